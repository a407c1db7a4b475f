"""LoRA adapters in the gateway: requests name one as their model, and it is loaded before it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway import clock
from headway.config import Engine
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.launch import command
from headway.errors import ConfigError, EngineError
from headway.events import Event
from headway.gateway.parsing.models import check_adapters
from headway.stages import Prewarm, Resource
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, until

ADAPTERS = {"adapters": {"terse": "/adapters/terse", "kind": "/adapters/kind"}}
Loads = Callable[[str], bool]


@pytest.fixture
def loaded(engines: Callable[..., None]) -> list[str]:
    """Return the adapters that engines were told to load, in the place of their memory."""
    names: list[str] = []

    async def load(engine: VllmEngine, name: str) -> bool:
        if name == "kind":
            raise EngineError("No such directory.", "Make it.")
        names.append(name)
        return names.count(name) > 1

    engines("load_adapter", load)
    return names


def warm(gateway: Gateway, name: str) -> None:
    async def execute() -> None:
        command = Prewarm("default", Resource("adapter", name), clock.now() + 600)
        gateway.inner.dispatcher.control.execute([command])

    gateway.do(execute())


def counted(gateway: Gateway, outcome: str) -> float:
    family = "headway_prewarm_end_total" if outcome in ("used", "wasted") else "headway_prewarm_total"
    return gateway.metric(f'{family}{{kind="adapter",outcome="{outcome}"}}')


def test_a_request_names_an_adapter_as_its_model(serve: Serve, fake: Fake) -> None:
    with serve(recipe="hermes", engine=ADAPTERS) as gateway:
        seen: list[tuple[str, str | None]] = []
        planner = gateway.controller.planner
        hear = planner.on

        def on(event: Event, *rest: Any) -> None:
            if hasattr(event, "request"):
                seen.append((event.request.model, event.request.adapter))
            hear(event, *rest)

        planner.on = on  # type: ignore[method-assign]
        for model in ("terse", "smollm2"):
            assert gateway.post(gateway.chat() | {"model": model}).status_code == 200
            assert fake.last()["body"]["model"] == model
        assert seen == [("smollm2", "terse"), ("smollm2", None)]
        listed = {one["id"]: one.get("parent") for one in gateway.get("/v1/models").json()["data"]}
        assert listed == {"smollm2": None, "terse": "smollm2", "kind": "smollm2"}
        refused = gateway.post(gateway.chat() | {"model": "rude"})
        assert refused.status_code == 404
        assert "kind, smollm2, terse" in refused.json()["error"]["message"]


def test_an_adapter_is_loaded_before_it_is_needed(serve: Serve, loaded: list[str]) -> None:
    with serve(recipe="hermes", engine=ADAPTERS) as gateway:
        warm(gateway, "terse")
        until(lambda: counted(gateway, "warmed") == 1)
        assert loaded == ["terse"]
        assert gateway.post(gateway.chat()).status_code == 200
        assert counted(gateway, "used") == 0
        assert gateway.post(gateway.chat() | {"model": "terse"}).status_code == 200
        until(lambda: counted(gateway, "used") == 1)
        warm(gateway, "terse")
        until(lambda: counted(gateway, "kept") == 1)
        warm(gateway, "kind")
        until(lambda: counted(gateway, "failed") == 1)
        warm(gateway, "unknown")
        until(lambda: counted(gateway, "skipped") == 1)


def test_an_engine_is_started_with_its_adapters() -> None:
    line = command(Engine(**ADAPTERS), 8001, "hermes")
    at = line.index("--lora-modules")
    assert line[at - 1 : at + 3] == ["--enable-lora", "--lora-modules", "terse=/adapters/terse", "kind=/adapters/kind"]
    assert "--enable-lora" not in command(Engine(), 8001, "hermes")


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        ((Engine("/m/a", adapters={"x": "/x"}, models=("/m/b",)),), "adapters and models"),
        ((Engine("/m/a", adapters={"x": "/x"}), Engine("/m/a")), "Not all engines of a"),
        ((Engine("/m/a", adapters={"x": "/x"}), Engine("/m/b", adapters={"x": "/x"})), "another model"),
        ((Engine("/m/a", adapters={"b": "/x"}), Engine("/m/b")), "another model"),
    ],
)
def test_adapters_that_a_request_could_miss(engines: tuple[Engine, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_adapters(engines)
