"""Opening a queue in PostgreSQL: what is wrong is told with its mend, and two schemas are two queues."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

import certifi
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from tests.helpers import postgres as server
from tests.store.stores import FAR, gateways, job, take_ids
from tests.test_clock import shift_now

from headway.config import Broker, Postgres
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from headway.store.queue import open_broker
from headway.store.queue.postgres import PostgresBroker
from headway.store.queue.postgres_link import Address


def refusal(address: Address, **more: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        PostgresBroker(address, "A", **more)
    assert server.PASSWORD not in str(caught.value)
    return caught.value


def sql(address: Address, statement: str, *values: Any) -> list[Any]:
    return server.run_sql(statement.replace("{s}", address.schema), *values, url=address.url)


def test_a_server_that_is_not_there(address: Address) -> None:
    port = free_port()
    seen = refusal(replace(address, url=f"postgresql://u:{server.PASSWORD}@127.0.0.1:{port}/postgres"))
    assert f"PostgreSQL (127.0.0.1:{port}/postgres) cannot be reached" in seen.message
    assert "Start it" in seen.hint


def test_a_wrong_password_is_told_without_it() -> None:
    own = server.private()
    address = replace(server.fresh(), url=own.url_of("headway", "very-wrong"))
    seen = refusal(address)
    assert "password authentication failed" in seen.message
    assert "Correct the password" in seen.hint
    assert "very-wrong" not in str(seen) + repr(address)
    assert seen.param == "broker.postgres.url"


def test_a_database_that_is_missing() -> None:
    own = server.private()
    seen = refusal(replace(server.fresh(), url=own.url_of("headway", server.PASSWORD, "nowhere")))
    assert 'database "nowhere" does not exist' in seen.message
    assert "createdb" in seen.hint


@pytest.mark.parametrize("url", ["mysql://u:correct-horse@h/db", "postgresql://u:correct-horse@h:port/db"])
def test_what_is_no_url_is_not_quoted(url: str) -> None:
    seen = refusal(Address(url, "headway", 5.0))
    assert "not the URL of a PostgreSQL server" in seen.message
    assert "postgresql://USER" in seen.hint


def test_a_server_that_does_not_answer_in_time() -> None:
    own = server.new()
    own.start()
    try:
        own.pause()
        began = time.monotonic()
        seen = refusal(Address(own.url, "headway", 0.5))
        assert time.monotonic() - began < 5
        assert "cannot be reached: no answer in time" in seen.message
    finally:
        own.resume()
        own.remove()


def test_rights_that_are_missing() -> None:
    own = server.private()
    owner, guest = server.fresh(own.url), own.url_of("guest", "guests-word")
    sql(
        owner,
        "DO $$ BEGIN CREATE ROLE guest LOGIN PASSWORD 'guests-word'; EXCEPTION WHEN duplicate_object THEN NULL; END $$",
    )
    seen = refusal(replace(owner, url=guest))
    assert "permission denied for database" in seen.message
    assert "GRANT CREATE" in seen.hint
    asyncio.run(PostgresBroker(owner, "A").close())
    assert "permission denied for schema" in refusal(replace(owner, url=guest)).message
    sql(owner, "GRANT USAGE ON SCHEMA {s} TO guest")
    sql(owner, "GRANT SELECT ON ALL TABLES IN SCHEMA {s} TO guest")
    assert "may not change the tables" in refusal(replace(owner, url=guest)).message
    sql(owner, "GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {s} TO guest")
    asyncio.run(one_job(replace(owner, url=guest)))


async def one_job(address: Address) -> None:
    async with gateways(lambda owner: PostgresBroker(address, owner), "A") as (broker,):
        await broker.put(job())
        assert await broker.done("a", b"r", 1.0)
        assert await broker.forget(2.0) == 1


def test_another_programs_schema_is_refused_and_left_alone(address: Address) -> None:
    sql(address, "CREATE SCHEMA {s}")
    sql(address, "CREATE TABLE {s}.orders ()")
    seen = refusal(address)
    assert "another program's tables, such as orders" in seen.message
    tables = sql(address, "SELECT tablename FROM pg_tables WHERE schemaname = $1", address.schema)
    assert [row[0] for row in tables] == ["orders"]


def test_a_schema_that_postgresql_keeps_for_itself(address: Address) -> None:
    seen = refusal(replace(address, schema="pg_mine"))
    assert "unacceptable schema name" in seen.message
    assert "broker.postgres.schema" in seen.hint


def test_a_database_that_cannot_hold_every_text() -> None:
    own = server.private()
    address = server.fresh(own.url)
    sql(address, "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    seen = refusal(replace(address, url=own.url_of("headway", server.PASSWORD, "latin")))
    assert "encoding LATIN1" in seen.message
    assert "--encoding=UTF8" in seen.hint


def test_a_clock_that_is_minutes_off(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    shift_now(-300, monkeypatch)
    seen = refusal(address, most_apart_s=10.0)
    assert "300.0 s behind PostgreSQL's" in seen.message
    assert "Synchronize" in seen.hint
    monkeypatch.undo()
    asyncio.run(PostgresBroker(address, "A", most_apart_s=10.0).close())


async def test_open_broker_opens_what_is_configured(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_URL", address.url)
    config = Broker("postgres", postgres=Postgres("env:SOME_URL", address.schema))
    first, second = open_broker(config), open_broker(config)
    assert isinstance(first, PostgresBroker)
    assert first.on_disk
    assert first.owner != second.owner
    await first.renew(FAR)
    await first.put(job())
    assert await second.get("a") == job(owner=first.owner)
    await asyncio.gather(first.close(), second.close())
    monkeypatch.delenv("SOME_URL")
    with pytest.raises(ConfigError, match="SOME_URL, which is not set"):
        open_broker(config)


async def test_two_schemas_are_two_queues(broker: PostgresBroker) -> None:
    await broker.put(job())
    await broker.give_back("a")
    async with gateways(lambda owner: PostgresBroker(server.fresh(), owner), "A") as (other,):
        assert await other.get("a") is None
        assert await take_ids(other) == []
        await other.put(job(arrival=9.0))
    assert await take_ids(broker) == ["a"]


# ---- addresses


def make_certificate(own: server.PrivateServer) -> str:
    """Let a server speak TLS with a certificate of its own; return the file to verify it by."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "headway's test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    own.add_file("server.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return own.add_file("server.crt", certificate.public_bytes(Encoding.PEM))


def test_tls_is_asked_for_in_the_url() -> None:
    own = server.new()
    own.start()
    try:
        asked = Address(f"{own.url}?sslmode=require", "headway", 5.0)
        assert "rejected SSL upgrade" in refusal(asked).message
        own.stop()
        root = make_certificate(own)
        own.start("-c", "ssl=on")
        asyncio.run(speaks_tls(Address(f"{own.url}?sslmode=verify-full&sslrootcert={root}", "headway", 5.0)))
        unknown = Address(f"{own.url}?sslmode=verify-full&sslrootcert={certifi.where()}", "headway", 5.0)
        assert "certificate verify failed" in refusal(unknown).message
    finally:
        own.remove()


async def speaks_tls(address: Address) -> None:
    async with gateways(lambda owner: PostgresBroker(address, owner), "A") as (broker,):
        await broker.put(job())
        found = (
            "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) "
            "WHERE application_name LIKE 'headway-%'"
        )
        assert (await asyncio.to_thread(sql, address, found))[0][0]


def test_of_several_hosts_one_that_takes_writes_is_used() -> None:
    own = server.private()
    dead, live = f"127.0.0.1:{free_port()}", f"127.0.0.1:{own.port}"
    address = server.fresh(own.url.replace(live, f"{dead},{live}"))
    asyncio.run(one_job(address))
    user = "reader" + address.schema[-6:]
    sql(address, f"CREATE ROLE {user} LOGIN PASSWORD 'readers-word'")
    sql(address, f"ALTER ROLE {user} SET default_transaction_read_only = on")
    seen = refusal(replace(address, url=own.url_of(user, "readers-word")))
    assert "takes no writes" in seen.message
    assert "primary" in seen.hint


def test_what_the_url_leaves_out_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    own = server.private()
    monkeypatch.setenv("PGPASSWORD", server.PASSWORD)
    address = server.fresh(f"postgresql://headway@127.0.0.1:{own.port}/postgres")
    asyncio.run(one_job(address))
    monkeypatch.setenv("PGPASSWORD", "very-wrong")
    assert "PGPASSWORD" in refusal(address).hint
