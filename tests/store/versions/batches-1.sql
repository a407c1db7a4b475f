-- Without checksums.
CREATE TABLE files (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, name TEXT NOT NULL,
    purpose TEXT NOT NULL, size INTEGER NOT NULL, created REAL NOT NULL
);
CREATE INDEX files_of ON files (tenant, seq);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file TEXT NOT NULL, window TEXT NOT NULL, created REAL NOT NULL, due REAL NOT NULL, metadata TEXT,
    claims TEXT, state TEXT NOT NULL, began REAL, finalizing REAL, cancelling REAL, ended REAL, errors TEXT,
    output_file TEXT, error_file TEXT, total INTEGER NOT NULL, completed INTEGER NOT NULL,
    failed INTEGER NOT NULL
);
CREATE INDEX batches_of ON batches (tenant, seq);
CREATE INDEX open_batches ON batches (due) WHERE ended IS NULL;
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
    custom_id TEXT NOT NULL, ended INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE TABLE answers (batch TEXT NOT NULL, number INTEGER NOT NULL, content BLOB NOT NULL);
CREATE UNIQUE INDEX answer_of ON answers (batch, number);
INSERT INTO files VALUES (1, 'file-1', 'alpha', 'in.jsonl', 'batch', 7, 1.0);
INSERT INTO batches (seq, id, tenant, endpoint, input_file, window, created, due, state, began, total, completed, failed)
    VALUES (1, 'batch-1', 'alpha', '/v1/chat/completions', 'file-1', '24h', 1.0, 9e9, 'in_progress', 2.0, 2, 1, 0);
INSERT INTO lines VALUES ('batch-1', 1, 0, 3, 'one', 1), ('batch-1', 2, 4, 3, 'two', 0);
INSERT INTO answers VALUES ('batch-1', 1, CAST('answer' AS BLOB));
PRAGMA user_version = 1;
PRAGMA journal_mode = wal;
