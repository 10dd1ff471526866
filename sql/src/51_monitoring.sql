-- Views of the recent past for dashboards: deliveries over time, delivery times, failures by cause, the attempts of a
-- message, the passes of the workers. All but the attempts are in shared memory and bounded: a view costs the same
-- whatever the backlog, and a restart of the server clears it. Without the preloaded library the views are empty.

create function outbox_internal.throughput()
returns double precision[] language c volatile as 'MODULE_PATHNAME', 'outbox_recent_throughput_wrapper';
comment on function outbox_internal.throughput() is
  'The last minutes of this database from shared memory, 5 numbers each, read by outbox_throughput; NULL = not'
  ' preloaded.';

create view @extschema@.outbox_throughput as
select pg_catalog.to_timestamp(m.n[i]) as minute, m.n[i + 1]::bigint as published, m.n[i + 2]::bigint as retried,
       m.n[i + 3]::bigint as failed, pg_catalog.round(m.n[i + 4]::numeric, 2)::double precision as p95_ms
from (select outbox_internal.throughput() as n) m, pg_catalog.generate_series(1, pg_catalog.cardinality(m.n), 5) i
order by 1;
comment on view @extschema@.outbox_throughput is
  'One row a minute, the oldest first: the last 60 whole minutes and the current one. Messages published, failed and'
  ' retried, and dead; the 95th percentile of the time from enqueue to confirm, in ms.';

create function outbox_internal.destination_history(destination text)
returns bigint[] language c volatile strict as 'MODULE_PATHNAME', 'outbox_destination_history_wrapper';
comment on function outbox_internal.destination_history(text) is
  'What ended of a destination, from shared memory, 5 numbers each, read by outbox_destination_throughput; NULL = no'
  ' worker counts.';

create view @extschema@.outbox_destination_throughput as
select d.destination, pg_catalog.to_timestamp(h.n[i]) as start,
       pg_catalog.make_interval(secs => h.n[i + 1]) as length,
       h.n[i + 2] as published, h.n[i + 3] as retried, h.n[i + 4] as failed
from outbox_internal.destinations() d
cross join lateral (select outbox_internal.destination_history(d.destination) as n) h
cross join lateral pg_catalog.generate_series(1, pg_catalog.cardinality(h.n), 5) i;
comment on view @extschema@.outbox_destination_throughput is
  'Messages of each destination that were published, failed and retried, or died: by the minute for the last hour, and'
  ' in periods of 10 minutes for the last 24 hours. One row a destination and period (start, length); periods without'
  ' a message have no row. Filter by length.';

create function outbox_internal.destination_latency(destination text)
returns double precision[] language c volatile strict as 'MODULE_PATHNAME', 'outbox_destination_latency_wrapper';
comment on function outbox_internal.destination_latency(text) is
  'The delivery times of a destination from shared memory: the sum in ms, then bounds in ms, each followed by a'
  ' count. Read by outbox_latency. NULL = no worker counts.';

create view @extschema@.outbox_latency as
select d.destination, h.n[i] as below_ms, h.n[i + 1]::bigint as messages, h.n[1] as sum_ms
from outbox_internal.destinations() d
cross join lateral (select outbox_internal.destination_latency(d.destination) as n) h
cross join lateral pg_catalog.generate_series(2, pg_catalog.cardinality(h.n), 2) i;
comment on view @extschema@.outbox_latency is
  'A histogram of the time from enqueue to confirm since stats_reset of outbox_destination_status. One row a'
  ' destination and bound: how many messages took less than below_ms; Infinity = all. sum_ms = the sum of all times.';

create view @extschema@.outbox_errors as
select f.t[i] as destination, f.t[i + 1] as kind, f.t[i + 2] as message, f.t[i + 3]::bigint as count,
       pg_catalog.to_timestamp(f.t[i + 4]::double precision / 1e6) as first_at,
       pg_catalog.to_timestamp(f.t[i + 5]::double precision / 1e6) as last_at, f.t[i + 6]::bigint as last_seq
from (select outbox_internal.error_groups() as t) f, pg_catalog.generate_series(1, pg_catalog.cardinality(f.t), 7) i
order by last_at desc;
comment on view @extschema@.outbox_errors is
  'What failed recently, one row a cause, the most recent first, 100 causes at most. A row has the destination,'
  ' kind, the error with # for numbers and ids, how often, first and last time, and the last message. If the'
  ' destination went down last_seq is NULL.';

create view @extschema@.outbox_attempts as
select l.seq, l.destination, l.attempt, l.at, l.outcome, l.error, l.worker_id
from @extschema@.outbox_attempts_log l;
comment on view @extschema@.outbox_attempts is
  'Attempts that failed, the last 20 of each message: which one, when, what became of the message (retried, deferred,'
  ' dead), the error, the worker (NULL = a relay). Give a seq.';

create function outbox_internal.recent_passes()
returns bigint[] language c volatile as 'MODULE_PATHNAME', 'outbox_recent_passes_wrapper';
comment on function outbox_internal.recent_passes() is
  'Passes of the workers of this database from shared memory, 14 numbers each, read by outbox_passes; NULL when not'
  ' preloaded.';

create view @extschema@.outbox_passes as
select pg_catalog.format('server-%s', t.n[i] + 1) as worker_id, x.at, t.n[i + 2] as claimed, t.n[i + 3] as published,
       t.n[i + 4] as failed, pg_catalog.round(t.n[i + 5] / 1000.0, 2) as duration_ms, t.n[i + 6] as backoff_ms,
       t.n[i + 7] = 1 as renewed_heartbeat, t.n[i + 8] as purged_stale, t.n[i + 9] as active_workers,
       t.n[i + 10] as desired_count, t.n[i + 11] as owned_count, t.n[i + 12] as leased_count,
       t.n[i + 13] as released_count,
       pg_catalog.to_char(x.at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') as ts
from (select outbox_internal.recent_passes() as n) t, pg_catalog.generate_series(1, pg_catalog.cardinality(t.n), 14) i
cross join lateral (select pg_catalog.to_timestamp(t.n[i + 1] / 1e6) as at) x
order by x.at desc;
comment on view @extschema@.outbox_passes is
  'The last passes of each worker that did something, most recent first, at most 120 of each worker. The columns are'
  ' the keys that outbox_run_pass() returns.';
