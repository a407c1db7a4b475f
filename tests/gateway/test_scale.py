"""A gateway says how many engines the promises of a model with [scale] need, and starts and stops them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headway.config import Engine, Scale
from headway.errors import ConfigError
from headway.gateway.preflight import preflight
from tests.gateway.conftest import Serve
from tests.gateway.gateway import configuration, serving, until
from tests.gateway.swapping import behave, make_model, use_fake_engines


def test_the_number_wanted_is_a_metric(serve: Serve) -> None:
    with serve() as gateway:
        assert "headway_wanted_engines{" not in gateway.get("/metrics").text
        model = gateway.chat()["model"]
    with serve(scale={model: Scale(max=3, min=1)}) as gateway:
        assert gateway.post(gateway.chat()).status_code == 200
        line = f'headway_wanted_engines{{model="{model}"}} 1.0'
        until(lambda: line in gateway.get("/metrics").text)


def test_engines_start_and_stop_by_the_number_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To zero while nothing comes, and back for a request that waits; an engine of the file is used again."""
    use_fake_engines(monkeypatch)
    scale = Scale(max=2, min=0, start_s=1.0, starts_engines=True)
    config = replace(configuration(tmp_path), engines=(Engine(str(make_model(tmp_path, "a"))),), scale={"a": scale})
    with serving(config) as gateway:
        engines = gateway.inner.dispatcher.engines
        until(lambda: engines["e0"].state == "drained", 20)
        assert gateway.get("/ready").status_code == 200
        assert gateway.post(gateway.chat(model="a")).status_code == 200
        assert {id: one.state for id, one in engines.items()} == {"e0": "up"}
        scaling = gateway.controller.scaling
        assert scaling is not None
        assert 0 < scaling.scalers["a"].start_s < 20


def test_the_least_number_is_started_as_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_engines(monkeypatch)
    scale = Scale(max=3, min=2, starts_engines=True)
    config = replace(configuration(tmp_path), engines=(Engine(str(make_model(tmp_path, "a"))),), scale={"a": scale})
    with serving(config) as gateway:
        engines = gateway.inner.dispatcher.engines
        until(lambda: {id: one.state for id, one in engines.items()} == {"e0": "up", "e1": "up"}, 20)


def test_an_engine_that_an_operator_drained_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy would start on its cores while it ends its work."""
    use_fake_engines(monkeypatch)
    scale = Scale(max=1, starts_engines=True)
    config = replace(configuration(tmp_path), engines=(Engine(str(make_model(tmp_path, "a"))),), scale={"a": scale})
    with serving(config) as gateway:
        gateway.do(gateway.inner.fleet.drain("e0"))
        until(lambda: "a needs 1 engines and has 0: operators have drained engines." in caplog.text, 20)
        assert [one.state for one in gateway.inner.dispatcher.engines.values()] == ["drained"]


def test_ready_is_said_when_the_first_engine_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    use_fake_engines(monkeypatch)
    model, scale = make_model(tmp_path, "a", behaviour="hang"), Scale(max=1, min=0, starts_engines=True)
    config = replace(configuration(tmp_path), engines=(Engine(str(model)),), scale={"a": scale})
    said = ""

    def says(text: str) -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return text in said

    with serving(config) as gateway:  # which is ready at once: its model may have no engine
        until(lambda: says("starting engines"))
        behave(model, "")
        until(lambda: says("ready: a at"), 20)
        assert gateway.all_up()
        assert said.index("e0: a, ") < said.index("ready: a at")


@pytest.mark.parametrize(("starts_engines", "url"), [(False, None), (True, "http://127.0.0.1:1")])
def test_engines_that_cannot_follow(tmp_path: Path, starts_engines: bool, url: str | None) -> None:
    engine = Engine(str(make_model(tmp_path, "a")), url=url)
    config = replace(configuration(tmp_path), engines=(engine,), scale={"a": Scale(max=2, starts_engines=True)})
    with pytest.raises(ConfigError, match="starts_engines"):
        preflight(config, starts_engines=starts_engines)
