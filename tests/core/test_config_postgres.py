"""[broker.postgres]: its URL is a secret, and what is beside a queue on disk has a place of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config import Config, parse, show
from headway.config import write as written
from headway.errors import ConfigError
from headway.gateway.preflight import preflight

URL = "postgresql://headway:very-secret-word@db.internal/headway"


def config(**tables: Any) -> Config:
    postgres = tables.pop("postgres", {"url": URL})
    return parse({"broker": {"kind": "postgres", "postgres": postgres}} | tables)


def test_a_queue_in_postgres_needs_a_url() -> None:
    with pytest.raises(ConfigError, match=r"broker\.postgres\.url is not set") as caught:
        config(postgres={})
    assert "env:HEADWAY_POSTGRES_URL" in caught.value.hint
    assert caught.value.param == "broker.postgres.url"
    assert parse({"broker": {"postgres": {"schema": "other"}}}).broker.kind == "sqlite", "no other kind asks"


@pytest.mark.parametrize("place", ["h:99999", "a b", "h:5432,h:99999", "h:port"])
def test_an_address_that_no_server_has_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="not the URL of a PostgreSQL server") as caught:
        preflight(config(postgres={"url": f"postgresql://headway:very-secret-word@{place}/headway"}))
    assert "very-secret-word" not in str(caught.value)


@pytest.mark.parametrize("place", ["h:1,h:2", "", "[::1]:5432", "h"])
def test_addresses_that_servers_have_are_taken(place: str) -> None:
    preflight(config(postgres={"url": f"postgresql://headway:very-secret-word@{place}/headway"}))


def test_the_url_is_not_shown() -> None:
    text = show(config())
    assert 'url = "****"' in text
    assert "very-secret-word" not in text
    assert URL in written(config()), "what is written is read again"


@pytest.mark.parametrize(
    "postgres", [{"url": 3}, {"url": URL, "schema": "no-dash"}, {"urk": URL}, {"timeout_s": 0}, URL, {"url": "short"}]
)
def test_what_is_wrong_is_told_without_the_url(postgres: Any) -> None:
    with pytest.raises(ConfigError, match=r"broker\.postgres") as caught:
        config(postgres=postgres)
    assert "very-secret-word" not in str(caught.value)
    assert "short" not in str(caught.value).replace("should", "")


@pytest.mark.parametrize("wire", [{"url": 3}, {"urk": URL}, {"lease_seconds": 0}, URL, {"url": "short"}])
def test_a_wrong_wire_is_told_without_its_url(wire: Any) -> None:
    with pytest.raises(ConfigError, match="wire") as caught:
        parse({"wire": wire})
    assert "very-secret-word" not in str(caught.value)
    assert "short" not in str(caught.value).replace("should", "")


@pytest.mark.parametrize("schema", ["no-dash", "Upper", "1st", "", "a" * 64, 'x"; DROP TABLE jobs; --'])
def test_a_schema_is_a_plain_name(schema: str) -> None:
    with pytest.raises(ConfigError, match=r"broker\.postgres\.schema"):
        config(postgres={"url": URL, "schema": schema})


def test_a_secret_that_is_not_there_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_URL", raising=False)
    attached = ({"url": "http://127.0.0.1:9"},)
    with pytest.raises(ConfigError, match=r"broker\.postgres\.url is in the environment variable NO_SUCH_URL"):
        preflight(config(postgres={"url": "env:NO_SUCH_URL"}, engines=attached))


def test_a_gateways_own_files_are_in_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = config(postgres={"url": URL, "schema": "two"})
    assert made.journal_dir == tmp_path / "headway" / "postgres-two.journal"
    assert made.history == tmp_path / "headway" / "postgres-two.lengths.npz"
    assert made.apps_dir == tmp_path / "headway" / "postgres-two.apps"
    assert config(journal={"dir": "/var/journal"}).journal_dir == Path("/var/journal")


def test_batches_are_in_the_queues_database_unless_a_directory_is_given() -> None:
    made = config()
    assert (made.batches_dir, made.batches_in_postgres) == (None, True)
    none = config(batches={"dir": "none"})
    assert (none.batches_dir, none.batches_in_postgres) == (None, False)
    given = config(batches={"dir": "/srv/batches"})
    assert (given.batches_dir, given.batches_in_postgres) == (Path("/srv/batches"), False)
    memory = parse({"broker": {"kind": "memory"}, "batches": {"dir": "/srv"}})
    assert (memory.batches_dir, memory.batches_in_postgres) == (None, False)
    assert not parse({}).batches_in_postgres
