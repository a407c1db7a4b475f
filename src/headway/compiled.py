"""How are hot loops compiled? By numba, once per machine: the machine code is kept beside the source.

What is compiled is plain Python over numpy columns, so that it can also be read, and stepped through with
NUMBA_DISABLE_JIT=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call (seconds), for every later call and process (microseconds)."""
    return cast(Function, njit(cache=True, nogil=True)(function))
