//! Turns a claimed or received message into a message of the engine: ready, parked, or given back. Called by `claim`
//! and `receive`, on the worker's main thread.

use super::batch::Batch;
use super::rows::{Claimed, Settlement};
use super::under_way::ClaimedMessage;
use super::{CRASHES_MAX, Engine, Sharing};
use crate::key_order::{Admission, MessageHandle, OrderedKey};
use crate::memory_budget::MESSAGE_BYTES;
use crate::message::{Event, Outcome, Pointer, Publication};
use crate::open_transactions::OpenTransactions;
use crate::settle::{Disposition, Rules};

impl Engine {
    pub(super) fn admit(
        &mut self,
        batch: Batch,
        rules: &Rules,
        open_transactions: &OpenTransactions,
        make: &mut impl FnMut(MessageHandle, &Pointer, Event) -> Result<Publication, String>,
    ) {
        self.bound_keys(rules);
        for claimed in batch.rows {
            let seq = claimed.pointer.seq;
            let Some(key) = OrderedKey::of(&claimed.pointer, rules.ordering) else {
                let handle = self.take_in(claimed, rules, make);
                self.make_ready([handle], rules);
                continue;
            };
            if self.read_limits.is_behind_blocker(key.partition, seq) {
                self.give_back([claimed], "an earlier message of its partition failed"); // in the same claim
                continue;
            }
            let held = open_transactions.hold_back(&key, seq);
            match self.key_order.admit(self.next_handle, key, seq, held) {
                Admission::Go => {
                    let handle = self.take_in(claimed, rules, make);
                    self.make_ready([handle], rules);
                }
                Admission::Park => {
                    self.take_in(claimed, rules, make);
                }
                Admission::Wait => self.unsettled.push(Settlement {
                    row_id: claimed.row_id,
                    pointer: claimed.pointer,
                    disposition: Disposition::Wait,
                }),
            }
        }
    }

    /// Stores a claimed message together with what is sent for it, and returns its handle.
    pub(super) fn take_in(
        &mut self,
        claimed: Claimed,
        rules: &Rules,
        make: &mut impl FnMut(MessageHandle, &Pointer, Event) -> Result<Publication, String>,
    ) -> MessageHandle {
        let handle = self.next_handle;
        self.next_handle += 1;
        self.progress.claimed(handle);
        let Claimed { row_id, pointer, event } = claimed;
        self.may_expire |= pointer.expires_at_us.is_some();
        self.may_have_crashed |= pointer.crashes > 0;
        let order = OrderedKey::name_of(&pointer, rules.ordering);
        let ordered = order.is_some() && self.sharing == Sharing::Leases;
        let unsendable = |reason| Outcome::Unsendable { reason };
        let publication = match event {
            Ok(_) if pointer.crashes >= CRASHES_MAX => Err(unsendable(format!(
                "{} workers crashed while it was in flight, the last of them with this message alone",
                pointer.crashes
            ))),
            Ok(event) => make(handle, &pointer, event)
                .map(|publication| Publication {
                    key: order,
                    ..publication
                })
                .map_err(unsendable),
            Err(outcome) => Err(outcome),
        };
        let message = ClaimedMessage {
            row_id,
            pointer,
            memory: self
                .memory
                .take(publication.as_ref().map_or(MESSAGE_BYTES, Publication::bytes)),
            publication: Some(publication),
            ordered,
        };
        self.messages.insert(handle, message);
        handle
    }

    /// Makes messages ready that may be published now. A message that cannot be sent ends here.
    pub(super) fn make_ready(&mut self, handles: impl IntoIterator<Item = MessageHandle>, rules: &Rules) {
        for handle in handles {
            let Some(message) = self.messages.get(&handle) else {
                continue;
            };
            if message.ordered && !self.key_order.is_sent(handle) {
                continue; // held back, because a message before it ended in this loop
            }
            match &message.publication {
                Some(Ok(_)) if self.must_yield(handle) => self.yield_to_others(handle, rules),
                Some(Ok(_)) => self.ready.push_back(handle),
                Some(Err(outcome)) => self.end(handle, &outcome.clone(), rules, 0),
                None => {}
            }
        }
    }

    /// Releases claimed rows, so that a later claim reads them again in the same order.
    pub(super) fn give_back(&mut self, rows: impl IntoIterator<Item = Claimed>, reason: &str) {
        self.unsettled.extend(rows.into_iter().map(|claimed| Settlement {
            row_id: claimed.row_id,
            pointer: claimed.pointer,
            disposition: Disposition::Release { reason: reason.into() },
        }));
    }
}
