"""The wait for a server that starts: long where a machine is busy, and never silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape

from headway.engines.vllm.process.launch import Child
from headway.errors import EngineError

START_S = 900.0  # on a machine with all cores busy; a child that ends is noticed at once
_SILENT_S = 60.0
_console = Console(stderr=True)


def attempts(
    name: str, child: Child, seconds: float = START_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Yield as often as a server should be asked whether it is ready; the caller sleeps in between.

    Says every minute that the wait goes on. EngineError when the child has ended or `seconds` are over.
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
