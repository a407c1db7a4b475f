-- Files and batches beside postgres-queue-1.sql.
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
INSERT INTO {s}.batches_meta VALUES (1);
INSERT INTO {s}.files (id, tenant, name, purpose, size, created, state, writer, grown) VALUES
    ('file-1', 'alpha', 'in.jsonl', 'batch', 7, 1.0, 'stored', 'w', now());
INSERT INTO {s}.chunks VALUES ('file-1', 0, 'content');
INSERT INTO {s}.batches (id, tenant, endpoint, input_file, "window", created, due, state, began, total, completed, failed)
    VALUES ('batch-1', 'alpha', '/v1/chat/completions', 'file-1', '24h', 1.0, 9e9, 'in_progress', 2.0, 2, 1, 0);
INSERT INTO {s}.lines VALUES ('batch-1', 1, 0, 3, 'one', 1, 'answer'), ('batch-1', 2, 4, 3, 'two', 0, NULL);
