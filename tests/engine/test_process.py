"""How `vllm serve` is started: what it may use of this machine."""

from __future__ import annotations

import os

import pytest

from headway.config import Engine
from headway.engines.vllm.process import launch


def test_threads_go_to_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installed", lambda name: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 11})
    assert launch.environment(Engine())["VLLM_CPU_OMP_THREADS_BIND"] == "2,5,11"
    assert launch.environment(Engine(cores="0-1"))["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
