-- The tables of onlyonce, with the prefix "onlyonce_".
-- `migrate()` runs this file; to use your own migration tool, copy it as it is.
-- Times are microseconds since 1970, from SQLite's own clock.

CREATE TABLE onlyonce_schema_version (
    only_row      INTEGER PRIMARY KEY DEFAULT 1 CHECK (only_row = 1),
    -- The oldest and the newest layout that programs may expect of these tables.
    min_supported INTEGER NOT NULL,
    max_supported INTEGER NOT NULL
) STRICT;
INSERT INTO onlyonce_schema_version (min_supported, max_supported) VALUES (1, 1);

-- Always empty. A claim points into it until the guard has passed, and the foreign key is checked at
-- COMMIT: a handler that sends COMMIT by itself gets an error, and nothing of its work stands alone.
CREATE TABLE onlyonce_open_claims (
    mark TEXT PRIMARY KEY
) STRICT;

-- One row per event whose work is committed. Insert-only but for purge and parking.
CREATE TABLE onlyonce_processed_events (
    event_key    BLOB NOT NULL PRIMARY KEY,
    kind         TEXT NOT NULL CHECK (kind IN ('event', 'once')),
    consumer     TEXT NOT NULL,
    source       TEXT NOT NULL,
    event_id     TEXT NOT NULL,
    payload_hash BLOB NOT NULL,
    outcome      TEXT NOT NULL CHECK (outcome IN ('processed', 'discarded')),
    processed_at INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    open_mark    TEXT REFERENCES onlyonce_open_claims (mark) DEFERRABLE INITIALLY DEFERRED
) STRICT, WITHOUT ROWID;
CREATE INDEX onlyonce_processed_events_purge ON onlyonce_processed_events (consumer, processed_at)
    WHERE kind = 'event';

-- Who reads: one row per running instance of a consumer, so that held events without a reader are noticed.
CREATE TABLE onlyonce_consumers (
    name     TEXT NOT NULL,
    instance BLOB NOT NULL,
    version  TEXT NOT NULL,
    seen_at  INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    PRIMARY KEY (name, instance)
) STRICT, WITHOUT ROWID;

-- Events that are kept because they could not be applied yet, or that wait in the embedded queue.
CREATE TABLE onlyonce_inbox (
    id                INTEGER PRIMARY KEY AUTOINCREMENT,
    -- NULL where the event has no usable identity.
    event_key         BLOB,
    consumer          TEXT NOT NULL,
    source            TEXT,
    event_id          TEXT,
    event_type        BLOB,
    ordering_key      BLOB,
    -- NULL is a null payload (a tombstone).
    payload           BLOB,
    payload_hash      BLOB NOT NULL,
    headers           BLOB NOT NULL,
    event_time_ms     INTEGER,
    -- The newest copy with the same identity and another payload that failed as well.
    copy_payload      BLOB,
    copy_payload_hash BLOB,
    copy_headers      BLOB,
    origin            TEXT NOT NULL,
    state             TEXT NOT NULL CHECK (state IN ('ready', 'running', 'dead', 'replayed', 'discarded')),
    reason            TEXT,
    run_at            INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    attempts          INTEGER NOT NULL DEFAULT 0,
    failures          TEXT NOT NULL DEFAULT '[]',
    lease_token       BLOB,
    leased_until      INTEGER,
    received_at       INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    dead_at           INTEGER
) STRICT;
CREATE UNIQUE INDEX onlyonce_inbox_unfinished ON onlyonce_inbox (event_key)
    WHERE state IN ('ready', 'running', 'dead');
CREATE INDEX onlyonce_inbox_due ON onlyonce_inbox (consumer, COALESCE(leased_until, run_at))
    WHERE state IN ('ready', 'running');
CREATE INDEX onlyonce_inbox_dead ON onlyonce_inbox (consumer, id) WHERE state = 'dead';

-- Outgoing events, written in the transactions that cause them. A relay deletes what the broker has confirmed.
CREATE TABLE onlyonce_outbox (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    relay           TEXT NOT NULL,
    event_id        TEXT NOT NULL,
    source          TEXT NOT NULL,
    -- publisher:address
    destination     TEXT NOT NULL,
    ordering_key    BLOB,
    -- The first 16 bytes of SHA-256 over destination and key: what rows are ordered by. NULL without a key.
    key_hash        BLOB,
    -- The first byte of SHA-256 over the key, modulo 64; random without a key.
    lane            INTEGER NOT NULL,
    event_type      TEXT,
    -- NULL is a null payload (a tombstone).
    payload         BLOB,
    content_type    TEXT,
    headers         BLOB NOT NULL,
    -- CloudEvents attributes beside id, source, type, time and content type.
    attributes      BLOB NOT NULL,
    mode            TEXT NOT NULL CHECK (mode IN ('binary', 'structured')),
    traceparent     TEXT,
    created_at      INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    -- NULL is at once.
    send_at         INTEGER,
    attempts        INTEGER NOT NULL DEFAULT 0,
    next_attempt_at INTEGER,
    last_error      TEXT,
    parked_at       INTEGER,
    replays         INTEGER NOT NULL DEFAULT 0,
    -- Only where sent rows are kept for a while.
    sent_at         INTEGER
) STRICT;
CREATE INDEX onlyonce_outbox_due ON onlyonce_outbox (relay, lane, id) WHERE sent_at IS NULL AND parked_at IS NULL;
-- What may stand in the way of later rows of its key.
CREATE INDEX onlyonce_outbox_waiting ON onlyonce_outbox (key_hash, id)
    WHERE sent_at IS NULL AND (parked_at IS NOT NULL OR next_attempt_at IS NOT NULL OR send_at IS NOT NULL);
CREATE INDEX onlyonce_outbox_parked ON onlyonce_outbox (relay, id) WHERE parked_at IS NOT NULL;
CREATE INDEX onlyonce_outbox_sent ON onlyonce_outbox (relay, sent_at) WHERE sent_at IS NOT NULL;

-- Who publishes the rows of a lane, and until when.
CREATE TABLE onlyonce_outbox_lanes (
    relay        TEXT NOT NULL,
    lane         INTEGER NOT NULL,
    owner        BLOB,
    -- Raised with every change of owner.
    fence        INTEGER NOT NULL DEFAULT 0,
    leased_until INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (relay, lane)
) STRICT, WITHOUT ROWID;

-- The instances of each relay that share its lanes.
CREATE TABLE onlyonce_outbox_relays (
    relay       TEXT NOT NULL,
    owner       BLOB NOT NULL,
    alive_until INTEGER NOT NULL,
    PRIMARY KEY (relay, owner)
) STRICT, WITHOUT ROWID;
