"""What was recorded is what happened, whole, and stays so in a folder."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.simulate.record import run_folder
from headway.simulate.record.recorder import ITERATIONS, MOVES, Recorder, State
from headway.simulate.record.timeline import Reader
from headway.simulate.run import Simulation
from tests.helpers.recorded import ALL, Spy, fleet, mixed, record

CASES = [(recipe, blocks, count) for recipe in ALL for blocks, count in ((130, 1), (300, 2))]


@pytest.mark.parametrize(("recipe", "blocks", "count"), CASES)
def test_every_iteration_comes_back_from_the_changes(recipe: str, blocks: int, count: int) -> None:
    spy = Spy()
    run = record(recipe, 3, count, blocks, spy, duration=4.0)
    reader, lines = Reader(run), run.recording.iterations
    assert lines.size == len(spy.said)
    for number, (instance, ran, tokens, paused, evicted) in enumerate(spy.said):
        line, inside = lines[number], reader.iteration(number)
        state = {int(row["request"]): State(row["state"]) for row in inside}
        assert (line["instance"], line["start"]) == (instance, ran.start)
        assert {int(row["request"]): int(row["tokens"]) for row in inside if row["tokens"]} == tokens
        assert paused <= {request for request, what in state.items() if what is State.PAUSED}
        assert all(state[request] is State.EVICTED for request in evicted)
        assert line["running"] == len(tokens)
        assert line["evicted"] == len(evicted)
        assert line["admitted"] >= ran.admitted
        assert line["decodes"] + line["prefill"] + line["recompute"] == sum(tokens.values())


@pytest.mark.parametrize("recipe", ALL)
def test_totals_are_those_of_the_outcome(recipe: str) -> None:
    run = record(recipe, 5, blocks=150, duration=5.0)
    lines, outcome, work = run.recording.iterations, run.outcome, run.workload
    assert np.count_nonzero(lines["seconds"]) == outcome.iterations
    assert lines["seconds"].sum() == pytest.approx(outcome.busy)
    assert lines["evicted"].sum() + lines["saved"].sum() == outcome.evictions.sum()
    assert lines["prefill"].sum() == work.prompt.sum()
    # Each answer's first token comes out of its last prompt token's iteration.
    lost_answers = int(lines["recompute"].sum())
    assert lines["decodes"].sum() <= (work.output - 1).sum() <= lines["decodes"].sum() + lost_answers
    assert (lines["blocks"] <= 150).all()
    assert lines["blocks"].max() > 100


def test_tests_see_every_state() -> None:
    seen = {
        int(state) for recipe in ALL for state in record(recipe, 5, blocks=150, duration=5.0).recording.changes["state"]
    }
    assert seen == {int(state) for state in State}


def test_a_recorded_run_is_the_same_run() -> None:
    alone = Simulation(ALL["slack"], fleet(2), mixed(1)).run()
    seen = record("slack", 1, 2).outcome
    for entry in fields(alone):
        np.testing.assert_array_equal(getattr(alone, entry.name), getattr(seen, entry.name))


def test_steady_answers_cost_no_rows() -> None:
    run = record("vllm", 2, blocks=3000, rate=4.0)
    assert run.recording.changes.size < 6 * run.workload.arrival.size < run.workload.output.sum() / 10


def test_moves_say_when_each_request_was_sent() -> None:
    run = record("edf", 4, 2)
    assert run.recording.moves.dtype == MOVES
    assert sorted(run.recording.moves["request"]) == list(range(len(run.workload)))
    sent = run.recording.moves
    assert (sent["time"] >= run.workload.arrival[sent["request"]]).all()
    assert (sent["instance"] == run.outcome.instance[sent["request"]]).all()


def test_a_full_recording_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"filled its 0\.1 MB after .* simulated seconds.*--record-mb"):
        record("vllm", 1, recorder=Recorder(0.1))
    with pytest.raises(ConfigError, match="is empty"):
        Recorder(0)


# ---- folders


def test_a_run_comes_back_from_its_folder(tmp_path) -> None:
    run = record("slack", 1, 2)
    back = run_folder.load(run_folder.save(run, tmp_path / "out" / "slack"))
    assert back.header == run.header
    assert back.workload.tiers == ("chat", "report", "batch")
    for part in ("workload", "outcome", "recording"):
        one, two = getattr(run, part), getattr(back, part)
        for entry in fields(one):
            np.testing.assert_array_equal(getattr(one, entry.name), getattr(two, entry.name))
            assert type(getattr(one, entry.name)) is type(getattr(two, entry.name))
    head = json.loads((tmp_path / "out" / "slack" / "run.json").read_text())
    assert (head["simulated"], head["recipe"], head["fleet"][1]["id"]) == (True, "slack", "e1")


def test_an_empty_run_can_be_kept(tmp_path) -> None:
    run = record("vllm", 1, rate=1e-6)
    back = run_folder.load(run_folder.save(run, tmp_path))
    assert back.recording.iterations.dtype == ITERATIONS
    assert back.recording.iterations.size == len(back.workload) == 0
    assert Reader(back).last == 0.0


def test_a_wrong_folder_is_answered_with_the_runs_near_it(tmp_path) -> None:
    run_folder.save(record("vllm", 1, duration=1.0), tmp_path / "runs" / "vllm")
    for wrong in (tmp_path, tmp_path / "runs", tmp_path / "runs" / "vlm", tmp_path / "runs" / "a" / "b"):
        with pytest.raises(ConfigError) as caught:
            run_folder.load(wrong)
        assert str(tmp_path / "runs" / "vllm") in caught.value.hint
    with pytest.raises(ConfigError, match="headway simulate --out"):
        run_folder.load(tmp_path / "a" / "b" / "c" / "d")


@pytest.mark.parametrize("part", ["run.json", "workload.npz", "outcome.npz", "recording.npz"])
def test_a_damaged_run_is_a_clear_error(tmp_path, part: str) -> None:
    run_folder.save(record("vllm", 1, duration=1.0), tmp_path)
    (tmp_path / part).write_bytes((tmp_path / part).read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"is damaged: .* Simulate it again"):
        run_folder.load(tmp_path)


def test_another_version_is_a_clear_error(tmp_path) -> None:
    run_folder.save(record("vllm", 1, duration=1.0), tmp_path)
    head = json.loads((tmp_path / "run.json").read_text()) | {"version": 99}
    (tmp_path / "run.json").write_text(json.dumps(head))
    with pytest.raises(ConfigError, match="another version"):
        run_folder.load(tmp_path)
