"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file (TOML); default: built-in defaults.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A short run: about a minute on a small machine.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the workload.")]
Out = Annotated[Path | None, typer.Option(help="Directory for plots (PNG), report.json, report.html and report.md.")]
MixName = Annotated[
    str, typer.Option("--mix", help="Traffic mix: chat-batch, deadlines, or a TOML file with one table per class.")
]
Slos = Annotated[
    list[str] | None,
    typer.Option(
        "--slo", help='SLO of a class in ms, as in "chat ttft:1500 tpot:150" (metrics: ttft, tpot, itl, e2el).'
    ),
]
Rate = Annotated[float | None, typer.Option(min=0.001, help="Request rate (requests/s).")]
Duration = Annotated[float, typer.Option(min=1, help="Seconds of arrivals, per round or replay.")]
Model = Annotated[str, typer.Option(help="Model name, directory or hub id.")]
MaxRunning = Annotated[int, typer.Option(min=1, help="Batch limit of every engine (vLLM's --max-num-seqs).")]
Burstiness = Annotated[
    float, typer.Option(min=0.01, help="Burstiness of the arrivals: 1 = Poisson, lower is burstier.")
]
Systems = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: vllm-fcfs, vllm-priority (stock vLLM) and recipes. Default: both with edf, "
        "slack and headway; with --tight, both with slack, bros, ecoserve and headway."
    ),
]
Load = Annotated[
    float, typer.Option(min=0.05, help="Request rate as a multiple of the measured capacity (without --rate).")
]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds over all systems.")]
Together = Annotated[
    bool, typer.Option("--together", help="Run all systems at once: fewer starts, but memory for all engines.")
]
KvBlocks = Annotated[
    int | None,
    typer.Option(
        "--kv-blocks", "--blocks", min=1, help="KV blocks of every engine (vLLM's --num-gpu-blocks-override)."
    ),
]
HostKv = Annotated[float, typer.Option("--host-kv-gib", min=0, help="Host memory for recipes that swap KV, GiB.")]


def listed(text: str) -> tuple[str, ...]:
    """Return the names in a list with commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
