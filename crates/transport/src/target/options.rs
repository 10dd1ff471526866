//! The options of CREATE SERVER and CREATE USER MAPPING: their names, their meaning, and their checks. Pure, as all of
//! `target`.

use super::{Certificates, Credential, Http, Protocol, Target};
use crate::amqp::ExchangeType;
use crate::http::check_credentials;
use crate::secret::Secret;
use crate::ssrf::AllowList;
use crate::url::{parse_http_url, parse_url};
use outbox_core::envelope::Refusal;
use outbox_core::headers::secret_name;
use outbox_core::message::Text;
use outbox_core::route::{EXPIRATION_MAX_MS, Format, Template};
use outbox_core::settle::Ordering;
use std::collections::BTreeMap;
use std::time::Duration;

/// The foreign data wrapper of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Amqp,
    Http,
}

/// The kind of object that options belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Server,
    UserMapping,
}

/// Why an option is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Whether there is no option with that name for this kind of object.
    pub unknown: bool,
    pub message: String,
    pub hint: String,
}

/// The highest `max_in_flight`: the most messages that a worker claims at once.
const IN_FLIGHT_MAX: u64 = 2_000;
/// The highest limit: the settings are signed 32-bit numbers.
const LIMIT_MAX: u64 = i32::MAX as u64;

pub type Options = [(String, String)];

/// Splits options as the catalogs store them: `name=value` each.
pub fn split(options: &[String]) -> Vec<(String, String)> {
    let pairs = options.iter().filter_map(|option| option.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

impl Kind {
    /// The name of the foreign data wrapper.
    pub fn wrapper(self) -> &'static str {
        match self {
            Self::Amqp => "outbox_amqp",
            Self::Http => "outbox_http",
        }
    }

    pub fn of_wrapper(name: &str) -> Option<Self> {
        [Self::Amqp, Self::Http].into_iter().find(|kind| kind.wrapper() == name)
    }

    /// The names of the options, as a list in words.
    pub(super) fn names(self, level: Level) -> &'static str {
        match (self, level) {
            (Self::Amqp, Level::Server) => {
                "url, exchange, exchange_type, routing_key, format, headers, content_type, app_id, source, expiration, \
                 priority, ordering, on_dead, on_unroutable, dead_letters_to, max_attempts, max_pending, max_rate, \
                 max_in_flight, retry_backoff, retry_backoff_max, connect_timeout, confirm_timeout, min_send_rate, tls_ca"
            }
            (Self::Http, Level::Server) => {
                "url, concurrency, format, headers, content_type, app_id, source, ordering, on_dead, dead_letters_to, \
                 max_attempts, max_pending, max_rate, retry_backoff, retry_backoff_max, connect_timeout, timeout, \
                 min_send_rate, retry_after_max, tls_ca"
            }
            (Self::Amqp, Level::UserMapping) => "user, password, tls_cert, tls_key",
            (Self::Http, Level::UserMapping) => {
                "user, password, bearer_token, signing_secret, headers, tls_cert, tls_key"
            }
        }
    }
}

/// Checks the options of one object by themselves.
///
/// # Errors
/// Returns the first option that is unknown or has a bad value.
pub fn check(kind: Kind, level: Level, options: &Options) -> Result<(), Refused> {
    let known = kind.names(level);
    for (name, _) in options {
        if !known.split(", ").any(|known| known == name) {
            return Err(Refused {
                unknown: true,
                message: format!("there is no option \"{name}\""),
                hint: format!("Options: {known}."),
            });
        }
    }
    let (server, mapping) = match level {
        Level::Server => (options, &[][..]),
        Level::UserMapping => (&[][..], options),
    };
    described(kind, &Target::default(), server, mapping).map(drop)
}

/// The destination that these options describe. Options that they leave out are as in `default`, but credentials of the
/// default are never sent to another address.
///
/// # Errors
/// Returns the first option with a bad value.
pub fn described(kind: Kind, default: &Target, server: &Options, mapping: &Options) -> Result<Target, Refused> {
    let mut target = default.clone();
    match kind {
        Kind::Amqp => target.allow = AllowList::any(), // the broker of the settings, which a superuser makes
        Kind::Http => {
            target.transport = Protocol::Http(Http::plain());
            target.certificates = Certificates::default();
        }
    }
    for (name, value) in server {
        let value = value.as_str();
        match (name.as_str(), &mut target.transport) {
            ("url", Protocol::Amqp(amqp)) => {
                let own = parse_url(value)
                    .map_err(|error| bad(name, error.to_string(), "Example: amqp://user@host:5672/vhost"))?;
                let of_settings = parse_url(&amqp.url).map_or(Vec::new(), |address| address.endpoints);
                if !own.endpoints.iter().all(|endpoint| of_settings.contains(endpoint)) {
                    target.allow = default.allow.clone().and_private();
                }
                amqp.url = value.to_owned();
                (amqp.user, amqp.password) = (None, None);
                (target.certificates.cert, target.certificates.key) = (None, None);
            }
            ("url", Protocol::Http(http)) => {
                parse_http_url(value)
                    .map_err(|error| bad(name, error.to_string(), "Example: https://example.com/hooks"))?;
                http.url = value.to_owned();
            }
            ("concurrency", Protocol::Http(http)) => http.concurrency = number(name, value, 1..=64)? as usize,
            ("retry_after_max", Protocol::Http(http)) => {
                http.retry_after_max = Duration::from_millis(duration(name, value, 0..=86_400_000)?);
            }
            ("exchange", _) if value.len() > 255 => {
                return Err(bad(name, "it is longer than 255 bytes", "AMQP allows 255 bytes."));
            }
            ("exchange", Protocol::Amqp(amqp)) => amqp.exchange = Text::shared(value),
            ("exchange_type", Protocol::Amqp(amqp)) => {
                amqp.exchange_type =
                    ExchangeType::parse(value).ok_or_else(|| bad(name, "it is unknown", ExchangeType::HINT))?;
            }
            ("routing_key", Protocol::Amqp(amqp)) => {
                amqp.routing_key = Template::parse(value).map_err(|refusal| other(name, refusal))?;
            }
            ("tls_ca", _) => target.certificates.ca = Some(pem(name, value)?),
            ("format", _) => target.format = Format::parse(value).map_err(|refusal| other(name, refusal))?,
            ("content_type", _) => target.statics.content_type = Some(Text::shared(value)),
            ("app_id", _) => target.statics.app_id = Text::shared(value),
            ("source", _) => {
                target.statics.source = Template::parse_text(value).map_err(|refusal| other(name, refusal))?;
            }
            ("expiration", _) => target.statics.expiration_ms = Some(duration(name, value, 0..=EXPIRATION_MAX_MS)?),
            ("priority", _) => target.statics.priority = Some(number(name, value, 0..=255)? as u8),
            ("ordering", _) => {
                target.rules.ordering = choice(
                    name,
                    value,
                    &[
                        ("key", Ordering::Key),
                        ("partition", Ordering::Partition),
                        ("none", Ordering::None),
                    ],
                )?;
            }
            ("on_dead", _) => target.rules.dead_blocks = choice(name, value, &[("block", true), ("skip", false)])?,
            ("on_unroutable", _) => {
                target.rules.retry.discards_unroutable = choice(name, value, &[("retry", false), ("discard", true)])?;
            }
            // Read by SQL where a message becomes a dead letter.
            ("dead_letters_to", _) if value.is_empty() => {
                return Err(bad(name, "it is empty", "Name another destination, or default."));
            }
            ("max_attempts", _) => target.rules.retry.max_attempts = number(name, value, 1..=i32::MAX as u64)? as u32,
            ("max_pending", _) => target.limits.max_pending = number(name, value, 0..=LIMIT_MAX)? as u32,
            ("max_rate", _) => target.limits.max_rate = number(name, value, 0..=LIMIT_MAX)? as u32,
            ("max_in_flight", Protocol::Amqp(amqp)) => {
                amqp.max_in_flight = number(name, value, 1..=IN_FLIGHT_MAX)? as usize;
            }
            ("retry_backoff", _) => target.rules.retry.base_ms = duration(name, value, 1..=86_400_000)?,
            ("retry_backoff_max", _) => target.rules.retry.max_ms = duration(name, value, 1..=86_400_000)?,
            ("connect_timeout", _) => {
                target.connect_timeout = Duration::from_millis(duration(name, value, 100..=300_000)?);
            }
            ("confirm_timeout" | "timeout", _) => {
                target.confirm_timeout = Duration::from_millis(duration(name, value, 100..=3_600_000)?);
            }
            ("min_send_rate", _) => target.min_send_rate = number(name, value, 1..=LIMIT_MAX)? as u32,
            _ => {}
        }
    }
    let transport = target.transport.kind();
    // Headers depend on the format, which may come after them in the list.
    if let Some((name, value)) = server.iter().find(|(name, _)| name == "headers") {
        for (header, template) in &headers_of(name, value, r#"{"tenant": "{header:tenant}"}"#)? {
            (target.statics.headers)
                .add(transport, target.format, header, template)
                .map_err(|refusal| other(name, refusal))?;
        }
    }
    (target.statics)
        .check(transport, target.format)
        .map_err(|refusal| other("format", refusal))?;
    target.rules.one_by_one = matches!(target.transport, Protocol::Http(_));
    target.rules.retry.max_ms = target.rules.retry.max_ms.max(target.rules.retry.base_ms);
    for (name, value) in mapping {
        if value.contains('\0') || value.is_empty() {
            return Err(bad(name, "it is empty", "Leave it out instead."));
        }
        let secret = || Secret::new(value.clone());
        match (name.as_str(), &mut target.transport) {
            ("user", Protocol::Amqp(amqp)) => amqp.user = Some(value.clone()),
            ("password", Protocol::Amqp(amqp)) => amqp.password = Some(Credential::Given(secret())),
            ("user", Protocol::Http(http)) => http.user = Some(value.clone()),
            ("password" | "bearer_token", Protocol::Http(http)) => http.secret = Some(secret()),
            ("signing_secret", Protocol::Http(http)) => {
                http.signing_secrets = value.split_whitespace().map(Secret::new).collect();
            }
            ("headers", Protocol::Http(http)) => http.secret_headers = secret_headers(name, value)?,
            ("tls_cert", _) => target.certificates.cert = Some(pem(name, value)?),
            ("tls_key", _) => target.certificates.key = Some(pem(name, value)?),
            _ => {}
        }
    }
    let given = |wanted: &str| mapping.iter().any(|(name, _)| name == wanted);
    if kind == Kind::Http && (given("user") != given("password") || (given("user") && given("bearer_token"))) {
        let hint = "Give user and password, or bearer_token.";
        return Err(bad("user", "it does not fit the other options", hint));
    }
    if let Protocol::Http(http) = &target.transport {
        if given("signing_secret") && http.signing_secrets.is_empty() {
            return Err(bad("signing_secret", "it is empty", "Leave it out instead."));
        }
        check_credentials(&http.auth(), &http.signing_secrets, &http.secret_headers).map_err(|(name, why)| {
            let hint = match name {
                "signing_secret" => {
                    "Use whsec_ followed by 24 to 64 bytes in base64. To rotate it, give the new secret, a space and the old one."
                }
                "headers" => r#"Example: {"x-api-key": "the key"}"#,
                _ => "See docs/destinations.md.",
            };
            bad(name, why, hint)
        })?;
    }
    Ok(target)
}

/// The option `headers`: a JSON object of names and texts.
fn headers_of(name: &str, value: &str, example: &str) -> Result<BTreeMap<String, String>, Refused> {
    serde_json::from_str(value).map_err(|_| {
        bad(
            name,
            "it is not a JSON object whose values are strings",
            format!("Example: {example}"),
        )
    })
}

/// The option `headers` of a user mapping. Its values are no templates: a key may have any characters. No error repeats
/// a name, which may be a secret by mistake.
fn secret_headers(name: &str, value: &str) -> Result<Vec<(String, Secret)>, Refused> {
    let mut headers: Vec<(String, Secret)> = Vec::new();
    for (header, secret) in headers_of(name, value, r#"{"x-api-key": "the key"}"#)? {
        let known =
            secret_name(&header).map_err(|refusal| bad(name, "one of its names cannot be set", refusal.hint))?;
        if headers.iter().any(|(other, _)| *other == *known) {
            return Err(bad(
                name,
                "it has a name twice, in upper or lower case",
                "Leave one of them out.",
            ));
        }
        headers.push((known.to_string(), Secret::new(secret)));
    }
    match headers.is_empty() {
        true => Err(bad(name, "it is empty", "Leave it out instead.")),
        false => Ok(headers),
    }
}

/// The template of the routing key in these options of a server; None = the template of the settings.
pub fn routing_template(kind: Kind, server: &Options) -> Option<Template> {
    match kind {
        Kind::Amqp => {
            let option = server.iter().find(|(name, _)| name == "routing_key");
            option.and_then(|(_, text)| Template::parse(text).ok())
        }
        Kind::Http => Template::parse("").ok(), // the URL is the whole address
    }
}

fn bad(name: &str, why: impl std::fmt::Display, hint: impl Into<String>) -> Refused {
    Refused {
        unknown: false,
        message: format!("option \"{name}\" is refused: {why}"),
        hint: hint.into(),
    }
}

/// Only checks that the text looks like PEM. The content is checked when it is used.
fn pem(name: &str, value: &str) -> Result<Credential, Refused> {
    match value.contains("-----BEGIN ") {
        true => Ok(Credential::Given(Secret::new(value))),
        false => Err(bad(
            name,
            "it is not in PEM",
            "Give the text of the file: -----BEGIN CERTIFICATE----- …",
        )),
    }
}

/// Turns a refusal of crates/core into a refusal of this option.
fn other(name: &str, refusal: Refusal) -> Refused {
    bad(name, refusal.message, refusal.hint)
}

fn choice<T: Copy>(name: &str, value: &str, choices: &[(&str, T)]) -> Result<T, Refused> {
    let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
    (choices.iter().find(|(word, _)| *word == value))
        .map(|(_, meaning)| *meaning)
        .ok_or_else(|| bad(name, "it is unknown", format!("Use {}.", words.join(" or "))))
}

fn number(name: &str, value: &str, range: std::ops::RangeInclusive<u64>) -> Result<u64, Refused> {
    let hint = || format!("Use a number from {} to {}.", range.start(), range.end());
    match value.parse() {
        Ok(number) if range.contains(&number) => Ok(number),
        Ok(_) => Err(bad(name, "it is out of range", hint())),
        Err(_) => Err(bad(name, "it is not a number", hint())),
    }
}

/// Parses a number with a unit, as in settings of the server; without a unit it is in ms.
pub(super) fn duration(name: &str, value: &str, range_ms: std::ops::RangeInclusive<u64>) -> Result<u64, Refused> {
    let digits = value.len() - value.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let factor = match value[digits..].trim() {
        "" | "ms" => 1,
        "s" => 1_000,
        "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => {
            return Err(bad(
                name,
                "its unit is unknown",
                "Units: ms, s, min, h, d. Example: 30s",
            ));
        }
    };
    let ms = value[..digits]
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(factor));
    match ms {
        Some(ms) if range_ms.contains(&ms) => Ok(ms),
        Some(_) => Err(bad(
            name,
            "it is out of range",
            format!("Use {} ms to {} ms.", range_ms.start(), range_ms.end()),
        )),
        None => Err(bad(name, "it is not a time", "Example: 30s")),
    }
}
