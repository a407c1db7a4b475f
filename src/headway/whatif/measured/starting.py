"""Waits for a server to start: long enough for a busy machine, and with signs of life."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape

from headway.engines.vllm.process.launch import Child
from headway.errors import EngineError

START_S = 900.0  # enough with all cores busy; the end of the child is noticed at once
_SILENT_S = 60.0
_console = Console(stderr=True)


def attempts(
    name: str, child: Child, seconds: float = START_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Yield for each check whether a server is ready; the caller sleeps in between.

    Prints a line every minute. EngineError when the child has ended or after `seconds`.
    """
    began = said = clock()
    while (now := clock()) < began + seconds:
        if not child.alive:
            raise child.died(name)
        if now > said + _SILENT_S:
            said = now
            _console.print(f"[dim]{name} is not ready after {now - began:.0f} s; its log: {escape(str(child.log))}[/]")
        yield
    raise EngineError(f"{name} was not ready after {seconds:g} s.\n{child.tail()}\n", f"See {child.log}.")
