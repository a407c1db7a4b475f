"""Compiled functions: their cache, and that numba does not disturb vLLM in the same process."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
from llvmlite.binding import ffi

import headway
from headway.compiled import _sources, compiled
from headway.policy.forecast.latency.online import OnlineLatency, prefill_of, seconds_of
from headway.types import Floats

ROOT = Path(headway.__file__).parent


def test_the_cache_folder_depends_on_the_version_of_all_callees() -> None:
    """A caller's file may stay the same while what it calls changes: the folder must not."""
    folder = Path(seconds_of._cache._cache_path)  # type: ignore[attr-defined]
    digest = sha256(b"".join(path.read_bytes() for path in _sources())).hexdigest()[:16]
    assert digest in folder.parts or os.environ.get("NUMBA_CACHE_DIR")


def test_all_that_the_largest_compiled_loop_loads_is_part_of_its_version() -> None:
    code = "import headway.simulate.compiled_loop, sys; print(*(m.__file__ for m in sys.modules.values() "
    code += "if m.__name__.startswith('headway.') and m.__file__))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    known = {str(path) for path in _sources()}
    empty = {str(path) for path in ROOT.rglob("__init__.py")}
    assert set(loaded.stdout.split()) - empty <= known
    assert str(ROOT / "gateway" / "app.py") not in known


def test_llvmlite_has_no_fake_dict() -> None:
    """vLLM calls vars() on every object that claims a `__dict__`."""
    assert seconds_of._cache is not None  # type: ignore[attr-defined]  # numba has the function
    assert not hasattr(ffi.lib, "__dict__")
    assert callable(ffi.lib.LLVMPY_GetVersionInfo)


def test_a_gateway_with_the_usual_planners_has_no_numba() -> None:
    """With LLVM it takes 160 MB, which only planners with loops of their own are to cost."""
    code = "import headway.gateway.main, sys; from headway.policy.recipes.registry import find; "
    code += "find('slack').planner().prepare(); print('numba' in sys.modules, 'llvmlite' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


def test_a_small_function_is_part_of_its_compiled_callers() -> None:
    theta = OnlineLatency().theta
    expected = [seconds_of(theta, 3, 100.0, 0.0, 0.0), seconds_of(theta, 0.0, 0.0, 9.0, 40.5)]
    found = [seconds_of._machine_code(theta, 3, 100.0, 0.0, 0.0), prefill_of._machine_code(theta, 9.0)]  # type: ignore[attr-defined]
    assert found == expected


def test_a_compiled_function_returns_what_its_python_source_does() -> None:
    def total(values: Floats) -> float:
        out = 0.0
        for value in values:
            out += value
        return out

    values = np.random.default_rng(0).normal(size=100)
    assert compiled(total)(values) == total(values)


def test_the_first_compilation_is_logged_and_a_load_is_not(tmp_path: Path) -> None:
    code = "from headway.policy.forecast.latency.online import seconds_of, OnlineLatency\n"
    code += "seconds_of._machine_code(OnlineLatency().theta, 3, 1.0, 0.0, 0.0)"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stderr
        for _ in range(2)
    )
    assert first.count("compiling Headway's loops") == 1
    assert "compiling" not in second
