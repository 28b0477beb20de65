use std::sync::Arc;

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

use super::SchemaName;
use crate::event::EventKey;
use crate::store::{ClaimRequest, Claims, LANES};

/// Every statement of the store, with the schema's name in its place. Built once; the name is a
/// validated and quoted identifier, and nothing else is ever put into SQL.
pub(super) struct Sql {
    pub session: SqlStr,
    pub end_session: SqlStr,
    pub claim: SqlStr,
    pub claim_one: SqlStr,
    pub claim_read: SqlStr,
    pub claim_once: SqlStr,
    /// What a session prepares by name, because it is executed in one message with other statements.
    pub prepare: String,
    guard: String,
    pub finish: SqlStr,
    pub record: SqlStr,
    pub parked: SqlStr,
    pub replay_parked: SqlStr,
    pub discard_parked: SqlStr,
    pub park_claim: SqlStr,
    pub park_insert: SqlStr,
    pub park_unclaim: SqlStr,
    pub enqueue: SqlStr,
    pub lease: SqlStr,
    pub renew: SqlStr,
    pub release: SqlStr,
    pub fail: SqlStr,
    pub close: SqlStr,
    pub backlog: SqlStr,
    pub purge: SqlStr,
    pub purge_lag: SqlStr,
    pub seen: SqlStr,
    pub tell: SqlStr,
    pub hold_lanes: SqlStr,
    pub make_lanes: SqlStr,
    pub give_up_lanes: SqlStr,
    pub due: SqlStr,
    pub delete_sent: SqlStr,
    pub keep_sent: SqlStr,
    pub mark_refused: SqlStr,
    pub outgoing: SqlStr,
    pub purge_sent: SqlStr,
}

/// The function behind the view `pg_stat_activity`, whose joins a new session would plan for milliseconds.
const SESSION: &str = "
SELECT pid, (EXTRACT(EPOCH FROM backend_start) * 1000000)::bigint FROM pg_stat_get_activity(pg_backend_pid())";

/// `$1` pid, `$2` its beginning. Nothing happens to a session that has this pid and is not the one meant.
const END_SESSION: &str = "
SELECT pg_terminate_backend(pid)
  FROM pg_stat_activity
 WHERE pid = $1 AND (EXTRACT(EPOCH FROM backend_start) * 1000000)::bigint = $2";

/// The states in which a row stands for its event.
const UNFINISHED: &str = "('ready', 'running', 'dead')";

/// `$1` keys, `$2` consumer, `$3` sources, `$4` event ids, `$5` payload hashes, `$6` own rows,
/// `$7` own tokens, `$8` outcome, `$9` whether any held row stands in the way that is not the
/// delivery's own, or only one with this very payload: a copy with another payload may run.
/// Answers with one row that names no key if all of them were new, as they nearly always are; else
/// with a row for each that was.
const CLAIM: &str = "
WITH new AS (
       INSERT INTO {s}.processed_events (event_key, kind, consumer, source, event_id, payload_hash, outcome)
       SELECT u.k, 'event', $2, u.source, u.event_id, u.hash, $8
         FROM unnest($1::uuid[], $3::text[], $4::text[], $5::bytea[], $6::bigint[], $7::uuid[])
              AS u (k, source, event_id, hash, own, token)
        WHERE NOT EXISTS (
              SELECT 1 FROM {s}.inbox x
               WHERE x.event_key = u.k AND x.state IN {unfinished}
                 AND ($9 OR x.payload_hash = u.hash OR x.copy_payload_hash = u.hash)
                 AND (x.id IS DISTINCT FROM u.own OR x.lease_token IS DISTINCT FROM u.token))
           ON CONFLICT (event_key) DO NOTHING
    RETURNING event_key, payload_hash),
     whole AS (
       SELECT count(*) = cardinality($1) AS claimed FROM new)
SELECT NULL, NULL, pg_current_xact_id()::text FROM whole WHERE claimed
 UNION ALL
SELECT event_key, payload_hash, pg_current_xact_id()::text FROM new WHERE NOT (SELECT claimed FROM whole)";

/// The same for one event, without arrays to build and to take apart: a third of the claim's cost.
const CLAIM_ONE: &str = "
INSERT INTO {s}.processed_events (event_key, kind, consumer, source, event_id, payload_hash, outcome)
SELECT $1, 'event', $2, $3, $4, $5, $8
 WHERE NOT EXISTS (
       SELECT 1 FROM {s}.inbox x
        WHERE x.event_key = $1 AND x.state IN {unfinished}
          AND ($9 OR x.payload_hash = $5 OR x.copy_payload_hash = $5)
          AND (x.id IS DISTINCT FROM $6 OR x.lease_token IS DISTINCT FROM $7))
    ON CONFLICT (event_key) DO NOTHING
RETURNING pg_current_xact_id()::text";

/// The same for one event that has no row of its own, sent with the commit before it. Texts come as
/// bytes, because they are a message's: digits cannot be anything but a value.
const CLAIM_AHEAD: &str = "
INSERT INTO {s}.processed_events (event_key, kind, consumer, source, event_id, payload_hash, outcome)
SELECT $1, 'event', convert_from($2, 'UTF8'), convert_from($3, 'UTF8'), convert_from($4, 'UTF8'), $5, 'processed'
 WHERE NOT EXISTS (
       SELECT 1 FROM {s}.inbox x WHERE x.event_key = $1 AND x.state IN {unfinished})
    ON CONFLICT (event_key) DO NOTHING
RETURNING pg_current_xact_id()::text";

/// What stands where an insert found its place taken; a fresh snapshot, so it sees who won.
const CLAIM_READ: &str = "
SELECT u.k, u.hash, p.source, p.event_id, p.payload_hash, p.outcome,
       (SELECT x.state FROM {s}.inbox x
         WHERE x.event_key = u.k AND x.state IN {unfinished}
           AND (x.payload_hash = u.hash OR x.copy_payload_hash = u.hash)
           AND (x.id IS DISTINCT FROM u.own OR x.lease_token IS DISTINCT FROM u.token))
  FROM unnest($1::uuid[], $2::bytea[], $3::bigint[], $4::uuid[]) AS u (k, hash, own, token)
  LEFT JOIN {s}.processed_events p ON p.event_key = u.k";

const CLAIM_ONCE: &str = "
INSERT INTO {s}.processed_events (event_key, kind, consumer, source, event_id, payload_hash, outcome)
VALUES ($1, 'once', $2, $3, $4, '', 'processed')
    ON CONFLICT (event_key) DO NOTHING";

/// The last statement before COMMIT, sent with it. `$1` the claims' xid, `$2` their keys or only one. It raises an
/// error unless the transaction is the claims' own and has no held row that is not finished: a word
/// that is no number, and says which. Under READ COMMITTED the snapshot is fresh, so it sees what
/// was held after the claim.
const GUARD: &str = "
SELECT (CASE WHEN pg_current_xact_id_if_assigned() IS DISTINCT FROM $1 THEN 'onlyonce: not ours'
             WHEN {held} THEN 'onlyonce: held'
             ELSE '1' END)::int";

const HELD_ONE: &str = "EXISTS (SELECT 1 FROM {s}.inbox WHERE event_key = $2 AND state IN {unfinished})";

/// Nearly always nothing at all is held. Only where something is are the keys read, of which a text is the
/// dearest part of the guard, and each looked for.
const HELD_ANY: &str = "EXISTS (SELECT 1 FROM {s}.inbox WHERE state IN {unfinished})
              AND EXISTS (SELECT 1 FROM {s}.inbox WHERE event_key = ANY ($2::uuid[]) AND state IN {unfinished})";

/// The words, as they stand in the server's message in any language.
pub(super) const NOT_OURS: &str = "onlyonce: not ours";
pub(super) const HELD: &str = "onlyonce: held";

/// `$1` keys, `$2` the claims' xid, `$3` the final state of rows that were dead once. The xid stands
/// inside the writes as well: in a transaction that is not ours they would commit on their own.
const FINISH: &str = "
WITH deleted AS (
       DELETE FROM {s}.inbox
        WHERE event_key = ANY ($1) AND state IN {unfinished} AND dead_at IS NULL
          AND pg_current_xact_id_if_assigned()::text = $2
    RETURNING 1),
     finished AS (
       UPDATE {s}.inbox SET state = $3, lease_token = NULL, leased_until = NULL
        WHERE event_key = ANY ($1) AND state IN {unfinished} AND dead_at IS NOT NULL
          AND pg_current_xact_id_if_assigned()::text = $2
    RETURNING 1)
SELECT (SELECT count(*) FROM deleted) + (SELECT count(*) FROM finished)";

/// `$1` to `$16` columns, `$17` the claims' xid: in a transaction that is not theirs it raises the guard's
/// error. Without claims it is NULL. In the order of the arrays, so that ids ascend with it.
const RECORD: &str = "
INSERT INTO {s}.outbox (relay, event_id, source, destination, ordering_key, key_hash, lane, event_type, payload,
       content_type, headers, attributes, mode, traceparent, send_at)
SELECT u.relay, u.event_id, u.source, u.destination, u.ordering_key, u.key_hash, u.lane, u.event_type, u.payload,
       u.content_type, u.headers, u.attributes, u.mode, u.traceparent,
       GREATEST('epoch'::timestamptz + u.send_at * interval '1 microsecond', now() + u.delay * interval '1 microsecond')
  FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bytea[], $7::smallint[], $8::text[],
              $9::bytea[], $10::text[], $11::bytea[], $12::bytea[], $13::text[], $14::text[], $15::bigint[],
              $16::bigint[])
       WITH ORDINALITY
       AS u (relay, event_id, source, destination, ordering_key, key_hash, lane, event_type, payload, content_type,
             headers, attributes, mode, traceparent, send_at, delay, n)
 WHERE (CASE WHEN $17::text IS NULL OR pg_current_xact_id_if_assigned()::text = $17 THEN 'true'
             ELSE 'onlyonce: not ours' END)::boolean
 ORDER BY u.n";

const PARKED: &str = "
SELECT id, event_id, event_type, destination, ordering_key, attempts, COALESCE(last_error, ''),
       (EXTRACT(EPOCH FROM parked_at) * 1000000)::bigint
  FROM {s}.outbox
 WHERE relay = $1 AND parked_at IS NOT NULL AND id > $2
 ORDER BY id
 LIMIT $3";

const REPLAY_PARKED: &str = "
UPDATE {s}.outbox SET parked_at = NULL, next_attempt_at = NULL, attempts = 0, replays = replays + 1
 WHERE relay = $1 AND id = ANY ($2) AND parked_at IS NOT NULL
RETURNING id";

const DISCARD_PARKED: &str = "
DELETE FROM {s}.outbox
 WHERE relay = $1 AND id = ANY ($2) AND parked_at IS NOT NULL
RETURNING id";

const PARK_CLAIM: &str = "
INSERT INTO {s}.processed_events (event_key, kind, consumer, source, event_id, payload_hash, outcome)
VALUES ($1, 'event', $2, $3, $4, $5, 'processed')
    ON CONFLICT (event_key) DO NOTHING";

const PARK_UNCLAIM: &str = "DELETE FROM {s}.processed_events WHERE event_key = $1";

/// On a row that is already there, attempts add up and failures append. Failures that it holds
/// already are those of a parking whose commit was in doubt: they count once. Another payload is kept
/// as the row's copy and changes neither its state nor its payload.
const PARK_INSERT: &str = "
INSERT INTO {s}.inbox AS i (event_key, consumer, source, event_id, event_type, ordering_key, payload, payload_hash,
       headers, event_time_ms, origin, state, reason, run_at, attempts, failures, dead_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, now() + $14::bigint * interval '1 millisecond',
       $15, $16::jsonb, CASE WHEN $12 = 'dead' THEN now() END)
    ON CONFLICT (event_key) WHERE state IN {unfinished} DO UPDATE SET
       attempts = i.attempts + CASE WHEN i.failures @> excluded.failures THEN 0 ELSE excluded.attempts END,
       failures = jsonb_path_query_array(
           CASE WHEN i.failures @> excluded.failures THEN i.failures ELSE i.failures || excluded.failures END,
           '$[last-19 to last]'),
       copy_payload = CASE WHEN i.payload_hash = excluded.payload_hash THEN i.copy_payload ELSE excluded.payload END,
       copy_payload_hash = CASE WHEN i.payload_hash = excluded.payload_hash THEN i.copy_payload_hash
                                ELSE excluded.payload_hash END,
       copy_headers = CASE WHEN i.payload_hash = excluded.payload_hash THEN i.copy_headers ELSE excluded.headers END,
       state = CASE WHEN i.state = 'ready' AND i.payload_hash = excluded.payload_hash THEN excluded.state
                    ELSE i.state END,
       reason = CASE WHEN i.state = 'ready' AND i.payload_hash = excluded.payload_hash THEN excluded.reason
                     ELSE i.reason END,
       dead_at = CASE WHEN i.state = 'ready' AND i.payload_hash = excluded.payload_hash
                      THEN COALESCE(excluded.dead_at, i.dead_at) ELSE i.dead_at END,
       run_at = CASE WHEN i.state = 'ready' AND i.payload_hash = excluded.payload_hash THEN excluded.run_at
                     ELSE i.run_at END";

/// `$13` whether to look for a claim: in the caller's own transaction there may be one, of a handler
/// that enqueues the very event that it handles.
const ENQUEUE: &str = "
INSERT INTO {s}.inbox (event_key, consumer, source, event_id, event_type, ordering_key, payload, payload_hash,
       headers, event_time_ms, origin, state, run_at)
SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, 'ready', now() + $12::bigint * interval '1 millisecond'
 WHERE NOT ($13 AND EXISTS (SELECT 1 FROM {s}.processed_events p WHERE p.event_key = $1))
    ON CONFLICT (event_key) WHERE state IN {unfinished} DO NOTHING";

/// Rows whose lease ran out are due as well: whoever had them died or lost the database.
const LEASE: &str = "
WITH due AS (
       SELECT id, leased_until IS NOT NULL AS ran_out
         FROM {s}.inbox
        WHERE consumer = $1 AND state IN ('ready', 'running') AND COALESCE(leased_until, run_at) <= now()
        ORDER BY COALESCE(leased_until, run_at)
        LIMIT $2
          FOR UPDATE SKIP LOCKED)
UPDATE {s}.inbox i
   SET state = 'running', lease_token = $3, leased_until = now() + $4::bigint * interval '1 millisecond'
  FROM due
 WHERE i.id = due.id
RETURNING i.id, i.attempts, i.source, i.event_id, i.event_type, i.ordering_key, i.payload, i.headers,
          i.event_time_ms, i.origin, due.ran_out";

const RENEW: &str = "
UPDATE {s}.inbox i SET leased_until = now() + $3::bigint * interval '1 millisecond'
  FROM unnest($1::bigint[], $2::uuid[]) AS u (id, token)
 WHERE i.id = u.id AND i.lease_token = u.token AND i.state = 'running'
RETURNING i.id";

const RELEASE: &str = "
UPDATE {s}.inbox i
   SET state = 'ready', lease_token = NULL, leased_until = NULL, run_at = now() + $3::bigint * interval '1 millisecond'
  FROM unnest($1::bigint[], $2::uuid[]) AS u (id, token)
 WHERE i.id = u.id AND i.lease_token = u.token AND i.state = 'running'";

const FAIL: &str = "
UPDATE {s}.inbox
   SET state = $3, reason = $4, run_at = now() + $5::bigint * interval '1 millisecond', attempts = attempts + $6,
       failures = jsonb_path_query_array(failures || $7::jsonb, '$[last-19 to last]'),
       lease_token = NULL, leased_until = NULL,
       dead_at = CASE WHEN $3 = 'dead' THEN now() ELSE dead_at END
 WHERE id = $1 AND lease_token = $2 AND state = 'running'";

const CLOSE: &str = "
WITH deleted AS (
       DELETE FROM {s}.inbox WHERE id = $1 AND lease_token = $2 AND state = 'running' AND dead_at IS NULL RETURNING 1),
     finished AS (
       UPDATE {s}.inbox SET state = 'replayed', lease_token = NULL, leased_until = NULL
        WHERE id = $1 AND lease_token = $2 AND state = 'running' AND dead_at IS NOT NULL RETURNING 1)
SELECT (SELECT count(*) FROM deleted) + (SELECT count(*) FROM finished)";

const BACKLOG: &str = "
SELECT count(*) FILTER (WHERE state <> 'dead' AND COALESCE(leased_until, run_at) <= now() OR state = 'running'),
       count(*) FILTER (WHERE state = 'ready' AND run_at > now()),
       count(*) FILTER (WHERE state = 'dead'),
       COALESCE(EXTRACT(EPOCH FROM now() - min(run_at) FILTER (WHERE state <> 'dead' AND run_at <= now())) * 1000, 0)::bigint
  FROM {s}.inbox
 WHERE consumer = $1 AND state IN {unfinished}";

/// `$4` is where the last batch ended: the pages before it hold only dead rows by now, and a scan
/// that began at the start of the index would read them all again.
const PURGE: &str = "
WITH old AS (
       SELECT event_key, processed_at
         FROM {s}.processed_events
        WHERE consumer = $1 AND kind = 'event'
          AND processed_at < now() - $2::bigint * interval '1 millisecond'
          AND processed_at >= 'epoch'::timestamptz + $4::bigint * interval '1 microsecond'
        ORDER BY processed_at
        LIMIT $3
          FOR UPDATE SKIP LOCKED),
     gone AS (
       DELETE FROM {s}.processed_events p USING old WHERE p.event_key = old.event_key RETURNING old.processed_at)
SELECT count(*), (EXTRACT(EPOCH FROM max(processed_at)) * 1000000)::bigint FROM gone";

/// From where the purge has come to (`$3`): what lies before is gone, and looking there again would
/// read all its dead entries.
const PURGE_LAG: &str = "
SELECT COALESCE(GREATEST(EXTRACT(EPOCH FROM now() - min(processed_at)) * 1000 - $2, 0), 0)::bigint
  FROM {s}.processed_events
 WHERE consumer = $1 AND kind = 'event'
   AND processed_at >= 'epoch'::timestamptz + $3::bigint * interval '1 microsecond'";

/// `$1` consumer, `$2` instance, `$3` version.
const SEEN: &str = "
WITH me AS (
       INSERT INTO {s}.consumers (name, instance, version) VALUES ($1, $2, $3)
           ON CONFLICT (name, instance) DO UPDATE SET seen_at = now(), version = excluded.version),
     gone AS (
       DELETE FROM {s}.consumers WHERE seen_at < now() - interval '7 days')
SELECT i.consumer, count(*)
  FROM {s}.inbox i
 WHERE i.state IN {unfinished} AND i.consumer <> $1
   AND NOT EXISTS (SELECT 1 FROM {s}.consumers c
                    WHERE c.name = i.consumer AND c.seen_at > now() - interval '5 minutes')
 GROUP BY i.consumer
 ORDER BY i.consumer";

/// The channel on which relays are told of outgoing events, of whatever schema.
pub(super) const CHANNEL: &str = "onlyonce_outbox";

/// `$1` channel, `$2` for whom.
const TELL: &str = "SELECT pg_notify($1, $2)";

/// `$1` relay, `$2` owner, `$3` lease. Instances that start at once may each take what is free; at
/// their next renewal they have seen each other. What is given up is nobody's for a third of the lease.
/// Dead instances are forgotten late, so that one that was only slow is never waited for by its neighbours.
const HOLD_LANES: &str = "
WITH me AS (
       INSERT INTO {s}.outbox_relays (relay, owner, alive_until)
       VALUES ($1, $2, now() + $3::bigint * interval '1 millisecond')
           ON CONFLICT (relay, owner) DO UPDATE SET alive_until = excluded.alive_until),
     dead AS (
       DELETE FROM {s}.outbox_relays WHERE relay = $1 AND owner <> $2 AND alive_until < now() - interval '1 minute'),
     share AS (
       SELECT ceil({lanes} / (1 + count(*))::numeric)::bigint AS lanes
         FROM {s}.outbox_relays
        WHERE relay = $1 AND owner <> $2 AND alive_until >= now()),
     mine AS (
       SELECT lane, row_number() OVER (ORDER BY lane) <= (SELECT lanes FROM share) AS kept
         FROM {s}.outbox_lanes
        WHERE relay = $1 AND owner = $2),
     free AS (
       SELECT lane
         FROM {s}.outbox_lanes
        WHERE relay = $1 AND owner IS DISTINCT FROM $2 AND leased_until < now()
        ORDER BY lane
        LIMIT GREATEST((SELECT lanes FROM share) - (SELECT count(*) FROM mine), 0)
          FOR UPDATE SKIP LOCKED),
     renewed AS (
       UPDATE {s}.outbox_lanes l
          SET owner = CASE WHEN mine.kept THEN $2 END,
              leased_until = now() + CASE WHEN mine.kept THEN $3::bigint ELSE $3::bigint / 3 END * interval '1 millisecond'
         FROM mine
        WHERE l.relay = $1 AND l.lane = mine.lane AND l.owner = $2
    RETURNING l.lane, l.fence, mine.kept),
     taken AS (
       UPDATE {s}.outbox_lanes l
          SET owner = $2, fence = l.fence + 1, leased_until = now() + $3::bigint * interval '1 millisecond'
         FROM free
        WHERE l.relay = $1 AND l.lane = free.lane
    RETURNING l.lane, l.fence)
SELECT lane, fence FROM renewed WHERE kept UNION ALL SELECT lane, fence FROM taken ORDER BY lane";

const MAKE_LANES: &str = "
INSERT INTO {s}.outbox_lanes (relay, lane) SELECT $1, generate_series(0, {lanes} - 1)
    ON CONFLICT (relay, lane) DO NOTHING";

const GIVE_UP_LANES: &str = "
WITH gone AS (
       DELETE FROM {s}.outbox_relays WHERE relay = $1 AND owner = $2)
UPDATE {s}.outbox_lanes SET owner = NULL, leased_until = '-infinity' WHERE relay = $1 AND owner = $2";

/// `$1` relay, `$2` lanes, `$3` rows in hand, `$4` paused destinations, `$5` publishers that are down,
/// `$6` whether to overtake, `$7` rows of each lane, `$8` bytes.
///
/// Of each lane the first rows, by its part of the index `outbox_due`: sorted by id over all lanes at
/// once, a long backlog would be read whole each time. What may stand in a row's way is looked up by
/// its key in `outbox_waiting`, in the words of that index. The planner cannot know how many rows the conditions
/// leave, and with a bad guess would rather sort a whole lane or read all that waits: OFFSET makes it look
/// up row by row, and a LIMIT that it cannot see through makes it expect to read a part of the lane. What is in
/// hand stands before what is asked for, thousands of rows of it: a subquery is hashed, an array is gone through
/// for each of them.
const DUE: &str = "
WITH first AS (
       SELECT o.id, sum(o.size) OVER (ORDER BY o.id) - o.size AS before
         FROM unnest($2::smallint[]) AS l (lane)
        CROSS JOIN LATERAL (
              SELECT o.id, o.size
                FROM (SELECT i.id, i.relay, i.destination, i.key_hash, i.next_attempt_at, i.send_at,
                             COALESCE(octet_length(i.payload), 0) + octet_length(i.headers) AS size
                        FROM {s}.outbox i
                       WHERE i.relay = $1 AND i.lane = l.lane AND i.sent_at IS NULL AND i.parked_at IS NULL
                       ORDER BY i.id
                       LIMIT (SELECT 9223372036854775807)) o
               WHERE (o.next_attempt_at IS NULL OR o.next_attempt_at <= now())
                 AND (o.send_at IS NULL OR o.send_at <= now())
                 AND o.id NOT IN (SELECT unnest($3::bigint[])) AND o.destination <> ALL ($4::text[])
                 AND split_part(o.destination, ':', 1) <> ALL ($5::text[])
                 AND ($6 OR NOT EXISTS (
                     SELECT 1 FROM {s}.outbox w
                      WHERE w.key_hash = o.key_hash AND w.id < o.id AND w.relay = o.relay AND w.sent_at IS NULL
                        AND (w.parked_at IS NOT NULL OR w.next_attempt_at IS NOT NULL OR w.send_at IS NOT NULL)
                        AND (w.parked_at IS NOT NULL OR w.next_attempt_at > now() OR w.send_at > now())
                     OFFSET 0))
               ORDER BY o.id
               LIMIT $7) o)
SELECT o.id, o.lane, o.key_hash, o.destination, o.attempts, o.event_id, o.source, o.event_type, o.ordering_key,
       o.payload, o.content_type, o.headers, o.attributes, o.mode, o.traceparent, o.replays,
       (EXTRACT(EPOCH FROM o.created_at) * 1000000)::bigint AS created_at
  FROM first
  JOIN {s}.outbox o ON o.id = first.id
 WHERE first.before < $8
 ORDER BY o.id";

const DELETE_SENT: &str = "DELETE FROM {s}.outbox WHERE id = ANY ($1)";

/// A row may have been parked by another instance before the broker's answer came.
const KEEP_SENT: &str = "
UPDATE {s}.outbox SET sent_at = now(), parked_at = NULL, next_attempt_at = NULL WHERE id = ANY ($1) AND sent_at IS NULL";

/// `$1` rows, `$2` lanes, `$3` fences, `$4` errors, `$5` delays (NULL: park). Whoever takes a lane over
/// waits for this, or this finds another fence.
const MARK_REFUSED: &str = "
WITH refused AS (
       SELECT o.id, u.error, u.again
         FROM unnest($1::bigint[], $2::smallint[], $3::bigint[], $4::text[], $5::bigint[])
              AS u (id, lane, fence, error, again)
         JOIN {s}.outbox o ON o.id = u.id AND o.lane = u.lane
         JOIN {s}.outbox_lanes l ON l.relay = o.relay AND l.lane = u.lane AND l.fence = u.fence
          FOR SHARE OF l)
UPDATE {s}.outbox o
   SET attempts = o.attempts + 1, last_error = r.error,
       next_attempt_at = now() + r.again * interval '1 millisecond',
       parked_at = CASE WHEN r.again IS NULL THEN now() END
  FROM refused r
 WHERE o.id = r.id AND o.sent_at IS NULL AND o.parked_at IS NULL
RETURNING o.id";

const OUTGOING: &str = "
SELECT count(*) FILTER (WHERE parked_at IS NULL),
       (EXTRACT(EPOCH FROM now() - min(GREATEST(created_at, send_at)) FILTER (
            WHERE parked_at IS NULL AND COALESCE(next_attempt_at <= now(), true) AND COALESCE(send_at <= now(), true)
        )) * 1000)::bigint,
       (SELECT count(*) FROM {s}.outbox WHERE relay = $1 AND parked_at IS NOT NULL)
  FROM {s}.outbox
 WHERE relay = $1 AND sent_at IS NULL AND parked_at IS NULL";

const PURGE_SENT: &str = "
DELETE FROM {s}.outbox
 WHERE id IN (SELECT id FROM {s}.outbox
               WHERE relay = $1 AND sent_at < now() - $2::bigint * interval '1 millisecond'
               ORDER BY sent_at
               LIMIT $3
                 FOR UPDATE SKIP LOCKED)";

impl Sql {
    pub(super) fn new(schema: &SchemaName) -> Self {
        let text = |template: &str| {
            template
                .replace("{s}", &schema.quoted())
                .replace("{unfinished}", UNFINISHED)
                .replace("{lanes}", &LANES.to_string())
        };
        let guard = GUARD.replace("{held}", HELD_ANY);
        // One key, without an array to build and to take apart.
        let guard_one = GUARD.replace("{held}", HELD_ONE);
        let sql = |template: &str| AssertSqlSafe(Arc::<str>::from(text(template))).into_sql_str();
        Self {
            session: sql(SESSION),
            end_session: sql(END_SESSION),
            claim: sql(CLAIM),
            claim_one: sql(CLAIM_ONE),
            claim_read: sql(CLAIM_READ),
            claim_once: sql(CLAIM_ONCE),
            prepare: text(&format!(
                "PREPARE onlyonce_guard (xid8, text) AS {guard};
                 PREPARE onlyonce_guard_one (xid8, uuid) AS {guard_one};
                 PREPARE onlyonce_claim (uuid, bytea, bytea, bytea, bytea) AS {CLAIM_AHEAD}"
            )),
            guard: text(&guard),
            finish: sql(FINISH),
            record: sql(RECORD),
            parked: sql(PARKED),
            replay_parked: sql(REPLAY_PARKED),
            discard_parked: sql(DISCARD_PARKED),
            park_claim: sql(PARK_CLAIM),
            park_insert: sql(PARK_INSERT),
            park_unclaim: sql(PARK_UNCLAIM),
            enqueue: sql(ENQUEUE),
            lease: sql(LEASE),
            renew: sql(RENEW),
            release: sql(RELEASE),
            fail: sql(FAIL),
            close: sql(CLOSE),
            backlog: sql(BACKLOG),
            purge: sql(PURGE),
            purge_lag: sql(PURGE_LAG),
            seen: sql(SEEN),
            tell: sql(TELL),
            hold_lanes: sql(HOLD_LANES),
            make_lanes: sql(MAKE_LANES),
            give_up_lanes: sql(GIVE_UP_LANES),
            due: sql(DUE),
            delete_sent: sql(DELETE_SENT),
            keep_sent: sql(KEEP_SENT),
            mark_refused: sql(MARK_REFUSED),
            outgoing: sql(OUTGOING),
            purge_sent: sql(PURGE_SENT),
        }
    }

    /// The statement before COMMIT. A transaction's number and hexadecimal digits are the only values
    /// that ever stand in SQL itself. Behind a pooler nothing that was prepared is there.
    pub(super) fn guard(&self, claims: &Claims, pooler: bool) -> String {
        let xid = claims.mark.as_deref().unwrap_or_default();
        debug_assert!(xid.bytes().all(|byte| byte.is_ascii_digit()));
        // With room for what may follow.
        let mut message = String::with_capacity(512);
        if pooler {
            let guard = self.guard.replace("$1", &format!("'{xid}'::xid8"));
            message.push_str(&guard.replace("$2", &format!("'{}'", array(&claims.keys))));
        } else if let [key] = claims.keys.as_slice() {
            message.extend(["EXECUTE onlyonce_guard_one('", xid, "', '"]);
            push_hex(&mut message, key.as_uuid().as_bytes());
            message.push_str("')");
        } else {
            let keys = array(&claims.keys);
            message.extend(["EXECUTE onlyonce_guard('", xid, "', '", &keys, "')"]);
        }
        message
    }
}

/// Keys as the text of an array.
fn array(keys: &[EventKey]) -> String {
    let mut array = String::with_capacity(keys.len() * 33 + 2);
    array.push('{');
    for (index, key) in keys.iter().enumerate() {
        if index > 0 {
            array.push(',');
        }
        push_hex(&mut array, key.as_uuid().as_bytes());
    }
    array.push('}');
    array
}

/// Adds an event's claim to a message, all of it in hexadecimal digits. (`E''` means the same
/// whatever a database makes of a backslash by default.)
pub(super) fn push_claim(message: &mut String, request: &ClaimRequest<'_>) {
    let (key, identity) = (request.key.as_uuid(), request.identity);
    message.push_str("; EXECUTE onlyonce_claim('");
    push_hex(message, key.as_bytes());
    for value in [
        request.consumer.as_bytes(),
        identity.source.as_bytes(),
        identity.id.as_bytes(),
        request.payload_hash.as_bytes(),
    ] {
        message.push_str("', E'\\\\x");
        push_hex(message, value);
    }
    message.push_str("')");
}

fn push_hex(message: &mut String, bytes: &[u8]) {
    message.reserve(2 * bytes.len());
    for byte in bytes {
        for digit in [byte >> 4, byte & 0xf] {
            message.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
        }
    }
}
