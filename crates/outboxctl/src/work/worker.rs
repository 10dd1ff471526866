//! A worker outside the server. Its loop is that of the workers in the server (src/worker.rs), and the policy is the same
//! code (crates/core): take outcomes and settle, tend the leases, claim, hand over, wait. On a thread of its own, which
//! waits for each answer of the server; the publishers have theirs.

use super::board::{Board, Facts, SHOW_EVERY};
use super::destination::{Common, Destination};
use super::ports::Shared;
use super::report::{Printer, Say, Tick, timestamp};
use super::screen::state;
use super::session::{Described, Look, Seen, Session, Trouble, TroubleKind};
use super::settings::Settings;
use super::{Stop, WorkArgs};
use crate::connect::ConnectArgs;
use crate::failure::{Code, Failure};
use outbox_core::engine::{Held, Sharing};
use outbox_core::lease;
use outbox_core::partition::{Partition, PartitionCount};
use outbox_core::settle::Ended;
use outbox_transport::{Bell, Deadline, ask_for_short_slices};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// The clock of the server was set, if between two looks it went by so much more or less than time did.
const CLOCK_WAS_SET_US: i64 = 1_000_000;
const LOOK_EVERY: Duration = Duration::from_secs(1);
const PURGE_EVERY: Duration = Duration::from_secs(60);
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(500);
/// Before another session is tried.
const RECONNECT_AFTER: Duration = Duration::from_secs(1);
/// At the end: how long answers of the brokers are waited for.
const LAST_OUTCOMES: Duration = Duration::from_secs(5);
/// The same while DROP DATABASE or the like waits for this worker.
const FEW_OUTCOMES: Duration = Duration::from_millis(700);
const LAST_WORDS: Duration = Duration::from_millis(200);
/// A tick that goes on for longer is told of in pieces.
const TICK_MAX: Duration = Duration::from_secs(1);
/// How often answers of the brokers are looked for that somebody waits for: at once, and less and less often while there are
/// none.
const LOOK_SHORTEST: Duration = Duration::from_millis(2);
const LOOK_LONGEST: Duration = Duration::from_millis(100);
/// How long a single tick waits for partitions that others are to give back.
const SHARE_PATIENCE: Duration = Duration::from_secs(3);
/// How long the first session waits for a server that says "not now".
const BEGIN_PATIENCE: Duration = Duration::from_secs(10);

/// How a session ended.
enum End {
    /// As it was asked to.
    Done,
    /// A new session is needed.
    Again,
}

/// All that a run did, whatever sessions it needed.
#[derive(Default)]
pub struct Totals {
    claimed: u64,
    ended: HashMap<String, Ended>,
}

impl Totals {
    fn note(&mut self, destination: &str, ended: Ended) {
        if ended != Ended::default() {
            self.ended.entry(destination.to_owned()).or_default().add(ended);
        }
    }

    fn of(&self, destination: &str) -> Ended {
        self.ended.get(destination).copied().unwrap_or_default()
    }

    fn all(&self) -> Ended {
        let mut all = Ended::default();
        self.ended.values().for_each(|ended| all.add(*ended));
        all
    }

    /// Messages that failed or expired, each as often as it did.
    pub fn failed(&self) -> u64 {
        let all = self.all();
        all.retried + all.buried()
    }
}

/// Delivers until it is asked to stop, or for one tick.
pub fn run(
    handle: &Handle,
    connect: &ConnectArgs,
    args: &WorkArgs,
    stop: &Stop,
    screen: Option<&Arc<Board>>,
    printer: &mut Printer,
) -> Result<Totals, Failure> {
    ask_for_short_slices();
    let mut totals = Totals::default();
    let (began, mut worked) = (Instant::now(), false);
    let say = Say::new(args.silent, screen.cloned());
    let mut connect = connect.clone();
    while !stop.is_asked() {
        let ended = Session::open(handle, &connect, &args.label()).and_then(|session| {
            let mut worker = Worker::begin(session, args, stop, screen, printer, &mut totals)?;
            worked = true;
            worker.show();
            worker.work()
        });
        match ended {
            Ok(End::Done) => break,
            Ok(End::Again) => {}
            Err(trouble) => {
                let goes_on = match trouble.kind {
                    TroubleKind::Lost => worked && !args.once,
                    TroubleKind::NotNow => (worked && !args.once) || began.elapsed() < BEGIN_PATIENCE,
                    TroubleKind::Locked | TroubleKind::Failed => false,
                };
                if !goes_on {
                    return Err(trouble.failure);
                }
                say.line(format_args!("{}; tries again", trouble.failure.message));
                if let Some(board) = screen {
                    board.lose(&trouble.failure.message);
                }
            }
        }
        // Whoever could answer sees the screen by now, and no question.
        connect.no_password |= worked && screen.is_some();
        let until = Instant::now() + RECONNECT_AFTER;
        while !stop.is_asked() && Instant::now() < until {
            std::thread::sleep(LOOK_LONGEST);
        }
    }
    Ok(totals)
}

struct Worker<'a> {
    common: Common,
    args: &'a WorkArgs,
    stop: &'a Stop,
    screen: Option<&'a Arc<Board>>,
    /// When the screen is told again.
    show_due: Instant,
    printer: &'a mut Printer,
    totals: &'a mut Totals,
    sharing: Sharing,
    session_defaults: String,
    destinations: Vec<Destination>,
    /// What the catalogs said of them last.
    described: Vec<Described>,
    leases: Vec<Held>,
    /// Until when they last, by the clock of `Deadline`.
    held_until_ns: u64,
    /// How many partitions it should have.
    desired: usize,
    /// Whether this one does what one worker of the database must do.
    first: bool,
    seen: Seen,
    /// Of `seen`, when the leases were tended last; None = never.
    tended_at: Option<i64>,
    /// The others shall look at the leases.
    tell: bool,
    leases_due: Instant,
    look_due: Instant,
    purge_due: Instant,
    /// Between two ticks: nothing is claimed until then.
    rests_until: Instant,
    tick: Tick,
    /// When its first pass began.
    tick_began: Option<Instant>,
    /// How soon answers are looked for.
    patience: Duration,
}

impl<'a> Worker<'a> {
    fn begin(
        session: Session,
        args: &'a WorkArgs,
        stop: &'a Stop,
        screen: Option<&'a Arc<Board>>,
        printer: &'a mut Printer,
        totals: &'a mut Totals,
    ) -> Result<Self, Trouble> {
        let look = session.look()?;
        let sharing = sharing(&look)?;
        let bell =
            Bell::new().map_err(|error| refused(format!("no eventfd: {error}"), "Raise the limit of open files."))?;
        let now = Instant::now();
        let common = Common {
            settings: Settings::read(&look, args),
            not_adopted: look.not_adopted,
            shared: Shared::default(),
            workers: 1,
            bell,
            deadline: Deadline::default(),
            began: now,
            rests: false,
            is_held: false,
            say: Say::new(args.silent, screen.cloned()),
            session,
        };
        let mut worker = Self {
            common,
            args,
            stop,
            screen,
            show_due: now,
            printer,
            totals,
            sharing,
            session_defaults: look.session_defaults,
            destinations: Vec::new(),
            described: Vec::new(),
            leases: Vec::new(),
            held_until_ns: 0,
            desired: 0,
            first: false,
            seen: Seen::default(),
            tended_at: None,
            tell: false,
            leases_due: now,
            look_due: now + LOOK_EVERY,
            purge_due: now + PURGE_EVERY,
            rests_until: now,
            tick: Tick::default(),
            tick_began: None,
            patience: LOOK_SHORTEST,
        };
        if args.no_leasing && sharing == Sharing::Leases {
            worker.check_alone()?;
        }
        worker.describe(look.destinations);
        Ok(worker)
    }

    /// Without leases there is nobody to share with.
    fn check_alone(&self) -> Result<(), Trouble> {
        let mut others = self.common.session.heartbeat()?;
        others.retain(|name| *name != self.common.session.id);
        if others.is_empty() {
            return Ok(());
        }
        _ = self.common.session.leave();
        Err(refused(
            format!("other workers deliver from this database: {}", others.join(", ")),
            "Leave --no-leasing out to share the partitions with them, or stop them first (outbox.workers = 0).",
        ))
    }

    fn work(&mut self) -> Result<End, Trouble> {
        self.destinations.iter_mut().for_each(|destination| {
            if self.args.once {
                destination.begin_tick();
            }
        });
        let ended = self.deliver();
        if let Err(trouble) = &ended
            && trouble.kind == TroubleKind::Lost
        {
            // Nothing more can be settled. What is with the brokers may arrive, and goes again.
            self.common.deadline.end();
            for destination in &mut self.destinations {
                destination.stop(&self.common, LAST_WORDS, "the session is lost");
            }
            return ended;
        }
        self.finish(match ended {
            Ok(End::Again) if self.seen.is_pressed => FEW_OUTCOMES,
            _ => LAST_OUTCOMES,
        });
        self.end_tick();
        ended
    }

    fn deliver(&mut self) -> Result<End, Trouble> {
        let mut again = false;
        while !self.stop.is_asked() && !again {
            let wait = match self.pass() {
                Ok(Pass::Wait(wait)) => wait,
                Ok(Pass::Again) => {
                    again = true;
                    continue;
                }
                Err(trouble) if trouble.kind == TroubleKind::Lost => return Err(trouble),
                Err(trouble) if trouble.failure.code != Code::Refused || self.args.once => return Err(trouble),
                Err(trouble) => {
                    self.common
                        .say
                        .line(format_args!("{}; tries again", trouble.failure.message));
                    PAUSE_AFTER_FAILURE
                }
            };
            if self.args.once && self.has_run_once() {
                return self.judge_once().map(|()| End::Done);
            }
            self.wait(wait)?;
            again = self.seen.is_vacated;
        }
        Ok(if again { End::Again } else { End::Done })
    }

    /// Until there may be something to do.
    fn wait(&mut self, wait: Duration) -> Result<(), Trouble> {
        let in_flight = self.outstanding();
        let (common, patience) = (&self.common, self.patience);
        let looks = self.destinations.iter_mut();
        let looks = looks.filter_map(|destination| destination.listen(common, patience));
        let wait = match looks.min() {
            Some(look) => {
                self.patience = (patience * 2).min(LOOK_LONGEST);
                wait.min(look)
            }
            None => wait,
        };
        if wait >= SHOW_EVERY || Instant::now() >= self.show_due {
            self.show();
        }
        let tell = std::mem::take(&mut self.tell);
        self.seen = self.common.session.wait(&self.seen, wait, in_flight, tell)?;
        Ok(())
    }

    /// Tells the screen how things are, if there is one.
    fn show(&mut self) {
        let Some(board) = self.screen else { return };
        self.show_due = Instant::now() + SHOW_EVERY;
        let common = &self.common;
        board.show(Facts {
            who: common.session.who.clone(),
            sharing: match self.sharing {
                Sharing::RowClaims => state::Sharing::RowClaims,
                Sharing::Leases if self.args.no_leasing => state::Sharing::Alone,
                Sharing::Leases => state::Sharing::Leases,
            },
            workers: common.workers,
            leases: self.leases.clone(),
            desired: self.desired,
            obstacle: match common.settings.enabled {
                true => common.not_adopted.clone(),
                false => Some("outbox.enabled is off".to_owned()),
            },
            destinations: (self.destinations.iter())
                .map(|destination| destination.facts(self.totals.of(&destination.name)))
                .collect(),
            claimed: self.totals.claimed,
            ended: self.totals.all(),
        });
    }

    fn outstanding(&self) -> usize {
        self.destinations.iter().map(Destination::outstanding).sum()
    }

    /// Returns how long to wait for a wake or an answer.
    fn pass(&mut self) -> Result<Pass, Trouble> {
        let now = Instant::now();
        let tick_began = *self.tick_began.get_or_insert(now);
        self.common.is_held = self.screen.is_some_and(|board| board.holds());
        let rests = now < self.rests_until;
        self.common.rests = rests || self.common.is_held;
        self.common.shared.begin_pass(self.seen.waiting_changes);
        self.common.bell.silence();
        let before = self.outstanding();
        self.give_up_what_has_run_out(now);
        for destination in &mut self.destinations {
            destination.broker.ensure(now);
            destination.take_outcomes(&self.common, now);
        }
        self.tend_leases(now)?;
        if now >= self.look_due && !self.look(now)? {
            return Ok(Pass::Again);
        }
        if now >= self.purge_due && self.first {
            self.purge_due = now + PURGE_EVERY;
            self.tick.purged_stale += self.common.session.purge()?;
        }
        let may_claim = !self.args.once || self.has_its_share(now);
        let (mut wait_ms, mut first_trouble) = (self.common.settings.idle_backoff_ms, None);
        let mut note = |trouble: Trouble| match trouble.kind {
            TroubleKind::Lost => Err(trouble),
            _ => {
                first_trouble.get_or_insert(trouble); // the others go on
                Ok(())
            }
        };
        // A settle waits for the disk of the server, and all destinations with it: what can be claimed goes out before.
        let common = &self.common;
        let (last, first): (Vec<usize>, Vec<usize>) =
            (0..self.destinations.len()).partition(|index| self.destinations[*index].settles_first(common));
        let mut served = Vec::new();
        for index in first.into_iter().chain(last) {
            match self.claim(index, may_claim, &mut served) {
                Ok((claimed, wait)) => {
                    self.tick.claimed += claimed as u64;
                    self.totals.claimed += claimed as u64;
                    wait_ms = wait_ms.min(wait);
                }
                Err(trouble) => note(trouble)?,
            }
        }
        // Also where nothing could be claimed: what the peer has confirmed is settled.
        for index in served {
            match self.destinations[index].settle_what_is_due(&self.common, wait_ms) {
                Ok(wait) => wait_ms = wait,
                Err(trouble) => note(trouble)?,
            }
        }
        self.count();
        if self.outstanding() != before {
            self.patience = LOOK_SHORTEST;
        }
        if let Some(trouble) = first_trouble {
            return Err(trouble);
        }
        let is_over = !self.destinations.iter().any(Destination::awaits);
        if !self.args.once && !rests && (is_over || now >= tick_began + TICK_MAX) {
            self.end_tick();
            if self.args.interval_ms > 0 {
                self.rests_until = Instant::now() + Duration::from_millis(self.args.interval_ms);
                wait_ms = wait_ms.max(1);
            }
        }
        let rest = self.rests_until.saturating_duration_since(Instant::now());
        let wait = Duration::from_millis(u64::from(wait_ms));
        Ok(Pass::Wait(match rest.is_zero() {
            true => wait,
            false => rest.min(Duration::from_millis(u64::from(self.common.settings.idle_backoff_ms))),
        }))
    }

    /// Notes whom it has served. Returns how many messages came, and how long to wait for more.
    fn claim(&mut self, index: usize, may_claim: bool, served: &mut Vec<usize>) -> Result<(usize, u32), Trouble> {
        let mut others = (self.destinations.iter().enumerate()).filter(|(other, _)| *other != index);
        let another_tries_one_alone = others.any(|(_, other)| other.tries_one_alone());
        let (common, destination) = (&self.common, &mut self.destinations[index]);
        if destination.settles_first(common) {
            destination.settle(common)?;
        }
        destination.report(common)?;
        served.push(index);
        // What crashes with that one would be charged to what is claimed here.
        destination.claim(common, may_claim && !another_tries_one_alone)
    }

    // ---- ticks ------------------------------------------------------------------------------------------------------

    fn count(&mut self) {
        for destination in &mut self.destinations {
            let ended = destination.take_ended();
            self.tick.published += ended.published;
            self.tick.failed += ended.retried + ended.buried();
            self.totals.note(&destination.name, ended);
        }
    }

    fn end_tick(&mut self) {
        self.count();
        let took = self.tick_began.take().map_or(Duration::ZERO, |began| began.elapsed());
        let tick = std::mem::take(&mut self.tick);
        self.printer.tick(&Tick {
            duration_ms: took.as_micros().div_ceil(10) as f64 / 100.0,
            backoff_ms: match tick.claimed {
                0 => self.common.settings.idle_backoff_ms,
                _ => 0,
            },
            active_workers: self.common.workers as usize,
            desired_count: self.desired,
            owned_count: self.leases.len(),
            ts: timestamp(self.common.session.now_us()),
            ..tick
        });
    }

    /// Whether a single tick may begin to claim.
    fn has_its_share(&self, now: Instant) -> bool {
        self.sharing == Sharing::RowClaims
            || self.leases.len() >= self.desired
            || now >= self.common.began + SHARE_PATIENCE
    }

    fn has_run_once(&self) -> bool {
        let common = &self.common;
        self.has_its_share(Instant::now())
            && (self.destinations.iter())
                .all(|destination| !destination.is_undecided(common) && destination.has_run_tick(common))
    }

    /// A single tick that could not reach a broker has failed.
    fn judge_once(&self) -> Result<(), Trouble> {
        let obstacles = self.destinations.iter().filter_map(|destination| {
            let why = destination.obstacle(&self.common)?;
            Some(format!("destination {}: {why}", destination.name))
        });
        match obstacles.collect::<Vec<_>>().as_slice() {
            [] => Ok(()),
            obstacles => Err(Trouble {
                kind: TroubleKind::Failed,
                failure: Failure::new(Code::CannotConnect, obstacles.join("; "))
                    .hint("Give --url and --password-file of the broker as it is seen from here, or a user mapping of this role."),
            }),
        }
    }

    // ---- leases -----------------------------------------------------------------------------------------------------

    /// This process has slept for longer than its leases last. What the publishers still hold is another's by now, so none
    /// of it may go when the leases are renewed.
    fn give_up_what_has_run_out(&mut self, now: Instant) {
        if self.leases.is_empty() || Deadline::now() < self.held_until_ns {
            return;
        }
        self.common
            .say
            .line(format_args!("the leases have run out; takes others"));
        for destination in &mut self.destinations {
            destination.stop(&self.common, LAST_WORDS, "the leases have run out");
            destination.set_leases(&[], &HashSet::new());
        }
        self.leases.clear();
        self.common.shared.hold(&[]);
        self.leases_due = now;
    }

    /// Heartbeat; renews, takes and gives back leases as the plan says.
    fn tend_leases(&mut self, now: Instant) -> Result<(), Trouble> {
        let changes = self.seen.worker_changes;
        if now < self.leases_due && self.tended_at == Some(changes) {
            return Ok(());
        }
        let asked_at = Deadline::now();
        let session = &self.common.session;
        let workers = match self.args.no_leasing && self.sharing == Sharing::Leases {
            true => session.heartbeat().map(|_| vec![session.id.clone()])?,
            false => session.heartbeat()?,
        };
        self.tick.renewed_heartbeat = true;
        self.first = workers.first() == Some(&session.id);
        if workers.len() as u32 != self.common.workers {
            self.common.workers = workers.len() as u32;
            for destination in &mut self.destinations {
                destination.take_limits(&self.common);
            }
        }
        let is_new = self.tended_at.is_none();
        let next = now + self.common.settings.lease_renew;
        if self.sharing == Sharing::RowClaims {
            self.tell |= is_new;
            (self.tended_at, self.leases_due) = (Some(changes), next);
            return Ok(());
        }
        let leases = self.common.session.leases()?;
        let plan = lease::plan(&self.common.session.id, &workers, &leases);
        // A partition that another worker should have is given back once nothing of it is in flight here.
        let in_use: HashSet<Partition> = self.destinations.iter().flat_map(Destination::in_use).collect();
        let (busy, free): (Vec<Held>, Vec<Held>) = plan.release.iter().copied().partition(|(p, _)| in_use.contains(p));
        // A lease in this name that is not held was lost on the way: it is taken anew.
        let (ours, inherited): (Vec<Held>, Vec<Held>) = plan
            .renew
            .iter()
            .copied()
            .partition(|lease| self.leases.contains(lease));
        let take: Vec<Partition> = (plan.acquire.iter().copied())
            .chain(inherited.into_iter().map(|(partition, _)| partition))
            .collect();
        let renew: Vec<Held> = ours.iter().chain(&busy).copied().collect();
        let (held, ttl_s) = self.common.session.lease(&renew, &free, &take)?;
        if let Some(ttl_s) = ttl_s {
            // Counted from before the lease was, and less a tenth.
            let lasts = Duration::from_millis(ttl_s * 900);
            self.common.deadline.set(asked_at, lasts);
            self.held_until_ns = asked_at + lasts.as_nanos() as u64;
        }
        let taken = held.iter().filter(|lease| !self.leases.contains(lease)).count();
        self.tick.leased_count += taken;
        self.tick.released_count += free.len();
        self.tell |= is_new || !free.is_empty();
        self.desired = PartitionCount::new(leases.len() as i64).map_or(0, |count| {
            let mut sorted = workers.clone();
            sorted.sort_unstable(); // the database has a collation of its own
            lease::target(&sorted, &self.common.session.id, count).len()
        });
        let leaving: HashSet<Partition> = busy.into_iter().map(|(partition, _)| partition).collect();
        // Soon again while a partition waits to be given back, or while there is none to own yet.
        self.leases_due = match leaving.is_empty() && !held.is_empty() {
            true => next,
            false => next.min(now + PAUSE_AFTER_FAILURE),
        };
        self.tended_at = Some(changes);
        self.common.shared.hold(&held);
        for destination in &mut self.destinations {
            destination.set_leases(&held, &leaving);
        }
        self.leases = held;
        Ok(())
    }

    // ---- everything else --------------------------------------------------------------------------------------------

    /// What changed. False: a new session is needed.
    fn look(&mut self, now: Instant) -> Result<bool, Trouble> {
        self.look_due = now + LOOK_EVERY;
        let expected_us = self.common.session.now_us();
        let look = self.common.session.look()?;
        // Leases go by the clock of the server: where it was set they may have run out.
        if (self.common.session.now_us() - expected_us).abs() > CLOCK_WAS_SET_US {
            self.leases_due = now;
        }
        match sharing(&look) {
            Ok(sharing) if sharing != self.sharing => return Ok(false),
            Err(trouble) if trouble.kind != TroubleKind::NotNow => return Err(trouble),
            _ => {}
        }
        if look.session_defaults != self.session_defaults {
            return Ok(false); // what ALTER DATABASE and ALTER ROLE say is for new sessions
        }
        let settings = Settings::read(&look, self.args);
        self.common.not_adopted = look.not_adopted;
        if settings != self.common.settings || look.destinations != self.described {
            self.common.settings = settings;
            self.describe(look.destinations);
        }
        Ok(true)
    }

    /// Serves the destinations that there are now, as they are described now.
    fn describe(&mut self, described: Vec<Described>) {
        for description in &described {
            match (self.destinations.iter_mut()).find(|known| known.name == description.name) {
                Some(known) => known.describe(&self.common, description),
                None => {
                    let new = Destination::new(&self.common, description, self.sharing, &self.leases);
                    self.destinations.push(new);
                }
            }
        }
        let gone = |destination: &mut Destination| described.iter().all(|still| still.name != destination.name);
        for mut destination in self.destinations.extract_if(.., gone) {
            destination.stop(&self.common, LAST_WORDS, "the destination is gone");
            let ended = (destination.settle(&self.common))
                .and_then(|()| self.common.session.report(&destination.name, None, None, None));
            if let Err(trouble) = ended {
                // What it held goes again when the lanes are read anew.
                self.common.say.line(format_args!("{}", trouble.failure.message));
            }
        }
        let names = self.destinations.iter().map(|destination| destination.name.clone());
        self.common.shared.serve(names.collect());
        self.described = described;
    }

    /// The orderly end: what the brokers confirm soon is settled, the rest is released, the leases go back.
    fn finish(&mut self, limit: Duration) {
        self.common.rests = true;
        let deadline = Instant::now() + limit;
        let awaits = |destination: &Destination| destination.awaits() && destination.broker.is_connected();
        while self.destinations.iter().any(awaits) && Instant::now() < deadline {
            std::thread::sleep(LOOK_SHORTEST);
            let now = Instant::now();
            if now >= self.show_due {
                self.count();
                self.show();
            }
            for destination in &mut self.destinations {
                destination.take_outcomes(&self.common, now);
                if let Err(trouble) = destination.settle_what_is_due(&self.common, 0) {
                    self.common.say.line(format_args!("{}", trouble.failure.message));
                }
            }
        }
        for destination in &self.destinations {
            destination.broker.ask_to_stop(LAST_WORDS);
        }
        for destination in &mut self.destinations {
            destination.stop(&self.common, LAST_WORDS, "the worker ended");
            if let Err(trouble) = destination.settle(&self.common) {
                self.common.say.line(format_args!("{}", trouble.failure.message)); // it goes again
            }
        }
        if let Err(trouble) = self.common.session.leave() {
            let why = trouble.failure.message;
            self.common
                .say
                .line(format_args!("the leases run out by themselves: {why}"));
        }
    }
}

enum Pass {
    Wait(Duration),
    /// A new session is needed.
    Again,
}

/// How partitions are shared; or why nothing can be delivered from here: what others alone can do must not wait in its
/// partitions.
fn sharing(look: &Look) -> Result<Sharing, Trouble> {
    let others_alone = |what: String| Trouble {
        kind: TroubleKind::Failed,
        failure: Failure::new(
            Code::Incompatible,
            format!("{what}, which only workers in the server can do"),
        )
        .hint("Let them deliver: outbox.workers = 1."),
    };
    if let Some(source) = &look.source {
        return Err(others_alone(format!("events are read from {source}")));
    }
    let with_function = (look.destinations.iter()).find(|known| known.options.iter().any(|(name, _)| name == "body"));
    if let Some(destination) = with_function {
        let name = &destination.name;
        return Err(others_alone(format!(
            "a function makes the bodies for destination {name}"
        )));
    }
    match look.leasing {
        Some(true) => Ok(Sharing::Leases),
        Some(false) => Ok(Sharing::RowClaims),
        None => Err(Trouble {
            kind: TroubleKind::NotNow,
            failure: Failure::new(Code::Refused, "outbox_configure() changes the partitions"),
        }),
    }
}

fn refused(message: String, hint: &str) -> Trouble {
    Trouble {
        kind: TroubleKind::Failed,
        failure: Failure::new(Code::Refused, message).hint(hint),
    }
}
