"""The directory of batches: what only files on a disk can go through; and the lines of its files."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headway.config import Batches, Config
from headway.errors import ConfigError, HeadwayError
from headway.gateway.apis.batches.lines import result_line
from headway.store.batches.directory import DirectoryStore
from headway.store.batches.opening import opened
from headway.store.batches.records import Line
from tests.gateway.batch_stores import BATCH, FILE, add, job


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DirectoryStore]:
    one = DirectoryStore(tmp_path)
    yield one
    await one.close()


async def test_old_files_that_nothing_knows_are_swept(store: DirectoryStore) -> None:
    await add(store)
    store.path("file-left-behind").write_text("x")
    for name in (FILE.id, "file-left-behind"):
        os.utime(store.path(name), (0, 0))
    store.path("file-new").write_text("half of it")
    await store.sweep()
    assert {path.name for path in (store.folder / "files").iterdir()} == {FILE.id, "file-new"}


async def test_a_file_that_is_gone_from_the_disk(store: DirectoryStore) -> None:
    await add(store)
    store.path(FILE.id).unlink()
    with pytest.raises(HeadwayError, match="content of the file is gone"):
        await store.read(FILE.id, 0, 9)


async def test_a_directory_that_fails_is_told(store: DirectoryStore) -> None:
    with pytest.raises(HeadwayError, match="The directory of batches is out") as caught:
        await store.append("file-none", 0, b"x")
    assert caught.value.status == 503


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"batches\.dir"):
        DirectoryStore(tmp_path / "taken")


async def test_a_signal_while_the_store_is_being_opened_leaves_none_open(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    opening = asyncio.create_task(opened(Config(batches=Batches(dir=str(tmp_path)))).__aenter__())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await asyncio.get_running_loop().shutdown_default_executor()
    assert {*threading.enumerate()} <= before, "an open file has a thread that watches it"


async def test_no_other_user_can_read_it_or_hold_its_lock(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    store = DirectoryStore(folder)
    await add(store)
    assert await store.hold()
    paths = [folder, *folder.rglob("*")]
    assert {path.name: path.stat().st_mode & 0o777 for path in paths} == {
        "batches": 0o700,
        "files": 0o700,
        "batches.sqlite": 0o600,
        "batches.sqlite-wal": 0o600,
        "batches.sqlite-shm": 0o600,
        "runner.lock": 0o600,
        FILE.id: 0o600,
    }
    await store.close()


def test_batches_in_a_log_without_its_database_are_not_thrown_away(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite-wal").write_bytes(b"work")
    with pytest.raises(ConfigError, match="is empty or missing"):
        DirectoryStore(tmp_path)
    assert (tmp_path / "batches.sqlite-wal").read_bytes() == b"work"


def test_batches_that_were_emptied_beside_their_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite").touch()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file-1").touch()
    with pytest.raises(ConfigError, match="is empty, but it was not"):
        DirectoryStore(tmp_path)


def test_an_answer_is_told_as_openai_does() -> None:
    line = Line(7, 0, 1, 'quoted "body": null')
    good, text = result_line(BATCH, line, job(line, True))
    told = json.loads(text)
    assert good
    assert b"\n" not in text
    assert told["response"] == {"status_code": 200, "request_id": "batch_1-7", "body": {"x": 1}}
    assert (told["id"], told["custom_id"], told["error"]) == ("batch_req_1_7", line.custom_id, None)
    good, text = result_line(BATCH, line, job(line, False))
    assert not good
    assert json.loads(text)["error"] == {"code": "dropped", "message": "late"}
    assert json.loads(text)["response"] is None
