//! What a publisher needs to know, as plain data: written by the worker's main thread, read by the publisher thread.

use crate::http::HttpConfig;
use crate::tls::Tls;
use crate::url::AmqpAddress;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// AMQP short string; lapin panics on a longer one, so nothing longer may reach it.
const SHORT_STRING_BYTES_MAX: usize = 255;

/// A password, a token or a key. It has no `Display` and its `Debug` shows nothing, so no format string can leak it.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }

    /// The one way to the text; only who sends it, or signs with it, calls this.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }

    /// The same as bytes, to be read as PEM.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Until when a publisher may publish, by the clock that goes on while the machine or the process sleeps. Written by the
/// worker's main thread when it holds its leases anew, read by the publisher thread before each publish: a worker that was
/// stopped for longer than its lease lasts sends nothing more, for another may own its partitions.
#[derive(Clone, Debug)]
pub struct Deadline(Arc<AtomicU64>);

impl Default for Deadline {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(u64::MAX)))
    }
}

impl Deadline {
    /// The time now, to count a deadline from, in ns.
    pub fn now() -> u64 {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: writes one timespec. The clock is there since Linux 2.6.39.
        unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut now) };
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    /// Publish until `duration` after `from`.
    pub fn set(&self, from: u64, duration: Duration) {
        self.0.store(from + duration.as_nanos() as u64, Ordering::SeqCst);
    }

    /// Publish without end.
    pub fn lift(&self) {
        self.0.store(u64::MAX, Ordering::SeqCst);
    }

    /// Publish nothing from now on. Allocates nothing: an exit callback may call it.
    pub fn end(&self) {
        self.0.store(0, Ordering::SeqCst);
    }

    pub(crate) fn has_passed(&self) -> bool {
        let until = self.0.load(Ordering::SeqCst);
        until != u64::MAX && Self::now() >= until
    }
}

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

/// Where a publisher publishes to, and how.
#[derive(Clone, Debug)]
pub enum TransportConfig {
    Amqp(AmqpConfig),
    Http(HttpConfig),
}

impl From<AmqpConfig> for TransportConfig {
    fn from(config: AmqpConfig) -> Self {
        Self::Amqp(config)
    }
}

impl From<HttpConfig> for TransportConfig {
    fn from(config: HttpConfig) -> Self {
        Self::Http(config)
    }
}

impl TransportConfig {
    /// Refuses what could never work, before a thread exists.
    pub(crate) fn validate(&self) -> io::Result<()> {
        match self {
            Self::Amqp(config) => config.validate(),
            Self::Http(config) => config.validate(),
        }
    }

    pub(crate) fn window(&self) -> usize {
        match self {
            Self::Amqp(config) => config.window,
            Self::Http(config) => config.window,
        }
    }
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
    /// if it does. See `unconfirmed`.
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
