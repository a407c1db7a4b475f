"""Lets vLLM fork its engine process on a CPU, where it spawns one whatever `VLLM_WORKER_MULTIPROC_METHOD` says.

A spawned process imports torch and vLLM a second time, which takes seven of 26 seconds of a start. On several
cores the API server's OpenMP threads would not be there in a fork, so Headway asks for it on one core alone
(`process/launch.py`).
"""

from __future__ import annotations

import os
from typing import Any

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def install() -> None:
    """Keep to "fork" if the environment says so; vLLM calls this in each of its processes."""
    from vllm.platforms import current_platform

    if os.environ.get(_METHOD) != "fork" or not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    stock = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        stock(cls, config)
        os.environ[_METHOD] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)
