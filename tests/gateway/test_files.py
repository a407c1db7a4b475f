"""Files of batches: uploaded within limits, listed, read and deleted by their own tenant only."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Batches, Broker, Key
from headway.errors import RequestError
from headway.gateway.apis.batches.files import Upload
from headway.gateway.apis.batches.lines import numbered
from tests.gateway.batches import lines, text, upload
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, configuration, serving, until

SMALL = Batches(max_file_mib=1, max_lines=4, tenant_mib=2)
LINE = b'{"x": 1}\n'
KIND = "multipart/form-data; boundary=abc"


@pytest.fixture(scope="module")
def small(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that takes files of 1 MiB and 4 lines."""
    with serving(configuration(tmp_path_factory.mktemp("files"), fake.url, batches=SMALL)) as running:
        yield running


def left(gateway: Gateway) -> set[str]:
    """Return the names of all files on the disk."""
    assert gateway.config.batches_dir is not None
    return {path.name for path in (gateway.config.batches_dir / "files").iterdir()}


def refused(gateway: Gateway, content: bytes, **more: Any) -> tuple[int, str]:
    """Return status and code of an upload that leaves nothing behind."""
    before = left(gateway)
    answer = upload(gateway, content, **more)
    assert left(gateway) == before
    return answer.status_code, answer.json()["error"]["code"]


def test_a_file_comes_back_as_it_was(gateway: Gateway) -> None:
    content = text(lines(3)) + b'{"no": "end of line"}'
    answer = upload(gateway, content)
    assert answer.status_code == 200, answer.text
    file = answer.json()
    assert (file["object"], file["bytes"], file["purpose"]) == ("file", len(content), "batch")
    assert file["filename"] == "lines.jsonl"
    assert gateway.get(f"/v1/files/{file['id']}").json() == file
    assert gateway.get(f"/v1/files/{file['id']}/content").content == content
    assert file in gateway.get("/v1/files").json()["data"]
    assert gateway.get("/v1/files?purpose=batch_output").json()["data"] == []
    assert WAS_DELETED.items() <= deleted(gateway, file["id"]).json().items()
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content"):
        assert gateway.get(path).status_code == 404
    assert deleted(gateway, file["id"]).status_code == 404
    assert file["id"] not in left(gateway)


WAS_DELETED = {"object": "file", "deleted": True}


def deleted(gateway: Gateway, id: str, **more: Any) -> Any:
    from tests.gateway.gateway import WEB

    return WEB.delete(f"{gateway.url}/v1/files/{id}", **more)


def test_lists_go_on_after_a_file(gateway: Gateway) -> None:
    ids = [upload(gateway, LINE).json()["id"] for _ in range(3)][::-1]
    page = gateway.get("/v1/files?limit=2").json()
    assert [file["id"] for file in page["data"]] == ids[:2]
    assert page["has_more"]
    rest = gateway.get(f"/v1/files?limit=2&after={page['last_id']}").json()["data"]
    assert rest[0]["id"] == ids[2]
    oldest = gateway.get("/v1/files?order=asc").json()["data"]
    assert [file["id"] for file in oldest][-3:] == ids[::-1]
    assert gateway.get("/v1/files?limit=0").status_code == 400


def test_limits_of_a_file(small: Gateway) -> None:
    assert refused(small, b"x" * 2**20 + b"y") == (413, "file_too_large")
    assert refused(small, LINE * 5) == (413, "too_many_lines")
    assert refused(small, LINE * 4 + b"x") == (413, "too_many_lines")
    assert upload(small, LINE * 4).status_code == 200


def test_a_file_whose_length_is_not_declared(small: Gateway) -> None:
    def body() -> Iterator[bytes]:
        yield b'--abc\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for _ in range(40):
            yield b"x" * 2**16

    before = left(small)
    answer = small.post(None, "/v1/files", content=body(), headers={"content-type": KIND})
    assert answer.status_code == 413
    assert left(small) == before


def test_the_bytes_of_a_tenant(serve: Serve) -> None:
    with serve(batches=Batches(max_file_mib=1, tenant_mib=1)) as gateway:
        first = upload(gateway, b"x" * 900_000)
        assert refused(gateway, b"x" * 300_000) == (413, "files_full")
        deleted(gateway, first.json()["id"])
        assert upload(gateway, b"x" * 300_000).status_code == 200


def test_files_without_content_have_a_limit(serve: Serve) -> None:
    with serve(batches=Batches(max_file_mib=1, tenant_mib=1)) as gateway:
        codes = [upload(gateway, b"").status_code for _ in range(257)]
    assert codes == [200] * 256 + [413]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"purpose": "fine-tune"}, "invalid_purpose"),
        ({"purpose": ""}, "invalid_purpose"),
        ({"headers": {"content-type": "application/json"}}, "invalid_form"),
    ],
)
def test_what_is_no_form_of_a_file(gateway: Gateway, more: dict[str, Any], code: str) -> None:
    assert refused(gateway, LINE, **more) == (400, code)


@pytest.mark.parametrize("boundary", ["other", "", "x" * 300])
def test_a_boundary_that_is_none(gateway: Gateway, boundary: str) -> None:
    before = left(gateway)
    kind = {"content-type": f"multipart/form-data; boundary={boundary}"}
    answer = gateway.post(None, "/v1/files", content=b"--abc\r\n\r\n\r\n--abc--\r\n", headers=kind)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    assert left(gateway) == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"expires": "3600"}, "expires"),
        ({"expires_after[seconds]": "3600"}, "anchor"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "seconds"),
        ({"expires_after[anchor]": "last_active_at", "expires_after[seconds]": "3600"}, "anchor"),
    ],
)
def test_fields_that_mean_nothing_here_are_refused(gateway: Gateway, fields: dict[str, str], words: str) -> None:
    answer = gateway.post(None, "/v1/files", files={"file": ("x", LINE)}, data={"purpose": "batch", **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_file_may_expire(gateway: Gateway) -> None:
    with gateway.client() as asks:
        file = asks.files.create(
            file=("x.jsonl", LINE), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
        )
    assert file.expires_at is not None
    assert file.expires_at - file.created_at in (7199, 7200, 7201)


def test_a_file_that_has_expired_is_gone(serve: Serve) -> None:
    with serve() as gateway:
        (kept, expired), queue = [upload(gateway, LINE).json()["id"] for _ in range(2)], gateway.config.broker
        assert gateway.config.batches_dir is not None
        database = gateway.config.batches_dir / "batches.sqlite"
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("UPDATE files SET expires = 1 WHERE id = ?", [expired])
    with serve(broker=queue) as gateway:
        assert gateway.get(f"/v1/files/{expired}").status_code == 404
        assert [file["id"] for file in gateway.get("/v1/files").json()["data"]] == [kept]
        assert gateway.get(f"/v1/files/{kept}").status_code == 200
        until(lambda: left(gateway) == {kept})


def test_files_of_another_tenant_are_not_there(serve: Serve) -> None:
    keys = (Key("sk-alpha-1", "alpha"), Key("sk-beta-11", "beta"))
    with serve(keys=keys) as gateway:
        mine, theirs = ({"authorization": f"Bearer {key.key}"} for key in keys)
        id = upload(gateway, LINE, headers=mine).json()["id"]
        assert gateway.get("/v1/files", headers=theirs).json()["data"] == []
        for path in (f"/v1/files/{id}", f"/v1/files/{id}/content"):
            assert gateway.get(path, headers=theirs).status_code == 404
            assert gateway.get(path).status_code == 401
        assert deleted(gateway, id, headers=theirs).status_code == 404
        assert gateway.get(f"/v1/files/{id}", headers=mine).status_code == 200


def test_without_a_queue_on_disk_there_are_none(serve: Serve) -> None:
    with serve(broker=Broker("memory")) as gateway:
        for answer in (upload(gateway, LINE), gateway.get("/v1/files"), gateway.get("/v1/batches")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "batches_off")
            assert "broker.kind" in answer.json()["error"]["message"]


# ---- parsing


@given(content=st.binary(max_size=300), cuts=st.lists(st.integers(0, 500), max_size=6))
def test_a_body_is_the_same_file_however_it_is_cut(content: bytes, cuts: list[int]) -> None:
    if b"--abc" in content:
        return
    body = (
        b'--abc\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--abc\r\ncontent-disposition: form-data; name="file"; filename="a/b.jsonl"\r\n\r\n'
        + content
        + b"\r\n--abc--\r\n"
    )
    upload, found, at = Upload(KIND, Batches()), b"", 0
    for cut in [*sorted(cuts), len(body)]:
        upload.feed(body[at:cut])
        found, at = found + upload.take(), max(at, cut)
    upload.complete()
    assert found == content
    assert (upload.name, upload.size) == ("b.jsonl", len(content))
    assert upload.lines == content.count(b"\n")


@pytest.mark.parametrize("end", [1, 60, 140])
def test_a_body_that_ends_too_early(end: int) -> None:
    upload = Upload(KIND, Batches())
    upload.feed(b'--abc\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nabc\r\n'[:end])
    with pytest.raises(RequestError, match="ends too early"):
        upload.complete()


@given(rows=st.lists(st.tuples(st.binary(max_size=40), st.sampled_from([b"\n", b"\r\n"]))), piece=st.integers(1, 99))
def test_lines_are_where_they_say(rows: list[tuple[bytes, bytes]], piece: int) -> None:
    rows = [(row.replace(b"\n", b"").rstrip(b"\r"), end) for row, end in rows]
    whole = b"".join(row + end for row, end in rows)
    found = asyncio.run(numbered_in(whole, piece))
    assert [number for number, _, _ in found] == [i for i, (row, _) in enumerate(rows, 1) if row[:31].strip()]
    for number, start, seen in found:
        row = rows[number - 1][0]
        assert len(seen) > 30 if len(row) > 30 else seen == row
        assert whole[start:].startswith(seen)


async def numbered_in(content: bytes, size: int) -> list[tuple[int, int, bytes]]:
    """Return the lines of a file that is read in pieces of that size."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), size):
            yield content[at : at + size]

    return [found async for found in numbered(pieces(), 30)]
