//! What a request looks like for the messages of a destination: names and values of its headers. Pure.

use crate::Text;
use outbox_core::envelope::Refusal;
use outbox_core::form::Form;
use outbox_core::headers::encoded_unless;

pub(super) const FORM: Form = Form {
    name: Some(sent_name),
    is_reserved,
    value: percent_encoded,
    is_sendable,
    headers_max: HEADERS_MAX,
    ..Form::TEXT
};

/// The limit of all headers of a request except those that the transport adds. Common servers refuse more with 431 or
/// 400: node at 16 KiB, nginx at 8 KiB a line.
const HEADERS_MAX: usize = 16 * 1024;

/// Headers that a request itself needs: framing, the connection, the sender, its method, and what the transport signs.
/// An event must not set these: it could smuggle another request, or use the credentials of the destination.
const RESERVED: [&str; 24] = [
    "accept-encoding",
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "content-range",
    "content-type",
    "cookie",
    "date",
    "expect",
    "forwarded",
    "host",
    "idempotency-key",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "via",
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-real-ip",
];
const RESERVED_PREFIXES: [&str; 4] = ["webhook-", "proxy-", "x-forwarded-", "sec-"];

/// Whether a request needs the header itself. `name` is in lower case.
pub(super) fn is_reserved(name: &str) -> bool {
    RESERVED.contains(&name) || RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// In lower case. A name is a token: RFC 9110, 5.6.2.
fn sent_name(name: &str) -> Result<String, Refusal> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    match !name.is_empty() && name.bytes().all(is_token) {
        true => Ok(name.to_ascii_lowercase()),
        false => Err(Refusal::new(
            format!("\"{}\" cannot be the name of a header in HTTP", name.escape_debug()),
            "Use letters, digits, hyphens and underscores.",
        )),
    }
}

/// A text must not end its line: the event could add a header, or a request.
fn is_sendable(text: &str) -> bool {
    !text.bytes().any(|byte| byte.is_ascii_control() && byte != b'\t')
}

/// As in CloudEvents' binding for HTTP (3.1.3.2), and here for all headers of outbox: `"`, `%` and all but visible
/// ASCII become `%XY`. One round of decoding returns the text.
fn percent_encoded(text: &str) -> Text {
    let is_plain =
        |at: usize| matches!(text.as_bytes()[at], b'!'..=b'~') && !matches!(text.as_bytes()[at], b'"' | b'%');
    Text::Owned(encoded_unless(text, is_plain).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use outbox_core::envelope::publication;
    use outbox_core::message::{Event, HeaderValue, Pointer, Publication};
    use outbox_core::partition::Partition;
    use outbox_core::route::{Format, Route, Statics, Template};
    use outbox_core::words::Word;
    use proptest::prelude::*;

    fn event(headers: String) -> Event {
        Event {
            id: "1".into(),
            kind: "T".into(),
            payload: "null".into(),
            headers: Some(headers),
            created_at: "2026-01-31T12:00:00.000000Z".into(),
            ..Event::default()
        }
    }

    fn made(event: Event, key: Option<String>, format: Format, statics: &Statics) -> Result<Publication, Refusal> {
        let pointer = Pointer {
            seq: 42,
            destination: "default".into(),
            partition: Partition::new(7).unwrap(),
            key,
            attempts: 0,
            crashes: 0,
            lease_epoch: 5,
            replayed: false,
            enqueued_at_us: 0,
            expires_at_us: None,
        };
        let route = Route {
            form: &FORM,
            format,
            address: &Template::default(),
            statics,
        };
        publication(9, &pointer, event, &route)
    }

    fn with(headers: &str) -> Result<Publication, Refusal> {
        made(event(headers.to_owned()), None, Format::Envelope, &Statics::default())
    }

    fn header(publication: &Publication, wanted: &str) -> Option<String> {
        let headers = &publication.properties.headers;
        headers
            .iter()
            .find(|(name, _)| name == wanted)
            .map(|(_, value)| value.to_string())
    }

    #[test]
    fn a_header_that_a_request_needs_is_not_set_by_an_event_or_a_destination() {
        for name in [
            "outbox-seq",
            "Outbox-Forged",
            "WEBHOOK-ID",
            "Content-Length",
            "authorization",
            "Host",
            "X-HTTP-Method-Override",
            "proxy-x",
        ] {
            let publication = with(&format!(r#"{{"{name}": "forged", "mine": 1}}"#)).unwrap();
            for (_, value) in &publication.properties.headers {
                assert_ne!(*value, HeaderValue::Text("forged".into()), "{name}");
            }
            assert_eq!(header(&publication, "mine").as_deref(), Some("1"));
            assert!(FORM.static_name(Format::Envelope, name).is_err(), "{name}");
        }
        assert_eq!(FORM.static_name(Format::Envelope, "X-Team").unwrap(), "x-team");
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
            assert!(with(json).is_err(), "{json}");
        }
        assert!(with(r#"{"a": "x\ty"}"#).is_ok());
        let mut statics = Statics::default();
        let added = statics.headers.add(&FORM, Format::Envelope, "who", "{aggregate_id}");
        added.unwrap();
        let event = Event {
            aggregate_id: Some("a\r\nhost: evil".into()),
            ..event("{}".into())
        };
        let refusal = made(event, None, Format::Envelope, &statics).unwrap_err();
        assert!(
            refusal.message.contains("header who") && !refusal.message.contains("evil"),
            "{refusal}"
        );
    }

    #[test]
    fn a_message_has_no_address_that_could_be_too_long() {
        let event = Event {
            aggregate_type: Some("x".repeat(256)),
            ..event("{}".into())
        };
        let publication = made(event, None, Format::Envelope, &Statics::default()).unwrap();
        assert!(publication.address.is_empty());
    }

    proptest! {
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
            let event = Event { id, ..event(serde_json::json!({ name: value }).to_string()) };
            for format in Format::ALL.iter().copied() {
                let made = made(event.clone(), Some(key.clone()), format, &Statics::default());
                let Ok(publication) = made else { continue };
                for (name, value) in &publication.properties.headers {
                    prop_assert!(sent_name(name).is_ok());
                    prop_assert!(is_sendable(&value.to_string()));
                }
            }
        }
    }
}
