"""The faults of `headway bench soak`: what happens to a gateway's machine before the gateway is killed."""

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

CLOCK = "clock"  # file with the seconds by which the gateway's machine's clock is wrong
_DAY = 86400.0
# Starts a gateway whose `time.time` is off by what the file says: the machine's own clock is not ours to set.
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
    """What a fault can reach: the FAKE engine, the gateway that lives now, the folder of its queue."""

    engine: Peer
    gateway: Peer
    folder: Path
    rng: np.random.Generator


def jump(folder: Path, seconds: float) -> None:
    """Set the clock of the gateways in this folder."""
    draft = folder / f"{CLOCK}.new"
    draft.write_bytes(struct.pack("d", seconds))
    draft.replace(folder / CLOCK)  # whole at once: a gateway reads it all the time


@contextmanager
def _jumped(scene: SoakScene) -> Iterator[None]:
    """The clock is set by up to 30 days, forth or back, and stays so."""
    jump(scene.folder, float(scene.rng.uniform(-30, 30)) * _DAY)
    yield


@contextmanager
def _full_disk(scene: SoakScene) -> Iterator[None]:
    """The queue's log cannot grow."""
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
    """The engine's process is stopped (SIGSTOP)."""
    scene.engine.process.suspend()
    try:
        yield
    finally:
        scene.engine.process.resume()


@contextmanager
def _moved(scene: SoakScene) -> Iterator[None]:
    """The queue's file is gone from its place."""
    path = scene.folder / QUEUE
    aside = path.rename(path.with_suffix(".aside"))
    try:
        yield
    finally:
        aside.replace(path)


@contextmanager
def _replaced(scene: SoakScene) -> Iterator[None]:
    """An empty file is in the place of the queue's."""
    with _moved(scene):
        (scene.folder / QUEUE).touch()
        yield


@contextmanager
def _locked(scene: SoakScene) -> Iterator[None]:
    """Another process holds the lock of those that write the queue's file."""
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
