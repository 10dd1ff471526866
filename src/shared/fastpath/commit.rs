//! The end of a transaction that has messages for the fast path. Run by a session, in the callbacks of its transaction.
//! An error in `copy_to_slot` does not stop the COMMIT. After COMMIT nothing here allocates or raises an error.

use super::handoff::Handoff;
use super::slot;
use crate::pg::xact;
use crate::shared::databases::DatabaseEntry;

/// Before COMMIT: copies the messages into slots before any other process can see their rows.
pub fn copy_to_slot(handoffs: &mut [Handoff]) {
    if !xact::commits_durably() {
        return;
    }
    for handoff in handoffs {
        // A row that was changed since is read from the table.
        if handoff.row.is_current() && handoff.event.is_current() {
            handoff.slot_id = slot::copy_to_slot(handoff);
        }
    }
}

/// After COMMIT: marks the slots ready for the workers of their lanes, or rewinds the lanes so that the workers read
/// the rows.
pub fn hand_over(database: &DatabaseEntry, handoffs: &mut [Handoff]) {
    for handoff in handoffs {
        let slot_id = handoff.slot_id.take();
        if !slot_id.is_some_and(|slot_id| slot::ready(slot_id, handoff.class, handoff.partition)) {
            database.rewind_to(handoff.class, handoff.partition, handoff.seq);
        }
    }
}

/// Frees the slots that are left when the transaction is over: their messages were not committed.
pub fn take_back(handoffs: &mut [Handoff]) {
    handoffs
        .iter_mut()
        .filter_map(|handoff| handoff.slot_id.take())
        .for_each(slot::free);
}
