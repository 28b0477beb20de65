//! What the broker's answers say about a message. Pure.
//!
//! A channel has one message under way at a time, so that whatever comes on it is about this message.

use lapin::{Confirmation, Error, ErrorKind};
use onlyonce::publisher::{PublishError, PublishErrorKind};

use super::parcel::Parcel;
use crate::connect::is_away;

/// `basic.return` of a message that went nowhere.
const NO_ROUTE: u16 = 312;

/// Success is an ack without a returned message: RabbitMQ acks what it could route nowhere.
pub(super) fn of_confirmation(confirmation: Confirmation, parcel: &Parcel) -> Result<(), PublishError> {
    let refused = |why: String| Err(PublishError::new(PublishErrorKind::Refused, why));
    match confirmation {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(returned)) if returned.reply_code == NO_ROUTE => refused(format!(
            "unroutable: no queue is bound to the exchange {:?} for the routing key {:?} ({NO_ROUTE} {})",
            parcel.exchange.as_str(),
            parcel.routing_key.as_str(),
            returned.reply_text
        )),
        Confirmation::Ack(Some(returned)) => refused(format!(
            "RabbitMQ returned the message: {} {}",
            returned.reply_code, returned.reply_text
        )),
        Confirmation::Nack(_) => refused(format!(
            "RabbitMQ refused the message (nack) for {:?}/{:?}: a queue it was routed to is full and rejects, or cannot store it",
            parcel.exchange.as_str(),
            parcel.routing_key.as_str()
        )),
        Confirmation::NotRequested => Err(PublishError::new(
            PublishErrorKind::Interrupted,
            "the channel was not in confirm mode",
        )),
    }
}

/// The channel or the connection ended while the message was under way.
pub(super) fn of_error(error: &Error, parcel: &Parcel) -> PublishError {
    let ErrorKind::ProtocolError(refusal) = error.kind() else {
        let text = format!("the connection to RabbitMQ broke while the message was on its way: {error}");
        return PublishError::new(PublishErrorKind::Interrupted, text);
    };
    let (code, text) = (refusal.get_id(), refusal.get_message().as_str());
    let (kind, told) = judge(code, text, error.is_amqp_soft_error());
    let (exchange, key) = (parcel.exchange.as_str(), parcel.routing_key.as_str());
    PublishError::new(
        kind,
        format!("cannot publish to {exchange:?}/{key:?}: {text}{told}"),
    )
}

/// `channel`: it ended the channel, and so is about the one message that was on it.
fn judge(code: u16, text: &str, channel: bool) -> (PublishErrorKind, &'static str) {
    match code {
        // The operator's doing; what was under way had no part in it.
        320 => (PublishErrorKind::Unavailable, ""),
        _ if !channel => (PublishErrorKind::Interrupted, ""),
        404 if is_away(text) => (PublishErrorKind::Unavailable, ""),
        404 => (PublishErrorKind::Destination, " (declare the exchange)"),
        403 => (
            PublishErrorKind::Destination,
            " (give the user the right to write to the exchange)",
        ),
        406 if text.contains("larger than") => (PublishErrorKind::Invalid, ""),
        _ => (PublishErrorKind::Refused, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_about_message_exchange_or_broker() {
        use PublishErrorKind::{Destination, Interrupted, Invalid, Refused, Unavailable};
        for (code, text, channel, kind) in [
            (404, "NOT_FOUND - no exchange 'x' in vhost '/'", true, Destination),
            (
                403,
                "ACCESS_REFUSED - access to exchange 'x' in vhost '/' refused for user 'u'",
                true,
                Destination,
            ),
            (
                403,
                "ACCESS_REFUSED - access to topic 'a' in exchange 'x' in vhost '/' refused for user 'u'",
                true,
                Destination,
            ),
            (
                406,
                "PRECONDITION_FAILED - message size 101 is larger than configured max size 100",
                true,
                Invalid,
            ),
            (406, "PRECONDITION_FAILED - anything else", true, Refused),
            (541, "INTERNAL_ERROR", false, Interrupted),
            (501, "FRAME_ERROR", false, Interrupted),
            (
                320,
                "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'",
                false,
                Unavailable,
            ),
        ] {
            assert_eq!(judge(code, text, channel).0, kind, "{text}");
        }
    }
}
