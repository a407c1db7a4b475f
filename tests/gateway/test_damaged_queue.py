"""A queue, or a directory of batches, that is damaged while the gateway runs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.config import Batches, Config, write
from headway.errors import ConfigError, HeadwayError
from headway.store.batches.directory import DirectoryStore
from headway.store.batches.sqlite_file import recover_batches
from headway.store.queue import open_broker, sqlite
from headway.store.queue.sqlite_jobs import Kept
from headway.store.sqlite import health
from tests.gateway.batch_stores import BATCH, FILE, add, begun
from tests.gateway.batches import begin as begin_batch
from tests.gateway.batches import content, ended, held, line, lines, text, upload
from tests.gateway.batches import look as look_batch
from tests.gateway.gateway import CHAT, DEAD, Fake, configuration, serving, until
from tests.gateway.test_background import begin, finished, look
from tests.gateway.test_refusals import error
from tests.helpers.damage import alter, overwrite, read_by_another

pytestmark = pytest.mark.usefixtures("watched_closely")


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


@pytest.mark.parametrize("kept", [True, False])
def test_an_altered_request_is_not_run(
    tmp_path: Path, mortal: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    """What memory has of it is run; without that it ends with an error."""
    if not kept:
        monkeypatch.setattr(sqlite, "Kept", lambda: Kept(0))
    mortal.stop()
    config = configuration(tmp_path, mortal.url)
    file = config.broker.sqlite.file
    with serving(config, ready=False) as gateway:
        other, altered = begin(gateway), begin(gateway, user="apple")
        into_file(file)
        alter(str(file), b'"apple"', b'"maple"')
        assert gateway.get("/ready").json()["broker"] is None
        mortal.start()
        until(lambda: "what the queue has is saved" in caplog.text)
        told = finished(gateway, altered)
        assert told["status"] == ("completed" if kept else "failed")
        if not kept:
            assert "has changed on the disk; send it again" in told["error"]["message"]
        assert finished(gateway, other)["status"] == "completed"
        assert mortal.last()["asked"] == (2 if kept else 1)
        assert caplog.text.count("nothing is accepted any more") == 1
        refused = error(gateway.post(gateway.chat()), 503)
        assert refused["code"] == "queue_unavailable"
        assert "has changed): stop the gateways" in refused["message"]
    assert "2 requests recovered, 0 of them not ended yet" in recover(config, tmp_path)


def test_an_altered_line_is_not_run(tmp_path: Path, fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    config = configuration(tmp_path, fake.url, batches=Batches(lines=1))
    assert config.batches_dir
    with serving(config) as gateway:
        id = begin_batch(gateway, [line("first", **held("altered line")), line("second", user="apple"), line("third")])
        until(lambda: look_batch(gateway, id)["status"] == "in_progress")
        alter(str(config.batches_dir / "files" / look_batch(gateway, id)["input_file_id"]), b"apple", b"maple")
        fake.release("altered line")
        batch = ended(gateway, id)
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        (told,) = content(gateway, batch["error_file_id"])
        assert told["custom_id"] == "second"
        assert told["response"]["body"]["error"]["code"] == "input_changed"
        assert "line 2 of the batch" in caplog.text


async def test_an_altered_answer_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, file = DirectoryStore(tmp_path), tmp_path / "batches.sqlite"
    first, second = await begun(store, 2)
    for one in (first, second):
        await store.record(BATCH.id, one.number, True, f"the answer to {one.number}".encode())
    into_file(file)
    alter(str(file), b"the answer to 2", b"the answer to 3")
    store._db.execute("PRAGMA shrink_memory")
    with pytest.raises(HeadwayError, match=r"batches.sqlite is damaged \(the answer to line 2 .* has changed") as error:
        await store.ended_lines(BATCH.id, 0, 9)
    assert error.value.status == 503
    assert "headway queue recover" in str(store.problem())
    assert caplog.text.count("no batch is accepted any more") == 1
    await store.close()
    recovered = recover_batches(tmp_path)
    assert recovered
    assert recovered.counts == (1, 1)


async def test_batches_of_a_file_without_checksums_go_on(tmp_path: Path) -> None:
    await DirectoryStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite", isolation_level=None)) as db:
        for table in ("lines", "answers"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
        db.execute("ALTER TABLE files DROP COLUMN expires")
        db.execute("ALTER TABLE batches DROP COLUMN output_expires_s")
        db.execute("PRAGMA user_version = 1")
    store = DirectoryStore(tmp_path)
    (one,) = await begun(store, 1)
    await store.record(BATCH.id, one.number, True, b"answer")
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db, db:
        db.execute("UPDATE answers SET checksum = NULL")  # of a gateway that does not know the column
    assert [line.content for line in await store.ended_lines(BATCH.id, 0, 9)] == [b"answer"]
    await store.close()


async def test_the_log_of_batches_is_truncated(tmp_path: Path) -> None:
    """It has grown while a reader was in the middle of its rows."""
    store, file = DirectoryStore(tmp_path), str(tmp_path / "batches.sqlite")
    await add(store)
    with closing(sqlite3.connect(file)) as reader:
        rows = reader.execute("SELECT 1 UNION SELECT id FROM files")
        rows.fetchone()
        for i in range(24):
            sql = "INSERT INTO answers (batch, number, content) VALUES ('batch', ?, ?)"
            with store.transaction() as db:
                db.execute(sql, [i, bytes(2**20)])
        assert health.log_bytes(file) > health.LOG_BOUND
        rows.close()
    until(lambda: health.log_bytes(file) <= health.LOG_BOUND)
    await store.close()


def test_a_log_that_cannot_shrink_refuses_background_work(tmp_path: Path, mortal: Fake) -> None:
    mortal.stop()
    config = configuration(tmp_path, mortal.url)
    file = str(config.broker.sqlite.file)
    with serving(config, ready=False) as gateway:
        accepted = begin(gateway)
        with read_by_another(file) as process:
            gateway.inner.broker._watch.max_log_bytes = health.log_bytes(file) - 1
            told = until(
                lambda: f"(process {process})" in (said := gateway.post(gateway.chat(background=True)).text) and said
            )
            assert "The queue takes no background work" in told
            answer = gateway.post(gateway.chat(background=True))
            assert error(answer, 503)["code"] == "queue_unavailable"
            assert answer.headers["retry-after"] == "10"
            mortal.start()
            assert gateway.post(gateway.chat()).status_code == 200
            assert finished(gateway, accepted)["status"] == "completed"


async def test_the_log_of_batches_is_bounded(tmp_path: Path) -> None:
    store, file = DirectoryStore(tmp_path), str(tmp_path / "batches.sqlite")
    (line,) = await begun(store, 1)
    with read_by_another(file):
        await store.close()
        store = DirectoryStore(tmp_path, health.log_bytes(file) - 1)
        for refused in (store.add_batch(replace(BATCH, id="batch_2"), 9), store.add_file(FILE, 10**9)):
            with pytest.raises(HeadwayError, match="its write-ahead log has") as told:
                await refused
            assert (told.value.status, told.value.headers["retry-after"]) == (503, "10")
        assert store.problem() is None
        assert await store.record(BATCH.id, line.number, True, b"answer")
        await store.end(BATCH.id, "completed", 5.0)
    await store.close()
    store = DirectoryStore(tmp_path)
    assert await store.add_batch(replace(BATCH, id="batch_2"), 9)
    await store.close()


def test_the_logs_are_measured(tmp_path: Path, fake: Fake) -> None:
    with serving(configuration(tmp_path, fake.url)) as gateway:
        gateway.post(gateway.chat())
        upload(gateway, text(lines(1)))
        assert gateway.metric('headway_store_wal_bytes{store="queue"}') > 0
        assert gateway.metric('headway_store_wal_bytes{store="batches"}') > 0
