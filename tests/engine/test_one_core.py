"""An engine on one core of a CPU is bound to it, and forked."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from vllm.platforms import current_platform

_ASK = """
import multiprocessing, os, sys
from headway.engines.vllm.plugin import one_core
from vllm.engine.arg_utils import EngineArgs

def tell(pipe):
    pipe.send(sorted(os.sched_getaffinity(0)))

for asked in ({}, {"VLLM_CPU_OMP_THREADS_BIND": sys.argv[2], "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
    os.environ.update(asked, VLLM_WORKER_MULTIPROC_METHOD="fork")
    one_core.install()
    EngineArgs(model=sys.argv[1], dtype="float32", max_model_len=128).create_engine_config()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=tell, args=(theirs,))
    child.start()
    print(os.environ["VLLM_WORKER_MULTIPROC_METHOD"], sorted(os.sched_getaffinity(0)), ours.recv())
    child.join()
"""


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU's engine has no core of its own")
def test_its_engine_process_is_a_fork_that_is_bound_to_the_core(few_layers: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    argv = [sys.executable, "-c", _ASK, few_layers, str(cores[-1])]
    done = subprocess.run(argv, env=os.environ | {"VLLM_PLUGINS": ""}, capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if line.startswith(("spawn ", "fork "))]  # vLLM warns there, too
    assert said == [f"spawn {cores} {cores}", f"fork {cores} {cores[-1:]}"], done.stderr[-2000:]
