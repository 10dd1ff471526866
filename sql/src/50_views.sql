-- Views for people and monitoring. The delivery uses none of them.
-- Superusers read these views. So a view must not call a function by a name that another role may have overloaded (see
-- 90_privileges.sql). SQL functions that the views call have a body with BEGIN ATOMIC, bound when it is created.

create function outbox_internal.shared_memory(area text, destination text default null)
returns setof record language c stable rows 1 as 'MODULE_PATHNAME', 'outbox_shared_memory_wrapper';
comment on function outbox_internal.shared_memory(text, text) is
  'The rows of an area of shared memory: counters, server, databases, transactions, first messages, first dead letters, errors, failed'
  ' tasks, throughput, passes; and of a destination its statistics, history and latency. One view of each area names the'
  ' columns. No row = the library is not preloaded, or no worker counts.';

create function @extschema@.outbox_is_preloaded()
returns boolean language c stable as 'MODULE_PATHNAME', 'outbox_is_preloaded_wrapper';
comment on function @extschema@.outbox_is_preloaded() is
  'Whether the server was started with outbox in shared_preload_libraries.';

create view outbox_internal.open_transactions as
select nullif(t.pid, 0) as pid, nullif(t.xid, '0') as xid, t.pid = 0 as prepared,
       greatest(clock_timestamp() - to_timestamp(t.since_us / 1e6), interval '0') as age, t.low
from outbox_internal.shared_memory('transactions') t (pid integer, xid xid, since_us double precision, low bigint);
comment on view outbox_internal.open_transactions is
  'Open transactions of this database that have enqueued messages.';
create function @extschema@.outbox_open_transactions(
  out pid integer, out xid xid, out prepared boolean, out age interval, out low bigint
) returns setof record language sql volatile
begin atomic
  select t.pid, t.xid, t.prepared, t.age, t.low from outbox_internal.open_transactions t;
end;
comment on function @extschema@.outbox_open_transactions() is
  'Open transactions of this database that have enqueued messages. Later messages of their keys wait for them.';

create view outbox_internal.live_workers as
select w.worker_id, w.pid from @extschema@.outbox_workers w
where w.heartbeat_until > clock_timestamp() and not outbox_internal.has_ended(w.worker_id);
comment on view outbox_internal.live_workers is
  'Workers whose heartbeat has not run out and that have not ended.';

create view outbox_internal.connections as
select c.worker_id, c.destination, c.since, c.state, c.reason, c.detail, c.code,
       array(select unnest(array[a.key, a.value]) from jsonb_each_text(c.args) a) as args, c.rechecked_at,
       array_position('{down,blocked,unconfigured,connecting,starting,connected,not adopted,pausing,paused}'::text[],
                      c.state) as severity,
       c.worker_id in (select w.worker_id from outbox_internal.live_workers w) as is_live
from @extschema@.outbox_connections c;
comment on view outbox_internal.connections is
  'outbox_connections, with the args as names and values by turns, the severity of the state (1 = the worst), and whether'
  ' the worker lives.';

create view @extschema@.outbox_messages as
with m as not materialized (
  select x.* from outbox_internal.ready_messages x
  union all
  select x.* from outbox_internal.waiting_messages x
  union all
  select x.* from outbox_internal.dead_messages x
  union all
  select x.* from outbox_internal.ended_messages x
)
select m.seq, m.seq as global_sequence, m.status,
       case m.status when 'published' then 'PUBLISHED' when 'dead' then 'FAILED' when 'discarded' then null
                     else 'PENDING' end as reference_status,
       m.destination, outbox_internal.partition_label(m.partition::integer) as partition_key, m.key,
       m.attempts, m.available_at, m.enqueued_at, case when m.status = 'published' then m.ended_at end as published_at,
       m.claim_token, m.last_error, m.replayed,
       m.id, m.type, m.aggregate_type, m.aggregate_id, m.operation, m.payload, m.previous_payload, m.metadata,
       m.headers, m.actor, m.correlation_id, m.created_at,
       -- the names of the same columns in other systems
       m.id as outbox_id, m.type as event_type, m.payload as body, m.actor as "user", m.destination as transport_name,
       m.attempts as retry_count, m.last_error as error_message,
       m.expires_at, m.event_error, case when m.last_error is not null then coalesce(m.error_code, 'text') end as error_code
from (
  select m.*, e.id, e.type, e.aggregate_type, e.aggregate_id, e.operation, e.payload, e.previous_payload, e.metadata,
         e.headers, e.actor, e.correlation_id, e.created_at, null::text as event_error
  from m left join @extschema@.outbox_events e
    on e.seq = m.seq
       -- While there was a source, its seq meant another event.
       and (m.ended_at is null or m.status = 'dead' or m.ended_at <@ (select t.current from outbox_internal.event_times t))
  where not exists (select from @extschema@.outbox_source)
  union all
  -- Read once for a row, and only if one of these columns is asked for.
  select m.*, case when (s.e).id ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then (s.e).id::uuid end, (s.e).type,
         (s.e).aggregate_type, (s.e).aggregate_id, (s.e).operation, (s.e).payload, (s.e).previous_payload,
         (s.e).metadata, (s.e).headers, (s.e).actor, (s.e).correlation_id, (s.e).created_at, (s.e).error
  from m left join lateral (select outbox_internal.source_row_of(outbox_internal.source_event(m.seq)) as e) s
    on m.ended_at is null or m.status = 'dead' or m.ended_at <@ (select t.current from outbox_internal.event_times t)
  where exists (select from @extschema@.outbox_source)
) m;
comment on view @extschema@.outbox_messages is
  'Every message with its event and one status: ready, in flight, retrying, blocked, scheduled (together: pending),'
  ' published, dead, discarded. An event of a source is read with the rights of the caller; event_error says why it is not'
  ' shown. For people and audits: filter by seq, or use LIMIT.';

create function outbox_internal.event_shown(
  of_seq bigint, out seq bigint, out id text, out type text, out aggregate_type text, out aggregate_id text,
  out operation text, out payload jsonb, out previous_payload jsonb, out metadata jsonb, out headers jsonb,
  out actor text, out correlation_id text, out created_at timestamptz, out body_bytes bigint, out error text
) returns setof record language sql stable
begin atomic
  select e.seq, e.id::text, e.type, e.aggregate_type, e.aggregate_id, e.operation, e.payload, e.previous_payload,
         e.metadata, e.headers, e.actor, e.correlation_id, e.created_at, e.body_bytes::bigint, null::text
  from @extschema@.outbox_events e where e.seq = of_seq and not exists (select from @extschema@.outbox_source)
  union all
  select of_seq, (s.e).id, (s.e).type, (s.e).aggregate_type, (s.e).aggregate_id, (s.e).operation, (s.e).payload,
         (s.e).previous_payload, (s.e).metadata, (s.e).headers, (s.e).actor, (s.e).correlation_id, (s.e).created_at,
         octet_length(concat((s.e).payload, (s.e).previous_payload, (s.e).metadata, (s.e).headers, (s.e).actor)),
         (s.e).error
  from (select outbox_internal.source_row_of(outbox_internal.source_event(of_seq)) as e offset 0) s
  where exists (select from @extschema@.outbox_source);
end;
comment on function outbox_internal.event_shown(bigint) is
  'The event of this seq, for people: of outbox_events, or of the source, read with the rights of the caller. error: why'
  ' it is not shown.';

create view outbox_internal.first_pending as
with recursive lane as ( -- one index lookup for each lane, whatever its length
  (select o.destination, o.partition, o.seq, o.enqueued_at from @extschema@.outbox o
   order by o.destination, o.partition, o.seq limit 1)
  union all
  select n.* from lane l cross join lateral (
    select o.destination, o.partition, o.seq, o.enqueued_at from @extschema@.outbox o
    where (o.destination, o.partition) > (l.destination, l.partition)
    order by o.destination, o.partition, o.seq limit 1) n
)
select lane.* from lane;
comment on view outbox_internal.first_pending is
  'The first message of outbox in each lane (destination, partition) that has one.';

-- For views that are read often. A scan of a lane from its start would read all ended messages that a held snapshot
-- keeps, so shared memory remembers where each lane begins.
create view outbox_internal.first_shown as
select f.*, exists (select from outbox_internal.blocked_lanes() l
                    where l.destination = f.destination and l.partition = f.partition
                      and l.blocker < f.seq) as is_blocked,
       f.destination in (select z.destination from @extschema@.outbox_paused z
                         union
                         select c.destination from outbox_internal.connections c where c.is_live group by 1
                         having bool_and(c.state in ('down', 'blocked', 'unconfigured', 'pausing', 'paused',
                                                     'not adopted')))
         or f.destination not in (select d.destination from outbox_internal.destinations() d) as is_stopped
from (select w.destination, w.partition, w.seq, to_timestamp(w.enqueued_us / 1e6) as enqueued_at
      from outbox_internal.shared_memory('first messages')
        w (destination text collate "C", partition smallint, seq bigint, enqueued_us double precision)) f;
comment on view outbox_internal.first_shown is
  'The rows of first_pending, at a cost that does not grow with the queue. They are the first message of outbox in'
  ' each lane (destination, partition). is_blocked = it waits behind a message that failed. is_stopped = no worker'
  ' can deliver to its destination: it does not exist or is paused, or the connection of each live worker is down,'
  ' blocked or unconfigured.';

create view outbox_internal.counters as
select c.*
from (select) one left join outbox_internal.shared_memory('counters') c (
  pending bigint, in_flight bigint, published bigint, failed bigint, published_60s numeric, failed_60s numeric,
  since_us double precision, dead bigint, blocking bigint) on true;
comment on view outbox_internal.counters is
  'The counters of this database, one row; all NULL = not preloaded.';

-- Counts the table only if shared memory has no count: a held snapshot keeps the rows of dead letters that were
-- retried or discarded.
create view outbox_internal.dead_counts as
select least(coalesce(c.dead, (select count(*) from (select from @extschema@.outbox_dead limit 10000) d)), 10000) as dead,
       least(coalesce(c.blocking, (select count(*) from (select from @extschema@.outbox_dead d where d.blocks
                                                         limit 10000) d)), 10000) as blocking
from outbox_internal.counters c;
comment on view outbox_internal.dead_counts is
  'The number of dead letters, and of those that block others. Both stop at 10000.';

create view outbox_internal.first_dead as
select f.dead, f.blocking from outbox_internal.shared_memory('first dead letters') f (dead bigint, blocking bigint);
comment on view outbox_internal.first_dead is
  'The seq of the first dead letter, and of the first that blocks others.';

create view @extschema@.outbox_status as
select greatest(c.pending, case when c.pending is not null then 0 end) as pending, -- NULL = not preloaded
       c.in_flight,
       (select d.dead from outbox_internal.dead_counts d) as dead,
       -- No volatile function here: it would be called even for a query of other columns.
       (select statement_timestamp() - min(o.enqueued_at) from outbox_internal.first_shown o
        where not o.is_blocked and not o.is_stopped) as oldest_pending_age,
       c.published as published_total, c.failed as failed_total,
       trim_scale(round(c.published_60s / 60, 3)) as published_per_s,
       trim_scale(round(c.failed_60s / 60, 3)) as failed_per_s,
       to_timestamp(c.since_us / 1e6) as stats_reset,
       (select round((array_agg(m.p95_ms order by m.start_s desc))[1], 2) from outbox_internal.shared_memory('throughput')
          m (start_s double precision, published bigint, retried bigint, failed bigint, p95_ms numeric)
        where m.p95_ms is not null
          and m.start_s >= extract(epoch from date_trunc('minute', statement_timestamp())) - 60) as p95_ms
from outbox_internal.counters c;
comment on view @extschema@.outbox_status is
  'One row, at a cost that does not grow with the queue. It has the messages pending (all that have not ended), in'
  ' flight and dead (up to 10000), and the age of the oldest that can be delivered now. It has totals since'
  ' stats_reset, and rates of the last minute. p95_ms is the 95th percentile of the time from enqueue to confirm in this'
  ' minute, or in the last one if nothing has been published in this; NULL = nothing in either.';

create view outbox_internal.hanging_workers as
select w.worker_id, w.pid, w.heartbeat_at from @extschema@.outbox_workers w join pg_stat_activity a on a.pid = w.pid
where w.worker_id like 'server-%' and w.heartbeat_until <= clock_timestamp() and not outbox_internal.has_ended(w.worker_id);
comment on view outbox_internal.hanging_workers is
  'Workers whose process exists and writes no heartbeat: it is stopped, or waits.';

create view @extschema@.outbox_worker_status as
select w.worker_id, w.pid, coalesce(c.state, 'starting') as state, c.reason,
       case when n.failing > 0 and n.failing < n.destinations
            then format('%s of %s destinations down', n.failing, n.destinations)
            else c.detail end as detail,
       w.worker_id in (select l.worker_id from outbox_internal.live_workers l) as alive,
       date_trunc('milliseconds', w.heartbeat_until - clock_timestamp()) as heartbeat_ttl,
       (select count(*) from @extschema@.outbox_partitions p
        where p.lease_owner = w.worker_id and p.lease_until > clock_timestamp()) as partitions,
       w.started_at, n.destinations, n.failing as destinations_down,
       w.worker_id in (select h.worker_id from outbox_internal.hanging_workers h) as hangs
from @extschema@.outbox_workers w
cross join lateral (
  select count(*) as destinations,
         count(*) filter (where x.state in ('down', 'blocked', 'unconfigured')) as failing
  from @extschema@.outbox_connections x
  where x.worker_id = w.worker_id and (x.destination, x.state) <> ('default', 'unconfigured')) n
left join lateral ( -- the worst state, unless only some destinations fail
  select x.state, x.reason, x.detail from outbox_internal.connections x where x.worker_id = w.worker_id
  order by n.destinations > 0 and (x.destination, x.state) = ('default', 'unconfigured'),
           x.state in ('down', 'blocked', 'unconfigured'), x.severity, x.reason is null,
           x.destination = 'default' desc, x.destination limit 1) c on true;
comment on view @extschema@.outbox_worker_status is
  'One row a worker: whether it is alive, the state of its connections, and the number of its partitions. Also the'
  ' number of its destinations, and of those that it cannot reach. state = down only if it can reach none. hangs = its'
  ' process exists and writes no heartbeat; a worker that is not alive and does not hang has ended.';

create view outbox_internal.destination_statistics as
select d.destination, d.wrapper, d.paused, d.not_adopted, f.*
from outbox_internal.destinations() d
left join lateral outbox_internal.shared_memory('statistics', d.destination) f (
  in_flight bigint, published bigint, failed bigint, dead bigint, released bigint, published_60s numeric,
  since_us double precision, p50_ms numeric, p95_ms numeric, p99_ms numeric, pending bigint, max_pending bigint) on true;
comment on view outbox_internal.destination_statistics is
  'All destinations, with their statistics but without their options, which may have a secret in a URL; in_flight NULL = no'
  ' worker counts. pending NULL = not counted, max_pending NULL = no limit.';

create view @extschema@.outbox_destination_status as
with live as (
  select c.* from outbox_internal.connections c where c.is_live
), pending as (
  select p.destination, min(p.enqueued_at) as oldest from outbox_internal.first_shown p where not p.is_blocked group by 1
)
select coalesce(d.destination, p.destination) as destination,
       case when d.destination is null then null when d.wrapper is null then 'settings' else d.wrapper end
         as described_by,
       case when d.destination is null then 'missing'
            when d.paused then case when b.busy then 'pausing' else 'paused' end
            when d.not_adopted is not null then 'not adopted'
            else coalesce(c.state, 'not served') end as state,
       coalesce(z.since, c.since) as since,
       case when d.paused or d.not_adopted is not null then null else c.reason end as reason,
       case when d.paused then concat_ws(
              ': ', case when b.busy then coalesce(d.in_flight, 0) || ' in flight, ' else '' end
                    || 'paused by ' || z.paused_by, z.reason)
            else coalesce(d.not_adopted, c.detail) end as detail,
       date_trunc('milliseconds', clock_timestamp() - p.oldest) as oldest_pending_age,
       d.in_flight, d.published as published_total, d.failed as failed_total, d.dead as dead_total,
       d.released as released_total, trim_scale(round(d.published_60s / 60, 3)) as published_per_s,
       round(d.p50_ms, 2) as p50_ms, round(d.p95_ms, 2) as p95_ms, round(d.p99_ms, 2) as p99_ms,
       to_timestamp(d.since_us / 1e6) as stats_reset, d.pending, d.max_pending
from outbox_internal.destination_statistics d
full join pending p on p.destination = d.destination
left join @extschema@.outbox_paused z on z.destination = d.destination
left join lateral (
  select l.state, l.since, l.reason, l.detail from live l where l.destination = d.destination
  order by l.severity, l.reason is null, l.since limit 1) c on true
-- True until each worker has noticed the pause and settled its messages.
cross join lateral (select exists (select from live l where l.destination = d.destination
                                   and l.state not in ('paused', 'not adopted')) as busy) b
order by 1;
comment on view @extschema@.outbox_destination_status is
  'One row a destination: its worst state in any worker, since when and why; the age of its oldest message that'
  ' waits behind no failed one. Then totals since stats_reset, percentiles from enqueue to confirm, and pending'
  ' messages (scheduled and in flight included) with their limit. NULL = no worker counts. missing = messages wait'
  ' for a dropped server.';

create view @extschema@.outbox_partition_status as
select outbox_internal.partition_label(p.partition::integer) as partition_key,
       case when l.is_held then p.lease_owner end as lease_owner,
       case when l.is_held then date_trunc('milliseconds', p.lease_until - clock_timestamp()) end as lease_ttl,
       p.lease_epoch, p.updated_at, f.seq as first_waiting_seq,
       case when l.is_held then p.lease_until end as lease_until
from @extschema@.outbox_partitions p
cross join lateral (select p.lease_until > clock_timestamp() as is_held) l
left join (select x.partition, min(x.seq) as seq from outbox_internal.first_shown x group by 1) f
  on f.partition = p.partition;
comment on view @extschema@.outbox_partition_status is
  'One row a partition: its lease and the first message that waits in it.';

create view outbox_internal.definer_functions as
select p.proname::text as name,
       encode(sha256(convert_to(concat_ws(' ', p.prosrc, p.proconfig::text), 'UTF8')), 'hex') as digest
from pg_proc p join outbox_internal.members m on m.classid = 'pg_proc'::regclass and m.objid = p.oid
where p.prosecdef;
comment on view outbox_internal.definer_functions is
  'The functions of the extension that run as its owner, with a digest of body and settings.';

-- 90_privileges.sql replaces it, when all functions exist.
create view outbox_internal.installed_functions as
select i.key as name, i.value as digest from jsonb_each_text('{}') i;
comment on view outbox_internal.installed_functions is
  'definer_functions as it was when this version was installed.';

create function outbox_internal.schema_problem(out code text, out args text[])
returns setof record language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  with place as (
    select n.oid, n.nspname, n.nspowner, n.nspacl, x.extowner, n.oid = x.extnamespace as is_shared
    from pg_extension x join pg_namespace n on n.oid = x.extnamespace or n.nspname = 'outbox_internal'
    where x.extname = 'outbox'
  ), harmless as ( -- a superuser needs no overload
    select r.oid, r.rolname
    from pg_roles r
    where exists (select from pg_roles s where s.rolsuper and s.oid = coalesce((
                    select d.datdba from pg_database d
                    where r.rolname = 'pg_database_owner' and d.datname = current_database()), r.oid))
  ), worker_role as ( -- and the workers may create partitions of the history
    select c.relowner as oid from pg_class c where c.oid = '@extschema@.outbox'::regclass
  )
  select f.code, f.args
  from (
    select 1 as rank,
           'function_foreign' as code,
           array['function', p.oid::regprocedure::text, 'owner', pg_get_userbyid(p.proowner),
                 'kind', case p.prokind when 'p' then 'procedure' when 'a' then 'aggregate' else 'function' end] as args
    from pg_proc p join place on p.pronamespace = place.oid and place.is_shared
    where p.proname >= 'outbox' and p.proname < 'outboy' and (p.proname = 'outbox' or p.proname like 'outbox\_%')
      and not exists (select from outbox_internal.members m where m.classid = 'pg_proc'::regclass and m.objid = p.oid)
    union all
    select 2,
           'schema_owner', array['schema', place.nspname, 'owner', pg_get_userbyid(place.extowner)]::text[]
    from place
    where place.nspowner not in (select h.oid from harmless h
                                 union all select w.oid from worker_role w where place.is_shared)
    union all
    -- The names of the members only: those of all functions take a tenth of a second.
    select 2, 'member_owner', array['object', min(coalesce('view ' || c.oid::regclass, 'function ' || p.oid::regprocedure)),
                                    'owner', r.rolname, 'superuser', (
             select s.rolname from pg_roles s where s.rolsuper order by s.oid limit 1)]
    from outbox_internal.members m
    left join pg_class c on m.classid = 'pg_class'::regclass and c.oid = m.objid and c.relkind = 'v'
    left join pg_proc p on m.classid = 'pg_proc'::regclass and p.oid = m.objid and not p.prosecdef
    join pg_roles r on r.oid = coalesce(c.relowner, p.proowner)
    where not r.rolsuper and r.oid not in (select w.oid from worker_role w)
    group by r.rolname
    union all
    select 3,
           'schema_create', array['schema', place.nspname::text,
                                  'role', case when g.grantee <> 0 then quote_ident(pg_get_userbyid(g.grantee)) end]
    from place cross join lateral aclexplode(place.nspacl) g
    where g.privilege_type = 'CREATE' and g.grantee <> place.nspowner
      and g.grantee not in (select h.oid from harmless h
                            union all select w.oid from worker_role w where place.is_shared)
    union all
    select 4, 'function_altered', array['function', i.name]
    from outbox_internal.installed_functions i left join outbox_internal.definer_functions f on f.name = i.name
    where f.digest is distinct from i.digest
    union all
    -- A trigger, a check, a default, a policy or a rule of a user. Their statements run as the owner of the table.
    select distinct 5,
           'function_without_path',
           array['function', p.oid::regprocedure::text, 'table', t.oid::regclass::text, 'path',
                 concat_ws(', ', 'pg_catalog', nullif(quote_ident(n.nspname), 'pg_catalog'),
                           (select quote_ident(place.nspname) from place where place.is_shared and place.oid <> n.oid),
                           'pg_temp')]
    from pg_class t join pg_depend a on a.refclassid = 'pg_class'::regclass and a.refobjid = t.oid and a.deptype = 'a'
    join pg_depend u on u.classid = a.classid and u.objid = a.objid and u.refclassid = 'pg_proc'::regclass
    join pg_proc p on p.oid = u.refobjid join pg_namespace n on n.oid = p.pronamespace
    join pg_language l on l.oid = p.prolang
    where t.relkind in ('r', 'p') and l.lanname not in ('internal', 'c') and p.prosqlbody is null
      and not exists (select from unnest(p.proconfig) c where c like 'search\_path=%')
      and not exists (select from pg_trigger d where a.classid = 'pg_trigger'::regclass and d.oid = a.objid and d.tgenabled = 'D')
      and not exists (select from pg_rewrite d where a.classid = 'pg_rewrite'::regclass and d.oid = a.objid and d.ev_enabled = 'D')
      and (exists (select from outbox_internal.members m where m.classid = 'pg_class'::regclass and m.objid = t.oid)
           or t.oid in (select i.inhrelid from pg_inherits i where i.inhparent = '@extschema@.outbox_history'::regclass))
  ) f
  order by f.rank, f.args;
end;
comment on function outbox_internal.schema_problem() is
  'Functions in the schema of the extension that are named like its own but are not part of it, or that were altered.'
  ' Also roles that own views of it, or may create functions there or in outbox_internal, and functions of users in statements on the'
  ' tables that set no search_path. outbox_health shows the first.';

-- It runs as its caller: only a superuser may read the file and replace functions of others. If the function is not there,
-- it fails: CREATE would make one that runs as the superuser. CREATE EXTENSION replaces the two words in its script, so
-- they are in two parts here.
create function outbox_internal.restore_function(name text)
returns void language plpgsql volatile strict set search_path = pg_catalog, pg_temp as $$
declare
  script text;
  head text;
begin
  select replace(replace(pg_read_file(c.setting || '/extension/outbox--' || x.extversion || '.sql'),
                         '@' || 'extschema@', quote_ident(n.nspname)), 'MODULE_' || 'PATHNAME', '$libdir/outbox'),
         format('function %I.%I(', f.nspname, p.proname)
  into strict script, head
  from pg_extension x join pg_namespace n on n.oid = x.extnamespace
  join pg_depend d on d.refclassid = 'pg_extension'::regclass and d.refobjid = x.oid and d.deptype = 'e'
  join pg_proc p on d.classid = 'pg_proc'::regclass and p.oid = d.objid
  join pg_namespace f on f.oid = p.pronamespace
  cross join pg_config c
  where x.extname = 'outbox' and p.proname = restore_function.name and c.name = 'SHAREDIR'
    and exists (select from outbox_internal.installed_functions i where i.name = p.proname); -- others are altered by statements further down
  execute format('create or replace %s%s', head,
                 split_part(split_part(script, 'create ' || head, 2), E'\ncomment on function ', 1));
  perform outbox_internal.set_plans();
end
$$;
comment on function outbox_internal.restore_function(text) is
  'Makes a function that runs as its owner again as the install script has it. For superusers; outbox_health names it.';

create function outbox_internal.worded(code text, args text[], out problem text, out remedy text, out commands jsonb)
language c stable strict parallel safe as 'MODULE_PATHNAME', 'outbox_worded_wrapper';
comment on function outbox_internal.worded(text, text[]) is
  'The words of a finding, and the commands in the remedy as a JSON array. args: names and values by turns; s_name is the setting outbox.name.';

-- Found by their dependency, as pg_trigger has no index by function. tgtype: 2 = BEFORE, 4 + 8 + 16 = all writes of a row.
create view outbox_internal.trigger_problems as
with ours as materialized (
  select t.tgrelid, t.tgname, t.tgenabled, t.tgtype, f.proname = 'outbox_captured' as captures,
         convert_from(substr(t.tgargs, 1, octet_length(t.tgargs) - 1), getdatabaseencoding()) as settings,
         format('%I.%I', n.nspname, c.relname) as place
  from outbox_internal.members m
  join pg_proc f on m.classid = 'pg_proc'::regclass and f.oid = m.objid and f.proname in ('outbox_captured', 'outbox_attached')
  join pg_depend d on d.refclassid = 'pg_proc'::regclass and d.refobjid = f.oid and d.classid = 'pg_trigger'::regclass
  join pg_trigger t on t.oid = d.objid and t.tgnargs = 1
  join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace
)
select t.tgrelid, 'trigger_disabled' as code,
       array['table', t.place, 'triggers', string_agg(quote_ident(t.tgname), ', ' order by t.tgname),
             'enable', string_agg(format('ENABLE TRIGGER %I', t.tgname), ', ' order by t.tgname),
             'replica', case when not bool_or(t.tgenabled = 'D') then '' end] as args
from ours t where t.tgenabled in ('D', 'R') group by t.tgrelid, t.place
union all
select t.tgrelid, 'capture_incomplete',
       array['table', t.place, 'operations', concat_ws(
               ', ', case when t.covered & 4 = 0 then 'INSERT' end, case when t.covered & 16 = 0 then 'UPDATE' end,
               case when t.covered & 8 = 0 then 'DELETE' end),
             'settings', coalesce((select string_agg(format(', %s => %L', s.key, case jsonb_typeof(s.value)
                                            when 'array' then array(select jsonb_array_elements_text(s.value))::text
                                            else s.value #>> '{}' end), '' order by s.key)
                                   from jsonb_each(t.settings::jsonb) s), '')]
from (select o.tgrelid, o.place, min(o.settings) as settings, bit_or(o.tgtype) as covered
      from ours o where o.captures and o.tgtype & 2 = 0 and o.settings like '%"aggregate_type"%'
      group by o.tgrelid, o.place) t
where t.covered & 28 <> 28;
comment on view outbox_internal.trigger_problems is
  'Tables of outbox_capture and outbox_attach of which a trigger is disabled or missing.';

create view outbox_internal.server as
select s.* from outbox_internal.shared_memory('server') s (
  preloaded boolean, obstacle text, missing_slots integer, missing_standbys text, connected_standbys text);
comment on view outbox_internal.server is
  'One row: whether the library is preloaded, why the launcher starts no worker, how many slots it lacks; and of the standbys'
  ' that messages wait for, those that are missing and those that are connected.';

create view outbox_internal.sharers as
with kind as (
  select k.place, k.wrapper from outbox_internal.kinds k where k.of_settings
), own as (
  select s.setdatabase from kind k, pg_db_role_setting s, unnest(s.setconfig) c (setting)
  where s.setrole = 0 and split_part(c.setting, '=', 1) in ('outbox.url', 'outbox.' || k.place))
select d.datname as database, k.place, k.wrapper
from kind k, outbox_internal.shared_memory('databases') m (database bigint) join pg_database d on d.oid = m.database::oid
where current_setting('outbox.url') <> '' and d.oid not in (select o.setdatabase from own o)
  and not exists (select from own o join pg_database x on x.oid = o.setdatabase where x.datname = current_database());
comment on view outbox_internal.sharers is
  'Other databases whose default destination is that of the settings of the server, as is that of this database, unless one'
  ' of them has a server "default".';

create view @extschema@.outbox_errors as
select f.destination, f.kind, f.message, f.count, to_timestamp(f.first_us / 1e6) as first_at,
       to_timestamp(f.last_us / 1e6) as last_at, f.last_seq, f.last_error
from outbox_internal.shared_memory('errors') f (
  destination text, kind text, message text, count bigint, first_us double precision, last_us double precision, last_seq bigint,
  last_error text)
order by last_at desc;
comment on view @extschema@.outbox_errors is
  'What failed recently, one row a cause, the most recent first, 100 causes at most. A row has the destination,'
  ' kind, the error with # for numbers and ids, how often, first and last time, and the last message with its error as it'
  ' was. If the destination went down last_seq is NULL.';

-- A function, so that the planner does not multiply its cost by the findings that it expects: above jit_above_cost the
-- server compiles outbox_health for seconds.
create function outbox_internal.facts(destination text)
returns text[] language sql stable parallel safe set search_path = pg_catalog, pg_temp
begin atomic
  select array[
    'destination', $1, 'wrapper', d.wrapper, 'server', case when d.server is not null then '' end, 'role', m.role,
    'worker_role', current_setting('outbox.worker_role'), 'database', current_database()::text, 'database_settings', (
      select string_agg(substr(split_part(c.setting, '=', 1), 8), ',')
      from pg_db_role_setting s join pg_database x on x.oid = s.setdatabase, unnest(s.setconfig) c (setting)
      where x.datname = current_database() and s.setrole = 0 and c.setting like 'outbox.%')] || o.texts
  from (select) one
  left join lateral ( -- not by destinations(): if that fails, this says why
    select s.oid as server, s.srvoptions as options, w.fdwname::text as wrapper
    from pg_foreign_server s join pg_foreign_data_wrapper w on w.oid = s.srvfdw
    where s.srvname = $1::name and w.oid in (select x.oid from outbox_internal.wrappers x)
      and (s.srvname <> 'default' or pg_has_role(s.srvowner, 'outbox_admin', 'usage'))) d on true
  left join lateral ( -- the user mapping of the workers
    select case u.umuser when 0 then 'PUBLIC' else quote_ident(u.usename) end as role, u.umoptions as options
    from pg_user_mappings u
    where u.srvid = d.server and (u.umuser = 0 or u.usename = current_setting('outbox.worker_role'))
    order by u.umuser = 0 limit 1) m on true
  cross join lateral (
    select array_agg(v.text order by p.i, v.n) as texts
    from (
      select row_number() over () as i, x.pair
      from (
        select array['o_' || split_part(o.option, '=', 1), substr(o.option, strpos(o.option, '=') + 1)] as pair
        from unnest(d.options) o (option)
        union all
        select array['m_' || split_part(o.option, '=', 1), ''] from unnest(m.options) o (option)
        union all
        select array['m_hidden', ''] where m.role is not null and m.options is null -- only superusers and owners see them
        union all -- how many others are of the kind of the settings, and which options they have
        select array[n.name, count(*)::text]
        from pg_foreign_server o join pg_foreign_data_wrapper w on w.oid = o.srvfdw
        cross join lateral (select 'others' as name
                            union all select 'others_' || split_part(y, '=', 1) from unnest(o.srvoptions) y) n
        where d.server is null and $1 = 'default' and o.srvname <> 'default'
          and w.fdwname = (select k.wrapper from outbox_internal.kinds k where k.of_settings)
        group by n.name) x) p
    cross join lateral unnest(p.pair) with ordinality v (text, n)) o;
end;
comment on function outbox_internal.facts(text) is
  'What the words of a finding may need of its destination (NULL = none) and of this database: names and values by turns.'
  ' The options of its server begin with o_, the names of those of its user mapping with m_.';

create view outbox_internal.unroutable as
select m.seq, m.destination, w.remedy
from (select x.seq, x.destination, x.partition, x.key, x.error_code from @extschema@.outbox_waiting x
      union all
      select x.seq, x.destination, x.partition, x.key, x.error_code from @extschema@.outbox_dead x) m
left join @extschema@.outbox_events e on e.seq = m.seq and not exists (select from @extschema@.outbox_source)
cross join lateral outbox_internal.worded('unroutable', array[
  'key', m.key, 'label', outbox_internal.partition_label(m.partition::integer), 'e_type', e.type,
  'e_aggregate_type', e.aggregate_type, 'e_aggregate_id', e.aggregate_id, 'e_operation', e.operation,
  'e_headers', e.headers::text] || outbox_internal.facts(m.destination)) w
where m.error_code = 'unroutable';
comment on view outbox_internal.unroutable is
  'What lets a message be routed that was not, with its address. Of an event of a source that is not known.';

-- The planner gives a condition on "check" to each part below, and so runs only that one. It does so to none if a part ends
-- with LIMIT. It evaluates a setting that a condition compares with a column. In a session that has not loaded the library
-- yet the setting is unknown, so it may be missing.
create view outbox_internal.findings as
with connection as (
  select c.* from outbox_internal.connections c where c.is_live
), server as (
  select s.*, current_setting('outbox.worker_role') as worker_role, current_setting('outbox.workers')::integer as workers,
         exists (select from outbox_internal.live_workers) as has_worker
  from outbox_internal.server s
), fill as materialized ( -- its numbers are NULL if the server has no entry for the destination
  select d.* from outbox_internal.destination_statistics d
), waiting as materialized ( -- read once for all checks
  select f.destination, f.partition, f.seq, f.enqueued_at, f.is_blocked, f.is_stopped from outbox_internal.first_shown f
), own_table as (
  select t.oid, t.relname, format('%I.%I', n.nspname, t.relname) as name, t.relowner,
         t.relrowsecurity and t.relforcerowsecurity as is_secured
  from pg_class t join pg_namespace n on n.oid = t.relnamespace
  where t.relkind in ('r', 'p') and (
    exists (select from outbox_internal.members m where m.classid = 'pg_class'::regclass and m.objid = t.oid)
    or t.oid in (select i.inhrelid from pg_inherits i where i.inhparent = '@extschema@.outbox_history'::regclass))
), other_owner as (
  select x.type, x.name, r.rolname as worker_role
  from (select 'TABLE' as type, o.name, o.relowner as owner from own_table o
        union all
        select 'FUNCTION', p.oid::regprocedure::text, p.proowner
        from outbox_internal.members m join pg_proc p on m.classid = 'pg_proc'::regclass and p.oid = m.objid
        where p.prosecdef) x
  join server s on true join pg_roles r on r.rolname = s.worker_role and r.oid <> x.owner
), foreign_trigger as (
  select t.tgname, t.tgtype, o.oid, o.name, o.relname from own_table o join pg_trigger t on t.tgrelid = o.oid
  where not t.tgisinternal and t.tgenabled <> 'D'
    and not exists (select from pg_depend d where d.classid = 'pg_proc'::regclass and d.objid = t.tgfoid
                    and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e')
)
select 'preload' as "check", null::text as destination, 'not_preloaded' as code,
       array['libraries', ( -- which not every role sees
         select string_agg(quote_literal(btrim(l.name)), ', ' order by l.n)
         from pg_settings p, unnest(string_to_array(concat_ws(',', nullif(p.setting, ''), 'outbox'), ','))
                with ordinality l (name, n)
         where p.name = 'shared_preload_libraries')] as args
from server s where not s.preloaded
union all
-- As the workers see it: the setting of a session may be older, if it is set for the database.
select 'enabled', null, 'disabled', '{}'
where case when exists (select from connection) then exists (select from connection c where c.code = 'disabled')
           else not current_setting('outbox.enabled')::boolean end
union all
select 'standby', null, 'standby', '{}' where pg_is_in_recovery()
union all
select 'version', null,
       case when string_to_array(v.library, '.')::integer[] > string_to_array(v.sql, '.')::integer[]
            then 'extension_older' else 'library_older' end,
       array['library', v.library, 'extension', v.sql]
from (select current_setting('outbox.library_version', true) as library, x.extversion as sql
      from pg_extension x where x.extname = 'outbox') v
where v.library <> v.sql
union all
select 'standbys', null,
       case when b.missing is null then 'standbys_behind' when b.missing <> '' then 'standbys_missing'
            when btrim(current_setting('outbox.standby_names')) = '' then 'no_standby_names' else 'no_standby_quorum' end,
       array['missing', b.missing, 'awaited', b.awaited, 'connected', b.connected,
             'timeout', nullif(current_setting('outbox.standby_timeout'), '-1')]
from (select s.missing_standbys as missing, nullif(s.connected_standbys, '') as connected,
             (select min(c.detail) from connection c where c.reason = 'standby') as awaited
      from server s where not pg_is_in_recovery() and current_setting('outbox.publish_after', true) = 'standby') b
where b.missing is not null or b.awaited is not null
union all
select 'identity', null, 'database_not_adopted', array['why', a.why]
from outbox_internal.not_adopted() a (why) where a.why is not null
union all
select 'partitions', null, 'settings_lost',
       array['partitions', coalesce(nullif((select count(*) from @extschema@.outbox_partitions), 0)::text,
                                    current_setting('outbox.partition_count')),
             'leasing', current_setting('outbox.leasing')]
where not exists (select from @extschema@.outbox_settings)
union all
select 'partitions', null, 'partitions_lost',
       array['lost', (s.partition_count - p.rows)::text, 'partitions', s.partition_count::text]
from @extschema@.outbox_settings s cross join (select count(*) as rows from @extschema@.outbox_partitions) p
where p.rows < s.partition_count
union all
select 'partitions', null, 'partition_unknown',
       array['label', outbox_internal.partition_label(p.highest), 'partitions', (p.highest + 1)::text]
from (select max(f.partition)::integer as highest from waiting f
      where f.partition >= (select s.partition_count from @extschema@.outbox_settings s)) p
where p.highest is not null
union all
select 'sequence', null,
       case when b.of_event then 'seq_not_drawn' when b.seq is not null then 'seqs_again'
            when q.seqcache > 1 then 'seqs_cached' else 'seqs_do_not_grow' end,
       array['seq', b.seq::text, 'cache', q.seqcache::text, 'sequence', '@extschema@.outbox_events_seq_seq']
from pg_sequence q left join (
  -- A sequence that nobody uses is behind whatever others insert.
  select max(k.seq) as seq, bool_or(k.of_event) as of_event
  from (select max(x.seq) as seq, true as of_event from @extschema@.outbox_events x
        where (select v.is_called from @extschema@.outbox_events_seq_seq v)
        union all select i.highest_seq, false from @extschema@.outbox_identity i) k, outbox_internal.drawn_seq d
  where k.seq > d.seq) b on true
where q.seqrelid = '@extschema@.outbox_events_seq_seq'::regclass
  and (b.seq is not null or q.seqcache > 1 or q.seqincrement < 0 or q.seqcycle)
union all
select 'role', null,
       case when r.rolname is null then 'role_missing' when r.rolsuper then 'role_superuser' else 'role_has_member' end,
       array['role', s.worker_role, 'owner', case when not o.rolsuper then o.rolname end, 'member', m.member]
from server s left join pg_roles r on r.rolname = s.worker_role
join pg_class t on t.oid = '@extschema@.outbox'::regclass
join pg_roles o on o.oid = t.relowner
cross join lateral (
  select min(quote_ident(x.rolname)) as member from pg_auth_members g join pg_roles x on x.oid = g.member
  where g.roleid = r.oid and not x.rolsuper) m
where r.rolname is null or r.rolsuper or m.member is not null
union all
select 'schema', null, x.code, x.args from (select s.* from outbox_internal.schema_problem() s limit 1) x
union all
-- Events may have triggers of others: what one changes or leaves out is no message yet.
select 'triggers', null, x.code, x.args
from (
  select 'trigger_undoes' as code, array['trigger', t.tgname, 'table', t.name]::text[] as args
  from foreign_trigger t where t.tgtype & 3 = 3 and t.relname <> 'outbox_events' -- BEFORE, FOR EACH ROW
  union all
  select 'rule_replaces', array['rule', r.rulename, 'table', o.name]
  from own_table o join pg_rewrite r on r.ev_class = o.oid where r.ev_enabled <> 'D'
  order by 1 desc, 2 limit 1) x
union all
select 'workers', null,
       case when h.pid is not null then 'worker_hangs'
            when s.workers = 0 and not s.has_worker then 'workers_0'
            when e.obstacle = 'time slices' then 'time_slices'
            when e.obstacle = 'slots' then 'no_worker_slots'
            when e.obstacle = 'entries' then 'too_many_workers'
            when e.obstacle = 'databases' then 'too_many_databases'
            when e.obstacle = 'excluded' then 'database_excluded'
            when e.obstacle = 'template' then 'database_template'
            when e.obstacle = 'closed' then 'database_closed'
            when e.obstacle = 'connect' then 'role_may_not_connect'
            when e.obstacle = 'login' then 'role_may_not_log_in'
            else 'no_worker' end,
       array['worker', h.worker_id, 'pid', h.pid::text, 'since', date_trunc('seconds', h.heartbeat_at)::text,
             'serves', case when s.has_worker then '' end, 'missing', s.missing_slots::text, 'role', s.worker_role,
             'databases', current_setting('outbox.databases') || ',' || current_database(),
             'obstacle', case e.obstacle when 'role' then 'its role is missing or a superuser' end,
             'see', case when e.obstacle = 'role' then 'see the check "role"'
                         when not s.preloaded then 'see the check "preload"' end]
from server s left join (select w.* from outbox_internal.hanging_workers w order by w.worker_id limit 1) h on true
-- What the launcher does not start, and what ends a worker before it can report.
cross join lateral (
  select coalesce(case when d.datistemplate then 'template' when not d.datallowconn then 'closed'
                       when not has_database_privilege(r.oid, d.oid, 'CONNECT') then 'connect'
                       -- Later versions start a background worker without LOGIN.
                       when not r.rolcanlogin and current_setting('server_version_num')::integer < 170000 then 'login' end,
                  s.obstacle) as obstacle
  from pg_database d left join pg_roles r on r.rolname = s.worker_role where d.datname = current_database()) e
where not pg_is_in_recovery()
  and (h.pid is not null or not s.has_worker or e.obstacle in ('slots', 'entries', 'time slices'))
union all
select 'destination', u.destination, u.code, u.args
from (select distinct on (x.destination) x.*
      from (select c.destination, coalesce(c.code, 'unconfigured') as code, array['detail', c.detail] || c.args as args
            from connection c where c.state = 'unconfigured'
            union all
            -- Also while no worker reports it, as in a restored database that is not adopted yet.
            select d.destination, p.n[1], p.n[2:]
            from outbox_internal.destinations() d cross join lateral outbox_internal.mapping_problem(d.server) p (n)
            where p.n is not null) x
      order by x.destination, x.code) u
where u.destination <> 'default' or u.code like 'mapping\_%' or current_setting('outbox.url') <> ''
   or (select count(*) from outbox_internal.destinations()) = 1
   or exists (select from waiting f where f.destination = 'default')
union all
select 'destination', 'default', 'no_url', '{}'
where not exists (select from outbox_internal.live_workers) and current_setting('outbox.url') = ''
  and (select d.server from outbox_internal.destinations() d where d.destination = 'default') is null
union all
select 'destination', 'default', 'default_ignored', array['owner', pg_get_userbyid(s.srvowner)::text]
from pg_foreign_server s join outbox_internal.wrappers w on w.oid = s.srvfdw
where s.srvname = 'default'
  and not pg_has_role(s.srvowner, 'outbox_admin', 'usage')
union all
select 'destination', m.destination, 'destination_missing', array['owner', f.owner, 'command', f.command]
from (select distinct f.destination from waiting f where not f.is_blocked
      except select d.destination from outbox_internal.destinations() d) m
left join outbox_internal.former_servers f on f.destination = m.destination
union all
select 'destination', d.destination, 'destination_not_adopted', array['why', d.not_adopted]
from outbox_internal.destinations() d where d.not_adopted is not null
union all
select 'destination', s.destination, 'subscriber_missing', array['owner', f.owner, 'command', f.command]
from @extschema@.outbox_subscriptions s left join outbox_internal.former_servers f on f.destination = s.destination
where s.destination not in (select d.destination from outbox_internal.destinations() d)
union all
select 'destination', n.destination, n.code, array['receiver', n.receiver, 'owner', n.owner]
from outbox_internal.notice_receivers n where n.code is not null
union all
select 'database', null, 'other_owner',
       array['objects', array_to_string((array_agg(o.name order by o.type desc, o.name))[1:3], ', '),
             'more', (nullif(greatest(count(*) - 3, 0), 0))::text, 'role', o.worker_role,
             'command', string_agg(format('ALTER %s %s OWNER TO %I', o.type, o.name, o.worker_role), '; '
                                   order by o.type desc, o.name)]
from other_owner o group by o.worker_role
union all
select f."check", null, f.code,
       array['since', f.since, 'error', f.error, 'role', s.worker_role, 'command', (
         select c.command
         from (
           select 1 as rank, format('GRANT CREATE ON SCHEMA %I TO %I', n.nspname, r.rolname) as command
           from pg_extension x join pg_namespace n on n.oid = x.extnamespace join pg_roles r on r.rolname = s.worker_role
           where x.extname = 'outbox' and f."check" = 'maintenance' and not has_schema_privilege(r.oid, n.oid, 'CREATE')
           union all
           select 2, format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY', o.name) from own_table o where o.is_secured
           union all
           select 3, format('ALTER TABLE %s DISABLE TRIGGER %I', t.name, t.tgname) from foreign_trigger t) c
         order by c.rank, c.command limit 1)]
from server s, (
  -- A worker tries again after half a second; what ends within a few tries is no problem.
  (select 'database' as "check", 'statement_fails' as code, null as since, e.message as error
   from @extschema@.outbox_errors e
   where e.kind = 'database' and e.count > 3 and e.last_at > clock_timestamp() - interval '10 seconds'
   order by e.last_at desc limit 1)
  union all
  -- Maintenance runs once a minute, and its last answer stands until then.
  (select 'maintenance', 'maintenance_fails', date_trunc('seconds', to_timestamp(t.since_us / 1e6))::text, t.error
   from outbox_internal.shared_memory('failed tasks') t (since_us double precision, error text) order by t.since_us limit 1)) f
where not exists (select from other_owner)
union all
select 'source', null, 'source_unreadable',
       array['problem', p.problem, 'columns', (
         select quote_literal(s.relation) || string_agg(format(', %s => %L', c.name, to_jsonb(s) ->> c.name), '' order by c.n)
         from @extschema@.outbox_source s,
              unnest('{seq,type,created_at,id,aggregate_type,aggregate_id,operation,payload,previous_payload,metadata,'
                     'headers,actor,correlation_id,key}'::text[]) with ordinality c (name, n)
         where to_jsonb(s) ->> c.name is not null
         group by s.relation)]
from (select outbox_internal.source_problem() as problem) p where p.problem is not null
union all
select 'capture', null, x.code, x.args
from (select p.code, p.args from outbox_internal.trigger_problems p order by p.tgrelid limit 3) x
union all
select 'paused', z.destination, 'paused',
       array['in_flight', case when b.busy then coalesce(f.in_flight, 0)::text end, 'by', z.paused_by,
             'since', date_trunc('seconds', z.since)::text, 'reason', z.reason]
from @extschema@.outbox_paused z
left join outbox_internal.destination_statistics f on f.destination = z.destination
cross join lateral (select exists (select from connection c where c.destination = z.destination
                                   and c.state not in ('paused', 'not adopted')) as busy) b
union all
select 'broker', c.destination, coalesce(c.code, c.reason, 'connecting'), array['detail', c.detail] || c.args
       || array['since', date_trunc('seconds', c.since)::text, 'http_allow', concat_ws(
            ', ', nullif(current_setting('outbox.http_allow'), ''), (c.args)[array_position(c.args, 'address') + 1])]
from (select distinct on (c.destination) c.* from connection c
      where c.state in ('down', 'connecting', 'connected') and c.reason <> 'standby' or c.state in ('starting', 'connecting')
      order by c.destination, c.reason is null, c.state = 'connected') c
union all
select 'blocked', c.destination, coalesce(c.code, 'blocked'),
       array['detail', c.detail] || c.args || array['since', date_trunc('seconds', c.since)::text]
from (select distinct on (c.destination) c.* from connection c where c.state = 'blocked'
      order by c.destination, c.detail) c
union all
select 'retrying', null, 'retrying',
       array['count', case when r.n = 10000 then '10000 or more' else r.n::text end, 'seq', w.seq::text,
             'destination', w.destination, 'since', date_trunc('seconds', w.enqueued_at)::text, 'error', w.last_error,
             'unroutable', case w.error_code when 'unroutable' then (
               select u.remedy from outbox_internal.unroutable u
               where u.seq = w.seq and u.destination = w.destination) end]
from (select x.* from @extschema@.outbox_waiting x where x.state = 'b' and x.attempts >= 3 order by x.seq limit 1) w
cross join (select count(*) as n from (select from @extschema@.outbox_waiting x
                                       where x.state = 'b' and x.attempts >= 3 limit 10000) x) r
union all
select 'dead letters', null, 'dead_letters',
       array['count', case when c.dead = 10000 then '10000 or more' else c.dead::text end, 'error', d.reason,
             'seq', d.seq::text, 'destination', d.destination,
             'unroutable', case d.error_code when 'unroutable' then (
               select u.remedy from outbox_internal.unroutable u
               where u.seq = d.seq and u.destination = d.destination) end,
             'refused', case when d.error_code in ('refused', 'unsendable') then '' end]
from outbox_internal.dead_counts c
left join lateral (
  select x.* from @extschema@.outbox_dead x
  where x.seq = (select f.dead from outbox_internal.first_dead f) limit 1) d on true
where c.dead > 0
union all
select 'keys', null, 'keys_blocked',
       array['count', case when c.blocking = 10000 then '10000 or more' else c.blocking::text end,
             'key', case when exists (select from outbox_internal.destinations() x
                                      where x.destination = d.destination and 'ordering=partition' = any (x.options))
                         then 'partition ' || outbox_internal.partition_label(d.partition::integer) else d.key end,
             'seq', d.seq::text, 'destination', d.destination]
from outbox_internal.dead_counts c
left join lateral (
  select x.* from @extschema@.outbox_dead x
  where x.blocks and x.seq = (select f.blocking from outbox_internal.first_dead f) limit 1) d on true
where c.blocking > 0
union all
select 'room', p.destination, case when p.pending >= p.max_pending then 'queue_full' else 'queue_nearly_full' end,
       array['pending', p.pending::text, 'most', p.max_pending::text, 'max_pending', (2 * p.max_pending)::text]
from fill p where p.pending >= 0.9 * p.max_pending
union all
select 'room', null, 'no_room_for_statistics', array['count', count(*)::text, 'example', min(p.destination)]
from fill p where p.in_flight is null and exists (
  select from connection c where c.destination = p.destination and c.worker_id like 'server-%')
having count(*) > 0
union all
select 'transactions', null, case when t.prepared then 'transaction_prepared' else 'transaction_open' end,
       array['xid', t.xid::text, 'pid', t.pid::text, 'gid', t.gid, 'age', date_trunc('seconds', t.age)::text,
             'who', concat_ws(', ', t.usename, nullif(t.application_name, '')),
             'statement', nullif(substr(regexp_replace(t.query, '\s+', ' ', 'g'), 1, 100), '')]
from (select x.*, g.gid, a.usename, a.application_name, a.query
      from outbox_internal.open_transactions x
      left join pg_stat_activity a on a.pid = x.pid and not x.prepared
      left join pg_prepared_xacts g on g.transaction = x.xid and x.prepared
      where x.age > case when x.prepared then interval '1 minute' else interval '30 seconds' end
      order by x.age desc limit 3) t
union all
-- The lease has run out, so its worker has not renewed it, and an open transaction has the row locked: that of the worker,
-- if it hangs while it settles. Partitions first: such rows are rare, and pg_locks is expensive.
select 'locks', null, 'partitions_locked',
       array['pid', h.pid::text, 'program', h.kind, 'since', date_trunc('seconds', h.since)::text,
             'partitions', h.partitions::text]
from (
  select l.pid, min(a.backend_type) as kind, coalesce(min(a.xact_start), min(p.lease_until)) as since, count(*) as partitions
  from (select q.xmax, q.lease_until from @extschema@.outbox_partitions q
        where q.lease_owner is not null and q.lease_until <= clock_timestamp() offset 0) p
  cross join lateral (
    select k.pid from pg_locks k
    where k.locktype = 'transactionid' and k.transactionid = p.xmax and k.granted offset 0) l
  left join pg_stat_activity a on a.pid = l.pid
  group by l.pid order by partitions desc limit 1) h
union all
select 'lag', s.destination,
       case when h.gid is not null then 'lag_behind_prepared' when h.pid is not null then 'lag_behind_locks'
            when r.most is not null then 'lag_at_max_rate' else 'lag' end,
       array['seq', s.seq::text, 'age', date_trunc('seconds', s.age)::text, 'since', date_trunc('seconds', s.enqueued_at)::text,
             'gid', h.gid, 'pid', h.pid::text, 'who', h.who,
             'statement', substr(regexp_replace(h.query, '\s+', ' ', 'g'), 1, 100),
             'most', r.most::text, 'max_rate', (2 * r.most)::text, 'per_s', p.per_s::text,
             'concurrency', p.concurrency::text, 'workers', (current_setting('outbox.workers')::integer + 1)::text]
from (
  select f.destination, f.partition, f.seq, f.enqueued_at, statement_timestamp() - f.enqueued_at as age from waiting f
  where not f.is_blocked and not f.is_stopped and f.enqueued_at < statement_timestamp() - interval '1 minute'
    -- A retry keeps its first time, and what an open transaction holds cannot be delivered: see the other checks.
    and exists (select from @extschema@.outbox o where o.destination = f.destination and o.partition = f.partition
                and o.seq = f.seq and o.attempts = 0)
    and not exists (select from outbox_internal.open_transactions t where t.low < f.seq)
  order by f.enqueued_at limit 1) s
left join lateral (
  select x.pid, x.gid, concat_ws(', ', a.usename, nullif(a.application_name, '')) as who, a.query
  from (select k.pid, g.gid
        from @extschema@.outbox o
        join pg_locks k on k.locktype = 'transactionid' and k.transactionid = o.xmax and k.granted
        left join pg_prepared_xacts g on g.transaction = o.xmax
        where o.destination = s.destination and o.partition = s.partition and o.seq = s.seq
        union all
        select b.pid, null from @extschema@.outbox_workers w cross join lateral unnest(pg_blocking_pids(w.pid)) b (pid)) x
  left join pg_stat_activity a on a.pid = x.pid
  where x.gid is not null or a.xact_start < clock_timestamp() - interval '1 second'
    and x.pid not in (select w.pid from @extschema@.outbox_workers w)
  limit 1) h on true
left join lateral (
  select trim_scale(round(d.published_60s / 60, 1)) as per_s, d.published_60s / 60 as rate, o.concurrency,
         coalesce(o.max_rate, current_setting('outbox.max_rate', true))::bigint as most
  from outbox_internal.destination_statistics d cross join lateral (
    select min(2 * substr(x, 13)::bigint) filter (where x like 'concurrency=%') as concurrency,
           min(substr(x, 10)) filter (where x like 'max\_rate=%') as max_rate
    from outbox_internal.destinations() i, unnest(i.options) x where i.destination = d.destination) o
  where d.destination = s.destination) p on true
left join lateral (
  select p.most
  -- A worker does not pass the rest of its share on to others.
  where p.most > 0
    and p.rate >= 0.9 * p.most / greatest(1, (
      select count(*) from @extschema@.outbox_workers w where w.heartbeat_until > clock_timestamp()))) r on true;
comment on view outbox_internal.findings is
  'What is wrong, as data: the check that finds it, the destination if it is one, the code, and names and values by turns.';

create view outbox_internal.problems as
select f."check", f.destination, w.problem, w.remedy, f.code, f.args, w.commands
from outbox_internal.findings f
cross join lateral outbox_internal.worded(f.code, f.args || outbox_internal.facts(f.destination)) w;
comment on view outbox_internal.problems is
  'The findings in words: the problem, the remedy, and the commands in the remedy as a JSON array.';

create view @extschema@.outbox_health as
select c.name as "check", p.destination, p.problem is null as ok, p.problem, p.remedy,
       p.code, jsonb_strip_nulls(jsonb_object(p.args)) as args, (jsonb_object(p.args) ->> 'since')::timestamptz as since, p.commands
from unnest('{preload,enabled,standby,version,standbys,identity,partitions,sequence,role,schema,triggers,workers,destination,database,'
            'maintenance,source,capture,paused,broker,blocked,retrying,dead letters,keys,room,transactions,locks,lag}'::text[])
       with ordinality c (name, n)
left join outbox_internal.problems p on p."check" = c.name
order by c.n, p.destination;
comment on view @extschema@.outbox_health is
  'One row a check, and one row a destination where a check finds several: ok or not, the problem, the remedy. Also as data:'
  ' code and args of the problem, since when, and the commands of the remedy with the place and the role of each.';
