"""What compiling brings with it must not disturb vLLM, which shares the process."""

from __future__ import annotations

import numpy as np
from llvmlite.binding import ffi

from headway.compiled import compiled
from headway.types import Floats


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
