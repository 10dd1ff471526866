//! Why a destination cannot be sent to, in one word and in detail.

use std::fmt;

outbox_core::words! {
    /// Why the connection is down. `Display` names the cause in words for a health view.
    pub enum DownReason {
        Unreachable = "unreachable",
        AuthRefused = "auth_refused",
        /// AMQP: the user may not declare or write the exchange.
        PermissionDenied = "permission_denied",
        VhostRefused = "vhost_refused",
        ExchangeMissing = "exchange_missing",
        ExchangeMismatch = "exchange_mismatch",
        Timeout = "timeout",
        TlsFailed = "tls_failed",
        Protocol = "protocol",
        Closed = "closed",
        /// HTTP: an address that is not public and not on the list.
        AddressRefused = "address_refused",
        /// HTTP: moved, missing, or not for messages.
        EndpointRefused = "endpoint_refused",
        /// HTTP: fewer requests, please.
        Throttled = "throttled",
        /// HTTP: not now.
        Unavailable = "unavailable",
    }
}

impl fmt::Display for DownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unreachable => "the destination cannot be reached",
            Self::AuthRefused => "the destination refuses the user or the password",
            Self::PermissionDenied => "the user lacks a permission on the exchange",
            Self::VhostRefused => "the virtual host is missing or closed to this user",
            Self::ExchangeMissing => "the exchange does not exist",
            Self::ExchangeMismatch => "the exchange exists with other properties",
            Self::Timeout => "the destination did not answer in time",
            Self::TlsFailed => "TLS failed",
            Self::Protocol => "the peer broke the protocol, or does not speak it",
            Self::Closed => "the connection was closed",
            Self::AddressRefused => "the address is not public, and not on the list of those that may be reached",
            Self::EndpointRefused => "the URL takes no messages",
            Self::Throttled => "the destination asks for fewer requests",
            Self::Unavailable => "the destination says that it is not available",
        })
    }
}

/// Why the connection is down, or could not be made.
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
