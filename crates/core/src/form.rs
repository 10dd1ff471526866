//! What the messages of a kind of destination look like. The kind gives it, as data; `envelope` and `headers` follow it.
//! Here are also the names of headers that no user may set.

use std::fmt;

use crate::format::Format;
use crate::refusal::{Refusal, check_short};
use crate::text::Text;

/// What the messages of a kind of destination look like. A kind begins with [`Form::TYPED`] or [`Form::TEXT`], and sets
/// what differs.
#[derive(Clone, Copy)]
pub struct Form {
    /// The noun for the address of a message, as in "the routing key is too long".
    pub address: &'static str,
    /// Whether the peer has properties beside the headers, such as a message id, a type and a time. Then outbox sets
    /// them, and [`SYSTEM_HEADERS`]. If not, outbox sets headers instead, under names that begin with `outbox-`. It
    /// converts no value: the transport gets a [`HeaderValue`](crate::message::HeaderValue) either way, and writes
    /// numbers and booleans as text if its protocol has only that.
    pub has_properties: bool,
    /// The limit of all headers of a message together, in bytes: names and values.
    pub headers_max: usize,
    /// The name of a header as it is sent; of several that are equal then, the last in the order of bytes counts. Err: the
    /// peer has no such name. None = each name is sent as it is.
    pub name: Option<SentName>,
    /// Whether the transport itself needs the header, so that no message may set it. The name is as it is sent.
    pub is_reserved: fn(&str) -> bool,
    /// Refuses a header that would make the peer refuse other messages as well. Called also at enqueue, for all kinds.
    pub check_name: fn(&str) -> Result<(), Refusal>,
    /// A text of the event or of outbox as the value of one of its `outbox-` or `ce-` headers, encoded so that
    /// `is_sendable` is true. Headers of users and of destinations are sent as they are. Not called if there are
    /// properties, but for the attributes of a CloudEvent.
    pub value: fn(&str) -> Text,
    /// Whether this text can be sent as the value of a header. If not, its message is a dead letter.
    pub is_sendable: fn(&str) -> bool,
}

/// The name of a header as it is sent.
type SentName = fn(&str) -> Result<String, Refusal>;

impl Form {
    /// A peer with properties and typed headers, under any name and with any text. No header is reserved.
    pub const TYPED: Self = Self {
        address: "address",
        has_properties: true,
        headers_max: HEADERS_MAX,
        name: None,
        is_reserved: |_| false,
        check_name: |_| Ok(()),
        value: |text| Text::Owned(text.to_owned()),
        is_sendable: |_| true,
    };
    /// A peer with headers and no properties: [`Form::TYPED`] but for that. A peer whose headers cannot have any name
    /// or text needs `name`, `value` and `is_sendable` as well; a peer without headers can leave them out of what it
    /// writes.
    pub const TEXT: Self = Self {
        has_properties: false,
        ..Self::TYPED
    };

    /// The name of a header that a destination adds to each message, as it is sent.
    ///
    /// # Errors
    /// [`Refusal`] unless a destination may set it.
    pub fn static_name(&self, format: Format, name: &str) -> Result<Text, Refusal> {
        check_short("name of a header", name)?;
        (self.check_name)(name)?;
        let name = self.name.map_or_else(|| Ok(name.to_owned()), |sent| sent(name))?;
        if name.is_empty() || self.is_taken(format, &name) {
            return Err(Refusal::new(
                format!("the header \"{name}\" cannot be set"),
                "The outbox or the transport sets it. Choose another name.",
            ));
        }
        Ok(Text::shared(&name))
    }

    /// Whether outbox or the transport sets the header, so that a consumer may trust it.
    pub(crate) fn is_taken(&self, format: Format, name: &str) -> bool {
        let begins_with = |prefix: &str| {
            let start = name.as_bytes().get(..prefix.len());
            start.is_some_and(|start| start.eq_ignore_ascii_case(prefix.as_bytes()))
        };
        let is_ours = match self.has_properties {
            true => SYSTEM_HEADERS.contains(&name) || (format == Format::Payload && PAYLOAD_HEADERS.contains(&name)),
            false => begins_with(TEXT_PREFIX),
        };
        is_ours || (format.is_cloudevents() && begins_with(ATTRIBUTE_PREFIX)) || (self.is_reserved)(name)
    }
}

impl fmt::Debug for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Form")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// The limit of all headers of a message. A broker may take them in one frame only; half of a usual one leaves room for
/// the properties, and for smaller settings.
pub const HEADERS_MAX: usize = 64 * 1024;

/// Headers that outbox sets beside properties. A user's header with such a name is dropped, also if outbox has no value
/// for it: a consumer may trust these names. (All but the epoch, the attempt and replayed come from the event.)
pub const SYSTEM_HEADERS: [&str; 8] = [
    "id",
    "aggregate_type",
    "aggregate_id",
    "partition_key",
    "seq",
    "lease_epoch",
    "attempt",
    "replayed",
];

/// Headers that outbox sets in addition to [`SYSTEM_HEADERS`] with [`Format::Payload`]: members of the envelope's body.
pub(crate) const PAYLOAD_HEADERS: [&str; 5] = ["key", "operation", "actor", "metadata", "created_at"];

/// The prefix of the headers that outbox sets if there are no properties.
const TEXT_PREFIX: &str = "outbox-";

/// The prefix of the attributes of CloudEvents.
pub(crate) const ATTRIBUTE_PREFIX: &str = "ce-";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{TEXT, TYPED};

    #[test]
    fn a_destination_cannot_set_reserved_headers() {
        let refused = |form: &Form, format, name: &str| form.static_name(format, name).is_err();
        for name in ["", "seq", "barred", &"n".repeat(256)] {
            assert!(refused(TYPED, Format::Envelope, name), "{name}");
        }
        assert!(refused(TYPED, Format::Payload, "actor") && !refused(TYPED, Format::Envelope, "actor"));
        assert!(refused(TYPED, Format::CloudEvents, "ce-x") && !refused(TYPED, Format::Envelope, "ce-x"));
        for name in ["Outbox-X", "Reserved", "x y", ""] {
            assert!(refused(TEXT, Format::Envelope, name), "{name}");
        }
        assert_eq!(TEXT.static_name(Format::Envelope, "X-Team").unwrap(), "x-team");
    }
}
