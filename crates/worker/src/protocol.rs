//! The client of the worker protocol: it calls the functions of sql/src/30_worker.sql and decodes their rows. A worker
//! in the server calls them through SPI; one outside calls them through its session, some of them by way of
//! sql/src/56_work.sql. Each is a [`Db`].

use crate::settings::{Described, Mapping};
use crate::status::ConnectionStatus;
use outbox_core::engine::{Batch, ClaimLimits, Claimed, DueMessages, Events, HeldLease, Lane, RowId, Settlement};
use outbox_core::event::{self, Event, sendable};
use outbox_core::key_order::{BlockedKey, OrderedKey};
use outbox_core::lease::Lease;
use outbox_core::message::{Outcome, Pointer};
use outbox_core::partition::Partition;
use outbox_core::settle::{Blocks, Disposition, Ending};
use outbox_core::words::Word;
use outbox_transport::kind::Kind;
use outbox_transport::options::split;
use std::sync::Arc;

/// The most due messages that one transaction brings back.
const DUE_ROWS: i32 = 1000;

/// Runs the statements of the protocol.
pub trait Db {
    type Error;
    type ResultRow<'a>: ResultRow<Error = Self::Error>;

    /// The function that claims with leasing off.
    const CLAIM_UNLEASED: &'static str;
    /// Settles messages in any way. $1 is the worker; then arrays of tids, seqs, destinations, partitions, tokens,
    /// actions, delays and reasons; and, if the caller gives them, delivery times.
    const SETTLE: &'static str;
    /// Whether each statement is a transaction. Else an error undoes what others did before.
    const COMMITS_EACH: bool;

    /// Runs a statement, and decodes each row of its result with `read`.
    fn run<T>(
        &self,
        statement: Statement,
        args: &[Arg],
        read: impl FnMut(&Self::ResultRow<'_>) -> Result<T, Self::Error>,
    ) -> Result<Vec<T>, Self::Error>;

    /// Settles messages as [`SETTLE`](Self::SETTLE) does, if this is possible without it. Returns the number of rows
    /// that changed; None: nothing was done.
    fn settle_published(&self, _worker: &str, _batch: &[Settlement]) -> Result<Option<usize>, Self::Error> {
        Ok(None)
    }

    /// Claims messages as [`WorkerProtocol::claim`] does, if their rows can be chosen without a statement. None:
    /// nothing was done.
    fn claim(
        &self,
        _worker: &str,
        _destination: &str,
        _lanes: &[Lane],
        _limits: ClaimLimits,
    ) -> Result<Option<ClaimedBatch>, Self::Error> {
        Ok(None)
    }

    /// Fails while no event of the source can be read, if one is set. Otherwise each claim would be made and undone.
    fn check_source(&self, _worker: &str) -> Result<(), Self::Error> {
        Ok(())
    }

    /// The events of claimed messages from the source; those for which the time or the bytes do not suffice are missing.
    /// None: no source is set, and the claim had the events.
    fn source_events(&self, _worker: &str, _claimed: &[Claimed], _bytes: usize) -> Result<Option<Events>, Self::Error> {
        Ok(None)
    }

    /// Runs a statement that returns one row.
    fn one<T>(
        &self,
        statement: Statement,
        args: &[Arg],
        read: impl FnMut(&Self::ResultRow<'_>) -> Result<T, Self::Error>,
    ) -> Result<T, Self::Error> {
        let row = self.run(statement, args, read)?.into_iter().next();
        row.ok_or_else(|| Self::ResultRow::unexpected("no row"))
    }
}

#[derive(Clone, Copy)]
pub enum Statement {
    Text(&'static str),
    /// A function of the protocol. It returns the columns of outbox_internal.claimed.
    Claim(&'static str),
}

pub enum Arg<'a> {
    Text(Option<&'a str>),
    Bytes(Option<&'a [u8]>),
    SmallInt(i16),
    Int(i32),
    BigInt(Option<i64>),
    Texts(Vec<Option<&'a str>>),
    /// Texts that may have characters that the encoding of the database lacks.
    Reasons(Vec<Option<&'a str>>),
    SmallInts(Option<Vec<i16>>),
    Ints(Vec<i32>),
    BigInts(Option<Vec<Option<i64>>>),
    /// An array of tid.
    RowIds(Vec<RowId>),
}

/// A row of a result. Columns are counted from zero.
pub trait ResultRow {
    type Error;

    fn text(&self, column: usize) -> Result<Option<String>, Self::Error>;
    fn texts(&self, column: usize) -> Result<Vec<String>, Self::Error>;
    /// False if it is NULL.
    fn boolean(&self, column: usize) -> Result<bool, Self::Error>;
    /// A smallint, an integer, or a bigint.
    fn number(&self, column: usize) -> Result<Option<i64>, Self::Error>;
    /// A time, in µs since 1970.
    fn time_us(&self, column: usize) -> Result<Option<i64>, Self::Error>;
    fn row_id(&self, column: usize) -> Result<RowId, Self::Error>;
    /// Why a text cannot be read. Err: this is another error.
    fn unreadable(error: Self::Error) -> Result<String, Self::Error>;
    /// The error for a value that the protocol does not have.
    fn unexpected(what: &str) -> Self::Error;

    fn name(&self, column: usize) -> Result<String, Self::Error> {
        Ok(self.text(column)?.unwrap_or_default())
    }

    fn count(&self, column: usize) -> Result<i64, Self::Error> {
        Ok(self.number(column)?.unwrap_or_default())
    }

    fn partition(&self, column: usize) -> Result<Partition, Self::Error> {
        Partition::new(self.count(column)?).map_err(|error| Self::unexpected(&error.to_string()))
    }
}

/// The result of a claim, and the position up to which WAL must be on disk before any of it is sent.
#[derive(Default)]
pub struct ClaimedBatch {
    pub batch: Batch,
    pub wal_position: u64,
}

/// A worker at a database.
pub struct WorkerProtocol<D> {
    pub db: D,
    /// The id of the worker.
    pub worker: String,
}

impl<D: Db> WorkerProtocol<D> {
    fn worker(&self) -> Arg<'_> {
        Arg::Text(Some(&self.worker))
    }

    /// Records that this worker is alive, for `ttl_s` seconds. Returns the ids of all workers that are.
    pub fn heartbeat(&self, pid: i32, ttl_s: i32) -> Result<Vec<String>, D::Error> {
        let sql = "select outbox_internal.legible(h) from outbox_internal.heartbeat($1, $2, $3) h";
        let args = [self.worker(), Arg::Int(pid), Arg::Int(ttl_s)];
        self.db.run(Statement::Text(sql), &args, |row| row.name(0))
    }

    /// Reports the status of a destination as this worker sees it; without one, the worker no longer serves the
    /// destination. `rechecked_at_us`: when a session had requested the recheck, in µs since 1970.
    pub fn report(
        &self,
        destination: &str,
        status: Option<&ConnectionStatus>,
        rechecked_at_us: Option<i64>,
    ) -> Result<(), D::Error> {
        let stored = status.map(ConnectionStatus::stored);
        let stored = stored.as_ref();
        let sql = "select outbox_internal.report($1, $2, $3, $4, outbox_internal.of_utf8($5),
                          to_timestamp(0) + $6 * interval '1 microsecond', $7, outbox_internal.of_utf8($8)::jsonb)";
        let args = [
            self.worker(),
            Arg::Text(Some(destination)),
            Arg::Text(stored.map(|stored| stored.state)),
            Arg::Text(stored.and_then(|stored| stored.reason)),
            // Texts of a peer are sent as bytes: the encoding of the database may lack one of their characters.
            Arg::Bytes(stored.and_then(|stored| Some(stored.detail.as_deref()?.as_bytes()))),
            Arg::BigInt(rechecked_at_us),
            Arg::Text(stored.and_then(|stored| stored.code)),
            Arg::Bytes(stored.map(|stored| stored.args.as_bytes())),
        ];
        self.db.run(Statement::Text(sql), &args, |_| Ok(())).map(drop)
    }

    /// The destinations of this database. `mapping` returns the user mapping of a foreign server for this worker's
    /// role.
    pub fn destinations(&self, mapping: impl Fn(&Kind, u32) -> Mapping) -> Result<Vec<Described>, D::Error> {
        let sql = "select outbox_internal.legible(d.destination), d.wrapper, d.server::bigint, d.paused,
                          array(select outbox_internal.legible(o) from unnest(d.options) with ordinality u (o, i) order by i),
                          outbox_internal.legible(d.not_adopted)
                   from outbox_internal.destinations() d";
        self.db.run(Statement::Text(sql), &[], |row| {
            let kind = match row.text(1)? {
                None => Some(Kind::of_settings()),
                Some(wrapper) => Kind::of_wrapper(&wrapper),
            };
            let server = kind.zip(row.number(2)?);
            Ok(Described {
                name: row.name(0)?,
                kind,
                options: split(&row.texts(4)?),
                mapping: server.map_or(Mapping::Absent, |(kind, oid)| mapping(kind, oid as u32)),
                paused: row.boolean(3)?,
                not_adopted: row.text(5)?,
            })
        })
    }

    pub fn leases(&self) -> Result<Vec<Lease>, D::Error> {
        let sql =
            "select partition, outbox_internal.legible(lease_owner), live, lease_epoch from outbox_internal.leases()";
        self.db.run(Statement::Text(sql), &[], |row| {
            Ok(Lease {
                partition: row.partition(0)?,
                owner: row.text(1)?,
                live: row.boolean(2)?,
                epoch: row.count(3)?,
            })
        })
    }

    /// Releases all leases of this worker, and ends its heartbeat.
    pub fn leave(&self) -> Result<(), D::Error> {
        let sql = "select outbox_internal.leave($1)";
        self.db
            .run(Statement::Text(sql), &[self.worker()], |_| Ok(()))
            .map(drop)
    }

    /// Removes workers that have ended. Returns their number.
    pub fn purge_workers(&self) -> Result<i64, D::Error> {
        let sql = "select outbox_internal.purge_workers()";
        self.db.one(Statement::Text(sql), &[], |row| row.count(0))
    }

    /// Claims messages of leased lanes, all of them with the same read limit.
    pub fn claim(&self, destination: &str, lanes: &[Lane], limits: ClaimLimits) -> Result<ClaimedBatch, D::Error> {
        self.db.check_source(&self.worker)?;
        if let Some(claimed) = self.db.claim(&self.worker, destination, lanes, limits)? {
            return self.with_events(claimed, limits, &release());
        }
        let args = [
            self.worker(),
            Arg::Text(Some(destination)),
            Arg::SmallInts(Some(lanes.iter().map(|lane| lane.partition.as_i16()).collect())),
            bigints(epochs(lanes.iter().map(|lane| (lane.partition, lane.epoch))).into_iter()),
            Arg::Ints(lanes.iter().map(|lane| lane.limit as i32).collect()),
            Arg::BigInts(Some(lanes.iter().map(|lane| Some(lane.cursor)).collect())),
            Arg::BigInt(Some(limits.bytes as i64)),
            Arg::BigInt(lanes.iter().map(|lane| lane.read_limit).max()),
            Arg::Int(limits.rows as i32),
        ];
        self.with_events(self.claimed("claim", destination, &args)?, limits, &release())
    }

    /// Claims messages of any partition for `ttl_s` seconds, with leasing off.
    pub fn claim_unleased(
        &self,
        destination: &str,
        token: i64,
        ttl_s: i32,
        limits: ClaimLimits,
    ) -> Result<ClaimedBatch, D::Error> {
        self.db.check_source(&self.worker)?;
        let args = [
            Arg::Text(Some(destination)),
            Arg::BigInt(Some(token)),
            Arg::Int(ttl_s),
            Arg::Int(limits.rows as i32),
            Arg::BigInt(Some(limits.bytes as i64)),
        ];
        self.with_events(self.claimed(D::CLAIM_UNLEASED, destination, &args)?, limits, &release())
    }

    /// Claims the first messages of a key that wait behind another message. The flag says whether more of them wait.
    pub fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limits: ClaimLimits,
    ) -> Result<(ClaimedBatch, bool), D::Error> {
        self.db.check_source(&self.worker)?;
        let its_key = || {
            let (destination, partition) = (Arg::Text(Some(&key.destination)), key.partition.as_i16());
            [destination, Arg::SmallInt(partition), Arg::Text(key.key.as_deref())]
        };
        let which = [
            bigints(epochs([(key.partition, epoch)]).into_iter()),
            Arg::BigInt(Some(read_limit)),
            Arg::Int(limits.rows as i32),
            Arg::BigInt(Some(limits.bytes as i64)),
        ];
        let args: Vec<Arg> = [self.worker()].into_iter().chain(its_key()).chain(which).collect();
        let claimed = self.claimed("claim_waiting", &key.destination, &args)?;
        let claimed = self.with_events(claimed, limits, &Disposition::Wait)?;
        let sql = "select outbox_internal.waits($1, $2, $3)";
        Ok((
            claimed,
            self.db.one(Statement::Text(sql), &its_key(), |row| row.boolean(0))?,
        ))
    }

    /// Replaces the events of a claim by those of the source, if one is set. Messages that cannot be read now are
    /// unclaimed. Events of outbox_events that the claim found under the same seqs are others. (So each claim searches
    /// an index that is usually empty. Without that, the functions of a claim would exist twice.)
    fn with_events(
        &self,
        mut claimed: ClaimedBatch,
        limits: ClaimLimits,
        unclaim: &Disposition,
    ) -> Result<ClaimedBatch, D::Error> {
        let batch = &mut claimed.batch;
        if batch.rows.is_empty() {
            return Ok(claimed);
        }
        let mut events = match self.db.source_events(&self.worker, &batch.rows, limits.bytes) {
            Ok(None) => return Ok(claimed),
            Ok(Some(events)) => events,
            Err(error) => {
                if D::COMMITS_EACH {
                    self.unclaim(std::mem::take(&mut batch.rows), unclaim)?;
                }
                return Err(error);
            }
        };
        let mut unread = Vec::new();
        for mut row in std::mem::take(&mut batch.rows) {
            match events.remove(&row.pointer.seq) {
                Some(event) => {
                    row.event = event;
                    batch.rows.push(row);
                }
                None => unread.push(row),
            }
        }
        if !unread.is_empty() {
            batch.cut = true;
            self.unclaim(unread, unclaim)?;
        }
        Ok(claimed)
    }

    fn unclaim(&self, rows: Vec<Claimed>, unclaim: &Disposition) -> Result<(), D::Error> {
        let settlement = |row: Claimed| Settlement {
            row_id: row.row_id,
            pointer: row.pointer,
            disposition: unclaim.clone(),
        };
        let batch: Vec<Settlement> = rows.into_iter().map(settlement).collect();
        let delivery_us = D::COMMITS_EACH.then_some(&[][..]);
        self.settle(&batch, Blocks::Nothing, delivery_us).map(drop)
    }

    fn claimed(&self, function: &'static str, destination: &str, args: &[Arg]) -> Result<ClaimedBatch, D::Error> {
        let (mut batch, mut wal_position) = (Batch::default(), 0);
        let destination = destination.into();
        self.db.run(Statement::Claim(function), args, |row| {
            match (row.number(column::SEQ)?, row.text(column::REMARK)?) {
                (Some(_), remark) => {
                    wal_position = wal_position.max(row.count(column::WAL_POSITION)? as u64);
                    batch.rows.push(claimed(row, &destination, remark)?);
                }
                (None, Some(remark)) if remark == "cut" => batch.cut = true,
                (None, Some(remark)) if remark == "missed" => batch.missed = true,
                (None, Some(remark)) if remark == "paused" => batch.is_paused = true,
                (None, _) => {}
            }
            Ok(())
        })?;
        Ok(ClaimedBatch { batch, wal_position })
    }

    /// Brings back messages that are due, of these leases or (None) of all partitions.
    pub fn bring_due(&self, leases: Option<&[HeldLease]>) -> Result<DueMessages, D::Error> {
        let next_due_ms = || {
            let next = Statement::Text("select outbox_internal.next_due_ms()");
            let ms = self.db.one(next, &[], |row| row.number(0))?;
            Ok(ms.and_then(|ms| u64::try_from(ms).ok()))
        };
        let next_ms = next_due_ms()?;
        if next_ms != Some(0) {
            let moved = Vec::new();
            return Ok(DueMessages { moved, next_ms });
        }
        let sql = "select outbox_internal.legible(destination), partition, seq
                   from outbox_internal.due($1, $2, $3, $4, null::text)";
        let (partitions, epochs) = leases.map(columns).unzip();
        let args = [
            self.worker(),
            Arg::SmallInts(partitions),
            Arg::BigInts(epochs),
            Arg::Int(DUE_ROWS),
        ];
        let moved = (self.db).run(Statement::Text(sql), &args, |row| {
            Ok((row.name(0)?, row.partition(1)?, row.count(2)?))
        })?;
        Ok(DueMessages {
            moved,
            next_ms: next_due_ms()?,
        })
    }

    /// The keys of a destination that are blocked, or have messages that wait behind another.
    pub fn blocked_keys(&self, destination: &str, partitions: &[Partition]) -> Result<Vec<BlockedKey>, D::Error> {
        let sql = "select partition, outbox_internal.legible(key), blocker, followers
                   from outbox_internal.blocked_keys($1, $2)";
        let args = [Arg::Text(Some(destination)), indexes(partitions)];
        let destination = destination.into();
        self.db.run(Statement::Text(sql), &args, |row| {
            Ok(BlockedKey {
                key: OrderedKey {
                    partition: row.partition(0)?,
                    destination: Arc::clone(&destination),
                    key: row.text(1)?,
                },
                blocker: row.number(2)?,
                followers: row.boolean(3)?,
            })
        })
    }

    /// The destinations that have any message but scheduled ones and dead letters that block nothing.
    pub fn destinations_with_messages(&self) -> Result<Vec<String>, D::Error> {
        let sql = "select outbox_internal.legible(d) from outbox_internal.destinations_with_messages() d";
        self.db.run(Statement::Text(sql), &[], |row| row.name(0))
    }

    /// Of these lanes, the indexes of those that have messages in `outbox` from their seq on.
    pub fn lanes_with_messages(&self, lanes: &[(&str, Partition, i64)]) -> Result<Vec<usize>, D::Error> {
        let sql = "select l from outbox_internal.lanes_with_messages($1, $2, $3) l";
        let args = [
            Arg::Texts(lanes.iter().map(|(destination, ..)| Some(*destination)).collect()),
            Arg::SmallInts(Some(lanes.iter().map(|(_, partition, _)| partition.as_i16()).collect())),
            bigints(lanes.iter().map(|(.., seq)| *seq)),
        ];
        (self.db).run(Statement::Text(sql), &args, |row| Ok(row.count(0)? as usize))
    }

    /// Writes the dispositions of claimed messages. Returns the number of rows that changed. `dead_blocks`: which
    /// messages wait behind a dead letter. `delivery_us`: delivery times, if the statement records them.
    pub fn settle(
        &self,
        batch: &[Settlement],
        dead_blocks: Blocks,
        delivery_us: Option<&[i64]>,
    ) -> Result<usize, D::Error> {
        let usual = match delivery_us {
            None => self.db.settle_published(&self.worker, batch)?,
            Some(_) => None,
        };
        let changed = match usual {
            Some(changed) => changed,
            None => {
                let tids = batch.iter().map(|settlement| settlement.row_id).collect();
                self.settle_at(batch, tids, dead_blocks, delivery_us)?
            }
        };
        if changed == batch.len() {
            return Ok(changed);
        }
        // Rows that moved (VACUUM FULL) are found again by key. Rows that are gone, or carry another token, are no
        // longer this worker's.
        let (seqs, destinations, partitions) = keys(batch);
        let sql = "select outbox_internal.locate($1, $2, $3)::text[]";
        let tids = (self.db).one(Statement::Text(sql), &[seqs, destinations, partitions], |row| {
            row.texts(0)
        })?;
        let tids = tids.iter().map(|tid| tid.parse().unwrap_or_default()).collect();
        Ok(changed + self.settle_at(batch, tids, dead_blocks, delivery_us)?)
    }

    fn settle_at(
        &self,
        batch: &[Settlement],
        tids: Vec<RowId>,
        dead_blocks: Blocks,
        delivery_us: Option<&[i64]>,
    ) -> Result<usize, D::Error> {
        let (seqs, destinations, partitions) = keys(batch);
        let endings: Vec<Ending> = (batch.iter())
            .map(|settlement| Ending::of(&settlement.disposition, dead_blocks))
            .collect();
        let mut args = vec![
            self.worker(),
            Arg::RowIds(tids),
            seqs,
            destinations,
            partitions,
            tokens(batch),
            Arg::Texts(endings.iter().map(|ending| Some(ending.action.letter())).collect()),
            Arg::BigInts(Some(endings.iter().map(|ending| ending.delay_ms).collect())),
            Arg::Reasons(endings.iter().map(|ending| ending.reason).collect()),
            Arg::Texts(endings.iter().map(|ending| ending.kind.map(Word::name)).collect()),
        ];
        args.extend(delivery_us.map(|delivery_us| bigints(delivery_us.iter().copied())));
        let changed = self.db.one(Statement::Text(D::SETTLE), &args, |row| row.count(0))?;
        Ok(changed as usize)
    }
}

/// Leases as arguments.
pub fn columns(leases: &[HeldLease]) -> (Vec<i16>, Vec<Option<i64>>) {
    (leases.iter())
        .map(|(partition, epoch)| (partition.as_i16(), Some(*epoch)))
        .unzip()
}

pub fn indexes<'a>(partitions: &[Partition]) -> Arg<'a> {
    Arg::SmallInts(Some(partitions.iter().map(|partition| partition.as_i16()).collect()))
}

fn bigints<'a>(numbers: impl Iterator<Item = i64>) -> Arg<'a> {
    Arg::BigInts(Some(numbers.map(Some).collect()))
}

fn tokens(batch: &[Settlement]) -> Arg<'_> {
    bigints(batch.iter().map(|settlement| settlement.pointer.lease_epoch))
}

fn keys(batch: &[Settlement]) -> (Arg<'_>, Arg<'_>, Arg<'_>) {
    let pointers = || batch.iter().map(|settlement| &settlement.pointer);
    (
        bigints(pointers().map(|pointer| pointer.seq)),
        Arg::Texts(pointers().map(|pointer| Some(&*pointer.destination)).collect()),
        Arg::SmallInts(Some(pointers().map(|pointer| pointer.partition.as_i16()).collect())),
    )
}

/// The epochs of leases as outbox_internal.mark() takes them: of partition n the element n, from zero.
pub fn epochs(leases: impl IntoIterator<Item = HeldLease>) -> Vec<i64> {
    let mut epochs = Vec::new();
    for (partition, epoch) in leases {
        let index = usize::from(partition.index());
        epochs.resize(epochs.len().max(index + 1), 0); // no lease has the epoch 0
        epochs[index] = epoch;
    }
    epochs
}

/// The columns of outbox_internal.claimed. The first ones, up to EXPIRES_AT, are those of outbox_internal.mark().
mod column {
    pub const TID: usize = 0;
    pub const SEQ: usize = 1;
    pub const PARTITION: usize = 2;
    pub const KEY: usize = 3;
    pub const ATTEMPTS: usize = 4;
    pub const CRASHES: usize = 5;
    pub const CLAIM_TOKEN: usize = 6;
    pub const REPLAYED: usize = 7;
    pub const ENQUEUED_AT: usize = 8;
    pub const EXPIRES_AT: usize = 9;
    pub const WAL_POSITION: usize = 10;
    pub const REMARK: usize = 11;
    /// The first column of the event.
    pub const EVENT: usize = 13;
}

/// A row of outbox_internal.mark(): where the message is, what it is, and its key or why that cannot be read.
pub type Marked = (RowId, Pointer, Result<Option<String>, String>);

/// Decodes a row of outbox_internal.mark().
pub fn marked<R: ResultRow>(row: &R, destination: &Arc<str>) -> Result<Marked, R::Error> {
    let pointer = Pointer {
        seq: row.count(column::SEQ)?,
        destination: Arc::clone(destination),
        partition: row.partition(column::PARTITION)?,
        key: None,
        attempts: row.count(column::ATTEMPTS)? as i32,
        crashes: row.count(column::CRASHES)? as i32,
        lease_epoch: row.count(column::CLAIM_TOKEN)?,
        replayed: row.boolean(column::REPLAYED)?,
        enqueued_at_us: row.time_us(column::ENQUEUED_AT)?.unwrap_or_default(),
        expires_at_us: row.time_us(column::EXPIRES_AT)?,
    };
    let key = readable::<_, R>(row.text(column::KEY))?;
    Ok((row.row_id(column::TID)?, pointer, key))
}

/// Decodes a claimed message. If its texts cannot be read, only this message becomes a dead letter: the others of its
/// claim continue. `remark`: why they cannot.
fn claimed<R: ResultRow>(row: &R, destination: &Arc<str>, remark: Option<String>) -> Result<Claimed, R::Error> {
    let marked = marked(row, destination)?;
    let mut columns = ClaimedEventColumns {
        row,
        next: column::EVENT,
    };
    let event = readable::<_, R>(Event::read(marked.1.seq, &mut columns))?;
    let claimed = with_event(marked, event);
    Ok(match remark {
        None => claimed,
        Some(reason) => Claimed {
            event: Err(Outcome::Unsendable { reason }),
            ..claimed
        },
    })
}

/// A claimed message with its key and its event, or why one of them cannot be read. An event without an id is not in
/// the event store.
pub fn with_event((row_id, pointer, key): Marked, event: Result<Event, String>) -> Claimed {
    // Without a key, no message waits for this one, and this one waits for none.
    let (key, is_readable) = match key {
        Ok(key) => (key, Ok(())),
        Err(why) => (None, Err(why)),
    };
    let pointer = Pointer { key, ..pointer };
    let event = match (is_readable, event) {
        (Ok(()), Ok(event)) if event.id.is_empty() => {
            Err(format!("the event store has no event with seq {}", pointer.seq))
        }
        (is_readable, event) => sendable(is_readable, event),
    };
    Claimed {
        row_id,
        pointer,
        event: event.map_err(|reason| Outcome::Unsendable { reason }),
    }
}

/// Releases a message as if it had not been claimed.
fn release() -> Disposition {
    Disposition::Release {
        reason: "not read yet".into(),
    }
}

/// Decodes a row of outbox_internal.work_events(): a seq, and the event of the source or what is wrong with it.
pub fn event_of_source<R: ResultRow>(row: &R) -> Result<(i64, Result<Event, Outcome>), R::Error> {
    let (seq, reason) = (row.count(0)?, row.name(2)?);
    let event = match row.text(1)?.as_deref() {
        None => Ok(Event::read(seq, &mut ClaimedEventColumns { row, next: 3 })?),
        Some("missing") => Err(Outcome::Unsendable { reason }),
        Some(_) => Err(Outcome::Failed { reason }),
    };
    Ok((seq, event))
}

/// The value that was read, or why it cannot be read.
fn readable<T, R: ResultRow>(read: Result<T, R::Error>) -> Result<Result<T, String>, R::Error> {
    match read {
        Ok(value) => Ok(Ok(value)),
        Err(error) => R::unreadable(error).map(Err),
    }
}

struct ClaimedEventColumns<'a, R> {
    row: &'a R,
    next: usize,
}

impl<R: ResultRow> event::EventRow for ClaimedEventColumns<'_, R> {
    type Error = R::Error;

    fn text(&mut self) -> Result<Option<String>, R::Error> {
        self.next += 1;
        self.row.text(self.next - 1)
    }

    fn number(&mut self) -> Result<Option<i64>, R::Error> {
        self.next += 1;
        self.row.number(self.next - 1)
    }
}
