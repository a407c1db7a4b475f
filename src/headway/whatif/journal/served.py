"""Turns the requests of a journal into the records of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.store.journal.rows import RequestRow
from headway.types import Slo
from headway.whatif.load.records import Record

SERVED = "served"  # name of the system in figures of real requests
_NO_GAPS = np.empty(0, np.float32)  # the journal keeps no chunks


def records_of(rows: Sequence[RequestRow], *, by_tenant: bool = False) -> list[Record]:
    """Return requests as records, without cancelled ones; seconds count from the first arrival.

    by_tenant: use the tenant as the record's class.
    """
    began = min((row.arrival for row in rows), default=0.0)
    return [_record(row, began, by_tenant) for row in rows if row.outcome != "cancelled"]


def _record(row: RequestRow, began: float, by_tenant: bool) -> Record:
    done = row.outcome == "finished"
    return Record(
        tier=row.tenant if by_tenant else row.tier,
        at=row.arrival - began,
        sent=row.arrival - began,
        first=None if row.first is None else row.first - began,
        last=row.ended - began,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        gaps=_NO_GAPS,
        status=200 if done else None,
        error=None if done else row.reason or row.outcome,
        slo=Slo(row.ttft, row.tpot, row.e2e, row.weight, row.soft, bool(row.line), row.itl, row.share),
        longest_gap=row.gap,
        id=row.id,
        model=row.model,
    )
