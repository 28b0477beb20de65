use std::fmt;

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::RawEvent;

/// Decodes an event's payload into what a handler works on.
///
/// Called inside the guarded step, once per attempt. An error is a dead letter with reason
/// `undecodable` and the raw bytes: decoding again would not help.
///
/// A newtype of yours implements this for Avro, protobuf or any other format.
pub trait FromEvent: Sized + Send + 'static {
    /// Decodes the payload; may look at headers and content type.
    fn from_event(raw: &RawEvent) -> Result<Self, DecodeError>;
}

/// Why a payload could not be decoded. The text is stored with the dead letter.
#[derive(Debug)]
pub struct DecodeError(String);

impl DecodeError {
    /// An error with this text.
    pub fn new(message: impl fmt::Display) -> Self {
        Self(message.to_string())
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for DecodeError {}

/// A JSON payload. A null payload (a tombstone) is an error here; `Option<Json<T>>` accepts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned + Send + 'static> FromEvent for Json<T> {
    fn from_event(raw: &RawEvent) -> Result<Self, DecodeError> {
        let body = Bytes::from_event(raw)?;
        serde_json::from_slice(&body)
            .map(Json)
            .map_err(|e| DecodeError::new(format_args!("the body is not the expected JSON: {e}")))
    }
}

impl FromEvent for Bytes {
    fn from_event(raw: &RawEvent) -> Result<Self, DecodeError> {
        raw.payload.clone().ok_or_else(|| {
            DecodeError::new(
                "the payload is null (a handler that takes tombstones has an Option as its payload)",
            )
        })
    }
}

/// `None` for a null payload and for nothing else: an undecodable body stays an error.
impl<P: FromEvent> FromEvent for Option<P> {
    fn from_event(raw: &RawEvent) -> Result<Self, DecodeError> {
        match raw.payload {
            None => Ok(None),
            Some(_) => P::from_event(raw).map(Some),
        }
    }
}
