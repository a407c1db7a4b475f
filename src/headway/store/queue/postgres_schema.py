"""The queue's tables in PostgreSQL, and the function that carries out calls."""

from __future__ import annotations

from headway.store.postgres.schema import PARAM, Tables
from headway.store.versions import Versions

# `seq` is the order of the puts. `call` is the number of the owner's call that put or took the job:
# it finds jobs to undo after a call with an unknown outcome. Bodies are not compressed, as a put would wait for it.
_TABLES = """
CREATE TABLE {s}.leases (
    owner text PRIMARY KEY, until double precision NOT NULL, ended boolean NOT NULL
) WITH (fillfactor = 50);
CREATE TABLE {s}.jobs (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE, state text NOT NULL,
    owner text, call bigint NOT NULL, tenant text NOT NULL, path text NOT NULL,
    arrival double precision NOT NULL, background boolean NOT NULL, attempts bigint NOT NULL,
    finished double precision, reason text, request text NOT NULL, body bytea NOT NULL, result bytea,
    CHECK ((state = 'open') = (finished IS NULL))
) WITH (autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE {s}.jobs ALTER body SET STORAGE EXTERNAL, ALTER result SET STORAGE EXTERNAL;
CREATE INDEX held ON {s}.jobs (owner, arrival, seq) WHERE state = 'open';
CREATE INDEX closed ON {s}.jobs (finished) WHERE finished IS NOT NULL;
"""

# Carries out calls in their order and returns a row for each, in one statement: one round trip, one commit.
# Calls of several gateways run concurrently under the shared lock. Calls that look at other gateways' leases
# (`take`, `forget`) run alone, so that no put or renewal is under way meanwhile. Every statement inside takes
# its snapshot after the lock. Rows are small, so a client that stops reading delays no commit.
_APPLY = """
CREATE FUNCTION {s}.apply(
    me text, alone boolean, lock bigint, verbs text[], calls bigint[], ids text[],
    instants double precision[], counts bigint[], backgrounds boolean[], tenants text[], paths text[],
    texts text[], bodies bytea[]
) RETURNS TABLE (outcome bigint, taken bigint[]) LANGUAGE plpgsql AS $apply$
#variable_conflict use_column
DECLARE
    leased boolean;
BEGIN
    IF alone THEN PERFORM pg_advisory_xact_lock(lock);
    ELSE PERFORM pg_advisory_xact_lock_shared(lock);
    END IF;
    FOR i IN 1 .. cardinality(verbs) LOOP
        taken := NULL;
        CASE verbs[i]
        WHEN 'put' THEN
            INSERT INTO {s}.jobs (id, state, owner, call, tenant, path, arrival, background, attempts,
                    request, body)
                SELECT ids[i], 'open', me, calls[i], tenants[i], paths[i], instants[i], backgrounds[i],
                    counts[i], texts[i], bodies[i]
                WHERE EXISTS (SELECT FROM {s}.leases WHERE owner = me) ON CONFLICT (id) DO NOTHING;
            GET DIAGNOSTICS outcome = ROW_COUNT;
            IF outcome = 0 AND NOT EXISTS (SELECT FROM {s}.leases WHERE owner = me) THEN
                outcome := -1;
            END IF;
        WHEN 'done', 'failed' THEN
            UPDATE {s}.jobs SET state = verbs[i], result = bodies[i], reason = texts[i],
                    finished = instants[i], body = ''
                WHERE id = ids[i] AND state = 'open' AND owner = me;
            GET DIAGNOSTICS outcome = ROW_COUNT;
        WHEN 'attempt' THEN
            outcome := NULL;
            UPDATE {s}.jobs SET attempts = attempts + 1 WHERE id = ids[i] RETURNING attempts INTO outcome;
        WHEN 'give_back' THEN
            UPDATE {s}.jobs SET owner = NULL WHERE id = ids[i] AND state = 'open' AND owner = me;
            GET DIAGNOSTICS outcome = ROW_COUNT;
        WHEN 'delete' THEN
            DELETE FROM {s}.jobs WHERE id = ids[i] AND state <> 'open';
            GET DIAGNOSTICS outcome = ROW_COUNT;
        WHEN 'renew' THEN
            SELECT NOT ended INTO leased FROM {s}.leases WHERE owner = me;
            INSERT INTO {s}.leases (owner, until, ended) VALUES (me, instants[i], false)
                ON CONFLICT (owner) DO UPDATE SET until = excluded.until, ended = false;
            outcome := coalesce(leased, false)::integer;
        WHEN 'take' THEN
            outcome := -1;
            IF EXISTS (SELECT FROM {s}.leases WHERE owner = me) THEN
                UPDATE {s}.leases SET ended = true
                    WHERE until <= instants[i] AND NOT ended AND owner <> me;
                taken := {s}.free(me, counts[i]);
                UPDATE {s}.jobs SET owner = me, call = calls[i] WHERE seq = ANY (taken);
                outcome := cardinality(taken);
            END IF;
        WHEN 'forget' THEN
            DELETE FROM {s}.leases WHERE until < instants[i] AND NOT EXISTS
                (SELECT FROM {s}.jobs WHERE jobs.state = 'open' AND jobs.owner = leases.owner);
            DELETE FROM {s}.jobs WHERE seq IN
                (SELECT seq FROM {s}.jobs WHERE finished < instants[i] ORDER BY finished LIMIT counts[i]);
            GET DIAGNOSTICS outcome = ROW_COUNT;
        WHEN 'leave' THEN
            UPDATE {s}.leases SET ended = true WHERE owner = me;
            GET DIAGNOSTICS outcome = ROW_COUNT;
        END CASE;
        RETURN NEXT;
    END LOOP;
END $apply$;
"""

# The first jobs that were given back and the first of each ended lease, then the first of these: held jobs
# are never scanned. (With `owner` in the first order PostgreSQL sees that the index has it.)
FREE = """
    SELECT seq FROM (
        (SELECT seq, arrival FROM {s}.jobs WHERE state = 'open' AND owner IS NULL
            ORDER BY owner, arrival, seq LIMIT $2)
        UNION ALL
        SELECT first.seq, first.arrival FROM {s}.leases CROSS JOIN LATERAL (
            SELECT seq, arrival FROM {s}.jobs WHERE state = 'open' AND jobs.owner = leases.owner
            ORDER BY arrival, seq LIMIT $2) AS first
        WHERE leases.ended AND leases.owner <> $1
    ) AS free ORDER BY arrival, seq LIMIT $2
"""
_FREE = f"""
CREATE OR REPLACE FUNCTION {{s}}.free(me text, most bigint) RETURNS bigint[] LANGUAGE sql AS $free$
    SELECT ARRAY ({FREE}) $free$;
"""
# `account` and `id` are escaped as all texts are. Gateways of version 1 made this table, or none, or an older `free`.
_SPENT = """
CREATE TABLE IF NOT EXISTS {s}.spent (
    account text NOT NULL, id text NOT NULL, at double precision NOT NULL, units double precision NOT NULL,
    PRIMARY KEY (account, id)
);
"""
# Digest, tenant and limits of API keys that were made at run time.
_KEYS = """
CREATE TABLE IF NOT EXISTS {s}.keys (
    id text PRIMARY KEY, digest bytea NOT NULL, settings text NOT NULL, created double precision NOT NULL,
    expires double precision, revoked double precision, changed bigint NOT NULL UNIQUE
);
"""
# What is trimmed. The length of a large text is known without reading it.
_KEPT_JOBS = """finished IS NOT NULL AND (result IS NOT NULL AND NOT background OR strpos(request, '"kept":') > 0)"""
TOO_MUCH = f"""SELECT id FROM (
    SELECT id, sum(octet_length(request) + coalesce(octet_length(result), 0)) OVER (
        PARTITION BY tenant ORDER BY finished DESC, id DESC) AS total
    FROM {{s}}.jobs WHERE {_KEPT_JOBS}) AS kept WHERE total > $1 LIMIT $2"""
_KEPT = f"""
CREATE INDEX IF NOT EXISTS kept ON {{s}}.jobs (tenant, finished) WHERE {_KEPT_JOBS};
"""
JOBS = Tables(
    "headway_meta",
    ("jobs", "leases", "spent", "keys"),
    Versions(param=PARAM, made=1, script=_TABLES + _FREE + _APPLY, steps={1: _SPENT + _FREE, 2: _KEYS, 3: _KEPT}),
)
