"""The commands on a journal as they are typed: where they look for it, and what they say when it is none."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import ConfigError
from headway.store.journal.reader import JournalReader
from headway.store.journal.rows import VERSION
from tests.helpers.journal_rows import ENGINE, request, written

FILE = "journal-1-1.sqlite"
Broken = Callable[[Path], object]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a state directory of its own, with nothing in it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def refused(*argv: str) -> ConfigError:
    error = CliRunner().invoke(app, list(argv)).exception
    assert isinstance(error, ConfigError), argv
    return error


# ---- where they look


@pytest.mark.parametrize("argv", [["explain", "a"], ["explain"], ["report", "--since", "9999w"]])
def test_the_journal_of_headway_serve_is_found(state: Path, tmp_path: Path, argv: list[str]) -> None:
    written(JournalReader([request("a", met=0, ttft=0.1)]), state / "headway" / "queue.journal")
    done = CliRunner().invoke(app, [*argv, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)
    config = tmp_path / "headway.toml"
    config.write_text(f'[journal]\ndir = "{tmp_path}/own"\n')
    written(JournalReader([request("own"), request("a")]), tmp_path / "own")
    done = CliRunner().invoke(app, [*argv, "--json", "--config", str(config)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("argv", [["explain", "hw-1"], ["report"], ["advise"], ["simulate", "--since", "1h"]])
def test_without_a_journal_they_say_where_they_looked(state: Path, tmp_path: Path, argv: list[str]) -> None:
    error = refused(*argv)
    assert str(state / "headway" / "queue.journal") in error.message
    assert all(word in error.hint for word in ("--config", "--journal", "[journal]"))
    config = tmp_path / "headway.toml"
    config.write_text('[journal]\ndir = "none"\n')
    error = refused(*argv, "--config", str(config))
    assert str(config) in error.message
    assert "Set journal.dir" in error.hint


def test_a_path_is_a_simulated_run(state: Path) -> None:
    assert "headway simulate --out DIR" in refused("explain", "out/runs/edf").hint


# ---- what they find


def newer(file: Path) -> None:
    with sqlite3.connect(file) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (newer, f"version {VERSION + 1} of its journal, this one reads {VERSION}"),
        (cut, "malformed"),
        (lambda file: file.write_text("hello"), "not a database"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "report", "advise"])
def test_a_journal_that_cannot_be_read(tmp_path: Path, command: str, broken: Broken, words: str) -> None:
    rows = [request(f"r{i}", tenant="t" * 200) for i in range(200)]
    (file,) = written(JournalReader(rows), tmp_path / "journal").iterdir()
    broken(file)
    error = refused(command, "--journal", str(tmp_path / "journal"))
    assert file.name in error.message
    assert words in error.message
    assert ".recover" in error.hint


@pytest.mark.parametrize("command", ["explain", "report", "advise"])
def test_a_journal_without_requests_of_that_time(tmp_path: Path, command: str) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    (empty / FILE).touch()
    for folder in (empty, written(JournalReader(engines={"e0": ENGINE}), tmp_path / "new")):
        assert "no requests yet" in refused(command, "--journal", str(folder)).message
    written(JournalReader([request("a", arrival=1.7e9, ended=1.7e9 + 1)]), full)
    error = refused(command, "--journal", str(full), "--since", "1m")
    assert '--since "2023-11-1' in error.hint


def test_a_path_beside_the_journal_names_it(tmp_path: Path) -> None:
    folder = written(JournalReader([request("a")]), tmp_path / "queue.journal")
    for path in (tmp_path, next(folder.iterdir())):
        assert str(folder) in refused("report", "--journal", str(path)).hint
    assert f"--journal {folder}" in refused("explain", str(folder)).hint


# ---- how it looks


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_figure_and_no_id_is_cut_on_a_narrow_terminal(tmp_path: Path, width: int) -> None:
    ids = [f"hw-{i:020d}" for i in range(3)]
    late = [request(id, met=0, ttft=0.1, tier="interactive", first=1200.5, ended=1300.0) for id in ids]
    table = np.array([[1000.0, 290.0, 3, 9, 20, 20, 50, 1]])
    folder = written(JournalReader(late, engines={"e0": ENGINE}, iterations={"e0": table}), tmp_path)
    for argv, told in (
        (["report", "--since", "9999w"], ["200,500", "ttft p99", "tokens, %", "e0: computing 100 %"]),
        (["explain", "--worst", "3"], ids),
        (["explain", ids[0]], [ids[0], "200.500", "unseen", "because of"]),
    ):
        shown = screen([*argv, "--journal", str(folder)], width)
        assert max(map(len, shown.splitlines())) <= width
        assert "…" not in shown
        assert all(word in " ".join(shown.split()) for word in told), shown


def screen(argv: list[str], width: int) -> str:
    """Return what a command prints on a terminal of so many columns."""
    env = {"COLUMNS": str(width), "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}
    done = CliRunner(env=env).invoke(app, argv)
    assert done.exit_code == 0, done.output
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout)


def test_an_error_in_a_pipe_is_in_one_piece(tmp_path: Path) -> None:
    folder = tmp_path / "a folder whose name would not fit into one line of a terminal" / ("x" * 60)
    argv = [sys.executable, "-c", "from headway.cli.main import main; main()", "report", "--journal", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert str(folder) in done.stderr
