//! Why messages cannot be sent to a destination: one word for the reason, and the detail.

use std::fmt;

outbox_core::words! {
    /// Why the connection is down. `Display` describes the cause in a phrase for the health view.
    pub enum DownReason {
        Unreachable = "unreachable",
        AuthRefused = "auth_refused",
        /// AMQP: the user has no permission to declare the exchange or to write to it.
        PermissionDenied = "permission_denied",
        VhostRefused = "vhost_refused",
        /// AMQP: a limit of connections of the broker, the virtual host or the user.
        ConnectionLimit = "connection_limit",
        ExchangeMissing = "exchange_missing",
        ExchangeMismatch = "exchange_mismatch",
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
            Self::AuthRefused => "the destination refuses the user or the password",
            Self::PermissionDenied => "the user lacks a permission on the exchange",
            Self::VhostRefused => "the virtual host does not exist, or the user may not access it",
            Self::ConnectionLimit => "a limit of connections is reached",
            Self::ExchangeMissing => "the exchange does not exist",
            Self::ExchangeMismatch => "the exchange exists with other properties",
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

/// Why the connection is down, or could not be opened.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) reason: DownReason,
    pub(crate) detail: String,
}

impl Fault {
    pub(crate) fn new(reason: DownReason, detail: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.detail)
    }
}
