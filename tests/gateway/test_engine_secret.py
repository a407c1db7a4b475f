"""Engines answer those that know their secret: all paths of a child, control and /v1 of an attached one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headway.config import Config, Engine
from headway.engines.vllm.process.children import Children
from headway.engines.vllm.process.launch import Child, command, environment
from headway.errors import ConfigError
from headway.gateway.preflight import preflight
from tests.gateway.conftest import Serve
from tests.gateway.gateway import WEB, Fake, until

SECRET = "sk-engine-secret-1"


@contextmanager
def guarded(folder: Path, *keys: str, **env: str) -> Iterator[Fake]:
    engine = Fake(folder)
    argv = [sys.executable, "-m", "tests.gateway.guarded_engine", str(engine.port), *keys]
    engine.child = Child(argv, dict(os.environ) | env, folder / "guarded.log")
    engine.child.start()
    try:
        until(engine.answers, 30)
        yield engine
    finally:
        engine.stop()


def status(engine: Fake, path: str, *given: str) -> int:
    headers = [(b"authorization", given[0].encode("latin-1"))] if given else []
    return WEB.post(engine.url + path, json={"op": "state"}, headers=headers).status_code


def test_a_child_answers_the_gateway_only(serve: Serve, tmp_path: Path) -> None:
    with guarded(tmp_path, HEADWAY_ENGINE_SECRET=SECRET) as engine:
        for path in ("/v1/chat/completions", "/headway/control", "/metrics", "/tokenize"):
            for given in ((), (f"Bearer {SECRET}x",), ("Bearer",), (f"Basic {SECRET}",), ("Bearer \xe9",)):
                assert status(engine, path, *given) == 401, (path, given)
        assert status(engine, "/headway/control", f"Bearer {SECRET}") == 200
        with serve(engine.url, engine={"api_key": SECRET}) as gateway:
            assert gateway.post(gateway.chat()).status_code == 200
            assert gateway.control({"op": "state"}).status_code == 200
            assert "vllm:" in gateway.get("/metrics").text


def test_control_of_an_attached_engine_wants_vllm_s_own_key(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", SECRET)
    with guarded(tmp_path, SECRET) as engine:
        assert status(engine, "/headway/control") == 401
        with serve(engine.url, engine={"api_key": "env:THEIR_KEY"}) as gateway:
            assert gateway.control({"op": "state"}).status_code == 200


def test_without_any_key_it_answers_as_before(tmp_path: Path) -> None:
    with guarded(tmp_path) as engine:
        assert status(engine, "/headway/control") == 200


def test_a_child_s_secret_is_random_and_only_in_its_environment(tmp_path: Path) -> None:
    one, other = (Children(f"e{i}", Engine(), "headway", tmp_path, "127.0.0.1") for i in range(2))
    assert len(one.secret) >= 32
    assert one.secret != other.secret
    given = environment(Engine(), one.secret)
    assert given["HEADWAY_ENGINE_SECRET"] == given["VLLM_API_KEY"] == one.secret
    assert one.secret not in " ".join(command(Engine(), 1, None))
    assert "HEADWAY_ENGINE_SECRET" not in environment(Engine())


def test_a_key_on_the_command_line_is_refused() -> None:
    config = Config(engines=(Engine(url=None, args=("--api-key", SECRET)),))
    with pytest.raises(ConfigError, match=r"engines\.0\.args has --api-key") as caught:
        preflight(config)
    assert SECRET not in str(caught.value)
    engine = Engine(url="http://127.0.0.1:1", api_key="env:NOT_SET_ANYWHERE")
    with pytest.raises(ConfigError, match=r"engines\.0\.api_key .* NOT_SET_ANYWHERE"):
        preflight(replace(config, engines=(engine,)))
