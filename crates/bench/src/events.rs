//! The events that are sent. All have one shape, and are made twice: by SQL for the outbox, and here for a publisher
//! without it. Both give the same bytes, so that the broker does the same work for each side.

use outbox_core::envelope;
use outbox_core::message::{Event, HeaderValue, Pointer, Publication};
use outbox_core::partition::{Partition, PartitionCount};
use outbox_core::route::{Form, Format, Route, Statics, Template};

/// The size of a message's body in bytes, unless a row specifies another one. It varies by the length of the seq.
pub const BODY_BYTES: usize = 300;

/// The SQL that publishes one event. `$1` is the note in its payload, `$2` its order.
pub const PUBLISH: &str = "select outbox_publish('OrderPlaced', \
     jsonb_build_object('note', $1::text, 'order', $2::text, 'total', 99.90), 'order', $2::text, 'placed')";

/// The default of outbox.routing_key.
const ROUTING_KEY: &str = "{aggregate_type}.{operation}";

/// Makes the same messages that the extension makes from its events.
pub struct EventMaker {
    form: &'static Form,
    template: Template,
    statics: Statics,
    partitions: PartitionCount,
    /// The value for `$1` of [`PUBLISH`]. Postgres cannot compress it.
    pub note: String,
}

impl EventMaker {
    pub fn new() -> Self {
        Self::sized(BODY_BYTES)
    }

    /// A maker of messages for an HTTP destination.
    pub fn http() -> Self {
        Self {
            form: &Form::TEXT,
            ..Self::new()
        }
    }

    /// A maker of messages with bodies of `body_bytes` bytes.
    pub fn sized(body_bytes: usize) -> Self {
        let mut maker = Self {
            form: &Form::TYPED,
            template: Template::parse(ROUTING_KEY).expect("a valid template"),
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
            lease_epoch: 1 << 31, // epochs start at random below 2^32: most have ten digits
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
            form: self.form,
            format: Format::Envelope,
            address: &self.template,
            statics: &self.statics,
        };
        envelope::publication(0, &pointer, event, &route).expect("an event that can be sent")
    }
}

/// A text of random-looking letters, the same each time.
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

/// The name of order number `n`, which is also the key. All names have the same length.
pub fn order(n: u32) -> String {
    format!("{n:06}")
}

/// An id in the form of a UUID, from a number.
pub fn id(n: u64) -> String {
    format!("0190a0c2-0000-7000-8000-{n:012x}")
}

/// The properties and headers that the extension sends, in lapin's types.
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
    fn a_body_has_the_documented_size() {
        let maker = EventMaker::new();
        assert_eq!(maker.message(123_456, &order(7), &id(1)).body.len(), BODY_BYTES);
        assert_eq!(
            maker.message(1_234_567, &order(999), &id(u64::MAX >> 16)).body.len(),
            BODY_BYTES + 1
        );
    }

    #[test]
    fn a_large_body_has_the_requested_size() {
        for bytes in [10_000, 1_000_000] {
            let maker = EventMaker::sized(bytes);
            assert_eq!(maker.message(123_456, &order(7), &id(1)).body.len(), bytes);
        }
    }

    #[test]
    fn all_properties_and_headers_of_the_extension_are_sent() {
        let message = EventMaker::new().message(1, &order(7), &id(1));
        let properties = properties(&message);
        assert_eq!(message.address, "order.placed");
        assert_eq!(properties.delivery_mode(), &Some(2));
        assert_eq!(
            properties.kind().as_ref().map(|kind| kind.as_str()),
            Some("OrderPlaced")
        );
        assert!(properties.timestamp().is_some());
        let headers = properties.headers().as_ref().expect("headers");
        // All headers except that of a replay.
        assert_eq!(headers.inner().len(), envelope::SYSTEM_HEADERS.len() - 1);
    }
}
