//! The worker's end of the publisher: starts it with what describes the destination, and puts its state into the words
//! that outbox_workers and outbox_health show. Called by a worker, in the server or outside of it, on its main thread.

use crate::target::{Amqp, Certificates, Http, Password, Pem, Target, Transport};
use crate::{
    AmqpConfig, Answered, Bell, ClientCertificate, ConnectionState, Deadline, DownReason, Event, HttpConfig, Outcome,
    Publication, Publisher, Secret, Tls, TlsError, TlsPart, TransportConfig,
};
use outbox_core::engine::Engine;
use outbox_core::pace::Pace;
use outbox_core::trust::Trust;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

/// Messages of a destination that a worker has in hand, or has claimed and not settled, at most: one batch on the wire while the next is claimed.
pub const WINDOW: usize = 2000;
/// How often a publisher that could not start (no url, no password file) is tried again.
const RETRY_START: Duration = Duration::from_secs(1);

/// What is known of the broker, as outbox_internal.report takes it.
#[derive(Clone, PartialEq, Debug)]
pub struct Status {
    pub state: &'static str,
    pub reason: Option<&'static str>,
    pub detail: Option<String>,
}

/// What the broker said.
pub type Outcomes = Vec<Answered>;

pub struct Broker {
    /// Or why there is none.
    target: Result<Target, String>,
    connection_name: String,
    bell: Bell,
    /// Until when it may publish: no longer than the leases of the worker last.
    deadline: Deadline,
    publisher: Option<Publisher>,
    /// What the publisher was started with; None without TLS.
    tls: Option<Tls>,
    next_start: Instant,
    trust: Trust,
    pub status: Status,
}

impl Broker {
    pub fn new(target: Result<Target, String>, connection_name: String, bell: Bell, deadline: Deadline) -> Self {
        let status = Status {
            state: "starting",
            reason: None,
            detail: None,
        };
        Self {
            target,
            connection_name,
            bell,
            deadline,
            publisher: None,
            tls: None,
            next_start: Instant::now(),
            trust: Trust::full(WINDOW),
            status,
        }
    }

    /// Takes over new settings: if any differs, or a certificate was renewed, the connection is given up and made anew.
    /// Returns the last outcomes of the old one, or None if it goes on.
    pub fn reconfigure(&mut self, target: Result<Target, String>) -> Option<Outcomes> {
        // Refused for its password: the file may say another one now.
        let anew = target != self.target || self.status.reason == Some("auth_refused") || self.has_new_certificates();
        if !anew {
            return None;
        }
        self.target = target;
        self.next_start = Instant::now();
        self.trust = Trust::full(WINDOW);
        Some(self.stop(Duration::from_millis(500)))
    }

    /// Does not wait for the next attempt to connect: `ensure` makes one now. Returns the last outcomes.
    pub fn try_at_once(&mut self, limit: Duration) -> Outcomes {
        self.next_start = Instant::now();
        self.stop(limit)
    }

    /// Starts the publisher if there is none and there can be one.
    pub fn ensure(&mut self, now: Instant) {
        if self.publisher.is_some() || now < self.next_start {
            return;
        }
        match self.start() {
            Ok((publisher, tls)) => {
                self.publisher = Some(publisher);
                self.tls = tls;
                self.status = Status {
                    state: "connecting",
                    reason: None,
                    detail: None,
                };
            }
            Err(detail) => {
                self.next_start = now + RETRY_START;
                self.status = Status {
                    state: "unconfigured",
                    reason: None,
                    detail: Some(detail),
                };
            }
        }
    }

    fn start(&self) -> Result<(Publisher, Option<Tls>), String> {
        let target = self.target.as_ref().map_err(String::clone)?;
        let (config, tls): (TransportConfig, _) = match &target.transport {
            Transport::Amqp(amqp) => {
                let (config, tls) = self.amqp(target, amqp)?;
                (config.into(), tls)
            }
            Transport::Http(http) => (self.http(target, http)?.into(), None),
        };
        let publisher =
            Publisher::start(config, self.bell.clone()).map_err(|error| start_failure(&error, &target.certificates))?;
        Ok((publisher, tls))
    }

    fn amqp(&self, target: &Target, amqp: &Amqp) -> Result<(AmqpConfig, Option<Tls>), String> {
        let address = amqp.address()?;
        let password = match &amqp.password {
            Password::Default => Secret::new("guest"), // the protocol's, as is the user
            Password::Known(password) => password.clone(),
            Password::File(path) => Secret::new(read_password(path)?),
        };
        let tls = match address.tls {
            true => Some(read_tls(&target.certificates)?),
            false => None,
        };
        let config = AmqpConfig {
            exchange: amqp.exchange.to_string(),
            exchange_type: amqp.exchange_type.clone(),
            window: amqp.max_in_flight,
            connect_timeout: target.connect_timeout,
            confirm_timeout: target.confirm_timeout,
            connection_name: self.connection_name.clone(),
            deadline: self.deadline.clone(),
            tls: tls.clone(),
            ..AmqpConfig::new(address, password)
        };
        Ok((config, tls))
    }

    fn http(&self, target: &Target, http: &Http) -> Result<HttpConfig, String> {
        let text = |pem: &Option<Pem>| match pem {
            Some(Pem::Given(text)) => Some(text.clone()),
            _ => None, // the settings name files of the default destination only
        };
        let plain = |pem| text(pem).map(|text| String::from_utf8_lossy(text.as_bytes()).into_owned());
        Ok(HttpConfig {
            auth: http.auth(),
            signing_secrets: http.signing_secrets.clone(),
            ca_pem: plain(&target.certificates.ca),
            client_cert_pem: plain(&target.certificates.cert),
            client_key_pem: text(&target.certificates.key),
            allow: target.http_allow.clone(),
            connect_timeout: target.connect_timeout,
            timeout: target.confirm_timeout,
            concurrency: http.concurrency,
            connection_name: self.connection_name.clone(),
            deadline: self.deadline.clone(),
            ..HttpConfig::new(http.address()?)
        })
    }

    /// Whether the files hold something else than what the publisher connects with. One that cannot be read now is no
    /// reason to give up what works.
    fn has_new_certificates(&self) -> bool {
        let Ok(target) = &self.target else { return false };
        self.tls.is_some() && read_tls(&target.certificates).is_ok_and(|read| self.tls != Some(read))
    }

    pub fn is_connected(&self) -> bool {
        self.status.state == "connected"
    }

    /// How many of its messages may be claimed and not settled: few while it has answered none since it went down.
    pub fn window(&self) -> usize {
        self.trust.window()
    }

    /// Hands a batch over; gives it back when there is no room or no connection.
    fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        match &self.publisher {
            Some(publisher) => publisher.try_publish(batch),
            None => Err(batch),
        }
    }

    /// Gives what is ready to the publisher, as fast as the destination may be sent to; the engine keeps the rest, in order,
    /// also while the publisher's queue is full.
    pub fn hand_over<P: Clone>(&self, engine: &mut Engine<P>, pace: &mut Pace, now_us: u64) {
        let room = pace.room(now_us).unwrap_or(usize::MAX);
        if room == 0 {
            return;
        }
        engine.hand_over(|mut now| {
            let mut later = now.split_off(room.min(now.len()));
            let count = now.len();
            match self.publish(now) {
                Ok(()) => pace.went(count),
                Err(refused) => later.splice(..0, refused).for_each(drop),
            }
            later
        });
    }

    /// Before each wait: so many confirms wake this worker, at most.
    pub fn listen(&self, confirms: usize) {
        if let Some(publisher) = &self.publisher {
            publisher.listen(confirms);
        }
    }

    /// Takes what the publisher has to say: outcomes are returned, states remembered. `died` is true when the thread is
    /// gone and whatever it held with it; also when its certificates were renewed, and another is to take its place.
    pub fn take(&mut self, now: Instant) -> (Outcomes, bool) {
        let Some(publisher) = &mut self.publisher else {
            return (Vec::new(), false);
        };
        let mut outcomes: Outcomes = Vec::new();
        let mut died = None;
        let mut is_down = false;
        for event in publisher.drain() {
            match event {
                Event::Outcomes(more) => outcomes.extend(more),
                Event::State(state) => {
                    is_down |= matches!(state, ConnectionState::Down { .. });
                    self.status = status_of(state);
                }
                Event::Died(why) => died = Some(why),
            }
        }
        let is_answered = |answered: &&Answered| !matches!(answered.outcome, Outcome::Lost { .. } | Outcome::TimedOut);
        self.trust.answered(outcomes.iter().filter(is_answered).count());
        if is_down || died.is_some() {
            self.trust.went_down();
        }
        if is_down && died.is_none() && self.has_new_certificates() {
            outcomes.extend(self.stop(Duration::from_millis(500)));
            self.next_start = now;
            return (outcomes, true);
        }
        let is_dead = died.is_some();
        if let Some(why) = died {
            self.stop(Duration::from_millis(100));
            self.next_start = now + RETRY_START;
            self.status = Status {
                state: "down",
                reason: Some("protocol"),
                detail: Some(format!("the publisher thread ended: {why}")),
            };
        }
        (outcomes, is_dead)
    }

    /// `stop` will be called, and shall not have to wait then.
    pub fn ask_to_stop(&self, limit: Duration) {
        if let Some(publisher) = &self.publisher {
            publisher.ask_to_stop(limit);
        }
    }

    /// Gives the connection up within `limit`; returns the last outcomes. Messages without one may have arrived or not.
    pub fn stop(&mut self, limit: Duration) -> Outcomes {
        let Some(mut publisher) = self.publisher.take() else {
            return Vec::new();
        };
        publisher.stop(limit);
        let last = publisher.drain().into_iter();
        last.flat_map(|event| {
            if let Event::Outcomes(outcomes) = event {
                outcomes
            } else {
                Vec::new()
            }
        })
        .collect()
    }
}

fn status_of(state: ConnectionState) -> Status {
    match state {
        ConnectionState::Connecting => Status {
            state: "connecting",
            reason: None,
            detail: None,
        },
        ConnectionState::Connected => Status {
            state: "connected",
            reason: None,
            detail: None,
        },
        ConnectionState::Unconfirmed {
            messages,
            seconds,
            is_alive,
        } => Status {
            state: "connected",
            reason: Some("unconfirmed"),
            detail: Some(format!(
                "{messages} unconfirmed for {seconds} s{}",
                if is_alive { ", though the broker answers" } else { "" }
            )),
        },
        ConnectionState::Blocked { reason } => Status {
            state: "blocked",
            reason: None,
            detail: Some(reason),
        },
        ConnectionState::Down { reason, detail } => {
            let reason = match reason {
                DownReason::Unreachable => "unreachable",
                DownReason::AuthRefused => "auth_refused",
                DownReason::VhostRefused => "vhost_refused",
                DownReason::ExchangeMissing => "exchange_missing",
                DownReason::ExchangeMismatch => "exchange_mismatch",
                DownReason::Timeout => "timeout",
                DownReason::TlsFailed => "tls_failed",
                DownReason::Protocol => "protocol",
                DownReason::Closed => "closed",
                DownReason::AddressRefused => "address_refused",
                DownReason::EndpointRefused => "endpoint_refused",
                DownReason::Throttled => "throttled",
                DownReason::Unavailable => "unavailable",
            };
            Status {
                state: "down",
                reason: Some(reason),
                detail: Some(detail),
            }
        }
    }
}

/// The first line of the file.
fn read_password(path: &str) -> Result<String, String> {
    const SETTING: &str = "outbox.password_file";
    let content = read_secret(SETTING, path)?;
    let text = String::from_utf8(content).map_err(|_| format!("{SETTING} {path} is not UTF-8"))?;
    match text.lines().next().map(str::trim_end) {
        Some(password) if !password.is_empty() => Ok(password.to_string()),
        _ => Err(format!("{SETTING} {path} is empty")),
    }
}

/// What the description names. Whether it can be used `Publisher::start` says.
fn read_tls(certificates: &Certificates) -> Result<Tls, String> {
    let client = match (&certificates.cert, &certificates.key) {
        (None, None) => None,
        (None, Some(key)) => {
            return Err(format!(
                "{} is set and {} is not",
                key.called("tls_key"),
                key.called("tls_cert")
            ));
        }
        (Some(cert), None) => {
            return Err(format!(
                "{} is set and {} is not",
                cert.called("tls_cert"),
                cert.called("tls_key")
            ));
        }
        (Some(cert), Some(key)) => Some(ClientCertificate {
            cert_pem: read_pem(cert, "tls_cert", read)?,
            key_pem: read_pem(key, "tls_key", read_secret)?,
        }),
    };
    Ok(Tls {
        ca_pem: (certificates.ca.as_ref())
            .map(|ca| read_pem(ca, "tls_ca", read))
            .transpose()?,
        client,
        server_name: None,
    })
}
fn read_pem(
    pem: &Pem,
    name: &str,
    read: impl FnOnce(&str, &str) -> Result<Vec<u8>, String>,
) -> Result<Vec<u8>, String> {
    match pem {
        Pem::File(path) => read(&pem.called(name), path),
        Pem::Given(text) => Ok(text.as_bytes().to_vec()),
    }
}

fn read(setting: &str, path: &str) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("cannot read {setting} {path}: {error}"))
}

/// The file must be ours alone, as core asks of a server key.
fn read_secret(setting: &str, path: &str) -> Result<Vec<u8>, String> {
    let meta = std::fs::metadata(path).map_err(|error| format!("cannot read {setting} {path}: {error}"))?;
    if meta.mode() & 0o077 != 0 {
        return Err(format!("{setting} {path} is open to group or others: chmod 600 it"));
    }
    read(setting, path)
}

/// Names the file or option that is at fault, which the transport does not know.
fn start_failure(error: &io::Error, certificates: &Certificates) -> String {
    let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>()) else {
        return format!("the publisher cannot start: {error}");
    };
    let (name, pem) = match tls.part {
        TlsPart::Ca => ("tls_ca", &certificates.ca),
        TlsPart::Certificate => ("tls_cert", &certificates.cert),
        TlsPart::Key => ("tls_key", &certificates.key),
        TlsPart::ServerName => return format!("the host of the URL {}", tls.problem),
    };
    match pem {
        Some(file @ Pem::File(path)) => format!("{} {path} {}", file.called(name), tls.problem),
        Some(given) => format!("{} {}", given.called(name), tls.problem),
        None => format!("the CAs of the system: {}", tls.problem),
    }
}
