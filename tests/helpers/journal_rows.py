"""Rows of a journal for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.journal.rows import EngineRow, RequestRow, StayRow

_REQUEST = RequestRow(
    "hw-0", "default", "chat", "smollm2", "chat", 0, 1000.0, 1000.1, 1000.2, 1000.2, 1000.5, 1001.0, 20, 64,
    16, 12.0, 1.0, 0.1, None, 1.0, None, 0, 0, "e0", 0, None, None, None, "finished", 1, None,
)  # fmt: skip
ENGINE = EngineRow("e0", 1000.0, "smollm2", "headway", 8, 2048, 512, 100, 16)


def request(id: str, **fields: Any) -> RequestRow:
    """Return a chat that was served on time, apart from the given fields."""
    return replace(_REQUEST, id=id, **fields)


def stay(id: str, entered: float, first: float, ended: float, **fields: Any) -> StayRow:
    """Return a stay in e0 that computes from its first instant on."""
    return replace(StayRow(id, "e0", entered, entered, first, ended, ""), **fields)
