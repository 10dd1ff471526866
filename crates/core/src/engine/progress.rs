//! What a session asked the worker for, as the engine sees it: how far it may go for that, and what became of the messages
//! that it claimed.

use super::cursors::END;
use crate::key_order::Handle;
use crate::settle::Disposition;

/// What a session asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// One claim, and the end of what it brings.
    Pass,
    /// All that could go up to this seq, and its end.
    UpTo(i64),
}

/// Of the messages claimed for an errand: those that are neither published nor failed have not ended yet, or went back
/// untried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub claimed: u64,
    pub published: u64,
    pub failed: u64,
}

pub(super) struct Progress {
    pub request: Option<Request>,
    /// Nothing with a higher seq is claimed; END = no bound.
    pub read_limit: i64,
    /// What was due when the errand began has been brought back.
    pub brought: bool,
    /// What counts are handles from here
    pub from: Handle,
    /// up to, not including, here; None while it still claims.
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
    /// With a bound to its reach only once: what fails meanwhile is not to be tried again under the same errand.
    pub fn brings_due(&self) -> bool {
        self.read_limit == END || !self.brought
    }

    /// Nothing is asked for, and nothing is out of reach.
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
