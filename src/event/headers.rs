use std::fmt;

use bytes::{BufMut, Bytes, BytesMut};

/// Headers as brokers really carry them: ordered, names may repeat, values are bytes and may be null.
///
/// All of them stand in one piece of memory, in the form in which they are stored: an event has many small
/// ones, and each is looked at a few times at most. A clone shares it until one of the two is changed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Headers(Bytes);

/// The first byte of the stored form, so that a later version can tell its own from ours.
const ENCODING: u8 = 1;

impl Headers {
    /// No headers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a header at the end; an earlier one of the same name stays.
    pub fn push(&mut self, name: impl AsRef<str>, value: impl AsRef<[u8]>) {
        self.add(name.as_ref(), Some(value.as_ref()));
    }

    /// Adds a header without a value, as Kafka knows them.
    pub fn push_null(&mut self, name: impl AsRef<str>) {
        self.add(name.as_ref(), None);
    }

    fn add(&mut self, name: &str, value: Option<&[u8]>) {
        let fields = std::mem::take(&mut self.0).try_into_mut();
        let mut fields = fields.unwrap_or_else(|shared| BytesMut::from(&*shared));
        write(&mut fields, name, value);
        self.0 = fields.freeze();
    }

    /// Adds one header to bytes that [`read`](Self::read) takes: for a source that copies all of a message
    /// into one piece of memory. It takes the name's and the value's length, and at most 9 bytes more.
    pub fn write(out: &mut Vec<u8>, name: &str, value: Option<&[u8]>) {
        write(out, name, value);
    }

    /// The headers that were [written](Self::write) into these bytes, without a copy. `None` if there is
    /// anything else in them.
    pub fn read(fields: Bytes) -> Option<Self> {
        let mut rest = &*fields;
        while !rest.is_empty() {
            let (name, _) = field(&mut rest)?;
            std::str::from_utf8(name).ok()?;
        }
        Some(Self(fields))
    }

    /// The same, where nobody else has put anything into them.
    pub(crate) fn written(fields: Vec<u8>) -> Self {
        Self(fields.into())
    }

    /// The value of the last header of this name; names are compared byte for byte.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let named = self.fields().filter(|field| field.0 == name.as_bytes());
        named.last()?.1
    }

    /// Every header of this name, in order. A null value is `None`.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Option<&'a [u8]>> + 'a {
        self.fields()
            .filter(move |field| field.0 == name.as_bytes())
            .map(|field| field.1)
    }

    /// All headers, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Option<&[u8]>)> {
        // They were texts when they were added.
        self.fields()
            .map(|(name, value)| (std::str::from_utf8(name).unwrap_or_default(), value))
    }

    /// How many headers there are.
    pub fn len(&self) -> usize {
        self.fields().count()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Keeps the headers whose name passes.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        let mut kept = BytesMut::with_capacity(self.0.len());
        for (name, value) in self.iter().filter(|(name, _)| keep(name)) {
            write(&mut kept, name, value);
        }
        self.0 = kept.freeze();
    }

    pub(crate) fn size(&self) -> usize {
        self.fields()
            .map(|(name, value)| name.len() + value.map_or(0, <[u8]>::len))
            .sum()
    }

    /// The stored form: one version byte, then per header the name and the value, each behind its
    /// length. Bytes in, the same bytes out, whatever a producer put there.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(1 + self.0.len());
        out.push(ENCODING);
        out.extend_from_slice(&self.0);
        out
    }

    /// Reads the stored form; `None` if it is not one.
    pub(crate) fn decode(stored: &[u8]) -> Option<Self> {
        let (encoding, fields) = stored.split_first()?;
        (*encoding == ENCODING)
            .then(|| Bytes::copy_from_slice(fields))
            .and_then(Self::read)
    }

    fn fields(&self) -> Fields<'_> {
        Fields(&self.0)
    }
}

fn write(out: &mut impl BufMut, name: &str, value: Option<&[u8]>) {
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

type Field<'a> = (&'a [u8], Option<&'a [u8]>);

/// Takes one header off; `None` if there is none at the beginning.
fn field<'a>(rest: &mut &'a [u8]) -> Option<Field<'a>> {
    let name = part(rest)?;
    let (has_value, tail) = rest.split_first()?;
    *rest = tail;
    match has_value {
        0 => Some((name, None)),
        1 => Some((name, Some(part(rest)?))),
        _ => None,
    }
}

/// Takes off what stands behind its length.
fn part<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (len, tail) = rest.split_first_chunk::<4>()?;
    let (part, tail) = tail.split_at_checked(u32::from_be_bytes(*len) as usize)?;
    *rest = tail;
    Some(part)
}

struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = Field<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        field(&mut self.0)
    }
}

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self
            .iter()
            .map(|(name, value)| (name, value.map(Bytes::copy_from_slice)));
        f.debug_list().entries(shown).finish()
    }
}

impl<N: AsRef<str>, V: AsRef<[u8]>> FromIterator<(N, V)> for Headers {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(headers: I) -> Self {
        let mut fields = BytesMut::new();
        for (name, value) in headers {
            write(&mut fields, name.as_ref(), Some(value.as_ref()));
        }
        Self(fields.freeze())
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
    fn a_clone_keeps_what_the_other_changes() {
        let mut headers: Headers = [("a", "1"), ("b", "2")].into_iter().collect();
        let before = headers.clone();
        headers.push("c", "3");
        headers.retain(|name| name != "a");
        let names = |headers: &Headers| {
            headers
                .iter()
                .map(|(name, _)| name.to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&before), ["a", "b"]);
        assert_eq!(names(&headers), ["b", "c"]);
        assert_eq!((headers.len(), headers.size()), (2, 4));
        assert_eq!(format!("{before:?}"), r#"[("a", Some(b"1")), ("b", Some(b"2"))]"#);
    }

    #[test]
    fn a_source_writes_what_is_read_and_nothing_else() {
        let mut out = b"before".to_vec();
        Headers::write(&mut out, "name", Some(b"value"));
        Headers::write(&mut out, "void", None);
        let written = Bytes::from(out);
        let read = Headers::read(written.slice(6..)).unwrap();
        assert_eq!(
            read.iter().collect::<Vec<_>>(),
            [("name", Some(&b"value"[..])), ("void", None)]
        );
        assert_eq!(Headers::read(written), None);
        assert_eq!(
            Headers::read(Bytes::from_static(b"\0\0\0\x01\xff\0")),
            None,
            "a name is a text"
        );
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
