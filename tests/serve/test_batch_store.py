"""The lines of a batch: each ends once, whatever is asked twice and whenever the gateway is killed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.broker.port import Job
from headway.errors import ConfigError, RequestError
from headway.serve.batches.files import sweep
from headway.serve.batches.records import CANCELLED, EXPIRED, Batch, Line, StoredFile
from headway.serve.batches.results import answered, conclude
from headway.serve.batches.store import Store

FILE = StoredFile("file-1", "alpha", "x.jsonl", "batch", 10, 1.0)
BATCH = Batch("batch_1", "alpha", "/v1/chat/completions", "file-1", "24h", 1.0, 90.0)
ROOM = 10**6
# What happens to a batch: a line is answered, well or not; or its gateway is killed and another one starts.
STEPS = st.lists(st.one_of(st.tuples(st.integers(1, 12), st.booleans()), st.just("restart")))


@contextmanager
def fresh() -> Iterator[Store]:
    """Yield a store in a directory of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        yield store
        store.close()


def begun(store: Store, count: int) -> list[Line]:
    """Begin a batch of so many lines."""
    store.add_file(FILE, ROOM)
    store.add_batch(BATCH, 1)
    lines = [Line(number, number * 10, 9, f"c{number}") for number in range(1, count + 1)]
    store.add_lines(BATCH.id, lines)
    assert store.begin(BATCH.id, 2.0) == count
    return lines


def job(line: Line, good: bool) -> Job:
    """Return the ended job of a line; the answer has ends of lines, as some engines write them."""
    found = Job(f"batch_1-{line.number}", "alpha", "", b"", "", 1.0, state="done" if good else "failed")
    return replace(found, result=b'{\n "x": 1\r\n}') if good else replace(found, reason="dropped: late")


@given(count=st.integers(1, 12), steps=STEPS, end=st.sampled_from([EXPIRED, CANCELLED]))
def test_each_line_is_in_one_file_once(
    count: int, steps: list[tuple[int, bool] | str], end: int
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        lines = {line.number: line for line in begun(store, count)}
        first = dict[int, bool]()
        for step in steps:
            if isinstance(step, str):
                store.close()
                store = Store(Path(folder))
            elif step[0] in lines:
                number, good = step
                good, content = answered(BATCH, lines[number], job(lines[number], good))
                assert store.record(BATCH.id, number, good, content) == (number not in first)
                first.setdefault(number, good)
            assert [one.number for one in store.open_lines(BATCH.id, 0, 99)] == sorted({*lines} - {*first})
        closed = store.close_lines(BATCH.id, end)
        assert closed == count - len(first)
        conclude(store, BATCH)
        batch = store.batch("alpha", BATCH.id)
        assert batch is not None
        good_ids, bad_ids = ids(store, batch.output_file), ids(store, batch.error_file)
        assert good_ids == [f"c{number}" for number in sorted(first) if first[number]]
        assert bad_ids == [f"c{n}" for n in sorted(lines) if not first.get(n, False)]
        assert (batch.completed, batch.failed) == (len(good_ids), len(bad_ids))
        assert batch.state == ("expired" if end == EXPIRED and closed else "completed")
        assert store.open_batches() == []
        assert store.ended_lines(BATCH.id, 0, 9) == []
        store.close()


def ids(store: Store, file: str | None) -> list[str]:
    """Return the `custom_id`s of a file's lines."""
    if file is None:
        return []
    return [json.loads(line)["custom_id"] for line in store.path(file).read_text().splitlines()]


def test_files_that_were_written_twice_count_once() -> None:
    """A gateway that is killed between the files and the end of the batch leaves both as they were."""
    with fresh() as store:
        (line,) = begun(store, 1)
        store.record(BATCH.id, line.number, *answered(BATCH, line, job(line, True)))
        assert store.finalize(BATCH.id, 3.0) == "completed"
        (store.folder / "files" / "file-left-behind").write_text("half of it")
        (batch,) = store.open_batches()
        assert (batch.state, batch.finalizing) == ("finalizing", 3.0)
        conclude(store, batch)
        assert [file.purpose for file in store.files("alpha", None, 9)] == ["batch_output", "batch"]
        sweep(store)
        assert store.path("file-left-behind").exists(), "it may be an upload in progress"


def test_old_files_that_nothing_knows_are_swept() -> None:
    with fresh() as store:
        store.add_file(FILE, ROOM)
        for name in (FILE.id, "file-left-behind"):
            store.path(name).write_text("x")
            os.utime(store.path(name), (0, 0))
        sweep(store)
        assert [path.name for path in (store.folder / "files").iterdir()] == [FILE.id]


def test_an_answer_is_told_as_openai_does() -> None:
    line = Line(7, 0, 1, 'quoted "body": null')
    good, text = answered(BATCH, line, job(line, True))
    told = json.loads(text)
    assert good
    assert b"\n" not in text
    assert told["response"] == {"status_code": 200, "request_id": "batch_1-7", "body": {"x": 1}}
    assert (told["id"], told["custom_id"], told["error"]) == ("batch_req_1_7", line.custom_id, None)
    good, text = answered(BATCH, line, job(line, False))
    assert not good
    assert json.loads(text)["error"] == {"code": "dropped", "message": "late"}
    assert json.loads(text)["response"] is None


def test_a_batch_is_cancelled_once_and_not_after_its_end() -> None:
    with fresh() as store:
        begun(store, 1)
        assert not store.cancel("beta", BATCH.id, 5.0), "it is another tenant's"
        assert store.cancel("alpha", BATCH.id, 5.0)
        assert not store.cancel("alpha", BATCH.id, 6.0)
        store.close_lines(BATCH.id, CANCELLED)
        conclude(store, BATCH)
        batch = store.batch("alpha", BATCH.id)
        assert batch is not None
        assert (batch.state, batch.cancelling, batch.failed) == ("cancelled", 5.0, 1)
        assert not store.cancel("alpha", BATCH.id, 7.0)


def test_limits_that_the_store_itself_keeps() -> None:
    with fresh() as store:
        with pytest.raises(RequestError, match="tenant_mib"):
            store.add_file(FILE, 9)
        with pytest.raises(RequestError, match="no file 'file-1'"):
            store.add_batch(BATCH, 1)
        begun(store, 1)
        with pytest.raises(RequestError, match="max_open") as caught:
            store.add_batch(replace(BATCH, id="batch_2"), 1)
        assert caught.value.status == 429
        with pytest.raises(RequestError, match="batch_1 reads this file") as caught:
            store.delete_file("alpha", "file-1")
        assert caught.value.status == 409


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"batches\.dir"):
        Store(tmp_path / "taken")
