"""`headway bench apps`: its load, its figures, and whole runs on FAKE engines."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.real import apps
from benchmarks.real.app_load import APPS, AppShape, calls_of, scaled, shares
from benchmarks.real.apps import AppsOutcome, AppsTrial, RunResult, ServedApps, completion_times
from benchmarks.real.apps_report import main, reductions, result
from headway.config import Broker, Config, Key, Server, Sqlite, Tier, load
from headway.engines.vllm.process.launch import Child
from headway.gateway.control.graph_files import GraphFiles
from headway.policy.apps.demand import SHARED
from headway.policy.apps.graph import Graph
from headway.simulate.workload.applications import AppRun, Step
from headway.types import Slo
from headway.whatif.load import mix
from headway.whatif.load.records import Record
from headway.whatif.measured import systems
from headway.whatif.measured.systems import standard_engine
from headway.whatif.output.results import Ask
from tests.bench.fake import fake, serving
from tests.gateway import gateway as in_process

ENGINE = standard_engine("smollm2", max_running=16, blocks=None)
SMALL = AppShape(scale=0.01)
RATE, SECONDS = 8.0, 1.0


@pytest.fixture(autouse=True)
def _without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_DATA", raising=False)


# ---- the load


def test_a_scaled_run_has_the_same_units() -> None:
    requests = ((1000, 200), (6000, 4000), (2, 1))
    run = AppRun("CG", (Step("write", requests=requests), Step("check", "docker", seconds=12.0)))
    small = scaled(run, 0.25)
    assert [step.unit for step in small.steps] == ["write", "check"]
    assert small.steps[0].requests == ((250, 50), (1400, 512), (1, 1))
    assert small.steps[1].seconds == 3.0


def test_the_load_is_the_same_for_a_seed() -> None:
    shape = AppShape()
    once = shape.load(0.5, 400.0, [0, 0])
    assert once == shape.load(0.5, 400.0, [0, 0])
    assert once != shape.load(0.5, 400.0, [0, 1])
    assert len(once.scripts) == 200
    assert all(0 <= script.at < 400 for script in once.scripts)
    seen = Counter(script.run.app for script in once.scripts)
    assert {app: seen[app] / 200 for app in APPS} == pytest.approx(shares(), abs=0.1)
    gaps = np.diff([script.at for script in once.scripts])
    assert gaps.std() / gaps.mean() > 2, "they come in bursts"
    assert len(once.chat) == pytest.approx(100, rel=0.3)
    assert {call.slo for call in once.chat} == {Slo(ttft=1.5, tpot=0.15)}


def test_every_request_has_a_prompt_of_its_length() -> None:
    load = AppShape().load(1.0, 10.0, [0, 0])
    for script in load.scripts:
        asked = [pair for step in script.run.steps for pair in step.requests]
        texts = [text for texts in script.prompts for text in texts]
        assert [len(text.split()) for text in texts] == [prompt for prompt, _ in asked]
        assert [(call.max_tokens, call.ignore_eos) for call in calls_of(script)] == [
            (output, True) for _, output in asked
        ]
    assert load.requests == len(load.chat) + sum(len(calls_of(script)) for script in load.scripts)


def test_graphs_are_learned_from_runs_that_are_not_made() -> None:
    graphs = {graph.app: graph for graph in SMALL.graphs()}
    assert set(graphs) == set(APPS)
    assert all(graph.runs == 100 for graph in graphs.values())


# ---- the figures


def ran(app: str, act: float) -> RunResult:
    return RunResult(app, 1.0, 1.0 + act, [])


def chat(first: float | None) -> Record:
    last, error = (None, "HTTP 500: no") if first is None else (first + 1.0, None)
    return Record("chat", 0.0, 0.0, first, last, 5, 9, np.empty(0, np.float32), None, error, Slo(ttft=1.5, tpot=0.15))


def test_figures() -> None:
    stock = ServedApps([ran("CC", 4.0), ran("CC", 8.0), ran("CG", math.nan)], [chat(1.0), chat(2.0), chat(None)])
    counts = {
        ("headway_runs_total", "CC", "finished"): 2.0,
        ("headway_runs_total", "CG", "failed"): 1.0,
        ("headway_run_seconds_sum", "CC"): 5.0,
        ("headway_run_seconds_count", "CC"): 2.0,
    }
    hermes = ServedApps([ran("CC", 2.0), ran("CC", 4.0), ran("CG", 3.0)], [chat(1.0)], counts, refused=1)
    trial = AppsTrial(ENGINE, ("vllm-fcfs", "hermes"), load=1.2)
    report = main.report(result(trial, AppsOutcome({"vllm-fcfs": stock, "hermes": hermes}, 0.5, 0.4)))
    rows = {(row.id, row.system, row.setting): row.ours for row in report.rows}
    assert all(setting.endswith(", 1.2x") for _, _, setting in rows)
    found = {(id, system, setting[: -len(", 1.2x")]): ours for (id, system, setting), ours in rows.items()}
    assert found["act.mean", "vllm-fcfs", "all"] == found["act.mean", "vllm-fcfs", "CC"] == 6.0
    assert found["act.p95", "vllm-fcfs", "all"] == pytest.approx(7.8)
    assert found["act.mean", "vllm-fcfs", "CG"] is None
    assert found["act.mean", "hermes", "all"] == 3.0
    assert [found["lost", "vllm-fcfs", s] for s in ("all", "CC", "CG", "chat")] == [1, 0, 1, 1]
    assert found["runs", "vllm-fcfs", "all"] == 3
    assert found["attainment", "vllm-fcfs", "chat"] == pytest.approx(100 / 3)
    assert found["gateway.runs", "hermes", "all"] == found["gateway.runs", "hermes", "CC"] == 2
    assert found["gateway.act.mean", "hermes", "CC"] == 2.5
    assert ("gateway.runs", "vllm-fcfs", "all") not in found
    assert found["act.mean.reduction_pct", "hermes", "all, against vllm-fcfs"] == pytest.approx(50)
    assert any("hermes: 1 reports" in note for note in report.notes)
    assert reductions({"vllm-fcfs": stock}) == []


def test_rounds_add_up() -> None:
    whole = ServedApps()
    for number in (1.0, 2.0):
        whole.add(ServedApps([ran("CC", number)], [chat(1.0)], {("a",): number}, 1))
    assert completion_times(whole.runs).tolist() == [1.0, 2.0]
    assert (len(whole.chat), whole.counts, whole.refused) == (2, {("a",): 3.0}, 2)


def test_figures_name_what_is_not_the_default() -> None:
    assert AppsTrial(ENGINE, duration=60.0, rounds=2, seed=4, together=True).variant == ""
    other = AppsTrial(ENGINE, rate=0.5, shape=AppShape(scale=0.1, burstiness=1.0))
    assert other.variant == "0.5 runs/s, scale 0.1, burstiness 1"


# ---- the systems


def test_a_gateway_knows_tenants_and_graphs(tmp_path: Path) -> None:
    keys, graphs = (Key("headway-bench-CC", "CC"),), SMALL.graphs()
    child = systems.gateway("hermes", (ENGINE,), 1, tmp_path, ("app",), keys=keys, graphs=graphs)
    config = written(child)
    assert (config.keys, config.classes["app"]) == (keys, Tier())
    assert config.apps_dir is not None
    known = GraphFiles(config.apps_dir).load()
    assert {key: graph.runs for key, graph in known.items()} == {(SHARED, app): 100 for app in APPS}


def written(child: Child) -> Config:
    return load(Path(child.argv[child.argv.index("--config") + 1]))


class Seen(dict[str, list[dict[str, Any]]]):
    """What each system is asked: FAKE engines, with a gateway of this process but for stock vLLM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @asynccontextmanager
    async def start(
        self,
        name: str,
        engine: Any,
        logs: Path,
        classes: Sequence[str],
        *,
        keys: tuple[Key, ...],
        graphs: Sequence[Graph],
    ) -> AsyncIterator[str]:
        async with serving(fake(2, split=False, on_request=self.setdefault(name, []).append)) as url:
            if name in systems.STOCK:
                yield url
                return
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            broker = Broker(sqlite=Sqlite(str(folder / "queue.sqlite"), "normal"))
            tiers = {one: Tier() for one in ("default", *classes)}
            attached = replace(ENGINE, url=url, served_name="smollm2")
            config = Config(name, Server(port=8000, operator_only=False), (attached,), broker, classes=tiers, keys=keys)
            assert config.apps_dir is not None
            for graph in graphs:
                GraphFiles(config.apps_dir).save(SHARED, graph)
            gateway = in_process.serving(config)  # it asks the engine, which this thread serves
            yield (await asyncio.to_thread(gateway.__enter__)).url
            await asyncio.to_thread(gateway.__exit__, None, None, None)


@pytest.fixture
def seen(tmp_path: Path) -> Seen:
    return Seen(tmp_path)


def of(seen: Seen, system: str) -> list[str]:
    """Return the prompts of the applications' requests, without those that warmed the engine up."""
    mine = [one["body"] for one in seen[system] if "prompt" in one["body"]]
    return sorted(str(body["prompt"]) for body in mine)


def test_all_systems_get_the_same_runs_and_the_gateway_counts_them(
    seen: Seen, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = ("vllm-fcfs", "parrot", "hermes")
    trial = AppsTrial(ENGINE, names, SMALL, rate=RATE, duration=SECONDS, rounds=2, start=seen.start)
    main(Ask(as_json=True, out=tmp_path / "out"), trial)
    result = json.loads(capsys.readouterr().out)
    assert (result["bench"], result["host"]) == ("apps", "vllm")
    rows = {(row["id"], row["system"], row["setting"]): row["ours"] for row in result["rows"]}
    end = f", {trial.variant}"
    for name in names:
        assert rows["runs", name, f"all{end}"] == 2 * RATE * SECONDS
        assert rows["lost", name, f"all{end}"] == rows["lost", name, f"chat{end}"] == 0
        assert rows["act.mean", name, f"all{end}"] > 0
        assert of(seen, name) == of(seen, names[0]) != []
        if name not in systems.STOCK:
            assert rows["gateway.runs", name, f"all{end}"] == 2 * RATE * SECONDS
            ours, theirs = rows["act.mean", name, f"all{end}"], rows["gateway.act.mean", name, f"all{end}"]
            assert 0 < theirs <= ours
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"report.html", "act.png", "act-cdf.png"}


def test_a_quick_run_has_two_systems_and_no_capacity(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    main(Ask(True, True), AppsTrial(ENGINE, duration=1.0, start=seen.start))
    result = json.loads(capsys.readouterr().out)
    assert {row["system"] for row in result["rows"]} == {"vllm-fcfs", "hermes"}


async def test_the_load_is_a_multiple_of_the_capacity(seen: Seen) -> None:
    trial = AppsTrial(ENGINE, ("vllm-fcfs",), SMALL, load=0.01, duration=SECONDS, start=seen.start)
    outcome = await apps.run(trial)
    assert outcome.capacity is not None
    assert outcome.rate == pytest.approx(0.01 * outcome.capacity)


async def test_a_run_is_lost_with_the_first_request_without_an_answer() -> None:
    load = SMALL.load(RATE, SECONDS, [0, 0])
    served = await apps.send("vllm-fcfs", "http://127.0.0.1:9", "smollm2", replace(load, chat=()))
    assert completion_times(served.runs).size == 0
    first = [len(script.prompts[0]) for script in load.scripts]
    assert [len(run.records) for run in served.runs] == first, "nothing follows"


def test_each_application_is_a_tenant() -> None:
    keys = {apps.key_of(app) for app in APPS}
    assert len(keys) == len(APPS)
    assert mix.BUILTIN["chat-batch"].tiers[0] in AppShape().chat.tiers
