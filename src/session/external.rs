//! A worker outside the server: its session holds an entry in shared memory. Commits wake it, the lanes that it leases
//! report from where to read again, and its statistics count. Called by the functions of sql/src/56_work.sql, which say
//! what it may do with the tables. It has only the rights of its role, and never the name of a worker in the server.
//! Runs on the main thread of the session's backend.

use crate::error::{UserError, internal};
use crate::pg::args::{Integers, SqlText};
use crate::pg::clock::now_us;
use crate::pg::{bgworker, catalog, latch, security, signals, txn};
use crate::shared::statistics::{self, DestinationStats};
use crate::shared::{MAX_WORKERS, databases, launcher, lifecycle, sessions, transactions, workers};
use crate::store::standbys;
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use outbox_core::standbys::Standby;
use outbox_core::throughput::DeliveryTimes;
use outbox_worker::rewinds::RewindLane;
use pgrx::prelude::*;
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The limit of the name that a worker gives itself.
const LABEL_BYTES_MAX: usize = 40;

thread_local! {
    static ME: RefCell<Option<Me>> = const { RefCell::new(None) };
}

/// Set since `outbox_internal.work_join`.
struct Me {
    id: String,
    slot: &'static workers::WorkerEntry,
    /// With leasing off: the token of this session's claims, a negative number.
    row_token: i64,
    /// The destinations whose state it has reported.
    served: Vec<(String, DestinationStats)>,
}

/// Runs an action as the worker that this session is.
fn as_me<T>(body: impl FnOnce(&mut Me) -> T) -> T {
    let done = ME.with_borrow_mut(|me| me.as_mut().map(body));
    done.unwrap_or_else(|| {
        UserError::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "this session is not a worker",
            "Call outbox_internal.work_begin() first. A worker needs a separate session: a pooler must not share it between clients.",
        )
        .raise()
    })
}

#[pg_extern(sql = false)]
fn outbox_work_join(label: SqlText) -> SqlText {
    let known = ME.with_borrow(|me| me.as_ref().map(|me| me.id.clone()));
    let id = known.unwrap_or_else(|| match join(&label) {
        Ok(me) => {
            let id = me.id.clone();
            ME.set(Some(me));
            id
        }
        Err(error) => error.raise(),
    });
    id.into()
}

fn join(label: &str) -> Result<Me, UserError> {
    if !launcher::is_preloaded() {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            "outbox is not preloaded: commits would wake no worker",
            "Add outbox to shared_preload_libraries and restart the server.",
        ));
    }
    let not_yet = |message| UserError::new(PgSqlErrorCode::ERRCODE_OBJECT_IN_USE, message, "Try again in a second.");
    if databases::my_database().is_none() {
        launcher::notify();
        return Err(not_yet("the server has not found the extension in this database yet"));
    }
    let Some(slot) = lifecycle::join_from_outside() else {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
            "there are too many workers outside the server",
            format!(
                "A server has {} entries for workers. Workers outside use at most {} of them, and {} for one database. End another worker, or lower outbox.workers.",
                MAX_WORKERS,
                workers::MAX_OUTSIDE,
                workers::MAX_OUTSIDE_OF_DATABASE
            ),
        ));
    };
    // After it took the entry, as a worker in the server does: one of the two sees the other.
    if sessions::is_vacated(catalog::my_database()) {
        lifecycle::leave_from_outside();
        return Err(not_yet("a statement in this database waits for its workers to leave"));
    }
    Ok(Me {
        // No name of a worker in the server begins like this, and no two sessions have the same number.
        id: format!("work-{}-{}", plain(label), bgworker::my_pid()),
        slot,
        row_token: slot.new_row_token(),
        served: Vec::new(),
    })
}

/// A label that is easy to read in a log and to quote.
fn plain(label: &str) -> String {
    let mut plain: String = label
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "._-".contains(c) {
                c
            } else {
                '-'
            }
        })
        .collect();
    plain.truncate(LABEL_BYTES_MAX);
    if plain.is_empty() { "unnamed".to_owned() } else { plain }
}

/// This session stops being a worker; it may join again.
#[pg_extern(sql = false)]
fn outbox_work_quit() {
    if ME.take().is_some() {
        lifecycle::leave_from_outside();
    }
}

#[pg_extern(sql = false)]
fn outbox_work_me() -> SqlText {
    as_me(|me| me.id.as_str().into())
}

/// The worker, if this session may act as it. A role with the rights of the current role, which owns the tables, may
/// act as any: so do the workers in the server.
#[pg_extern(sql = false)]
fn outbox_check_worker(worker: SqlText) -> SqlText {
    if catalog::has_rights_of(security::session_user(), security::current_user()) {
        return worker;
    }
    as_me(|me| {
        if me.id != *worker {
            UserError::new(
                PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
                format!("this session is not the worker {:?}", &*worker),
                "Call the function with the name that outbox_internal.work_begin() returned.",
            )
            .raise()
        }
    });
    worker
}

#[pg_extern(sql = false)]
fn outbox_work_token() -> i64 {
    as_me(|me| me.row_token)
}

/// Runs while the rows of the leases are locked: before another worker can take them.
#[pg_extern(sql = false)]
fn outbox_work_own(partitions: Integers, ttl_s: i32) {
    let Some(database) = databases::my_database() else {
        return;
    };
    as_me(|me| {
        me.slot.hold_leases(ttl_s);
        for partition in known(&partitions.0) {
            database.own_lanes(partition, me.slot);
        }
    });
}

/// The rewinds of these partitions: for each lane that has one the partition, the lane, and the seq from which it must be
/// read again.
#[pg_extern(sql = false)]
fn outbox_work_rewinds(partitions: Integers) -> Vec<i64> {
    let database = databases::my_database();
    transactions::reap();
    as_me(|me| {
        rewinds(&partitions.0, |lane, partition| {
            database?.take_rewind(lane, partition, me.slot)
        })
    })
}

/// The number of open transactions that have enqueued. For each: its lowest seq, the number of words of its filter that
/// are not empty, and for each of these words its index and its bits. Then the result of outbox_internal.work_rewinds,
/// which is not consumed.
#[pg_extern(sql = false)]
fn outbox_work_shared_state(partitions: Integers) -> Vec<i64> {
    let open = transactions::open_transactions();
    let mut flat = vec![open.len() as i64];
    for transaction in open {
        let words = || (transaction.filter.iter().enumerate()).filter(|(_, word)| **word != 0);
        flat.extend([transaction.low, words().count() as i64]);
        flat.extend(words().flat_map(|(number, word)| [number as i64, *word as i64]));
    }
    // Read after the transactions: a transaction that has left the list has published before where it wrote.
    let database = databases::my_database();
    flat.extend(rewinds(&partitions.0, |lane, partition| {
        database?.peek_rewind(lane, partition)
    }));
    flat
}

/// Without numbers that are no partition.
fn known(partitions: &[i64]) -> impl Iterator<Item = Partition> {
    partitions
        .iter()
        .filter_map(|partition| Partition::new(*partition).ok())
}

fn rewinds(partitions: &[i64], of: impl Fn(RewindLane, Partition) -> Option<i64>) -> Vec<i64> {
    let found = known(partitions).flat_map(|partition| {
        let of = &of;
        (RewindLane::all(partition).chain([RewindLane::UNBLOCKED])).filter_map(move |lane| {
            let seq = of(lane, partition)?;
            Some([partition.as_i16().into(), lane.number().into(), seq])
        })
    });
    found.flatten().collect()
}

/// Waits until the workers of this database are woken, or `timeout_ms` have passed. The first three numbers returned
/// are the arguments of the next call, so that no wake between two waits is missed. The last one says whether to leave:
/// 1 = immediately, 2 = in order.
#[pg_extern(sql = false)]
fn outbox_work_wait(seen: Integers, timeout_ms: i32, in_flight: i32, leases_changed: bool) -> Vec<i64> {
    let (Some(database), here) = (databases::my_database(), catalog::my_database()) else {
        return Vec::new();
    };
    as_me(|me| me.slot.set_in_flight(usize::try_from(in_flight).unwrap_or(0)));
    if leases_changed {
        databases::recheck(); // the other wakes are about free partitions, or a new worker
    }
    let state = || {
        let changes = [
            database.calls.read(),
            database.worker_changes.read(),
            database.schedules.read(),
        ];
        let leaves = match sessions::is_vacated(here) {
            false => 0,
            true => 2 - i64::from(sessions::is_vacated_immediately(here)),
        };
        (changes.map(i64::from), leaves)
    };
    let until = Instant::now() + Duration::from_millis(u64::try_from(timeout_ms).unwrap_or(0));
    loop {
        let (counters, leaves) = state();
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || seen.0 != counters || leaves != 0 {
            return [&counters[..], &[leaves]].concat();
        }
        latch::wait(left.as_millis().max(1) as i64);
        signals::check_for_interrupts();
    }
}

/// Waits until WAL is on disk up to this position.
#[pg_extern(sql = false)]
fn outbox_is_on_disk(position: i64) -> bool {
    txn::flush_wal(position as u64);
    true
}

/// In lines: the position of WAL that is on disk, behind all commits of this session; then the position and the name of
/// each standby.
#[pg_extern(sql = false)]
fn outbox_work_standbys() -> SqlText {
    as_me(|_| ());
    let replication = standbys::replication().unwrap_or_else(|error| internal(error).raise());
    let line = |standby: &Standby| format!("\n{} {}", standby.flushed, standby.name);
    let lines: String = replication.connected.iter().map(line).collect();
    (replication.durable.to_string() + &lines).into()
}

/// Transactions that were prepared before the shared memory was created: (xid, time of PREPARE in µs), one after the
/// other.
#[pg_extern(sql = false)]
fn outbox_work_adopt(prepared: Integers) {
    if let Some(database) = databases::my_database()
        && !database.adopted.is_set()
    {
        let found: Vec<(u32, i64)> = prepared
            .0
            .chunks_exact(2)
            .map(|pair| (pair[0] as u32, pair[1]))
            .collect();
        transactions::adopt(&found);
        database.adopted.set();
        // One may have been committed before it was found, while another worker was reading already.
        databases::rewind_all(catalog::my_database(), 1);
    }
}

/// Records what a settle ended in the statistics of its destination: the numbers published, retried, dead, expired and
/// released, and the delivery times of the published ones.
#[pg_extern(sql = false)]
fn outbox_work_count(destination: SqlText, ended: Integers, delivery_us: Integers) {
    let [published, retried, dead, expired, released] = ended.0[..] else {
        return;
    };
    let ended = Ended {
        published: published as u64,
        retried: retried as u64,
        dead: dead as u64,
        expired: expired as u64,
        discarded: 0, // not counted
        released: released as u64,
    };
    as_me(|me| {
        let now_us = now_us();
        let stats = stats_of(me, &destination);
        stats.count(&ended, now_us);
        let mut times = DeliveryTimes::default();
        delivery_us
            .0
            .into_iter()
            .for_each(|delivery_us| times.note(delivery_us));
        stats.confirmed(&times, now_us);
    });
}

/// The number of messages of a destination that this session has claimed and not settled.
#[pg_extern(sql = false)]
fn outbox_work_in_flight(destination: SqlText, in_flight: i32) {
    as_me(|me| stats_of(me, &destination).set_in_flight(usize::try_from(in_flight).unwrap_or(0)));
}

fn stats_of<'a>(me: &'a mut Me, destination: &str) -> &'a DestinationStats {
    let known = me.served.iter().position(|(name, _)| name == destination);
    let index = known.unwrap_or_else(|| {
        me.served
            .push((destination.to_owned(), DestinationStats::of(destination)));
        if let Some(database) = databases::my_database().filter(|_| statistics::is_any_uncounted()) {
            database.request_maintenance();
        }
        me.served.len() - 1
    });
    &me.served[index].1
}
