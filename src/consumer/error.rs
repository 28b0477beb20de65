use std::fmt;

use crate::source::SourceError;
use crate::store::StoreError;

/// What is wrong with the settings of a consumer, a relay or a supervisor: all of it, not only the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildError(pub(crate) Vec<String>);

impl BuildError {
    /// One message per problem.
    pub fn problems(&self) -> &[String] {
        &self.0
    }
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl std::error::Error for BuildError {}

/// A consumer or a relay ended, and not because it was told to. Nothing is lost: what was not acked comes
/// again, and what was not sent is in the table.
#[derive(Debug)]
pub struct RunError {
    message: String,
}

impl RunError {
    pub(crate) fn source(consumer: &str, error: SourceError) -> Self {
        Self {
            message: format!("consumer {consumer}: {error}"),
        }
    }

    pub(crate) fn store(consumer: &str, error: String) -> Self {
        Self {
            message: format!("consumer {consumer}: {error}"),
        }
    }

    pub(crate) fn relay(relay: &str, error: &StoreError) -> Self {
        Self {
            message: format!("relay {relay}: {error}"),
        }
    }

    pub(crate) fn build(error: BuildError) -> Self {
        Self {
            message: error.to_string(),
        }
    }

    pub(crate) fn lane_died(consumer: &str, error: Option<tokio::task::JoinError>) -> Self {
        let why = error.map_or_else(|| "it ended early".to_owned(), |e| e.to_string());
        Self {
            message: format!(
                "consumer {consumer}: a task of the framework died ({why}); this is a bug in onlyonce, and what was \
                 not acked comes again"
            ),
        }
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for RunError {}
