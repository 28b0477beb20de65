//! What can be known before the first event: that the topics are there and keep what they hold for no
//! longer than the database remembers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onlyonce::source::{Plan, SourceError};
use rdkafka::admin::{AdminClient, AdminOptions, ResourceSpecifier};
use rdkafka::client::ClientContext;
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaError;
use rdkafka::types::{RDKafkaErrorCode, RDKafkaRespErr};
use rdkafka::{Offset, TopicPartitionList};

use crate::config::{OrderingKey, Settings, StartAt};
use crate::explain::{self, Judgement};
use crate::position;

/// How long a question may take that holds up the polling.
pub(crate) const GLANCE: Duration = Duration::from_secs(1);
/// How long the first attempt of a question at the start may take; each further one takes twice as long.
const FIRST_ATTEMPT: Duration = Duration::from_millis(500);
/// How long a client is listened to for what it has to say of its troubles.
const LISTENING: Duration = Duration::from_millis(50);

/// A client that asks a few questions, hands its words to our log, and keeps the last complaint: an
/// answer that does not come says nothing of why.
#[derive(Default)]
struct Asking {
    complaint: Mutex<Option<(KafkaError, String)>>,
}

impl Asking {
    fn complaint(&self) -> MutexGuard<'_, Option<(KafkaError, String)>> {
        self.complaint.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientContext for Asking {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        explain::log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "Kafka client, at start");
        let mut complaint = self.complaint();
        // That all brokers are away follows from what was said before.
        if complaint.is_none() || !explain::all_away(&error) {
            *complaint = Some((error, reason.to_owned()));
        }
    }
}

impl ConsumerContext for Asking {}

/// One topic as the brokers describe it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Topic {
    name: String,
    partitions: usize,
    /// `None`: without end, or not told.
    retention: Option<Duration>,
    /// The log is compacted: the last record of each key stays for ever.
    compacted: bool,
}

/// Asks the brokers, refuses what cannot work, and warns of what may not.
pub(crate) async fn at_start(settings: &Arc<Settings>, plan: &Plan) -> Result<(), SourceError> {
    let asked = settings.clone();
    let mut topics = tokio::task::spawn_blocking(move || look(&asked))
        .await
        .map_err(SourceError::broken)??;
    describe(settings, &mut topics).await;
    for topic in &topics {
        tracing::info!(topic = %topic.name, partitions = topic.partitions, retention = ?topic.retention, "the topic is there");
    }
    let warnings = judge(settings, &topics, plan);
    if settings.strict_checks && !warnings.is_empty() {
        return Err(SourceError::fatal(warnings.join("; ")));
    }
    for warning in warnings {
        tracing::warn!(consumer = %plan.consumer, "{warning}");
    }
    Ok(())
}

/// The topics that are named and have to be there. Blocks.
fn look(settings: &Settings) -> Result<Vec<Topic>, SourceError> {
    let mut config = settings.connection();
    config.set("group.id", &settings.group);
    let client: BaseConsumer<Asking> = BaseConsumer::from_config_and_context(&config, Asking::default())
        .map_err(|e| explain::creation(settings, &e))?;
    let mut topics = Vec::new();
    for name in settings.named_topics() {
        let metadata = ask(settings, &client, |time| client.fetch_metadata(Some(name), time))?;
        let Some(topic) = metadata.topics().iter().find(|topic| topic.name() == name) else {
            return Err(missing(settings, name));
        };
        match topic.error() {
            None => topics.push(Topic {
                name: name.to_owned(),
                partitions: topic.partitions().len(),
                ..Topic::default()
            }),
            Some(error) => return Err(refused(settings, name, error)),
        }
    }
    if settings.start_at == StartAt::Fail {
        begins_somewhere(settings, &client, &topics)?;
    }
    Ok(topics)
}

/// A group that was never told where to begin ends its consumer now, rather than when it has its partitions.
fn begins_somewhere(
    settings: &Settings,
    client: &BaseConsumer<Asking>,
    topics: &[Topic],
) -> Result<(), SourceError> {
    let mut all = TopicPartitionList::new();
    for topic in topics.iter().filter(|topic| topic.partitions > 0) {
        all.add_partition_range(&topic.name, 0, topic.partitions as i32 - 1);
    }
    if all.count() == 0 {
        return Ok(());
    }
    let committed = ask(settings, client, |time| {
        client.committed_offsets(all.clone(), time)
    })?;
    match committed
        .elements()
        .iter()
        .find(|element| element.offset() == Offset::Invalid)
    {
        Some(element) => Err(position::needs_start(
            settings,
            element.topic(),
            element.partition(),
        )),
        None => Ok(()),
    }
}

/// Whether a topic that was there has been deleted. A broker that does not answer says nothing about it.
pub(crate) fn is_there<C: ConsumerContext>(
    settings: &Settings,
    consumer: &BaseConsumer<C>,
    name: &str,
) -> Result<(), SourceError> {
    let Ok(metadata) = consumer.fetch_metadata(Some(name), GLANCE) else {
        return Ok(());
    };
    let error = metadata
        .topics()
        .iter()
        .find(|topic| topic.name() == name)
        .and_then(|topic| topic.error());
    match error.map(|error| refused(settings, name, error)) {
        Some(error) if error.is_fatal() => Err(error),
        _ => Ok(()),
    }
}

/// Asks until there is an answer, or the time is up. In between the client is listened to: what a person
/// has to change is told at once, as the client itself would go on trying.
fn ask<T>(
    settings: &Settings,
    client: &BaseConsumer<Asking>,
    question: impl Fn(Duration) -> Result<T, KafkaError>,
) -> Result<T, SourceError> {
    let until = Instant::now() + settings.connect_timeout;
    let mut time = FIRST_ATTEMPT;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let error = match question(time.min(left)) {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let trouble = trouble(settings, client, &error);
        if trouble.is_fatal() || time >= left {
            return Err(trouble);
        }
        time *= 2;
    }
}

/// Why there is no answer, in the client's own words where it has any.
fn trouble(settings: &Settings, client: &BaseConsumer<Asking>, error: &KafkaError) -> SourceError {
    // They wait in a queue, and a poll that is given no time takes just one of them.
    let until = Instant::now() + LISTENING;
    while client
        .poll(until.saturating_duration_since(Instant::now()))
        .is_some()
    {}
    let complaint = client.context().complaint();
    let reason = match &*complaint {
        Some((complaint, reason)) => {
            let reason = settings.without_values(reason);
            match explain::judge(complaint, &reason) {
                Judgement::Over(error) => return error,
                _ => reason,
            }
        }
        None => error.to_string(),
    };
    SourceError::broken(format_args!(
        "Kafka at {} does not answer: {reason}",
        settings.brokers
    ))
}

fn missing(settings: &Settings, topic: &str) -> SourceError {
    SourceError::fatal(format_args!(
        "Kafka at {} has no topic {topic:?} (create it; this crate creates nothing)",
        settings.brokers
    ))
}

fn refused(settings: &Settings, topic: &str, error: RDKafkaRespErr) -> SourceError {
    match RDKafkaErrorCode::from(error) {
        RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic => {
            missing(settings, topic)
        }
        RDKafkaErrorCode::TopicAuthorizationFailed => SourceError::fatal(format_args!(
            "Kafka at {} does not let this user see the topic {topic:?} (it needs READ and DESCRIBE on it)",
            settings.brokers
        )),
        RDKafkaErrorCode::InvalidTopic => SourceError::fatal(format_args!(
            "{topic:?} is no name for a topic (a pattern is said by `topic_pattern`)"
        )),
        // Leaders are being elected: in a moment it is there.
        code => SourceError::broken(format_args!("the topic {topic:?} is not ready: {code}")),
    }
}

/// Adds what only its configuration tells. A user may not be allowed to read that; then it is not checked.
async fn describe(settings: &Settings, topics: &mut [Topic]) {
    if topics.is_empty() {
        return;
    }
    let admin: AdminClient<Asking> =
        match AdminClient::from_config_and_context(&settings.connection(), Asking::default()) {
            Ok(admin) => admin,
            Err(error) => return unchecked(&explain::creation(settings, &error).to_string()),
        };
    let options = AdminOptions::new().request_timeout(Some(settings.connect_timeout));
    let names: Vec<String> = topics.iter().map(|topic| topic.name.clone()).collect();
    let resources: Vec<_> = names.iter().map(|name| ResourceSpecifier::Topic(name)).collect();
    match admin.describe_configs(&resources, &options).await {
        Ok(described) => {
            for (topic, described) in topics.iter_mut().zip(described) {
                match described {
                    Ok(config) => {
                        let value = |name: &str| config.get(name).and_then(|entry| entry.value.as_deref());
                        topic.compacted =
                            value("cleanup.policy").is_some_and(|policy| policy.contains("compact"));
                        topic.retention = value("retention.ms")
                            .and_then(|ms| ms.parse().ok())
                            .map(Duration::from_millis);
                    }
                    Err(error) => unchecked(&error.to_string()),
                }
            }
        }
        Err(error) => unchecked(&error.to_string()),
    }
    // Its destructor waits for its own thread, and this is a runtime's.
    tokio::task::spawn_blocking(move || drop(admin));
}

fn unchecked(why: &str) {
    tracing::info!(
        why,
        "the topics' retention was not checked against the deduplication window"
    );
}

/// What may not work, in words. Pure.
fn judge(settings: &Settings, topics: &[Topic], plan: &Plan) -> Vec<String> {
    let mut warnings = Vec::from_iter(idle_lanes(settings, topics, plan));
    if let Some(window) = plan.dedup_window {
        for topic in topics {
            let name = &topic.name;
            match topic.retention {
                _ if topic.compacted => warnings.push(format!(
                    "the topic {name:?} is compacted and keeps records for ever, but identities are remembered for {window:?}: \
                     a group that is reset applies older ones again"
                )),
                None => warnings.push(format!(
                    "the topic {name:?} keeps records for ever, or does not say for how long, but identities are remembered for {window:?}: \
                     a group that is reset applies older ones again"
                )),
                Some(retention) if retention > window => warnings.push(format!(
                    "the topic {name:?} keeps records for {retention:?} (retention.ms), but identities are remembered for {window:?}: \
                     a group that is reset applies older ones again (make the window longer than the retention)"
                )),
                Some(_) => {}
            }
        }
    }
    warnings
}

/// Where a partition runs in order, no more lanes ever work than there are partitions. By keys it does
/// not matter how many there are.
fn idle_lanes(settings: &Settings, topics: &[Topic], plan: &Plan) -> Option<String> {
    let partitions: usize = topics.iter().map(|topic| topic.partitions).sum();
    // What a pattern finds is not known yet.
    let all_known = settings.named_topics().count() == settings.topics.len();
    let idle = settings.ordering_key == OrderingKey::Partition && all_known && plan.lanes > partitions;
    idle.then(|| {
        format!(
            "there are {} lanes, but each partition runs in order and there are {partitions}: no more lanes than that ever \
             work (fewer lanes, more partitions, or an ordering by keys)",
            plan.lanes
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::KafkaBuilder;

    fn settings(ordering: OrderingKey) -> Settings {
        KafkaBuilder::new("b:1", "g")
            .topic("orders")
            .ordering_key(ordering)
            .settings()
            .unwrap()
    }

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn topic(retention: Option<Duration>, compacted: bool) -> Topic {
        Topic {
            name: "orders".to_owned(),
            partitions: 3,
            retention,
            compacted,
        }
    }

    fn plan(window: Option<Duration>) -> Plan {
        let mut plan = Plan::for_window("c", 8);
        plan.dedup_window = window;
        plan
    }

    #[test]
    fn what_is_kept_longer_than_remembered_is_warned_about() {
        let keys = settings(OrderingKey::RecordKey);
        let week = plan(Some(7 * DAY));
        assert!(judge(&keys, &[topic(Some(7 * DAY), false)], &week).is_empty());
        assert!(judge(&keys, &[topic(Some(8 * DAY), false)], &week)[0].contains("retention.ms"));
        assert!(judge(&keys, &[topic(None, false)], &week)[0].contains("for ever"));
        assert!(judge(&keys, &[topic(Some(DAY), true)], &week)[0].contains("compacted"));
        assert!(
            judge(&keys, &[topic(None, true)], &plan(None)).is_empty(),
            "remembered for ever"
        );
    }

    #[test]
    fn lanes_that_never_work_are_warned_about() {
        let mut plan = plan(None);
        let topics = [topic(None, false), topic(None, false)];
        let judged = |ordering, lanes, plan: &mut Plan| {
            plan.lanes = lanes;
            judge(&settings(ordering), &topics, plan).join("; ")
        };
        assert_eq!(judged(OrderingKey::Partition, 6, &mut plan), "");
        assert_eq!(judged(OrderingKey::RecordKey, 64, &mut plan), "");
        let text = judged(OrderingKey::Partition, 7, &mut plan);
        assert!(text.contains("7 lanes") && text.contains("there are 6"), "{text}");
        let pattern = KafkaBuilder::new("b:1", "g")
            .topic("orders")
            .topic_pattern("orders-.*")
            .ordering_key(OrderingKey::Partition)
            .settings()
            .unwrap();
        assert!(judge(&pattern, &topics, &plan).is_empty(), "more may be found");
    }
}
