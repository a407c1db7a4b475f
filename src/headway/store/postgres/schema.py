"""Checks a schema of a PostgreSQL database, and creates missing tables.

All statements name the schema, so that a session's `search_path` does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncpg import Connection

from headway.errors import ConfigError

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

    meta: the table that holds their version. names: of the tables that are changed later.
    script: SQL that creates all of them; {s} in it is the schema. upgrades: SQL from a version to the next one.
    """

    meta: str
    version: int
    names: tuple[str, ...]
    script: str
    upgrades: Mapping[int, str] = field(default_factory=dict)


def lock_of(schema: str) -> int:
    """Return the number of the advisory lock that the gateways of one schema share."""
    digest = hashlib.sha256(f"headway {schema}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


async def prepare(connection: Connection, schema: str, parts: Sequence[Tables], *, make: bool) -> None:
    """Check the database and the tables in a schema; with `make`, create missing ones.

    Every Headway schema has the first part. Raises ConfigError when the database or the schema cannot
    be used. The lock keeps gateways that start together from creating the schema twice.
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
                await _make(connection, schema, part)
            version = await connection.fetchval(f'SELECT version FROM "{schema}".{part.meta}')
            while make and version in part.upgrades:
                await connection.execute(part.upgrades[version].replace("{s}", f'"{schema}"'))
                version += 1
                await connection.execute(f'UPDATE "{schema}".{part.meta} SET version = {version}')
            if version != part.version:
                raise ConfigError(
                    f"The schema {schema} has version {version}; this Headway knows {part.version}.",
                    "Use the Headway that made it, or give this one another schema.",
                    param=PARAM,
                )
    if not await connection.fetchval(_RIGHTS, schema, [name for part in parts for name in part.names]):
        raise ConfigError(
            f"The user may not change the tables in the schema {schema}.",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} to it.",
            param=URL,
        )


def _check_server(row: Any) -> None:
    if row["version"] < OLDEST:
        problem = f"The PostgreSQL server is of version {row['version'] // 10000}."
        raise ConfigError(problem, f"Headway needs {OLDEST // 10000} or newer.", param=URL)
    if row["encoding"] != "UTF8":
        problem = f"The database has the encoding {row['encoding']}, which cannot hold every text."
        fix = "Create one with: createdb --encoding=UTF8 --template=template0 NAME"
        raise ConfigError(problem, fix, param=URL)


async def _make(connection: Connection, schema: str, part: Tables) -> None:
    if not await connection.fetchval("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", schema):
        await connection.execute(f'CREATE SCHEMA "{schema}"')
    await connection.execute(part.script.replace("{s}", f'"{schema}"'))
    await connection.execute(f'INSERT INTO "{schema}".{part.meta} VALUES ({part.version})')


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
