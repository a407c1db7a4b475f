"""Checks a schema of a PostgreSQL database, creates missing tables and upgrades older ones.

All statements name the schema, so that a session's `search_path` does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncpg import Connection

from headway.errors import ConfigError
from headway.store.versions import Versions

OLDEST = 140000  # PostgreSQL 14: pg_terminate_backend that waits
PARAM, URL = "broker.postgres.schema", "broker.postgres.url"

# PostgreSQL's text cannot hold NUL. A noncharacter, which Unicode leaves to programs' internal use, escapes it
# and itself.
_NUL, _ESCAPE = "\0", "\ufdd0"
_SERVER = """SELECT current_setting('server_version_num')::integer AS version,
    current_setting('server_encoding') AS encoding"""
_RELATIONS = """SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = $1 AND relkind IN ('r', 'p', 'v', 'm', 'f')"""
_RIGHTS = """SELECT bool_and(has_table_privilege(format('%I.%I', $1::text, name), what))
    FROM unnest($2::text[]) AS name,
        unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS what"""


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables that are created together.

    meta: the table that holds their version. names: of the tables whose rows are changed later.
    versions: {s} in its SQL is the schema.
    """

    meta: str
    names: tuple[str, ...]
    versions: Versions


def lock_of(schema: str) -> int:
    """Return the number of the advisory lock that the gateways of one schema share."""
    digest = hashlib.sha256(f"headway {schema}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


async def prepare(connection: Connection, schema: str, parts: Sequence[Tables], *, make: bool) -> None:
    """Check the database and the tables in a schema, and upgrade older ones; with `make`, create missing ones.

    Without `make`, for a gateway that connects again, newer tables are no error: a later gateway has upgraded them
    meanwhile (`Versions`). Every Headway schema has the first part. Raises ConfigError when the database or the schema
    cannot be used. The lock keeps gateways that start together from creating the schema twice.
    """
    _check_server(await connection.fetchrow(_SERVER))
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", lock_of(schema))
        for part in parts:
            found = {row["relname"] for row in await connection.fetch(_RELATIONS, schema)}
            others = set[str]() if parts[0].meta in found else found
            if part.meta not in found:
                if others or not make:
                    raise _foreign(schema, others)
                await _begin(connection, schema, part.meta)
            await _upgrade(connection, schema, part, newer=not make)
    if not await connection.fetchval(_RIGHTS, schema, [name for part in parts for name in part.names]):
        raise ConfigError(
            f"The user may not change the tables in the schema {schema}.",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} to it.",
            param=URL,
        )


async def at_start(connection: Connection, schema: str, part: Tables) -> str:
    """Return in words what a start finds in a schema and does to its tables; ConfigError for newer ones."""
    there = await connection.fetchval("SELECT to_regclass($1)", f'"{schema}".{part.meta}')
    found = there and await connection.fetchval(f'SELECT version FROM "{schema}".{part.meta}')
    return part.versions.at_start(found, f"The schema {schema}")


def _check_server(row: Any) -> None:
    if row["version"] < OLDEST:
        problem = f"The PostgreSQL server is of version {row['version'] // 10000}."
        raise ConfigError(problem, f"Headway needs {OLDEST // 10000} or newer.", param=URL)
    if row["encoding"] != "UTF8":
        problem = f"The database has the encoding {row['encoding']}, which cannot hold every text."
        fix = "Create one with: createdb --encoding=UTF8 --template=template0 NAME"
        raise ConfigError(problem, fix, param=URL)


async def _begin(connection: Connection, schema: str, meta: str) -> None:
    if not await connection.fetchval("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", schema):
        await connection.execute(f'CREATE SCHEMA "{schema}"')
    await connection.execute(f'CREATE TABLE "{schema}".{meta} (version integer NOT NULL)')


async def _upgrade(connection: Connection, schema: str, part: Tables, *, newer: bool) -> None:
    """Bring tables to the latest version. newer: tables of a newer version are no error."""
    found = await connection.fetchval(f'SELECT version FROM "{schema}".{part.meta}')
    if newer and found is not None and found > part.versions.latest:
        return
    scripts = part.versions.scripts(found, f"The schema {schema}")
    for script in scripts:
        await connection.execute(script.replace("{s}", f'"{schema}"'))
    if scripts:
        verb = "INSERT INTO {} VALUES ({})" if found is None else "UPDATE {} SET version = {}"
        await connection.execute(verb.format(f'"{schema}".{part.meta}', part.versions.latest))


def _foreign(schema: str, found: set[str]) -> ConfigError:
    """Return the error of a schema whose tables are gone, or belong to another program."""
    if not found:
        return ConfigError(
            f"The schema {schema} has no tables any more.",
            "Restore the database, or restart the gateways with an empty queue.",
            param=PARAM,
        )
    return ConfigError(
        f"The schema {schema} has another program's tables, such as {min(found)}.",
        "Give the broker a separate schema.",
        param=PARAM,
    )


def stored(text: str | None) -> str | None:
    """Escape a text so that PostgreSQL can hold it."""
    if text is None or not (_NUL in text or _ESCAPE in text):
        return text
    return text.replace(_ESCAPE, _ESCAPE + "1").replace(_NUL, _ESCAPE + "0")


def loaded(text: Any) -> Any:
    """Undo `stored`; return values other than text unchanged."""
    if not isinstance(text, str) or _ESCAPE not in text:
        return text
    return text.replace(_ESCAPE + "0", _NUL).replace(_ESCAPE + "1", _ESCAPE)
