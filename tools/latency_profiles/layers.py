"""Iteration latency as the sum of its operators, from Vidur's profiles.

An iteration is the sum of its layers (measured operator medians at the batch's number of tokens), all-reduce
and the CPU overhead. Attention was profiled only for other models, so its time is modelled: KV reads at a share
of the memory bandwidth plus arithmetic at a share of the peak, both calibrated on those profiles.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.policy.forecast.latency.laws import nonnegative
from headway.types import Batch, Floats

Rows = list[dict[str, str]]
_ONCE = "emb_ms"  # all other operators run in every layer
_OPERATORS = (
    "input_layernorm_ms",
    "attn_pre_proj_ms",
    "attn_rope_ms",
    "attn_post_proj_ms",
    "post_attention_layernorm_ms",
    "mlp_up_proj_ms",
    "mlp_act_ms",
    "mlp_down_proj_ms",
    "add_ms",
)
# Not ray_comm_time_mean_ms: current engines do not communicate with workers through Ray in every step.
_AROUND = (
    "schedule_median_ms",
    "sampler_e2e_median_ms",
    "prepare_inputs_e2e_median_ms",
    "process_model_outputs_median_ms",
)


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer's shape, with 2 bytes per weight and per KV element."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    weights_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Return the KV bytes per token, over all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's data sheet: bytes, bytes per second, dense 16-bit FLOP per second."""

    name: str
    memory: float
    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention law of one layer: launch + ideal time / share, in seconds, for decode and for prefill."""

    decode_launch: float
    decode_sequence: float
    bandwidth_share: float
    prefill_launch: float
    flops_share: float
    error: float  # mean relative error on the profile it was calibrated on

    def seconds(self, batch: Batch, model: Model, gpu: Gpu, tp: int) -> float:
        """Return the seconds of one layer on one of `tp` GPUs."""
        out = 0.0
        if batch.decodes:
            out += self.decode_launch + self.decode_sequence * batch.decodes
            out += _read(batch.context, model, tp) / (gpu.bandwidth * self.bandwidth_share)
        if batch.prefill:
            out += self.prefill_launch
            out += _arithmetic(batch.prefill_context, model, tp) / (gpu.flops * self.flops_share)
        return out


def calibrate(rows: Rows, model: Model, gpu: Gpu, tp: int) -> Attention:
    """Return the attention law fitted to a profile of `model` on `gpu`."""
    batches, times = _attention_rows(rows)
    decode = np.array([bool(b.decodes) for b in batches])
    ideal = np.array([_ideal(b, model, gpu, tp) for b in batches])
    count = np.array([float(b.decodes) for b in batches])
    one = np.ones_like(times)
    a, b, slow = _relative((one, count, ideal), times, decode)
    c, slower = _relative((one, ideal), times, ~decode)
    law = Attention(a, b, 1 / slow, c, 1 / slower, 0.0)
    ours = np.array([law.seconds(batch, model, gpu, tp) for batch in batches])
    return Attention(a, b, 1 / slow, c, 1 / slower, float(np.abs(ours / times - 1).mean()))


class Layers:
    """Iteration times of a model on `tp` GPUs, as sums of operator profiles.

    cpu: CPU overheads of this model and tp. reduce_rows: all-reduce profile, used only with tp > 1.
    """

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        tp: int,
        attention: Attention,
        *,
        operators: Rows,
        cpu: Rows,
        reduce_rows: Rows | None = None,
    ) -> None:
        self.model, self.gpu, self.tp, self.attention = model, gpu, tp, attention
        mine = [row for row in operators if int(row["num_tensor_parallel_workers"]) == tp]
        self._layer = _curve(mine, "num_tokens", _OPERATORS)
        self._embed = _curve(mine, "num_tokens", (_ONCE,))
        self._cpu = _line(cpu, "batch_size", _AROUND)
        self._reduce = _curve(_reducers(reduce_rows or [], tp), "size_bytes", ("all_reduce_ms",))

    def seconds(self, batch: Batch) -> float:
        """Return the seconds of one iteration; prompts count as one sequence."""
        tokens = batch.decodes + batch.prefill
        sequences = batch.decodes + bool(batch.prefill)
        layer = self._layer(tokens) + self.attention.seconds(batch, self.model, self.gpu, self.tp)
        if self.tp > 1:
            layer += 2 * self._reduce(2 * tokens * self.model.hidden)
        head = 2 * self.model.vocab * self.model.hidden / self.tp
        share = self.attention.bandwidth_share
        return (
            self.model.layers * layer + self._embed(tokens) + head / (self.gpu.bandwidth * share) + self._cpu(sequences)
        )


def read(folder: Path, name: str) -> Rows:
    """Return the rows of the profile `name` (.csv or .csv.gz) in `folder`/profiles."""
    path = folder / "profiles" / name
    with gzip.open(path, "rt") if name.endswith(".gz") else path.open() as file:
        return list(csv.DictReader(file))


def grid(most_kv: float = float("inf"), longest: int = 4096, *, mixed: bool = True) -> list[Batch]:
    """Return typical batches of a server: decodes, prompts (whole and in chunks), and both together."""
    decode = [
        Batch(n, n * context, 0)
        for n in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
        for context in (128, 256, 512, 1024, 2048)
        if n * context <= most_kv
    ]
    whole = [_chunk(n, 0) for n in (32, 64, 128, 256, 512, 1024, 2048, 4096) if n <= longest]
    if not mixed:
        return decode + whole
    chunks = [_chunk(n, before) for n in (256, 512, 1024) for before in (1024, 4096, 16384)]
    both = [
        Batch(d.decodes, d.context, p.prefill, p.prefill_context)
        for d in (Batch(n, n * context, 0) for n in (8, 32, 64, 128) for context in (256, 1024))
        for p in (_chunk(n, before) for n in (128, 256, 512, 1024) for before in (0, 1024))
    ]
    return decode + whole + chunks + both


def _chunk(new: int, before: int) -> Batch:
    return Batch(0, 0, new, new * before + new * new // 2)


def _read(context: int, model: Model, tp: int) -> float:
    """Return the KV bytes that one layer reads on one GPU; each GPU has at least one KV head."""
    return 2 * 2 * context * max(model.kv_heads // tp, 1) * model.head_dim


def _arithmetic(pairs: int, model: Model, tp: int) -> float:
    return 4 * pairs * model.heads / tp * model.head_dim


def _ideal(batch: Batch, model: Model, gpu: Gpu, tp: int) -> float:
    if batch.decodes:
        return _read(batch.context, model, tp) / gpu.bandwidth
    return _arithmetic(batch.prefill_context, model, tp) / gpu.flops


def _attention_rows(rows: Rows) -> tuple[list[Batch], Floats]:
    """Return the profiled batches and seconds, without rows that have no time."""
    batches, times = [], []
    for row in rows:
        prompt = row["is_prefill"] == "True"
        ms = float(row["attn_prefill_ms" if prompt else "attn_decode_ms"] or 0)
        count, kv = int(row["batch_size"]), int(row["kv_cache_size"])
        if ms > 0:
            batches.append(_chunk(int(row["prefill_chunk_size"]), kv) if prompt else Batch(count, count * kv, 0))
            times.append(ms / 1000)
    return batches, np.array(times)


def _relative(columns: Sequence[Floats], times: Floats, rows: Floats) -> Floats:
    a = np.stack([column[rows] for column in columns], 1) / times[rows, None]
    return nonnegative(a, np.ones(len(a)))


def _reducers(rows: Rows, tp: int) -> Rows:
    return [r for r in rows if int(r["num_workers"]) == tp and int(r["devices_per_node"]) == tp]


def _curve(rows: Rows, key: str, columns: Iterable[str]) -> Callable[[float], float]:
    """Return a function from key to seconds: medians of the columns' sum, interpolated linearly."""
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(float(row[key]), []).append(sum(float(row[c]) for c in columns) / 1000)
    x = np.array(sorted(found))
    y = np.array([np.median(found[at]) for at in x])
    return lambda at: float(np.interp(at, x, y))


def _line(rows: Rows, key: str, columns: Iterable[str]) -> Callable[[float], float]:
    """Return a linear fit of the columns' sum in seconds; profiles end below the largest batches."""
    y = np.array([sum(float(row[c]) for c in columns) for row in rows]) / 1000
    slope, base = np.polyfit([float(row[key]) for row in rows], y, 1)
    return lambda at: float(base + slope * at)
