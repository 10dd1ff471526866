//! The session of a worker with its database. It calls the functions that the role outbox_relay may call; each call is
//! one statement, and so one transaction. Used on the worker's thread, which waits for each result.

use super::db::SessionDb;
use super::error::{WorkError, no_answer, unexpected};
use crate::connect::{self, ConnectArgs};
use crate::progress::WorkerIdentity;
use crate::shutdown::Shutdown;
use outbox_core::engine::{Batch, ClaimLimits, HeldLease, Lane};
use outbox_core::finding::Finding;
use outbox_core::open_transactions::{FILTER_WORDS, OpenTransaction};
use outbox_core::partition::Partition;
use outbox_core::session_settings;
use outbox_core::standbys::{Replication, Standby, WalPosition};
use outbox_transport::kind::Kind;
use outbox_transport::options::split;
use outbox_worker::protocol::{Arg, Db, ResultRow, Statement, WorkerProtocol, columns, indexes};
use outbox_worker::rewinds::{RewindLane, Rewound};
use outbox_worker::{Described, Mapping, empty_mapping};
use std::cell::Cell;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Settings in addition to those of a worker in the server. With tcp_user_timeout the server ends the session of a
/// worker that has not acknowledged data for that long, and so releases its locks. A commit that a crash undoes is
/// repeated; a settle waits for the disk.
const SETTINGS: &str = "
    set application_name = 'outboxctl work'; set statement_timeout = '30s'; set tcp_user_timeout = '15s';
    set synchronous_commit = off";

/// Without connect_timeout: the longest wait for a session with an address. A peer that says nothing must not hold a
/// worker for ever.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The shared memory that a worker reads after a claim.
pub struct SharedState {
    pub open: Vec<OpenTransaction>,
    pub rewinds: Vec<Rewound>,
}

/// The settings and destinations that the worker reads every second.
pub struct Refreshed {
    /// `None` while outbox_configure() changes the partitions.
    pub leasing: Option<bool>,
    pub not_adopted: Option<String>,
    pub session_defaults: String,
    pub destinations: Vec<Described>,
    /// The settings of the outbox by name, in the units of pg_settings.
    pub settings: HashMap<String, String>,
}

/// The result of a wait.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WaitResult {
    counters: Vec<i64>,
    pub worker_changes: i64,
    pub schedules: u32,
    /// Whether a statement needs the database without workers.
    pub is_vacated: bool,
    /// Whether that statement does not wait for messages in flight.
    pub must_terminate: bool,
}

/// A user mapping of a server, as this session sees it.
struct RoleMapping {
    options: Vec<(String, String)>,
    is_own: bool,
    /// Whose mapping it is, and the role of this session, as identifiers.
    of: String,
    role: String,
    /// Whether the role has USAGE on the server.
    may_read: bool,
}

impl RoleMapping {
    /// A message must not go out unsigned because only the workers in the server have the secret. At the peer of the
    /// settings, this worker has credentials of its own.
    fn mapping(&self, kind: &Kind) -> Mapping {
        let Self { of, role, .. } = self;
        match (self.is_own, kind == Kind::of_settings()) {
            (true, _) if !self.options.is_empty() => Mapping::Options(self.options.clone()),
            (true, _) if !self.may_read => {
                let why = format!("{role} cannot read its user mapping without USAGE on the server");
                Mapping::Unusable(Finding::new("mapping_unreadable", why).with("role", role))
            }
            (true, _) => Mapping::Unusable(empty_mapping(role)),
            (false, false) => {
                let why = format!("there is a user mapping for {of} and none for {role}");
                Mapping::Unusable(Finding::new("mapping_missing", why).with("role", role))
            }
            (false, true) => Mapping::Absent,
        }
    }
}

pub struct WorkerSession {
    pub protocol: WorkerProtocol<SessionDb>,
    /// The worker id, and the server, database and role of the session.
    pub who: WorkerIdentity,
    /// With leasing off: the token of this worker's claims.
    pub row_token: i64,
    pid: i32,
    /// outbox.lease_ttl and outbox.claim_ttl, in seconds, as of the last refresh.
    lease_ttl_s: Cell<i32>,
    pub claim_ttl_s: Cell<i32>,
    /// A time of the server's clock, in µs since 1970, and when it was read.
    clock: Cell<(i64, Instant)>,
}

impl WorkerSession {
    /// Opens a session and registers it as a worker. A stop ends the attempt.
    pub fn open(handle: &Handle, connect: &ConnectArgs, label: &str, stop: &Shutdown) -> Result<Self, WorkError> {
        let opened = handle.block_on(async {
            tokio::select! {
                opened = connect::connect_session_within(connect, CONNECT_TIMEOUT) => opened.map_err(WorkError::from),
                () = stop.requested() => Err(no_answer()),
            }
        })?;
        let db = SessionDb::new(handle.clone(), opened.client, stop.clone());
        db.batch_execute(SETTINGS)?;
        db.batch_execute(&session_settings::statement())?;
        let begin = Statement::Text("select worker, token from outbox_internal.work_begin($1)");
        let (worker, row_token) = db.one(begin, &[Arg::Text(Some(label))], |row| {
            Ok((row.name(0)?, row.count(1)?))
        })?;
        let who = Statement::Text(
            "select coalesce(host(inet_server_addr()), 'local socket') || ':' || current_setting('port'),
                    current_database()::text, current_user::text, pg_backend_pid()",
        );
        let (who, pid) = db.one(who, &[], |row| {
            let identity = WorkerIdentity {
                worker_id: worker.clone(),
                server: row.name(0)?,
                database: row.name(1)?,
                user: row.name(2)?,
            };
            Ok((identity, row.count(3)? as i32))
        })?;
        Ok(Self {
            protocol: WorkerProtocol { db, worker },
            who,
            row_token,
            pid,
            lease_ttl_s: Cell::new(0),
            claim_ttl_s: Cell::new(0),
            clock: Cell::new((0, Instant::now())),
        })
    }

    fn db(&self) -> &SessionDb {
        &self.protocol.db
    }

    /// Waits for this time, or until the worker is to end.
    pub fn pause(&self, limit: Duration) {
        self.db().pause(limit);
    }

    /// Runs a statement that returns nothing.
    fn act(&self, sql: &'static str, args: &[Arg]) -> Result<(), WorkError> {
        self.db().run(Statement::Text(sql), args, |_| Ok(())).map(drop)
    }

    /// The time of the server, in µs since 1970.
    pub fn now_us(&self) -> i64 {
        let (then_us, at) = self.clock.get();
        then_us + at.elapsed().as_micros() as i64
    }

    // ---- its life ---------------------------------------------------------------------------------------------------

    pub fn refresh(&self) -> Result<Refreshed, WorkError> {
        let refresh = Statement::Text(
            "select leasing, not_adopted, has_source, coalesce(defaults, ''), now_us, leasing is null from outbox_internal.work_refresh()",
        );
        let settings = Statement::Text(
            "select name, outbox_internal.legible(setting) from pg_settings where name like 'outbox.%' and setting is not null",
        );
        // That of this role, or else that of the workers in the server, whose options this role may not read. The view
        // shows options of a mapping to its own role only, and only with USAGE on the server.
        let mappings = Statement::Text(
            "select distinct on (srvid) srvid::bigint,
                    array(select outbox_internal.legible(o) from unnest(umoptions) with ordinality u (o, i) order by i),
                    usename = current_user, case umuser when 0 then 'PUBLIC' else quote_ident(usename) end,
                    quote_ident(current_user), has_server_privilege(srvid, 'USAGE')
             from pg_user_mappings
             where usename = current_user or umuser = 0 or usename = current_setting('outbox.worker_role')
             order by srvid, usename = current_user desc, umuser = 0",
        );
        let db = self.db();
        let mappings = db.run(mappings, &[], |row| {
            let mapping = RoleMapping {
                options: split(&row.texts(1)?),
                is_own: row.boolean(2)?,
                of: row.name(3)?,
                role: row.name(4)?,
                may_read: row.boolean(5)?,
            };
            Ok((row.count(0)? as u32, mapping))
        })?;
        let mappings: HashMap<u32, RoleMapping> = mappings.into_iter().collect();
        let mapping = |kind: &Kind, server| {
            mappings
                .get(&server)
                .map_or(Mapping::Absent, |found| found.mapping(kind))
        };
        let settings = db.run(settings, &[], |row| Ok((row.name(0)?, row.name(1)?)))?;
        let mut settings: HashMap<String, String> = settings.into_iter().collect();
        let seconds = |name| settings.get(name).and_then(|value| value.parse().ok()).unwrap_or(15);
        self.lease_ttl_s.set(seconds("outbox.lease_ttl"));
        self.claim_ttl_s.set(seconds("outbox.claim_ttl"));
        let mut destinations = self.protocol.destinations(mapping)?;
        db.one(refresh, &[], |row| {
            self.clock.set((row.count(4)?, Instant::now()));
            self.db().has_source.set(row.boolean(2)?);
            Ok(Refreshed {
                leasing: (!row.boolean(5)?).then_some(row.boolean(0)?),
                not_adopted: row.text(1)?,
                session_defaults: row.name(3)?,
                destinations: std::mem::take(&mut destinations),
                settings: std::mem::take(&mut settings),
            })
        })
    }

    /// Writes the heartbeat of this worker, for as long as its leases last. Returns the names of all live workers.
    pub fn heartbeat(&self) -> Result<Vec<String>, WorkError> {
        self.protocol.heartbeat(self.pid, self.lease_ttl_s.get())
    }

    /// Renews, releases and takes leases. Returns the leases of this worker, and for how many seconds they last.
    pub fn lease(
        &self,
        renew: &[HeldLease],
        release: &[HeldLease],
        take: &[Partition],
    ) -> Result<(Vec<HeldLease>, Option<u64>), WorkError> {
        let ((renew, renew_epochs), (release, release_epochs)) = (columns(renew), columns(release));
        let args = [
            Arg::SmallInts(Some(renew)),
            Arg::BigInts(Some(renew_epochs)),
            Arg::SmallInts(Some(release)),
            Arg::BigInts(Some(release_epochs)),
            indexes(take),
        ];
        let sql = "select partition, lease_epoch, ttl_s from outbox_internal.work_lease($1, $2, $3, $4, $5)";
        let mut ttl_s = None;
        let held = self.db().run(Statement::Text(sql), &args, |row| {
            ttl_s = u64::try_from(row.count(2)?).ok();
            Ok((row.partition(0)?, row.count(1)?))
        })?;
        Ok((held, ttl_s))
    }

    /// A position of WAL that is on disk, behind the commits of all claimed messages, and the connected standbys.
    pub fn replication(&self) -> Result<Replication, WorkError> {
        let sql = "select outbox_internal.work_standbys()";
        let text = self.db().one(Statement::Text(sql), &[], |row| row.name(0))?;
        let mut lines = text.lines();
        let standby = |line: &str| {
            let (flushed, name) = line.split_once(' ')?;
            Some(Standby {
                name: name.to_owned(),
                flushed: flushed.parse().ok()?,
            })
        };
        Ok(Replication {
            // A position that cannot be read is none: nothing is sent.
            durable: lines
                .next()
                .and_then(|line| line.parse().ok())
                .unwrap_or(WalPosition::MAX),
            connected: lines.filter_map(standby).collect(),
        })
    }

    /// Releases the leases, then the registration as a worker.
    pub fn leave(&self) -> Result<(), WorkError> {
        self.protocol.leave()?;
        self.act("select outbox_internal.work_quit()", &[])
    }

    /// Waits in the server until there may be something to do, at most `limit`. `notify_others`: the other workers
    /// check the leases immediately.
    pub fn wait(
        &self,
        seen: &WaitResult,
        limit: Duration,
        in_flight: usize,
        notify_others: bool,
    ) -> Result<WaitResult, WorkError> {
        let args = [
            Arg::BigInts(Some(seen.counters.iter().copied().map(Some).collect())),
            Arg::Int(limit.as_millis() as i32),
            Arg::Int(in_flight as i32),
            Arg::Int(notify_others.into()),
        ];
        let sql = "select outbox_internal.work_wait($1, $2, $3, $4 = 1)";
        let mut counters = self.db().one(Statement::Text(sql), &args, |row| row.bigints(0))?;
        let leaves = counters.pop().unwrap_or_default();
        Ok(WaitResult {
            worker_changes: counters.get(1).copied().unwrap_or_default(),
            schedules: counters.get(2).copied().unwrap_or_default() as u32,
            counters,
            is_vacated: leaves != 0,
            must_terminate: leaves == 1,
        })
    }

    pub fn report_in_flight(&self, destination: &str, in_flight: usize) -> Result<(), WorkError> {
        let args = [Arg::Text(Some(destination)), Arg::Int(in_flight as i32)];
        self.act("select outbox_internal.work_report_in_flight($1, $2)", &args)
    }

    // ---- messages ---------------------------------------------------------------------------------------------------

    /// Takes the rewinds of partitions. Called before the claims of a pass.
    pub fn rewinds(&self, partitions: &[Partition]) -> Result<Vec<Rewound>, WorkError> {
        let sql = "select outbox_internal.work_rewinds($1)";
        let flat = (self.db()).one(Statement::Text(sql), &[indexes(partitions)], |row| row.bigints(0))?;
        rewinds(&flat)
    }

    /// Reads the open transactions and the rewinds. Called after a claim.
    pub fn shared_state(&self, partitions: &[Partition]) -> Result<SharedState, WorkError> {
        let flat = (self.db()).one(SHARED_STATE, &[indexes(partitions)], |row| row.bigints(0))?;
        shared_state(&flat)
    }

    /// Claims, and then reads shared memory. Both statements are sent together; the server runs them in this order.
    pub fn claim_and_read_shared(
        &self,
        destination: &str,
        lanes: &[Lane],
        limits: ClaimLimits,
        partitions: &[Partition],
    ) -> Result<(Batch, Result<SharedState, WorkError>), WorkError> {
        self.db().query_next(SHARED_STATE, partitions)?;
        let claimed = self.protocol.claim(destination, lanes, limits);
        let flat = self.db().take_next(|row| row.bigints(0));
        Ok((claimed?.batch, flat.and_then(|flat| shared_state(&flat))))
    }

    /// Claims with a lock timeout of 20 ms, and does not read shared memory.
    pub fn claim_impatiently(
        &self,
        destination: &str,
        lanes: &[Lane],
        limits: ClaimLimits,
    ) -> Result<Batch, WorkError> {
        self.db().batch_execute("set lock_timeout = '20ms'")?;
        let claimed = self.protocol.claim(destination, lanes, limits);
        self.db().batch_execute("set lock_timeout = '500ms'")?;
        Ok(claimed?.batch)
    }
}

const SHARED_STATE: Statement = Statement::Text("select outbox_internal.work_shared_state($1)");

/// Decodes rewinds: partition, lane and seq of each.
fn rewinds(flat: &[i64]) -> Result<Vec<Rewound>, WorkError> {
    let decode = |numbers: &[i64]| {
        let partition = Partition::new(numbers[0]).ok()?;
        let lane = RewindLane::new(partition, numbers[1])?;
        let seq = numbers[2];
        Some(Rewound { partition, lane, seq })
    };
    let (rewinds, rest) = flat.as_chunks::<3>();
    let decoded: Option<Vec<Rewound>> = rewinds.iter().map(|numbers| decode(numbers)).collect();
    decoded
        .filter(|_| rest.is_empty())
        .ok_or_else(|| unexpected("a rewind cannot be read"))
}

fn shared_state(flat: &[i64]) -> Result<SharedState, WorkError> {
    let mut numbers = flat.iter().copied();
    let mut next = || {
        numbers
            .next()
            .ok_or_else(|| unexpected("the shared state is too short"))
    };
    let mut open = Vec::new();
    for _ in 0..next()? {
        let low = next()?;
        let mut filter = Box::new([0; FILTER_WORDS]);
        for _ in 0..next()? {
            let (word, bits) = (next()?, next()? as u64);
            let word = usize::try_from(word).ok().and_then(|word| filter.get_mut(word));
            *word.ok_or_else(|| unexpected("a key filter has another size"))? = bits;
        }
        open.push(OpenTransaction { low, filter });
    }
    let rewinds = rewinds(&numbers.collect::<Vec<i64>>())?;
    Ok(SharedState { open, rewinds })
}
