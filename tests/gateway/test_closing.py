"""Ends of requests survive a disk that is full for a while; loops beside the requests go on after errors."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.config import Broker as BrokerConfig
from headway.errors import HeadwayError
from headway.gateway import tasks
from headway.gateway.apis.responses.conversations import Conversations
from headway.gateway.requests.background import forget_old_jobs
from headway.gateway.requests.closing import Closings
from headway.store.queue.memory import MemoryBroker, MemoryStore
from headway.store.queue.port import Job
from headway.store.queue.sqlite import SqliteBroker
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, configuration, serving, until
from tests.gateway.test_background import begin, finished
from tests.gateway.test_request_ends import fakes


@contextmanager
def full(broker: type[SqliteBroker] | type[MemoryBroker], *, status: int = 503) -> Iterator[None]:
    """Let every end of a job fail to be stored, as on a full disk."""

    async def out(*_: Any) -> bool:
        raise HeadwayError("The broker is out: disk full.", "Make room.", status=status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "done", out)
        patch.setattr(broker, "fail", out)
        yield


def waiting(gateway: Gateway) -> int:
    return int(gateway.get("/ready").json()["ends_not_stored"])


def test_work_that_ends_on_a_full_disk_is_closed_later(serve: Serve, fake: Fake) -> None:
    with serve() as gateway:
        held, other = begin(gateway, **fakes(hold="full")), begin(gateway, **fakes(hold="other"))
        until(lambda: fake.last()["open"] == 2)
        with full(SqliteBroker):
            fake.release("full")
            until(lambda: waiting(gateway) == 1)
            assert gateway.get("/ready").status_code == 503
            refused = gateway.post(None, f"/v1/responses/{other}/cancel")
            assert refused.status_code == 503
            assert "cannot be written" in refused.json()["error"]["message"]
            assert gateway.post(None, f"/v1/responses/{other}/cancel").status_code == 503
            assert gateway.post(gateway.chat()).status_code == 200, "the answer is there"
            until(lambda: waiting(gateway) == 3)
        until(lambda: waiting(gateway) == 0)
        assert gateway.get("/ready").status_code == 200
        assert finished(gateway, held)["response"]["usage"]["completion_tokens"] == 8
        assert finished(gateway, other)["status"] == "cancelled"
        assert "open" not in {state for state, _ in gateway.jobs().values()}


def test_a_conversation_gets_an_answer_that_is_stored_later(serve: Serve) -> None:
    with serve() as gateway:
        id = gateway.post({}, "/v1/conversations").json()["id"]
        with full(SqliteBroker):
            asked = {"model": "smollm2", "input": "Hi.", "conversation": id}
            assert gateway.post(asked, "/v1/responses").status_code == 200
            until(lambda: waiting(gateway) == 1)
        until(lambda: waiting(gateway) == 0)
        items = gateway.get(f"/v1/conversations/{id}/items").json()["data"]
        assert [one["role"] for one in items] == ["assistant", "user"]


async def lone(kind: type[MemoryBroker] = MemoryBroker) -> tuple[MemoryBroker, Closings]:
    broker = kind("A", MemoryStore())
    await broker.renew(1e12)
    await broker.put(Job("a", "t", "/v1/completions", b"{}", "{}", 0.0, background=True))
    return broker, Closings(broker)


async def test_the_first_end_counts() -> None:
    broker, closings = await lone()
    with full(MemoryBroker):
        assert await closings.done("a", b"answer", 1.0)
        assert "a" in closings
        assert not await closings.retry()
    assert await closings.retry()
    assert len(closings) == 0
    job = await broker.get("a")
    assert job is not None
    assert (job.state, job.result) == ("done", b"answer")


async def test_an_end_whose_writer_is_stopped_is_stored_later(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, closings = await lone()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBroker, "done", lambda *_: asyncio.Event().wait())
        writer = asyncio.create_task(closings.done("a", b"answer", 1.0))
        await asyncio.sleep(0)
        await tasks.cancel(writer)
    assert writer.cancelled()
    assert await closings.retry()
    job = await broker.get("a")
    assert job is not None
    assert (job.state, job.result) == ("done", b"answer")


def test_cancelling_what_is_being_stored_waits_for_it(
    serve: Serve, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, storing, go_on = SqliteBroker.done, threading.Event(), threading.Event()

    async def slow(self: SqliteBroker, *answer: Any) -> bool:
        storing.set()
        await asyncio.to_thread(go_on.wait, 20.0)
        return await done(self, *answer)

    with serve() as gateway, ThreadPoolExecutor(1) as client:
        monkeypatch.setattr(SqliteBroker, "done", slow)
        held = begin(gateway, **fakes(hold="held"))
        until(lambda: fake.last()["open"] == 1)
        fake.release("held")
        assert storing.wait(20.0)
        answer = client.submit(gateway.post, None, f"/v1/responses/{held}/cancel")
        time.sleep(0.2)
        assert not answer.done()
        go_on.set()
        assert answer.result(20.0).status_code == 409
        assert finished(gateway, held)["status"] == "completed"


class Unfit(MemoryBroker):
    async def done(self, *_: Any) -> bool:
        raise HeadwayError("The job cannot be stored: too big.", "Send a smaller one.")


async def test_an_answer_that_can_never_be_stored_fails_the_job() -> None:
    broker, closings = await lone(Unfit)
    await closings.done("a", b"answer", 1.0)
    job = await broker.get("a")
    assert job is not None
    assert job.state == "failed"
    assert "too big" in str(job.reason)


def test_a_stored_request_that_cannot_be_read_strands_no_other(fake: Fake, tmp_path: Path) -> None:
    config = configuration(tmp_path, fake.url)

    async def leave() -> None:
        broker = SqliteBroker(str(config.broker.sqlite.file), "dead")
        await broker.renew(0.0)
        job = Job("bad", "default", "/v1/completions", b"{}", "not a request", 0.0, background=True)
        for id in ("bad", "worse"):
            await broker.put(replace(job, id=id))
        await broker.close()

    asyncio.run(leave())
    with serving(config) as gateway:
        until(lambda: [state for state, _ in gateway.jobs().values()] == ["failed"] * 2)


async def test_a_loop_that_fails_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    turns, failed, done = 0, list[str](), asyncio.Event()

    async def chore() -> None:
        nonlocal turns
        turns += 1
        if turns < 3:
            raise ZeroDivisionError("oops")
        done.set()
        await asyncio.sleep(3600)

    with caplog.at_level(logging.ERROR, "headway.gateway"):
        async with tasks.running(chore, failed=failed.append):
            await asyncio.wait_for(done.wait(), 5)
    assert len(failed) == 2
    assert "chore" in failed[0]
    assert "oops" in caplog.text


def test_forgetting_goes_on_after_an_error(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    async def forget(*_: Any) -> int:
        nonlocal calls
        calls += 1
        raise OverflowError("a clock beyond all years")

    monkeypatch.setattr(SqliteBroker, "forget", forget)
    with serve() as gateway:
        until(lambda: calls > 2)
        assert gateway.metric('headway_loop_failures_total{loop="forget_old_jobs"}') > 1


class Trimmed(MemoryBroker):
    """Counts the searches for what is to be trimmed."""

    trims = 0

    async def trim(self, most: int) -> int:
        self.trims += 1
        return 0


@pytest.mark.parametrize("keep", [True, False])
async def test_nothing_is_trimmed_where_nothing_is_kept(keep: bool) -> None:
    broker = Trimmed("A", MemoryStore())
    forgetting = asyncio.create_task(forget_old_jobs(broker, BrokerConfig(keep_responses=keep)))
    await asyncio.sleep(0.01)
    await tasks.cancel(forgetting)
    assert broker.trims == keep


class Shaky(MemoryBroker):
    """Stores ends and changes, and does not say so the first time: their outcome is unknown."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.out = set[str]()

    async def done(self, *given: Any) -> bool:
        return self._told("done", await super().done(*given))

    async def amend(self, *given: Any) -> bool:
        return self._told("amend", await super().amend(*given))

    def _told(self, call: str, told: bool) -> bool:
        if call in self.out:
            self.out.remove(call)
            raise HeadwayError("The broker is out: disk full.", "Make room.", status=503)
        return told


async def test_what_belongs_to_a_conversation_is_added_once_when_it_can_be_stored() -> None:
    broker = Shaky("A", MemoryStore())
    await broker.renew(1e12)
    conversations = Conversations(broker, 1000)
    talk = await conversations.begin("t", [], {})
    kept = {"input": [{"content": "old"}, {"content": "new"}], "own": 1, "conversation": talk.id}
    request = json.dumps({"kept": kept}, separators=(",", ":"))
    await broker.put(Job("r", "t", "/v1/chat/completions", b"{}", request, 0.0))
    answer = json.dumps({"output": [{"id": "msg_r", "content": "answer"}]}).encode()
    broker.out = {"done", "amend"}
    closings = Closings(broker)
    assert await closings.done("r", answer, 1.0, then=conversations.extend)
    assert not await closings.retry(), "the conversation could not be changed"
    assert await closings.retry()
    items = json.loads((await conversations.find(talk.id, "t")).result or b"")["items"]
    assert [one["content"] for one in items] == ["new", "answer"]
    await broker.delete(talk.id)
    await conversations.extend("r")  # it is gone: only the log says so
