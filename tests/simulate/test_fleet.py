"""Fleets of unlike machines: how they are written, what is refused, who gets what."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import ConfigError
from headway.policy.recipes.baselines import ROUTERS
from headway.policy.recipes.registry import find
from headway.simulate import fleet
from headway.simulate.fleet import Spec, build, spec
from headway.simulate.run import InstanceSpec, Simulation
from headway.types import Batch, Slo
from headway.whatif import scenario
from headway.whatif.experiment import Mixed, simulate
from tests.simulate.machines import Constant, at, machine, random_traffic, together


def test_a_line_of_text_is_a_spec() -> None:
    assert spec("opt-13b-a100") == Spec("opt-13b-a100")
    assert spec("opt-13b-a100:2,kv_tokens=40000,model=x", budget=512) == Spec(
        "opt-13b-a100", 2, "x", kv_tokens=40_000, budget=512
    )
    read = spec("opt-13b-a100,loads=llama-2-7b-a100+yi-34b-a100-tp2,host_gb=0.5")
    assert read.loads == ("llama-2-7b-a100", "yi-34b-a100-tp2")
    assert read.host_gb == 0.5


@pytest.mark.parametrize(
    ("text", "said", "mend"),
    [
        ("opt-13b-a10", "no latency profile opt-13b-a10", "opt-13b-a100"),
        ("opt-13b-a100:0", "count", "profile[:count]"),
        ("opt-13b-a100:two", "count", "profile[:count]"),
        ("opt-13b-a100,kv_token=5", "no 'kv_token'", "'kv_tokens'"),
        ("opt-13b-a100,zzz=5", "no 'zzz'", "Use one of"),
        ("opt-13b-a100,fast", "no key=value", "profile[:count]"),
        ("opt-13b-a100,kv_tokens=1000", "hold no request of 2048", "smaller max_model_len"),
        ("opt-13b-a100,budget=100", "fewer than 256 running", "Raise budget"),
        ("opt-13b-a100,loads=opt-13b-a100", "one model twice", "Let it load each model once"),
        ("opt-13b-a100,host_gb=-1", "host_gb", "profile[:count]"),
        ("opt-13b-a100,host_kv_gib=-1", "host_kv_gib", "profile[:count]"),
        ("", "profile", ""),
    ],
)
def test_fleets_that_cannot_be_are_refused_with_the_mend(text: str, said: str, mend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build([spec(text)])
    assert said in str(caught.value)
    assert mend in str(caught.value)


def test_a_fleet_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no instances"):
        build([])
    with pytest.raises(ConfigError, match="no instance"):
        Simulation(find("vllm"), [], at(0.0)).run()
    with pytest.raises(ConfigError, match="one name"):
        Simulation(find("vllm"), [machine("e0"), machine("e0")], at(0.0)).run()


def test_nodes_are_what_their_pace_files_say() -> None:
    nodes = build([spec("opt-13b-a100:2,loads=llama-2-7b-a100"), spec("llama-2-7b-a40")])
    assert [node.instance.id for node in nodes] == ["e0", "e1", "e2"]
    assert fleet.models(nodes) == ("opt-13b", "llama-2-7b-hf")
    assert nodes[0].instance.blocks_total == 66_144 // 16
    assert nodes[0].others[0].instance.blocks_total == 117_648 // 16
    assert nodes[0].host_tokens == 128 * 2**30 // 819_200
    assert build([spec("opt-13b-a100,host_kv_gib=0")])[0].host_tokens == 0
    assert nodes[0].load is not None
    assert nodes[2].load is None, "it loads nothing else, so nobody has to know"


def test_several_models_may_have_one_profile() -> None:
    text = "llama-2-7b-a100,model=chat,loads=code@llama-2-7b-a100+opt-13b-a100+law@opt-13b-a100"
    (node,) = build([spec(text)])
    assert list(node.variants()) == ["chat", "code", "opt-13b", "law"]
    assert node.variants()["code"].latency.seconds(Batch(1, 9, 0)) == node.latency.seconds(Batch(1, 9, 0))
    assert node.variants()["law"].load == node.variants()["opt-13b"].load
    with pytest.raises(ConfigError, match="one model twice"):
        build([spec(text + "+code@opt-13b-a100")])
    with pytest.raises(ConfigError, match="no latency profile"):
        build([spec("llama-2-7b-a100,loads=code@llama-9")])


@pytest.mark.parametrize(
    ("workload", "said", "mend"),
    [
        (at(0.0, model="x"), "'x', which no instance serves", "add an instance of 'x'"),
        (at(0.0, 1.0, model="b"), "never swaps", "such as shepherd"),
        (at(0.0, model="a", prompt=1000), "Request 0 has 1005 tokens", "max_model_len"),
        (at(0.0, model="c", prompt=700), "no instance of 'c' holds over 640", "kv_tokens"),
    ],
)
def test_a_workload_nobody_can_serve_is_refused_before_it_runs(workload: object, said: str, mend: str) -> None:
    nodes = [machine("e0", "a", "b"), machine("e1", "c", blocks=40)]
    with pytest.raises(ConfigError) as caught:
        Simulation(find("vllm"), nodes, workload).run()  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert mend in str(caught.value)


def test_swapping_needs_known_load_times() -> None:
    node = machine("e0", "a", "b")
    with pytest.raises(ConfigError, match="load_cold_s"):
        Simulation(find("shepherd"), [replace(node, load=None)], at(0.0, model="a")).run()


def unlike() -> list[InstanceSpec]:
    """One four times as fast as the other, and with more memory."""
    slow = replace(machine("slow", "m", each=0.2, blocks=20), latency=Constant(0.2))
    return [slow, machine("fast", "m", each=0.05, blocks=200)]


@pytest.mark.parametrize("recipe", ["vllm", "slack", "least-loaded"])
def test_the_faster_machine_serves_more(recipe: str) -> None:
    workload = random_traffic(2, ("m",), 120, 10.0)
    outcome = Simulation(find(recipe), unlike(), workload).run()
    assert np.count_nonzero(outcome.instance == 1) > 1.5 * np.count_nonzero(outcome.instance == 0)


@pytest.mark.parametrize("recipe", ["vllm", "priority", "edf", "slack", *ROUTERS])
def test_a_request_goes_only_where_it_fits(recipe: str) -> None:
    workload = together(random_traffic(4, ("m",), 30, 2.0), at(0.5, 0.6, model="m", prompt=500))
    outcome = Simulation(find(recipe), unlike(), workload).run()
    assert np.isfinite(outcome.end).all()
    assert outcome.failed == 0
    assert (outcome.instance[workload.prompt == 500] == 1).all()


def test_what_fits_nowhere_any_more_fails_instead_of_waiting_for_ever() -> None:
    from headway.simulate.run import Failure

    workload = together(at(0.0, model="m", prompt=500, output=60), at(1.0, model="m"))
    outcome = Simulation(find("vllm"), unlike(), workload, failures=[Failure("fast", 0.5)]).run()
    assert outcome.failed == 1
    assert np.isnan(outcome.end[0])
    assert np.isfinite(outcome.end[1])


# ---- files and the command line

SCENE = """
[[instances]]
profile = "opt-13b-a100"
count = 2
loads = ["llama-2-7b-a100"]

[[instances]]
profile = "llama-2-7b-a40"

[[traffic]]
name = "chat"
model = "opt-13b"
share = 0.5
slo = "ttft:400 tpot:200"
tenants = ["a", "b"]
drop = true

[[traffic]]
name = "bulk"
model = "llama-2-7b-hf"
lengths = "alpaca"
priority = 10
"""


def test_a_scene_is_a_fleet_and_its_traffic(tmp_path: Path) -> None:
    path = tmp_path / "scene.toml"
    path.write_text(SCENE)
    specs, traffic, _ = scenario.load(path, budget=512)
    assert [one.count for one in specs] == [2, 1]
    assert {one.budget for one in specs} == {512}
    assert [one.model for one in traffic] == ["opt-13b", "llama-2-7b-hf"]
    assert traffic[0].slo == Slo(0.4, 0.2)
    assert traffic[0].tenants == ("a", "b")
    assert [one.drop for one in traffic] == [True, False]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no instance"),
        ("[[instances", "not TOML"),
        ("[instances]\nprofile = 'x'", "[[instances]]"),
        ("[[machines]]", "unknown table 'machines'"),
        ("[[instances]]\nprofile = 'x'\ncuont = 1", "'count'"),
        ("[[instances]]\nprofile = 'x'\n[[traffic]]\nname = 'c'\nshare = 'a'", "share of [[traffic]]"),
        ("[[instances]]\nprofile = 'x'\n[[traffic]]\nname = 'c'\nslos = ''", "'slo'"),
        ("[[instances]]\nprofile = 'x'\n[[traffic]]\nshare = 1.0", "has no name"),
    ],
)
def test_bad_scenes_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "scene.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        scenario.load(path)
    assert said in str(caught.value)


def test_simulate_runs_a_scene_of_several_models(tmp_path: Path) -> None:
    path = tmp_path / "scene.toml"
    path.write_text(SCENE)
    argv = ["simulate", "--fleet", str(path), "--rate", "4", "--duration", "10", "--json", "--plan-us", "50"]
    done = CliRunner().invoke(app, [*argv, "--recipes", "vllm,least-loaded,shepherd"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["host"] == "sim"
    assert {row["system"] for row in report["rows"]} == {"vllm", "least-loaded", "shepherd"}


def test_simulate_runs_unlike_instances_of_one_model_and_counts_what_is_shed() -> None:
    argv = [
        "simulate",
        "--instance",
        "opt-13b-a100,model=m,max_running=4",
        "--instance",
        "llama-2-7b-a40,model=m,max_running=4",
    ]
    done = CliRunner().invoke(app, [*argv, "--recipes", "llm-d-like", "--rate", "8", "--duration", "10"])
    assert done.exit_code == 0, done.output
    assert "requests shed" in done.output


def test_a_recipe_that_copies_kv_needs_to_know_how_fast() -> None:
    """BROS copies where the host has room, and evicts where it has none."""
    text, load = "smollm2-135m-cpu2,kv_tokens=4096", at(0.0, 0.0, 0.0, model="smollm2-135m-instruct")
    with pytest.raises(ConfigError, match="host_kv_gib=0"):
        simulate(["bros"], Mixed((spec(text),)), load, bar=False)
    with pytest.raises(ConfigError, match="another recipe"):
        simulate(["fastserve"], Mixed((spec(text),)), load, bar=False)
    found = simulate(["bros"], Mixed((spec(f"{text},host_kv_gib=0"),)), load, bar=False)
    assert len(found.records["bros"][0]) == 3
