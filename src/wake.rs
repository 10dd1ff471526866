//! From enqueue to the worker: remembers in this backend what the transaction has enqueued, and at commit tells the
//! workers and wakes them, once. Called by the enqueue functions and by the end of each transaction; main thread.
//!
//! COMMIT PREPARED wakes nobody: the transaction was forgotten at PREPARE, and may be committed by another session. The
//! safety poll of the workers finds its messages within a second.

use crate::faults::Fault;
use crate::pg::tid::Tid;
use crate::pg::xact::{self, End};
use crate::shmem::Class;
use crate::store::now_us;
use crate::{asks, capture, express, faults, figures, registry, shmem};
use outbox_core::engine::Place;
use outbox_core::minutes::Took;
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

thread_local! {
    /// (savepoint, messages enqueued in it)
    static ENQUEUED: RefCell<Vec<(u32, i64)>> = const { RefCell::new(Vec::new()) };
    /// (savepoint, destination by its number, how many more of its messages wait)
    static PENDING: RefCell<Vec<(u32, (u64, i64))>> = const { RefCell::new(Vec::new()) };
    /// The lowest seq in each lane, whether or not its savepoint lasts: too low a seq costs a look.
    static LOWS: RefCell<BTreeMap<(Class, Partition), i64>> = const { RefCell::new(BTreeMap::new()) };
    /// (savepoint, a message that may go by express)
    static PARCELS: RefCell<Vec<(u32, Parcel)>> = const { RefCell::new(Vec::new()) };
    /// (savepoint, what a relay ended in it)
    static ENDED: RefCell<Vec<(u32, Ended)>> = const { RefCell::new(Vec::new()) };
    /// (savepoint, in how many µs a message got through that a relay published in it)
    static TOOK: RefCell<Vec<(u32, i64)>> = const { RefCell::new(Vec::new()) };
    /// (savepoint, messages that failed in it)
    static FAULTS: RefCell<Vec<(u32, Fault)>> = const { RefCell::new(Vec::new()) };
    static WAITING: Cell<bool> = const { Cell::new(false) };
    static ASKING: Cell<bool> = const { Cell::new(false) };
    static WAKE: Cell<bool> = const { Cell::new(false) };
    static WAITING_CHANGED: Cell<bool> = const { Cell::new(false) };
    static BY_HAND: Cell<bool> = const { Cell::new(false) };
    static SOME_EXPIRE: Cell<bool> = const { Cell::new(false) };
    static INSTALLED: Cell<bool> = const { Cell::new(false) };
    static DATABASES: Cell<bool> = const { Cell::new(false) };
}

/// Of a transaction; more go by the table alone, where a claim takes them together.
const MAX_PARCELS: usize = 8;

/// A message that may be laid down for its worker when this transaction commits.
pub struct Parcel {
    pub class: Class,
    pub partition: Partition,
    pub seq: i64,
    /// CRC-32 of its name.
    pub destination: u32,
    /// Where its rows are, and in which tables: in `outbox` and among the events.
    pub row: (u32, Tid),
    pub event: (u32, Tid),
    pub bytes: Vec<u8>,
    pub place: Option<Place>,
}

/// From `_PG_init`.
pub fn init() {
    xact::on_end(ended);
}

/// This transaction enqueued `count` messages of a destination: wake the workers when it commits.
pub fn enqueued(destination: &str, count: i64) {
    pending_changed(destination, count);
    more_wait(count);
}

/// So many more messages of a destination wait, or fewer.
pub fn pending_changed(destination: &str, by: i64) {
    let (savepoint, number) = (xact::current_savepoint(), figures::number_of(destination));
    PENDING.with_borrow_mut(|entries| {
        let known = (entries.iter_mut().rev()).find(|(known, (to, _))| (*known, *to) == (savepoint, number));
        match known {
            Some((_, (_, sum))) => *sum += by,
            None => entries.push((savepoint, (number, by))),
        }
    });
}

/// How many messages this transaction has added to a destination, given by its number.
pub fn own_pending(number: u64) -> i64 {
    let of_it = |(_, (to, count)): &(u32, (u64, i64))| (*to == number).then_some(*count);
    PENDING.with_borrow(|entries| entries.iter().filter_map(of_it).sum())
}

/// This transaction changed how many messages of this database wait: wake the workers when it commits.
pub fn more_wait(count: i64) {
    WAKE.set(true);
    let savepoint = xact::current_savepoint();
    ENQUEUED.with_borrow_mut(|entries| match entries.last_mut() {
        Some((last, sum)) if *last == savepoint => *sum += count,
        _ => entries.push((savepoint, count)),
    });
}

/// Whether this transaction has enqueued, or changed by hand what waits.
pub fn has_enqueued() -> bool {
    ENQUEUED.with_borrow(|entries| !entries.is_empty())
}

/// This transaction ended what a relay had claimed.
pub fn note_ended(ended: Ended) {
    let savepoint = xact::current_savepoint();
    ENDED.with_borrow_mut(|entries| match entries.last_mut() {
        Some((last, sum)) if *last == savepoint => sum.add(ended),
        _ => entries.push((savepoint, ended)),
    });
}

/// So long took messages that a relay published in this transaction.
pub fn note_took(took_us: Vec<i64>) {
    let savepoint = xact::current_savepoint();
    TOOK.with_borrow_mut(|entries| entries.extend(took_us.into_iter().map(|took_us| (savepoint, took_us))));
}

/// In this transaction messages failed. Of more kinds than are kept the rest is left out.
pub fn note_fault(fault: Fault) {
    let savepoint = xact::current_savepoint();
    FAULTS.with_borrow_mut(|entries| {
        let is_like = |(known, other): &(u32, Fault)| *known == savepoint && other.is_like(&fault);
        match entries.iter().position(is_like) {
            Some(index) => entries[index].1.add(&fault),
            None if entries.len() < faults::MAX_OF_DATABASE => entries.push((savepoint, fault)),
            None => {}
        }
    });
}

/// This session waits for the end of a message: it shall be woken, until its transaction is over.
pub fn waiting() {
    WAITING.set(true);
}

/// This session asks the workers for something, until its transaction is over at the latest.
pub fn asking() {
    ASKING.set(true);
}

/// It does so no more.
pub fn stop_asking() {
    if ASKING.take() {
        asks::stop();
    }
}

/// This transaction made a message ready to go to a destination of this class.
pub fn ready(class: Class, partition: Partition, seq: i64) {
    LOWS.with_borrow_mut(|lows| {
        let low = lows.entry((class, partition)).or_insert(seq);
        *low = seq.min(*low);
    });
}

/// Whether so many more messages of this transaction may go by express.
pub fn may_go_by_express(count: usize) -> bool {
    count > 0 && PARCELS.with_borrow(|parcels| parcels.len() + count <= MAX_PARCELS)
}

/// This transaction made a message ready that may go by express.
pub fn ready_by_express(parcel: Parcel) {
    PARCELS.with_borrow_mut(|parcels| parcels.push((xact::current_savepoint(), parcel)));
}

/// What this transaction has enqueued lies there before anybody can see its rows.
fn lay_down_parcels() {
    PARCELS.with_borrow_mut(|parcels| {
        if parcels.is_empty() || !xact::commits_durably() {
            return;
        }
        for (_, parcel) in parcels {
            // What was changed since is read from the table.
            let is_current = |(table, tid): (u32, Tid)| tid.is_current_in(table);
            if is_current(parcel.row) && is_current(parcel.event) {
                parcel.place = express::lay_down(parcel);
            }
        }
    });
}

/// After Committed: whoever reads their lanes may take them, or shall look for the rows.
fn hand_parcels_over(database: &shmem::Database) {
    PARCELS.with_borrow_mut(|parcels| {
        for (_, parcel) in parcels {
            let place = parcel.place.take();
            if !place.is_some_and(|place| express::ready(place, parcel.class, parcel.partition)) {
                database.reopen(parcel.class, parcel.partition, parcel.seq);
            }
        }
    });
}

/// This transaction scheduled a message.
pub fn waiting_changed() {
    WAITING_CHANGED.set(true);
}

/// This transaction changed what waits, or what may go, by hand.
pub fn changed_by_hand() {
    waiting_changed();
    BY_HAND.set(true);
}

/// This transaction enqueued messages that expire.
pub fn some_expire() {
    SOME_EXPIRE.set(true);
}

/// This transaction installed the extension: tell the launcher when it commits.
pub fn installed() {
    INSTALLED.set(true);
}

/// This transaction may change which databases there are, and may have sent workers away: when it ends, however it ends,
/// let them back and tell the launcher.
pub fn databases_change() {
    DATABASES.set(true);
}

/// After Committed nothing here may allocate, log or raise: the lists only shrink.
fn ended(end: End) {
    match end {
        End::Committing => lay_down_parcels(),
        End::Committed => {
            if INSTALLED.get()
                && let Some(database) = shmem::my_database()
            {
                database.installed();
                figures::installed();
                faults::forget_here();
            }
            if WAKE.get() {
                // In this order: visible already; from where to read; no longer open; look.
                if let Some(database) = shmem::my_database() {
                    hand_parcels_over(database);
                    LOWS.with_borrow(|lows| {
                        for ((class, partition), low) in lows {
                            database.reopen(*class, *partition, *low);
                        }
                    });
                    database.enqueued(ENQUEUED.with_borrow(|entries| entries.iter().map(|(_, count)| count).sum()));
                    if SOME_EXPIRE.get() {
                        database.some_expire();
                    }
                    if BY_HAND.get() {
                        database.changed_by_hand();
                    }
                    if WAITING_CHANGED.get() {
                        database.waiting_changed();
                        database.ended();
                    }
                }
            }
            PENDING.with_borrow(|entries| {
                for (_, (number, by)) in entries {
                    figures::pending_changed(*number, *by);
                }
            });
            tell_ended();
            FAULTS.with_borrow(|entries| entries.iter().for_each(|(_, fault)| faults::note(fault)));
            if INSTALLED.get() {
                shmem::extension_came();
            }
            leave();
        }
        End::Preparing => {
            if !registry::prepare() {
                pgrx::error!("outbox has no room for another prepared transaction");
            }
        }
        End::Aborted | End::Prepared => leave(),
        End::SavepointReleased { id, into } => {
            ENQUEUED.with_borrow_mut(|entries| move_up(entries, id, into));
            PARCELS.with_borrow_mut(|entries| move_up(entries, id, into));
            ENDED.with_borrow_mut(|entries| move_up(entries, id, into));
            TOOK.with_borrow_mut(|entries| move_up(entries, id, into));
            FAULTS.with_borrow_mut(|entries| move_up(entries, id, into));
            PENDING.with_borrow_mut(|entries| {
                move_up(entries, id, into);
                merge(entries);
            });
        }
        End::SavepointAborted { id } => {
            ENQUEUED.with_borrow_mut(|entries| entries.retain(|(savepoint, _)| *savepoint != id));
            PARCELS.with_borrow_mut(|entries| entries.retain(|(savepoint, _)| *savepoint != id));
            ENDED.with_borrow_mut(|entries| entries.retain(|(savepoint, _)| *savepoint != id));
            TOOK.with_borrow_mut(|entries| entries.retain(|(savepoint, _)| *savepoint != id));
            FAULTS.with_borrow_mut(|entries| entries.retain(|(savepoint, _)| *savepoint != id));
            PENDING.with_borrow_mut(|entries| entries.retain(|(savepoint, _)| *savepoint != id));
            capture::savepoint_aborted(id);
            stop_asking(); // the statement that asked has failed
            if DATABASES.get() {
                shmem::let_back(); // the statement may have failed; if not, core's lock still keeps the workers out
            }
        }
    }
}

fn move_up<T>(entries: &mut [(u32, T)], id: u32, into: u32) {
    for entry in entries.iter_mut().filter(|(savepoint, _)| *savepoint == id) {
        entry.0 = into;
    }
}

/// One entry for each savepoint and destination, however many savepoints were released: each enqueue may sum them up.
fn merge(entries: &mut Vec<(u32, (u64, i64))>) {
    entries.sort_unstable();
    entries.dedup_by(|(savepoint, (number, count)), (before, (to, sum))| {
        let same = (*savepoint, *number) == (*before, *to);
        if same {
            *sum += *count;
        }
        same
    });
}

/// After Committed: as above.
fn tell_ended() {
    ENDED.with_borrow(|entries| {
        if let (false, Some(database)) = (entries.is_empty(), shmem::my_database()) {
            let mut sum = Ended::default();
            entries.iter().for_each(|(_, ended)| sum.add(*ended));
            database.settled(&sum, now_us());
        }
    });
    TOOK.with_borrow(|entries| {
        if let (false, Some(database)) = (entries.is_empty(), shmem::my_database()) {
            let mut took = Took::default();
            entries.iter().for_each(|(_, took_us)| took.note(*took_us));
            database.confirmed(&mut took, now_us());
        }
    });
}

/// The transaction is over, however it ended: messages may have waited for its own.
fn leave() {
    capture::transaction_over();
    registry::leave();
    if WAKE.take() {
        shmem::wake_workers();
    }
    WAITING_CHANGED.set(false);
    BY_HAND.set(false);
    SOME_EXPIRE.set(false);
    INSTALLED.set(false);
    if DATABASES.take() {
        shmem::let_back();
    }
    if WAITING.take() {
        shmem::stop_waiting();
    }
    stop_asking();
    ENQUEUED.with_borrow_mut(Vec::clear);
    PARCELS.with_borrow_mut(|parcels| {
        let places = parcels.drain(..).filter_map(|(_, parcel)| parcel.place);
        places.for_each(express::free); // it did not commit
    });
    ENDED.with_borrow_mut(Vec::clear);
    TOOK.with_borrow_mut(Vec::clear);
    FAULTS.with_borrow_mut(Vec::clear);
    PENDING.with_borrow_mut(Vec::clear);
    LOWS.with_borrow_mut(BTreeMap::clear);
}
