"""Attention over KV blocks that are filled from the right (BROS 5.1), as a Triton kernel.

It runs after the engine's own attention and writes the output of right-aligned rows anew: one launch per layer
and two stages, as in flash decoding. The keys and values of any of vLLM's attentions whose cache has the logical
shape (blocks, KV heads, slots, 2 x head size) are read by their strides. Rows beyond this step's leave at once, so
that a CUDA graph may hold the launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headway.engines.vllm.plugin.right_aligned_rows import rows, wrap

MULTIPLE = 16  # tokens that a block is a multiple of: what `tl.dot` takes at least
_LOWEST = -1e38  # a masked score; not infinite, because a split may have no slot of the row's own
_SPLITS = 16  # programs that share one row's context, at most
_SCRATCH = 64 << 20  # bytes of their results, at most


@triton.jit
def _scores(q, k, scale, softcap):  # type: ignore[no-untyped-def]
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if softcap > 0:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
    return score


@triton.jit  # type: ignore[untyped-decorator]
def _partial(  # type: ignore[no-untyped-def]
    rows, tables, query, cache, sums, tops, scale, softcap,
    row_stride, table_stride, query_token, query_head, block_stride, head_stride, slot_stride,
    SIZE: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a row's context, for the query heads of one KV head."""
    i, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, row = tl.load(rows + i * row_stride), tl.load(rows + i * row_stride + 1)
    full, kept = tl.load(rows + i * row_stride + 2), tl.load(rows + i * row_stride + 3)
    if (kept == 0) | (kept == SIZE):
        return
    group, element, slot = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED), tl.arange(0, TILE)
    heads = head * GROUP + group
    real, wide = group < GROUP, element < DIM
    at = query + token.to(tl.int64) * query_token + heads[:, None] * query_head + element[None, :]
    q = tl.load(at, mask=real[:, None] & wide[None, :], other=0.0)
    top = tl.full([GROUP_PADDED], LOWEST, tl.float32)
    weight = tl.zeros([GROUP_PADDED], tl.float32)
    mixed = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    tiles = (full + 1) * (SIZE // TILE)
    each = tl.cdiv(tiles, SPLITS)
    for tile in range(split * each, tl.minimum(split * each + each, tiles)):
        index, inside = tile // (SIZE // TILE), (tile % (SIZE // TILE)) * TILE + slot
        block = tl.load(tables + row * table_stride + index).to(tl.int64)
        mine = inside >= tl.where(index < full, 0, SIZE - kept)
        place = cache + block * block_stride + head * head_stride + inside[:, None] * slot_stride + element[None, :]
        mask = mine[:, None] & wide[None, :]
        k, v = tl.load(place, mask=mask, other=0.0), tl.load(place + DIM, mask=mask, other=0.0)
        score = tl.where(mine[None, :], _scores(q, k, scale, softcap), LOWEST)
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp(score - higher[:, None])
        fade = tl.exp(top - higher)
        weight = weight * fade + tl.sum(share, 1)
        mixed = mixed * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        top = higher
    part = (i * HEADS + heads) * SPLITS + split
    tl.store(sums + part[:, None] * DIM + element[None, :], mixed, mask=real[:, None] & wide[None, :])
    tl.store(tops + part * 2, top, mask=real)
    tl.store(tops + part * 2 + 1, weight, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    rows, out, sums, tops, row_stride, out_token, out_head,
    SIZE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row and query head into its output."""
    i, head = tl.program_id(0), tl.program_id(1)
    token, kept = tl.load(rows + i * row_stride), tl.load(rows + i * row_stride + 3)
    if (kept == 0) | (kept == SIZE):
        return
    split, element = tl.arange(0, SPLITS), tl.arange(0, DIM_PADDED)
    part, wide = (i * HEADS + head) * SPLITS + split, element < DIM
    top, weight = tl.load(tops + part * 2), tl.load(tops + part * 2 + 1)
    mixed = tl.load(sums + part[:, None] * DIM + element[None, :], mask=wide[None, :], other=0.0)
    fade = tl.exp(top - tl.max(top, 0))
    value = tl.sum(mixed * fade[:, None], 0) / tl.sum(weight * fade, 0)
    at = out + token.to(tl.int64) * out_token + head * out_head + element
    tl.store(at, value.to(out.dtype.element_ty), mask=wide)


class Kernel:
    """The kernel with its scratch memory, for layers of one shape.

    heads, kv_heads, dim: of a layer on this device.
    """

    def __init__(self, requests: int, heads: int, kv_heads: int, dim: int, device: Any) -> None:
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        most = min(_SPLITS, max(_SCRATCH // (requests * heads * dim * 4), 1))
        self.splits = 1 << (most.bit_length() - 1)
        parts = requests * heads * self.splits
        self._sums = torch.empty((parts, dim), dtype=torch.float32, device=device)
        self._tops = torch.empty((parts, 2), dtype=torch.float32, device=device)

    def attend(self, query: Any, cache: Any, columns: Any, table: Any, output: Any, scale: float, cap: float) -> None:
        """Write the output of the right-aligned rows.

        query, output: (tokens, heads, dim).
        cache: (blocks, KV heads, slots, 2 x dim), keys before values.
        columns: `Rows.device`, or its first rows.
        table: block table, int32 (requests, blocks).
        cap: of the logits, 0 = none.
        """
        query, output = (x.view(x.shape[0], self.heads, self.dim) for x in (query, output))
        size, wide = cache.shape[2], triton.next_power_of_2(self.dim)
        group = self.heads // self.kv_heads
        tile = min(size & -size, 64)  # a power of two that divides the block
        shape = {"SIZE": size, "HEADS": self.heads, "DIM": self.dim, "DIM_PADDED": wide, "SPLITS": self.splits}
        _partial[(columns.shape[0], self.kv_heads, self.splits)](
            columns, table, query, cache, self._sums, self._tops, scale, cap,
            columns.stride(0), table.stride(0), *query.stride()[:2], *cache.stride()[:3],
            TILE=tile, GROUP=group, GROUP_PADDED=max(triton.next_power_of_2(group), 16), LOWEST=_LOWEST, **shape,
        )  # fmt: skip
        _merge[(columns.shape[0], self.heads)](
            columns, output, self._sums, self._tops, columns.stride(0), *output.stride()[:2], **shape
        )


def install(layers: dict[str, Any], caches: dict[str, Any], requests: int) -> None:
    """Let the attention of these layers read right-aligned rows.

    Raises RuntimeError, which ends the start of the engine, for an attention that cannot.
    """
    kernels: dict[tuple[int, int, int], Kernel] = {}
    for name, cache in caches.items():
        impl = layers[name].impl
        shape = (impl.num_heads, impl.num_kv_heads, impl.head_size)
        _check(name, impl, cache)
        if shape not in kernels:
            kernels[shape] = Kernel(requests, *shape, cache.device)
        impl.headway_kernel = kernels[shape]
        wrap(type(impl), "forward", _forward)


def _check(name: str, impl: Any, cache: Any) -> None:
    missing = {
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "attention sinks": getattr(impl, "sinks", None) is not None,
        f"a KV cache of the shape {tuple(cache.shape)}": cache.dim() != 4
        or (cache.shape[1], cache.shape[3]) != (impl.num_kv_heads, 2 * impl.head_size),
    }
    found = next((what for what, there in missing.items() if there), None)
    if found:
        kind = type(impl).__name__
        raise RuntimeError(
            f"Two-ended blocks do not work with {found}, which layer {name} ({kind}) has. "
            "Choose recipe bros-plain-blocks, or --attention-backend TRITON_ATTN in args."
        )


def _forward(
    stock: Any, impl: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any,
    output: Any, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    result = stock(impl, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
    capturing = query.is_cuda and torch.cuda.is_current_stream_capturing()
    if metadata is not None and (rows.now or capturing):
        columns = rows.device if capturing else rows.device[: len(rows.now)]
        cap = getattr(impl, "logits_soft_cap", None) or 0.0
        impl.headway_kernel.attend(query, kv_cache, columns, rows.table, output, impl.scale, cap)
    return result


class Slots:
    """Reads and writes the KV of single slots."""

    def read(self, cache: Any, slots: Any) -> Any:
        """Return the KV of slots, (slots, KV heads, 2 x head size)."""
        return cache[slots // cache.shape[2], :, slots % cache.shape[2]]

    def write(self, cache: Any, slots: Any, data: Any) -> None:
        """Write the KV of slots."""
        cache[slots // cache.shape[2], :, slots % cache.shape[2]] = data
