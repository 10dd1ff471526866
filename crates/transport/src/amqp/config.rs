//! The configuration of a publisher for a broker, as plain data. The worker's main thread writes it, the publisher
//! thread reads it.

use super::url::AmqpAddress;
use crate::connected::{BACKOFF_MAX, BACKOFF_MIN, PATIENCE, Terms};
use crate::deadline::Deadline;
use crate::lookup::CONNECTION_LIFE;
use crate::secret::Secret;
use crate::ssrf::AllowList;
use crate::tls::Tls;
use crate::transfer::MIN_SEND_RATE;
use crate::url::Endpoint;
use std::io;
use std::time::Duration;

/// The limit of an AMQP short string. lapin panics on a longer one, so no longer one may reach it.
const SHORT_STRING_BYTES_MAX: usize = 255;

/// The type of which the publisher declares its exchange. Empty = it only checks that the exchange exists, because the
/// administrator of the broker creates it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExchangeType(String);

impl ExchangeType {
    pub const HINT: &str = "Use direct, fanout, topic, headers or a plugin's x-…; or leave it empty to only check that the exchange exists.";

    pub fn parse(name: &str) -> Option<Self> {
        let is_known = matches!(name, "" | "direct" | "fanout" | "topic" | "headers")
            || (name.starts_with("x-") && name.len() <= SHORT_STRING_BYTES_MAX);
        is_known.then(|| Self(name.to_owned()))
    }

    /// None = the exchange is not declared.
    pub(crate) fn name(&self) -> Option<&str> {
        Some(self.0.as_str()).filter(|name| !name.is_empty())
    }
}

/// The broker of one destination. Never changed in place: stop the publisher and start another (see
/// [`crate::Publisher::start`]).
#[derive(Clone, Debug)]
pub struct AmqpConfig {
    /// At least one. The first is the one to connect to; after a failure the next is.
    pub endpoints: Vec<Endpoint>,
    pub vhost: String,
    pub user: String,
    pub password: Secret,
    /// What may be reached although its address is not public.
    pub allow: AllowList,
    /// None = plain AMQP.
    pub tls: Option<Tls>,
    /// SASL EXTERNAL: the broker reads the user from the client certificate. `user` and `password` are not sent.
    pub external: bool,
    /// Checked (or declared) at each connect. Empty = the broker's default exchange, which needs neither.
    pub exchange: String,
    pub exchange_type: ExchangeType,
    /// How long the broker keeps each message in a queue.
    pub expiration_ms: Option<u64>,
    /// For queues with `x-max-priority`.
    pub priority: Option<u8>,
    /// The time limit for connecting to an endpoint: name lookup, TCP, TLS, handshake, exchange check, channel. Its
    /// addresses share it. At most 5 s if there are several endpoints.
    pub connect_timeout: Duration,
    /// After this time a connection to a host with a name is replaced.
    pub connection_life: Duration,
    /// The time limit for a confirm once the broker has taken the message, and before that for its next bytes. The
    /// clock stops while the broker blocks publishers.
    pub confirm_timeout: Duration,
    /// The lowest rate at which bytes extend it, in bytes a second.
    pub min_send_rate: u32,
    /// A message that stays unconfirmed for this time makes the publisher probe whether the broker still answers. If it
    /// does, the message is sent again. See `connected::unconfirmed`.
    pub patience: Duration,
    /// The most messages that may be outstanding, at least 1.
    pub window: usize,
    /// Shown in the broker's list of connections.
    pub connection_name: String,
    /// The wait after the first failed connect; it doubles up to `backoff_max`.
    pub backoff_min: Duration,
    pub backoff_max: Duration,
    /// No message is published after it, and the connection is cut.
    pub deadline: Deadline,
}

impl AmqpConfig {
    /// A configuration for `address` with the defaults of all other fields. A URL without a user gets the broker's
    /// default user. It may reach every address.
    pub fn new(address: AmqpAddress, password: Secret) -> Self {
        Self {
            endpoints: address.endpoints,
            vhost: address.vhost,
            user: address.user.unwrap_or_else(|| "guest".to_owned()),
            password,
            allow: AllowList::any(),
            tls: address.tls.then(Tls::default),
            external: address.external,
            exchange: String::new(),
            exchange_type: ExchangeType::default(),
            expiration_ms: None,
            priority: None,
            connect_timeout: Duration::from_secs(5),
            connection_life: CONNECTION_LIFE,
            confirm_timeout: Duration::from_secs(30),
            min_send_rate: MIN_SEND_RATE,
            patience: PATIENCE,
            window: 1000,
            connection_name: "outbox".to_owned(),
            backoff_min: BACKOFF_MIN,
            backoff_max: BACKOFF_MAX,
            deadline: Deadline::default(),
        }
    }

    pub(crate) fn terms(&self) -> Terms {
        Terms {
            endpoints: self.endpoints.clone(),
            allow: self.allow.clone(),
            connect_timeout: self.connect_timeout,
            connection_life: self.connection_life,
            answer_timeout: self.confirm_timeout,
            min_send_rate: self.min_send_rate,
            patience: self.patience,
            window: self.window,
            backoff_min: self.backoff_min,
            backoff_max: self.backoff_max,
            deadline: self.deadline.clone(),
        }
    }

    /// Refuses what lapin would panic on or what could never work, before a thread exists.
    pub(crate) fn validate(&self) -> io::Result<()> {
        let short = [("vhost", &self.vhost), ("exchange", &self.exchange)];
        if let Some(tls) = &self.tls {
            // This result is dropped: each connect builds its own, so that changes to the system's CAs take effect.
            tls.client_config()
                .and_then(|_| {
                    let mut names = self.endpoints.iter().map(|endpoint| tls.server_name(&endpoint.host));
                    names.try_for_each(|name| name.map(drop))
                })
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        }
        let problem = if self.external && self.tls.as_ref().is_none_or(|tls| tls.client.is_none()) {
            Some("auth_mechanism=external needs amqps and a client certificate".to_owned())
        } else if self.endpoints.is_empty() || self.endpoints.iter().any(|e| e.host.is_empty() || e.port == 0) {
            Some("host and port must be set".to_owned())
        } else if self.user.contains('\0') || self.password.reveal().contains('\0') {
            Some("user and password must not contain NUL".to_owned())
        } else if self.window == 0 || self.backoff_min.is_zero() || self.min_send_rate == 0 {
            Some("window, backoff and min_send_rate must be above zero".to_owned())
        } else {
            short
                .iter()
                .find(|(_, v)| v.len() > SHORT_STRING_BYTES_MAX)
                .map(|(what, _)| format!("{what} is longer than 255 bytes"))
        };
        problem.map_or(Ok(()), |text| Err(io::Error::new(io::ErrorKind::InvalidInput, text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_format_string_shows_the_password() {
        let config = AmqpConfig::new(crate::parse_url("amqp://u@h").unwrap(), Secret::new("hunter2"));
        assert!(!format!("{config:?} {:#?}", config.password).contains("hunter2"));
    }

    #[test]
    fn a_configuration_that_panics_lapin_is_refused_before_the_thread_starts() {
        let good = AmqpConfig::new(crate::parse_url("amqp://h").unwrap(), Secret::default());
        assert!(good.validate().is_ok());
        let long = "x".repeat(256);
        assert_eq!(ExchangeType::parse(&format!("x-{long}")), None);
        for bad in [
            AmqpConfig {
                vhost: long.clone(),
                ..good.clone()
            },
            AmqpConfig {
                exchange: long,
                ..good.clone()
            },
            AmqpConfig {
                external: true,
                ..good.clone()
            },
            AmqpConfig {
                endpoints: vec![Endpoint {
                    host: "fe80::1%eth0".into(),
                    port: 5671,
                }],
                tls: Some(Tls::default()),
                ..good.clone()
            },
            AmqpConfig {
                tls: Some(Tls {
                    ca_pem: Some(Vec::new()),
                    ..Tls::default()
                }),
                ..good.clone()
            },
            AmqpConfig {
                endpoints: Vec::new(),
                ..good.clone()
            },
            AmqpConfig {
                window: 0,
                ..good.clone()
            },
            AmqpConfig {
                password: Secret::new("a\0b"),
                ..good.clone()
            },
        ] {
            assert_eq!(bad.validate().unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
