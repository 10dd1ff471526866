//! How much WAL the standbys of this server have. Workers in the server call it, and sessions for workers outside.

use crate::pg::security;
use crate::pg::spi::{Lossy, Spi, SpiResult};
use crate::pg::txn;
use outbox_core::standbys::{Replication, Standby};

/// Makes the commits of this session durable, and reads the standbys. The claim of a message is a commit of the
/// worker's session, after that of the message. A message of the fast path was on disk before it was ready. Inside a
/// transaction.
pub fn replication() -> SpiResult<Replication> {
    Ok(Replication {
        durable: txn::flush_own_commits(),
        connected: connected()?,
    })
}

/// The connected standbys that have reported a position. The worker's role may not read the positions, so this reads
/// them as a superuser. A subscriber of logical replication, whose connection has a database, is no standby. Inside a
/// transaction.
pub fn connected() -> SpiResult<Vec<Standby>> {
    const SQL: &str = "select a.application_name, (w.flush_lsn operator(pg_catalog.-) pg_catalog.pg_lsn '0/0')::bigint
                       from pg_catalog.pg_stat_get_wal_senders() w
                       join pg_catalog.pg_stat_get_activity(null) a on a.pid operator(pg_catalog.=) w.pid
                       where w.flush_lsn is not null and a.datid is null";
    security::run_as_superuser(|| {
        Spi::connect(|client| {
            client
                .select(SQL, None, &[])?
                .map(|row| {
                    Ok(Standby {
                        name: row.get::<Lossy>(1)?.unwrap_or_default().0,
                        flushed: row.get::<i64>(2)?.unwrap_or_default() as u64,
                    })
                })
                .collect()
        })
    })
}
