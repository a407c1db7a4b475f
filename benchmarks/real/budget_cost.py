"""What budgets add to a request in the queue: the statements that charge it, and that settle the charge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from headway.store.queue.port import Charge, Job
from headway.store.queue.sqlite import SqliteBroker
from headway.whatif.output.results import Row

_AT_ONCE = 32
_KINDS: dict[str, Sequence[Charge]] = {
    "without budgets": (),
    "with two budgets": tuple(Charge(f"budget of t: {of}", 1000.0, 1e15, 1.0, 0.0) for of in ("tokens", "cost")),
}


def budget_rows(seconds: float) -> list[Row]:
    """Return the time of a request in a SQLite queue, from put to stored end, both kinds in turn.

    cpu_us: of the whole process. All requests are of one tenant, and each call shares its commit with others.
    """
    with TemporaryDirectory(prefix="headway-budget-") as folder:
        times = asyncio.run(_rounds(Path(folder), seconds))
    setting = f"sqlite, synchronous = full, {_AT_ONCE} at once, {{}}"
    return [
        Row(f"budget.{what}_us", "headway", setting.format(kind), 1e6 * float(np.median(seen[:, i])), "us")
        for kind, seen in times.items()
        for i, what in enumerate(("wall", "cpu"))
    ]


async def _rounds(folder: Path, seconds: float) -> dict[str, np.ndarray]:
    """Return (wall, CPU) seconds of a request by kind, a row for each round."""
    broker = SqliteBroker(str(folder / "queue.sqlite"), "bench")
    await broker.renew(1e12)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    stop, number = time.perf_counter() + seconds, 0
    while time.perf_counter() < stop or not number:
        for kind, charges in _KINDS.items():
            began = time.perf_counter(), time.process_time()
            await asyncio.gather(*(_request(broker, f"{number + i}", charges) for i in range(_AT_ONCE)))
            ended = time.perf_counter(), time.process_time()
            times[kind].append(((ended[0] - began[0]) / _AT_ONCE, (ended[1] - began[1]) / _AT_ONCE))
            number += _AT_ONCE
    await broker.close()
    return {kind: np.array(rows) for kind, rows in times.items()}


async def _request(broker: SqliteBroker, id: str, charges: Sequence[Charge]) -> None:
    await broker.put(Job(id, "t", "/v1/chat/completions", b"x" * 500, "{}", 1.0), charges)
    await broker.done(id, None, 2.0, {charge.account: 900.0 for charge in charges})
