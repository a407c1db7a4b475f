"""What compiling brings with it must not disturb vLLM, which shares the process."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import numpy as np
from llvmlite.binding import ffi

import headway
from headway.compiled import compiled
from headway.forecast.pace import seconds_of
from headway.types import Floats

ROOT = Path(headway.__file__).parent


def test_machine_code_is_kept_by_the_version_of_all_source() -> None:
    """A caller's file may stay the same while what it calls changes: the folder must not."""
    folder = Path(seconds_of._cache._cache_path)  # type: ignore[attr-defined]
    digest = sha256(b"".join(path.read_bytes() for path in sorted(ROOT.rglob("*.py")))).hexdigest()[:16]
    assert digest in folder.parts or os.environ.get("NUMBA_CACHE_DIR")


def test_llvmlite_makes_up_no_attributes() -> None:
    """vLLM calls vars() on whatever says it has a `__dict__`."""
    assert not hasattr(ffi.lib, "__dict__")
    assert callable(ffi.lib.LLVMPY_GetVersionInfo)


def test_a_compiled_function_says_what_its_python_says() -> None:
    def total(values: Floats) -> float:
        out = 0.0
        for value in values:
            out += value
        return out

    values = np.random.default_rng(0).normal(size=100)
    assert compiled(total)(values) == total(values)
