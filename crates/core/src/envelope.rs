//! One event and its pointer become one [`Publication`]. Called by the worker's main thread for each claimed row, after
//! the claim's transaction has ended; [`check_headers`] and [`check_short`] also by the enqueuing functions, so that
//! what cannot be sent is refused while its author still listens.
//!
//! The body is the JSON of the whole event, the same bytes on each retry: what differs between attempts (attempt,
//! lease epoch) stands in headers only. Absent is what is NULL in the source.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::message::{Event, HeaderValue, Pointer, Properties, Publication};
use crate::route::{Route, RouteError};

/// AMQP 0-9-1 sends message_id, type, correlation_id, header names, routing key and exchange as short strings, whose
/// length is one byte.
pub const SHORT_STRING_MAX: usize = 255;

/// All headers of a message, encoded. An AMQP content header cannot be split over frames, and a frame is 131072 bytes
/// in RabbitMQ unless configured; half of it leaves room for the properties and for smaller settings.
pub const HEADERS_MAX: usize = 64 * 1024;

/// Part of [`HEADERS_MAX`] that the user's own headers may not take, so that what passes [`check_headers`] at enqueue
/// does not fail later for the outbox's own; these hold aggregate_type and aggregate_id, the rest is under 300 bytes.
pub const SYSTEM_HEADERS_RESERVED: usize = 4 * 1024;

/// Headers that the outbox sets. A user's header of such a name is dropped, also where the outbox has no value to set:
/// a consumer may trust these names. (All but the epoch, the attempt and replayed are the event's, and in the envelope.)
pub const SYSTEM_HEADERS: [&str; 8] = [
    "id",
    "aggregate_type",
    "aggregate_id",
    "seq",
    "partition_key",
    "lease_epoch",
    "attempt",
    "replayed",
];

/// RabbitMQ reads these as lists of further routing keys and closes the channel (406 PRECONDITION_FAILED) when they
/// are anything else (rabbit_basic.erl, header_routes). A header here is never a list, so one message would fail the
/// whole window, again and again.
const ROUTING_HEADERS: [&str; 2] = ["CC", "BCC"];

pub const CONTENT_TYPE: &str = "application/json";
pub const APP_ID: &str = "outbox";

/// Why an event can never be sent as it is. Holds names and sizes, no values: it is stored and logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong: a primary line.
    pub message: String,
    /// What to do.
    pub hint: String,
}

/// The message for `event`, complete. `handle` comes back with the outcome.
///
/// # Errors
/// [`Refusal`] when a JSON column is not JSON, or when something exceeds what AMQP can carry. No retry mends it.
pub fn publication(handle: u64, pointer: &Pointer, event: &Event, route: &Route<'_>) -> Result<Publication, Refusal> {
    check_short("exchange name", route.exchange)?;
    check_short("event id", &event.id)?;
    check_short("event type", &event.kind)?;
    if let Some(correlation_id) = &event.correlation_id {
        check_short("correlation id", correlation_id)?;
    }
    let routing_key = route.template.render(event, pointer.key.as_deref())?;
    let properties = Properties {
        message_id: event.id.clone(),
        kind: Some(event.kind.clone()),
        content_type: CONTENT_TYPE.to_owned(),
        timestamp_s: u64::try_from(event.created_at_s).ok(),
        app_id: APP_ID.to_owned(),
        correlation_id: event.correlation_id.clone(),
        headers: headers(pointer, event)?,
    };
    let body = body(event, pointer.key.as_deref())?;
    Ok(Publication {
        handle,
        exchange: route.exchange.to_owned(),
        routing_key,
        key: pointer.key.clone(),
        properties,
        body,
    })
}

/// Checks the user's own headers, for use at enqueue.
///
/// # Errors
/// [`Refusal`] unless they are a JSON object with names of at most [`SHORT_STRING_MAX`] bytes, none of them `CC` or
/// `BCC`, and fit in what [`HEADERS_MAX`] leaves them.
pub fn check_headers(json: &str) -> Result<(), Refusal> {
    own_headers(json).map(drop)
}

/// Checks a text that AMQP sends as a short string; `name` says in a refusal what it is.
///
/// # Errors
/// [`Refusal`] when it is longer than [`SHORT_STRING_MAX`] bytes.
pub fn check_short(name: &str, text: &str) -> Result<(), Refusal> {
    if text.len() <= SHORT_STRING_MAX {
        return Ok(());
    }
    Err(Refusal {
        message: format!(
            "the {name} is {} bytes long, AMQP carries at most {SHORT_STRING_MAX}",
            text.len()
        ),
        hint: format!("Shorten the {name}."),
    })
}

/// The body as consumers see it, in this order. The raw values go out byte for byte as stored, without the white space
/// around them.
#[derive(Serialize)]
struct Envelope<'a> {
    id: &'a str,
    seq: i64,
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    operation: Option<&'a str>,
    payload: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    previous_payload: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    actor: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    correlation_id: Option<&'a str>,
    created_at: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    headers: Option<&'a RawValue>,
}

fn body(event: &Event, key: Option<&str>) -> Result<Vec<u8>, Refusal> {
    let envelope = Envelope {
        id: &event.id,
        seq: event.seq,
        kind: &event.kind,
        aggregate_type: event.aggregate_type.as_deref(),
        aggregate_id: event.aggregate_id.as_deref(),
        operation: event.operation.as_deref(),
        payload: raw("payload", &event.payload)?,
        previous_payload: event
            .previous_payload
            .as_deref()
            .map(|json| raw("previous_payload", json))
            .transpose()?,
        metadata: event
            .metadata
            .as_deref()
            .map(|json| raw("metadata", json))
            .transpose()?,
        actor: event.actor.as_deref(),
        correlation_id: event.correlation_id.as_deref(),
        created_at: &event.created_at,
        key,
        headers: event.headers.as_deref().map(|json| raw("headers", json)).transpose()?,
    };
    let json_bytes = [&event.previous_payload, &event.metadata, &event.headers]
        .into_iter()
        .map(|json| json.as_ref().map_or(0, String::len))
        .sum::<usize>();
    let mut body = Vec::with_capacity(event.payload.len() + json_bytes + 512);
    serde_json::to_writer(&mut body, &envelope).map_err(|error| Refusal {
        message: format!("the envelope could not be written: {error}"),
        hint: "This is a defect of the outbox; please report it.".to_owned(),
    })?;
    Ok(body)
}

fn raw<'a>(column: &str, json: &'a str) -> Result<&'a RawValue, Refusal> {
    serde_json::from_str(json).map_err(|error| not_json(column, &error))
}

/// Says where, never what: serde's own text may quote the value.
fn not_json(column: &str, error: &serde_json::Error) -> Refusal {
    Refusal {
        message: format!(
            "{column} is not valid JSON at line {} column {}",
            error.line(),
            error.column()
        ),
        hint: format!("Store {column} as json or jsonb."),
    }
}

/// The outbox's headers, then the user's own by name.
fn headers(pointer: &Pointer, event: &Event) -> Result<Vec<(String, HeaderValue)>, Refusal> {
    let text = |name: &str, value: &str| (name.to_owned(), HeaderValue::Text(value.to_owned()));
    let int = |name: &str, value: i64| (name.to_owned(), HeaderValue::Int(value));
    let mut headers = vec![text("id", &event.id)];
    headers.extend(
        event
            .aggregate_type
            .as_deref()
            .map(|value| text("aggregate_type", value)),
    );
    headers.extend(event.aggregate_id.as_deref().map(|value| text("aggregate_id", value)));
    headers.push(int("seq", event.seq));
    headers.push(text("partition_key", &pointer.partition.label()));
    headers.push(int("lease_epoch", pointer.lease_epoch));
    headers.push(int("attempt", i64::from(pointer.attempts) + 1));
    if pointer.replayed {
        headers.push(("replayed".to_owned(), HeaderValue::Bool(true)));
    }
    if let Some(json) = &event.headers {
        headers.extend(own_headers(json)?);
    }
    let bytes = encoded_bytes(&headers);
    if bytes > HEADERS_MAX {
        return Err(too_large(bytes, HEADERS_MAX));
    }
    Ok(headers)
}

/// The user's own headers by name; of a repeated name the last value counts, as in jsonb. Names of the outbox's own
/// are dropped.
fn own_headers(json: &str) -> Result<Vec<(String, HeaderValue)>, Refusal> {
    let values: BTreeMap<String, &RawValue> = serde_json::from_str(json).map_err(|error| {
        if !error.is_data() {
            return not_json("headers", &error);
        }
        Refusal {
            message: "headers are not a JSON object".to_owned(),
            hint: "Pass headers as an object, such as {\"tenant\": \"acme\"}.".to_owned(),
        }
    })?;
    let mut headers = Vec::with_capacity(values.len());
    for (name, value) in values {
        check_short("name of a header", &name)?;
        if ROUTING_HEADERS.contains(&name.as_str()) {
            return Err(Refusal {
                message: format!("the header {name} cannot be set"),
                hint: "RabbitMQ takes CC and BCC for lists of routing keys. Choose another name, or bind further \
                       queues to the exchange."
                    .to_owned(),
            });
        }
        if SYSTEM_HEADERS.contains(&name.as_str()) {
            continue;
        }
        headers.extend(header_value(value.get())?.map(|value| (name, value)));
    }
    let bytes = encoded_bytes(&headers);
    let bytes_max = HEADERS_MAX - SYSTEM_HEADERS_RESERVED;
    if bytes > bytes_max {
        Err(too_large(bytes, bytes_max))
    } else {
        Ok(headers)
    }
}

/// One valid JSON value as a header; null is none. What a header cannot hold without loss goes as the text of its
/// JSON: objects, arrays, integers beyond 64 bits, numbers beyond a double.
fn header_value(json: &str) -> Result<Option<HeaderValue>, Refusal> {
    let as_text = || HeaderValue::Text(json.to_owned());
    Ok(Some(match json.as_bytes().first() {
        Some(b'n') => return Ok(None),
        Some(b't') => HeaderValue::Bool(true),
        Some(b'f') => HeaderValue::Bool(false),
        Some(b'"') => HeaderValue::Text(serde_json::from_str(json).map_err(|error| not_json("headers", &error))?),
        Some(b'{' | b'[') => as_text(),
        _ if !json.contains(['.', 'e', 'E']) => json.parse().map_or_else(|_| as_text(), HeaderValue::Int),
        _ => match json.parse::<f64>() {
            Ok(number) if number.is_finite() => HeaderValue::Float(number),
            _ => as_text(),
        },
    }))
}

/// Size of an AMQP field table: a length, then per field a short string, a type and a value.
fn encoded_bytes(headers: &[(String, HeaderValue)]) -> usize {
    let field_bytes = |(name, value): &(String, HeaderValue)| {
        let value_bytes = match value {
            HeaderValue::Text(text) => 4 + text.len(),
            HeaderValue::Int(_) | HeaderValue::Float(_) => 8,
            HeaderValue::Bool(_) => 1,
        };
        1 + name.len() + 1 + value_bytes
    };
    4 + headers.iter().map(field_bytes).sum::<usize>()
}

fn too_large(bytes: usize, bytes_max: usize) -> Refusal {
    Refusal {
        message: format!("the headers take {bytes} bytes, a message carries at most {bytes_max}"),
        hint: "Put large values into the payload.".to_owned(),
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

impl From<RouteError> for Refusal {
    fn from(error: RouteError) -> Self {
        Self {
            message: error.to_string(),
            hint: "Shorten the template or the values that it uses.".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::Partition;
    use crate::route::Template;
    use proptest::prelude::*;
    use serde_json::Value;

    fn pointer() -> Pointer {
        Pointer {
            seq: 42,
            destination: "default".into(),
            partition: Partition::new(7).unwrap(),
            key: Some("order-42".into()),
            attempts: 2,
            crashes: 0,
            lease_epoch: 5,
            replayed: false,
        }
    }

    fn event() -> Event {
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

    fn published(pointer: &Pointer, event: &Event) -> Result<Publication, Refusal> {
        let template = Template::parse("{aggregate_type}.{operation}").unwrap();
        publication(
            9,
            pointer,
            event,
            &Route {
                exchange: "events",
                template: &template,
            },
        )
    }

    fn own(json: &str) -> Vec<(String, HeaderValue)> {
        own_headers(json).unwrap()
    }

    fn text(value: &str) -> HeaderValue {
        HeaderValue::Text(value.to_owned())
    }

    #[test]
    fn the_body_is_the_whole_event_with_json_byte_for_byte() {
        let body = String::from_utf8(published(&pointer(), &event()).unwrap().body).unwrap();
        let expected = concat!(
            r#"{"id":"0198a3f2-0000-7000-8000-000000000001","seq":42,"type":"OrderPlaced","#,
            r#""aggregate_type":"Order","aggregate_id":"42","operation":"INSERT","#,
            r#""payload":{"total": 1.10,  "b":1,"a":2},"previous_payload":[1 , 2],"metadata":{"n":1e2},"#,
            r#""actor":"kim","correlation_id":"c-1","created_at":"2026-01-31T12:00:00.000001Z","key":"order-42","#,
            r#""headers":{"tenant": "acme"}}"#,
        );
        assert_eq!(body, expected);
    }

    #[test]
    fn what_is_null_in_the_source_is_absent() {
        let bare = Event {
            id: "1".into(),
            kind: "T".into(),
            payload: "null".into(),
            created_at: "2026-01-31T12:00:00.000000Z".into(),
            ..Event::default()
        };
        let publication = published(&Pointer { key: None, ..pointer() }, &bare).unwrap();
        let expected = r#"{"id":"1","seq":0,"type":"T","payload":null,"created_at":"2026-01-31T12:00:00.000000Z"}"#;
        assert_eq!(String::from_utf8(publication.body).unwrap(), expected);
        assert_eq!(publication.routing_key, ".");
        assert_eq!(publication.properties.correlation_id, None);
        let names: Vec<&str> = publication
            .properties
            .headers
            .iter()
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(names, ["id", "seq", "partition_key", "lease_epoch", "attempt"]);
    }

    #[test]
    fn a_retry_under_another_lease_has_the_same_body_and_message_id() {
        let first = published(&pointer(), &event()).unwrap();
        let again = published(
            &Pointer {
                attempts: 9,
                lease_epoch: 77,
                ..pointer()
            },
            &event(),
        )
        .unwrap();
        assert_eq!(first.body, again.body);
        assert_eq!(first.properties.message_id, again.properties.message_id);
        assert_ne!(first.properties.headers, again.properties.headers);
    }

    #[test]
    fn a_replayed_message_says_so_and_is_the_same_otherwise() {
        let first = published(&pointer(), &event()).unwrap();
        let again = Pointer {
            replayed: true,
            ..pointer()
        };
        let mut again = published(&again, &event()).unwrap();
        assert!(!first.properties.headers.iter().any(|(name, _)| name == "replayed"));
        let marked = ("replayed".to_owned(), HeaderValue::Bool(true));
        let place = (again.properties.headers.iter()).position(|header| *header == marked);
        again.properties.headers.remove(place.expect("the header"));
        assert_eq!(again, first);
    }

    #[test]
    fn properties_and_headers_name_the_event() {
        let publication = published(&pointer(), &event()).unwrap();
        assert_eq!((publication.handle, publication.exchange.as_str()), (9, "events"));
        assert_eq!(publication.routing_key, "order.insert");
        let headers = vec![
            ("id".to_owned(), text("0198a3f2-0000-7000-8000-000000000001")),
            ("aggregate_type".to_owned(), text("Order")),
            ("aggregate_id".to_owned(), text("42")),
            ("seq".to_owned(), HeaderValue::Int(42)),
            ("partition_key".to_owned(), text("p07")),
            ("lease_epoch".to_owned(), HeaderValue::Int(5)),
            ("attempt".to_owned(), HeaderValue::Int(3)),
            ("tenant".to_owned(), text("acme")),
        ];
        let expected = Properties {
            message_id: "0198a3f2-0000-7000-8000-000000000001".into(),
            kind: Some("OrderPlaced".into()),
            content_type: "application/json".into(),
            timestamp_s: Some(1_769_860_800),
            app_id: "outbox".into(),
            correlation_id: Some("c-1".into()),
            headers,
        };
        assert_eq!(publication.properties, expected);
    }

    #[test]
    fn a_moment_before_1970_has_no_timestamp() {
        let old = Event {
            created_at_s: -1,
            ..event()
        };
        assert_eq!(published(&pointer(), &old).unwrap().properties.timestamp_s, None);
    }

    #[test]
    fn a_user_header_keeps_its_type() {
        let found =
            own(r#"{"b": true, "f": 1.5, "i": -3, "n": null, "s": "é\n", "traceparent": "00-ab-cd-01", "z": false}"#);
        let expected = [
            ("b", HeaderValue::Bool(true)),
            ("f", HeaderValue::Float(1.5)),
            ("i", HeaderValue::Int(-3)),
            ("s", text("é\n")),
            ("traceparent", text("00-ab-cd-01")),
            ("z", HeaderValue::Bool(false)),
        ];
        assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), value)));
    }

    #[test]
    fn what_a_header_cannot_hold_goes_as_the_text_of_its_json() {
        let found = own(r#"{"a": [1, "x"], "big": 18446744073709551616, "huge": 1e999, "o": {"z":1, "a":1.10}}"#);
        let expected = [
            ("a", r#"[1, "x"]"#),
            ("big", "18446744073709551616"),
            ("huge", "1e999"),
            ("o", r#"{"z":1, "a":1.10}"#),
        ];
        assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), text(value))));
        assert_eq!(own(r#"{"e": 1e2, "w": 2.0}"#)[0].1, HeaderValue::Float(100.0));
    }

    #[test]
    fn a_user_header_never_overrides_one_of_the_outbox() {
        for name in SYSTEM_HEADERS {
            assert_eq!(own(&format!(r#"{{"{name}": "forged"}}"#)), []);
        }
    }

    #[test]
    fn of_a_repeated_header_the_last_counts() {
        assert_eq!(own(r#"{"a": 1, "a": 2}"#), [("a".to_owned(), HeaderValue::Int(2))]);
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
    fn headers_that_pass_at_enqueue_also_pass_with_the_outboxs_own() {
        let own = |value_bytes: usize| format!(r#"{{"a": "{}"}}"#, "v".repeat(value_bytes));
        // less the length of the table and what the one field takes beside its value
        let largest = HEADERS_MAX - SYSTEM_HEADERS_RESERVED - 4 - (1 + 1 + 1 + 4);
        assert!(check_headers(&own(largest + 1)).is_err());
        let headers = own(largest);
        assert_eq!(check_headers(&headers), Ok(()));
        assert!(
            published(
                &pointer(),
                &Event {
                    headers: Some(headers.clone()),
                    ..event()
                }
            )
            .is_ok()
        );
        let id = Some("i".repeat(SYSTEM_HEADERS_RESERVED));
        let refusal = published(
            &pointer(),
            &Event {
                headers: Some(headers),
                aggregate_id: id,
                ..event()
            },
        )
        .unwrap_err();
        assert!(refusal.message.contains("at most 65536"), "{refusal}");
    }

    #[test]
    fn what_is_not_json_is_refused_without_quoting_it() {
        let broken = |change: fn(&mut Event)| {
            let mut event = event();
            change(&mut event);
            published(&pointer(), &event).unwrap_err().message
        };
        assert_eq!(
            broken(|e| e.payload = "{\"secret".into()),
            "payload is not valid JSON at line 1 column 8"
        );
        assert!(broken(|e| e.payload = String::new()).starts_with("payload is not valid JSON"));
        assert!(broken(|e| e.previous_payload = Some("secret".into())).starts_with("previous_payload is not"));
        assert!(broken(|e| e.metadata = Some("{} {}".into())).starts_with("metadata is not"));
        assert!(broken(|e| e.headers = Some("\"secret\"".into())).starts_with("headers are not"));
    }

    #[test]
    fn what_amqp_cannot_carry_is_refused_by_name() {
        let long = "x".repeat(256);
        let cases = [
            (
                "event id",
                Event {
                    id: long.clone(),
                    ..event()
                },
            ),
            (
                "event type",
                Event {
                    kind: long.clone(),
                    ..event()
                },
            ),
            (
                "correlation id",
                Event {
                    correlation_id: Some(long.clone()),
                    ..event()
                },
            ),
            (
                "routing key",
                Event {
                    aggregate_type: Some(long.clone()),
                    ..event()
                },
            ),
        ];
        for (name, event) in cases {
            let refusal = published(&pointer(), &event).unwrap_err();
            assert!(
                refusal.message.contains(name) && refusal.message.contains("255"),
                "{refusal}"
            );
            assert!(!refusal.hint.is_empty());
        }
        let template = Template::parse("k").unwrap();
        assert!(
            publication(
                1,
                &pointer(),
                &event(),
                &Route {
                    exchange: &long,
                    template: &template
                }
            )
            .is_err()
        );
    }

    #[test]
    fn a_deeply_nested_payload_does_not_overflow_the_stack() {
        let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
        assert!(
            published(
                &pointer(),
                &Event {
                    payload: deep.clone(),
                    ..event()
                }
            )
            .is_ok()
        );
        assert!(
            check_headers(&format!(r#"{{"a": {deep}}}"#)).is_err(),
            "too large, and no crash"
        );
    }

    proptest! {
        #[test]
        fn every_text_arrives_as_it_was(
            id in "\\PC{0,20}",
            kind in "[\\s\\S]{0,60}",
            actor: Option<String>,
            key: Option<String>,
            seq: i64,
        ) {
            let event = Event { id, kind, actor, seq, ..event() };
            let template = Template::parse("").unwrap();
            let route = Route { exchange: "", template: &template };
            let body = publication(1, &Pointer { key: key.clone(), ..pointer() }, &event, &route).unwrap().body;
            let found: Value = serde_json::from_slice(&body).unwrap();
            prop_assert_eq!(found["id"].as_str(), Some(event.id.as_str()));
            prop_assert_eq!(found["type"].as_str(), Some(event.kind.as_str()));
            prop_assert_eq!(found.get("actor").and_then(Value::as_str), event.actor.as_deref());
            prop_assert_eq!(found.get("key").and_then(Value::as_str), key.as_deref());
            prop_assert_eq!(found["seq"].as_i64(), Some(seq));
        }

        #[test]
        fn no_headers_panic_and_what_passes_fits(
            json in concat!(
                r#"\PC{0,40}|"#,
                r#"\{(("[a-z]{0,3}": ?(-?[0-9]{1,25}(\.[0-9])?(e[0-9]{1,4})?|null|true|"\PC{0,5}"|\[\]),){0,5}"#,
                r#""end": 1)\}"#,
            ),
        ) {
            match own_headers(&json) {
                Ok(headers) => prop_assert!(encoded_bytes(&headers) <= HEADERS_MAX),
                Err(refusal) => prop_assert!(!refusal.message.is_empty() && !refusal.hint.is_empty()),
            }
        }
    }
}
