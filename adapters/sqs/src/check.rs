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

/// Nothing stays invisible for longer than this.
const LONGEST_HOLD: Duration = Duration::from_secs(12 * 3600);
/// The longest that a dead-letter queue can keep what it got.
const LONGEST_RETENTION: Duration = Duration::from_secs(14 * DAY);
/// Each deploy, pause and crash can use up one receive of a message that nothing is wrong with.
const FEW_RECEIVES: u64 = 5;
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
    for finding in judge(&facts, plan) {
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

#[derive(Debug, Clone, PartialEq, Eq)]
struct Finding {
    fatal: bool,
    text: String,
}

/// What about this queue endangers the consumer, and what to do about it.
fn judge(facts: &Facts, plan: &Plan) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut say = |fatal: bool, text: String| findings.push(Finding { fatal, text });
    if plan.longest_unsettled >= LONGEST_HOLD {
        say(
            true,
            format!(
                "an event can take {:?} here with all its attempts in place, and SQS lets nobody keep a message for more than 12 h (shorten the handler's time limit)",
                plan.longest_unsettled
            ),
        );
    }
    if let (Some(window), Some(retention)) = (plan.dedup_window, facts.retention) {
        if window < retention {
            say(
                true,
                format!(
                    "it keeps messages for {} days and identities are remembered for {} (remember them for longer, or set a shorter MessageRetentionPeriod)",
                    days(retention),
                    days(window)
                ),
            );
        } else if facts.most_receives.is_some() && window < retention + LONGEST_RETENTION {
            say(
                false,
                format!(
                    "identities are remembered for {} days; what comes back from its dead-letter queue can be up to {} days old",
                    days(window),
                    days(retention + LONGEST_RETENTION)
                ),
            );
        }
    }
    match facts.most_receives {
        None => say(
            false,
            "it has no dead-letter queue: a message that cannot be recorded in the database either comes again until its retention is over (set a RedrivePolicy)"
                .to_owned(),
        ),
        Some(most) if most < FEW_RECEIVES => say(
            false,
            format!(
                "its RedrivePolicy moves a message away after {most} receives, and a deploy, a pause or a crash can use up one each (set maxReceiveCount to {FEW_RECEIVES} or more; attempts are counted in the database)"
            ),
        ),
        Some(_) => {}
    }
    findings
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

    fn said(facts: &Facts, plan: &Plan) -> Vec<(bool, String)> {
        judge(facts, plan)
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

        let few = Facts {
            most_receives: Some(3),
            ..facts()
        };
        let findings = said(&few, &plan(Some(10)));
        assert_eq!(findings.iter().map(|f| f.0).collect::<Vec<_>>(), [false, false]);
        assert!(findings[0].1.contains("up to 18 days"), "{findings:?}");
        assert!(findings[1].1.contains("after 3 receives"), "{findings:?}");

        let none = Facts {
            most_receives: None,
            ..facts()
        };
        assert!(said(&none, &plan(None))[0].1.contains("no dead-letter queue"));
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
