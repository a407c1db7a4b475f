"""Loads on engines that `headway bench` starts itself, here FAKE ones: compare."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config import BATCH, Tier, load
from headway.whatif.load import mix
from headway.whatif.measured import compare, systems
from headway.whatif.measured.systems import standard_engine
from tests.bench.fake import fake, serving

ENGINE = standard_engine("smollm2", max_running=16, blocks=None)
SYSTEMS = ("vllm-fcfs", "headway")


class Seen(dict[str, list[dict[str, Any]]]):
    """The requests that each system gets; FAKE engines are started in their place."""

    @asynccontextmanager
    async def start(self, name: str, *_: Any) -> AsyncIterator[str]:
        assert name not in self, "a system is started once"
        async with serving(fake(2, on_request=self.setdefault(name, []).append)) as url:
            yield url


@pytest.fixture
def seen() -> Seen:
    return Seen()


def setup(**more: Any) -> compare.CompareSetup:
    return compare.CompareSetup(mix.BUILTIN["chat-batch"], ENGINE, SYSTEMS, **more)


def of(seen: Seen, system: str, tier: str) -> list[dict[str, Any]]:
    """Return the measured requests of a class; those that warm an engine up ask for 8 tokens."""
    mine = [one for one in seen[system] if one["headers"]["x-llm-d-inference-objective"] == tier]
    return [one for one in mine if one["body"]["max_tokens"] > 8]


# ---- compare


@pytest.mark.parametrize("seed", range(5))
def test_a_quick_comparison_has_more_requests_than_a_batch_takes(seed: int) -> None:
    short = compare.shortened(setup(seed=seed))
    assert (short.systems, short.together, short.engine.max_running) == (SYSTEMS, True, 8)
    assert short.engine.max_running < len(compare._calls(short, short.rate or 0.0, 0)) <= 20


def test_figures_name_what_is_not_the_default() -> None:
    assert setup().variant == setup(duration=60.0, rounds=2, seed=4, together=True).variant == ""
    assert setup(load=1.2).variant == "1.2x"
    assert setup(tight=True, burstiness=0.1).variant == "tight, burstiness 0.1"
    other = replace(setup(rate=2.0), mix=mix.BUILTIN["deadlines"], engine=replace(ENGINE, blocks=22))
    assert other.variant == "deadlines, 2 req/s, 22 KV blocks"


async def test_every_system_gets_the_same_bursts_in_every_round(seen: Seen) -> None:
    chosen = setup(rate=20.0, duration=0.5, rounds=2, burstiness=0.2, together=True, start=seen.start)
    results = (await compare.run(chosen)).results
    ours, theirs = (results[name][0] for name in SYSTEMS)
    assert len(ours) == len(theirs) == 2 * 10
    for tier in ("chat", "batch"):
        prompts = [sorted(str(one["body"]["messages"]) for one in of(seen, name, tier)) for name in SYSTEMS]
        assert prompts[0] == prompts[1] != []
    assert all(record.ok for record in (*ours, *theirs))


def test_a_gateway_knows_the_classes_of_the_mix(tmp_path: Path) -> None:
    names = mix.BUILTIN["deadlines"].names
    child = systems.gateway("headway", (ENGINE,), 1, tmp_path, names)
    known = load(Path(child.argv[child.argv.index("--config") + 1])).classes
    assert {name: known[name] for name in names} == {"chat": Tier(), "code": Tier(), "batch": BATCH}
