//! The launcher: one process of the server, connected to no database. It starts the workers of every database that has
//! the extension, and starts them again when they end. The launcher cannot look into a database, so it starts a worker
//! to check. A worker that finds no extension records this in shared memory and ends. The launcher leaves a database
//! alone that a statement needs for itself, until it is notified (`sessions::vacate`). Workers outlive the launcher
//! that started them: the next launcher finds them by their entries in shared memory.
//!
//! If there are fewer worker slots than databases, the databases are served in turn. crates/core makes the plan
//! (`slot_schedule`); this file collects its input and executes it. Maintenance of a database is a process that the
//! launcher starts when a run is due (`maintenance`), in a free slot or in its turn.

use crate::config::ServerSettings;
use crate::pg::bgworker::{self, Handle, Spec};
use crate::pg::catalog::{self, Role};
use crate::pg::clock::now_us;
use crate::pg::txn::{self, Durability};
use crate::pg::{latch, signals};
use crate::shared::databases::{self, Obstacle};
use crate::shared::workers::{self, MAINTENANCE, MAX_MAINTENANCE};
use crate::shared::{MAX_DATABASES, MAX_WORKERS, launcher, lifecycle, sessions};
use outbox_core::slot_schedule::{self, SlotPlan};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often the launcher rescans the databases without a notification.
const RESCAN: Duration = Duration::from_secs(60);
/// How soon the launcher scans again after a scan that failed.
const RETRY_SCAN: Duration = Duration::from_secs(1);
/// The wait before a worker that ended early is started again. It doubles up to the longest.
const RESTART_SHORTEST: Duration = Duration::from_millis(100);
const RESTART_LONGEST: Duration = Duration::from_secs(30);
/// A worker that lived this long has not failed at its start.
const SETTLED_DOWN: Duration = Duration::from_secs(5);
/// How often one more slot is tried after none was free. Other extensions and parallel queries use the same slots.
const RETRY_SLOT: Duration = Duration::from_secs(5);
/// A worker that was asked to leave and still runs after this time is sent SIGTERM.
const LEAVE_PATIENCE: Duration = Duration::from_secs(20);
/// How long a database without a worker counts as idle. No commit announces `COMMIT PREPARED`, rows written by hand, or
/// rows that became old.
const VISIT_EVERY_MS: u64 = 60_000;

/// Maintenance that found no slot for this time takes its turn like a database with messages.
const MAINTENANCE_PATIENCE_MS: u64 = 60_000;

const RESTART_OF_LAUNCHER_S: i32 = 1;

/// From `_PG_init`, while preloading. A server that pg_upgrade runs has no launcher: a probe of a database would be in
/// the way when pg_upgrade drops it. Workers would change what pg_upgrade copies.
pub fn register() {
    if bgworker::in_binary_upgrade() {
        return;
    }
    let spec = Spec {
        name: "outbox launcher",
        kind: "outbox launcher",
        function: "outbox_launcher_main",
        argument: 0,
    };
    bgworker::register_static(&spec, RESTART_OF_LAUNCHER_S);
}

/// The database and number of a worker, from the argument that its process was started with.
pub fn unpack(argument: u64) -> (u32, u32) {
    (argument as u32, (argument >> 32) as u32)
}

fn pack(database: u32, number: u32) -> u64 {
    u64::from(number) << 32 | u64::from(database)
}

pub fn main() {
    signals::install();
    bgworker::connect_to_shared_catalogs();
    lifecycle::launcher_starts();
    let mut launcher = Launcher {
        databases: BTreeMap::new(),
        slots: u32::MAX,
        tried: None,
        news: 0,
        scanned: None,
        warned: None,
        without_entry: Vec::new(),
        began: Instant::now(),
    };
    loop {
        let wait = launcher.pass();
        latch::wait(wait.as_millis() as i64);
        signals::forget_cancel(); // a cancel between two statements would be an ERROR and end the launcher
        signals::check_for_interrupts();
        if signals::reload_if_requested() {
            launcher.scanned = None;
        }
    }
}

struct Launcher {
    databases: BTreeMap<u32, Served>,
    /// Slots that our processes take or could take: the number that they took when none was free, plus one for each
    /// later try.
    slots: u32,
    /// When a start last found no free slot.
    tried: Option<Instant>,
    news: u32,
    /// When the launcher last scanned without a notification, and also had databases without the extension rechecked.
    scanned: Option<Instant>,
    /// When the launcher last logged that worker slots are missing: at most once a minute.
    warned: Option<Instant>,
    /// Databases that had no entry at the last scan.
    without_entry: Vec<String>,
    began: Instant,
}

/// A database and its workers; the index is the number of the worker.
#[derive(Default)]
struct Served {
    name: String,
    workers: Vec<Child>,
    maintenance: Child,
    /// Since when maintenance is due, in ms of the launcher's life; None = it is not due.
    maintenance_due_ms: Option<u64>,
    /// The number of runs that had ended when the running process started.
    maintenance_runs: u32,
    /// The database was dropped, or is closed to connections.
    gone: bool,
    /// The number of workers that the database is to have now.
    wanted: u32,
    /// The extension seems to be missing, and a worker shall check again.
    recheck: bool,
    /// When its first worker started, or its last one ended, in ms of the launcher's life; 0 = neither has happened.
    since_ms: u64,
    /// The number of calls of its workers when none had anything to do, and when the launcher saw that, in ms of its
    /// life.
    idle: Option<(u32, u64)>,
}

#[derive(Default)]
struct Child {
    running: Option<Running>,
    not_before: Option<Instant>,
    failures: u32,
}

struct Running {
    process: Process,
    since: Instant,
    /// The number of notifications of the launcher when the process started.
    news: u32,
    /// Since when the process shall end; None = it may run on.
    leaves: Option<Instant>,
}

impl Child {
    /// Records the end of the process, and when another one may start at the earliest.
    fn record_end(&mut self, has_failed: bool, now: Instant) {
        self.failures = if has_failed { self.failures + 1 } else { 0 };
        let wait = RESTART_SHORTEST
            .saturating_mul(1 << self.failures.min(9))
            .min(RESTART_LONGEST);
        self.not_before = Some(now + wait);
    }
}

/// How the launcher identifies a process.
enum Process {
    Started(Handle),
    /// An earlier launcher started it: the id of the process, which has an entry in shared memory.
    Found(i32),
}

impl Running {
    fn is_alive(&self, database: u32, number: u32) -> bool {
        match &self.process {
            Process::Started(handle) => handle.is_alive(),
            Process::Found(pid) => workers::has_entry(database, number, *pid),
        }
    }

    fn terminate(&self, database: u32, number: u32) {
        match &self.process {
            Process::Started(handle) => handle.terminate(),
            Process::Found(_) => workers::terminate(database, |its| its == number),
        }
    }
}

impl Launcher {
    /// Starts and ends processes so that those run that should. Returns how long the launcher may sleep if nothing else
    /// happens.
    fn pass(&mut self) -> Duration {
        let now = Instant::now();
        let news = launcher::news();
        let mut next = RESCAN;
        let rescan_due = self.scanned.is_none_or(|scanned| now >= scanned + RESCAN);
        if news != self.news || rescan_due {
            match self.scan() {
                true => self.news = news,
                false => next = RETRY_SCAN, // the notification is not handled yet
            }
            if self.news == news && rescan_due {
                self.scanned = Some(now);
                self.databases.values_mut().for_each(|served| served.recheck = true);
            }
        }
        self.find_workers(now);
        let settings = ServerSettings::snapshot();
        let role = txn::run(c"outbox: look up the worker role", 30_000, Durability::Relaxed, || {
            Ok(catalog::role(&settings.worker_role))
        });
        let role = match role {
            Ok(Role::Usable(role)) => Some(role),
            _ => None,
        };
        if let Some(role) = role {
            launcher::set_worker_role(role);
        }
        let now_ms = self.now_ms(now);
        for (oid, served) in &mut self.databases {
            let of_workers = served.tend(*oid, &settings, role.is_some(), self.news, now, now_ms);
            let of_maintenance = served.tend_maintenance(*oid, &settings, role.is_some(), now, now_ms);
            next = next.min(of_workers).min(of_maintenance);
        }
        let plan = self.serve(&settings, now, now_ms);
        self.report_waiting(&plan, now);
        let rescan_in = plan.rescan_in_ms.map(Duration::from_millis);
        let retry_in = (plan.kept_out > 0).then_some(RETRY_SLOT);
        rescan_in.into_iter().chain(retry_in).fold(next, Duration::min)
    }

    /// Starts workers, and asks others to leave. Returns the plan, with what is left to be done.
    fn serve(&mut self, settings: &ServerSettings, now: Instant, now_ms: u64) -> SlotPlan {
        loop {
            let count = self.databases.len();
            let mut seen: Vec<slot_schedule::DatabaseDemand> = (self.databases.iter_mut())
                .map(|(oid, served)| served.as_seen(*oid, now, now_ms))
                .collect();
            let mut maintenance_running = self.maintenance_processes();
            let may_start = maintenance_running < MAX_MAINTENANCE;
            // After the databases, in the same order, the maintenance of each.
            seen.extend(
                self.databases
                    .values()
                    .map(|served| served.maintenance_as_seen(may_start)),
            );
            let room = workers::room_in_server() + maintenance_running as u32;
            let plan = slot_schedule::plan(&seen, self.slots.min(room), now_ms, settings.slice_ms);
            let mut found_none = false;
            for index in &plan.start {
                let Some((oid, served)) = self.databases.iter_mut().nth(*index % count) else {
                    continue;
                };
                let has_started = match *index < count {
                    true => served.start(*oid, self.news, now, now_ms),
                    false if maintenance_running == MAX_MAINTENANCE => true, // wait for an entry
                    false => {
                        maintenance_running += 1;
                        served.start_maintenance(*oid, self.news, now)
                    }
                };
                if !has_started {
                    found_none = true;
                    break;
                }
            }
            if found_none {
                let workers: u32 = self.databases.values().map(Served::running).sum();
                self.slots = workers + self.maintenance_processes() as u32;
                self.tried = Some(now);
                continue; // plan with the slots that there are
            }
            if plan.kept_out > 0 && self.slots < room && self.tried.is_none_or(|tried| now >= tried + RETRY_SLOT) {
                self.slots = self.slots.saturating_add(1);
                continue;
            }
            for index in &plan.leave {
                match self.databases.iter_mut().nth(*index % count) {
                    Some((oid, served)) if *index < count => served.request_leave(*oid, now),
                    Some((oid, served)) => served.request_maintenance_leave(*oid, now),
                    None => {}
                }
            }
            return plan;
        }
    }

    /// The number of maintenance processes that run.
    fn maintenance_processes(&self) -> usize {
        let runs = |served: &&Served| served.maintenance.running.is_some();
        self.databases.values().filter(runs).count()
    }

    fn report_waiting(&mut self, plan: &SlotPlan, now: Instant) {
        let no_entries = workers::room_in_server() <= self.slots;
        for (oid, served) in &self.databases {
            let entry = databases::database(*oid).filter(|entry| served.wanted > 0 && !entry.lacks_extension());
            if let Some(entry) = entry {
                entry.set_obstacle(match served.startable(now) {
                    _ if plan.in_turn && no_entries => Obstacle::Entries,
                    _ if plan.in_turn => Obstacle::TimeSlices,
                    0 => Obstacle::None,
                    _ if no_entries && plan.missing > 0 => Obstacle::Entries,
                    _ => Obstacle::Slots,
                });
            }
        }
        launcher::set_waiting_databases(plan.waiting);
        launcher::set_missing_slots(if no_entries { 0 } else { plan.missing });
        if plan.missing > 0 && self.warned.is_none_or(|last| now >= last + Duration::from_secs(60)) {
            self.warned = Some(now);
            let in_turn = if plan.in_turn {
                "; the databases are served in turn"
            } else {
                ""
            };
            let missing = plan.missing;
            match no_entries {
                true => pgrx::warning!(
                    "outbox: {missing} worker(s) cannot start: the limit of {MAX_WORKERS} workers inside and outside the server is reached{in_turn}"
                ),
                false => pgrx::warning!(
                    "outbox: {missing} worker(s) cannot start: no worker slot is free; raise max_worker_processes by {missing}{in_turn}"
                ),
            }
        }
    }

    fn now_ms(&self, now: Instant) -> u64 {
        1 + now.duration_since(self.began).as_millis() as u64
    }

    /// Takes over workers that another launcher started.
    fn find_workers(&mut self, now: Instant) {
        let (news, now_ms) = (self.news, self.now_ms(now));
        for found in workers::processes_in_server() {
            let unlisted = || Served {
                gone: true, // it is closed to connections, and its workers shall end
                ..Served::default()
            };
            let served = self.databases.entry(found.database).or_insert_with(unlisted);
            let child = match found.number {
                MAINTENANCE => &mut served.maintenance,
                number => {
                    if served.running() == 0 {
                        served.since_ms = now_ms;
                    }
                    let number = number as usize;
                    while served.workers.len() <= number {
                        served.workers.push(Child::default());
                    }
                    &mut served.workers[number]
                }
            };
            if child.running.is_some() {
                continue;
            }
            pgrx::log!(
                "outbox launcher: found {} of database {} running, process {}",
                workers::id_of(found.number),
                found.database,
                found.pid
            );
            child.running = Some(Running {
                process: Process::Found(found.pid),
                since: now,
                news,
                leaves: found.leaves.then_some(now),
            });
        }
    }

    /// Lists the databases. Returns false if that failed.
    fn scan(&mut self) -> bool {
        let found = match txn::run(c"outbox: list databases", 30_000, Durability::Relaxed, || {
            Ok(catalog::databases())
        }) {
            Ok(found) => found,
            Err(failure) => {
                pgrx::warning!("outbox launcher: cannot list databases: {}", failure.message);
                return false;
            }
        };
        let oids: Vec<u32> = found.iter().map(|database| database.oid).collect();
        self.databases.retain(|oid, served| {
            served.gone = !oids.contains(oid);
            !served.gone || served.maintenance.running.is_some() || served.running() > 0
        });
        lifecycle::sweep(&oids);
        let mut without_entry = Vec::new();
        for database in found {
            if databases::add_database(database.oid, now_us()).is_none() {
                without_entry.push(database.name.clone());
            }
            self.databases.entry(database.oid).or_default().name = database.name;
        }
        self.report_databases_without_entry(without_entry);
        true
    }

    /// Logs each database without an entry once.
    fn report_databases_without_entry(&mut self, without_entry: Vec<String>) {
        if let Some(new) = without_entry.iter().find(|name| !self.without_entry.contains(name)) {
            let count = without_entry.len();
            pgrx::warning!(
                "outbox: {count} database(s) cannot be served, for example \"{new}\": the limit of {MAX_DATABASES} databases is reached"
            );
        }
        self.without_entry = without_entry;
    }
}

impl Served {
    /// Records workers that ended, decides how many there are to be, and ends those beyond that number. Returns how
    /// long until the next check.
    fn tend(
        &mut self,
        oid: u32,
        settings: &ServerSettings,
        has_role: bool,
        news: u32,
        now: Instant,
        now_ms: u64,
    ) -> Duration {
        let entry = match self.gone || sessions::is_vacated(oid) {
            true => None,
            false => databases::add_database(oid, now_us()),
        };
        self.reap(oid, entry, news, now, now_ms);
        let mut next = RESCAN;
        self.wanted = match entry {
            None => 0,
            Some(entry) if !settings.serves(&self.name) => {
                entry.set_obstacle(Obstacle::Excluded);
                0
            }
            Some(entry) if entry.lacks_extension() && !self.recheck => 0, // until a notification or a rescan
            Some(entry) if !has_role => {
                entry.set_obstacle(Obstacle::Role);
                next = Duration::from_secs(1);
                0
            }
            // Until the first worker has found the extension, one is enough.
            Some(entry) if !entry.has_extension() => settings.workers.min(1),
            Some(_) => settings.workers,
        };
        let in_order = sessions::is_vacated(oid) && !sessions::is_vacated_immediately(oid);
        for (number, worker) in self.workers.iter_mut().enumerate().skip(self.wanted as usize) {
            if let Some(running) = &mut worker.running {
                running.leaves.get_or_insert(now);
                if !(in_order && workers::request_leave(oid, number as u32)) {
                    running.terminate(oid, number as u32);
                }
            }
        }
        for (number, worker) in self.workers.iter().enumerate() {
            let Some(running) = &worker.running else { continue };
            match running.leaves {
                Some(since) if now >= since + LEAVE_PATIENCE => running.terminate(oid, number as u32),
                Some(_) => {}
                None => continue,
            }
            next = next.min(Duration::from_secs(5));
        }
        let rests = |child: &Child| child.not_before.filter(|not_before| *not_before > now);
        let resting = self.workers.iter().take(self.wanted as usize).filter_map(rests);
        resting.fold(next, |next, not_before| next.min(not_before - now))
    }

    /// Records that the maintenance process ended, ends one that must not run, and records since when the next is due.
    /// Returns how long until the next check.
    fn tend_maintenance(
        &mut self,
        oid: u32,
        settings: &ServerSettings,
        has_role: bool,
        now: Instant,
        now_ms: u64,
    ) -> Duration {
        let entry = databases::database(oid).filter(|_| !self.gone && !sessions::is_vacated(oid));
        if let Some(ended) = self
            .maintenance
            .running
            .take_if(|running| !running.is_alive(oid, MAINTENANCE))
        {
            let has_failed = ended.leaves.is_none()
                && entry.is_some_and(|entry| {
                    entry.has_extension() && entry.maintenance.runs.read() == self.maintenance_runs
                });
            self.recheck &= !entry.is_some_and(databases::DatabaseEntry::lacks_extension);
            self.maintenance.record_end(has_failed, now);
        }
        let may_run = settings.serves(&self.name) && has_role;
        let Some(entry) = entry.filter(|_| may_run) else {
            self.maintenance_due_ms = None;
            if let Some(running) = &mut self.maintenance.running {
                running.leaves.get_or_insert(now);
                running.terminate(oid, MAINTENANCE);
            }
            return RESCAN;
        };
        // If there are workers, they check for the extension.
        let probes = settings.workers == 0 && (!entry.lacks_extension() || self.recheck);
        let left_us = entry.maintenance.next_us().saturating_sub(now_us());
        let rests = self.maintenance.not_before.filter(|not_before| *not_before > now);
        if let Some(running) = &self.maintenance.running {
            match running.leaves {
                Some(since) if now >= since + LEAVE_PATIENCE => running.terminate(oid, MAINTENANCE),
                _ => {}
            }
            return RESCAN;
        }
        let is_due = left_us <= 0 && rests.is_none() && (entry.has_extension() || probes);
        self.maintenance_due_ms = is_due.then(|| self.maintenance_due_ms.unwrap_or(now_ms));
        match (rests, u64::try_from(left_us)) {
            (Some(not_before), _) => not_before - now,
            (None, Ok(left_us @ 1..)) => Duration::from_micros(left_us).min(RESCAN),
            _ => RESCAN,
        }
    }

    /// Maintenance, as the plan needs it: like a database that is known to be idle, until it has waited for
    /// `MAINTENANCE_PATIENCE_MS`.
    fn maintenance_as_seen(&self, may_start: bool) -> slot_schedule::DatabaseDemand {
        let (runs, is_due) = (self.maintenance.running.as_ref(), self.maintenance_due_ms.is_some());
        let since_ms = self.maintenance_due_ms.unwrap_or(0);
        slot_schedule::DatabaseDemand {
            wanted: u32::from(is_due || runs.is_some()),
            startable: u32::from(is_due && runs.is_none() && may_start),
            running: u32::from(runs.is_some()),
            leaving: u32::from(runs.is_some_and(|running| running.leaves.is_some())),
            since_ms,
            idle_until_ms: match runs {
                Some(_) => u64::MAX,
                None => since_ms + MAINTENANCE_PATIENCE_MS,
            },
            spare: false,
            maintenance: true,
        }
    }

    /// Starts maintenance. Returns false if no slot is free.
    fn start_maintenance(&mut self, oid: u32, news: u32, now: Instant) -> bool {
        let name = format!("outbox maintenance of {}", self.name);
        let spec = Spec {
            name: &name,
            kind: "outbox maintenance",
            function: "outbox_worker_main",
            argument: pack(oid, MAINTENANCE),
        };
        let Some(handle) = bgworker::start(&spec) else {
            return false;
        };
        self.maintenance_runs = databases::database(oid).map_or(0, |entry| entry.maintenance.runs.read());
        self.maintenance.running = Some(Running {
            process: Process::Started(handle),
            since: now,
            news,
            leaves: None,
        });
        true
    }

    fn request_maintenance_leave(&mut self, oid: u32, now: Instant) {
        if let Some(running) = &mut self.maintenance.running {
            running.leaves.get_or_insert(now);
            if !workers::request_leave(oid, MAINTENANCE) {
                running.terminate(oid, MAINTENANCE); // it has no entry yet
            }
        }
    }

    /// Records workers that have ended.
    fn reap(&mut self, oid: u32, database: Option<&databases::DatabaseEntry>, news: u32, now: Instant, now_ms: u64) {
        let before = self.running();
        for (number, child) in self.workers.iter_mut().enumerate() {
            let Some(ended) = child.running.take_if(|running| !running.is_alive(oid, number as u32)) else {
                continue;
            };
            // The launcher was notified since the worker started. So the worker may have ended for that reason, or have
            // checked for the extension too soon.
            let is_outdated = ended.news != news;
            let without_extension = database.filter(|database| database.lacks_extension());
            if let Some(database) = without_extension.filter(|_| is_outdated) {
                database.forget_extension();
            }
            self.recheck &= without_extension.is_none();
            let was_requested = is_outdated || ended.leaves.is_some();
            let has_failed = !was_requested && without_extension.is_none() && now < ended.since + SETTLED_DOWN;
            child.record_end(has_failed, now);
        }
        if before > 0 && self.running() == 0 {
            self.since_ms = now_ms;
        }
    }

    fn running(&self) -> u32 {
        self.workers.iter().filter(|child| child.running.is_some()).count() as u32
    }

    /// The number of workers that are missing and could be started now.
    fn startable(&self, now: Instant) -> u32 {
        let cannot = |child: &&Child| child.running.is_some() || child.not_before.is_some_and(|time| time > now);
        let known = self.workers.iter().take(self.wanted as usize);
        self.wanted - known.filter(cannot).count() as u32
    }

    /// The database, as the plan needs it.
    fn as_seen(&mut self, oid: u32, now: Instant, now_ms: u64) -> slot_schedule::DatabaseDemand {
        let (running, entry) = (self.running(), databases::database(oid));
        if let Some(entry) = entry {
            self.idle = match running {
                // A database that is known to wait need not wake the launcher again.
                0 => self.idle.filter(|(then, _)| entry.wake_launcher_on_call() == *then),
                _ => entry.idle_at().map(|calls| (calls, now_ms)),
            };
        }
        let due_ms = entry
            .and_then(|entry| entry.next_due_us.get())
            .map_or(u64::MAX, |due_us| {
                now_ms + u64::try_from(due_us - now_us()).unwrap_or(0) / 1000
            });
        let leaves = |child: &&Child| child.running.as_ref().is_some_and(|running| running.leaves.is_some());
        slot_schedule::DatabaseDemand {
            wanted: self.wanted,
            startable: self.startable(now),
            running,
            leaving: self.workers.iter().filter(leaves).count() as u32,
            since_ms: self.since_ms,
            idle_until_ms: self.idle.map_or(0, |(_, seen_ms)| due_ms.min(seen_ms + VISIT_EVERY_MS)),
            spare: entry.is_some_and(databases::DatabaseEntry::lacks_extension),
            maintenance: false,
        }
    }

    /// Starts a worker. Returns false if no slot is free.
    fn start(&mut self, oid: u32, news: u32, now: Instant, now_ms: u64) -> bool {
        while self.workers.len() < self.wanted as usize {
            self.workers.push(Child::default());
        }
        let can = |child: &Child| child.running.is_none() && child.not_before.is_none_or(|time| time <= now);
        let is_first = self.running() == 0;
        let Some(number) = self.workers.iter().take(self.wanted as usize).position(can) else {
            return true;
        };
        let name = format!("outbox worker {} of {}", number + 1, self.name);
        let spec = Spec {
            name: &name,
            kind: "outbox worker",
            function: "outbox_worker_main",
            argument: pack(oid, number as u32),
        };
        let Some(handle) = bgworker::start(&spec) else {
            return false;
        };
        self.workers[number].running = Some(Running {
            process: Process::Started(handle),
            since: now,
            news,
            leaves: None,
        });
        if is_first {
            self.since_ms = now_ms;
        }
        true
    }

    /// Asks the worker of the highest number to leave.
    fn request_leave(&mut self, oid: u32, now: Instant) {
        for (number, child) in self.workers.iter_mut().enumerate().rev() {
            if let Some(running) = child.running.as_mut().filter(|running| running.leaves.is_none()) {
                running.leaves = Some(now);
                if !workers::request_leave(oid, number as u32) {
                    running.terminate(oid, number as u32); // it has no entry yet
                }
                return;
            }
        }
    }
}
