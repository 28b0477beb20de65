//! Clients from plain configuration, and what the errors of a call mean.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use aws_credential_types::Credentials;
use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::{BehaviorVersion, Region, SharedHttpClient};
use aws_sdk_sqs::error::{ProvideErrorMetadata, SdkError};
use onlyonce::source::SourceError;

use crate::config::{ConfigError, Settings};

/// What only a person can change.
const REFUSALS: [&str; 12] = [
    "AccessDenied",
    "AccessDeniedException",
    "AuthFailure",
    "InvalidAddress",
    "InvalidClientTokenId",
    "InvalidSecurity",
    "NonExistentQueue",
    "OptInRequired",
    "QueueDoesNotExist",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
    "UnsupportedOperation",
];

/// Plain configuration for a client: region, keys and, for emulators, an endpoint.
///
/// Not for roles, profiles and metadata services: those are what `aws-config` is for, and a client made
/// by it does here as well.
///
/// ```
/// use onlyonce_sqs::Connection;
///
/// let client = Connection::new("us-east-1", "test", "test").endpoint("http://localhost:9324").client()?;
/// # drop(client);
/// # Ok::<_, onlyonce_sqs::ConfigError>(())
/// ```
#[derive(Clone)]
#[must_use = "nothing is made before `client`"]
pub struct Connection {
    region: String,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    endpoint: Option<String>,
}

impl Connection {
    /// These keys, in this region.
    pub fn new(
        region: impl Into<String>,
        access_key_id: impl Into<String>,
        secret_access_key: impl Into<String>,
    ) -> Self {
        Self {
            region: region.into(),
            access_key_id: access_key_id.into(),
            secret_access_key: secret_access_key.into(),
            session_token: None,
            endpoint: None,
        }
    }

    /// The token that temporary keys come with.
    pub fn session_token(mut self, token: impl Into<String>) -> Self {
        self.session_token = Some(token.into());
        self
    }

    /// An emulator or a private endpoint, such as `http://localhost:9324`. Default: the region's own.
    pub fn endpoint(mut self, url: impl Into<String>) -> Self {
        self.endpoint = Some(url.into());
        self
    }

    /// Makes the client. Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// An endpoint that is no URL, and one with TLS while the feature `tls` is off.
    pub fn client(&self) -> Result<Client, ConfigError> {
        let problem = |text: &str| Err(ConfigError::of("client", vec![text.to_owned()]));
        let http = match self.endpoint.as_deref() {
            // The endpoint is not repeated: nobody knows which part of it is a secret.
            Some(url) if !url.starts_with("http://") && !url.starts_with("https://") => {
                return problem("endpoint is not a URL with the scheme http or https");
            }
            Some(url) if url.starts_with("http://") => plain_http(),
            _ => match tls() {
                Some(http) => http,
                None => return problem("endpoint needs TLS (switch on the feature `tls`)"),
            },
        };
        let credentials = Credentials::new(
            &self.access_key_id,
            &self.secret_access_key,
            self.session_token.clone(),
            None,
            "onlyonce",
        );
        let mut config = aws_sdk_sqs::Config::builder()
            .behavior_version(BehaviorVersion::v2026_01_12())
            .region(Region::new(self.region.clone()))
            .credentials_provider(credentials)
            .http_client(http);
        if let Some(url) = &self.endpoint {
            config = config.endpoint_url(url);
        }
        Ok(Client::from_conf(config.build()))
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("region", &self.region)
            .field("endpoint", &self.endpoint.is_some())
            .finish_non_exhaustive()
    }
}

/// Named, because without default features the SDK has none and says so only at the first call.
fn plain_http() -> SharedHttpClient {
    aws_smithy_http_client::Builder::new().build_http()
}

#[cfg(feature = "tls")]
fn tls() -> Option<SharedHttpClient> {
    use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
    let provider = Provider::Rustls(CryptoMode::Ring);
    Some(
        aws_smithy_http_client::Builder::new()
            .tls_provider(provider)
            .build_https(),
    )
}

#[cfg(not(feature = "tls"))]
fn tls() -> Option<SharedHttpClient> {
    None
}

/// What went wrong with a whole call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// What SQS calls it, or what happened instead of an answer.
    pub(crate) text: String,
    /// What SQS calls it in one word, if it answered.
    pub(crate) code: Option<String>,
    /// A person has to change something.
    pub(crate) refused: bool,
    /// Nobody knows whether SQS has done what it was called for.
    pub(crate) unanswered: bool,
}

impl Trouble {
    /// In words for an operator.
    pub(crate) fn explain(&self, settings: &Settings, doing: &str) -> SourceError {
        let text = format!(
            "cannot {doing} the SQS queue {:?} at {}: {}",
            settings.name, settings.url, self.text
        );
        if self.refused {
            SourceError::fatal(text)
        } else {
            SourceError::broken(text)
        }
    }
}

/// Waits for a call's answer, but not longer than `limit`.
pub(crate) async fn within<T, E>(
    limit: Duration,
    call: impl Future<Output = Result<T, SdkError<E>>>,
) -> Result<T, Trouble>
where
    E: ProvideErrorMetadata + StdError + 'static,
{
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(trouble(&error)),
        Err(_) => Err(Trouble {
            text: format!("no answer within {limit:?}"),
            code: None,
            refused: false,
            unanswered: true,
        }),
    }
}

fn trouble<E: ProvideErrorMetadata + StdError + 'static>(error: &SdkError<E>) -> Trouble {
    match error {
        SdkError::ServiceError(refusal) => {
            let code = refusal.err().code().unwrap_or("an error without a code");
            let text = match refusal.err().message() {
                Some(message) => format!("{code}: {message}"),
                None => code.to_owned(),
            };
            Trouble {
                refused: is_refusal(code),
                text,
                code: refusal.err().code().map(str::to_owned),
                // Something broke there, before or after it was done.
                unanswered: refusal.raw().status().is_server_error(),
            }
        }
        SdkError::ConstructionFailure(_) => Trouble {
            refused: true,
            text: chain(error),
            code: None,
            unanswered: false,
        },
        _ => Trouble {
            refused: false,
            text: chain(error),
            code: None,
            unanswered: true,
        },
    }
}

/// The same error has a name of its own in each of the two protocols.
fn is_refusal(code: &str) -> bool {
    let name = code.strip_prefix("AWS.SimpleQueueService.").unwrap_or(code);
    let of_the_key = name.starts_with("KMS.") || name.starts_with("Kms");
    REFUSALS.contains(&name) || (of_the_key && !name.contains("Throttl"))
}

/// The SDK's errors say only the outermost of what happened.
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_by_itself_is_no_refusal() {
        for code in [
            "AWS.SimpleQueueService.NonExistentQueue",
            "QueueDoesNotExist",
            "AccessDenied",
            "KMS.DisabledException",
            "KmsAccessDenied",
        ] {
            assert!(is_refusal(code), "{code}");
        }
        for code in [
            "RequestThrottled",
            "KMS.ThrottlingException",
            "KmsThrottled",
            "OverLimit",
            "ExpiredToken",
            "InternalError",
        ] {
            assert!(!is_refusal(code), "{code}");
        }
    }

    #[test]
    fn secrets_are_in_no_text() {
        let connection = Connection::new("r", "AKIAMARKER", "s3cr3t-marker")
            .session_token("t0ken-marker")
            .endpoint("ftp://u:s3cr3t-marker@h");
        let texts = [
            format!("{connection:?}"),
            connection.client().unwrap_err().to_string(),
            format!(
                "{:?}",
                crate::Sqs::queue(
                    connection.endpoint("http://127.0.0.1:1").client().unwrap(),
                    "http://h/q"
                )
            ),
        ];
        for text in texts {
            assert!(!text.to_lowercase().contains("marker"), "{text}");
        }
    }

    #[cfg(feature = "tls")]
    #[tokio::test]
    async fn a_handshake_with_a_server_that_speaks_none_is_an_error_and_no_panic() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("https://{}", listener.local_addr().unwrap());
        let server = tokio::spawn(async move { drop(listener.accept().await) });
        let client = Connection::new("r", "k", "s")
            .endpoint(endpoint)
            .client()
            .unwrap();
        let call = client.list_queues().send();
        let trouble = within(Duration::from_secs(10), call).await.unwrap_err();
        assert!(!trouble.refused, "{trouble:?}");
        server.await.unwrap();
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn tls_that_is_not_there_is_named_at_build_time() {
        for connection in [
            Connection::new("r", "k", "s"),
            Connection::new("r", "k", "s").endpoint("https://h"),
        ] {
            assert!(connection.client().unwrap_err().to_string().contains("`tls`"));
        }
    }
}
