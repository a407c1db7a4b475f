"""A sweep computes each cell once, survives what goes wrong in one, and goes on where it was stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import ConfigError
from headway.policy.core import ranks
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack.ranked import Fcfs
from headway.policy.plan import ordered
from headway.policy.recipes.recipe import Recipe
from headway.ports import Packer
from headway.whatif import scenario, sweep_plots, sweep_report
from headway.whatif import sweep as sweeps
from headway.whatif.experiment import Fleet
from headway.whatif.sweep import Cell, Sweep, collect

SMALL = Sweep(("vllm", "edf"), (4.0, 8.0), 2, 0, 4.0)


class Broken(Packer):
    """A packer that is wrong: it cannot even begin."""

    def pack(self, *_: Any) -> Any:
        raise ZeroDivisionError("nothing to pack by")


class Deadly(Packer):
    """A packer that takes its process with it, as one that runs out of memory does."""

    def pack(self, *_: Any) -> Any:
        os._exit(9)


class Slow(Packer):
    """A packer that takes its time, so that there is some to stop it in."""

    def __init__(self, inner: Packer) -> None:
        self.inner = inner

    def pack(self, *state: Any) -> Any:
        time.sleep(0.5)
        return self.inner.pack(*state)


def recipe(name: str, packer: Callable[[EngineSpec], Packer]) -> Recipe:
    return Recipe(name, "for tests", lambda: ordered.Ordered(ranks.ARRIVAL), packer)


BROKEN = recipe("broken", lambda _: Broken())
DEADLY = recipe("deadly", lambda _: Deadly())
SLOW = recipe("slow", lambda spec: Slow(Fcfs(spec.max_running)))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compute SMALL once, here."""
    folder = tmp_path_factory.mktemp("cells")
    for cell in SMALL.cells():
        sweeps.compute(cell, folder)
    return folder


def found(folder: Path, sweep: Sweep = SMALL) -> dict[Cell, dict[str, Any]]:
    return {cell: data for cell in sweep.cells() if (data := sweeps.done(cell, folder)) is not None}


# ---- cells


def test_cells_are_every_combination_once() -> None:
    cells = replace(SMALL, rates=(4.0, 8.0, 4.0)).cells()
    assert len(cells) == len(set(cells)) == 8
    assert {(cell.recipe, cell.rate, cell.seed) for cell in cells} == {
        (recipe, rate, seed) for recipe in ("vllm", "edf") for rate in (4.0, 8.0) for seed in (0, 1)
    }


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": "slack"},
        {"rate": 4.5},
        {"seed": 7},
        {"duration": 5.0},
        {"slo": "ttft:500"},
        {"fleet": Fleet("opt-66b-a100-tp4")},
        {"fleet": Fleet("opt-13b-a100", kv_tokens=9000)},
    ],
)
def test_any_change_of_the_setting_is_another_cell(change: dict[str, Any], swept: Path) -> None:
    cell = SMALL.cells()[0]
    other = replace(cell, **change)
    assert other.key != cell.key
    assert sweeps.done(cell, swept) is not None
    assert sweeps.done(other, swept) is None


def test_another_simulator_or_pace_file_is_another_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = SMALL.cells()[0]
    keys = {cell.key}
    for name in ("source_digest", "_profile"):
        monkeypatch.setattr(sweeps, name, lambda *_: "other")
        keys.add(cell.key)
    assert len(keys) == 3


def test_a_half_written_or_foreign_file_is_no_cell(swept: Path, tmp_path: Path) -> None:
    cell = SMALL.cells()[0]
    whole = (swept / f"{cell.key}.json").read_text()
    for text in (whole[:50], "[]", "{}", whole.replace('"seed": 0', '"seed": 5')):
        (tmp_path / f"{cell.key}.json").write_text(text)
        assert sweeps.done(cell, tmp_path) is None


def test_a_cell_is_the_simulation_of_its_seed(swept: Path) -> None:
    from headway.whatif.experiment import chat_batch, simulate
    from headway.whatif.load import metrics
    from headway.whatif.load.mix import parse_slo

    cell = SMALL.cells()[-1]
    workload = chat_batch(cell.rate, cell.duration, cell.seed, parse_slo(cell.slo), 2048)
    rows = metrics.figures(simulate([cell.recipe], cell.fleet, workload, bar=False).records)
    data = sweeps.done(cell, swept)
    assert data is not None
    assert data["rows"] == [[row.id, row.setting, row.ours, row.unit] for row in rows]


# ---- figures


def test_a_figure_is_the_mean_between_its_extremes(swept: Path) -> None:
    cells = found(swept)
    rows = {(r.id, r.system, r.setting): r.ours for r in sweep_report.rows(collect(SMALL, cells))}
    for recipe_name in SMALL.recipes:
        values = [
            figure[2]
            for cell, data in cells.items()
            if (cell.recipe, cell.rate) == (recipe_name, 8.0)
            for figure in data["rows"]
            if figure[:2] == ["ttft.p50", "chat"]
        ]
        assert len(values) == 2
        where = (recipe_name, "chat at 8 req/s")
        assert rows["ttft.p50", *where] == pytest.approx(sum(values) / 2)
        assert (rows["ttft.p50.min", *where], rows["ttft.p50.max", *where]) == (min(values), max(values))
    ids = list(rows)
    assert len(ids) == len(set(ids))


def test_missing_cells_leave_gaps(swept: Path) -> None:
    cells = {cell: data for cell, data in found(swept).items() if (cell.recipe, cell.rate) != ("edf", 8.0)}
    curves = collect(SMALL, cells)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(sweep_report.build(SMALL, curves, {SMALL.cells()[0]: "a [note]"}, 1.0).table())
    text = console.export_text()
    assert "a [note]" in text
    assert any("8" in line and line.rstrip(" │").endswith("-") for line in text.splitlines())
    assert all(png.startswith(b"\x89PNG") for png in sweep_plots.draw(curves).values())


def test_nothing_at_all_can_be_drawn() -> None:
    curves = collect(SMALL, {})
    assert set(sweep_plots.draw(curves)) == {"attainment-rate", "latency-rate", "throughput-rate"}


# ---- the command


def headway(*arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in (*sys.path, ".") if path)}
    argv = [sys.executable, "-c", "from headway.cli.main import main; main()", "sweep", *arguments]
    return subprocess.Popen(
        argv,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # deaf where tests run in background
    )


def options(out: Path, recipes: str, **more: Any) -> list[str]:
    given = {"rates": "4,8", "seeds": 1, "duration": 3, "jobs": 2, **more}
    return ["--recipes", recipes, "--out", str(out), *(f"--{k}={v}" for k, v in given.items())]


def test_a_failing_cell_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    mine = __name__
    process = headway(*options(tmp_path, f"vllm,{mine}:BROKEN,{mine}:DEADLY,edf", rates=8), "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert err.count("ZeroDivisionError: nothing to pack by") == 1
    assert err.count("its process died") == 1
    data = json.loads(out)
    assert (data["bench"], data["host"]) == ("sweep", "sim")
    assert {row["system"] for row in data["rows"]} == {"vllm", "edf"}
    assert {row["setting"] for row in data["rows"] if row["system"] == "edf"} >= {"chat at 8 req/s", "all at 8 req/s"}
    page = (tmp_path / "report.html").read_text()
    assert "SIMULATED" in page
    assert "nothing to pack by" in page
    assert page.count("data:image/png;base64,") == 3
    assert len(list((tmp_path / "cells").iterdir())) == 2


def test_ctrl_c_leaves_what_is_done_and_no_process(tmp_path: Path) -> None:
    import psutil

    for_ever = options(tmp_path, f"vllm,{__name__}:SLOW", rates="4,8")
    process = headway(*for_ever)
    family = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "cells").glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = family.children(recursive=True)
    assert workers
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").glob("*.json")}
    for one in (family, *workers):  # as a terminal does it: everybody hears it
        one.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "stopped: 2 of 4 cells are done" in err
    assert "Traceback" not in err
    assert not psutil.wait_procs(workers, timeout=10)[1]

    again = headway(*options(tmp_path, "vllm,edf", rates="4,8"))
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert "2 of 4 cells are already computed" in err
    assert {file: file.stat().st_mtime_ns for file in before} == before


def test_ctrl_c_between_two_cells_leaves_no_process_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come while the parent draws its progress, where the workers' keeper does not hear it."""

    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_report.Progress, "advance", pressed)
    others = set(multiprocessing.active_children())
    cells = Sweep(("vllm", f"{__name__}:SLOW"), (4.0,), 1, 0, 4.0).cells()
    with pytest.raises(KeyboardInterrupt) as stopped:  # held, as by whoever handles it
        sweep_report._compute(cells, tmp_path, 2, Console(quiet=True))
    assert set(multiprocessing.active_children()) == others
    assert stopped.traceback


# ---- what can be asked for


def test_a_file_and_options_that_replace_it(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('recipes = ["edf"]\nrates = [1, 2.5]\nseeds = 4\n[fleet]\nprofile = "opt-66b-a100"\ncount = 2\n')
    assert sweeps.read(file, {}, {}) == Sweep(("edf",), (1.0, 2.5), 4, fleet=Fleet("opt-66b-a100", 2))
    mixed = sweeps.read(file, {"recipes": ["slack"], "seed": 9}, {"count": 3})
    assert mixed == Sweep(("slack",), (1.0, 2.5), 4, 9, fleet=Fleet("opt-66b-a100", 3))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe = ['edf']", "Did you mean recipes?"),
        ("[fleet]\nprofiles = 'x'", "Did you mean profile?"),
        ("fleet = 3", "fleet"),
        ("seeds = 2.5", "seeds is 2.5. It must be a whole number"),
        ("seeds = true", "seeds is True"),
        ("rates = 3", "rates is 3. It must be a list of numbers"),
        ("rates = ['fast']", "wrong type"),
        ("recipes = []", "The sweep is empty"),
        ("rates = [-1]", "-1.0 is not a rate"),
        ("duration = inf", "inf is not a rate or duration"),
        ("seeds = ", "is not TOML"),
    ],
)
def test_a_bad_file_is_a_clear_error(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "s.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        sweeps.read(file, {}, {})
    assert said in str(caught.value)


def test_no_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        sweeps.read(tmp_path / "none.toml", {}, {})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipes", "slak"], "slack"),
        (["--slo", "ttfd:3"], "ttft"),
        (["--profile", "opt-13"], "opt-13b-a100"),
        (["--rates", "2,x"], "not a list of rates"),
        (["--kv-tokens", "100"], "hold no request"),
    ],
)
def test_what_is_wrong_for_all_cells_is_said_before_any_is_computed(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, ["sweep", "--out", str(tmp_path / "o"), *arguments])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert not (tmp_path / "o").exists()


def test_quick_is_small() -> None:
    few = Sweep().quick()
    assert len(few.cells()) <= 24
    assert few.duration <= 20
    assert Sweep(duration=50).quick(("duration",)).duration == 50, "the user's own"


def test_the_documented_fleet_file_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
    (tmp_path / "fleet.toml").write_text(text.split("```toml")[1].split("```")[0])
    specs, traffic, _ = scenario.load(tmp_path / "fleet.toml")
    mine = scenario.mixed(specs, traffic, 2.0, 10.0, "ttft:400", 0)
    workload, left_out = mine.workload()
    assert len(workload) > 10
    assert left_out < len(workload)
    assert {one.name for one in traffic} == {"chat", "code", "batch"}
