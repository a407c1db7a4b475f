"""How are hot loops compiled? By numba, once per machine: the machine code is kept beside the source.

What is compiled is plain Python over numpy columns, so that it can also be read, and stepped through with
NUMBA_DISABLE_JIT=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite.binding import ffi
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call (seconds), for every later call and process (microseconds)."""
    return cast(Function, njit(cache=True, nogil=True)(function))


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
