"""Attention over KV blocks that are filled from the right (BROS 5.1), as a Triton kernel.

It runs after vLLM's attention and overwrites the output of right-aligned rows, with two kernels per layer as in flash
decoding: `_partial` attends to parts of the context, `_merge` combines them. It reads the KV cache by its strides, so
any backend works whose cache has the logical shape (blocks, KV heads, slots, 2 x head size). Attention runs outside of
CUDA graphs (`TwoEndedPool.requires_piecewise_for_cudagraph`), so each launch is sized to the rows of its step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headway.engines.vllm.plugin.right_aligned_rows import rows, wrap

_LOWEST = -1e38  # score of a masked slot; finite, as -inf minus -inf is NaN in a split without a slot of the request
_SPLITS = 16  # maximum number of programs that share the context of one row
_SCRATCH = 64 << 20  # target for the bytes of their partial outputs; a single split may need more


@triton.jit
def _scores(q, k, scale, softcap):  # type: ignore[no-untyped-def]
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if softcap > 0:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
    return score


@triton.jit  # type: ignore[untyped-decorator]
def _partial(  # type: ignore[no-untyped-def]
    rows, tables, query, cache, partial_out, partial_max_sum, scale, softcap,
    row_stride, table_stride, query_token, query_head, block_stride, head_stride, slot_stride,
    SIZE: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a row's context, for the query heads of one KV head."""
    i, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, row = tl.load(rows + i * row_stride), tl.load(rows + i * row_stride + 1)
    full, kept = tl.load(rows + i * row_stride + 2), tl.load(rows + i * row_stride + 3)
    if (kept == 0) | (kept == SIZE):
        return  # a launch without rows, or a full block, which vLLM's attention has read correctly
    group, element, slot = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED), tl.arange(0, TILE)
    heads = head * GROUP + group
    head_mask, dim_mask = group < GROUP, element < DIM
    at = query + token.to(tl.int64) * query_token + heads[:, None] * query_head + element[None, :]
    q = tl.load(at, mask=head_mask[:, None] & dim_mask[None, :], other=0.0)
    base = cache + head.to(tl.int64) * head_stride + element[None, :]
    m, l_sum = tl.full([GROUP_PADDED], LOWEST, tl.float32), tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    tiles = (full + 1) * (SIZE // TILE)
    each = tl.cdiv(tiles, SPLITS)
    for tile in range(split * each, tl.minimum(split * each + each, tiles)):
        index, inside = tile // (SIZE // TILE), (tile % (SIZE // TILE)) * TILE + slot
        block = tl.load(tables + row * table_stride + index).to(tl.int64)
        slot_mask = inside >= tl.where(index < full, 0, SIZE - kept)
        place = base + block * block_stride + inside[:, None] * slot_stride
        mask = slot_mask[:, None] & dim_mask[None, :]
        k, v = tl.load(place, mask=mask, other=0.0), tl.load(place + DIM, mask=mask, other=0.0)
        score = tl.where(slot_mask[None, :], _scores(q, k, scale, softcap), LOWEST)
        m_new = tl.maximum(m, tl.max(score, 1))
        p = tl.exp(score - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l_sum = l_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    part = (i * HEADS + heads) * SPLITS + split
    tl.store(partial_out + part[:, None] * DIM + element[None, :], acc, mask=head_mask[:, None] & dim_mask[None, :])
    tl.store(partial_max_sum + part * 2, m, mask=head_mask)
    tl.store(partial_max_sum + part * 2 + 1, l_sum, mask=head_mask)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    rows, out, partial_out, partial_max_sum, row_stride, out_token, out_head,
    SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row and query head into its output."""
    i, head = tl.program_id(0), tl.program_id(1)
    token, kept = tl.load(rows + i * row_stride), tl.load(rows + i * row_stride + 3)
    if (kept == 0) | (kept == SIZE):
        return  # a launch without rows, or a full block, which vLLM's attention has read correctly
    split, element = tl.arange(0, SPLITS), tl.arange(0, DIM_PADDED)
    part, dim_mask = (i * HEADS + head) * SPLITS + split, element < DIM
    m, l_sum = tl.load(partial_max_sum + part * 2), tl.load(partial_max_sum + part * 2 + 1)
    acc = tl.load(partial_out + part[:, None] * DIM + element[None, :], mask=dim_mask[None, :], other=0.0)
    alpha = tl.exp(m - tl.max(m, 0))
    value = tl.sum(acc * alpha[:, None], 0) / tl.sum(l_sum * alpha, 0)
    at = out + token.to(tl.int64) * out_token + head * out_head + element
    tl.store(at, value.to(out.dtype.element_ty), mask=dim_mask)


class Kernel:
    """The kernel with its scratch memory, for layers of one shape.

    heads, kv_heads, dim: query heads, KV heads and head size of a layer, as this worker holds them.
    """

    def __init__(self, requests: int, heads: int, kv_heads: int, dim: int, device: Any) -> None:
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.compiled = False
        most = min(_SPLITS, max(_SCRATCH // (requests * heads * dim * 4), 1))
        self.splits = 1 << (most.bit_length() - 1)
        parts = requests * heads * self.splits
        self._partial_out = torch.empty((parts, dim), dtype=torch.float32, device=device)
        self._partial_max_sum = torch.empty((parts, 2), dtype=torch.float32, device=device)

    def attend(self, query: Any, cache: Any, columns: Any, table: Any, output: Any, scale: float, cap: float) -> None:
        """Write the output of the right-aligned rows.

        query, output: (tokens, heads, dim).
        cache: (blocks, KV heads, slots, 2 x dim), keys before values.
        columns: `Rows.columns`, or its first rows.
        table: block table, int32 (requests, blocks).
        cap: soft cap of the attention logits, 0 = none.
        """
        query, output = (x.view(x.shape[0], self.heads, self.dim) for x in (query, output))
        size, dim_padded = cache.shape[2], triton.next_power_of_2(self.dim)
        group = self.heads // self.kv_heads
        tile = min(size & -size, 64)  # a power of two that divides the block
        shape = {"SIZE": size, "HEADS": self.heads, "DIM": self.dim, "DIM_PADDED": dim_padded, "SPLITS": self.splits}
        _partial[(columns.shape[0], self.kv_heads, self.splits)](
            columns, table, query, cache, self._partial_out, self._partial_max_sum, scale, cap,
            columns.stride(0), table.stride(0), *query.stride()[:2], *cache.stride()[:3],
            TILE=tile, GROUP=group, GROUP_PADDED=max(triton.next_power_of_2(group), 16), LOWEST=_LOWEST, **shape,
        )  # fmt: skip
        _merge[(columns.shape[0], self.heads)](
            columns, output, self._partial_out, self._partial_max_sum, columns.stride(0), *output.stride()[:2], **shape
        )


def install(layers: dict[str, Any], caches: dict[str, Any], requests: int, size: int) -> None:
    """Make the attention of these layers read right-aligned rows, too. size: tokens per block.

    Raises RuntimeError, which stops the engine during startup, if a layer's attention is not supported.
    """
    kernels: dict[tuple[int, int, int], Kernel] = {}
    for name, cache in caches.items():
        impl = layers[name].impl
        shape = (impl.num_heads, impl.num_kv_heads, impl.head_size)
        _check(name, impl, cache, size)
        if shape not in kernels:
            kernels[shape] = Kernel(requests, *shape, cache.device)
        impl.headway_kernel = kernels[shape]
        wrap(type(impl), "forward", _forward)


def _check(name: str, impl: Any, cache: Any, size: int) -> None:
    shape = tuple(cache.shape[1:]) == (impl.num_kv_heads, size, 2 * impl.head_size)
    unsupported = {
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "attention sinks": getattr(impl, "sinks", None) is not None,
        f"a KV cache of the shape {tuple(cache.shape)}": not shape,
    }
    found = next((what for what, there in unsupported.items() if there), None)
    if found:
        other = "" if shape else " Or try --attention-backend TRITON_ATTN in args."
        raise RuntimeError(
            f"Layer {name} ({type(impl).__name__}) has {found}, which two-ended blocks do not support. "
            f"Use recipe bros-plain-blocks.{other}"
        )


def _forward(
    stock: Any, impl: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any,
    output: Any, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    result = stock(impl, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
    kernel = impl.headway_kernel
    if metadata is not None and rows.table is not None and (rows.current or not kernel.compiled):
        kernel.compiled = True  # by a launch without rows, at the first step: not when a request waits for it
        columns = rows.columns[: max(len(rows.current), 1)]
        cap = getattr(impl, "logits_soft_cap", None) or 0.0
        kernel.attend(query, kv_cache, columns, rows.table, output, impl.scale, cap)
    return result


class Slots:
    """Reads and writes the KV of single slots."""

    def read(self, cache: Any, slots: Any) -> Any:
        """Return the KV of slots, (slots, KV heads, 2 x head size)."""
        return cache[slots // cache.shape[2], :, slots % cache.shape[2]]

    def write(self, cache: Any, slots: Any, data: Any) -> None:
        """Write the KV of slots."""
        cache[slots // cache.shape[2], :, slots % cache.shape[2]] = data
