//! The SQL of the upkeep: what waits is counted, what has expired becomes a dead letter, what is old goes. Each call is one
//! statement in the transaction of the caller, as the worker role. Main thread of an upkeep process; a worker calls
//! `purge_workers` when a session asks for a tick.

use super::Store;
use crate::pg::clock::us_since_1970;
use crate::pg::guc;
use crate::pg::spi::{Lossy, Spi, SpiResult};
use pgrx::datum::TimestampWithTimeZone;

/// How many messages of a destination wait, and when the first of them expires, in µs since 1970.
pub struct Counted {
    pub destination: String,
    pub messages: i64,
    pub first_expiry_us: Option<i64>,
}

/// What a look for expired messages found.
pub struct Expired {
    /// How many it buried, of each destination that had any.
    pub counts: Vec<(String, i64)>,
    /// Others of its key may wait behind one of them.
    pub blocking: bool,
    /// Where to go on; 0 = all was looked through.
    pub next_block: i64,
    /// It stopped at its limit.
    pub more: bool,
    /// When the first of those that are left expires, in µs since 1970.
    pub next_expiry_us: Option<i64>,
}

impl Store {
    /// The messages that wait, of each destination that has any, counted up to `limit` in all.
    pub fn count_pending(&self, limit: i64) -> SpiResult<Vec<Counted>> {
        Spi::connect(|client| {
            let sql = format!(
                "select o.destination, pg_catalog.count(*), pg_catalog.min(o.expires_at)
                 from (select destination, expires_at from {s}.outbox
                       union all select destination, expires_at from {s}.outbox_waiting limit $1) o
                 group by 1",
                s = self.schema
            );
            let count = || client.select(sql.as_str(), None, &[limit.into()]);
            guc::with(&[(c"enable_seqscan", c"on")], count)?
                .map(|row| {
                    Ok(Counted {
                        destination: row.get::<Lossy>(1)?.unwrap_or_default().0,
                        messages: row.get(2)?.unwrap_or_default(),
                        first_expiry_us: row.get::<TimestampWithTimeZone>(3)?.map(us_since_1970),
                    })
                })
                .collect()
        })
    }

    /// How many dead letters there are, and how many that block others; of at most `limit`.
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

    /// How many messages wait, as the last vacuum or analyze estimated.
    pub fn estimate_pending(&self) -> SpiResult<i64> {
        let sql = format!(
            "select sum(greatest(reltuples, 0))::bigint from pg_class
             where oid in ('{s}.outbox'::regclass, '{s}.outbox_waiting'::regclass)",
            s = self.schema
        );
        Ok(Spi::get_one(&sql)?.unwrap_or_default())
    }

    /// Makes dead letters of messages that have expired, in so many blocks of the table from this one on.
    pub fn expire(&self, first_block: i64, blocks: i32, batch: i32) -> SpiResult<Expired> {
        Spi::connect_mut(|client| {
            let sql = "select destinations, counts, blocking, next_block, more, next_expiry from outbox_internal.expire($1, $2, $3)";
            let args = [first_block.into(), blocks.into(), batch.into()];
            let row = client.update(sql, Some(1), &args)?.first();
            let destinations: Vec<Lossy> = row.get(1)?.unwrap_or_default();
            let counts: Option<Vec<i64>> = row.get(2)?;
            Ok(Expired {
                counts: (destinations.into_iter().map(|destination| destination.0))
                    .zip(counts.unwrap_or_default())
                    .collect(),
                blocking: row.get(3)?.unwrap_or_default(),
                next_block: row.get(4)?.unwrap_or_default(),
                more: row.get(5)?.unwrap_or_default(),
                next_expiry_us: row.get(6)?.map(us_since_1970),
            })
        })
    }

    pub fn make_partitions(&self, retention_s: Option<i32>) -> SpiResult<i32> {
        let sql = "select outbox_internal.make_partitions($1, clock_timestamp())";
        Ok(Spi::get_one_with_args(sql, &[retention_s.into()])?.unwrap_or_default())
    }

    /// Summarises new ranges of the indexes of the history; returns how many.
    pub fn summarize_history(&self) -> SpiResult<i32> {
        let sql = "select outbox_internal.summarize_history(clock_timestamp(), 1000)";
        Ok(Spi::get_one(sql)?.unwrap_or_default())
    }

    /// Calls a function that removes what is older, `batch` at most, and returns how many.
    pub fn clear(&self, function: &str, retention_s: i32, batch: i32) -> SpiResult<i64> {
        let sql = format!("select outbox_internal.{function}($1, $2, clock_timestamp())::bigint");
        Ok(Spi::get_one_with_args(&sql, &[retention_s.into(), batch.into()])?.unwrap_or_default())
    }

    /// Calls a function that removes what is older and over, looking at `batch` rows after a seq. Returns how far it got,
    /// and whether more may be old.
    pub fn clear_after(&self, function: &str, after: i64, retention_s: i32, batch: i32) -> SpiResult<(i64, bool)> {
        let sql = format!("select reached, more from outbox_internal.{function}($1, $2, $3, clock_timestamp())");
        let args = [after.into(), retention_s.into(), batch.into()];
        let (reached, more) = Spi::get_two_with_args(&sql, &args)?;
        Ok((reached.unwrap_or(after), more.unwrap_or_default()))
    }

    pub fn purge_workers(&self) -> SpiResult<i64> {
        let purged: Option<i64> = Spi::get_one("select outbox_internal.purge_workers()")?;
        Ok(purged.unwrap_or_default())
    }
}
