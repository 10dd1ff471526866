//! Implements the host of crates/worker for a worker outside the server: tables through a session, the settings that
//! the server shows, and the log. Runs on the worker's thread, which waits for each result of the server.

use super::args::WorkArgs;
use super::board::Board;
use super::port::{Here, Port};
use super::session::{Refreshed, Trouble, TroubleKind};
use super::settings;
use super::stop::Stop;
use crate::failure::{Code, Failure};
use outbox_core::engine::{Held, Request, Sharing};
use outbox_core::lease::Lease;
use outbox_core::standbys::Replication;
use outbox_transport::target::Target;
use outbox_transport::{Deadline, NotStarted, Started, Starter};
use outbox_worker::{Changes, DEFAULT_DESTINATION, Orders, PassEnd, Plan, Report, Tended};
use std::cell::{Cell, RefCell};
use std::fmt::Arguments;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

const REFRESH_EVERY: Duration = Duration::from_secs(1);
const PAUSE_AFTER_FAILURE_MS: u32 = 500;
/// How long `--once` waits for partitions that other workers must release.
const SHARE_PATIENCE: Duration = Duration::from_secs(3);
/// The request id of the pass that `--once` requests.
const ONCE: u32 = 1;

pub struct Host {
    pub here: Rc<Here>,
    args: WorkArgs,
    stop: Stop,
    screen: Option<Arc<Board>>,
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

impl Host {
    pub fn new(
        here: Here,
        args: &WorkArgs,
        stop: &Stop,
        screen: Option<&Arc<Board>>,
        starter: Starter,
        refreshed: &Refreshed,
        sharing: Sharing,
    ) -> Self {
        let now = Instant::now();
        Self {
            here: Rc::new(here),
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

impl outbox_worker::Host for Host {
    type Error = Trouble;
    type Port = Port;
    type Publisher = Started;
    const HAS_FAST_PATH: bool = false;
    const PURGE_EVERY: Option<Duration> = Some(Duration::from_secs(60));

    fn id(&self) -> &str {
        &self.here.session.id
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn now_us(&self) -> i64 {
        self.here.session.now_us()
    }

    fn boottime_ns(&self) -> u64 {
        Deadline::now()
    }

    // ---- a destination ----------------------------------------------------------------------------------------------

    fn port(&self, destination: &str) -> Port {
        Port::new(Rc::clone(&self.here), destination)
    }

    fn start(&self, target: &Target, connection: &str) -> Result<Started, NotStarted> {
        self.starter.start(target, connection)
    }

    fn serves(&self, _destinations: &[&str]) {}

    // ---- control ----------------------------------------------------------------------------------------------------

    fn begin_pass(&self) {
        self.starter.waker().clear();
    }

    fn end_pass(&self, end: PassEnd) {
        self.here.totals.borrow_mut().claimed += end.report.claimed;
        self.ended.replace(Some(end));
    }

    fn orders(&self) -> Orders {
        let held = self.screen.as_ref().is_some_and(|board| board.holds());
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

    fn answer(&self, _request_id: u32, _report: &Report, done: bool) {
        self.has_run_once.set(done);
    }

    /// There is no fast path outside the server.
    fn is_something_ready(&self) -> bool {
        false
    }

    fn nothing_waits(&self) -> bool {
        false // unknown outside the server
    }

    // ---- settings ---------------------------------------------------------------------------------------------------

    fn refresh(&self, at_once: bool) -> Result<outbox_worker::Refresh, Trouble> {
        let now = Instant::now();
        if now < self.refresh_due.get() && !at_once {
            return Ok(outbox_worker::Refresh::Skipped);
        }
        self.refresh_due.set(now + REFRESH_EVERY);
        let refreshed = self.here.session.refresh()?;
        match sharing(&refreshed) {
            Ok(sharing) if sharing != self.sharing => return Ok(outbox_worker::Refresh::NewSession),
            Err(trouble) if trouble.kind != TroubleKind::NotNow => return Err(trouble),
            _ => {}
        }
        if refreshed.session_defaults != self.session_defaults {
            return Ok(outbox_worker::Refresh::NewSession); // ALTER DATABASE and ALTER ROLE apply to new sessions only
        }
        Ok(outbox_worker::Refresh::Changed(Box::new(Changes {
            settings: Some(settings::read(&refreshed, &self.args)),
            not_adopted: refreshed.not_adopted,
            described: Some(refreshed.destinations),
        })))
    }

    fn is_stale(&self) -> bool {
        false // matters only for the fast path
    }

    // ---- leases -----------------------------------------------------------------------------------------------------

    fn tend(&self, _is_idle: bool, plan: &mut dyn FnMut(&[String], &[Lease]) -> Plan) -> Result<Tended, Trouble> {
        let session = &self.here.session;
        let mut workers = session.heartbeat()?;
        if self.sharing == Sharing::RowClaims {
            return Ok(Tended { workers, leased: None });
        }
        if self.args.no_leasing {
            workers = vec![session.id.clone()];
        }
        let plan = plan(&workers, &session.leases()?);
        let (held, ttl_s) = session.lease(&plan.renew, &plan.release, &plan.take)?;
        let partitions = held.iter().map(|(partition, _): &Held| *partition);
        self.here.partitions.replace(partitions.collect());
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
        self.here.seen.borrow().worker_changes as u64
    }

    fn call_others(&self) {
        self.notifies_others.set(true); // sent with the next wait
    }

    fn purge(&self) -> Result<i64, Trouble> {
        self.here.session.purge()
    }

    fn leave(&self) -> Result<(), Trouble> {
        self.here.session.leave()
    }

    // ---- standbys ---------------------------------------------------------------------------------------------------

    fn replication(&self) -> Result<Replication, Trouble> {
        self.here.session.replication()
    }

    // ---- log --------------------------------------------------------------------------------------------------------

    fn log(&self, destination: Option<&str>, text: Arguments) {
        match destination {
            None | Some(DEFAULT_DESTINATION) => self.here.log.line(text),
            Some(name) => self.here.log.line(format_args!("destination {name}: {text}")),
        }
    }

    fn failed(&self, trouble: Trouble) -> Result<u32, Trouble> {
        let is_final = trouble.kind == TroubleKind::Lost || trouble.failure.code != Code::Refused || self.args.once;
        if is_final {
            return Err(trouble);
        }
        let message = &trouble.failure.message;
        self.here.log.line(format_args!("{message}; tries again"));
        Ok(PAUSE_AFTER_FAILURE_MS)
    }
}

/// How partitions are shared, or why this worker cannot deliver. Messages that only the workers in the server can
/// deliver must not wait in the partitions of this worker.
pub fn sharing(refreshed: &Refreshed) -> Result<Sharing, Trouble> {
    let only_in_server = |what: String| Trouble {
        kind: TroubleKind::Failed,
        failure: Failure::new(
            Code::Incompatible,
            format!("{what}, which only workers in the server can do"),
        )
        .hint("Let them deliver: set outbox.workers to 1."),
    };
    if let Some(source) = &refreshed.source {
        return Err(only_in_server(format!("events are read from {source}")));
    }
    let with_function =
        (refreshed.destinations.iter()).find(|described| described.options.iter().any(|(name, _)| name == "body"));
    if let Some(destination) = with_function {
        let name = &destination.name;
        return Err(only_in_server(format!(
            "a function makes the bodies for destination {name}"
        )));
    }
    match refreshed.leasing {
        Some(true) => Ok(Sharing::Leases),
        Some(false) => Ok(Sharing::RowClaims),
        None => Err(Trouble {
            kind: TroubleKind::NotNow,
            failure: Failure::new(Code::Refused, "outbox_configure() changes the partitions"),
        }),
    }
}
