"""Ends an engine whose Headway was killed, should SIGTERM not suffice.

The kernel sends an engine SIGTERM when the process that started it dies (`process/launch.py`). vLLM's API
server then waits for its open requests, and one that asks an engine core which has ended is never answered.
"""

from __future__ import annotations

import os
import signal
import time
from threading import Thread

PARENT = "HEADWAY_PARENT"  # the process that has started this engine
GRACE_S = 10.0  # between the end of that process and SIGKILL
_LOOK_S = 1.0


def end_with_parent(grace_s: float = GRACE_S) -> None:
    """End this process and its group `grace_s` seconds after the process that has started it, at the latest.

    It does nothing without HEADWAY_PARENT, or in a process that leads no group: others started that.
    """
    parent = os.environ.get(PARENT)
    if parent is not None and os.getpgrp() == os.getpid():
        Thread(target=_watch, args=(int(parent), grace_s), name="headway-orphan", daemon=True).start()


def _watch(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    time.sleep(grace_s)
    os.killpg(os.getpgrp(), signal.SIGKILL)
