//! Amazon SQS as a source of deliveries for [`onlyonce`] consumers, and as a destination of their outgoing events.
//!
//! ```
//! use onlyonce_sqs::{Connection, Sqs};
//!
//! // Or a client made by aws-config.
//! let client = Connection::new("us-east-1", "test", "test").endpoint("http://localhost:9324").client()?;
//! let orders = Sqs::queue(client, "http://localhost:9324/000000000000/orders").build()?;
//! # drop(orders);
//! # Ok::<_, onlyonce_sqs::ConfigError>(())
//! ```
//!
//! The queue has to exist; this crate creates nothing. Standard and FIFO queues are consumed; a FIFO
//! queue is known by its name, which ends in `.fifo`.
//!
//! # What is promised
//!
//! - **Acks** are deletions of what the consumer settled, up to ten in a call. An entry that failed is
//!   repeated on its own. A deletion that SQS never confirms is harmless: the message comes again and
//!   meets its claim.
//! - **Visibility** is renewed every third of the timeout, counted from the moment at which a call was
//!   sent, also while a message waits for a lane. When a renewal is refused, or has not been confirmed
//!   by the end of the timeout, or after the twelve hours that SQS allows, the delivery is reported as
//!   lost, and is not started.
//! - **Giving back** makes a message visible at once, or after the delay that was asked for, rounded up
//!   to whole seconds; SQS waits, not this process. It counts as a receive in SQS: see the queue's
//!   `maxReceiveCount`. A delay ends with the twelve hours.
//! - **Calls for messages** run in tasks of their own, as many as there is room for (one on an empty
//!   queue). What a call brings is never lost by a caller that stops waiting.
//! - **An answer that gets lost** costs a FIFO queue no visibility timeout: the call is made again by the same
//!   `ReceiveRequestAttemptId`, and SQS gives the same messages. Those of a standard queue come again when
//!   their visibility is over.
//! - **Every call has a time limit**, also at an endpoint that accepts and never answers. Failed calls
//!   are repeated, after 0.1 s at first, every 10 s in the end; throttling is one of the reasons. What
//!   only a person can change (a queue that is gone, a permission) is reported as fatal.
//! - **Pausing and stopping** give back once what was not handed out, including what calls under way
//!   still bring. Stopping waits for those calls for up to 8 s, and for the settlements of the rest.
//! - **Keys and tokens** appear in no log, no error and no `Debug`.
//!
//! # Order
//!
//! Of a FIFO queue the ordering key is the `MessageGroupId`. When a message is lost or given back, those
//! of its group that came after it are given back with it; other groups go on. As every message there
//! has a group, a failed event is tried again in place only, and is dead after that; with
//! `Ordering::Unordered` it is held and tried again later, and others of its group overtake it.
//!
//! A standard queue has no order; an ordering key from a message attribute keeps events of one key from
//! running at the same time in one process, and no more.
//!
//! # Identity
//!
//! Message attributes are headers: `onlyonce-event-id`, CloudEvents' `ce-id` or one of your choice name
//! the event. An envelope of SNS (`TopicArn`, `MessageId`) or EventBridge (account and source, `id`) does as
//! well and is unwrapped: the handler gets what is inside. With
//! [`s3_records`](SqsBuilder::s3_records) every record of an S3 notification is an event of its own, to
//! which the attributes of its message do not belong.
//! Without any of these the SQS `MessageId` is left, under the queue's [name](SqsBuilder::name); that is
//! weak, as it changes when a producer sends again and when a message is moved out of a dead-letter
//! queue. A `MessageDeduplicationId` is never an identity: SQS remembers it for five minutes.
//!
//! # What it may do, and what it costs
//!
//! The role needs `sqs:ReceiveMessage`, `sqs:DeleteMessage` and `sqs:ChangeMessageVisibility`. With
//! `sqs:GetQueueAttributes` the queue is checked at start (retention against the dedup window, redrive
//! policy against the attempts of an event, a missing dead-letter queue), and the backlog is known, by a
//! call every 30 s. The visibility timeout is held against the time that an event may take.
//!
//! An idle consumer calls once per [wait time](SqsBuilder::wait_time), a busy one twice for up to ten
//! messages, and once more per third of a visibility timeout for up to ten that take that long.
//!
//! # Publishing
//!
//! ```
//! use onlyonce_sqs::{Connection, SqsPublisher};
//!
//! let client = Connection::new("us-east-1", "test", "test").endpoint("http://localhost:9324").client()?;
//! let sqs = SqsPublisher::to(client).build()?;
//! # drop(sqs);
//! # Ok::<_, onlyonce_sqs::ConfigError>(())
//! ```
//!
//! An address is a queue's URL, or its name in the client's account and region (which needs `sqs:GetQueueUrl`, once).
//! Sending needs `sqs:SendMessage`.
//!
//! - **Calls** take up to ten messages of one queue: those that wait while the [calls](SqsPublisherBuilder::calls)
//!   before are under way. No timer holds anything back. Each message has its own answer; of a call that fails as a whole
//!   for what is in it, every message is `Interrupted`, and tried alone tells which one it was.
//! - **FIFO queues** order by the event's key, without which an event is refused: it is the `MessageGroupId` if a group
//!   can be called so (1 to 128 visible ASCII characters), else a digest of it is. The `MessageDeduplicationId` is a digest of
//!   source, id and how often a person sent the event anew: SQS drops copies for five minutes, and no replay.
//! - **A failure inside of SQS** counts for no message while nothing passes, and holds up no others once something does:
//!   then it is the message's refusal, tried again later. Throttling is nobody's fault.
//! - **On the wire** id, source and media type are attributes (`onlyonce-event-id`, `onlyonce-event-source`, `content-type`); all
//!   other headers, as SQS allows ten attributes, are one JSON document in the attribute `onlyonce`:
//!   `{"headers":[["tenant","eu"],["raw",{"base64":"/wA="}],["none",null]],"body":"base64"}`. There `body` says how the body is to be
//!   read: as it is (not there), `base64` (bytes that are no text, or characters that SQS refuses), `empty` (the body is `""`), `null`
//!   (the body is `null`, a tombstone). The source of this crate reads all of it back, and takes no such body for an envelope.
//!
//! # TLS
//!
//! A client of your own brings its own TLS. [`Connection`] has it with the feature `tls`: rustls with
//! ring and the system's certificates. A program that links ring and aws-lc both has to choose one of
//! them for rustls (`CryptoProvider::install_default`).
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod attempt;
mod check;
mod config;
mod connect;
mod demand;
mod envelope;
mod identity;
mod packing;
mod publisher;
mod request;
mod session;
mod settle;
mod source;
mod status;

pub use config::{ConfigError, OrderingKey, SqsBuilder};
pub use connect::Connection;
pub use publisher::{MAX_MESSAGE_BYTES, SqsPublisher, SqsPublisherBuilder};
pub use source::Sqs;
