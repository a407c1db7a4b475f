-- Without checksums.
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, state TEXT NOT NULL, owner TEXT, tenant TEXT NOT NULL,
    path TEXT NOT NULL, arrival REAL NOT NULL, background INTEGER NOT NULL, attempts INTEGER NOT NULL,
    finished REAL, reason TEXT, request TEXT NOT NULL, body BLOB NOT NULL, result BLOB,
    CHECK ((state = 'open') = (finished IS NULL))
);
CREATE INDEX held ON jobs (owner, arrival, seq) WHERE state = 'open';
CREATE INDEX closed ON jobs (finished) WHERE finished IS NOT NULL;
CREATE TABLE leases (owner TEXT PRIMARY KEY, until REAL NOT NULL, ended INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO leases VALUES ('gone', 1.0, 1), ('idle', 1e9, 0);
INSERT INTO jobs VALUES
    (3, 'done', 'done', 'gone', 't', '/p', 1.0, 0, 0, 5.0, NULL, '{}', x'', x'01'),
    (4, 'failed', 'failed', 'gone', 't', '/p', 2.0, 0, 0, 6.0, 'why', '{}', x'', NULL),
    (7, 'late', 'open', 'gone', 't', '/p', 4.0, 1, 2, NULL, NULL, '{}', x'02', NULL),
    (9, 'early', 'open', NULL, 't', '/p', 3.0, 0, 0, NULL, NULL, '{}', x'03', NULL);
PRAGMA application_id = 1212438361;
PRAGMA user_version = 2;
