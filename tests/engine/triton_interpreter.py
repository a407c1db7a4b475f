"""Run an engine with two-ended blocks and vLLM's Triton attention in Triton's interpreter; print its tokens as JSON.

`python -m tests.engine.triton_interpreter FOLDER`, for a model of two small layers with random weights. This is a
separate program because Triton reads TRITON_INTERPRET when it is imported. vLLM's CPU build is patched so that it finds
a Triton backend and selects TRITON_ATTN; the attention and its kernels are vLLM's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.engine.conftest import ENV, Engine

os.environ.update(ENV | {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"})
BLOCKS, SIZE, HOST = 9, 16, 60
# Three best-effort requests, one with a long prompt that leaves few free blocks, and three that share blocks with the
# first three. The last four have an SLO.
PROMPTS = [3, 5, 4, 54, 4, 5, 3]
TOKENS = [12, 10, 11, 9, 8, 7, 7]
FIRST_WITH_SLO = 3  # index in PROMPTS
WORDS = 512


def model(folder: Path) -> str:
    """Write the model; its weights are large, so that reading the wrong KV changes tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def stand_in_for_a_gpu() -> None:
    """Let vLLM's build for CPUs run its Triton attention."""
    import torch
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum.TRITON_ATTN.get_path()
    CpuPlatform.get_attn_backend_cls = classmethod(lambda *_, **__: path)


def started(folder: Path) -> Engine:
    """Start the engine."""
    stand_in_for_a_gpu()
    from vllm import LLM

    from headway.engines.vllm.kv_transfer import two_ended_pool
    from headway.engines.vllm.plugin.hook import HeadwayScheduler

    llm = LLM(
        model(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=SIZE * (BLOCKS - 1),
        max_num_seqs=16,
        enforce_eager=True,
        enable_prefix_caching=False,
        attention_backend="TRITON_ATTN",
        block_size=SIZE,
        num_gpu_blocks_override=BLOCKS,
        max_num_batched_tokens=SIZE * (BLOCKS - 1),
        async_scheduling=False,
        scheduler_cls=HeadwayScheduler,
        additional_config={"headway": {"recipe": "bros", "max_running": 8}},
        kv_transfer_config=two_ended_pool(0, host_tokens=HOST, copy_seconds=1e-6),
    )
    return Engine(llm)


def answers(engine: Engine, packer: Any, *, promised: bool = True) -> list[list[int]]:
    """Return each request's tokens; one request is added per iteration."""
    engine.scheduler.packer, done = packer, {}
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, TOKENS, strict=True)):
        words = np.random.default_rng(i).integers(1, WORDS, prompt).tolist()
        engine.add(f"r{i}", words, tokens, **({"ttft": 2.0, "tpot": 0.05} if promised and i >= FIRST_WITH_SLO else {}))
        done |= engine.step()
    done |= engine.run(500)
    return [done[f"r{i}"] for i in range(len(PROMPTS))]


def difference(size: int, heads: int, kv_heads: int, dim: int, cap: float) -> float:
    """Return the largest difference between the kernel and attention over the same tokens in order."""
    import torch

    from headway.engines.vllm.plugin.right_aligned_gpu import Kernel

    draw = torch.Generator().manual_seed(size)
    cache = torch.randn(9, size, kv_heads, 2 * dim, generator=draw).transpose(1, 2)  # as with VLLM_KV_CACHE_LAYOUT=NHD
    query, out = torch.randn(4, heads, dim, generator=draw), torch.full((4, heads, dim), 7.0)
    table = torch.tensor([[3, 5, 1, 0], [2, 7, 0, 0], [8, 0, 0, 0], [6, 4, 0, 0]], dtype=torch.int32)
    rows = [
        (0, 0, 2, 5),
        (2, 1, 1, size - 1),
        (3, 2, 0, 3),
        (1, 3, 1, size),
    ]  # (token, row, full, kept); the last is a full block
    columns = torch.tensor([(*row, 0) for row in rows] + [(0,) * 5], dtype=torch.int32)
    Kernel(5, heads, kv_heads, dim, cache.device).attend(query, cache, columns, table, out, 0.3, cap)
    assert (out[1] == 7).all(), "the kernel leaves full blocks to vLLM's attention"
    worst = 0.0
    for token, row, full, kept in rows[:3]:
        blocks = [cache[block] for block in table[row, : full + 1].tolist()]
        keys, values = torch.cat([*blocks[:full], blocks[full][:, size - kept :]], 1).split(dim, -1)
        scores = 0.3 * query[token].view(kv_heads, -1, dim) @ keys.transpose(1, 2)
        scores = cap * torch.tanh(scores / cap) if cap else scores
        wanted = (scores.softmax(-1) @ values).reshape(heads, dim)
        worst = max(worst, float((out[token] - wanted).abs().max()))
    return worst


def main(folder: Path) -> None:
    """Print the tokens with unshared blocks, with shared ones, and with shared ones when the kernel does nothing."""
    engine = started(folder)
    from dataclasses import replace

    from headway.engines.vllm.plugin.right_aligned_gpu import Kernel
    from headway.policy.recipes.registry import find
    from tests.engine.test_two_ends import Everybody

    scheduler, attend, launches = engine.scheduler, Kernel.attend, 0

    def counted(*args: Any) -> None:
        nonlocal launches
        launches += bool(args[3].any())  # not the launch without rows, which compiles
        attend(*args)

    Kernel.attend = counted  # type: ignore[method-assign]
    alone = answers(engine, find("vllm").packer(replace(scheduler.spec, max_running=4)), promised=False)
    assert not any(scheduler.kv_policy.counters().values())
    assert not launches
    shared = answers(engine, Everybody())
    did = scheduler.kv_policy.counters() | {"launches": launches}
    Kernel.attend = lambda *_: None  # type: ignore[method-assign]
    misread = answers(engine, Everybody())
    Kernel.attend = attend  # type: ignore[method-assign]
    shapes = [(32, 4, 2, 32, 0.0), (48, 3, 1, 80, 5.0), (16, 8, 2, 64, 0.0)]
    found = {"alone": alone, "shared": shared, "misread": misread, "did": did}
    print(json.dumps(found | {"differences": [difference(*shape) for shape in shapes]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
