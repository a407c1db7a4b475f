"""Writes docs/results.md from the JSON of benchmarks in docs/results: `python -m tools.results`.

`python -m tools.results NAME BENCH OPTIONS` runs `headway bench BENCH OPTIONS --json` first, and keeps those
figures as NAME.json there, with the command, the machine and the date. A figure is one line in `FIGURES`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headway.whatif.output.results import show

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "results"
HEADWAY = "headway"
_BEST = ""  # rival: of the other systems, the one with the best value
_BOUNDS = {"bound", "clairvoyant", "hindsight", "alone", "direct"}  # systems that are no rivals
_PAGE = """# Results

Written by `python -m tools.results` from the JSON in [results/](results); do not edit. The strongest rival is the best
of the other systems in the same run, with the same requests. SIMULATED figures come from the simulator, which
[truth.md](truth.md) compares with real engines. Figures of different lines do not compare: their machines and loads
differ. `python -m tools.results NAME BENCH OPTIONS` measures a line anew.

| question | Headway | strongest rival | measured |
|---|---:|---:|---|
"""
_COMMANDS = """
## Commands

| line | command | seconds | machine | date |
|---|---|---:|---|---|
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the page.

    question: as the page asks it. file: of the JSON, without its ending. id, setting, system: of the row.
    rival: its system; "" = the best of the others, None = there is none. highest: more is better.
    asks: the command that measures it, shown while there is no file.
    """

    question: str
    file: str
    id: str
    setting: str
    rival: str | None = _BEST
    highest: bool = False
    system: str = HEADWAY
    asks: str = ""


FIGURES = (
    Figure(
        "Promises kept in all settings, share of an upper bound", "default", "share_of_bound.mean", "all", highest=True,
        asks="headway bench default --quick --seed 0",
    ),
    Figure("Interactive ttft p95 beside a batch", "beside", "ttft.p95", "3000 in the batch"),
    Figure("The same, times that of stock vLLM without a batch", "beside", "ttft.p95_of_alone", "3000 in the batch"),
    Figure("ttft p95 in the first 10 s of a burst beside it", "beside", "onset.ttft.p95", "3000 in the batch"),
    Figure("Time of that batch", "beside", "batch.seconds", "3000 in the batch"),
    Figure("ttft p95 beside a batch on two real engines", "beside-real", "ttft.p95", "300 in the batch"),
    Figure("The same, times that without a batch", "beside-real", "ttft.p95_of_alone", "300 in the batch"),
    Figure(
        "Promises kept in conversations on 4 engines", "placement", "attainment.promised",
        "interactive-chat, 4 engines, 1x", highest=True,
        asks="headway bench placement --engines 4 --seed 0",
    ),
    Figure(
        "Points more kept than by the best router before stock vLLM, six workloads", "placement", "margin.mean",
        "all, 1x", rival=None, asks="headway bench placement --engines 4 --seed 0",
    ),
    Figure(
        "Engine-hours while the load rises in a step", "elastic", "engine_hours", "step, starts 30 s",
        rival="fixed-at-peak",
        asks="headway bench elastic --quick --seed 0",
    ),
    Figure("Promises kept in that step", "elastic", "attainment.promised", "step, starts 30 s", rival="fixed-at-peak",
        asks="headway bench elastic --quick --seed 0",
    ),
    Figure(
        "Added to the first token by the gateway, p50", "overhead", "gateway.added_ms.p50",
        "streamed, to the first token, idle FAKE instant engine", rival=None, asks="headway bench overhead --seed 0",
    ),
    Figure("Time of the scheduler hook, times vLLM's schedule()", "overhead", "hook.ratio", "64 running", rival=None,
        asks="headway bench overhead --seed 0",
    ),
    Figure(
        "Accepted requests lost in 1,000 faults", "faults", "faults.lost", "1000 faults, RabbitMQ of 3", rival=None,
        asks="headway bench faults --faults 1000 --seed 0",
    ),
    Figure(
        "Long streams broken by them, of 8,655", "faults", "faults.streams.broken", "1000 faults, RabbitMQ of 3",
        rival=None, asks="headway bench faults --faults 1000 --seed 0",
    ),
    Figure(
        "Seconds per iteration in the simulator, against real ones", "truth", "pace.bias_pct", "below", rival=None,
        system="vllm", asks="headway bench truth --quick --seed 0",
    ),
    Figure(
        "Mean completion time of LLM applications above the capacity, below stock vLLM's by", "apps",
        "act.mean.reduction_pct", "all, against vllm-fcfs, 1.3x", rival=None, system="hermes",
        asks="headway bench apps --load 1.3 --systems vllm-fcfs,hermes",
    ),
    Figure(
        "The same, P95", "apps", "act.p95.reduction_pct", "all, against vllm-fcfs, 1.3x", rival=None, system="hermes",
        asks="headway bench apps --load 1.3 --systems vllm-fcfs,hermes",
    ),
    Figure(
        "An event in the planner with 100,000 queued", "planner", "event.us", "100000 queued, 8 instances",
        asks="headway bench planner --quick --seed 0",
    ),
    Figure(
        "Start of an engine until it serves", "gpu", "start_s", "start", asks="headway bench gpu"
    ),
)  # fmt: skip


def page(figures: Sequence[Figure] = FIGURES, folder: Path = FOLDER) -> str:
    """Return the page. Raise KeyError for a figure that its file does not have."""
    return "".join(_lines(figures, folder))


def _lines(figures: Sequence[Figure], folder: Path) -> Iterator[str]:
    yield _PAGE
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    for figure in figures:
        if figure.file in files:
            yield _line(figure, files[figure.file])
        else:
            yield f"| {figure.question} | not measured yet | | `{figure.asks}` |\n"
    yield _COMMANDS
    for name, kept in files.items():
        seconds = f"{kept['result']['seconds']:.0f}"
        yield f"| {name} | `{kept['command']}` | {seconds} | {kept['machine']} | {kept['date']} |\n"


def _line(figure: Figure, kept: dict[str, Any]) -> str:
    found = {
        row["system"]: row
        for row in kept["result"]["rows"]
        if (row["id"], row["setting"]) == (figure.id, figure.setting)
    }
    if figure.system not in found:
        raise KeyError(f"{figure.file}.json has no {figure.id} of {figure.system} in {figure.setting!r}")
    ours, rival = found.pop(figure.system), ""
    others = {name: row["ours"] for name, row in found.items() if name not in _BOUNDS and row["ours"] is not None}
    if figure.rival is not None and others:
        best = figure.rival or (max if figure.highest else min)(others, key=others.__getitem__)
        rival = f"{show(others[best])} ({best})"
    where = f"{'SIMULATED, ' if kept['result']['host'] == 'sim' else ''}[{figure.file}](results/{figure.file}.json)"
    unit = f", {ours['unit']}" if ours["unit"] else ""
    return f"| {figure.question}{unit} | {show(ours['ours'])} | {rival} | {where} |\n"


def record(name: str, words: list[str]) -> None:
    """Run `headway bench` with these words, and keep the figures of the page; raise CalledProcessError if it fails."""
    argv = [sys.executable, "-m", "headway.cli", "bench", *words, "--json"]
    printed = subprocess.run(argv, stdout=subprocess.PIPE, check=True, text=True).stdout
    result, ids = json.loads(printed), {figure.id for figure in FIGURES if figure.file == name}
    result["rows"] = [row for row in result["rows"] if row["id"] in ids]
    FOLDER.mkdir(exist_ok=True)
    kept = {
        "command": shlex.join(["headway", "bench", *words]),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {_processor()}",
        "date": datetime.now(UTC).date().isoformat(),
        "result": result,
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(kept) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        record(sys.argv[1], sys.argv[2:])
    (DOCS / "results.md").write_text(page())
