"""What the gateway's journal has of requests that were served, refused, given up and lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from headway.config import Journal as JournalTable
from headway.store.journal.reader import JournalReader, read
from headway.store.journal.rows import RequestRow
from headway.store.journal.writer import PATTERN
from headway.whatif.journal.past import Past
from tests.gateway.conftest import Serve
from tests.gateway.gateway import SAY, Fake, Gateway, until
from tests.gateway.test_request_ends import fakes

SECRET = "a sentence that no journal may hold"


def journal(gateway: Gateway) -> JournalReader:
    folder = gateway.config.journal_dir
    assert folder is not None
    return read(folder)


def row(gateway: Gateway, id: str) -> RequestRow:
    """Return the row of a request once it has been written."""

    def found() -> RequestRow | None:
        folder = gateway.config.journal_dir
        if folder is None or not any(folder.glob(PATTERN)):
            return None
        return next((one for one in read(folder).requests if one.id == id), None)

    answer = until(found)
    assert isinstance(answer, RequestRow)
    return answer


def test_an_answer_that_came_in_time(gateway: Gateway) -> None:
    answer = gateway.post(
        gateway.chat(stream=True, max_tokens=8),
        headers={"x-slo-ttft-ms": "60000", "x-headway-app": "a", "x-headway-run": "r", "x-headway-unit": "u"},
    )
    one = row(gateway, answer.headers["x-request-id"])
    assert (one.outcome, one.verdict, one.met, one.reason) == ("finished", "met", 1, None)
    assert (one.kind, one.model, one.instance, one.ttft) == ("chat", "smollm2", "e0", 60.0)
    assert (one.app, one.run, one.unit) == ("a", "r", "u")
    assert (one.output_tokens, one.max_tokens, one.background) == (8, 8, 0)
    assert one.prompt_tokens > 0
    assert one.queued is not None
    assert one.sent is not None
    assert one.first is not None
    assert one.arrival <= one.queued <= one.sent <= one.first <= one.ended
    assert one.sent == one.resent


def test_a_stream_that_has_moved(gateway: Gateway) -> None:
    ask = gateway.chat(stream=True, max_tokens=16, **fakes(tokens=16, cuts=[4, 9]))
    one = row(gateway, gateway.post(ask, headers={"x-slo-ttft-ms": "60000"}).headers["x-request-id"])
    assert (one.outcome, one.verdict, one.requeues, one.output_tokens) == ("finished", "met", 2, 16)
    assert one.sent is not None
    assert one.first is not None
    assert one.resent is not None
    assert one.sent <= one.first <= one.resent <= one.ended


def test_an_answer_that_came_late_and_one_without_a_promise(gateway: Gateway) -> None:
    late = gateway.post(gateway.chat(), headers={"x-slo-e2e-ms": "0.001"})
    assert row(gateway, late.headers["x-request-id"]).verdict == "missed"
    free = gateway.post(gateway.chat(service_tier="batch"))
    assert row(gateway, free.headers["x-request-id"]).verdict == "served"


def test_a_background_answer(gateway: Gateway) -> None:
    id = gateway.post(gateway.chat(background=True)).json()["id"]
    assert row(gateway, id).background == 1


def test_a_client_that_leaves(gateway: Gateway) -> None:
    with pytest.raises(httpx.ReadTimeout):
        gateway.post(gateway.chat(**fakes(hold="journal-leaves")), timeout=0.5)
    one = until(lambda: [one for one in journal(gateway).requests if one.outcome == "cancelled"])[0]
    assert (one.verdict, one.met, one.output_tokens) == ("cancelled", None, 0)


def test_an_engine_that_refuses(gateway: Gateway) -> None:
    answer = gateway.post(gateway.chat(**fakes(end="400")))
    one = row(gateway, answer.headers["x-request-id"])
    assert one.verdict in ("failed", "dropped")
    assert one.reason


def test_refusals_at_the_door_are_counted(serve: Serve, fake: Fake) -> None:
    with serve(server={"max_queued": 1}, engine={"max_running": 1}) as gateway:
        stuck = [gateway.chat(background=True, **fakes(hold="journal-full")) for _ in range(20)]
        codes = [gateway.post(body).status_code for body in stuck]
        refused = codes.count(429)
        assert refused
        folder = gateway.config.journal_dir
        assert folder is not None
        until(lambda: list(folder.glob("journal-*")))
        until(lambda: sum(one.count for one in journal(gateway).refusals) == refused)
        assert {one.reason for one in journal(gateway).refusals} == {"queue_full"}
        fake.release("journal-full")


def test_no_text_is_in_it(serve: Serve) -> None:
    with serve() as gateway:
        answer = gateway.post(gateway.chat(messages=[*SAY, {"role": "user", "content": SECRET}]))
        text = answer.json()["choices"][0]["message"]["content"]
        row(gateway, answer.headers["x-request-id"])
        folder = gateway.config.journal_dir
    assert folder is not None
    files = [path.read_bytes() for path in folder.iterdir()]
    assert files
    for told in (SECRET, text):
        assert not any(told.encode() in data for data in files)


def test_what_waited_for_its_engine_to_start(serve: Serve, mortal: Fake) -> None:
    mortal.stop()
    with serve(mortal.url, ready=False) as gateway, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(gateway.post, gateway.chat())
        until(lambda: gateway.metric("headway_queue_length") == 1)
        mortal.start()
        one = row(gateway, asked.result().headers["x-request-id"])
        past = Past.of(until(lambda: (read_ := journal(gateway)).engines and read_), "")
        seconds = past.timeline(past.run.workload.row_of(one.id)).seconds()
    assert max(seconds, key=seconds.__getitem__) == "starting"


def test_a_disk_that_cannot_be_written_stops_nothing(serve: Serve, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    with serve(journal=JournalTable(str(blocked))) as gateway:
        assert gateway.post(gateway.chat()).status_code == 200
        assert gateway.get("/ready").status_code == 200
        blocked.unlink()
        until(lambda: any(blocked.glob(PATTERN)) and journal(gateway).requests)


def test_it_is_off_where_it_is_turned_off(serve: Serve, tmp_path: Path) -> None:
    with serve(journal=JournalTable("none")) as gateway:
        assert gateway.config.journal_dir is None
        assert gateway.post(gateway.chat()).status_code == 200
    assert not list(tmp_path.glob("*journal*"))


def test_the_rows_of_the_last_second_are_written_when_it_stops(serve: Serve) -> None:
    with serve() as gateway:
        ids = [gateway.post(gateway.chat()).headers["x-request-id"] for _ in range(20)]
        config = gateway.config
    assert config.journal_dir is not None
    assert {one.id for one in read(config.journal_dir).requests} >= set(ids)
