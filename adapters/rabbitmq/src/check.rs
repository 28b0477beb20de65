//! What is checked before consuming: the queue's declaration against what this consumer needs.
//!
//! AMQP tells whether a queue exists and no more. The rest is in the management API. What it says is
//! read into [`Facts`], and [`judge`] is a pure function of those.

use std::time::Duration;

use onlyonce::source::{Plan, SourceError};
use serde_json::Value;

use crate::config::Settings;

/// Since RabbitMQ 4.0 a quorum queue without a limit of its own has this one.
const DEFAULT_DELIVERY_LIMIT: i64 = 20;
/// What RabbitMQ takes when nothing is configured. The server's own setting is not in the API.
const DEFAULT_CONSUMER_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// An expiry of an unused queue that is shorter than an outage is a trap.
const SHORT_EXPIRY: Duration = Duration::from_secs(24 * 3600);

/// What the checks found out about the queue for [`Capabilities`](onlyonce::source::Capabilities).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) counts_deliveries: bool,
    pub(crate) native_dead_letters: bool,
}

/// Runs the checks and logs what they found.
///
/// # Errors
///
/// Fatal if the queue cannot serve this consumer, and, with strict checks, if it only should not.
pub(crate) async fn at_start(settings: &Settings, plan: &Plan) -> Result<Known, SourceError> {
    let queue = &settings.queue;
    let facts = match read(settings).await {
        Ok(Some(facts)) => facts,
        Ok(None) => {
            tracing::info!(
                queue = %queue,
                "no management_url: delivery limit, dead-letter exchange, consumer timeout, expiry and single active consumer were not checked"
            );
            return Ok(Known::default());
        }
        Err(error) => {
            tracing::warn!(queue = %queue, %error, "the management API did not answer: the queue's settings were not checked");
            return Ok(Known::default());
        }
    };
    let mut refused = Vec::new();
    for finding in judge(&facts, settings.single_active_consumer, plan) {
        if finding.fatal || settings.strict_checks {
            refused.push(finding.text);
        } else {
            tracing::warn!(queue = %queue, "{}", finding.text);
        }
    }
    if !refused.is_empty() {
        return Err(SourceError::fatal(format_args!(
            "the queue {queue:?} does not suit: {}",
            refused.join("; ")
        )));
    }
    Ok(Known {
        counts_deliveries: facts.kind == Kind::Quorum,
        native_dead_letters: facts.effective_limit().is_some() && facts.dead_letter_exchange.is_some(),
    })
}

#[cfg(feature = "management")]
async fn read(settings: &Settings) -> Result<Option<Facts>, String> {
    let Some(url) = settings.management.clone() else {
        return Ok(None);
    };
    let (vhost, queue, timeout) = (
        settings.access.broker.vhost().to_owned(),
        settings.queue.clone(),
        settings.access.connect_timeout,
    );
    let read = move || {
        let api = crate::management::Api::new(&url, timeout);
        let about_queue = api.get(&["api", "queues", &vhost, &queue])?;
        let overview = api.get(&["api", "overview"])?;
        Ok(Some(Facts::read(&about_queue, &overview)))
    };
    tokio::task::spawn_blocking(read)
        .await
        .unwrap_or_else(|e| Err(e.to_string()))
}

#[cfg(not(feature = "management"))]
async fn read(settings: &Settings) -> Result<Option<Facts>, String> {
    match settings.management {
        None => Ok(None),
        Some(_) => Err("the feature `management` is off".to_owned()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Classic,
    Quorum,
    Stream,
    Other,
}

/// The queue as the management API describes it; arguments win over policies, as in the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Facts {
    kind: Kind,
    version: Option<(u32, u32)>,
    delivery_limit: Option<i64>,
    dead_letter_exchange: Option<String>,
    consumer_timeout: Option<Duration>,
    expires: Option<Duration>,
    single_active_consumer: bool,
    auto_delete: bool,
    exclusive: bool,
}

impl Facts {
    #[cfg_attr(
        not(feature = "management"),
        allow(dead_code, reason = "nothing to read without the API")
    )]
    fn read(queue: &Value, overview: &Value) -> Self {
        let arguments = &queue["arguments"];
        let policy = &queue["effective_policy_definition"];
        let either = |name: &str| match &arguments[format!("x-{name}")] {
            Value::Null => &policy[name],
            argument => argument,
        };
        let milliseconds = |name: &str| either(name).as_u64().map(Duration::from_millis);
        Self {
            kind: match queue["type"]
                .as_str()
                .or_else(|| arguments["x-queue-type"].as_str())
            {
                Some("classic") | None => Kind::Classic,
                Some("quorum") => Kind::Quorum,
                Some("stream") => Kind::Stream,
                Some(_) => Kind::Other,
            },
            version: overview["rabbitmq_version"].as_str().and_then(|text| {
                let mut parts = text.split('.').map(|part| part.parse().ok());
                Some((parts.next()??, parts.next()??))
            }),
            delivery_limit: either("delivery-limit").as_i64(),
            dead_letter_exchange: either("dead-letter-exchange").as_str().map(str::to_owned),
            consumer_timeout: milliseconds("consumer-timeout"),
            expires: milliseconds("expires"),
            single_active_consumer: arguments["x-single-active-consumer"].as_bool().unwrap_or(false),
            auto_delete: queue["auto_delete"].as_bool().unwrap_or(false),
            exclusive: queue["exclusive"].as_bool().unwrap_or(false),
        }
    }

    /// After how many returns the broker itself takes a message away; negative means never.
    fn effective_limit(&self) -> Option<i64> {
        if self.kind != Kind::Quorum {
            return None;
        }
        let default = self
            .version
            .is_some_and(|version| version >= (4, 0))
            .then_some(DEFAULT_DELIVERY_LIMIT);
        self.delivery_limit.or(default).filter(|limit| *limit >= 0)
    }

    /// It takes away what kills its consumers, to where it can be found, and nothing else.
    fn limit_suits(&self, limit: i64, plan: &Plan) -> bool {
        !self.counts_returns() && self.dead_letter_exchange.is_some() && limit >= enough_deaths(plan)
    }

    /// Since 4.3 a `nack` no longer counts towards the limit, only what looks like a crash.
    fn counts_returns(&self) -> bool {
        self.version.is_none_or(|version| version < (4, 3))
    }
}

/// A message whose every attempt takes its consumer down, and a crash that is not its fault.
fn enough_deaths(plan: &Plan) -> i64 {
    i64::from(plan.attempts) + 1
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    fatal: bool,
    text: String,
}

/// What about this queue endangers the consumer, and what to do about it.
fn judge(facts: &Facts, single_active_consumer: bool, plan: &Plan) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut say = |fatal: bool, text: String| findings.push(Finding { fatal, text });
    if facts.kind == Kind::Stream {
        say(
            true,
            "it is a stream, which keeps what was acked and cannot take back what was not (use a quorum or classic queue)"
                .to_owned(),
        );
    }
    if single_active_consumer && !facts.single_active_consumer {
        say(
            true,
            "it has no single active consumer (declare it with x-single-active-consumer = true)".to_owned(),
        );
    }
    if facts.auto_delete {
        // Not only a restart: consuming pauses while the database is away.
        say(
            true,
            "it is auto-delete: the broker deletes it, with all messages, when the last consumer pauses (declare it without)"
                .to_owned(),
        );
    }
    if facts.exclusive {
        say(
            true,
            "it is exclusive to another connection (declare it without)".to_owned(),
        );
    }
    if let Some(expires) = facts.expires.filter(|expires| *expires < SHORT_EXPIRY) {
        say(
            false,
            format!(
                "the broker deletes it, with all messages, after {expires:?} without a consumer (raise or drop `expires`)"
            ),
        );
    }
    let limit = facts.effective_limit();
    if let Some(limit) = limit.filter(|limit| !facts.limit_suits(*limit, plan)) {
        let counted = if facts.counts_returns() {
            "a message that is given back, as when the database is away or this process stops, counts"
        } else {
            "a message whose consumer dies counts"
        };
        let enough = if facts.counts_returns() {
            "a high number".to_owned()
        } else {
            format!("{} or more", enough_deaths(plan))
        };
        let raise = format!("set the delivery limit to -1 where the broker knows that, or to {enough}");
        match &facts.dead_letter_exchange {
            None => say(
                false,
                format!(
                    "after {limit} returns the broker drops a message for good, as there is no dead-letter exchange, and {counted} \
                     (set one, and {raise})"
                ),
            ),
            Some(exchange) => say(
                false,
                format!(
                    "after {limit} returns the broker moves a message to the exchange {exchange:?}, past this consumer's own dead letters, \
                     and {counted} ({raise})"
                ),
            ),
        }
    }
    let (timeout, whose) = match facts.consumer_timeout {
        Some(timeout) => (timeout, "its consumer timeout"),
        None => (DEFAULT_CONSUMER_TIMEOUT, "RabbitMQ's default consumer timeout"),
    };
    if timeout < plan.longest_unsettled {
        say(
            false,
            format!(
                "{whose} is {timeout:?}, but one message may be worked on for {:?}, and then the broker closes the \
                 channel and delivers everything again (raise x-consumer-timeout, or lower the handler's timeout and its immediate retries)",
                plan.longest_unsettled
            ),
        );
    }
    findings
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// With a message that may be worked on for this long.
    fn minutes(minutes: u64) -> Plan {
        let mut plan = Plan::for_window("c", 8);
        plan.longest_unsettled = Duration::from_secs(60 * minutes);
        plan
    }

    fn facts(queue: Value, version: &str) -> Facts {
        Facts::read(&queue, &json!({ "rabbitmq_version": version }))
    }

    fn texts(facts: &Facts) -> Vec<String> {
        judge(facts, false, &minutes(1))
            .into_iter()
            .map(|f| f.text)
            .collect()
    }

    #[test]
    fn a_plain_queue_is_fine() {
        assert_eq!(
            judge(
                &facts(json!({"type": "classic", "arguments": {}}), "3.10.8"),
                false,
                &minutes(1)
            ),
            []
        );
        assert_eq!(
            judge(&facts(json!({"type": "quorum"}), "3.13.7"), false, &minutes(1)),
            [],
            "no default limit before 4.0"
        );
    }

    #[test]
    fn what_cannot_work_is_fatal() {
        for (queue, part) in [
            (json!({"type": "stream"}), "it is a stream"),
            (json!({"auto_delete": true}), "it is auto-delete"),
            (json!({"exclusive": true}), "it is exclusive"),
        ] {
            let findings = judge(&facts(queue, "4.1.0"), false, &minutes(1));
            assert!(
                findings[0].fatal && findings[0].text.contains(part),
                "{findings:?}"
            );
        }
        let plain = facts(json!({}), "4.1.0");
        assert!(
            judge(&plain, true, &minutes(1))[0]
                .text
                .contains("x-single-active-consumer")
        );
        let single = facts(json!({"arguments": {"x-single-active-consumer": true}}), "4.1.0");
        assert_eq!(judge(&single, true, &minutes(1)), []);
    }

    #[test]
    fn a_delivery_limit_is_named_with_what_it_does() {
        let dropped = texts(&facts(json!({"type": "quorum"}), "4.0.2"));
        assert!(
            dropped[0].contains("after 20 returns the broker drops"),
            "{dropped:?}"
        );
        assert!(
            dropped[0].contains("given back"),
            "nacks count before 4.3: {dropped:?}"
        );
        let newer = texts(&facts(json!({"type": "quorum"}), "4.3.0"));
        assert!(newer[0].contains("whose consumer dies"), "{newer:?}");

        let limited =
            json!({"type": "quorum", "arguments": {"x-delivery-limit": 5, "x-dead-letter-exchange": "dlx"}});
        let limited = facts(limited, "4.3.0");
        let mut plan = minutes(1);
        plan.attempts = 4;
        assert_eq!(
            judge(&limited, false, &plan),
            [],
            "only what kills its consumer goes there"
        );
        plan.attempts = 5;
        let few = judge(&limited, false, &plan).remove(0).text;
        assert!(few.contains("or to 6 or more"), "{few}");

        let queue = json!({
            "type": "quorum",
            "arguments": {"x-delivery-limit": 5},
            "effective_policy_definition": {"delivery-limit": 9, "dead-letter-exchange": "dlx"},
        });
        let moved = facts(queue, "3.10.8");
        assert!(
            texts(&moved)[0].contains("after 5 returns the broker moves a message to the exchange \"dlx\"")
        );
        assert_eq!(moved.effective_limit(), Some(5), "arguments win over policies");
        assert_eq!(
            texts(&facts(
                json!({"type": "quorum", "arguments": {"x-delivery-limit": -1}}),
                "4.1.0"
            )),
            [""; 0]
        );
    }

    #[test]
    fn timeouts_and_expiry_are_held_against_the_policy() {
        let short = facts(
            json!({"effective_policy_definition": {"consumer-timeout": 30_000}}),
            "3.13.0",
        );
        assert!(
            texts(&short)[0]
                .contains("its consumer timeout is 30s, but one message may be worked on for 60s")
        );
        let plain = facts(json!({}), "3.13.0");
        assert!(
            judge(&plain, false, &minutes(31))[0]
                .text
                .contains("default consumer timeout is 1800s")
        );
        let expiring = facts(json!({"arguments": {"x-expires": 60_000}}), "3.13.0");
        assert!(texts(&expiring)[0].contains("after 60s without a consumer"));
    }
}
