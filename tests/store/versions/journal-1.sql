-- Before weights, soft targets, token lines, promised gaps, shares, and where a prompt was found.
CREATE TABLE requests ("id" TEXT NOT NULL, "tenant" TEXT NOT NULL, "tier" TEXT NOT NULL, "model" TEXT NOT NULL, "kind" TEXT NOT NULL, "background" INTEGER NOT NULL, "arrival" REAL NOT NULL, "queued" REAL, "sent" REAL, "resent" REAL, "first" REAL, "ended" REAL NOT NULL, "prompt_tokens" INTEGER NOT NULL, "max_tokens" INTEGER NOT NULL, "output_tokens" INTEGER NOT NULL, "forecast" REAL, "ttft" REAL, "tpot" REAL, "priority" INTEGER NOT NULL, "instance" TEXT, "requeues" INTEGER NOT NULL, "app" TEXT, "run" TEXT, "unit" TEXT, "outcome" TEXT NOT NULL, "met" INTEGER, "reason" TEXT);
CREATE TABLE refusals ("at" REAL NOT NULL, "tenant" TEXT NOT NULL, "tier" TEXT NOT NULL, "model" TEXT NOT NULL, "reason" TEXT NOT NULL, "count" INTEGER NOT NULL);
CREATE TABLE stays ("id" TEXT NOT NULL, "instance" TEXT NOT NULL, "entered" REAL NOT NULL, "admitted" REAL, "first" REAL NOT NULL, "ended" REAL NOT NULL, "stops" TEXT NOT NULL);
CREATE TABLE iterations ("instance" TEXT NOT NULL, "start" REAL NOT NULL, "ended" REAL NOT NULL, "count" INTEGER NOT NULL, "data" BLOB NOT NULL);
CREATE TABLE engines ("instance" TEXT NOT NULL, "at" REAL NOT NULL, "model" TEXT NOT NULL, "recipe" TEXT NOT NULL, "max_running" INTEGER NOT NULL, "max_model_len" INTEGER NOT NULL, "token_budget" INTEGER, "blocks" INTEGER, "block_size" INTEGER);
INSERT INTO requests VALUES ('r', 'default', 'chat', 'smollm2', 'chat', 0, 1000.0, 1000.1, 1000.2, 1000.2, 1000.5, 1001.0,
    20, 64, 16, 12.0, 1.0, 0.1, 0, 'e0', 0, NULL, NULL, NULL, 'finished', 1, NULL);
INSERT INTO refusals VALUES (1000.0, 'default', 'chat', 'smollm2', 'too_long', 3);
INSERT INTO stays VALUES ('r', 'e0', 1000.2, 1000.2, 1000.4, 1001.0, '');
INSERT INTO engines VALUES ('e0', 999.0, 'smollm2', 'headway', 8, 2048, 512, 100, 16);
PRAGMA application_id = 1212435020;
PRAGMA user_version = 1;
