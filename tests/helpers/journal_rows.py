"""Rows of a journal for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.store.journal.reader import JournalReader
from headway.store.journal.rows import EngineRow, RequestRow, StayRow, packed
from headway.store.journal.writer import MIB, Writer

_REQUEST = RequestRow(
    "hw-0",
    "default",
    "chat",
    "smollm2",
    "chat",
    0,
    1000.0,
    1000.1,
    1000.2,
    1000.2,
    1000.5,
    1001.0,
    20,
    64,
    16,
    12.0,
    1.0,
    0.1,
    None,
    1.0,
    None,
    0,
    0,
    "e0",
    0,
    0,
    None,
    None,
    None,
    "finished",
    1,
    None,
)
ENGINE = EngineRow("e0", 1000.0, "smollm2", "headway", 8, 2048, 512, 100, 16, None)


def request(id: str, **fields: Any) -> RequestRow:
    """Return a chat that was served on time, apart from the given fields."""
    return replace(_REQUEST, id=id, **fields)


def stay(id: str, entered: float, first: float, ended: float, **fields: Any) -> StayRow:
    """Return a stay in e0 that computes from its first instant on."""
    return replace(StayRow(id, "e0", entered, entered, first, ended, ""), **fields)


def written(journal: JournalReader, folder: Path) -> Path:
    """Write a journal to a folder."""
    writer = Writer(folder, 64 * MIB, 10 * 365 * 86400.0, most=16 * MIB)
    writer.write([*journal.engines.values(), *journal.requests, *journal.refusals, *journal.stays])
    for name, table in journal.iterations.items():
        writer.write([packed(name, table[i : i + 4096].tolist()) for i in range(0, len(table), 4096)])
    writer.close()
    return folder
