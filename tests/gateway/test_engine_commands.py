"""Engines that are processes of this machine, the `headway engine` commands, and a configuration file read again."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.config import Engine, Tier, parse, write
from headway.errors import ConfigError, HeadwayError
from headway.gateway.apis.state import AppState
from headway.gateway.reload import Reload, paired
from tests.gateway.conftest import Serve
from tests.gateway.gateway import DEAD, Fake, Gateway, configuration, serving, until
from tests.gateway.swapping import make_model, use_fake_engines
from tests.gateway.test_engines import add, load, order, states
from tests.gateway.test_request_ends import fakes

# ---- processes of this machine


def test_processes_start_and_end_with_their_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_engines(monkeypatch)
    one, other = (str(make_model(tmp_path, name)) for name in "ab")
    config = configuration(tmp_path, classes={"default": Tier()})
    with serving(replace(config, engines=(Engine(one, max_running=4),))) as gateway:
        engines = gateway.inner.dispatcher.engines
        first = engines["e0"].child.process  # type: ignore[attr-defined]
        assert add(gateway, model=other, id="more") == "more"
        assert gateway.post(gateway.chat(model="b")).json()["model"] == "b"
        assert [one["id"] for one in gateway.get("/v1/models").json()["data"]] == ["a", "b"]
        second = engines["more"].child.process  # type: ignore[attr-defined]
        order(gateway, "POST", "/roll", json={"set": {"max_running": 6}})
        until(lambda: [one.max_running for one in gateway.controller.cluster.instances.values()] == [6, 6])
        assert first.poll() is not None
        assert second.poll() is not None
        third = engines["more"].child.process  # type: ignore[attr-defined]
        order(gateway, "DELETE", "/more")
        until(lambda: states(gateway) == {"e0": "up"})
        assert third.poll() is not None
        assert gateway.post(gateway.chat(model="b")).status_code == 404
        assert gateway.post(gateway.chat(model="a")).json()["model"] == "a"
        order(gateway, "POST", "/roll", json={"set": {"model": other}})
        until(lambda: [one["id"] for one in gateway.get("/v1/models").json()["data"]] == ["b"])
        until(lambda: states(gateway) == {"e0": "up"})
        assert gateway.post(gateway.chat(model="b")).json()["model"] == "b"
        assert gateway.post(gateway.chat(model="a")).status_code == 404
        order(gateway, "POST", json={"model": str(make_model(tmp_path, "c", behaviour="refuse"))})
        until(lambda: states(gateway)["e1"] == "failed", 20)
        assert "exit code 2" in order(gateway, "GET")[1]["data"][1]["error"]
        order(gateway, "DELETE", "/e1")
        until(lambda: states(gateway) == {"e0": "up"})


def test_replaced_engines_have_the_memory_or_their_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_fake_engines(monkeypatch)
    model = str(make_model(tmp_path, "a"))
    config = replace(configuration(tmp_path), engines=(Engine(model), Engine(model)))
    with serving(config) as gateway:
        until(lambda: states(gateway) == {"e0": "up", "e1": "up"}, 20)
        assert order(gateway, "POST", "/roll", json={"set": {"kv_gib": 100_000}})[0] == 202
        until(lambda: "keeps its settings: There is not enough memory for e0 (memory: " in caplog.text, 20)
        until(lambda: states(gateway) == {"e0": "up", "e1": "up"}, 20)
        assert all(one.config.kv_gib < 100_000 for one in gateway.inner.dispatcher.engines.values())
        order(gateway, "POST", "/e1/drain")
        until(lambda: states(gateway)["e1"] == "drained", 20)
        status, body = order(gateway, "POST", "/roll", json={"engines": ["e1"], "set": {"kv_gib": 100_000}})
        assert (status, "not enough memory for e1" in body["error"]["message"]) == (400, True)
        assert order(gateway, "POST", "/roll", json={"engines": ["e1"]})[0] == 202
        until(lambda: states(gateway) == {"e0": "up", "e1": "up"}, 20)


# ---- the command line


def test_the_list_says_what_engines_wait_for(serve: Serve, fake: Fake, others: list[Fake], tmp_path: Path) -> None:
    def waits(gateway: Gateway) -> dict[str, str]:
        return {one["id"]: one["waits_for"] for one in order(gateway, "GET")[1]["data"] if one["waits_for"]}

    with serve(fake.url, others[0].url) as gateway, ThreadPoolExecutor(1) as pool:
        assert waits(gateway) == {}
        assert order(gateway, "POST", json={"url": DEAD})[0] == 202
        order(gateway, "POST", "/roll", json={"engines": ["e0", "e1"]})
        assert waits(gateway) == {"e0": "e2", "e1": "e2"}
        order(gateway, "DELETE", "/e2?now=true")
        until(lambda: waits(gateway) == {} and states(gateway) == {"e0": "up", "e1": "up"}, 20)
        order(gateway, "POST", "/e1/drain")
        held = pool.submit(gateway.post, gateway.chat(**fakes(hold="waits")))
        until(lambda: fake.last()["open"] == 1)
        order(gateway, "POST", "/e0/drain?force=true")
        until(lambda: waits(gateway) == {"e0": "the requests inside it (1, each at most 21600 s)"})
        file = tmp_path / "headway.toml"
        file.write_text(write(gateway.config))
        listed = CliRunner().invoke(app, ["engine", "list", "-c", str(file)], env={"COLUMNS": "40"})
        assert "waits for the requests inside it (1, each at most 21600 s)" in listed.stdout
        fake.release("waits")
        assert held.result().status_code == 200


def test_the_command_line(serve: Serve, fake: Fake, others: list[Fake], tmp_path: Path) -> None:
    file = tmp_path / "headway.toml"
    with serve(fake.url) as gateway:
        file.write_text(write(gateway.config))

        def run(*words: str) -> str:
            result = CliRunner().invoke(app, ["engine", *words, "-c", str(file)], env={"COLUMNS": "200"})
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            return f"{result.exit_code}: {' '.join(result.stdout.split())}"

        assert "e0 │ up" in run("list")
        assert "e1 │ up" in run("add", "--set", f"url={others[0].url}", "--set", "max_running=4", "--wait")
        assert "e1 │ drained " in run("drain", "e1", "--wait")
        rolled = run("roll", "e1", "--set", "max_running=3", "--wait")
        assert "e1 │ up" in rolled
        assert gateway.controller.cluster.instances["e1"].max_running == 3
        assert "e1" not in run("remove", "e1", "--wait")
        assert json.loads(run("list", "--json").partition(": ")[2])[0]["id"] == "e0"
        failed = run("add", "--set", f"url={DEAD}", "--set", "start_timeout_s=0.2", "--wait")
        assert failed.startswith("1: ")
        assert "did not answer" in failed
        with pytest.raises(HeadwayError, match="There is no engine 'e9'"):
            run("drain", "e9")
        with pytest.raises(ConfigError, match="--set url has no value"):
            run("add", "--set", "url")
        with pytest.raises(HeadwayError, match="does not answer"):
            run("list", "--server", DEAD)
        file.write_text("")
        with pytest.raises(ConfigError, match="operator_key"):
            run("list")


# ---- the file


def test_a_file_that_is_read_again(
    serve: Serve, fake: Fake, others: list[Fake], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "headway.toml"
    first = [{"url": fake.url}, {"url": others[0].url, "id": "second"}, {"url": others[1].url}]

    def written(engines: list[dict[str, Any]]) -> None:
        file.write_text(write(parse({"engines": engines})))

    written(first)
    with serve(fake.url, others[0].url, others[1].url) as gateway:
        engines = gateway.inner.dispatcher.engines

        async def reload() -> Reload:
            return Reload(file, AppState(gateway.inner))

        again = gateway.do(reload())
        again._engines = dict(zip(engines, again._engines.values(), strict=True))  # as if it was started with it
        with load(gateway):
            before = dict(engines)
            written([{"url": others[1].url, "max_running": 7}, {"url": fake.url}, {"url": others[0].url, "id": "new"}])
            gateway.do(again.run())
            until(lambda: states(gateway) == {"e0": "up", "e2": "up", "new": "up"})
            until(lambda: gateway.controller.cluster.instances["e2"].max_running == 7)
        assert engines["e0"] is before["e0"]
        assert engines["e2"] is not before["e2"]
        written([{"url": fake.url, "max_model_len": 16}, {"url": fake.url, "max_model_len": 32}])
        gateway.do(again.run())
        assert states(gateway) == {"e0": "up", "e2": "up", "new": "up"}, "a file with errors changes nothing"
        written([{"url": others[1].url, "max_running": 8}, {"url": DEAD}])
        gateway.do(again.run())
        assert f"The engine e0 works, and nothing answers at its new url {DEAD}" in caplog.text
        assert states(gateway) == {"e0": "up", "e2": "up", "new": "up"}
        written([{"url": others[1].url, "max_running": 8}, {"url": others[0].url}])
        gateway.do(again.run())
        until(lambda: states(gateway) == {"e0": "up", "e2": "up"})
        until(lambda: engines["e0"].config.url == others[0].url and engines["e2"].config.max_running == 8)


def test_an_engine_may_be_removed_while_a_file_s_new_urls_are_asked(
    serve: Serve, fake: Fake, others: list[Fake], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "headway.toml"

    def written(*urls: str) -> None:
        file.write_text(write(parse({"engines": [{"url": url, "max_running": 32} for url in urls]})))

    async def reload() -> Reload:
        return Reload(file, AppState(gateway.inner))

    with serve(fake.url, others[0].url) as gateway, ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent.settimeout(10)
        until(gateway.all_up)
        written(fake.url, others[0].url)
        again = gateway.do(reload())
        urls = [f"http://127.0.0.1:{silent.getsockname()[1]}/{i}" for i in range(2)]
        written(*urls)
        reloaded = asyncio.run_coroutine_threadsafe(again.run(), gateway.loop)
        for _ in urls:  # both are asked at once
            stack.enter_context(silent.accept()[0])
        order(gateway, "DELETE", "/e1")
        until(lambda: states(gateway) == {"e0": "up"})
        reloaded.result(15)
        assert f"The engine e0 works, and nothing answers at its new url {urls[0]}" in caplog.text


def test_what_orders_have_done_already_is_not_forgotten(
    serve: Serve, fake: Fake, others: list[Fake], tmp_path: Path
) -> None:
    """A file that says what operators have ordered before changes nothing, but what it says next does."""
    file = tmp_path / "headway.toml"
    one, two = {"url": fake.url, "max_running": 32}, {"url": others[0].url, "max_running": 32}

    def reread(*engines: dict[str, Any]) -> None:
        file.write_text(write(parse({"engines": engines})))
        gateway.do(again.run())

    with serve(fake.url, others[0].url) as gateway:
        limits = lambda: {id: one.max_running for id, one in gateway.controller.cluster.instances.items()}  # noqa: E731

        async def reload() -> Reload:
            return Reload(file, AppState(gateway.inner))

        file.write_text(write(parse({"engines": [one, two]})))
        again = gateway.do(reload())
        until(gateway.all_up)
        order(gateway, "DELETE", "/e1")
        order(gateway, "POST", "/roll", json={"engines": ["e0"], "set": {"max_running": 5}})
        until(lambda: limits() == {"e0": 5} == {id: 5 for id, state in states(gateway).items() if state == "up"})
        reread(one | {"max_running": 5})
        assert limits() == {"e0": 5}
        reread(one, two)
        until(lambda: limits() == {"e0": 32, "e2": 32})


def engine(model: str, **more: Any) -> Engine:
    return Engine(model, **more)


@pytest.mark.parametrize(
    ("new", "ids"),
    [
        ([engine("a"), engine("b"), engine("c", id="x")], ["e0", "e1", "x"]),
        ([engine("b"), engine("a")], ["e1", "e0"]),
        ([engine("b", max_running=2), engine("a")], ["e1", "e0"]),
        ([engine("d"), engine("b")], ["e0", "e1"]),
        ([engine("a"), engine("c")], ["e0", "e1"]),
        ([engine("a", id="x"), engine("a"), engine("b"), engine("b")], ["x", "e0", "e1", None]),
        ([engine("c", id="y"), engine("b")], [None, "e1"]),
    ],
)
def test_tables_are_known_again(new: list[Engine], ids: list[str | None]) -> None:
    old = {"e0": engine("a"), "e1": engine("b"), "x": engine("c", id="x")}
    assert paired(old, new) == ids


def test_gpus_that_were_chosen_do_not_count_as_a_change() -> None:
    old = {"e0": engine("a", gpus=1, cards="0"), "e1": engine("b", gpus=1, cards="1")}
    assert paired(old, [engine("b", gpus=1, cards="0")]) == ["e1"]
