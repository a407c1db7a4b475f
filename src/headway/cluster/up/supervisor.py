"""Runs one Headway process on a node, and starts it again whenever it ends.

Ray keeps the supervisor alive (as an actor), on another node when its own is gone; the process ends with it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.addresses import netloc
from headway.cluster.up.parts import CONFIG, HOST, PORT, Part
from headway.engines.vllm.process.launch import Child, free_port

_PAUSE_S, _LONGEST_S = 0.5, 10.0  # before a process that has ended is started again: doubled each time
_LOOK_S = 0.1
_GOOD_S = 60.0  # one that has run for so long begins with the shortest pause again


@dataclass(frozen=True, slots=True)
class PartState:
    """How a part is. digest: of part and configuration. tail: the last lines of a process that has ended."""

    digest: str
    host: str
    port: int
    pid: int
    ready: bool
    restarts: int
    tail: str


class Supervisor:
    """Runs a part.

    config: the file, with `HOST` for the node's address, which is `host`. env: more of the environment.
    """

    def __init__(self, part: Part, config: str, host: str, env: Mapping[str, str]) -> None:
        self._digest, self._host, self._port = part.digest(config), host, part.port or free_port()
        folder = Path(tempfile.mkdtemp(prefix=f"headway-{part.name}-"))
        file = folder / "headway.toml"
        file.touch(0o600)
        file.write_text(config.replace(HOST, host))
        known = {CONFIG: str(file), PORT: str(self._port)}
        argv = [sys.executable, "-m", "headway.cli", *(known.get(word, word) for word in part.argv)]
        self._child = Child(argv, {**os.environ, **env}, folder / "log")
        self._restarts, self._tail, self._ends = 0, "", threading.Event()
        # The process ends with the thread that starts it (launch.py), so one thread lives as long as this.
        self._thread = threading.Thread(target=self._watch, name=part.name, daemon=True)
        self._thread.start()

    def state(self) -> PartState:
        """Return how the part is now."""
        process = self._child.process
        pid = process.pid if process is not None and self._child.alive else 0
        ready = bool(pid) and self._answers()
        return PartState(self._digest, self._host, self._port, pid, ready, self._restarts, self._tail)

    def stop(self, grace: float) -> None:
        """End the process, which gets `grace` seconds to finish its work."""
        self._ends.set()
        self._thread.join()  # from then on nothing starts it again
        self._child.stop(grace)

    def _watch(self) -> None:
        pause = _PAUSE_S
        while True:
            began = time.monotonic()
            self._child.start()
            while self._child.alive:
                if self._ends.wait(_LOOK_S):
                    return
            self._child.signal(signal.SIGKILL)  # what it has left
            self._restarts, self._tail = self._restarts + 1, self._child.tail()
            pause = _PAUSE_S if time.monotonic() - began > _GOOD_S else min(2 * pause, _LONGEST_S)
            if self._ends.wait(pause):
                return

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{netloc(self._host, self._port)}/ready", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False
