"""The clock of gateways and engines: it goes on evenly, and all processes of a boot agree on it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import clock
from headway.errors import ConfigError

DAY = 86400.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The state directory, in which no process has noted an origin."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    restart()
    yield tmp_path / "headway"
    restart()


def restart() -> None:
    """Know as little of the origin as a process that starts now."""
    clock._origin.cache_clear()


def set_by(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the machine's clock, as far as this process sees it."""
    was = time.time
    monkeypatch.setattr(time, "time", lambda: was() + seconds)


def shift_now(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Headway's clock be this far ahead."""
    was = clock.now
    monkeypatch.setattr(clock, "now", lambda: was() + seconds)


def test_it_shows_the_time(folder: Path) -> None:
    assert clock.now() == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize("seconds", [-30 * DAY, -1.0, 5.0, 30 * DAY])
def test_a_set_clock_does_not_change_it(folder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    before = clock.now()
    set_by(seconds, monkeypatch)
    assert 0 <= clock.now() - before < 60
    restart()
    assert 0 <= clock.now() - before < 60


@pytest.mark.parametrize("seconds", [-9 * DAY, 9 * DAY])
def test_instants_are_shown_by_the_clock_as_it_is_set(
    folder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrival = clock.now()
    assert clock.shown(arrival) == arrival
    set_by(seconds, monkeypatch)
    assert clock.shown(arrival) == arrival + seconds


def test_another_process_agrees_on_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_by(-3 * DAY, monkeypatch)
    before = clock.now()
    said = subprocess.check_output([sys.executable, "-c", "from headway import clock; print(clock.now())"])
    assert before <= float(said) <= clock.now()


def test_a_process_that_died_before_it_noted_anything_is_no_reason_to_stop(folder: Path) -> None:
    file = clock.origin_file()
    assert file
    file.touch()
    before = clock.now()
    restart()
    assert before <= clock.now() <= before + 60


def test_no_other_user_can_write_it_or_put_another_in_its_place(folder: Path) -> None:
    clock.now()
    (noted,) = folder.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (noted, folder)] == [0o600, 0o700]


@pytest.mark.parametrize("text", ["nan", "soon"])
def test_a_damaged_file_is_told(folder: Path, text: str) -> None:
    clock.now()
    (noted,) = folder.iterdir()
    noted.write_text(text)
    restart()
    with pytest.raises(ConfigError, match="origin of Headway's clock") as error:
        clock.now()
    assert "Delete it" in error.value.hint
