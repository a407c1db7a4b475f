"""The faults of `headway bench soak`, injected into a gateway's environment before the gateway is killed."""

from __future__ import annotations

import resource
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]

from benchmarks.real.peers import QUEUE, Peer

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
