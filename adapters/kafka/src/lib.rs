//! Kafka topics as a source of deliveries for [`onlyonce`] consumers, and as a destination of their outgoing events.
//!
//! ```
//! use onlyonce_kafka::{Kafka, StartAt};
//!
//! let orders = Kafka::group("localhost:9092", "ledger")
//!     .topic("orders")
//!     .start_at(StartAt::Earliest)
//!     .set("session.timeout.ms", "10000")
//!     .build()?;
//! # drop(orders);
//! # Ok::<_, onlyonce_kafka::ConfigError>(())
//! ```
//!
//! The topics have to exist; this crate creates nothing.
//!
//! # What is promised
//!
//! - **Offsets** are committed only up to the first event of a partition that is not done. Events of one
//!   partition are done in any order; what is done behind an unfinished one comes again after a death and
//!   meets its claim. A committed offset never goes back by this crate, also not that of a partition that
//!   somebody else has by now.
//! - **Giving back** is a matter of this process, as Kafka takes nothing back: the event waits here, and
//!   later ones of its key behind it. Nothing goes round in a hot loop.
//! - **A partition that leaves** is left in good order: what was not started is dropped, what runs is
//!   waited for up to the [drain limit](KafkaBuilder::drain_limit), then the offset is committed. What was
//!   lost (the group thought that this member was dead) stores nothing.
//! - **Handlers may be slow.** The client is polled by a thread of its own, whatever handlers do;
//!   a full buffer and an event that hangs pause partitions, and the member stays in its group.
//! - **No jump in silence.** A group without an offset has to be told where to [begin](StartAt); a record
//!   that retention deleted before it was read ends receiving, unless a [policy](OutOfRange) says otherwise.
//! - **Pausing** keeps the membership and fetches nothing. **Stopping** waits for the settlements of what
//!   was handed out, commits, and leaves the group, so that others go on at once.
//! - **Values of settings** appear in no log, no error and no `Debug`.
//!
//! # Login and encryption
//!
//! Both are settings of librdkafka, passed on by [`set`](KafkaBuilder::set): `security.protocol`, `sasl.mechanism`,
//! `sasl.username`, `sasl.password`, `ssl.ca.location` and so on. SASL PLAIN is in every build; TLS and SCRAM want
//! the feature `tls`. A login that is refused ends the consumer at its start, in the broker's words; one that
//! broke off is tried again.
//!
//! # Order
//!
//! A partition is in order, and an event's ordering key is the record's key: events of one key run one
//! after another, different keys of one partition beside each other. Records without a key are ordered
//! with nothing. [`OrderingKey::Partition`] makes a whole partition run in order.
//!
//! # Identity
//!
//! Headers are handed on as bytes, in order, with their repetitions; a null payload is not an empty one.
//! An event without an id of its own is identified by where it stands in the log, `topic/partition/offset@timestamp`
//! of the source `kafka:<`[`cluster`](KafkaBuilder::cluster)`>`. That is weak: an event that its producer
//! sends twice counts as two. The event type is the header `onlyonce-event-type`, else `ce_type`.
//!
//! # Publishing
//!
//! ```
//! use onlyonce_kafka::KafkaPublisher;
//!
//! let kafka = KafkaPublisher::to("localhost:9092").set("compression.type", "lz4").build()?;
//! # drop(kafka);
//! # Ok::<_, onlyonce_kafka::ConfigError>(())
//! ```
//!
//! An address is a topic. It is asked for before the first message goes there: one that is not there is not created,
//! also by brokers that create what a producer asks for.
//!
//! - **Published** means in the logs of all in-sync replicas (`acks=all`), by an idempotent producer, whose own retries write
//!   nothing twice and keep the order of a partition.
//! - **Keys** land in the partition in which the Java client puts them (`partitioner=murmur2_random`).
//! - **A message too large** is refused for itself. Of a batch that the broker finds too large, as its limit is lower than
//!   the client's, every message is `Interrupted`: only one that had no company is known to be why. Set `message.max.bytes`
//!   to the lowest limit among the topics, and `batch.size` below it.
//! - **An outage** is an answer within the [patience](KafkaPublisherBuilder::patience). A topic that hangs while others go on is
//!   the destination's trouble. A producer that broke for good is replaced.
//! - **On the wire** headers keep order, repetitions and null values; a null payload is a tombstone. The media type is the
//!   header `content-type`, CloudEvents attributes are `ce_id` and so on.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod buffer;
mod check;
mod config;
mod explain;
mod identity;
mod position;
mod publisher;
mod session;
mod settle;
mod source;
mod status;

pub use config::{ConfigError, KafkaBuilder, OrderingKey, OutOfRange, StartAt};
pub use publisher::{KafkaPublisher, KafkaPublisherBuilder, MAX_MESSAGE_BYTES};
pub use source::Kafka;
