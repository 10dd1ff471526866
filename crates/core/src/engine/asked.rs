//! What a session asked the worker for, as the engine sees it: how far it may go for that, and what became of the messages
//! that it claimed. Called by the worker's main thread, around [`Engine::claim`].

use super::{END, Engine, Sharing};
use crate::gate::Handle;
use crate::settle::Disposition;

/// What a session asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errand {
    /// One claim, and the end of what it brings.
    Tick,
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

pub(super) struct Asked {
    errand: Option<Errand>,
    /// Nothing with a higher seq is claimed; END = no bound.
    pub reach: i64,
    /// What was due when the errand began has been brought back.
    pub brought: bool,
    /// What counts are handles from here
    from: Handle,
    /// up to, not including, here; None while it still claims.
    until: Option<Handle>,
    tally: Tally,
}

impl Default for Asked {
    fn default() -> Self {
        Self {
            errand: None,
            reach: END,
            brought: false,
            from: 0,
            until: None,
            tally: Tally::default(),
        }
    }
}

impl Asked {
    /// With a bound to its reach only once: what fails meanwhile is not to be tried again under the same errand.
    pub fn brings_due(&self) -> bool {
        self.reach == END || !self.brought
    }

    /// Nothing is asked for, and nothing is out of reach.
    pub fn is_unbounded(&self) -> bool {
        self.errand.is_none() && self.reach == END
    }

    fn counts(&self, handle: Handle) -> bool {
        self.errand.is_some() && handle >= self.from && self.until.is_none_or(|until| handle < until)
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

impl<P: Clone> Engine<P> {
    pub fn begin_errand(&mut self, errand: Errand) {
        self.asked = Asked {
            errand: Some(errand),
            from: self.next_handle,
            ..Asked::default()
        };
        self.due_at_ms = 0; // what is due by now belongs to it
    }

    pub fn end_errand(&mut self) {
        self.asked = Asked::default();
    }

    /// Nothing above this seq is claimed from now on; None = no bound.
    pub fn set_reach(&mut self, reach: Option<i64>) {
        self.asked.reach = reach.unwrap_or(END);
    }

    /// After a claim: whether that was all there is to claim for the errand.
    pub fn note_claim(&mut self) {
        let all = match self.asked.errand {
            None => return,
            Some(Errand::Tick) => true,
            Some(Errand::UpTo(seq)) => self.has_read_up_to(seq),
        };
        if all && self.asked.until.is_none() {
            self.asked.until = Some(self.next_handle);
        }
    }

    fn has_read_up_to(&self, seq: i64) -> bool {
        if self.sharing == Sharing::RowClaims {
            return !self.full;
        }
        let mut claimable = self.leases.iter().filter(|(p, _)| !self.leaving.contains(p));
        !self.drains && claimable.all(|(partition, _)| self.mark(*partition) >= seq.min(self.reach(*partition)))
    }

    /// Whether all has been claimed that the errand asks for.
    pub fn has_claimed(&self) -> bool {
        self.asked.errand.is_none() || self.asked.until.is_some()
    }

    /// Whether a message of the errand, or one claimed before it, is on its way. One that is kept back is not: nobody
    /// knows for how long.
    pub fn is_under_way(&self) -> bool {
        let until = self.asked.until.unwrap_or(Handle::MAX);
        self.messages.iter().any(|(handle, message)| {
            let kept_back = message.ordered && !self.gates.is_sent(*handle);
            *handle < until && !kept_back
        })
    }

    pub fn tally(&self) -> Tally {
        self.asked.tally
    }
}
