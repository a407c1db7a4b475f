"""Client libraries against a real `headway serve`, each from an environment of its own (`make clients`).

`docs/clients.md` lists what they did; the last test holds its table to what has really run.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headway.models.resolve import resolve
from tests.e2e.server import ANSWER_S, Headway
from tests.gateway.test_agents import AGENTS
from tests.gateway.test_open_webui import OPEN_WEBUI

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("HEADWAY_CLIENTS", ROOT / ".venv-clients")) / "bin" / "python"
CALLS = Path(__file__).parent / "clients" / "calls.py"
CLIENTS = {
    "openai": {
        "chat",
        "completions",
        "models",
        "stream",
        "structured output",
        "responses",
        "responses stream",
        "previous response",
        "log probabilities",
        "background",
        "files and batches",
        "tools",
    },
    "anthropic": {"messages", "stream", "count tokens"},
    "langchain": {"invoke", "stream"},
    "llamaindex": {"chat", "stream"},
    "litellm": {"completion", "stream"},
    "guidellm": {"requests"},
    "vllm bench serve": {"completed"},
}
POOLING = {"openai, pooling model": {"embeddings", "scores"}}
TEXTS = {"log probabilities", "chat", "stream", "invoke", "completion", "responses", "responses stream", "messages"}
needs_clients = pytest.mark.skipif(not PYTHON.exists(), reason="make clients has not installed them")


@needs_clients
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_is_answered(headway: Headway, name: str) -> None:
    seen = _called(name.replace(" ", "_"), headway)
    assert set(seen) == CLIENTS[name]
    assert all(seen.values()), seen
    assert all("Paris" in seen[what] for what in TEXTS & set(seen)), seen


@needs_clients
def test_a_pooling_model_answers(pooling: Headway) -> None:
    seen = _called("pooling", pooling)
    assert set(seen) == POOLING["openai, pooling model"]
    assert seen["embeddings"] == [576, 576]
    alike, other = seen["scores"]
    assert alike > other


def _called(name: str, server: Headway) -> dict[str, Any]:
    argv = [str(PYTHON), str(CALLS), name, server.url, resolve("smollm2")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=2 * ANSWER_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_table_in_the_docs_is_that_of_the_tests() -> None:
    lines = (ROOT / "docs" / "clients.md").read_text().splitlines()
    begin = lines.index("| client | what the test does |") + 2
    expected = CLIENTS | POOLING | AGENTS | OPEN_WEBUI
    table = dict(line.strip("| ").split(" | ") for line in lines[begin : begin + len(expected)])
    names = {name.strip("` "): set(what.split(", ")) for name, what in table.items()}
    assert names == expected
