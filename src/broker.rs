//! The worker's end of the publisher: starts it with what the settings say, and puts its state into the words that
//! outbox_workers and outbox_health show. Main thread; no Postgres here but the settings.

use outbox_transport::target::{Password, Target, Transport};
use outbox_transport::{
    AmqpConfig, Bell, ConnectionState, Deadline, DownReason, Event, Outcome, Publication, Publisher, Secret,
};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// How often a publisher that could not start (no url, no password file) is tried again.
const RETRY_START: Duration = Duration::from_secs(1);

/// Until when this process may publish: no longer than its leases last.
pub static DEADLINE: LazyLock<Deadline> = LazyLock::new(Deadline::default);

/// What is known of the broker, as outbox_report takes it.
#[derive(Clone, PartialEq, Debug)]
pub struct Status {
    pub state: &'static str,
    pub reason: Option<&'static str>,
    pub detail: Option<String>,
}

/// What the broker said, by the handle of the message.
pub type Outcomes = Vec<(u64, Outcome)>;

pub struct Broker {
    /// Or why there is none.
    target: Result<Target, String>,
    connection_name: String,
    bell: Bell,
    publisher: Option<Publisher>,
    next_start: Instant,
    pub status: Status,
}

impl Broker {
    pub fn new(target: Result<Target, String>, connection_name: String, bell: Bell) -> Self {
        let status = Status {
            state: "starting",
            reason: None,
            detail: None,
        };
        Self {
            target,
            connection_name,
            bell,
            publisher: None,
            next_start: Instant::now(),
            status,
        }
    }

    /// Takes over new settings: if any differs, the connection is given up and made anew. Returns the last outcomes of
    /// the old one, or None if it goes on.
    pub fn reconfigure(&mut self, target: Result<Target, String>) -> Option<Outcomes> {
        // Refused for its password: the file may say another one now.
        if target == self.target && self.status.reason != Some("auth_refused") {
            return None;
        }
        self.target = target;
        self.next_start = Instant::now();
        Some(self.stop(Duration::from_millis(500)))
    }

    /// Starts the publisher if there is none and there can be one.
    pub fn ensure(&mut self, now: Instant) {
        if self.publisher.is_some() || now < self.next_start {
            return;
        }
        match self.start() {
            Ok(publisher) => {
                self.publisher = Some(publisher);
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

    fn start(&self) -> Result<Publisher, String> {
        let target = self.target.as_ref().map_err(String::clone)?;
        let Transport::Amqp(amqp) = &target.transport;
        let address = amqp.address()?;
        let password = match &amqp.password {
            Password::Default => Secret::new("guest"), // the protocol's, as is the user
            Password::Known(password) => password.clone(),
            Password::File(path) => Secret::new(read_password(Path::new(path))?),
        };
        let config = AmqpConfig {
            exchange: amqp.exchange.to_string(),
            exchange_type: amqp.exchange_type.clone(),
            connect_timeout: target.connect_timeout,
            confirm_timeout: target.confirm_timeout,
            connection_name: self.connection_name.clone(),
            deadline: DEADLINE.clone(),
            ..AmqpConfig::new(address, password)
        };
        Publisher::start(config, self.bell.clone()).map_err(|error| format!("the publisher cannot start: {error}"))
    }

    pub fn is_connected(&self) -> bool {
        self.status.state == "connected"
    }

    /// Hands a batch over; gives it back when there is no room or no connection.
    pub fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        match &self.publisher {
            Some(publisher) => publisher.try_publish(batch),
            None => Err(batch),
        }
    }

    /// Takes what the publisher has to say: outcomes are returned, states remembered. `died` is true when the thread is
    /// gone and whatever it held with it.
    pub fn take(&mut self, now: Instant) -> (Outcomes, bool) {
        let Some(publisher) = &mut self.publisher else {
            return (Vec::new(), false);
        };
        let mut outcomes = Vec::new();
        let mut died = None;
        for event in publisher.drain() {
            match event {
                Event::Outcomes(more) => outcomes.extend(more),
                Event::State(state) => self.status = status_of(state),
                Event::Died(why) => died = Some(why),
            }
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
            };
            Status {
                state: "down",
                reason: Some(reason),
                detail: Some(detail),
            }
        }
    }
}

/// The first line of the file. It must be ours alone, as core asks of a server key.
fn read_password(path: &Path) -> Result<String, String> {
    let shown = path.display();
    let meta = std::fs::metadata(path).map_err(|error| format!("cannot read outbox.password_file {shown}: {error}"))?;
    if meta.mode() & 0o077 != 0 {
        return Err(format!(
            "outbox.password_file {shown} is open to group or others: chmod 600 it"
        ));
    }
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("cannot read outbox.password_file {shown}: {error}"))?;
    match text.lines().next().map(str::trim_end) {
        Some(password) if !password.is_empty() => Ok(password.to_string()),
        _ => Err(format!("outbox.password_file {shown} is empty")),
    }
}
