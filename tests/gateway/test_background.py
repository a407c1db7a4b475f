"""Background requests: accepted with an id, run once, kept over restarts, cancelled on request."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headway.config import Broker, Sqlite
from headway.errors import HeadwayError
from headway.gateway.requests import background
from tests.gateway.conftest import Serve
from tests.gateway.gateway import DEAD, Fake, Gateway, configuration, serving, until
from tests.gateway.test_request_ends import fakes

RESPONSE = {"id", "object", "status", "created_at", "background", "error"}


def begin(gateway: Gateway, path: str = "/v1/chat/completions", **fields: Any) -> str:
    """Ask for a background response; return its id."""
    body = gateway.chat(background=True, **fields)
    if path == "/v1/completions":
        body["prompt"] = body.pop("messages")[0]["content"]
    answer = gateway.post(body, path)
    assert answer.status_code == 202, answer.text
    assert set(answer.json()) >= RESPONSE
    assert answer.json()["status"] == "queued"
    return str(answer.json()["id"])


def look(gateway: Gateway, id: str) -> dict[str, Any]:
    return dict(gateway.get(f"/v1/responses/{id}").json())


def finished(gateway: Gateway, id: str) -> dict[str, Any]:
    """Wait for a response's end and return it."""
    return dict(until(lambda: (seen := look(gateway, id))["status"] != "queued" and seen))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_it_is_completed(gateway: Gateway, path: str) -> None:
    id = begin(gateway, path)
    seen = finished(gateway, id)
    assert seen["status"] == "completed"
    assert seen["error"] is None
    choice = seen["response"]["choices"][0]
    assert (choice["message"]["content"] if "chat" in path else choice["text"]) == "fake " * 8
    assert look(gateway, id) == seen, "looking changes nothing"
    cancelled = gateway.post(None, f"/v1/responses/{id}/cancel")
    assert cancelled.status_code == 409
    assert "completed already" in cancelled.json()["error"]["message"]


def test_a_broker_that_is_out_for_a_moment_loses_nothing(
    gateway: Gateway, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body is read when it is sent to an engine: it waits for the broker instead of failing."""
    broker = gateway.inner.path.broker
    get, asked = broker.get, list[str]()

    async def out(id: str) -> Any:
        asked.append(id)
        if len(asked) <= 3:
            raise HeadwayError("The broker is out.", "Wait.", status=503)
        return await get(id)

    monkeypatch.setattr(broker, "get", out)
    id = begin(gateway)
    until(lambda: len(asked) > 3)
    assert finished(gateway, id)["status"] == "completed"
    assert asked[:4] == [id] * 4


def test_it_may_be_slow_and_have_an_slo(gateway: Gateway, fake: Fake) -> None:
    id = begin(gateway, ttlt_slo_ms=60_000, **fakes(hold="slow"))
    assert look(gateway, id)["status"] == "queued"
    fake.release("slow")
    assert finished(gateway, id)["status"] == "completed"
    body = fake.last()["body"]
    assert body["vllm_xargs"]["headway_e2e"] == 60
    assert "background" not in body


@pytest.mark.parametrize("end", ["400", "500", "cut"])
def test_what_the_engine_refuses_is_failed(gateway: Gateway, end: str) -> None:
    seen = finished(gateway, begin(gateway, **fakes(end=end)))
    assert seen["status"] == "failed"
    assert seen["error"]["message"].startswith("engine_gone" if end == "cut" else "engine_refused")
    assert "response" not in seen


def test_cancelling_what_the_engine_works_on(gateway: Gateway, fake: Fake) -> None:
    aborted = fake.last()["aborted"]
    id = begin(gateway, **fakes(hold="ever"))
    until(lambda: fake.last()["open"] == 1)
    answer = gateway.post(None, f"/v1/responses/{id}/cancel")
    assert answer.json()["status"] == "cancelled"
    assert answer.json()["error"] is None
    until(lambda: fake.last()["aborted"] == aborted + 1)
    assert look(gateway, id)["status"] == "cancelled"
    assert gateway.post(None, f"/v1/responses/{id}/cancel").status_code == 409
    assert gateway.controller.requests == {}


def test_cancelling_what_waits(serve: Serve) -> None:
    with serve(DEAD, ready=False) as gateway:
        id = begin(gateway)
        until(lambda: gateway.controller.queued == 1)
        assert gateway.post(None, f"/v1/responses/{id}/cancel").json()["status"] == "cancelled"
        assert gateway.controller.queued == 0
        assert gateway.jobs() == {id: ("failed", "cancelled")}


def test_a_foreground_request_is_no_response_to_fetch(gateway: Gateway) -> None:
    id = gateway.post(gateway.chat()).headers["x-request-id"]
    assert gateway.get(f"/v1/responses/{id}").status_code == 404
    assert gateway.post(None, f"/v1/responses/{id}/cancel").status_code == 404


def test_it_survives_a_restart(fake: Fake, tmp_path: Path) -> None:
    broker = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    with serving(configuration(tmp_path, DEAD, broker=broker), ready=False) as gateway:
        ids = [begin(gateway, user=f"u{i}", ttlt_slo_ms=1000) for i in range(3)]
        gone = begin(gateway)
    assert set(gateway.jobs().values()) == {("open", None)}, "stopping is no failure"
    asked = fake.last()["asked"]
    with serving(configuration(tmp_path, fake.url, broker=broker)) as gateway:
        for id in [*ids, gone]:
            assert finished(gateway, id)["status"] == "completed"
        assert fake.last()["asked"] == asked + 4, "each is run once"
        assert fake.last()["body"]["vllm_xargs"]["headway_id"] in {*ids, gone}
    with serving(configuration(tmp_path, fake.url, broker=broker)) as gateway:
        assert look(gateway, ids[0])["status"] == "completed"
        assert fake.last()["asked"] == asked + 4


def test_a_queue_of_the_first_version_is_answered(fake: Fake, tmp_path: Path) -> None:
    """Its open job is as the first gateway stored it, before requests had classes' shares, runs' units and the like."""
    path, id = tmp_path / "queue.sqlite", "hw-" + "0" * 24
    slo = {"ttft": None, "tpot": None, "e2e": None}
    request = {"id": id, "model": "smollm2", "prompt_tokens": 5, "max_tokens": 8, "arrival": time.time(), "slo": slo}
    request |= {
        "priority": 0,
        "adapter": None,
        "tenant": "default",
        "task": "default",
        "tier": "default",
        "stage": None,
    }
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Say"}], "max_tokens": 8}
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript((Path(__file__).parents[1] / "store" / "versions" / "queue-1.sql").read_text())
        db.execute("DELETE FROM jobs")
        row = [id, "default", "/v1/chat/completions", time.time(), json.dumps(request), json.dumps(body).encode()]
        db.execute("INSERT INTO jobs VALUES (1, ?, 'open', ?, ?, ?, 1, 0, NULL, NULL, ?, ?, NULL)", row)
    broker = Broker(sqlite=Sqlite(str(path)))
    with serving(configuration(tmp_path, fake.url, broker=broker)) as gateway:
        assert finished(gateway, id)["response"]["choices"][0]["message"]["content"] == "fake " * 8
        assert fake.last()["body"]["messages"] == body["messages"]


def test_another_gateway_takes_over_what_a_stopping_one_gives_back(fake: Fake, tmp_path: Path) -> None:
    broker = Broker(lease_seconds=3, sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    asked = fake.last()["asked"]
    with serving(configuration(tmp_path, fake.url, broker=broker)) as other:
        with serving(configuration(tmp_path, DEAD, broker=broker), ready=False) as gateway:
            id = begin(gateway)
            assert look(other, id)["status"] == "queued", "every gateway on the file knows it"
            assert other.controller.requests == {}, "its owner holds it"
        assert finished(other, id)["status"] == "completed"
    assert fake.last()["asked"] == asked + 1


def test_any_gateway_cancels_what_another_runs(fake: Fake, tmp_path: Path) -> None:
    """The end counts at once; the one that runs it stops with its next renewal, and its engine is let go.

    The lease is longer than a busy machine stands still: the other gateway would take its work.
    """
    broker = Broker(lease_seconds=9, sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    with (
        serving(configuration(tmp_path, fake.url, broker=broker)) as runs,
        serving(configuration(tmp_path, DEAD, broker=broker), ready=False) as other,
    ):
        held, waits = begin(runs, **fakes(hold="elsewhere")), begin(other)
        until(lambda: fake.last()["open"] == 1)
        for id, gateway in ((held, other), (waits, runs)):
            answer = gateway.post(None, f"/v1/responses/{id}/cancel")
            assert answer.status_code == 200
            assert answer.json()["status"] == "cancelled"
            assert {look(one, id)["status"] for one in (runs, other)} == {"cancelled"}
            assert gateway.post(None, f"/v1/responses/{id}/cancel").status_code == 409
        until(lambda: fake.last()["open"] == 0, 20)
        until(lambda: not runs.controller.requests and not other.controller.requests, 20)
        assert set(runs.jobs().values()) == {("failed", "cancelled")}


def test_what_another_gateway_took_from_a_frozen_one_is_dropped(fake: Fake, tmp_path: Path) -> None:
    broker = Broker(lease_seconds=3, sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    with (
        serving(configuration(tmp_path, fake.url, broker=broker)) as frozen,
        serving(configuration(tmp_path, DEAD, broker=broker), ready=False) as other,
    ):
        id = begin(frozen, **fakes(hold="frozen"))
        until(lambda: fake.last()["open"] == 1)
        frozen.do(_freeze(seconds=5))
        until(lambda: id in other.controller.requests)
        until(lambda: id not in frozen.controller.requests and fake.last()["open"] == 0)
        assert look(frozen, id)["status"] == "queued", "the other gateway has it"


async def _freeze(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - nothing else of this gateway is to run


def test_a_backlog_is_asked_about_in_turns(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One renewal's question is bounded; what it leaves out is asked about by the next renewals."""
    monkeypatch.setattr(background, "_IDS_PER_CALL", 2)
    broker = Broker(lease_seconds=3, sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    with (
        serving(configuration(tmp_path, DEAD, broker=broker), ready=False) as runs,
        serving(configuration(tmp_path, fake.url, broker=broker)) as other,
    ):
        ids = [begin(runs) for _ in range(5)]
        for id in (ids[1], ids[4]):
            assert other.post(None, f"/v1/responses/{id}/cancel").status_code == 200
        until(lambda: set(runs.controller.requests) == {ids[0], ids[2], ids[3]})


def test_a_model_that_is_not_served_any_more(fake: Fake, tmp_path: Path) -> None:
    broker = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    with serving(configuration(tmp_path, DEAD, broker=broker), ready=False) as gateway:
        id = begin(gateway)
    engine = {"served_name": "other"}
    with serving(configuration(tmp_path, fake.url, broker=broker, engine=engine)) as gateway:
        seen = finished(gateway, id)
        assert seen["status"] == "failed"
        assert "smollm2 is not served any more" in seen["error"]["message"]
        assert gateway.controller.queued == 0


def test_a_crash_ends_foreground_requests(fake: Fake, tmp_path: Path) -> None:
    """What a killed gateway leaves in the queue: open requests, whose clients are gone."""
    broker = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    with serving(configuration(tmp_path, fake.url, broker=broker)) as gateway:
        id = gateway.post(gateway.chat()).headers["x-request-id"]
        assert gateway.newest() == ("done", None)
        with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as db, db:
            db.execute("UPDATE jobs SET state = 'open', finished = NULL, body_sum = NULL WHERE id = ?", [id])
    with serving(configuration(tmp_path, fake.url, broker=broker)) as gateway:
        state, reason = gateway.jobs()[id]
        assert (state, str(reason).split(":")[0]) == ("failed", "client_gone")


def test_an_engine_that_dies_over_it(serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url) as gateway:
        id = begin(gateway, **fakes(hold="death"))
        until(lambda: mortal.last()["open"] == 1)
        mortal.stop()
        until(lambda: gateway.controller.queued == 1)
        assert look(gateway, id)["status"] == "queued"
        mortal.start()
        mortal.release("death")
        assert finished(gateway, id)["status"] == "completed"
        assert mortal.last()["asked"] == 1
