"""The predictor's history outlives the process, and a bad file is ignored."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import Broker, Config, Predictor, Sqlite
from headway.gateway.control.lengths.service import PredictorService, keep, open_lengths, recall
from headway.gateway.watch.metrics import Metrics
from headway.policy.forecast.lengths.predictor import PLAIN, History
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, until
from tests.gateway.test_length_service import LONG, PADDED, PLAINLY, RECIPE, SHORT, chat, left

TASKS = ("chat", "bätch", "a" * 300)


def some(count: int = 5, width: int = PLAIN) -> History:
    rng = np.random.default_rng(count)
    looks = rng.random((count, width), np.float32)
    return History(looks, tuple(TASKS[i % 3] for i in range(count)), rng.integers(1, 900, count).astype(float))


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "lengths.npz"
    for history in (some(5), some(70, PLAIN + 3)):
        keep(path, history)
        back = recall(path, history.features.shape[1])
        assert back is not None
        assert (back.features == history.features).all()
        assert (back.output_tokens == history.output_tokens).all()
        assert back.tasks == history.tasks
    assert os.listdir(path.parent) == ["lengths.npz"], "nothing half written is left"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_file_is_no_history_and_nothing_to_complain_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert recall(tmp_path / "none.npz", PLAIN) is None
    assert not caplog.records


BAD: dict[str, dict[str, Any]] = {
    "differ in length": {"made": np.ones(4)},
    "of other types": {"features": np.ones((5, PLAIN))},
    "cannot be a length": {"made": np.zeros(5)},
    "cannot be a length or a trait": {"features": np.full((5, PLAIN), np.nan, np.float32)},
    "another predictor.embedding": {"features": np.ones((5, PLAIN + 1), np.float32)},
    "allow_pickle": {"tasks": np.array([{}] * 5)},
}


@pytest.mark.parametrize("why", BAD)
def test_a_file_of_something_else_is_not_used_and_says_why(
    why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, good = tmp_path / "lengths.npz", some()
    columns = {"features": good.features, "tasks": np.array(good.tasks), "made": good.output_tokens}
    np.savez(path, **(columns | BAD[why]))
    assert recall(path, PLAIN) is None
    assert why in caplog.text
    assert str(path) in caplog.text


@given(st.binary(max_size=200), st.integers(0, 2000))
@settings(max_examples=20)
def test_no_damage_raises(tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int) -> None:
    path = tmp_path_factory.mktemp("junk") / "lengths.npz"
    keep(path, some())
    whole = path.read_bytes()
    at %= len(whole)
    path.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
    recall(path, PLAIN)
    path.write_bytes(whole[:at])
    assert recall(path, PLAIN) is None


def test_a_file_too_large_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lengths.npz"
    keep(path, some())
    os.truncate(path, 2**26 + 1)
    assert recall(path, PLAIN) is None
    assert "larger" in caplog.text


def test_a_disk_that_refuses_is_reported_and_nothing_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "lengths.npz", some())
    assert "set predictor.history" in caplog.text


def test_where_it_is() -> None:
    disk = Broker(sqlite=Sqlite("/q/queue.sqlite"))
    assert Config(broker=disk).history == Path("/q/queue.lengths.npz")
    assert Config(broker=Broker(kind="memory")).history is None
    assert Config(broker=disk, predictor=Predictor(history="none")).history is None
    given = Config(broker=Broker(kind="memory"), predictor=Predictor(history="~/l.npz"))
    assert given.history == Path.home() / "l.npz"


def test_a_gateway_that_starts_again_knows_what_the_last_one_learned(serve: Serve, fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "kept.npz"
    settings = Predictor(embedding="none", quantile=0.8, history=str(file))
    with serve(recipe=RECIPE, predictor=settings) as gateway:
        for i in range(40):
            chat(gateway, SHORT + "!" * (i % 3), 4 + i % 3)
            chat(gateway, LONG + "So" * (i % 3), 290 + i % 20)
    assert file.is_file()
    assert b"whole story" not in file.read_bytes(), "no text is kept"
    with serve(recipe=RECIPE, predictor=settings) as gateway:
        until(lambda: gateway.metric("headway_forecast_history") == 80)
        assert left(gateway, fake, SHORT) <= 30
        assert left(gateway, fake, LONG) >= 270


async def test_few_answers_are_kept_and_no_model_is_made_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    keep(tmp_path / "few.npz", some(5))
    async with open_lengths(PADDED, PLAINLY, Metrics(), tmp_path / "few.npz") as lengths:
        assert isinstance(lengths, PredictorService)
        assert (lengths.predictor.known, lengths.predictor.due) == (5, False)
    back = recall(tmp_path / "few.npz", PLAIN)
    assert back is not None
    assert len(back) == 5
