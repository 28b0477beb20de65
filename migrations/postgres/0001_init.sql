-- The tables of onlyonce in the schema "onlyonce"; another name may be configured.
-- `migrate()` runs this file; to use your own migration tool, copy it as it is.

CREATE TABLE onlyonce.schema_version (
    only_row      boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- The oldest and the newest layout that programs may expect of these tables.
    min_supported integer NOT NULL,
    max_supported integer NOT NULL
);
INSERT INTO onlyonce.schema_version (min_supported, max_supported) VALUES (1, 1);

-- One row per event whose work is committed. Insert-only but for purge and parking. Without CHECK
-- constraints, of which the server parses the text again on every insert: only claims write here.
CREATE TABLE onlyonce.processed_events (
    event_key    uuid PRIMARY KEY,
    -- event, once
    kind         text COLLATE "C" NOT NULL,
    consumer     text COLLATE "C" NOT NULL,
    source       text COLLATE "C" NOT NULL,
    event_id     text COLLATE "C" NOT NULL,
    payload_hash bytea NOT NULL,
    -- processed, discarded
    outcome      text COLLATE "C" NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX processed_events_purge ON onlyonce.processed_events (consumer, processed_at) WHERE kind = 'event';

-- Who reads: one row per running instance of a consumer, so that held events without a reader are noticed.
CREATE TABLE onlyonce.consumers (
    name     text COLLATE "C" NOT NULL,
    instance uuid NOT NULL,
    version  text COLLATE "C" NOT NULL,
    seen_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (name, instance)
);

-- Events that are kept because they could not be applied yet, or that wait in the embedded queue.
CREATE TABLE onlyonce.inbox (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- NULL where the event has no usable identity.
    event_key         uuid,
    consumer          text COLLATE "C" NOT NULL,
    source            text COLLATE "C",
    event_id          text COLLATE "C",
    event_type        bytea,
    ordering_key      bytea,
    -- NULL is a null payload (a tombstone).
    payload           bytea,
    payload_hash      bytea NOT NULL,
    headers           bytea NOT NULL,
    event_time_ms     bigint,
    -- The newest copy with the same identity and another payload that failed as well.
    copy_payload      bytea,
    copy_payload_hash bytea,
    copy_headers      bytea,
    origin            text NOT NULL,
    state             text COLLATE "C" NOT NULL CHECK (state IN ('ready', 'running', 'dead', 'replayed', 'discarded')),
    reason            text COLLATE "C",
    run_at            timestamptz NOT NULL DEFAULT now(),
    attempts          integer NOT NULL DEFAULT 0,
    failures          jsonb NOT NULL DEFAULT '[]',
    lease_token       uuid,
    leased_until      timestamptz,
    received_at       timestamptz NOT NULL DEFAULT now(),
    dead_at           timestamptz
);
CREATE UNIQUE INDEX inbox_unfinished ON onlyonce.inbox (event_key) WHERE state IN ('ready', 'running', 'dead');
CREATE INDEX inbox_due ON onlyonce.inbox (consumer, COALESCE(leased_until, run_at)) WHERE state IN ('ready', 'running');
CREATE INDEX inbox_dead ON onlyonce.inbox (consumer, id) WHERE state = 'dead';

-- Rows come and go: vacuum by count, not by a share of a table that once was large.
ALTER TABLE onlyonce.inbox SET (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 5000);

-- Outgoing events, written in the transactions that cause them. A relay deletes what the broker has confirmed.
CREATE TABLE onlyonce.outbox (
    -- Without a cache: in the order in which one session writes, ids ascend.
    id              bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    relay           text COLLATE "C" NOT NULL,
    event_id        text COLLATE "C" NOT NULL,
    source          text COLLATE "C" NOT NULL,
    -- publisher:address
    destination     text COLLATE "C" NOT NULL,
    ordering_key    bytea,
    -- The first 16 bytes of SHA-256 over destination and key: what rows are ordered by. NULL without a key.
    key_hash        bytea,
    -- The first byte of SHA-256 over the key, modulo 64; random without a key.
    lane            smallint NOT NULL,
    event_type      text COLLATE "C",
    -- NULL is a null payload (a tombstone).
    payload         bytea,
    content_type    text,
    headers         bytea NOT NULL,
    -- CloudEvents attributes beside id, source, type, time and content type.
    attributes      bytea NOT NULL,
    -- binary, structured
    mode            text COLLATE "C" NOT NULL,
    traceparent     text,
    created_at      timestamptz NOT NULL DEFAULT now(),
    -- NULL is at once.
    send_at         timestamptz,
    attempts        integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz,
    last_error      text,
    parked_at       timestamptz,
    replays         integer NOT NULL DEFAULT 0,
    -- Only where sent rows are kept for a while.
    sent_at         timestamptz
);
CREATE INDEX outbox_due ON onlyonce.outbox (relay, lane, id) WHERE sent_at IS NULL AND parked_at IS NULL;
-- What may stand in the way of later rows of its key.
CREATE INDEX outbox_waiting ON onlyonce.outbox (key_hash, id)
    WHERE sent_at IS NULL AND (parked_at IS NOT NULL OR next_attempt_at IS NOT NULL OR send_at IS NOT NULL);
CREATE INDEX outbox_parked ON onlyonce.outbox (relay, id) WHERE parked_at IS NOT NULL;
CREATE INDEX outbox_sent ON onlyonce.outbox (relay, sent_at) WHERE sent_at IS NOT NULL;
ALTER TABLE onlyonce.outbox SET (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.0, autovacuum_vacuum_insert_threshold = 50000);

-- Who publishes the rows of a lane, and until when.
CREATE TABLE onlyonce.outbox_lanes (
    relay        text COLLATE "C" NOT NULL,
    lane         smallint NOT NULL,
    owner        uuid,
    -- Raised with every change of owner.
    fence        bigint NOT NULL DEFAULT 0,
    leased_until timestamptz NOT NULL DEFAULT '-infinity',
    PRIMARY KEY (relay, lane)
);

-- The instances of each relay that share its lanes.
CREATE TABLE onlyonce.outbox_relays (
    relay       text COLLATE "C" NOT NULL,
    owner       uuid NOT NULL,
    alive_until timestamptz NOT NULL,
    PRIMARY KEY (relay, owner)
);
