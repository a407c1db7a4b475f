"""Gateways that share a PostgreSQL: any answers for any file and batch, one runs them, another takes over."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real.peers import gateway_argv
from benchmarks.real.peers import serving as process
from headway.config import Batches, Broker, Config, Key, Postgres, Sqlite, write
from headway.engines.vllm.process.launch import free_port
from tests.gateway.batches import begin, content, ended, held, line, lines, look, outcome, text, upload
from tests.gateway.gateway import CHAT, WEB, Fake, Gateway, configuration, serving, until
from tests.gateway.roles.parts import parts
from tests.helpers import postgres

pytestmark = pytest.mark.usefixtures("own_state")


def shared(folder: Path, fake: Fake, url: str | None = None, lease_seconds: float = 6.0, **more: Any) -> Config:
    """Return the configuration of gateways that share a new schema."""
    address = postgres.fresh(url)
    settings = Postgres(address.url, address.schema, 2.0)
    broker = Broker("postgres", 24.0, lease_seconds, Sqlite(str(folder / "none")), settings)
    return configuration(folder, fake.url, broker=broker, **more)


def rows(config: Config, table: str, what: str = "*") -> int:
    """Return how many rows a table has."""
    at = config.broker.postgres
    return int(postgres.run_sql(f"SELECT count({what}) FROM {at.schema}.{table}", url=str(at.url))[0][0])


def delete(gateway: Gateway, id: str) -> Any:
    return WEB.delete(f"{gateway.url}/v1/files/{id}")


# ---- any gateway answers


def test_any_gateway_answers_for_any_file_and_batch(fake: Fake, tmp_path: Path) -> None:
    config = shared(tmp_path, fake)
    with serving(config) as first, serving(config) as second:
        sent = text(lines(12))
        file = upload(first, sent).json()
        assert second.get(f"/v1/files/{file['id']}").json() == file
        assert second.get(f"/v1/files/{file['id']}/content").content == sent
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        id = second.post(body, "/v1/batches").json()["id"]
        seen = ended(first, id)
        assert seen["status"] == "completed"
        assert seen["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        assert look(second, id) == seen
        assert outcome(second, seen) == ([f"line-{i}" for i in range(12)], [])
        assert outcome(first, seen) == outcome(second, seen)
        listed = [gateway.get("/v1/batches").json() for gateway in (first, second)]
        assert listed[0] == listed[1]
        assert {one["purpose"] for one in first.get("/v1/files").json()["data"]} == {"batch", "batch_output"}
        assert delete(first, file["id"]).status_code == 200
        assert second.get(f"/v1/files/{file['id']}/content").status_code == 404
        client = second.client()
        assert client.files.content(seen["output_file_id"]).text.count("\n") == 12
        assert client.batches.retrieve(id).status == "completed"
    assert rows(config, "lines") == 0


def test_gateways_of_a_headway_in_parts_do(fake: Fake, tmp_path: Path) -> None:
    with parts(shared(tmp_path, fake), tmp_path) as headway:
        headway.controller("c1")
        headway.agent("a1", "e0")
        with headway.gateway("g1") as first, headway.gateway("g2") as second:
            file = upload(first, text(lines(8))).json()["id"]
            body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
            id = second.post(body, "/v1/batches").json()["id"]
            seen = ended(first, id)
            assert outcome(second, seen) == ([f"line-{i}" for i in range(8)], [])


def test_a_batch_is_cancelled_at_another_gateway(fake: Fake, tmp_path: Path) -> None:
    config = shared(tmp_path, fake, batches=Batches(lines=2))
    with serving(config) as first, serving(config) as second:
        id = begin(first, [*lines(3), *(line(f"held-{i}", **held("pg-cancel")) for i in range(4))])
        until(lambda: look(first, id)["request_counts"]["completed"] == 3, 30)
        runs = 'headway_batches{state="in_progress"}'
        until(lambda: first.metric(runs) + second.metric(runs) == 1)
        answer = (second if first.metric(runs) else first).post(None, f"/v1/batches/{id}/cancel")
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] in ("cancelling", "cancelled")
        seen = ended(second, id)
        assert seen["status"] == "cancelled"
        assert outcome(first, seen) == ([f"line-{i}" for i in range(3)], [f"held-{i}" for i in range(4)])
        assert content(first, seen["error_file_id"])[0]["error"]["code"] == "batch_cancelled"


def test_wrong_lines_and_other_tenants(fake: Fake, tmp_path: Path) -> None:
    keys = (Key("sk-alpha-1", "alpha"), Key("sk-beta-11", "beta"))
    config = shared(tmp_path, fake, keys=keys)
    with serving(config) as first, serving(config) as second:
        mine, theirs = ({"headers": {"authorization": f"Bearer {key.key}"}} for key in keys)
        id = begin(first, [*lines(2), line("a", stream=True)], **mine)
        seen = ended(second, id, **mine)
        assert seen["status"] == "failed"
        assert [(one["code"], one["line"]) for one in seen["errors"]["data"]] == [("stream_unsupported", 3)]
        assert second.get(f"/v1/batches/{id}", **theirs).status_code == 404
        assert second.get(f"/v1/files/{seen['input_file_id']}/content", **theirs).status_code == 404
        assert second.get("/v1/files", **theirs).json()["data"] == []
    assert rows(config, "lines") == 0


# ---- uploads


def unfinished(gateway: Gateway, size: int) -> socket.socket:
    """Begin an upload of which so many bytes come, and then nothing."""
    connection = socket.create_connection(("127.0.0.1", int(gateway.url.rsplit(":", 1)[1])))
    head = b'--abc\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    connection.sendall(
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=abc\r\n"
        b"content-length: %d\r\n\r\n" % (len(head) + 2**24) + head
    )
    for _ in range(size // 2**16):
        connection.sendall(b"x" * 2**16)
    return connection


def test_an_upload_that_ends_early_leaves_nothing(fake: Fake, tmp_path: Path) -> None:
    config = shared(tmp_path, fake)
    with serving(config) as gateway:
        connection = unfinished(gateway, 2**20)
        until(lambda: rows(config, "chunks") >= 3)
        connection.close()
        until(lambda: rows(config, "chunks") == rows(config, "files") == 0)
        wrong = upload(gateway, text(lines(2)), purpose="fine-tune")
        assert wrong.json()["error"]["code"] == "invalid_purpose"
        until(lambda: rows(config, "files") == 0)


def test_limits_hold_over_all_gateways(fake: Fake, tmp_path: Path) -> None:
    config = shared(tmp_path, fake, batches=Batches(max_file_mib=16, tenant_mib=17, max_open=1))
    with serving(config) as first, serving(config) as second:
        large = upload(first, b"x" * (16 * 2**20 + 1))
        assert (large.status_code, large.json()["error"]["code"]) == (413, "file_too_large")
        connection = unfinished(first, 2**21)
        until(lambda: rows(config, "chunks") >= 7)
        full = upload(second, b"x" * (16 * 2**20))
        assert (full.status_code, full.json()["error"]["code"]) == (413, "files_full")
        assert rows(config, "chunks", "DISTINCT file") == 1, "it declared its length: nothing of it is stored"
        connection.close()
        until(lambda: rows(config, "chunks") == 0)
        id = begin(first, lines(1, **held("pg-open")))
        body = {"input_file_id": look(first, id)["input_file_id"], "endpoint": CHAT, "completion_window": "1h"}
        more = second.post(body, "/v1/batches")
        assert (more.status_code, more.json()["error"]["code"]) == (429, "too_many_batches")
        assert delete(second, body["input_file_id"]).json()["error"]["code"] == "file_in_use"
        fake.release("pg-open")
        ended(second, id)


def test_large_files_take_little_memory(fake: Fake, tmp_path: Path) -> None:
    """Of 100 MB that come in, are checked, and go out, a few MB are in memory at a time."""
    config, size = shared(tmp_path, fake), 100 * 2**20
    with ExitStack() as stack:
        gateway = start(stack, tmp_path / "gateway", config)
        url, memory = f"http://127.0.0.1:{gateway.port}/v1", gateway.process.memory_info
        id = WEB.post(f"{url}/files", files={"file": ("x", text(lines(1)))}, data=PURPOSE).json()["id"]
        assert WEB.get(f"{url}/files/{id}/content").status_code == 200
        before, most = memory().rss, 0
        row = b'{"custom_id": "a", "pad": "' + b"x" * 500_000 + b'"}\n'

        def body() -> Iterator[bytes]:
            nonlocal most
            yield b'--abc\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            yield b'--abc\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
            for _ in range(size // len(row)):
                yield row
                most = max(most, memory().rss)
            yield b"\r\n--abc--\r\n"

        kind = {"content-type": "multipart/form-data; boundary=abc"}
        file = WEB.post(f"{url}/files", content=body(), headers=kind, timeout=60).json()
        assert file["bytes"] > 0.9 * size
        read = 0
        with WEB.stream("GET", f"{url}/files/{file['id']}/content", timeout=60) as answer:
            assert answer.headers["content-length"] == str(file["bytes"])
            for piece in answer.iter_raw():
                read, most = read + len(piece), max(most, memory().rss)
        assert read == file["bytes"]
        made = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "1h"}
        batch = WEB.post(f"{url}/batches", json=made).json()["id"]
        until(lambda: WEB.get(f"{url}/batches/{batch}").json()["status"] == "failed", 30)
        most = max(most, memory().rss)
        assert most - before < 40 * 2**20, f"{(most - before) / 2**20:.0f} MiB more"


# ---- kills


PURPOSE = {"purpose": "batch"}


def start(stack: ExitStack, folder: Path, config: Config) -> Any:
    """Start a gateway in a process of its own; return it."""
    folder.mkdir()
    config = replace(config, server=replace(config.server, port=free_port()))
    (folder / "headway.toml").write_text(write(config))
    return stack.enter_context(process("gateway", gateway_argv(folder), config.server.port, "/ready", folder))


def progress(port: int, id: str) -> dict[str, Any]:
    return dict(WEB.get(f"http://127.0.0.1:{port}/v1/batches/{id}").json())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "paused"])
def test_another_gateway_takes_a_batch_over(fake: Fake, tmp_path: Path, how: int) -> None:
    """What has ended is not run again; a gateway that was paused, and goes on later, changes nothing."""
    config = shared(tmp_path, fake, lease_seconds=3.0, batches=Batches(lines=8))
    before, name = fake.last()["asked"], f"pg-{how}"
    with ExitStack() as stack:
        first = start(stack, tmp_path / "first", config)
        url = f"http://127.0.0.1:{first.port}/v1"
        records = [line(f"line-{i}", **({} if i < 10 else held(name))) for i in range(30)]
        file = WEB.post(f"{url}/files", files={"file": ("x", text(records))}, data=PURPOSE).json()
        made = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        id = WEB.post(f"{url}/batches", json=made).json()["id"]
        second = start(stack, tmp_path / "second", config)
        until(lambda: progress(second.port, id)["request_counts"]["completed"] == 10, 30)
        until(lambda: fake.last()["asked"] == before + 18, 20)
        first.process.send_signal(how)
        time.sleep(4.0)
        fake.release(name)
        seen = until(lambda: (one := progress(second.port, id))["completed_at"] and one, 60)
        if how == signal.SIGSTOP:
            first.process.send_signal(signal.SIGCONT)
            until(lambda: progress(first.port, id) == seen, 20)
        assert seen["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        url = f"http://127.0.0.1:{second.port}/v1/files/{seen['output_file_id']}/content"
        answered = [json.loads(one)["custom_id"] for one in WEB.get(url).text.splitlines()]
        assert Counter(answered) == Counter(f"line-{i}" for i in range(30))
        assert seen["error_file_id"] is None
        again = fake.last()["asked"] - before - 30
        assert 0 <= again <= 8, "only what an engine worked on"


# ---- a server that is out


def test_a_server_that_is_restarted_loses_nothing(fake: Fake, own: postgres.PrivateServer, tmp_path: Path) -> None:
    config = shared(tmp_path, fake, own.url, lease_seconds=30.0, batches=Batches(lines=4))
    asked = fake.last()["asked"]
    with serving(config) as gateway:
        records = [line(f"line-{i}", **({} if i < 5 else held("pg-restart"))) for i in range(12)]
        id = begin(gateway, records)
        until(lambda: look(gateway, id)["request_counts"]["completed"] == 5, 30)
        until(lambda: fake.last()["asked"] == asked + 9)
        own.stop(signal.SIGQUIT)
        body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
        answers = [
            upload(gateway, text(lines(1))),
            gateway.get("/v1/files"),
            gateway.get(f"/v1/batches/{id}"),
            gateway.post(body, "/v1/batches"),
            gateway.post(None, f"/v1/batches/{id}/cancel"),
            gateway.get("/v1/files/file-x/content"),
        ]
        for answer in answers:
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["type"] == "server_error"
            assert error["message"].startswith(("The store of files and batches is out", "The queue takes nothing"))
            assert str(own.port) not in answer.text
        fake.release("pg-restart")
        time.sleep(1.0)
        own.start()
        until(lambda: gateway.get(f"/v1/batches/{id}").status_code == 200, 20)
        seen = ended(gateway, id)
        assert seen["status"] == "completed"
        assert outcome(gateway, seen) == ([f"line-{i}" for i in range(12)], [])
        assert fake.last()["asked"] == asked + 12, "each is run once"


# ---- where they are


def test_a_directory_that_is_given_is_used(fake: Fake, tmp_path: Path) -> None:
    config = shared(tmp_path, fake, batches=Batches(dir=str(tmp_path / "batches")))
    with serving(config) as gateway:
        assert ended(gateway, begin(gateway, lines(2)))["status"] == "completed"
        assert (tmp_path / "batches" / "batches.sqlite").is_file()


def test_none_at_all(fake: Fake, tmp_path: Path) -> None:
    with serving(shared(tmp_path, fake, batches=Batches(dir="none"))) as gateway:
        answer = upload(gateway, text(lines(1)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "batches_off")
