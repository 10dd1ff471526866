//! What is known of a connection, in the words that outbox_workers and outbox_health show.

use outbox_transport::{ConnectionState, DownReason};

/// What is known of the connection, as outbox_internal.report takes it.
#[derive(Clone, PartialEq, Debug)]
pub struct Status {
    pub state: &'static str,
    pub reason: Option<&'static str>,
    pub detail: Option<String>,
}

impl Status {
    /// A state that needs no reason.
    pub fn plain(state: &'static str, detail: Option<String>) -> Self {
        Self {
            state,
            reason: None,
            detail,
        }
    }

    pub fn down(reason: &'static str, detail: String) -> Self {
        Self {
            state: "down",
            reason: Some(reason),
            detail: Some(detail),
        }
    }

    pub fn of(state: ConnectionState) -> Self {
        match state {
            ConnectionState::Connecting => Self::plain("connecting", None),
            ConnectionState::Connected => Self::plain("connected", None),
            ConnectionState::Unconfirmed {
                messages,
                seconds,
                is_alive,
            } => Self {
                state: "connected",
                reason: Some("unconfirmed"),
                detail: Some(format!(
                    "{messages} unconfirmed for {seconds} s{}",
                    if is_alive { ", though the broker answers" } else { "" }
                )),
            },
            ConnectionState::Blocked { reason } => Self::plain("blocked", Some(reason)),
            ConnectionState::Down { reason, detail } => Self::down(name_of(reason), detail),
        }
    }
}

fn name_of(reason: DownReason) -> &'static str {
    match reason {
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
    }
}
