"""`headway report --by tenant`: what requests cost, by tenant, API key, application, class or model, from a journal."""

from __future__ import annotations

import csv
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

from headway.store.journal.reader import read
from headway.store.journal.rows import RequestRow
from headway.whatif.journal.served import SERVED
from headway.whatif.output.results import About, Grid, Report, Row, deliver, say, show

By = Literal["tenant", "key", "app", "class", "model"]
_COLUMNS = ("requests", "prompt_tokens", "cached_tokens", "answer_tokens", "cost")
_NONE = "(none)"  # requests without a key, or of no application
_NOTE = (
    "Tokens are those that are paid; cached_tokens are part of prompt_tokens. The cost is by [prices] when each "
    "request was accepted; requests whose model had no price cost nothing."
)


@dataclass(slots=True)
class Sums:
    """The requests of a tenant, key, application, class or model, and what is paid for them."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    cost: Decimal = Decimal()

    def add(self, row: RequestRow) -> None:
        """Count a request."""
        self.requests += 1
        self.prompt_tokens += row.paid_prompt
        self.cached_tokens += row.paid_cached
        self.answer_tokens += row.paid_output
        self.cost += Decimal(repr(row.cost or 0.0))


def main(
    folder: Path, by: By, *, since: float | None, until: float | None, as_csv: bool, as_json: bool, out: Path | None
) -> None:
    """Print the costs of requests that ended in [since, until), the dearest first, or write them to a folder."""
    began = time.perf_counter()
    journal = read(folder, since=since, until=until)
    if not journal.requests:
        raise journal.nothing()
    sums = sums_of(journal.requests, by)
    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow((by, *_COLUMNS))
        for name, one in sums.items():
            *counts, cost = (getattr(one, column) for column in _COLUMNS)
            writer.writerow((name, *counts, f"{cost.normalize():f}"))
        for line in journal.left_out():
            say(line)
        return
    lines = [[name, *(show(float(getattr(one, column))) for column in _COLUMNS)] for name, one in sums.items()]
    seconds, rows = time.perf_counter() - began, [*_rows(sums)]
    grid, notes = Grid((by, *_COLUMNS), [lines]), [_NOTE, *journal.left_out()]
    about = About(f"{len(journal.requests):,} requests")
    report = Report("report", "vllm", f"Cost by {by}", rows, seconds, about, grid, notes=notes)
    deliver(report, as_json=as_json, out=out)


def sums_of(rows: Sequence[RequestRow], by: By) -> dict[str, Sums]:
    """Return the sums of requests by name, the dearest first."""
    field, sums = "tier" if by == "class" else by, defaultdict[str, Sums](Sums)
    for row in rows:
        sums[getattr(row, field) or _NONE].add(row)
    return dict(sorted(sums.items(), key=lambda one: (-one[1].cost, -one[1].requests, one[0])))


def _rows(sums: dict[str, Sums]) -> Iterator[Row]:
    for name, one in sums.items():
        for column in _COLUMNS:
            unit = {"requests": "count", "cost": "units"}.get(column, "tokens")
            yield Row(f"paid.{column}", SERVED, name, float(getattr(one, column)), unit)
