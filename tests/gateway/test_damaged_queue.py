"""A queue, or a directory of batches, that is damaged while the gateway runs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.config import Config, write
from headway.errors import ConfigError, HeadwayError
from headway.store.batches.directory import DirectoryStore
from headway.store.queue import open_broker, sqlite_health
from tests.gateway.batch_stores import add
from tests.gateway.batches import begin as begin_batch
from tests.gateway.batches import ended, held, lines, text, upload
from tests.gateway.batches import look as look_batch
from tests.gateway.gateway import CHAT, Fake, configuration, serving, until
from tests.gateway.test_background import DEAD, begin, finished, look
from tests.gateway.test_refusals import error
from tests.helpers.damage import overwrite


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_health, "_PAUSE_S", 0.05)


def into_file(file: Path) -> None:
    """Move what is in the log into the file."""
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)


def recover(config: Config, folder: Path) -> str:
    """Run `headway queue recover`; return what it prints."""
    (folder / "headway.toml").write_text(write(config))
    ran = CliRunner().invoke(app, ["queue", "recover", "--config", str(folder / "headway.toml")])
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_a_damaged_queue_loses_nothing(tmp_path: Path, fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    config = configuration(tmp_path, DEAD)
    file = config.broker.sqlite.file
    with serving(config, ready=False) as gateway:
        ids = [begin(gateway, metadata="x" * 3000) for _ in range(20)]
        uploaded = upload(gateway, text(lines(1))).json()["id"]
        into_file(file)
        overwrite(str(file))
        told = until(lambda: gateway.get("/ready").json()["broker"])
        assert "headway queue recover" in told
        assert gateway.get("/ready").status_code == 503
        assert "is damaged" in caplog.text
        batch = {"input_file_id": uploaded, "endpoint": CHAT, "completion_window": "24h"}
        background = gateway.chat(background=True)
        for body, path in ((background, CHAT), (gateway.chat(), CHAT), (batch, "/v1/batches")):
            refused = error(gateway.post(body, path), 503)
            assert refused["code"] == "queue_unavailable"
            assert "headway queue recover" in refused["message"]
        until(lambda: "what the queue has is saved" in caplog.text)
        assert {look(gateway, id)["status"] for id in ids} == {"queued"}

    with pytest.raises(ConfigError, match="headway queue recover"):
        open_broker(config.broker)
    assert "20 requests recovered, 20 of them not ended yet" in recover(config, tmp_path)
    up = replace(config, engines=configuration(tmp_path, fake.url).engines)
    with serving(up) as gateway:
        assert {finished(gateway, id)["status"] for id in ids} == {"completed"}


def test_a_damaged_directory_of_batches_takes_none(
    tmp_path: Path, fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    config = configuration(tmp_path, fake.url)
    assert config.batches_dir
    file = config.batches_dir / "batches.sqlite"
    with serving(config) as gateway:
        late = begin_batch(gateway, lines(9, **held("late")))
        until(lambda: look_batch(gateway, late)["status"] == "in_progress")
        into_file(file)
        overwrite(str(file))
        assert "batches.sqlite is damaged" in until(lambda: gateway.get("/ready").json()["batches"])
        assert gateway.get("/ready").status_code == 503
        assert "no batch is accepted any more" in caplog.text
        assert "is damaged" in error(upload(gateway, text(lines(1))), 503)["message"]
        assert gateway.post(gateway.chat()).status_code == 200
    fake.release("late")
    with pytest.raises(ConfigError, match="headway queue recover"):
        DirectoryStore(config.batches_dir)
    assert "1 batches recovered, 1 of them not ended yet" in recover(config, tmp_path)
    with serving(config) as gateway:
        assert ended(gateway, late)["request_counts"] == {"total": 9, "completed": 9, "failed": 0}
    with pytest.raises(HeadwayError, match="Neither the queue nor the batches are damaged"):
        CliRunner().invoke(app, ["queue", "recover", "-c", str(tmp_path / "headway.toml")], catch_exceptions=False)


async def test_the_log_of_batches_is_truncated(tmp_path: Path) -> None:
    """It has grown while a reader was in the middle of its rows."""
    store, file = DirectoryStore(tmp_path), str(tmp_path / "batches.sqlite")
    await add(store)
    with closing(sqlite3.connect(file)) as reader:
        rows = reader.execute("SELECT 1 UNION SELECT id FROM files")
        rows.fetchone()
        for i in range(24):
            sql = "INSERT INTO answers VALUES ('batch', ?, ?)"
            with store.transaction() as db:
                db.execute(sql, [i, bytes(2**20)])
        assert sqlite_health.log_bytes(file) > sqlite_health.LOG_BOUND
        rows.close()
    until(lambda: sqlite_health.log_bytes(file) <= sqlite_health.LOG_BOUND)
    await store.close()


def test_the_logs_are_measured(tmp_path: Path, fake: Fake) -> None:
    with serving(configuration(tmp_path, fake.url)) as gateway:
        gateway.post(gateway.chat())
        assert gateway.metric('headway_store_wal_bytes{store="queue"}') > 0
        assert gateway.metric('headway_store_wal_bytes{store="batches"}') > 0
