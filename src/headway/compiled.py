"""Compilation of hot loops by numba, once per machine and version of the source.

What is compiled is plain Python over numpy columns, so that it can also be read, and stepped through with
NUMBA_DISABLE_JIT=1. Machine code contains that of the functions it calls, and numba's cache looks only at a
function's own file; so it is kept in a folder named after the source of every module with compiled functions
and of every Headway module that these import.

numba itself is imported when the first function is compiled or loaded: with LLVM and its own tables it takes
160 MB, and a gateway whose planner needs no loop does without.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property, update_wrapper
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from threading import Lock
from typing import Any, TypeVar, cast

_IMPORT = re.compile(r"^\s*(?:from|import) (headway(?:\.\w+)*)", re.MULTILINE)
_KEPT = 8  # versions: a developer goes back and forth between some
log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call (seconds), for every later call and process (microseconds)."""
    return cast(Function, _Compiled(function))


def compiled_within(function: Function) -> Function:
    """Compile a function of a few numbers as a part of its compiled callers alone.

    Python calls its source: that takes no longer than to hand the numbers to machine code.
    """
    return cast(Function, _CompiledWithin(function))


def compiled_in_place(function: Function) -> Function:
    """Compile a function that makes no arrays, only reads and writes those that it is given.

    It does not count references to them, which costs more than the work itself in functions of some tens of
    nanoseconds. One that makes an array cannot be compiled so: numba raises an error.
    """
    return cast(Function, _Compiled(function, _nrt=False))


def compiled_inline(function: Function) -> Function:
    """As `compiled_in_place`, as a part of each compiled caller: arrays are not passed on at all."""
    return cast(Function, _Compiled(function, _nrt=False, inline="always"))


def compiled_into_callers(function: Function) -> Function:
    """As `compiled`, as a part of each compiled caller: arrays are not passed on at all."""
    return cast(Function, _Compiled(function, inline="always"))


class _Compiled:
    """A function and its machine code, which is there from the first call on.

    To numba, where it compiles a caller, it is the machine code's own object (`_numba_type_` and others).
    """

    def __init__(self, function: Callable[..., Any], **options: bool | str) -> None:
        update_wrapper(self, function)
        self._function, self._options = function, options

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._machine_code(*args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._machine_code, name)

    @cached_property
    def _machine_code(self) -> Any:
        with _giving:
            return _njit(self._function, self._options)


class _CompiledWithin(_Compiled):
    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._function(*args, **named)


_giving = Lock()  # numba's folder is set for one function at a time


def _njit(function: Callable[..., Any], options: dict[str, bool | str]) -> Any:
    """Give a function to numba, which compiles it when it is called."""
    from llvmlite.binding import ffi
    from numba import config, njit

    _without_dunders(ffi.lib)
    _say_when_compiling()
    before, config.CACHE_DIR = config.CACHE_DIR, os.environ.get("NUMBA_CACHE_DIR") or _folder()
    try:
        return njit(cache=True, nogil=True, **options)(function)
    finally:
        config.CACHE_DIR = before


@cache
def _say_when_compiling() -> None:
    """Log the first compilation of this process, which would else be a minute or two of silence.

    A warning, because in an engine nothing below is written.
    """
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]  # numba has no types
        told = False

        def on_start(self, event: Any) -> None:
            if not self.told:
                self.told = True
                log.warning("compiling Headway's loops, once per version: this takes a minute or two")

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Listener())


def cache_folder() -> Path:
    """Return the folder for what can be computed again: $HEADWAY_CACHE, or headway in the user's cache."""
    places = os.environ.get("HEADWAY_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(places[0] or Path(places[1] or "~/.cache") / "headway").expanduser().absolute()


@cache
def _folder() -> str:
    """Return where this version's machine code is kept; those of versions not used for long are deleted."""
    root = cache_folder() / "compiled"
    here = root / sha256(b"".join(path.read_bytes() for path in _sources())).hexdigest()[:16]
    with suppress(OSError):  # a home that cannot be written: numba then falls back to a place of its own
        here.mkdir(parents=True, exist_ok=True)
        os.utime(here)
        for old in sorted(root.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            rmtree(old, ignore_errors=True)
    return str(here)


def _sources() -> list[Path]:
    """Return the files that machine code can depend on, sorted: those that compile, and what they import."""
    package = Path(__file__).parent
    todo = [path for path in package.rglob("*.py") if "@compiled" in path.read_text()]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += [file for name in _IMPORT.findall(path.read_text()) for file in _files_of(package, name)]
    return sorted(seen)


def _files_of(package: Path, name: str) -> list[Path]:
    """Return the files of a dotted name under `headway`: the module, or all modules of a package."""
    path = package.joinpath(*name.split(".")[1:])
    return [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else sorted(path.glob("*.py"))


@cache
def _without_dunders(library: Any) -> None:
    """Let llvmlite's library object have no attributes like `__dict__`, which it makes up for every name.

    vLLM looks at `vars()` of every module's values when it starts on a CPU, and fails on a made-up one.
    """
    kind = type(library)
    lookup = kind.__getattr__

    def checked(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lookup(self, name)

    kind.__getattr__ = checked
