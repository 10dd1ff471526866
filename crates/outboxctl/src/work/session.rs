//! The session of a worker with its database. It calls the functions that the role outbox_relay may call; each call is
//! one statement, and so one transaction. Used on the worker's thread, which waits for each result.

use crate::connect::{self, ConnectArgs};
use crate::failure::{Code, Failure};
use crate::progress::WorkerIdentity;
use outbox_core::engine::{Batch, Claimed, Held, Lane, RowId, Settlement};
use outbox_core::event::{self, COLUMNS, Event};
use outbox_core::key_order::{Found, OrderedKey};
use outbox_core::lease::Lease;
use outbox_core::message::{Outcome, Pointer};
use outbox_core::open_transactions::{FILTER_WORDS, OpenTransaction};
use outbox_core::partition::Partition;
use outbox_core::session;
use outbox_core::settle::{Blocks, Ending};
use outbox_core::standbys::{Replication, Standby, WalPosition};
use outbox_transport::target::{Kind, split};
use outbox_worker::Described;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::LazyLock;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row, Statement};

/// Settings in addition to those of a worker in the server. With tcp_user_timeout the server ends the session of a
/// worker that has not acknowledged data for that long, and so releases its locks.
const SETTINGS: &str = "
    set application_name = 'outboxctl work'; set statement_timeout = '30s'; set tcp_user_timeout = '15s'";
/// The longest wait for a result, longer than statement_timeout. After it the session counts as lost.
const ANSWER: Duration = Duration::from_secs(45);

/// Why a call failed.
#[derive(Debug)]
pub struct WorkError {
    pub kind: WorkErrorKind,
    pub failure: Failure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkErrorKind {
    /// Another session holds locks on rows.
    Locked,
    /// Not now: a statement needs the database without workers, or the server has only just started.
    NotNow,
    /// The server refused the call; the session continues.
    Failed,
    /// The session is lost.
    Lost,
}

impl From<tokio_postgres::Error> for WorkError {
    fn from(error: tokio_postgres::Error) -> Self {
        let kind = match error.code() {
            _ if error.is_closed() => WorkErrorKind::Lost,
            None => WorkErrorKind::Lost,
            Some(code) if *code == SqlState::LOCK_NOT_AVAILABLE => WorkErrorKind::Locked,
            Some(code) if *code == SqlState::OBJECT_IN_USE => WorkErrorKind::NotNow,
            Some(code) if code.code().starts_with("57P") => WorkErrorKind::Lost, // the server or this session ends
            Some(_) => WorkErrorKind::Failed,
        };
        let denied = (error.as_db_error())
            .is_some_and(|db| *db.code() == SqlState::INSUFFICIENT_PRIVILEGE && db.hint().is_none());
        let mut failure = Failure::from(error);
        if denied {
            failure.hint = Some("A worker needs the role outbox_relay: GRANT outbox_relay TO …;".to_owned());
        }
        if kind == WorkErrorKind::Lost {
            failure.code = Code::CannotConnect;
        }
        Self { kind, failure }
    }
}

/// The result of a claim, and shared memory as read right after it.
pub struct ClaimedAndSeen {
    pub claimed: Result<Batch, WorkError>,
    pub shared_state: Result<SharedState, WorkError>,
}

/// The shared memory that a worker reads after a claim.
pub struct SharedState {
    pub open: Vec<OpenTransaction>,
    pub rewinds: Vec<Rewinds>,
}

/// The seqs from which a partition must be read again; `None` = no rewind.
#[derive(Clone, Copy)]
pub struct Rewinds {
    pub partition: Partition,
    pub default: Option<i64>,
    pub others: Option<i64>,
}

/// The settings and destinations that the worker reads every second.
pub struct Refreshed {
    /// `None` while outbox_configure() changes the partitions.
    pub leasing: Option<bool>,
    pub not_adopted: Option<String>,
    pub source: Option<String>,
    pub session_defaults: String,
    pub destinations: Vec<Described>,
    /// The settings of the outbox by name, in the units of pg_settings.
    pub settings: HashMap<String, String>,
}

/// The result of a wait.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    counters: Vec<i64>,
    pub worker_changes: i64,
    pub unblocks: u32,
    pub schedules: u32,
    /// Whether a statement needs the database without workers.
    pub is_vacated: bool,
    /// Whether that statement does not wait for messages in flight.
    pub is_pressed: bool,
}

pub struct Session {
    handle: Handle,
    client: Client,
    /// The worker id.
    pub id: String,
    /// The worker id, and the server, database and role of the session.
    pub who: WorkerIdentity,
    statements: RefCell<HashMap<&'static str, Statement>>,
    /// A time of the server's clock, in µs since 1970, and when it was read.
    clock: Cell<(i64, Instant)>,
}

/// The columns of a claimed message: those of its pointer, the remark, and those of its event.
static CLAIMED: LazyLock<String> = LazyLock::new(|| {
    format!(
        "tid::text, seq, destination, partition, key, attempts, crashes, claim_token, replayed,
         (extract(epoch from enqueued_at) * 1000000)::bigint, (extract(epoch from expires_at) * 1000000)::bigint, remark,
         {}, created_at, created_at_s",
        COLUMNS.map(|column| column.name).join(", ")
    )
});
const REMARK: usize = 11;
/// The first column of the event.
const EVENT: usize = 12;

impl Session {
    /// Opens a session and registers it as a worker.
    pub fn open(handle: &Handle, connect: &ConnectArgs, label: &str) -> Result<Self, WorkError> {
        let opened = handle
            .block_on(connect::connect_session(connect))
            .map_err(|failure| WorkError {
                kind: match failure.code {
                    Code::CannotConnect => WorkErrorKind::Lost,
                    _ => WorkErrorKind::Failed,
                },
                failure,
            })?;
        let client = opened.client;
        handle.block_on(client.batch_execute(SETTINGS))?;
        handle.block_on(client.batch_execute(&session::statement()))?;
        let mut session = Self {
            handle: handle.clone(),
            client,
            id: String::new(),
            who: WorkerIdentity::default(),
            statements: RefCell::default(),
            clock: Cell::new((0, Instant::now())),
        };
        session.id = session
            .one("select outbox_internal.work_begin($1::text)", &[&label])?
            .get(0);
        let row = session.one(
            "select coalesce(host(inet_server_addr()), 'local socket') || ':' || current_setting('port'),
                    current_database()::text, current_user::text",
            &[],
        )?;
        session.who = WorkerIdentity {
            worker_id: session.id.clone(),
            server: row.get(0),
            database: row.get(1),
            user: row.get(2),
        };
        Ok(session)
    }

    /// Prepares a statement once for the session.
    fn prepared(&self, sql: &'static str) -> Result<Statement, WorkError> {
        if let Some(known) = self.statements.borrow().get(sql) {
            return Ok(known.clone());
        }
        let text = sql.replace("CLAIMED", &CLAIMED);
        let statement = self.wait_for(self.client.prepare(&text))?;
        self.statements.borrow_mut().insert(sql, statement.clone());
        Ok(statement)
    }

    fn wait_for<T>(&self, answer: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T, WorkError> {
        match self
            .handle
            .block_on(async { tokio::time::timeout(ANSWER, answer).await })
        {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(no_answer()),
        }
    }

    fn rows(&self, sql: &'static str, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, WorkError> {
        let statement = self.prepared(sql)?;
        self.wait_for(self.client.query(&statement, params))
    }

    fn one(&self, sql: &'static str, params: &[&(dyn ToSql + Sync)]) -> Result<Row, WorkError> {
        let statement = self.prepared(sql)?;
        self.wait_for(self.client.query_one(&statement, params))
    }

    /// The time of the server, in µs since 1970.
    pub fn now_us(&self) -> i64 {
        let (then_us, at) = self.clock.get();
        then_us + at.elapsed().as_micros() as i64
    }

    // ---- its life ---------------------------------------------------------------------------------------------------

    pub fn refresh(&self) -> Result<Refreshed, WorkError> {
        let row = self.one(
            "select leasing, not_adopted, source, coalesce(defaults, ''), now_us from outbox_internal.work_refresh()",
            &[],
        )?;
        self.clock.set((row.get(4), Instant::now()));
        let settings = self.rows(
            "select name, outbox_internal.legible(setting) from pg_settings where name like 'outbox.%' and setting is not null",
            &[],
        )?;
        Ok(Refreshed {
            leasing: row.get(0),
            not_adopted: row.get(1),
            source: row.get(2),
            session_defaults: row.get(3),
            destinations: self.destinations()?,
            settings: settings.iter().map(|row| (row.get(0), row.get(1))).collect(),
        })
    }

    fn destinations(&self) -> Result<Vec<Described>, WorkError> {
        // The view shows options of a mapping to its own role only, and only with USAGE on the server.
        let rows = self.rows(
            "select d.destination, d.wrapper, coalesce(d.options, '{}'), d.paused,
                    array(select outbox_internal.legible(o) from unnest(m.umoptions) with ordinality u (o, i) order by i)
             from outbox_internal.work_destinations() d
             left join pg_user_mappings m on m.srvid = d.server and m.usename = current_user order by 1",
            &[],
        )?;
        let described = rows.iter().map(|row| Described {
            name: row.get(0),
            kind: row
                .get::<_, Option<&str>>(1)
                .and_then(Kind::of_wrapper)
                .unwrap_or(Kind::Amqp),
            options: split(&row.get::<_, Vec<String>>(2)),
            mapping: split(&row.get::<_, Vec<String>>(4)),
            paused: row.get(3),
        });
        Ok(described.collect())
    }

    /// Writes the heartbeat of this worker. Returns the names of all live workers.
    pub fn heartbeat(&self) -> Result<Vec<String>, WorkError> {
        let rows = self.rows("select * from outbox_internal.work_heartbeat()", &[])?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    pub fn leases(&self) -> Result<Vec<Lease>, WorkError> {
        let rows = self.rows(
            "select partition, lease_owner, live, lease_epoch from outbox_internal.work_leases()",
            &[],
        )?;
        rows.iter()
            .map(|row| {
                Ok(Lease {
                    partition: partition(row.get(0))?,
                    owner: row.get(1),
                    live: row.get(2),
                    epoch: row.get(3),
                })
            })
            .collect()
    }

    /// Renews, releases and takes leases. Returns the leases of this worker, and for how many seconds they last.
    pub fn lease(
        &self,
        renew: &[Held],
        release: &[Held],
        take: &[Partition],
    ) -> Result<(Vec<Held>, Option<u64>), WorkError> {
        let ((renew, renew_epochs), (release, release_epochs)) = (columns(renew), columns(release));
        let rows = self.rows(
            "select partition, lease_epoch, ttl_s from outbox_internal.work_lease($1::smallint[], $2::bigint[], $3::smallint[], $4::bigint[], $5::smallint[])",
            &[&renew, &renew_epochs, &release, &release_epochs, &indexes(take)],
        )?;
        let held: Result<Vec<Held>, WorkError> = rows
            .iter()
            .map(|row| Ok((partition(row.get(0))?, row.get(1))))
            .collect();
        let ttl_s = rows.first().map(|row| row.get::<_, i32>(2) as u64);
        Ok((held?, ttl_s))
    }

    /// A position of WAL that is on disk, behind the commits of all claimed messages, and the connected standbys.
    pub fn replication(&self) -> Result<Replication, WorkError> {
        let row = self.one("select outbox_internal.work_standbys()", &[])?;
        let mut lines = row.get::<_, &str>(0).lines();
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

    pub fn purge(&self) -> Result<i64, WorkError> {
        let row = self.one("select coalesce(outbox_internal.work_purge(), 0)", &[])?;
        Ok(row.get(0))
    }

    pub fn report(
        &self,
        destination: &str,
        state: Option<&str>,
        reason: Option<&str>,
        detail: Option<&str>,
    ) -> Result<(), WorkError> {
        // Sent as bytes: a broker's text may have a character that the encoding of the database lacks. As text the
        // statement would fail.
        let (reason, detail) = (reason.map(str::as_bytes), detail.map(str::as_bytes));
        let params: [&(dyn ToSql + Sync); 4] = [&destination, &state, &reason, &detail];
        self.rows(
            "select outbox_internal.work_report($1::text, $2::text, outbox_internal.of_utf8($3::bytea), outbox_internal.of_utf8($4::bytea))",
            &params,
        )
        .map(drop)
    }

    /// Releases the leases, then the registration as a worker.
    pub fn leave(&self) -> Result<(), WorkError> {
        self.rows("select outbox_internal.work_leave()", &[])?;
        self.rows("select outbox_internal.work_quit()", &[]).map(drop)
    }

    /// Waits in the server until there may be something to do, at most `limit`. `notify_others`: the other workers
    /// check the leases at once.
    pub fn wait(&self, seen: &Seen, limit: Duration, in_flight: usize, notify_others: bool) -> Result<Seen, WorkError> {
        let (limit_ms, in_flight) = (limit.as_millis() as i32, in_flight as i32);
        let row = self.one(
            "select outbox_internal.work_wait($1::bigint[], $2::integer, $3::integer, $4::boolean)",
            &[&seen.counters, &limit_ms, &in_flight, &notify_others],
        )?;
        let mut counters: Vec<i64> = row.get(0);
        let leaves = counters.pop().unwrap_or_default();
        Ok(Seen {
            worker_changes: counters.get(1).copied().unwrap_or_default(),
            unblocks: counters.get(2).copied().unwrap_or_default() as u32,
            schedules: counters.get(3).copied().unwrap_or_default() as u32,
            counters,
            is_vacated: leaves != 0,
            is_pressed: leaves == 1,
        })
    }

    pub fn report_in_flight(&self, destination: &str, in_flight: usize) -> Result<(), WorkError> {
        let in_flight = in_flight as i32;
        self.rows(
            "select outbox_internal.work_report_in_flight($1::text, $2::integer)",
            &[&destination, &in_flight],
        )
        .map(drop)
    }

    // ---- messages ---------------------------------------------------------------------------------------------------

    /// Takes the rewinds of partitions. Called before a claim.
    pub fn rewinds(&self, partitions: &[Partition]) -> Result<Vec<Rewinds>, WorkError> {
        let row = self.one(
            "select outbox_internal.work_rewinds($1::smallint[])",
            &[&indexes(partitions)],
        )?;
        Ok(rewinds(partitions, row.get(0)))
    }

    /// Reads the open transactions and the rewinds. Called after a claim.
    pub fn shared_state(&self, partitions: &[Partition]) -> Result<SharedState, WorkError> {
        let row = self.one(SHARED_STATE, &[&indexes(partitions)])?;
        shared_state(partitions, row.get(0))
    }

    /// Claims, and then reads shared memory. Both statements are sent at once; the server runs them in this order.
    pub fn claim_and_read_shared(
        &self,
        destination: &str,
        lanes: &[Lane],
        partitions: &[Partition],
    ) -> Result<ClaimedAndSeen, WorkError> {
        let lanes = Lanes::of(lanes);
        let params = lanes.params(&destination);
        let (claim, read_shared) = (self.prepared(CLAIM)?, self.prepared(SHARED_STATE)?);
        let indexes = indexes(partitions);
        let seen: [&(dyn ToSql + Sync); 1] = [&indexes];
        let both = async {
            // The query that is polled first is sent first.
            let mut first = pin!(self.client.query(&claim, &params));
            let mut second = pin!(self.client.query_one(&read_shared, &seen));
            let (mut claimed, mut shared_state) = (None, None);
            poll_fn(|context| {
                if claimed.is_none()
                    && let Poll::Ready(answer) = first.as_mut().poll(context)
                {
                    claimed = Some(answer);
                }
                if shared_state.is_none()
                    && let Poll::Ready(answer) = second.as_mut().poll(context)
                {
                    shared_state = Some(answer);
                }
                match (claimed.is_some(), shared_state.is_some()) {
                    (true, true) => Poll::Ready(()),
                    _ => Poll::Pending,
                }
            })
            .await;
            Ok((claimed, shared_state))
        };
        let (claimed, seen) = self.wait_for(both)?;
        Ok(ClaimedAndSeen {
            claimed: claimed
                .ok_or_else(no_answer)?
                .map_err(WorkError::from)
                .and_then(|rows| batch(&rows)),
            shared_state: (seen.ok_or_else(no_answer)?)
                .map_err(WorkError::from)
                .and_then(|row| shared_state(partitions, row.get(0))),
        })
    }

    /// Claims with a lock timeout of 20 ms, and does not read shared memory.
    pub fn claim_impatiently(&self, destination: &str, lanes: &[Lane]) -> Result<Batch, WorkError> {
        self.wait_for(self.client.batch_execute("set lock_timeout = '20ms'"))?;
        let lanes = Lanes::of(lanes);
        let claimed = self
            .rows(CLAIM, &lanes.params(&destination))
            .and_then(|rows| batch(&rows));
        self.wait_for(self.client.batch_execute("set lock_timeout = '500ms'"))?;
        claimed
    }

    pub fn claim_unleased(&self, destination: &str, limit: u32) -> Result<Batch, WorkError> {
        let limit = limit as i32;
        batch(&self.rows(
            "select CLAIMED from outbox_internal.work_claim_unleased($1::text, $2::integer)",
            &[&destination, &limit],
        )?)
    }

    /// Claims messages of a key from outbox_waiting. The flag is true if more of them wait.
    pub fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch, bool), WorkError> {
        let (index, limit) = (key.partition.as_i16(), limit as i32);
        let rows = self.rows(
            "select CLAIMED from outbox_internal.work_claim_waiting($1::text, $2::smallint, $3::text, $4::bigint, $5::bigint, $6::integer)",
            &[&key.destination, &index, &key.key, &epoch, &read_limit, &limit],
        )?;
        let more = rows.iter().any(|row| remark(row) == Some("more"));
        Ok((batch(&rows)?, more))
    }

    /// Moves the messages that are due to outbox. Returns their destinations, partitions and seqs.
    pub fn bring_due(&self, leases: Option<&[Held]>) -> Result<Vec<(String, Partition, i64)>, WorkError> {
        let (partitions, epochs) = leases.map(columns).unzip();
        let rows = self.rows(
            "select destination, partition, seq from outbox_internal.work_due($1::smallint[], $2::bigint[])",
            &[&partitions, &epochs],
        )?;
        rows.iter()
            .map(|row| Ok((row.get(0), partition(row.get(1))?, row.get(2))))
            .collect()
    }

    pub fn next_due_ms(&self) -> Result<Option<u64>, WorkError> {
        let row = self.one("select outbox_internal.work_next_due_ms()", &[])?;
        Ok(row.get::<_, Option<i64>>(0).and_then(|ms| u64::try_from(ms).ok()))
    }

    pub fn blocked_keys(&self, partitions: &[Partition]) -> Result<Vec<Found>, WorkError> {
        let rows = self.rows(
            "select destination, partition, key, blocker, followers from outbox_internal.work_blocked_keys($1::smallint[])",
            &[&indexes(partitions)],
        )?;
        rows.iter()
            .map(|row| {
                Ok(Found {
                    key: OrderedKey {
                        partition: partition(row.get(1))?,
                        destination: row.get(0),
                        key: row.get(2),
                    },
                    blocker: row.get(3),
                    followers: row.get(4),
                })
            })
            .collect()
    }

    /// Settles messages of one destination. Returns how many rows it changed.
    pub fn settle(
        &self,
        destination: &str,
        batch: &[Settlement],
        dead_blocks: Blocks,
        took_us: &[i64],
    ) -> Result<usize, WorkError> {
        let rows = Settled::of(batch, dead_blocks);
        let row = self.one(
            "select outbox_internal.work_settle($1::text, $2::text[], $3::bigint[], $4::smallint[], $5::bigint[], $6::text[], $7::bigint[],
               array(select outbox_internal.of_utf8(r) from unnest($8::bytea[]) with ordinality u (r, i) order by i), $9::bigint[])",
            &[
                &destination,
                &rows.tids,
                &rows.seqs,
                &rows.partitions,
                &rows.tokens,
                &rows.actions,
                &rows.delays_ms,
                &rows.reasons,
                &took_us,
            ],
        )?;
        Ok(row.get::<_, i32>(0) as usize)
    }
}

const CLAIM: &str = "select CLAIMED from outbox_internal.work_claim($1::text, $2::smallint[], $3::bigint[], $4::integer[], $5::bigint[], $6::bigint)";
const SHARED_STATE: &str = "select outbox_internal.work_shared_state($1::smallint[])";

// ---- rows -----------------------------------------------------------------------------------------------------------

/// Lanes, one array for each parameter of the claim.
struct Lanes {
    partitions: Vec<i16>,
    epochs: Vec<i64>,
    limits: Vec<i32>,
    cursors: Vec<i64>,
    read_limit: Option<i64>,
}

impl Lanes {
    fn of(lanes: &[Lane]) -> Self {
        Self {
            partitions: lanes.iter().map(|lane| lane.partition.as_i16()).collect(),
            epochs: lanes.iter().map(|lane| lane.epoch).collect(),
            limits: lanes.iter().map(|lane| lane.limit as i32).collect(),
            cursors: lanes.iter().map(|lane| lane.cursor).collect(),
            read_limit: lanes.iter().map(|lane| lane.read_limit).max(),
        }
    }

    fn params<'a>(&'a self, destination: &'a &str) -> [&'a (dyn ToSql + Sync); 6] {
        [
            destination,
            &self.partitions,
            &self.epochs,
            &self.limits,
            &self.cursors,
            &self.read_limit,
        ]
    }
}

/// Messages to settle, one array for each parameter of the settle.
#[derive(Default)]
struct Settled<'a> {
    tids: Vec<String>,
    seqs: Vec<i64>,
    partitions: Vec<i16>,
    tokens: Vec<i64>,
    actions: Vec<&'static str>,
    delays_ms: Vec<Option<i64>>,
    /// UTF-8 as bytes, because the encoding of the database may lack a character.
    reasons: Vec<Option<&'a [u8]>>,
}

impl<'a> Settled<'a> {
    fn of(batch: &'a [Settlement], dead_blocks: Blocks) -> Self {
        let mut rows = Self::default();
        for settlement in batch {
            let ending = Ending::of(&settlement.disposition, dead_blocks);
            rows.tids.push(settlement.row_id.to_string());
            rows.seqs.push(settlement.pointer.seq);
            rows.partitions.push(settlement.pointer.partition.as_i16());
            rows.tokens.push(settlement.pointer.lease_epoch);
            rows.actions.push(ending.action.letter());
            rows.delays_ms.push(ending.delay_ms);
            rows.reasons.push(ending.reason.map(str::as_bytes));
        }
        rows
    }
}

fn no_answer() -> WorkError {
    WorkError {
        kind: WorkErrorKind::Lost,
        failure: Failure::new(Code::CannotConnect, "the server does not answer"),
    }
}

fn unexpected(what: &str) -> WorkError {
    WorkError {
        kind: WorkErrorKind::Failed,
        failure: Failure::new(Code::Incompatible, format!("unexpected result from the server: {what}"))
            .hint("This program and the extension may have different versions. Compare them with outboxctl version."),
    }
}

fn partition(index: i16) -> Result<Partition, WorkError> {
    Partition::new(i64::from(index)).map_err(|error| unexpected(&error.to_string()))
}

/// Reads `(block,line)`.
fn row_id(tid: &str) -> Result<RowId, WorkError> {
    let inside = tid.strip_prefix('(').and_then(|tid| tid.strip_suffix(')'));
    let numbers = inside.and_then(|inside| inside.split_once(','));
    let row_id = numbers.and_then(|(block, line)| {
        Some(RowId {
            block: block.parse().ok()?,
            line: line.parse().ok()?,
        })
    });
    row_id.ok_or_else(|| unexpected(&format!("the ctid {tid}")))
}

fn indexes(partitions: &[Partition]) -> Vec<i16> {
    partitions.iter().map(|partition| partition.as_i16()).collect()
}

fn columns(leases: &[Held]) -> (Vec<i16>, Vec<i64>) {
    (leases.iter())
        .map(|(partition, epoch)| (partition.as_i16(), *epoch))
        .unzip()
}

/// Decodes rewinds: two numbers for each partition, in the order of the partitions; negative = no rewind.
fn rewinds(partitions: &[Partition], lows: Vec<i64>) -> Vec<Rewinds> {
    let seq = |low: i64| (low >= 0).then_some(low);
    (partitions.iter().zip(lows.chunks_exact(2)))
        .map(|(partition, lows)| Rewinds {
            partition: *partition,
            default: seq(lows[0]),
            others: seq(lows[1]),
        })
        .collect()
}

fn shared_state(partitions: &[Partition], flat: Vec<i64>) -> Result<SharedState, WorkError> {
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
    let lows: Vec<i64> = numbers.collect();
    if lows.len() != 2 * partitions.len() {
        return Err(unexpected("the shared state has another number of partitions"));
    }
    Ok(SharedState {
        open,
        rewinds: rewinds(partitions, lows),
    })
}

fn remark(row: &Row) -> Option<&str> {
    row.get(REMARK)
}

fn batch(rows: &[Row]) -> Result<Batch, WorkError> {
    let mut batch = Batch::default();
    for row in rows {
        match (row.get::<_, Option<i64>>(1), remark(row)) {
            (Some(seq), _) => batch.rows.push(claimed(row, seq)?),
            (None, Some("cut")) => batch.cut = true,
            (None, Some("missed")) => batch.missed = true,
            (None, Some("paused")) => batch.is_paused = true,
            (None, _) => {}
        }
    }
    Ok(batch)
}

/// Decodes a claimed message. If its event cannot be read, only this message becomes a dead letter, and the others of
/// its claim are delivered.
fn claimed(row: &Row, seq: i64) -> Result<Claimed, WorkError> {
    let pointer = Pointer {
        seq,
        destination: row.get(2),
        partition: partition(row.get(3))?,
        key: row.get(4),
        attempts: row.get(5),
        crashes: row.get(6),
        lease_epoch: row.get(7),
        replayed: row.get(8),
        enqueued_at_us: row.get(9),
        expires_at_us: row.get(10),
    };
    let event = match (remark(row), event(row, seq)?) {
        (Some(why), _) => Err(why.to_owned()),
        (None, event) if event.id.is_empty() => Err(format!("the event store has no event with seq {seq}")),
        (None, event) => Ok(event),
    };
    Ok(Claimed {
        row_id: row_id(row.get(0))?,
        pointer,
        event: event.map_err(|reason| Outcome::Unsendable { reason }),
    })
}

fn event(row: &Row, seq: i64) -> Result<Event, WorkError> {
    Ok(Event::read(seq, &mut Columns { row, next: EVENT })?)
}

struct Columns<'a> {
    row: &'a Row,
    next: usize,
}

impl event::Row for Columns<'_> {
    type Error = tokio_postgres::Error;

    fn text(&mut self) -> Result<Option<String>, tokio_postgres::Error> {
        self.next += 1;
        self.row.try_get(self.next - 1)
    }

    fn number(&mut self) -> Result<Option<i64>, tokio_postgres::Error> {
        self.next += 1;
        self.row.try_get(self.next - 1)
    }
}
