//! Implements the runtime of crates/worker for a worker outside the server: shared memory through a session, the
//! settings that the server shows, and the log. Runs on the worker's thread, which waits for each result of the server.

use super::args::WorkArgs;
use super::context::WorkContext;
use super::error::{WorkError, WorkErrorKind};
use super::settings;
use super::worker_session::Refreshed;
use crate::failure::{Code, Failure};
use crate::progress::WorkerProgress;
use crate::shutdown::Shutdown;
use outbox_core::engine::{HeldLease, Memory, Request, Sharing};
use outbox_core::lease::Lease;
use outbox_core::message::Pointer;
use outbox_core::open_transactions::OpenTransaction;
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use outbox_core::standbys::Replication;
use outbox_transport::kind::Target;
use outbox_transport::{Deadline, NotStarted, Started, Starter};
use outbox_worker::rewinds::{RewindGroup, Rewound};
use outbox_worker::{
    Changes, ConnectionStatus, DEFAULT_DESTINATION, LeaseChanges, Orders, PassCounts, PassEnd, Tended,
};
use std::cell::{Cell, RefCell};
use std::fmt::Arguments;
use std::sync::Arc;
use std::time::{Duration, Instant};

const REFRESH_EVERY: Duration = Duration::from_secs(1);
const PAUSE_AFTER_FAILURE_MS: u32 = 500;
/// How long `--once` waits for partitions that other workers must release.
const SHARE_PATIENCE: Duration = Duration::from_secs(3);
/// The request id of the pass that `--once` requests.
const ONCE: u32 = 1;

pub struct WorkRuntime {
    pub context: WorkContext,
    args: WorkArgs,
    stop: Shutdown,
    screen: Option<Arc<WorkerProgress>>,
    sharing: Sharing,
    session_defaults: String,
    starter: Starter,
    began: Instant,
    refresh_due: Cell<Instant>,
    /// Between two passes: the worker claims nothing until then.
    pub rests_until: Cell<Instant>,
    /// Whether the next wait makes the other workers check the leases.
    pub notifies_others: Cell<bool>,
    /// The end of the last pass, until the loop takes it.
    pub ended: RefCell<Option<PassEnd>>,
    /// Whether the pass that `--once` requests is done.
    pub has_run_once: Cell<bool>,
}

impl WorkRuntime {
    pub fn new(
        context: WorkContext,
        args: &WorkArgs,
        stop: &Shutdown,
        screen: Option<&Arc<WorkerProgress>>,
        starter: Starter,
        refreshed: &Refreshed,
        sharing: Sharing,
    ) -> Self {
        let now = Instant::now();
        Self {
            context,
            args: args.clone(),
            stop: stop.clone(),
            screen: screen.cloned(),
            sharing,
            session_defaults: refreshed.session_defaults.clone(),
            starter,
            began: now,
            refresh_due: Cell::new(now + REFRESH_EVERY),
            rests_until: Cell::new(now),
            notifies_others: Cell::new(false),
            ended: RefCell::default(),
            has_run_once: Cell::new(false),
        }
    }

    /// Stops the publishers: they publish nothing more.
    pub fn end(&self) {
        self.starter.deadline.end();
    }
}

impl outbox_worker::Runtime for WorkRuntime {
    type Tables = WorkContext;
    type Publisher = Started;
    const HAS_FAST_PATH: bool = false;
    const PURGE_EVERY: Option<Duration> = Some(Duration::from_secs(60));

    fn id(&self) -> &str {
        &self.context.session.protocol.worker
    }

    fn tables(&self) -> &WorkContext {
        &self.context
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn now_us(&self) -> i64 {
        self.context.session.now_us()
    }

    fn boottime_ns(&self) -> u64 {
        Deadline::now()
    }

    // ---- control ----------------------------------------------------------------------------------------------------

    fn begin_pass(&self) {
        self.starter.waker().clear();
    }

    fn end_pass(&self, end: PassEnd) {
        self.context.totals.borrow_mut().claimed += end.report.claimed;
        self.ended.replace(Some(end));
    }

    fn orders(&self) -> Orders {
        let held = self.screen.as_ref().is_some_and(|progress| progress.holds());
        Orders {
            leave: None,
            rests: Instant::now() < self.rests_until.get(),
            held: held.then_some("held at the terminal of this worker"),
            once: self.args.once,
            share_by: self.args.once.then(|| self.began + SHARE_PATIENCE),
            request: self.args.once.then_some((ONCE, Request::Pass)),
        }
    }

    fn is_ending(&self) -> bool {
        self.stop.is_requested()
    }

    fn answer(&self, _request_id: u32, _report: &PassCounts, done: bool) {
        self.has_run_once.set(done);
    }

    // ---- settings ---------------------------------------------------------------------------------------------------

    fn refresh(&self, immediately: bool) -> Result<outbox_worker::Refresh, WorkError> {
        let now = Instant::now();
        if now < self.refresh_due.get() && !immediately {
            return Ok(outbox_worker::Refresh::Skipped);
        }
        self.refresh_due.set(now + REFRESH_EVERY);
        let refreshed = self.context.session.refresh()?;
        match sharing(&refreshed) {
            Ok(sharing) if sharing != self.sharing => return Ok(outbox_worker::Refresh::NewSession),
            Err(error) if error.kind != WorkErrorKind::NotNow => return Err(error),
            _ => {}
        }
        if refreshed.session_defaults != self.session_defaults {
            return Ok(outbox_worker::Refresh::NewSession); // ALTER DATABASE and ALTER ROLE apply to new sessions only
        }
        Ok(outbox_worker::Refresh::Changed(Box::new(Changes {
            settings: Some(settings::read(&refreshed, &self.args)?),
            not_adopted: refreshed.not_adopted,
            described: Some(refreshed.destinations),
        })))
    }

    // ---- leases -----------------------------------------------------------------------------------------------------

    fn tend(
        &self,
        _is_idle: bool,
        plan: &mut dyn FnMut(&[String], &[Lease]) -> LeaseChanges,
    ) -> Result<Tended, WorkError> {
        let session = &self.context.session;
        let mut workers = session.heartbeat()?;
        if self.sharing == Sharing::RowClaims {
            session.lease(&[], &[], &[])?; // renews its claims
            return Ok(Tended { workers, leased: None });
        }
        if self.args.no_leasing {
            workers = vec![session.protocol.worker.clone()];
        }
        let plan = plan(&workers, &session.protocol.leases()?);
        let (held, ttl_s) = session.lease(&plan.renew, &plan.release, &plan.take)?;
        let partitions = held.iter().map(|(partition, _): &HeldLease| *partition);
        self.context.partitions.replace(partitions.collect());
        // Without a lease there is nothing to publish.
        let lasts = Duration::from_secs(ttl_s.unwrap_or_default());
        Ok(Tended {
            workers,
            leased: Some((held, lasts)),
        })
    }

    fn set_deadline(&self, deadline: Option<(u64, Duration)>) {
        match deadline {
            Some((from_ns, lasts)) => self.starter.deadline.set(from_ns, lasts),
            None => self.starter.deadline.lift(),
        }
    }

    fn worker_changes(&self) -> u64 {
        self.context.seen.borrow().worker_changes as u64
    }

    fn call_others(&self) {
        self.notifies_others.set(true); // sent with the next wait
    }

    fn purge(&self) -> Result<i64, WorkError> {
        self.context.session.protocol.purge_workers()
    }

    fn leave(&self) -> Result<(), WorkError> {
        self.context.session.leave()
    }

    // ---- standbys ---------------------------------------------------------------------------------------------------

    fn replication(&self) -> Result<Replication, WorkError> {
        self.context.session.replication()
    }

    // ---- shared memory ----------------------------------------------------------------------------------------------

    fn take_rewinds(&self, _: &[RewindGroup], _: &[HeldLease]) -> Result<Vec<Rewound>, WorkError> {
        self.context.session.rewinds(&self.context.partitions.borrow())
    }

    fn schedules(&self) -> u32 {
        self.context.seen.borrow().schedules
    }

    // ---- a destination ----------------------------------------------------------------------------------------------

    fn start(&self, target: &Target, connection: &str) -> Result<Started, NotStarted> {
        self.starter.start(target, connection)
    }

    fn serves(&self, destinations: &[&str]) {
        let mut delivery_us = self.context.delivery_us.borrow_mut();
        delivery_us.retain(|name, _| destinations.contains(&name.as_str()));
    }

    fn confirmed(&self, pointer: &Pointer, at_us: i64) {
        let mut delivery_us = self.context.delivery_us.borrow_mut();
        let time_us = (at_us - pointer.enqueued_at_us).max(0);
        match delivery_us.get_mut(&*pointer.destination) {
            Some(its) => its.push(time_us),
            None => _ = delivery_us.insert(pointer.destination.to_string(), vec![time_us]),
        }
    }

    fn settled(&self, _: &str, ended: &Ended) {
        self.context.totals.borrow_mut().ended.add(*ended);
    }

    /// Reports only whether there are some.
    fn report_in_flight(&self, destination: &str, count: usize) -> Result<(), WorkError> {
        let mut reported = self.context.reported_in_flight.borrow_mut();
        if (count == 0) == reported.contains(destination) {
            self.context.session.report_in_flight(destination, count)?;
            match count {
                0 => _ = reported.remove(destination),
                _ => _ = reported.insert(destination.to_owned()),
            }
        }
        Ok(())
    }

    fn report(&self, destination: &str, status: Option<&ConnectionStatus>, _: Option<i64>) -> Result<(), WorkError> {
        self.context.session.protocol.report(destination, status, None)
    }

    // ---- log --------------------------------------------------------------------------------------------------------

    fn log(&self, destination: Option<&str>, text: Arguments) {
        match destination {
            None | Some(DEFAULT_DESTINATION) => self.context.log.line(text),
            Some(name) => self.context.log.line(format_args!("destination {name}: {text}")),
        }
    }

    fn failed(&self, error: WorkError) -> Result<u32, WorkError> {
        let is_final = error.kind == WorkErrorKind::Lost || error.failure.code != Code::Refused || self.args.once;
        if is_final {
            return Err(error);
        }
        let message = &error.failure.message;
        self.context.log.failure(format_args!("{message}; tries again"));
        Ok(PAUSE_AFTER_FAILURE_MS)
    }
}

impl Memory for WorkRuntime {
    type Error = WorkError;

    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, WorkError> {
        let context = &self.context;
        let read = context.shared_state.take();
        let read = read.unwrap_or_else(|| context.session.shared_state(&context.partitions.borrow()));
        let (open, rewinds) = match read {
            Ok(shared_state) => (Ok(shared_state.open), shared_state.rewinds),
            Err(error) => (Err(error), Vec::new()),
        };
        context.rewinds.replace(rewinds);
        open
    }

    fn peek_rewinds(&self, destination: &str, leases: &[HeldLease]) -> Vec<(Partition, i64)> {
        let (rewinds, group) = (self.context.rewinds.borrow(), RewindGroup::of(destination));
        let is_its = |rewound: &&Rewound| {
            let is_leased = leases.iter().any(|(partition, _)| *partition == rewound.partition);
            is_leased && group.lane(rewound.partition) == rewound.lane
        };
        (rewinds.iter().filter(is_its))
            .map(|rewound| (rewound.partition, rewound.seq))
            .collect()
    }
}

/// How partitions are shared, or why this worker cannot deliver now.
pub fn sharing(refreshed: &Refreshed) -> Result<Sharing, WorkError> {
    match refreshed.leasing {
        Some(true) => Ok(Sharing::Leases),
        Some(false) => Ok(Sharing::RowClaims),
        None => Err(WorkError {
            kind: WorkErrorKind::NotNow,
            failure: Failure::new(Code::Refused, "outbox_configure() changes the partitions"),
        }),
    }
}
