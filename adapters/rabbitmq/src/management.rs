//! Reads from the management API. Blocking: call it where that is allowed.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use ureq::Agent;
use url::Url;

use crate::config::ManagementUrl;

/// An answer larger than this is not one of the two that are asked for.
const LARGEST_ANSWER: u64 = 1 << 20;

pub(crate) struct Api {
    agent: Agent,
    base: Url,
    authorization: String,
}

impl Api {
    pub(crate) fn new(url: &ManagementUrl, timeout: Duration) -> Self {
        let config = Agent::config_builder()
            .timeout_global(Some(timeout))
            // A redirect would carry the password to another address, a proxy from the environment through one.
            .max_redirects(0)
            .proxy(None)
            .http_status_as_error(false);
        #[cfg(feature = "tls")]
        let config = config.tls_config(
            ureq::tls::TlsConfig::builder()
                .root_certs(ureq::tls::RootCerts::PlatformVerifier)
                .build(),
        );
        Self {
            agent: config.build().into(),
            base: url.base.clone(),
            authorization: format!(
                "Basic {}",
                STANDARD.encode(format!("{}:{}", url.user, url.password))
            ),
        }
    }

    /// The JSON at this path. Errors name the path and never the password.
    pub(crate) fn get(&self, path: &[&str]) -> Result<Value, String> {
        let mut url = self.base.clone();
        // It fails only for URLs that cannot have a path, which http URLs can.
        let _ = url.path_segments_mut().map(|mut segments| {
            segments.pop_if_empty().extend(path);
        });
        let failed = |e: &dyn std::fmt::Display| format!("GET {url}: {e}");
        let mut response = self
            .agent
            .get(url.as_str())
            .header("authorization", &self.authorization)
            .call()
            .map_err(|e| failed(&e))?;
        match response.status().as_u16() {
            200 => {}
            401 => return Err(failed(&"401: user or password refused")),
            403 => {
                return Err(failed(
                    &"403: the user needs the tag `monitoring` or `management`",
                ));
            }
            404 => return Err(failed(&"404: no such queue, vhost or API")),
            status => return Err(failed(&status)),
        }
        let body = response
            .body_mut()
            .with_config()
            .limit(LARGEST_ANSWER)
            .read_to_string()
            .map_err(|e| failed(&e))?;
        serde_json::from_str(&body).map_err(|e| failed(&e))
    }
}
