"""`headway bench batch`: interactive requests alone, then beside a batch, on a real engine; the gateway is killed.

The batch (`/v1/batches`) has short answers. Once half of its lines have ended and the interactive requests
are over, the gateway is killed (SIGKILL) and restarted, and the batch runs to its end. The engine is a separate
process to which the gateway attaches; it stays up.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.experiment import Result, experiment
from headway.config import BATCH, Broker, Config, Engine, Server, Sqlite, Tier, write
from headway.engines.vllm.process.launch import Child, command, environment, free_port
from headway.engines.vllm.process.sizes import expected
from headway.errors import ConfigError, EngineError
from headway.simulate.workload import traffic
from headway.types import Slo
from headway.whatif.load import generator, mix, report
from headway.whatif.load.records import Call, Record
from headway.whatif.measured.systems import answering
from headway.whatif.output.plots import colours, line_legend, png, sheet
from headway.whatif.output.results import Ask, Row, say

ALONE, BESIDE = "interactive alone", "interactive beside the batch"
_NAME, _WINDOW, _LEASE_S = "headway", "24h", 5.0
_PATH = "/v1/chat/completions"
_INTERACTIVE = mix.TrafficTier("interactive", 1.0, Slo(ttft=1.5, tpot=0.150), "sharegpt_first_turn", max_tokens=32)
_LINES = mix.TrafficTier("batch", 1.0, Slo(), "sharegpt_first_turn", max_tokens=4, prompt_tokens=(8, 48))
_QUICK_LINES, _QUICK_SECONDS = 300, 4.0
_WARM = 16  # warm-up requests
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class BatchTrial:
    """The settings of a trial.

    lines: lines of the batch. rate: interactive requests/s, Poisson. seconds: duration of each of the two settings.
    """

    engine: Engine
    lines: int = 10_000
    rate: float = 1.0
    seconds: float = 120.0
    seed: int = 0

    @property
    def calls(self) -> list[Call]:
        """The interactive requests, which are the same in both settings."""
        rng = np.random.default_rng([self.seed, 0])
        at = traffic.gamma(self.rate, 1.0, self.seconds, rng)
        return mix.calls(mix.Mix("interactive", (_INTERACTIVE,)), at, rng)

    @property
    def content(self) -> bytes:
        """The content of the batch's input file."""
        rng = np.random.default_rng([self.seed, 1])
        calls = mix.calls(mix.Mix("batch", (_LINES,)), np.zeros(self.lines), rng, warn=lambda _: None)
        return b"".join(_line(number, call, self.engine.name) for number, call in enumerate(calls))


def _line(number: int, call: Call, model: str) -> bytes:
    body = {
        "model": model,
        "max_tokens": call.max_tokens,
        "temperature": 0,
        "messages": [{"role": "user", "content": call.prompt}],
    }
    line = {"custom_id": f"line-{number}", "method": "POST", "url": _PATH, "body": body}
    return json.dumps(line).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The measured outcome.

    records: interactive requests, by setting. batch: the final state from its endpoint. answered, refused:
    `custom_id`s in the output and the error file. killed_at: lines that had ended at the kill of the gateway.
    """

    records: Mapping[str, Sequence[Record]]
    batch: dict[str, Any]
    answered: Sequence[str]
    refused: Sequence[str]
    killed_at: int


async def run(trial: BatchTrial) -> BatchOutcome:
    """Run both settings. Raise ConfigError or EngineError if that fails."""
    folder, calls = Path(tempfile.mkdtemp(prefix="headway-batch-")), trial.calls
    if not calls:
        raise ConfigError("No interactive request comes in that time.", "Give more --rate or --duration.")
    say(f"logs: {folder}")
    port = free_port()
    engine = replace(trial.engine, url=f"http://127.0.0.1:{port}")
    # With prefix caching, the second run would reuse the prompts of the first.
    argv = command(replace(trial.engine, args=(*trial.engine.args, "--no-enable-prefix-caching")), port, _NAME)
    vllm = Child(argv, environment(trial.engine), folder / "engine.log")
    async with answering("the engine", vllm, f"{engine.url}/health"):
        return await _measure(trial, calls, engine, folder)


async def _measure(trial: BatchTrial, calls: Sequence[Call], engine: Engine, folder: Path) -> BatchOutcome:
    """Measure with gateways in front of a running engine."""
    port = free_port()
    url, child = f"http://127.0.0.1:{port}", _gateway(engine, folder, port)
    async with answering(_NAME, child, f"{url}/ready"):
        await _send(url, trial.engine, [replace(call, at=0.0) for call in calls[:_WARM]])
        records = {ALONE: await _send(url, trial.engine, calls)}
        id = await _begin(url, trial.content)
        records[BESIDE] = await _send(url, trial.engine, calls)
        say(f"waiting for half of {trial.lines} lines")
        killed_at = await _until_half(url, id, trial.lines)
        assert child.process is not None
        child.process.kill()
    say(f"killed the gateway after {killed_at} lines; restarting it")
    async with answering(_NAME, _gateway(engine, folder, port), f"{url}/ready"):
        batch = await _until_ended(url, id)
        answered = await _ids(url, batch["output_file_id"])
        refused = await _ids(url, batch["error_file_id"])
    return BatchOutcome(records, batch, answered, refused, killed_at)


def _gateway(engine: Engine, folder: Path, port: int) -> Child:
    """Return a gateway; a second one in the same folder takes over the first one's queue and batches."""
    config = Config(
        server=Server(port=port),
        engines=(engine,),
        broker=Broker(lease_seconds=_LEASE_S, sqlite=Sqlite(str(folder / "queue.sqlite"))),
        classes={"default": Tier(), "interactive": Tier(), "batch": BATCH},
    )
    file = folder / "headway.toml"
    file.write_text(write(config))
    argv = [sys.executable, "-m", "headway.cli", "serve", "--config", str(file), "--logs", str(folder)]
    return Child(argv, environment(engine), folder / "gateway.log")


async def _send(url: str, engine: Engine, calls: Sequence[Call]) -> list[Record]:
    """Send interactive requests. Raise KeyboardInterrupt if the load was interrupted."""
    records = await generator.run(url, engine.name, calls)
    if len(records) < len(calls) or any(generator.was_cut_off(record) for record in records):
        raise KeyboardInterrupt
    return records


# ---- the batch


async def _begin(url: str, content: bytes) -> str:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", content, filename="lines.jsonl")
    async with aiohttp.ClientSession() as http:
        file = await _json(await http.post(f"{url}/v1/files", data=form))
        body = {"input_file_id": file["id"], "endpoint": _PATH, "completion_window": _WINDOW}
        return str((await _json(await http.post(f"{url}/v1/batches", json=body)))["id"])


async def _json(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    if answer.status != 200:
        raise EngineError(f"The gateway answered {answer.status}: {await answer.text()}.", "See its log.")
    return dict(await answer.json())


async def _look(url: str, id: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http:
        return await _json(await http.get(f"{url}/v1/batches/{id}"))


async def _until_half(url: str, id: str, lines: int) -> int:
    """Wait until half of the lines have ended; return their number. Raise ConfigError if all have ended."""
    while True:
        batch = await _look(url, id)
        counts = batch["request_counts"]
        if (ended := counts["completed"] + counts["failed"]) >= lines or batch["failed_at"]:
            raise ConfigError(
                f"The batch ended ({batch['status']}) before the gateway could be killed in the middle.",
                "Give more --lines, or a shorter --duration.",
            )
        if ended >= lines / 2:
            return int(ended)
        await asyncio.sleep(_LOOK_S)


async def _until_ended(url: str, id: str) -> dict[str, Any]:
    while True:
        batch = await _look(url, id)
        if batch["status"] not in ("validating", "in_progress", "finalizing", "cancelling"):
            return batch
        await asyncio.sleep(_LOOK_S)


async def _ids(url: str, file: str | None) -> list[str]:
    """Return the `custom_id`s of a file's lines."""
    if file is None:
        return []
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/files/{file}/content") as answer:
        return [json.loads(line)["custom_id"] for line in (await answer.text()).splitlines()]


# ---- the report


def rows_of(trial: BatchTrial, outcome: BatchOutcome) -> list[Row]:
    """Return the figures; requests without a first token have an infinite ttft."""
    found = list[Row]()
    for setting, records in outcome.records.items():
        # A measured value, since interpolation with an infinite one is undefined.
        for p in (50, 99):
            value = float(np.quantile([record.ttft for record in records], p / 100, method="higher"))
            found.append(Row(f"ttft.p{p}", _NAME, setting, value, "s"))
    times = Counter([*outcome.answered, *outcome.refused])
    once = sum(count == 1 for count in times.values())
    took = (outcome.batch["completed_at"] or outcome.batch["expired_at"] or 0) - outcome.batch["created_at"]
    setting = f"{trial.lines} lines, killed after {outcome.killed_at}"
    return [
        *found,
        Row("batch.in_window_pct", _NAME, setting, 100 * len(set(outcome.answered)) / trial.lines, "%"),
        Row("batch.lines_answered_once", _NAME, setting, float(once), "lines"),
        Row("batch.lost", _NAME, setting, float(trial.lines - len(times)), "lines"),
        Row("batch.seconds", _NAME, setting, float(took), "s"),
    ]


@experiment("batch", "vllm", "Interactive requests beside a batch on vLLM")
def main(ask: Ask, trial: BatchTrial) -> Result:
    """Run the benchmark. `quick`: a small batch beside a few seconds of interactive requests."""
    if ask.quick:
        trial = replace(trial, lines=min(trial.lines, _QUICK_LINES), seconds=min(trial.seconds, _QUICK_SECONDS))
    outcome = asyncio.run(run(trial))
    interactive = mix.describe(mix.Mix("interactive", (_INTERACTIVE,)))
    workload = (
        f"{interactive}; {trial.rate:g} requests/s for {trial.seconds:g} s, alone and beside a batch of "
        f"{trial.lines} lines ({mix.describe(mix.Mix('lines', (_LINES,)))}) with a window of {_WINDOW}; the "
        f"gateway killed in the middle; batch limit {expected(trial.engine).max_running}, no prefix caching."
    )
    notes = report.warnings({name: (found, {}) for name, found in outcome.records.items()})
    return Result(rows_of(trial, outcome), workload, lambda: {"batch": plot(outcome)}, notes=notes)


def plot(outcome: BatchOutcome) -> bytes:
    """Return the distributions of interactive ttft, alone and beside the batch, as PNG."""
    figure, (axes,) = sheet(1, 1, 7, 4)
    shades = colours(outcome.records)
    for name, records in outcome.records.items():
        seconds = np.sort([record.ttft for record in records])
        share = 100 * np.arange(1, len(seconds) + 1) / max(len(seconds), 1)
        axes.step(seconds, share, where="post", color=shades[name], label=name)
    axes.set(xlabel="time to first token, s", ylabel="requests, %", ylim=(0, 103))
    line_legend(figure, 2)
    return png(figure)
