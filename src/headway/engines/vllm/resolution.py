"""What vLLM makes of `vllm serve` command lines, on this machine or on a device that is not at hand.

`python -m headway.engines.vllm.resolution` reads a JSON object from standard input: "lines", each a list of arguments
of `vllm serve`, and "devices", each a name or null for this machine. It prints a list per device with an object of
settings per line, or {"error": text}. No model is loaded. For a named device vLLM's own rules run on a stand-in for
its platform.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NamedTuple

FIELDS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "dtype",
    "enforce_eager",
    "async_scheduling",
    "enable_prefix_caching",
    "tensor_parallel_size",
)


class Device(NamedTuple):
    """An accelerator as vLLM's rules ask for it. gib: of memory. capability: CUDA's, or that of ROCm's gfx.

    Those rules compare names and memory. What needs a vendor's libraries (ROCm's fused kernels) is left out.
    """

    name: str
    gib: int
    capability: tuple[int, int]


DEVICES = {
    "a100": Device("NVIDIA A100-SXM4-80GB", 80, (8, 0)),
    "b200": Device("NVIDIA B200", 180, (10, 0)),
    "h100": Device("NVIDIA H100 80GB HBM3", 80, (9, 0)),
    "h200": Device("NVIDIA H200", 141, (9, 0)),
    "l4": Device("NVIDIA L4", 24, (8, 9)),
    "mi300": Device("AMD Instinct MI300X", 192, (9, 4)),
}


def resolve_lines(lines: list[list[str]], devices: list[Device | None]) -> list[list[dict[str, Any]]]:
    """Return the settings of each command line on each device; None = this machine's."""
    # First on this one, also where it is not asked for: that imports the models' modules, with kernels for a platform.
    here = [_settings(line) for line in lines]
    found = []
    for device in devices:
        if device is not None:
            _stand_in(device)
        found.append(here if device is None else [_settings(line) for line in lines])
    return found


def _settings(line: list[str]) -> dict[str, Any]:
    from vllm.usage.usage_lib import UsageContext

    try:
        config = _arguments(line).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # whatever vLLM refuses a command line with
        return {"error": str(error)}
    parts = (config.scheduler_config, config.cache_config, config.model_config, config.parallel_config)
    found = {name: next(getattr(part, name) for part in parts if hasattr(part, name)) for name in FIELDS}
    found["dtype"] = str(found["dtype"]).removeprefix("torch.")
    return found | {"auto_context": config.model_config.original_max_model_len == -1}


def _arguments(line: list[str]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser  # where 0.32 and 0.33 have it
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    known.model = known.model_tag or known.model
    return AsyncEngineArgs.from_cli_args(known)


def _stand_in(device: Device) -> None:
    """Put a platform with this device in the place of the real one, in every module that has imported it."""
    from vllm import platforms

    platform = platforms._current_platform = _platform(device)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm") and "current_platform" in vars(module):
            module.current_platform = platform  # type: ignore[attr-defined]


def _platform(device: Device) -> Any:
    import torch
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    class StandIn(Platform):  # type: ignore[misc]
        _enum = PlatformEnum.CUDA
        device_name = device_type = "cuda"
        dispatch_key = "CUDA"
        supported_dtypes = (torch.bfloat16, torch.float16, torch.float32)
        get_device_capability = staticmethod(lambda device_id=0: DeviceCapability(*device.capability))
        get_device_name = staticmethod(lambda device_id=0: device.name)
        get_device_total_memory = staticmethod(lambda device_id=0: device.gib * 2**30)
        device_count = staticmethod(lambda: 8)
        support_hybrid_kv_cache = staticmethod(lambda: True)

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            parallel = vllm_config.parallel_config
            if parallel.worker_cls == "auto":
                parallel.worker_cls = "vllm.v1.worker.gpu_worker.Worker"

    return StandIn()


def main() -> None:
    """Answer one question, in a process that ends afterwards: the stand-in stays in place."""
    question = json.load(sys.stdin)
    devices = [None if name is None else DEVICES[name] for name in question["devices"]]
    answers = resolve_lines(question["lines"], devices)
    os.write(_STDOUT, json.dumps(answers).encode())


if __name__ == "__main__":
    _STDOUT = os.dup(1)
    os.dup2(2, 1)  # vLLM prints there, too
    main()
