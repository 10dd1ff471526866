//! The SQL of maintenance: it counts waiting messages, dead-letters expired ones, and removes what is old. Each call is
//! one statement in the caller's transaction, as the worker role. Runs on the main thread of a maintenance process. A
//! worker calls `purge_workers` when a session requests a pass.

use super::Store;
use crate::pg::clock::us_since_1970;
use crate::pg::guc;
use crate::pg::spi::{Lossy, Spi, SpiResult};
use pgrx::datum::TimestampWithTimeZone;

/// The number of waiting messages of a destination, their highest seq, and when the first of them expires, in µs since
/// 1970.
pub struct Counted {
    pub destination: String,
    pub messages: i64,
    pub highest: i64,
    pub first_expiry_us: Option<i64>,
}

/// The result of one step of a search for expired messages.
pub struct Expired {
    /// The number of messages that it dead-lettered, of each destination that had any.
    pub counts: Vec<(String, i64)>,
    /// The block at which to continue; 0 = the table was searched to its end.
    pub next_block: i64,
    /// Whether it stopped at its limit of messages.
    pub more: bool,
    /// When the first of the messages that are left expires, in µs since 1970.
    pub next_expiry_us: Option<i64>,
}

impl Store {
    /// Counts the waiting messages of each destination that has any, up to `limit` in all.
    pub fn count_pending(&self, limit: i64) -> SpiResult<Vec<Counted>> {
        Spi::connect(|client| {
            let sql = format!(
                "select o.destination, pg_catalog.count(*), pg_catalog.min(o.expires_at), pg_catalog.max(o.seq)
                 from (select destination, expires_at, seq from {s}.outbox
                       union all select destination, expires_at, seq from {s}.outbox_waiting limit $1) o
                 group by 1",
                s = self.schema
            );
            let count = || client.select(sql.as_str(), None, &[limit.into()]);
            guc::with(&[(c"enable_seqscan", c"on")], count)?
                .map(|row| {
                    Ok(Counted {
                        destination: row.get::<Lossy>(1)?.unwrap_or_default().0,
                        messages: row.get(2)?.unwrap_or_default(),
                        highest: row.get(4)?.unwrap_or_default(),
                        first_expiry_us: row.get::<TimestampWithTimeZone>(3)?.map(us_since_1970),
                    })
                })
                .collect()
        })
    }

    /// The oldest transaction id that is still open, and the next one.
    pub fn open_xids(&self) -> SpiResult<(i64, i64)> {
        let sql = "select pg_catalog.pg_snapshot_xmin(s)::text::bigint, pg_catalog.pg_snapshot_xmax(s)::text::bigint
                   from pg_catalog.pg_current_snapshot() s";
        let (oldest, next) = Spi::connect(|client| client.select(sql, None, &[])?.first().get_two())?; // assigns none
        Ok((oldest.unwrap_or_default(), next.unwrap_or(i64::MAX)))
    }

    /// Counts the dead letters, and those of them that block others, among at most `limit` rows.
    pub fn count_dead(&self, limit: i64) -> SpiResult<[i64; 2]> {
        Spi::connect(|client| {
            let sql = format!(
                "select pg_catalog.count(*), pg_catalog.count(*) filter (where d.blocks)
                 from (select x.blocks from {}.outbox_dead x limit $1) d",
                self.schema
            );
            let count = || client.select(sql.as_str(), None, &[limit.into()]);
            let (dead, blocking) = guc::with(&[(c"enable_seqscan", c"on")], count)?.first().get_two()?;
            Ok([dead.unwrap_or_default(), blocking.unwrap_or_default()])
        })
    }

    /// The number of waiting messages, as the last vacuum or analyze estimated it.
    pub fn estimate_pending(&self) -> SpiResult<i64> {
        let sql = format!(
            "select sum(greatest(reltuples, 0))::bigint from pg_class
             where oid in ('{s}.outbox'::regclass, '{s}.outbox_waiting'::regclass)",
            s = self.schema
        );
        Ok(Spi::get_one(&sql)?.unwrap_or_default())
    }

    /// Dead-letters at most `batch` messages that have expired, in `blocks` blocks of the table, beginning at
    /// `first_block`.
    pub fn expire(&self, first_block: i64, blocks: i32, batch: i32) -> SpiResult<Expired> {
        Spi::connect_mut(|client| {
            let sql =
                "select destinations, counts, next_block, more, next_expiry from outbox_internal.expire($1, $2, $3)";
            let args = [first_block.into(), blocks.into(), batch.into()];
            let row = client.update(sql, Some(1), &args)?.first();
            let destinations: Vec<Lossy> = row.get(1)?.unwrap_or_default();
            let counts: Option<Vec<i64>> = row.get(2)?;
            Ok(Expired {
                counts: (destinations.into_iter().map(|destination| destination.0))
                    .zip(counts.unwrap_or_default())
                    .collect(),
                next_block: row.get(3)?.unwrap_or_default(),
                more: row.get(4)?.unwrap_or_default(),
                next_expiry_us: row.get(5)?.map(us_since_1970),
            })
        })
    }

    pub fn make_partitions(&self, retention_s: Option<i32>) -> SpiResult<i32> {
        let sql = "select outbox_internal.make_partitions($1, clock_timestamp())";
        Ok(Spi::get_one_with_args(sql, &[retention_s.into()])?.unwrap_or_default())
    }

    /// Records the names of the owners of servers, which ALTER ROLE may have changed.
    pub fn record_owners(&self) -> SpiResult<()> {
        Spi::run_with_args("select outbox_internal.record_owners()", &[])
    }

    /// Summarizes new ranges of the history's indexes. Returns the number of ranges.
    pub fn summarize_history(&self) -> SpiResult<i32> {
        let sql = "select outbox_internal.summarize_history(clock_timestamp(), 1000)";
        Ok(Spi::get_one(sql)?.unwrap_or_default())
    }

    pub fn record_drawn_seq(&self) -> SpiResult<()> {
        Spi::run_with_args("select outbox_internal.record_drawn_seq()", &[])
    }

    /// Removes at most `batch` rows of a table that no other row depends on, whose `time` is older than `retention_s`.
    /// `order`: the rows have an index in order of `time`.
    pub fn trim(&self, table: &str, time: &str, order: &str, retention_s: i32, batch: i32) -> SpiResult<i64> {
        Spi::connect_mut(|client| {
            let sql = format!(
                "with old as (
                   delete from {s}.{table} t where t.ctid = any (array(
                     select x.ctid from {s}.{table} x
                     where x.{time} < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => $1)
                     {order} limit $2 for update skip locked))
                   returning 1)
                 select pg_catalog.count(*) from old",
                s = self.schema
            );
            let args = [retention_s.into(), batch.into()];
            let in_order: &[_] = match order.is_empty() {
                true => &[],
                false => &[
                    (c"enable_seqscan", c"off"),
                    (c"enable_bitmapscan", c"off"),
                    (c"enable_sort", c"off"),
                ],
            };
            let removed = guc::with(in_order, || client.update(sql.as_str(), Some(1), &args))?;
            Ok(removed.first().get_one()?.unwrap_or_default())
        })
    }

    /// Calls a function that removes what is older than `retention_s`, at most `batch` items. Returns the number of
    /// removed items.
    pub fn clear(&self, function: &str, retention_s: i32, batch: i32) -> SpiResult<i64> {
        let sql = format!("select outbox_internal.{function}($1, $2, clock_timestamp())::bigint");
        Ok(Spi::get_one_with_args(&sql, &[retention_s.into(), batch.into()])?.unwrap_or_default())
    }

    /// Calls a function that removes what is finished and older than `retention_s`. It checks `batch` rows after the
    /// seq `after`. Returns the seq that it reached, and whether more rows may be old.
    pub fn clear_after(&self, function: &str, after: i64, retention_s: i32, batch: i32) -> SpiResult<(i64, bool)> {
        let sql = format!("select reached, more from outbox_internal.{function}($1, $2, $3, clock_timestamp())");
        let args = [after.into(), retention_s.into(), batch.into()];
        let (reached, more) = Spi::get_two_with_args(&sql, &args)?;
        Ok((reached.unwrap_or(after), more.unwrap_or_default()))
    }
}
