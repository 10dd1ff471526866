//! The effects of a transaction that other processes are notified of. The functions of a session record them here,
//! under the savepoint that caused them; at COMMIT this module publishes them once. Runs in a user's backend, on its
//! main thread.
//!
//! COMMIT PREPARED wakes no worker: the session forgot the transaction at PREPARE, and another session may commit it.
//! The safety poll of the workers finds its messages within a second.

use crate::pg::clock::now_us;
use crate::pg::xact::{self, End};
use crate::session::{changes, fast_path};
use crate::shared::databases::{self, DatabaseEntry};
use crate::shared::error_groups::{self, FailureGroup};
use crate::shared::fast_path::Handoff;
use crate::shared::{floors, launcher, lifecycle, sessions, statistics, transactions};
use outbox_core::nested::{Absorb, Nested};
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use outbox_core::throughput::DeliveryTimes;
use outbox_worker::rewinds::{RewindGroup, RewindLane};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::panic::AssertUnwindSafe;

/// The effects of a savepoint. They count once the savepoint is released and the transaction commits.
#[derive(Default)]
struct Effects {
    /// It enqueued messages, or changed waiting messages by hand.
    changes_what_waits: bool,
    /// The change of the number of pending messages of this database.
    enqueued: i64,
    /// The change of the number of pending messages of each destination, by its number.
    pending: BTreeMap<u64, i64>,
    /// The seq from which each lane is to be read again.
    rewinds: BTreeMap<(RewindLane, Partition), i64>,
    /// The lowest seq in each lane of a destination, by its number, and the name of the destination: for views.
    lowest_shown: BTreeMap<(u64, Partition), (String, i64)>,
    /// Messages that may take the fast path.
    handoffs: Vec<Handoff>,
    /// The change of the number of dead letters, and of those that block others.
    dead: [i64; 2],
    /// The lowest seq of a new one of each kind.
    lowest_dead: [Option<i64>; 2],
    /// What a relay settled.
    ended: Option<Ended>,
    /// The delivery times of messages that a relay published, in µs.
    delivery_us: Vec<i64>,
    /// Messages that failed, by error group. Groups beyond the limit are left out.
    errors: Vec<FailureGroup>,
    /// It scheduled a message.
    scheduled: bool,
    /// It changed waiting messages, or what may be delivered, by hand.
    by_hand: bool,
    /// The earliest expiry of a message that it enqueued, in µs since 1970.
    expires_us: Option<i64>,
    /// It installed the extension.
    installed: bool,
}

/// What this session does at the end of its transaction.
#[derive(Default)]
struct Transaction {
    effects: Nested<Effects>,
    /// The sum of `Effects::pending`. Each enqueue reads it.
    pending: BTreeMap<u64, i64>,
    /// The number of `Effects::handoffs`.
    handoffs: usize,
    // The fields below apply however the transaction ends, and whatever savepoint was rolled back.
    /// Wake the workers: messages may have waited for the end of this transaction.
    wakes: bool,
    /// Notify the launcher that databases may have changed.
    changes_databases: bool,
}

thread_local! {
    static TRANSACTION: RefCell<Transaction> = RefCell::default();
}

/// Called by `_PG_init`.
pub fn init() {
    xact::on_end(ended);
}

fn record(body: impl FnOnce(&mut Effects)) {
    sessions::begin_to_own();
    TRANSACTION.with_borrow_mut(|transaction| body(transaction.effects.of(xact::current_savepoint())));
}

// ---- what a transaction does ----------------------------------------------------------------------------------------

/// This transaction enqueued `count` messages of a destination: wakes the workers when it commits.
pub fn enqueued(destination: &str, count: i64) {
    pending_changed(destination, count);
    more_wait(count);
}

/// This transaction changed the number of pending messages of a destination by this much.
pub fn pending_changed(destination: &str, by: i64) {
    let number = statistics::number_of(destination);
    record(|effects| *effects.pending.entry(number).or_default() += by);
    TRANSACTION.with_borrow_mut(|transaction| *transaction.pending.entry(number).or_default() += by);
}

/// The number of messages that this transaction has added to a destination, given by its number.
pub fn own_pending(number: u64) -> i64 {
    TRANSACTION.with_borrow(|transaction| transaction.pending.get(&number).copied().unwrap_or_default())
}

/// This transaction changed the number of pending messages of this database: wakes the workers when it commits.
pub fn more_wait(count: i64) {
    record(|effects| {
        effects.changes_what_waits = true;
        effects.enqueued += count;
    });
    TRANSACTION.with_borrow_mut(|transaction| transaction.wakes = true);
}

/// Whether this transaction has enqueued messages, or changed waiting messages by hand.
pub fn has_enqueued() -> bool {
    TRANSACTION.with_borrow(|transaction| transaction.effects.iter().any(|effects| effects.changes_what_waits))
}

/// This transaction settled messages that a relay had claimed.
pub fn record_ended(ended: Ended) {
    record(|effects| effects.ended.get_or_insert_default().add(ended));
}

/// The delivery times of messages that a relay published in this transaction.
pub fn record_delivery_times(delivery_us: Vec<i64>) {
    record(|effects| effects.delivery_us.extend(delivery_us));
}

/// Messages failed in this transaction.
pub fn record_error(error: FailureGroup) {
    record(|effects| add_error(&mut effects.errors, error));
}

fn add_error(errors: &mut Vec<FailureGroup>, error: FailureGroup) {
    let has_room = errors.len() < error_groups::MAX_OF_DATABASE;
    match errors.iter_mut().find(|known| known.is_like(&error)) {
        Some(known) => known.add(&error),
        None if has_room => errors.push(error),
        None => {}
    }
}

/// This transaction made a message ready for delivery. It takes the fast path if there is a handoff.
pub fn ready(destination: &str, partition: Partition, seq: i64, handoff: Option<Handoff>) {
    record_shown(destination, partition, seq);
    match handoff {
        Some(handoff) => {
            record(|effects| effects.handoffs.push(handoff));
            TRANSACTION.with_borrow_mut(|transaction| transaction.handoffs += 1);
        }
        None => read_again(RewindGroup::of(destination).lane(partition), partition, seq),
    }
}

/// Whether this number of further messages of this transaction may take the fast path.
pub fn may_use_fast_path(count: usize) -> bool {
    fast_path::is_on() && TRANSACTION.with_borrow(|transaction| fast_path::is_room(transaction.handoffs, count))
}

/// This transaction put a message where views look for waiting messages.
pub fn record_shown(destination: &str, partition: Partition, seq: i64) {
    let lane = (statistics::number_of(destination), partition);
    record(|effects| {
        let (_, first) = effects
            .lowest_shown
            .entry(lane)
            .or_insert_with(|| (destination.to_owned(), seq));
        *first = seq.min(*first);
    });
}

/// This transaction changed the number of dead letters and of those that block others; `seq` is that of the new one.
pub fn dead_changed(by: [i64; 2], seq: i64) {
    record(|effects| {
        for ((count, low), by) in effects.dead.iter_mut().zip(&mut effects.lowest_dead).zip(by) {
            *count += by;
            *low = lower(*low, (by > 0).then_some(seq));
        }
    });
}

/// After this transaction a lane must be read again from this seq.
pub fn read_again(lane: RewindLane, partition: Partition, seq: i64) {
    record(|effects| {
        let low = effects.rewinds.entry((lane, partition)).or_insert(seq);
        *low = seq.min(*low);
    });
}

/// This transaction scheduled a message.
pub fn scheduled() {
    record(|effects| effects.scheduled = true);
}

/// This transaction changed waiting messages, or what may be delivered, by hand.
pub fn changed_by_hand() {
    record(|effects| effects.by_hand = true);
}

/// This transaction enqueued a message that expires at this time, in µs since 1970.
pub fn expires_at(us: i64) {
    record(|effects| effects.expires_us = lower(effects.expires_us, Some(us)));
}

/// This transaction installed the extension: notifies the launcher when it commits.
pub fn installed() {
    record(|effects| effects.installed = true);
}

/// This transaction may change which databases there are. However it ends, the launcher is notified.
pub fn databases_change() {
    TRANSACTION.with_borrow_mut(|transaction| transaction.changes_databases = true);
}

// ---- how savepoints end ---------------------------------------------------------------------------------------------

impl Absorb for Effects {
    fn absorb(&mut self, child: Self) {
        // Names each field, so that a field that is forgotten here does not compile.
        let Self {
            changes_what_waits,
            enqueued,
            pending,
            rewinds,
            lowest_shown,
            handoffs,
            dead,
            lowest_dead,
            ended,
            delivery_us,
            errors,
            scheduled,
            by_hand,
            expires_us,
            installed,
        } = child;
        self.changes_what_waits |= changes_what_waits;
        self.enqueued += enqueued;
        merge(&mut self.pending, pending, |known, more| *known += more);
        merge(&mut self.rewinds, rewinds, |known, seq| *known = seq.min(*known));
        merge(&mut self.lowest_shown, lowest_shown, |(_, known), (_, seq)| {
            *known = seq.min(*known)
        });
        append(&mut self.handoffs, handoffs);
        for (count, more) in self.dead.iter_mut().zip(dead) {
            *count += more;
        }
        for (low, other) in self.lowest_dead.iter_mut().zip(lowest_dead) {
            *low = lower(*low, other);
        }
        if let Some(ended) = ended {
            self.ended.get_or_insert_default().add(ended);
        }
        append(&mut self.delivery_us, delivery_us);
        errors.into_iter().for_each(|error| add_error(&mut self.errors, error));
        self.scheduled |= scheduled;
        self.by_hand |= by_hand;
        self.expires_us = lower(self.expires_us, expires_us);
        self.installed |= installed;
    }
}

/// Merges the smaller map into the larger one, so the result of `join` must not depend on the order of its arguments.
fn merge<K: Ord, V>(to: &mut BTreeMap<K, V>, mut more: BTreeMap<K, V>, join: impl Fn(&mut V, V)) {
    if more.len() > to.len() {
        std::mem::swap(to, &mut more);
    }
    for (key, value) in more {
        match to.entry(key) {
            Entry::Occupied(mut known) => join(known.get_mut(), value),
            Entry::Vacant(free) => _ = free.insert(value),
        }
    }
}

fn append<T>(to: &mut Vec<T>, mut more: Vec<T>) {
    if more.len() > to.len() {
        std::mem::swap(to, &mut more);
    }
    to.append(&mut more);
}

/// The lower of two seqs, as far as they are known.
fn lower(one: Option<i64>, other: Option<i64>) -> Option<i64> {
    one.into_iter().chain(other).min()
}

// ---- how the transaction ends ---------------------------------------------------------------------------------------

/// After Committed nothing in this section may allocate, log or raise an error: collections only shrink.
fn ended(end: End) {
    changes::ended(end);
    if end == End::Preparing && !transactions::prepare() {
        pgrx::error!("outbox has no room for another prepared transaction");
    }
    TRANSACTION.with_borrow_mut(|transaction| match end {
        End::Committing => transaction.copy_to_slot(),
        End::Committed => {
            transaction.publish();
            transaction.leave();
        }
        End::Preparing => {}
        End::Prepared => {
            if let Some(database) = databases::my_database() {
                transaction.effects.whole().record_expiry(database);
            }
            transaction.leave();
        }
        End::Aborted => transaction.leave(),
        End::SavepointReleased { id, into } => transaction.effects.release(id, into),
        End::SavepointAborted { id } => transaction.savepoint_aborted(id),
    });
}

impl Transaction {
    /// Messages of the fast path are copied into slots before any other session can see their rows.
    fn copy_to_slot(&mut self) {
        let handoffs = &mut self.effects.whole().handoffs;
        if !handoffs.is_empty() {
            xact::ignore_errors_at_commit(AssertUnwindSafe(|| fast_path::copy_to_slot(handoffs)));
        }
    }

    /// Runs after Committed.
    fn publish(&mut self) {
        let (effects, database) = (self.effects.whole(), databases::my_database());
        if effects.installed
            && let Some(database) = database
        {
            database.installed();
            statistics::installed();
            error_groups::forget_here();
        }
        if let Some(database) = database {
            if self.wakes {
                effects.notify_workers(database);
            }
            effects.record_for_views(database);
            effects.record_ended_messages(database);
        }
        for (number, by) in &effects.pending {
            statistics::pending_changed(*number, *by);
        }
        effects.errors.iter().for_each(error_groups::record);
        if effects.installed {
            databases::extension_came();
        }
    }

    /// The transaction is over, however it ended: messages may have waited for its end.
    fn leave(&mut self) {
        lifecycle::transaction_ends();
        if std::mem::take(&mut self.wakes) {
            databases::wake_workers();
        }
        if std::mem::take(&mut self.changes_databases) {
            launcher::notify();
        }
        fast_path::take_back(&mut self.effects.whole().handoffs); // it did not commit
        self.effects.clear();
        self.pending.clear();
        self.handoffs = 0;
    }

    fn savepoint_aborted(&mut self, id: u32) {
        if let Some(undone) = self.effects.abort(id) {
            self.handoffs -= undone.handoffs.len();
            for (number, by) in undone.pending {
                *self.pending.entry(number).or_default() -= by;
            }
        }
        // The statement with a request has failed. One that needs a database for itself may have; if not, core's lock
        // still keeps the workers out.
        lifecycle::savepoint_aborted();
    }
}

/// All of these run after Committed: they publish what is visible now.
impl Effects {
    /// The order matters. The rows are visible already; first publish from where to read. Then the transaction is
    /// removed from the list of open ones, and then the workers read: see `shared::fast_path`.
    fn notify_workers(&mut self, database: &DatabaseEntry) {
        if self.by_hand {
            database.changes_by_hand.advance(); // before a slot is ready: a worker takes none before it has read the change
        }
        fast_path::hand_over(database, &mut self.handoffs);
        for ((lane, partition), low) in &self.rewinds {
            database.rewind_to(*lane, *partition, *low);
        }
        database.pending.add(self.enqueued);
        self.record_expiry(database);
        if self.by_hand || self.scheduled {
            database.schedules.advance();
            database.ended();
        }
    }

    /// Maintenance reads it at its next run. Called at PREPARE too, because COMMIT PREPARED publishes nothing.
    fn record_expiry(&self, database: &DatabaseEntry) {
        if let Some(us) = self.expires_us {
            database.expires_at(us);
        }
    }

    fn record_for_views(&self, database: &DatabaseEntry) {
        for (blocks, low) in [false, true].into_iter().zip(self.lowest_dead) {
            if let Some(low) = low {
                database.floors.record_dead(blocks, low);
            }
        }
        for (count, by) in database.dead.iter().zip(self.dead) {
            count.add(by);
        }
        for ((number, partition), (destination, seq)) in &self.lowest_shown {
            floors::record(&database.floors, destination, partition.index(), *number, *seq);
        }
    }

    fn record_ended_messages(&self, database: &DatabaseEntry) {
        if let Some(ended) = &self.ended {
            database.settled(ended, now_us());
        }
        if !self.delivery_us.is_empty() {
            let mut times = DeliveryTimes::default();
            self.delivery_us.iter().for_each(|delivery_us| times.note(*delivery_us));
            database.throughput.count_times(&times, now_us());
        }
    }
}
