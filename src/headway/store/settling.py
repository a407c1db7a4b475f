"""Delivers the outcomes of calls from a broker's thread to the event loops of their callers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


def deliver(settled: Iterable[tuple[asyncio.Future[Any], Any]]) -> None:
    """Resolve futures of any event loops, each with a value or an exception, waking each loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for future, outcome in settled:
        loops.setdefault(future.get_loop(), []).append((future, outcome))
    for loop, part in loops.items():
        with suppress(RuntimeError):  # the loop is closed, and its callers are gone
            loop.call_soon_threadsafe(_settle, part)


def _settle(settled: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in settled:
        if future.done():  # cancelled while it waited
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
