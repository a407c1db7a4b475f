-- Without owners: one gateway held the whole file.
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, state TEXT NOT NULL, tenant TEXT NOT NULL,
    path TEXT NOT NULL, arrival REAL NOT NULL, background INTEGER NOT NULL, attempts INTEGER NOT NULL,
    finished REAL, reason TEXT, request TEXT NOT NULL, body BLOB NOT NULL, result BLOB,
    CHECK ((state = 'open') = (finished IS NULL))
);
CREATE INDEX owed ON jobs (arrival, seq) WHERE state = 'open';
CREATE INDEX closed ON jobs (finished) WHERE finished IS NOT NULL;
INSERT INTO jobs VALUES
    (3, 'done', 'done', 't', '/p', 1.0, 0, 0, 5.0, NULL, '{}', x'', x'01'),
    (4, 'failed', 'failed', 't', '/p', 2.0, 0, 0, 6.0, 'why', '{}', x'', NULL),
    (7, 'late', 'open', 't', '/p', 4.0, 1, 2, NULL, NULL, '{}', x'02', NULL),
    (9, 'early', 'open', 't', '/p', 3.0, 0, 0, NULL, NULL, '{}', x'03', NULL);
PRAGMA application_id = 1212438361;
PRAGMA user_version = 1;
PRAGMA journal_mode = wal;
