"""Recorded runs of applications: reading, drawing, and as the requests of a simulation."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.policy.apps.graph import LLM, Visit
from headway.simulate.workload.application_models import generated
from headway.simulate.workload.applications import SHARES, AppRun, Step, applications, draw, graphs_of, read

GOOD = {
    "app": "CG",
    "units": [
        {"unit": "plan", "type": "llm", "requests": [{"prompt_tokens": 100, "completion_tokens": 7}]},
        {"unit": "nothing", "type": "llm", "requests": []},
        {"unit": "run", "type": "docker", "exec_time_s": 1.5},
        {"unit": "dnn:vqa", "type": "dnn", "exec_time_s": None},
        {
            "unit": "check",
            "type": "llm",
            "requests": [{"prompt_tokens": p, "completion_tokens": c} for p, c in ((10, 4), (30, 0))],
        },
    ],
}
RUN = AppRun(
    "CG",
    (
        Step("plan", LLM, ((100, 7),)),
        Step("run", "docker", seconds=1.5),
        Step("dnn:vqa", "dnn:vqa"),
        Step("check", LLM, ((10, 4), (30, 1))),
    ),
)


def file(folder: Path, *lines: object) -> Path:
    path = folder / "runs.jsonl"
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))
    return path


def test_runs_are_read_plain_and_gzipped(tmp_path: Path) -> None:
    path = file(tmp_path, GOOD, GOOD)
    assert read(path) == [RUN, RUN]
    packed = tmp_path / "runs.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed) == [RUN, RUN]


def with_unit(**values: object) -> object:
    return {"app": "CG", "units": [{"unit": "u", "type": "tool"} | values]}


REQUEST = {"prompt_tokens": 1, "completion_tokens": 1}
BAD = {
    "no JSON": "{",
    "an empty line": "",
    "a list": [],
    "no application": {"units": GOOD["units"]},
    "no units": {"app": "CG", "units": []},
    "units that are a number": {"app": "CG", "units": 3},
    "a unit without a type": {"app": "CG", "units": [{"unit": "u"}]},
    "a unit without a name": with_unit(unit=""),
    "seconds that are text": with_unit(exec_time_s="long"),
    "seconds that are no number": with_unit(exec_time_s=float("nan")),
    "endless seconds": with_unit(exec_time_s=float("inf")),
    "no requests": with_unit(type="llm"),
    "a request without a prompt": with_unit(type="llm", requests=[{"completion_tokens": 1}]),
    "an endless prompt": with_unit(type="llm", requests=[REQUEST | {"prompt_tokens": float("inf")}]),
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD)
def test_the_line_of_a_bad_run_is_named(tmp_path: Path, line: object) -> None:
    with pytest.raises(ConfigError, match="line 2 is no recorded run") as caught:
        read(file(tmp_path, GOOD, line, GOOD))
    assert "exec_time_s" in str(caught.value.hint)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="holds no runs"):
        read(file(tmp_path))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(binary)
    whole = gzip.compress((json.dumps(GOOD) * 100).encode())
    for name, data in (("cut", whole[: len(whole) // 2]), ("plain", b"{}"), ("spoilt", whole[:20] + b"\xff" * 40)):
        path = tmp_path / f"{name}.gz"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="cannot be read"):
            read(path)


def test_a_step_is_recorded_as_a_visit_of_mean_lengths() -> None:
    assert RUN.visits == [
        Visit("plan", LLM, 100, 7, 1),
        Visit("run", "docker", seconds=1.5),
        Visit("dnn:vqa", "dnn:vqa"),
        Visit("check", LLM, 20, 2.5, 2),
    ]


def test_graphs_are_learned_by_application() -> None:
    other = AppRun("EV", RUN.steps[:1])
    graphs = graphs_of([RUN, other, RUN])
    assert {app: graph.runs for app, graph in graphs.items()} == {"CG": 2, "EV": 1}
    assert graphs["CG"].units["check"].next_units == {"": 1.0}


# ---- drawing


def pool_of(*apps: str) -> dict[str, list[AppRun]]:
    return {app: [AppRun(app, (Step(f"{i}", "t"),)) for i in range(5)] for app in apps}


def test_applications_are_drawn_by_their_shares() -> None:
    n = 20_000
    drawn = draw(pool_of(*SHARES), n, np.random.default_rng(0))
    for app, share in SHARES.items():
        error = 5 * np.sqrt(share * (1 - share) / n)
        assert sum(run.app == app for run in drawn) / n == pytest.approx(share, abs=error)
    assert {run.steps[0].unit for run in drawn} == set("01234")
    assert sum(SHARES.values()) == pytest.approx(1)


def test_applications_without_runs_or_without_a_share_are_not_drawn() -> None:
    pool = pool_of("a", "b", "other") | {"empty": []}
    drawn = draw(pool, 100, np.random.default_rng(0), {"a": 1, "b": 0, "empty": 5, "missing": 5})
    assert {run.app for run in drawn} == {"a"}


@pytest.mark.parametrize("pool", [{}, {"CG": []}, pool_of("other")])
def test_there_must_be_runs_to_draw_from(pool: dict[str, list[AppRun]]) -> None:
    with pytest.raises(ConfigError, match="no runs to draw from"):
        draw(pool, 3, np.random.default_rng(0))


def test_the_same_seed_draws_the_same_runs() -> None:
    pool = pool_of(*SHARES)
    one, same, other = (draw(pool, 50, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_generated_runs_learn_and_replay() -> None:
    pool = generated(5, np.random.default_rng(0))
    assert set(pool) == set(SHARES)
    runs = [run for some in pool.values() for run in some]
    assert len(applications(runs, np.arange(len(runs)) * 1.0, "m")) == len(runs)
    again = generated(5, np.random.default_rng(0))
    assert again == pool


# ---- as a workload


def test_the_requests_of_runs_are_rows_run_by_run_and_step_by_step() -> None:
    apps = applications([RUN, AppRun("EV", RUN.steps[3:]), RUN], np.array([0.0, 5.0, 6.0]), "m")
    load = apps.workload
    assert load.prompt.tolist() == [100, 10, 30, 10, 30, 100, 10, 30]
    assert load.output.tolist() == [7, 4, 1, 4, 1, 7, 4, 1]
    assert load.max_tokens.tolist() == [2048] * 8
    assert load.arrival.tolist() == [0, 0, 0, 5, 5, 6, 6, 6]
    assert apps.rows == ((0, 1, 1, 1, 3), (3, 5), (5, 6, 6, 6, 8))
    request = load.request(6)
    assert request.stage is not None
    assert (request.tenant, request.tier, request.model) == ("CG", "CG", "m")
    assert (request.stage.app, request.stage.run, request.stage.unit) == ("CG", "2", "check")
    assert apps.target.tolist() == [np.inf] * 3


def test_an_answer_longer_than_any_limit_keeps_its_length() -> None:
    apps = applications([AppRun("a", (Step("u", LLM, ((1, 5000),)),))], np.zeros(1), "m")
    assert apps.workload.max_tokens.tolist() == [5000]


def test_runs_outside_the_llm_have_no_requests() -> None:
    apps = applications([AppRun("a", (Step("u", "t", seconds=1),))], np.zeros(1), "m")
    assert (len(apps), len(apps.workload), apps.rows) == (1, 0, ((0, 0),))


@pytest.mark.parametrize(
    "runs", [[], [AppRun("a", ())], [RUN, AppRun("a", (Step("u"),))], [AppRun("a", (Step("u", "tool", ((1, 1),)),))]]
)
def test_runs_with_nothing_to_do_are_refused(runs: list[AppRun]) -> None:
    with pytest.raises(ConfigError, match="nothing to do"):
        applications(runs, np.zeros(len(runs)), "m")


@pytest.mark.skipif(not os.environ.get("HEADWAY_DATA"), reason="set HEADWAY_DATA to the data")
@pytest.mark.parametrize("app", SHARES)
def test_the_recorded_runs_can_be_read(app: str) -> None:
    runs = read(Path(os.environ["HEADWAY_DATA"], "apps", f"{app.lower()}.jsonl.gz"))
    assert len(runs) > 50
    assert len(graphs_of(runs)) == 1
    assert len(applications(runs, np.zeros(len(runs)), "m")) == len(runs)
