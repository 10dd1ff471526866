//! The headers of a message: those of outbox, of its destination, and of the user. Called by `envelope`.
//!
//! AMQP carries typed values under any name; HTTP carries text under names without case. So there are two sets of names
//! with one meaning.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::format::{Format, TransportKind};
use crate::header_names::{check_routes_nothing, check_token, is_reserved};
pub use crate::header_names::{is_reserved_by_http, secret_name};
use crate::json::{decimal, not_json};
use crate::message::{Event, HeaderValue, Pointer};
use crate::refusal::{Refusal, check_short};
use crate::route::Route;
use crate::template::Values;
use crate::text::Text;

/// Name and value.
pub(crate) type Header = (Text, HeaderValue);

/// The limit of all headers of a message, encoded. An AMQP content header cannot be split over frames, and a frame of
/// RabbitMQ has 131072 bytes unless configured. Half of it leaves room for the properties and for smaller settings.
pub const HEADERS_MAX: usize = 64 * 1024;

/// The part of [`HEADERS_MAX`] that is reserved for headers of outbox, so that headers that pass [`check_headers`] at
/// enqueue do not fail later. It holds aggregate_type and aggregate_id; the rest is under 300 bytes.
pub const SYSTEM_HEADERS_RESERVED: usize = 4 * 1024;

/// The limit of all headers of a request except those that the transport adds. Common servers refuse more with 431 or
/// 400: node at 16 KiB, nginx at 8 KiB a line.
pub const HTTP_HEADERS_MAX: usize = 16 * 1024;

/// Checks the headers of the user at enqueue.
///
/// # Errors [`Refusal`] unless they are a JSON object that fits in the part of [`HEADERS_MAX`] left for it. Its names
/// have at most 255 bytes, and none is `CC` or `BCC`.
pub fn check_headers(json: &str) -> Result<(), Refusal> {
    own(json).map(drop)
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
    let statics = &route.statics.headers;
    let mut of_destination = Vec::new();
    for (name, template) in statics.iter() {
        let rendered = template.render(&Values::new(pointer, event, &own));
        let value = rendered.map_err(|long| long.refusal(&format!("header {name}"), "the limit of its template"))?;
        if !value.is_empty() {
            of_destination.push((name.clone(), HeaderValue::Text(value)));
        }
    }
    let mut headers = Vec::with_capacity(13 + more.len() + of_destination.len() + own.len());
    match route.transport {
        TransportKind::Amqp => push_amqp(&mut headers, pointer, event, route.format),
        TransportKind::Http => push_http(&mut headers, pointer, event, route),
    }
    headers.extend(more);
    headers.extend(of_destination);
    let own = match route.transport {
        TransportKind::Amqp => own,
        TransportKind::Http => own_of_http(own)?,
    };
    headers.extend(own.into_iter().filter(|(name, _)| {
        !is_reserved(route.transport, route.format, name) && statics.iter().all(|(other, _)| other != name)
    }));
    if route.transport == TransportKind::Http {
        check_http_values(&headers)?;
    }
    let (bytes, bytes_max) = match route.transport {
        TransportKind::Amqp => (encoded_bytes(&headers), HEADERS_MAX),
        TransportKind::Http => (http_bytes(&headers), HTTP_HEADERS_MAX),
    };
    if bytes > bytes_max {
        return Err(too_large(bytes, bytes_max));
    }
    Ok(headers)
}

fn push_amqp(headers: &mut Vec<Header>, pointer: &Pointer, event: &mut Event, format: Format) {
    let mut push = |name: &'static str, value: Option<String>| {
        headers.extend(value.map(|value| (name.into(), HeaderValue::Text(value.into()))));
    };
    push("id", Some(event.id.clone()));
    push("aggregate_type", event.aggregate_type.take());
    push("aggregate_id", event.aggregate_id.take());
    if format == Format::Payload {
        push("key", pointer.key.clone());
        push("operation", event.operation.take());
        push("actor", event.actor.take());
        push("metadata", event.metadata.take());
        push("created_at", Some(std::mem::take(&mut event.created_at)));
    }
    push_delivery(
        headers,
        pointer,
        ["partition_key", "seq", "lease_epoch", "attempt", "replayed"],
    );
}

/// HTTP has only headers, so the properties of AMQP are here too.
fn push_http(headers: &mut Vec<Header>, pointer: &Pointer, event: &Event, route: &Route<'_>) {
    let mut push = |name: &'static str, value: Option<&str>| {
        headers.extend(value.map(|value| (name.into(), HeaderValue::Text(percent_encoded(value)))));
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
pub(crate) fn own(json: &str) -> Result<Vec<Header>, Refusal> {
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
        check_routes_nothing(&name)?;
        headers.extend(header_value(value.get())?.map(|value| (Text::Owned(name), value)));
    }
    let bytes = encoded_bytes(&headers);
    let bytes_max = HEADERS_MAX - SYSTEM_HEADERS_RESERVED;
    if bytes > bytes_max {
        Err(too_large(bytes, bytes_max))
    } else {
        Ok(headers)
    }
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

/// In lower case, each name once: of names that differ only in case, the last in the order of bytes counts.
fn own_of_http(own: Vec<Header>) -> Result<Vec<Header>, Refusal> {
    let mut by_name = BTreeMap::new();
    for (name, value) in own {
        check_token(&name)?;
        by_name.insert(name.to_ascii_lowercase(), value);
    }
    Ok(by_name
        .into_iter()
        .map(|(name, value)| (Text::Owned(name), value))
        .collect())
}

/// The text is sent unchanged, so it must not end its line: the event could add a header, or a request.
fn check_http_values(headers: &[Header]) -> Result<(), Refusal> {
    let breaks = |text: &str| text.bytes().any(|byte| byte.is_ascii_control() && byte != b'\t');
    for (name, value) in headers {
        if matches!(value, HeaderValue::Text(text) if breaks(text)) {
            return Err(Refusal::new(
                format!("the header {name} contains a line break or another control character"),
                "HTTP cannot carry it. Put the value into the payload.",
            ));
        }
    }
    Ok(())
}

/// As in CloudEvents' binding for HTTP (3.1.3.2), and here for all headers of outbox: `"`, `%` and all but visible
/// ASCII become `%XY`. One round of decoding returns the text.
pub(crate) fn percent_encoded(text: &str) -> Text {
    let is_plain =
        |at: usize| matches!(text.as_bytes()[at], b'!'..=b'~') && !matches!(text.as_bytes()[at], b'"' | b'%');
    Text::Owned(encoded_unless(text, is_plain).into_owned())
}

/// `%XY` for each byte that is not plain; only ASCII can be plain. The table is indexed by the byte.
pub(crate) fn encoded_unless(text: &str, is_plain: impl Fn(usize) -> bool) -> Cow<'_, str> {
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

/// The size of an AMQP field table: a length, then a short string, a type and a value for each field.
fn encoded_bytes(headers: &[Header]) -> usize {
    let field_bytes = |(name, value): &Header| {
        let value_bytes = match value {
            HeaderValue::Text(text) => 4 + text.len(),
            HeaderValue::Int(_) | HeaderValue::Float(_) => 8,
            HeaderValue::Bool(_) => 1,
        };
        1 + name.len() + 1 + value_bytes
    };
    4 + headers.iter().map(field_bytes).sum::<usize>()
}

/// The size of the lines of a request, with numbers at their longest.
fn http_bytes(headers: &[Header]) -> usize {
    let line_bytes = |(name, value): &Header| {
        let value_bytes = match value {
            HeaderValue::Text(text) => text.len(),
            HeaderValue::Int(_) | HeaderValue::Float(_) => 24,
            HeaderValue::Bool(_) => 5,
        };
        name.len() + ": \r\n".len() + value_bytes
    };
    headers.iter().map(line_bytes).sum()
}

fn too_large(bytes: usize, bytes_max: usize) -> Refusal {
    Refusal::new(
        format!("the headers take {bytes} bytes; the limit is {bytes_max}"),
        "Put large values into the payload.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{TRACEPARENT, bare_event, event, event_with, header, made, names, pointer, text};
    use crate::header_names::{PAYLOAD_HEADERS, SYSTEM_HEADERS};
    use crate::message::Publication;
    use crate::route::Statics;
    use crate::words::Word;
    use TransportKind::{Amqp, Http};
    use proptest::prelude::*;

    fn read(json: &str) -> Vec<Header> {
        own(json).unwrap()
    }

    fn with_own(transport: TransportKind, format: Format, json: &str) -> Result<Publication, Refusal> {
        let event = event_with(|e| e.headers = Some(json.to_owned()));
        made(&pointer(), &event, transport, format, &Statics::default())
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
    fn headers_that_rabbitmq_would_close_the_channel_for_are_refused() {
        for json in [r#"{"CC": "a.b"}"#, r#"{"BCC": ["a"]}"#] {
            assert!(check_headers(json).unwrap_err().hint.contains("routing keys"), "{json}");
        }
        assert_eq!(check_headers(r#"{"cc": "a.b"}"#), Ok(()));
    }

    #[test]
    fn headers_are_an_object() {
        for json in ["[]", "1", "\"a\"", "null"] {
            assert_eq!(
                check_headers(json).unwrap_err().message,
                "headers are not a JSON object",
                "{json}"
            );
        }
        for json in ["", "{", "{\"a\"}", "{\"a\": tru}", r#"{"a": "\ud800"}"#, "{} x"] {
            assert!(
                check_headers(json).unwrap_err().message.contains("not valid JSON"),
                "{json}"
            );
        }
        assert_eq!(check_headers(" {} "), Ok(()));
    }

    #[test]
    fn a_header_name_over_255_bytes_is_refused() {
        assert_eq!(check_headers(&format!(r#"{{"{}": 1}}"#, "n".repeat(255))), Ok(()));
        assert!(check_headers(&format!(r#"{{"{}": 1}}"#, "n".repeat(256))).is_err());
    }

    #[test]
    fn a_header_of_the_user_never_overrides_one_of_outbox() {
        let payloads = SYSTEM_HEADERS
            .iter()
            .chain(&PAYLOAD_HEADERS)
            .map(|name| (Amqp, Format::Payload, *name));
        let envelopes = SYSTEM_HEADERS.iter().map(|name| (Amqp, Format::Envelope, *name));
        let attributes = ["ce-id", "Ce-Source", "CE-x"].into_iter().flat_map(|name| {
            [
                (Amqp, Format::CloudEvents, name),
                (Amqp, Format::CloudEventsBinary, name),
                (Http, Format::CloudEventsBinary, name),
            ]
        });
        let https = [
            "outbox-seq",
            "Outbox-Forged",
            "WEBHOOK-ID",
            "Content-Length",
            "authorization",
            "Host",
            "X-HTTP-Method-Override",
        ];
        let https = https.into_iter().map(|name| (Http, Format::Envelope, name));
        for (transport, format, name) in payloads.chain(envelopes).chain(attributes).chain(https) {
            // Also if outbox has no value to set.
            let bare = Event {
                headers: Some(format!(r#"{{"{name}": "forged", "mine": 1}}"#)),
                ..bare_event()
            };
            let publication = made(&pointer(), &bare, transport, format, &Statics::default()).unwrap();
            for (_, value) in &publication.properties.headers {
                assert!(*value != text("forged"), "{transport:?} {format:?} {name}");
            }
            assert_eq!(header(&publication, "mine").as_deref(), Some("1"));
        }
    }

    #[test]
    fn names_reserved_in_another_format_are_free_for_the_user() {
        let json = r#"{"actor": "a", "ce-id": "b", "outbox-seq": "c"}"#;
        let publication = with_own(Amqp, Format::Envelope, json).unwrap();
        for (name, value) in [("actor", "a"), ("ce-id", "b"), ("outbox-seq", "c")] {
            assert_eq!(header(&publication, name).as_deref(), Some(value));
        }
        let publication = with_own(Http, Format::Payload, r#"{"actor": "a", "seq": 1, "ce-id": "b"}"#).unwrap();
        for (name, value) in [("actor", "a"), ("seq", "1"), ("ce-id", "b")] {
            assert_eq!(header(&publication, name).as_deref(), Some(value));
        }
    }

    #[test]
    fn http_has_all_that_amqp_has_in_properties_and_headers() {
        let pointer = Pointer {
            key: Some("Grüße 5%".into()),
            ..pointer()
        };
        let publication = made(&pointer, &event(), Http, Format::Envelope, &Statics::default()).unwrap();
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
        let publication = made(&pointer, &event(), Http, Format::Payload, &Statics::default()).unwrap();
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
        let publication = made(&pointer, &bare_event(), Http, Format::Payload, &Statics::default()).unwrap();
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
    fn in_http_headers_of_the_user_are_sent_unchanged_under_names_without_case() {
        let json =
            format!(r#"{{"Tenant": "a", "tenant": "b", "n": 3, "umlaut": "ü", "Traceparent": "{TRACEPARENT}"}}"#);
        let publication = with_own(Http, Format::Envelope, &json).unwrap();
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
    fn a_value_that_would_begin_a_line_of_a_request_is_refused() {
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
            assert!(with_own(Http, Format::Envelope, json).is_err(), "{json}");
            assert!(with_own(Amqp, Format::Envelope, json).is_ok(), "{json}");
        }
        assert!(with_own(Http, Format::Envelope, r#"{"a": "x\ty"}"#).is_ok());
        let mut statics = Statics::default();
        statics
            .headers
            .add(Http, Format::Envelope, "who", "{aggregate_id}")
            .unwrap();
        let event = event_with(|e| e.aggregate_id = Some("a\r\nhost: evil".into()));
        let refusal = made(&pointer(), &event, Http, Format::Envelope, &statics).unwrap_err();
        assert!(
            refusal.message.contains("header who") && !refusal.message.contains("evil"),
            "{refusal}"
        );
    }

    #[test]
    fn a_request_holds_16_kib_of_headers() {
        let with = |bytes: usize| {
            let json = format!(r#"{{"a": "{}"}}"#, "v".repeat(bytes));
            with_own(Http, Format::Envelope, &json)
        };
        let rest = http_bytes(&with(0).unwrap().properties.headers);
        assert!(with(HTTP_HEADERS_MAX - rest).is_ok());
        assert!(
            with(HTTP_HEADERS_MAX - rest + 1)
                .unwrap_err()
                .message
                .contains("the limit is 16384")
        );
    }

    #[test]
    fn a_destinations_header_is_rendered_replaces_the_users_and_is_absent_when_empty() {
        for transport in [Amqp, Http] {
            let mut statics = Statics::default();
            for (name, template) in [
                ("team", "logistics"),
                ("tenant", "t-{header:tenant|none}"),
                ("nothing", "{header:missing}"),
            ] {
                statics
                    .headers
                    .add(transport, Format::Envelope, name, template)
                    .unwrap();
            }
            let event = event_with(|e| e.headers = Some(r#"{"tenant": "acme", "nothing": "mine"}"#.into()));
            let publication = made(&pointer(), &event, transport, Format::Envelope, &statics).unwrap();
            assert_eq!(header(&publication, "team").as_deref(), Some("logistics"));
            assert_eq!(header(&publication, "tenant").as_deref(), Some("t-acme"));
            assert_eq!(header(&publication, "nothing"), None);
            let other = event_with(|e| e.headers = None);
            let publication = made(&pointer(), &other, transport, Format::Envelope, &statics).unwrap();
            assert_eq!(header(&publication, "tenant").as_deref(), Some("t-none"));
        }
        let mut statics = Statics::default();
        statics
            .headers
            .add(Amqp, Format::Envelope, "who", "{aggregate_id}")
            .unwrap();
        let event = event_with(|e| e.aggregate_id = Some("x".repeat(1025)));
        let refusal = made(&pointer(), &event, Amqp, Format::Envelope, &statics).unwrap_err();
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
            match own(&json) {
                Ok(headers) => prop_assert!(encoded_bytes(&headers) <= HEADERS_MAX),
                Err(refusal) => prop_assert!(!refusal.message.is_empty() && !refusal.hint.is_empty()),
            }
        }

        #[test]
        fn encoded_text_is_visible_and_decodes_to_itself(text in "\\PC{0,40}|[\\s\\S]{0,20}") {
            let encoded = percent_encoded(&text);
            prop_assert!(encoded.bytes().all(|byte| matches!(byte, b'!'..=b'~') && byte != b'"'));
            let mut decoded = Vec::new();
            let mut rest = encoded.bytes();
            while let Some(byte) = rest.next() {
                let mut digit = || char::from(rest.next().unwrap()).to_digit(16).unwrap() as u8;
                decoded.push(if byte == b'%' { digit() * 16 + digit() } else { byte });
            }
            prop_assert_eq!(decoded, text.as_bytes());
        }

        #[test]
        fn no_event_ends_a_line_of_a_request(
            name in "[\\s\\S]{0,12}", value in "[\\s\\S]{0,12}", id in "[\\s\\S]{1,12}", key in "[\\s\\S]{0,12}",
        ) {
            let event = Event {
                id,
                headers: Some(serde_json::json!({ name: value }).to_string()),
                ..event()
            };
            let pointer = Pointer { key: Some(key), ..pointer() };
            for format in Format::ALL.iter().copied() {
                let Ok(publication) = made(&pointer, &event, Http, format, &Statics::default()) else { continue };
                for (name, value) in &publication.properties.headers {
                    prop_assert!(check_token(name).is_ok());
                    prop_assert!(!value.to_string().bytes().any(|byte| byte.is_ascii_control() && byte != b'\t'));
                }
            }
        }
    }
}
