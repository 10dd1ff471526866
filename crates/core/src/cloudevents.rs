//! An event as a CloudEvent 1.0.2: its attributes, and where they are in a message. `envelope` calls it;
//! docs/formats.md shows both forms.
//!
//! The binary form uses headers `ce-…` everywhere, as the bindings for HTTP, NATS and Kafka do, and Knative for RabbitMQ.

use std::borrow::Cow;

use serde_json::value::RawValue;

use crate::form::{ATTRIBUTE_PREFIX, Form};
use crate::headers::{Header, encoded_unless};
use crate::json::{Member, Members, written};
use crate::message::HeaderValue;
use crate::refusal::Refusal;
use crate::route::Route;
use crate::template::Values;
use crate::text::Text;
use crate::trace;

pub const CONTENT_TYPE: &str = "application/cloudevents+json";

/// The attributes, in the order in which they are written, with the names that they have as headers. An attribute that
/// the event lacks, or that is empty, is absent: CloudEvents has no empty attributes.
pub(crate) struct Attributes<'a>([(&'static str, Option<Cow<'a, str>>); 15]);

/// The content type of the data; in the binary form that of the message.
const DATACONTENTTYPE: &str = "ce-datacontenttype";

impl<'a> Attributes<'a> {
    /// # Errors [`Refusal`] if CloudEvents does not allow a value.
    pub(crate) fn of(values: &Values<'a>, route: &Route<'_>) -> Result<Self, Refusal> {
        let event = values.event;
        let optional = |name, value: Option<&'a str>| match value {
            None | Some("") => Ok(None),
            Some(value) => allowed(name, value).map(Some),
        };
        let header = |wanted: &str| {
            let (_, value) = values
                .headers
                .iter()
                .rfind(|(name, _)| name.eq_ignore_ascii_case(wanted))?;
            match value {
                HeaderValue::Text(text) => Some(text.as_str()),
                _ => None,
            }
        };
        let traceparent = header("traceparent").filter(|text| trace::is_traceparent(text));
        let tracestate = header("tracestate").filter(|text| trace::is_tracestate(text));
        let partitionkey = optional("key", values.key)?;
        let text = |value: Option<&'a str>| value.map(Cow::Borrowed);
        Ok(Self([
            ("ce-specversion", text(Some("1.0"))),
            ("ce-id", text(Some(required("event id", &event.id)?))),
            ("ce-source", Some(source(values, route)?.into_string().into())),
            ("ce-type", text(Some(required("event type", &event.kind)?))),
            (
                "ce-subject",
                text(optional("aggregate_id", event.aggregate_id.as_deref())?.or(partitionkey)),
            ),
            (
                "ce-time",
                text(Some(event.created_at.as_str()).filter(|time| is_timestamp(time))),
            ),
            (DATACONTENTTYPE, text(Some("application/json"))),
            // The partitioning extension: events with the same value are in order.
            ("ce-partitionkey", text(partitionkey)),
            // The sequence extension: ordered as text. A negative seq has none.
            (
                "ce-sequence",
                u64::try_from(event.seq).ok().map(|seq| format!("{seq:019}").into()),
            ),
            (
                "ce-aggregatetype",
                text(optional("aggregate_type", event.aggregate_type.as_deref())?),
            ),
            ("ce-operation", text(optional("operation", event.operation.as_deref())?)),
            (
                "ce-correlationid",
                text(optional("correlation id", event.correlation_id.as_deref())?),
            ),
            ("ce-actor", text(optional("actor", event.actor.as_deref())?)),
            // The distributed tracing extension. The second has no meaning without the first.
            ("ce-traceparent", text(traceparent)),
            ("ce-tracestate", text(tracestate.filter(|_| traceparent.is_some()))),
        ]))
    }

    /// The structured form.
    pub(crate) fn body(&self, data: &RawValue) -> Result<Vec<u8>, Refusal> {
        let attributes = self.0.iter().map(|(name, value)| {
            let value = value.as_deref()?;
            Some((&name[ATTRIBUTE_PREFIX.len()..], Member::Text(value)))
        });
        let members: Vec<_> = attributes.chain([Some(("data", Member::Json(data)))]).collect();
        written(&Members(&members), data.get().len() + 512)
    }

    /// The binary form.
    pub(crate) fn headers(self, form: &Form) -> Vec<Header> {
        let [version, id, source, rest @ ..] = self.0;
        let attributes = [version, source, id].into_iter().chain(rest);
        let header = |(name, value): (&'static str, Option<Cow<'_, str>>)| {
            Some((name.into(), HeaderValue::Text((form.value)(&value?))))
        };
        attributes
            .filter(|(name, _)| *name != DATACONTENTTYPE)
            .filter_map(header)
            .collect()
    }
}

/// The text of the template, made valid for a URI.
fn source(values: &Values<'_>, route: &Route<'_>) -> Result<Text, Refusal> {
    let source = route.statics.source.render(values);
    let source = source.map_err(|long| long.refusal("source of the CloudEvent", "the limit of its template"))?;
    required("source of the CloudEvent", &source)?;
    // RFC 3986, 2. A part that the template has encoded already stays.
    let bytes = source.as_bytes();
    let is_plain = |at: usize| match bytes[at] {
        b'%' => matches!(bytes.get(at + 1..at + 3), Some(hex) if hex.iter().all(u8::is_ascii_hexdigit)),
        byte => byte.is_ascii_alphanumeric() || b"-._~:/?#[]@!$&'()*+,;=".contains(&byte),
    };
    let encoded = match encoded_unless(&source, is_plain) {
        Cow::Borrowed(_) => None,
        Cow::Owned(encoded) => Some(encoded),
    };
    Ok(encoded.map_or(source, Text::Owned))
}

fn required<'a>(name: &str, value: &'a str) -> Result<&'a str, Refusal> {
    if value.is_empty() {
        return Err(Refusal::new(
            format!("the {name} is empty, which CloudEvents does not allow"),
            "Give it a value, or choose the format envelope.",
        ));
    }
    allowed(name, value)
}

/// Attributes contain no control characters and no noncharacters of Unicode.
fn allowed<'a>(name: &str, value: &'a str) -> Result<&'a str, Refusal> {
    let is_barred = |char: char| {
        let code = u32::from(char);
        char.is_control() || (0xFDD0..=0xFDEF).contains(&code) || code & 0xFFFE == 0xFFFE
    };
    if !value.contains(is_barred) {
        return Ok(value);
    }
    Err(Refusal::new(
        format!("the {name} contains a control character, which CloudEvents does not allow"),
        "Remove it from the event, or choose the format envelope.",
    ))
}

/// RFC 3339 has four digits for the year; Postgres has more years.
fn is_timestamp(text: &str) -> bool {
    let form = b"0000-00-00T00:00:00";
    let fits = |(byte, form): (u8, &u8)| match form {
        b'0' => byte.is_ascii_digit(),
        other => byte == *other,
    };
    text.len() > form.len() && text.ends_with('Z') && text.bytes().zip(form).all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{TEXT, TRACEPARENT, TYPED, bare_event, event, event_with, header, made, names, pointer};
    use crate::message::{Event, Pointer, Publication};
    use crate::route::{Format, Statics, Template};
    use proptest::prelude::*;
    use serde_json::Value;

    fn structured(pointer: &Pointer, event: &Event) -> Result<Publication, Refusal> {
        made(pointer, event, TYPED, Format::CloudEvents, &Statics::default())
    }

    fn binary(pointer: &Pointer, event: &Event, form: &'static Form) -> Result<Publication, Refusal> {
        made(pointer, event, form, Format::CloudEventsBinary, &Statics::default())
    }

    fn traced() -> Event {
        let headers = format!(r#"{{"traceparent": "{TRACEPARENT}", "tracestate": "rojo=1"}}"#);
        event_with(|e| e.headers = Some(headers))
    }

    #[test]
    fn the_structured_form_has_the_attributes_and_the_payload_byte_for_byte() {
        let publication = structured(&pointer(), &traced()).unwrap();
        assert_eq!(publication.properties.content_type, "application/cloudevents+json");
        let expected = concat!(
            r#"{"specversion":"1.0","id":"0198a3f2-0000-7000-8000-000000000001","source":"/outbox","#,
            r#""type":"OrderPlaced","subject":"42","time":"2026-01-31T12:00:00.000001Z","#,
            r#""datacontenttype":"application/json","partitionkey":"order-42","sequence":"0000000000000000042","#,
            r#""aggregatetype":"Order","operation":"INSERT","correlationid":"c-1","actor":"kim","#,
            r#""traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01","tracestate":"rojo=1","#,
            r#""data":{"total": 1.10,  "b":1,"a":2}}"#,
        );
        assert_eq!(String::from_utf8(publication.body).unwrap(), expected);
    }

    #[test]
    fn the_binary_form_has_the_same_attributes_in_headers() {
        let whole: Value = serde_json::from_slice(&structured(&pointer(), &traced()).unwrap().body).unwrap();
        for form in [TYPED, TEXT] {
            let publication = binary(&pointer(), &traced(), form).unwrap();
            assert_eq!(publication.body, traced().payload.as_bytes());
            assert_eq!(publication.properties.content_type, "application/json");
            let mut attributes = whole.as_object().unwrap().clone();
            assert!(attributes.remove("data").is_some() && attributes.remove("datacontenttype").is_some());
            for (name, value) in &attributes {
                assert_eq!(
                    header(&publication, &format!("ce-{name}")).as_deref(),
                    value.as_str(),
                    "{name}"
                );
            }
            let found = names(&publication)
                .into_iter()
                .filter(|name| name.starts_with("ce-"))
                .count();
            assert_eq!(found, attributes.len());
        }
    }

    #[test]
    fn null_and_empty_values_are_no_attributes() {
        let bare = Event {
            actor: Some(String::new()),
            aggregate_type: Some(String::new()),
            ..bare_event()
        };
        let publication = structured(&Pointer { key: None, ..pointer() }, &bare).unwrap();
        let expected = concat!(
            r#"{"specversion":"1.0","id":"1","source":"/outbox","type":"T","time":"2026-01-31T12:00:00.000000Z","#,
            r#""datacontenttype":"application/json","sequence":"0000000000000000000","data":null}"#
        );
        assert_eq!(String::from_utf8(publication.body).unwrap(), expected);
    }

    #[test]
    fn the_subject_is_the_aggregate_or_else_the_key() {
        let subject = |event: &Event| {
            let body = structured(&pointer(), event).unwrap().body;
            serde_json::from_slice::<Value>(&body).unwrap()["subject"]
                .as_str()
                .map(str::to_owned)
        };
        assert_eq!(subject(&event()).as_deref(), Some("42"));
        assert_eq!(
            subject(&event_with(|e| e.aggregate_id = None)).as_deref(),
            Some("order-42")
        );
        assert_eq!(
            subject(&event_with(|e| e.aggregate_id = Some(String::new()))).as_deref(),
            Some("order-42")
        );
    }

    #[test]
    fn only_a_valid_trace_is_an_attribute_and_a_header_in_any_case() {
        for (headers, parent, state) in [
            (
                r#"{"traceparent": "00-ab-cd-01", "tracestate": "a=1"}"#.to_owned(),
                false,
                false,
            ),
            (r#"{"tracestate": "a=1"}"#.to_owned(), false, false),
            (r#"{"traceparent": 7}"#.to_owned(), false, false),
            (
                format!(r#"{{"traceparent": "{TRACEPARENT}", "tracestate": "ü"}}"#),
                true,
                false,
            ),
            (
                format!(r#"{{"Traceparent": "{TRACEPARENT}", "TraceState": "a=1"}}"#),
                true,
                true,
            ),
        ] {
            let event = event_with(|e| e.headers = Some(headers.clone()));
            let publication = binary(&pointer(), &event, TYPED).unwrap();
            assert_eq!(header(&publication, "ce-traceparent").is_some(), parent, "{headers}");
            assert_eq!(header(&publication, "ce-tracestate").is_some(), state, "{headers}");
            let given: serde_json::Map<String, Value> = serde_json::from_str(&headers).unwrap();
            assert!(
                given.keys().all(|name| header(&publication, name).is_some()),
                "{headers}"
            );
        }
    }

    #[test]
    fn sequences_are_ordered_as_text() {
        let sequence = |seq| {
            let publication = binary(&pointer(), &Event { seq, ..event() }, TYPED).unwrap();
            header(&publication, "ce-sequence")
        };
        let seqs = [0, 9, 10, 1 << 40, i64::MAX];
        let texts: Vec<_> = seqs.iter().map(|seq| sequence(*seq).unwrap()).collect();
        assert!(
            texts.is_sorted() && texts.iter().all(|text| text.len() == 19),
            "{texts:?}"
        );
        assert_eq!(sequence(-1), None);
    }

    #[test]
    fn a_source_is_a_template_and_a_uri() {
        let with = |template: &str, event: &Event| {
            let statics = Statics {
                source: Template::parse_text(template).unwrap(),
                ..Statics::default()
            };
            let publication = made(&pointer(), event, TYPED, Format::CloudEventsBinary, &statics)?;
            Ok::<_, Refusal>(header(&publication, "ce-source").unwrap())
        };
        assert_eq!(
            with("https://a.b/{aggregate_type}?x=%20", &event()).unwrap(),
            "https://a.b/order?x=%20"
        );
        let odd = event_with(|e| e.aggregate_type = Some("a b\"ü\n".into()));
        let refusal = with("/{aggregate_type}", &odd).unwrap_err();
        assert!(refusal.message.contains("control"), "{refusal}");
        let odd = event_with(|e| e.aggregate_type = Some("a b\"ü".into()));
        assert_eq!(with("/{aggregate_type}", &odd).unwrap(), "/a%20b%22%C3%BC");
        let odd = event_with(|e| e.aggregate_type = Some("50%/%4x/%".into()));
        assert_eq!(with("/{aggregate_type}", &odd).unwrap(), "/50%25/%254x/%25");
        assert!(
            with("{header:none}", &event())
                .unwrap_err()
                .message
                .contains("source of the CloudEvent is empty")
        );
        let long = event_with(|e| e.aggregate_id = Some("a".repeat(1024)));
        assert!(
            with("/{aggregate_id}", &long)
                .unwrap_err()
                .message
                .contains("1025 bytes")
        );
    }

    #[test]
    fn a_value_that_cloudevents_does_not_allow_is_refused_by_name() {
        for (name, event) in [
            ("event id", event_with(|e| e.id = String::new())),
            ("event type", event_with(|e| e.kind = String::new())),
            ("event type", event_with(|e| e.kind = "a\nb".into())),
            ("aggregate_id", event_with(|e| e.aggregate_id = Some("\u{7f}".into()))),
            (
                "aggregate_type",
                event_with(|e| e.aggregate_type = Some("\u{85}".into())),
            ),
            ("operation", event_with(|e| e.operation = Some("\u{fdd0}".into()))),
            (
                "correlation id",
                event_with(|e| e.correlation_id = Some("\u{1ffff}".into())),
            ),
            ("actor", event_with(|e| e.actor = Some("\t".into()))),
            ("payload", event_with(|e| e.payload = "{".into())),
        ] {
            for publication in [structured(&pointer(), &event), binary(&pointer(), &event, TEXT)] {
                let refusal = publication.unwrap_err();
                assert!(
                    refusal.message.contains(name) && !refusal.hint.is_empty(),
                    "{name}: {refusal}"
                );
            }
        }
        let pointer = Pointer {
            key: Some("a\nb".into()),
            ..pointer()
        };
        assert!(
            structured(&pointer, &event())
                .unwrap_err()
                .message
                .starts_with("the key")
        );
    }

    #[test]
    fn a_time_that_rfc_3339_cannot_represent_is_no_attribute() {
        for time in [
            "10000-01-01T00:00:00.000000Z",
            "infinity",
            "",
            "2026-01-31 12:00:00Z",
            "2026-01-31T12:00:00",
        ] {
            let event = event_with(|e| e.created_at = time.to_owned());
            assert_eq!(
                header(&binary(&pointer(), &event, TYPED).unwrap(), "ce-time"),
                None,
                "{time}"
            );
        }
    }

    proptest! {
        #[test]
        fn every_text_arrives_unchanged_or_is_refused(
            kind in "\\PC{0,30}|[\\s\\S]{0,12}", actor in "\\PC{0,30}", key in "\\PC{0,30}", seq in 0..=i64::MAX,
        ) {
            let event = Event { kind, actor: Some(actor), seq, ..event() };
            let pointer = Pointer { key: Some(key), ..pointer() };
            let Ok(publication) = structured(&pointer, &event) else { return Ok(()) };
            let found: Value = serde_json::from_slice(&publication.body).unwrap();
            let text = |name: &str| found.get(name).map_or(Some(""), Value::as_str);
            prop_assert_eq!(text("type"), Some(event.kind.as_str()));
            prop_assert_eq!(text("actor"), event.actor.as_deref());
            prop_assert_eq!(text("partitionkey"), pointer.key.as_deref());
            prop_assert_eq!(text("sequence").and_then(|text| text.parse().ok()), Some(seq));
        }
    }
}
