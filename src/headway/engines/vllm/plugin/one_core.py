"""An engine on one CPU core: without a worker process, its engine process a fork of the API server's.

vLLM binds threads to cores in worker processes alone, so Headway binds the engine process. On a CPU vLLM spawns that
process whatever `VLLM_WORKER_MULTIPROC_METHOD` says, and it then imports torch and vLLM a second time: seven of 26
seconds of a start. On several cores the API server's OpenMP threads would not be there in a fork, so there all is
left as vLLM has it (`process/launch.py`).
"""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from typing import Any

_METHOD, _CORES = "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND"
_WORKERS = "VLLM_ENABLE_V1_MULTIPROCESSING"


def install() -> None:
    """Do what the environment asks for; vLLM calls this in each of its processes."""
    from vllm.platforms import current_platform

    core = os.environ.get(_CORES, "")
    if not current_platform.is_cpu() or os.environ.get(_WORKERS) != "0" or not core.isdecimal():
        return
    bind = partial(os.sched_setaffinity, 0, {int(core)})
    if multiprocessing.parent_process() is not None:
        bind()
        return
    os.register_at_fork(after_in_child=bind)
    if os.environ.get(_METHOD) == "fork":
        _keep_to_fork(type(current_platform))


def _keep_to_fork(platform: Any) -> None:
    stock = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        stock(cls, config)
        os.environ[_METHOD] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)
