//! From a queue's name to its URL: asked once.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use onlyonce::publisher::PublishError;

use super::config::Settings;
use super::parcel::is_url;
use super::verdict;
use crate::connect::within;

#[derive(Debug, Default)]
pub(super) struct Urls {
    known: Mutex<HashMap<String, String>>,
    /// Whoever asks holds it; with what came of the last question for each name that failed.
    asking: tokio::sync::Mutex<HashMap<String, (Instant, PublishError)>>,
}

impl Urls {
    /// Those who come while somebody asks wait, and share the answer.
    pub(super) async fn of(&self, address: &str, settings: &Settings) -> Result<String, PublishError> {
        if is_url(address) {
            return Ok(address.to_owned());
        }
        let since = Instant::now();
        if let Some(url) = self.known().get(address) {
            return Ok(url.clone());
        }
        let mut failed = self.asking.lock().await;
        if let Some(url) = self.known().get(address) {
            return Ok(url.clone());
        }
        if let Some((at, error)) = failed.get(address)
            && *at >= since
        {
            return Err(error.clone());
        }
        // Old answers are of no use to those who come from now on.
        failed.clear();
        match ask(address, settings).await {
            Ok(url) => {
                self.known().insert(address.to_owned(), url.clone());
                Ok(url)
            }
            Err(error) => {
                failed.insert(address.to_owned(), (Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// It is gone: the next one who wants it asks.
    pub(super) fn forget(&self, address: &str) {
        self.known().remove(address);
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn ask(name: &str, settings: &Settings) -> Result<String, PublishError> {
    let call = settings.client.get_queue_url().queue_name(name).send();
    let told =
        |kind, why: &str| PublishError::new(kind, format_args!("cannot find the SQS queue {name:?}: {why}"));
    match within(settings.call_timeout, call).await {
        Ok(found) => found.queue_url.ok_or_else(|| {
            told(
                onlyonce::publisher::PublishErrorKind::Destination,
                "SQS gives no URL for it",
            )
        }),
        Err(trouble) => Err(told(verdict::of_call(&trouble, 1), &trouble.text)),
    }
}
