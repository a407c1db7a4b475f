"""Builds the latency profiles that come with Headway from public measurements.

Each profile is a latency law (BROS 4.1, SLO-aware 4.2) fitted to public measurements of one model on one
device. `HEADWAY_DATA=... python -m tools.latency_profiles.build --out DIR` reproduces the files byte for byte
and prints the error of each law.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import ConfigError
from headway.policy.forecast.latency.laws import LAWS, Additive, Bros, Error, LatencyLaw, Shapes, errors
from headway.policy.forecast.latency.profiles import LatencyProfile
from headway.types import Batch, Floats
from tools.latency_profiles.layers import Attention, Gpu, Layers, Model, Rows, calibrate, grid, read

# SloAware is compared but never chosen: a `Batch` does not hold its prompts, so more context can make it faster.
_CHOICE = ("additive", "roofline", "bros")
_GIB = 2**30
A100 = Gpu("A100-SXM4-80GB", 80 * _GIB, 2.039e12, 312e12)
A100_40 = Gpu("A100-SXM4-40GB", 40 * _GIB, 1.555e12, 312e12)
A100_PCIE = Gpu("A100-PCIe-80GB", 80 * _GIB, 1.935e12, 312e12)
H100 = Gpu("H100-SXM5-80GB", 80 * _GIB, 3.352e12, 989e12)
A100_40_PCIE = Gpu("A100-PCIe-40GB", 40 * _GIB, 1.555e12, 312e12)
A40 = Gpu("A40-48GB", 48 * _GIB, 0.696e12, 149.7e12)
A30 = Gpu("A30-24GB", 24 * _GIB, 0.933e12, 165e12)
A10 = Gpu("A10-24GB", 24 * _GIB, 0.6e12, 125e12)
OPT_13B = Model("facebook/opt-13b", 40, 5120, 40, 40, 128, 50272, 25_700_000_000)
OPT_30B = Model("facebook/opt-30b", 48, 7168, 56, 56, 128, 50272, 59_950_000_000)
OPT_66B = Model("facebook/opt-66b", 64, 9216, 72, 72, 128, 50272, 131_400_000_000)
LLAMA_7B = Model("meta-llama/Llama-2-7b-hf", 32, 4096, 32, 32, 128, 32000, 13_476_000_000)
LLAMA_70B = Model("meta-llama/Llama-2-70b-hf", 80, 8192, 64, 8, 128, 32000, 137_950_000_000)
LLAMA_3_70B = Model("meta-llama/Meta-Llama-3-70B", 80, 8192, 64, 8, 128, 128256, 141_110_000_000)
YI_34B = Model("01-ai/Yi-34B-200K", 60, 7168, 56, 8, 128, 64000, 68_780_000_000)
QWEN_7B = Model("Qwen/Qwen2-7B", 28, 3584, 28, 4, 128, 152064, 15_230_000_000)
SMOLLM = Model("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 576, 9, 3, 64, 49152, 269_000_000)
_LOADED = {  # bytes of the models whose loading was measured
    "facebook/opt-6.7b": 13_320_000_000,
    "meta-llama/Llama-3.1-8B-Instruct": 16_060_000_000,
    "Qwen/Qwen3-32B": 65_520_000_000,
}
_ACTIVATIONS = 2 * _GIB  # per GPU, beside weights and KV
_UTILISATION = 0.9  # vLLM's default share of the GPU's memory

# vLLM 0.32 on 2 CPU cores, SmolLM2-135M, bfloat16, eager, in process, block 128: milliseconds per step.
_CPU_CONTEXTS = (32, 512, 1024, 1900)
_CPU_DECODE = {
    1: (10.6, 12.0, 11.9, 12.8),
    2: (11.2, 13.0, 14.1, 15.3),
    4: (12.1, 15.7, 18.2, 23.2),
    8: (13.8, 20.2, 27.0, 34.9),
    16: (18.6, 28.0, 40.1, 57.6),
    32: (26.7, 45.9, 69.5, 104.0),
    64: (39.3, 82.0, 127.0, 142.0),
}
_CPU_PREFILL = {16: 17.3, 64: 31.3, 128: 49.2, 256: 76.4, 512: 154.0, 1024: 353.0, 2000: 856.0}
# The same with 8 answers at context 512 in the batch.
_CPU_MIXED = {0: 19.5, 16: 24.7, 32: 30.1, 64: 40.4, 128: 57.8, 256: 95.5, 512: 177.5, 1024: 370.0}


@dataclass(frozen=True, slots=True)
class Sample:
    """The data that a profile is fitted to.

    measured: errors are computed over the first `measured` batches; None = over all.
    """

    model: Model
    device: str
    batches: list[Batch]
    seconds: Floats
    source: dict[str, str]
    kv_tokens: int
    load: tuple[float, float]
    copy_gb_s: float | None
    block_size: int = 16
    measured: int | None = None


class Data:
    """The public profiles in `folder`, and the values that several files share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        on_a100 = read(folder, "vidur_attention_a100_llama-2-70b_tp2.csv.gz")
        on_a30 = read(folder, "vidur_attention_a30_qwen2-7b.csv.gz")
        self.on_a100 = calibrate(on_a100, LLAMA_70B, A100, 2)
        self.on_a30 = calibrate(on_a30, QWEN_7B, A30, 1)

    def load_seconds(self, model: Model) -> tuple[tuple[float, float], str]:
        """Return (cold, warm) seconds to load the weights, and their source."""
        near = min(_LOADED, key=lambda name: abs(_LOADED[name] - model.weights_bytes))
        ratio = model.weights_bytes / _LOADED[near]
        rows = [r for r in read(self.folder, "serverlessllm_load_times.csv.gz") if r["model"] == near]
        cold, _ = _median(rows, ("safetensors",), ("random",))
        warm, how = _median(rows, ("sllm", "phantom"), ("cached", "random"))
        text = f"serverlessllm_load_times: medians of {near} x {ratio:.2f} (bytes; the nearest model by size), "
        where = f"cold = safetensors, random; warm = {how}. One process reads all; TP may be faster."
        return (_digits(cold * ratio), _digits(warm * ratio)), text + where

    def copy_gb_s(self, tp: int) -> tuple[float, str]:
        """Return GB/s (1e9 bytes) of KV between GPU and host over `tp` links, and its source."""
        rows = [r for r in read(self.folder, "hermes_kv_swap_llama7b.csv") if r["num_tokens"] == "16384"]
        slow = max(
            np.median([float(r["time_ms"]) for r in rows if r["operation"] == way]) for way in ("gpu2cpu", "cpu2gpu")
        )
        one = 16384 * LLAMA_7B.kv_bytes / (slow / 1000) / 1e9
        text = "hermes_kv_swap_llama7b: slower direction at 16,384 tokens, GPU not stated (like PCIe 4 x16)"
        return _digits(float(one) * tp), f"{text}; x {tp} links. Not measured on this device."


def distserve(data: Data, model: Model, tp: int) -> Sample:
    """Return DistServe's fit of vLLM on A100 as points of a grid; its two laws exclude mixed batches."""
    law = json.loads((data.folder / "profiles" / "distserve_a100_80g_fits.json").read_text())
    law = law["vllm_engine"][model.name][str(tp)]
    kv = {(r["model"], r["tp"], r["pp"]): r for r in read(data.folder, "distserve_a100_80g_max_kv_tokens.csv")}
    tokens = int(kv[model.name, str(tp), "1"]["max_num_tokens"])
    batches = grid(tokens, 2048, mixed=False)
    return _sample(
        data,
        model,
        A100,
        tp,
        batches,
        lambda batch: _distserve_ms(law, batch) / 1000,
        coefficients="distserve_a100_80g_fits.json, vllm_engine (prefill a + b n + c n^2, decode "
        "a + b context + c batch with another set from batch 95): points of those laws, so errors are "
        "against them, not against a machine. No mixed batch was measured; theirs is an extrapolation.",
        kv=(tokens, "distserve_a100_80g_max_kv_tokens.csv, pp 1"),
    )


def between(data: Data, model: Model, less: Model, more: Model, there: Gpu, tp: int) -> Sample:
    """Return an unmeasured model between two measured ones: their laws, weighted by bytes of weights.

    Of `there`, only the memory size is used; both models were measured on 80 GB.
    """
    laws = json.loads((data.folder / "profiles" / "distserve_a100_80g_fits.json").read_text())["vllm_engine"]
    share = (model.weights_bytes - less.weights_bytes) / (more.weights_bytes - less.weights_bytes)
    pairs = ((1 - share, laws[less.name][str(tp)]), (share, laws[more.name][str(tp)]))
    tokens = _room(model, there, tp)
    return _sample(
        data,
        model,
        there,
        tp,
        grid(tokens, 2048, mixed=False),
        lambda batch: sum(weight * _distserve_ms(law, batch) for weight, law in pairs) / 1000,
        coefficients=f"NOT measured: {1 - share:.2f} x {less.name} + {share:.2f} x {more.name}, by bytes of "
        f"weights, both of distserve_a100_80g_fits.json, vllm_engine, tp {tp}, measured on {A100.name} (this "
        f"one reads memory at {there.bandwidth / A100.bandwidth:.0%} of that). Errors are against that sum. "
        "No mixed batch was measured.",
        kv=None,
    )


def vidur(
    data: Data, model: Model, gpu: Gpu, tp: int, attention: Attention, cpu: str, cpu_as: tuple[Model, int] | None = None
) -> Sample:
    """Return iteration times summed from Vidur's operator profiles.

    cpu_as: model and tensor parallelism whose CPU overheads replace this model's, which were not profiled.
    """
    short = model.name.split("/")[1].lower().removesuffix("-hf").removeprefix("meta-")
    kind = gpu.name.split("-")[0].lower()
    layers = Layers(
        model,
        gpu,
        tp,
        attention,
        operators=read(data.folder, f"vidur_mlp_{kind}_{short}.csv.gz"),
        cpu=_cpu_rows(data, cpu, *(cpu_as or (model, tp))),
        reduce_rows=read(data.folder, f"vidur_allreduce_{kind}_dgx.csv.gz") if tp > 1 else None,
    )
    other = f" ({cpu_as[0].name}, tp {cpu_as[1]})" if cpu_as else ""
    tokens = _room(model, gpu, tp)
    profile = "A100 llama-2-70b TP 2" if attention is data.on_a100 else "A30 qwen2-7b"
    text = (
        f"vidur_mlp_{kind}_{short} layer medians x {model.layers}; CPU overheads of {cpu}{other} without Ray "
        f"communication; {'all-reduce ' + kind + ' twice a layer; ' if tp > 1 else ''}"
        f"attention is MODELLED, not measured: KV bytes at {attention.bandwidth_share:.0%} of the data "
        f"sheet's bandwidth, prefill arithmetic at {attention.flops_share:.0%} of its peak, both "
        f"calibrated on {profile} (mean error {attention.error:.0%} there). No whole iteration was measured; "
        "errors are those of the form against this composition."
    )
    sample = _sample(data, model, gpu, tp, grid(tokens), layers.seconds, coefficients=text, kv=None)
    sample.source.update(_check(data, layers))
    return sample


def sarathi(data: Data) -> Sample:
    """Return Yi-34B on two A100s: 15 measured batches, and those with decodes moved to other contexts."""
    rows = read(data.folder, "sarathi_yi34b_2xa100_prefill_decode.csv")
    pairs = [_sarathi_row(row) for row in rows if row["num_prefill_tokens"] != "256"]
    per_token = YI_34B.kv_bytes / 2 / (A100_PCIE.bandwidth * data.on_a100.bandwidth_share)
    moved = [
        (Batch(b.decodes, b.decodes * context, 0), s + per_token * (b.decodes * context - b.context))
        for b, s in pairs
        for context in (256, 4096)
        if b.decodes
    ]
    both = dict(pairs + moved)
    return _sample(
        data,
        YI_34B,
        A100_PCIE,
        2,
        list(both),
        both.__getitem__,
        coefficients="sarathi_yi34b_2xa100_prefill_decode.csv without its 256-token row (warm-up); every "
        "decode was at context 1,022 (sarathi-serve's figure-2 script), so the cost of context is MODELLED "
        f"as KV bytes at {data.on_a100.bandwidth_share:.0%} of the bandwidth. Errors over 15 measured rows.",
        kv=None,
        measured=len(pairs),
    )


def hermes_log(data: Data) -> Sample:
    """Return the iterations that Hermes' authors logged, without swaps, and those with answers at other contexts.

    The log has no contexts: an answer's is taken as the log's mean prompt and half of its mean answer, and prompts of
    one iteration as equally long.
    """
    names = ("num_prefill", "num_decode", "num_tokens", "swap_ms", "step_ms")
    log = [[float(row[name]) for name in names] for row in read(data.folder, "hermes_vllm_iterations.csv.gz")]
    prompts, answers, tokens, swap, step = np.array([row for row in log if row[2]]).T
    context = round(tokens[prompts > 0].sum() / prompts.sum() + answers.sum() / prompts.sum() / 2)
    batches = [
        Batch(0, 0, int(n), int(n * n / p / 2)) if p else Batch(int(a), int(a) * context, 0)
        for p, a, n in zip(prompts, answers, tokens, strict=True)
    ]
    seconds = (step - swap) / 1000
    per_token = LLAMA_7B.kv_bytes / (A100_40_PCIE.bandwidth * data.on_a100.bandwidth_share)
    measured = list(zip(batches, seconds.tolist(), strict=True))
    moved = [
        (replace(b, context=b.decodes * other), s + per_token * b.decodes * (other - context))
        for b, s in measured
        for other in (256, 4096)
        if b.decodes
    ]
    text = (
        "hermes_vllm_iterations.csv.gz (the Hermes authors' own log, Hermes/evaluation/plot/log2.txt): step less swap "
        "of all iterations with tokens. The log names neither model nor GPU; those of the paper (5.1) are assumed. It "
        f"has no contexts: answers are taken to be at {context} (mean prompt + half of the mean answer), and the cost "
        f"of context is MODELLED as KV bytes at {data.on_a100.bandwidth_share:.0%} of the bandwidth. No mixed batch "
        f"is in it. Errors over its {len(batches):,} rows."
    )
    unknown = dict[Batch, float]().__getitem__  # equal batches took different times
    sample = _sample(data, LLAMA_7B, A100_40_PCIE, 1, [], unknown, coefficients=text, kv=None, measured=len(batches))
    both = measured + moved
    return replace(sample, batches=[batch for batch, _ in both], seconds=np.array([s for _, s in both]))


def scaled(data: Data, model: Model, base: Sample, here: Gpu, there: Gpu) -> Sample:
    """Return a sample of one GPU scaled to another by the ratios of their data sheets (a roofline).

    Prompt tokens, prompt pairs and sequences scale with arithmetic; weights (the bases) and the context of
    answers scale with memory bandwidth. The bases' CPU part is scaled, too, which overestimates it.
    """
    slower, narrower = here.flops / there.flops, here.bandwidth / there.bandwidth
    fitted = Bros.fit(Shapes.of(base.batches), base.seconds)
    law = Bros(
        fitted.prefill_tokens * slower,
        fitted.prefill_pairs * slower,
        fitted.prefill_base * narrower,
        fitted.decode_tokens * slower,
        fitted.decode_pairs * narrower,
        fitted.decode_base * narrower,
    )
    batches = grid(_room(model, there, 1))
    times = dict(zip(batches, law.seconds(Shapes.of(batches)).tolist(), strict=True))
    text = (
        f"NOT measured: the bros law of {model.name} on {here.name} times the ratios of the data sheets: "
        f"prompts' tokens and pairs and answers' sequences x {slower:.2f} "
        f"({here.flops / 1e12:g} / {there.flops / 1e12:g} TFLOPS), bases and answers' context x "
        f"{narrower:.2f} ({here.bandwidth / 1e9:g} / {there.bandwidth / 1e9:g} GB/s). Errors are those of "
        f"the form against that law. {here.name}: {base.source['coefficients']}"
    )
    return _sample(data, model, there, 1, batches, times.__getitem__, coefficients=text, kv=None)


def smollm(_: Data) -> Sample:
    """Return the measurements from this project's own machine, all of which are in the tables above."""
    decode = [
        (Batch(n, n * context, 0), ms)
        for n, row in _CPU_DECODE.items()
        for context, ms in zip(_CPU_CONTEXTS, row, strict=True)
    ]
    prefill = [(Batch(0, 0, n, n * n // 2), ms) for n, ms in _CPU_PREFILL.items()]
    mixed = [(Batch(8, 8 * 512, n, n * n // 2), ms) for n, ms in _CPU_MIXED.items()]
    batches, ms = zip(*(decode + prefill + mixed), strict=True)
    tokens = _GIB // SMOLLM.kv_bytes // 128 * 128
    source = {
        "coefficients": "measured here: vLLM 0.32 on 2 CPU cores, eager, 2 threads, no prefix cache",
        "kv_tokens": "1 GiB of KV, Headway's default (engines.kv_gib), in blocks of 128",
        "load": "cold = `vllm serve` to /health, process start included; warm = reload_weights in place",
        "kv_copy": "not measured",
    }
    times = np.array(ms) / 1000
    return Sample(SMOLLM, "2 CPU cores", list(batches), times, source, tokens, (17.0, 0.14), None, block_size=128)


FILES: dict[str, Callable[[Data], Sample]] = {
    "llama-2-70b-a100-tp4": lambda d: vidur(d, LLAMA_70B, A100, 4, d.on_a100, "a100"),
    "llama-2-70b-h100-tp4": lambda d: vidur(d, LLAMA_70B, H100, 4, d.on_a100, "a100"),
    "llama-2-7b-a10": lambda d: scaled(d, LLAMA_7B, vidur(d, LLAMA_7B, A100, 1, d.on_a100, "a100"), A100, A10),
    "llama-2-7b-a100": lambda d: vidur(d, LLAMA_7B, A100, 1, d.on_a100, "a100"),
    "llama-2-7b-a40": lambda d: vidur(d, LLAMA_7B, A40, 1, d.on_a30, "a40"),
    "llama-2-7b-h100": lambda d: vidur(d, LLAMA_7B, H100, 1, d.on_a100, "a100"),
    "llama-2-7b-hermes-authors": hermes_log,
    "llama-3-70b-a100-tp8": lambda d: vidur(d, LLAMA_3_70B, A100, 8, d.on_a100, "a100", (LLAMA_70B, 4)),
    "opt-13b-a100": lambda d: distserve(d, OPT_13B, 1),
    "opt-30b-a100-40g-tp4": lambda d: between(d, OPT_30B, OPT_13B, OPT_66B, A100_40, 4),
    "opt-66b-a100-tp4": lambda d: distserve(d, OPT_66B, 4),
    "smollm2-135m-cpu2": smollm,
    "yi-34b-a100-tp2": sarathi,
}


def build(sample: Sample) -> LatencyProfile:
    """Fit every law to a sample and return the latency profile with the most accurate one."""
    x = Shapes.of(sample.batches)
    seen = np.arange(len(sample.batches)) < (sample.measured or len(sample.batches))
    laws: dict[str, LatencyLaw] = {name: _rounded(law.fit(x, sample.seconds)) for name, law in LAWS.items()}
    off = {name: _errors(law, x.only(seen), sample.seconds[seen]) for name, law in laws.items()}
    best = min(_CHOICE, key=lambda name: off[name]["all"].mean)
    additive = laws["additive"]
    assert isinstance(additive, Additive)
    return LatencyProfile(
        sample.model.name,
        sample.device,
        laws[best],
        additive,
        sample.block_size,
        sample.model.kv_bytes,
        sample.model.weights_bytes,
        sample.kv_tokens,
        *sample.load,
        sample.copy_gb_s,
        off,
        sample.source,
    )


def table(files: dict[str, LatencyProfile]) -> str:
    """Return a table of the mean and p90 errors of each law by kind of batch; * marks the profile's law."""
    lines = [f"{'file':22}{'form':12}" + "".join(f"{k:>16}" for k in ("all", "prefill", "decode", "mixed"))]
    for name, file in files.items():
        for law, kinds in file.errors.items():
            cells = (kinds.get(kind) for kind in ("all", "prefill", "decode", "mixed"))
            shown = "".join(f"{e.mean:>9.1%}{e.p90:>7.1%}" if e else f"{'-':>16}" for e in cells)
            lines.append(f"{name:22}{law + ('*' if law == file.law.NAME else ''):12}{shown}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Write the built-in latency profiles and Hermes' authors', and print the errors. ConfigError without the data."""
    parser = argparse.ArgumentParser(
        prog="tools.latency_profiles.build", description="Build the built-in latency profiles."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    out = parser.parse_args(arguments).out
    folder = os.environ.get("HEADWAY_DATA")
    if not folder:
        raise ConfigError("HEADWAY_DATA is not set.", "Set it to the folder that holds profiles/.")
    data = Data(Path(folder))
    files = {name: build(make(data)) for name, make in FILES.items()}
    out.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        file.save(out / f"{name}.json")
    print(table(files))


def _sample(
    data: Data,
    model: Model,
    gpu: Gpu,
    tp: int,
    batches: list[Batch],
    law: Callable[[Batch], float],
    *,
    coefficients: str,
    kv: tuple[int, str] | None,
    measured: int | None = None,
) -> Sample:
    load, load_text = data.load_seconds(model)
    copy, copy_text = data.copy_gb_s(tp)
    room = f"computed: {_UTILISATION:.0%} of memory - weights - 2 GiB of activations per GPU, by KV bytes"
    tokens, kv_text = kv or (_room(model, gpu, tp), room)
    source = {"coefficients": coefficients, "kv_tokens": kv_text, "load": load_text, "kv_copy": copy_text}
    device = gpu.name if tp == 1 else f"{tp} x {gpu.name}"
    seconds = np.array([law(batch) for batch in batches])
    return Sample(model, device, batches, seconds, source, tokens, load, copy, measured=measured)


def _room(model: Model, gpu: Gpu, tp: int) -> int:
    """Return the KV tokens that fit into memory beside the weights, in whole blocks of 16."""
    free = tp * (_UTILISATION * gpu.memory - _ACTIVATIONS) - model.weights_bytes
    return int(free / model.kv_bytes) // 16 * 16


def _distserve_ms(law: dict[str, Any], batch: Batch) -> float:
    if batch.prefill:
        a, b, c = law["prefill"]
        return float(a + b * batch.prefill + c * batch.prefill**2)
    small = batch.decodes < law["decoding_large_small_bs_threshold"]
    a, b, c = law["decoding_smallbs" if small else "decoding_largebs"]
    return float(a + b * batch.context + c * batch.decodes)


def _sarathi_row(row: dict[str, str]) -> tuple[Batch, float]:
    new, answers = int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])
    return Batch(answers, 1022 * answers, new, new * new // 2), float(row["batch_execution_time_s"])


def _cpu_rows(data: Data, cpu: str, model: Model, tp: int) -> Rows:
    rows = read(data.folder, f"vidur_cpu_overheads_{cpu}.csv.gz")
    return [r for r in rows if r["model_name"] == model.name and int(r["tensor_parallel_degree"]) == tp]


def _check(data: Data, layers: Layers) -> dict[str, str]:
    """Compare with measured vLLM iterations of a similar model on the same GPU, if there are any."""
    like = {LLAMA_7B.name: "meta-llama/Llama-3.1-8B-Instruct", LLAMA_70B.name: "meta-llama/Llama-3.1-70B-Instruct"}
    if layers.gpu is not H100:
        return {}
    wanted = (like[layers.model.name], "H100", str(layers.tp))
    rows = [
        r
        for r in read(data.folder, "mlenergy_vllm_h100_b200.csv.gz")
        if (r["model_id"], r["gpu_model"], r["num_gpus"]) == wanted and float(r["avg_batch_size"]) < 200
    ]
    ratios = [_ratio(row, layers) for row in rows]
    text = ", ".join(f"{float(r['avg_batch_size']):.0f}: {x:.2f}" for r, x in zip(rows, ratios, strict=True))
    note = "ours / median inter-token latency at a batch size, context 100 + half the answer (a guess)"
    return {"check": f"mlenergy_vllm_h100_b200, {wanted[0]} (grouped KV heads): {note}: {text}."}


def _ratio(row: dict[str, str], layers: Layers) -> float:
    count = round(float(row["avg_batch_size"]))
    context = 100 + float(row["avg_output_len"]) / 2
    return 1000 * layers.seconds(Batch(count, int(count * context), 0)) / float(row["median_itl_ms"])


def _median(rows: Rows, loaders: tuple[str, ...], scenarios: tuple[str, ...]) -> tuple[float, str]:
    """Return the median and name of the first scenario that was measured with one of the loaders."""
    for scenario in scenarios:
        found = [r for r in rows if r["loader"] in loaders and r["scenario"] == scenario]
        if found:
            seconds = float(np.median([float(r["loading_time_s"]) for r in found]))
            return seconds, f"{found[0]['loader']}, {scenario}"
    raise ConfigError(f"No row was loaded with {loaders}.", "Check serverlessllm_load_times.csv.gz.")


def _errors(law: LatencyLaw, x: Shapes, measured: Floats) -> dict[str, Error]:
    return {
        kind: Error(round(e.mean, 4), round(e.p50, 4), round(e.p90, 4), e.rows)
        for kind, e in errors(law, x, measured).items()
    }


def _rounded(law: Any) -> LatencyLaw:
    """Return the law rounded to 6 digits, so that files do not depend on a machine's last bits."""
    return type(law)(**{field.name: _digits(getattr(law, field.name)) for field in fields(law)})  # type: ignore[no-any-return]


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


if __name__ == "__main__":
    main()
