//! A worker: delivers the messages of one database. Its loop reads like the table in ARCHITECTURE.md: take outcomes and
//! settle, tend the leases, claim, hand over, wait. Main thread of its own process; the publisher thread is behind
//! `broker`. Policy is in crates/core; here is the order of things and what happens when one fails.

use crate::config::Settings;
use crate::destination::{Common, Destination, changes_by_hand};
use crate::limits::STATEMENT_TIMEOUT_MS;
use crate::pg::bgworker;
use crate::pg::clock::now_us;
use crate::pg::latch::WaitSet;
use crate::pg::txn::{self, Durability, Failure};
use crate::pg::{catalog, signals, text};
use crate::ports::{Shared, held_transaction, in_transaction, remember_table};
use crate::shared::requests::Report;
use crate::shared::workers::{self, NoPlace, id_of};
use crate::shared::{databases, launcher, lifecycle, statistics, transactions, vacancies};
use crate::worker::broker::DEADLINE;
use crate::worker::store::{Described, Store};
use outbox_core::engine::{Errand, Held, Listen, Sharing};
use outbox_core::lease;
use outbox_core::partition::{Partition, PartitionCount};
use outbox_core::session;
use outbox_core::settle::Ended;
use outbox_transport::{Bell, Deadline, ask_for_short_slices};
use std::cell::RefCell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// Wait after a transaction failed.
const PAUSE_AFTER_FAILURE_MS: u32 = 500;
/// A failure that repeats is logged again after so long.
const SAY_AGAIN_AFTER: Duration = Duration::from_secs(60);
/// At the end: how long outcomes are waited for, and how long each last transaction may take; and all of it. A fast
/// shutdown must be through within 2 s, whatever the broker does.
const LAST_OUTCOMES: Duration = Duration::from_millis(700);
const LAST_TRANSACTION_MS: i32 = 300;
const LAST_SETTLES: Duration = Duration::from_millis(300);
const LAST_WORDS_TO_BROKER: Duration = Duration::from_millis(200);
const LAST_MS: i32 = 1_700;
/// A worker that gives its slot to another database: a third of this for answers to what is on its way, then it goes.
const LEAVE: Duration = Duration::from_secs(15);
/// The clock of the server was set, if between two passes it went by so much more or less than time did.
const CLOCK_WAS_SET_US: i64 = 1_000_000;
/// How long the connection of a destination that is gone may take to close; the others wait for it.
const STOP_GONE: Duration = Duration::from_millis(200);

const CONFIG_CHECK_EVERY: Duration = Duration::from_secs(1);
/// What has changed in a catalog is read again then. This long after it was read last all of it is, whatever happened: most of it
/// stands in catalogs, and the rest is written by calls that tell of it.
const CONFIG_READ_EVERY: Duration = Duration::from_secs(10);

pub fn main(database: u32, number: u32) -> ! {
    // Read before the session begins, which has these settings or newer ones.
    let known_defaults = databases::database(database).map_or(0, |database| database.session_defaults());
    let slot = enter(database, number);
    ask_for_short_slices();
    let mut worker = Worker::start(number, slot, known_defaults);
    bgworker::on_exit(stop_publishing);
    signals::end_in_order();
    loop {
        let wait_ms = worker.pass();
        if worker.has_made_room() {
            worker.finish();
            signals::exit(0);
        }
        if !signals::asked_to_end() {
            worker.wait(wait_ms);
        }
        if signals::asked_to_end() {
            worker.finish();
            signals::exit(1);
        }
        signals::check_for_interrupts();
        if signals::reload_if_asked() {
            worker.take_settings();
        }
    }
}

/// The first steps of a process that serves a database: its place, then its connection. Ends where there is no place.
pub fn enter(database: u32, number: u32) -> &'static workers::Worker {
    signals::install();
    let slot = match lifecycle::worker_starts(database, number) {
        Ok(slot) => slot,
        Err(NoPlace::Taken(pid)) => {
            pgrx::log!(
                "outbox {}: process {pid} is this worker already; this one ends",
                id_of(number)
            );
            signals::exit(0)
        }
        Err(NoPlace::Full) => signals::exit(0), // the launcher says so
    };
    if vacancies::is_vacated(database) {
        signals::exit(0);
    }
    bgworker::connect(database.into(), launcher::worker_role().into());
    for (name, value) in session::SETTINGS.iter().chain(session::IN_THE_SERVER) {
        txn::set_for_session(name, value);
    }
    slot
}

/// Tells the workers that start from now on. Returns the hash that they know it by.
fn note_session_defaults(defaults: &str) -> u64 {
    let hash = statistics::number_of(defaults).max(1);
    if let Some(database) = databases::my_database() {
        database.set_session_defaults(hash);
    }
    hash
}

struct Worker {
    common: Common,
    waits: WaitSet,
    destinations: Vec<Destination>,
    /// What the catalogs said of them last.
    described: Vec<Described>,
    sharing: Sharing,
    leases: Vec<Held>,
    /// What ALTER DATABASE and ALTER ROLE said when this session began; None = they changed while it did.
    session_defaults: Option<String>,
    idle: bool,
    /// Whether this one does what one worker of the database must do.
    first: bool,
    /// As of the last look at who is there; 0 = none yet.
    worker_changes: u32,
    leases_due: Instant,
    /// What the clock of the server showed when this worker began, as of the last pass.
    clock_began_us: i64,
    config_check_due: Instant,
    config_read_due: Instant,
    /// What `catalog::changes` said then.
    catalog_changes: u64,
    /// The most recent ask of a session that this one heard of; 0 = none.
    heard: u32,
    /// What it is about, while it is not done.
    task: Option<Task>,
    /// What this pass did, and how partitions are shared as of the last look at the leases.
    tick: Report,
    /// What was said of a failure, and when.
    last_failure: RefCell<Option<(String, Instant)>>,
}

/// What a session asked for.
struct Task {
    ticket: u32,
    errand: Errand,
    began: Instant,
    purged: bool,
    report: Report,
}

impl Worker {
    fn start(number: u32, slot: &'static workers::Worker, known_defaults: u64) -> Self {
        let id = id_of(number);
        let opened = in_transaction(c"outbox: start", Durability::Relaxed, || {
            text::prepare();
            let store = Store::open(&id)?;
            let sharing = store.sharing()?;
            remember_table(store.a_table()?);
            let session_defaults = store.session_defaults()?;
            let described = store.destinations()?;
            store.look_at_source()?;
            if let Some(database) = databases::my_database()
                && !database.has_adopted()
            {
                transactions::adopt(&store.prepared_transactions()?);
                database.set_adopted();
                // One may have been committed before it was found, while another worker read already.
                databases::reopen_all(catalog::my_database(), 1);
            }
            let not_adopted = store.not_adopted()?;
            Ok((store, sharing, session_defaults, described, not_adopted))
        });
        let opened = (opened.map_err(|failure| failure.message))
            .and_then(|opened| Ok((opened, Bell::new().map_err(|error| error.to_string())?)));
        let ((store, sharing, session_defaults, described, not_adopted), bell) = match opened {
            Ok(opened) => opened,
            Err(why) => {
                pgrx::warning!("outbox {id}: cannot start: {why}");
                signals::exit(1)
            }
        };
        let hash = note_session_defaults(&session_defaults);
        let session_defaults = (known_defaults == 0 || known_defaults == hash).then_some(session_defaults);
        let now = Instant::now();
        pgrx::log!("outbox {id}: started");
        let common = Common {
            row_token: -(uuid::Uuid::new_v4().as_u64_pair().0 as i64 & i64::MAX).max(1),
            id,
            store,
            shared: Shared::new(databases::my_database(), slot),
            settings: Settings::snapshot(),
            workers: 1,
            not_adopted,
            changes_seen: 0, // it looks at once
            bell,
            began: now,
            leaves_by: None,
        };
        let mut worker = Self {
            waits: WaitSet::new(common.bell.fd()),
            common,
            destinations: Vec::new(),
            described: Vec::new(),
            sharing,
            leases: Vec::new(),
            session_defaults,
            idle: false,
            first: false,
            worker_changes: 0,
            leases_due: now,
            clock_began_us: now_us(),
            config_check_due: now,
            config_read_due: now,
            catalog_changes: 0,
            heard: 0,
            task: None,
            tick: Report::default(),
            last_failure: RefCell::default(),
        };
        worker.describe(described);
        // It may start the other workers, and the upkeep, which counts what waits for the destinations that there are.
        if let Some(database) = databases::my_database() {
            database.set_extension(true);
            launcher::tell_news();
        }
        worker
    }

    /// One tick. Returns how long to wait for a wake, an outcome or the safety poll.
    fn pass(&mut self) -> u32 {
        let now = Instant::now();
        let calls = databases::my_database().map(databases::Database::calls); // before it looks for what they are about
        self.common.shared.begin_pass();
        self.common.bell.silence();
        if self.common.leaves_by.is_none() && self.common.shared.is_to_leave() {
            self.begin_to_leave(now);
        }
        self.listen(now);
        for destination in &mut self.destinations {
            if self.common.leaves_by.is_none() {
                destination.broker.ensure(now);
            }
            destination.take_outcomes(&self.common, now);
        }
        for destination in &mut self.destinations {
            if destination.take_question() {
                self.config_read_due = now; // what was changed just now counts
            }
        }
        self.look_at_clock(now);
        // Whatever fails below: settings that were changed may be the cause, and their change the end of it.
        let looked = self.look_at_settings(now);
        // The first heartbeat makes the row that the reports belong to.
        let tended = self.tend_leases(now).and_then(|()| self.purge());
        if let Err(failure) = looked.and(tended) {
            self.common.shared.set_idle(None);
            return self.failed(&failure);
        }
        if self.common.leaves_by.is_none() {
            // Each may wait for a connection to close.
            for destination in self.destinations.iter_mut().take_while(|_| !signals::asked_to_end()) {
                destination.look_afresh(&self.common);
            }
        }
        let (claimed, wait_ms, all_well) = self.deliver();
        self.idle = claimed == 0;
        self.note_tick(now, claimed, wait_ms);
        let is_at_rest = all_well && self.idle && self.is_at_rest();
        self.common.shared.set_idle(calls.filter(|_| is_at_rest));
        self.common
            .shared
            .set_in_flight(self.destinations.iter().map(Destination::outstanding).sum());
        self.destinations.iter().for_each(Destination::note_in_flight);
        for destination in &mut self.destinations {
            destination.let_go(&self.common);
        }
        self.answer();
        wait_ms
    }

    /// Until something calls: a wake, an answer that somebody waits for, or the time.
    fn wait(&mut self, wait_ms: u32) {
        let destinations = self.destinations.iter_mut();
        let wait_ms = destinations.fold(wait_ms, |wait_ms, destination| {
            destination.listen(&self.common, wait_ms)
        });
        self.waits.wait(i64::from(wait_ms));
    }

    /// Tells of this pass, if it did something.
    fn note_tick(&mut self, began: Instant, claimed: usize, wait_ms: u32) {
        let mut ended = Ended::default();
        self.destinations
            .iter_mut()
            .for_each(|destination| ended.add(destination.take_ended()));
        let tick = Report {
            claimed: claimed as u64,
            published: ended.published,
            failed: ended.retried + ended.buried(),
            duration_us: began.elapsed().as_micros() as u64,
            backoff_ms: wait_ms,
            owned: self.leases.len(),
            ..self.tick.clone()
        };
        self.common.shared.note_tick(&tick);
        self.tick = Report {
            active_workers: self.tick.active_workers,
            desired: self.tick.desired,
            ..Report::default()
        };
    }

    /// Whether there is nothing to do: then another database may have the slot at once.
    fn is_at_rest(&self) -> bool {
        let has_counted = |database: &&databases::Database| database.kept().has_counted() && database.pending() == 0;
        let nothing_waits = databases::my_database().filter(has_counted).is_some();
        self.destinations.iter().all(|destination| {
            destination.is_at_rest(&self.common) || (nothing_waits && destination.outstanding() == 0)
        })
    }

    fn begin_to_leave(&mut self, now: Instant) {
        self.common.leaves_by = Some(now + LEAVE / 2);
        for destination in &self.destinations {
            destination.begin_to_leave(LEAVE);
        }
    }

    /// Whether it was asked to leave, and what it had is settled or given back, or will not be soon.
    fn has_made_room(&self) -> bool {
        let is_done = || {
            self.destinations
                .iter()
                .all(|destination| destination.outstanding() == 0)
        };
        (self.common.leaves_by).is_some_and(|leaves_by| is_done() || Instant::now() >= leaves_by)
    }

    /// Claims of all destinations, and their settles. A settle waits for the disk, and all destinations with it: what is
    /// ready by then is handed over before. Returns how many messages came, how long to wait, and whether nothing failed.
    fn deliver(&mut self) -> (usize, u32, bool) {
        let (mut claimed, mut wait_ms, mut all_well) = (0, self.common.settings.idle_backoff_ms, true);
        for index in 0..self.destinations.len() {
            claimed += self.open(index);
        }
        let common = &self.common;
        let (last, first): (Vec<usize>, Vec<usize>) =
            (0..self.destinations.len()).partition(|index| self.destinations[*index].settles_first(common));
        let mut served = Vec::new();
        for index in first.into_iter().chain(last) {
            let result = self.claim(index, &mut claimed, &mut served);
            wait_ms = wait_ms.min(result.unwrap_or_else(|failure| {
                all_well = false;
                self.failed(&failure) // the others go on
            }));
        }
        // Also where nothing could be claimed, for as long as that may last: what the peer has confirmed is settled.
        for index in served {
            if self.destinations[index].is_settle_due(&self.common) {
                if let Some(came) = self.receive() {
                    claimed += came;
                    wait_ms = 0; // what was given up, or has to wait for it, is claimed with the next pass
                }
                if let Err(failure) = self.settle(index, &mut claimed) {
                    all_well = false;
                    wait_ms = wait_ms.min(self.failed(&failure));
                    continue;
                }
            }
            let settles_in_ms = self.destinations[index].settles_in_ms(&self.common);
            wait_ms = settles_in_ms.map_or(wait_ms, |ms| wait_ms.min(ms));
        }
        (claimed, wait_ms, all_well)
    }

    /// Notes whom it has served, and how many messages came. Returns how long to wait.
    fn claim(&mut self, index: usize, claimed: &mut usize, served: &mut Vec<usize>) -> Result<u32, Failure> {
        *claimed += self.receive().unwrap_or_default(); // what came while another was served
        if self.destinations[index].settles_first(&self.common) {
            self.settle(index, claimed)?;
            *claimed += self.open(index) + self.receive().unwrap_or_default();
        }
        self.destinations[index].report(&self.common)?;
        served.push(index);
        let may_claim = !self.another_tries_one_alone(index);
        let (count, wait_ms) = self.destinations[index].claim(&self.common, may_claim)?;
        *claimed += count;
        Ok(wait_ms)
    }

    /// Settles what has ended, and hands over between what comes meanwhile.
    fn settle(&mut self, index: usize, claimed: &mut usize) -> Result<(), Failure> {
        while self.destinations[index].settle_some(&self.common, STATEMENT_TIMEOUT_MS)? {
            *claimed += self.receive().unwrap_or_default();
        }
        Ok(())
    }

    fn open(&mut self, index: usize) -> usize {
        let may_claim = !self.another_tries_one_alone(index);
        self.destinations[index].open(&self.common, may_claim)
    }

    /// What crashes with that one would be charged to what is claimed beside it.
    fn another_tries_one_alone(&self, index: usize) -> bool {
        let mut destinations = self.destinations.iter().enumerate();
        destinations.any(|(other, destination)| other != index && destination.tries_one_alone())
    }

    /// Takes in hand what has become ready since the pass began, if there is something. Returns how much it took.
    fn receive(&mut self) -> Option<usize> {
        self.common.shared.is_something_ready().then(|| {
            let indexes = 0..self.destinations.len();
            let may_take: Vec<usize> = indexes.filter(|index| !self.another_tries_one_alone(*index)).collect();
            let receive = |index: usize| self.destinations[index].receive(&self.common);
            may_take.into_iter().map(receive).sum()
        })
    }

    /// Returns how long to wait.
    fn failed(&self, failure: &Failure) -> u32 {
        if signals::asked_to_end() {
            return 0; // the statement was cancelled for that
        }
        // What lasts is said once a minute.
        let now = Instant::now();
        let last = self.last_failure.replace(Some((failure.message.clone(), now)));
        match last.filter(|(message, at)| *message == failure.message && now < *at + SAY_AGAIN_AFTER) {
            Some(said) => _ = self.last_failure.replace(Some(said)),
            None => pgrx::warning!("outbox {}: {}; tries again", self.common.id, failure.message),
        }
        PAUSE_AFTER_FAILURE_MS
    }

    /// Serves the destinations that there are now, as they are described now.
    fn describe(&mut self, described: Vec<Described>) {
        for description in &described {
            if signals::asked_to_end() {
                return; // each may wait for a connection to close
            }
            match self
                .destinations
                .iter_mut()
                .find(|known| known.name == description.name)
            {
                Some(known) => known.describe(&self.common, description),
                None => {
                    let mut new = Destination::new(&self.common, description, self.sharing, &self.leases);
                    if let Some(task) = &self.task {
                        new.begin_errand(task.errand);
                    }
                    self.destinations.push(new);
                }
            }
        }
        let gone = |destination: &mut Destination| described.iter().all(|still| still.name != destination.name);
        for mut destination in self.destinations.extract_if(.., gone) {
            let patience = if signals::asked_to_end() {
                Duration::ZERO
            } else {
                STOP_GONE
            };
            destination.stop(&self.common, patience, "the destination is gone");
            let ended = destination.settle(&self.common, LAST_TRANSACTION_MS).and_then(|()| {
                in_transaction(c"outbox: report", Durability::Relaxed, || {
                    self.common.store.report(&destination.name, None, None, None, None)
                })
            });
            if let Err(failure) = ended {
                // What it held goes again when the lanes are read anew.
                pgrx::warning!("outbox {}: {}", self.common.id, failure.message);
            }
            destination.let_go(&self.common);
        }
        if statistics::is_any_uncounted() {
            ask_for_upkeep();
        }
        let names: Vec<&str> = described.iter().map(|described| described.name.as_str()).collect();
        statistics::forget_but(&names);
        let names = self.destinations.iter().map(|destination| destination.name.clone());
        self.common.shared.serve(names.collect());
        self.described = described;
    }

    // ---- what a session asks for ------------------------------------------------------------------------------------

    /// Takes up what a session asks for, and drops what nobody waits for any more.
    fn listen(&mut self, now: Instant) {
        let asked = self.common.shared.asked();
        let ticket = asked.map_or(0, |(ticket, _)| ticket);
        if self.task.as_ref().is_some_and(|task| task.ticket != ticket) {
            self.drop_task();
        }
        let Some((ticket, errand)) = asked.filter(|(ticket, _)| *ticket != self.heard) else {
            return;
        };
        self.heard = ticket;
        self.task = Some(Task {
            ticket,
            errand,
            began: now,
            purged: false,
            report: Report::default(),
        });
        for destination in &mut self.destinations {
            destination.begin_errand(errand);
        }
        self.leases_due = now;
        self.config_read_due = now; // what was changed just now counts
    }

    fn drop_task(&mut self) {
        self.task = None;
        self.destinations.iter_mut().for_each(Destination::end_errand);
    }

    /// Removes workers that have ended: by the way once a minute, and for each tick.
    fn purge(&mut self) -> Result<(), Failure> {
        if let Some(task) = &mut self.task
            && self.first
            && !std::mem::replace(&mut task.purged, true)
        {
            let store = &self.common.store;
            let purge = || store.purge_workers();
            task.report.purged_stale = in_transaction(c"outbox: purge workers", Durability::Relaxed, purge)?;
            self.tick.purged_stale = task.report.purged_stale;
        }
        Ok(())
    }

    /// At the end of a pass.
    fn answer(&mut self) {
        let (common, destinations) = (&self.common, &self.destinations);
        let Some(task) = &mut self.task else { return };
        let tallies = || destinations.iter().map(Destination::tally);
        let report = &mut task.report;
        report.claimed = tallies().map(|tally| tally.claimed).sum();
        report.published = tallies().map(|tally| tally.published).sum();
        report.failed = tallies().map(|tally| tally.failed).sum();
        report.duration_us = task.began.elapsed().as_micros() as u64;
        report.backoff_ms = match report.claimed {
            0 => common.settings.idle_backoff_ms,
            _ => 0,
        };
        report.owned = self.leases.len();
        let done = destinations
            .iter()
            .all(|destination| destination.has_run_errand(common));
        common.shared.answer(task.ticket, report, done);
        if done {
            self.drop_task();
        }
    }

    // ---- leases -----------------------------------------------------------------------------------------------------

    /// Leases go by the clock of the server, and the publisher's deadline by one that goes on while the machine is suspended. No
    /// timer of this process does: after either has jumped, the leases are over and would not be looked at for long.
    fn look_at_clock(&mut self, now: Instant) {
        let began_us = now_us() - self.common.began.elapsed().as_micros() as i64;
        if (began_us - self.clock_began_us).abs() > CLOCK_WAS_SET_US {
            pgrx::log!("outbox {}: the clock was set; looks at its leases", self.common.id);
            self.leases_due = now;
        }
        self.clock_began_us = began_us;
    }

    /// Heartbeat; renews, takes and gives back leases as the plan says.
    fn tend_leases(&mut self, now: Instant) -> Result<(), Failure> {
        let changes = databases::my_database().map_or(0, databases::Database::worker_changes);
        if now < self.leases_due && changes == self.worker_changes {
            return Ok(());
        }
        let asked_at = Deadline::now();
        let (store, settings) = (&self.common.store, &self.common.settings);
        let in_use: HashSet<Partition> = self.destinations.iter().flat_map(Destination::in_use).collect();
        let owner_of_lanes = &self.common.shared;
        let (id, sharing, before) = (&self.common.id, self.sharing, &self.leases);
        let (mut taken, mut freed) = (0, 0);
        // An asynchronous commit keeps the WAL writer up for 10 s, which is until the next heartbeat.
        let durability = if self.idle {
            Durability::Full
        } else {
            Durability::Relaxed
        };
        let (held, leaving, first, shares) = in_transaction(c"outbox: leases", durability, || {
            let workers = store.heartbeat(bgworker::my_pid(), settings.heartbeat_ttl_s)?;
            let first = workers.first() == Some(id);
            if sharing == Sharing::RowClaims {
                return Ok((Vec::new(), HashSet::new(), first, (workers.len(), 0)));
            }
            let leases = store.leases()?;
            let plan = lease::plan(id, &workers, &leases);
            // A partition that another worker should have is given back once nothing of it is in flight here.
            // A lease in our name that this process does not hold was an earlier process' of the same name: it is taken
            // anew, so that what that one had claimed counts as unclaimed.
            let (ours, inherited): (Vec<_>, Vec<_>) =
                plan.renew.iter().copied().partition(|lease| before.contains(lease));
            let acquire: Vec<Partition> = plan
                .acquire
                .iter()
                .copied()
                .chain(inherited.into_iter().map(|(partition, _)| partition))
                .collect();
            let (busy, free): (Vec<_>, Vec<_>) = plan.release.iter().copied().partition(|(p, _)| in_use.contains(p));
            store.release(&free)?;
            freed = free.len();
            let wanted: Vec<(Partition, i64)> = ours.iter().chain(&busy).copied().collect();
            let renewed = store.renew(&wanted, settings.lease_ttl_s)?;
            let mut held: Vec<(Partition, i64)> = wanted
                .into_iter()
                .filter(|(partition, _)| renewed.contains(partition))
                .collect();
            let new = store.take(&acquire, settings.lease_ttl_s)?;
            taken = new.len();
            held.extend(&new);
            held.sort_unstable();
            // Before anybody else can take them, for the rows of the leases are still locked.
            owner_of_lanes.own_lanes(&held, settings.lease_ttl_s);
            owner_of_lanes.begin_lanes(&new);
            let leaving = busy.into_iter().map(|(partition, _)| partition).collect();
            let mine = PartitionCount::new(leases.len() as i64).map_or(0, |count| {
                let mut workers_sorted = workers.clone();
                workers_sorted.sort_unstable(); // the database has a collation of its own
                lease::target(&workers_sorted, id, count).len()
            });
            Ok((held, leaving, first, (workers.len(), mine)))
        })?;
        match sharing {
            // Counted from before the lease was, and less a tenth.
            Sharing::Leases => DEADLINE.set(asked_at, Duration::from_millis(settings.lease_ttl_s as u64 * 900)),
            Sharing::RowClaims => DEADLINE.lift(),
        }
        self.first = first;
        let live = shares.0 as u32;
        for report in (self.task.iter_mut().map(|task| &mut task.report)).chain([&mut self.tick]) {
            report.renewed_heartbeat = true;
            (report.active_workers, report.desired) = shares;
            (report.leased, report.released) = (report.leased + taken, report.released + freed);
        }
        if live != self.common.workers {
            self.common.workers = live;
            for destination in &mut self.destinations {
                destination.take_limits(&self.common);
            }
        }
        if self.worker_changes == 0 || freed > 0 {
            databases::look_again(); // the others: at a worker that is new, or at partitions that are free
        }
        self.worker_changes = changes.max(1);
        if held.len() != self.leases.len() {
            pgrx::log!("outbox {}: owns {} partitions", self.common.id, held.len());
        }
        // Soon again while a partition waits to be given back, or while there is none to own yet.
        let soon = !leaving.is_empty() || (held.is_empty() && sharing == Sharing::Leases);
        for destination in &mut self.destinations {
            destination.set_leases(&held, &leaving);
        }
        self.leases = held;
        self.leases_due = now
            + if soon {
                Duration::from_millis(500)
            } else {
                self.common.settings.lease_renew
            };
        Ok(())
    }

    // ---- everything else --------------------------------------------------------------------------------------------

    fn take_settings(&mut self) {
        let before = std::mem::replace(&mut self.common.settings, Settings::snapshot());
        if before.retention != self.common.settings.retention {
            ask_for_upkeep();
        }
        let described = std::mem::take(&mut self.described);
        self.describe(described);
        self.leases_due = Instant::now();
        self.config_check_due = Instant::now(); // outbox.identity may be another
    }

    /// Changed settings and destinations. Where a new session would have other settings this one ends.
    fn look_at_settings(&mut self, now: Instant) -> Result<(), Failure> {
        let store = &self.common.store;
        let changes = changes_by_hand();
        let by_hand = changes != self.common.changes_seen;
        let must_read = by_hand || now >= self.config_read_due;
        if now < self.config_check_due && !must_read {
            return Ok(());
        }
        self.config_check_due = now + CONFIG_CHECK_EVERY;
        self.config_read_due = self.config_read_due.max(self.config_check_due); // also where it fails
        let known = self.catalog_changes;
        let looked = in_transaction(c"outbox: look at settings", Durability::Relaxed, || {
            let catalog_changes = catalog::changes();
            let read = match must_read || catalog_changes != known {
                true => Some((store.session_defaults()?, store.destinations()?)),
                false => None,
            };
            let looked = (catalog_changes, read, store.not_adopted()?);
            store.look_at_source()?; // after it was seen to be adopted: a restored dump is complete then
            Ok(looked)
        });
        let (catalog_changes, read, not_adopted) = looked?;
        self.common.not_adopted = not_adopted;
        let Some((defaults, described)) = read else {
            return Ok(());
        };
        (self.config_read_due, self.catalog_changes) = (now + CONFIG_READ_EVERY, catalog_changes);
        note_session_defaults(&defaults);
        if self.session_defaults.as_ref() != Some(&defaults) {
            pgrx::log!(
                "outbox {}: settings of the database or role changed, starts anew",
                self.common.id
            );
            ask_for_upkeep();
            self.finish();
            signals::exit(0);
        }
        if described != self.described {
            self.describe(described);
        }
        self.common.changes_seen = changes;
        Ok(())
    }

    /// The orderly end: what the brokers confirm within a moment is settled, the rest is released, the leases go back.
    fn finish(&mut self) {
        signals::end_within(LAST_MS);
        let deadline = Instant::now() + LAST_OUTCOMES;
        let awaits = |destination: &Destination| destination.outstanding() > 0 && destination.broker.is_connected();
        for destination in &self.destinations {
            destination.broker.listen(Listen::TO_EACH.confirms);
        }
        while self.destinations.iter().any(awaits) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.waits.wait(left.as_millis() as i64);
            self.common.bell.silence();
            for destination in &mut self.destinations {
                destination.take_outcomes(&self.common, Instant::now());
            }
        }
        for destination in &self.destinations {
            destination.broker.ask_to_stop(LAST_WORDS_TO_BROKER);
        }
        let deadline = Instant::now() + LAST_WORDS_TO_BROKER;
        let mut ended = Ok(());
        for destination in &mut self.destinations {
            let left = deadline.saturating_duration_since(Instant::now());
            destination.stop(&self.common, left, "the worker ended");
        }
        let deadline = Instant::now() + LAST_SETTLES;
        for destination in &mut self.destinations {
            // What is not settled in time goes again.
            if Instant::now() < deadline {
                ended = ended.and(destination.settle(&self.common, LAST_TRANSACTION_MS));
            }
        }
        let ended = ended.and_then(|()| {
            held_transaction(c"outbox: leave", LAST_TRANSACTION_MS, Durability::Relaxed, || {
                self.common.store.leave()
            })
        });
        let id = &self.common.id;
        match ended {
            Ok(()) => pgrx::log!("outbox {id}: ended"),
            Err(failure) => pgrx::log!("outbox {id}: ended; its leases run out: {}", failure.message),
        }
    }
}

/// Its settings changed, or nobody knows yet what waits for a destination.
fn ask_for_upkeep() {
    if let Some(database) = databases::my_database() {
        database.ask_for_upkeep();
    }
}

/// Before the other workers are told that this one has ended: its publisher thread lives on for a moment.
unsafe extern "C-unwind" fn stop_publishing(_code: i32, _arg: pgrx::pg_sys::Datum) {
    DEADLINE.end();
}
