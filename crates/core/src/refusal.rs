//! Why an event cannot be sent in its form. Made at enqueue, when a destination is described, and when a message is
//! built.

use std::fmt;

/// The limit of ids, types, header names and addresses, in bytes. Brokers store their length in one byte.
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

/// Checks a text that is sent as a short string; `name` is its name in a refusal.
///
/// # Errors [`Refusal`] if it is longer than [`SHORT_STRING_MAX`] bytes.
pub fn check_short(name: &str, text: &str) -> Result<(), Refusal> {
    match text.len() {
        ..=SHORT_STRING_MAX => Ok(()),
        bytes => Err(too_long(name, &bytes.to_string())),
    }
}

/// As [`check_short`], for a text that may be only the start of one that is longer than [`SHORT_STRING_MAX`] bytes.
///
/// # Errors [`Refusal`] if it is longer.
pub fn check_short_start(name: &str, start: &str) -> Result<(), Refusal> {
    match start.len() {
        ..=SHORT_STRING_MAX => Ok(()),
        _ => Err(too_long(name, &format!("more than {SHORT_STRING_MAX}"))),
    }
}

fn too_long(name: &str, bytes: &str) -> Refusal {
    Refusal::new(
        format!("the {name} is {bytes} bytes long; the limit is {SHORT_STRING_MAX}"),
        format!("Shorten the {name}."),
    )
}
