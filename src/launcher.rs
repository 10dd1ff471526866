//! The launcher: one process of the server, connected to no database, that starts the workers of every database that has
//! the extension and starts them again when they end. It cannot look into a database, so it starts a worker to see:
//! one that finds no extension says so in shared memory and ends. A database that a statement needs for itself is left
//! alone until there is news (`hooks`).

use crate::config::ServerSettings;
use crate::figures;
use crate::pg::bgworker::{self, Handle, Spec};
use crate::pg::catalog::{self, Role};
use crate::pg::txn::{self, Durability};
use crate::pg::{latch, signals};
use crate::shmem::{self, Obstacle};
use crate::store::now_us;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How often databases are looked for without news.
const RESCAN: Duration = Duration::from_secs(60);
/// Wait before a worker that ended soon is started again; doubles up to the longest.
const RESTART_SHORTEST: Duration = Duration::from_millis(100);
const RESTART_LONGEST: Duration = Duration::from_secs(30);
/// A worker that lived this long did not end because it started.
const SETTLED_DOWN: Duration = Duration::from_secs(5);

const RESTART_OF_LAUNCHER_S: i32 = 5;

/// From `_PG_init`, while preloading.
pub fn register() {
    let spec = Spec {
        name: "outbox launcher",
        kind: "outbox launcher",
        function: "outbox_launcher_main",
        argument: 0,
    };
    bgworker::register_static(&spec, RESTART_OF_LAUNCHER_S);
}

/// The database and number of the worker, out of the argument it was started with.
pub fn unpack(argument: u64) -> (u32, u32) {
    (argument as u32, (argument >> 32) as u32)
}

fn pack(database: u32, number: u32) -> u64 {
    u64::from(number) << 32 | u64::from(database)
}

pub fn main() {
    signals::install();
    bgworker::connect_to_shared_catalogs();
    shmem::launcher_starts();
    let mut launcher = Launcher {
        databases: HashMap::new(),
        news: 0,
        scanned: None,
        complained: None,
    };
    loop {
        let wait = launcher.pass();
        latch::wait(wait.as_millis() as i64);
        signals::check_for_interrupts();
        if signals::reload_if_asked() {
            launcher.scanned = None;
        }
    }
}

struct Launcher {
    databases: HashMap<u32, Served>,
    news: u32,
    scanned: Option<Instant>,
    /// When it last said in the log that worker slots are missing: at most once a minute.
    complained: Option<Instant>,
}

/// A database and its workers; index = number of the worker.
struct Served {
    name: String,
    workers: Vec<Place>,
    /// Dropped, or closed to connections.
    gone: bool,
    /// Workers that found no slot.
    missing: u32,
}

#[derive(Default)]
struct Place {
    running: Option<Running>,
    not_before: Option<Instant>,
    failures: u32,
}

struct Running {
    handle: Handle,
    since: Instant,
    /// How much news there was when it started.
    news: u32,
}

impl Launcher {
    /// Brings the workers to where they should be; returns how long it may sleep unless something happens.
    fn pass(&mut self) -> Duration {
        let now = Instant::now();
        let news = shmem::news();
        let rescan_due = self.scanned.is_none_or(|scanned| now >= scanned + RESCAN);
        if news != self.news || rescan_due {
            self.news = news;
            if rescan_due {
                shmem::forget_absences();
            }
            self.scan(now);
        }
        let settings = ServerSettings::snapshot();
        let mut next = RESCAN;
        for oid in self.databases.keys().copied().collect::<Vec<_>>() {
            next = next.min(self.tend(oid, &settings, now));
        }
        let missing = self.databases.values().map(|served| served.missing).sum();
        shmem::set_missing_slots(missing);
        if missing > 0 && self.complained.is_none_or(|said| now >= said + Duration::from_secs(60)) {
            self.complained = Some(now);
            pgrx::warning!("outbox: {missing} worker(s) find no slot; raise max_worker_processes by as many");
        }
        next
    }

    fn scan(&mut self, now: Instant) {
        let found = match txn::run(c"outbox: look for databases", 30_000, Durability::Relaxed, || {
            Ok(catalog::databases())
        }) {
            Ok(found) => found,
            Err(failure) => {
                pgrx::warning!("outbox launcher: cannot list databases: {}", failure.message);
                return;
            }
        };
        self.scanned = Some(now);
        let oids: Vec<u32> = found.iter().map(|database| database.oid).collect();
        self.databases.retain(|oid, served| {
            served.gone = !oids.contains(oid);
            !served.gone || served.workers.iter().any(|place| place.running.is_some())
        });
        shmem::forget_databases_but(&oids);
        figures::forget_databases_but(&oids);
        for database in found {
            shmem::add_database(database.oid, now_us());
            let served = self.databases.entry(database.oid).or_insert_with(|| Served {
                name: String::new(),
                workers: Vec::new(),
                gone: false,
                missing: 0,
            });
            served.name = database.name;
        }
    }

    /// One database. Returns when to look again.
    fn tend(&mut self, oid: u32, settings: &ServerSettings, now: Instant) -> Duration {
        let Some(served) = self.databases.get_mut(&oid) else {
            return RESCAN;
        };
        served.missing = 0;
        if served.gone || shmem::is_vacated(oid) {
            served.reap(None, self.news, now);
            served.stop_beyond(0);
            return RESCAN;
        }
        let Some(place) = shmem::add_database(oid, now_us()) else {
            return RESCAN;
        };
        served.reap(Some(place), self.news, now);
        let wanted = match settings.serves(&served.name) {
            false => {
                place.set_obstacle(Obstacle::Excluded);
                0
            }
            true if place.lacks_extension() => 0, // until there is news or a rescan
            // Until the first worker has found the extension, one is enough.
            true if !place.has_extension() => settings.workers.min(1),
            true => settings.workers,
        };
        served.stop_beyond(wanted);
        if wanted == 0 {
            return RESCAN;
        }
        let role = txn::run(c"outbox: look up the worker role", 30_000, Durability::Relaxed, || {
            Ok(catalog::role(&settings.worker_role))
        });
        let Ok(Role::Usable(role)) = role else {
            place.set_obstacle(Obstacle::Role);
            served.stop_beyond(0);
            return Duration::from_secs(1);
        };
        shmem::set_worker_role(role);
        let mut next = RESCAN;
        for number in 0..wanted {
            match served.ensure(oid, number, self.news, now) {
                Started::Runs => {}
                Started::Waits(wait) => next = next.min(wait),
                Started::NoSlot => {
                    served.missing += 1;
                    next = next.min(Duration::from_secs(5));
                }
            }
        }
        place.set_obstacle(match served.missing {
            0 => Obstacle::None,
            _ => Obstacle::Slots,
        });
        next
    }
}

enum Started {
    Runs,
    Waits(Duration),
    NoSlot,
}

impl Served {
    /// Notices workers that have ended.
    fn reap(&mut self, database: Option<&shmem::Database>, news: u32, now: Instant) {
        for place in &mut self.workers {
            let Some(ended) = place.running.take_if(|running| !running.handle.is_alive()) else {
                continue;
            };
            // There was news since it started, so it may have ended for that, or have looked for the extension too soon.
            let is_outdated = ended.news != news;
            let without_extension = database.filter(|database| database.lacks_extension());
            if let Some(database) = without_extension.filter(|_| is_outdated) {
                database.forget_extension();
            }
            let has_failed = !is_outdated && without_extension.is_none() && now < ended.since + SETTLED_DOWN;
            place.failures = if has_failed { place.failures + 1 } else { 0 };
            let wait = RESTART_SHORTEST
                .saturating_mul(1 << place.failures.min(9))
                .min(RESTART_LONGEST);
            place.not_before = Some(now + wait);
        }
    }

    fn stop_beyond(&mut self, wanted: u32) {
        for place in self.workers.iter().skip(wanted as usize) {
            if let Some(running) = &place.running {
                running.handle.terminate();
            }
        }
    }

    fn ensure(&mut self, oid: u32, number: u32, news: u32, now: Instant) -> Started {
        while self.workers.len() <= number as usize {
            self.workers.push(Place::default());
        }
        let name = format!("outbox worker {} of {}", number + 1, self.name);
        let place = &mut self.workers[number as usize];
        if place.running.is_some() {
            return Started::Runs;
        }
        if let Some(not_before) = place.not_before.filter(|not_before| *not_before > now) {
            return Started::Waits(not_before - now);
        }
        let spec = Spec {
            name: &name,
            kind: "outbox worker",
            function: "outbox_worker_main",
            argument: pack(oid, number),
        };
        match bgworker::start(&spec) {
            Some(handle) => {
                place.running = Some(Running {
                    handle,
                    since: now,
                    news,
                });
                Started::Runs
            }
            None => Started::NoSlot,
        }
    }
}
