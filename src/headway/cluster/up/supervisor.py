"""Runs one Headway process on a node, and starts it again whenever it ends.

The supervisor is a Ray actor, which Ray restarts on another node if its node is gone; the process ends with it.
"""

from __future__ import annotations

import functools
import os
import signal
import ssl
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
from headway.cluster.up.parts import CONFIG, HOST, PORT, PYTHON, TEMPLATE, Part
from headway.engines.vllm.process.launch import Child, free_port

_PAUSE_S, _LONGEST_S = 0.5, 10.0  # pause before a restart, doubled each time
_POLL_S = 0.1
_STABLE_S = 60.0  # a process that ran this long restarts after the shortest pause
_ANYONE = ssl.create_default_context()  # the part is this node's own, by its address, which no certificate names
_ANYONE.check_hostname, _ANYONE.verify_mode = False, ssl.CERT_NONE


@dataclass(frozen=True, slots=True)
class PartState:
    """The state of a part.

    digest: of part and configuration. pid: 0 = no process. tail: last lines of the log before the last restart.
    ending: it is to stop, and is not started again.
    """

    digest: str
    host: str
    port: int
    pid: int
    ready: bool
    restarts: int
    tail: str
    ending: bool


class Supervisor:
    """Runs a part.

    config: text of the configuration file, with `HOST` for the node's address, `PYTHON` for its interpreter and
        `TEMPLATE` for a file with this text. host: that address. env: variables to add to the environment.
    """

    def __init__(self, part: Part, config: str, host: str, env: Mapping[str, str]) -> None:
        self._digest, self._host, self._port = part.digest(config), host, part.port or free_port()
        self._tls = part.tls
        folder = Path(tempfile.mkdtemp(prefix=f"headway-{part.name}-"))
        file, template = folder / "headway.toml", folder / "template.toml"
        known = {HOST: host, PYTHON: sys.executable, TEMPLATE: str(template)}
        for path, words in ((file, known), (template, {})):
            path.touch(0o600)
            path.write_text(functools.reduce(lambda text, one: text.replace(*one), words.items(), config))
        known = {CONFIG: str(file), PORT: str(self._port)}
        argv = [sys.executable, "-m", "headway.cli", *(known.get(word, word) for word in part.argv)]
        self._child = Child(argv, {**os.environ, **env}, folder / "log")
        self._restarts, self._tail, self._ends = 0, "", threading.Event()
        # The process ends with the thread that starts it (launch.py), so this thread lives as long as the supervisor.
        self._thread = threading.Thread(target=self._watch, name=part.name, daemon=True)
        self._thread.start()

    def state(self) -> PartState:
        """Return the current state of the part."""
        process = self._child.process
        pid = process.pid if process is not None and self._child.alive else 0
        ready = bool(pid) and self._answers()
        ending = self._ends.is_set()
        return PartState(self._digest, self._host, self._port, pid, ready, self._restarts, self._tail, ending)

    def stop(self, grace: float) -> None:
        """End the process, which gets `grace` seconds to finish its work."""
        self._ends.set()
        while self._thread.is_alive():  # until it ends nothing signals the process but this
            self._child.stop(grace)
            self._thread.join(_POLL_S)

    def _watch(self) -> None:
        pause = _PAUSE_S
        while True:
            began = time.monotonic()
            self._child.start()
            while self._child.alive:
                time.sleep(_POLL_S)
            self._child.signal(signal.SIGKILL)  # its remaining processes
            if self._ends.is_set():
                return
            self._restarts, self._tail = self._restarts + 1, self._child.tail()
            pause = _PAUSE_S if time.monotonic() - began > _STABLE_S else min(2 * pause, _LONGEST_S)
            if self._ends.wait(pause):
                return

    def _answers(self) -> bool:
        try:
            url = f"http{'s' * self._tls}://{netloc(self._host, self._port)}/ready"
            with urllib.request.urlopen(url, timeout=2, context=_ANYONE if self._tls else None):
                return True
        except (urllib.error.URLError, OSError):
            return False
