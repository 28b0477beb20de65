//! What is checked before consuming: the queue's attributes against what this consumer needs.
//!
//! What SQS says is read into [`Facts`], and [`judge`] is a pure function of those.

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_sqs::types::QueueAttributeName;
use onlyonce::source::{Plan, SourceError};
use serde_json::Value;

use crate::config::Settings;
use crate::connect::within;
use crate::settle::LONGEST_HOLD;

/// The longest that a dead-letter queue can keep what it got.
const LONGEST_RETENTION: Duration = Duration::from_secs(14 * DAY);
/// A deploy and an outage of the database use up one receive each of a message that nothing is wrong with.
const GIVEN_BACK: u64 = 2;
const DAY: u64 = 24 * 3600;

/// What the checks found out about the queue.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    /// The queue's attributes may be read.
    pub(crate) attributes: bool,
    pub(crate) native_dead_letters: bool,
    pub(crate) backlog: Option<u64>,
}

/// Runs the checks and logs what they found.
///
/// # Errors
///
/// Fatal if the queue is not there or cannot serve this consumer, and, with strict checks, if it only
/// should not.
pub(crate) async fn at_start(settings: &Settings, plan: &Plan) -> Result<Known, SourceError> {
    let queue = &settings.name;
    let call = settings
        .client
        .get_queue_attributes()
        .queue_url(&settings.url)
        .attribute_names(QueueAttributeName::All)
        .send();
    let facts = match within(settings.call_timeout, call).await {
        Ok(answer) => Facts::read(&answer.attributes.unwrap_or_default()),
        Err(trouble) if trouble.text.starts_with("AccessDenied") && !settings.strict_checks => {
            tracing::warn!(
                queue = %queue,
                "sqs:GetQueueAttributes is not allowed: retention, redrive policy and backlog were not checked"
            );
            return Ok(Known::default());
        }
        Err(trouble) => return Err(trouble.explain(settings, "look at")),
    };
    let mut refused = Vec::new();
    for finding in judge(&facts, &Calls::of(settings), plan) {
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
        attributes: true,
        native_dead_letters: facts.most_receives.is_some(),
        backlog: facts.backlog,
    })
}

/// The queue as SQS describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Facts {
    retention: Option<Duration>,
    /// After how many receives SQS itself moves a message to a dead-letter queue.
    most_receives: Option<u64>,
    backlog: Option<u64>,
}

impl Facts {
    fn read(attributes: &HashMap<QueueAttributeName, String>) -> Self {
        let number = |name: &QueueAttributeName| attributes.get(name)?.parse::<u64>().ok();
        let redrive: Value = attributes
            .get(&QueueAttributeName::RedrivePolicy)
            .and_then(|policy| serde_json::from_str(policy).ok())
            .unwrap_or_default();
        // A number or a text, depending on who wrote the policy.
        let most_receives = &redrive["maxReceiveCount"];
        Self {
            retention: number(&QueueAttributeName::MessageRetentionPeriod).map(Duration::from_secs),
            most_receives: most_receives
                .as_u64()
                .or_else(|| most_receives.as_str()?.parse().ok()),
            backlog: number(&QueueAttributeName::ApproximateNumberOfMessages),
        }
    }
}

/// What was set for the calls that keep a message.
#[derive(Debug, Clone, Copy)]
struct Calls {
    visibility: Duration,
    limit: Duration,
}

impl Calls {
    fn of(settings: &Settings) -> Self {
        Self {
            visibility: settings.visibility_timeout,
            limit: settings.call_timeout,
        }
    }

    /// The first renewal comes after a third: then there must be time for one that is not answered,
    /// and for another.
    fn shortest_visibility(&self) -> Duration {
        self.limit * 3
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    fatal: bool,
    text: String,
}

impl Finding {
    fn fatal(text: String) -> Self {
        Self { fatal: true, text }
    }

    fn warning(text: String) -> Self {
        Self { fatal: false, text }
    }
}

/// What about this queue endangers the consumer, and what to do about it.
fn judge(facts: &Facts, calls: &Calls, plan: &Plan) -> Vec<Finding> {
    [hold(calls, plan), memory(facts, plan), receives(facts, plan)]
        .into_iter()
        .flatten()
        .collect()
}

/// How long a message can be kept, against how long an event can take.
fn hold(calls: &Calls, plan: &Plan) -> Option<Finding> {
    let longest = plan.longest_unsettled;
    if longest >= LONGEST_HOLD {
        return Some(Finding::fatal(format!(
            "an event can take {longest:?} here with all its attempts in place, and SQS lets nobody keep a message for more than 12 h (shorten the handler's time limit)"
        )));
    }
    let (visibility, enough) = (calls.visibility, calls.shortest_visibility());
    (visibility < longest && visibility < enough).then(|| {
        Finding::warning(format!(
            "an event can take {longest:?} here, and with a visibility_timeout of {visibility:?} a single renewal without an answer for the call_timeout of {:?} gives it to somebody else meanwhile (set the visibility_timeout to {enough:?} or more, or shorten the call_timeout)",
            calls.limit
        ))
    })
}

/// How old a message can be, against how long identities are remembered.
fn memory(facts: &Facts, plan: &Plan) -> Option<Finding> {
    let (window, retention) = (plan.dedup_window?, facts.retention?);
    let oldest = retention + LONGEST_RETENTION;
    if window < retention {
        Some(Finding::fatal(format!(
            "it keeps messages for {} days and identities are remembered for {} (remember them for longer, or set a shorter MessageRetentionPeriod)",
            days(retention),
            days(window)
        )))
    } else if facts.most_receives.is_some() && window < oldest {
        Some(Finding::warning(format!(
            "identities are remembered for {} days; what comes back from its dead-letter queue can be up to {} days old",
            days(window),
            days(oldest)
        )))
    } else {
        None
    }
}

/// After how many receives SQS takes a message away, against how many this consumer can need.
fn receives(facts: &Facts, plan: &Plan) -> Option<Finding> {
    let Some(most) = facts.most_receives else {
        return Some(Finding::warning(
            "it has no dead-letter queue: a message that takes the process down with it, or cannot be recorded in the database, comes again until its retention is over (set a RedrivePolicy)"
                .to_owned(),
        ));
    };
    let enough = u64::from(plan.attempts) + GIVEN_BACK;
    (most < enough).then(|| {
        Finding::warning(format!(
            "its RedrivePolicy moves a message away after {most} receives; an event has {} attempts here, each of which can end with the process, and a deploy or an outage gives back what is in hand (set maxReceiveCount to {enough} or more)",
            plan.attempts
        ))
    })
}

fn days(time: Duration) -> u64 {
    time.as_secs() / DAY
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            retention: Some(Duration::from_secs(4 * DAY)),
            most_receives: Some(10),
            backlog: None,
        }
    }

    fn plan(window: Option<u64>) -> Plan {
        let mut plan = Plan::for_window("c", 8);
        plan.dedup_window = window.map(|days| Duration::from_secs(days * DAY));
        plan
    }

    fn calls(visibility: u64, limit: u64) -> Calls {
        let [visibility, limit] = [visibility, limit].map(Duration::from_secs);
        Calls { visibility, limit }
    }

    fn said(facts: &Facts, plan: &Plan) -> Vec<(bool, String)> {
        judge(facts, &calls(30, 5), plan)
            .into_iter()
            .map(|f| (f.fatal, f.text))
            .collect()
    }

    #[test]
    fn a_queue_that_suits_is_not_spoken_of() {
        assert_eq!(said(&facts(), &plan(Some(30))), []);
        assert_eq!(said(&facts(), &plan(None)), [], "repeats are accepted");
    }

    #[test]
    fn what_endangers_deduplication_is_refused_and_the_rest_is_said() {
        let mut long = plan(Some(3));
        long.longest_unsettled = Duration::from_secs(13 * 3600);
        let findings = said(&facts(), &long);
        assert_eq!(findings.iter().map(|f| f.0).collect::<Vec<_>>(), [true, true]);
        assert!(findings[0].1.contains("12 h"), "{findings:?}");
        assert!(
            findings[1].1.contains("4 days") && findings[1].1.contains("for 3 "),
            "{findings:?}"
        );

        let findings = said(&facts(), &plan(Some(10)));
        assert!(
            !findings[0].0 && findings[0].1.contains("up to 18 days"),
            "{findings:?}"
        );
        let none = Facts {
            most_receives: None,
            ..facts()
        };
        assert!(said(&none, &plan(None))[0].1.contains("no dead-letter queue"));
    }

    #[test]
    fn every_attempt_may_need_a_receive_of_its_own() {
        let mut plan = plan(Some(30));
        plan.attempts = 8;
        assert_eq!(said(&facts(), &plan), [], "eight, a deploy and an outage");
        plan.attempts = 9;
        let (fatal, text) = said(&facts(), &plan).remove(0);
        assert!(!fatal && text.contains("after 10 receives"), "{text}");
        assert!(
            text.contains("9 attempts") && text.contains("to 11 or more"),
            "{text}"
        );
    }

    #[test]
    fn one_renewal_without_an_answer_must_not_lose_what_runs() {
        let mut plan = plan(Some(30));
        plan.longest_unsettled = Duration::from_secs(14);
        let short =
            |calls: &Calls, plan: &Plan| judge(&facts(), calls, plan).pop().map(|f| (f.fatal, f.text));
        assert_eq!(short(&calls(14, 5), &plan), None, "it ends before");
        plan.longest_unsettled = Duration::from_secs(15);
        assert_eq!(short(&calls(15, 5), &plan), None, "there is time for two");
        let (fatal, text) = short(&calls(14, 5), &plan).unwrap();
        assert!(!fatal && text.contains("visibility_timeout of 14s"), "{text}");
        assert!(text.contains("to 15s or more"), "{text}");
    }

    #[test]
    fn a_redrive_policy_is_read_with_its_number_as_text_or_number() {
        for policy in [
            r#"{"deadLetterTargetArn":"a","maxReceiveCount":"3"}"#,
            r#"{"maxReceiveCount":3}"#,
        ] {
            let attributes = HashMap::from([(QueueAttributeName::RedrivePolicy, policy.to_owned())]);
            assert_eq!(Facts::read(&attributes).most_receives, Some(3));
        }
        assert_eq!(Facts::read(&HashMap::new()).most_receives, None);
    }
}
