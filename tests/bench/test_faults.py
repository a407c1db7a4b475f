"""The benchmark of faults: its draws, and a few faults of a Headway in parts with real servers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real.faults import main
from benchmarks.real.faults.kinds import KINDS
from benchmarks.real.faults.run import FaultSizes, FaultsOutcome, drawn, measure
from headway.errors import ConfigError
from headway.whatif.output.results import save
from testing.fake_engine import NAME
from tests.helpers import postgres, rabbitmq

FEW = ("controller killed", "agent killed", "gateway cut off from PostgreSQL", "engine paused")


@pytest.fixture(scope="module")
def journal() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, journal: io.StringIO) -> FaultsOutcome:
    rabbitmq.new().remove()  # skips where there is none
    postgres.new().remove()
    folder = tmp_path_factory.mktemp("faults")
    struck = list[str]()
    made = measure(folder, FaultSizes(len(FEW), nodes=1, longest_s=0.8), 1, struck.append, journal, FEW)
    assert struck == [record.kind for record in made.records]
    return made


def test_nothing_is_lost_or_answered_twice(outcome: FaultsOutcome) -> None:
    verdict = outcome.verdict
    assert verdict.accepted > 20
    assert (verdict.lost, verdict.lost_ids, verdict.twice, verdict.twice_ids) == (0, (), 0, ())
    assert sorted(record.kind for record in outcome.records) == sorted(FEW)
    assert all(record.recovered is not None for record in outcome.records)


def test_no_stream_is_broken(outcome: FaultsOutcome) -> None:
    assert outcome.streams["whole"] > 0
    assert {kind: outcome.streams[kind] for kind in ("broken", "lost", "twice")} == dict.fromkeys(
        ("broken", "lost", "twice"), 0
    ), outcome.broken


def test_it_is_written_with_each_fault(outcome: FaultsOutcome, journal: io.StringIO, tmp_path: Path) -> None:
    save(main.main.report(main.result(outcome)), tmp_path, {"faults": main.plot(outcome)})
    found = {(row["id"], row["setting"]) for row in json.loads((tmp_path / "report.json").read_text())["rows"]}
    assert {("faults.recover_s.p99", kind) for kind in (main.ALL, *FEW)} <= found
    assert {(id, "4 faults, RabbitMQ of 1") for id in ("faults.lost", "faults.streams.broken")} <= found
    assert NAME in (tmp_path / "report.html").read_text()
    written = [json.loads(line) for line in journal.getvalue().splitlines()]
    assert [one["number"] for one in written] == [0, 1, 2, 3]


def test_faults_are_those_of_the_seed_and_each_comes_as_often() -> None:
    first, again = (drawn(50, (), np.random.default_rng(3)) for _ in range(2))
    assert first == again != drawn(50, (), np.random.default_rng(4))
    assert {first.count(kind) for kind in KINDS} <= {2, 3}


def test_an_unknown_fault_is_said() -> None:
    with pytest.raises(ConfigError, match=r"no fault 'war'\. Use some of: gateway killed, "):
        drawn(1, ("war",), np.random.default_rng(0))
