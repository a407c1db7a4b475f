"""Servers that a benchmark starts: it waits for slow ones and says so, and shows why one has ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from headway.engines.vllm.process.launch import Child
from headway.errors import EngineError
from headway.whatif.measured.systems import START_S, attempts, standard_engine

LEAKS = """nanobind: leaked 4 instances!
 - leaked instance 0x7f304c4411c8 of type "triton._C.libtriton.ir.attribute"
nanobind: leaked 64 types!
 - leaked type "ATOMIC_OP"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html/lib/resource_tracker.py:254: UserWarning
  warnings.warn('resource_tracker: There appear to be %d '
"""


def child(tmp_path: Path, code: str) -> Child:
    """Start a child that runs some Python; it ends with the test."""
    made = Child([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")
    made.start()
    return made


def test_a_slow_start_is_waited_for_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, told = 0.0, dict[float, int]()  # lines by the clock
    slow = child(tmp_path, "import time; time.sleep(600)")
    try:
        looks = attempts("slow", slow, clock=lambda: now)
        for now in (0.0, 50.0, 110.0, 120.0, 180.0):
            next(looks)
            told[now] = capsys.readouterr().err.count("slow is not ready after")
        assert told == {0.0: 0, 50.0: 0, 110.0: 1, 120.0: 0, 180.0: 1}
        now = START_S
        with pytest.raises(EngineError, match=f"was not ready after {START_S:g} s"):
            next(looks)
    finally:
        slow.stop()


def test_a_gateway_waits_for_its_engine_as_long_as_the_benchmark_does() -> None:
    assert standard_engine("smollm2", max_running=16, blocks=None).start_timeout_s == START_S


def test_reports_of_leaks_do_not_hide_the_error(tmp_path: Path) -> None:
    ended = child(tmp_path, f"import sys; sys.stderr.write('the error\\n' + {LEAKS * 3!r}); sys.exit(3)")
    assert ended.process is not None
    ended.process.wait()
    with pytest.raises(EngineError, match=r"exit code 3. Its last lines:\nthe error\n The whole log"):
        next(attempts("broken", ended))
