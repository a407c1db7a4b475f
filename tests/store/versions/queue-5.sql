-- As version 4, with `keys` from the start.
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, state TEXT NOT NULL, owner TEXT, tenant TEXT NOT NULL,
    path TEXT NOT NULL, arrival REAL NOT NULL, background INTEGER NOT NULL, attempts INTEGER NOT NULL,
    finished REAL, reason TEXT, body_sum INTEGER, result_sum INTEGER, request TEXT NOT NULL, body BLOB NOT NULL,
    result BLOB,
    CHECK ((state = 'open') = (finished IS NULL))
);
CREATE INDEX held ON jobs (owner, arrival, seq) WHERE state = 'open';
CREATE INDEX closed ON jobs (finished) WHERE finished IS NOT NULL;
CREATE TABLE leases (owner TEXT PRIMARY KEY, until REAL NOT NULL, ended INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE spent (account TEXT NOT NULL, id TEXT NOT NULL, at REAL NOT NULL,
    units REAL NOT NULL, PRIMARY KEY (account, id)) WITHOUT ROWID;
CREATE TABLE keys (id TEXT PRIMARY KEY, digest BLOB NOT NULL, settings TEXT NOT NULL,
    created REAL NOT NULL, expires REAL, revoked REAL, changed INTEGER NOT NULL UNIQUE) WITHOUT ROWID;
INSERT INTO leases VALUES ('gone', 1.0, 1), ('idle', 1e9, 0);
INSERT INTO jobs VALUES
    (3, 'done', 'done', 'gone', 't', '/p', 1.0, 0, 0, 5.0, NULL, NULL, NULL, '{}', x'', x'01'),
    (4, 'failed', 'failed', 'gone', 't', '/p', 2.0, 0, 0, 6.0, 'why', NULL, NULL, '{}', x'', NULL),
    (7, 'late', 'open', 'gone', 't', '/p', 4.0, 1, 2, NULL, NULL, 68548561, NULL, '{}', x'02', NULL),
    (9, 'early', 'open', NULL, 't', '/p', 3.0, 0, 0, NULL, NULL, NULL, NULL, '{}', x'03', NULL);
INSERT INTO spent VALUES ('paid', 'late', 4.0, 2.5);
PRAGMA application_id = 1212438361;
PRAGMA user_version = 5;
