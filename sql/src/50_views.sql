-- Views for people and monitoring. The delivery uses none of them.
-- Superusers read these views. So a view must not call a function by a name that another role may have overloaded (see
-- 90_privileges.sql). SQL functions that the views call have a body with BEGIN ATOMIC, bound when it is created.

create function outbox_internal.shared_memory(area text, destination text default null)
returns setof text[] language c stable rows 1 as 'MODULE_PATHNAME', 'outbox_shared_memory_wrapper';
comment on function outbox_internal.shared_memory(text, text) is
  'The rows of an area of shared memory, each an array of texts: counters, server, transactions, first messages, first'
  ' dead letters, errors, failed tasks, throughput, passes; and of a destination its statistics, history and latency. Views'
  ' name the columns. No row = the library is not preloaded, or no worker counts.';

create function @extschema@.outbox_is_preloaded()
returns boolean language c stable as 'MODULE_PATHNAME', 'outbox_is_preloaded_wrapper';
comment on function @extschema@.outbox_is_preloaded() is
  'Whether the server was started with outbox in shared_preload_libraries.';

create view outbox_internal.open_transactions as
select nullif(t.n[1], '0')::integer as pid, nullif(t.n[2], '0')::xid as xid, t.n[1] = '0' as prepared,
       greatest(clock_timestamp() - to_timestamp(t.n[3]::double precision / 1e6), interval '0') as age,
       t.n[4]::bigint as low
from outbox_internal.shared_memory('transactions') t (n);
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
select c.worker_id, c.destination, c.since, c.state, c.reason, split_part(c.detail, E'\n', 1) as detail,
       nullif(split_part(c.detail, E'\n', 2), '') as remedy, c.rechecked_at,
       array_position('{down,blocked,unconfigured,connecting,starting,connected,not adopted,pausing,paused}'::text[],
                      c.state) as severity,
       c.worker_id in (select w.worker_id from outbox_internal.live_workers w) as is_live
from @extschema@.outbox_connections c;
comment on view outbox_internal.connections is
  'outbox_connections, with the two lines of a detail apart, the severity of the state (1 = the worst), and whether the'
  ' worker lives.';

create view @extschema@.outbox_messages as
with m as not materialized (
  select o.seq, o.destination, o.partition, o.key,
         case when outbox_internal.claim_is_live(o.claim_token, o.partition, o.claim_until)
                or outbox_internal.is_taken(o.destination, o.partition, o.seq) then 'in flight'
              else 'ready' end as status,
         o.attempts, o.enqueued_at as available_at, o.enqueued_at, null::timestamptz as published_at, o.claim_token,
         o.last_error, o.replayed, o.expires_at, null::timestamptz as ended_at, o.error_code
  from @extschema@.outbox o
  union all
  select w.seq, w.destination, w.partition, w.key,
         case w.state when 'b' then 'retrying' when 'g' then 'blocked' else 'scheduled' end,
         w.attempts, w.due_at, w.enqueued_at, null, null, w.last_error, w.replayed, w.expires_at, null, w.error_code
  from @extschema@.outbox_waiting w
  union all
  select d.seq, d.destination, d.partition, d.key, 'dead', d.attempts, null, d.enqueued_at, null, null, d.reason,
         d.replayed, d.expires_at, null, d.error_code
  from @extschema@.outbox_dead d
  union all
  select h.seq, h.destination, h.partition, h.key, case when h.discarded then 'discarded' else 'published' end,
         h.attempts, null, h.enqueued_at, case when not h.discarded then h.published_at end, null, h.last_error,
         h.replayed, null, h.published_at, h.error_code
  from @extschema@.outbox_history h
)
select m.seq, m.seq as global_sequence, m.status,
       case m.status when 'published' then 'PUBLISHED' when 'dead' then 'FAILED' when 'discarded' then null
                     else 'PENDING' end as reference_status,
       m.destination, outbox_internal.partition_label(m.partition::integer) as partition_key, m.key,
       m.attempts, m.available_at, m.enqueued_at, m.published_at, m.claim_token, m.last_error, m.replayed,
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
       and (m.ended_at is null or m.ended_at <@ (select t.current from outbox_internal.event_times t))
  where not exists (select from @extschema@.outbox_source)
  union all
  -- Read once for a row, and only if one of these columns is asked for.
  select m.*, case when (s.e).id ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then (s.e).id::uuid end, (s.e).type,
         (s.e).aggregate_type, (s.e).aggregate_id, (s.e).operation, (s.e).payload, (s.e).previous_payload,
         (s.e).metadata, (s.e).headers, (s.e).actor, (s.e).correlation_id, (s.e).created_at, (s.e).error
  from m left join lateral (select outbox_internal.source_row_of(outbox_internal.source_event(m.seq)) as e) s
    on m.ended_at is null or m.ended_at <@ (select t.current from outbox_internal.event_times t)
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
from (select w.n[1] collate "C" as destination, w.n[2]::smallint as partition, w.n[3]::bigint as seq,
             to_timestamp(w.n[4]::double precision / 1e6) as enqueued_at
      from outbox_internal.shared_memory('first messages') w (n)) f;
comment on view outbox_internal.first_shown is
  'The rows of first_pending, at a cost that does not grow with the queue. They are the first message of outbox in'
  ' each lane (destination, partition). is_blocked = it waits behind a message that failed. is_stopped = no worker'
  ' can deliver to its destination: it does not exist or is paused, or the connection of each live worker is down,'
  ' blocked or unconfigured.';

-- Counts the table only if shared memory has no count: a held snapshot keeps the rows of dead letters that were
-- retried or discarded.
create view outbox_internal.dead_counts as
select least(coalesce(c.n[8]::bigint, (select count(*) from (select from @extschema@.outbox_dead limit 10000) d)),
             10000) as dead,
       least(coalesce(c.n[9]::bigint, (select count(*) from (select from @extschema@.outbox_dead d where d.blocks
                                                             limit 10000) d)), 10000) as blocking
from (select) one left join outbox_internal.shared_memory('counters') c (n) on true;
comment on view outbox_internal.dead_counts is
  'The number of dead letters, and of those that block others. Both stop at 10000.';

create view @extschema@.outbox_status as
select greatest(c.n[1]::bigint, case when c.n[1] is not null then 0 end) as pending, -- NULL = not preloaded
       c.n[2]::bigint as in_flight,
       (select d.dead from outbox_internal.dead_counts d) as dead,
       -- No volatile function here: it would be called even for a query of other columns.
       (select statement_timestamp() - min(o.enqueued_at) from outbox_internal.first_shown o
        where not o.is_blocked and not o.is_stopped) as oldest_pending_age,
       c.n[3]::bigint as published_total, c.n[4]::bigint as failed_total,
       trim_scale(round(c.n[5]::numeric / 60, 3)) as published_per_s,
       trim_scale(round(c.n[6]::numeric / 60, 3)) as failed_per_s,
       to_timestamp(c.n[7]::double precision / 1e6) as stats_reset
from (select) one left join outbox_internal.shared_memory('counters') c (n) on true;
comment on view @extschema@.outbox_status is
  'One row, at a cost that does not grow with the queue. It has the messages pending (all that have not ended), in'
  ' flight and dead (up to 10000), and the age of the oldest that can be delivered now. It has totals since'
  ' stats_reset, and rates of the last minute.';

create view @extschema@.outbox_worker_status as
select w.worker_id, w.pid, coalesce(c.state, 'starting') as state, c.reason,
       case when n.failing > 0 and n.failing < n.destinations
            then format('%s of %s destinations down', n.failing, n.destinations)
            else c.detail end as detail,
       w.worker_id in (select l.worker_id from outbox_internal.live_workers l) as alive,
       date_trunc('milliseconds', w.heartbeat_until - clock_timestamp()) as heartbeat_ttl,
       (select count(*) from @extschema@.outbox_partitions p
        where p.lease_owner = w.worker_id and p.lease_until > clock_timestamp()) as partitions,
       w.started_at, n.destinations, n.failing as destinations_down
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
  ' number of its destinations, and of those that it cannot reach. state = down only if it can reach none.';

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
              ': ', case when b.busy then coalesce(f.n[1], '0') || ' in flight, ' else '' end
                    || 'paused by ' || z.paused_by, z.reason)
            else coalesce(d.not_adopted, c.detail) end as detail,
       date_trunc('milliseconds', clock_timestamp() - p.oldest) as oldest_pending_age,
       f.n[1]::bigint as in_flight, f.n[2]::bigint as published_total, f.n[3]::bigint as failed_total,
       f.n[4]::bigint as dead_total, f.n[5]::bigint as released_total,
       trim_scale(round(f.n[6]::numeric / 60, 3)) as published_per_s,
       round(f.n[8]::numeric, 2) as p50_ms, round(f.n[9]::numeric, 2) as p95_ms, round(f.n[10]::numeric, 2) as p99_ms,
       to_timestamp(f.n[7]::double precision / 1e6) as stats_reset,
       f.n[11]::bigint as pending, f.n[12]::bigint as max_pending
from outbox_internal.destinations() d
full join pending p on p.destination = d.destination
left join @extschema@.outbox_paused z on z.destination = d.destination
left join lateral (
  select l.state, l.since, l.reason, l.detail from live l where l.destination = d.destination
  order by l.severity, l.reason is null, l.since limit 1) c on true
left join lateral outbox_internal.shared_memory('statistics', d.destination) f (n) on true
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
from pg_proc p join pg_depend d on d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e'
join pg_extension x on d.refclassid = 'pg_extension'::regclass and x.oid = d.refobjid and x.extname = 'outbox'
where p.prosecdef;
comment on view outbox_internal.definer_functions is
  'The functions of the extension that run as its owner, with a digest of body and settings.';

-- 90_privileges.sql replaces it, when all functions exist.
create view outbox_internal.installed_functions as
select i.key as name, i.value as digest from jsonb_each_text('{}') i;
comment on view outbox_internal.installed_functions is
  'definer_functions as it was when this version was installed.';

create function outbox_internal.schema_problem(out problem text, out remedy text)
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
  select f.problem, f.remedy
  from (
    select 1 as rank,
           format('function %s of role %I is not part of the extension, and could be called in place of one that is',
                  p.oid::regprocedure, pg_get_userbyid(p.proowner)) as problem,
           format('drop %s %s', case p.prokind when 'p' then 'procedure' when 'a' then 'aggregate' else 'function' end,
                  p.oid::regprocedure) as remedy
    from pg_proc p join place on p.pronamespace = place.oid and place.is_shared
    where p.proname >= 'outbox' and p.proname < 'outboy' and (p.proname = 'outbox' or p.proname like 'outbox\_%')
      and not exists (select from pg_depend d join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
                      where d.classid = 'pg_proc'::regclass and d.objid = p.oid
                        and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e')
    union all
    select 2,
           format('schema %I belongs to a role that is not a superuser and could create functions in it'
                  ' that are called in place of those of the extension', place.nspname),
           format('alter schema %I owner to %I', place.nspname, pg_get_userbyid(place.extowner))
    from place
    where place.nspowner not in (select h.oid from harmless h
                                 union all select w.oid from worker_role w where place.is_shared)
    union all
    select 3,
           format('%s may create functions in schema %I that are called in place of those of the extension',
                  case g.grantee when 0 then 'every role' else format('role %I', pg_get_userbyid(g.grantee)) end,
                  place.nspname),
           format('revoke create on schema %I from %s', place.nspname,
                  case g.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(g.grantee)) end)
    from place cross join lateral aclexplode(place.nspacl) g
    where g.privilege_type = 'CREATE' and g.grantee <> place.nspowner
      and g.grantee not in (select h.oid from harmless h
                            union all select w.oid from worker_role w where place.is_shared)
    union all
    select 4, format('function %I of the extension was altered, and it runs with more rights than its caller', i.name),
           format('find out who did so; then select outbox_internal.restore_function(%L)', i.name)
    from outbox_internal.installed_functions i left join outbox_internal.definer_functions f on f.name = i.name
    where f.digest is distinct from i.digest
    union all
    -- A trigger, a check, a default, a policy or a rule of a user. Their statements run as the owner of the table.
    select distinct 5,
           format('function %s runs in statements on %s, and sets no search_path: it finds other objects than those of'
                  ' pg_catalog only by names with their schema', p.oid::regprocedure, t.oid::regclass),
           format('alter function %s set search_path = %s', p.oid::regprocedure,
                  concat_ws(', ', 'pg_catalog', nullif(quote_ident(n.nspname), 'pg_catalog'),
                            (select quote_ident(place.nspname) from place where place.is_shared and place.oid <> n.oid),
                            'pg_temp'))
    from pg_class t join pg_depend a on a.refclassid = 'pg_class'::regclass and a.refobjid = t.oid and a.deptype = 'a'
    join pg_depend u on u.classid = a.classid and u.objid = a.objid and u.refclassid = 'pg_proc'::regclass
    join pg_proc p on p.oid = u.refobjid join pg_namespace n on n.oid = p.pronamespace
    join pg_language l on l.oid = p.prolang
    where t.relkind in ('r', 'p') and l.lanname not in ('internal', 'c') and p.prosqlbody is null
      and not exists (select from unnest(p.proconfig) c where c like 'search\_path=%')
      and not exists (select from pg_trigger d where a.classid = 'pg_trigger'::regclass and d.oid = a.objid and d.tgenabled = 'D')
      and not exists (select from pg_rewrite d where a.classid = 'pg_rewrite'::regclass and d.oid = a.objid and d.ev_enabled = 'D')
      and (exists (select from pg_depend d join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
                   where d.classid = 'pg_class'::regclass and d.objid = t.oid
                     and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e')
           or t.oid in (select i.inhrelid from pg_inherits i where i.inhparent = '@extschema@.outbox_history'::regclass))
  ) f
  order by f.rank, f.problem;
end;
comment on function outbox_internal.schema_problem() is
  'Functions in the schema of the extension that are named like its own but are not part of it, or that were altered.'
  ' Also roles that may create functions there or in outbox_internal, and functions of users in statements on the'
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

create function outbox_internal.setting_command(name text, value text, destination text default null)
returns text language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  select coalesce(
    (select format('ALTER SERVER %I OPTIONS (%s %I %L)', d.destination,
                   case when exists (select from unnest(d.options) o where starts_with(o, substr(name, 8) || '='))
                        then 'SET' else 'ADD' end, substr(name, 8), value)
     from outbox_internal.destinations() d where d.destination = $3 and d.server is not null),
    case when exists (
           select from pg_db_role_setting s join pg_database d on d.oid = s.setdatabase, unnest(s.setconfig) c
           where d.datname = current_database() and s.setrole = 0 and starts_with(c, name || '='))
         then format('ALTER DATABASE %I SET %s = %L', current_database(), name, value)
         else format('ALTER SYSTEM SET %s = %L; SELECT pg_reload_conf()', name, value) end);
end;
comment on function outbox_internal.setting_command(text, text, text) is
  'The command that changes a setting where it is set: for this database, or for the server; for a destination with a'
  ' server of its own, the option of that name.';

create function outbox_internal.mapping_remedy(destination text, problem text)
returns text language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  select case
    when problem like '% cannot read its user mapping %'
      then format('GRANT USAGE ON FOREIGN SERVER %I TO %s', destination,
                  substring(problem, '^(.*) cannot read its user mapping'))
    when problem like '% and none for %'
      then format('CREATE USER MAPPING FOR %s SERVER %I OPTIONS (signing_secret ''...'')',
                  substring(problem, ' and none for (.*)$'), destination)
    else format('fill it, because a dump of a role that may not read secrets leaves it empty: ALTER USER MAPPING FOR %1$s'
                ' SERVER %2$I OPTIONS (%3$s), or drop it if it needs none: DROP USER MAPPING FOR %1$s SERVER %2$I',
                substring(problem, '^the user mapping for (.*) is empty$'), destination,
                case when exists (select from outbox_internal.destinations() d
                                  where d.destination = $1 and d.wrapper = 'outbox_http')
                     then 'ADD signing_secret ''...''' else 'ADD user ''...'', ADD password ''...''' end) end;
end;
comment on function outbox_internal.mapping_remedy(text, text) is
  'The command that gives a worker the secrets of a destination whose user mapping it may not use.';

create view outbox_internal.connection_problems as
with destination as (
  select f.*, d.server is null as by_settings, d.wrapper is not distinct from 'outbox_http' as is_http, o.*, m.*,
         case when d.wrapper = 'outbox_http' then 'the receiver' else 'the broker' end as peer,
         case when o.has_url then format('the option url of server %I', d.destination) else 'outbox.url' end as url
  from (
    select distinct on (c.destination) c.destination, c.reason, c.detail, c.remedy from outbox_internal.connections c
    where c.is_live and (c.state in ('down', 'connecting', 'connected') and c.reason <> 'standby'
                         or c.state in ('starting', 'connecting'))
    order by c.destination, c.reason is null, c.state = 'connected') f
  left join outbox_internal.destinations() d on d.destination = f.destination
  cross join lateral (
    select coalesce(bool_or(x like 'url=%'), false) as has_url, coalesce(bool_or(x like 'tls\_ca=%'), false) as has_ca
    from unnest(d.options) x) o
  left join lateral (
    select case u.umuser when 0 then 'PUBLIC' else quote_ident(u.usename) end as role,
           -- Only superusers and owners see the options.
           u.umoptions is null and d.wrapper <> 'outbox_http'
             or exists (select from unnest(u.umoptions) x where x like 'password=%') as has_password,
           u.umoptions is null or exists (select from unnest(u.umoptions) x where x like 'bearer\_token=%') as has_token,
           exists (select from unnest(u.umoptions) x where x like 'headers=%') as has_headers,
           exists (select from unnest(u.umoptions) x where x like 'tls\_cert=%') as has_certificate
    from pg_user_mappings u
    where u.srvid = d.server and (u.umuser = 0 or u.usename = current_setting('outbox.worker_role'))
    order by u.umuser = 0 limit 1) m on true
)
select d.destination,
       format(coalesce(t.problem, case when d.reason is null then 'connecting to %s' else 'the connection to %s failed: ' end),
              d.peer, case when d.is_http then 'credentials' else 'user or password' end) || coalesce(d.detail, '') as problem,
       coalesce(d.remedy, case
         when d.reason is null then 'wait a few seconds'
         when d.reason = 'auth_refused' then case
           when d.role is not null
             then format('correct the credentials: ALTER USER MAPPING FOR %s SERVER %I OPTIONS (%s)', d.role, d.destination,
                         case when d.is_http and d.has_headers and not d.has_password and not d.has_token
                              then 'SET headers ''{"...": "..."}'''
                              when d.is_http and not d.has_password
                              then case when d.has_token then 'SET' else 'ADD' end || ' bearer_token ''...'''
                              else case when d.has_password then 'SET' else 'ADD' end || ' password ''...''' end)
           when d.is_http or d.has_url
             then format('name the credentials: CREATE USER MAPPING FOR %I SERVER %I OPTIONS (%s)',
                         current_setting('outbox.worker_role'), d.destination,
                         case when d.is_http then 'bearer_token ''...''' else 'user ''...'', password ''...''' end)
           when current_setting('outbox.password_file') = ''
             then 'write the password of the user in outbox.url into a file with mode 600 of the server''s user: '
                  || outbox_internal.setting_command('outbox.password_file', '/etc/postgresql/outbox.password')
           else format('correct the user in outbox.url, or the password in %s; a worker reads the file again by itself',
                       current_setting('outbox.password_file')) end
         when d.reason = 'tls_failed' and d.detail like '%client certificate%' then case
           when d.is_http or d.has_url
             then format('give its user mapping a client certificate and its key, as PEM texts: %s USER MAPPING FOR %s'
                         ' SERVER %I OPTIONS (%s)',
                         case when d.role is null then 'CREATE' else 'ALTER' end,
                         coalesce(d.role, quote_ident(current_setting('outbox.worker_role'))), d.destination,
                         case when d.has_certificate then 'SET tls_cert ''...'', SET tls_key ''...''' when d.role is null
                              then 'tls_cert ''...'', tls_key ''...''' else 'ADD tls_cert ''...'', ADD tls_key ''...''' end)
           else 'name a client certificate that the broker accepts, and its key: '
                || outbox_internal.setting_command('outbox.tls_cert_file', '/etc/postgresql/outbox.pem') || '; '
                || outbox_internal.setting_command('outbox.tls_key_file', '/etc/postgresql/outbox.key') end
         when d.reason = 'tls_failed' and (d.detail like '%the CA that it names%' or d.detail like '%a CA that is not trusted%')
           then case
             when d.is_http or d.has_ca
               then 'give the destination the CA of that certificate, as a PEM text: '
                    || outbox_internal.setting_command('outbox.tls_ca', '...', d.destination)
             else 'name the CA of that certificate: '
                  || outbox_internal.setting_command('outbox.tls_ca_file', '/etc/postgresql/outbox-ca.pem') end
         else format(coalesce(t.remedy, 'see the log of %s, and whether it is the one that %s names'), d.peer, d.url)
           || case
             when d.reason = 'timeout' and d.is_http and d.detail like 'no answer within %'
               then ', or give it more time: ' || outbox_internal.setting_command('outbox.timeout', '1min', d.destination)
             when d.reason = 'timeout' and d.detail like 'no confirm within %'
               then '; if both are well, see which queue does not answer: rabbitmqctl list_unresponsive_queues'
             when d.reason = 'address_refused'
               then outbox_internal.setting_command('outbox.http_allow', concat_ws(
                      ', ', nullif(current_setting('outbox.http_allow'), ''), split_part(d.detail, ' is ', 1)))
             -- The servers without the option have the type of the settings.
             when d.reason in ('exchange_missing', 'exchange_mismatch', 'exchange_type_unknown') and d.by_settings
                  and exists (
                    select from outbox_internal.destinations() x
                    where x.wrapper = 'outbox_amqp'
                      and not exists (select from unnest(x.options) y where y like 'exchange\_type=%'))
               then format('CREATE SERVER "default" FOREIGN DATA WRAPPER outbox_amqp OPTIONS (exchange_type %L)', t.type)
             when d.reason in ('exchange_missing', 'exchange_mismatch', 'exchange_type_unknown')
               then outbox_internal.setting_command('outbox.exchange_type', t.type, d.destination)
             when d.reason in ('unreachable', 'endpoint_refused', 'tls_failed')
               then outbox_internal.setting_command('outbox.url', '...', case when d.has_url then d.destination end)
             else '' end end) as remedy
-- The reason, what it means, what to do, and the type of exchange that the worker is to declare.
from destination d left join (values
  ('unreachable', '%s cannot be reached: ', 'start %s, or correct host and port: ', null),
  ('timeout', '%s does not answer: ', 'check the network and the load of %s', null),
  ('auth_refused', '%s refuses the %s: ', null, null),
  ('permission_denied', 'the user of the broker lacks a permission: ',
   'grant the user configure and write permission on the exchange', null),
  ('vhost_refused', 'the broker refuses the virtual host: ', 'check the path of %2$s and the user''s permissions', null),
  ('connection_limit', 'the broker takes no more connections: ',
   'close some connections (rabbitmqctl list_connections user vhost), or raise connection_max of the broker', null),
  ('process_limit', 'not tried, because a limit on this side is reached: ',
   'raise the limits of the processes of the server (LimitNOFILE and TasksMax of its unit of systemd, or ulimit -n and -u)'
   ' and restart it; a worker outside has its own', null),
  ('exchange_missing', 'the exchange does not exist: ',
   'declare the exchange and its bindings, or let the worker declare it: ', 'topic'),
  ('exchange_mismatch', 'the exchange exists, and ', 'let the worker only check that the exchange exists: ', ''),
  ('exchange_type_unknown', 'the broker does not know the type of the exchange: ',
   'enable the plugin of the type on the broker (rabbitmq-plugins list), or let the worker only check that the exchange'
   ' exists: ', ''),
  ('queue_refused', 'a queue behind the exchange refuses the messages: ',
   'see which queue is full: rabbitmqctl list_queues name messages policy arguments; consume its messages or raise its'
   ' max-length; delivery resumes by itself', null),
  ('unconfirmed', 'the broker is connected and does not confirm: ',
   'see which queue does not answer: rabbitmqctl list_unresponsive_queues; start the nodes that it needs, or delete it;'
   ' the worker sends unconfirmed messages again by itself', null),
  ('memory', 'messages wait for memory of the worker: ',
   'see which destinations hold it, and pause those that do not answer: select destination, in_flight from'
   ' outbox_destination_status order by in_flight desc; or raise outbox.workers', null),
  ('tls_failed', 'TLS with %s failed: ',
   'let %s present a certificate that is valid for the host in %s, or correct the URL: ', null),
  ('address_refused', 'the address is not public: ', 'if that is meant, allow it: ', null),
  ('endpoint_refused', 'the URL does not accept messages: ',
   'let the receiver take messages at this URL, or correct it: ', null),
  ('throttled', 'the receiver asks for fewer requests: ', 'nothing: delivery resumes when the receiver allows it', null),
  ('unavailable', 'the receiver reports that it is not available: ',
   'nothing here: delivery resumes when the receiver is available; see its log', null)
) t (reason, problem, remedy, type) on t.reason = d.reason;
comment on view outbox_internal.connection_problems is
  'Destinations that are not connected: why, and the command that ends it. Of a refusal of RabbitMQ the worker reports'
  ' the command.';

-- Found by their dependency, as pg_trigger has no index by function. tgtype: 2 = BEFORE, 4 + 8 + 16 = all writes of a row.
create view outbox_internal.trigger_problems as
with ours as materialized (
  select t.tgrelid, t.tgname, t.tgenabled, t.tgtype, f.proname = 'outbox_captured' as captures,
         convert_from(substr(t.tgargs, 1, octet_length(t.tgargs) - 1), getdatabaseencoding()) as settings,
         format('%I.%I', n.nspname, c.relname) as place
  from pg_extension x
  join pg_depend m on m.refclassid = 'pg_extension'::regclass and m.refobjid = x.oid and m.classid = 'pg_proc'::regclass
  join pg_proc f on f.oid = m.objid and f.proname in ('outbox_captured', 'outbox_attached')
  join pg_depend d on d.refclassid = 'pg_proc'::regclass and d.refobjid = f.oid and d.classid = 'pg_trigger'::regclass
  join pg_trigger t on t.oid = d.objid and t.tgnargs = 1
  join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace
  where x.extname = 'outbox'
)
select t.tgrelid,
       format('trigger %s of table %s %s: its rows are written without events',
              string_agg(quote_ident(t.tgname), ', ' order by t.tgname), t.place,
              case when bool_or(t.tgenabled = 'D') then 'is disabled' else 'fires in replication only' end) as problem,
       format('ALTER TABLE %s %s', t.place,
              string_agg(format('ENABLE TRIGGER %I', t.tgname), ', ' order by t.tgname)) as remedy
from ours t where t.tgenabled in ('D', 'R') group by t.tgrelid, t.place
union all
select t.tgrelid,
       format('table %s has lost a trigger of outbox_capture: %s makes no event', t.place,
              concat_ws(', ', case when t.covered & 4 = 0 then 'INSERT' end, case when t.covered & 16 = 0 then 'UPDATE' end,
                        case when t.covered & 8 = 0 then 'DELETE' end)),
       format('select outbox_capture(%L%s)', t.place,
              (select string_agg(format(', %s => %L', s.key, case jsonb_typeof(s.value)
                        when 'array' then array(select jsonb_array_elements_text(s.value))::text
                        else s.value #>> '{}' end), '' order by s.key)
               from jsonb_each(t.settings::jsonb) s))
from (select o.tgrelid, o.place, min(o.settings) as settings, bit_or(o.tgtype) as covered
      from ours o where o.captures and o.tgtype & 2 = 0 and o.settings like '%"aggregate_type"%'
      group by o.tgrelid, o.place) t
where t.covered & 28 <> 28;
comment on view outbox_internal.trigger_problems is
  'Tables of outbox_capture and outbox_attach of which a trigger is disabled or missing, and the command that ends it.';

-- The planner evaluates a setting that a condition compares with a column. In a session that has not loaded the library
-- yet the setting is unknown, so it may be missing.
create view outbox_internal.problems as
with connection as (
  select c.* from outbox_internal.connections c where c.is_live
), server as (
  select s.n[1]::boolean as preloaded, s.n[2] as obstacle, s.n[3]::integer as missing_slots, s.n[4] as missing_standbys,
         s.n[5] as connected_standbys,
         current_setting('outbox.worker_role') as worker_role, current_setting('outbox.workers')::integer as workers,
         exists (select from outbox_internal.live_workers) as has_worker
  from outbox_internal.shared_memory('server') s (n)
), fill as materialized ( -- its numbers are NULL if the server has no entry for the destination
  select d.destination, f.n[11]::bigint as pending, f.n[12]::bigint as most, f.n is null as is_uncounted
  from outbox_internal.destinations() d
  left join lateral outbox_internal.shared_memory('statistics', d.destination) f (n) on true
), waiting as materialized ( -- read once for all checks
  select f.destination, f.partition, f.seq, f.enqueued_at, f.is_blocked, f.is_stopped from outbox_internal.first_shown f
), own_table as (
  select t.oid, t.relname, format('%I.%I', n.nspname, t.relname) as name, t.relowner,
         t.relrowsecurity and t.relforcerowsecurity as is_secured
  from pg_class t join pg_namespace n on n.oid = t.relnamespace
  where t.relkind in ('r', 'p') and (
    exists (select from pg_depend d join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
            where d.classid = 'pg_class'::regclass and d.objid = t.oid
              and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e')
    or t.oid in (select i.inhrelid from pg_inherits i where i.inhparent = '@extschema@.outbox_history'::regclass))
), other_owner as (
  select x.type, x.name, r.rolname as worker_role
  from (select 'TABLE' as type, o.name, o.relowner as owner from own_table o
        union all
        select 'FUNCTION', p.oid::regprocedure::text, p.proowner
        from pg_extension x
        join pg_depend d on d.refclassid = 'pg_extension'::regclass and d.refobjid = x.oid and d.deptype = 'e'
        join pg_proc p on d.classid = 'pg_proc'::regclass and p.oid = d.objid
        where x.extname = 'outbox' and p.prosecdef) x
  join server s on true join pg_roles r on r.rolname = s.worker_role and r.oid <> x.owner
), foreign_trigger as (
  select t.tgname, t.tgtype, o.oid, o.name, o.relname from own_table o join pg_trigger t on t.tgrelid = o.oid
  where not t.tgisinternal and t.tgenabled <> 'D'
    and not exists (select from pg_depend d where d.classid = 'pg_proc'::regclass and d.objid = t.tgfoid
                    and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e')
)
select 'preload' as "check", null::text as destination,
       'outbox is not in shared_preload_libraries: no worker runs, messages wait' as problem,
       coalesce(
         (select 'ALTER SYSTEM SET shared_preload_libraries = '
                 || string_agg(quote_literal(btrim(l.name)), ', ' order by l.n) || '; then restart the server'
          from pg_settings p, unnest(string_to_array(concat_ws(',', nullif(p.setting, ''), 'outbox'), ','))
                 with ordinality l (name, n)
          where p.name = 'shared_preload_libraries'), -- which not every role sees
         'add outbox to shared_preload_libraries and restart the server') as remedy
from server s where not s.preloaded
union all
select 'enabled', null, 'outbox.enabled is off: messages wait', outbox_internal.setting_command('outbox.enabled', 'on')
where not current_setting('outbox.enabled')::boolean
union all
select 'standby', null, 'this server is a standby: nothing is delivered from here',
       'ask the primary; after a promotion the workers of this server start by themselves'
where pg_is_in_recovery()
union all
select 'version', null,
       format('the library that the server runs is of version %s, and the extension of this database is of version %s',
              v.library, v.sql),
       case when string_to_array(v.library, '.')::integer[] > string_to_array(v.sql, '.')::integer[]
            then 'ALTER EXTENSION outbox UPDATE'
            else 'install the library of the extension''s version and restart the server' end
from (select current_setting('outbox.library_version', true) as library, x.extversion as sql
      from pg_extension x where x.extname = 'outbox') v
where v.library <> v.sql
union all
select 'standbys', null,
       case when b.missing = '' and btrim(current_setting('outbox.standby_names')) = ''
              then 'outbox.publish_after is standby, and outbox.standby_names is empty: messages wait'
            when b.missing = ''
              then 'outbox.standby_names has a pattern, and outbox.standby_quorum is 0: messages wait, as nothing says how many'
                   ' standbys all of a pattern are'
            when b.missing is null then 'standbys are connected and behind: a worker ' || b.awaited
            when current_setting('outbox.standby_timeout') = '-1'
              then format('messages wait for standbys that are not connected: %s', b.missing) || b.others
            else format('standbys are not connected: %s; after %s messages are sent without them', b.missing,
                        current_setting('outbox.standby_timeout')) || b.others end,
       case when b.missing = '' and btrim(current_setting('outbox.standby_names')) = ''
              then 'name the standbys in outbox.standby_names, by their application_name'
            when b.missing = ''
              then 'set how many must have a commit: ' || outbox_internal.setting_command('outbox.standby_quorum', '1')
            when b.missing is null then 'see their flush_lsn in pg_stat_replication: network or disk is slow'
            else 'start them, or correct outbox.standby_names, for example if one was made again under another name; only direct'
                 ' standbys of this server count: those in its pg_stat_replication' end
from (select s.missing_standbys as missing, coalesce('; connected: ' || nullif(s.connected_standbys, ''), '') as others,
             (select min(c.detail) from connection c where c.reason = 'standby') as awaited
      from server s where not pg_is_in_recovery() and current_setting('outbox.publish_after', true) = 'standby') b
where b.missing is not null or b.awaited is not null
union all
select 'identity', null, 'nothing is delivered from this database until it is adopted: ' || a.why,
       'select outbox_adopt(), if this database, not the original, must deliver the waiting messages'
from outbox_internal.not_adopted() a (why) where a.why is not null
union all
select 'partitions', null,
       'outbox_settings has lost its row: nothing is published or delivered. If this database had a partitioner, name it, too',
       format('select outbox_configure(partition_count => %s, leasing => %L)',
              coalesce(nullif((select count(*) from @extschema@.outbox_partitions), 0)::text,
                       current_setting('outbox.partition_count')), current_setting('outbox.leasing'))
where not exists (select from @extschema@.outbox_settings)
union all
select 'partitions', null, format('%s of %s partitions have lost their row in outbox_partitions: their messages wait',
                                  s.partition_count - p.rows, s.partition_count),
       'select outbox_configure()'
from @extschema@.outbox_settings s cross join (select count(*) as rows from @extschema@.outbox_partitions) p
where p.rows < s.partition_count
union all
select 'partitions', null,
       format('messages are in partition %s, which does not exist: they came from a database with more partitions',
              outbox_internal.partition_label(p.highest)),
       format('select outbox_configure(partition_count => %s)', p.highest + 1)
from (select max(f.partition)::integer as highest from waiting f
      where f.partition >= (select s.partition_count from @extschema@.outbox_settings s)) p
where p.highest is not null
union all
select 'sequence', null,
       case when b.of_event
              then 'outbox_events has seq ' || b.seq || ', and its sequence has not given it out: publishing fails with 23505'
            when b.seq is not null
              then 'the seqs of outbox_events begin again, and were drawn up to ' || b.seq || ' before: new events get the'
                   ' history, the attempts and the dead letters of old ones'
            when q.seqcache > 1
              then 'each session draws ' || q.seqcache || ' seqs of outbox_events ahead: events of a key are sent out of order'
            else 'seqs of outbox_events do not always grow: events of a key are sent out of order' end,
       case when b.seq is not null
              then format('select setval(s, greatest(%s, nextval(s))) from (select %L::regclass) x (s)', b.seq,
                          '@extschema@.outbox_events_seq_seq')
            else 'alter sequence @extschema@.outbox_events_seq_seq increment 1 cache 1 no cycle' end
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
       case when r.rolname is null then format('role %I, which the workers run as, does not exist', s.worker_role)
            when r.rolsuper then format('role %I is a superuser: the workers do not run as a superuser', s.worker_role)
            else format('role %s is a member of %I, and could become a superuser', m.member, s.worker_role) end,
       case when r.rolname is null and not o.rolsuper
              then format('ALTER SYSTEM SET outbox.worker_role = %L; SELECT pg_reload_conf()', o.rolname)
            when r.rolname is null
              then format('CREATE ROLE %I and make it the owner of the tables of outbox and of its functions with SECURITY'
                          ' DEFINER; DROP EXTENSION would drop the messages', s.worker_role)
            when r.rolsuper then format('ALTER ROLE %I NOSUPERUSER', s.worker_role)
            else format('REVOKE %I FROM %s', s.worker_role, m.member) end
from server s left join pg_roles r on r.rolname = s.worker_role
join pg_class t on t.oid = '@extschema@.outbox'::regclass
join pg_roles o on o.oid = t.relowner
cross join lateral (
  select min(quote_ident(x.rolname)) as member from pg_auth_members g join pg_roles x on x.oid = g.member
  where g.roleid = r.oid and not x.rolsuper) m
where r.rolname is null or r.rolsuper or m.member is not null
union all
select 'schema', null, x.problem, x.remedy from (select s.* from outbox_internal.schema_problem() s limit 1) x
union all
-- Events may have triggers of others: what one changes or leaves out is no message yet.
select 'triggers', null, x.problem,
       x.undo || '; then a new lease sends again what stays in flight: select pg_terminate_backend(pid) from'
                 ' outbox_worker_status where alive'
from (
  select format('trigger %I of %s runs before each change of a row, and can undo it: messages may be lost, stuck or sent'
                ' again', t.tgname, t.name) as problem,
         format('ALTER TABLE %s DISABLE TRIGGER %I', t.name, t.tgname) as undo
  from foreign_trigger t where t.tgtype & 3 = 3 and t.relname <> 'outbox_events' -- BEFORE, FOR EACH ROW
  union all
  select format('rule %I of %s replaces changes of rows: messages may be lost, stuck or sent again', r.rulename, o.name),
         format('DROP RULE %I ON %s', r.rulename, o.name)
  from own_table o join pg_rewrite r on r.ev_class = o.oid where r.ev_enabled <> 'D'
  order by 1 limit 1) x
union all
select 'workers', null,
       case when h.pid is not null then format('%s hangs: its process %s wrote its last heartbeat at %s', h.worker_id, h.pid,
                                               date_trunc('seconds', h.heartbeat_at))
            when s.has_worker then case e.obstacle
              when 'time slices' then 'there are more databases than worker slots: this one is served in turn with others'
              else 'not every worker of this database runs: ' || o.problem end
            when s.workers = 0 then 'outbox.workers is 0: nothing is delivered'
            else 'no worker is alive in this database' || case e.obstacle
                   when 'time slices' then ' now: there are more databases than worker slots, so they are served in turn'
                   else coalesce(': ' || o.problem, '') end end,
       case when h.pid is not null
              then format('if it is stopped, kill -CONT %1$s at the shell of the server; else select pg_terminate_backend(%1$s)',
                          h.pid)
            when s.workers = 0 and not s.has_worker then outbox_internal.setting_command('outbox.workers', '1')
            when e.obstacle in ('slots', 'time slices')
              then format('raise max_worker_processes by %s or more and restart the server', s.missing_slots)
            when e.obstacle in ('entries', 'databases') then o.remedy
            when not s.preloaded then 'see the check "preload"'
            when e.obstacle = 'excluded'
              then outbox_internal.setting_command('outbox.databases', current_setting('outbox.databases') || ','
                                                                       || current_database())
            else coalesce(o.remedy, 'wait a few seconds; then search the server log for "outbox"') end
from server s left join (
  select w.worker_id, w.pid, w.heartbeat_at from @extschema@.outbox_workers w join pg_stat_activity a on a.pid = w.pid
  where w.worker_id like 'server-%' and w.heartbeat_until <= clock_timestamp() and not outbox_internal.has_ended(w.worker_id)
  order by w.worker_id limit 1) h on true
-- What the launcher does not start, and what ends a worker before it can report.
cross join lateral (
  select coalesce(case when d.datistemplate then 'template' when not d.datallowconn then 'closed'
                       when not has_database_privilege(r.oid, d.oid, 'CONNECT') then 'connect'
                       -- Later versions start a background worker without LOGIN.
                       when not r.rolcanlogin and current_setting('server_version_num')::integer < 170000 then 'login' end,
                  s.obstacle) as obstacle
  from pg_database d left join pg_roles r on r.rolname = s.worker_role where d.datname = current_database()) e
left join lateral (values
  ('slots', 'max_worker_processes is used up', null),
  ('entries', 'the server already has the most workers, 128',
   'lower outbox.workers, narrow outbox.databases, or end workers outside the server, and reload'),
  ('databases', 'the server already serves the most databases, 128',
   'drop a database, or close one with ALTER DATABASE ... ALLOW_CONNECTIONS false; databases without the extension count,'
   ' too'),
  ('excluded', 'outbox.databases does not name it', null),
  ('role', 'its role is missing or a superuser', 'see the check "role"'),
  ('template', 'it is a template, which no worker serves', format('ALTER DATABASE %I IS_TEMPLATE false', current_database())),
  ('closed', 'it is closed to connections', format('ALTER DATABASE %I ALLOW_CONNECTIONS true', current_database())),
  ('connect', format('role %I may not connect to it', s.worker_role),
   format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), s.worker_role)),
  ('login', format('role %I may not log in', s.worker_role),
   format('ALTER ROLE %I LOGIN CONNECTION LIMIT 0', s.worker_role))
) o (obstacle, problem, remedy) on o.obstacle = e.obstacle
where not pg_is_in_recovery()
  and (h.pid is not null or not s.has_worker or e.obstacle in ('slots', 'entries', 'time slices'))
union all
select 'destination', u.destination, u.detail,
       case when u.detail like '%password_file%'
              then 'make the file readable for the server''s user only, with the password as its first line, or name another'
                   ' one: ' || outbox_internal.setting_command('outbox.password_file', '...')
            when u.detail like '%outbox.tls\_%'
              then 'let the file be in PEM, and a key readable for the server''s user only, or name another one: '
                   || outbox_internal.setting_command(substring(u.detail, 'outbox.tls_\w+'), '...')
            when u.detail like '%user mapping%' then outbox_internal.mapping_remedy(u.destination, u.detail)
            when u.destination = 'default'
              then 'name the broker: ' || outbox_internal.setting_command('outbox.url', 'amqp://localhost')
            else format('ALTER SERVER %I OPTIONS (...); see docs/destinations.md', u.destination) end
from (select x.destination, min(x.detail) as detail
      from (select c.destination, c.detail from connection c where c.state = 'unconfigured'
            union all
            -- Also while no worker reports it, as in a restored database that is not adopted yet.
            select d.destination, outbox_internal.mapping_problem(d.server) from outbox_internal.destinations() d) x
      where x.detail is not null group by 1) u
where u.destination <> 'default' or u.detail like '%user mapping%' or current_setting('outbox.url') <> ''
   or (select count(*) from outbox_internal.destinations()) = 1
   or exists (select from waiting f where f.destination = 'default')
union all
select 'destination', 'default', 'outbox.url is empty: there is no broker to deliver to',
       'name the broker: ' || outbox_internal.setting_command('outbox.url', 'amqp://localhost')
where not exists (select from outbox_internal.live_workers) and current_setting('outbox.url') = ''
  and (select d.server from outbox_internal.destinations() d where d.destination = 'default') is null
union all
select 'destination', 'default',
       format('the server "default" does not count: its owner %I is no member of outbox_admin', pg_get_userbyid(s.srvowner)),
       'ALTER SERVER "default" OWNER TO outbox_admin, or DROP SERVER "default"'
from pg_foreign_server s join outbox_internal.wrappers w on w.oid = s.srvfdw
where s.srvname = 'default'
  and not pg_has_role(s.srvowner, 'outbox_admin', 'usage')
union all
select 'destination', m.destination, 'messages wait for this destination, which does not exist',
       coalesce(f.who || f.command, 'create it with CREATE SERVER')
       || format('; or discard them: select outbox_discard(seq, destination) from outbox_messages'
                 ' where destination = %L and status in (''ready'', ''blocked'', ''retrying'', ''scheduled'', ''dead'')',
                 m.destination)
from (select distinct f.destination from waiting f where not f.is_blocked
      except select d.destination from outbox_internal.destinations() d) m
left join outbox_internal.former_servers f on f.destination = m.destination
union all
select 'destination', d.destination, d.not_adopted || ': its messages wait',
       format('select outbox_adopt(destination => %L), if this server may have them', d.destination)
from outbox_internal.destinations() d where d.not_adopted is not null
union all
select 'destination', s.destination, 'it is subscribed, and does not exist: no event goes there',
       concat_ws('; or ', format('select outbox_unsubscribe(%L)', s.destination), f.who || f.command)
from @extschema@.outbox_subscriptions s left join outbox_internal.former_servers f on f.destination = s.destination
where s.destination not in (select d.destination from outbox_internal.destinations() d)
union all
select 'destination', n.destination, format('notices of its dead letters do not reach %s: %s', n.receiver, n.problem), n.remedy
from outbox_internal.notice_receivers n where n.problem is not null
union all
select 'database', null,
       format('%s%s must belong to %I, the role of the workers: what uses them fails',
              array_to_string((array_agg(o.name order by o.type desc, o.name))[1:3], ', '),
              case when count(*) > 3 then format(' and %s more', count(*) - 3) end, o.worker_role),
       string_agg(format('ALTER %s %s OWNER TO %I', o.type, o.name, o.worker_role), '; ' order by o.type desc, o.name)
from other_owner o group by o.worker_role
union all
select f."check", null, f.problem,
       coalesce('undo what the error names, for example: ' || (
         select c.command
         from (
           select 1 as rank, format('GRANT CREATE ON SCHEMA %I TO %I', n.nspname, r.rolname) as command
           from pg_extension x join pg_namespace n on n.oid = x.extnamespace join pg_roles r on r.rolname = s.worker_role
           where x.extname = 'outbox' and f."check" = 'maintenance' and not has_schema_privilege(r.oid, n.oid, 'CREATE')
           union all
           select 2, format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY', o.name) from own_table o where o.is_secured
           union all
           select 3, format('ALTER TABLE %s DISABLE TRIGGER %I', t.name, t.tgname) from foreign_trigger t) c
         order by c.rank, c.command limit 1),
         'undo what the error names: no row security, trigger or event trigger of others may refuse statements of '
         || s.worker_role) || '; the log of the server has the whole error'
from server s, (
  -- A worker tries again after half a second; what ends within a few tries is no problem.
  (select 'database' as "check", 'a statement of a worker fails: ' || e.n[3] as problem
   from outbox_internal.shared_memory('errors') e (n)
   where e.n[2] = 'database' and e.n[4]::bigint > 3
     and to_timestamp(e.n[6]::double precision / 1e6) > clock_timestamp() - interval '10 seconds'
   order by e.n[6]::bigint desc limit 1)
  union all
  -- Maintenance runs once a minute, and its last answer stands until then.
  (select 'maintenance', format('it has failed since %s: %s', date_trunc('seconds', to_timestamp(t.n[1]::double precision / 1e6)),
                                t.n[2])
   from outbox_internal.shared_memory('failed tasks') t (n) order by t.n[1]::bigint limit 1)) f
where not exists (select from other_owner)
union all
select 'source', null, p.problem,
       coalesce('messages wait until it can be read: correct it, or name its columns again: select outbox_source_set('
         || (select quote_literal(s.relation) || string_agg(format(', %s => %L', c.name, to_jsonb(s) ->> c.name), '' order by c.n)
             from @extschema@.outbox_source s,
                  unnest('{seq,type,created_at,id,aggregate_type,aggregate_id,operation,payload,previous_payload,metadata,'
                         'headers,actor,correlation_id,key}'::text[]) with ordinality c (name, n)
             where to_jsonb(s) ->> c.name is not null
             group by s.relation) || ')',
         'select outbox_source_reset(), or outbox_source_set() for the same relation')
from (select outbox_internal.source_problem() as problem) p where p.problem is not null
union all
select 'capture', null, string_agg(t.problem, '; '), string_agg(t.remedy, '; ')
from (select x.* from outbox_internal.trigger_problems x order by x.tgrelid limit 3) t having count(*) > 0
union all
select 'paused', z.destination,
       format('%s by %s since %s%s', case when b.busy then format('pausing, %s in flight, paused', coalesce(f.n[1], '0'))
                                          else 'paused' end,
              z.paused_by, date_trunc('seconds', z.since), coalesce(': ' || z.reason, '')),
       format('select outbox_resume(%L)', z.destination)
from @extschema@.outbox_paused z
left join lateral outbox_internal.shared_memory('statistics', z.destination) f (n) on true
cross join lateral (select exists (select from connection c where c.destination = z.destination
                                   and c.state not in ('paused', 'not adopted')) as busy) b
union all
select 'broker', c.destination, c.problem, c.remedy from outbox_internal.connection_problems c
union all
select 'blocked', c.destination, 'the broker blocks publishers: ' || coalesce(min(c.detail), ''),
       coalesce(min(c.remedy), 'see rabbitmq-diagnostics alarms on the broker') || '; delivery resumes by itself'
from connection c where c.state = 'blocked' group by c.destination
union all
select 'retrying', null,
       format('%s message(s) have failed three times or more, for example seq %s to %s, since %s: %s',
              case when r.n = 10000 then '10000 or more' else r.n::text end, w.seq, w.destination,
              date_trunc('seconds', w.enqueued_at), w.last_error),
       'select seq, destination, attempts, last_error from outbox_messages where status = ''retrying''; correct the cause,'
       ' then outbox_retry(seq, destination) tries immediately'
from (select x.* from @extschema@.outbox_waiting x where x.state = 'b' and x.attempts >= 3 order by x.seq limit 1) w
cross join (select count(*) as n from (select from @extschema@.outbox_waiting x
                                       where x.state = 'b' and x.attempts >= 3 limit 10000) x) r
union all
select 'dead letters', null,
       format('%s dead letter(s), for example: %s', case when c.dead = 10000 then '10000 or more' else c.dead::text end,
              (select d.reason from @extschema@.outbox_dead d
               where d.seq = (select n[1]::bigint from outbox_internal.shared_memory('first dead letters') f (n)) limit 1)),
       'select * from outbox_dead; then outbox_retry(seq, destination) or outbox_discard(seq, destination)'
from outbox_internal.dead_counts c where c.dead > 0
union all
select 'keys', null,
       format('%s key(s) are blocked by a dead letter, for example: %s (seq %s)',
              case when c.blocking = 10000 then '10000 or more' else c.blocking::text end,
              case when exists (select from outbox_internal.destinations() x
                                where x.destination = d.destination and 'ordering=partition' = any (x.options))
                   then 'partition ' || outbox_internal.partition_label(d.partition::integer) else d.key end, d.seq),
       format('select outbox_retry(%s, %2$L), or outbox_discard(%1$s, %2$L), unblocks the key; with outbox.on_dead = skip none'
              ' blocks', d.seq, d.destination)
from outbox_internal.dead_counts c
left join lateral (
  select x.* from @extschema@.outbox_dead x
  where x.blocks and x.seq = (select n[2]::bigint from outbox_internal.shared_memory('first dead letters') f (n))
  limit 1) d on true
where c.blocking > 0
union all
select 'room', p.destination,
       format('%s of %s messages pending: %s', p.pending, p.most,
              case when p.pending >= p.most then 'the queue is full, enqueue is refused' else 'the queue is nearly full' end),
       'see the other checks for why they wait; or raise the limit: '
         || outbox_internal.setting_command('outbox.max_pending', (2 * p.most)::text, p.destination)
from fill p where p.pending >= 0.9 * p.most
union all
select 'room', null,
       format('%s destination(s) have neither statistics nor max_pending, for example %s: the server has room for those of'
              ' 4096', count(*), min(p.destination)),
       'drop destinations that get no messages any more, or move a database to another server'
from fill p where p.is_uncounted and exists (
  select from connection c where c.destination = p.destination and c.worker_id like 'server-%')
having count(*) > 0
union all
select 'transactions', null,
       string_agg(case when t.prepared
         then format('transaction %s has been prepared for %s', t.xid, date_trunc('seconds', t.age))
         else format('the session with pid %s (%s) has enqueued and not ended for %s%s', t.pid,
                     concat_ws(', ', t.usename, nullif(t.application_name, '')), date_trunc('seconds', t.age),
                     ', last statement: ' || nullif(substr(regexp_replace(t.query, '\s+', ' ', 'g'), 1, 100), '')) end, '; '),
       min(case when t.gid is not null then format('COMMIT PREPARED %1$L, or ROLLBACK PREPARED %1$L', t.gid)
                when t.prepared then 'COMMIT PREPARED or ROLLBACK PREPARED; see pg_prepared_xacts'
                else format('later messages of its keys wait for it: end it, or select pg_terminate_backend(%s)', t.pid) end)
from (select x.*, g.gid, a.usename, a.application_name, a.query
      from outbox_internal.open_transactions x
      left join pg_stat_activity a on a.pid = x.pid and not x.prepared
      left join pg_prepared_xacts g on g.transaction = x.xid and x.prepared
      where x.age > case when x.prepared then interval '1 minute' else interval '30 seconds' end
      order by x.age desc limit 3) t
having count(*) > 0
union all
-- The lease has run out, so its worker has not renewed it, and an open transaction has the row locked: that of the worker,
-- if it hangs while it settles. Partitions first: such rows are rare, and pg_locks is expensive.
select 'locks', null,
       format('process %s%s has had rows of outbox_partitions locked since %s: no other worker can take over %s partition(s)',
              h.pid, ' (' || h.kind || ')', date_trunc('seconds', h.since), h.partitions),
       format('if it is stopped, kill -CONT %1$s at the shell of the server; else select pg_terminate_backend(%1$s)', h.pid)
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
       format('the oldest message that can be delivered, seq %s, has waited for %s%s', s.seq,
              date_trunc('seconds', s.age), ': ' || case
                when h.gid is not null then format('a prepared transaction has it locked: %s', h.gid)
                when h.pid is not null
                  then format('the session with pid %s (%s) keeps the workers waiting by its locks%s', h.pid, h.who,
                              ', last statement: ' || substr(regexp_replace(h.query, '\s+', ' ', 'g'), 1, 100))
                when r.most is not null then format('its destination may take at most %s a second', r.most) end),
       case when h.gid is not null then format('COMMIT PREPARED %1$L, or ROLLBACK PREPARED %1$L', h.gid)
            when h.pid is not null then format('end its transaction, or select pg_terminate_backend(%s)', h.pid)
            when r.most is not null
              then 'if it can take more: '
                   || outbox_internal.setting_command('outbox.max_rate', (2 * r.most)::text, s.destination)
            else format('see the other checks; if all are ok, the workers, or what they deliver to, are too slow: %s; or raise'
                        ' outbox.batch_size',
                        outbox_internal.setting_command('outbox.workers',
                                                        (current_setting('outbox.workers')::integer + 1)::text)) end
from (
  select f.destination, f.partition, f.seq, statement_timestamp() - f.enqueued_at as age from waiting f
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
  select m.most from outbox_internal.destinations() d
  cross join lateral outbox_internal.shared_memory('statistics', d.destination) f (n)
  cross join lateral (
    select coalesce((select substr(o, 10) from unnest(d.options) o where o like 'max\_rate=%'),
                    current_setting('outbox.max_rate', true))::bigint as most) m
  -- A worker does not pass the rest of its share on to others.
  where d.destination = s.destination and m.most > 0
    and f.n[6]::double precision / 60 >= 0.9 * m.most / greatest(1, (
      select count(*) from @extschema@.outbox_workers w where w.heartbeat_until > clock_timestamp()))) r on true;
comment on view outbox_internal.problems is
  'What is wrong: the check that finds it, the destination if it is one, the problem, the remedy.';

create view @extschema@.outbox_health as
select c.name as "check", p.destination, p.problem is null as ok, p.problem collate "default" as problem, p.remedy
from unnest('{preload,enabled,standby,version,standbys,identity,partitions,sequence,role,schema,triggers,workers,destination,database,'
            'maintenance,source,capture,paused,broker,blocked,retrying,dead letters,keys,room,transactions,locks,lag}'::text[])
       with ordinality c (name, n)
left join outbox_internal.problems p on p."check" = c.name
order by c.n, p.destination;
comment on view @extschema@.outbox_health is
  'One row a check, and one row a destination where a check finds several: ok or not, the problem, the remedy.';
