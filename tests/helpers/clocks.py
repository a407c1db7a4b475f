"""Clocks that are set, as far as this process sees them."""

from __future__ import annotations

import time

import pytest

from headway import clock


def set_by(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the machine's clock."""
    was = time.time
    monkeypatch.setattr(time, "time", lambda: was() + seconds)


def shift_now(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Headway's clock be this far ahead."""
    was = clock.now
    monkeypatch.setattr(clock, "now", lambda: was() + seconds)
