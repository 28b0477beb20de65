use std::fmt;
use std::str::FromStr;

/// Where an outgoing event goes: the name of a publisher of the relay, a colon, and an address that this
/// publisher understands.
///
/// | broker | address | example |
/// |---|---|---|
/// | Kafka | the topic | `kafka:orders` |
/// | RabbitMQ | the exchange, a slash, the routing key | `rabbitmq:payments/payment.captured` |
/// | RabbitMQ | no exchange: a slash and the queue | `rabbitmq:/invoices` |
/// | SQS | the queue's name or URL | `sqs:orders.fifo` |
///
/// The name before the colon is the one under which the publisher was given to the relay, so that two
/// clusters of one broker can be told apart: `kafka-eu:orders`. It has 1 to 64 of the characters `a-z`, `0-9`,
/// `-` and `_`; the whole has at most 512 bytes and no control characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Destination {
    text: String,
    colon: usize,
}

/// The longest destination, in bytes.
const MAX_BYTES: usize = 512;

/// The longest name of a publisher, in bytes.
const MAX_NAME: usize = 64;

impl Destination {
    /// The name of the publisher.
    pub fn publisher(&self) -> &str {
        &self.text[..self.colon]
    }

    /// The address within the publisher's broker.
    pub fn address(&self) -> &str {
        &self.text[self.colon + 1..]
    }

    /// The whole, as it is stored.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// Whether a publisher may have this name.
pub(crate) fn is_publisher_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name
            .bytes()
            .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
}

impl FromStr for Destination {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<Self, DestinationError> {
        let refused = |why| {
            Err(DestinationError {
                text: text.chars().take(80).collect(),
                why,
            })
        };
        let Some(colon) = text.find(':') else {
            return refused("it has no colon after the publisher's name");
        };
        if !is_publisher_name(&text[..colon]) {
            return refused("the publisher's name is not 1 to 64 of a-z, 0-9, - and _");
        }
        if text.len() == colon + 1 {
            return refused("nothing comes after the colon");
        }
        if text.len() > MAX_BYTES {
            return refused("it is longer than 512 bytes");
        }
        if text.chars().any(char::is_control) {
            return refused("it holds control characters");
        }
        Ok(Self {
            text: text.to_owned(),
            colon,
        })
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A text that is no destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DestinationError {
    text: String,
    why: &'static str,
}

impl fmt::Display for DestinationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is no destination: {} (write publisher:address, such as kafka:orders)",
            self.text, self.why
        )
    }
}

impl std::error::Error for DestinationError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_colon_ends_the_name() {
        let to: Destination = "sqs:http://localhost:9324/q".parse().unwrap();
        assert_eq!((to.publisher(), to.address()), ("sqs", "http://localhost:9324/q"));
        let to: Destination = "rabbitmq:/invoices".parse().unwrap();
        assert_eq!((to.publisher(), to.address()), ("rabbitmq", "/invoices"));
    }

    #[test]
    fn what_no_relay_could_read_is_refused_with_the_reason() {
        for (text, why) in [
            ("orders", "no colon"),
            (":orders", "name is not"),
            ("Kafka:orders", "name is not"),
            ("kafka:", "nothing comes"),
            ("kafka:a\nb", "control"),
        ] {
            let error = text.parse::<Destination>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let long = format!("kafka:{}", "x".repeat(507));
        assert!(long.parse::<Destination>().is_err());
        assert!(long[..512].parse::<Destination>().is_ok());
    }
}
