//! A text that must never be shown.

use std::fmt;

/// A password, a token or a key. It has no `Display` and its `Debug` shows nothing, so no format string can leak it.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }

    /// The only access to the text. Called only by code that sends it or signs with it.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }

    /// The text as bytes, for PEM parsers.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}
