"""`headway explain ID --journal DIR`: why a request that was really served was late."""

from __future__ import annotations

from pathlib import Path

from headway.store.journal.reader import JournalReader, read
from headway.whatif import explain
from headway.whatif.journal.past import Past
from headway.whatif.output.results import command_line, say


def main(
    folder: Path, request: str | None, *, since: float | None, worst: int | None, as_json: bool, whole: bool
) -> None:
    """Print the story of a request; without one, the requests with the largest SLO violations.

    since: instant from which requests count, None = all of the journal.
    """
    past = Past.of(load(folder, since), command_line())
    explain.show(past.run, past.timeline, str(folder), request, worst=worst, as_json=as_json, whole=whole)


def load(folder: Path, since: float | None, until: float | None = None) -> JournalReader:
    """Read what ended in [since, until) (None = all), and say which files could not be read."""
    journal = read(folder, since=since, until=until)
    for name, why in journal.damaged.items():
        say(f"{folder}/{name} is left out: {why}")
    return journal
