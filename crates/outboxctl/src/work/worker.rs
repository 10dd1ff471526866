//! A worker outside the server: the loop around the passes of crates/worker, its sessions, its pass reports and its
//! end. It runs on a separate thread, which waits for each result of the server. The publishers have their own threads.

use super::args::WorkArgs;
use super::context::WorkContext;
use super::error::{WorkError, WorkErrorKind};
use super::report::{Log, Printer};
use super::runtime::{WorkRuntime, sharing};
use super::settings;
use super::totals::Totals;
use super::worker_session::{WaitResult, WorkerSession};
use crate::connect::ConnectArgs;
use crate::failure::{Code, Failure};
use crate::progress::pass::{PassReport, timestamp};
use crate::progress::{DestinationFacts, SHOW_EVERY, WorkerFacts, WorkerProgress};
use crate::shutdown::Shutdown;
use outbox_core::engine::Sharing;
use outbox_transport::{Deadline, Starter, Waker, give_way};
use outbox_worker::{FinishTimeouts, Pass, PassEnd, Runtime};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// The wait before a new session is opened.
const RECONNECT_AFTER: Duration = Duration::from_secs(1);
/// At the end: the longest wait for outcomes of the messages in flight.
const OUTCOME_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest wait for outcomes while a statement such as DROP DATABASE waits for this worker.
const FEW_OUTCOMES: Duration = Duration::from_millis(700);
/// The longest wait for the connections to the brokers to close.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);
/// How long after the connections are closed a settle may still begin.
const LAST_SETTLES: Duration = Duration::from_secs(5);
/// A pass that takes longer is reported in parts.
const PASS_MAX: Duration = Duration::from_secs(1);
/// The interval at which the worker polls for outcomes of messages in flight, in ms. It starts at the shortest and
/// doubles up to the longest while there are none.
const POLL_SHORTEST_MS: u32 = 2;
const POLL_LONGEST_MS: u32 = 100;
/// How long the first session retries while the server answers "not now".
const BEGIN_PATIENCE: Duration = Duration::from_secs(10);

/// How a session ended.
enum RunEnd {
    /// The worker ended as requested.
    Done,
    /// A new session is needed.
    Again,
}

/// Delivers until a stop is requested, or for one pass with `--once`. Returns the number of failed attempts and expired
/// messages.
pub fn run(
    handle: &Handle,
    connect: &ConnectArgs,
    args: &WorkArgs,
    stop: &Shutdown,
    screen: Option<&Arc<WorkerProgress>>,
    printer: &mut Printer,
) -> Result<u64, Failure> {
    give_way();
    let totals = Rc::<RefCell<Totals>>::default();
    let (began, mut worked) = (Instant::now(), false);
    let log = Rc::new(Log::new(args.silent, screen.cloned()));
    while !stop.is_requested() {
        let ended = WorkerSession::open(handle, connect, &args.label(), stop).and_then(|session| {
            let mut run = Run::begin(session, args, stop, screen, printer, &log, &totals)?;
            worked = true;
            run.work()
        });
        match ended {
            Ok(RunEnd::Done) => break,
            Ok(RunEnd::Again) => {}
            Err(_) if stop.is_requested() => break,
            Err(trouble) => {
                let again = worked && !args.once;
                let retries = match trouble.kind {
                    WorkErrorKind::Final => false,
                    WorkErrorKind::Lost | WorkErrorKind::Failed => again,
                    WorkErrorKind::NotNow | WorkErrorKind::Locked => again || began.elapsed() < BEGIN_PATIENCE,
                };
                if !retries {
                    return Err(trouble.failure);
                }
                log.failure(format_args!("{}; tries again", trouble.failure.message));
                if let Some(progress) = screen {
                    progress.lose(&trouble.failure.message);
                }
            }
        }
        _ = handle.block_on(async { timeout(RECONNECT_AFTER, stop.requested()).await });
    }
    Ok(totals.borrow().failed())
}

type Worker = outbox_worker::Worker<WorkRuntime>;

/// The state of the worker during one session.
struct Run<'a> {
    worker: Worker,
    shown: ScreenUpdates<'a>,
    args: &'a WorkArgs,
    stop: &'a Shutdown,
    printer: &'a mut Printer,
    pass: PassReport,
    /// When the first pass of crates/worker in this reported pass began.
    pass_began: Option<Instant>,
    /// The current interval at which the worker polls for outcomes, in ms.
    patience_ms: u32,
}

impl<'a> Run<'a> {
    fn begin(
        session: WorkerSession,
        args: &'a WorkArgs,
        stop: &'a Shutdown,
        screen: Option<&'a Arc<WorkerProgress>>,
        printer: &'a mut Printer,
        log: &Rc<Log>,
        totals: &Rc<RefCell<Totals>>,
    ) -> Result<Self, WorkError> {
        let refreshed = session.refresh()?;
        let sharing = sharing(&refreshed)?;
        if args.no_leasing && sharing == Sharing::Leases {
            check_alone(&session)?;
        }
        let waker = Waker::new().map_err(|error| {
            refused(
                format!("could not create an eventfd: {error}"),
                "Raise the limit of open files.",
            )
        })?;
        let starter = Starter::new(waker, Deadline::default());
        let context = WorkContext::new(session, Rc::clone(log), Rc::clone(totals));
        let runtime = WorkRuntime::new(context, args, stop, screen, starter, &refreshed, sharing);
        let settings = settings::read(&refreshed, args)?;
        let mut worker = Worker::new(runtime, sharing, settings, refreshed.not_adopted);
        worker.describe(refreshed.destinations);
        Ok(Self {
            worker,
            shown: ScreenUpdates {
                screen,
                due: Instant::now(),
                sharing,
                is_alone: args.no_leasing,
            },
            args,
            stop,
            printer,
            pass: PassReport::default(),
            pass_began: None,
            patience_ms: POLL_SHORTEST_MS,
        })
    }

    fn work(&mut self) -> Result<RunEnd, WorkError> {
        self.shown.show(&self.worker);
        let ended = self.deliver();
        if let Err(trouble) = &ended
            && trouble.kind == WorkErrorKind::Lost
        {
            // Nothing more can be settled. Messages in flight may arrive, and will be sent again.
            self.worker.runtime().end();
            self.worker.abandon(CLOSE_TIMEOUT);
            return ended;
        }
        let must_terminate = matches!(ended, Ok(RunEnd::Again)) && self.seen().must_terminate;
        self.finish(if must_terminate { FEW_OUTCOMES } else { OUTCOME_TIMEOUT });
        self.end_pass();
        ended
    }

    fn seen(&self) -> std::cell::Ref<'_, WaitResult> {
        self.worker.runtime().context.seen.borrow()
    }

    fn deliver(&mut self) -> Result<RunEnd, WorkError> {
        while !self.stop.is_requested() {
            let before = self.worker.outstanding();
            self.pass_began.get_or_insert_with(Instant::now);
            let Pass::Wait(wait_ms) = self.worker.pass()? else {
                return Ok(RunEnd::Again);
            };
            if self.worker.outstanding() != before {
                self.patience_ms = POLL_SHORTEST_MS;
            }
            let wait_ms = self.count_pass(wait_ms);
            if self.worker.runtime().has_run_once.get() && !self.worker.is_undecided() {
                return self.judge_once().map(|()| RunEnd::Done);
            }
            if let Err(trouble) = self.wait(wait_ms) {
                self.pause_after(trouble)?;
            }
            if self.seen().is_vacated {
                return Ok(RunEnd::Again);
            }
        }
        Ok(RunEnd::Done)
    }

    /// Waits until there may be something to do. The wait is a function in the server, so no waker can end it.
    fn wait(&mut self, wait_ms: u32) -> Result<(), WorkError> {
        let in_flight = self.worker.outstanding();
        let limit_ms = self.worker.arm_wake(wait_ms, Some(self.patience_ms));
        if limit_ms < wait_ms {
            self.patience_ms = (self.patience_ms * 2).min(POLL_LONGEST_MS);
        }
        let wait = Duration::from_millis(limit_ms.into());
        if wait >= SHOW_EVERY || Instant::now() >= self.shown.due {
            self.shown.show(&self.worker);
        }
        let runtime = self.worker.runtime();
        let seen = runtime
            .context
            .session
            .wait(&self.seen(), wait, in_flight, runtime.notifies_others.take())?;
        runtime.context.seen.replace(seen);
        Ok(())
    }

    /// Waits after a wait in the server that failed: an operator may have canceled it.
    fn pause_after(&self, trouble: WorkError) -> Result<(), WorkError> {
        if trouble.kind == WorkErrorKind::Final {
            return Err(trouble);
        }
        let runtime = self.worker.runtime();
        let pause_ms = runtime.failed(trouble)?;
        runtime.context.session.pause(Duration::from_millis(pause_ms.into()));
        Ok(())
    }

    // ---- passes -----------------------------------------------------------------------------------------------------

    /// Counts a pass of crates/worker to the reported pass, which ends when no outcome is awaited. Returns how long to
    /// wait, in ms.
    fn count_pass(&mut self, wait_ms: u32) -> u32 {
        let runtime = self.worker.runtime();
        let awaits = add_pass(&mut self.pass, runtime);
        let (now, idle_ms) = (Instant::now(), self.worker.settings().idle_backoff_ms);
        let rests_until = runtime.rests_until.get();
        if now < rests_until {
            let left_ms = rests_until.saturating_duration_since(now).as_millis() as u32;
            return left_ms.clamp(1, idle_ms.max(1));
        }
        let is_over = !awaits || self.pass_began.is_some_and(|began| now >= began + PASS_MAX);
        if self.args.once || !is_over {
            return wait_ms;
        }
        self.end_pass();
        if self.args.interval_ms == 0 {
            return wait_ms;
        }
        let interval = Duration::from_millis(self.args.interval_ms);
        self.worker.runtime().rests_until.set(Instant::now() + interval);
        u32::try_from(self.args.interval_ms)
            .unwrap_or(u32::MAX)
            .min(idle_ms.max(1))
    }

    fn end_pass(&mut self) {
        let elapsed = self.pass_began.take().map_or(Duration::ZERO, |began| began.elapsed());
        let pass = std::mem::take(&mut self.pass);
        self.printer.pass(&PassReport {
            duration_ms: elapsed.as_micros().div_ceil(10) as f64 / 100.0,
            backoff_ms: match pass.claimed {
                0 => self.worker.settings().idle_backoff_ms,
                _ => 0,
            },
            active_workers: self.worker.workers() as usize,
            owned_count: self.worker.leases().len(),
            ts: timestamp(self.worker.runtime().context.session.now_us()),
            ..pass
        });
    }

    /// With `--once`: the pass failed if a broker could not be reached.
    fn judge_once(&self) -> Result<(), WorkError> {
        match self.worker.obstacles().as_slice() {
            [] => Ok(()),
            obstacles => Err(WorkError {
                kind: WorkErrorKind::Failed,
                failure: Failure::new(Code::CannotConnect, obstacles.join("; "))
                    .hint("Set --url and --password-file for the broker as this machine reaches it, or create a user mapping for this role."),
            }),
        }
    }

    // ---- the end ----------------------------------------------------------------------------------------------------

    /// Settles what the brokers confirm within `outcomes`, releases the other messages, and releases the leases.
    fn finish(&mut self, outcomes: Duration) {
        let timeouts = FinishTimeouts {
            outcomes,
            close: CLOSE_TIMEOUT,
            settles: LAST_SETTLES,
            settles_before_close: true,
        };
        let (worker, shown) = (&mut self.worker, &mut self.shown);
        let ended = worker.finish(&timeouts, &mut |worker, _| {
            std::thread::sleep(Duration::from_millis(POLL_SHORTEST_MS.into()));
            if Instant::now() >= shown.due {
                shown.show(worker);
            }
        });
        if let Err(trouble) = ended {
            // Messages that are not settled will be sent again. Leases that were not released expire.
            worker
                .runtime()
                .context
                .log
                .failure(format_args!("{}", trouble.failure.message));
        }
        add_pass(&mut self.pass, worker.runtime());
    }
}

/// Adds a pass of crates/worker to the reported pass. Returns whether outcomes or settles are still awaited.
fn add_pass(pass: &mut PassReport, runtime: &WorkRuntime) -> bool {
    let Some(PassEnd { report, awaits, .. }) = runtime.ended.take() else {
        return false;
    };
    pass.claimed += report.claimed;
    pass.published += report.published;
    pass.failed += report.failed;
    pass.renewed_heartbeat |= report.renewed_heartbeat;
    pass.purged_stale += report.purged_stale;
    pass.leased_count += report.leased;
    pass.released_count += report.released;
    (pass.active_workers, pass.desired_count) = (report.active_workers, report.desired);
    awaits
}

/// Updates the screen, if there is one.
struct ScreenUpdates<'a> {
    screen: Option<&'a Arc<WorkerProgress>>,
    /// When the next update is due.
    due: Instant,
    sharing: Sharing,
    is_alone: bool,
}

impl ScreenUpdates<'_> {
    /// Writes the current state of the worker for the screen.
    fn show(&mut self, worker: &Worker) {
        let Some(progress) = self.screen else { return };
        self.due = Instant::now() + SHOW_EVERY;
        let context = &worker.runtime().context;
        let totals = context.totals.borrow();
        let facts = |condition: outbox_worker::Condition<'_>| DestinationFacts {
            name: condition.name.to_owned(),
            status: condition.status.clone(),
            since: condition.since,
            in_flight: condition.in_flight,
        };
        progress.show(WorkerFacts {
            who: context.session.who.clone(),
            sharing: self.sharing,
            is_alone: self.is_alone,
            workers: worker.workers(),
            owned: worker.leases().len(),
            desired: worker.desired(),
            obstacle: match worker.settings().enabled {
                true => worker.not_adopted().map(str::to_owned),
                false => Some("outbox.enabled is off".to_owned()),
            },
            destinations: worker.conditions().map(facts).collect(),
            claimed: totals.claimed,
            ended: totals.ended,
        });
    }
}

/// Checks for `--no-leasing` that no other worker is alive: without leases, nothing can be shared.
fn check_alone(session: &WorkerSession) -> Result<(), WorkError> {
    let mut others = session.heartbeat()?;
    others.retain(|name| *name != session.protocol.worker);
    if others.is_empty() {
        return Ok(());
    }
    _ = session.leave();
    Err(refused(
        format!("other workers deliver from this database: {}", others.join(", ")),
        "Omit --no-leasing to share the partitions with them, or stop them first (outbox.workers = 0).",
    ))
}

fn refused(message: String, hint: &str) -> WorkError {
    WorkError {
        kind: WorkErrorKind::Failed,
        failure: Failure::new(Code::Refused, message).hint(hint),
    }
}
