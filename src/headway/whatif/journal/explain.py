"""`headway explain ID --journal DIR`: why a real request was late."""

from __future__ import annotations

from pathlib import Path

from headway.store.journal.reader import read
from headway.whatif import explain
from headway.whatif.journal.past import Past
from headway.whatif.output.results import command_line, say


def main(
    folder: Path, request: str | None, *, since: float | None, worst: int | None, as_json: bool, whole: bool
) -> None:
    """Explain a request, by default list those with the largest SLO violations.

    since: time after which listed requests ended, None = the whole journal.
    """
    journal = read(folder, since=since)
    past = Past.of(journal, command_line())
    try:
        explain.show(past.run, past.timeline, str(folder), request, worst=worst, as_json=as_json, whole=whole)
    finally:
        for line in journal.left_out():
            say(line)
