//! Every statement of the store. The tables have a fixed prefix, so nothing is ever put into SQL.

/// Now, by the database's clock, in microseconds since 1970.
macro_rules! now {
    () => {
        "CAST(unixepoch('subsec') * 1000000 AS INTEGER)"
    };
}

/// The states in which a row stands for its event. Word for word as in the index that holds it to one.
macro_rules! unfinished {
    () => {
        "('ready', 'running', 'dead')"
    };
}

/// The event keys of the JSON array `?1`, in hexadecimal: one statement for any number of them.
macro_rules! keys {
    () => {
        "(SELECT unhex(value) FROM json_each(?1))"
    };
}

/// The leases of the JSON array `?1` of [id, token]; the token is in hexadecimal.
macro_rules! leased {
    () => {
        "(id, lease_token) IN (SELECT json_extract(value, '$[0]'), unhex(json_extract(value, '$[1]')) \
         FROM json_each(?1)) AND state = 'running'"
    };
}

/// A transaction that is the writer from the start: one that becomes it later fails at once if
/// another has committed meanwhile, whatever the timeout.
pub(super) const BEGIN: &str = "BEGIN IMMEDIATE";

/// `?1` key, `?2` consumer, `?3` source, `?4` event id, `?5` payload hash, `?6` own row, `?7` own token,
/// `?8` outcome, `?9` the mark that no commit gets past until the guard took it away. A held row stands
/// in the way if it has this very payload and is not the delivery's own; a copy with another payload
/// may run.
pub(super) const CLAIM: &str = concat!(
    "
INSERT INTO onlyonce_processed_events
       (event_key, kind, consumer, source, event_id, payload_hash, outcome, open_mark)
SELECT ?1, 'event', ?2, ?3, ?4, ?5, ?8, ?9
 WHERE NOT EXISTS (
       SELECT 1 FROM onlyonce_inbox x
        WHERE x.event_key = ?1 AND x.state IN ",
    unfinished!(),
    "
          AND (x.payload_hash = ?5 OR x.copy_payload_hash = ?5)
          AND (x.id IS NOT ?6 OR x.lease_token IS NOT ?7))
    ON CONFLICT (event_key) DO NOTHING"
);

/// What stands where an insert found its place taken. `?1` key, `?2` payload hash, `?3` own row, `?4` own token.
pub(super) const CLAIM_READ: &str = concat!(
    "
SELECT p.source, p.event_id, p.payload_hash, p.outcome,
       (SELECT x.state FROM onlyonce_inbox x
         WHERE x.event_key = ?1 AND x.state IN ",
    unfinished!(),
    "
           AND (x.payload_hash = ?2 OR x.copy_payload_hash = ?2)
           AND (x.id IS NOT ?3 OR x.lease_token IS NOT ?4))
  FROM (SELECT 1) LEFT JOIN onlyonce_processed_events p ON p.event_key = ?1"
);

pub(super) const CLAIM_ONCE: &str = "
INSERT INTO onlyonce_processed_events (event_key, kind, consumer, source, event_id, payload_hash, outcome)
VALUES (?1, 'once', ?2, ?3, ?4, x'', 'processed')
    ON CONFLICT (event_key) DO NOTHING";

/// `?1` keys, `?2` the claims' mark. In a transaction that is not the claims' own there is no such
/// row, so it changes nothing and says so.
pub(super) const GUARD: &str = concat!(
    "UPDATE onlyonce_processed_events SET open_mark = NULL WHERE event_key IN ",
    keys!(),
    " AND open_mark = ?2"
);

/// `?1` keys, `?2` the final state of rows that were dead once. Only after the guard has passed.
pub(super) const FINISH: &str = concat!(
    "
DELETE FROM onlyonce_inbox
 WHERE event_key IN ",
    keys!(),
    " AND state IN ",
    unfinished!(),
    " AND dead_at IS NULL;
UPDATE onlyonce_inbox SET state = ?2, lease_token = NULL, leased_until = NULL
 WHERE event_key IN ",
    keys!(),
    " AND state IN ",
    unfinished!(),
    " AND dead_at IS NOT NULL"
);

/// `?1` to `?16` columns, `?17` the claims' mark and `?18` one of their keys: in a transaction that is not
/// theirs there is no such row, so it writes nothing. Without claims both are NULL.
pub(super) const RECORD: &str = concat!(
    "
INSERT INTO onlyonce_outbox (relay, event_id, source, destination, ordering_key, key_hash, lane, event_type,
       payload, content_type, headers, attributes, mode, traceparent, send_at)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14,
       NULLIF(max(COALESCE(?15, 0), COALESCE(",
    now!(),
    " + ?16, 0)), 0)
 WHERE ?17 IS NULL
    OR EXISTS (SELECT 1 FROM onlyonce_processed_events WHERE event_key = ?18 AND open_mark = ?17)"
);

/// Several rows are all written or none.
pub(super) const RECORD_ALL: &str = "SAVEPOINT onlyonce_outbox";
pub(super) const RECORD_END: &str = "RELEASE onlyonce_outbox";
pub(super) const RECORD_UNDO: &str = "ROLLBACK TO onlyonce_outbox; RELEASE onlyonce_outbox";

pub(super) const PARKED: &str = "
SELECT id, event_id, event_type, destination, ordering_key, attempts, COALESCE(last_error, ''), parked_at
  FROM onlyonce_outbox
 WHERE relay = ?1 AND parked_at IS NOT NULL AND id > ?2
 ORDER BY id
 LIMIT ?3";

/// `?2` a JSON array of rows.
pub(super) const REPLAY_PARKED: &str = "
UPDATE onlyonce_outbox SET parked_at = NULL, next_attempt_at = NULL, attempts = 0, replays = replays + 1
 WHERE relay = ?1 AND id IN (SELECT value FROM json_each(?2)) AND parked_at IS NOT NULL
RETURNING id";

pub(super) const DISCARD_PARKED: &str = "
DELETE FROM onlyonce_outbox
 WHERE relay = ?1 AND id IN (SELECT value FROM json_each(?2)) AND parked_at IS NOT NULL
RETURNING id";

pub(super) const PARK_CLAIM: &str = "
INSERT INTO onlyonce_processed_events (event_key, kind, consumer, source, event_id, payload_hash, outcome)
VALUES (?1, 'event', ?2, ?3, ?4, ?5, 'processed')
    ON CONFLICT (event_key) DO NOTHING";

pub(super) const PARK_UNCLAIM: &str = "DELETE FROM onlyonce_processed_events WHERE event_key = ?1";

pub(super) const PARK_FIND: &str = concat!(
    "SELECT id, state, payload_hash, failures FROM onlyonce_inbox WHERE event_key = ?1 AND state IN ",
    unfinished!()
);

pub(super) const PARK_INSERT: &str = concat!(
    "
INSERT INTO onlyonce_inbox (event_key, consumer, source, event_id, event_type, ordering_key, payload,
       payload_hash, headers, event_time_ms, origin, state, reason, run_at, attempts, failures, dead_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ",
    now!(),
    " + ?14, ?15, ?16, CASE WHEN ?12 = 'dead' THEN ",
    now!(),
    " END)"
);

/// `?1` the row, `?2` attempts to add, `?3` all failures.
pub(super) const PARK_COUNT: &str =
    "UPDATE onlyonce_inbox SET attempts = attempts + ?2, failures = ?3 WHERE id = ?1";

/// `?1` the row, `?2` to `?4` the copy.
pub(super) const PARK_COPY: &str =
    "UPDATE onlyonce_inbox SET copy_payload = ?2, copy_payload_hash = ?3, copy_headers = ?4 WHERE id = ?1";

/// `?1` the row, `?2` state, `?3` reason, `?4` delay.
pub(super) const PARK_MOVE: &str = concat!(
    "
UPDATE onlyonce_inbox
   SET state = ?2, reason = ?3, run_at = ",
    now!(),
    " + ?4, dead_at = CASE WHEN ?2 = 'dead' THEN ",
    now!(),
    " ELSE dead_at END
 WHERE id = ?1"
);

/// `?13` whether to look for a claim: in the caller's own transaction there may be one, of a handler
/// that enqueues the very event that it handles.
pub(super) const ENQUEUE: &str = concat!(
    "
INSERT INTO onlyonce_inbox (event_key, consumer, source, event_id, event_type, ordering_key, payload,
       payload_hash, headers, event_time_ms, origin, state, run_at)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, 'ready', ",
    now!(),
    " + ?12
 WHERE NOT (?13 AND EXISTS (SELECT 1 FROM onlyonce_processed_events p WHERE p.event_key = ?1))
    ON CONFLICT (event_key) WHERE state IN ",
    unfinished!(),
    " DO NOTHING"
);

/// Rows whose lease ran out are due as well: whoever had them died or lost the database. (`+ 0`, because
/// SQLite searches an index on an expression only for a value that has no type of its own.)
pub(super) const DUE: &str = concat!(
    "
SELECT id, attempts, source, event_id, event_type, ordering_key, payload, headers, event_time_ms, origin,
       leased_until IS NOT NULL AS ran_out
  FROM onlyonce_inbox
 WHERE consumer = ?1 AND state IN ('ready', 'running') AND COALESCE(leased_until, run_at) <= ",
    now!(),
    " + 0
 ORDER BY COALESCE(leased_until, run_at)
 LIMIT ?2"
);

pub(super) const LEASE: &str = concat!(
    "UPDATE onlyonce_inbox SET state = 'running', lease_token = ?2, leased_until = ",
    now!(),
    " + ?3 WHERE id = ?1"
);

pub(super) const RENEW: &str = concat!(
    "UPDATE onlyonce_inbox SET leased_until = ",
    now!(),
    " + ?2 WHERE ",
    leased!(),
    " RETURNING id"
);

pub(super) const RELEASE: &str = concat!(
    "UPDATE onlyonce_inbox SET state = 'ready', lease_token = NULL, leased_until = NULL, run_at = ",
    now!(),
    " + ?2 WHERE ",
    leased!()
);

/// Fenced: no row if the lease is another's by now.
pub(super) const FAIL_FIND: &str =
    "SELECT failures FROM onlyonce_inbox WHERE id = ?1 AND lease_token = ?2 AND state = 'running'";

/// `?1` the row, `?2` state, `?3` reason, `?4` delay, `?5` attempts to add, `?6` all failures.
pub(super) const FAIL: &str = concat!(
    "
UPDATE onlyonce_inbox
   SET state = ?2, reason = ?3, run_at = ",
    now!(),
    " + ?4, attempts = attempts + ?5, failures = ?6, lease_token = NULL, leased_until = NULL,
       dead_at = CASE WHEN ?2 = 'dead' THEN ",
    now!(),
    " ELSE dead_at END
 WHERE id = ?1"
);

pub(super) const CLOSE_DELETE: &str = "
DELETE FROM onlyonce_inbox WHERE id = ?1 AND lease_token = ?2 AND state = 'running' AND dead_at IS NULL";

pub(super) const CLOSE_FINISH: &str = "
UPDATE onlyonce_inbox SET state = 'replayed', lease_token = NULL, leased_until = NULL
 WHERE id = ?1 AND lease_token = ?2 AND state = 'running' AND dead_at IS NOT NULL";

pub(super) const BACKLOG: &str = concat!(
    "
SELECT count(*) FILTER (WHERE COALESCE(leased_until, run_at) <= t OR state = 'running'),
       count(*) FILTER (WHERE state = 'ready' AND run_at > t),
       (SELECT count(*) FROM onlyonce_inbox WHERE consumer = ?1 AND state = 'dead'),
       COALESCE(t - min(run_at) FILTER (WHERE run_at <= t), 0)
  FROM onlyonce_inbox, (SELECT ",
    now!(),
    " AS t)
 WHERE consumer = ?1 AND state IN ('ready', 'running')"
);

/// `?1` consumer, `?2` window, `?3` limit, `?4` where the last batch ended.
pub(super) const SEEN: &str = concat!(
    "INSERT INTO onlyonce_consumers (name, instance, version) VALUES (?, ?, ?) ",
    "ON CONFLICT (name, instance) DO UPDATE SET seen_at = excluded.seen_at, version = excluded.version",
);

pub(super) const FORGET: &str = "DELETE FROM onlyonce_consumers WHERE seen_at < CAST((unixepoch('subsec') - 7 * 86400) * 1000000 AS INTEGER)";

pub(super) const UNREAD: &str = concat!(
    "SELECT i.consumer, count(*) FROM onlyonce_inbox i ",
    "WHERE i.state IN ('ready', 'running', 'dead') AND i.consumer <> ? ",
    "AND NOT EXISTS (SELECT 1 FROM onlyonce_consumers c WHERE c.name = i.consumer ",
    "AND c.seen_at > CAST((unixepoch('subsec') - 300) * 1000000 AS INTEGER)) ",
    "GROUP BY i.consumer ORDER BY i.consumer",
);

pub(super) const PURGE: &str = concat!(
    "
DELETE FROM onlyonce_processed_events
 WHERE event_key IN (
       SELECT event_key FROM onlyonce_processed_events
        WHERE consumer = ?1 AND kind = 'event' AND processed_at < ",
    now!(),
    " - ?2 AND processed_at >= ?4
        ORDER BY processed_at
        LIMIT ?3)
RETURNING processed_at"
);

pub(super) const PURGE_LAG: &str = concat!(
    "SELECT COALESCE(max(",
    now!(),
    " - min(processed_at) - ?2, 0), 0) FROM onlyonce_processed_events WHERE consumer = ?1 AND kind = 'event'"
);

/// `?1` relay, `?2` owner, `?3` lease.
pub(super) const ALIVE: &str = concat!(
    "
INSERT INTO onlyonce_outbox_relays (relay, owner, alive_until) VALUES (?1, ?2, ",
    now!(),
    " + ?3)
    ON CONFLICT (relay, owner) DO UPDATE SET alive_until = excluded.alive_until"
);

pub(super) const FORGET_DEAD: &str = concat!(
    "DELETE FROM onlyonce_outbox_relays WHERE relay = ?1 AND alive_until < ",
    now!()
);

pub(super) const MAKE_LANES: &str = "
WITH RECURSIVE lanes (lane) AS (SELECT 0 UNION ALL SELECT lane + 1 FROM lanes WHERE lane < ?2 - 1)
INSERT INTO onlyonce_outbox_lanes (relay, lane) SELECT ?1, lane FROM lanes WHERE true
    ON CONFLICT (relay, lane) DO NOTHING";

/// `?1` relay, `?2` owner, `?3` lease, `?4` all lanes. What is above the share is nobody's for a third of the
/// lease.
pub(super) const RENEW_LANES: &str = concat!(
    "
WITH mine AS MATERIALIZED (
       SELECT lane, row_number() OVER (ORDER BY lane) <= (
              SELECT (?4 + count(*) - 1) / count(*) FROM onlyonce_outbox_relays WHERE relay = ?1) AS kept
         FROM onlyonce_outbox_lanes
        WHERE relay = ?1 AND owner = ?2)
UPDATE onlyonce_outbox_lanes
   SET owner = CASE WHEN mine.kept THEN ?2 END,
       leased_until = ",
    now!(),
    " + CASE WHEN mine.kept THEN ?3 ELSE ?3 / 3 END
  FROM mine
 WHERE relay = ?1 AND onlyonce_outbox_lanes.lane = mine.lane"
);

/// The same arguments.
pub(super) const TAKE_LANES: &str = concat!(
    "
UPDATE onlyonce_outbox_lanes
   SET owner = ?2, fence = fence + 1, leased_until = ",
    now!(),
    " + ?3
 WHERE relay = ?1 AND lane IN (
       SELECT lane FROM onlyonce_outbox_lanes
        WHERE relay = ?1 AND owner IS NOT ?2 AND leased_until < ",
    now!(),
    "
        ORDER BY lane
        LIMIT max((SELECT (?4 + count(*) - 1) / count(*) FROM onlyonce_outbox_relays WHERE relay = ?1)
                  - (SELECT count(*) FROM onlyonce_outbox_lanes WHERE relay = ?1 AND owner = ?2), 0))"
);

pub(super) const HELD_LANES: &str =
    "SELECT lane, fence FROM onlyonce_outbox_lanes WHERE relay = ?1 AND owner = ?2 ORDER BY lane";

pub(super) const GIVE_UP_LANES: &str = "
UPDATE onlyonce_outbox_lanes SET owner = NULL, leased_until = 0 WHERE relay = ?1 AND owner = ?2;
DELETE FROM onlyonce_outbox_relays WHERE relay = ?1 AND owner = ?2";

/// `?1` relay, `?2` lanes, `?3` rows in hand, `?4` paused destinations, `?5` publishers that are down,
/// `?6` whether to overtake, `?7` rows of each lane, `?8` bytes; `?2` to `?5` are JSON arrays.
///
/// Of each lane the first rows, by its part of the index `outbox_due`. What may stand in a row's way
/// is looked up by its key in `outbox_waiting`, in the words of that index.
pub(super) const DUE_OUTGOING: &str = concat!(
    "
WITH first AS MATERIALIZED (
       SELECT id, sum(size) OVER (ORDER BY id) - size AS before FROM (
              SELECT o.id, COALESCE(length(o.payload), 0) + length(o.headers) AS size
                FROM json_each(?2) l
               CROSS JOIN onlyonce_outbox o ON o.id IN (
                     SELECT i.id FROM onlyonce_outbox i
                      WHERE i.relay = ?1 AND i.lane = l.value AND i.sent_at IS NULL AND i.parked_at IS NULL
                        AND (i.next_attempt_at IS NULL OR i.next_attempt_at <= ",
    now!(),
    ")
                        AND (i.send_at IS NULL OR i.send_at <= ",
    now!(),
    ")
                        AND i.id NOT IN (SELECT value FROM json_each(?3))
                        AND i.destination NOT IN (SELECT value FROM json_each(?4))
                        AND substr(i.destination, 1, instr(i.destination, ':') - 1)
                            NOT IN (SELECT value FROM json_each(?5))
                        AND (?6 OR NOT EXISTS (
                            SELECT 1 FROM onlyonce_outbox w
                             WHERE w.key_hash = i.key_hash AND w.id < i.id AND w.relay = i.relay AND w.sent_at IS NULL
                               AND (w.parked_at IS NOT NULL OR w.next_attempt_at IS NOT NULL OR w.send_at IS NOT NULL)
                               AND (w.parked_at IS NOT NULL OR w.next_attempt_at > ",
    now!(),
    " OR w.send_at > ",
    now!(),
    ")))
                      ORDER BY i.id
                      LIMIT ?7)))
SELECT o.id, o.lane, o.key_hash, o.destination, o.attempts, o.event_id, o.source, o.event_type, o.ordering_key,
       o.payload, o.content_type, o.headers, o.attributes, o.mode, o.traceparent, o.replays, o.created_at
  FROM first
  JOIN onlyonce_outbox o ON o.id = first.id
 WHERE first.before < ?8
 ORDER BY o.id"
);

/// `?1` rows, a JSON array.
pub(super) const DELETE_SENT: &str =
    "DELETE FROM onlyonce_outbox WHERE id IN (SELECT value FROM json_each(?1))";

/// A row may have been parked by another instance before the broker's answer came.
pub(super) const KEEP_SENT: &str = concat!(
    "UPDATE onlyonce_outbox SET parked_at = NULL, next_attempt_at = NULL, sent_at = ",
    now!(),
    " WHERE id IN (SELECT value FROM json_each(?1)) AND sent_at IS NULL"
);

/// `?1` row, `?2` lane, `?3` fence, `?4` error, `?5` delay (NULL: park).
pub(super) const MARK_REFUSED: &str = concat!(
    "
UPDATE onlyonce_outbox
   SET attempts = attempts + 1, last_error = ?4, next_attempt_at = ",
    now!(),
    " + ?5, parked_at = CASE WHEN ?5 IS NULL THEN ",
    now!(),
    " END
 WHERE id = ?1 AND lane = ?2 AND sent_at IS NULL AND parked_at IS NULL
   AND EXISTS (SELECT 1 FROM onlyonce_outbox_lanes l
                WHERE l.relay = onlyonce_outbox.relay AND l.lane = ?2 AND l.fence = ?3)"
);

pub(super) const OUTGOING: &str = concat!(
    "
SELECT count(*),
       t - min(max(created_at, COALESCE(send_at, 0))) FILTER (
           WHERE COALESCE(next_attempt_at <= t, true) AND COALESCE(send_at <= t, true)),
       (SELECT count(*) FROM onlyonce_outbox WHERE relay = ?1 AND parked_at IS NOT NULL)
  FROM onlyonce_outbox, (SELECT ",
    now!(),
    " AS t)
 WHERE relay = ?1 AND sent_at IS NULL AND parked_at IS NULL"
);

pub(super) const PURGE_SENT: &str = concat!(
    "
DELETE FROM onlyonce_outbox
 WHERE id IN (SELECT id FROM onlyonce_outbox
               WHERE relay = ?1 AND sent_at IS NOT NULL AND sent_at < ",
    now!(),
    " - ?2
               ORDER BY sent_at
               LIMIT ?3)"
);

/// Rewrites what is there: a read-only file refuses it, and so does a full disk.
pub(super) const PROBE: &str = "UPDATE onlyonce_schema_version SET max_supported = max_supported";
