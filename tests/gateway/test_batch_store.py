"""The contract of every batch store: each line ends once, one gateway holds, and what was added is kept."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import HeadwayError, RequestError
from headway.gateway.apis.batches.lines import conclude, result_line
from headway.store.batches.port import PIECE, BatchStore, pieces
from headway.store.batches.records import BAD, CANCELLED, ENDED_KEPT_S, EXPIRED, GOOD, LEAST_BYTES, Line, StoredFile
from tests.gateway.batch_stores import BATCH, FILE, ROOM, STORES, Connect, add, begun, content, custom_ids, job

# What happens to a batch: a line is result_line, well or not; or its gateway ends and another one starts.
STEPS = st.lists(st.one_of(st.tuples(st.integers(1, 12), st.booleans()), st.just("restart")))


@pytest.fixture(params=STORES)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    return STORES[request.param](tmp_path)


@pytest.fixture
async def store(connect: Connect) -> AsyncIterator[BatchStore]:
    one = await asyncio.to_thread(connect)
    yield one
    await one.close()


@pytest.fixture
async def two(connect: Connect) -> AsyncIterator[tuple[BatchStore, BatchStore]]:
    """Two gateways at one place."""
    first, second = [await asyncio.to_thread(connect) for _ in range(2)]
    yield first, second
    await first.close()
    await second.close()


# ---- lines


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=13)
@given(count=st.integers(1, 12), steps=STEPS, end=st.sampled_from([EXPIRED, CANCELLED]))
def test_each_line_is_in_one_file_once(kind: str, count: int, steps: list[tuple[int, bool] | str], end: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run_steps(STORES[kind](Path(folder)), count, steps, end))


async def run_steps(connect: Connect, count: int, steps: list[tuple[int, bool] | str], end: int) -> None:
    store = connect()
    lines = {line.number: line for line in await begun(store, count)}
    first = dict[int, bool]()
    for step in steps:
        if isinstance(step, str):
            await store.close()
            store = connect()
            assert await store.hold()
        elif step[0] in lines:
            number, good = step
            good, text = result_line(BATCH, lines[number], job(lines[number], good))
            assert await store.record(BATCH.id, number, good, text) == (number not in first)
            first.setdefault(number, good)
        found = await store.open_lines(BATCH.id, 0, 99)
        assert found == [lines[number] for number in sorted({*lines} - {*first})]
    closed = await store.close_lines(BATCH.id, end)
    assert closed == count - len(first)
    await conclude(store, BATCH)
    batch = await store.batch("alpha", BATCH.id)
    assert batch is not None
    good_ids, bad_ids = [await custom_ids(store, id) for id in (batch.output_file, batch.error_file)]
    assert good_ids == [f"c{number}" for number in sorted(first) if first[number]]
    assert bad_ids == [f"c{n}" for n in sorted(lines) if not first.get(n, False)]
    assert (batch.total, batch.completed, batch.failed) == (count, len(good_ids), len(bad_ids))
    assert batch.state == ("expired" if end == EXPIRED and closed else "completed")
    assert await store.open_batches() == []
    assert await store.ended_lines(BATCH.id, 0, 9) == []
    await store.close()


async def test_of_many_ends_at_once_one_counts(store: BatchStore) -> None:
    await begun(store, 1)
    won = await asyncio.gather(*(store.record(BATCH.id, 1, i % 2 == 0, b"%d" % i) for i in range(20)))
    assert won.count(True) == 1
    (ended,) = await store.ended_lines(BATCH.id, 0, 9)
    assert ended.content == b"%d" % won.index(True)
    batch = await store.batch("alpha", BATCH.id)
    assert batch is not None
    assert batch.completed + batch.failed == 1


async def test_a_line_that_is_not_there_does_not_end(store: BatchStore) -> None:
    await begun(store, 1)
    assert not await store.record(BATCH.id, 2, True, b"x")
    assert not await store.record("batch_none", 1, True, b"x")
    assert [line.number for line in await store.open_lines(BATCH.id, 0, 9)] == [1]


async def test_ended_lines_come_in_pages_of_few_bytes(store: BatchStore) -> None:
    await begun(store, 9)
    for number, size in ((1, 3 * PIECE), (2, 5), (3, PIECE - 5), (4, 1), (6, 2)):
        await store.record(BATCH.id, number, True, b"x" * size)
    await store.close_lines(BATCH.id, CANCELLED)
    pages, after = [], 0
    while page := await store.ended_lines(BATCH.id, after, 4):
        pages.append([(line.number, len(line.content or b"")) for line in page])
        after = page[-1].number
    big, full, rest, last = pages
    assert big == [(1, 3 * PIECE)]
    assert full == [(2, 5), (3, PIECE - 5)]
    assert rest == [(4, 1), (5, 0), (6, 2), (7, 0)]
    assert last == [(8, 0), (9, 0)]


async def test_texts_that_are_not_plain_come_back(store: BatchStore) -> None:
    """A client's texts may have any character, NUL among them."""
    odd = "a\0b\ufdd0'\"é\U0001f600"
    assert await store.hold()
    await add(store, replace(FILE, name=odd))
    found = await store.file("alpha", FILE.id)
    assert found is not None
    assert found.name == odd
    await store.add_batch(replace(BATCH, metadata=json.dumps({"a": odd})), 1)
    await store.add_lines(BATCH.id, [Line(1, 0, 9, odd)])
    assert (await store.open_lines(BATCH.id, 0, 9))[0].custom_id == odd
    await store.record(BATCH.id, 1, True, b"x")
    assert (await store.ended_lines(BATCH.id, 0, 9))[0].custom_id == odd
    batch = await store.batch("alpha", BATCH.id)
    assert batch is not None
    assert json.loads(batch.metadata or "") == {"a": odd}
    assert await store.file("alpha", "\0") is None
    assert await store.files("al\0pha", "\0", 3, purpose="\0") == []


async def test_a_check_that_was_cut_short_begins_again(store: BatchStore) -> None:
    assert await store.hold()
    await add(store)
    await store.add_batch(BATCH, 1)
    lines = [Line(number, 0, 9, f"c{number}") for number in range(1, 2501)]
    await store.add_lines(BATCH.id, lines)
    await store.clear_lines(BATCH.id)
    await store.add_lines(BATCH.id, lines[:3])
    assert await store.begin(BATCH.id, 2.0) == 3
    assert await store.open_lines(BATCH.id, 1, 9) == lines[1:3]


async def test_wrong_lines_end_the_batch(store: BatchStore) -> None:
    assert await store.hold()
    await add(store)
    await store.add_batch(BATCH, 1)
    await store.add_lines(BATCH.id, [Line(1, 0, 9, "c1")])
    await store.refuse(BATCH.id, [{"code": "x"}], 4.0)
    batch = await store.batch("alpha", BATCH.id)
    assert batch is not None
    assert (batch.state, batch.ended, json.loads(batch.errors or "")) == ("failed", 4.0, [{"code": "x"}])
    assert await store.open_lines(BATCH.id, 0, 9) == []
    await store.add_batch(replace(BATCH, id="batch_2"), 1)
    assert await store.cancel("alpha", "batch_2", 5.0)
    await store.refuse("batch_2", [], 6.0)
    batch = await store.batch("alpha", "batch_2")
    assert batch is not None
    assert batch.state == "cancelled"


# ---- batches


async def test_files_that_were_written_twice_count_once(store: BatchStore) -> None:
    """A gateway that is killed between the files and the end of the batch leaves both as they were."""
    (line,) = await begun(store, 1)
    await store.record(BATCH.id, line.number, *result_line(BATCH, line, job(line, True)))
    assert await store.finalize(BATCH.id, 3.0) == "completed"
    left = StoredFile("file-left", "alpha", "left", "batch_output", 0, 3.0)
    await store.begin_file(left)
    await store.append(left.id, 0, b"half of it")
    (batch,) = await store.open_batches()
    assert (batch.state, batch.finalizing) == ("finalizing", 3.0)
    await conclude(store, batch)
    assert [file.purpose for file in await store.files("alpha", None, 9)] == ["batch_output", "batch"]
    await store.sweep()
    await store.append(left.id, 10, b"x")  # it may be an upload in progress


async def test_a_batch_is_cancelled_once_and_not_after_its_end(store: BatchStore) -> None:
    await begun(store, 1)
    assert not await store.cancel("beta", BATCH.id, 5.0), "it is another tenant's"
    assert await store.cancel("alpha", BATCH.id, 5.0)
    assert not await store.cancel("alpha", BATCH.id, 6.0)
    assert await store.close_lines(BATCH.id, CANCELLED) == 1
    await conclude(store, BATCH)
    batch = await store.batch("alpha", BATCH.id)
    assert batch is not None
    assert (batch.state, batch.cancelling, batch.failed) == ("cancelled", 5.0, 1)
    assert not await store.cancel("alpha", BATCH.id, 7.0)


async def test_lists_of_batches(store: BatchStore) -> None:
    await add(store)
    made = [replace(BATCH, id=f"batch_{i}", due=90.0 - i) for i in range(4)]
    for batch in made:
        await store.add_batch(batch, 9)
    assert await store.batches("alpha", None, 2) == [made[3], made[2]]
    assert await store.batches("alpha", "batch_2", 9) == [made[1], made[0]]
    assert await store.batches("beta", None, 9) == []
    assert await store.open_batches() == made[::-1], "the most urgent first"
    assert await store.batch("beta", "batch_1") is None


async def test_an_id_is_taken_once(store: BatchStore) -> None:
    """Also when the batch has ended, its file is gone or no more may be open."""
    await add(store)
    both = await asyncio.gather(*(store.add_batch(BATCH, 1, keyed=True) for _ in range(2)))
    assert sorted(both) == [False, True]
    assert not await store.add_batch(replace(BATCH, window="1h", input_file="file-none"), 1, keyed=True)
    assert await store.open_batches() == [BATCH]
    assert await store.hold()
    assert await store.cancel("alpha", BATCH.id, 5.0)
    await store.refuse(BATCH.id, [], 6.0)
    assert not await store.add_batch(BATCH, 1)
    assert await store.open_batches() == []


async def test_limits_that_the_store_itself_keeps(store: BatchStore) -> None:
    await store.begin_file(FILE)
    await store.append(FILE.id, 0, b"x" * 10)
    with pytest.raises(RequestError, match="tenant_mib"):
        await store.add_file(FILE, LEAST_BYTES - 1)
    await store.discard(FILE.id)
    with pytest.raises(RequestError, match="no file 'file-1'"):
        await store.add_batch(BATCH, 1)
    await begun(store, 1)
    with pytest.raises(RequestError, match="max_open") as caught:
        await store.add_batch(replace(BATCH, id="batch_2"), 1)
    assert caught.value.status == 429
    with pytest.raises(RequestError, match="batch_1 reads this file") as caught:
        await store.delete_file("alpha", "file-1")
    assert caught.value.status == 409


async def test_of_ended_batches_the_newest_are_kept(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("directory", "postgres"):
        sql = f"headway.store.batches.{place}._FORGET_BATCHES"
        monkeypatch.setattr(sql, pytest.importorskip(sql.rpartition(".")[0])._FORGET_BATCHES.replace("10000", "3"))
    store = await asyncio.to_thread(connect)
    await add(store)
    assert await store.hold()
    await store.add_batch(replace(BATCH, id="open"), 9)
    for i in range(5):
        await store.add_batch(replace(BATCH, id=f"batch_{i}"), 9)
        await store.refuse(f"batch_{i}", [], 6.0)
    await store.sweep()
    await store.add_batch(replace(BATCH, id="soon", created=6.0 + ENDED_KEPT_S), 9)
    assert len(await store.batches("alpha", None, 99)) == 7, "all have ended not long ago"
    assert await store.cancel("alpha", "soon", 7.0)
    await store.refuse("soon", [], 7.0)
    await store.add_batch(replace(BATCH, id="last", created=6.5 + ENDED_KEPT_S), 9)
    kept = [batch.id for batch in await store.batches("alpha", None, 99)]
    assert kept == ["last", "soon", "batch_4", "open"]
    await store.close()


# ---- files


async def test_a_file_comes_back_whole_and_in_parts(two: tuple[BatchStore, BatchStore]) -> None:
    first, second = two
    text = bytes(range(256)) * (PIECE // 100)  # more than two pieces
    file = replace(FILE, size=len(text))
    await first.begin_file(file)
    assert await second.file("alpha", file.id) is None, "it is not complete"
    at = 0
    for cut in (1, 1, PIECE + 7, PIECE, 300):
        await first.append(file.id, at, text[at : at + cut])
        at += cut
    await first.append(file.id, at, text[at:])
    await first.add_file(file, ROOM)
    assert await second.file("alpha", file.id) == file
    assert await second.file("beta", file.id) is None
    assert await content(second, file.id) == text
    for start, size in ((0, 1), (1, 1), (2, PIECE), (PIECE + 5, 9), (len(text) - 3, 99), (len(text), 1)):
        assert await second.read(file.id, start, size) == text[start : start + size]
    assert await second.used("alpha") == len(text)
    assert await second.delete_file("alpha", file.id)
    assert not await first.delete_file("alpha", file.id)
    assert await first.files("alpha", None, 9) == []
    assert await first.used("alpha") == 0
    with pytest.raises(RequestError, match="content of the file is gone"):
        [piece async for piece in pieces(first, file)]


async def test_an_upload_that_is_given_up_leaves_nothing(store: BatchStore) -> None:
    await store.begin_file(FILE)
    await store.append(FILE.id, 0, b"x" * 9)
    assert await store.used("alpha") == 0, "this gateway counts its own uploads itself"
    await store.discard(FILE.id)
    with pytest.raises(HeadwayError) as caught:
        await store.append(FILE.id, 9, b"x")
    assert caught.value.status == 503
    await store.discard(FILE.id)
    await store.discard("file-none")
    await add(store)
    assert await content(store, FILE.id) == b"x" * 10


async def test_lists_of_files(store: BatchStore) -> None:
    made = [replace(FILE, id=f"file-{i}", purpose="batch_output" if i == 2 else "batch") for i in range(4)]
    for file in made:
        await add(store, file)
    await add(store, replace(FILE, id="other", tenant="beta"))
    assert await store.files("alpha", None, 2) == [made[3], made[2]]
    assert await store.files("alpha", "file-2", 9) == [made[1], made[0]]
    assert await store.files("alpha", "file-1", 9, newest=False) == made[2:]
    assert await store.files("alpha", None, 9, purpose="batch") == [made[3], made[1], made[0]]
    assert await store.files("alpha", "other", 9) == [], "it is another tenant's"
    await add(store, replace(FILE, id="expired", expires=5.0))
    await add(store, lasts := replace(FILE, id="lasts", expires=20.0))
    assert await store.files("alpha", None, 2, now=10.0) == [lasts, made[3]]
    assert await store.files("alpha", "expired", 1, now=10.0) == [made[3]], "one may go on from it"


async def test_expired_files_are_named_unless_a_batch_reads_them(store: BatchStore) -> None:
    made = [replace(FILE, id=f"file-{i}", expires=expires) for i, expires in enumerate((None, 5.0, 6.0, 20.0))]
    for file in made:
        await add(store, file)
    assert await store.file("alpha", "file-1") == made[1]
    await store.add_batch(replace(BATCH, input_file="file-2", output_expires_s=60.0), 1)
    assert await store.expired(10.0, 9) == [made[1]]
    batch = await store.batch("alpha", BATCH.id)
    assert batch is not None
    assert batch.output_expires_s == 60.0
    assert await store.hold()
    await store.end(BATCH.id, "completed", 9.0)
    assert len(await store.expired(10.0, 9)) == 2
    assert len(await store.expired(10.0, 1)) == 1


# ---- the gateway that runs batches


async def test_one_gateway_holds(two: tuple[BatchStore, BatchStore]) -> None:
    first, second = two
    assert await first.hold()
    assert await first.hold()
    assert not await second.hold()
    await first.release()
    assert await second.hold()
    assert not await first.hold()
    await second.close()
    assert await first.hold()


async def test_what_another_gateway_sees(two: tuple[BatchStore, BatchStore]) -> None:
    first, second = two
    (line,) = await begun(first, 1)
    assert await second.cancel("alpha", BATCH.id, 3.0)
    (batch,) = await first.open_batches()
    assert (batch.state, batch.cancelling) == ("cancelling", 3.0)
    await first.record(BATCH.id, 1, *result_line(BATCH, line, job(line, True)))
    await conclude(first, batch)
    seen = await second.batch("alpha", BATCH.id)
    assert seen is not None
    assert (seen.state, seen.completed) == ("cancelled", 1)
    assert await custom_ids(second, seen.output_file) == ["c1"]


async def test_ends_of_lines_are_told_apart(store: BatchStore) -> None:
    await begun(store, 3)
    await store.record(BATCH.id, 1, True, b"1")
    await store.record(BATCH.id, 2, False, b"2")
    assert await store.close_lines(BATCH.id, EXPIRED) == 1
    ends = [(line.ended, line.content) for line in await store.ended_lines(BATCH.id, 0, 9)]
    assert ends == [(GOOD, b"1"), (BAD, b"2"), (EXPIRED, None)]
    assert await store.finalize(BATCH.id, 5.0) == "expired"
