-- Views of the recent past for dashboards: deliveries over time, delivery times, failures by cause, the attempts of a
-- message, the passes of the workers. All but the attempts are in shared memory and bounded: a view costs the same
-- whatever the backlog, and a restart of the server clears it. Without the preloaded library the views are empty.

create view @extschema@.outbox_throughput as
select to_timestamp(m.start_s) as minute, m.published, m.retried, m.failed, round(m.p95_ms, 2)::double precision as p95_ms
from outbox_internal.shared_memory('throughput')
  m (start_s double precision, published bigint, retried bigint, failed bigint, p95_ms numeric)
order by 1;
comment on view @extschema@.outbox_throughput is
  'One row a minute, the oldest first: the last 60 whole minutes and the current one. Messages published, failed and'
  ' retried, and dead; the 95th percentile of the time from enqueue to confirm, in ms.';

create view @extschema@.outbox_destination_throughput as
select d.destination, to_timestamp(h.start_s) as start, make_interval(secs => h.length_s) as length,
       h.published, h.retried, h.failed
from outbox_internal.destinations() d cross join lateral outbox_internal.shared_memory('history', d.destination)
  h (start_s double precision, length_s double precision, published bigint, retried bigint, failed bigint);
comment on view @extschema@.outbox_destination_throughput is
  'Messages of each destination that were published, failed and retried, or died: by the minute for the last hour, and'
  ' in periods of 10 minutes for the last 24 hours. One row a destination and period (start, length); periods without'
  ' a message have no row. Filter by length.';

create view @extschema@.outbox_latency as
select d.destination, h.below_ms, h.messages, h.sum_ms
from outbox_internal.destinations() d cross join lateral outbox_internal.shared_memory('latency', d.destination)
  h (below_ms double precision, messages bigint, sum_ms double precision);
comment on view @extschema@.outbox_latency is
  'A histogram of the time from enqueue to confirm since stats_reset of outbox_destination_status. One row a'
  ' destination and bound: how many messages took less than below_ms; Infinity = all. sum_ms = the sum of all times.';

create view @extschema@.outbox_attempts as
select l.seq, l.destination, l.attempt, l.at, l.outcome, l.error, l.worker_id,
       coalesce(l.error_code, 'text') as error_code
from @extschema@.outbox_attempts_log l;
comment on view @extschema@.outbox_attempts is
  'Attempts that failed, the last 20 of each message: which one, when, what became of the message (retried, deferred,'
  ' dead), the error, the worker (NULL = a relay), the kind of the error (text = only its text is known). Give a seq.';

create view @extschema@.outbox_passes as
select format('server-%s', t.number + 1) as worker_id, x.at, t.claimed, t.published, t.failed,
       round(t.duration_us / 1000.0, 2) as duration_ms, t.backoff_ms, t.renewed_heartbeat = 1 as renewed_heartbeat,
       t.purged_stale, t.active_workers, t.desired_count, t.owned_count, t.leased_count, t.released_count,
       to_char(x.at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') as ts
from outbox_internal.shared_memory('passes') t (
  number bigint, at_us bigint, claimed bigint, published bigint, failed bigint, duration_us bigint, backoff_ms bigint,
  renewed_heartbeat bigint, purged_stale bigint, active_workers bigint, desired_count bigint, owned_count bigint,
  leased_count bigint, released_count bigint)
cross join lateral (select to_timestamp(t.at_us / 1e6) as at) x
order by x.at desc;
comment on view @extschema@.outbox_passes is
  'The last passes of each worker that did something, most recent first, at most 120 of each worker. The columns are'
  ' the keys that outbox_run_pass() returns.';
