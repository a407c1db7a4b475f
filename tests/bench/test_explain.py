"""A story in words: true to the run, complete, and helpful when it is asked for what is not there."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import ConfigError
from headway.prefix import Prefix
from headway.simulate.record import run_folder
from headway.simulate.record.recorder import Recorder
from headway.simulate.record.run_folder import Header, Machine, Run
from headway.simulate.record.timeline import Reader
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import single
from headway.whatif import explain, slo_violations
from tests.helpers.recorded import ALL, fleet, record


@pytest.fixture(scope="module")
def late() -> Run:
    """A run short of memory and places, so that much is late for many reasons."""
    return record("edf", 5, blocks=150, rate=16.0)


@pytest.fixture(scope="module")
def folder(late: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder.save(late, tmp_path_factory.mktemp("out") / "runs" / "edf")


def test_misses_are_those_of_the_records(late: Run) -> None:
    work, out = late.workload, late.outcome
    excess = slo_violations.late(work, out)
    for i in range(len(work)):
        ttft, e2e = out.first[i] - work.arrival[i], out.end[i] - work.arrival[i]
        tokens = max(int(work.output[i]) - 1, 1)
        tpot = (out.end[i] - out.first[i]) / tokens if work.output[i] > 1 else 0.0
        assert excess["ttft"][i] == pytest.approx(max(ttft - work.ttft[i], 0.0))
        assert excess["tpot"][i] == pytest.approx(max(tpot - work.tpot[i], 0.0) * tokens)
        assert excess["e2e"][i] == pytest.approx(max(e2e - work.e2e[i], 0.0))
        slo = work.request(i).slo
        assert all(kept.met for kept in slo_violations.of(late, i)) == slo.met(ttft, tpot, e2e, out.gap[i])
    assert {name for name, column in excess.items() if column.any()} == {"ttft", "tpot", "e2e"}


def test_the_worst_are_in_order_and_none_of_them_was_on_time(late: Run) -> None:
    rows = slo_violations.worst(late, 1000).tolist()
    most = [slo_violations.of(late, i)[0].late for i in rows]
    assert most == sorted(most, reverse=True)
    assert most[-1] > 0
    met = [i for i in range(len(late.workload)) if all(kept.met for kept in slo_violations.of(late, i))]
    assert sorted([*rows, *met]) == list(range(len(late.workload)))


_WORDS = {
    "queued outside": "outside",
    "for admission": "waiting",
    "lost its KV": "lost",
    "was paused": "paused",
    "were being generated": "running",
    "own prompt": "prefill",
}


def reasons(run: Run) -> set[str]:
    """Check that each verdict is one sentence that fits its request; return the reasons that were given."""
    reader, found = Reader(run), set()
    for i in range(len(run.workload)):
        text = explain.verdict(run, reader.timeline(i))
        assert text.startswith(f"r{i} ({run.workload.tiers[run.workload.tier[i]]})")
        assert text.endswith(".")
        kept = slo_violations.of(run, i)
        if kept and all(one.met for one in kept):
            assert "was on time" in text
        else:
            named = {reason for phrase, reason in _WORDS.items() if phrase in text}
            assert len(named) == 1
            found |= named
            assert (" late, " in text or "too slow" in text) if kept else "has no SLO" in text
    return found


def test_every_verdict_is_one_sentence_that_says_what_and_why(late: Run) -> None:
    assert reasons(late) >= {"outside", "lost", "running"}
    assert "waiting" in reasons(record("slack", 5, blocks=150, rate=16.0))


def test_the_numbers_of_a_verdict_by_hand(late: Run) -> None:
    i = int(np.nanargmax(slo_violations.late(late.workload, late.outcome)["ttft"]))
    story = Reader(late).timeline(i)
    seen = late.outcome.first[i] - late.workload.arrival[i]
    text = explain.verdict(late, story)
    longest = max(story.seconds(end=story.first).values())
    written = [f"{one:.{3 if one < 1 else 2}f} s" for one in (seen - 0.4, seen, longest)]
    assert f"had its first token {written[0]} late" in text
    assert f"{written[1]} against an SLO of 0.400 s" in text
    assert written[2] in text


def test_json_is_whole_and_adds_up(late: Run) -> None:
    reader = Reader(late)
    for i in range(len(late.workload)):
        data = json.loads(json.dumps(explain.describe(late, reader.timeline(i)), allow_nan=False))
        assert math.fsum(data["seconds"].values()) == pytest.approx(data["latency"], abs=1e-9)
        assert math.fsum(span["seconds"] for span in data["timeline"]) == pytest.approx(data["latency"], abs=1e-9)
        assert data["simulated"] is True


def text_of(run: Run, request: int, **more: Any) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(explain.render(run, Reader(run).timeline(request), **more))
    return console.export_text()


def test_the_table_has_the_sum_and_those_who_gained(late: Run) -> None:
    i = int(np.argmax(late.outcome.evictions))
    text = text_of(late, i)
    latency = late.outcome.end[i] - late.workload.arrival[i]
    assert re.search(rf"sum +│ +{latency:.3f} │ +100%", text)
    assert "evicted" in text
    assert re.search(r"gained: r\d+ \w+ \+\d+ blocks", text)
    assert "SIMULATED" in text


def test_long_timelines_are_cut_and_say_so(late: Run) -> None:
    i = int(np.argmax(late.outcome.evictions))
    many = len(Reader(late).timeline(i).spans)
    assert f"{many - 2} shorter stretches are left out" in text_of(late, i, lines=2)
    assert "left out" not in text_of(late, i, whole=True, lines=2)


def test_a_request_that_never_ended(late: Run) -> None:
    cut = replace(late.outcome, first=late.outcome.first.copy(), end=late.outcome.end.copy())
    cut.first[4] = cut.end[4] = np.nan
    run = replace(late, outcome=cut)
    story = Reader(run).timeline(4)
    assert explain.verdict(run, story).startswith(f"r4 ({late.workload.request(4).tier}) never finished: for ")
    assert json.dumps(explain.describe(run, story), allow_nan=False)
    assert "forever" in text_of(run, 4) or "no SLO" in text_of(run, 4)


@pytest.mark.parametrize("wrong", ["r99999", "99999", "chat", "", "r-1", "r1x"])
def test_an_unknown_request_is_answered_with_near_ones(late: Run, wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        slo_violations.find(late, wrong)
    assert f"r0 to r{len(late.workload) - 1}" in caught.value.message
    near = re.findall(r"r\d+", caught.value.hint)
    assert near == list(dict.fromkeys(near))
    assert all(slo_violations.find(late, one) < len(late.workload) for one in near)


def test_a_request_may_be_written_with_or_without_r(late: Run) -> None:
    assert slo_violations.find(late, "r7") == slo_violations.find(late, "7") == slo_violations.find(late, " r07 ") == 7


def test_of_several_engines_it_says_which_one_got_it_and_what_that_one_held(late: Run, tmp_path: Path) -> None:
    load = single(np.array([0.0, 1.0, 2.0]), np.array([1000, 500, 1200]), np.array([5, 5, 5]))
    load = replace(load, prefix=np.array([1, 0, 1]), prefixes=(None, Prefix("history", 960)))
    nodes, recorder = [replace(one, prefix_caching=True) for one in fleet(2)], Recorder()
    outcome = Simulation(ALL["headway"], nodes, load).run(observer=recorder)
    header = Header("headway", tuple(map(Machine.of, nodes)), 0, "a test")
    run = run_folder.load(run_folder.save(Run(header, load, outcome, recorder.recording()), tmp_path))
    said = [explain.placement(run, Reader(run).timeline(i)) for i in range(3)]
    names = [f"e{number}" for number in outcome.instance]
    waited = "; it waited 0.000 s outside and 0.000 s inside."
    assert said[0] == f"It went to {names[0]}, which held none of its 1,000 prompt tokens{waited}"
    assert said[2] == f"It went to {names[0]}, which held 960 of its 1,200 prompt tokens{waited}"
    assert said[2] in text_of(run, 2)
    data = explain.describe(run, Reader(run).timeline(2))
    assert (data["placement"], data["cached_tokens"]) == (said[2], 960)
    assert explain.placement(late, Reader(late).timeline(0)) == "", "one engine has the model"


# ---- the command


def test_the_command(folder: Path) -> None:
    run = CliRunner()
    listed = run.invoke(app, ["explain", str(folder), "--worst", "3", "--json"])
    rows = json.loads(listed.stdout)["worst"]
    assert len(rows) == 3
    told = run.invoke(app, ["explain", str(folder), rows[0]["request"], "--json"])
    assert json.loads(told.stdout)["verdict"] == rows[0]["verdict"]
    assert "Most late, recipe edf (SIMULATED)" in run.invoke(app, ["explain", str(folder)]).stdout
    assert "Timeline" in run.invoke(app, ["explain", str(folder), "3", "--all"]).stdout


def test_the_commands_errors(folder: Path) -> None:
    run = CliRunner()
    both = run.invoke(app, ["explain", str(folder), "3", "--worst", "2"])
    assert isinstance(both.exception, ConfigError)
    beside = run.invoke(app, ["explain", str(folder.parent / "efd"), "3"])
    assert isinstance(beside.exception, ConfigError)
    assert str(folder) in beside.exception.hint


@pytest.mark.parametrize(
    ("limit", "said"), [(1e6, "Every request met its SLO."), (np.inf, "No request of this run has an SLO.")]
)
def test_a_run_without_late_requests_says_so(late: Run, tmp_path: Path, limit: float, said: str) -> None:
    long = np.full(len(late.workload), limit)
    calm = replace(late, workload=replace(late.workload, ttft=long, tpot=long, e2e=long))
    assert said in CliRunner().invoke(app, ["explain", str(run_folder.save(calm, tmp_path))]).stdout
