//! From enqueue to the worker: remembers in this backend what the transaction has enqueued, and at commit tells the
//! workers and wakes them, once. Called by the enqueue functions and by the end of each transaction; main thread.
//!
//! COMMIT PREPARED wakes nobody: the transaction was forgotten at PREPARE, and may be committed by another session. The
//! safety poll of the workers finds its messages within a second.

use crate::pg::clock::now_us;
use crate::pg::xact::{self, End};
use crate::session::{asking, publishing};
use crate::shared::databases;
use crate::shared::error_groups::Fault;
use crate::shared::fastpath::parcel::Parcel;
use crate::shared::fastpath::{commit, eligibility};
use crate::shared::lanes::Class;
use crate::shared::{error_groups, floors, statistics, transactions, vacancies, waiters};
use outbox_core::minutes::Took;
use outbox_core::nested::Nested;
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

thread_local! {
    /// Messages enqueued.
    static ENQUEUED: RefCell<Nested<i64>> = const { RefCell::new(Nested::new()) };
    /// Destination by its number, and how many more of its messages wait.
    static PENDING: RefCell<Nested<(u64, i64)>> = const { RefCell::new(Nested::new()) };
    /// The sum of these for each destination, which an enqueue asks for.
    static PENDING_SUMS: RefCell<BTreeMap<u64, i64>> = const { RefCell::new(BTreeMap::new()) };
    /// The lowest seq in each lane, whether or not its savepoint lasts: too low a seq costs a look.
    static LOWS: RefCell<BTreeMap<(Class, Partition), i64>> = const { RefCell::new(BTreeMap::new()) };
    /// The lowest seq in each lane of a destination, by its number, and its name: for views, which are told at COMMIT.
    static FIRSTS: RefCell<BTreeMap<(u64, Partition), (String, i64)>> = const { RefCell::new(BTreeMap::new()) };
    /// How many more dead letters there are, and how many that block others.
    static DEAD: RefCell<Nested<[i64; 2]>> = const { RefCell::new(Nested::new()) };
    /// The lowest seq of a new one of each, whether or not its savepoint lasts.
    static DEAD_LOWS: Cell<[i64; 2]> = const { Cell::new([i64::MAX; 2]) };
    /// Messages that may go by express.
    static PARCELS: RefCell<Nested<Parcel>> = const { RefCell::new(Nested::new()) };
    /// What a relay ended.
    static ENDED: RefCell<Nested<Ended>> = const { RefCell::new(Nested::new()) };
    /// In how many µs a message got through that a relay published.
    static TOOK: RefCell<Nested<i64>> = const { RefCell::new(Nested::new()) };
    /// Messages that failed.
    static FAULTS: RefCell<Nested<Fault>> = const { RefCell::new(Nested::new()) };
    static WAITING: Cell<bool> = const { Cell::new(false) };
    static ASKING: Cell<bool> = const { Cell::new(false) };
    static WAKE: Cell<bool> = const { Cell::new(false) };
    static WAITING_CHANGED: Cell<bool> = const { Cell::new(false) };
    static BY_HAND: Cell<bool> = const { Cell::new(false) };
    /// When the first message expires that was enqueued in this transaction, in µs since 1970.
    static EXPIRES_US: Cell<i64> = const { Cell::new(i64::MAX) };
    static INSTALLED: Cell<bool> = const { Cell::new(false) };
    static DATABASES: Cell<bool> = const { Cell::new(false) };
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
    let number = statistics::number_of(destination);
    PENDING.with_borrow_mut(|notes| notes.add(xact::current_savepoint(), (number, by), add_pending));
    PENDING_SUMS.with_borrow_mut(|sums| *sums.entry(number).or_default() += by);
}

/// How many messages this transaction has added to a destination, given by its number.
pub fn own_pending(number: u64) -> i64 {
    PENDING_SUMS.with_borrow(|sums| sums.get(&number).copied().unwrap_or_default())
}

/// This transaction changed how many messages of this database wait: wake the workers when it commits.
pub fn more_wait(count: i64) {
    WAKE.set(true);
    ENQUEUED.with_borrow_mut(|notes| notes.add(xact::current_savepoint(), count, add_count));
}

fn add_count(before: &mut i64, count: &i64) -> bool {
    *before += count;
    true
}

fn add_pending((known, sum): &mut (u64, i64), (number, by): &(u64, i64)) -> bool {
    let same = known == number;
    if same {
        *sum += by;
    }
    same
}

fn add_ended(before: &mut Ended, ended: &Ended) -> bool {
    before.add(*ended);
    true
}

/// Whether this transaction has enqueued, or changed by hand what waits.
pub fn has_enqueued() -> bool {
    ENQUEUED.with_borrow(|entries| !entries.is_empty())
}

/// This transaction ended what a relay had claimed.
pub fn note_ended(ended: Ended) {
    ENDED.with_borrow_mut(|notes| notes.add(xact::current_savepoint(), ended, add_ended));
}

/// So long took messages that a relay published in this transaction.
pub fn note_took(took_us: Vec<i64>) {
    let savepoint = xact::current_savepoint();
    TOOK.with_borrow_mut(|notes| took_us.into_iter().for_each(|took_us| notes.push(savepoint, took_us)));
}

/// In this transaction messages failed. Of more kinds than are kept the rest is left out.
pub fn note_fault(fault: Fault) {
    let savepoint = xact::current_savepoint();
    FAULTS.with_borrow_mut(|notes| {
        let has_room = notes.len() < error_groups::MAX_OF_DATABASE;
        let known = notes.of_mut(savepoint).iter_mut().find(|other| other.is_like(&fault));
        match known {
            Some(known) => known.add(&fault),
            None if has_room => notes.push(savepoint, fault),
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
        asking::stop();
    }
}

/// This transaction made a message ready to go. By express if there is a parcel.
pub fn ready(destination: &str, partition: Partition, seq: i64, parcel: Option<Parcel>) {
    is_shown(destination, partition, seq);
    match parcel {
        Some(parcel) => PARCELS.with_borrow_mut(|parcels| parcels.push(xact::current_savepoint(), parcel)),
        None => read_again(Class::of(destination), partition, seq),
    }
}

/// This transaction put a message where views look for what waits.
pub fn is_shown(destination: &str, partition: Partition, seq: i64) {
    FIRSTS.with_borrow_mut(|firsts| {
        let lane = (statistics::number_of(destination), partition);
        let (_, first) = firsts.entry(lane).or_insert_with(|| (destination.to_owned(), seq));
        *first = seq.min(*first);
    });
}

/// This transaction made so many more dead letters, or fewer, and so many that block others, with this seq.
pub fn dead_changed(by: [i64; 2], seq: i64) {
    DEAD.with_borrow_mut(|notes| notes.add(xact::current_savepoint(), by, add_dead));
    let low = |index: usize, low: i64| if by[index] > 0 { low.min(seq) } else { low };
    let lows = DEAD_LOWS.get();
    DEAD_LOWS.set([low(0, lows[0]), low(1, lows[1])]);
}

fn add_dead(before: &mut [i64; 2], by: &[i64; 2]) -> bool {
    before.iter_mut().zip(by).for_each(|(before, by)| *before += by);
    true
}

/// After this transaction a lane of this class is to be read again from here.
pub fn read_again(class: Class, partition: Partition, seq: i64) {
    LOWS.with_borrow_mut(|lows| {
        let low = lows.entry((class, partition)).or_insert(seq);
        *low = seq.min(*low);
    });
}

/// Whether so many more messages of this transaction may go by express.
pub fn may_go_by_express(count: usize) -> bool {
    PARCELS.with_borrow(|parcels| eligibility::is_room(parcels.len(), count))
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

/// This transaction enqueued a message that expires then, in µs since 1970.
pub fn expires_at(us: i64) {
    EXPIRES_US.set(EXPIRES_US.get().min(us));
}

/// The upkeep looks for it at its time. Also at PREPARE, for COMMIT PREPARED tells nothing.
fn tell_expiry() {
    let first = Some(EXPIRES_US.get()).filter(|us| *us < i64::MAX);
    if let (Some(us), Some(database)) = (first, databases::my_database()) {
        database.expires_at(us);
    }
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
        End::Committing if PARCELS.with_borrow(|parcels| parcels.is_empty()) => {}
        End::Committing => {
            xact::commits_all_the_same(|| PARCELS.with_borrow_mut(|parcels| commit::lay_down(parcels.iter_mut())))
        }
        End::Committed => {
            if INSTALLED.get()
                && let Some(database) = databases::my_database()
            {
                database.installed();
                statistics::installed();
                error_groups::forget_here();
            }
            if WAKE.get() {
                // In this order: visible already; from where to read; no longer open; look.
                if let Some(database) = databases::my_database() {
                    PARCELS.with_borrow_mut(|parcels| commit::hand_over(database, parcels.iter_mut()));
                    LOWS.with_borrow(|lows| {
                        for ((class, partition), low) in lows {
                            database.reopen(*class, *partition, *low);
                        }
                    });
                    database.enqueued(ENQUEUED.with_borrow(|entries| entries.iter().sum()));
                    tell_expiry();
                    if BY_HAND.get() {
                        database.changed_by_hand();
                    }
                    if WAITING_CHANGED.get() {
                        database.waiting_changed();
                        database.ended();
                    }
                }
            }
            tell_views();
            PENDING_SUMS.with_borrow(|sums| {
                for (number, by) in sums {
                    statistics::pending_changed(*number, *by);
                }
            });
            tell_ended();
            FAULTS.with_borrow(|entries| entries.iter().for_each(error_groups::note));
            if INSTALLED.get() {
                databases::extension_came();
            }
            leave();
        }
        End::Preparing => {
            if !transactions::prepare() {
                pgrx::error!("outbox has no room for another prepared transaction");
            }
        }
        End::Prepared => {
            tell_expiry();
            leave();
        }
        End::Aborted => leave(),
        End::SavepointReleased { id, into } => {
            ENQUEUED.with_borrow_mut(|notes| notes.release(id, into, add_count));
            PENDING.with_borrow_mut(|notes| notes.release(id, into, add_pending));
            PARCELS.with_borrow_mut(|notes| notes.release(id, into, |_, _| false));
            DEAD.with_borrow_mut(|notes| notes.release(id, into, add_dead));
            ENDED.with_borrow_mut(|notes| notes.release(id, into, add_ended));
            TOOK.with_borrow_mut(|notes| notes.release(id, into, |_, _| false));
            FAULTS.with_borrow_mut(|notes| notes.release(id, into, |_, _| false));
        }
        End::SavepointAborted { id } => {
            ENQUEUED.with_borrow_mut(|notes| notes.abort(id, |_| ()));
            PENDING.with_borrow_mut(|notes| {
                let sums = |(number, by)| PENDING_SUMS.with_borrow_mut(|sums| *sums.entry(number).or_default() -= by);
                notes.abort(id, sums);
            });
            PARCELS.with_borrow_mut(|notes| notes.abort(id, |_| ()));
            DEAD.with_borrow_mut(|notes| notes.abort(id, |_| ()));
            ENDED.with_borrow_mut(|notes| notes.abort(id, |_| ()));
            TOOK.with_borrow_mut(|notes| notes.abort(id, |_| ()));
            FAULTS.with_borrow_mut(|notes| notes.abort(id, |_| ()));
            publishing::savepoint_aborted(id);
            stop_asking(); // the statement that asked has failed
            if DATABASES.get() {
                vacancies::let_back(); // the statement may have failed; if not, core's lock still keeps the workers out
            }
        }
    }
}

/// After Committed: what is visible now, views find it.
fn tell_views() {
    DEAD.with_borrow(|notes| {
        let Some(database) = databases::my_database().filter(|_| !notes.is_empty()) else {
            return;
        };
        for (blocks, low) in [false, true].into_iter().zip(DEAD_LOWS.get()) {
            if low < i64::MAX {
                database.floors().tell_dead(blocks, low);
            }
        }
        notes.iter().for_each(|by| database.dead_changed(*by));
    });
    FIRSTS.with_borrow(|firsts| {
        let Some(database) = databases::my_database().filter(|_| !firsts.is_empty()) else {
            return;
        };
        for ((number, partition), (destination, seq)) in firsts {
            floors::tell(database.floors(), destination, partition.index(), *number, *seq);
        }
    });
}

/// After Committed: as above.
fn tell_ended() {
    ENDED.with_borrow(|entries| {
        if let (false, Some(database)) = (entries.is_empty(), databases::my_database()) {
            let mut sum = Ended::default();
            entries.iter().for_each(|ended| sum.add(*ended));
            database.settled(&sum, now_us());
        }
    });
    TOOK.with_borrow(|entries| {
        if let (false, Some(database)) = (entries.is_empty(), databases::my_database()) {
            let mut took = Took::default();
            entries.iter().for_each(|took_us| took.note(*took_us));
            database.confirmed(&mut took, now_us());
        }
    });
}

/// The transaction is over, however it ended: messages may have waited for its own.
fn leave() {
    publishing::transaction_over();
    transactions::leave();
    if WAKE.take() {
        databases::wake_workers();
    }
    WAITING_CHANGED.set(false);
    BY_HAND.set(false);
    EXPIRES_US.set(i64::MAX);
    INSTALLED.set(false);
    if DATABASES.take() {
        vacancies::let_back();
    }
    if WAITING.take() {
        waiters::stop();
    }
    stop_asking();
    ENQUEUED.with_borrow_mut(Nested::clear);
    PARCELS.with_borrow_mut(|parcels| {
        commit::take_back(parcels.iter_mut());
        parcels.clear();
    });
    ENDED.with_borrow_mut(Nested::clear);
    TOOK.with_borrow_mut(Nested::clear);
    FAULTS.with_borrow_mut(Nested::clear);
    PENDING.with_borrow_mut(Nested::clear);
    PENDING_SUMS.with_borrow_mut(BTreeMap::clear);
    LOWS.with_borrow_mut(BTreeMap::clear);
    FIRSTS.with_borrow_mut(BTreeMap::clear);
    DEAD.with_borrow_mut(Nested::clear);
    DEAD_LOWS.set([i64::MAX; 2]);
}
