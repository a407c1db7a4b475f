"""Attention over a KV block that is filled from the right (BROS 5.1), with vLLM's own CPU kernel.

When decoding, attention does not depend on the order of the cached tokens: their positions are already in the
keys. So the shared block comes first in the request's block table, and the kernel's sliding window, as long
as the request, cuts off the slots at that block's left, which belong to another request. Two of vLLM's methods
are wrapped, the attention metadata and the attention itself: one more kernel call per layer for each such row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from headway.engines.vllm.plugin.right_aligned_rows import RightAligned, rows, wrap

BLOCK_MULTIPLE = 32  # tokens per block must be a multiple of this in vLLM's CPU attention


class AttentionCall(NamedTuple):
    """The kernel call of one request.

    token: index of its token in the batch.
    table: its block table, last block first.
    lengths: sequence length that covers all slots of these blocks.
    starts: query start locations.
    plan: vLLM's scheduler metadata for the call.
    window: sliding window, the request's true length.
    """

    token: int
    table: Any
    lengths: Any
    starts: Any
    plan: Any
    window: int


def install() -> None:
    """Wrap the attention's methods in this process, once."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

    wrap(CPUAttentionMetadataBuilder, "build", _build)
    wrap(CPUAttentionBackendImpl, "forward", _forward)


def _build(stock: Any, builder: Any, common_prefix_len: int, common: Any, *args: Any, **kwargs: Any) -> Any:
    metadata = stock(builder, common_prefix_len, common, *args, **kwargs)
    now = [one for one in rows.current if one.row < common.num_reqs]
    metadata.headway = [call for one in now if (call := _call(builder, common, one))]
    return metadata


def _call(builder: Any, common: Any, right: RightAligned) -> AttentionCall | None:
    """Return the kernel call of a row; None when its last block is full."""
    from vllm import _custom_ops as ops
    from vllm import envs

    size, (row, k, kept), start = builder.block_size, right, int(common.query_start_loc[right.row])
    tokens = k * size + kept
    if kept == size:
        return None  # all of its slots are the request's own, in any order
    blocks = common.block_table_tensor[row]
    table = torch.cat([blocks[k : k + 1], blocks[:k]])[None].contiguous()
    lengths = torch.tensor([(k + 1) * size], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=builder.num_heads,
        num_kv_heads=builder.num_kv_heads,
        head_dim=builder.head_dim,
        seq_lens=lengths,
        dtype=builder.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=tokens,
        isa=builder.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        kv_cache_dtype=builder.kv_cache_dtype,
    )
    return AttentionCall(start, table, lengths, starts, plan, tokens)


def _forward(
    stock: Any, impl: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any,
    output: Any, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    result = stock(impl, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
    calls = getattr(metadata, "headway", None)
    if calls:
        from vllm import _custom_ops as ops

        keys, values = _halves(kv_cache)
        for call in calls:
            one = slice(call.token, call.token + 1)
            ops.cpu_attention_with_kv_cache(
                query=query[one], key_cache=keys, value_cache=values, output=output[one],
                query_start_loc=call.starts, seq_lens=call.lengths, scale=impl.scale, causal=True,
                alibi_slopes=None, sliding_window=call.window, block_table=call.table,
                softcap=impl.logits_soft_cap, scheduler_metadata=call.plan, s_aux=impl.sinks,
                k_scale=layer._k_scale_float, v_scale=layer._v_scale_float,
                kv_cache_dtype=impl.kv_cache_dtype,
            )  # fmt: skip
    return result


def _halves(cache: Any) -> tuple[Any, Any]:
    """Return the keys and the values of a layer's cache, split as vLLM's backend does."""
    blocks, heads, size, _ = cache.size()
    keys, values = cache.view((blocks, heads, size * 2, -1)).chunk(2, dim=2)
    return keys, values


def reads_from_the_right(size: int, heads: int, dim: int, dtype: Any) -> bool:
    """Return whether this machine's attention reads right-aligned blocks correctly, by trying it.

    The same tokens are attended to in blocks of their own and in a block shared with other tokens.
    """
    load_kernels()
    draw = torch.Generator().manual_seed(0)
    tail = size // 4
    keys, others = (torch.randn(n, 2, heads, dim, generator=draw).to(dtype) for n in (size + tail, size // 2))
    cache = torch.zeros(4, heads, size, 2 * dim, dtype=dtype)
    whole, last = size + torch.arange(size), torch.arange(tail)
    _write(cache, keys[:size], whole)
    _write(cache, keys[size:], 2 * size + last)
    _write(cache, keys[size:], 3 * size + size - 1 - last)
    _write(cache, 8 * others, 3 * size + torch.arange(size // 2))  # large, so that reading them would show
    alone = attend(cache, others[:1, 1], [1, 2], size + tail, -1)
    beside = attend(cache, others[:1, 1], [3, 1], 2 * size, size + tail)
    near = 1e-4 if dtype == torch.float32 else 4e-2
    return bool(torch.allclose(alone.float(), beside.float(), atol=near))


def load_kernels() -> None:
    """Load vLLM's kernels, and ask the operating system for AMX's tiles, which kills a process that uses them unasked.

    In an engine vLLM's own matrix products may ask only later.
    """
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _write(cache: Any, data: Any, slots: Any) -> None:
    """Write keys and values, (tokens, 2, heads, elements), into slots."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(cache.dtype, cache.shape[2], cache.shape[3] // 2)
    parts = (part.contiguous() for part in data.unbind(1))
    ops.cpu_attn_reshape_and_cache(*parts, *_halves(cache), slots, isa)


def attend(cache: Any, query: Any, blocks: list[int], tokens: int, window: int) -> Any:
    """Return the attention output of one token over `tokens` slots of these blocks (window -1 = all)."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    _, heads, size, width = cache.shape
    isa, table = _get_attn_isa(cache.dtype, size, width // 2), torch.tensor([blocks], dtype=torch.int32)
    lengths, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([tokens], [0, 1]))
    out, query = torch.empty_like(query), query.contiguous()
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, heads, heads, width // 2, lengths, cache.dtype, starts, True, window, isa, True
    )
    ops.cpu_attention_with_kv_cache(
        query, *_halves(cache), out, starts, lengths, (width // 2) ** -0.5, True, None, window, table, 0.0, plan, None
    )
    return out


class Slots:
    """Reads and writes the KV of single slots; the order of elements in a block depends on the instruction set."""

    def __init__(self, cache: Any, size: int) -> None:
        self._size, self._where = size, layout(cache, size)

    def read(self, cache: Any, slots: Any) -> Any:
        """Return the KV of slots, (slots, elements)."""
        return cache.view(cache.shape[0], -1)[self._index(slots)]

    def write(self, cache: Any, slots: Any, data: Any) -> None:
        """Write the KV of slots."""
        cache.view(cache.shape[0], -1)[self._index(slots)] = data

    def _index(self, slots: Any) -> tuple[Any, Any]:
        return slots[:, None] // self._size, self._where[slots % self._size]


def layout(cache: Any, size: int) -> Any:
    """Return the offsets of each slot's KV in a flattened block, shape (slots, elements), found by probing.

    The inner order of a block differs between instruction sets. Three probes write, for every element of
    every slot, the slot's number and the element's number in two digits; all are small integers, exact in any
    float type.
    """
    _, heads, _, width = cache.shape
    dim = width // 2
    element = torch.arange(dim)
    slot = _probe(cache, size, torch.arange(size)[:, None].expand(size, dim))
    low = _probe(cache, size, (element % 64).expand(size, dim))
    high = _probe(cache, size, (element // 64).expand(size, dim))
    place = torch.arange(slot.numel())
    part = place // (size * dim)  # head by head: its keys, then its values
    order = torch.argsort(slot * (2 * heads * dim) + part * dim + high * 64 + low)
    where = order.view(size, 2 * heads * dim)
    assert torch.equal(slot[where], torch.arange(size)[:, None].expand_as(where)), "a slot's elements are not together"
    return where


def _probe(cache: Any, size: int, numbers: Any) -> Any:
    """Write `numbers` (slots, elements) as keys and values of one block; return the block, flat."""
    _, heads, _, width = cache.shape
    block = torch.zeros((1, *cache.shape[1:]), dtype=cache.dtype)
    data = numbers[:, None, None].expand(size, 2, heads, width // 2).to(cache.dtype)
    _write(block, data, torch.arange(size))
    return block.flatten().long()
