use std::sync::Arc;

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

use super::SchemaName;
use crate::event::EventKey;
use crate::store::{ClaimRequest, Claims};

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
const CLAIM: &str = "
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
RETURNING event_key, payload_hash, pg_current_xact_id()::text";

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
             WHEN EXISTS (SELECT 1 FROM {s}.inbox WHERE event_key = {keys} AND state IN {unfinished})
             THEN 'onlyonce: held'
             ELSE '1' END)::int";

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

impl Sql {
    pub(super) fn new(schema: &SchemaName) -> Self {
        let text = |template: &str| {
            template
                .replace("{s}", &schema.quoted())
                .replace("{unfinished}", UNFINISHED)
        };
        let guard = GUARD.replace("{keys}", "ANY ($2)");
        // One key, without an array to build and to take apart.
        let guard_one = GUARD.replace("{keys}", "$2");
        let sql = |template: &str| AssertSqlSafe(Arc::<str>::from(text(template))).into_sql_str();
        Self {
            session: sql(SESSION),
            end_session: sql(END_SESSION),
            claim: sql(CLAIM),
            claim_one: sql(CLAIM_ONE),
            claim_read: sql(CLAIM_READ),
            claim_once: sql(CLAIM_ONCE),
            prepare: text(&format!(
                "PREPARE onlyonce_guard (xid8, uuid[]) AS {guard};
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
        }
    }

    /// One message of two statements. A transaction's number and hexadecimal digits are the only values
    /// that ever stand in SQL itself. Behind a pooler nothing that was prepared is there.
    pub(super) fn guard_and_commit(&self, claims: &Claims, pooler: bool) -> String {
        let xid = claims.mark.as_deref().unwrap_or_default();
        debug_assert!(xid.bytes().all(|byte| byte.is_ascii_digit()));
        // With room for what may follow.
        let mut message = String::with_capacity(512);
        if pooler {
            let guard = self.guard.replace("$1", &format!("'{xid}'::xid8"));
            message.push_str(&guard.replace("$2", &format!("'{}'::uuid[]", array(&claims.keys))));
        } else if let [key] = claims.keys.as_slice() {
            message.extend(["EXECUTE onlyonce_guard_one('", xid, "', '"]);
            push_hex(&mut message, key.as_uuid().as_bytes());
            message.push_str("')");
        } else {
            let keys = array(&claims.keys);
            message.extend(["EXECUTE onlyonce_guard('", xid, "', '", &keys, "')"]);
        }
        message.push_str("; COMMIT");
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
