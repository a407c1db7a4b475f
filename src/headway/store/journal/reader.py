"""Reads a journal: of a running gateway, of one that was killed, or a copy in another folder."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import ConfigError
from headway.store.journal.rows import (
    APPLICATION,
    BEFORE,
    ITERATION,
    TABLES,
    VERSION,
    WHEN,
    EngineRow,
    IterationsRow,
    RefusalRow,
    RequestRow,
    StayRow,
    unpacked,
)
from headway.store.journal.writer import PATTERN
from headway.types import Floats

_WAIT_S = 10.0  # limit for waiting while a gateway writes


@dataclass(slots=True)
class JournalReader:
    """The rows of a journal, requests by arrival.

    engines: the newest description of each. refusals: at the door, without a `RequestRow`.
    starts: instance -> (down since, up from) of each of its starts.
    iterations: instance -> array of `ITERATION` columns by start.
    damaged: files that could not be read, and why.
    ended: the first and last end of a request in all its files; None = there is none.
    """

    requests: list[RequestRow] = field(default_factory=list)
    refusals: list[RefusalRow] = field(default_factory=list)
    stays: list[StayRow] = field(default_factory=list)
    iterations: dict[str, Floats] = field(default_factory=dict)
    engines: dict[str, EngineRow] = field(default_factory=dict)
    starts: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    ended: tuple[float, float] | None = None

    def nothing(self) -> ConfigError:
        """Return the error for a time in which it has no requests."""
        if self.ended is None:
            hint = "A request is in it about a second after it ends: send some through this gateway."
            return ConfigError("The journal has no requests yet.", " ".join([hint, *self.left_out()]))
        low, high = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in self.ended)
        hint = f'It has some from {low} to {high}: --since "{low}".'
        return ConfigError("The journal has no requests from that time.", " ".join([hint, *self.left_out()]))

    def left_out(self) -> list[str]:
        """Return a sentence for each reason why files could not be read."""
        files = {why: [name for name, other in self.damaged.items() if other == why] for why in self.damaged.values()}
        return [
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} of the journal left out: {why}."
            for why, names in files.items()
        ]


def read(folder: Path, *, since: float | None = None, until: float | None = None) -> JournalReader:
    """Read what ended in [since, until), None = no limit. ConfigError when the folder has no journal.

    A file that cannot be read (a power failure may tear the newest) is left out and named in `damaged`.
    """
    files = sorted(folder.glob(PATTERN)) if folder.is_dir() else []
    if not files:
        raise _missing(folder)
    found, packs = JournalReader(), list[IterationsRow]()
    for path in files:
        try:
            _add(path, found, packs, since, until)
        except FileNotFoundError:  # the gateway has just deleted it
            continue
        except (sqlite3.Error, ValueError, TypeError) as error:
            found.damaged[path.name] = str(error)
    if len(found.damaged) == len(files):
        name, why = next(reversed(found.damaged.items()))
        raise ConfigError(
            f"No file of the journal in {folder} can be read; of the newest, {name}: {why}.",
            "Use the Headway that wrote it, if that was another; `sqlite3 FILE .recover` saves what is left "
            "of a damaged one. New requests go to a new file.",
        )
    found.requests.sort(key=lambda row: (row.arrival, row.id))
    for name in dict.fromkeys(pack.instance for pack in packs):
        table = np.concatenate([unpacked(pack) for pack in packs if pack.instance == name])
        found.iterations[name] = table[np.argsort(table[:, 0], kind="stable")]
    return found


def _missing(folder: Path) -> ConfigError:
    """Return the error for a path without a journal; it names journals nearby."""
    where = folder.parent if folder.is_file() else folder
    near = sorted({file.parent for depth in ("", "*/") for file in where.glob(depth + PATTERN)})
    hint = "Give the folder of journal.dir (headway config show), of a gateway that has served requests."
    if near:
        hint = f"Give one of: {', '.join(map(str, near[:5]))}."
    return ConfigError(f"There is no journal in {folder}.", hint)


def _add(
    path: Path, found: JournalReader, packs: list[IterationsRow], since: float | None, until: float | None
) -> None:
    """Add the rows of one file, or none of them."""
    low, high = -1e300 if since is None else since, 1e300 if until is None else until
    with closing(_open(path)) as db:
        if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            return  # its gateway ended while creating the file
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            raise ValueError("it is not a journal file")
        if version > VERSION:
            raise ValueError(
                f"written by a newer Headway with version {version} of its journal, this one reads {VERSION}"
            )
        rows = {kind: list(_rows(db, kind, low, high)) for kind in TABLES}
        (ended,) = db.execute("SELECT min(ended), max(ended) FROM requests")
    for pack in rows[IterationsRow]:
        unpacked(pack)
    packs += rows[IterationsRow]
    found.requests += rows[RequestRow]
    found.refusals += rows[RefusalRow]
    found.stays += rows[StayRow]
    if ended[0] is not None:
        low, high = found.ended or ended
        found.ended = min(low, ended[0]), max(high, ended[1])
    for engine in rows[EngineRow]:
        known = found.engines.get(engine.instance)
        if known is None or engine.at >= known.at:
            found.engines[engine.instance] = engine
        if engine.down is not None:
            found.starts.setdefault(engine.instance, []).append((engine.down, engine.at))


def _rows(db: sqlite3.Connection, kind: type[Any], low: float, high: float) -> Iterator[Any]:
    table = TABLES[kind]
    there = {name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")}
    names = (f'"{name}"' if name in there else BEFORE.get(name, "NULL") for name in kind.__dataclass_fields__)
    when, columns = WHEN[table], ", ".join(names)
    if when is None:
        cursor = db.execute(f"SELECT {columns} FROM {table}")
    else:
        cursor = db.execute(f"SELECT {columns} FROM {table} WHERE {when} >= ? AND {when} < ?", (low, high))
    for row in cursor:
        yield kind(*row)


def _open(path: Path) -> sqlite3.Connection:
    """Open a file for reading; if its writer was killed, SQLite recovers it, provided that the folder is writable."""
    if not path.exists():
        raise FileNotFoundError(path)
    address = path.resolve().as_uri()
    with suppress(sqlite3.OperationalError):
        db = sqlite3.connect(f"{address}?mode=rw", uri=True, timeout=_WAIT_S, isolation_level=None)
        try:
            db.execute("PRAGMA query_only = on")
            db.execute("SELECT 1 FROM sqlite_master").fetchone()
        except BaseException:
            db.close()
            raise
        return db
    # In a read-only folder the write-ahead log has no shared memory.
    return sqlite3.connect(f"{address}?mode=ro&immutable=1", uri=True)


def columns(iterations: Floats) -> dict[str, Floats]:
    """Return the columns of an array of iterations by name."""
    return {name: iterations[:, i] for i, name in enumerate(ITERATION)}
