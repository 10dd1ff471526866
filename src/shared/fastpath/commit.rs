//! The end of a transaction that has messages for the fast path. Run by a session, in the callbacks of its transaction. An error
//! in `lay_down` does not stop the COMMIT. After COMMIT nothing here allocates or raises.

use super::parcel::Parcel;
use super::slot;
use crate::pg::xact;
use crate::shared::databases::Database;

/// Before COMMIT: the messages lie there before any other process can see their rows.
pub fn lay_down(parcels: &mut [Parcel]) {
    if !xact::commits_durably() {
        return;
    }
    for parcel in parcels {
        // A row that was changed since is read from the table.
        if parcel.row.is_current() && parcel.event.is_current() {
            parcel.place = slot::lay_down(parcel);
        }
    }
}

/// After COMMIT: the workers of their lanes may take them, or are told to look for the rows.
pub fn hand_over(database: &Database, parcels: &mut [Parcel]) {
    for parcel in parcels {
        let place = parcel.place.take();
        if !place.is_some_and(|place| slot::ready(place, parcel.class, parcel.partition)) {
            database.reopen(parcel.class, parcel.partition, parcel.seq);
        }
    }
}

/// The transaction is over. What lies there still was not committed.
pub fn take_back(parcels: &mut [Parcel]) {
    parcels
        .iter_mut()
        .filter_map(|parcel| parcel.place.take())
        .for_each(slot::free);
}
