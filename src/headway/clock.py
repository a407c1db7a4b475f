"""The one clock of gateways and engines: instants that go on evenly when the machine's clock is set.

Promises, leases and the time for which answers are kept are all differences of instants. By the machine's own
clock they would be off by days when it is corrected by days.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from headway.errors import ConfigError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def now() -> float:
    """Return the seconds since the epoch, by the machine's clock as it was when this boot's origin was noted.

    All processes of a user that were started since the machine booted, and have the same directory for
    temporary files, agree on it, so that gateways can share leases and engines know how long a request
    waited. Elsewhere (another machine, a container) clocks must agree as far as promises should.
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
    own, booted = time.time() - time.monotonic(), boot()
    if booted is None:  # the monotonic clocks of two processes may have nothing in common
        return own
    path = Path(tempfile.gettempdir()) / f"headway-{os.getuid()}-{booted}.clock"
    with suppress(FileExistsError):
        _note(path, own)
    return _noted(path)


def _note(path: Path, origin: float) -> None:
    """Make the file, whole at once. FileExistsError when another process was first."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(repr(origin))
    try:
        os.link(draft, path)
    finally:
        draft.unlink()


def _noted(path: Path) -> float:
    """Return the origin in a file of this user's. ConfigError for any other."""
    fix = "Delete it, and start Headway's gateways and engines anew."
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise ConfigError(f"{path} is not this user's own file.", fix)
    try:
        origin = float(path.read_text())
    except ValueError:
        origin = math.nan
    if not math.isfinite(origin):
        raise ConfigError(f"{path} does not hold the origin of Headway's clock.", fix)
    return origin
