//! Why an event cannot be sent in its form. Made at enqueue, when a destination is described, and when a message is
//! built.

use std::fmt;

/// AMQP 0-9-1 sends message_id, type, correlation_id, header names, routing key and exchange as short strings, whose
/// length is one byte.
pub const SHORT_STRING_MAX: usize = 255;

/// Why an event can never be sent in its form, or a destination cannot be described like this. It contains names and
/// sizes, no values of events, because it is stored and logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong: a primary message.
    pub message: String,
    /// What to do: a hint.
    pub hint: String,
}

impl Refusal {
    pub fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        let (message, hint) = (message.into(), hint.into());
        Self { message, hint }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

/// Checks a text that AMQP sends as a short string; `name` is its name in a refusal.
///
/// # Errors [`Refusal`] if it is longer than [`SHORT_STRING_MAX`] bytes.
pub fn check_short(name: &str, text: &str) -> Result<(), Refusal> {
    if text.len() <= SHORT_STRING_MAX {
        return Ok(());
    }
    Err(Refusal::new(
        format!(
            "the {name} is {} bytes long; the limit of AMQP is {SHORT_STRING_MAX}",
            text.len()
        ),
        format!("Shorten the {name}."),
    ))
}
