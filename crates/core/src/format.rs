//! The format of a message: what its body is.

use crate::refusal::Refusal;
use crate::words::Word;

crate::words! {
    /// The body of a message. docs/formats.md shows each format.
    #[derive(Default)]
    pub enum Format {
        /// The JSON of the whole event.
        #[default]
        Envelope = "envelope",
        /// The payload as stored; the rest is in properties and headers.
        Payload = "payload",
        /// A CloudEvent in JSON, whose data is the payload.
        CloudEvents = "cloudevents",
        /// A CloudEvent whose data is the body and whose attributes are headers.
        CloudEventsBinary = "cloudevents_binary",
    }
}

impl Format {
    /// # Errors
    /// [`Refusal`] unless it is one of the four words.
    pub fn parse(word: &str) -> Result<Self, Refusal> {
        let known = Self::of_name(word);
        known.ok_or_else(|| {
            Refusal::new(
                format!("unknown format \"{}\"", word.chars().take(32).collect::<String>()),
                format!(
                    "Known formats: {}.",
                    Self::ALL
                        .iter()
                        .map(|format| format.name())
                        .collect::<Vec<_>>()
                        .join(", ")
                ),
            )
        })
    }

    pub fn is_cloudevents(self) -> bool {
        matches!(self, Self::CloudEvents | Self::CloudEventsBinary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_has_a_word() {
        for format in Format::ALL {
            assert_eq!(Format::parse(format.name()), Ok(*format));
        }
        assert_eq!(Format::default().name(), "envelope");
        for word in ["", "Envelope", "json", "cloudevents-binary"] {
            let refusal = Format::parse(word).unwrap_err();
            assert_eq!(
                refusal.hint,
                "Known formats: envelope, payload, cloudevents, cloudevents_binary."
            );
        }
    }
}
