"""`headway bench fleet` on gateways of this process, whose engines are FAKE child processes."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.real import fleet
from benchmarks.real.fleet import FleetRun, FleetState, FleetTrial, ServedFleet, Watched, main, rows_of
from benchmarks.simulated import fleet as virtual
from headway.config import Broker, Config, Model, Server, Sqlite, Tier
from headway.errors import ConfigError
from headway.policy.plan.estimator import load_seconds
from headway.policy.recipes.registry import find
from headway.simulate.instance import SimulatedInstance
from headway.types import Slo
from headway.whatif.load import mix
from headway.whatif.measured.systems import total
from headway.whatif.output.results import Ask
from tests.gateway.gateway import serving
from tests.gateway.swapping import make_model, use_fake_engines

MIX = mix.Mix(
    "m",
    (
        mix.TrafficTier("fast", 0.5, Slo(e2e=8.0), prompt_tokens=(5, 50)),
        mix.TrafficTier("batch", 0.5, Slo(e2e=60.0), prompt_tokens=(5, 50)),
    ),
)
FIGURES = {
    "attainment",
    "e2el.p99",
    "throughput.req_per_s",
    "swaps",
    "swap.seconds",
    "swaps.failed",
    "swaps.taken_back",
    "lost",
    "answered_twice",
}
KILLED = {"replanned", "replanned.seconds", "back.seconds"}


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetTrial:
    """Return a trial whose systems are gateways of this process."""
    use_fake_engines(monkeypatch)
    models = tuple(
        Model(str(make_model(tmp_path, name, layers=layers)), name) for name, layers in (("a", 1), ("b", 1), ("c", 2))
    )

    @asynccontextmanager
    async def running(name: str, trial: FleetTrial, logs: Path) -> AsyncIterator[ServedFleet]:
        engines = trial.engines()
        queue = Broker(sqlite=Sqlite(str(logs / f"{name}.sqlite"), "normal"))
        classes = {"default": Tier()} | dict.fromkeys(trial.mix.names, Tier())
        with serving(Config(name, Server(port=8000), engines, queue, classes=classes)) as gateway:
            ports = {id: str(one.port) for id, one in zip(fleet.INSTANCES, engines, strict=True)}
            served = ServedFleet(gateway.url, os.getpid(), ports)
            await served.up()
            yield served

    systems = ("qlm", "vllm-model-swap")
    return FleetTrial(models, systems, MIX, rate=20.0, tail=0.2, duration=1.0, start=running)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str, str], float | None]:
    result = json.loads(capsys.readouterr().out)
    assert (result["bench"], result["host"]) == ("fleet", "vllm")
    return {(row["id"], row["system"], row["setting"]): row["ours"] for row in result["rows"]}


def test_every_system_gets_the_same_calls_for_all_models(
    trial: FleetTrial, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(Ask(as_json=True, out=tmp_path / "out"), trial)
    rows = printed(capsys)
    end = f", {trial.variant}"
    assert end == ", 20 req/s, 20% tail, 1 s"
    for name in trial.systems:
        assert {id for id, system, _ in rows if system == name} == FIGURES
        assert rows["lost", name, f"all{end}"] == rows["answered_twice", name, f"all{end}"] == 0
        settings = {setting for id, system, setting in rows if (id, system) == ("attainment", name)}
        assert settings == {f"{one}{end}" for one in ("fast", "batch", "all", "a", "b", "c")}
        restarts = rows["swaps", name, f"restart{end}"]
        assert restarts is not None
        assert restarts >= 1, "c has another shape"
        assert (rows["swap.seconds", name, f"restart{end}"] or 0) > 0
    assert (tmp_path / "out" / "models.png").stat().st_size > 1000
    assert (tmp_path / "out" / "attainment.png").exists()


def test_nothing_is_lost_when_an_engine_is_killed(trial: FleetTrial, capsys: pytest.CaptureFixture[str]) -> None:
    main(Ask(as_json=True), replace(trial, systems=("qlm",), kill=True))
    rows = {id: ours for (id, _, setting), ours in printed(capsys).items() if setting.startswith("all")}
    assert set(rows) == FIGURES | KILLED
    assert rows["lost"] == rows["answered_twice"] == 0
    assert (rows["back.seconds"] or 0) > 0


def test_a_quick_run_has_no_model_of_another_shape(trial: FleetTrial, capsys: pytest.CaptureFixture[str]) -> None:
    main(Ask(True, True), replace(trial, systems=("edf-model-swap", "qlm")))
    rows = printed(capsys)
    assert {system for _, system, _ in rows} == {"qlm"}
    assert {setting.partition(",")[0] for _, _, setting in rows} == {
        "fast",
        "batch",
        "all",
        "a",
        "b",
        "in_place",
        "restart",
    }
    assert next(ours for (id, _, setting), ours in rows.items() if (id, setting[:3]) == ("swaps", "res")) == 0


def test_calls_are_the_same_for_a_seed_and_ask_for_models_by_their_shares(trial: FleetTrial) -> None:
    long = replace(trial, duration=100.0, tail=0.1)
    calls = long.calls()
    assert calls == long.calls()
    assert calls != replace(long, seed=1).calls()
    share = {name: sum(call.model == name for call in calls) / len(calls) for name in "abc"}
    assert share == pytest.approx({"a": 0.45, "b": 0.45, "c": 0.1}, abs=0.04)


def test_engines_serve_the_frequent_models_first(trial: FleetTrial) -> None:
    first, second = trial.engines()
    assert (first.name, second.name) == ("a", "b")
    assert set(first.served) == set(second.served) == {"a", "b", "c"}
    assert first.port != second.port
    alone = replace(trial, models=trial.models[:2]).engines()
    assert [engine.name for engine in alone] == ["a", "a"]


@pytest.mark.parametrize(
    ("systems", "hint"), [(("vllm",), "shepherd"), (("edf", "qlm"), "qlm"), ((), "Name some"), (("qml",), "qlm")]
)
def test_recipes_that_do_not_swap_are_refused(systems: tuple[str, ...], hint: str) -> None:
    models = (Model("a"), Model("b"), Model("c"))
    with pytest.raises(ConfigError) as caught:
        fleet.check(FleetTrial(models, systems))
    assert hint in caught.value.hint


def test_standard_systems_swap() -> None:
    assert set(fleet.SYSTEMS) <= set(fleet.swapping())


def test_a_simulated_fleet_has_the_same_classes_and_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trial = virtual.Trial(("edf-model-swap", "qlm"), duration=60.0, tail=0.3, seeds=3)
    virtual.main(Ask(True, True, out=tmp_path), trial)
    result = json.loads(capsys.readouterr().out)
    assert (result["bench"], result["host"]) == ("fleet", "sim")
    rows = {(row["id"], row["system"], row["setting"]): row["ours"] for row in result["rows"]}
    for system in trial.systems:
        settings = {setting for id, name, setting in rows if (id, name) == ("attainment", system)}
        assert settings == {"fast", "batch", "all", *virtual.MODELS}
        assert rows["swaps", system, "restart"] > 0
    assert (tmp_path / "attainment.png").stat().st_size > 1000
    told = [SimulatedInstance(spec, find("qlm")).instance() for spec in trial.instances()]
    ways = {(one.model, model): load_seconds(one, model, one.model) for one in told for model in virtual.MODELS}
    assert ways["smollm2", "smollm2-near"] < 1 < ways["smollm2", "smollm2-short"]
    with pytest.raises(ConfigError, match="never swaps"):
        virtual.check_swaps(("vllm",))


def run(counts: dict[tuple[str, ...], float], watched: Watched) -> dict[tuple[str, str], float | None]:
    return {(row.id, row.setting): row.ours for row in rows_of("s", FleetRun([], counts, watched))}


def test_figures_from_counters() -> None:
    swaps, loads, requeued = ("headway_model_swaps_total", "headway_model_swap_seconds", "headway_requeue_seconds")
    counts: dict[tuple[str, ...], float] = {
        (swaps, "e0", "in_place", "a", "loaded"): 3,
        (swaps, "e1", "restart", "c", "loaded"): 1,
        (swaps, "e1", "restart", "c", "failed"): 2,
        (f"{loads}_count", "e0", "in_place", "a", "warm"): 3,
        (f"{loads}_sum", "e0", "in_place", "a", "warm"): 6,
        (f"{loads}_count", "e1", "restart", "c", "cold"): 1,
        (f"{loads}_sum", "e1", "restart", "c", "cold"): 30,
        (fleet.FINISHED, "fast", "a", "finished"): 2,
        (f"{requeued}_count", "engine_gone"): 4,
        (f"{requeued}_sum", "engine_gone"): 2,
    }
    assert total(counts, swaps, "loaded") == 4
    found = run(counts, Watched())
    assert [found["swaps", way] for way in ("in_place", "restart", "all")] == [3, 1, 4]
    assert [found["swap.seconds", way] for way in ("in_place", "restart", "all")] == [2, 30, 9]
    assert found["swaps.failed", "all"] == 2
    assert found["answered_twice", "all"] == 2, "no client got them"
    assert ("replanned", "all") not in found
    states = [(0.0, FleetState("a")), (7.0, FleetState(None)), (30.0, FleetState("a"))]
    found = run(counts, Watched({"e0": states}, (6.5, "e0")))
    assert (found["replanned", "all"], found["replanned.seconds", "all"]) == (4, 0.5)
    assert found["back.seconds", "all"] == 23.5


def test_states_are_noted_when_they_change() -> None:
    watched = Watched()
    for now, state in (
        (0.0, FleetState("a")),
        (1.0, FleetState("a")),
        (2.0, FleetState(None, "b")),
        (3.0, FleetState("b")),
    ):
        watched.note(now, {"e0": state})
    assert [at for at, _ in watched.states["e0"]] == [0.0, 2.0, 3.0]
    assert watched.back is None


def test_variants_are_made_once(tmp_path: Path) -> None:
    source = str(make_model(tmp_path, "tiny", layers=14))
    first = fleet.make_models(source, tmp_path / "variants")
    made = [Path(model.model).stat().st_ino for model in first]
    assert fleet.make_models(source, tmp_path / "variants") == first
    assert [Path(model.model).stat().st_ino for model in first] == made
    assert [model.name for model in first] == ["tiny", "tiny-near", "tiny-short"]
    configs = [json.loads((Path(model.model) / "config.json").read_text()) for model in first]
    assert [config["num_hidden_layers"] for config in configs] == [14, 14, 12]
    assert all((Path(model.model) / "model.safetensors").is_file() for model in first)
