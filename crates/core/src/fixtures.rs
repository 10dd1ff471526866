//! An event, its pointer, and the message made of them: the start of the tests of a message's parts.

use crate::envelope::{Refusal, publication};
use crate::form::Form;
use crate::headers::encoded_unless;
use crate::message::{Event, HeaderValue, Pointer, Publication};
use crate::partition::Partition;
use crate::route::{Format, Route, Statics, Template};
use crate::text::Text;

pub(crate) const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A peer with properties, which refuses a header.
pub(crate) const TYPED: &Form = &Form {
    address: "routing key",
    check_name: |name| match name {
        "barred" => Err(Refusal::new("barred", "Leave it out.")),
        _ => Ok(()),
    },
    ..Form::TYPED
};

/// A peer with names in lower case, a header of its own, and values in visible ASCII without line breaks.
pub(crate) const TEXT: &Form = &Form {
    name: Some(
        |name| match name.is_ascii() && !name.contains([' ', '\r', '\n', ':']) && !name.is_empty() {
            true => Ok(name.to_ascii_lowercase()),
            false => Err(Refusal::new("no name", "Choose another one.")),
        },
    ),
    is_reserved: |name| name == "reserved",
    value: |text| {
        Text::Owned(
            encoded_unless(text, |at| {
                matches!(text.as_bytes()[at], b'!'..=b'~') && !matches!(text.as_bytes()[at], b'"' | b'%')
            })
            .into_owned(),
        )
    },
    is_sendable: |text| !text.contains(|c: char| c.is_ascii_control() && c != '\t'),
    headers_max: 16 * 1024,
    ..Form::TEXT
};

pub(crate) fn pointer() -> Pointer {
    Pointer {
        seq: 42,
        destination: "default".into(),
        partition: Partition::new(7).unwrap(),
        key: Some("order-42".into()),
        attempts: 2,
        crashes: 0,
        lease_epoch: 5,
        replayed: false,
        enqueued_at_us: 0,
        expires_at_us: None,
    }
}

pub(crate) fn event() -> Event {
    Event {
        id: "0198a3f2-0000-7000-8000-000000000001".into(),
        seq: 42,
        kind: "OrderPlaced".into(),
        aggregate_type: Some("Order".into()),
        aggregate_id: Some("42".into()),
        operation: Some("INSERT".into()),
        payload: r#"{"total": 1.10,  "b":1,"a":2}"#.into(),
        previous_payload: Some("[1 , 2]".into()),
        metadata: Some(r#"{"n":1e2}"#.into()),
        headers: Some(r#"{"tenant": "acme"}"#.into()),
        actor: Some("kim".into()),
        correlation_id: Some("c-1".into()),
        created_at: "2026-01-31T12:00:00.000001Z".into(),
        created_at_s: 1_769_860_800,
    }
}

/// The smallest possible event.
pub(crate) fn bare_event() -> Event {
    Event {
        id: "1".into(),
        kind: "T".into(),
        payload: "null".into(),
        created_at: "2026-01-31T12:00:00.000000Z".into(),
        ..Event::default()
    }
}

/// Another event that differs in some fields.
pub(crate) fn event_with(change: impl FnOnce(&mut Event)) -> Event {
    let mut event = event();
    change(&mut event);
    event
}

pub(crate) fn made(
    pointer: &Pointer,
    event: &Event,
    form: &'static Form,
    format: Format,
    statics: &Statics,
) -> Result<Publication, Refusal> {
    let route = Route {
        form,
        format,
        address: &Template::parse("{aggregate_type}.{operation}").unwrap(),
        statics,
    };
    publication(9, pointer, event.clone(), &route)
}

pub(crate) fn text(value: &str) -> HeaderValue {
    HeaderValue::Text(value.to_owned().into())
}

/// Value of the header as text; none if absent.
pub(crate) fn header(publication: &Publication, wanted: &str) -> Option<String> {
    let mut found = publication.properties.headers.iter().filter(|(name, _)| name == wanted);
    let (first, second) = (found.next(), found.next());
    assert!(second.is_none(), "{wanted} comes twice");
    first.map(|(_, value)| value.to_string())
}

pub(crate) fn names(publication: &Publication) -> Vec<&str> {
    publication
        .properties
        .headers
        .iter()
        .map(|(name, _)| name.as_str())
        .collect()
}
