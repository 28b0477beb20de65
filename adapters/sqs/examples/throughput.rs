//! How fast events go from SQS to PostgreSQL, beside the same loop written by hand with aws-sdk-sqs and
//! sqlx: receive ten, a transaction for each or for all ten, one DeleteMessageBatch.
//!
//! ```sh
//! scripts/services up && eval "$(scripts/services env)"
//! cargo run --release -p onlyonce-sqs --example throughput -- --events 8000 --rounds 3
//! ```
//!
//! The queue is an emulator's, on the same machine. `--only NAME` measures the variants with NAME in
//! their name.

use aws_sdk_sqs::Client;
use aws_sdk_sqs::operation::send_message_batch::SendMessageBatchOutput;
use aws_sdk_sqs::types::{
    DeleteMessageBatchRequestEntry, Message, MessageAttributeValue, SendMessageBatchRequestEntry,
};
use onlyonce::async_trait;
use onlyonce_sqs::{Connection as Aws, Sqs};
use onlyonce_testbed::throughput::{self, BODY, BoxError, Broker, Twin, TwinLane, environment, event_id};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

const ID: &str = "onlyonce-event-id";
const SOURCE: &str = "onlyonce-event-source";

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let sqs = Aws::new("us-east-1", "test", "test")
        .endpoint(environment("ONLYONCE_SQS_URL")?)
        .client()?;
    throughput::run(Emulator { sqs }).await
}

struct Emulator {
    sqs: Client,
}

#[async_trait]
impl Broker for Emulator {
    type Source = Sqs;

    /// As many as one call receives.
    const BATCH: usize = 10;

    async fn filled(&self, events: u64) -> Result<String, BoxError> {
        let name = format!("bench-{:08x}", std::process::id());
        let created = self.sqs.create_queue().queue_name(name).send().await?;
        let queue = created.queue_url.ok_or("a queue without a URL")?;
        let numbers: Vec<u64> = (0..events).collect();
        let mut sending = JoinSet::new();
        for ten in numbers.chunks(10) {
            let entries: Result<Vec<_>, BoxError> = ten.iter().map(|n| entry(*n)).collect();
            let call = self.sqs.send_message_batch().queue_url(&queue);
            let call = call.set_entries(Some(entries?));
            sending.spawn(async move { call.send().await });
            if sending.len() >= 8
                && let Some(sent) = sending.join_next().await
            {
                all_sent(&sent??)?;
            }
        }
        while let Some(sent) = sending.join_next().await {
            all_sent(&sent??)?;
        }
        Ok(queue)
    }

    fn source(&self, queue: &str) -> Result<Sqs, BoxError> {
        Ok(Sqs::queue(self.sqs.clone(), queue).build()?)
    }

    async fn by_hand(&self, queue: &str, twin: Twin, stop: CancellationToken) -> Result<(), BoxError> {
        let mut lanes = JoinSet::new();
        for _ in 0..twin.lanes {
            let (sqs, queue, stop) = (self.sqs.clone(), queue.to_owned(), stop.clone());
            let (batch, mut lane) = (twin.batch, twin.lane().await?);
            lanes.spawn(async move {
                loop {
                    let call = sqs
                        .receive_message()
                        .queue_url(&queue)
                        .max_number_of_messages(10)
                        .wait_time_seconds(1)
                        .message_attribute_names("All")
                        .send();
                    let received = tokio::select! {
                        () = stop.cancelled() => return Ok::<_, BoxError>(()),
                        received = call => received?.messages.unwrap_or_default(),
                    };
                    for messages in received.chunks(batch) {
                        apply(&mut lane, messages).await?;
                    }
                    if !received.is_empty() {
                        let deletions: Result<_, BoxError> =
                            received.iter().enumerate().map(deletion).collect();
                        let call = sqs.delete_message_batch().queue_url(&queue);
                        call.set_entries(Some(deletions?)).send().await?;
                    }
                }
            });
        }
        while let Some(ended) = lanes.join_next().await {
            ended??;
        }
        Ok(())
    }

    async fn delete(&self, queue: &str) -> Result<(), BoxError> {
        self.sqs.delete_queue().queue_url(queue).send().await?;
        Ok(())
    }
}

async fn apply(lane: &mut TwinLane, messages: &[Message]) -> Result<(), BoxError> {
    let id = |message: &Message| {
        let value = message.message_attributes.as_ref()?.get(ID)?;
        value.string_value.clone()
    };
    let ids: Vec<String> = messages
        .iter()
        .map(|message| id(message).unwrap_or_default())
        .collect();
    let events: Vec<_> = ids
        .iter()
        .zip(messages)
        .map(|(id, message)| (id.as_str(), message.body().unwrap_or_default().as_bytes()))
        .collect();
    lane.apply(&events).await
}

fn deletion((n, message): (usize, &Message)) -> Result<DeleteMessageBatchRequestEntry, BoxError> {
    Ok(DeleteMessageBatchRequestEntry::builder()
        .id(n.to_string())
        .set_receipt_handle(message.receipt_handle.clone())
        .build()?)
}

fn entry(n: u64) -> Result<SendMessageBatchRequestEntry, BoxError> {
    let text = |value: &str| {
        MessageAttributeValue::builder()
            .data_type("String")
            .string_value(value)
            .build()
    };
    Ok(SendMessageBatchRequestEntry::builder()
        .id((n % 10).to_string())
        .message_body(BODY)
        .message_attributes(ID, text(&event_id(n))?)
        .message_attributes(SOURCE, text("bench")?)
        .build()?)
}

fn all_sent(sent: &SendMessageBatchOutput) -> Result<(), BoxError> {
    match sent.failed.first() {
        None => Ok(()),
        Some(failed) => Err(format!("a message was not sent: {}", failed.code).into()),
    }
}
