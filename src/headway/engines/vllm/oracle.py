"""vLLM's own scheduler in virtual time, without GPU or weights: the oracle for the simulated engine.

Only the model is missing: each answer repeats one token. Everything the scheduler decides
(order, chunks, blocks, preemptions) is vLLM's own code.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.engines.vllm.kv_transfer import host_pool
from headway.models.resolve import resolve

_TOKEN = 7  # prompts and answers consist of it, unless they are given
_HEADS, _HEAD_SIZE = 1, 64  # of one small layer: the scheduler needs a shape of KV, not its true size


def config(
    *, max_running: int, max_batched_tokens: int, max_model_len: int, block_size: int,
    policy: str = "fcfs", recipe: str | None = None, slots: int | None = None, model: str = "smollm2",
    host_gib: float = 0.0, pool: dict[str, Any] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """Return vLLM's configuration object, with prefix caching and asynchronous scheduling off.

    host_gib: GiB of a host pool (`plugin/connector.py`), 0 = none.
    pool: another KV connector instead, as `--kv-transfer-config` takes it.
    more: further `EngineArgs`.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import EngineArgs

    options = {"headway": {"recipe": recipe, "max_running": max_running}} if recipe else {}
    arguments: dict[str, Any] = {
        "enable_prefix_caching": False, "async_scheduling": False, "scheduling_policy": policy,
        "kv_transfer_config": pool or (host_pool(host_gib) if host_gib else None),
    }  # fmt: skip
    return EngineArgs(
        model=resolve(model), max_num_seqs=slots or max_running, max_num_batched_tokens=max_batched_tokens,
        max_model_len=max_model_len, block_size=block_size, additional_config=options,
        skip_tokenizer_init=True, enforce_eager=True, **{**arguments, **more},
    ).create_engine_config()  # fmt: skip


def scheduler(vllm_config: Any, blocks: int, block_size: int, cls: Callable[..., Any] | None = None) -> Any:
    """Return a scheduler with `blocks` KV blocks (one of them vLLM's null block); stock unless `cls`."""
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=_HEADS, head_size=_HEAD_SIZE, dtype=torch.float32)
    kv = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    vllm_config.cache_config.num_gpu_blocks = blocks
    return (cls or Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=kv,
        block_size=block_size,
        structured_output_manager=StructuredOutputManager(vllm_config),
    )


def block_hasher(scheduler: Any, size: int) -> Any:
    """Return what hashes a request's blocks of `size` tokens; None when the scheduler caches no prefixes."""
    if not scheduler.kv_cache_manager.enable_caching:
        return None
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(size, sha256)


@dataclass(slots=True)
class SchedulerOracle:
    """A scheduler in virtual time; `step` is one iteration."""

    scheduler: Any
    now: float = 0.0
    finished: list[str] = field(default_factory=list)
    _answers: dict[str, int] = field(default_factory=dict)  # the token that each answer repeats
    _hasher: Any = None

    def __post_init__(self) -> None:
        self._hasher = block_hasher(self.scheduler, self.scheduler.block_size)
        if hasattr(self.scheduler, "timer"):
            self.scheduler.clock = self.scheduler.timer = lambda: self.now

    def add(
        self,
        id: str,
        prompt: int,
        output: int,
        *,
        priority: int = 0,
        metadata: dict[str, Any] | None = None,
        arrival: float | None = None,
        tokens: Sequence[int] = (),
        answer: int = _TOKEN,
    ) -> None:
        """Add a request of `prompt` tokens that answers with exactly `output` tokens.

        metadata: its `vllm_xargs` (`request_metadata.py`).
        arrival: the instant that policies see, None = now.
        tokens: of the prompt, where it matters which they are (prefix caching); answer: the token that its
            answer repeats.
        """
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=output, ignore_eos=True, extra_args=metadata)
        at = self.now if arrival is None else arrival
        self._answers[id] = answer
        self.scheduler.add_request(
            Request(
                id,
                list(tokens) or [_TOKEN] * prompt,
                params,
                None,
                arrival_time=at,
                priority=priority,
                block_hasher=self._hasher,
            )
        )

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests())

    def schedule(self) -> Any:
        """Return vLLM's decision for the next iteration."""
        return self.scheduler.schedule()

    def complete(self, output: Any, seconds: float) -> float:
        """Let an iteration of `seconds` pass and give the scheduler its tokens; return the time it took."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        tokens = [[self._answers[id]] if self._outputs(id) else [] for id in ids]
        self.now += seconds
        result = ModelRunnerOutput(ids, {id: i for i, id in enumerate(ids)}, tokens)
        began = time.perf_counter()
        updated = self.scheduler.update_from_output(output, result)
        took = time.perf_counter() - began
        for outputs in updated.values():
            self.finished += [one.request_id for one in outputs.outputs if one.finish_reason is not None]
        return took

    def step(self, seconds: float = 0.05) -> dict[str, int]:
        """Run one iteration; return the tokens scheduled per request."""
        output = self.schedule()
        self.complete(output, seconds)
        return dict(output.num_scheduled_tokens)

    def _outputs(self, id: str) -> bool:
        """Return whether all tokens of a request are computed, so that it outputs a new one."""
        request = self.scheduler.requests[id]
        return bool(request.num_computed_tokens >= request.num_tokens)


def run(oracle: SchedulerOracle, arrivals: Sequence[tuple[float, str, int, int]], seconds: float = 0.05) -> list[Any]:
    """Run (instant, id, prompt, output) requests to the end; return the tokens of every step, in order."""
    steps, todo = [], sorted(arrivals)
    while todo or oracle.busy:
        while todo and todo[0][0] <= oracle.now:
            _, id, prompt, output = todo.pop(0)
            oracle.add(id, prompt, output)
        steps.append(oracle.step(seconds))
    return steps
