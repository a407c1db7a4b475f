"""The journal's files: what is written is read, whatever dies in the middle, and the folder stays bounded."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import ConfigError
from headway.store.journal.reader import read
from headway.store.journal.rows import APPLICATION, ITERATION, VERSION, RefusalRow, packed, schema, stops_text, unpacked
from headway.store.journal.writer import MIB, PATTERN, Writer
from tests.helpers.journal_rows import ENGINE, request, stay

DAY = 86400.0


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_is_written_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 16 * MIB, DAY)
    late, early = request("b", arrival=2000.0, ended=2001.0), request("a")
    refused, inside = RefusalRow(1500.0, "t", "chat", "m", "queue_full", 7), stay("a", 1000.2, 1000.5, 1001.0)
    writer.write([late, refused, ENGINE])
    writer.write([early, inside])
    found = read(tmp_path)  # of a gateway that runs
    assert found.requests == [early, late]
    assert (found.refusals, found.stays, found.engines) == ([refused], [inside], {"e0": ENGINE})
    writer.close()
    assert read(tmp_path) == found
    assert read(tmp_path, since=1500.0).requests == [late]
    assert read(tmp_path, until=1500.0).requests == [early]


def test_its_files_are_the_owner_s_alone(tmp_path: Path) -> None:
    Writer(tmp_path, 16 * MIB, DAY).write([request("a")])
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@settings(max_examples=5)
@given(st.lists(st.tuples(st.integers(1, 250), st.integers(1, 200)), min_size=1, max_size=40))
def test_the_folder_never_exceeds_its_limit(writes: list[tuple[int, int]]) -> None:
    limit, most = 2 * MIB, MIB // 4
    with tempfile.TemporaryDirectory() as name:
        folder, count = Path(name), 0
        writer = Writer(folder, limit, DAY, most=most)
        for rows, letters in writes:
            writer.write([request(f"{count + i:05d}", tenant="t" * letters) for i in range(rows)])
            count += rows
            assert size(folder) <= limit
        kept = [row.id for row in read(folder).requests]
        # The newest rows stay, without a gap.
        assert kept == [f"{i:05d}" for i in range(count - len(kept), count)]
        assert kept
        writer.close()


def test_the_oldest_files_go_and_each_names_the_engines(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 2 * MIB, DAY, most=MIB // 4)
    writer.write([ENGINE])
    for i in range(0, 40_000, 500):
        writer.write([request(f"{j:05d}") for j in range(i, i + 500)])
    found = read(tmp_path)
    assert 1_000 < len(found.requests) < 40_000
    assert found.requests[-1].id == "39999"
    assert found.engines == {"e0": ENGINE}


def test_files_that_are_too_old_go(tmp_path: Path) -> None:
    old = Writer(tmp_path, 16 * MIB, DAY)
    old.write([request("old")])
    old.close()
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    Writer(tmp_path, 16 * MIB, DAY).write([request("new")])
    assert [row.id for row in read(tmp_path).requests] == ["new"]


def test_two_gateways_share_a_folder(tmp_path: Path) -> None:
    writers = [Writer(tmp_path, 16 * MIB, DAY) for _ in range(2)]
    for i, writer in enumerate(writers):
        writer.write([request(f"r{i}", arrival=1000.0 + i)])
    assert [row.id for row in read(tmp_path).requests] == ["r0", "r1"]


_KILLED = """
import sys
from pathlib import Path
from headway.store.journal.writer import MIB, Writer
from tests.helpers.journal_rows import request
writer = Writer(Path(sys.argv[1]), 16 * MIB, 86400.0)
for i in range(10**6):
    writer.write([request(f"{i}.{j}", arrival=1000.0 + i) for j in range(5)])
    print(i, flush=True)
"""


def test_a_write_that_is_killed_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with subprocess.Popen([sys.executable, "-c", _KILLED, folder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(30)]
        process.send_signal(signal.SIGKILL)
        told += process.stdout.readlines()
    found = read(folder)
    ids = [row.id for row in found.requests]
    assert not found.damaged
    assert len(ids) % 5 == 0
    assert len(ids) >= 5 * len([line for line in told if line.endswith(b"\n")])


def test_a_full_disk_refuses_and_nothing_that_was_written_is_lost(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 16 * MIB, DAY)
    writer.write([request("before")])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    rows = [request(f"r{i}", tenant="t" * 200) for i in range(1000)]
    try:
        with pytest.raises((sqlite3.Error, OSError)):
            writer.write(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [row.id for row in read(tmp_path).requests] == ["before"]
    writer.write(rows)
    assert len(read(tmp_path).requests) == 1001


def test_a_damaged_file_is_left_out_and_named(tmp_path: Path) -> None:
    Writer(tmp_path, 16 * MIB, DAY).write([request("whole")])
    torn = tmp_path / PATTERN.replace("*", "0000000000000001-1")
    torn.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    other = tmp_path / PATTERN.replace("*", "0000000000000002-1")
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE requests (id TEXT)")
    db.close()
    found = read(tmp_path)
    assert [row.id for row in found.requests] == ["whole"]
    assert set(found.damaged) == {torn.name, other.name}
    newer = [tmp_path / PATTERN.replace("*", f"000000000000000{i}-1") for i in (3, 4)]
    for file in newer:
        with sqlite3.connect(file) as db:
            db.executescript(f"{schema()} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION + 1}")
        db.close()
    said = [line for line in read(tmp_path).left_out() if "version" in line]
    assert len(said) == 1
    assert said[0].startswith(f"{newer[0].name} and 1 more of the journal left out: written by a newer Headway")
    shown = CliRunner().invoke(app, ["explain", "whole", "--journal", str(tmp_path)])
    assert (shown.exit_code, "and 1 more of the journal left out" in shown.stderr) == (0, True)


def test_a_folder_without_a_journal_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no journal"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="no journal"):
        read(tmp_path / "nothing")


@given(
    st.lists(
        st.tuples(
            st.floats(1e-6, 5.0), st.floats(1e-4, 100.0), *(st.integers(0, 2**40) for _ in range(len(ITERATION) - 2))
        ),
        min_size=1,
        max_size=50,
    )
)
def test_iterations_are_packed_without_loss(given_rows: list[tuple[float, ...]]) -> None:
    starts = 1.7e9 + np.cumsum([row[0] for row in given_rows])
    rows = [[start, *row[1:]] for start, row in zip(starts.tolist(), given_rows, strict=True)]
    found = unpacked(packed("e0", rows))
    table = np.array(rows)
    assert np.abs(found[:, 0] - table[:, 0]).max() < 2e-6
    assert np.allclose(found[:, 1], table[:, 1], rtol=1e-6)
    assert np.array_equal(found[:, 2:], table[:, 2:])


def test_stops_are_kept_with_their_kind() -> None:
    stops = [(1000.5, 1000.7, "p"), (1001.0, 1003.25, "e")]
    row = stay("a", 1000.0, 1004.0, 1005.0, stops=stops_text(1000.0, stops))
    assert row.spans == [(pytest.approx(low), pytest.approx(high), kind) for low, high, kind in stops]
