"""Batches: checked line by line, run behind interactive work, every line answered once; OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headway import clock
from headway.config import Batches, Broker, Config, Key, Sqlite, Tier
from headway.gateway.apis.batches.lines import LineCheck
from headway.gateway.parsing.parser import Parser
from headway.store.batches.directory import DirectoryStore
from headway.store.batches.port import BatchStore
from headway.store.batches.records import Batch, Line, StoredFile
from tests.gateway.batches import begin, content, ended, held, line, lines, look, outcome, text, upload
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, CLASSES, DEAD, SAY, Fake, Gateway, configuration, serving, until
from tests.gateway.test_request_ends import fakes
from tests.test_clock import shift_now


def cancel(gateway: Gateway, id: str, **more: Any) -> Any:
    return gateway.post(None, f"/v1/batches/{id}/cancel", **more)


# ---- what becomes of a batch


def test_responses_are_answered_as_responses(gateway: Gateway) -> None:
    records = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": "smollm2", "input": f"Say {i}.", "metadata": {"number": str(i)}},
        }
        for i in range(3)
    ]
    done = ended(gateway, begin(gateway, records, endpoint="/v1/responses"))
    assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    for one in content(gateway, done["output_file_id"]):
        body = one["response"]["body"]
        assert (body["object"], body["status"]) == ("response", "incomplete")  # the fake's end is its limit
        assert body["metadata"] == {"number": one["custom_id"]}
        assert body["output"][0]["content"][0]["text"].startswith("fake")
    wrong = [records[0] | {"body": {"model": "smollm2", "input": "a", "previous_response_id": "b"}}]
    failed = ended(gateway, begin(gateway, wrong, endpoint="/v1/responses"))
    assert failed["status"] == "failed"


def test_metrics_tell_what_is_left_of_batches(serve: Serve, fake: Fake) -> None:
    with serve() as gateway:
        id = begin(gateway, lines(3, **held("batch metrics")))
        until(lambda: gateway.metric('headway_batches{state="in_progress"}') == 1)
        assert gateway.metric("headway_batch_lines ") == 3
        fake.release("batch metrics")
        ended(gateway, id)
        until(lambda: gateway.metric('headway_batches{state="in_progress"}') == 0)
        assert gateway.metric("headway_batch_lines ") == 0


def test_openai_s_client_gets_every_line_answered(gateway: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(text([*lines(20), line("refused", **fakes(end="400"))]))
    client = gateway.client()
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    assert client.files.retrieve(uploaded.id).filename == "lines.jsonl"
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h", metadata={"who": "test"}
    )
    done = until(lambda: (b := client.batches.retrieve(batch.id)).status == "completed" and b, 60)
    assert done.metadata == {"who": "test"}
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 21, "completed": 20, "failed": 1}
    assert done.output_file_id is not None
    answers = [json.loads(one) for one in client.files.content(done.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in answers] == [f"line-{i}" for i in range(20)]
    said = answers[0]["response"]
    assert (said["status_code"], said["body"]["choices"][0]["message"]["content"]) == (200, "fake " * 8)
    (wrong,) = content(gateway, done.error_file_id)
    assert (wrong["custom_id"], wrong["error"]["code"]) == ("refused", "engine_refused")
    assert done.expires_at is not None
    assert done.expires_at == pytest.approx(done.created_at + 86400, abs=2)
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    assert client.files.delete(uploaded.id).deleted


def test_a_mark_of_the_encoding_is_no_part_of_the_first_line(gateway: Gateway) -> None:
    record = {"custom_id": "a", "method": "POST", "url": CHAT, "body": gateway.chat()}
    seen = ended(gateway, begin(gateway, ["\ufeff" + json.dumps(record), record | {"custom_id": "b"}]))
    assert seen["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_text_completions_and_windows(gateway: Gateway, fake: Fake) -> None:
    body = {"model": "smollm2", "prompt": "Say", "max_tokens": 8}
    record = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    id = begin(gateway, [record], "90m", endpoint="/v1/completions")
    seen = ended(gateway, id)
    assert seen["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert seen["error_file_id"] is None
    sent = fake.last()["body"]["vllm_xargs"]
    assert sent["headway_id"] == f"{id}-1"
    assert 5000 < sent["headway_e2e"] <= 5400, "what is left of the window"
    assert fake.last()["body"]["priority"] == 10, "of the class batch"
    assert "headway_soft" not in sent, "a window is a promise, which orders the line"


def test_an_slo_of_its_own_counts_and_so_does_the_class(serve: Serve, fake: Fake) -> None:
    with serve(classes=CLASSES | {"batch": Tier(e2e_ms=600_000.0, priority=7)}) as gateway:
        ended(gateway, begin(gateway, lines(1)))
        sent = fake.last()["body"]
        assert (sent["priority"], sent["vllm_xargs"]["headway_e2e"]) == (7, 600)
        ended(gateway, begin(gateway, lines(1, ttlt_slo_ms=90_000)))
        assert fake.last()["body"]["vllm_xargs"]["headway_e2e"] == 90


def test_more_lines_than_fit_at_a_time(serve: Serve, fake: Fake) -> None:
    """Few are in the gateway at once, and interactive requests go on."""
    with serve(batches=Batches(lines=3)) as gateway:
        id = begin(gateway, lines(12, **held("few")))
        until(lambda: len(gateway.controller.requests) == 3)
        assert gateway.post(gateway.chat()).status_code == 200
        until(lambda: len(gateway.controller.requests) == 3)
        assert look(gateway, id)["request_counts"] == {"total": 12, "completed": 0, "failed": 0}
        fake.release("few")
        seen = ended(gateway, id)
        assert outcome(gateway, seen) == ([f"line-{i}" for i in range(12)], [])
        assert seen["status"] == "completed"


def test_a_full_queue_is_waited_for(serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url, server={"max_queued": 4}, engine={"max_running": 1}) as gateway:
        mortal.stop()
        waiting = [gateway.post(gateway.chat(background=True)).json()["id"] for _ in range(3)]
        until(lambda: gateway.controller.queued == 3)
        id = begin(gateway, lines(3))
        until(lambda: look(gateway, id)["status"] == "in_progress", 30)
        assert gateway.controller.queued == 3, "half of the queue is not for batches"
        mortal.start()
        assert ended(gateway, id)["request_counts"]["completed"] == 3
        assert all(gateway.get(f"/v1/responses/{one}").json()["status"] == "completed" for one in waiting)


# ---- what is wrong with its lines


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ("not json", "invalid_json"),
        ("[]", "invalid_request"),
        (line("a") | {"method": "GET"}, "invalid_request"),
        (line("a") | {"url": "/v1/completions"}, "invalid_url"),
        (line(""), "invalid_request"),
        (line("line-0"), "duplicate_custom_id"),
        (line("a", stream=True), "stream_unsupported"),
        (line("a", model="none"), "model_not_found"),
        (line("a", max_tokens=-1), "invalid_request"),
        (line("a", max_tokens=10**6), "context_length_exceeded"),
        (line("a", user="x" * 2**20), "line_too_long"),
    ],
)
def test_a_wrong_line_fails_the_batch(gateway: Gateway, fake: Fake, wrong: Any, code: str) -> None:
    asked = fake.last()["asked"]
    seen = ended(gateway, begin(gateway, [*lines(2), "", wrong]))
    assert seen["status"] == "failed"
    assert seen["failed_at"] is not None
    (problem,) = seen["errors"]["data"]
    assert (problem["code"], problem["line"]) == (code, 4)
    assert seen["output_file_id"] is seen["error_file_id"] is None
    assert fake.last()["asked"] == asked, "nothing of it is run"


def test_a_fault_of_the_parser_fails_the_batch(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the batch would be checked again every second until it expires."""

    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("a fault")

    monkeypatch.setattr(Parser, "parse", broken)
    seen = ended(gateway, begin(gateway, lines(1)))
    (problem,) = seen["errors"]["data"]
    assert (seen["status"], problem["code"], problem["line"]) == ("failed", "invalid_request", 1)


def test_a_file_without_lines_and_one_with_many_wrong_ones(gateway: Gateway) -> None:
    (problem,) = ended(gateway, begin(gateway, ["", ""]))["errors"]["data"]
    assert problem["code"] == "empty_file"
    problems = ended(gateway, begin(gateway, ["x"] * 200))["errors"]["data"]
    assert [problem["line"] for problem in problems] == list(range(1, 51))


def test_the_claims_of_a_batch_have_no_defaults(serve: Serve) -> None:
    """An older gateway reads them, though it does not know all limits."""
    with serve(keys=(Key("sk-alpha-1", "alpha", classes=("batch",)),)) as gateway:
        id = begin(gateway, lines(1), headers={"authorization": "Bearer sk-alpha-1"})
        assert gateway.inner.batches is not None
        claims = gateway.do(gateway.inner.batches.batch("alpha", id)).claims
        assert json.loads(claims) == {"tenant": "alpha", "classes": ["batch"]}


def test_claims_beyond_the_key_of_the_batch(serve: Serve) -> None:
    with serve(keys=(Key("sk-alpha-1", "alpha", classes=("batch",), e2e_ms=5000.0),)) as gateway:
        mine = {"headers": {"authorization": "Bearer sk-alpha-1"}}
        id = begin(gateway, [line("fine"), line("hasty", ttlt_slo_ms=100)], **mine)
        (problem,) = ended(gateway, id, **mine)["errors"]["data"]
        assert (problem["line"], problem["code"]) == (2, "beyond_key")
        assert ended(gateway, begin(gateway, lines(2), **mine), **mine)["status"] == "completed"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"completion_window": "59s"}, 400),
        ({"completion_window": "tomorrow"}, 400),
        ({"completion_window": "367d"}, 400),
        ({"endpoint": "/v1/rerank"}, 400),
        ({"input_file_id": "file-none"}, 404),
        ({"metadata": {"x": 3}}, 400),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, 400),
        ({"output_expires_after": {"anchor": "ended_at", "seconds": 3600}}, 400),
    ],
)
def test_a_batch_that_is_refused(gateway: Gateway, fields: dict[str, Any], status: int) -> None:
    file = upload(gateway, text(lines(1))).json()["id"]
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "1m", **fields}
    answer = gateway.post(body, "/v1/batches")
    assert answer.status_code == status, answer.text


def test_what_it_reads_and_wrote(gateway: Gateway, fake: Fake) -> None:
    id = begin(gateway, lines(1, **held("read")))
    until(lambda: look(gateway, id)["status"] == "in_progress", 30)
    store: Any = gateway.inner.batches
    batch = gateway.do(store.batch("default", id))
    with pytest.raises(Exception, match="reads this file"):
        gateway.do(store.delete_file("default", batch.input_file))
    fake.release("read")
    output = ended(gateway, id)["output_file_id"]
    body = {"input_file_id": output, "endpoint": CHAT, "completion_window": "1m"}
    assert gateway.post(body, "/v1/batches").json()["error"]["code"] == "invalid_purpose"


# ---- when it ends early


def test_cancelling_keeps_what_was_answered(serve: Serve, fake: Fake) -> None:
    with serve(batches=Batches(lines=2)) as gateway:
        id = begin(gateway, [*lines(3), *(line(f"held-{i}", **held("cancel")) for i in range(4))])
        until(lambda: look(gateway, id)["request_counts"]["completed"] == 3, 30)
        aborted = fake.last()["aborted"]
        assert cancel(gateway, id).json()["status"] in ("cancelling", "cancelled")
        seen = ended(gateway, id)
        assert seen["status"] == "cancelled"
        assert seen["cancelled_at"] >= seen["cancelling_at"]
        good, bad = outcome(gateway, seen)
        assert good == [f"line-{i}" for i in range(3)]
        assert bad == [f"held-{i}" for i in range(4)]
        assert content(gateway, seen["error_file_id"])[0]["error"]["code"] == "batch_cancelled"
        until(lambda: fake.last()["aborted"] == aborted + 2)
        assert gateway.controller.requests == {}
        assert cancel(gateway, id).status_code == 409


def test_the_window_ends(serve: Serve, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(batches=Batches(lines=2)) as gateway:
        id = begin(gateway, [*lines(2), *(line(f"held-{i}", **held("window")) for i in range(3))], "1h")
        until(lambda: look(gateway, id)["request_counts"]["completed"] == 2, 30)
        until(lambda: len(gateway.controller.requests) == 2)
        shift_now(3700, monkeypatch)
        seen = ended(gateway, id)
        assert (seen["status"], seen["cancelling_at"]) == ("expired", None)
        assert seen["request_counts"] == {"total": 5, "completed": 2, "failed": 3}
        assert outcome(gateway, seen) == (["line-0", "line-1"], [f"held-{i}" for i in range(3)])
        assert content(gateway, seen["error_file_id"])[0]["error"]["code"] == "batch_expired"
        assert gateway.controller.requests == {}


def test_tenants_take_turns_with_checks(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant with many batches does not hold up the check of another's only one."""
    order, may_check, check = list[str](), threading.Event(), LineCheck.run

    def run(self: LineCheck) -> bool:
        order.append(self.batch.tenant)
        assert may_check.wait(60)
        return check(self)

    monkeypatch.setattr(LineCheck, "run", run)
    keys = tuple(Key(key=f"sk-{tenant}-1234567", tenant=tenant) for tenant in "ab")
    headers = [{"authorization": f"Bearer {key.key}"} for key in keys]
    with serve(keys=keys) as gateway:
        ids = [begin(gateway, lines(1), headers=headers[0]) for _ in range(3)]
        until(lambda: order == ["a"])
        only = begin(gateway, lines(1), headers=headers[1])
        time.sleep(1.5)  # the runner looks for new batches every second
        may_check.set()
        assert ended(gateway, only, headers=headers[1])["status"] == "completed"
        assert [ended(gateway, id, headers=headers[0])["status"] for id in ids] == ["completed"] * 3
    assert order == ["a", "b", "a", "a"]


def test_batches_of_another_tenant_are_not_there(serve: Serve) -> None:
    keys = (Key("sk-alpha-1", "alpha"), Key("sk-beta-11", "beta"))
    with serve(keys=keys) as gateway:
        mine, theirs = ({"headers": {"authorization": f"Bearer {key.key}"}} for key in keys)
        id = begin(gateway, lines(2), **mine)
        output = ended(gateway, id, **mine)["output_file_id"]
        assert gateway.get(f"/v1/batches/{id}", **theirs).status_code == 404
        assert cancel(gateway, id, **theirs).status_code == 404
        assert gateway.get("/v1/batches", **theirs).json()["data"] == []
        assert gateway.get(f"/v1/files/{output}/content", **theirs).status_code == 404
        body = {
            "input_file_id": look(gateway, id, **mine)["input_file_id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        assert gateway.post(body, "/v1/batches", **theirs).status_code == 404


# ---- over restarts


def on_disk(tmp_path: Path, url: str, **fields: Any) -> Config:
    broker = Broker(lease_seconds=3, sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    return configuration(tmp_path, url, broker=broker, **fields)


def test_it_goes_on_after_a_restart(fake: Fake, tmp_path: Path) -> None:
    asked = fake.last()["asked"]
    with serving(on_disk(tmp_path, DEAD), ready=False) as gateway:
        id = begin(gateway, lines(30))
        until(lambda: gateway.controller.queued >= 10)
    with serving(on_disk(tmp_path, fake.url)) as gateway:
        seen = ended(gateway, id)
        assert outcome(gateway, seen) == ([f"line-{i}" for i in range(30)], [])
        assert fake.last()["asked"] == asked + 30, "each is run once"


def test_what_was_answered_while_nobody_recorded_it(fake: Fake, tmp_path: Path) -> None:
    """A line whose end the queue knows, and the batch does not, is picked up rather than run again."""
    with serving(on_disk(tmp_path, DEAD), ready=False) as gateway:
        id = begin(gateway, lines(2))
        until(lambda: gateway.controller.queued == 2)
        answer = json.dumps({"choices": [], "picked": "up"}).encode()
        gateway.do(_ends_unseen(gateway, f"{id}-1", answer))
    asked = fake.last()["asked"]
    with serving(on_disk(tmp_path, fake.url)) as gateway:
        first, _ = content(gateway, ended(gateway, id)["output_file_id"])
        assert first["response"]["body"]["picked"] == "up"
        assert fake.last()["asked"] == asked + 1


async def _ends_unseen(gateway: Gateway, id: str, answer: bytes) -> None:
    """End a job in the queue in such a way that the gateway does not notice."""
    await gateway.inner.broker.done(id, answer, clock.now())
    await asyncio.sleep(0)


@pytest.mark.parametrize("killed", ["while lines were checked", "while files were written"])
def test_what_a_killed_gateway_left(fake: Fake, tmp_path: Path, killed: str) -> None:
    config = on_disk(tmp_path, fake.url)
    assert config.batches_dir is not None
    asyncio.run(_left_behind(DirectoryStore(config.batches_dir), text(lines(3)), "written" in killed))
    asked = fake.last()["asked"]
    with serving(config) as gateway:
        seen = ended(gateway, "batch_1")
        count = 2 if "written" in killed else 3
        assert outcome(gateway, seen) == ([f"line-{i}" for i in range(count)], [])
        assert seen["request_counts"] == {"total": count, "completed": count, "failed": 0}
        assert fake.last()["asked"] == asked + (0 if "written" in killed else 3)


async def _left_behind(store: BatchStore, content: bytes, written: bool) -> None:
    """Leave a batch of which two lines are checked, or all that it has are answered."""
    now = clock.now()
    file = StoredFile("file-1", "default", "x", "batch", len(content), now)
    await store.begin_file(file)
    await store.append(file.id, 0, content)
    await store.add_file(file, 10**6)
    await store.add_batch(Batch("batch_1", "default", CHAT, file.id, "24h", now, now + 86400), 1)
    await store.add_lines("batch_1", [Line(1, 0, 9, "line-0"), Line(2, 0, 9, "line-1")])
    if written:
        await store.begin("batch_1", now)
        for i in range(2):
            await store.record("batch_1", i + 1, True, json.dumps({"custom_id": f"line-{i}"}).encode())
        await store.finalize("batch_1", now)
    await store.close()


def test_of_two_gateways_one_runs_it_and_both_tell(fake: Fake, tmp_path: Path) -> None:
    with serving(on_disk(tmp_path, fake.url)) as first:
        with serving(on_disk(tmp_path, fake.url)) as second:
            id = begin(second, lines(8))
            assert ended(first, id) == ended(second, id)
            assert outcome(second, look(second, id)) == ([f"line-{i}" for i in range(8)], [])
            held_id = begin(second, lines(1, **held("two")))
            until(lambda: look(second, held_id)["status"] == "in_progress", 30)
            assert cancel(second, held_id).status_code == 200
            assert ended(second, held_id)["status"] == "cancelled"
        assert ended(first, begin(first, [line("x", messages=SAY)]))["status"] == "completed"


def test_its_files_may_expire(gateway: Gateway) -> None:
    after = {"anchor": "created_at", "seconds": 7200}
    done = ended(gateway, begin(gateway, lines(2), output_expires_after=after))
    file = gateway.get(f"/v1/files/{done['output_file_id']}").json()
    assert file["expires_at"] - file["created_at"] in (7199, 7200, 7201)
    again = {"input_file_id": done["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    key = {"headers": {"idempotency-key": "expires"}}
    assert gateway.post({**again, "output_expires_after": after}, "/v1/batches", **key).status_code == 200
    assert gateway.post({**again, "output_expires_after": after}, "/v1/batches", **key).status_code == 200
    assert gateway.post(again, "/v1/batches", **key).status_code == 422
