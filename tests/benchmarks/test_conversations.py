"""Conversations, and traces whose blocks have hashes, as requests that share prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.catalog.conversations import Conversations, Spread
from headway.engines.simulated.prefix_blocks import shared_keys
from headway.prefix import GRAIN
from headway.simulate.workload.traces import prefixes_of
from headway.types import Slo

TALK = Conversations(
    "talk",
    system=64,
    prompt=Spread(100, 4000, 800, 400),
    added=Spread(10, 200, 50, 40),
    answer=Spread(1, 300, 100, 50, "normal"),
    turns=Spread(1, 8, 4, 2.5),
    gap=Spread(1, 60, 10, 8),
    slo=Slo(ttft=1.0),
    longest=2000,
)


def test_a_turn_begins_with_all_that_was_said() -> None:
    work = TALK.workload(1.0, 60.0, np.random.default_rng(0))
    assert (np.diff(work.arrival) >= 0).all()
    assert (work.prompt + work.output <= TALK.longest).all()
    said: dict[str, int] = {}
    turns = 0
    for row in range(len(work)):
        prefix = work.prefixes[work.prefix[row]]
        assert prefix is not None
        assert prefix.tokens == work.prompt[row] > said.get(prefix.id, 0)
        turns += prefix.id in said
        said[prefix.id] = int(work.prompt[row] + work.output[row])
    assert turns > len(said), "most requests go on with a conversation"


def test_the_mean_prompt_is_that_of_the_statistics() -> None:
    work = TALK.workload(20.0, 200.0, np.random.default_rng(0))
    by_talk: dict[str, list[int]] = {}
    for row in range(len(work)):
        prefix = work.prefixes[work.prefix[row]]
        assert prefix is not None
        by_talk.setdefault(prefix.id, []).append(int(work.prompt[row]))
    assert abs(np.mean([np.mean(prompts) for prompts in by_talk.values()]) / 800 - 1) < 0.15


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 32))
def test_prompts_share_the_blocks_whose_hashes_are_equal(paths: list[list[int]], last: int) -> None:
    """Hashes as in a trace: each names a block and all before it."""
    names: dict[tuple[int, ...], int] = {}
    hashes = [[names.setdefault(tuple(path[: i + 1]), len(names)) for i in range(len(path))] for path in paths]
    tokens = [32 * (len(path) - 1) + last for path in paths]
    prefixes = prefixes_of(hashes, tokens, 32)
    keys = [shared_keys(prefix).tolist() for prefix in prefixes]
    for a, one in enumerate(hashes):
        for b, other in enumerate(hashes):
            both = sum(x == y for x, y in zip(one, other, strict=False))
            common = sum(x == y for x, y in zip(keys[a], keys[b], strict=False))
            assert common == min(both * 32 // GRAIN, len(keys[a]), len(keys[b]))
