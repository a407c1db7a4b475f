"""The rows that a rival may run, with the deadlines of their next tokens. Compiled.

A request with an e2e promise alone has neither a first deadline nor a pace in these papers' rules, except in
QoServe, which plans 0.4 s per token for deadlines of minutes. Here every rival plans for it alike: at most
that pace, in at most a share of the promise, half of it unless a rival says more, at least the seconds of
an iteration; the first token is due so that the expected answer fits behind it. (With the mean + 2 standard
deviations of QoServe's text instead of the mean, it keeps 3 to 6 points less on its own ground.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.forecast.latency.online import seconds_of
from headway.policy.pack.kernels import Rows, missing_of, promised
from headway.types import Bools, Floats, Ints

SLOWEST_PACE = 0.4  # seconds per token


class DeadlineView(NamedTuple):
    """The rows that control does not hold, as aligned arrays.

    missing: tokens to compute before the next one comes out. decodes: it is one, of a running row.
    first_due: instant by which the first token is due; due: the next one; inf = never.
    pace: seconds per token after the first, promised or planned; inf = none.
    answer: expected tokens of the whole answer.
    promised: it has an SLO.
    serial, arrival, output_tokens: as in `Jobs`. blocks: that it holds alone.
    """

    rows: Ints
    missing: Ints
    decodes: Bools
    running: Bools
    computed: Ints
    first_due: Floats
    due: Floats
    pace: Floats
    answer: Floats
    promised: Bools
    serial: Ints
    arrival: Floats
    output_tokens: Ints
    blocks: Ints

    def take(self, which: Ints | Bools) -> DeadlineView:
        """Return some of the rows, in that order."""
        columns: list[Any] = [column[which] for column in self]
        return DeadlineView(*columns)


@compiled
def view_of(jobs: Rows, rows: Ints, theta: Floats, from_first: bool, share: float) -> DeadlineView:
    """Return these rows.

    from_first: the deadlines of a row with a tpot begin at its first token. share: of an e2e promise that
    decoding may take.
    """
    n, decoding, context = rows.size, 0, 0.0
    whole, real, yes = np.zeros((6, n), np.int64), np.zeros((5, n)), np.zeros((3, n), np.bool_)
    for i in range(n):
        row = rows[i]
        yes[1, i], whole[0, i] = jobs["running"][row], missing_of(jobs, row)
        yes[0, i], yes[2, i] = yes[1, i] and whole[0, i] == 1, promised(jobs, row)
        whole[1, i], whole[2, i] = jobs["computed"][row], jobs["serial"][row]
        whole[3, i] = jobs["output_tokens"][row]
        whole[4, i] = jobs["blocks"][row] - jobs["shared"][row]
        real[3, i], real[4, i] = jobs["output_tokens"][row] + jobs["tokens_left"][row], jobs["arrival"][row]
        if yes[0, i]:
            decoding, context = decoding + 1, context + whole[1, i]
    step = seconds_of(theta, decoding, context, 0.0, 0.0)
    for i in range(n):
        real[0, i], real[2, i] = targets(jobs, rows[i], real[3, i], step, share)
        real[1, i] = next_due(jobs, rows[i], real[0, i], real[2, i], from_first)
    return DeadlineView(
        rows,
        whole[0],
        yes[0],
        yes[1],
        whole[1],
        real[0],
        real[1],
        real[2],
        real[3],
        yes[2],
        whole[2],
        real[4],
        whole[3],
        whole[4],
    )


@compiled
def targets(jobs: Rows, row: int, answer: float, step: float, share: float) -> tuple[float, float]:
    """Return the instant by which a row's first token is due and its seconds per token after it.

    answer: expected tokens; step: seconds of an iteration; share: of the promise that decoding may take.
    """
    e2e, pace = jobs["e2e"][row], jobs["tpot"][row]
    if e2e == np.inf:
        return jobs["arrival"][row] + jobs["ttft"][row], pace
    if pace == np.inf:
        pace = max(min(share * e2e / answer, SLOWEST_PACE), step)
    return jobs["arrival"][row] + min(jobs["ttft"][row], e2e - answer * pace), pace


@compiled
def next_due(jobs: Rows, row: int, first_due: float, pace: float, from_first: bool) -> float:
    """Return the instant by which a row's next token is due, inf = never."""
    out, start = jobs["output_tokens"][row], jobs["first"][row]
    if out == 0:
        return float(first_due)
    if first_due < np.inf and not (from_first and jobs["tpot"][row] < np.inf):
        start = max(start, first_due)
    return float(start + out * pace)
