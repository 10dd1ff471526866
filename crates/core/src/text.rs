//! Text that many messages share: names of headers, content types, texts that a destination adds to each. Made once,
//! cloned for each message without an allocation. `envelope` makes it, the transports read it.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// A text that is cheap to clone unless it belongs to one message alone.
#[derive(Clone)]
pub enum Text {
    Static(&'static str),
    /// Belongs to a destination: counted, so that it may cross to the publisher's thread.
    Shared(Arc<str>),
    /// Belongs to one message.
    Owned(String),
}

impl Text {
    /// For texts that each message of a destination has.
    pub fn shared(text: &str) -> Self {
        Self::Shared(text.into())
    }

    pub fn as_str(&self) -> &str {
        self
    }

    /// Allocates only if the text belongs to one message.
    pub fn into_string(self) -> String {
        match self {
            Self::Static(text) => text.to_owned(),
            Self::Shared(text) => text.as_ref().to_owned(),
            Self::Owned(text) => text,
        }
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Static(text) => text,
            Self::Shared(text) => text,
            Self::Owned(text) => text,
        }
    }
}

impl Default for Text {
    fn default() -> Self {
        Self::Static("")
    }
}

impl From<&'static str> for Text {
    fn from(text: &'static str) -> Self {
        Self::Static(text)
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self::Owned(text)
    }
}

impl From<Text> for String {
    fn from(text: Text) -> Self {
        text.into_string()
    }
}

impl<T: AsRef<str> + ?Sized> PartialEq<T> for Text {
    fn eq(&self, other: &T) -> bool {
        self.as_str() == other.as_ref()
    }
}

impl AsRef<str> for Text {
    fn as_ref(&self) -> &str {
        self
    }
}

impl Eq for Text {}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_are_equal_wherever_they_are_kept() {
        let kept = [Text::from("a"), Text::shared("a"), Text::from("a".to_owned())];
        for text in &kept {
            assert!(kept.iter().all(|other| other == text));
            assert_eq!((format!("{text}"), format!("{text:?}")), ("a".into(), "\"a\"".into()));
            assert_eq!(text.clone().into_string(), "a");
            assert_ne!(text, "b");
        }
    }
}
