//! What a transaction does that other processes are told of. A session notes it here, by the savepoint that did it, and tells it
//! once, at COMMIT. Run by a user's backend, on its main thread: by the functions of a session, and at the end of each transaction.
//!
//! COMMIT PREPARED wakes no worker: the transaction was forgotten at PREPARE, and may be committed by another session. The
//! safety poll of the workers finds its messages within a second.

use crate::pg::clock::now_us;
use crate::pg::xact::{self, End};
use crate::session::{publishing, requests};
use crate::shared::databases::{self, Database};
use crate::shared::error_groups::{self, ErrorGroup};
use crate::shared::fastpath::handoff::Handoff;
use crate::shared::fastpath::{commit, eligibility};
use crate::shared::lanes::Class;
use crate::shared::{floors, statistics, transactions, vacancies, waiters};
use outbox_core::nested::{Absorb, Nested};
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use outbox_core::throughput::Took;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::panic::AssertUnwindSafe;

/// What a savepoint did. It counts once the savepoint is released and the transaction commits.
#[derive(Default)]
struct Effects {
    /// It enqueued, or changed by hand what waits.
    changes_what_waits: bool,
    /// How many more messages of this database wait.
    enqueued: i64,
    /// Destination by its number, and how many more of its messages wait.
    pending: BTreeMap<u64, i64>,
    /// From which seq on a lane is to be read again.
    lows: BTreeMap<(Class, Partition), i64>,
    /// The lowest seq in each lane of a destination, by its number, and its name: for views.
    firsts: BTreeMap<(u64, Partition), (String, i64)>,
    /// Messages that may go by the fast path.
    handoffs: Vec<Handoff>,
    /// How many more dead letters there are, and how many that block others.
    dead: [i64; 2],
    /// The lowest seq of a new one of each.
    dead_lows: [Option<i64>; 2],
    /// What a relay ended, if it settled.
    ended: Option<Ended>,
    /// In how many µs messages got through that a relay published.
    took_us: Vec<i64>,
    /// Messages that failed. Of more kinds than are kept the rest is left out.
    errors: Vec<ErrorGroup>,
    /// It scheduled a message.
    waiting_changed: bool,
    /// It changed what waits, or what may go, by hand.
    by_hand: bool,
    /// When the first message expires that it enqueued, in µs since 1970.
    expires_us: Option<i64>,
    /// It installed the extension.
    installed: bool,
}

/// What this session does at the end of its transaction.
#[derive(Default)]
struct Transaction {
    effects: Nested<Effects>,
    /// The sum of `Effects::pending`, which each enqueue asks for.
    pending: BTreeMap<u64, i64>,
    /// How many `Effects::parcels` there are.
    handoffs: usize,
    // What follows is done however the transaction ends, and whatever savepoint was rolled back.
    /// The workers are woken: messages may have waited for the end of this transaction.
    wakes: bool,
    /// The launcher is told that databases may have changed. Workers that were sent away may come back.
    vacates: bool,
    /// This session waits no more for the end of a message.
    waits: bool,
    /// This session asks the workers for nothing any more.
    has_request: bool,
}

thread_local! {
    static TRANSACTION: RefCell<Transaction> = RefCell::default();
}

/// From `_PG_init`.
pub fn init() {
    xact::on_end(ended);
}

fn record(body: impl FnOnce(&mut Effects)) {
    TRANSACTION.with_borrow_mut(|transaction| body(transaction.effects.of(xact::current_savepoint())));
}

// ---- what it does ---------------------------------------------------------------------------------------------------

/// This transaction enqueued `count` messages of a destination: wake the workers when it commits.
pub fn enqueued(destination: &str, count: i64) {
    pending_changed(destination, count);
    more_wait(count);
}

/// This transaction changed by so many how many messages of a destination wait.
pub fn pending_changed(destination: &str, by: i64) {
    let number = statistics::number_of(destination);
    record(|effects| *effects.pending.entry(number).or_default() += by);
    TRANSACTION.with_borrow_mut(|transaction| *transaction.pending.entry(number).or_default() += by);
}

/// How many messages this transaction has added to a destination, given by its number.
pub fn own_pending(number: u64) -> i64 {
    TRANSACTION.with_borrow(|transaction| transaction.pending.get(&number).copied().unwrap_or_default())
}

/// This transaction changed how many messages of this database wait: wake the workers when it commits.
pub fn more_wait(count: i64) {
    record(|effects| {
        effects.changes_what_waits = true;
        effects.enqueued += count;
    });
    TRANSACTION.with_borrow_mut(|transaction| transaction.wakes = true);
}

/// Whether this transaction has enqueued, or changed by hand what waits.
pub fn has_enqueued() -> bool {
    TRANSACTION.with_borrow(|transaction| transaction.effects.iter().any(|effects| effects.changes_what_waits))
}

/// This transaction ended what a relay had claimed.
pub fn record_ended(ended: Ended) {
    record(|effects| effects.ended.get_or_insert_default().add(ended));
}

/// So long took messages that a relay published in this transaction.
pub fn record_took(took_us: Vec<i64>) {
    record(|effects| effects.took_us.extend(took_us));
}

/// In this transaction messages failed.
pub fn record_error(error: ErrorGroup) {
    record(|effects| add_error(&mut effects.errors, error));
}

fn add_error(errors: &mut Vec<ErrorGroup>, error: ErrorGroup) {
    let has_room = errors.len() < error_groups::MAX_OF_DATABASE;
    match errors.iter_mut().find(|known| known.is_like(&error)) {
        Some(known) => known.add(&error),
        None if has_room => errors.push(error),
        None => {}
    }
}

/// This transaction made a message ready to go. By the fast path if there is a parcel.
pub fn ready(destination: &str, partition: Partition, seq: i64, handoff: Option<Handoff>) {
    is_shown(destination, partition, seq);
    match handoff {
        Some(handoff) => {
            record(|effects| effects.handoffs.push(handoff));
            TRANSACTION.with_borrow_mut(|transaction| transaction.handoffs += 1);
        }
        None => read_again(Class::of(destination), partition, seq),
    }
}

/// Whether so many more messages of this transaction may go by the fast path.
pub fn may_use_fast_path(count: usize) -> bool {
    TRANSACTION.with_borrow(|transaction| eligibility::is_room(transaction.handoffs, count))
}

/// This transaction put a message where views look for what waits.
pub fn is_shown(destination: &str, partition: Partition, seq: i64) {
    let lane = (statistics::number_of(destination), partition);
    record(|effects| {
        let (_, first) = effects
            .firsts
            .entry(lane)
            .or_insert_with(|| (destination.to_owned(), seq));
        *first = seq.min(*first);
    });
}

/// This transaction made so many more dead letters, or fewer, and so many that block others, with this seq.
pub fn dead_changed(by: [i64; 2], seq: i64) {
    record(|effects| {
        for ((count, low), by) in effects.dead.iter_mut().zip(&mut effects.dead_lows).zip(by) {
            *count += by;
            *low = lower(*low, (by > 0).then_some(seq));
        }
    });
}

/// After this transaction a lane of this class is to be read again from here.
pub fn read_again(class: Class, partition: Partition, seq: i64) {
    record(|effects| {
        let low = effects.lows.entry((class, partition)).or_insert(seq);
        *low = seq.min(*low);
    });
}

/// This transaction scheduled a message.
pub fn waiting_changed() {
    record(|effects| effects.waiting_changed = true);
}

/// This transaction changed what waits, or what may go, by hand.
pub fn changed_by_hand() {
    record(|effects| {
        effects.waiting_changed = true;
        effects.by_hand = true;
    });
}

/// This transaction enqueued a message that expires then, in µs since 1970.
pub fn expires_at(us: i64) {
    record(|effects| effects.expires_us = lower(effects.expires_us, Some(us)));
}

/// This transaction installed the extension: tell the launcher when it commits.
pub fn installed() {
    record(|effects| effects.installed = true);
}

/// This session waits for the end of a message: it shall be woken, until its transaction is over.
pub fn waiting() {
    TRANSACTION.with_borrow_mut(|transaction| transaction.waits = true);
}

/// This session asks the workers for something, until its transaction is over at the latest.
pub fn requesting() {
    TRANSACTION.with_borrow_mut(|transaction| transaction.has_request = true);
}

/// It does so no more.
pub fn end_request() {
    TRANSACTION.with_borrow_mut(Transaction::end_request);
}

/// This transaction may change which databases there are, and may have sent workers away: when it ends, however it ends,
/// let them back and tell the launcher.
pub fn databases_change() {
    TRANSACTION.with_borrow_mut(|transaction| transaction.vacates = true);
}

// ---- how savepoints end ---------------------------------------------------------------------------------------------

impl Absorb for Effects {
    fn absorb(&mut self, child: Self) {
        // By name: a field that is added and forgotten here does not compile.
        let Self {
            changes_what_waits,
            enqueued,
            pending,
            lows,
            firsts,
            handoffs,
            dead,
            dead_lows,
            ended,
            took_us,
            errors,
            waiting_changed,
            by_hand,
            expires_us,
            installed,
        } = child;
        self.changes_what_waits |= changes_what_waits;
        self.enqueued += enqueued;
        merge(&mut self.pending, pending, |known, more| *known += more);
        merge(&mut self.lows, lows, |known, seq| *known = seq.min(*known));
        merge(&mut self.firsts, firsts, |(_, known), (_, seq)| {
            *known = seq.min(*known)
        });
        append(&mut self.handoffs, handoffs);
        for (count, more) in self.dead.iter_mut().zip(dead) {
            *count += more;
        }
        for (low, other) in self.dead_lows.iter_mut().zip(dead_lows) {
            *low = lower(*low, other);
        }
        if let Some(ended) = ended {
            self.ended.get_or_insert_default().add(ended);
        }
        append(&mut self.took_us, took_us);
        errors.into_iter().for_each(|error| add_error(&mut self.errors, error));
        self.waiting_changed |= waiting_changed;
        self.by_hand |= by_hand;
        self.expires_us = lower(self.expires_us, expires_us);
        self.installed |= installed;
    }
}

/// The smaller goes into the larger, so `join` must not care which is which.
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

/// The lower of the two, as far as they are known.
fn lower(one: Option<i64>, other: Option<i64>) -> Option<i64> {
    one.into_iter().chain(other).min()
}

// ---- how the transaction ends ---------------------------------------------------------------------------------------

/// After Committed nothing here may allocate, log or raise: what there is only shrinks.
fn ended(end: End) {
    if end == End::Preparing && !transactions::prepare() {
        pgrx::error!("outbox has no room for another prepared transaction");
    }
    TRANSACTION.with_borrow_mut(|transaction| match end {
        End::Committing => transaction.copy_to_slot(),
        End::Committed => {
            transaction.tell();
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
    /// What goes by the fast path lies there before anybody can see its rows.
    fn copy_to_slot(&mut self) {
        let handoffs = &mut self.effects.whole().handoffs;
        if !handoffs.is_empty() {
            xact::commits_all_the_same(AssertUnwindSafe(|| commit::copy_to_slot(handoffs)));
        }
    }

    /// After Committed.
    fn tell(&mut self) {
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

    /// The transaction is over, however it ended: messages may have waited for its own.
    fn leave(&mut self) {
        publishing::transaction_over();
        transactions::leave();
        if std::mem::take(&mut self.wakes) {
            databases::wake_workers();
        }
        if std::mem::take(&mut self.vacates) {
            vacancies::let_back();
        }
        if std::mem::take(&mut self.waits) {
            waiters::stop();
        }
        self.end_request();
        commit::take_back(&mut self.effects.whole().handoffs); // it did not commit
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
        publishing::savepoint_aborted(id);
        self.end_request(); // the statement that asked has failed
        if self.vacates {
            vacancies::let_back(); // the statement may have failed; if not, core's lock still keeps the workers out
        }
    }

    fn end_request(&mut self) {
        if std::mem::take(&mut self.has_request) {
            requests::stop();
        }
    }
}

/// After Committed, each of these: what is visible now is told.
impl Effects {
    /// In this order: visible already; from where to read. Then the transaction is no longer open, and then the workers look:
    /// see `shared::fastpath`.
    fn notify_workers(&mut self, database: &Database) {
        commit::hand_over(database, &mut self.handoffs);
        for ((class, partition), low) in &self.lows {
            database.rewind_to(*class, *partition, *low);
        }
        database.enqueued(self.enqueued);
        self.record_expiry(database);
        if self.by_hand {
            database.changed_by_hand();
        }
        if self.waiting_changed {
            database.waiting_changed();
            database.ended();
        }
    }

    /// The upkeep looks for it at its time. Also at PREPARE, for COMMIT PREPARED tells nothing.
    fn record_expiry(&self, database: &Database) {
        if let Some(us) = self.expires_us {
            database.expires_at(us);
        }
    }

    fn record_for_views(&self, database: &Database) {
        for (blocks, low) in [false, true].into_iter().zip(self.dead_lows) {
            if let Some(low) = low {
                database.floors().record_dead(blocks, low);
            }
        }
        if self.dead != [0, 0] {
            database.dead_changed(self.dead);
        }
        for ((number, partition), (destination, seq)) in &self.firsts {
            floors::record(database.floors(), destination, partition.index(), *number, *seq);
        }
    }

    fn record_ended_messages(&self, database: &Database) {
        if let Some(ended) = &self.ended {
            database.settled(ended, now_us());
        }
        if !self.took_us.is_empty() {
            let mut took = Took::default();
            self.took_us.iter().for_each(|took_us| took.note(*took_us));
            database.confirmed(&took, now_us());
        }
    }
}
