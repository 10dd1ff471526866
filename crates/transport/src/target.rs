//! The description of a destination: from the settings of the server, or from the options of CREATE SERVER and CREATE
//! USER MAPPING. Pure; called on the main thread by the validators of the foreign data wrappers and by the worker.
//!
//! No error repeats a value: it may be a secret that was written into the wrong option.

mod options;

pub use options::{Kind, Level, Options, Refused, check, described, routing_template, split};

use crate::amqp::ExchangeType;
use crate::http::{HttpAuth, RETRY_AFTER_MAX};
use crate::secret::Secret;
use crate::ssrf::AllowList;
use crate::url::{AmqpAddress, HttpAddress, parse_http_url, parse_url};
use outbox_core::message::Text;
use outbox_core::route::{Format, Route, Statics, Template, TransportKind};
use outbox_core::settle::Rules;
use std::time::Duration;

/// All that a worker needs to know about a destination; see [`Target::connection`]. The default values are neutral, to be
/// filled in by options.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Target {
    pub transport: Protocol,
    pub certificates: Certificates,
    /// Hosts and networks that may be reached although they are not public. As a default, those of the destinations
    /// with a URL of their own.
    pub allow: AllowList,
    pub format: Format,
    /// Headers and properties that each message carries, whatever the event.
    pub statics: Statics,
    pub rules: Rules,
    pub limits: Limits,
    pub connect_timeout: Duration,
    pub confirm_timeout: Duration,
    /// The lowest rate at which the bytes of a message extend `confirm_timeout`, in bytes a second.
    pub min_send_rate: u32,
}

/// The longest wait for each step of connecting, unless a destination has another one. A shorter confirm_timeout limits
/// it too.
pub const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(10);

/// The limits of a destination; 0 = no limit. The connection does not use them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// The most messages that may be pending.
    pub max_pending: u32,
    /// The most messages per second, over all workers.
    pub max_rate: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Protocol {
    Amqp(Amqp),
    Http(Http),
}

impl Default for Protocol {
    fn default() -> Self {
        Self::Amqp(Amqp::default())
    }
}

impl Protocol {
    pub fn kind(&self) -> TransportKind {
        match self {
            Self::Amqp(_) => TransportKind::Amqp,
            Self::Http(_) => TransportKind::Http,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Http {
    pub url: String,
    pub user: Option<String>,
    /// The password if there is a user, otherwise a bearer token.
    pub secret: Option<Secret>,
    /// The current secret first, then the older secrets that it replaces.
    pub signing_secrets: Vec<Secret>,
    /// Headers of each request whose values are secret, by their names in lower case.
    pub secret_headers: Vec<(String, Secret)>,
    /// The most requests at a time.
    pub concurrency: usize,
    /// The longest pause that an answer can ask for.
    pub retry_after_max: Duration,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Amqp {
    pub url: String,
    pub user: Option<String>,
    /// None = the protocol's default password.
    pub password: Option<Credential>,
    pub exchange: Text,
    pub exchange_type: ExchangeType,
    pub routing_key: Template,
    /// The most messages without a confirm.
    pub max_in_flight: usize,
}

/// A file that a worker reads when it connects.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedFile {
    /// The setting or command-line option that names the file, as errors show it.
    pub named_by: &'static str,
    pub path: String,
}

/// The certificates of a TLS connection. `ca` names the trusted CAs (None = those of the system); `cert` and `key` are
/// the client certificate.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Certificates {
    pub ca: Option<Credential>,
    pub cert: Option<Credential>,
    pub key: Option<Credential>,
}

/// A password, or a text in PEM.
#[derive(Clone, Debug, PartialEq)]
pub enum Credential {
    File(NamedFile),
    /// The value of an option.
    Given(Secret),
}

impl Credential {
    /// The setting or option that the text comes from. `name` is tls_ca, tls_cert or tls_key.
    pub fn called(&self, name: &str) -> String {
        match self {
            Self::File(file) => file.named_by.to_owned(),
            Self::Given(_) => format!("the option {name}"),
        }
    }
}

impl Target {
    /// The route of its messages. `nothing` is the empty exchange and routing key for HTTP, where the URL is the whole
    /// address.
    pub fn route<'a>(&'a self, nothing: &'a (Text, Template)) -> Route<'a> {
        let (exchange, template) = match &self.transport {
            Protocol::Amqp(amqp) => (&amqp.exchange, &amqp.routing_key),
            Protocol::Http(_) => (&nothing.0, &nothing.1),
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

    /// Why no message can be sent, if that follows from the hosts in the URL and the list of what may be reached: the
    /// host, and the reason.
    pub fn refused_host(&self) -> Option<(String, String)> {
        let hosts: Vec<String> = match &self.transport {
            Protocol::Amqp(amqp) => amqp
                .address()
                .ok()?
                .endpoints
                .into_iter()
                .map(|endpoint| endpoint.host)
                .collect(),
            Protocol::Http(http) => vec![http.address().ok()?.host],
        };
        let refused = hosts
            .into_iter()
            .map(|host| self.allow.refusal_of(&host).map(|why| (host, why)));
        refused.collect::<Option<Vec<_>>>()?.pop()
    }

    /// The part whose change needs another connection: all but the limits and what becomes of a message that fails. The
    /// order and what a message looks like are in it: no message that was made before may go out after the change.
    #[must_use]
    pub fn connection(self) -> Self {
        let ordering = self.rules.ordering;
        Self {
            limits: Limits::default(),
            rules: Rules {
                ordering,
                ..Rules::default()
            },
            ..self
        }
    }
}

impl Http {
    fn plain() -> Self {
        Self {
            concurrency: 8,
            retry_after_max: RETRY_AFTER_MAX,
            ..Self::default()
        }
    }

    /// The address, or the reason why there is none, as a text for outbox_health.
    pub fn address(&self) -> Result<HttpAddress, String> {
        if self.url.is_empty() {
            return Err("the option url is missing: there is no URL to post to".into());
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
    /// The address, or the reason why there is none, as a text for outbox_health.
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

#[cfg(test)]
mod tests;
