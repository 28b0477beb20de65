use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Headers as brokers really carry them: ordered, names may repeat, values are bytes and may be null.
/// A clone shares them until one of the two is changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Headers(Arc<Vec<(String, Option<Bytes>)>>);

/// The first byte of the stored form, so that a later version can tell its own from ours.
const ENCODING: u8 = 1;

impl Headers {
    /// No headers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a header at the end; an earlier one of the same name stays.
    pub fn push(&mut self, name: impl Into<String>, value: impl Into<Bytes>) {
        Arc::make_mut(&mut self.0).push((name.into(), Some(value.into())));
    }

    /// Adds a header without a value, as Kafka knows them.
    pub fn push_null(&mut self, name: impl Into<String>) {
        Arc::make_mut(&mut self.0).push((name.into(), None));
    }

    /// The value of the last header of this name; names are compared byte for byte.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.0
            .iter()
            .rev()
            .find(|(n, _)| n == name)
            .and_then(|(_, value)| value.as_deref())
    }

    /// Every header of this name, in order. A null value is `None`.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Option<&'a [u8]>> + 'a {
        self.0
            .iter()
            .filter(move |(n, _)| n == name)
            .map(|(_, value)| value.as_deref())
    }

    /// All headers, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_deref()))
    }

    /// How many headers there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Keeps the headers whose name passes.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        Arc::make_mut(&mut self.0).retain(|(name, _)| keep(name));
    }

    pub(crate) fn size(&self) -> usize {
        self.0
            .iter()
            .map(|(name, value)| name.len() + value.as_ref().map_or(0, Bytes::len))
            .sum()
    }

    /// The stored form: one version byte, then per header the name and the value, each behind its
    /// length. Bytes in, the same bytes out, whatever a producer put there.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = BytesMut::with_capacity(1 + self.size() + self.0.len() * 9);
        out.put_u8(ENCODING);
        for (name, value) in self.0.iter() {
            out.put_u32(name.len() as u32);
            out.put_slice(name.as_bytes());
            match value {
                None => out.put_u8(0),
                Some(value) => {
                    out.put_u8(1);
                    out.put_u32(value.len() as u32);
                    out.put_slice(value);
                }
            }
        }
        out.to_vec()
    }

    /// Reads the stored form; `None` if it is not one.
    pub(crate) fn decode(stored: &[u8]) -> Option<Self> {
        let mut rest = Bytes::copy_from_slice(stored);
        if !rest.has_remaining() || rest.get_u8() != ENCODING {
            return None;
        }
        let mut headers = Vec::new();
        while rest.has_remaining() {
            let name = String::from_utf8(take(&mut rest)?.to_vec()).ok()?;
            let value = match rest.try_get_u8().ok()? {
                0 => None,
                1 => Some(take(&mut rest)?),
                _ => return None,
            };
            headers.push((name, value));
        }
        Some(Self(Arc::new(headers)))
    }
}

fn take(rest: &mut Bytes) -> Option<Bytes> {
    let len = rest.try_get_u32().ok()? as usize;
    (rest.len() >= len).then(|| rest.split_to(len))
}

impl<N: Into<String>, V: Into<Bytes>> FromIterator<(N, V)> for Headers {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(headers: I) -> Self {
        let headers = headers.into_iter();
        Self(Arc::new(
            headers
                .map(|(name, value)| (name.into(), Some(value.into())))
                .collect(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_form_keeps_order_repeats_nulls_and_any_bytes() {
        let mut headers = Headers::new();
        headers.push("a", &b"\0\xff"[..]);
        headers.push_null("b");
        headers.push("a", &b""[..]);
        assert_eq!(Headers::decode(&headers.encode()), Some(headers.clone()));
        assert_eq!(headers.get("a"), Some(&b""[..]), "the last one wins");
        assert_eq!(headers.all("a").count(), 2);
    }

    #[test]
    fn cut_or_foreign_bytes_are_refused_rather_than_misread() {
        let mut headers = Headers::new();
        headers.push("name", &b"value"[..]);
        let stored = headers.encode();
        for cut in 2..stored.len() {
            assert_eq!(Headers::decode(&stored[..cut]), None, "cut at {cut}");
        }
        assert_eq!(Headers::decode(b""), None);
        assert_eq!(Headers::decode(b"\x02abc"), None);
    }
}
