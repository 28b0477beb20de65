//! RabbitMQ as a source of deliveries for [`onlyonce`] consumers, and as a destination of their outgoing events.
//!
//! ```
//! use onlyonce_rabbitmq::{OrderingKey, RabbitMq};
//!
//! let orders = RabbitMq::queue("amqp://worker:secret@localhost:5672/%2f", "orders")
//!     .ordering_key(OrderingKey::RoutingKey)
//!     .management_url("http://monitor:secret@localhost:15672")
//!     .build()?;
//! # drop(orders);
//! # Ok::<_, onlyonce_rabbitmq::ConfigError>(())
//! ```
//!
//! The queue has to exist; this crate declares nothing. Classic and quorum queues are consumed,
//! streams are refused by name.
//!
//! # What is promised
//!
//! - **Acks** are written only for what the consumer settled, and at once. A run of finished messages
//!   without a gap is one frame; one that waits behind an unfinished message is acked on its own after
//!   25 ms. An ack that never reaches the broker is counted and harmless: the message comes again and
//!   meets its claim.
//! - **Giving back** is `basic.nack` with `requeue`, once. Since RabbitMQ 4.3 that does not count
//!   towards a quorum queue's delivery limit; before, it does, and the start-up checks say so. A delay
//!   is waited for here, for up to 15 minutes, and takes up a place in the prefetch. A message that
//!   goes round (given back at once, delivered, given back) is slowed down from the fourth time on.
//! - **Every end of a connection** is noticed: a closed socket or channel and a cancelled consumer at
//!   once, a silent peer after two heartbeats (20 s), a silent handshake after the connect timeout (5 s).
//!   What was outstanding is reported as lost, and the connection is opened anew, after 0.1 s at first,
//!   every 10 s in the end, for as long as it takes. What only a person can change (a refused
//!   password, a queue that is gone) is reported as fatal, with what to do.
//! - **Pausing and stopping** cancel the consumer and give back what was not handed out, including
//!   what arrives until the broker knows. Stopping then waits for the settlements of the rest, makes
//!   sure that the broker has read them, and closes channel and connection.
//! - **Passwords** appear in no log, no error and no `Debug`, also not in lapin's lines about the
//!   frames that it writes, which are kept from the level TRACE.
//!
//! # Order
//!
//! A queue is first in, first out for one consumer. Several instances that share it each have some
//! of a key's messages, so there is no order per key between them. With a queue declared with
//! `x-single-active-consumer` and
//! [`require_single_active_consumer`](RabbitMqBuilder::require_single_active_consumer) there is, with
//! one limit: what is given back with a delay is overtaken by what comes after it, here as in any broker.
//!
//! # Identity
//!
//! The message property is `message_id`, with `app_id` as its source; without an `app_id` the exchange
//! the message was first published to (`x-first-death-exchange`, else the exchange; the one without a
//! name is `amq.default`). Two publishers that share an exchange and number their messages
//! independently need an `app_id` each.
//!
//! # Connections
//!
//! One connection and two channels per source. A publisher has another connection of its own: a broker that
//! is short of memory stops reading from those that publish, and acks would be stuck among them.
//!
//! # Publishing
//!
//! ```
//! use onlyonce_rabbitmq::RabbitMqPublisher;
//!
//! let rabbitmq = RabbitMqPublisher::to("amqp://relay:secret@localhost:5672/%2f").build()?;
//! # drop(rabbitmq);
//! # Ok::<_, onlyonce_rabbitmq::ConfigError>(())
//! ```
//!
//! An address is `exchange/routing.key`, or `/queue` by way of the default exchange. Nothing is declared.
//!
//! - **Published** means confirmed and routed: RabbitMQ acks also what no queue takes, and returns it. Such a message is
//!   refused, unless [`accept_unroutable`](RabbitMqPublisherBuilder::accept_unroutable) says otherwise. So is one that a
//!   full queue rejects.
//! - **Each message** under way has a channel to itself. One for which the broker closes it (a missing exchange, no
//!   right to write, a body beyond `max_message_size`) harms no other; what headers would end the whole connection
//!   is found before it is sent.
//! - **An outage** is an answer within the [patience](RabbitMqPublisherBuilder::patience): `Interrupted` for what was on
//!   its way, `Unavailable` for the rest. The connection is opened anew by the next message. A broker that blocks
//!   those who publish, for it is short of memory or disk, is waited for in the same way.
//! - **On the wire** a message is persistent; `message_id`, `app_id`, `type`, `content_type` and `timestamp` are the
//!   event's id, source, type, media type and time. Headers are long strings, or byte arrays where they are no text; of
//!   several of one name the last is carried. The key is the header `onlyonce-ordering-key`, CloudEvents attributes are
//!   `ce-id` and so on. A null payload is an empty body. Ids, sources, types, media types, routing keys and names of headers have
//!   at most 255 bytes each; `CC` and `BCC` are no names of headers.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod check;
mod config;
mod connect;
mod identity;
#[cfg(feature = "management")]
mod management;
mod publisher;
mod quiet;
mod repeats;
mod session;
mod settle;
mod source;
mod status;

pub use config::{ConfigError, OrderingKey, RabbitMqBuilder};
pub use publisher::{MAX_MESSAGE_BYTES, RabbitMqPublisher, RabbitMqPublisherBuilder};
pub use source::RabbitMq;
