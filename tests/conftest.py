"""No test is timed, and none leaves a process behind, which would starve every test after it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, settings

MARK = "HEADWAY_TESTS"  # inherited by every descendant, so it also tells those whose parent has died
SECONDS = 20.0  # within which what was told to end has ended
OURS_TO_KEEP = ("resource_tracker", "forkserver")  # Python's own, one per test process

# A machine may stall for seconds in any example.
settings.register_profile("headway", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headway")


@pytest.fixture(scope="session", autouse=True)
def marked() -> None:
    os.environ[MARK] = str(os.getpid())


@pytest.fixture(scope="module", autouse=True)
def nobody_left(marked: None, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    deadline = time.monotonic() + SECONDS
    while (left := _descendants()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not left:
        return
    words = [f"{process.pid}: {name}" for process, name in left]
    for process, _ in left:
        process.kill()
    pytest.fail(f"{request.module.__name__} left processes: " + "; ".join(words))


def _descendants() -> list[tuple[psutil.Process, str]]:
    """Return the processes that this one or its descendants have started, with their command lines."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) != str(os.getpid()):
                continue
            name = " ".join(process.cmdline()) or process.name()
        except psutil.Error:  # ended meanwhile, or another user's
            continue
        if not any(word in name for word in OURS_TO_KEEP):
            found.append((process, name))
    return found
