//! A destination as it is described: by the settings of the server, or by the options of CREATE SERVER and CREATE USER
//! MAPPING. Pure; called on the main thread by the validators of the foreign data wrappers and by the worker.
//!
//! No error repeats a value: it may be a secret that was written into the wrong option.

use crate::config::{ExchangeType, Secret};
use crate::function::BodyFunction;
use crate::http::{HttpAuth, check_credentials};
use crate::ssrf::AllowList;
use crate::url::{AmqpAddress, HttpAddress, parse_http_url, parse_url};
use outbox_core::envelope::Refusal;
use outbox_core::message::Text;
use outbox_core::route::{EXPIRATION_MAX_MS, Format, Route, Statics, Template, TransportKind};
use outbox_core::settle::{Ordering, RetryPolicy, Rules};
use std::collections::BTreeMap;
use std::time::Duration;

/// What a worker needs to know of a destination. When any of it changes but the limits, the worker connects anew.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    pub transport: Transport,
    pub certificates: Certificates,
    /// What may be reached by HTTP though it is not public.
    pub http_allow: AllowList,
    pub format: Format,
    /// What makes the bodies, if not the format alone.
    pub body: Option<BodyFunction>,
    /// What each message carries whatever the event.
    pub statics: Statics,
    pub rules: Rules,
    pub limits: Limits,
    pub connect_timeout: Duration,
    pub confirm_timeout: Duration,
}

/// How much a destination is given; 0 = any number. The connection knows none of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Messages that wait.
    pub max_pending: u32,
    /// Messages a second, of all workers together.
    pub max_rate: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Transport {
    Amqp(Amqp),
    Http(Http),
}

impl Transport {
    pub fn kind(&self) -> TransportKind {
        match self {
            Self::Amqp(_) => TransportKind::Amqp,
            Self::Http(_) => TransportKind::Http,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Http {
    pub url: String,
    pub user: Option<String>,
    /// With a user the password, without one a bearer token.
    pub secret: Option<Secret>,
    /// The current one first, then those that it replaces.
    pub signing_secrets: Vec<Secret>,
    /// Requests at a time, at most.
    pub concurrency: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Amqp {
    pub url: String,
    pub user: Option<String>,
    pub password: Password,
    pub exchange: Text,
    pub exchange_type: ExchangeType,
    pub routing_key: Template,
    /// Messages without a confirm, at most.
    pub max_in_flight: usize,
}

/// As many as a worker claims.
const IN_FLIGHT_MAX: u64 = 2_000;

/// Where the password is.
#[derive(Clone, Debug, PartialEq)]
pub enum Password {
    /// The protocol's default.
    Default,
    Known(Secret),
    /// In the first line of this file.
    File(String),
}

/// With TLS: whom to trust (None: the CAs of the system), and as whom to come.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Certificates {
    pub ca: Option<Pem>,
    pub cert: Option<Pem>,
    pub key: Option<Pem>,
}

/// Something in PEM.
#[derive(Clone, Debug, PartialEq)]
pub enum Pem {
    /// In this file, which a setting names.
    File(String),
    /// The text of an option.
    Given(Secret),
}

impl Pem {
    /// The setting or option that it comes from: `name` is tls_ca, tls_cert or tls_key.
    pub fn called(&self, name: &str) -> String {
        match self {
            Self::File(_) => format!("outbox.{name}_file"),
            Self::Given(_) => format!("the option {name}"),
        }
    }
}

/// Which foreign data wrapper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Amqp,
    Http,
}

/// What the options belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Server,
    UserMapping,
}

/// Why an option is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// There is no option of that name here.
    pub unknown: bool,
    pub message: String,
    pub hint: String,
}

/// As of the settings, whose numbers are signed.
const LIMIT_MAX: u64 = i32::MAX as u64;

pub type Options = [(String, String)];

/// Options as the catalogs hold them, `name=value` each.
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

    fn names(self, level: Level) -> &'static [&'static str] {
        match (self, level) {
            (Self::Amqp, Level::Server) => &[
                "url",
                "exchange",
                "exchange_type",
                "routing_key",
                "format",
                "body",
                "headers",
                "content_type",
                "app_id",
                "source",
                "expiration",
                "priority",
                "ordering",
                "on_dead",
                "max_attempts",
                "max_pending",
                "max_rate",
                "max_in_flight",
                "retry_backoff",
                "retry_backoff_max",
                "connect_timeout",
                "confirm_timeout",
                "tls_ca",
            ],
            (Self::Http, Level::Server) => &[
                "url",
                "concurrency",
                "format",
                "body",
                "headers",
                "content_type",
                "app_id",
                "source",
                "ordering",
                "on_dead",
                "max_attempts",
                "max_pending",
                "max_rate",
                "retry_backoff",
                "retry_backoff_max",
                "connect_timeout",
                "timeout",
                "tls_ca",
            ],
            (Self::Http, Level::UserMapping) => &[
                "user",
                "password",
                "bearer_token",
                "signing_secret",
                "tls_cert",
                "tls_key",
            ],
            (Self::Amqp, Level::UserMapping) => &["user", "password", "tls_cert", "tls_key"],
        }
    }
}

/// Checks options by themselves, as they are written.
///
/// # Errors
/// The first that is unknown or has a bad value.
pub fn check(kind: Kind, level: Level, options: &Options) -> Result<(), Refused> {
    let known = kind.names(level);
    for (name, _) in options {
        if !known.contains(&name.as_str()) {
            return Err(Refused {
                unknown: true,
                message: format!("there is no option \"{name}\""),
                hint: format!("Options: {}.", known.join(", ")),
            });
        }
    }
    let (server, mapping) = match level {
        Level::Server => (options, &[][..]),
        Level::UserMapping => (&[][..], options),
    };
    described(kind, &Target::plain(), server, mapping).map(drop)
}

/// The destination that these options describe. What they leave out is as in `default`; but credentials of the default are
/// never sent to another address.
///
/// # Errors
/// The first option with a bad value.
pub fn described(kind: Kind, default: &Target, server: &Options, mapping: &Options) -> Result<Target, Refused> {
    let mut target = default.clone();
    match kind {
        Kind::Amqp => target.http_allow = AllowList::default(), // says nothing here, so its change must not disconnect
        Kind::Http => {
            target.transport = Transport::Http(Http::plain());
            target.certificates = Certificates::default();
        }
    }
    for (name, value) in server {
        let value = value.as_str();
        match (name.as_str(), &mut target.transport) {
            ("url", Transport::Amqp(amqp)) => {
                parse_url(value)
                    .map_err(|error| bad(name, error.to_string(), "Example: amqp://user@host:5672/vhost"))?;
                amqp.url = value.to_owned();
                (amqp.user, amqp.password) = (None, Password::Default);
                (target.certificates.cert, target.certificates.key) = (None, None);
            }
            ("url", Transport::Http(http)) => {
                parse_http_url(value)
                    .map_err(|error| bad(name, error.to_string(), "Example: https://example.com/hooks"))?;
                http.url = value.to_owned();
            }
            ("concurrency", Transport::Http(http)) => http.concurrency = number(name, value, 1..=64)? as usize,
            ("exchange", _) if value.len() > 255 => {
                return Err(bad(name, "it is longer than 255 bytes", "AMQP allows 255 bytes."));
            }
            ("exchange", Transport::Amqp(amqp)) => amqp.exchange = Text::shared(value),
            ("exchange_type", Transport::Amqp(amqp)) => {
                amqp.exchange_type =
                    ExchangeType::parse(value).ok_or_else(|| bad(name, "it is unknown", ExchangeType::HINT))?;
            }
            ("routing_key", Transport::Amqp(amqp)) => {
                amqp.routing_key =
                    Template::parse(value).map_err(|error| bad(name, error.to_string(), error.hint()))?;
            }
            ("tls_ca", _) => target.certificates.ca = Some(pem(name, value)?),
            ("format", _) => target.format = Format::parse(value).map_err(|refusal| other(name, refusal))?,
            ("body", _) => {
                let function = BodyFunction::parse(value);
                target.body = Some(function.ok_or_else(|| bad(name, "it is no name", BodyFunction::HINT))?);
            }
            ("content_type", _) => target.statics.content_type = Some(Text::shared(value)),
            ("app_id", _) => target.statics.app_id = Text::shared(value),
            ("source", _) => {
                target.statics.source =
                    Template::parse_text(value).map_err(|error| bad(name, error.to_string(), error.hint()))?;
            }
            ("expiration", _) => target.statics.expiration_ms = Some(duration(name, value, 0..=EXPIRATION_MAX_MS)?),
            ("priority", _) => target.statics.priority = Some(number(name, value, 0..=255)? as u8),
            ("ordering", _) => {
                target.rules.ordering = choice(name, value, &[("key", Ordering::Key), ("none", Ordering::None)])?;
            }
            ("on_dead", _) => target.rules.dead_blocks = choice(name, value, &[("block", true), ("skip", false)])?,
            ("max_attempts", _) => target.rules.retry.max_attempts = number(name, value, 1..=1000)? as u32,
            ("max_pending", _) => target.limits.max_pending = number(name, value, 0..=LIMIT_MAX)? as u32,
            ("max_rate", _) => target.limits.max_rate = number(name, value, 0..=LIMIT_MAX)? as u32,
            ("max_in_flight", Transport::Amqp(amqp)) => {
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
            _ => {}
        }
    }
    if let Some(body) = &mut target.body {
        match target.format {
            Format::Envelope if server.iter().any(|(name, _)| name == "format") => {
                let hint = "Leave format out, or choose payload, cloudevents or cloudevents_binary.";
                return Err(bad("body", "the format envelope tells the whole event", hint));
            }
            Format::Envelope => target.format = Format::Payload,
            format => body.as_json = format.is_cloudevents(),
        }
    }
    let transport = target.transport.kind();
    // They depend on the format, wherever it stands.
    if let Some((name, value)) = server.iter().find(|(name, _)| name == "headers") {
        let headers: BTreeMap<String, String> = serde_json::from_str(value).map_err(|_| {
            bad(
                name,
                "it is not a JSON object of texts",
                r#"Example: {"tenant": "{header:tenant}"}"#,
            )
        })?;
        for (header, template) in &headers {
            (target.statics.headers)
                .add(transport, target.format, header, template)
                .map_err(|refusal| other(name, refusal))?;
        }
    }
    (target.statics)
        .check(transport, target.format)
        .map_err(|refusal| other("format", refusal))?;
    target.rules.retry.max_ms = target.rules.retry.max_ms.max(target.rules.retry.base_ms);
    for (name, value) in mapping {
        if value.contains('\0') || value.is_empty() {
            return Err(bad(name, "it is empty", "Leave it out instead."));
        }
        let secret = || Secret::new(value.clone());
        match (name.as_str(), &mut target.transport) {
            ("user", Transport::Amqp(amqp)) => amqp.user = Some(value.clone()),
            ("password", Transport::Amqp(amqp)) => amqp.password = Password::Known(secret()),
            ("user", Transport::Http(http)) => http.user = Some(value.clone()),
            ("password" | "bearer_token", Transport::Http(http)) => http.secret = Some(secret()),
            ("signing_secret", Transport::Http(http)) => {
                http.signing_secrets = value.split_whitespace().map(Secret::new).collect();
            }
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
    if let Transport::Http(http) = &target.transport {
        if given("signing_secret") && http.signing_secrets.is_empty() {
            return Err(bad("signing_secret", "it is empty", "Leave it out instead."));
        }
        check_credentials(&http.auth(), &http.signing_secrets).map_err(|(name, why)| {
            let hint = match name {
                "signing_secret" => {
                    "whsec_ and the base64 of 24 to 64 bytes; while it is rotated the new one, a space, the old one."
                }
                _ => "See docs/destinations.md.",
            };
            bad(name, why, hint)
        })?;
    }
    Ok(target)
}

/// The template of the routing key that these options of a server ask for; None: that of the settings.
pub fn routing_template(kind: Kind, server: &Options) -> Option<Template> {
    match kind {
        Kind::Amqp => {
            let option = server.iter().find(|(name, _)| name == "routing_key");
            option.and_then(|(_, text)| Template::parse(text).ok())
        }
        Kind::Http => Template::parse("").ok(), // the URL says it all
    }
}

impl Target {
    /// Where its messages go; `nothing` is the exchange and routing key where the URL says it all.
    pub fn route<'a>(&'a self, nothing: &'a (Text, Template)) -> Route<'a> {
        let (exchange, template) = match &self.transport {
            Transport::Amqp(amqp) => (&amqp.exchange, &amqp.routing_key),
            Transport::Http(_) => (&nothing.0, &nothing.1),
        };
        let (transport, format, statics) = (self.transport.kind(), self.format, &self.statics);
        Route {
            transport,
            format,
            exchange,
            template,
            statics,
        }
    }

    /// What nothing describes.
    pub fn plain() -> Self {
        Self {
            transport: Transport::Amqp(Amqp {
                url: String::new(),
                user: None,
                password: Password::Default,
                exchange: Text::default(),
                exchange_type: ExchangeType::None,
                routing_key: Template::parse("").expect("an empty template"),
                max_in_flight: 1,
            }),
            certificates: Certificates::default(),
            http_allow: AllowList::default(),
            format: Format::default(),
            body: None,
            statics: Statics::default(),
            rules: Rules {
                retry: RetryPolicy {
                    max_attempts: 1,
                    base_ms: 1,
                    max_ms: 1,
                },
                dead_blocks: true,
                ordering: Ordering::Key,
            },
            limits: Limits::default(),
            connect_timeout: Duration::ZERO,
            confirm_timeout: Duration::ZERO,
        }
    }

    /// What the connection needs to know: no limits.
    pub fn unlimited(self) -> Self {
        Self {
            limits: Limits::default(),
            ..self
        }
    }
}

impl Http {
    fn plain() -> Self {
        Self {
            url: String::new(),
            user: None,
            secret: None,
            signing_secrets: Vec::new(),
            concurrency: 8,
        }
    }

    /// The address, or why there is none, in words for outbox_health.
    pub fn address(&self) -> Result<HttpAddress, String> {
        if self.url.is_empty() {
            return Err("the option url is missing: there is nowhere to post to".into());
        }
        parse_http_url(&self.url).map_err(|error| error.to_string())
    }

    pub fn auth(&self) -> HttpAuth {
        match (&self.user, &self.secret) {
            (Some(user), Some(password)) => HttpAuth::Basic {
                user: user.clone(),
                password: password.clone(),
            },
            (None, Some(token)) => HttpAuth::Bearer(token.clone()),
            (_, None) => HttpAuth::None,
        }
    }
}

impl Amqp {
    /// The address, or why there is none, in words for outbox_health.
    pub fn address(&self) -> Result<AmqpAddress, String> {
        if self.url.is_empty() {
            return Err("outbox.url is empty: there is no broker to deliver to".into());
        }
        let mut address = parse_url(&self.url).map_err(|error| error.to_string())?;
        if self.user.is_some() {
            address.user.clone_from(&self.user);
        }
        Ok(address)
    }
}

impl ExchangeType {
    pub const HINT: &str = "Use direct, fanout, topic, headers or a plugin's x-…; or leave it empty to only check that the exchange exists.";

    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "" => Self::None,
            "direct" => Self::Direct,
            "fanout" => Self::Fanout,
            "topic" => Self::Topic,
            "headers" => Self::Headers,
            plugin if plugin.starts_with("x-") && plugin.len() <= 255 => Self::Custom(plugin.into()),
            _ => return None,
        })
    }
}

fn bad(name: &str, why: impl std::fmt::Display, hint: impl Into<String>) -> Refused {
    Refused {
        unknown: false,
        message: format!("option \"{name}\" is refused: {why}"),
        hint: hint.into(),
    }
}

/// Whether it holds what it should is known when it is used.
fn pem(name: &str, value: &str) -> Result<Pem, Refused> {
    match value.contains("-----BEGIN ") {
        true => Ok(Pem::Given(Secret::new(value))),
        false => Err(bad(
            name,
            "it is not in PEM",
            "Give the text of the file: -----BEGIN CERTIFICATE----- …",
        )),
    }
}

/// A refusal in the words of the core.
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

/// A number with a unit as in settings of the server; without one it is ms.
fn duration(name: &str, value: &str, range_ms: std::ops::RangeInclusive<u64>) -> Result<u64, Refused> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn options(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect()
    }

    fn default() -> Target {
        Target {
            transport: Transport::Amqp(Amqp {
                url: "amqp://main@broker".into(),
                user: None,
                password: Password::File("/etc/secret".into()),
                exchange: Text::shared("outbox"),
                exchange_type: ExchangeType::Topic,
                routing_key: Template::parse("{type}").unwrap(),
                max_in_flight: 1_000,
            }),
            certificates: Certificates {
                ca: Some(Pem::File("/etc/ca".into())),
                cert: Some(Pem::File("/etc/cert".into())),
                key: Some(Pem::File("/etc/key".into())),
            },
            http_allow: AllowList::default(),
            format: Format::default(),
            body: None,
            statics: Statics::default(),
            rules: Rules {
                retry: RetryPolicy {
                    max_attempts: 15,
                    base_ms: 1000,
                    max_ms: 600_000,
                },
                dead_blocks: true,
                ordering: Ordering::Key,
            },
            limits: Limits::default(),
            connect_timeout: Duration::from_secs(10),
            confirm_timeout: Duration::from_secs(30),
        }
    }

    fn amqp(target: &Target) -> &Amqp {
        let Transport::Amqp(amqp) = &target.transport else {
            panic!("AMQP")
        };
        amqp
    }

    #[test]
    fn what_is_left_out_is_as_in_the_default() {
        assert_eq!(described(Kind::Amqp, &default(), &[], &[]).unwrap(), default());
        let other = described(
            Kind::Amqp,
            &default(),
            &options(&[("exchange", "audit"), ("on_dead", "skip")]),
            &[],
        )
        .unwrap();
        assert_eq!(&*amqp(&other).exchange, "audit");
        assert_eq!(amqp(&other).password, Password::File("/etc/secret".into()));
        assert!(!other.rules.dead_blocks);
        assert_eq!(other.rules.retry, default().rules.retry);
    }

    #[test]
    fn what_http_may_reach_is_no_matter_of_a_broker() {
        let allowed = Target {
            http_allow: AllowList::parse("10.0.0.0/8").unwrap(),
            ..default()
        };
        let of = |kind| described(kind, &allowed, &[], &[]).unwrap();
        assert_eq!(of(Kind::Amqp), default());
        assert_eq!(of(Kind::Http).http_allow, allowed.http_allow);
    }

    #[test]
    fn the_password_of_the_default_goes_to_no_other_address() {
        let other = described(Kind::Amqp, &default(), &options(&[("url", "amqp://elsewhere")]), &[]).unwrap();
        assert_eq!(amqp(&other).password, Password::Default);
        assert_eq!((&other.certificates.cert, &other.certificates.key), (&None, &None));
        assert_eq!(other.certificates.ca, default().certificates.ca);
        let mapping = options(&[("user", "u"), ("password", "p")]);
        let known = described(
            Kind::Amqp,
            &default(),
            &options(&[("url", "amqp://elsewhere")]),
            &mapping,
        )
        .unwrap();
        assert_eq!(amqp(&known).password, Password::Known(Secret::new("p")));
        assert_eq!(amqp(&known).address().unwrap().user.as_deref(), Some("u"));
    }

    #[test]
    fn times_have_units() {
        let ms = |text: &str| duration("t", text, 1..=86_400_000);
        assert_eq!(ms("250").unwrap(), 250);
        assert_eq!(ms("250ms").unwrap(), 250);
        assert_eq!(ms("30 s").unwrap(), 30_000);
        assert_eq!(ms("1d").unwrap(), 86_400_000);
        for bad in ["", "s", "-1", "1.5s", "2d", "1 week", "99999999999999999999", "0"] {
            assert!(ms(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bad_options_are_refused_with_a_hint_and_without_the_value() {
        for (name, value) in [
            ("url", "amqp://u:hunter2@h"),
            ("exchange_type", "hunter2"),
            ("routing_key", "{hunter2}"),
            ("ordering", "hunter2"),
            ("on_dead", "hunter2"),
            ("body", "hunter2"),
            ("max_attempts", "0"),
            ("max_pending", "-1"),
            ("max_rate", "2147483648"),
            ("max_in_flight", "0"),
            ("max_attempts", "hunter2"),
            ("retry_backoff", "hunter2"),
            ("confirm_timeout", "1ms"),
            ("exchange", &"hunter2".repeat(60)),
        ] {
            let refused = check(Kind::Amqp, Level::Server, &options(&[(name, value)])).unwrap_err();
            assert!(!refused.unknown, "{name}");
            assert!(
                refused.message.contains(name) && !refused.hint.is_empty(),
                "{refused:?}"
            );
            let tells = name != "routing_key" && format!("{refused:?}").contains("hunter2");
            assert!(!tells, "{refused:?}");
        }
        let unknown = check(Kind::Amqp, Level::Server, &options(&[("password", "x")])).unwrap_err();
        assert!(unknown.unknown && unknown.hint.contains("exchange"), "{unknown:?}");
        assert!(check(Kind::Amqp, Level::UserMapping, &options(&[("password", "")])).is_err());
        assert!(check(Kind::Amqp, Level::UserMapping, &options(&[("password", "x")])).is_ok());
    }

    #[test]
    fn every_option_that_is_offered_is_read() {
        let values = [
            ("url", "amqp://elsewhere"),
            ("exchange", "other"),
            ("exchange_type", "fanout"),
            ("routing_key", "{key}"),
            ("format", "cloudevents"),
            ("body", "shop.for_search"),
            ("headers", r#"{"tenant": "{header:tenant|none}"}"#),
            ("content_type", "text/plain"),
            ("app_id", "shop"),
            ("source", "/shop"),
            ("expiration", "1d"),
            ("priority", "3"),
            ("ordering", "none"),
            ("on_dead", "skip"),
            ("max_attempts", "3"),
            ("max_pending", "1000"),
            ("max_rate", "500"),
            ("max_in_flight", "10"),
            ("retry_backoff", "5s"),
            ("retry_backoff_max", "7s"),
            ("connect_timeout", "1s"),
            ("confirm_timeout", "2s"),
            ("tls_ca", "-----BEGIN CERTIFICATE-----"),
        ];
        let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, Kind::Amqp.names(Level::Server));
        for pair in values {
            let mut pairs = vec![pair];
            if pair.0 == "content_type" {
                pairs.insert(0, ("format", "payload"));
            }
            assert_ne!(
                described(Kind::Amqp, &default(), &options(&pairs), &[]).unwrap(),
                described(Kind::Amqp, &default(), &options(&pairs[1..]), &[]).unwrap_or_else(|_| default()),
                "{pair:?}"
            );
        }
    }

    #[test]
    fn an_http_destination_takes_rules_of_the_default_and_no_credentials() {
        let server = options(&[
            ("url", "https://example.com/hook"),
            ("concurrency", "3"),
            ("timeout", "2s"),
        ]);
        let target = described(Kind::Http, &default(), &server, &[]).unwrap();
        let Transport::Http(http) = &target.transport else {
            panic!("HTTP")
        };
        assert_eq!((http.concurrency, &http.secret), (3, &None));
        assert_eq!(target.rules, default().rules);
        assert_eq!(target.certificates, Certificates::default());
        assert_eq!(target.confirm_timeout, Duration::from_secs(2));
        let mapping = options(&[
            (
                "signing_secret",
                "whsec_bmV3bmV3bmV3bmV3bmV3bmV3bmV3bmV3 whsec_b2xkb2xkb2xkb2xkb2xkb2xkb2xkb2xk",
            ),
            ("bearer_token", "t"),
        ]);
        let Transport::Http(http) = described(Kind::Http, &default(), &server, &mapping).unwrap().transport else {
            panic!("HTTP")
        };
        assert_eq!(http.signing_secrets.len(), 2);
        assert!(matches!(http.auth(), HttpAuth::Bearer(_)));
        for bad in [
            &[("user", "u")][..],
            &[("password", "p")],
            &[("user", "u"), ("password", "p"), ("bearer_token", "t")],
            &[("user", "hunter2:x"), ("password", "hunter2")],
            &[("bearer_token", "hunter2 x")],
            &[("signing_secret", "hunter2")],
            &[("signing_secret", "whsec_aHVudGVyMg==")],
            &[("signing_secret", "whsec_bmV3bmV3bmV3bmV3bmV3bmV3bmV3bmV3 hunter2")],
            &[("signing_secret", " ")],
        ] {
            let refused = check(Kind::Http, Level::UserMapping, &options(bad)).expect_err(bad[0].1);
            assert!(
                refused.message.contains(bad[0].0) || bad[0].0 == "password",
                "{refused:?}"
            );
            assert!(
                !refused.hint.is_empty() && !format!("{refused:?}").contains("hunter2"),
                "{refused:?}"
            );
        }
        for bad in [
            ("url", "amqp://h"),
            ("url", "https://u:hunter2@h"),
            ("concurrency", "65"),
        ] {
            let refused = check(Kind::Http, Level::Server, &options(&[bad])).unwrap_err();
            assert!(!format!("{refused:?}").contains("hunter2"), "{refused:?}");
        }
        assert!(
            check(Kind::Http, Level::Server, &options(&[("exchange", "x")]))
                .unwrap_err()
                .unknown
        );
    }
}
