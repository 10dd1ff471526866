//! The statements that read the views for dashboards, one for each type of `model`. Their columns are its fields.

use std::sync::LazyLock;

/// The statement for [`Now`](super::model::Now): one row.
pub const NOW: &str = r#"
    select extract(epoch from clock_timestamp())::float8 as epoch_s, to_char(clock_timestamp(), 'HH24:MI:SS') as clock,
           current_database() as database, current_user as "user", pg_is_in_recovery() as is_standby"#;

/// The statement for [`Status`](super::model::Status): one row.
pub const STATUS: &str = "
    select pending, in_flight, dead, extract(epoch from oldest_pending_age)::float8 as oldest_s, published_total, failed_total,
           published_per_s, failed_per_s, p95_ms
    from @extschema@.outbox_status";

/// The statement for [`Minute`](super::model::Minute): one row for each minute, the oldest first.
pub const THROUGHPUT: &str = "
    select extract(epoch from minute)::float8 as at, to_char(minute, 'HH24:MI') as clock, published, retried, failed, p95_ms
    from @extschema@.outbox_throughput order by minute";

/// The statement for [`Partition`](super::model::Partition): one row for each partition.
pub const PARTITIONS: &str = "
    select p.partition_key as label, p.lease_owner as owner, extract(epoch from p.lease_ttl)::float8 as ttl_s,
           p.lease_epoch as epoch, p.first_waiting_seq,
           exists (select from @extschema@.outbox_dead d where d.blocks and d.partition = substr(p.partition_key, 2)::smallint) as is_blocked
    from @extschema@.outbox_partition_status p order by length(p.partition_key), p.partition_key";

/// The statement for [`Worker`](super::model::Worker): one row for each worker.
pub const WORKERS: &str = "
    select s.worker_id as id, s.pid, s.state, s.reason, s.detail, s.alive as is_alive, s.hangs,
           extract(epoch from clock_timestamp() - w.heartbeat_at)::float8 as heartbeat_age_s,
           extract(epoch from s.heartbeat_ttl)::float8 as heartbeat_s, s.partitions,
           extract(epoch from clock_timestamp() - s.started_at)::float8 as age_s
    from @extschema@.outbox_worker_status s join @extschema@.outbox_workers w on w.worker_id = s.worker_id
    order by length(s.worker_id), s.worker_id limit 1000";

/// The statement for [`Passes`](super::model::Passes): one row for each worker. The view keeps 120 passes of each
/// worker: if it has fewer, they are all passes of the last minute.
pub const PASSES: &str = "
    select worker_id, count(*) as count,
           case when count(*) < 120 then 60 else greatest(extract(epoch from clock_timestamp() - min(at)), 0.001) end as span_s,
           avg(duration_ms) as mean_ms, sum(claimed)::bigint as claimed, sum(published)::bigint as published,
           sum(failed)::bigint as failed, (array_agg(backoff_ms order by at desc))[1] as backoff_ms,
           (array_agg(desired_count order by at desc))[1] as desired, sum(leased_count)::bigint as leased,
           sum(released_count)::bigint as released
    from @extschema@.outbox_passes where at > clock_timestamp() - interval '1 minute' group by 1";

/// The statement for [`Destination`](super::model::Destination): one row for each destination.
pub const DESTINATIONS: &str = "
    select s.destination as name, s.described_by, s.state, extract(epoch from s.since)::float8 as since,
           extract(epoch from clock_timestamp() - s.since)::float8 as since_s, s.reason, s.detail,
           extract(epoch from s.oldest_pending_age)::float8 as oldest_s, s.pending, s.max_pending, s.in_flight,
           s.published_total, s.failed_total, s.dead_total, s.released_total, s.published_per_s, s.p50_ms, s.p95_ms, s.p99_ms,
           case when s.described_by = 'settings' then nullif(current_setting('outbox.url', true), '')
                else (select o.option_value from pg_foreign_server f, pg_options_to_table(f.srvoptions) o
                      where f.srvname = s.destination and o.option_name = 'url') end as url,
           exists (select from @extschema@.outbox_paused z where z.destination = s.destination) as paused
    from @extschema@.outbox_destination_status s limit 1000";

/// The statement for [`ErrorGroup`](super::model::ErrorGroup): the 100 latest groups, the latest first.
pub const ERRORS: &str = "
    select destination, kind, message, count, extract(epoch from first_at)::float8 as first_at,
           extract(epoch from last_at)::float8 as last_at,
           extract(epoch from clock_timestamp() - first_at)::float8 as first_age_s,
           extract(epoch from clock_timestamp() - last_at)::float8 as last_age_s, last_seq, last_error
    from @extschema@.outbox_errors order by outbox_errors.last_at desc limit 100";

/// The same, with equal errors of several destinations in one group.
pub static MERGED_ERRORS: LazyLock<String> = LazyLock::new(|| {
    format!(
        "select string_agg(destination, ', ' order by last_at desc) as destination, kind, message, sum(count)::bigint as count,
                min(first_at) as first_at, max(last_at) as last_at, max(first_age_s) as first_age_s,
                min(last_age_s) as last_age_s, (array_agg(last_seq order by last_at desc))[1] as last_seq,
                (array_agg(last_error order by last_at desc))[1] as last_error
         from ({ERRORS}) e group by kind, message order by max(last_at) desc"
    )
});

/// The statement for [`Check`](super::model::HealthCheck): one row for each check.
pub const HEALTH: &str = r#"
    select "check", destination, ok, coalesce(code, '') as code, coalesce(problem, '') as problem, coalesce(remedy, '') as remedy,
           coalesce(commands, '[]') as commands, extract(epoch from since)::float8 as since
    from @extschema@.outbox_health"#;
