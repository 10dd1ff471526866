//! What a publisher needs to know of a broker, as plain data: written by the worker's main thread, read by the publisher
//! thread.

use crate::deadline::Deadline;
use crate::secret::Secret;
use crate::tls::Tls;
use crate::url::AmqpAddress;
use std::io;
use std::time::Duration;

/// AMQP short string; lapin panics on a longer one, so nothing longer may reach it.
const SHORT_STRING_BYTES_MAX: usize = 255;

/// Whether the publisher may create its exchange, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExchangeType {
    /// Only check that the exchange exists: whoever runs the broker made it.
    #[default]
    None,
    Direct,
    Fanout,
    Topic,
    Headers,
    /// A type that a broker plugin brings, such as `x-consistent-hash`.
    Custom(String),
}

/// One destination's broker. Not changed in place: stop the publisher and start another (see [`crate::Publisher::start`]).
#[derive(Clone, Debug)]
pub struct AmqpConfig {
    pub host: String,
    pub port: u16,
    pub vhost: String,
    pub user: String,
    pub password: Secret,
    /// None speaks plain AMQP.
    pub tls: Option<Tls>,
    /// SASL EXTERNAL: the broker takes the user from the client certificate. `user` and `password` are not sent.
    pub external: bool,
    /// Checked (or declared) at each connect. Empty is the broker's default exchange, which needs neither.
    pub exchange: String,
    pub exchange_type: ExchangeType,
    /// For each step of connecting: TCP, handshake, channel, exchange check.
    pub connect_timeout: Duration,
    /// From publish to confirm; the clock stands while the broker blocks publishers.
    pub confirm_timeout: Duration,
    /// A message that is unconfirmed for so long makes the publisher ask whether the broker still answers, and send it again
    /// if it does. See `amqp::unconfirmed`.
    pub patience: Duration,
    /// How many messages may be outstanding, at least 1.
    pub window: usize,
    /// Shown in the broker's list of connections.
    pub connection_name: String,
    /// Pause after the first failed connect; doubles up to `backoff_max`.
    pub backoff_min: Duration,
    pub backoff_max: Duration,
    /// Nothing is published after it, and the connection is cut.
    pub deadline: Deadline,
}

impl AmqpConfig {
    /// `address` as a URL gave it, the broker's stock user where it names none, and the defaults of all else.
    pub fn new(address: AmqpAddress, password: Secret) -> Self {
        Self {
            host: address.host,
            port: address.port,
            vhost: address.vhost,
            user: address.user.unwrap_or_else(|| "guest".to_owned()),
            password,
            tls: address.tls.then(Tls::default),
            external: address.external,
            exchange: String::new(),
            exchange_type: ExchangeType::None,
            connect_timeout: Duration::from_secs(5),
            confirm_timeout: Duration::from_secs(30),
            patience: Duration::from_secs(5),
            window: 1000,
            connection_name: "outbox".to_owned(),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            deadline: Deadline::default(),
        }
    }

    /// Refuses what lapin would panic on or what could never work, before a thread exists.
    pub(crate) fn validate(&self) -> io::Result<()> {
        let custom = match &self.exchange_type {
            ExchangeType::Custom(kind) => kind.as_str(),
            _ => "",
        };
        let short = [
            ("vhost", self.vhost.as_str()),
            ("exchange", &self.exchange),
            ("exchange type", custom),
        ];
        if let Some(tls) = &self.tls {
            // Made anew at each connect, so that a CA that the system takes up or drops counts from then on.
            tls.client_config()
                .and_then(|_| tls.server_name(&self.host))
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        }
        let problem = if self.external && self.tls.as_ref().is_none_or(|tls| tls.client.is_none()) {
            Some("auth_mechanism=external needs amqps and a client certificate".to_owned())
        } else if self.host.is_empty() || self.port == 0 {
            Some("host and port must be set".to_owned())
        } else if self.user.contains('\0') || self.password.reveal().contains('\0') {
            Some("user and password must not contain NUL".to_owned())
        } else if self.window == 0 || self.backoff_min.is_zero() {
            Some("window and backoff must be above zero".to_owned())
        } else {
            short
                .iter()
                .find(|(_, v)| v.len() > SHORT_STRING_BYTES_MAX)
                .map(|(what, _)| format!("{what} is over 255 bytes"))
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
    fn what_lapin_would_panic_on_is_refused_before_the_thread_starts() {
        let good = AmqpConfig::new(crate::parse_url("amqp://h").unwrap(), Secret::default());
        assert!(good.validate().is_ok());
        let long = "x".repeat(256);
        for bad in [
            AmqpConfig {
                vhost: long.clone(),
                ..good.clone()
            },
            AmqpConfig {
                exchange: long.clone(),
                ..good.clone()
            },
            AmqpConfig {
                exchange_type: ExchangeType::Custom(long),
                ..good.clone()
            },
            AmqpConfig {
                external: true,
                ..good.clone()
            },
            AmqpConfig {
                host: "fe80::1%eth0".into(),
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
