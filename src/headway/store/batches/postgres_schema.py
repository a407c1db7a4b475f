"""The tables of files and batches, in the schema of the PostgreSQL broker."""

from __future__ import annotations

from headway.store.postgres.schema import Tables

# A file is first an "upload", which `writer` writes and which grew at an instant; then "stored", or "gone",
# while its chunks are deleted. Chunks and answers are not compressed, so that a part of one is read without
# the rest. Lines of an ended batch are deleted; then it is `cleared`.
_SCHEMA = """
CREATE TABLE {s}.batches_meta (version integer NOT NULL);
CREATE TABLE {s}.batch_runner (
    one boolean PRIMARY KEY DEFAULT true CHECK (one), term bigint NOT NULL, holder text,
    until timestamptz NOT NULL
);
CREATE TABLE {s}.files (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE, tenant text NOT NULL,
    name text NOT NULL, purpose text NOT NULL, size bigint NOT NULL, created double precision NOT NULL,
    state text NOT NULL, writer text NOT NULL, grown timestamptz NOT NULL
);
CREATE INDEX files_of ON {s}.files (tenant, seq);
CREATE INDEX unlisted_files ON {s}.files (grown) WHERE state <> 'stored';
CREATE TABLE {s}.chunks (
    file text NOT NULL, start bigint NOT NULL, content bytea NOT NULL, PRIMARY KEY (file, start)
);
CREATE TABLE {s}.batches (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE, tenant text NOT NULL,
    endpoint text NOT NULL, input_file text NOT NULL, "window" text NOT NULL,
    created double precision NOT NULL, due double precision NOT NULL, metadata text, claims text,
    state text NOT NULL, began double precision, finalizing double precision, cancelling double precision,
    ended double precision, errors text, output_file text, error_file text, total bigint NOT NULL,
    completed bigint NOT NULL, failed bigint NOT NULL, cleared boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);
CREATE INDEX batches_of ON {s}.batches (tenant, seq);
CREATE INDEX open_batches ON {s}.batches (due, seq) WHERE ended IS NULL;
CREATE INDEX uncleared_batches ON {s}.batches (seq) WHERE ended IS NOT NULL AND NOT cleared;
CREATE TABLE {s}.lines (
    batch text NOT NULL, number bigint NOT NULL, start bigint NOT NULL, size bigint NOT NULL,
    custom_id text NOT NULL, ended smallint NOT NULL DEFAULT 0, content bytea, PRIMARY KEY (batch, number)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX open_lines ON {s}.lines (batch, number) WHERE ended = 0;
ALTER TABLE {s}.chunks ALTER content SET STORAGE EXTERNAL;
ALTER TABLE {s}.lines ALTER content SET STORAGE EXTERNAL;
INSERT INTO {s}.batch_runner (term, until) VALUES (0, '-infinity');
"""
BATCHES = Tables("batches_meta", 1, ("batch_runner", "files", "chunks", "batches", "lines"), _SCHEMA)
