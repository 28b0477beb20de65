//! Single calls to SQS, each within its time limit, and what the answers say.

use std::sync::Arc;

use aws_sdk_sqs::types::{
    BatchResultErrorEntry, ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry,
};
use tokio::time::Instant;

use crate::attempt::Attempt;
use crate::config::Settings;
use crate::connect::{Trouble, within};
use crate::identity::{arrival, wanted};
use crate::settle::{Answer, Arrival, Entry};

pub(crate) struct Polled {
    pub(crate) attempt: Attempt,
    pub(crate) sent: Instant,
    pub(crate) messages: Result<Vec<Arrival>, Trouble>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Delete,
    Change,
}

pub(crate) struct Settled {
    pub(crate) kind: Kind,
    pub(crate) sent: Instant,
    pub(crate) answers: Vec<(Entry, Answer)>,
    pub(crate) trouble: Option<Trouble>,
}

/// One call for messages.
pub(crate) async fn poll(settings: Arc<Settings>, attempt: Attempt) -> Polled {
    let sent = Instant::now();
    let call = settings
        .client
        .receive_message()
        .queue_url(&settings.url)
        .max_number_of_messages(whole(attempt.ask as u64))
        .set_receive_request_attempt_id(attempt.id.clone())
        .wait_time_seconds(whole(settings.wait_time.as_secs()))
        .visibility_timeout(whole(settings.visibility_timeout.as_secs()))
        .set_message_system_attribute_names(Some(wanted(settings.fifo)))
        .message_attribute_names("All")
        .send();
    let answer = within(settings.wait_time + settings.call_timeout, call).await;
    let messages = answer.map(|answer| {
        let messages = answer.messages.unwrap_or_default();
        messages
            .into_iter()
            .filter_map(|message| arrival(message, &settings))
            .collect()
    });
    Polled {
        attempt,
        sent,
        messages,
    }
}

/// One call with up to ten entries, and what SQS said to each.
pub(crate) async fn settle(settings: Arc<Settings>, kind: Kind, entries: Vec<Entry>) -> Settled {
    let sent = Instant::now();
    let failed = match kind {
        Kind::Delete => delete(&settings, &entries).await,
        Kind::Change => change(&settings, &entries).await,
    };
    let (answers, trouble) = match failed {
        Ok(failed) => (answers(entries, &failed), None),
        Err(trouble) => {
            let all_again = entries.into_iter().map(|entry| (entry, Answer::Again));
            (all_again.collect(), Some(trouble))
        }
    };
    Settled {
        kind,
        sent,
        answers,
        trouble,
    }
}

async fn delete(settings: &Settings, entries: &[Entry]) -> Result<Vec<BatchResultErrorEntry>, Trouble> {
    let mut call = settings.client.delete_message_batch().queue_url(&settings.url);
    for (at, entry) in entries.iter().enumerate() {
        let entry = DeleteMessageBatchRequestEntry::builder()
            .id(at.to_string())
            .receipt_handle(&entry.handle)
            .build()
            .map_err(|e| unbuildable(&e))?;
        call = call.entries(entry);
    }
    let answer = within(settings.call_timeout, call.send()).await?;
    Ok(answer.failed)
}

async fn change(settings: &Settings, entries: &[Entry]) -> Result<Vec<BatchResultErrorEntry>, Trouble> {
    let mut call = settings
        .client
        .change_message_visibility_batch()
        .queue_url(&settings.url);
    for (at, entry) in entries.iter().enumerate() {
        let entry = ChangeMessageVisibilityBatchRequestEntry::builder()
            .id(at.to_string())
            .receipt_handle(&entry.handle)
            .visibility_timeout(entry.seconds)
            .build()
            .map_err(|e| unbuildable(&e))?;
        call = call.entries(entry);
    }
    let answer = within(settings.call_timeout, call.send()).await?;
    Ok(answer.failed)
}

fn unbuildable(error: &aws_sdk_sqs::error::BuildError) -> Trouble {
    Trouble {
        text: error.to_string(),
        code: None,
        refused: false,
        unanswered: false,
    }
}

/// The answer is 200 whatever became of the entries; each failure stands in it with its reason.
fn answers(entries: Vec<Entry>, failed: &[BatchResultErrorEntry]) -> Vec<(Entry, Answer)> {
    entries
        .into_iter()
        .enumerate()
        .map(|(at, entry)| {
            let failure = failed.iter().find(|failure| failure.id() == at.to_string());
            let answer = match failure {
                None => Answer::Done,
                Some(failure) if is_void(failure) => Answer::Gone,
                Some(_) => Answer::Again,
            };
            (entry, answer)
        })
        .collect()
}

/// Our own fault is a handle that is void, as all else in an entry is made here; unless it is that we
/// call too often.
fn is_void(failure: &BatchResultErrorEntry) -> bool {
    failure.sender_fault() && !failure.code().contains("Thrott") && !failure.code().contains("OverLimit")
}

fn whole(number: u64) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_entry_has_its_own_answer() {
        let entries: Vec<Entry> = (0..4)
            .map(|number| Entry {
                number,
                handle: String::new(),
                seconds: 0,
                gives_back: false,
            })
            .collect();
        let failure = |id: &str, code: &str, ours| {
            let failure = BatchResultErrorEntry::builder().id(id).code(code);
            failure.sender_fault(ours).build().unwrap()
        };
        let failed = [
            failure("3", "ReceiptHandleIsInvalid", true),
            failure("1", "InternalError", false),
            failure("2", "RequestThrottled", true),
        ];
        let answers: Vec<Answer> = answers(entries, &failed).into_iter().map(|a| a.1).collect();
        assert_eq!(
            answers,
            [Answer::Done, Answer::Again, Answer::Again, Answer::Gone]
        );
    }
}
