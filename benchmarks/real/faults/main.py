"""The command `headway bench faults`: its sizes and its report."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.experiment import Result, experiment
from benchmarks.real.faults.kinds import KINDS
from benchmarks.real.faults.run import PATIENCE_S, FaultSizes, FaultsOutcome, measure
from benchmarks.real.peers import HEADWAY
from headway.whatif.output.plots import png, sheet
from headway.whatif.output.results import Ask, Row
from testing.fake_engine import NAME
from testing.servers.parts import LEASE_S

QUICK, WHOLE = FaultSizes(30, nodes=1, longest_s=0.6 * LEASE_S), FaultSizes(1000, nodes=3, longest_s=2 * LEASE_S)
ALL = "all kinds"
WORKLOAD = (
    f"Headway in parts: two gateways, two controllers, two agents with a {NAME} each, RabbitMQ and "
    "PostgreSQL, each in its own process on this machine. Clients "
    "ask at both gateways all the time, 60 % of the requests in the background, and read twelve streams of up to "
    "150 tokens (7.5 s), while one part after the other is killed (and started again at once), paused, or cut off."
)
_NOTES = (
    "lost: accepted requests without an answer: background ones that did not complete, others that neither "
    "got their answer nor an error though their gateway lived. twice: requests with two ends. recomputed: "
    "computations of background requests beyond the first. told: requests that were answered with an error, "
    "since their engine died after the first token. refused: 429 or 503, to be sent again. recover_s: from "
    "the end of a fault (a resumed part, a restarted process) until both gateways are ready and have "
    f"answered a new request. stuck: faults after which that took more than {PATIENCE_S:g} s. "
    "streams: long ones; moved: begun at one engine, ended at another, or there after its restart; gateway_gone: ended "
    "early with the gateway that served them; broken: all others with an error event or without an end; lost, twice: "
    "ended, but with a token missing or twice.",
)


@experiment("faults", "vllm", "Faults of a Headway in parts")
def main(ask: Ask, only: Sequence[str] = (), count: int | None = None) -> Result:
    """Run the benchmark; the journal of faults is written to `ask.out`."""
    sizes = QUICK if ask.quick else WHOLE
    sizes = replace(sizes, faults=count or sizes.faults)
    with (
        Progress(console=Console(stderr=True)) as progress,
        tempfile.TemporaryDirectory(prefix="headway-faults-") as folder,
        _journal(ask.out) as journal,
    ):
        Path(folder).chmod(0o755)
        task = progress.add_task("start", total=sizes.faults + 1)

        def tick(kind: str) -> None:
            progress.update(task, advance=1, description=kind)

        outcome = measure(Path(folder), sizes, ask.seed, tick, journal, only)
        progress.update(task, advance=1, description="done")
    return result(outcome)


def _journal(out: Path | None) -> IO[str]:
    """Open the journal of faults; without a folder it is not kept."""
    if out is None:
        return io.StringIO()
    out.mkdir(parents=True, exist_ok=True)
    return (out / "faults.jsonl").open("w")


def rows(outcome: FaultsOutcome) -> list[Row]:
    """Return the counts, and recovery times over all faults and by kind."""
    verdict, count = outcome.verdict, len(outcome.records)
    setting = f"{count} faults, RabbitMQ of {outcome.nodes}"
    stuck = sum(one.recovered is None for one in outcome.records)
    counts = {
        "accepted": verdict.accepted,
        "lost": verdict.lost,
        "twice": verdict.twice,
        "stuck": stuck,
        "recomputed": verdict.recomputed,
        "told": outcome.told,
        "refused": outcome.refused,
        "streams": outcome.streams.total(),
        "streams.moved": outcome.moved,
        "streams.gateway_gone": outcome.streams["gateway gone"],
        **{f"streams.{name}": outcome.streams[name] for name in ("broken", "lost", "twice")},
    }
    units = {"stuck": "faults", "recomputed": "computations", "streams": "streams"}
    made = [
        Row(f"faults.{name}", HEADWAY, setting, float(value), units.get(name.partition(".")[0], "requests"))
        for name, value in counts.items()
    ]
    for kind in (ALL, *KINDS):
        seconds = _seconds(outcome, kind)
        if seconds:
            for percent in (50, 99):
                value = float(np.percentile(seconds, percent, method="higher"))
                made.append(Row(f"faults.recover_s.p{percent}", HEADWAY, kind, value, "s"))
    return made


def _seconds(outcome: FaultsOutcome, kind: str) -> list[float]:
    """Return the recovery times; a fault without recovery counts as `PATIENCE_S`."""
    return [
        PATIENCE_S if one.recovered is None else one.recovered for one in outcome.records if kind in (ALL, one.kind)
    ]


def result(outcome: FaultsOutcome) -> Result:
    """Return the findings, with the ids of lost and twice answered requests and of broken streams as notes."""
    verdict = outcome.verdict
    found = [f"lost: {', '.join(verdict.lost_ids)}"] * bool(verdict.lost_ids)
    found += [f"answered twice: {', '.join(verdict.twice_ids)}"] * bool(verdict.twice_ids)
    found += [f"broken: {', '.join(f'{id} ({error})' for id, error in outcome.broken.items())}"] * bool(outcome.broken)
    return Result(rows(outcome), WORKLOAD, lambda: {"faults": plot(outcome)}, notes=(*_NOTES, *found))


def plot(outcome: FaultsOutcome) -> bytes:
    """Return a PNG of the recovery times by kind, a point per fault."""
    kinds = [kind for kind in KINDS if _seconds(outcome, kind)]
    figure, panels = sheet(1, 1, 8.0, 0.3 * len(kinds) + 1.2)
    axes = panels[0]
    for place, kind in enumerate(kinds):
        seconds = _seconds(outcome, kind)
        axes.plot(seconds, [place] * len(seconds), "o", color="#0072B2", alpha=0.4, markersize=4)
    axes.set_yticks(range(len(kinds)), kinds, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the end of the fault until both gateways answer again", fontsize=8)
    return png(figure)
