//! Why an event cannot be sent as it is. Made at enqueue, when a destination is described, and when a message is built.

use std::fmt;

/// AMQP 0-9-1 sends message_id, type, correlation_id, header names, routing key and exchange as short strings, whose
/// length is one byte.
pub const SHORT_STRING_MAX: usize = 255;

/// Why an event can never be sent as it is, or a destination not be described so. Holds names and sizes, no values of
/// events: it is stored and logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong: a primary line.
    pub message: String,
    /// What to do.
    pub hint: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

/// Checks a text that AMQP sends as a short string; `name` says in a refusal what it is.
///
/// # Errors
/// [`Refusal`] when it is longer than [`SHORT_STRING_MAX`] bytes.
pub fn check_short(name: &str, text: &str) -> Result<(), Refusal> {
    if text.len() <= SHORT_STRING_MAX {
        return Ok(());
    }
    Err(Refusal {
        message: format!(
            "the {name} is {} bytes long, AMQP carries at most {SHORT_STRING_MAX}",
            text.len()
        ),
        hint: format!("Shorten the {name}."),
    })
}
