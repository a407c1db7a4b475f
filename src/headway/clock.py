"""The one clock of gateways and engines: instants that go on evenly when the machine's clock is set.

Promises, leases and the time for which answers are kept are all differences of instants. By the machine's own
clock they would be off by days when it is corrected by days.
"""

from __future__ import annotations

import math
import os
import time
from functools import cache
from pathlib import Path

from headway import private
from headway.errors import ConfigError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def now() -> float:
    """Return the seconds since the epoch, by the machine's clock as it was when this boot's origin was noted.

    All processes of a user that were started since the machine booted, and have the same state directory,
    agree on it, so that gateways can share leases and engines know how long a request waited. Elsewhere
    (another machine, a container) clocks must agree as far as promises should.
    """
    return _origin() + time.monotonic()


def boot() -> str | None:
    """Return what this boot of the machine is called, None where that is not known (not on Linux)."""
    return _BOOT.read_text().strip() if _BOOT.exists() else None


def shown(instant: float) -> float:
    """Return an instant by the machine's clock as it is set now: for people, not to calculate with."""
    return instant + round(time.time() - now())


@cache
def _origin() -> float:
    """Return the instant at which the monotonic clock was zero. The first process of a boot notes it."""
    own, path = time.time() - time.monotonic(), origin_file()
    if path is None:  # the monotonic clocks of two processes may have nothing in common
        return own
    import fcntl  # not on Windows, where no engine runs but the simulator may

    with os.fdopen(private.opened(path, os.O_RDWR), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        noted = file.read()
        if not noted:
            file.write(repr(own))
            return own
    try:
        origin = float(noted)
    except ValueError:
        origin = math.nan
    if not math.isfinite(origin):
        fix = "Delete it, and start Headway's gateways and engines anew."
        raise ConfigError(f"{path} does not hold the origin of Headway's clock.", fix)
    return origin


def origin_file() -> Path | None:
    """Return where this boot's origin is noted, None = nowhere."""
    booted = boot()
    return None if booted is None else private.shared_dir() / f"{booted}.clock"
