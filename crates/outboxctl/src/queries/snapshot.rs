//! All values of the board and of `status`, read with one round trip.

use super::model::{HealthCheck, Now, Part, Problem, Snapshot};
use super::{Fetch, views};
use crate::failure::{Code, Failure};
use serde::de::DeserializeOwned;
use std::sync::LazyLock;

/// The most dead letters, and the most messages with a next attempt or a later time, that are read.
pub const MESSAGES_MAX: usize = 200;

/// Messages that do not move, worst first: dead letters, scheduled and retried ones, those behind another of their key,
/// and the first of each lane. Each kind is found by an index and limited.
/// Failed messages are grouped by their cause, so they are many.
static MESSAGES: LazyLock<String> = LazyLock::new(|| {
    let columns = "select t.status, t.seq, t.destination, t.partition, t.key, t.attempts, t.enqueued_at";
    format!(
        "select m.status, m.seq, m.destination, @extschema@.outbox_partition_label(m.partition::integer) as partition, m.key, m.attempts,
                extract(epoch from clock_timestamp() - m.enqueued_at)::float8 as age_s,
                extract(epoch from m.due_at - clock_timestamp())::float8 as due_s, m.note
         from (({columns}, null::timestamptz as due_at, t.last_error as note
                from outbox_internal.dead_messages t order by t.ended_at desc limit {MESSAGES_MAX})
               union all
               ({columns}, t.available_at, t.last_error from outbox_internal.waiting_messages t
                where t.available_at is not null order by t.available_at limit {MESSAGES_MAX})
               union all
               ({columns}, null, 'behind an earlier message of its key' from outbox_internal.waiting_messages t
                where t.state = 'g' order by t.destination, t.partition, t.key collate \"C\", t.seq limit 50)
               union all
               ({columns}, null, t.last_error
                from (select * from outbox_internal.first_shown limit 50) l
                join outbox_internal.ready_messages t
                  on t.destination = l.destination and t.partition = l.partition and t.seq = l.seq)) m"
    )
});

/// Reads all parts. An error means that the session is lost.
pub async fn read<S: Fetch>(session: &S) -> Result<Snapshot, Failure> {
    async fn part<S: Fetch, T: DeserializeOwned + Send>(session: &S, sql: &str) -> Part<Vec<T>> {
        session.fetch(sql, &[]).await.map_err(|failure| failure.to_string())
    }
    // All statements are sent together.
    let (now, status, throughput, partitions, workers, passes, destinations, errors, messages, checks) = tokio::join!(
        part(session, views::NOW),
        part(session, views::STATUS),
        part(session, views::THROUGHPUT),
        part(session, views::PARTITIONS),
        part(session, views::WORKERS),
        part(session, views::PASSES),
        part(session, views::DESTINATIONS),
        part(session, &views::MERGED_ERRORS),
        part(session, &MESSAGES),
        part::<_, HealthCheck>(session, views::HEALTH),
    );
    let now: Vec<Now> = now.map_err(|why| Failure::new(Code::CannotConnect, why))?;
    Ok(Snapshot {
        now: now.into_iter().next().unwrap_or_default(),
        status: status.and_then(|rows| rows.into_iter().next().ok_or_else(|| "no row".into())),
        throughput,
        partitions,
        workers,
        passes,
        destinations,
        errors,
        messages,
        problems: checks.map(|checks| Problem::of(&checks)),
    })
}
