"""What has been promised, even after a crash?

One SQLite file holds every job, and one thread writes it: calls that arrive while a commit is under way
share the next one (group commit), so a hundred waiting callers cost one fsync. A caller goes on only after
the commit that holds its call, which is what makes a promise a promise.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import math
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from headway.broker.memory import known, unknown
from headway.broker.port import Job
from headway.errors import ConfigError, HeadwayError

T = TypeVar("T")

APPLICATION = 0x48445759  # "HDWY": tells our files from other programs' SQLite files
VERSION = 1  # of the schema below, in PRAGMA user_version
SYNCHRONOUS = ("full", "normal")
GROUP = 256  # calls that share one commit at most, so that none waits for a long transaction
PAGE = 32  # open jobs in memory at once; a body may be megabytes
SWEEP = 500  # jobs deleted per transaction, so that forgetting does not hold up puts
PATIENCE = 5.0  # seconds to wait when another program (a backup, a shell) holds the file's lock

# `seq` is the order of the puts. Large columns come last: SQLite skips what follows the columns it reads.
SCHEMA = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, state TEXT NOT NULL, tenant TEXT NOT NULL,
    path TEXT NOT NULL, arrival REAL NOT NULL, background INTEGER NOT NULL, attempts INTEGER NOT NULL,
    finished REAL, reason TEXT, request TEXT NOT NULL, body BLOB NOT NULL, result BLOB,
    CHECK ((state = 'open') = (finished IS NULL))
);
CREATE INDEX owed ON jobs (arrival, seq) WHERE state = 'open';
CREATE INDEX closed ON jobs (finished) WHERE finished IS NOT NULL;
"""
FIELDS = tuple(field.name for field in fields(Job))
COLUMNS = ", ".join(FIELDS)
PUT = f"INSERT INTO jobs ({COLUMNS}) VALUES ({', '.join('?' * len(FIELDS))}) ON CONFLICT (id) DO NOTHING"
END = """UPDATE jobs SET state = ?, result = ?, reason = ?, finished = ?, body = x''
    WHERE id = ? AND state = 'open'"""
ATTEMPT = "UPDATE jobs SET attempts = attempts + 1 WHERE id = ? RETURNING attempts"
FORGET = """DELETE FROM jobs WHERE seq IN
    (SELECT seq FROM jobs WHERE finished < ? ORDER BY finished LIMIT ?)"""
GET = f"SELECT {COLUMNS} FROM jobs WHERE id = ?"
OWED = f"""SELECT seq, {COLUMNS} FROM jobs WHERE state = 'open' AND (arrival, seq) > (?, ?)
    ORDER BY arrival, seq LIMIT ?"""

# Values that SQLite cannot hold (a NaN instant, half a surrogate pair, 1 GB): the fault of one call only.
UNFIT = (
    sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError,
    ValueError, OverflowError,
)  # fmt: skip


@dataclass(slots=True)
class _Call:
    """One caller's change and the future it waits on."""

    apply: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]


class SqliteBroker:
    """A `Broker` in one SQLite file (WAL), for one gateway at a time.

    synchronous: "full" survives loss of power; "normal" survives the death of the process, but the last
    moments before a loss of power may be missing. Raises ConfigError when the file cannot be used.

    Every method raises HeadwayError (503) when the file cannot be written or read (a full disk) or after
    `close`; the broker lives on and the next call may succeed. Such a call, or one that is cancelled, may
    or may not have been carried out. Calls take effect in the order in which they were made.
    """

    def __init__(self, path: str, *, synchronous: str = "full") -> None:
        if synchronous not in SYNCHRONOUS:
            fix = f"Use one of: {', '.join(SYNCHRONOUS)}."
            raise ConfigError(f"There is no synchronous mode {synchronous!r}.", fix, param="synchronous")
        self.path = os.path.realpath(path)  # two names of one file must meet at the same lock
        with _opening(self.path), ExitStack() as held:
            held.callback(os.close, _lock(self.path))
            self._db = held.enter_context(closing(_writing(self.path, synchronous)))
            self._view = held.enter_context(closing(_reading(self.path)))
            self._held = held.pop_all()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._closed = False
        self._readers = ThreadPoolExecutor(1, "broker-read")
        # A daemon: a gateway that dies without close() must not hang on a queue nobody fills.
        self._writer = Thread(target=self._serve, name="broker-write", daemon=True)
        self._writer.start()

    async def put(self, job: Job) -> None:
        """Store a new open job; it is on the disk when this returns.

        Raises HeadwayError: 409 when the id is known (closed jobs included), 400 when SQLite cannot hold it.
        """
        assert job.state == "open", f"job {job.id} is {job.state}"
        row = [getattr(job, name) for name in FIELDS]
        if not await self._write(partial(_changes, PUT, row)):
            raise known(job.id)

    async def done(self, id: str, result: bytes | None, now: float) -> bool:
        """Close an open job as done at the instant `now`. False when it is not open (or not known)."""
        return await self._write(partial(_changes, END, ["done", result, None, now, id])) == 1

    async def fail(self, id: str, reason: str, now: float) -> bool:
        """Close an open job as failed at the instant `now`. False when it is not open (or not known)."""
        return await self._write(partial(_changes, END, ["failed", None, reason, now, id])) == 1

    async def attempt(self, id: str) -> int:
        """Count one more try; return how many there were. Raises HeadwayError (404) on an unknown id."""
        rows = await self._write(partial(_rows, ATTEMPT, [id]))
        if not rows:
            raise unknown(id)
        return int(rows[0][0])

    async def get(self, id: str) -> Job | None:
        """Return one job; a closed one has an empty body. None when unknown or forgotten."""
        rows = await self._read(partial(_rows, GET, [id]))
        return _job(rows[0]) if rows else None

    async def open(self) -> AsyncIterator[Job]:
        """Yield open jobs by arrival, then in the order of their puts, holding `PAGE` in memory.

        Each page is as committed when it is read: jobs put or closed meanwhile may or may not be in it.
        """
        arrival, seq = -math.inf, 0
        while page := await self._read(partial(_rows, OWED, [arrival, seq, PAGE])):
            jobs = [_job(row) for _, *row in page]
            for job in jobs:
                yield job
            arrival, seq = jobs[-1].arrival, page[-1][0]

    async def forget(self, before: float) -> int:
        """Delete jobs closed before that instant, in several commits; return how many."""
        total, deleted = 0, SWEEP
        while deleted == SWEEP:
            deleted = await self._write(partial(_changes, FORGET, [before, SWEEP]))
            total += deleted
        return total

    async def close(self) -> None:
        """Carry out the calls made so far, then let go of the threads, the file and its lock."""
        self._closed = True
        self._calls.put(None)
        await asyncio.to_thread(self._writer.join)

    # ---- on the event loop

    async def _write(self, apply: Callable[[sqlite3.Connection], T]) -> T:
        self._check()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put(_Call(apply, future))
        return await future

    async def _read(self, look: Callable[[sqlite3.Connection], T]) -> T:
        self._check()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._readers, look, self._view)
        except sqlite3.Error as error:
            raise self._down(str(error)) from error

    def _check(self) -> None:
        if self._closed:
            raise self._down("it is closed")

    def _down(self, why: str) -> HeadwayError:
        fix = "Look at the disk and at who else uses the file, then send the request again."
        return HeadwayError(f"The broker {self.path} is out: {why}.", fix, status=503, kind="server_error")

    # ---- on the writer's thread

    def _serve(self) -> None:
        with self._held:
            while group := self._take():
                _deliver(group, self._commit(group))
            self._readers.shutdown()  # reads that were asked for before close() are answered

    def _take(self) -> list[_Call]:
        """Wait for a call and return it with all that wait behind it; nothing when it is time to end."""
        group: list[_Call] = []
        call = self._calls.get()
        with suppress(Empty):
            while call is not None:
                group.append(call)
                if len(group) == GROUP:
                    return group
                call = self._calls.get_nowait()
            self._calls.put(None)  # the end comes after this group
        return group

    def _commit(self, group: list[_Call]) -> list[Any]:
        """Apply the group in one transaction; return each call's value, or its error."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            outcomes = [self._apply(call) for call in group]
            self._db.execute("COMMIT")
        except Exception as error:  # whatever it is, the callers must hear of it and the thread must live
            with suppress(sqlite3.Error):
                self._db.rollback()
            return [self._down(str(error)) for _ in group]
        return outcomes

    def _apply(self, call: _Call) -> Any:
        try:
            return call.apply(self._db)
        except UNFIT as error:  # SQLite has undone this statement alone; the others' transaction goes on
            return HeadwayError(
                f"The job cannot be stored: {error}.", "Send a smaller or well-formed request."
            )


def _deliver(group: list[_Call], outcomes: list[Any]) -> None:
    """Resolve the callers' futures, waking each event loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for call, outcome in zip(group, outcomes, strict=True):
        loops.setdefault(call.future.get_loop(), []).append((call.future, outcome))
    for loop, settled in loops.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in settled:
        if future.done():  # cancelled while it waited
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _changes(sql: str, values: list[Any], db: sqlite3.Connection) -> int:
    return db.execute(sql, values).rowcount


def _rows(sql: str, values: list[Any], db: sqlite3.Connection) -> list[Any]:
    return db.execute(sql, values).fetchall()


def _job(row: list[Any]) -> Job:
    job = Job(*row)
    job.background = bool(job.background)  # SQLite has no booleans
    return job


# ---- opening the file


@contextmanager
def _opening(path: str) -> Iterator[None]:
    """Turn what SQLite says of a bad file into a ConfigError."""
    try:
        yield
    except sqlite3.Error as error:
        fix = "Give the path of a file that Headway made, or of a new one in a directory it may write to."
        raise ConfigError(f"The broker cannot use {path}: {error}.", fix, param="path") from error


def _lock(path: str) -> int:
    """Lock `path` for this process and return the lock's file descriptor.

    The kernel drops a flock when its process dies, even by kill -9, so no stale lock is ever left. The
    lock's file stays: deleting it would let two gateways lock two different files of the same name.
    """
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        fix = "Name a file in a directory that exists and that this user may write to."
        raise ConfigError(f"The broker cannot use {path}: {error.strerror}.", fix, param="path") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(lock, 20, 0).decode(errors="replace")
        os.close(lock)
        fix = "Stop that gateway, or give this one a file of its own."
        raise ConfigError(f"{path} is served by another gateway (pid {owner}).", fix, param="path") from error
    with suppress(OSError):  # the pid only helps people; a full disk shows itself soon enough
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def _connect(path: str) -> sqlite3.Connection:
    # Transactions are begun by hand, and each connection is made here but used by one other thread.
    return sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)


def _reading(path: str) -> sqlite3.Connection:
    view = _connect(path)
    view.execute("PRAGMA query_only = on")
    return view


def _writing(path: str, synchronous: str) -> sqlite3.Connection:
    db = _connect(path)
    try:
        _inspect(db, path)
        db.execute("PRAGMA journal_mode = wal")
        db.execute(f"PRAGMA synchronous = {synchronous}")
    except BaseException:
        db.close()
        raise
    return db


def _inspect(db: sqlite3.Connection, path: str) -> None:
    """Make the schema in an empty file; refuse one that another program or a newer Headway made."""
    if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
        _create(db)
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        fix = "Give the broker a file of its own."
        raise ConfigError(f"{path} is another program's database.", fix, param="path")
    if version != VERSION:
        fix = "Use the Headway that made it, or give this one a new file."
        message = f"{path} has schema version {version}; this Headway knows {VERSION}."
        raise ConfigError(message, fix, param="path")


def _create(db: sqlite3.Connection) -> None:
    # In one transaction: a crash leaves an empty file or a whole schema.
    marks = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"
    db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {marks} COMMIT;")
