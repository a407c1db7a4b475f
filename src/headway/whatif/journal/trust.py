"""Warns of untrustworthy advice: when the simulation of a journal's requests differs from their real figures.

The journal often shows the cause.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from headway.store.journal.reader import JournalReader
from headway.store.journal.rows import ITERATION
from headway.whatif.journal.calibrate import Calibration

_POINTS = 5.0  # allowed error of attainment in percentage points, besides one and a half requests
_TIMES = 1.3  # allowed error of a median, as a factor
_MISFIT = 0.05  # allowed error of a latency law, as a share of the time of all iterations
_AWAY = 0.05  # most seconds between gateway and engine, both ways together, on a machine without other load
_SHARE = 0.05  # allowed share of unusual requests
_CACHED, _FOREIGN = 0.85, 1.15  # bounds of the computed tokens relative to the tokens of the journal's requests
_FIX = (
    "To fix it, measure the engine without other load (headway profile --url URL --device NAME --out "
    "DIR) and give --instance DIR/pace.json; choose a time without restarts and other load with --since and "
    "--until; copy the files of all gateways' journals into one folder."
)


def differs(real: float, simulated: float, requests: int) -> bool:
    """Tell whether two attainments (%) over `requests` differ more than in a good simulation."""
    return abs(real - simulated) > _POINTS + 150 / max(requests, 1)


def slower(real: float, simulated: float) -> bool:
    """Tell whether two medians differ more than in a good simulation."""
    return not 1 / _TIMES <= simulated / max(real, 1e-9) <= _TIMES


def warning(differences: Sequence[str], seen: Sequence[str]) -> str:
    """Return the warning about advice, "" = none. seen: `suspects` of the journal."""
    if not differences:
        return ""
    causes = (
        "Likely causes: a latency law that does not fit this engine, a restart of the engine, other load on "
        "its machine, or requests that are in another gateway's journal."
    )
    shown = f"Seen in the journal: {'; '.join(seen)}." if seen else "The journal does not show which."
    first = "WARNING: do not rely on this advice, the simulation differs from the served traffic: "
    return "\n".join((f"{first}{'; '.join(differences)}.", causes, shown, _FIX))


def suspects(journal: JournalReader, known: Mapping[str, Calibration]) -> list[str]:
    """Return signs in a journal of events that a simulation cannot reproduce."""
    found = [
        f"the latency law misses the iterations of {name} by {one.error:.0%}"
        for name, one in known.items()
        if one.error > _MISFIT
    ]
    found += [
        f"a request spends {1000 * (one.request + one.token):,.0f} ms between the gateway and {name}"
        for name, one in known.items()
        if one.request + one.token > _AWAY
    ]
    return [*found, *_requests(journal), *_tokens(journal)]


def _requests(journal: JournalReader) -> Iterator[str]:
    rows = journal.requests
    gone = [row.ended for row in rows if row.requeues or (row.reason or "").startswith("engine_")]
    if gone:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(gone)))
        yield f"{len(gone):,} requests were lost by an engine or sent again, the last ended at {when}"
    known = {stay.id for stay in journal.stays}
    cut = sum(row.outcome in ("cancelled", "failed") for row in rows)
    if cut > _SHARE * len(rows):
        yield f"{cut:,} of {len(rows):,} requests have no complete answer, so its length is guessed"
    unreported = sum(row.outcome == "finished" and row.id not in known for row in rows)
    if unreported > _SHARE * len(rows):
        share = f"{unreported:,} of {len(rows):,} requests were computed by engines that did not report them"
        yield f"{share}: the journal is incomplete, or an engine was restarted"
    if journal.damaged:
        yield f"{len(journal.damaged)} of its files cannot be read"


def _tokens(journal: JournalReader) -> Iterator[str]:
    """Compare the tokens that engines computed with those of the journal's requests."""
    complete = all(row.outcome in ("finished", "refused") for row in journal.requests)
    for name, table in journal.iterations.items():
        mine = [row for row in journal.requests if row.instance == name]
        made, read = (float(np.sum(table[:, ITERATION.index(of)])) for of in ("decodes", "prefill"))
        answers, prompts = (sum(getattr(row, f"{of}_tokens") for row in mine) for of in ("output", "prompt"))
        if complete and made > _FOREIGN * answers:
            yield f"{name} generated {made:,.0f} tokens, {answers:,} of them for this journal's requests"
        if read < _CACHED * prompts:
            yield f"{name} had {1 - read / prompts:.0%} of the prompts' tokens in its prefix cache"
