"""Recorded conversations of coding agents (`agents/agentic_coding.jsonl.gz` of `HEADWAY_DATA`)."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from headway.simulate.workload.traces import locate

FILE = "agentic_coding", ("agents",)
SYSTEM = 85  # tokens of the system prompt with which all of them begin
_CHARS = 4  # of text in a token
_TEXTS = "content", "tool_calls", "tool_results"


class AgentTurn(NamedTuple):
    """A request of an agent: tokens of its whole prompt and its answer, and the seconds that its tools take then."""

    prompt: int
    answer: float
    tools_s: float


def conversations() -> list[list[AgentTurn]]:
    """Return the turns of each conversation. ConfigError where the file is not there."""
    talks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with gzip.open(locate(*FILE), "rt") as lines:
        for line in lines:
            row = json.loads(line)
            talks[row["conversation_id"]].append(row)
    return [_turns_of(rows) for rows in talks.values()]


def _turns_of(rows: Sequence[dict[str, Any]]) -> list[AgentTurn]:
    said, turns = 0, list[AgentTurn]()
    for row in rows:
        size = max(sum(len(json.dumps(row[key])) for key in _TEXTS if row.get(key)), _CHARS)
        if row["role"] == "assistant":
            turns.append(AgentTurn(said, size / _CHARS, 0.0))
        elif turns:
            last = turns[-1]
            turns[-1] = last._replace(tools_s=last.tools_s + float(row.get("delay_seconds") or 0.0))
        said += size // _CHARS
    return turns
