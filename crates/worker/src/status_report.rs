//! What a worker reports of a destination's connection: which state, and when it is news. `destination` calls it on the
//! worker's thread.

use crate::runtime::Runtime;
use crate::status::{ConnectionStatus, State, StatusReason};
use outbox_core::words::Word;
use outbox_transport::kind::Kind;
use std::time::Instant;

pub struct StatusReport {
    /// The last reported status.
    pub reported: Option<ConnectionStatus>,
    /// When the reported state last changed.
    pub since: Instant,
    /// Whether a session requested a recheck of the connection.
    pub wants_recheck: bool,
    /// When this worker received the request for a recheck, in µs since 1970. Until it is answered, the next known
    /// state is reported even if it is the old one.
    requested_at_us: Option<i64>,
}

impl StatusReport {
    pub fn new(now: Instant) -> Self {
        Self {
            reported: None,
            since: now,
            wants_recheck: false,
            requested_at_us: None,
        }
    }

    /// Whether a session waits for the result of a recheck.
    pub fn is_awaited(&self) -> bool {
        self.wants_recheck || self.requested_at_us.is_some()
    }

    /// A session requested a recheck.
    pub fn request_recheck(&mut self, now_us: i64) {
        self.wants_recheck = true;
        self.requested_at_us = Some(now_us);
    }

    /// Reports `status` if it is news, and returns whether it is; outbox_health shows it.
    pub fn report<R: Runtime>(
        &mut self,
        runtime: &R,
        destination: &str,
        status: ConnectionStatus,
        kind: &Kind,
    ) -> Result<bool, R::Error> {
        // Between two failed attempts the reason of the failure says more than "connecting".
        let is_trying_again =
            status.state == State::Connecting && self.reported.as_ref().is_some_and(|r| r.state == State::Down);
        let is_known = !status.state.is_undecided();
        let requested_at_us = self.requested_at_us.filter(|_| is_known);
        let is_new = self.reported.as_ref() != Some(&status);
        if is_trying_again || (!is_new && requested_at_us.is_none()) {
            return Ok(false);
        }
        runtime.report(destination, Some(&status), requested_at_us)?;
        self.requested_at_us = self.requested_at_us.filter(|_| !is_known);
        if is_new && status.state.is_failure() {
            let detail = status.detail().unwrap_or_default();
            let reason = status.reason.map_or(status.state.name(), StatusReason::name);
            runtime.record_error(destination, reason, detail);
        }
        let before = self.reported.replace(status.clone());
        if before.as_ref().is_none_or(|before| before.state != status.state) {
            self.since = runtime.now();
        }
        let waits = Some(StatusReason::Memory);
        let is_logged = before.is_some_and(|before| {
            (before.state, before.reason) == (status.state, status.reason)
                || before.reason == waits && status.state == State::Connected
        });
        // Many destinations may wait for memory, again and again.
        if !is_logged && status.state != State::Connecting && status.reason != waits {
            match (status.reason, status.detail()) {
                (Some(StatusReason::Standby), Some(awaited)) => {
                    runtime.log(Some(destination), format_args!("{awaited}"))
                }
                _ => runtime.log(Some(destination), format_args!("{} {}", kind.peer, status.in_words())),
            }
        }
        Ok(true)
    }
}
