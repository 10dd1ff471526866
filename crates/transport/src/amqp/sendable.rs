//! Checks whether a message can be encoded for AMQP. Pure; called by `publish_loop` on the publisher thread before each
//! publish.
//!
//! Without these checks, one bad message would harm others. A short string over 255 bytes panics inside lapin. A header
//! frame over `frame_max` or a malformed CC header makes the broker close the connection or channel. That fails every
//! other message in the window. Here only the bad message fails.

use super::config::AmqpConfig;
use crate::{HeaderValue, Properties, Publication, Text};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};

/// Persistent: a confirm then means "on disk" (durable queue), not only "in memory".
const DELIVERY_MODE_PERSISTENT: u8 = 2;
/// AMQP 0-9-1, 4.2.3: type, channel, size and end octet.
const FRAME_OVERHEAD_BYTES: usize = 8;
/// Content header: class, weight, body size, property flags.
const HEADER_FIXED_BYTES: usize = 2 + 2 + 8 + 2;

/// A message as lapin takes it.
pub(crate) struct Sendable {
    pub(crate) exchange: ShortString,
    pub(crate) routing_key: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: Vec<u8>,
}

impl Sendable {
    /// Encodes a message. `Err` is the reason why it can never be sent unchanged.
    pub(crate) fn build(publication: Publication, config: &AmqpConfig, frame_bytes_max: usize) -> Result<Self, String> {
        let (properties, properties_bytes) = build_properties(publication.properties, config)?;
        let frame_bytes = FRAME_OVERHEAD_BYTES + HEADER_FIXED_BYTES + properties_bytes;
        if frame_bytes > frame_bytes_max {
            return Err(format!(
                "properties and headers take {frame_bytes} bytes; the broker's limit is {frame_bytes_max}"
            ));
        }
        Ok(Self {
            exchange: ShortString::from(config.exchange.as_str()), // at most 255 bytes: AmqpConfig::validate
            routing_key: short("routing key", publication.address)?,
            properties,
            body: publication.body,
        })
    }
}

/// The properties and the most bytes that they take on the wire.
fn build_properties(given: Properties, config: &AmqpConfig) -> Result<(BasicProperties, usize), String> {
    let mut bytes = 0;
    let mut take = |what: &str, value: Text| {
        bytes += 1 + value.len();
        short(what, value)
    };
    let mut properties = BasicProperties::default()
        .with_delivery_mode(DELIVERY_MODE_PERSISTENT)
        .with_message_id(take("message_id", given.message_id.into())?);
    if !given.content_type.is_empty() {
        properties = properties.with_content_type(take("content_type", given.content_type)?);
    }
    if !given.app_id.is_empty() {
        properties = properties.with_app_id(take("app_id", given.app_id)?);
    }
    if let Some(kind) = given.kind {
        properties = properties.with_type(take("type", kind.into())?);
    }
    if let Some(id) = given.correlation_id {
        properties = properties.with_correlation_id(take("correlation_id", id.into())?);
    }
    if let Some(expiration_ms) = config.expiration_ms {
        properties = properties.with_expiration(take("expiration", expiration_ms.to_string().into())?);
    }
    if let Some(priority) = config.priority {
        properties = properties.with_priority(priority);
        bytes += 1;
    }
    bytes += 1;
    if let Some(timestamp_s) = given.timestamp_s {
        properties = properties.with_timestamp(timestamp_s);
        bytes += 8;
    }
    if !given.headers.is_empty() {
        let (table, table_bytes) = build_headers(given.headers)?;
        properties = properties.with_headers(table);
        bytes += table_bytes;
    }
    Ok((properties, bytes))
}

fn build_headers(headers: Vec<(Text, HeaderValue)>) -> Result<(FieldTable, usize), String> {
    let mut table = FieldTable::default();
    let mut bytes = 4;
    for (name, value) in headers {
        // RabbitMQ routes by these two headers. It closes the channel unless they are arrays, and header values here
        // are never arrays (rabbit_basic:header_routes/1).
        if name == "CC" || name == "BCC" {
            return Err(format!("the header name {name} is reserved by the broker"));
        }
        bytes += 2 + name.len();
        let value = match value {
            HeaderValue::Text(text) => {
                bytes += 4 + text.len();
                AMQPValue::LongString(LongString::from(text.into_string()))
            }
            HeaderValue::Int(int) => {
                bytes += 8;
                AMQPValue::LongLongInt(int)
            }
            HeaderValue::Float(float) => {
                bytes += 8;
                AMQPValue::Double(float)
            }
            HeaderValue::Bool(bool) => {
                bytes += 1;
                AMQPValue::Boolean(bool)
            }
        };
        table.insert(short("header name", name)?, value);
    }
    Ok((table, bytes))
}

fn short(what: &str, value: Text) -> Result<ShortString, String> {
    let bytes = value.len();
    ShortString::try_new(value).map_err(|_| format!("{what} takes {bytes} bytes; the limit of AMQP is 255"))
}

#[cfg(test)]
mod tests {
    use super::super::guard::FRAME_BYTES_MAX;
    use super::*;
    use outbox_core::form::HEADERS_MAX;

    fn publication() -> Publication {
        Publication {
            handle: 1,
            address: "k".into(),
            key: None,
            properties: Properties {
                message_id: "m".into(),
                ..Properties::default()
            },
            body: b"body".to_vec(),
        }
    }

    fn config() -> AmqpConfig {
        AmqpConfig::new(crate::parse_url("amqp://h").unwrap(), crate::Secret::default())
    }

    fn built(publication: Publication, frame_bytes_max: usize) -> Result<Sendable, String> {
        Sendable::build(publication, &config(), frame_bytes_max)
    }

    fn refusal(publication: Publication) -> String {
        built(publication, FRAME_BYTES_MAX as usize).err().expect("refused")
    }

    #[test]
    fn every_short_string_over_255_bytes_is_refused_by_name() {
        let long = "é".repeat(128);
        let with = |change: &dyn Fn(&mut Publication)| {
            let mut p = publication();
            change(&mut p);
            refusal(p)
        };
        assert!(with(&|p| p.address = long.clone().into()).starts_with("routing key"));
        assert!(with(&|p| p.properties.message_id = long.clone()).starts_with("message_id"));
        assert!(with(&|p| p.properties.content_type = long.clone().into()).starts_with("content_type"));
        assert!(with(&|p| p.properties.app_id = long.clone().into()).starts_with("app_id"));
        assert!(with(&|p| p.properties.kind = Some(long.clone())).starts_with("type"));
        assert!(with(&|p| p.properties.correlation_id = Some(long.clone())).starts_with("correlation_id"));
        assert!(
            with(&|p| p.properties.headers = vec![(long.clone().into(), HeaderValue::Int(1))])
                .starts_with("header name")
        );
    }

    #[test]
    fn exactly_255_bytes_and_an_interior_nul_are_accepted() {
        let mut p = publication();
        p.address = format!("{}\0", "k".repeat(254)).into();
        p.properties.headers = vec![("n\0".into(), HeaderValue::Text("v\0".into()))];
        assert!(built(p, FRAME_BYTES_MAX as usize).is_ok());
    }

    #[test]
    fn headers_larger_than_a_frame_are_refused_and_smaller_ones_accepted() {
        let with = |text_bytes| {
            let mut p = publication();
            p.properties.headers = vec![("h".into(), HeaderValue::Text("v".repeat(text_bytes).into()))];
            built(p, 4096).is_ok()
        };
        // frame 8, fixed 14, message_id 2, mode 1, table 4, name 2, tag 1, length 4
        assert!(with(4096 - 36));
        assert!(!with(4096 - 35));
    }

    #[test]
    fn the_largest_headers_and_properties_fit_into_a_frame() {
        let longest = || "p".repeat(255);
        let mut p = publication();
        p.properties = Properties {
            message_id: longest(),
            content_type: longest().into(),
            app_id: longest().into(),
            kind: Some(longest()),
            correlation_id: Some(longest()),
            headers: vec![("h".into(), HeaderValue::Text("v".repeat(HEADERS_MAX).into()))],
            ..Properties::default()
        };
        assert!(built(p, FRAME_BYTES_MAX as usize - 2_048).is_ok());
    }

    #[test]
    fn a_message_has_the_expiration_and_the_priority_of_its_destination() {
        let config = AmqpConfig {
            expiration_ms: Some(4_294_967_295),
            priority: Some(9),
            ..config()
        };
        let properties = Sendable::build(publication(), &config, FRAME_BYTES_MAX as usize)
            .unwrap()
            .properties;
        let expiration = properties.expiration().as_ref().map(|text| text.as_str());
        assert_eq!((expiration, properties.priority()), (Some("4294967295"), &Some(9)));
    }

    #[test]
    fn headers_that_the_broker_routes_by_are_refused() {
        let mut p = publication();
        p.properties.headers = vec![("CC".into(), HeaderValue::Text("q".into()))];
        assert!(refusal(p).contains("CC"));
    }

    #[test]
    fn a_message_is_persistent_and_absent_properties_stay_absent() {
        let sendable = built(publication(), FRAME_BYTES_MAX as usize).unwrap();
        assert_eq!(sendable.properties.delivery_mode(), &Some(2));
        assert_eq!(sendable.properties.content_type(), &None);
        assert_eq!(sendable.properties.headers(), &None);
        assert_eq!(sendable.properties.expiration(), &None);
        assert_eq!(sendable.properties.priority(), &None);
    }
}
