//! Chaos with SQS, by an emulator; see `testbed/src/chaos`. `scripts/chaos sqs` starts the servers and
//! runs it; with `--fifo` the queue is a FIFO queue, and the events of a group have to keep their order.

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, bail};
use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    MessageAttributeValue, QueueAttributeName as Attribute, SendMessageBatchRequestEntry as Entry,
};
use onlyonce::async_trait;
use onlyonce_sqs::{Connection, Sqs};
use onlyonce_testbed::chaos::{self, Broker, Entrance, Event, Keys, Seat, variable};
use uuid::Uuid;

/// SQS takes no more in one call.
const IN_A_CALL: usize = 10;

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    chaos::run::<Emulator>().await
}

struct Emulator {
    endpoint: String,
    fifo: bool,
    /// The URL of the run's queue, once it is declared.
    queue: OnceLock<String>,
}

#[async_trait]
impl Broker for Emulator {
    const SERVICE: &'static str = "sqs";
    const USAGE: &'static str = "--fifo";
    // ElasticMQ can write messages to disk (`messages-storage`), but only after it has confirmed them: of
    // 2,000 that were confirmed a SIGKILL took 30.
    const NEVER_RESTARTED: Option<&'static str> = Some("the emulator would lose messages by itself");

    type Producer = Client;
    type Source = Sqs;

    fn from_env() -> anyhow::Result<Self> {
        Ok(Self {
            endpoint: variable("ONLYONCE_SQS_URL")?,
            fifo: false,
            queue: OnceLock::new(),
        })
    }

    fn option(&mut self, argument: &str) -> bool {
        self.fifo |= argument == "--fifo";
        argument == "--fifo"
    }

    fn keys(&self) -> Keys {
        if self.fifo { Keys::All } else { Keys::None }
    }

    /// A link is before the queue, as a worker is given the queue's URL and takes the endpoint from it.
    fn entrance(&self, _place: usize) -> anyhow::Result<Entrance> {
        Ok(Entrance {
            url: self.queue()?.to_owned(),
            port: 0,
        })
    }

    async fn declare(&self, name: &str) -> anyhow::Result<()> {
        let sqs = client(&self.endpoint)?;
        let create = if self.fifo {
            let create = sqs.create_queue().queue_name(format!("{name}.fifo"));
            create.attributes(Attribute::FifoQueue, "true")
        } else {
            sqs.create_queue().queue_name(name)
        };
        let created = create.send().await?;
        let url = created.queue_url.context("the new queue has no URL")?;
        self.queue.get_or_init(|| url);
        Ok(())
    }

    async fn delete(&self, _name: &str) -> anyhow::Result<()> {
        client(&self.endpoint)?
            .delete_queue()
            .queue_url(self.queue()?)
            .send()
            .await?;
        Ok(())
    }

    async fn producer(&self) -> anyhow::Result<Client> {
        client(&self.endpoint)
    }

    async fn publish(&self, producer: &Client, _name: &str, batch: &[&Event]) -> anyhow::Result<()> {
        for part in batch.chunks(IN_A_CALL) {
            let entries = part
                .iter()
                .enumerate()
                .map(|(n, event)| entry(n, event))
                .collect::<anyhow::Result<_>>()?;
            let sent = producer
                .send_message_batch()
                .queue_url(self.queue()?)
                .set_entries(Some(entries))
                .send()
                .await?;
            if !sent.failed.is_empty() {
                bail!("{} of {} were refused", sent.failed.len(), part.len());
            }
        }
        Ok(())
    }

    async fn left(&self, _name: &str) -> anyhow::Result<u64> {
        let numbers = [
            Attribute::ApproximateNumberOfMessages,
            Attribute::ApproximateNumberOfMessagesNotVisible,
            Attribute::ApproximateNumberOfMessagesDelayed,
        ];
        let answer = client(&self.endpoint)?
            .get_queue_attributes()
            .queue_url(self.queue()?)
            .set_attribute_names(Some(numbers.to_vec()))
            .send()
            .await?;
        let attributes = answer.attributes.context("the queue has no attributes")?;
        let mut left = 0;
        for number in numbers {
            let value = attributes
                .get(&number)
                .with_context(|| format!("{number} is missing"))?;
            left += value.parse::<u64>()?;
        }
        Ok(left)
    }

    fn source(&self, seat: &Seat) -> anyhow::Result<Sqs> {
        let endpoint = seat
            .url
            .rsplitn(3, '/')
            .nth(2)
            .context("the queue's URL has no account")?;
        Ok(Sqs::queue(client(endpoint)?, &seat.url)
            .visibility_timeout(Duration::from_secs(3))
            .wait_time(Duration::from_secs(1))
            .call_timeout(Duration::from_secs(2))
            .build()?)
    }
}

impl Emulator {
    fn queue(&self) -> anyhow::Result<&str> {
        let queue = self.queue.get().context("the queue is not declared")?;
        Ok(queue)
    }
}

fn client(endpoint: &str) -> anyhow::Result<Client> {
    Ok(Connection::new("us-east-1", "test", "test")
        .endpoint(endpoint)
        .client()?)
}

fn entry(number: usize, event: &Event) -> anyhow::Result<Entry> {
    let entry = Entry::builder().id(number.to_string());
    let entry = match &event.key {
        // Each sending is new to SQS: what it keeps back as a duplicate would not be seen by us.
        Some(key) => entry
            .message_group_id(key)
            .message_deduplication_id(Uuid::new_v4()),
        None => entry,
    };
    Ok(entry
        .message_body(serde_json::to_string(event)?)
        .message_attributes("onlyonce-event-id", text(&event.id)?)
        .message_attributes("onlyonce-event-source", text("chaos")?)
        .build()?)
}

fn text(value: &str) -> anyhow::Result<MessageAttributeValue> {
    Ok(MessageAttributeValue::builder()
        .data_type("String")
        .string_value(value)
        .build()?)
}
