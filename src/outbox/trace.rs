//! The trace to which an outgoing event belongs: as W3C Trace Context, in its headers.

use bytes::Bytes;

use crate::event::Headers;

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";

/// The most that is carried on of a trace's state, as the standard asks of everybody.
const MAX_STATE: usize = 512;

/// An event's headers with the context that it goes on under: its own, else that of the event which has
/// caused it. A context that is none is left out: it must not make the event fail.
pub(super) fn carried_on(mut headers: Headers, cause: Option<&Headers>) -> Headers {
    let context = Context::of(&headers).or_else(|| cause.and_then(Context::of));
    headers.retain(|name| !name.eq_ignore_ascii_case(TRACEPARENT) && !name.eq_ignore_ascii_case(TRACESTATE));
    if let Some(context) = context {
        headers.push(TRACEPARENT, context.parent);
        if let Some(state) = context.state {
            headers.push(TRACESTATE, state);
        }
    }
    headers
}

struct Context {
    parent: Bytes,
    state: Option<Bytes>,
}

impl Context {
    fn of(headers: &Headers) -> Option<Self> {
        let parent = last(headers, TRACEPARENT).filter(|value| is_parent(value))?;
        let is_state = |value: &&[u8]| {
            (1..=MAX_STATE).contains(&value.len()) && value.iter().all(|byte| matches!(byte, b' '..=b'~'))
        };
        let state = last(headers, TRACESTATE).filter(is_state);
        Some(Self {
            parent: Bytes::copy_from_slice(parent),
            state: state.map(Bytes::copy_from_slice),
        })
    }
}

fn last<'a>(headers: &'a Headers, name: &str) -> Option<&'a [u8]> {
    let named = headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name));
    named.last().and_then(|(_, value)| value)
}

/// Four lower-case hexadecimal numbers: version, trace, parent, flags. In this version of the standard that
/// is all, 55 characters; the numbers of trace and parent are not zero.
fn is_parent(value: &[u8]) -> bool {
    let parts: Vec<&[u8]> = value.split(|byte| *byte == b'-').collect();
    let [version, trace, parent, flags] = parts.as_slice() else {
        return false;
    };
    let is_hex = |part: &[u8], len: usize| {
        part.len() == len && part.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_zero = |part: &[u8]| part.iter().all(|byte| *byte == b'0');
    is_hex(version, 2)
        && *version != b"ff"
        && is_hex(trace, 32)
        && !is_zero(trace)
        && is_hex(parent, 16)
        && !is_zero(parent)
        && is_hex(flags, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    const OTHER: &str = "00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-00";

    fn headers(pairs: &[(&str, &str)]) -> Headers {
        pairs
            .iter()
            .map(|(name, value)| (*name, Bytes::copy_from_slice(value.as_bytes())))
            .collect()
    }

    fn carried(own: &[(&str, &str)], cause: &[(&str, &str)]) -> Headers {
        carried_on(headers(own), Some(&headers(cause)))
    }

    #[test]
    fn the_events_own_context_wins_and_its_state_stays_with_it() {
        let cause = [("Traceparent", OTHER), ("tracestate", "of=cause")];
        let own = [("a", "1"), ("traceparent", GOOD)];
        assert_eq!(carried(&own, &cause), headers(&own));
        assert_eq!(
            carried(&[("a", "1")], &cause),
            headers(&[("a", "1"), ("traceparent", OTHER), ("tracestate", "of=cause")])
        );
    }

    #[test]
    fn a_context_that_is_none_is_left_out() {
        let long = format!("{GOOD}{}", "0".repeat(10_000));
        for bad in [
            "",
            "00",
            &GOOD[..54],
            &long,
            &GOOD.to_uppercase(),
            &GOOD.replace("00-", "ff-"),
            &GOOD.replace('4', "g"),
            &GOOD.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &GOOD.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &format!("{GOOD}-00"),
            "00-é",
        ] {
            assert_eq!(carried(&[], &[("traceparent", bad)]), Headers::new(), "{bad:.80}");
            let own = [("traceparent", bad), ("tracestate", "x=1")];
            let cause = [("traceparent", GOOD)];
            assert_eq!(carried(&own, &cause), headers(&cause), "{bad:.80}");
        }
    }

    #[test]
    fn a_state_that_is_too_long_or_unprintable_does_not_take_the_parent_with_it() {
        for bad in [&"x".repeat(513), "a\nb", "é", ""] {
            let cause = [("traceparent", GOOD), ("tracestate", bad)];
            assert_eq!(carried(&[], &cause), headers(&[("traceparent", GOOD)]));
        }
    }
}
