//! What a session asked for, from its begin to its end. Called by the worker's main thread, around [`Engine::claim`].

use super::asked::{Asked, Errand, Tally};
use super::marks::END;
use super::{Engine, Sharing};
use crate::gate::Handle;

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
