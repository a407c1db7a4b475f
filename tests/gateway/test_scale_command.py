"""A command that is run with the number of engines that a model needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from headway.config import Scale
from headway.gateway import tasks
from headway.gateway.control.autoscale import commands
from tests.gateway.conftest import Serve
from tests.gateway.gateway import until

SCRIPT = """#!/bin/sh
cd "$(dirname "$0")"
echo "begin $1 $2" >>log
if [ -e slow ]; then sleep 0.5; fi
if [ -e wrong ]; then echo "no such fleet"; rm wrong; exit 3; fi
if [ -e stuck ]; then echo $$ >pid; rm stuck; sleep 600; fi
echo "end $1 $2" >>log
"""


@asynccontextmanager
async def following(folder: Path, wanted: dict[str, int], *words: str) -> AsyncIterator[None]:
    """Run the commands of two models, by default the script, until the block ends."""
    script = folder / "scale"
    script.write_text(SCRIPT)
    script.chmod(0o700)
    scale = Scale(max=9, command=words or (str(script), "{model}", "{wanted}"))
    async with tasks.running(*commands({"a": scale, "b": scale, "c": Scale(max=2)}, lambda: wanted)):
        yield


async def lines(folder: Path, count: int) -> list[str]:
    """Wait until the script has written so many lines, and return all."""
    log = folder / "log"
    found = lambda: log.read_text().splitlines() if log.exists() else []  # noqa: E731
    await asyncio.to_thread(until, lambda: len(found()) >= count, 15)
    return found()


def test_it_runs_once_for_each_number_and_never_twice_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        wanted = {"a": 2, "c": 1}
        (tmp_path / "slow").touch()
        async with following(tmp_path, wanted):
            await lines(tmp_path, 1)
            wanted["a"] = 3  # while the first one runs
            assert await lines(tmp_path, 4) == ["begin a 2", "end a 2", "begin a 3", "end a 3"]
            wanted |= {"a": 3, "b": 0}
            assert (await lines(tmp_path, 6))[4:] == ["begin b 0", "end b 0"]

    asyncio.run(work())


def test_one_that_fails_is_run_again_with_the_newest_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        wanted = {"a": 2}
        (tmp_path / "wrong").touch()
        async with following(tmp_path, wanted):
            await lines(tmp_path, 1)
            wanted["a"] = 4
            assert await lines(tmp_path, 3) == ["begin a 2", "begin a 4", "end a 4"]

    asyncio.run(work())
    failed = next(record.getMessage() for record in caplog.records if "status 3" in record.getMessage())
    assert failed.startswith("a needs 2 engines: ")
    assert "(no such fleet). It is run again in 2 s." in failed


def test_one_that_cannot_be_run_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with following(tmp_path, {"a": 2}, str(tmp_path / "none")):
            await asyncio.to_thread(until, lambda: "cannot be run: No such file or directory." in caplog.text)

    asyncio.run(work())


def test_one_that_runs_ends_with_headway(tmp_path: Path) -> None:
    async def work() -> None:
        (tmp_path / "stuck").touch()
        async with following(tmp_path, {"a": 2}):
            await asyncio.to_thread(until, lambda: not (tmp_path / "stuck").exists())

    asyncio.run(work())
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_gateway_runs_it(serve: Serve, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    command = ("sh", "-c", f"echo $0 >>{seen}", "{wanted}")
    with serve() as gateway:
        model = gateway.chat()["model"]
    with serve(scale={model: Scale(max=3, min=2, command=command)}):
        until(lambda: seen.exists() and seen.read_text() == "2\n", 20)
