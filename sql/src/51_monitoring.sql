-- Views of the recent past for dashboards: deliveries over time, delivery times, failures by cause, the attempts of a
-- message, the passes of the workers. All but the attempts are in shared memory and bounded: a view costs the same
-- whatever the backlog, and a restart of the server clears it. Without the preloaded library the views are empty.

create view @extschema@.outbox_throughput as
select to_timestamp(m.n[1]::double precision) as minute, m.n[2]::bigint as published, m.n[3]::bigint as retried,
       m.n[4]::bigint as failed, round(m.n[5]::numeric, 2)::double precision as p95_ms
from outbox_internal.shared_memory('throughput') m (n)
order by 1;
comment on view @extschema@.outbox_throughput is
  'One row a minute, the oldest first: the last 60 whole minutes and the current one. Messages published, failed and'
  ' retried, and dead; the 95th percentile of the time from enqueue to confirm, in ms.';

create view @extschema@.outbox_destination_throughput as
select d.destination, to_timestamp(h.n[1]::double precision) as start,
       make_interval(secs => h.n[2]::double precision) as length,
       h.n[3]::bigint as published, h.n[4]::bigint as retried, h.n[5]::bigint as failed
from outbox_internal.destinations() d
cross join lateral outbox_internal.shared_memory('history', d.destination) h (n);
comment on view @extschema@.outbox_destination_throughput is
  'Messages of each destination that were published, failed and retried, or died: by the minute for the last hour, and'
  ' in periods of 10 minutes for the last 24 hours. One row a destination and period (start, length); periods without'
  ' a message have no row. Filter by length.';

create view @extschema@.outbox_latency as
select d.destination, h.n[1]::double precision as below_ms, h.n[2]::bigint as messages,
       h.n[3]::double precision as sum_ms
from outbox_internal.destinations() d
cross join lateral outbox_internal.shared_memory('latency', d.destination) h (n);
comment on view @extschema@.outbox_latency is
  'A histogram of the time from enqueue to confirm since stats_reset of outbox_destination_status. One row a'
  ' destination and bound: how many messages took less than below_ms; Infinity = all. sum_ms = the sum of all times.';

create view @extschema@.outbox_errors as
select f.n[1] as destination, f.n[2] as kind, f.n[3] as message, f.n[4]::bigint as count,
       to_timestamp(f.n[5]::double precision / 1e6) as first_at,
       to_timestamp(f.n[6]::double precision / 1e6) as last_at, f.n[7]::bigint as last_seq
from outbox_internal.shared_memory('errors') f (n)
order by last_at desc;
comment on view @extschema@.outbox_errors is
  'What failed recently, one row a cause, the most recent first, 100 causes at most. A row has the destination,'
  ' kind, the error with # for numbers and ids, how often, first and last time, and the last message. If the'
  ' destination went down last_seq is NULL.';

create view @extschema@.outbox_attempts as
select l.seq, l.destination, l.attempt, l.at, l.outcome, l.error, l.worker_id,
       coalesce(l.error_code, 'text') as error_code
from @extschema@.outbox_attempts_log l;
comment on view @extschema@.outbox_attempts is
  'Attempts that failed, the last 20 of each message: which one, when, what became of the message (retried, deferred,'
  ' dead), the error, the worker (NULL = a relay), the kind of the error (text = only its text is known). Give a seq.';

create view @extschema@.outbox_passes as
select format('server-%s', t.n[1] + 1) as worker_id, x.at, t.n[3] as claimed, t.n[4] as published, t.n[5] as failed,
       round(t.n[6] / 1000.0, 2) as duration_ms, t.n[7] as backoff_ms, t.n[8] = 1 as renewed_heartbeat,
       t.n[9] as purged_stale, t.n[10] as active_workers, t.n[11] as desired_count, t.n[12] as owned_count,
       t.n[13] as leased_count, t.n[14] as released_count,
       to_char(x.at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') as ts
from (select p.n::bigint[] as n from outbox_internal.shared_memory('passes') p (n)) t
cross join lateral (select to_timestamp(t.n[2] / 1e6) as at) x
order by x.at desc;
comment on view @extschema@.outbox_passes is
  'The last passes of each worker that did something, most recent first, at most 120 of each worker. The columns are'
  ' the keys that outbox_run_pass() returns.';
