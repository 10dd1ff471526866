//! The process around a worker in the server, as crates/worker calls it: tables through SPI, shared memory, the
//! settings and the log. Runs on the main thread of a worker.

use super::context::WorkerContext;
use super::transaction::{LAST_TRANSACTION_MS, in_transaction, in_transaction_within};
use crate::config::Settings;
use crate::pg::clock::now_us;
use crate::pg::txn::{Durability, TransactionFailure};
use crate::pg::{bgworker, catalog, signals};
use crate::shared::error_groups::{self, FailureGroup};
use crate::shared::fast_path;
use crate::shared::{databases, statistics, transactions};
use crate::store::standbys;
use outbox_core::engine::{Arrived, Events, HeldLease, Memory, Sharing, SlotId};
use outbox_core::lease::Lease;
use outbox_core::message::Pointer;
use outbox_core::open_transactions::OpenTransaction;
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use outbox_core::standbys::Replication;
use outbox_core::throughput::DeliveryTimes;
use outbox_transport::kind::{Limits, Target};
use outbox_transport::{Deadline, NotStarted, Started, Starter, Waker};
use outbox_worker::protocol::{Db, WorkerProtocol};
use outbox_worker::rewinds::{RewindGroup, RewindLane, Rewound};
use outbox_worker::{
    Changes, ConnectionStatus, DEFAULT_DESTINATION, LeaseChanges, Orders, PassCounts, PassEnd, Refresh, Repeats, Tended,
};
use std::cell::Cell;
use std::fmt::Arguments;
use std::sync::LazyLock;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// The wait after a failure, in ms.
const PAUSE_AFTER_FAILURE_MS: u32 = 500;
/// How long a worker may take to leave when it gives its slot to another database. A third of this is for outstanding
/// outcomes.
const LEAVE: Duration = Duration::from_secs(15);
/// How often a worker checks whether a catalog has changed. If one has, the worker reads its settings again.
const CONFIG_CHECK_EVERY: Duration = Duration::from_secs(1);
/// How often a worker reads its settings even if no catalog has changed. Most settings are in catalogs, and the calls
/// that write the others notify the workers.
const CONFIG_READ_EVERY: Duration = Duration::from_secs(10);

/// Until when the publisher threads of this process may publish: no longer than its leases last. The threads check this
/// before each message.
pub static DEADLINE: LazyLock<Deadline> = LazyLock::new(Deadline::default);

pub struct ServerRuntime {
    context: WorkerContext,
    sharing: Sharing,
    starter: Starter,
    /// The number of calls of this database's workers when this pass began.
    calls: Cell<Option<u32>>,
    /// The number of requests to recheck a connection, as of the last call.
    rechecks: Cell<u32>,
    /// The settings of ALTER DATABASE and ALTER ROLE when this session began; None = they changed while it began.
    session_defaults: Option<String>,
    check_due: Cell<Instant>,
    read_due: Cell<Instant>,
    /// `catalog::changes` as of the last check that read the settings.
    catalog_changes: Cell<u64>,
    failures: Repeats,
}

impl ServerRuntime {
    pub fn new(context: WorkerContext, sharing: Sharing, waker: Waker, session_defaults: Option<String>) -> Self {
        let now = Instant::now();
        Self {
            context,
            sharing,
            starter: Starter::new(waker, DEADLINE.clone()),
            calls: Cell::new(None),
            // One less: a session may have requested a recheck before this worker began.
            rechecks: Cell::new(statistics::rechecks().wrapping_sub(1)),
            session_defaults,
            check_due: Cell::new(now),
            read_due: Cell::new(now),
            catalog_changes: Cell::new(0),
            failures: Repeats::default(),
        }
    }

    pub fn waker(&self) -> &Waker {
        self.starter.waker()
    }

    /// Reloads the settings. Returns those that crates/worker uses.
    pub fn reload(&self) -> outbox_worker::WorkerSettings {
        let settings = Settings::snapshot();
        let worker = settings.worker.clone();
        let before = self.context.settings.replace(settings);
        if before.retention != self.context.settings.borrow().retention {
            request_maintenance();
        }
        self.check_due.set(Instant::now()); // outbox.identity may have changed
        worker
    }
}

impl outbox_worker::Runtime for ServerRuntime {
    type Tables = WorkerContext;
    type Publisher = Started;
    const HAS_FAST_PATH: bool = true;
    /// Maintenance removes dead workers.
    const PURGE_EVERY: Option<Duration> = None;

    fn id(&self) -> &str {
        &self.context.id
    }

    fn tables(&self) -> &WorkerContext {
        &self.context
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn now_us(&self) -> i64 {
        now_us()
    }

    fn boottime_ns(&self) -> u64 {
        Deadline::now()
    }

    // ---- control ----------------------------------------------------------------------------------------------------

    fn begin_pass(&self) {
        // Read before the pass, so that the pass sees what these calls were for.
        self.calls
            .set(self.context.database.map(|database| database.calls.read()));
        self.starter.waker().clear();
    }

    fn end_pass(&self, end: PassEnd) {
        let slot = self.context.slot;
        slot.set_idle(self.calls.get().filter(|_| end.is_at_rest));
        slot.set_in_flight(end.in_flight);
        if end.report.is_notable() {
            slot.record_pass(&end.report);
        }
    }

    fn orders(&self) -> Orders {
        Orders {
            leave: self.context.slot.is_to_leave().then_some(LEAVE),
            request: self.context.database.and_then(|database| database.request.now()),
            ..Orders::default()
        }
    }

    fn is_ending(&self) -> bool {
        signals::is_shutdown_requested()
    }

    /// Stores the result of a request; with `done`, also wakes the session that made the request.
    fn answer(&self, request_id: u32, report: &PassCounts, done: bool) {
        if let Some(database) = self.context.database {
            self.context
                .slot
                .answer()
                .report(&database.request, request_id, report, done);
        }
    }

    fn nothing_waits(&self) -> bool {
        self.context.database.and_then(|database| database.pending.get()) == Some(0)
    }

    // ---- settings ---------------------------------------------------------------------------------------------------

    /// Reads changed settings and destinations. Returns `NewSession` if a new session would start with other settings:
    /// this worker then ends.
    fn refresh(&self, immediately: bool) -> Result<Refresh, TransactionFailure> {
        let (now, store) = (Instant::now(), &self.context.store);
        let changes = self.context.changes_by_hand();
        let must_read = immediately || changes != self.context.changes_seen.get() || now >= self.read_due.get();
        if now < self.check_due.get() && !must_read {
            return Ok(Refresh::Skipped);
        }
        let known = self.catalog_changes.get();
        let (catalog_changes, read, not_adopted) =
            in_transaction(c"outbox: read settings", Durability::Relaxed, || {
                let catalog_changes = catalog::changes();
                if catalog_changes != known {
                    store.record_owners()?; // REASSIGN OWNED fires no event trigger
                }
                let read = match must_read || catalog_changes != known {
                    true => Some((store.session_defaults()?, store.destinations()?)),
                    false => None,
                };
                let not_adopted = store.not_adopted()?;
                store.refresh_source()?; // after the adoption check: a restored dump is complete by then
                Ok((catalog_changes, read, not_adopted))
            })?;
        self.check_due.set(now + CONFIG_CHECK_EVERY);
        let mut described = None;
        if let Some((defaults, destinations)) = read {
            self.read_due.set(now + CONFIG_READ_EVERY);
            self.catalog_changes.set(catalog_changes);
            store_session_defaults(&defaults);
            if self.session_defaults.as_ref() != Some(&defaults) {
                let id = &self.context.id;
                pgrx::log!("outbox {id}: settings of the database or role changed; restarting");
                request_maintenance();
                return Ok(Refresh::NewSession);
            }
            self.context.changes_seen.set(changes);
            described = Some(destinations);
        }
        Ok(Refresh::Changed(Box::new(Changes {
            not_adopted,
            settings: None, // a reload takes them over
            described,
        })))
    }

    fn is_stale(&self) -> bool {
        self.context.is_stale()
    }

    // ---- leases -----------------------------------------------------------------------------------------------------

    fn tend(
        &self,
        is_idle: bool,
        plan: &mut dyn FnMut(&[String], &[Lease]) -> LeaseChanges,
    ) -> Result<Tended, TransactionFailure> {
        let WorkerContext {
            store, slot, database, ..
        } = &self.context;
        let settings = self.context.settings.borrow();
        let ttl_s = settings.lease_ttl_s;
        // An asynchronous commit keeps the WAL writer awake for 10 s, which is until the next heartbeat.
        let durability = if is_idle { Durability::Full } else { Durability::Relaxed };
        in_transaction(c"outbox: leases", durability, || {
            let workers = store.protocol.heartbeat(bgworker::my_pid(), settings.heartbeat_ttl_s)?;
            if self.sharing == Sharing::RowClaims {
                slot.hold_leases(ttl_s);
                return Ok(Tended { workers, leased: None });
            }
            let plan = plan(&workers, &store.protocol.leases()?);
            store.release(&plan.release)?;
            let renewed = store.renew(&plan.renew, ttl_s)?;
            let is_renewed = |(partition, _): &HeldLease| renewed.contains(partition);
            let mut held: Vec<HeldLease> = plan.renew.into_iter().filter(is_renewed).collect();
            let new = store.take(&plan.take, ttl_s)?;
            held.extend(&new);
            held.sort_unstable();
            // Before another worker can take them: the rows of the leases are still locked.
            slot.hold_leases(ttl_s);
            if let Some(database) = database {
                held.iter()
                    .for_each(|(partition, _)| database.own_lanes(*partition, slot));
            }
            // New partitions are read from the start.
            new.iter().for_each(|(partition, _)| fast_path::begin_lane(*partition));
            Ok(Tended {
                workers,
                leased: Some((held, Duration::from_secs(ttl_s as u64))),
            })
        })
    }

    fn set_deadline(&self, deadline: Option<(u64, Duration)>) {
        match deadline {
            Some((from_ns, lasts)) => DEADLINE.set(from_ns, lasts),
            None => DEADLINE.lift(),
        }
    }

    fn worker_changes(&self) -> u64 {
        self.context
            .database
            .map_or(0, |database| database.worker_changes.read().into())
    }

    fn call_others(&self) {
        databases::recheck();
    }

    fn purge(&self) -> Result<i64, TransactionFailure> {
        let purge = || self.context.store.protocol.purge_workers();
        in_transaction(c"outbox: purge workers", Durability::Relaxed, purge)
    }

    fn leave(&self) -> Result<(), TransactionFailure> {
        let leave = || self.context.store.protocol.leave();
        in_transaction_within(c"outbox: leave", LAST_TRANSACTION_MS, Durability::Relaxed, leave)
    }

    // ---- standbys ---------------------------------------------------------------------------------------------------

    fn replication(&self) -> Result<Replication, TransactionFailure> {
        in_transaction(c"outbox: read standbys", Durability::Relaxed, standbys::replication)
    }

    // ---- shared memory ----------------------------------------------------------------------------------------------

    fn take_rewinds(&self, groups: &[RewindGroup], leases: &[HeldLease]) -> Result<Vec<Rewound>, TransactionFailure> {
        transactions::reap(); // first: it also records the rewinds of prepared transactions that have ended
        let Some(database) = self.context.database else {
            return Ok(Vec::new());
        };
        let lanes = leases.iter().flat_map(|(partition, _)| {
            let lanes = groups.iter().map(|group| group.lane(*partition));
            lanes.chain([RewindLane::UNBLOCKED]).map(|lane| (*partition, lane))
        });
        let take = |(partition, lane)| {
            let seq = database.take_rewind(lane, partition, self.context.slot)?;
            Some(Rewound { partition, lane, seq })
        };
        Ok(lanes.filter_map(take).collect())
    }

    fn schedules(&self) -> u32 {
        self.context.database.map_or(0, |database| database.schedules.read())
    }

    fn take_ready(&self) -> Vec<Arrived> {
        fast_path::take(self.context.slot.entry())
    }

    // ---- a destination ----------------------------------------------------------------------------------------------

    fn serves(&self, destinations: &[&str]) {
        statistics::forget_but(destinations);
        let mut served = self.context.destinations.borrow_mut();
        served.retain(|name, _| destinations.contains(&name.as_str()));
        served.values_mut().for_each(|served| served.stats.take_entry()); // one may be free now
        if statistics::is_any_uncounted() {
            request_maintenance();
        }
    }

    fn limit(&self, destination: &str, limits: &Limits) {
        self.context.with_destination(destination, |served| {
            served.stats.set_max_pending(limits.max_pending);
        });
    }

    fn start(&self, target: &Target, connection: &str) -> Result<Started, NotStarted> {
        self.starter.start(target, connection)
    }

    fn confirmed(&self, pointer: &Pointer, at_us: i64) {
        self.context.with_destination(&pointer.destination, |served| {
            served.delivery_times.note(at_us.saturating_sub(pointer.enqueued_at_us));
        });
    }

    fn settled(&self, destination: &str, ended: &Ended) {
        let now_us = now_us();
        let times = self.context.with_destination(destination, |served| {
            let times = match ended.published {
                0 => DeliveryTimes::default(),
                _ => std::mem::take(&mut served.delivery_times),
            };
            served.stats.settled(ended, now_us);
            served.stats.confirmed(&times, now_us);
            times
        });
        if let Some(database) = self.context.database {
            database.settled(ended, now_us);
            database.throughput.count_times(&times, now_us);
        }
    }

    fn record_in_flight(&self, destination: &str, count: usize) {
        self.context
            .with_destination(destination, |served| served.stats.set_in_flight(count));
    }

    fn are_rechecks_requested(&self) -> bool {
        let rechecks = statistics::rechecks();
        self.rechecks.replace(rechecks) != rechecks
    }

    fn take_recheck_request(&self, destination: &str) -> bool {
        self.context
            .with_destination(destination, |served| served.stats.take_recheck_request())
    }

    fn report(
        &self,
        destination: &str,
        status: Option<&ConnectionStatus>,
        requested_at_us: Option<i64>,
    ) -> Result<(), TransactionFailure> {
        in_transaction(c"outbox: report", Durability::Relaxed, || {
            let store = &self.context.store;
            (store.protocol).report(destination, status, requested_at_us)
        })
    }

    fn record_error(&self, destination: &str, reason: &'static str, detail: &str) {
        error_groups::record(&FailureGroup::of_destination(destination, reason, detail));
    }

    // ---- log --------------------------------------------------------------------------------------------------------

    fn log(&self, destination: Option<&str>, text: Arguments) {
        let id = &self.context.id;
        match destination {
            None | Some(DEFAULT_DESTINATION) => pgrx::log!("outbox {id}: {text}"),
            Some(name) => pgrx::log!("outbox {id}, destination {name}: {text}"),
        }
    }

    fn failed(&self, failure: TransactionFailure) -> Result<u32, TransactionFailure> {
        if signals::is_shutdown_requested() {
            return Ok(0); // the shutdown cancelled the statement
        }
        let db = &self.context.store.protocol.db;
        let is_of_source = (db.source.borrow().as_ref()).is_some_and(|source| source.says(&failure.message));
        error_groups::record(&FailureGroup::of_statement(&failure.message, is_of_source));
        db.forget();
        if self.failures.is_news(&failure.message, Instant::now()) {
            pgrx::warning!("outbox {}: {}; tries again", self.context.id, failure.message);
        }
        Ok(PAUSE_AFTER_FAILURE_MS)
    }
}

impl Memory for ServerRuntime {
    type Error = TransactionFailure;

    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, TransactionFailure> {
        Ok(transactions::open_transactions())
    }

    fn peek_rewinds(&self, destination: &str, leases: &[HeldLease]) -> Vec<(Partition, i64)> {
        // In this order: a process that withdraws a ready message sets the rewind first.
        let mut ready = fast_path::lowest_ready(destination);
        let group = RewindGroup::of(destination);
        let peek = |(partition, _): &HeldLease| {
            let rewind = self.context.database?.peek_rewind(group.lane(*partition), *partition);
            let low = ready.remove(partition).into_iter().chain(rewind).min()?;
            Some((*partition, low))
        };
        leases.iter().filter_map(peek).collect()
    }

    fn read_events(&self, seqs: &[i64], bytes: usize) -> Events {
        let read = in_transaction(c"outbox: read events", Durability::Relaxed, || {
            let WorkerProtocol { db, worker } = &self.context.store.protocol;
            db.check_source(worker)?;
            Ok(db.events(seqs, bytes).unwrap_or_default())
        });
        read.unwrap_or_default()
    }

    fn withdraw(&self, destination: &str, claimed: &[(Partition, i64)]) {
        fast_path::revoke(destination, claimed);
    }

    fn free_slot(&self, slot_id: SlotId) {
        fast_path::free(slot_id);
    }

    fn give_up(&self, slot_id: SlotId, destination: &str, partition: Partition, seq: i64) {
        if let Some(database) = self.context.database {
            database.rewind_to(RewindGroup::of(destination).lane(partition), partition, seq);
        }
        fast_path::free(slot_id);
    }
}

/// Stores the session defaults for workers that start from now on. Returns their hash.
pub fn store_session_defaults(defaults: &str) -> u64 {
    let hash = statistics::number_of(defaults).max(1);
    if let Some(database) = databases::my_database() {
        database.session_defaults.store(hash, SeqCst);
    }
    hash
}

/// Requests a maintenance run: its settings changed, or the messages of a destination are not counted yet.
fn request_maintenance() {
    if let Some(database) = databases::my_database() {
        database.request_maintenance();
    }
}
