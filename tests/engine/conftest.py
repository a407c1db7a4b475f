"""A real vLLM engine in this process, float32 so that tokens do not depend on the rest of the batch."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from headway.engines.vllm.fatal_fields import WORKER_EXTENSION
from headway.engines.vllm.kv_transfer import host_pool
from headway.models import resolve
from headway.models.variants import vary

OTHER = os.environ.get("HEADWAY_OTHER_VLLM")  # its Python files alone are here (tools/vllm_sources.py)
ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
LAYERS = 5  # of the model's 30: what happens to KV happens to that of each layer, and tokens depend on all
HOST_GIB = 0.25 * LAYERS / 30  # room for about half of what the tests save, so that the pool runs out too
BLOCKS = 96  # x 32 tokens: small, so that KV runs out


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Skip what calls a kernel, where another release is tested without them."""
    try:
        return (yield)
    except AttributeError as error:
        if OTHER is None or "'_OpNamespace' '_C' object has no attribute" not in str(error):
            raise
        pytest.skip(f"needs the kernels of vLLM {OTHER}")


@dataclass
class Engine:
    """The engine, its scheduler and a way to run prompts to the end."""

    llm: Any

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def add(self, name: str, prompt: list[int], tokens: int, seed: int | None = None, **metadata: float) -> None:
        """Add a request; without a seed it is greedy."""
        from vllm import SamplingParams

        extra = {f"headway_{key}": value for key, value in metadata.items()} | {"headway_id": name}
        params = SamplingParams(
            temperature=float(seed is not None),
            seed=seed,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra,
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> dict[str, list[int]]:
        """Do one iteration; return the tokens of each request that it has finished."""
        return {out.request_id: list(out.outputs[0].token_ids) for out in self.llm.llm_engine.step() if out.finished}

    def counters(self) -> dict[str, float]:
        """Return what the hook has counted so far."""
        return dict(self.scheduler.control({"op": "state"})["counters"])

    def run(self, steps: int = 100_000) -> dict[str, list[int]]:
        """Step until nothing is left; return the tokens of each finished request."""
        done: dict[str, list[int]] = {}
        for _ in range(steps):
            if not self.llm.llm_engine.has_unfinished_requests():
                return done
            done |= self.step()
        raise AssertionError(f"not finished after {steps} steps")


@pytest.fixture(scope="session")
def few_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The default model's first layers: the same tokenizer and KV per layer in a sixth of the time."""
    out = tmp_path_factory.mktemp("model") / "few-layers"
    return str(vary(str(resolve.fetch()), out, scale=0.0, layers=LAYERS))


def started(model: str, **options: Any) -> Iterator[Engine]:
    """Yield an engine, then end it. options: of `LLM`, beyond or instead of those here."""
    os.environ.update(ENV)
    from vllm import LLM
    from vllm.distributed.kv_transfer import kv_transfer_state as one_per_process

    common: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "block_size": 32,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_batched_tokens": 512,
        "async_scheduling": False,
        "scheduler_cls": "headway.engines.vllm.plugin.hook.scheduler",
        "additional_config": {"headway": {"recipe": "slack", "max_running": 8}},
        "kv_transfer_config": host_pool(HOST_GIB),
    }
    # vLLM holds one connector per process; that of another file's engine, which is still there, is put aside.
    other, one_per_process._KV_CONNECTOR_AGENT = one_per_process._KV_CONNECTOR_AGENT, None
    llm = LLM(model, **(common | options))
    yield Engine(llm)
    llm.llm_engine.engine_core.shutdown()
    one_per_process._KV_CONNECTOR_AGENT = other


@pytest.fixture(scope="session")
def engine(few_layers: str) -> Iterator[Engine]:
    yield from started(few_layers, worker_extension_cls=WORKER_EXTENSION)


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    """Return random prompts of 8 to 400 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(100, 40_000, rng.integers(8, 400)).tolist() for _ in range(count)]
