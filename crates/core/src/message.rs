//! The data types of a message's path. A claim fills `Pointer` and `Event` from rows, the fast path from a slot, both
//! on the worker's main thread. `envelope` makes a `Publication` of them, the publisher threads send it and answer with
//! an `Outcome`.
//!
//! Both sides of the bounded queues between the threads use these types. They know neither Postgres nor a broker.

use std::fmt;
use std::sync::Arc;

pub use crate::event::Event;
use crate::memory_budget::MESSAGE_BYTES;
use crate::partition::Partition;
pub use crate::text::Text;

/// One complete message: the publisher adds nothing and reads nothing else.
///
/// Written by `envelope::publication` on the worker's main thread, read by a publisher thread.
#[derive(Clone, Debug, PartialEq)]
pub struct Publication {
    /// The worker's number for this attempt; the [`Outcome`] carries it. Never sent to the broker.
    pub handle: u64,
    /// Where it goes at its destination, at most 255 bytes: a routing key, a subject. Empty if the destination is the whole
    /// address.
    pub address: Text,
    /// The unit of order: a transport that sends several messages at once sends those of one key one after the other.
    pub key: Option<String>,
    pub properties: Properties,
    /// The bytes of the message: the same for each retry of the same event.
    pub body: Vec<u8>,
}

impl Publication {
    /// About what it takes in memory, in bytes.
    pub fn bytes(&self) -> usize {
        let text = |value: &HeaderValue| match value {
            HeaderValue::Text(text) => text.len(),
            _ => 0,
        };
        let headers = self.properties.headers.iter();
        MESSAGE_BYTES + self.body.len() + headers.map(|(name, value)| name.len() + text(value)).sum::<usize>()
    }
}

/// The properties of a message. A transport without properties leaves them out: [`crate::form`].
///
/// Written by `envelope`, read by the transports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Properties {
    /// The id of the event: the same across retries and reconnects, so consumers deduplicate by it. At most 255 bytes.
    pub message_id: String,
    /// The event's type, at most 255 bytes.
    pub kind: Option<String>,
    /// MIME type of the body.
    pub content_type: Text,
    /// When the event was created, in whole seconds since 1970; absent before 1970.
    pub timestamp_s: Option<u64>,
    /// The application that publishes; `outbox` unless its destination says otherwise.
    pub app_id: Text,
    /// At most 255 bytes.
    pub correlation_id: Option<String>,
    /// In sending order, each name once, each name at most 255 bytes.
    pub headers: Vec<(Text, HeaderValue)>,
}

/// The value of a header: the types that JSON can represent without loss, and typed headers too.
#[derive(Clone, Debug, PartialEq)]
pub enum HeaderValue {
    Text(Text),
    Int(i64),
    Float(f64),
    Bool(bool),
}

impl fmt::Display for HeaderValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => text.fmt(f),
            Self::Int(int) => int.fmt(f),
            Self::Float(float) => float.fmt(f),
            Self::Bool(bool) => bool.fmt(f),
        }
    }
}

/// The broker's answer for one publication, or that there was none. Exactly one for each handle.
///
/// Written by a publisher thread, read by `settle::decide` on the worker's main thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The broker has taken responsibility: the only way to "published".
    Confirmed,
    /// The broker refused responsibility for this message (`basic.nack`): a retry may succeed.
    Nacked,
    /// The destination failed on this message and said why (HTTP 500): a retry may succeed.
    Failed { reason: String },
    /// Published as mandatory and not routed to any queue; `code` is the broker's (312 = no route), `reason` names the
    /// exchange and the routing key without a queue.
    Returned { code: u16, reason: String },
    /// This message can never be sent in this form (too large, HTTP 400): a retry cannot help.
    Refused { reason: String },
    /// Not sent: there is nothing to send, or it cannot be put into a message.
    Unsendable { reason: String },
    /// Sent, and then the connection ended, the destination failed, or no answer came in time; the message may have
    /// arrived. `alone`: no other message was on its way, or the failure was the answer to this one.
    Unanswered { reason: String, alone: bool },
    /// The destination asks for a pause (HTTP 429, or `Retry-After`): the message must not be sent again for `after_ms`.
    /// `is_limit`: because of the number of requests, so the message cannot be at fault.
    Postponed {
        reason: String,
        after_ms: u64,
        is_limit: bool,
    },
    /// Not sent: there was no connection, the publisher ended, or an earlier message of its key failed.
    Lost { reason: String },
    /// Not sent: the broker blocks publishers (memory or disk alarm).
    Blocked,
    /// Never handed to a publisher: it expired.
    Expired,
}

impl Outcome {
    /// Whether the destination has answered the message.
    pub fn is_answer(&self) -> bool {
        match self {
            Self::Confirmed | Self::Nacked | Self::Failed { .. } | Self::Returned { .. } | Self::Refused { .. } => true,
            Self::Unsendable { .. }
            | Self::Unanswered { .. }
            | Self::Postponed { .. }
            | Self::Lost { .. }
            | Self::Blocked
            | Self::Expired => false,
        }
    }

    /// Whether later messages of its key may be sent.
    pub fn is_passed(&self) -> bool {
        matches!(self, Self::Confirmed | Self::Expired)
    }
}

/// One claimed row of `outbox`: the event that it points to, and the state of its delivery.
///
/// Written by the claim (`protocol.rs` of crates/worker) or by a session for the fast path, read by `envelope` and the
/// settlement.
#[derive(Clone, Debug, PartialEq)]
pub struct Pointer {
    /// Position of the event in its source.
    pub seq: i64,
    /// Name of the destination.
    pub destination: Arc<str>,
    /// The partition of the key; below the database's partition count.
    pub partition: Partition,
    /// The key of its order; None is an unordered message.
    pub key: Option<String>,
    /// Attempts that are over and were charged to the message; 0 before the first.
    pub attempts: i32,
    /// Workers that crashed while they had it.
    pub crashes: i32,
    /// Epoch of the lease under which the row was claimed; fences the settlement.
    pub lease_epoch: i64,
    /// It had ended before and is sent again by a replay.
    pub replayed: bool,
    /// When it was enqueued, in µs since 1970.
    pub enqueued_at_us: i64,
    /// The time from which it must not be sent any more, in µs since 1970.
    pub expires_at_us: Option<i64>,
}

impl Pointer {
    /// The partition and the seq, which identify a message of one destination.
    pub fn which(&self) -> (Partition, i64) {
        (self.partition, self.seq)
    }
}
