//! Names of headers: those reserved for outbox and the transport, and those that cannot be sent. `headers` calls it for
//! each message, `route` for each destination.

use crate::format::{Format, TransportKind};
use crate::refusal::{Refusal, check_short};
use crate::text::Text;

/// Headers that outbox sets with AMQP. A user's header with such a name is dropped, also if outbox has no value for it:
/// a consumer may trust these names. (All but the epoch, the attempt and replayed come from the event.)
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

/// Headers that outbox sets in addition to [`SYSTEM_HEADERS`] with [`Format::Payload`]: members of the envelope's body.
pub(crate) const PAYLOAD_HEADERS: [&str; 5] = ["key", "operation", "actor", "metadata", "created_at"];

/// The prefix of CloudEvents' bindings for HTTP and for RabbitMQ.
pub(crate) const ATTRIBUTE_PREFIX: &str = "ce-";

/// RabbitMQ reads these as lists of further routing keys and closes the channel (406 PRECONDITION_FAILED) if they are
/// anything else (rabbit_basic.erl, header_routes). A header here is never a list, so one message would fail the whole
/// window, again and again.
const ROUTING_HEADERS: [&str; 2] = ["CC", "BCC"];

/// Headers that a request itself needs: framing, the connection, the sender, its method, and what the transport signs.
/// An event must not set these: it could smuggle another request, or use the credentials of the destination.
const HTTP_RESERVED: [&str; 24] = [
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
const HTTP_RESERVED_PREFIXES: [&str; 4] = ["webhook-", "proxy-", "x-forwarded-", "sec-"];
/// The prefix of the headers that outbox sets with HTTP.
const HTTP_PREFIX: &str = "outbox-";

/// Whether a request needs the header itself, so that a message must not set it. `name` is in lower case.
pub fn is_reserved_by_http(name: &str) -> bool {
    HTTP_RESERVED.contains(&name) || HTTP_RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Checks the name of a header that a destination adds to each message.
pub(crate) fn static_name(transport: TransportKind, format: Format, name: &str) -> Result<Text, Refusal> {
    check_short("name of a header", name)?;
    check_routes_nothing(name)?;
    let name = match transport {
        TransportKind::Amqp => Text::shared(name),
        TransportKind::Http => {
            check_token(name)?;
            Text::shared(&name.to_ascii_lowercase())
        }
    };
    if name.is_empty() || is_reserved(transport, format, &name) {
        return Err(Refusal::new(
            format!("the header \"{name}\" cannot be set"),
            "The outbox or the transport sets it. Choose another name.",
        ));
    }
    Ok(name)
}

/// Checks the name of a header whose value is a secret of the destination. Only HTTP has such headers. The rule is that
/// of all formats, because the format may change; `Authorization` is allowed, as the option is for credentials.
///
/// # Errors
/// [`Refusal`] unless a destination may set it.
pub fn secret_name(name: &str) -> Result<Text, Refusal> {
    match name.eq_ignore_ascii_case("authorization") {
        true => Ok("authorization".into()),
        false => static_name(TransportKind::Http, Format::CloudEvents, name),
    }
}

/// Whether the name is reserved for outbox or the transport. With HTTP it is given in lower case.
pub(crate) fn is_reserved(transport: TransportKind, format: Format, name: &str) -> bool {
    let prefix = name.as_bytes().get(..ATTRIBUTE_PREFIX.len());
    let is_attribute = prefix.is_some_and(|prefix| prefix.eq_ignore_ascii_case(ATTRIBUTE_PREFIX.as_bytes()));
    (format.is_cloudevents() && is_attribute)
        || match transport {
            TransportKind::Amqp => {
                SYSTEM_HEADERS.contains(&name) || (format == Format::Payload && PAYLOAD_HEADERS.contains(&name))
            }
            TransportKind::Http => name.starts_with(HTTP_PREFIX) || is_reserved_by_http(name),
        }
}

pub(crate) fn check_routes_nothing(name: &str) -> Result<(), Refusal> {
    if !ROUTING_HEADERS.contains(&name) {
        return Ok(());
    }
    Err(Refusal::new(
        format!("the header {name} cannot be set"),
        "RabbitMQ takes CC and BCC for lists of routing keys. Choose another name, or bind further queues to the \
               exchange.",
    ))
}

/// RFC 9110, 5.6.2.
pub(crate) fn check_token(name: &str) -> Result<(), Refusal> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if !name.is_empty() && name.bytes().all(is_token) {
        return Ok(());
    }
    Err(Refusal::new(
        format!("\"{}\" cannot be the name of a header in HTTP", name.escape_debug()),
        "Use letters, digits, hyphens and underscores.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use TransportKind::{Amqp, Http};

    #[test]
    fn a_destination_cannot_set_reserved_headers() {
        let refused = |transport, format, name: &str| static_name(transport, format, name).is_err();
        for name in ["", "seq", "CC", "BCC", &"n".repeat(256)] {
            assert!(refused(Amqp, Format::Envelope, name), "{name}");
        }
        assert!(refused(Amqp, Format::Payload, "actor") && !refused(Amqp, Format::Envelope, "actor"));
        assert!(refused(Amqp, Format::CloudEvents, "ce-x") && !refused(Amqp, Format::Envelope, "ce-x"));
        for name in [
            "Outbox-X",
            "Authorization",
            "content-type",
            "x y",
            "",
            "webhook-id",
            "proxy-x",
            "ü",
        ] {
            assert!(refused(Http, Format::Envelope, name), "{name}");
        }
        assert_eq!(static_name(Http, Format::Envelope, "X-Team").unwrap(), "x-team");
    }
}
