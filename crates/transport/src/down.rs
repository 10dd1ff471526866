//! Why messages cannot be sent to a destination: one word for the reason, and the detail.

use outbox_core::finding::Finding;
use outbox_core::words::Word;
use std::fmt;
use std::io;
use std::net::SocketAddr;

outbox_core::words! {
    /// Why the connection is down. `Display` describes the cause in a phrase for the health view.
    pub enum DownReason {
        Unreachable = "unreachable",
        /// The process of the worker, or its machine, has no descriptor, thread or port left. Says nothing about the
        /// peer.
        ProcessLimit = "process_limit",
        AuthRefused = "auth_refused",
        /// AMQP: the user has no permission to declare the exchange or to write to it.
        PermissionDenied = "permission_denied",
        VhostRefused = "vhost_refused",
        /// AMQP: a limit of connections of the broker, the virtual host or the user.
        ConnectionLimit = "connection_limit",
        ExchangeMissing = "exchange_missing",
        ExchangeMismatch = "exchange_mismatch",
        /// AMQP: the broker has no such type of exchange, for example because a plugin is not enabled.
        ExchangeTypeUnknown = "exchange_type_unknown",
        /// AMQP: each message is refused (`basic.nack`) by a queue, for example a full one.
        QueueRefused = "queue_refused",
        Timeout = "timeout",
        TlsFailed = "tls_failed",
        Protocol = "protocol",
        Closed = "closed",
        /// The address is neither public nor on the allow list.
        AddressRefused = "address_refused",
        /// HTTP: the URL has moved, does not exist, or does not accept messages.
        EndpointRefused = "endpoint_refused",
        /// HTTP: the receiver limits the rate of requests.
        Throttled = "throttled",
        /// HTTP: the receiver is temporarily unavailable.
        Unavailable = "unavailable",
    }
}

impl fmt::Display for DownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unreachable => "the destination cannot be reached",
            Self::ProcessLimit => "a limit of the worker's process is reached",
            Self::AuthRefused => "the destination refuses the user or the password",
            Self::PermissionDenied => "the user lacks a permission on the exchange",
            Self::VhostRefused => "the virtual host does not exist, or the user may not access it",
            Self::ConnectionLimit => "a limit of connections is reached",
            Self::ExchangeMissing => "the exchange does not exist",
            Self::ExchangeMismatch => "the exchange exists with other properties",
            Self::ExchangeTypeUnknown => "the broker does not know the type of the exchange",
            Self::QueueRefused => "a queue refuses the messages",
            Self::Timeout => "the destination did not answer in time",
            Self::TlsFailed => "TLS failed",
            Self::Protocol => "the peer violated the protocol, or speaks another one",
            Self::Closed => "the connection was closed",
            Self::AddressRefused => "the address is not public, and outbox.http_allow does not list it",
            Self::EndpointRefused => "the URL does not accept messages",
            Self::Throttled => "the destination asks for fewer requests",
            Self::Unavailable => "the destination reports that it is not available",
        })
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
                DownReason::ProcessLimit,
                format!("no port is left for a connection to {to}: {error}"),
            ),
            _ => Self::of_call(otherwise, error, &to.to_string()),
        }
    }

    /// The fault of a system call that failed: `otherwise`, unless a limit on our side is the cause.
    pub(crate) fn of_call(otherwise: DownReason, error: &io::Error, what: &str) -> Self {
        match limit_of(error) {
            Some(limit) => Self::new(DownReason::ProcessLimit, format!("{limit}: {what}: {error}")),
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
        Err(ours) if limit_of(&ours).is_some() => Fault::of_call(DownReason::Unreachable, &ours, what),
        _ => Fault::of_call(DownReason::Unreachable, error, what),
    }
}

/// A fault passes through ureq as an error of the connection.
impl std::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.finding.detail)
    }
}
