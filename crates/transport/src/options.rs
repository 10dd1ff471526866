//! Options as texts: of CREATE SERVER, of CREATE USER MAPPING, and of settings that stand for one. Each is read with a
//! check. Pure; used by the kinds, and by `described` for those that all kinds have.
//!
//! No error repeats a value: it may be a secret that was written into the wrong option.

use crate::secret::Secret;
use outbox_core::envelope::{Refusal, SHORT_STRING_MAX};
use outbox_core::message::Text;
use outbox_core::route::Template;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

/// The kind of object that options belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Server,
    UserMapping,
}

/// Options as the catalogs store them.
pub type Pairs = [(String, String)];

/// The value of an option.
#[derive(Clone, Debug, PartialEq)]
pub enum OptionValue {
    Text(Secret),
    /// The content of a file. Only settings and the command line name one: whoever may create servers may not read the
    /// files of the server.
    File(NamedFile),
}

/// A file that a worker reads when it connects.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedFile {
    /// The setting or command-line option that names the file, as errors show it.
    pub named_by: &'static str,
    pub path: String,
}

impl OptionValue {
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(Secret::new(text))
    }

    pub(crate) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text.reveal()),
            Self::File(_) => None,
        }
    }

    /// The setting or option that the value comes from. `name` is that of the option.
    pub fn called(&self, name: &str) -> String {
        match self {
            Self::File(file) => file.named_by.to_owned(),
            Self::Text(_) => format!("the option {name}"),
        }
    }
}

/// The certificates of a TLS connection. `ca` names the trusted CAs (None = those of the system); `cert` and `key` are
/// the client certificate.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Certificates {
    pub ca: Option<OptionValue>,
    pub cert: Option<OptionValue>,
    pub key: Option<OptionValue>,
}

/// Why an option is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub name: String,
    /// None = there is no option with that name for this kind of object.
    pub why: Option<String>,
    pub hint: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match &self.why {
            Some(why) => write!(f, "option \"{name}\" is refused: {why}"),
            None => write!(f, "there is no option \"{name}\""),
        }
    }
}

/// A setting of the server that is an option of the default destination.
pub struct Setting {
    pub name: &'static CStr,
    pub option: &'static str,
    pub level: Level,
    pub default: &'static CStr,
    pub about: &'static CStr,
    /// How the file that it names must be; None = its text is the value.
    pub file: Option<FileRule>,
}

#[derive(Clone, Copy)]
pub enum FileRule {
    /// Only the user of the server may read it.
    Secret,
    Pem,
}

impl Setting {
    /// A setting whose text is an option of a server.
    pub(crate) const fn text(
        name: &'static CStr,
        option: &'static str,
        default: &'static CStr,
        about: &'static CStr,
    ) -> Self {
        Self {
            name,
            option,
            level: Level::Server,
            default,
            about,
            file: None,
        }
    }

    /// It names a file with the value.
    pub(crate) const fn of_file(self, rule: FileRule) -> Self {
        Self {
            file: Some(rule),
            ..self
        }
    }

    /// It is an option of a user mapping.
    pub(crate) const fn of_mapping(self) -> Self {
        Self {
            level: Level::UserMapping,
            ..self
        }
    }

    /// The value of the option; None = it is left out.
    pub fn value(&self, text: String) -> Option<(Level, String, OptionValue)> {
        let named_by = self.name.to_str().unwrap_or_default();
        let value = match self.file {
            Some(_) => OptionValue::File(NamedFile {
                named_by,
                path: text.clone(),
            }),
            None => OptionValue::text(text.clone()),
        };
        (!text.is_empty()).then(|| (self.level, self.option.to_owned(), value))
    }
}

/// The options of a server or of a user mapping, each name once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options(pub(crate) Vec<(String, OptionValue)>);

impl Options {
    pub(crate) fn of(pairs: &Pairs) -> Self {
        Self(
            pairs
                .iter()
                .map(|(name, value)| (name.clone(), OptionValue::text(value)))
                .collect(),
        )
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    pub(crate) fn value(&self, name: &str) -> Option<&OptionValue> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.value(name)?.as_text()
    }

    /// Reads an option if it is given.
    pub(crate) fn read<T>(
        &self,
        name: &'static str,
        read: impl FnOnce(Given<'_>) -> Result<T, Refused>,
    ) -> Result<Option<T>, Refused> {
        self.text(name).map(|text| read(Given { name, text })).transpose()
    }

    /// Adds the options of `default` that are not given.
    pub(crate) fn inherit(&mut self, default: &Self) {
        let missing = default.0.iter().filter(|(name, _)| !self.has(name));
        let missing: Vec<_> = missing.cloned().collect();
        self.0.extend(missing);
    }
}

/// An option that is given.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a> {
    pub(crate) name: &'a str,
    pub(crate) text: &'a str,
}

impl Given<'_> {
    pub(crate) fn refuse<T>(self, why: impl fmt::Display, hint: impl Into<String>) -> Result<T, Refused> {
        Err(refused(self.name, why, hint))
    }

    /// Turns a refusal of crates/core into one of this option.
    pub(crate) fn core<T>(self, read: Result<T, Refusal>) -> Result<T, Refused> {
        read.or_else(|refusal| self.refuse(refusal.message, refusal.hint))
    }

    pub(crate) fn parsed<T, E: fmt::Display>(self, parsed: Result<T, E>, hint: &str) -> Result<T, Refused> {
        parsed.or_else(|error| self.refuse(error, hint))
    }

    pub(crate) fn short(self) -> Result<Text, Refused> {
        match self.text.len() {
            ..=SHORT_STRING_MAX => Ok(Text::shared(self.text)),
            _ => self.refuse("it is longer than 255 bytes", "Shorten it to 255 bytes."),
        }
    }

    /// The template of an address.
    pub(crate) fn address(self) -> Result<Template, Refused> {
        self.core(Template::parse(self.text))
    }

    pub(crate) fn choice<T: Copy>(self, choices: &[(&str, T)]) -> Result<T, Refused> {
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        let known = choices.iter().find(|(word, _)| *word == self.text);
        known.map_or_else(
            || self.refuse("it is unknown", format!("Use {}.", words.join(" or "))),
            |(_, meaning)| Ok(*meaning),
        )
    }

    pub(crate) fn number(self, range: RangeInclusive<u64>) -> Result<u64, Refused> {
        let hint = || format!("Use a number from {} to {}.", range.start(), range.end());
        match self.text.parse() {
            Ok(number) if range.contains(&number) => Ok(number),
            Ok(_) => self.refuse("it is out of range", hint()),
            Err(_) => self.refuse("it is not a number", hint()),
        }
    }

    /// A number with a unit, as in settings of the server; without a unit it is in ms.
    pub(crate) fn millis(self, range_ms: RangeInclusive<u64>) -> Result<u64, Refused> {
        let digits = self.text.len() - self.text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let factor = match self.text[digits..].trim() {
            "" | "ms" => 1,
            "s" => 1_000,
            "min" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return self.refuse("its unit is unknown", "Units: ms, s, min, h, d. Example: 30s"),
        };
        let number = self.text[..digits].parse::<u64>().ok();
        match number.and_then(|number| number.checked_mul(factor)) {
            Some(ms) if range_ms.contains(&ms) => Ok(ms),
            Some(_) => self.refuse(
                "it is out of range",
                format!("Use {} ms to {} ms.", range_ms.start(), range_ms.end()),
            ),
            None => self.refuse("it is not a time", "Example: 30s"),
        }
    }

    pub(crate) fn duration(self, range_ms: RangeInclusive<u64>) -> Result<Duration, Refused> {
        self.millis(range_ms).map(Duration::from_millis)
    }

    /// A JSON object of names and texts.
    pub(crate) fn texts(self, example: &str) -> Result<BTreeMap<String, String>, Refused> {
        serde_json::from_str(self.text).or_else(|_| {
            let hint = format!("Example: {example}");
            self.refuse("it is not a JSON object whose values are strings", hint)
        })
    }
}

pub(crate) fn refused(name: &str, why: impl fmt::Display, hint: impl Into<String>) -> Refused {
    Refused {
        name: name.to_owned(),
        why: Some(why.to_string()),
        hint: hint.into(),
    }
}

/// Splits options as the catalogs store them: `name=value` each.
pub fn split(options: &[String]) -> Vec<(String, String)> {
    let pairs = options.iter().filter_map(|option| option.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}
