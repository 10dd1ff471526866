//! The request of a session, from its begin to its end. The worker calls it on its main thread, around
//! [`Engine::claim`].

use super::cursors::END;
use super::progress::{Progress, Request, Tally};
use super::{Engine, Sharing};
use crate::key_order::Handle;

impl<P: Clone> Engine<P> {
    pub fn begin_request(&mut self, request: Request) {
        self.progress = Progress {
            request: Some(request),
            from: self.next_handle,
            ..Progress::default()
        };
        self.due_at_ms = 0; // messages that are due by now belong to it
    }

    pub fn end_request(&mut self) {
        self.progress = Progress::default();
    }

    /// No message above this seq is claimed from now on; None = no limit.
    pub fn set_read_limit(&mut self, read_limit: Option<i64>) {
        self.progress.read_limit = read_limit.unwrap_or(END);
    }

    /// After a claim: whether that was all there is to claim for the request.
    pub fn after_claim(&mut self) {
        let all = match self.progress.request {
            None => return,
            Some(Request::Pass) => true,
            Some(Request::UpTo(seq)) => self.has_read_up_to(seq),
        };
        if all && self.progress.until.is_none() {
            self.progress.until = Some(self.next_handle);
        }
    }

    fn has_read_up_to(&self, seq: i64) -> bool {
        if self.sharing == Sharing::RowClaims {
            return !self.full;
        }
        let mut claimable = self.leases.iter().filter(|(p, _)| !self.leaving.contains(p));
        !self.drains && claimable.all(|(partition, _)| self.cursor(*partition) >= seq.min(self.read_limit(*partition)))
    }

    /// Whether all messages of the request have been claimed.
    pub fn has_claimed(&self) -> bool {
        self.progress.request.is_none() || self.progress.until.is_some()
    }

    /// Whether a message of the request, or one claimed before it, is in flight. A message that is kept back is not: it
    /// may stay so for any time.
    pub fn is_under_way(&self) -> bool {
        let until = self.progress.until.unwrap_or(Handle::MAX);
        self.messages.iter().any(|(handle, message)| {
            let kept_back = message.ordered && !self.key_order.is_sent(*handle);
            *handle < until && !kept_back
        })
    }

    pub fn tally(&self) -> Tally {
        self.progress.tally
    }
}
