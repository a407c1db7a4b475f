"""Loads on engines that `headway bench` starts itself, here FAKE ones: compare and beside --real."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.real import beside
from benchmarks.simulated.beside import ALONE, BESIDE
from headway.config import BATCH, Tier, load
from headway.types import Slo
from headway.whatif.load import mix
from headway.whatif.load.records import Record
from headway.whatif.measured import compare, systems
from headway.whatif.measured.systems import standard_engine
from headway.whatif.output.results import Ask
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


# ---- beside --real


def trial(**more: Any) -> beside.BesideTrial:
    return beside.BesideTrial(ENGINE, SYSTEMS, **{"seconds": 1.2, "capacity": 20.0, **more})


def test_the_same_requests_arrive_alone_and_beside_the_batch() -> None:
    long = trial(seconds=600.0)
    alone, batch = long.calls(4.0, 0)
    assert (alone, batch) == long.calls(4.0, 0)
    assert alone != long.calls(4.0, 1)[0]
    counts = np.histogram([call.at for call in alone], np.arange(0, 601, 100))[0]
    assert (counts[::2] > 5 * counts[1::2]).all()
    assert len(alone) == pytest.approx(600 * 4 * 0.32, rel=0.1)
    assert len(batch) == round(600 * 4 * 0.68 * 0.75)
    assert {(call.at, call.slo, call.priority) for call in batch} == {(0.0, Slo(e2e=600.0), 10)}


def record(tier: str, first: float | None, slo: Slo) -> Record:
    last, error = (first + 1.0, None) if first is not None else (0.0, "HTTP 500: no")
    return Record(tier, 0.0, 0.0, first, last, 5, 9, np.empty(0, np.float32), None, error, slo)


def test_figures_of_a_real_run() -> None:
    chat, due = Slo(ttft=1.5), Slo(e2e=10.0)
    mine = [record("interactive", first, chat) for first in (1.0, 2.0)]
    found = beside.figures([*mine, record("batch", 3.0, due), record("batch", 9.5, due)])
    assert (found.ttft_p99, found.attainment, found.in_time) == (pytest.approx(1.99), 50.0, 50.0)
    assert beside.figures(mine).in_time is None
    assert not np.isfinite(beside.figures([record("interactive", None, chat), *mine]).ttft_p99)


def test_both_runs_of_both_systems(seen: Seen, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    beside.main(Ask(True, True, out=tmp_path), trial(start=seen.start))
    printed = json.loads(capsys.readouterr().out)
    assert (printed["bench"], printed["host"]) == ("beside", "vllm")
    rows = {(row["id"], row["system"], row["setting"]): row["ours"] for row in printed["rows"]}
    for name in SYSTEMS:
        assert 0 <= rows["batch.in_time", name, f"{BESIDE}, 1.2 s"] <= 100
        assert rows["ttft.p99_ratio", name, f"{BESIDE}, 1.2 s"] > 0
        assert ("batch.in_time", name, f"{ALONE}, 1.2 s") not in rows
        batch = of(seen, name, "batch")
        assert len(batch) == round(20 * 1.2 * 0.68 * 0.75)
        assert {one["headers"]["x-slo-e2e-ms"] for one in batch} == {"1200"}
        sent = [str(one["body"]) for one in of(seen, name, "interactive")]
        assert len(sent) == 2 * len(set(sent)) > 0, "the same ones with and without the batch"
    assert (tmp_path / "beside.png").stat().st_size > 1000
