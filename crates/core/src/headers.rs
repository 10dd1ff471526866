//! The headers of a message: those of outbox, of its destination, and of the user. Called by `envelope`.
//!
//! Some peers know typed values under any name, beside properties; others text alone. So there are two sets of names with
//! one meaning; [`Form`] says which.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::form::{Form, HEADERS_MAX, PAYLOAD_HEADERS, SYSTEM_HEADERS};
use crate::format::Format;
use crate::json::{decimal, not_json};
use crate::message::{Event, HeaderValue, Pointer};
use crate::refusal::{Refusal, check_short};
use crate::route::Route;
use crate::template::Values;
use crate::text::Text;

/// Name and value.
pub(crate) type Header = (Text, HeaderValue);

/// The part of [`HEADERS_MAX`] that is reserved for headers of outbox, so that headers that pass [`check_headers`] at
/// enqueue do not fail later. It holds aggregate_type and aggregate_id; the rest is under 300 bytes.
pub const SYSTEM_HEADERS_RESERVED: usize = 4 * 1024;

/// Checks the headers of the user at enqueue, where the destination may be of any of these forms.
///
/// # Errors [`Refusal`] unless they are a JSON object that fits in the part of [`HEADERS_MAX`] left for it. Its names
/// have at most 255 bytes, and no form refuses one.
pub fn check_headers(json: &str, forms: &[&Form]) -> Result<(), Refusal> {
    own(json, forms).map(drop)
}

/// All headers, each name once: those of outbox, `more` of its format, those of the destination, and the remaining
/// `own` ones of the user. Takes texts that only headers have out of the event.
pub(crate) fn all(
    pointer: &Pointer,
    event: &mut Event,
    route: &Route<'_>,
    more: Vec<Header>,
    own: Vec<Header>,
) -> Result<Vec<Header>, Refusal> {
    let (form, statics) = (route.form, &route.statics.headers);
    let mut of_destination = Vec::new();
    for (name, template) in statics.iter() {
        let rendered = template.render(&Values::new(pointer, event, &own));
        let value = rendered.map_err(|long| long.refusal(&format!("header {name}"), "the limit of its template"))?;
        if !value.is_empty() {
            of_destination.push((name.clone(), HeaderValue::Text(value)));
        }
    }
    let mut headers = Vec::with_capacity(13 + more.len() + of_destination.len() + own.len());
    match form.has_properties {
        true => push_beside_properties(&mut headers, pointer, event, route.format),
        false => push_as_text(&mut headers, pointer, event, route),
    }
    headers.extend(more);
    headers.extend(of_destination);
    let own = as_sent(own, form)?;
    headers.extend(
        own.into_iter()
            .filter(|(name, _)| !form.is_taken(route.format, name) && statics.iter().all(|(other, _)| other != name)),
    );
    check_values(&headers, form)?;
    check_size(&headers, form.has_properties, form.headers_max)?;
    Ok(headers)
}

fn push_beside_properties(headers: &mut Vec<Header>, pointer: &Pointer, event: &mut Event, format: Format) {
    let mut push = |name: &'static str, value: Option<String>| {
        headers.extend(value.map(|value| (name.into(), HeaderValue::Text(value.into()))));
    };
    let [id, aggregate_type, aggregate_id, delivery @ ..] = SYSTEM_HEADERS;
    push(id, Some(event.id.clone()));
    push(aggregate_type, event.aggregate_type.take());
    push(aggregate_id, event.aggregate_id.take());
    if format == Format::Payload {
        let [key, operation, actor, metadata, created_at] = PAYLOAD_HEADERS;
        push(key, pointer.key.clone());
        push(operation, event.operation.take());
        push(actor, event.actor.take());
        push(metadata, event.metadata.take());
        push(created_at, Some(std::mem::take(&mut event.created_at)));
    }
    push_delivery(headers, pointer, delivery);
}

/// There are only headers, so what would be properties is here too.
fn push_as_text(headers: &mut Vec<Header>, pointer: &Pointer, event: &Event, route: &Route<'_>) {
    let mut push = |name: &'static str, value: Option<&str>| {
        headers.extend(value.map(|value| (name.into(), HeaderValue::Text((route.form.value)(value)))));
    };
    push("outbox-id", Some(&event.id));
    push("outbox-type", Some(&event.kind));
    push("outbox-aggregate-type", event.aggregate_type.as_deref());
    push("outbox-aggregate-id", event.aggregate_id.as_deref());
    push("outbox-key", pointer.key.as_deref());
    push("outbox-correlation-id", event.correlation_id.as_deref());
    push("outbox-created-at", Some(&event.created_at));
    push("outbox-app-id", Some(&route.statics.app_id));
    if route.format == Format::Payload {
        push("outbox-operation", event.operation.as_deref());
        push("outbox-actor", event.actor.as_deref());
        push("outbox-metadata", event.metadata.as_deref());
    }
    let names = [
        "outbox-partition-key",
        "outbox-seq",
        "outbox-lease-epoch",
        "outbox-attempt",
        "outbox-replayed",
    ];
    push_delivery(headers, pointer, names);
}

/// What concerns the delivery and not the event. The last header is only there if the value is true.
fn push_delivery(headers: &mut Vec<Header>, pointer: &Pointer, names: [&'static str; 5]) {
    let values = [
        HeaderValue::Text(pointer.partition.label().into()),
        HeaderValue::Int(pointer.seq),
        HeaderValue::Int(pointer.lease_epoch),
        HeaderValue::Int(i64::from(pointer.attempts) + 1),
        HeaderValue::Bool(true),
    ];
    let count = names.len() - usize::from(!pointer.replayed);
    headers.extend(names.into_iter().map(Text::Static).zip(values).take(count));
}

/// The headers of the user by name. Of a repeated name the last value counts, as in jsonb.
pub(crate) fn own(json: &str, forms: &[&Form]) -> Result<Vec<Header>, Refusal> {
    let values: BTreeMap<String, &RawValue> = serde_json::from_str(json).map_err(|error| {
        if !error.is_data() {
            return not_json("headers", &error);
        }
        Refusal::new(
            "headers are not a JSON object",
            "Pass headers as an object, such as {\"tenant\": \"acme\"}.",
        )
    })?;
    let mut headers = Vec::with_capacity(values.len());
    for (name, value) in values {
        check_short("name of a header", &name)?;
        forms.iter().try_for_each(|form| (form.check_name)(&name))?;
        headers.extend(header_value(value.get())?.map(|value| (Text::Owned(name), value)));
    }
    check_size(&headers, true, HEADERS_MAX - SYSTEM_HEADERS_RESERVED)?;
    Ok(headers)
}

/// One valid JSON value as a header; null means no header. A value that a header cannot hold without loss becomes the
/// text of its JSON: objects, arrays, integers beyond 64 bits, numbers with more digits or a larger exponent than a
/// double.
fn header_value(json: &str) -> Result<Option<HeaderValue>, Refusal> {
    let as_text = || HeaderValue::Text(json.to_owned().into());
    Ok(Some(match json.as_bytes().first() {
        Some(b'n') => return Ok(None),
        Some(b't') => HeaderValue::Bool(true),
        Some(b'f') => HeaderValue::Bool(false),
        Some(b'"') => {
            let text: String = serde_json::from_str(json).map_err(|error| not_json("headers", &error))?;
            HeaderValue::Text(text.into())
        }
        Some(b'{' | b'[') => as_text(),
        _ if !json.contains(['.', 'e', 'E']) => json.parse().map_or_else(|_| as_text(), HeaderValue::Int),
        _ => match json.parse::<f64>() {
            Ok(number) if decimal(&format!("{number:e}")) == decimal(json) => HeaderValue::Float(number),
            _ => as_text(),
        },
    }))
}

/// Under the names that are sent, each once.
fn as_sent(own: Vec<Header>, form: &Form) -> Result<Vec<Header>, Refusal> {
    let Some(sent) = form.name else {
        return Ok(own);
    };
    let mut by_name = BTreeMap::new();
    for (name, value) in own {
        by_name.insert(sent(&name)?, value);
    }
    Ok(by_name
        .into_iter()
        .map(|(name, value)| (Text::Owned(name), value))
        .collect())
}

fn check_values(headers: &[Header], form: &Form) -> Result<(), Refusal> {
    let refused = headers
        .iter()
        .find(|(_, value)| matches!(value, HeaderValue::Text(text) if !(form.is_sendable)(text)));
    refused.map_or(Ok(()), |(name, _)| {
        Err(Refusal::new(
            format!("the header {name} contains a line break or another control character"),
            "The destination cannot carry it. Put the value into the payload.",
        ))
    })
}

/// `%XY` for each byte that is not plain; only ASCII can be plain. The table is indexed by the byte.
pub fn encoded_unless(text: &str, is_plain: impl Fn(usize) -> bool) -> Cow<'_, str> {
    if (0..text.len()).all(&is_plain) {
        return Cow::Borrowed(text);
    }
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let mut encoded = String::with_capacity(text.len() + 16);
    for (at, byte) in text.bytes().enumerate() {
        if is_plain(at) {
            encoded.push(char::from(byte));
        } else {
            encoded.push('%');
            encoded.push(char::from(HEX[usize::from(byte >> 4)]));
            encoded.push(char::from(HEX[usize::from(byte & 15)]));
        }
    }
    Cow::Owned(encoded)
}

/// Refuses headers that take more bytes.
fn check_size(headers: &[Header], are_typed: bool, bytes_max: usize) -> Result<(), Refusal> {
    let bytes = bytes(headers, are_typed);
    match bytes <= bytes_max {
        true => Ok(()),
        false => Err(Refusal::new(
            format!("the headers take {bytes} bytes; the limit is {bytes_max}"),
            "Put large values into the payload.",
        )),
    }
}

/// The size of a table with a length, and with name, type and value of each header; or of lines of text, with numbers at
/// their longest.
fn bytes(headers: &[Header], are_typed: bool) -> usize {
    let (length, frame, text, number, flag) = match are_typed {
        true => (4, 2, 4, 8, 1),
        false => (0, 4, 0, 24, 5),
    };
    let of_one = |(name, value): &Header| {
        let value_bytes = match value {
            HeaderValue::Text(value) => text + value.len(),
            HeaderValue::Int(_) | HeaderValue::Float(_) => number,
            HeaderValue::Bool(_) => flag,
        };
        frame + name.len() + value_bytes
    };
    length + headers.iter().map(of_one).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{
        TEXT, TRACEPARENT, TYPED, bare_event, event, event_with, header, made, names, pointer, text,
    };
    use crate::message::Publication;
    use crate::route::Statics;
    use proptest::prelude::*;

    fn read(json: &str) -> Vec<Header> {
        own(json, &[]).unwrap()
    }

    fn with_own(form: &'static Form, format: Format, json: &str) -> Result<Publication, Refusal> {
        let event = event_with(|e| e.headers = Some(json.to_owned()));
        made(&pointer(), &event, form, format, &Statics::default())
    }

    #[test]
    fn a_user_header_keeps_its_type() {
        let found =
            read(r#"{"b": true, "f": 1.5, "i": -3, "n": null, "s": "é\n", "traceparent": "00-ab-cd-01", "z": false}"#);
        let expected = [
            ("b", HeaderValue::Bool(true)),
            ("f", HeaderValue::Float(1.5)),
            ("i", HeaderValue::Int(-3)),
            ("s", text("é\n")),
            ("traceparent", text("00-ab-cd-01")),
            ("z", HeaderValue::Bool(false)),
        ];
        assert_eq!(found, expected.map(|(name, value)| (name.into(), value)));
    }

    #[test]
    fn a_value_that_a_header_cannot_hold_becomes_the_text_of_its_json() {
        let found = read(r#"{"a": [1, "x"], "big": 18446744073709551616, "huge": 1e999, "o": {"z":1, "a":1.10}}"#);
        let expected = [
            ("a", r#"[1, "x"]"#),
            ("big", "18446744073709551616"),
            ("huge", "1e999"),
            ("o", r#"{"z":1, "a":1.10}"#),
        ];
        assert_eq!(found, expected.map(|(name, value)| (name.into(), text(value))));
        assert_eq!(read(r#"{"e": 1e2, "w": 2.0}"#)[0].1, HeaderValue::Float(100.0));
        let number = |json: &str| header_value(json).unwrap_or_default();
        for (json, float) in [
            ("1.10", 1.1),
            ("-0.5", -0.5),
            ("0.0", 0.0),
            ("-0.0", -0.0),
            ("12345.678e-3", 12.345678),
            ("0.001", 1e-3),
            ("1E+2", 100.0),
        ] {
            assert_eq!(number(json), Some(HeaderValue::Float(float)), "{json}");
        }
        for json in [
            "0.12345678901234567890123",
            "-9007199254740993.0",
            "1e-400",
            "1.7976931348623159e308",
        ] {
            assert_eq!(number(json), Some(HeaderValue::Text(json.into())), "{json}");
        }
    }

    #[test]
    fn the_last_of_a_repeated_header_counts() {
        assert_eq!(read(r#"{"a": 1, "a": 2}"#), [("a".into(), HeaderValue::Int(2))]);
    }

    #[test]
    fn headers_that_a_form_refuses_are_refused_at_enqueue() {
        let json = r#"{"barred": "a.b"}"#;
        assert_eq!(check_headers(json, &[TEXT, TYPED]).unwrap_err().message, "barred");
        assert_eq!(check_headers(json, &[TEXT]), Ok(()));
    }

    #[test]
    fn headers_are_an_object() {
        for json in ["[]", "1", "\"a\"", "null"] {
            assert_eq!(
                check_headers(json, &[TYPED]).unwrap_err().message,
                "headers are not a JSON object",
                "{json}"
            );
        }
        for json in ["", "{", "{\"a\"}", "{\"a\": tru}", r#"{"a": "\ud800"}"#, "{} x"] {
            assert!(
                check_headers(json, &[TYPED])
                    .unwrap_err()
                    .message
                    .contains("not valid JSON"),
                "{json}"
            );
        }
        assert_eq!(check_headers(" {} ", &[TYPED]), Ok(()));
    }

    #[test]
    fn a_header_name_over_255_bytes_is_refused() {
        assert_eq!(
            check_headers(&format!(r#"{{"{}": 1}}"#, "n".repeat(255)), &[TYPED]),
            Ok(())
        );
        assert!(check_headers(&format!(r#"{{"{}": 1}}"#, "n".repeat(256)), &[TYPED]).is_err());
    }

    #[test]
    fn a_header_of_the_user_never_overrides_one_of_outbox() {
        let payloads = SYSTEM_HEADERS
            .iter()
            .chain(&PAYLOAD_HEADERS)
            .map(|name| (TYPED, Format::Payload, *name));
        let envelopes = SYSTEM_HEADERS.iter().map(|name| (TYPED, Format::Envelope, *name));
        let attributes = ["ce-id", "Ce-Source", "CE-x"].into_iter().flat_map(|name| {
            [
                (TYPED, Format::CloudEvents, name),
                (TYPED, Format::CloudEventsBinary, name),
                (TEXT, Format::CloudEventsBinary, name),
            ]
        });
        let texts = ["outbox-seq", "Outbox-Forged", "RESERVED"];
        let texts = texts.into_iter().map(|name| (TEXT, Format::Envelope, name));
        for (form, format, name) in payloads.chain(envelopes).chain(attributes).chain(texts) {
            // Also if outbox has no value to set.
            let bare = Event {
                headers: Some(format!(r#"{{"{name}": "forged", "mine": 1}}"#)),
                ..bare_event()
            };
            let publication = made(&pointer(), &bare, form, format, &Statics::default()).unwrap();
            for (_, value) in &publication.properties.headers {
                assert!(*value != text("forged"), "{form:?} {format:?} {name}");
            }
            assert_eq!(header(&publication, "mine").as_deref(), Some("1"));
        }
    }

    #[test]
    fn names_reserved_in_another_format_are_free_for_the_user() {
        let json = r#"{"actor": "a", "ce-id": "b", "outbox-seq": "c"}"#;
        let publication = with_own(TYPED, Format::Envelope, json).unwrap();
        for (name, value) in [("actor", "a"), ("ce-id", "b"), ("outbox-seq", "c")] {
            assert_eq!(header(&publication, name).as_deref(), Some(value));
        }
        let publication = with_own(TEXT, Format::Payload, r#"{"actor": "a", "seq": 1, "ce-id": "b"}"#).unwrap();
        for (name, value) in [("actor", "a"), ("seq", "1"), ("ce-id", "b")] {
            assert_eq!(header(&publication, name).as_deref(), Some(value));
        }
    }

    #[test]
    fn without_properties_all_is_in_headers() {
        let pointer = Pointer {
            key: Some("Grüße 5%".into()),
            ..pointer()
        };
        let publication = made(&pointer, &event(), TEXT, Format::Envelope, &Statics::default()).unwrap();
        let found: Vec<(&str, String)> = publication
            .properties
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_string()))
            .collect();
        let expected = [
            ("outbox-id", "0198a3f2-0000-7000-8000-000000000001"),
            ("outbox-type", "OrderPlaced"),
            ("outbox-aggregate-type", "Order"),
            ("outbox-aggregate-id", "42"),
            ("outbox-key", "Gr%C3%BC%C3%9Fe%205%25"),
            ("outbox-correlation-id", "c-1"),
            ("outbox-created-at", "2026-01-31T12:00:00.000001Z"),
            ("outbox-app-id", "outbox"),
            ("outbox-partition-key", "p07"),
            ("outbox-seq", "42"),
            ("outbox-lease-epoch", "5"),
            ("outbox-attempt", "3"),
            ("tenant", "acme"),
        ];
        assert_eq!(found, expected.map(|(name, value)| (name, value.to_owned())));
        let publication = made(&pointer, &event(), TEXT, Format::Payload, &Statics::default()).unwrap();
        assert_eq!(header(&publication, "outbox-operation").as_deref(), Some("INSERT"));
        assert_eq!(header(&publication, "outbox-actor").as_deref(), Some("kim"));
        assert_eq!(
            header(&publication, "outbox-metadata").as_deref(),
            Some("{%22n%22:1e2}")
        );
    }

    #[test]
    fn a_missing_value_has_no_header() {
        let pointer = Pointer { key: None, ..pointer() };
        let publication = made(&pointer, &bare_event(), TEXT, Format::Payload, &Statics::default()).unwrap();
        let expected = [
            "outbox-id",
            "outbox-type",
            "outbox-created-at",
            "outbox-app-id",
            "outbox-partition-key",
            "outbox-seq",
            "outbox-lease-epoch",
            "outbox-attempt",
        ];
        assert_eq!(names(&publication), expected);
    }

    #[test]
    fn headers_of_the_user_are_sent_unchanged_under_the_names_of_the_form() {
        let json =
            format!(r#"{{"Tenant": "a", "tenant": "b", "n": 3, "umlaut": "ü", "Traceparent": "{TRACEPARENT}"}}"#);
        let publication = with_own(TEXT, Format::Envelope, &json).unwrap();
        for (name, value) in [
            ("tenant", "b"),
            ("n", "3"),
            ("umlaut", "ü"),
            ("traceparent", TRACEPARENT),
        ] {
            assert_eq!(header(&publication, name).as_deref(), Some(value));
        }
        assert_eq!(header(&publication, "Tenant"), None);
    }

    #[test]
    fn a_value_that_the_form_cannot_carry_is_refused() {
        for json in [
            r#"{"a": "x\r\nhost: evil"}"#,
            r#"{"a": "x\ny"}"#,
            r#"{"a": "\u0000"}"#,
            r#"{"a": "\u007f"}"#,
            r#"{"a b": 1}"#,
            r#"{"a:": 1}"#,
            r#"{"a\r\nb": 1}"#,
            r#"{"ü": 1}"#,
            r#"{"": 1}"#,
        ] {
            assert!(with_own(TEXT, Format::Envelope, json).is_err(), "{json}");
            assert!(with_own(TYPED, Format::Envelope, json).is_ok(), "{json}");
        }
        assert!(with_own(TEXT, Format::Envelope, r#"{"a": "x\ty"}"#).is_ok());
        let mut statics = Statics::default();
        statics
            .headers
            .add(TEXT, Format::Envelope, "who", "{aggregate_id}")
            .unwrap();
        let event = event_with(|e| e.aggregate_id = Some("a\r\nhost: evil".into()));
        let refusal = made(&pointer(), &event, TEXT, Format::Envelope, &statics).unwrap_err();
        assert!(
            refusal.message.contains("header who") && !refusal.message.contains("evil"),
            "{refusal}"
        );
    }

    #[test]
    fn the_form_limits_all_headers_together() {
        let with = |bytes: usize| {
            let json = format!(r#"{{"a": "{}"}}"#, "v".repeat(bytes));
            with_own(TEXT, Format::Envelope, &json)
        };
        let rest = bytes(&with(0).unwrap().properties.headers, false);
        assert!(with(TEXT.headers_max - rest).is_ok());
        assert!(
            with(TEXT.headers_max - rest + 1)
                .unwrap_err()
                .message
                .contains("the limit is 16384")
        );
    }

    #[test]
    fn a_destinations_header_is_rendered_replaces_the_users_and_is_absent_when_empty() {
        for form in [TYPED, TEXT] {
            let mut statics = Statics::default();
            for (name, template) in [
                ("team", "logistics"),
                ("tenant", "t-{header:tenant|none}"),
                ("nothing", "{header:missing}"),
            ] {
                statics.headers.add(form, Format::Envelope, name, template).unwrap();
            }
            let event = event_with(|e| e.headers = Some(r#"{"tenant": "acme", "nothing": "mine"}"#.into()));
            let publication = made(&pointer(), &event, form, Format::Envelope, &statics).unwrap();
            assert_eq!(header(&publication, "team").as_deref(), Some("logistics"));
            assert_eq!(header(&publication, "tenant").as_deref(), Some("t-acme"));
            assert_eq!(header(&publication, "nothing"), None);
            let other = event_with(|e| e.headers = None);
            let publication = made(&pointer(), &other, form, Format::Envelope, &statics).unwrap();
            assert_eq!(header(&publication, "tenant").as_deref(), Some("t-none"));
        }
        let mut statics = Statics::default();
        statics
            .headers
            .add(TYPED, Format::Envelope, "who", "{aggregate_id}")
            .unwrap();
        let event = event_with(|e| e.aggregate_id = Some("x".repeat(1025)));
        let refusal = made(&pointer(), &event, TYPED, Format::Envelope, &statics).unwrap_err();
        assert!(refusal.message.contains("header who is 1025 bytes"), "{refusal}");
    }

    proptest! {
        #[test]
        fn no_headers_panic_and_headers_that_pass_fit(
            json in concat!(
                r#"\PC{0,40}|"#,
                r#"\{(("[a-z]{0,3}": ?(-?[0-9]{1,25}(\.[0-9])?(e[0-9]{1,4})?|null|true|"\PC{0,5}"|\[\]),){0,5}"#,
                r#""end": 1)\}"#,
            ),
        ) {
            match own(&json, &[]) {
                Ok(headers) => prop_assert!(bytes(&headers, true) <= HEADERS_MAX),
                Err(refusal) => prop_assert!(!refusal.message.is_empty() && !refusal.hint.is_empty()),
            }
        }
    }
}
