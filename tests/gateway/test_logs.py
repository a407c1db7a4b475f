"""The log on stderr, the access log, and SIGHUP, as a process has them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config import Broker, Config, Engine, Key, Log, Server, Sqlite, Tier, write
from headway.engines.vllm.process.launch import free_port
from tests.gateway.gateway import CHAT, SAY, WEB, Fake, until
from tests.gateway.test_cli import headway

BODY = {"model": "smollm2", "messages": SAY, "max_tokens": 4}


class Process:
    """`headway serve` with a file that may change."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.port = folder, free_port()
        self.file, self.errors = folder / "headway.toml", folder / "stderr"
        self.config = Config(
            server=Server(port=self.port),
            engines=(Engine(url=url, max_running=8),),
            broker=Broker(sqlite=Sqlite(str(folder / "queue.sqlite"), "normal")),
            log=Log(format="json", access=True),
            keys=(Key("sk-first-key", "alpha"), Key("sk-other-key", "beta")),
        )
        self.write(self.config)

    def write(self, config: Config) -> None:
        self.file.write_text(write(config))

    def ask(self, key: str, **body: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return WEB.post(f"http://127.0.0.1:{self.port}{CHAT}", json=BODY | body, headers=headers).status_code

    def lines(self) -> list[dict[str, Any]]:
        """Return what it has logged; nothing but JSON."""
        return [json.loads(line) for line in self.errors.read_text().splitlines()]

    def ready(self) -> bool:
        try:
            return WEB.get(f"http://127.0.0.1:{self.port}/ready").status_code == 200
        except Exception:  # it does not listen yet
            return False


@pytest.fixture
def process(tmp_path: Path, fake: Fake) -> Iterator[Process]:
    one = Process(tmp_path, fake.url)
    with one.errors.open("w") as errors:
        started = headway("serve", "-c", str(one.file), folder=tmp_path, stderr=errors)
        try:
            until(one.ready, 60)
            one.hang_up = lambda: started.send_signal(signal.SIGHUP)  # type: ignore[attr-defined]
            yield one
        finally:
            started.send_signal(signal.SIGINT)
            assert started.wait(30) == 0
            if started.stdout is not None:
                started.stdout.close()


def test_a_line_for_every_request_and_keys_that_come_and_go(process: Any) -> None:
    assert process.ask("sk-first-key") == 200
    assert process.ask("sk-wrong-key") == 401

    def seen() -> list[dict[str, Any]]:
        return [line for line in process.lines() if line["logger"] == "headway.access" and line["path"] == CHAT]

    until(lambda: len(seen()) == 2)
    until(lambda: any(f"http://127.0.0.1:{process.port}/v1" in str(line) for line in process.lines()))
    good, bad = sorted(seen(), key=lambda line: line["status"])  # by their ends, in either order
    assert (good["status"], good["tenant"], good["class"], good["method"]) == (200, "alpha", "default", "POST")
    assert good["id"].startswith("hw-")
    assert good["bytes"] > 0
    assert (bad["status"], bad["tenant"]) == (401, "")
    assert "sk-" not in process.errors.read_text()
    assert {line["path"] for line in process.lines() if line["logger"] == "headway.access"} == {CHAT}, "no probes"

    keys = (Key("sk-newer-key", "gamma"), Key("sk-other-key", "beta", classes=("default", "gold")))
    classes = {"default": Tier(), "gold": Tier(ttft_ms=60_000.0)}
    process.write(replace(process.config, keys=keys, classes=classes))
    process.hang_up()
    until(lambda: process.ask("sk-newer-key") == 200)
    assert process.ask("sk-first-key") == 401
    assert process.ask("sk-other-key", service_tier="gold") == 200

    process.file.write_text("[server\n")
    process.hang_up()
    until(lambda: any("is not reloaded" in line.get("message", "") for line in process.lines()))
    assert process.ask("sk-newer-key") == 200, "a file that cannot be read changes nothing"

    process.write(replace(process.config, keys=keys[:1], classes=classes))
    process.hang_up()
    until(lambda: any("second tenant" in line.get("message", "") for line in process.lines()))
    assert process.ask("sk-other-key") == 200, "tenants are kept account of from the start on"

    changed = replace(process.config.server, max_queued=7)
    process.write(replace(process.config, keys=keys, classes=classes, server=changed))
    process.hang_up()
    until(lambda: any("server take effect after a restart" in line.get("message", "") for line in process.lines()))


CRASH = """
import logging, threading, warnings
from headway.config import Config, Log
from headway.gateway.watch.logs import configure
from headway.gateway.main import GatewayServer

class Ends:
    def __del__(self):
        raise OSError("at its end")

configure(Log(format="json"))
GatewayServer(Config())
logging.getLogger("uvicorn.error").warning("of uvicorn")
warnings.warn("some day")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
Ends()
raise LookupError("two\\nlines")
"""


def test_warnings_and_what_nothing_catches_are_json() -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    for line, said in zip(
        lines, ("of uvicorn", "some day", "division by zero", "at its end", "two\nlines"), strict=True
    ):
        assert said in line["message"]
    assert ["Traceback" in line.get("trace", "") for line in lines] == [False, False, True, True, True]
    assert (ended.returncode, ended.stdout) == (1, "")


def test_what_stops_a_start_is_json(tmp_path: Path) -> None:
    one = Process(tmp_path, "http://nowhere:99999")
    started = headway("serve", "-c", str(one.file), folder=tmp_path)
    out, errors = started.communicate(timeout=60)
    (line,) = map(json.loads, errors.splitlines())
    assert (started.returncode, out, line["level"]) == (2, "", "error")
    assert "http://nowhere:99999" in line["message"]
