//! Why messages cannot be sent to a destination: one word for the reason, and what is known of the cause.

use outbox_core::finding::Finding;
use std::fmt;
use std::io;
use std::net::SocketAddr;

/// Why a connection is down: a word for the column `reason`, and a phrase for the log. A kind of destination has its own in
/// addition to these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DownReason {
    name: &'static str,
    phrase: &'static str,
}

impl DownReason {
    pub const UNREACHABLE: Self = Self::new("unreachable", "the destination cannot be reached");
    /// The process of the worker, or its machine, has no descriptor, thread or port left. Says nothing about the peer.
    pub const PROCESS_LIMIT: Self = Self::new("process_limit", "a limit of the worker's process is reached");
    pub const AUTH_REFUSED: Self = Self::new("auth_refused", "the destination refuses the user or the password");
    pub const PERMISSION_DENIED: Self = Self::new("permission_denied", "the user lacks a permission");
    pub const CONNECTION_LIMIT: Self = Self::new("connection_limit", "a limit of connections is reached");
    /// Each message is refused by a queue, for example a full one.
    pub const QUEUE_REFUSED: Self = Self::new("queue_refused", "a queue refuses the messages");
    pub const TIMEOUT: Self = Self::new("timeout", "the destination did not answer in time");
    pub const TLS_FAILED: Self = Self::new("tls_failed", "TLS failed");
    pub const PROTOCOL: Self = Self::new("protocol", "the peer violated the protocol, or speaks another one");
    pub const CLOSED: Self = Self::new("closed", "the connection was closed");
    /// The address is neither public nor on the allow list.
    pub const ADDRESS_REFUSED: Self = Self::new(
        "address_refused",
        "the address is not public, and outbox.http_allow does not list it",
    );

    /// Those of all kinds.
    pub const ALL: [Self; 11] = [
        Self::UNREACHABLE,
        Self::PROCESS_LIMIT,
        Self::AUTH_REFUSED,
        Self::PERMISSION_DENIED,
        Self::CONNECTION_LIMIT,
        Self::QUEUE_REFUSED,
        Self::TIMEOUT,
        Self::TLS_FAILED,
        Self::PROTOCOL,
        Self::CLOSED,
        Self::ADDRESS_REFUSED,
    ];

    pub const fn new(name: &'static str, phrase: &'static str) -> Self {
        Self { name, phrase }
    }

    pub fn name(self) -> &'static str {
        self.name
    }
}

impl fmt::Display for DownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.phrase)
    }
}

/// The code of a fault: a message was sent, and its answer has not come in time.
pub(crate) const NO_ANSWER: &str = "no_answer";

/// Why the connection is down, or could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub reason: DownReason,
    /// Its code is the name of the reason, unless the cause is known better.
    pub finding: Finding,
}

impl Fault {
    pub(crate) fn new(reason: DownReason, detail: impl Into<String>) -> Self {
        Self::coded(reason, reason.name(), detail)
    }

    /// A fault whose cause is known better than its reason says.
    pub(crate) fn coded(reason: DownReason, code: &'static str, detail: impl Into<String>) -> Self {
        let finding = Finding::new(code, detail);
        Self { reason, finding }
    }

    /// The same, with more in its detail.
    pub(crate) fn detailed(mut self, detail: impl FnOnce(&str) -> String) -> Self {
        self.finding.detail = detail(&self.finding.detail);
        self
    }

    /// The fault of a connect that failed. An IPv4 address is always there: what is not available is a port of ours.
    pub(crate) fn of_connect(otherwise: DownReason, error: &io::Error, to: SocketAddr) -> Self {
        match error.kind() {
            io::ErrorKind::AddrNotAvailable if to.is_ipv4() => Self::new(
                DownReason::PROCESS_LIMIT,
                format!("no port is left for a connection to {to}: {error}"),
            ),
            _ => Self::of_call(otherwise, error, &to.to_string()),
        }
    }

    /// The fault of a system call that failed: `otherwise`, unless a limit on our side is the cause.
    pub(crate) fn of_call(otherwise: DownReason, error: &io::Error, what: &str) -> Self {
        match limit_of(error) {
            Some(limit) => Self::new(DownReason::PROCESS_LIMIT, format!("{limit}: {what}: {error}")),
            None => Self::new(otherwise, format!("{what}: {error}")),
        }
    }
}

/// What this process or its machine has no more of, if that is what the error says.
pub(crate) fn limit_of(error: &io::Error) -> Option<&'static str> {
    Some(match error.raw_os_error()? {
        libc::EMFILE => "the worker's process has no file descriptor left",
        libc::ENFILE => "the machine has no file descriptor left",
        // For a socket that connects: all ports are in use.
        libc::EAGAIN => "the worker's process may start no more threads, or no port is left",
        libc::ENOMEM | libc::ENOBUFS => "the machine has no memory left",
        _ => return None,
    })
}

/// The limit that a name lookup ran into, if this process cannot even open a descriptor: the error of a lookup names
/// no cause.
pub(crate) fn lookup_fault(error: &io::Error) -> Fault {
    let what = "cannot resolve the host";
    match std::fs::File::open("/dev/null") {
        Err(ours) if limit_of(&ours).is_some() => Fault::of_call(DownReason::UNREACHABLE, &ours, what),
        _ => Fault::of_call(DownReason::UNREACHABLE, error, what),
    }
}

/// A fault passes through ureq as an error of the connection.
impl std::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.finding.detail)
    }
}
