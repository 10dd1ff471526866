//! The transport and the format of a message.

use crate::refusal::Refusal;

/// How messages reach a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportKind {
    /// RabbitMQ, by AMQP 0-9-1.
    Amqp,
    Http,
}

/// The body of a message. docs/formats.md shows each format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// The JSON of the whole event.
    #[default]
    Envelope,
    /// The payload as stored; the rest is in properties and headers.
    Payload,
    /// A CloudEvent in JSON, whose data is the payload.
    CloudEvents,
    /// A CloudEvent whose data is the body and whose attributes are headers.
    CloudEventsBinary,
}

impl Format {
    pub const ALL: [Self; 4] = [
        Self::Envelope,
        Self::Payload,
        Self::CloudEvents,
        Self::CloudEventsBinary,
    ];

    /// # Errors
    /// [`Refusal`] unless it is one of the four words.
    pub fn parse(word: &str) -> Result<Self, Refusal> {
        let known = Self::ALL.into_iter().find(|format| format.as_str() == word);
        known.ok_or_else(|| Refusal {
            message: format!("unknown format \"{}\"", word.chars().take(32).collect::<String>()),
            hint: format!("Known formats: {}.", Self::ALL.map(Self::as_str).join(", ")),
        })
    }

    pub fn is_cloudevents(self) -> bool {
        matches!(self, Self::CloudEvents | Self::CloudEventsBinary)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Envelope => "envelope",
            Self::Payload => "payload",
            Self::CloudEvents => "cloudevents",
            Self::CloudEventsBinary => "cloudevents_binary",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_has_a_word() {
        for format in Format::ALL {
            assert_eq!(Format::parse(format.as_str()), Ok(format));
        }
        assert_eq!(Format::default().as_str(), "envelope");
        for word in ["", "Envelope", "json", "cloudevents-binary"] {
            let refusal = Format::parse(word).unwrap_err();
            assert_eq!(
                refusal.hint,
                "Known formats: envelope, payload, cloudevents, cloudevents_binary."
            );
        }
    }
}
