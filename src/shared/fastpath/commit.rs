//! The end of a transaction that has messages for the fast path: they are laid down before COMMIT, handed over after it, and
//! taken back if there was none. In a user's backend, called by the callbacks of its transaction: `lay_down` may fail, and the
//! transaction commits all the same; from COMMIT on nothing here may allocate or raise.

use super::parcel::Parcel;
use super::slot;
use crate::pg::xact;
use crate::shared::databases::Database;

/// What this transaction has enqueued lies there before anybody can see its rows.
pub fn lay_down(parcels: &mut [Parcel]) {
    if !xact::commits_durably() {
        return;
    }
    for parcel in parcels {
        // What was changed since is read from the table.
        if parcel.row.is_current() && parcel.event.is_current() {
            parcel.place = slot::lay_down(parcel);
        }
    }
}

/// After Committed: whoever reads their lanes may take them, or shall look for the rows.
pub fn hand_over(database: &Database, parcels: &mut [Parcel]) {
    for parcel in parcels {
        let place = parcel.place.take();
        if !place.is_some_and(|place| slot::ready(place, parcel.class, parcel.partition)) {
            database.reopen(parcel.class, parcel.partition, parcel.seq);
        }
    }
}

/// The transaction is over, and what lies there still did not commit.
pub fn take_back(parcels: &mut [Parcel]) {
    parcels
        .iter_mut()
        .filter_map(|parcel| parcel.place.take())
        .for_each(slot::free);
}
