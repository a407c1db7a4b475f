"""Model swaps where controller, agent and gateway are apart: each is ordered once, whoever leads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.config import Broker, Config, Engine, Server, Sqlite
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.launch import free_port
from headway.events import Event
from tests.gateway.gateway import CLASSES, SAY, Gateway, until
from tests.gateway.roles.parts import Parts, parts
from tests.gateway.swapping import behave, kinds, make_model, note_events, use_fake_engines


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    return note_events(monkeypatch)


@pytest.fixture
def headway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]) -> Iterator[Parts]:
    """A controller, and an agent whose engine serves `a` and can load b (the same shape) and c."""
    use_fake_engines(monkeypatch)
    names = [str(make_model(tmp_path, name, layers=layers)) for name, layers in (("a", 1), ("b", 1), ("c", 2))]
    engine = Engine(names[0], models=tuple(names[1:]), max_running=8)
    queue = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite"), "normal"))
    config = Config("tests.gateway.swapping:RECIPE", Server(port=free_port()), (engine,), broker=queue, classes=CLASSES)
    with parts(config, tmp_path) as made:
        made.controller("c1")
        made.agent("a1", "e0")
        yield made


def ask(gateway: Gateway, model: str) -> Any:
    answer = gateway.post({"model": model, "messages": SAY, "max_tokens": 8})
    assert answer.status_code == 200, answer.text
    return answer.json()["model"]


def engine_of(headway: Parts) -> VllmEngine:
    return headway.agents["a1"].agents.engines["e0"]


def test_a_swap_is_ordered_once(headway: Parts, events: list[Event], engines: Callable[..., None]) -> None:
    orders, begin = list[str](), VllmEngine.begin_swap

    def noted(engine: VllmEngine, model: str) -> None:
        orders.append(model)
        begin(engine, model)

    engines("begin_swap", noted)
    models = ["b", "a", "c", "a", "b", "a"]
    with headway.gateway("g1") as gateway:
        assert [ask(gateway, model) for model in models] == orders == models
        assert engine_of(headway).restarts == 0
        assert engine_of(headway).failure is None
        assert kinds(events) == ["InstanceUp:a", *(f"Swapped:{model}" for model in models)]


@pytest.mark.parametrize("model", ["b", "c"])
def test_a_new_controller_knows_what_is_being_loaded(
    headway: Parts, events: list[Event], tmp_path: Path, model: str
) -> None:
    headway.controller("c2")
    behave(tmp_path / model, "hang")
    with headway.gateway("g1") as gateway, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, gateway, model)
        until(lambda: engine_of(headway).loading == model)
        headway.kill("c1")
        until(lambda: headway.controllers["c2"].leader is not None)
        leader = headway.controllers["c2"].leader
        assert leader is not None
        cluster = leader.control.controller.cluster
        until(lambda: {id: wanted for id, (_, wanted) in cluster.loading.items()} == {"e0": model})
        until(lambda: leader._settling is None)
        assert not cluster.instances
        behave(tmp_path / model, "")
        assert waiting.result(20) == model
        assert kinds(events) == ["InstanceUp:a", f"Swapped:{model}"]
        assert ask(gateway, "a") == "a"


def test_an_order_that_comes_while_another_model_is_loaded_is_not_obeyed(
    headway: Parts, events: list[Event], tmp_path: Path
) -> None:
    behave(tmp_path / "b", "hang")
    with headway.gateway("g1") as gateway, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, gateway, "b")
        engine = engine_of(headway)
        until(lambda: engine.loading == "b")
        headway.loop.call_soon_threadsafe(engine.begin_swap, "c")
        behave(tmp_path / "b", "")
        assert waiting.result(20) == "b"
        assert engine.restarts == 0
        assert kinds(events) == ["InstanceUp:a", "Swapped:b"]
