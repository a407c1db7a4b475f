"""Part "kills" of `headway bench soak`: a gateway is killed (SIGKILL) again and again, with faults in between.

Clients send requests all the time and record the answers (`soak_clients.py`). At the end nothing is broken, and
each accepted background request must have exactly one answer.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]

from benchmarks.real.peers import HEADWAY, QUEUE, Peer, fake_engine, gateway_argv, serving, write_config
from benchmarks.real.soak_clients import Clients, Endpoint, Verdict, check
from headway.engines.vllm.process.launch import free_port
from headway.whatif.output.results import Row

CLOCK = "clock"  # file with the offset of the gateway's clock in seconds
_DAY = 86400.0
# Starts a gateway whose `time.time` has the offset in the file; the machine's clock stays as it is.
JUMPING = """
import struct, time
from pathlib import Path
was, path = time.time, Path({path!r})
time.time = lambda: was() + struct.unpack("d", path.read_bytes())[0]
from headway.cli.main import main
main()
"""


@dataclass(frozen=True, slots=True)
class SoakScene:
    """The targets of a fault: the FAKE engine, the current gateway, and the folder of its queue."""

    engine: Peer
    gateway: Peer
    folder: Path
    rng: np.random.Generator


def jump(folder: Path, seconds: float) -> None:
    """Set the clock offset of the gateways in this folder."""
    draft = folder / f"{CLOCK}.new"
    draft.write_bytes(struct.pack("d", seconds))
    draft.replace(folder / CLOCK)  # atomic: a gateway may read the file at any time


@contextmanager
def _jumped(scene: SoakScene) -> Iterator[None]:
    """Set the clock forward or back by up to 30 days, for good."""
    jump(scene.folder, float(scene.rng.uniform(-30, 30)) * _DAY)
    yield


@contextmanager
def _full_disk(scene: SoakScene) -> Iterator[None]:
    """Keep the queue's write-ahead log from growing."""
    log = scene.folder / f"{QUEUE}-wal"
    limit = scene.gateway.process.rlimit
    before = limit(resource.RLIMIT_FSIZE)
    limit(resource.RLIMIT_FSIZE, (min(log.stat().st_size if log.exists() else 0, 4096), before[1]))
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            limit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _hung_engine(scene: SoakScene) -> Iterator[None]:
    """Suspend the engine's process (SIGSTOP)."""
    scene.engine.process.suspend()
    try:
        yield
    finally:
        scene.engine.process.resume()


@contextmanager
def _moved(scene: SoakScene) -> Iterator[None]:
    """Move the queue's file away."""
    path = scene.folder / QUEUE
    aside = path.rename(path.with_suffix(".aside"))
    try:
        yield
    finally:
        aside.replace(path)


@contextmanager
def _replaced(scene: SoakScene) -> Iterator[None]:
    """Replace the queue's file with an empty one."""
    with _moved(scene):
        (scene.folder / QUEUE).touch()
        yield


@contextmanager
def _locked(scene: SoakScene) -> Iterator[None]:
    """Hold the write lock of the queue's file."""
    other = sqlite3.connect(scene.folder / QUEUE, timeout=30, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        yield
    finally:
        other.close()


@contextmanager
def _none(scene: SoakScene) -> Iterator[None]:
    yield


FAULTS: dict[str, Callable[[SoakScene], AbstractContextManager[None]]] = {
    "none": _none,
    "clock jump": _jumped,
    "full disk": _full_disk,
    "engine hangs": _hung_engine,
    "queue's file gone": _moved,
    "queue's file replaced": _replaced,
    "queue's file locked": _locked,
}


_LEASE_S = 2.0  # short, so that the next gateway takes over soon
_HEALTH_S = 0.5  # time limit of engines' health checks, short enough to notice a hang
_LIFE_S = (0.3, 1.2)  # seconds before, during and after a fault


@dataclass(frozen=True, slots=True)
class Killed:
    """The number of kills, and counts of lost and doubled answers."""

    kills: int
    verdict: Verdict

    def rows(self) -> list[Row]:
        """Return the part's figures."""
        setting, verdict = f"{self.kills} kills", self.verdict
        return [
            Row("soak.accepted", HEADWAY, setting, float(verdict.accepted), "requests"),
            Row("soak.lost", HEADWAY, setting, float(verdict.lost), "requests"),
            Row("soak.twice", HEADWAY, setting, float(verdict.twice), "requests"),
            Row("soak.recomputed", HEADWAY, setting, float(verdict.recomputed), "computations"),
        ]


def measure(folder: Path, kills: int, seed: int, tick: Callable[[int], None]) -> Killed:
    """Kill gateways on one queue, then let a last one finish the work. tick: called with the new kills."""
    rng = np.random.default_rng([seed, 12])
    engine_port, port, journal = free_port(), free_port(), folder / "journal"
    jump(folder, 0.0)
    server, engines = {"max_attempts": 1000}, {"health_timeout_s": _HEALTH_S}
    write_config(folder, engine_port, port, "slack", server, engines, lease_seconds=_LEASE_S)
    clients = Clients([Endpoint(port)], seed)
    with fake_engine(folder, engine_port, "--journal", str(journal)) as engine:
        with clients.running():
            for _ in range(kills):
                _life(clients, engine, folder, str(rng.choice(list(FAULTS))), rng)
                tick(1)
        _settle(clients, folder)
    clients.history.computed.update(filter(None, journal.read_text().split("\n")))
    return Killed(kills, check(clients.history))


@contextmanager
def _gateway(folder: Path, port: int) -> Iterator[Peer]:
    """Run a gateway that reads its clock's offset from the folder, so that jumps affect nothing else."""
    argv = gateway_argv(folder, JUMPING.format(path=str(folder / CLOCK)))
    with serving(HEADWAY, argv, port, "/ready", folder, {"TMPDIR": str(folder)}) as gateway:
        yield gateway


def _life(clients: Clients, engine: Peer, folder: Path, fault: str, rng: np.random.Generator) -> None:
    """Run a gateway for a while, inject a fault, and kill the gateway during or after the fault."""
    with _gateway(folder, clients.endpoints[0].port) as gateway:
        clients.endpoints[0].lives += 1
        time.sleep(rng.uniform(*_LIFE_S))
        within = rng.random() < 0.5
        with FAULTS[fault](SoakScene(engine, gateway, folder, rng)):
            time.sleep(rng.uniform(*_LIFE_S))
            if within:
                _kill(clients, gateway)
        if not within:
            time.sleep(rng.uniform(*_LIFE_S))
            _kill(clients, gateway)


def _kill(clients: Clients, gateway: Peer) -> None:
    clients.endpoints[0].lives += 1
    gateway.process.send_signal(signal.SIGKILL)
    gateway.process.wait(30)


def _settle(clients: Clients, folder: Path) -> None:
    """Let a gateway finish all work and poll every request; kill it and repeat with another."""
    for _ in range(2):
        with _gateway(folder, clients.endpoints[0].port) as gateway:
            asyncio.run(clients.look_at_all())
            gateway.process.send_signal(signal.SIGKILL)
            gateway.process.wait(30)
