//! Messages that wait for one queue, and the calls that take them: what waits while calls are under way is the next.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aws_sdk_sqs::types::BatchResultErrorEntry;
use onlyonce::publisher::{PublishError, PublishErrorKind};
use tokio::sync::oneshot;

use super::config::Settings;
use super::parcel::Parcel;
use super::verdict;
use crate::connect::within;

/// SQS takes no more messages in a call.
const MOST_MESSAGES: usize = 10;
/// Nor more bytes, at queues that were made before 2025. One message that is larger goes alone, and SQS says
/// what it thinks of it.
const MOST_BYTES: usize = 256 << 10;

pub(super) type Told = Result<(), PublishError>;

#[derive(Debug)]
pub(super) struct Queue {
    url: String,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    parcels: VecDeque<Pending>,
    /// How many tasks make calls.
    calling: usize,
}

#[derive(Debug)]
struct Pending {
    parcel: Parcel,
    answer: oneshot::Sender<Told>,
}

impl Queue {
    pub(super) fn at(url: String) -> Self {
        Self {
            url,
            waiting: Mutex::default(),
        }
    }

    /// Puts a message behind those that wait. If `true`, a task is to be started that [sends](Self::send_all).
    pub(super) fn push(&self, parcel: Parcel, calls: usize) -> (oneshot::Receiver<Told>, bool) {
        let (answer, told) = oneshot::channel();
        let mut waiting = self.lock();
        waiting.parcels.push_back(Pending { parcel, answer });
        let wanted = waiting.calling < calls;
        if wanted {
            waiting.calling += 1;
        }
        (told, wanted)
    }

    /// Makes calls until nothing waits.
    pub(super) async fn send_all(self: Arc<Self>, settings: Arc<Settings>) {
        while let Some(batch) = self.next() {
            let told = send(&self.url, &batch, &settings).await;
            for (pending, told) in batch.into_iter().zip(told) {
                // Whoever published may have gone.
                let _ = pending.answer.send(told);
            }
        }
    }

    /// The next call. `None`: nothing waits, and the task that asked is not counted any more.
    fn next(&self) -> Option<Vec<Pending>> {
        let mut waiting = self.lock();
        let mut batch = Vec::new();
        let mut bytes = 0;
        while batch.len() < MOST_MESSAGES
            && let Some(next) = waiting.parcels.front()
        {
            let more = next.parcel.size();
            if !batch.is_empty() && bytes + more > MOST_BYTES {
                break;
            }
            bytes += more;
            batch.extend(
                waiting
                    .parcels
                    .pop_front()
                    .filter(|next| !next.answer.is_closed()),
            );
        }
        if batch.is_empty() {
            waiting.calling -= 1;
            return None;
        }
        Some(batch)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One call. What became of each message, in their order.
async fn send(url: &str, batch: &[Pending], settings: &Settings) -> Vec<Told> {
    let cannot = |kind, why: &str| {
        Err(PublishError::new(
            kind,
            format_args!("cannot send to the SQS queue at {url}: {why}"),
        ))
    };
    let mut call = settings.client.send_message_batch().queue_url(url);
    for (number, pending) in batch.iter().enumerate() {
        match pending.parcel.entry(number) {
            Ok(entry) => call = call.entries(entry),
            // It lacks a part that every entry of ours has.
            Err(error) => {
                return batch
                    .iter()
                    .map(|_| cannot(PublishErrorKind::Interrupted, &error.to_string()))
                    .collect();
            }
        }
    }
    let answer = match within(settings.call_timeout, call.send()).await {
        Ok(answer) => answer,
        Err(trouble) => {
            let kind = verdict::of_call(&trouble, batch.len());
            return batch.iter().map(|_| cannot(kind, &trouble.text)).collect();
        }
    };
    // The answer is 200 whatever became of the messages.
    let others = !answer.successful.is_empty();
    (0..batch.len())
        .map(|number| {
            let id = number.to_string();
            if answer.successful.iter().any(|sent| sent.id == id) {
                return Ok(());
            }
            match answer.failed.iter().find(|failed| failed.id == id) {
                Some(failed) => cannot(
                    verdict::of_entry(&failed.code, failed.sender_fault, others),
                    &reason(failed),
                ),
                None => cannot(
                    PublishErrorKind::Interrupted,
                    "SQS does not say what became of it",
                ),
            }
        })
        .collect()
}

fn reason(failed: &BatchResultErrorEntry) -> String {
    match &failed.message {
        Some(message) => format!("{}: {message}", failed.code),
        None => failed.code.clone(),
    }
}

#[cfg(test)]
mod tests {
    use onlyonce::publisher::Message;

    use super::*;

    fn parcel(bytes: usize) -> Parcel {
        Parcel::of(&Message::new("q", "s", "e", vec![b'x'; bytes])).unwrap()
    }

    #[test]
    fn a_call_takes_what_waits_up_to_the_limits() {
        let queue = Queue::at("http://h/q".to_owned());
        let mut told = Vec::new();
        let mut wanted = Vec::new();
        for bytes in [10, 20, 300_000, 30, 200_000, 100_000].into_iter().chain([1; 12]) {
            let (receiver, want) = queue.push(parcel(bytes), 2);
            told.push(receiver);
            wanted.push(want);
        }
        assert_eq!(wanted[..3], [true, true, false], "two calls at once");
        // Nobody waits for the second one any more.
        drop(told.remove(1));
        let sizes = || queue.next().map(|batch| batch.len());
        assert_eq!(sizes(), Some(1), "the large one goes alone");
        assert_eq!(sizes(), Some(1));
        assert_eq!(sizes(), Some(2));
        assert_eq!(sizes(), Some(10), "no more messages");
        assert_eq!(sizes(), Some(3));
        assert_eq!((sizes(), sizes()), (None, None));
        assert!(queue.push(parcel(1), 2).1, "somebody is to send again");
    }
}
