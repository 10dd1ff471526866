//! What is sent? Events of one shape, made twice: by SQL for the outbox, and here for who publishes without it. Both give
//! the same bytes, so that the broker does the same work for each side.

use outbox_core::envelope;
use outbox_core::message::{Event, HeaderValue, Pointer, Publication, Text};
use outbox_core::partition::{Partition, PartitionCount};
use outbox_core::route::{Format, Route, Statics, Template, TransportKind};

/// Bytes of a message's body where a row does not say otherwise, give or take those of a longer or shorter seq.
pub const BODY_BYTES: usize = 300;

/// The SQL of one event; `$1` is the note in its payload, `$2` its order.
pub const PUBLISH: &str = "select outbox_publish('OrderPlaced', \
     jsonb_build_object('note', $1::text, 'order', $2::text, 'total', 99.90), 'order', $2::text, 'placed')";

/// The default of outbox.routing_key.
const ROUTING_KEY: &str = "{aggregate_type}.{operation}";

/// Makes the messages that the extension makes of its events.
pub struct Maker {
    exchange: Text,
    template: Template,
    statics: Statics,
    partitions: PartitionCount,
    /// What `$1` of [`PUBLISH`] must be. Postgres finds nothing in it to compress.
    pub note: String,
}

impl Maker {
    pub fn new(exchange: &str) -> Self {
        Self::sized(exchange, BODY_BYTES)
    }

    /// Of messages with bodies of so many bytes.
    pub fn sized(exchange: &str, body_bytes: usize) -> Self {
        let mut maker = Self {
            exchange: Text::shared(exchange),
            template: Template::parse(ROUTING_KEY).expect("a template of our own"),
            statics: Statics::default(),
            partitions: PartitionCount::new(16).expect("the default count"),
            note: String::new(),
        };
        let unpadded = maker.message(100_000, &order(0), &id(0));
        maker.note = note(body_bytes - unpadded.body.len());
        maker
    }

    pub fn message(&self, seq: i64, order: &str, id: &str) -> Publication {
        let key = format!("order:{order}");
        let pointer = Pointer {
            seq,
            destination: "default".into(),
            partition: Partition::of_key(&key, self.partitions),
            key: Some(key),
            attempts: 0,
            crashes: 0,
            lease_epoch: 1 << 40,
            replayed: false,
            enqueued_at_us: 0,
            expires_at_us: None,
        };
        let event = Event {
            id: id.to_owned(),
            seq,
            kind: "OrderPlaced".into(),
            aggregate_type: Some("order".into()),
            aggregate_id: Some(order.to_owned()),
            operation: Some("placed".into()),
            // As jsonb prints it: shorter names first.
            payload: format!(r#"{{"note": "{}", "order": "{order}", "total": 99.90}}"#, self.note),
            created_at: "2026-01-31T12:00:00.123456Z".into(),
            created_at_s: 1_769_860_800,
            ..Event::default()
        };
        let route = Route {
            transport: TransportKind::Amqp,
            format: Format::Envelope,
            exchange: &self.exchange,
            template: &self.template,
            statics: &self.statics,
        };
        envelope::publication(0, &pointer, &event, &route).expect("an event that can be sent")
    }
}

/// Letters that look as by chance, the same each time.
fn note(bytes: usize) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-";
    let mut state = 0x9e37_79b9_7f4a_7c15_u64; // xorshift64
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            char::from(LETTERS[(state >> 58) as usize])
        })
        .collect()
}

/// The order of number `n`, and so the key: of one length whatever the number.
pub fn order(n: u32) -> String {
    format!("{n:06}")
}

/// An id of our own, in the form of a UUID.
pub fn id(n: u64) -> String {
    format!("0190a0c2-0000-7000-8000-{n:012x}")
}

/// Properties and headers, in lapin's terms, as the extension sends them.
pub fn properties(publication: &Publication) -> lapin::BasicProperties {
    use lapin::types::{AMQPValue, FieldTable, LongString};
    let given = &publication.properties;
    let mut table = FieldTable::default();
    for (name, value) in &given.headers {
        let value = match value {
            HeaderValue::Text(text) => AMQPValue::LongString(LongString::from(text.as_str())),
            HeaderValue::Int(int) => AMQPValue::LongLongInt(*int),
            HeaderValue::Float(float) => AMQPValue::Double(*float),
            HeaderValue::Bool(bool) => AMQPValue::Boolean(*bool),
        };
        table.insert(name.as_str().into(), value);
    }
    let properties = lapin::BasicProperties::default()
        .with_delivery_mode(2) // persistent
        .with_message_id(given.message_id.as_str().into())
        .with_content_type(given.content_type.as_str().into())
        .with_app_id(given.app_id.as_str().into())
        .with_headers(table);
    let properties = match &given.kind {
        Some(kind) => properties.with_type(kind.as_str().into()),
        None => properties,
    };
    match given.timestamp_s {
        Some(timestamp_s) => properties.with_timestamp(timestamp_s),
        None => properties,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_has_the_size_that_is_promised() {
        let maker = Maker::new("bench");
        assert_eq!(maker.message(123_456, &order(7), &id(1)).body.len(), BODY_BYTES);
        assert_eq!(
            maker.message(1_234_567, &order(999), &id(u64::MAX >> 16)).body.len(),
            BODY_BYTES + 1
        );
    }

    #[test]
    fn a_large_body_has_the_size_that_is_asked_for() {
        for bytes in [10_000, 1_000_000] {
            let maker = Maker::sized("bench", bytes);
            assert_eq!(maker.message(123_456, &order(7), &id(1)).body.len(), bytes);
        }
    }

    #[test]
    fn nothing_that_the_extension_sends_is_left_out() {
        let message = Maker::new("bench").message(1, &order(7), &id(1));
        let properties = properties(&message);
        assert_eq!(message.routing_key, "order.placed");
        assert_eq!(properties.delivery_mode(), &Some(2));
        assert_eq!(
            properties.kind().as_ref().map(|kind| kind.as_str()),
            Some("OrderPlaced")
        );
        assert!(properties.timestamp().is_some());
        let headers = properties.headers().as_ref().expect("headers");
        // All but the one of a replay.
        assert_eq!(headers.inner().len(), envelope::SYSTEM_HEADERS.len() - 1);
    }
}
