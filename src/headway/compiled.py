"""How are hot loops compiled? By numba, once per machine and version of the source.

What is compiled is plain Python over numpy columns, so that it can also be read, and stepped through with
NUMBA_DISABLE_JIT=1. Machine code contains that of the functions it calls, and numba's cache looks only at a
function's own file; so it is kept in a folder named after all of Headway's source.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar, cast

from llvmlite.binding import ffi
from numba import config, njit

_KEPT = 8  # versions: a developer goes back and forth between some

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call (seconds), for every later call and process (microseconds)."""
    before, config.CACHE_DIR = config.CACHE_DIR, os.environ.get("NUMBA_CACHE_DIR") or _folder()
    try:
        return cast(Function, njit(cache=True, nogil=True)(function))
    finally:
        config.CACHE_DIR = before


@cache
def _folder() -> str:
    """Return where this version's machine code is kept; those of versions not used for long are deleted."""
    places = os.environ.get("HEADWAY_CACHE"), os.environ.get("XDG_CACHE_HOME")
    root = Path(places[0] or Path(places[1] or "~/.cache") / "headway").expanduser().absolute() / "compiled"
    source = sorted(Path(__file__).parent.rglob("*.py"))
    here = root / sha256(b"".join(path.read_bytes() for path in source)).hexdigest()[:16]
    with suppress(OSError):  # a home that cannot be written: numba then falls back to a place of its own
        here.mkdir(parents=True, exist_ok=True)
        os.utime(here)
        for old in sorted(root.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            rmtree(old, ignore_errors=True)
    return str(here)


def _without_dunders(library: Any) -> None:
    """Let llvmlite's library object have no attributes like `__dict__`, which it makes up for every name.

    vLLM looks at `vars()` of every module's values when it starts on a CPU, and fails on a made-up one.
    """
    lookup = library.__getattr__

    def checked(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lookup(self, name)

    library.__getattr__ = checked


_without_dunders(type(ffi.lib))
