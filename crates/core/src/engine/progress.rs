//! The request of a session to the worker, as the engine sees it: how far it may read for it, and the outcomes of the
//! messages that it claimed.

use super::cursors::END;
use crate::key_order::Handle;
use crate::settle::Disposition;

/// The request of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// One claim, and the end of the messages that it brings.
    Pass,
    /// All messages up to this seq that could be delivered, and their end.
    UpTo(i64),
}

/// The messages claimed for a request: those that are neither published nor failed have not ended yet, or were released
/// untried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub claimed: u64,
    pub published: u64,
    pub failed: u64,
}

pub(super) struct Progress {
    pub request: Option<Request>,
    /// No message with a higher seq is claimed; END = no limit.
    pub read_limit: i64,
    /// Messages that were due when the request began have been brought back.
    pub brought: bool,
    /// Handles from this one on count
    pub from: Handle,
    /// up to this one, exclusive; None while it still claims.
    pub until: Option<Handle>,
    pub tally: Tally,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            request: None,
            read_limit: END,
            brought: false,
            from: 0,
            until: None,
            tally: Tally::default(),
        }
    }
}

impl Progress {
    /// With a read limit only once: messages that fail meanwhile must not be tried again under the same request.
    pub fn brings_due(&self) -> bool {
        self.read_limit == END || !self.brought
    }

    /// There is no request, and no seq is beyond the read limit.
    pub fn is_unbounded(&self) -> bool {
        self.request.is_none() && self.read_limit == END
    }

    fn counts(&self, handle: Handle) -> bool {
        self.request.is_some() && handle >= self.from && self.until.is_none_or(|until| handle < until)
    }

    pub fn claimed(&mut self, handle: Handle) {
        self.tally.claimed += u64::from(self.counts(handle));
    }

    pub fn ended(&mut self, handle: Handle, disposition: &Disposition) {
        if !self.counts(handle) {
            return;
        }
        match disposition {
            Disposition::Publish => self.tally.published += 1,
            Disposition::Retry { .. } | Disposition::Dead { .. } | Disposition::Expire => self.tally.failed += 1,
            Disposition::Release { .. } | Disposition::Wait => {}
        }
    }
}
