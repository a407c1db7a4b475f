"""Parses times on the command line: durations such as 90m, and dates."""

from __future__ import annotations

import re
import time
from datetime import datetime

from headway.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")


def seconds(text: str) -> float:
    """Parse a duration such as "90m" (s, m, h, d, w) into seconds. ConfigError for anything else."""
    match = _LENGTH.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise ConfigError(f"{text!r} is not a duration.", "Write it like 90m, 1h or 7d.")
    return float(match[1]) * _UNITS[match[2]]


def instant(text: str, now: float | None = None) -> float:
    """Parse "24h" (24 hours ago) or "2026-11-23 10:00" (local time) into seconds since the epoch.

    now: seconds since the epoch, None = the current time. ConfigError for anything else.
    """
    given = text.strip()
    if re.fullmatch(_LENGTH, given):
        return (time.time() if now is None else now) - seconds(given)
    try:
        return datetime.fromisoformat(given).timestamp()
    except ValueError:
        raise ConfigError(
            f"{text!r} is not a time.", "Write it like 90m, 24h or 7d, or like 2026-11-23 10:00."
        ) from None
