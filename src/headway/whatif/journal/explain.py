"""`headway explain ID --journal DIR`: why a real request was late."""

from __future__ import annotations

from pathlib import Path

from headway.store.journal.reader import JournalReader, read
from headway.whatif import explain
from headway.whatif.journal.past import Past
from headway.whatif.output.results import command_line, say


def main(
    folder: Path, request: str | None, *, since: float | None, worst: int | None, as_json: bool, whole: bool
) -> None:
    """Explain a request, by default list those with the largest SLO violations.

    since: time after which listed requests ended, None = the whole journal.
    """
    past = Past.of(load(folder, since), command_line())
    explain.show(past.run, past.timeline, str(folder), request, worst=worst, as_json=as_json, whole=whole)


def load(folder: Path, since: float | None, until: float | None = None) -> JournalReader:
    """Read the requests that ended in [since, until) (None = no limit); name unreadable files on stderr."""
    journal = read(folder, since=since, until=until)
    for name, why in journal.damaged.items():
        say(f"{folder}/{name} is left out: {why}")
    return journal
