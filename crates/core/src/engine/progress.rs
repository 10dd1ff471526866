//! The request of a session as the engine sees it: the seq up to which it claims, and the outcomes of the messages that
//! it claimed. Written and read by the engine on the worker's main thread.

use super::cursors::END;
use crate::key_order::MessageHandle;
use crate::settle::Disposition;

/// What a session requests from the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// One claim. The request ends when its messages have ended.
    Pass,
    /// All claimable messages up to this seq. The request ends when they have ended.
    UpTo(i64),
    /// The same, after a request of the same delivery by hand: what failed, or was down, then is left alone.
    OnTo(i64),
}

impl Request {
    /// Whether it goes on with what another request began.
    pub fn goes_on(self) -> bool {
        matches!(self, Self::OnTo(_))
    }
}

/// Number of messages that were claimed for a request, by outcome. Messages that are neither published nor failed have
/// not ended yet, or were released without an attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub claimed: u64,
    pub published: u64,
    pub failed: u64,
}

/// The state of the current request.
pub(super) struct RequestProgress {
    pub request: Option<Request>,
    /// Messages with a higher seq are not claimed; END = no limit.
    pub read_limit: i64,
    /// The first handle that counts for the request.
    pub from: MessageHandle,
    /// The first handle that no longer counts for the request; None while the request still claims.
    pub until: Option<MessageHandle>,
    pub tally: Tally,
}

impl Default for RequestProgress {
    fn default() -> Self {
        Self {
            request: None,
            read_limit: END,
            from: 0,
            until: None,
            tally: Tally::default(),
        }
    }
}

impl RequestProgress {
    /// Whether there is neither a request nor a read limit.
    pub fn is_unbounded(&self) -> bool {
        self.request.is_none() && self.read_limit == END
    }

    fn counts(&self, handle: MessageHandle) -> bool {
        self.request.is_some() && handle >= self.from && self.until.is_none_or(|until| handle < until)
    }

    pub fn claimed(&mut self, handle: MessageHandle) {
        self.tally.claimed += u64::from(self.counts(handle));
    }

    pub fn on_end(&mut self, handle: MessageHandle, disposition: &Disposition) {
        if !self.counts(handle) {
            return;
        }
        match disposition {
            Disposition::Publish => self.tally.published += 1,
            Disposition::Retry { .. }
            | Disposition::Defer { .. }
            | Disposition::Dead { .. }
            | Disposition::Discard { .. }
            | Disposition::Expire => self.tally.failed += 1,
            Disposition::Release { .. } | Disposition::Wait => {}
        }
    }
}
