"""What has been promised? Both brokers keep the same promises, and a bad file is refused with the mend.

What may go wrong later (kill -9, a full disk, callers that give up) is in test_crash.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.broker import KINDS, SqliteBroker, open_broker
from headway.broker import sqlite as module
from headway.broker.port import Broker, Job
from headway.errors import ConfigError, HeadwayError

CHAT = "/v1/chat/completions"


def job(id: str = "a", arrival: float = 1.0, **more: Any) -> Job:
    return Job(id, "tenant", CHAT, b'{"prompt": "\x00\xff"}', '{"model": "m"}', arrival, **more)


async def owed(broker: Broker) -> list[str]:
    return [job.id async for job in broker.open()]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "jobs.db")


@pytest.fixture(params=KINDS)
async def broker(request: pytest.FixtureRequest, path: str) -> AsyncIterator[Broker]:
    broker = open_broker(request.param, path, "normal")
    yield broker
    await broker.close()


# ---- what every broker promises


async def test_a_put_job_comes_back_as_it_was(broker: Broker) -> None:
    await broker.put(job(background=True, attempts=2))
    assert await broker.get("a") == job(background=True, attempts=2)
    assert await broker.get("b") is None


async def test_changing_a_job_does_not_change_the_promise(broker: Broker) -> None:
    mine = job()
    await broker.put(mine)
    mine.attempts, mine.state = 7, "done"
    got = await broker.get("a")
    assert got == job()
    got.state = "done"
    async for open_job in broker.open():
        open_job.attempts = 9
    assert await broker.get("a") == job()


async def test_a_known_id_is_an_error_and_changes_nothing(broker: Broker) -> None:
    await broker.put(job())
    with pytest.raises(HeadwayError, match="'a' is stored already") as error:
        await broker.put(job(arrival=9.0))
    assert error.value.status == 409
    await broker.done("a", b"x", 2.0)
    with pytest.raises(HeadwayError):
        await broker.put(job())
    assert await owed(broker) == []


async def test_done_keeps_the_result_and_drops_the_body(broker: Broker) -> None:
    await broker.put(job())
    assert await broker.done("a", b"\x00answer", 5.0)
    assert await broker.get("a") == replace(job(), state="done", body=b"", result=b"\x00answer", finished=5.0)


async def test_fail_keeps_the_reason(broker: Broker) -> None:
    await broker.put(job())
    assert await broker.fail("a", "engine died", 5.0)
    assert await broker.get("a") == replace(
        job(), state="failed", body=b"", reason="engine died", finished=5.0
    )


@pytest.mark.parametrize("first", ["done", "fail"])
@pytest.mark.parametrize("second", ["done", "fail"])
async def test_a_job_closes_once(broker: Broker, first: str, second: str) -> None:
    close = {
        "done": lambda now: broker.done("a", b"r", now),
        "fail": lambda now: broker.fail("a", "r", now),
    }
    await broker.put(job())
    assert await close[first](2.0)
    closed = await broker.get("a")
    assert not await close[second](3.0)
    assert await broker.get("a") == closed


async def test_of_many_answers_at_once_one_counts(broker: Broker) -> None:
    await broker.put(job())
    won = await asyncio.gather(*(broker.done("a", b"%d" % i, 2.0) for i in range(20)))
    assert won.count(True) == 1
    got = await broker.get("a")
    assert got
    assert got.result == b"%d" % won.index(True)


async def test_an_unknown_job_does_not_close_and_is_not_tried(broker: Broker) -> None:
    assert not await broker.done("a", None, 1.0)
    assert not await broker.fail("a", "why", 1.0)
    with pytest.raises(HeadwayError, match="no job 'a'") as error:
        await broker.attempt("a")
    assert error.value.status == 404


async def test_attempts_are_counted(broker: Broker) -> None:
    await broker.put(job())
    assert sorted(await asyncio.gather(*(broker.attempt("a") for _ in range(5)))) == [1, 2, 3, 4, 5]
    got = await broker.get("a")
    assert got
    assert got.attempts == 5


async def test_open_jobs_come_oldest_first(broker: Broker) -> None:
    arrivals = {"new": 9.0, "tie 1": 5.0, "old": -1.0, "tie 2": 5.0, "closed": 0.0}
    for id, arrival in arrivals.items():
        await broker.put(job(id, arrival))
    await broker.done("closed", None, 9.0)
    assert await owed(broker) == ["old", "tie 1", "tie 2", "new"]


@pytest.mark.parametrize("count", [0, 1, module.PAGE, module.PAGE + 1, 3 * module.PAGE])
async def test_open_pages_through_everything(broker: Broker, count: int) -> None:
    ids = [f"{i:03}" for i in range(count)]
    await asyncio.gather(*(broker.put(job(id, arrival=float(id) // 20)) for id in ids))
    assert await owed(broker) == ids


async def test_jobs_may_close_while_open_is_read(broker: Broker) -> None:
    ids = [f"{i:03}" for i in range(3 * module.PAGE)]
    await asyncio.gather(*(broker.put(job(id, arrival=float(id))) for id in ids))
    async for open_job in broker.open():
        assert await broker.done(open_job.id, None, 1.0)
        ids.remove(open_job.id)
    assert ids == []
    assert await owed(broker) == []


async def test_open_may_be_left_early(broker: Broker) -> None:
    await broker.put(job())
    async for _ in broker.open():
        break
    assert await owed(broker) == ["a"]


async def test_forget_deletes_what_closed_before(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP", 3)  # several transactions, the last one full
    for i in range(8):
        await broker.put(job(str(i)))
        await broker.done(str(i), b"r", float(i))
    await broker.put(job("open"))
    assert await broker.forget(6.0) == 6
    assert [await broker.get(id) is None for id in ("0", "5", "6", "7", "open")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert await broker.forget(6.0) == 0
    await broker.put(job("0"))  # a forgotten id is new again


async def test_odd_text_survives(broker: Broker) -> None:
    odd = replace(job("quote'\x00\U0001f600"), tenant="", path="/ü", body=b"", arrival=1e300)
    await broker.put(odd)
    assert await broker.get(odd.id) == odd
    await broker.done(odd.id, b"", 1.0)
    got = await broker.get(odd.id)
    assert got
    assert got.result == b""  # an empty answer is not a missing one


# ---- every program of calls gives what a plain dict gives


@dataclass
class Model:
    """What a broker is, said as simply as possible."""

    jobs: dict[str, Job] = field(default_factory=dict)
    serial: dict[str, int] = field(default_factory=dict)
    closings: int = 0

    def put(self, id: str, now: float) -> object:
        if id in self.jobs:
            return 409
        self.serial[id] = max(self.serial.values(), default=0) + 1
        self.jobs[id] = job(id, now)
        return None

    def done(self, id: str, now: float) -> object:
        return self._close(id, state="done", result=b"r", finished=now)

    def fail(self, id: str, now: float) -> object:
        return self._close(id, state="failed", reason="why", finished=now)

    def attempt(self, id: str, now: float) -> object:
        if id not in self.jobs:
            return 404
        self.jobs[id].attempts += 1
        return self.jobs[id].attempts

    def forget(self, id: str, now: float) -> object:
        old = [key for key, job in self.jobs.items() if job.finished is not None and job.finished < now]
        for key in old:
            del self.jobs[key]
        return len(old)

    def owed(self) -> list[Job]:
        mine = [job for job in self.jobs.values() if job.state == "open"]
        return sorted(mine, key=lambda job: (job.arrival, self.serial[job.id]))

    def _close(self, id: str, **closing: Any) -> bool:
        if id not in self.jobs or self.jobs[id].state != "open":
            return False
        self.jobs[id] = replace(self.jobs[id], body=b"", **closing)
        return True


async def call(broker: Broker, verb: str, id: str, now: float) -> object:
    """Make one call as the model words it: the value, or the status of the error."""
    calls: dict[str, Callable[[], Any]] = {
        "put": lambda: broker.put(job(id, now)),
        "done": lambda: broker.done(id, b"r", now),
        "fail": lambda: broker.fail(id, "why", now),
        "attempt": lambda: broker.attempt(id),
        "forget": lambda: broker.forget(now),
    }
    try:
        return await calls[verb]()
    except HeadwayError as error:
        return error.status


CALLS = st.tuples(
    st.sampled_from(["put", "put", "done", "fail", "attempt", "forget"]),
    st.sampled_from("abcdef"),
    st.integers(0, 5).map(float),
)
PROGRAMS = st.lists(st.one_of(st.just("reopen"), st.lists(CALLS, min_size=1, max_size=12)), max_size=12)


async def compare(kind: str, path: str, program: list[Any]) -> None:
    """Run a program: each list is a burst of calls made at the same time, so that they share commits."""
    model, broker = Model(), open_broker(kind, path, "normal")
    try:
        for burst in program:
            if burst == "reopen":
                if kind != "memory":
                    await broker.close()
                    broker = open_broker(kind, path, "normal")
                continue
            seen = await asyncio.gather(*(call(broker, *step) for step in burst))
            assert seen == [getattr(model, verb)(id, now) for verb, id, now in burst]
            assert [job async for job in broker.open()] == model.owed()
            assert [await broker.get(id) for id in "abcdef"] == [model.jobs.get(id) for id in "abcdef"]
    finally:
        await broker.close()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(program=PROGRAMS)
def test_every_program_gives_what_a_dict_gives(kind: str, program: list[Any]) -> None:
    # In memory where there is such a place: these files need to be reopened, not to survive.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        asyncio.run(compare(kind, f"{directory}/jobs.db", program))


# ---- files that cannot be used


def refusal(path: str, **more: str) -> str:
    with pytest.raises(ConfigError) as error:
        SqliteBroker(path, **more)
    assert error.value.fix
    return str(error.value)


def test_a_missing_directory_is_told(tmp_path: Path) -> None:
    assert "No such file or directory" in refusal(str(tmp_path / "nowhere" / "jobs.db"))


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    assert "it is a directory" in refusal(str(tmp_path / "."))
    assert not Path(f"{tmp_path}.lock").exists()


def test_a_file_that_is_no_database_is_told_and_left_alone(path: str) -> None:
    Path(path).write_text("[gateway]\nport = 8000\n" * 100)
    assert "not a database" in refusal(path)
    assert "not a database" in refusal(path)  # and not "in use": the lock was let go of
    assert Path(path).read_text().startswith("[gateway]")


def test_another_programs_database_is_left_alone(path: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")
    before = Path(path).read_bytes()
    assert "another program's" in refusal(path)
    assert Path(path).read_bytes() == before


async def test_a_newer_schema_is_told(path: str) -> None:
    await SqliteBroker(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {module.VERSION + 1}")
    assert "schema version 2; this Headway knows 1" in refusal(path)


async def test_two_gateways_never_serve_one_file(path: str, tmp_path: Path) -> None:
    first = SqliteBroker(path)
    (tmp_path / "alias.db").symlink_to(path)
    assert f"served by another gateway (pid {os.getpid()})" in refusal(str(tmp_path / "alias.db"))
    await first.close()
    await SqliteBroker(path).close()


def test_a_file_that_another_program_holds_is_told(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        assert "database is locked" in refusal(path)


def test_an_unknown_mode_is_told(path: str) -> None:
    assert "Use one of: full, normal." in refusal(path, synchronous="off")


@pytest.mark.parametrize(("kind", "path"), [("rabbit", "x"), ("sqlite", None), ("sqlite", "")])
def test_open_broker_says_what_is_missing(kind: str, path: str | None) -> None:
    with pytest.raises(ConfigError, match="memory, sqlite" if kind == "rabbit" else "Set the path"):
        open_broker(kind, path, "full")
