"""`headway serve` as a user runs it: a process with a real vLLM child and a queue on disk.

Every wait is for a condition; the limits only end a wait that is hopeless, on a machine with all cores busy.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import psutil

from headway.config import Broker, Config, Engine, Server, Sqlite, Tier, write
from headway.engines.vllm.process.launch import free_port
from tests.conftest import CORE
from tests.gateway.gateway import WEB

START_S = 1200.0  # loading and compiling a model
ANSWER_S = 600.0  # one HTTP answer, or a batch of them
OPERATOR = {"authorization": "Bearer sk-operator-1"}
END_S = 300.0  # processes told to end


@dataclass
class Headway:
    """One gateway process; `start` again after `kill` is the restart after a crash."""

    folder: Path
    recipe: str = "headway"
    max_running: int = 8
    runner: Literal["generate", "pooling"] = "generate"
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def queue(self) -> Path:
        return self.folder / "queue.sqlite"

    def start(self) -> None:
        parser = "hermes" if self.runner == "generate" else None  # SmolLM2 has none of its own
        engine = Engine(
            cores=CORE, max_running=self.max_running, runner=self.runner, start_timeout_s=START_S, tool_parser=parser
        )
        config = Config(
            recipe=self.recipe,
            server=Server(port=self.port, operator_key="sk-operator-1"),
            engines=(engine,),
            classes={"strict": Tier(ttft_ms=1.0, drop=True)},
            broker=Broker(lease_seconds=5, sqlite=Sqlite(str(self.queue))),
        )
        (self.folder / "headway.toml").write_text(write(config))
        argv = [sys.executable, "-m", "headway.cli", "serve", "-c", str(self.folder / "headway.toml")]
        with (self.folder / "gateway.log").open("ab") as log:
            self.process = subprocess.Popen([*argv, "--logs", str(self.folder)], stdout=log, stderr=log)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "gateway.log").read_text()
            try:
                if WEB.get(f"{self.url}/ready", timeout=30).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise AssertionError((self.folder / "gateway.log").read_text())

    def control(self, message: dict[str, object]) -> httpx.Response:
        """Send a message to the engine's scheduler, as the operator."""
        url = f"{self.url}/headway/control/e0"
        return WEB.post(url, json=message, headers=OPERATOR, timeout=ANSWER_S)

    def family(self) -> list[psutil.Process]:
        """Return the gateway's descendants: the engine and all its processes."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> list[psutil.Process]:
        """SIGKILL the gateway; return the processes that have to end because of it."""
        family = self.family()
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        return family

    def interrupt(self) -> tuple[int, list[psutil.Process]]:
        """Send Ctrl-C; return the exit status and the processes that are left."""
        family = self.family()
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(END_S)
        return status, gone(family)


def gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait for processes to end; return those that did not."""
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
