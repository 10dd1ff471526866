//! The request of a session, from its start to its end. Called by the worker's main thread around [`Engine::claim`].

use super::cursors::END;
use super::progress::{Request, RequestProgress, Tally};
use super::{Engine, Sharing};
use crate::key_order::MessageHandle;

impl Engine {
    /// Starts a request: messages claimed from now on count for it.
    pub fn begin_request(&mut self, request: Request) {
        self.progress = RequestProgress {
            request: Some(request),
            from: self.next_handle,
            ..RequestProgress::default()
        };
        self.send_yielding(|_| true); // the request waits for them
    }

    /// Drops the request and its read limit.
    pub fn end_request(&mut self) {
        self.progress = RequestProgress::default();
    }

    /// Sets the seq above which nothing is claimed from now on; None = no limit.
    pub fn set_read_limit(&mut self, read_limit: Option<i64>) {
        self.progress.read_limit = read_limit.unwrap_or(END);
    }

    /// Called after a claim. Ends the claims of the request once all its messages have been claimed.
    pub fn after_claim(&mut self) {
        let all = match self.progress.request {
            None => return,
            Some(Request::Pass) => true,
            Some(Request::UpTo(seq) | Request::OnTo(seq)) => self.has_read_up_to(seq),
        };
        if all && self.progress.until.is_none() {
            self.progress.until = Some(self.next_handle);
        }
    }

    /// Whether all claimable lanes have been read up to `seq`, or up to their read limits.
    fn has_read_up_to(&self, seq: i64) -> bool {
        if self.sharing == Sharing::RowClaims {
            return !self.full;
        }
        let mut claimable = self.leases.iter().filter(|(p, _)| !self.leaving.contains(p));
        !self.drains && claimable.all(|(partition, _)| self.cursor(*partition) >= seq.min(self.read_limit(*partition)))
    }

    /// Whether all messages of the request have been claimed. Also true without a request.
    pub fn has_claimed(&self) -> bool {
        self.progress.request.is_none() || self.progress.until.is_some()
    }

    /// Whether a message of the request, or one claimed before it, has not ended and is not parked. A parked message
    /// does not count, because the engine cannot know how long it waits.
    pub fn is_under_way(&self) -> bool {
        let until = self.progress.until.unwrap_or(MessageHandle::MAX);
        self.messages.iter().any(|(handle, message)| {
            let is_parked = message.ordered && !self.key_order.is_sent(*handle);
            *handle < until && !is_parked
        })
    }

    /// The outcomes of the request so far.
    pub fn tally(&self) -> Tally {
        self.progress.tally
    }
}
