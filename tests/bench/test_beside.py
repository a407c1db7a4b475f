"""`headway bench beside`: interactive requests beside a batch on two engines, simulated and on FAKE engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.real import beside as live
from benchmarks.simulated import beside
from benchmarks.simulated.beside import ALONE, QUICK, SYSTEMS, Seen, Shape, rows_of
from headway.config import Engine
from headway.types import Slo
from headway.whatif.load.records import Record
from headway.whatif.measured.systems import standard_engine
from headway.whatif.output.results import Ask, Row
from tests.bench.fake import fake, serving

IDS = {"ttft.p50", "ttft.p95", "ttft.p99", "ttft.p95_of_alone", "onset.ttft.p95"}
BATCH_IDS = {"batch.seconds", "batch.done"}


def figures(rows: Sequence[Row]) -> dict[tuple[str, str], float | None]:
    return {(row.id, row.system): row.ours for row in rows}


def test_bursts_begin_on_a_batch_in_progress() -> None:
    shape = Shape()
    at = shape.interactive(28.0, np.random.default_rng(0))
    counts = np.histogram(at, [0, 15, 105, 195, 285, 375, 465, 555])[0]
    assert (counts[::2] == 0).all()
    assert counts[1::2] == pytest.approx(28 * 90, rel=0.1)
    assert (shape.due()[-1], shape.due().size) == (pytest.approx(6.0, abs=0.01), 3000)
    assert shape.begins(np.array([14.9, 15.0, 24.9, 25.0, 195.0])).tolist() == [False, True, True, False, True]


def test_requests_count_until_the_batch_is_complete() -> None:
    at, ttft = np.array([16.0, 30.0, 200.0]), np.array([0.1, 0.3, 9.0])
    alone, beside = Seen.of(Shape(), at, ttft), Seen.of(Shape(), at, 2 * ttft, np.array([90.0, 180.0]))
    assert (beside.ttft.tolist(), beside.onset.tolist(), beside.seconds, beside.done) == (
        [0.2, 0.6],
        [True, False],
        180.0,
        2,
    )
    found = figures(rows_of({ALONE: alone, "headway": beside}, "few"))
    assert found["ttft.p50", "headway"] == pytest.approx(600.0)
    assert found["onset.ttft.p95", "headway"] == pytest.approx(200.0)
    assert found["ttft.p95_of_alone", ALONE] == 1.0
    assert ("batch.done", ALONE) not in found
    failed = figures(rows_of({ALONE: Seen.of(Shape(), at, ttft, np.array([np.inf, 180.0]))}, "few"))
    assert (failed["batch.seconds", ALONE], failed["batch.done", ALONE]) == (None, 1.0)


def test_the_default_recipe_protects_interactive_requests_from_the_first_second(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    beside.main(Ask(True, True, out=tmp_path))
    printed = json.loads(capsys.readouterr().out)
    assert (printed["bench"], printed["host"]) == ("beside", "sim")
    at = {(row["id"], row["system"]): row["ours"] for row in printed["rows"]}
    assert {id for id, system in at if system == "headway"} == IDS | BATCH_IDS
    assert {id for id, system in at if system == ALONE} == IDS | {"knee", "alone.ttft.p95"}
    assert all(at["batch.done", system] == QUICK.batch for system in SYSTEMS)
    assert at["ttft.p95_of_alone", "headway"] < 1.4 < at["ttft.p95_of_alone", "vllm"]
    assert at["onset.ttft.p95", "headway"] < 2 * at["onset.ttft.p95", ALONE]
    # Of so short a batch most runs beside a burst, in short iterations; of 3,000 requests it is 1.05 times.
    assert at["batch.seconds", "headway"] < 1.25 * at["batch.seconds", "vllm-priority"]
    assert (tmp_path / "beside.png").stat().st_size > 1000


# ---- on FAKE engines


def record(tier: str, first: float | None) -> Record:
    last, error = (first + 1.0, None) if first is not None else (0.0, "HTTP 500: no")
    return Record(tier, 0.0, 0.0, first, last, 5, 9, np.empty(0, np.float32), None, error, Slo())


def test_figures_of_records() -> None:
    seen = live.seen(Shape(), [record("interactive", 1.0), record("interactive", None), record("batch", 3.0)])
    assert (seen.ttft.tolist(), seen.seconds, seen.done) == ([1.0, np.inf], 4.0, 1)
    assert live.seen(Shape(), [record("interactive", 1.0)]).done is None
    assert live.seen(Shape(), [record("interactive", 1.0), record("batch", None)]).done == 0


async def test_all_systems_get_the_same_requests_on_two_engines() -> None:
    got: dict[str, list[list[dict[str, Any]]]] = {}

    @asynccontextmanager
    async def start(name: str, engines: Sequence[Engine], logs: Path) -> AsyncIterator[Sequence[str]]:
        assert [engine.cores for engine in engines] == ["0", "1"]
        async with AsyncExitStack() as stack:
            got[name] = [[] for _ in engines[: 2 if name == "vllm-fcfs" else 1]]
            yield [await stack.enter_async_context(serving(fake(2, on_request=one.append))) for one in got[name]]

    shape = Shape(batch=20, lead=0.1, burst=0.5, idle=0.1, bursts=2, onset=0.2)
    engine = standard_engine("smollm2", max_running=16, blocks=None)
    found, knee = await live.run(live.BesideTrial(engine, ("headway",), shape, 40.0, start=start))
    assert (knee, [*found], found["headway"].done) == (40.0, [ALONE, "headway"], 20)
    assert all(len(one) > 10 for one in got["vllm-fcfs"]), "in turn"

    def prompts(name: str, tier: str) -> list[str]:
        asked = [one for part in got[name] for one in part]
        mine = [one for one in asked if one["headers"]["x-llm-d-inference-objective"] == tier]
        return sorted(str(one["body"]["messages"]) for one in mine)

    assert prompts("vllm-fcfs", "interactive") == prompts("headway", "interactive")
    assert prompts("vllm-fcfs", "batch") == [], "alone"
    assert len(prompts("headway", "batch")) == 20
    batch = [one for one in got["headway"][0] if one["headers"]["x-llm-d-inference-objective"] == "batch"]
    assert {one["headers"]["x-slo-e2e-ms"] for one in batch} == {"86400000"}
