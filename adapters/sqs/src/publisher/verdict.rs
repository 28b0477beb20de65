//! What SQS's answers say about a message, its queue and SQS itself. Pure.

use onlyonce::publisher::PublishErrorKind;

use PublishErrorKind::{Destination, Interrupted, Invalid, Refused, Unavailable};

use crate::connect::Trouble;

/// The queue as a whole takes nothing: it is not there, or we may not send to it.
const OF_THE_QUEUE: [&str; 6] = [
    "AccessDenied",
    "AccessDeniedException",
    "InvalidAddress",
    "NonExistentQueue",
    "QueueDoesNotExist",
    "UnsupportedOperation",
];
/// SQS takes nothing from us.
const OF_THE_CALLER: [&str; 8] = [
    "AuthFailure",
    "ExpiredToken",
    "InvalidClientTokenId",
    "InvalidSecurity",
    "OptInRequired",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
];
/// A message as it is will never be taken.
const OF_THE_MESSAGE: [&str; 7] = [
    "BatchRequestTooLong",
    "InvalidAttributeValue",
    "InvalidMessageContents",
    "InvalidParameterValue",
    "MessageTooLong",
    "MissingParameter",
    "ValidationError",
];

/// What a call that failed as a whole says about each of the messages in it.
///
/// Of several, nobody knows which one SQS does not like: they are all to be tried alone.
pub(super) fn of_call(trouble: &Trouble, messages: usize) -> PublishErrorKind {
    let Some(name) = trouble.code.as_deref().map(name) else {
        return Unavailable;
    };
    if trouble.unanswered || is_throttling(name) || OF_THE_CALLER.contains(&name) {
        Unavailable
    } else if OF_THE_QUEUE.contains(&name) || name.starts_with("KMS.") || name.starts_with("Kms") {
        Destination
    } else if messages > 1 {
        Interrupted
    } else if OF_THE_MESSAGE.contains(&name) {
        Invalid
    } else {
        Refused
    }
}

/// What the failure of one message in a call says. `others`: some of the call was taken.
///
/// What is not the message's fault is nobody's while nothing passes, and the publisher pauses. Where others pass SQS is
/// there: the message is tried again as a refused one, which holds up no others.
pub(super) fn of_entry(code: &str, sender_fault: bool, others: bool) -> PublishErrorKind {
    let name = name(code);
    if is_throttling(name) {
        Unavailable
    } else if sender_fault && OF_THE_MESSAGE.contains(&name) {
        Invalid
    } else if sender_fault || others {
        Refused
    } else {
        Unavailable
    }
}

/// The same error has a name of its own in each of the two protocols.
fn name(code: &str) -> &str {
    code.strip_prefix("AWS.SimpleQueueService.").unwrap_or(code)
}

fn is_throttling(name: &str) -> bool {
    name.contains("Throttl") || matches!(name, "OverLimit" | "ServiceUnavailable")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trouble(code: Option<&str>, unanswered: bool) -> Trouble {
        Trouble {
            text: String::new(),
            code: code.map(str::to_owned),
            refused: false,
            unanswered,
        }
    }

    #[test]
    fn a_failed_call_is_about_queue_caller_or_messages() {
        for (code, one, several) in [
            (
                "AWS.SimpleQueueService.NonExistentQueue",
                Destination,
                Destination,
            ),
            ("QueueDoesNotExist", Destination, Destination),
            ("AccessDenied", Destination, Destination),
            ("KMS.DisabledException", Destination, Destination),
            ("KMS.ThrottlingException", Unavailable, Unavailable),
            ("RequestThrottled", Unavailable, Unavailable),
            ("InvalidClientTokenId", Unavailable, Unavailable),
            ("InvalidMessageContents", Invalid, Interrupted),
            ("AWS.SimpleQueueService.BatchRequestTooLong", Invalid, Interrupted),
            ("SomethingNew", Refused, Interrupted),
        ] {
            assert_eq!(of_call(&trouble(Some(code), false), 1), one, "{code}");
            assert_eq!(of_call(&trouble(Some(code), false), 7), several, "{code}");
        }
        assert_eq!(of_call(&trouble(None, true), 1), Unavailable);
        assert_eq!(of_call(&trouble(Some("InternalError"), true), 1), Unavailable);
    }

    #[test]
    fn a_failed_message_is_at_fault_if_sqs_says_so() {
        for (code, sender, others, kind) in [
            ("InvalidMessageContents", true, true, Invalid),
            ("SomethingNew", true, true, Refused),
            ("InternalError", false, true, Refused),
            ("InternalError", false, false, Unavailable),
            ("RequestThrottled", true, true, Unavailable),
        ] {
            assert_eq!(of_entry(code, sender, others), kind, "{code}");
        }
    }
}
