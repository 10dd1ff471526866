//! Makes one [`Publication`] of an event and its pointer. The worker calls it on its main thread for each claimed row,
//! after the claim's transaction has ended. The enqueuing functions call [`check_headers`], [`check_short`] and
//! [`address_of`], so that an event that cannot be sent is refused at the call.
//!
//! The body has the same bytes on each retry: values that differ between attempts (attempt, lease epoch) are only in
//! headers. The envelope is the JSON of the whole event; columns that are NULL are absent.

use crate::cloudevents::{self, Attributes};
use crate::form::Form;
use crate::format::Format;
use crate::headers;
use crate::json::{Member, Members, not_json, raw, written};
use crate::message::{Event, Pointer, Properties, Publication};
use crate::route::Route;
use crate::template::{Template, Values};
use crate::text::Text;

pub use crate::form::{HEADERS_MAX, SYSTEM_HEADERS};
pub use crate::headers::{SYSTEM_HEADERS_RESERVED, check_headers};
pub use crate::refusal::{Refusal, SHORT_STRING_MAX, check_short, check_short_start};

pub const CONTENT_TYPE: &str = "application/json";

/// The complete message for `event`, but for `key`, which the engine sets. The outcome carries `handle`.
///
/// # Errors [`Refusal`] if a JSON column is not JSON, or if a value exceeds a limit of the transport or the format. A
/// retry cannot help.
pub fn publication(
    handle: u64,
    pointer: &Pointer,
    mut event: Event,
    route: &Route<'_>,
) -> Result<Publication, Refusal> {
    check_short("event id", &event.id)?;
    check_short("event type", &event.kind)?;
    if let Some(correlation_id) = &event.correlation_id {
        check_short("correlation id", correlation_id)?;
    }
    let own = own_headers(&event, &[route.form])?;
    let values = Values::new(pointer, &event, &own);
    let address = address(route.form, route.address, &values)?;
    let statics = route.statics;
    // None: the body is the payload, as it is.
    let (content_type, body, more) = match route.format {
        Format::Envelope => {
            let body = envelope(&event, values.key)?;
            (Text::Static(CONTENT_TYPE), Some(body), Vec::new())
        }
        Format::Payload => {
            if statics.content_type.is_none() {
                raw("payload", &event.payload)?;
            }
            let given = statics.content_type.clone();
            (given.unwrap_or(Text::Static(CONTENT_TYPE)), None, Vec::new())
        }
        Format::CloudEvents => {
            let body = Attributes::of(&values, route)?.body(raw("payload", &event.payload)?)?;
            (Text::Static(cloudevents::CONTENT_TYPE), Some(body), Vec::new())
        }
        Format::CloudEventsBinary => {
            raw("payload", &event.payload)?;
            let attributes = Attributes::of(&values, route)?.headers(route.form);
            (Text::Static(CONTENT_TYPE), None, attributes)
        }
    };
    let headers = headers::all(pointer, &mut event, route, more, own)?;
    let body = body.unwrap_or_else(|| event.payload.into_bytes());
    let properties = Properties {
        message_id: event.id,
        kind: Some(event.kind),
        content_type,
        timestamp_s: u64::try_from(event.created_at_s).ok(),
        app_id: statics.app_id.clone(),
        correlation_id: event.correlation_id,
        headers,
    };
    Ok(Publication {
        handle,
        address,
        key: None,
        properties,
        body,
    })
}

/// The address that `template` makes of an event; `values.headers` are read from it. `form`: that of its destination;
/// `forms`: those of all that it may have.
///
/// # Errors [`Refusal`] if the user's headers cannot be sent, as in [`check_headers`], or the address is too long.
pub fn address_of(form: &Form, forms: &[&Form], template: &Template, values: Values<'_>) -> Result<Text, Refusal> {
    let headers = &own_headers(values.event, forms)?;
    address(form, template, &Values { headers, ..values })
}

fn address(form: &Form, template: &Template, values: &Values<'_>) -> Result<Text, Refusal> {
    let rendered = template.render(values);
    rendered.map_err(|long| long.refusal(form.address, "the limit"))
}

fn own_headers(event: &Event, forms: &[&Form]) -> Result<Vec<headers::Header>, Refusal> {
    let own = event.headers.as_deref();
    own.map_or(Ok(Vec::new()), |json| headers::own(json, forms))
}

/// Checks metadata that is given as text: a JSON object that jsonb can store.
///
/// # Errors [`Refusal`] unless it is an object without the character NUL.
pub fn check_metadata(json: &str) -> Result<(), Refusal> {
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(json).map_err(|error| match error.is_data() {
            false => not_json("metadata", &error),
            true => Refusal::new(
                "metadata is not a JSON object",
                "Give an object, such as {\"source\": \"admin\"}.",
            ),
        })?;
    if object.iter().any(|(name, value)| name.contains('\0') || has_nul(value)) {
        return Err(Refusal::new(
            "metadata contains the character \\u0000",
            "Postgres cannot store it; leave it out.",
        ));
    }
    Ok(())
}

fn has_nul(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::String(text) => text.contains('\0'),
        serde_json::Value::Array(values) => values.iter().any(has_nul),
        serde_json::Value::Object(values) => values.iter().any(|(name, value)| name.contains('\0') || has_nul(value)),
        _ => false,
    }
}

/// The members of the body; columns that are NULL are absent. Raw values are the stored bytes, without the white space
/// around them.
fn members<'a>(event: &'a Event, key: Option<&'a str>) -> Result<[Option<(&'static str, Member<'a>)>; 14], Refusal> {
    let text = |name, text: &'a Option<String>| Some((name, Member::Text(text.as_deref()?)));
    let json = |name, json: &'a str| raw(name, json).map(|json| Some((name, Member::Json(json))));
    let optional = |name, text: &'a Option<String>| text.as_deref().map_or(Ok(None), |text| json(name, text));
    Ok([
        Some(("id", Member::Text(&event.id))),
        Some(("seq", Member::Number(event.seq))),
        Some(("type", Member::Text(&event.kind))),
        text("aggregate_type", &event.aggregate_type),
        text("aggregate_id", &event.aggregate_id),
        text("operation", &event.operation),
        json("payload", &event.payload)?,
        optional("previous_payload", &event.previous_payload)?,
        optional("metadata", &event.metadata)?,
        text("actor", &event.actor),
        text("correlation_id", &event.correlation_id),
        Some(("created_at", Member::Text(&event.created_at))),
        key.map(|key| ("key", Member::Text(key))),
        optional("headers", &event.headers)?,
    ])
}

fn envelope(event: &Event, key: Option<&str>) -> Result<Vec<u8>, Refusal> {
    let json_bytes = [&event.previous_payload, &event.metadata, &event.headers]
        .into_iter()
        .map(|json| json.as_ref().map_or(0, String::len))
        .sum::<usize>();
    let members = members(event, key)?;
    written(&Members(&members), event.payload.len() + json_bytes + 512)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::EVENT_BYTES_MAX;
    use crate::fixtures::{TYPED, bare_event, event, event_with, header, made, names, pointer, text};
    use crate::message::HeaderValue;
    use crate::partition::Partition;
    use crate::route::Statics;
    use proptest::prelude::*;
    use serde_json::Value;

    fn published(pointer: &Pointer, event: &Event) -> Result<Publication, Refusal> {
        made(pointer, event, TYPED, Format::Envelope, &Statics::default())
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
    fn metadata_is_an_object_that_jsonb_can_store() {
        for json in [
            "{}",
            r#"{"a": "\\u0000"}"#,
            r#"{"source": "admin", "n": [1.5e3, null, {"a": "\u0041"}]}"#,
        ] {
            assert_eq!(check_metadata(json), Ok(()), "{json}");
        }
        for json in [
            "",
            "null",
            "[]",
            "1",
            "{",
            r#"{"a": "\u0000"}"#,
            r#"{"a\u0000": 1}"#,
            r#"{"a": [{"b\u0000": 1}]}"#,
            r#"{"a": "\ud800"}"#,
        ] {
            assert!(check_metadata(json).is_err(), "{json}");
        }
    }

    #[test]
    fn null_columns_are_absent() {
        let publication = published(&Pointer { key: None, ..pointer() }, &bare_event()).unwrap();
        let expected = r#"{"id":"1","seq":0,"type":"T","payload":null,"created_at":"2026-01-31T12:00:00.000000Z"}"#;
        assert_eq!(std::str::from_utf8(&publication.body).unwrap(), expected);
        assert_eq!(publication.address, ".");
        assert_eq!(publication.properties.correlation_id, None);
        assert_eq!(
            names(&publication),
            ["id", "partition_key", "seq", "lease_epoch", "attempt"]
        );
    }

    /// Its own texts are escaped, each byte as six: the largest body that a format makes of an event. An actor that
    /// fits in a header has at most 64 KiB.
    #[test]
    fn the_largest_event_is_a_message_below_16_mib_in_every_format() {
        const MAX_MESSAGE_SIZE: usize = 16 << 20;
        for (format, escaped) in [
            (Format::Envelope, "\u{1}"),
            (Format::Payload, "\u{1}"),
            (Format::CloudEvents, "\""),
            (Format::CloudEventsBinary, "\""),
        ] {
            let short = || escaped.repeat(255);
            let mut largest = event_with(|e| {
                e.id = short();
                e.kind = short();
                e.aggregate_type = Some(escaped.repeat(127)); // both are in the routing key
                e.aggregate_id = Some(short());
                e.operation = Some(escaped.repeat(127));
                e.correlation_id = Some(short());
                e.actor = Some(escaped.repeat(if format == Format::Envelope { 64 << 10 } else { 32 << 10 }));
            });
            let others = largest.body_bytes() - largest.payload.len();
            largest.payload = format!("\"{}\"", "x".repeat(EVENT_BYTES_MAX - others - 2));
            assert_eq!(largest.body_bytes(), EVENT_BYTES_MAX);
            let key = Pointer {
                key: Some(short()),
                ..pointer()
            };
            let statics = Statics::default();
            let body = made(&key, &largest, TYPED, format, &statics).unwrap().body;
            assert!(body.len() > EVENT_BYTES_MAX - (128 << 10), "{format:?}");
            assert!(body.len() <= MAX_MESSAGE_SIZE, "{format:?}: {}", body.len());
        }
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
        assert!(
            !first
                .properties
                .headers
                .iter()
                .any(|(name, _)| name.as_str() == "replayed")
        );
        let marked = (Text::Static("replayed"), HeaderValue::Bool(true));
        let place = (again.properties.headers.iter()).position(|header| *header == marked);
        again.properties.headers.remove(place.expect("the header"));
        assert_eq!(again, first);
    }

    #[test]
    fn properties_and_headers_name_the_event() {
        let publication = published(&pointer(), &event()).unwrap();
        assert_eq!((publication.handle, publication.address.as_str()), (9, "order.insert"));
        let headers = [
            ("id", text("0198a3f2-0000-7000-8000-000000000001")),
            ("aggregate_type", text("Order")),
            ("aggregate_id", text("42")),
            ("partition_key", text("p07")),
            ("seq", HeaderValue::Int(42)),
            ("lease_epoch", HeaderValue::Int(5)),
            ("attempt", HeaderValue::Int(3)),
            ("tenant", text("acme")),
        ];
        let expected = Properties {
            message_id: "0198a3f2-0000-7000-8000-000000000001".into(),
            kind: Some("OrderPlaced".into()),
            content_type: "application/json".into(),
            timestamp_s: Some(1_769_860_800),
            app_id: "outbox".into(),
            correlation_id: Some("c-1".into()),
            headers: headers.map(|(name, value)| (name.into(), value)).into(),
        };
        assert_eq!(publication.properties, expected);
    }

    #[test]
    fn a_time_before_1970_has_no_timestamp() {
        let old = Event {
            created_at_s: -1,
            ..event()
        };
        assert_eq!(published(&pointer(), &old).unwrap().properties.timestamp_s, None);
    }

    #[test]
    fn headers_that_pass_at_enqueue_also_pass_with_those_of_outbox() {
        let own = |value_bytes: usize| format!(r#"{{"a": "{}"}}"#, "v".repeat(value_bytes));
        // less a length, and what the one header takes in addition to its value
        let largest = HEADERS_MAX - SYSTEM_HEADERS_RESERVED - 4 - (6 + 1);
        assert!(check_headers(&own(largest + 1), &[]).is_err());
        let headers = own(largest);
        assert_eq!(check_headers(&headers, &[]), Ok(()));
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
        assert!(refusal.message.contains("the limit is 65536"), "{refusal}");
    }

    #[test]
    fn invalid_json_is_refused_without_quoting_it() {
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
    fn a_value_that_is_too_long_is_refused_by_name() {
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
    }

    #[test]
    fn a_payload_is_sent_as_stored_and_the_rest_in_headers() {
        let event = event_with(|e| e.payload = " {\"a\":  1} ".into());
        let publication = made(&pointer(), &event, TYPED, Format::Payload, &Statics::default()).unwrap();
        assert_eq!(publication.body, b" {\"a\":  1} ");
        assert_eq!(publication.properties.content_type, "application/json");
        assert_eq!(publication.properties.kind.as_deref(), Some("OrderPlaced"));
        for (name, value) in [
            ("key", "order-42"),
            ("operation", "INSERT"),
            ("actor", "kim"),
            ("metadata", r#"{"n":1e2}"#),
            ("created_at", "2026-01-31T12:00:00.000001Z"),
            ("aggregate_id", "42"),
            ("tenant", "acme"),
        ] {
            assert_eq!(header(&publication, name).as_deref(), Some(value), "{name}");
        }
        assert_eq!(header(&publication, "previous_payload"), None);
    }

    #[test]
    fn a_payload_need_not_be_json_if_its_content_type_says_so() {
        let text = event_with(|e| e.payload = "plain".into());
        let statics = Statics {
            content_type: Some("text/plain".into()),
            ..Statics::default()
        };
        let by = |statics| made(&pointer(), &text, TYPED, Format::Payload, statics);
        let publication = by(&statics).unwrap();
        assert_eq!(
            (
                publication.body.as_slice(),
                publication.properties.content_type.as_str()
            ),
            (b"plain".as_slice(), "text/plain")
        );
        assert!(
            by(&Statics::default())
                .unwrap_err()
                .message
                .starts_with("payload is not valid JSON")
        );
    }

    #[test]
    fn each_message_has_the_app_id_of_its_destination() {
        let statics = Statics {
            app_id: "shop".into(),
            ..Statics::default()
        };
        let publication = made(&pointer(), &event(), TYPED, Format::Envelope, &statics).unwrap();
        assert_eq!(publication.properties.app_id.as_str(), "shop");
    }

    #[test]
    fn an_address_is_checked_at_enqueue_with_the_users_headers() {
        let template = Template::parse("{partition}.{header:tenant|none}").unwrap();
        let pointer = Pointer {
            partition: Partition::LAST,
            ..pointer()
        };
        let check = |bytes: usize| {
            let event = event_with(|e| e.headers = Some(format!(r#"{{"tenant": "{}"}}"#, "t".repeat(bytes))));
            let values = Values::new(&pointer, &event, &[]);
            address_of(TYPED, &[TYPED], &template, values).map(drop)
        };
        assert_eq!(check(255 - "p1023.".len()), Ok(()));
        assert!(
            check(256 - "p1023.".len())
                .unwrap_err()
                .message
                .contains("routing key is 256 bytes")
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
            check_headers(&format!(r#"{{"a": {deep}}}"#), &[]).is_err(),
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
            let body = published(&Pointer { key: key.clone(), ..pointer() }, &event).unwrap().body;
            let found: Value = serde_json::from_slice(&body).unwrap();
            prop_assert_eq!(found["id"].as_str(), Some(event.id.as_str()));
            prop_assert_eq!(found["type"].as_str(), Some(event.kind.as_str()));
            prop_assert_eq!(found.get("actor").and_then(Value::as_str), event.actor.as_deref());
            prop_assert_eq!(found.get("key").and_then(Value::as_str), key.as_deref());
            prop_assert_eq!(found["seq"].as_i64(), Some(seq));
        }
    }
}
