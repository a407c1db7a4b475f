"""Turns a journal's engines into simulated instances, with a latency law and overheads fitted to the traffic.

The laws are fitted as in `headway profile`, to the iterations that the engines logged while they served, so they
hold only for similar loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.errors import ConfigError
from headway.policy.forecast.latency.measurement import Row, Samples, Seen, bias, fit_all, interruptions, overheads
from headway.policy.forecast.latency.profiles import FixedLatency
from headway.simulate.instance import InstanceSpec
from headway.store.journal.reader import JournalReader
from headway.store.journal.rows import EngineRow
from headway.types import Floats, Instance

_LEAST = 30  # iterations with prompts, and without
_PARTS, _EACH = 40, 500  # number and length of the stretches of iterations to fit
_SOON = 1e-3  # seconds after an event; lies within the next iteration
_DESCRIBE = "Describe the fleet with --instance or --fleet; headway profile --url URL measures an engine."


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured costs of an instance.

    law: law of the seconds of an iteration. error: its relative error over all iterations together.
    iterations: number of iterations that it was fitted to.
    request, token, interruption: overheads in seconds, as in `InstanceSpec`.
    """

    law: FixedLatency
    error: float
    iterations: int
    request: float
    token: float
    interruption: float


def instances_of(journal: JournalReader) -> tuple[tuple[InstanceSpec, ...], dict[str, Calibration]]:
    """Return a journal's engines as instances, with their calibrations. ConfigError for too little data."""
    if not journal.engines:
        raise ConfigError(
            "The journal has no engines: headway gateway does not log the engines of its agents.", _DESCRIBE
        )
    for engine in journal.engines.values():
        _sizes(engine)
    found = {name: _calibration(journal, name) for name in sorted(journal.engines)}
    return tuple(_instance(journal.engines[name], one) for name, one in found.items()), found


def _instance(engine: EngineRow, known: Calibration) -> InstanceSpec:
    blocks, block_size, budget = _sizes(engine)
    size = blocks * block_size
    instance = Instance(
        engine.instance, engine.model, engine.max_running, blocks, block_size, min(engine.max_model_len, size)
    )
    return InstanceSpec(
        instance,
        known.law,
        2 * engine.max_running,
        budget,
        math.inf,
        request_overhead=known.request,
        token_overhead=known.token,
        interruption=known.interruption,
    )


def _sizes(engine: EngineRow) -> tuple[int, int, int]:
    """Return blocks, block size and token budget of an engine. ConfigError if it did not report them."""
    if not (engine.blocks and engine.block_size and engine.token_budget):
        raise ConfigError(
            f"Engine {engine.instance} did not report its KV: it runs without Headway's scheduler.", _DESCRIBE
        )
    return engine.blocks, engine.block_size, engine.token_budget


def _calibration(journal: JournalReader, name: str) -> Calibration:
    """Fit the laws to the iterations of one engine."""
    table = journal.iterations.get(name, np.empty((0, 8)))
    rows = _rows(_spread(table))
    prompts = sum(float(row[5] or 0) > 0 for row in rows)
    if prompts < _LEAST or len(rows) - prompts < _LEAST:
        raise ConfigError(
            f"The journal has {len(rows)} iterations of {name} without a pause after them, {prompts} of them "
            f"with prompts: too few for a fit, which needs {_LEAST} of each kind.",
            f"Choose a longer time (--since), or let the gateway serve more. {_DESCRIBE}",
        )
    each, shorter = interruptions(rows, _moments(journal, name))
    fits = fit_all(Samples.of(shorter))
    law = fits.laws[fits.best]
    seen = _seen(journal, name)
    request, token = overheads(seen, rows) if len(seen) > 20 else (0.0, 0.0)
    return Calibration(FixedLatency(law), abs(bias(law, shorter)), len(rows), request, max(token, 0.0), sum(each))


def _spread(table: Floats) -> list[Floats]:
    """Return all iterations, or stretches of them spread evenly over the whole log."""
    if len(table) <= _PARTS * _EACH:
        return [table]
    begins = np.linspace(0, len(table) - _EACH, _PARTS).astype(int)
    return [table[begin : begin + _EACH] for begin in begins.tolist()]


def _rows(parts: Sequence[Floats]) -> list[Row]:
    """Return iterations as rows of an engine's log, with the interval to the start of the next iteration.

    Iterations before a pause, and the last of each stretch, are left out, because they have no such interval.
    """
    rows: list[Row] = []
    for part in parts:
        start, seconds = part[:-1, 0], part[:-1, 1]
        interval = part[1:, 0] - start
        whole = (interval > 0) & (interval <= 1.2 * seconds + 0.002)
        kept = np.column_stack([start, seconds, interval, part[:-1, 2:6]])[whole]
        rows += kept.tolist()
    return rows


def _moments(journal: JournalReader, name: str) -> list[Floats]:
    """Return the times at which requests were sent to an engine, got their first token, and ended."""
    sent = [row.sent for row in journal.requests if row.instance == name and row.sent is not None]
    stays = [stay for stay in journal.stays if stay.instance == name]
    first, ended = [stay.first + _SOON for stay in stays], [stay.ended + _SOON for stay in stays]
    return [np.sort(np.array(times, float)) for times in (sent, first, ended)]


def _seen(journal: JournalReader, name: str) -> list[Seen]:
    """Join the gateway's times of streamed answers with the scheduler's, but of those that went on elsewhere."""
    stays = {stay.id: stay for stay in journal.stays if stay.instance == name}
    return [
        Seen(row.resent, stays[row.id].entered, stays[row.id].first, row.first)
        for row in journal.requests
        if row.id in stays and row.resent is not None and row.first is not None and row.resent < row.first < row.ended
    ]
