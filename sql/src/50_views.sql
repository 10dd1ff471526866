-- Views for people and monitoring. The delivery uses none of them.
-- Superusers read these views. So a view must not call a function by a name that another role may have overloaded (see
-- 90_privileges.sql). SQL functions that the views call have a body with BEGIN ATOMIC, bound when it is created.

create function outbox_internal.is_preloaded()
returns boolean language c stable as 'MODULE_PATHNAME', 'outbox_is_preloaded_wrapper';
comment on function outbox_internal.is_preloaded() is
  'The copy of outbox_is_preloaded() that outbox_health calls.';
create function @extschema@.outbox_is_preloaded()
returns boolean language c stable as 'MODULE_PATHNAME', 'outbox_is_preloaded_wrapper';
comment on function @extschema@.outbox_is_preloaded() is
  'Whether the server was started with outbox in shared_preload_libraries.';

create function outbox_internal.counters()
returns bigint[] language c volatile as 'MODULE_PATHNAME', 'outbox_counters_wrapper';
comment on function outbox_internal.counters() is
  'Counters of this database from shared memory, read by outbox_status; NULL when not preloaded.';

create function outbox_internal.destination_stats(destination text)
returns double precision[] language c volatile strict as 'MODULE_PATHNAME', 'outbox_destination_stats_wrapper';
comment on function outbox_internal.destination_stats(text) is
  'Statistics of a destination from shared memory, read by outbox_destination_status; NULL = no worker counts.';

create function outbox_internal.missing_slots()
returns integer language c stable as 'MODULE_PATHNAME', 'outbox_missing_slots_wrapper';
comment on function outbox_internal.missing_slots() is
  'The number of workers, of all databases, that find no slot of max_worker_processes.';

create function outbox_internal.server_state()
returns text language c stable as 'MODULE_PATHNAME', 'outbox_server_state_wrapper';
comment on function outbox_internal.server_state() is
  'One word for why the launcher runs no worker for this database; NULL = it runs one, or does not know yet.';

create function outbox_internal.registry()
returns bigint[] language c volatile as 'MODULE_PATHNAME', 'outbox_registry_wrapper';
comment on function outbox_internal.registry() is
  'Open transactions that have enqueued in this database, from shared memory. Four numbers for each: pid or 0, xid or'
  ' 0, start in microseconds since 1970, lowest seq.';

create function outbox_internal.error_groups()
returns text[] language c volatile as 'MODULE_PATHNAME', 'outbox_error_groups_wrapper';
comment on function outbox_internal.error_groups() is
  'Failures of this database from shared memory, 7 texts a group, read by outbox_errors; NULL when not preloaded.';

create function outbox_internal.open_transactions(
  out pid integer, out xid xid, out prepared boolean, out age interval, out low bigint
) returns setof record language sql volatile set search_path = pg_catalog, pg_temp
begin atomic
  select nullif(r.entries[i], 0)::integer, nullif(r.entries[i + 1], 0)::text::xid, r.entries[i] = 0,
         greatest(clock_timestamp() - to_timestamp(r.entries[i + 2] / 1e6), interval '0'), r.entries[i + 3]
  from (select outbox_internal.registry() as entries) r, generate_series(1, cardinality(r.entries), 4) i;
end;
comment on function outbox_internal.open_transactions() is
  'The copy of outbox_open_transactions() that outbox_health calls.';
create function @extschema@.outbox_open_transactions(
  out pid integer, out xid xid, out prepared boolean, out age interval, out low bigint
) returns setof record language sql volatile
begin atomic
  select t.pid, t.xid, t.prepared, t.age, t.low from outbox_internal.open_transactions() t;
end;
comment on function @extschema@.outbox_open_transactions() is
  'Open transactions of this database that have enqueued messages. Later messages of their keys wait for them.';

create view @extschema@.outbox_messages as
with m as (
  select o.seq, o.destination, o.partition, o.key,
         case when outbox_internal.claim_is_live(o.claim_token, o.partition, o.claim_until)
                or outbox_internal.is_taken(o.destination, o.partition, o.seq) then 'in flight'
              else 'ready' end as status,
         o.attempts, o.enqueued_at as available_at, o.enqueued_at, null::timestamptz as published_at, o.claim_token,
         o.last_error, o.replayed, o.expires_at
  from @extschema@.outbox o
  union all
  select w.seq, w.destination, w.partition, w.key,
         case w.state when 'b' then 'retrying' when 'g' then 'blocked' else 'scheduled' end,
         w.attempts, w.due_at, w.enqueued_at, null, null, w.last_error, w.replayed, w.expires_at
  from @extschema@.outbox_waiting w
  union all
  select d.seq, d.destination, d.partition, d.key, 'dead', d.attempts, null, d.enqueued_at, null, null, d.reason,
         d.replayed, d.expires_at
  from @extschema@.outbox_dead d
  union all
  select h.seq, h.destination, h.partition, h.key, case when h.discarded then 'discarded' else 'published' end,
         h.attempts, null, h.enqueued_at, case when not h.discarded then h.published_at end, null, h.last_error,
         h.replayed, null
  from @extschema@.outbox_history h
)
select m.seq, m.seq as global_sequence, m.status,
       case m.status when 'published' then 'PUBLISHED' when 'dead' then 'FAILED' when 'discarded' then 'FAILED'
                     else 'PENDING' end as reference_status,
       m.destination, outbox_internal.partition_label(m.partition::integer) as partition_key, m.key,
       m.attempts, m.available_at, m.enqueued_at, m.published_at, m.claim_token, m.last_error, m.replayed,
       e.id, e.type, e.aggregate_type, e.aggregate_id, e.operation, e.payload, e.previous_payload, e.metadata,
       e.headers, e.actor, e.correlation_id, e.created_at,
       -- the names of the same columns in other systems
       e.id as outbox_id, e.type as event_type, e.payload as body, e.actor as "user", m.destination as transport_name,
       m.attempts as retry_count, m.last_error as error_message,
       m.expires_at
-- With outbox_source_set() the events are in the user's relation, under the user's rights.
from m left join @extschema@.outbox_events e on e.seq = m.seq and not exists (select from @extschema@.outbox_source);
comment on view @extschema@.outbox_messages is
  'Every message with its event and one status: ready, in flight, retrying, blocked, scheduled (together: pending),'
  ' published, dead, discarded. For people and audits: filter by seq, or use LIMIT.';

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

create view outbox_internal.first_that_could_go as
select f.* from outbox_internal.first_pending f
where not exists (select from outbox_internal.blocked_lanes() l
                  where l.destination = f.destination and l.partition = f.partition and l.blocker < f.seq);
comment on view outbox_internal.first_that_could_go is
  'first_pending without the lanes that are blocked by a message that failed.';

create function outbox_internal.nothing_waits()
returns boolean language c stable as 'MODULE_PATHNAME', 'outbox_nothing_waits_wrapper';
comment on function outbox_internal.nothing_waits() is
  'Whether the counters of this database are valid and say that no message waits.';

create function outbox_internal.first_waiting()
returns text[] language c stable as 'MODULE_PATHNAME', 'outbox_first_waiting_wrapper';
comment on function outbox_internal.first_waiting() is
  'Four texts for each lane with messages in outbox: destination, partition, seq of the first message, and when it was'
  ' enqueued, in microseconds since 1970. Read by first_shown.';

create view outbox_internal.stopped_destinations as
select z.destination from @extschema@.outbox_paused z
union
select c.destination
from @extschema@.outbox_connections c join @extschema@.outbox_workers w on w.worker_id = c.worker_id
where w.heartbeat_until > pg_catalog.clock_timestamp() and not outbox_internal.has_ended(w.worker_id)
group by c.destination
having pg_catalog.bool_and(c.state in ('down', 'blocked', 'unconfigured', 'pausing', 'paused', 'not adopted'));
comment on view outbox_internal.stopped_destinations is
  'Destinations to which no worker can deliver now: paused, or the connection of each live worker is down, blocked or'
  ' unconfigured.';

-- For views that are read often. A scan of a lane from its start would read all ended messages that a held snapshot
-- keeps. first_waiting() remembers in shared memory where each lane begins. It is not called if nothing waits.
create view outbox_internal.first_shown as
select f.*, exists (select from outbox_internal.blocked_lanes() l
                    where l.destination = f.destination and l.partition = f.partition
                      and l.blocker < f.seq) as is_blocked,
       f.destination in (select z.destination from outbox_internal.stopped_destinations z)
         or f.destination not in (select d.destination from outbox_internal.destinations() d) as is_stopped
from (select w.t[i] collate "C" as destination, w.t[i + 1]::smallint as partition, w.t[i + 2]::bigint as seq,
             pg_catalog.to_timestamp(w.t[i + 3]::double precision / 1e6) as enqueued_at
      -- OFFSET 0: called once a row, its result would change while the row is read.
      from (select outbox_internal.first_waiting() as t offset 0) w,
           pg_catalog.generate_series(1, pg_catalog.cardinality(w.t), 4) i) f
where not (select outbox_internal.nothing_waits());
comment on view outbox_internal.first_shown is
  'The rows of first_pending, at a cost that does not grow with the queue. They are the first message of outbox in'
  ' each lane (destination, partition). is_blocked = it waits behind a message that failed. is_stopped = its'
  ' destination is stopped or does not exist.';

create view outbox_internal.beyond_sequence as
select e.seq
from (select pg_catalog.max(x.seq) as seq from @extschema@.outbox_events x) e, @extschema@.outbox_events_seq_seq q
where q.is_called and e.seq > q.last_value; -- a sequence that nobody uses is behind whatever others insert
comment on view outbox_internal.beyond_sequence is
  'The highest seq of outbox_events, if its sequence has not given it out: rows were copied without the sequence.';

create function outbox_internal.first_dead(blocks boolean)
returns bigint language c stable strict as 'MODULE_PATHNAME', 'outbox_first_dead_wrapper';
comment on function outbox_internal.first_dead(boolean) is
  'The seq of the first dead letter, or of the first that blocks others; read by outbox_health.';

-- Counts the table only if shared memory has no count: a held snapshot keeps the rows of dead letters that were
-- retried or discarded.
create view outbox_internal.dead_counts as
select coalesce(case when c.counters[8] > 10000 then 10000 else c.counters[8] end,
                (select pg_catalog.count(*) from (select from @extschema@.outbox_dead limit 10000) d)) as dead,
       coalesce(case when c.counters[9] > 10000 then 10000 else c.counters[9] end,
                (select pg_catalog.count(*)
                 from (select from @extschema@.outbox_dead d where d.blocks limit 10000) d)) as blocking
from (select pg_catalog.array_replace(outbox_internal.counters(), -1::bigint, null::bigint) as counters) c;
comment on view outbox_internal.dead_counts is
  'The number of dead letters, and of those that block others. Both stop at 10000.';

create view @extschema@.outbox_status as
select case when c.counters[1] < 0 then 0 else c.counters[1] end as pending, -- NULL = not preloaded
       c.counters[2] as in_flight,
       (select d.dead from outbox_internal.dead_counts d) as dead,
       -- No volatile function here: it would be called even for a query of other columns.
       (select pg_catalog.statement_timestamp() - pg_catalog.min(o.enqueued_at) from outbox_internal.first_shown o
        where not o.is_blocked and not o.is_stopped) as oldest_pending_age,
       c.counters[3] as published_total,
       c.counters[4] as failed_total,
       pg_catalog.trim_scale(pg_catalog.round(c.counters[5] / 60.0, 3)) as published_per_s,
       pg_catalog.trim_scale(pg_catalog.round(c.counters[6] / 60.0, 3)) as failed_per_s,
       pg_catalog.to_timestamp(c.counters[7] / 1e6) as stats_reset
from (select outbox_internal.counters() as counters) c;
comment on view @extschema@.outbox_status is
  'One row, at a cost that does not grow with the queue. It has the messages pending (all that have not ended), in'
  ' flight and dead (up to 10000), and the age of the oldest that can be delivered now. It has totals since'
  ' stats_reset, and rates of the last minute.';

create view @extschema@.outbox_worker_status as
select w.worker_id, w.pid, coalesce(c.state, 'starting') as state, c.reason,
       case when n.failing > 0 and n.failing < n.destinations
            then pg_catalog.format('%s of %s destinations down', n.failing, n.destinations)
            else c.detail end as detail,
       w.heartbeat_until > pg_catalog.clock_timestamp() and not outbox_internal.has_ended(w.worker_id) as alive,
       pg_catalog.date_trunc('milliseconds', w.heartbeat_until - pg_catalog.clock_timestamp()) as heartbeat_ttl,
       (select pg_catalog.count(*) from @extschema@.outbox_partitions p
        where p.lease_owner = w.worker_id and p.lease_until > pg_catalog.clock_timestamp()) as partitions,
       w.started_at, n.destinations, n.failing as destinations_down
from @extschema@.outbox_workers w
cross join lateral (
  select pg_catalog.count(*) as destinations,
         pg_catalog.count(*) filter (where x.state in ('down', 'blocked', 'unconfigured')) as failing
  from @extschema@.outbox_connections x
  where x.worker_id = w.worker_id and (x.destination, x.state) <> ('default', 'unconfigured')) n
left join lateral ( -- the worst state, unless only some destinations fail
  select x.state, x.reason, x.detail from @extschema@.outbox_connections x where x.worker_id = w.worker_id
  order by n.destinations > 0 and (x.destination, x.state) = ('default', 'unconfigured'),
           x.state in ('down', 'blocked', 'unconfigured'),
           pg_catalog.array_position(
             '{down,blocked,unconfigured,connecting,starting,connected,not adopted,pausing,paused}'::text[], x.state),
           x.reason is null, x.destination = 'default' desc, x.destination limit 1) c on true;
comment on view @extschema@.outbox_worker_status is
  'One row a worker: whether it is alive, the state of its connections, and the number of its partitions. Also the'
  ' number of its destinations, and of those that it cannot reach. state = down only if it can reach none.';

create view @extschema@.outbox_destination_status as
with live as (
  select c.* from @extschema@.outbox_connections c join @extschema@.outbox_workers w on w.worker_id = c.worker_id
  where w.heartbeat_until > pg_catalog.clock_timestamp() and not outbox_internal.has_ended(w.worker_id)
), pending as (
  select p.destination, pg_catalog.min(p.enqueued_at) as oldest
  from outbox_internal.first_shown p where not p.is_blocked group by 1
)
select coalesce(d.destination, p.destination) as destination,
       case when d.destination is null then null when d.wrapper is null then 'settings' else d.wrapper end
         as described_by,
       case when d.destination is null then 'missing'
            when d.paused then case when b.busy then 'pausing' else 'paused' end
            else coalesce(c.state, 'not served') end as state,
       coalesce(z.since, c.since) as since,
       case when d.paused then null else c.reason end as reason,
       case when d.paused then pg_catalog.concat_ws(
              ': ', case when b.busy then coalesce(f.n[1], 0)::text || ' in flight, ' else '' end
                    || 'paused by ' || z.paused_by, z.reason)
            else c.detail end as detail,
       pg_catalog.date_trunc('milliseconds', pg_catalog.clock_timestamp() - p.oldest) as oldest_pending_age,
       f.n[1]::bigint as in_flight, f.n[2]::bigint as published_total, f.n[3]::bigint as failed_total,
       f.n[4]::bigint as dead_total, f.n[5]::bigint as released_total,
       pg_catalog.trim_scale(pg_catalog.round((f.n[6] / 60)::numeric, 3)) as published_per_s,
       pg_catalog.round(f.n[8]::numeric, 2) as p50_ms, pg_catalog.round(f.n[9]::numeric, 2) as p95_ms,
       pg_catalog.round(f.n[10]::numeric, 2) as p99_ms,
       pg_catalog.to_timestamp(f.n[7] / 1e6) as stats_reset,
       f.n[11]::bigint as pending, f.n[12]::bigint as max_pending
from outbox_internal.destinations() d
full join pending p on p.destination = d.destination
left join @extschema@.outbox_paused z on z.destination = d.destination
left join lateral (
  select l.state, l.since, l.reason, l.detail from live l where l.destination = d.destination
  order by pg_catalog.array_position(
             '{down,blocked,unconfigured,connecting,starting,connected,not adopted,pausing,paused}'::text[], l.state),
           l.reason is null, l.since
  limit 1) c on true
left join lateral (select outbox_internal.destination_stats(d.destination) as n) f on true
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
       case when p.lease_until > pg_catalog.clock_timestamp() then p.lease_owner end as lease_owner,
       case when p.lease_until > pg_catalog.clock_timestamp()
            then pg_catalog.date_trunc('milliseconds', p.lease_until - pg_catalog.clock_timestamp()) end as lease_ttl,
       p.lease_epoch, p.updated_at,
       f.seq as first_waiting_seq,
       case when p.lease_until > pg_catalog.clock_timestamp() then p.lease_until end as lease_until
from @extschema@.outbox_partitions p
left join (select x.partition, pg_catalog.min(x.seq) as seq from outbox_internal.first_shown x group by 1) f
  on f.partition = p.partition;
comment on view @extschema@.outbox_partition_status is
  'One row a partition: its lease and the first message that waits in it.';

create function outbox_internal.definer_functions(out name text, out digest text)
returns setof record language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  select p.proname::text, encode(sha256(convert_to(concat_ws(' ', p.prosrc, p.proconfig::text), 'UTF8')), 'hex')
  from pg_proc p join pg_depend d on d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e'
  join pg_extension x on d.refclassid = 'pg_extension'::regclass and x.oid = d.refobjid and x.extname = 'outbox'
  where p.prosecdef;
end;
comment on function outbox_internal.definer_functions() is
  'The functions of the extension that run as its owner, with a digest of body and settings.';

-- 90_privileges.sql replaces it, when all functions exist.
create function outbox_internal.installed_functions() returns jsonb
language sql immutable parallel safe set search_path = pg_catalog, pg_temp return '{}'::jsonb;
comment on function outbox_internal.installed_functions() is
  'definer_functions() as it was when this version was installed.';

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
    select 4, format('function %I of the extension was altered, and it runs with more rights than its caller', i.key),
           format('find out who did so; then select outbox_internal.restore_function(%L)', i.key)
    from jsonb_each_text(outbox_internal.installed_functions()) i
    left join outbox_internal.definer_functions() f on f.name = i.key
    where f.digest is distinct from i.value
  ) f
  order by f.rank, f.problem;
end;
comment on function outbox_internal.schema_problem() is
  'Functions in the schema of the extension that are named like its own but are not part of it, or that were altered.'
  ' Also roles that may create functions there or in outbox_internal. outbox_health shows the first.';

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
    and outbox_internal.installed_functions() ? p.proname; -- others are altered by statements further down
  execute format('create or replace %s%s', head,
                 split_part(split_part(script, 'create ' || head, 2), E'\ncomment on function ', 1));
  perform outbox_internal.set_plans();
end
$$;
comment on function outbox_internal.restore_function(text) is
  'Makes a function that runs as its owner again as the install script has it. For superusers; outbox_health names it.';

create function outbox_internal.missing_standbys()
returns text language c stable as 'MODULE_PATHNAME', 'outbox_missing_standbys_wrapper';
comment on function outbox_internal.missing_standbys() is
  'The standbys that messages wait for and that are not connected; empty = none is named. NULL = no message waits for'
  ' a standby.';

create function outbox_internal.standby_problem(awaited text, out problem text, out remedy text)
returns record language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  names text;
begin
  if pg_is_in_recovery() or current_setting('outbox.publish_after', true) is distinct from 'standby' then
    return;
  end if;
  names := outbox_internal.missing_standbys();
  if names = '' then
    problem := 'outbox.publish_after is standby, and outbox.standby_names is empty: messages wait';
    remedy := 'name the standbys in outbox.standby_names, by their application_name';
  elsif names is not null then
    problem := case when current_setting('outbox.standby_timeout') = '-1'
                      then format('messages wait for standbys that are not connected: %s', names)
                    else format('standbys are not connected: %s; after %s messages are sent without them', names,
                                current_setting('outbox.standby_timeout')) end;
    remedy := 'start them, or take them out of outbox.standby_names; only direct standbys of this server count:'
              ' those in its pg_stat_replication';
  elsif awaited is not null then
    problem := 'standbys are connected and behind: a worker ' || awaited;
    remedy := 'see their flush_lsn in pg_stat_replication: network or disk is slow';
  end if;
end;
$$;
comment on function outbox_internal.standby_problem(text) is
  'What holds up messages that wait for standbys. awaited = what a worker waits for, in its words; NULL = nothing.'
  ' outbox_health shows it.';

create function outbox_internal.version_problem(out problem text, out remedy text)
returns record language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  -- The library of 0.1.0 lacks the setting.
  library text := coalesce(current_setting('outbox.library_version', true), '0.1.0');
  sql text;
begin
  select x.extversion into sql from pg_extension x where x.extname = 'outbox';
  if sql <> library then
    problem := format('the library that the server runs is of version %s, and the extension of this database is of'
                      ' version %s', library, sql);
    remedy := case when string_to_array(library, '.')::integer[] > string_to_array(sql, '.')::integer[]
                then 'ALTER EXTENSION outbox UPDATE'
                else 'install the library of the extension''s version and restart the server' end;
  end if;
end;
$$;
comment on function outbox_internal.version_problem() is
  'Whether library and extension are of different versions. outbox_health shows it.';

create function outbox_internal.resume_command(pid integer)
returns text language sql immutable parallel safe set search_path = pg_catalog, pg_temp
return format('if it is stopped, kill -CONT %1$s at the shell of the server; else select pg_terminate_backend(%1$s)', pid);
comment on function outbox_internal.resume_command(integer) is
  'What ends the wait for a process that hangs. outbox_health shows it.';

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

create function outbox_internal.connection_problem(
  destination text, reason text, detail text, out problem text, out remedy text
) returns record language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  with destination as materialized (
    select d.destination, d.server is null as by_settings, coalesce(d.wrapper = 'outbox_http', false) as is_http, o.*, m.*,
           case when d.wrapper = 'outbox_http' then 'the receiver' else 'the broker' end as peer,
           case when o.has_url then format('the option url of server %I', d.destination) else 'outbox.url' end as url,
           -- What RabbitMQ names when it refuses.
           coalesce((regexp_match(detail, 'vhost ''(.*)'' refused'))[1],
                    (regexp_match(detail, 'vhost ''?(.*?)''? not found'))[1]) as vhost,
           (regexp_match(detail, 'refused for user ''(.*)'''))[1] as login,
           (regexp_match(detail, 'connection limit \((\d+)\)'))[1]::bigint + 10 as more,
           case reason when 'exchange_missing' then 'topic' else '' end as type
    from (select) one left join outbox_internal.destinations() d on d.destination = $1
    cross join lateral (
      select coalesce(bool_or(x like 'url=%'), false) as has_url, coalesce(bool_or(x like 'tls\_ca=%'), false) as has_ca,
             regexp_replace(coalesce(max(substr(x, 10)) filter (where x like 'exchange=%'),
                                     current_setting('outbox.exchange')),
                            '([].*+?^${}()|\\[])', '\\\1', 'g') as exchange
      from unnest(d.options) x) o
    left join lateral (
      select case u.umuser when 0 then 'PUBLIC' else quote_ident(u.usename) end as role,
             -- Only superusers and owners see the options.
             u.umoptions is null and d.wrapper <> 'outbox_http'
               or exists (select from unnest(u.umoptions) x where x like 'password=%') as has_password,
             u.umoptions is null or exists (select from unnest(u.umoptions) x where x like 'bearer\_token=%') as has_token,
             exists (select from unnest(u.umoptions) x where x like 'tls\_cert=%') as has_certificate
      from pg_user_mappings u
      where u.srvid = d.server and (u.umuser = 0 or u.usename = current_setting('outbox.worker_role'))
      order by u.umuser = 0 limit 1) m on true
  )
  select case reason
           when 'auth_refused' then d.peer || ' refuses the '
                                    || case when d.is_http then 'credentials: ' else 'user or password: ' end
           when 'permission_denied' then 'the user of the broker lacks a permission: '
           when 'vhost_refused' then 'the broker refuses the virtual host: '
           when 'connection_limit' then 'the broker takes no more connections: '
           when 'process_limit' then 'not tried, because a limit on this side is reached: '
           when 'exchange_missing' then 'the exchange does not exist: '
           when 'exchange_mismatch' then coalesce(
             'the exchange exists, and its property "' || substring(detail, 'inequivalent arg ''([^'']*)''')
               || '" differs: ', 'the exchange exists with other properties: ')
           when 'unreachable' then d.peer || ' cannot be reached: '
           when 'timeout' then d.peer || ' does not answer: '
           when 'tls_failed' then 'TLS with ' || d.peer || ' failed: '
           when 'address_refused' then 'the address is not public: '
           when 'endpoint_refused' then 'the URL does not accept messages: '
           when 'throttled' then 'the receiver asks for fewer requests: '
           when 'unavailable' then 'the receiver reports that it is not available: '
           when 'unconfirmed' then 'the broker is connected and does not confirm: '
           when 'queue_refused' then 'a queue behind the exchange refuses the messages: '
           else case when reason is null then 'connecting to ' || d.peer
                     else 'the connection to ' || d.peer || ' failed: ' end
         end || coalesce(detail, ''),
         case reason
           when 'auth_refused' then case
             when d.role is not null
               then format('correct the credentials: ALTER USER MAPPING FOR %s SERVER %I OPTIONS (%s)', d.role, d.destination,
                           case when d.is_http and not d.has_password
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
           when 'permission_denied' then case
             when d.vhost is not null and d.login is not null
               then format('on the broker, extend the patterns of the user (rabbitmqctl list_user_permissions'
                           ' %2$s; an empty one is ^$): rabbitmqctl set_permissions -p %1$s %2$s'
                           ' ''CONFIGURE|^%3$s$'' ''WRITE|^%3$s$'' ''READ'' with the old ones for the words in'
                           ' capitals', d.vhost, d.login, d.exchange)
             when detail like '%internal exchange%' then 'name another exchange: clients do not publish to an internal one'
             else 'grant the user configure and write permission on the exchange' end
           when 'vhost_refused' then case
             when d.login is not null
               then format('on the broker: rabbitmqctl set_permissions -p ''%s'' ''%s'' ''^%3$s$'' ''^%3$s$'' ''^$''',
                           d.vhost, d.login, d.exchange)
             when d.vhost is not null
               then format('correct the path of the URL, or on the broker: rabbitmqctl add_vhost ''%s''', d.vhost)
             else 'check the path of ' || d.url || ' and the user''s permissions' end
           when 'connection_limit' then 'close some connections (rabbitmqctl list_connections user vhost), or raise ' || case
             when detail like '%user connection limit%'
               then format('the limit of the user: rabbitmqctl set_user_limits ''%s'' ''{"max-connections": %s}''', d.login,
                           d.more)
             when d.more is not null
               then format('the limit of the virtual host, and repeat its other limits (rabbitmqctl list_vhost_limits -p'
                           ' ''%1$s''): rabbitmqctl set_vhost_limits -p ''%1$s'' ''{"max-connections": %2$s}''', d.vhost,
                           d.more)
             else 'connection_max of the broker' end
           when 'process_limit'
             then 'raise the limits of the processes of the server (LimitNOFILE and TasksMax of its unit of systemd, or ulimit'
                  ' -n and -u) and restart it; a worker outside has its own'
           when 'exchange_missing' then 'declare the exchange and its bindings, or let the worker declare it: '
           when 'exchange_mismatch' then 'let the worker only check that the exchange exists: '
           when 'unconfirmed'
             then 'see which queue does not answer: rabbitmqctl list_unresponsive_queues; start the nodes that it needs, or'
                  ' delete it; the worker sends unconfirmed messages again by itself'
           when 'queue_refused'
             then 'see which queue is full: rabbitmqctl list_queues name messages policy arguments; consume its messages or'
                  ' raise its max-length; delivery resumes by itself'
           when 'unreachable' then 'start ' || d.peer || ', or correct host and port: '
           when 'timeout' then 'check the network and the load of ' || d.peer || case
             when detail like 'no answer within %' and d.is_http
               then ', or give it more time: ' || outbox_internal.setting_command('outbox.timeout', '1min', d.destination)
             when detail like 'no confirm within %'
               then '; if both are well, see which queue does not answer: rabbitmqctl list_unresponsive_queues'
             else '' end
           when 'tls_failed' then case
             when detail like '%client certificate%' and (d.is_http or d.has_url)
               then format('give its user mapping a client certificate and its key, as PEM texts: %s USER MAPPING FOR %s'
                           ' SERVER %I OPTIONS (%s)',
                           case when d.role is null then 'CREATE' else 'ALTER' end,
                           coalesce(d.role, quote_ident(current_setting('outbox.worker_role'))), d.destination,
                           case when d.has_certificate then 'SET tls_cert ''...'', SET tls_key ''...''' when d.role is null
                                then 'tls_cert ''...'', tls_key ''...''' else 'ADD tls_cert ''...'', ADD tls_key ''...''' end)
             when detail like '%client certificate%'
               then 'name a client certificate that the broker accepts, and its key: '
                    || outbox_internal.setting_command('outbox.tls_cert_file', '/etc/postgresql/outbox.pem') || '; '
                    || outbox_internal.setting_command('outbox.tls_key_file', '/etc/postgresql/outbox.key')
             when detail like '%the CA that it names%' or detail like '%a CA that is not trusted%' then case
               when d.is_http or d.has_ca
                 then 'give the destination the CA of that certificate, as a PEM text: '
                      || outbox_internal.setting_command('outbox.tls_ca', '...', d.destination)
               else 'name the CA of that certificate: '
                    || outbox_internal.setting_command('outbox.tls_ca_file', '/etc/postgresql/outbox-ca.pem') end
             else 'let ' || d.peer || ' present a certificate that is valid for the host in ' || d.url
                  || ', or correct the URL: ' end
           when 'address_refused' then 'if that is meant, allow it: '
             || outbox_internal.setting_command('outbox.http_allow', concat_ws(
                  ', ', nullif(current_setting('outbox.http_allow'), ''), substring(detail, '^(\S+) is ')))
           when 'endpoint_refused' then 'let the receiver take messages at this URL, or correct it: '
           when 'throttled' then 'nothing: delivery resumes when the receiver allows it'
           when 'unavailable' then 'nothing here: delivery resumes when the receiver is available; see its log'
           else case when reason is null then 'wait a few seconds'
                     else 'see the log of ' || d.peer || ', and whether it is the one that ' || d.url || ' names' end
         end || case
           when reason in ('exchange_missing', 'exchange_mismatch') then case
             -- The servers without the option have the type of the settings.
             when d.by_settings and exists (
                    select from outbox_internal.destinations() x
                    where x.wrapper = 'outbox_amqp'
                      and not exists (select from unnest(x.options) y where y like 'exchange\_type=%'))
               then format('CREATE SERVER "default" FOREIGN DATA WRAPPER outbox_amqp OPTIONS (exchange_type %L)', d.type)
             else outbox_internal.setting_command('outbox.exchange_type', d.type, d.destination) end
           when reason in ('unreachable', 'endpoint_refused')
             or reason = 'tls_failed' and detail not like '%client certificate%'
                and detail not like '%the CA that it names%' and detail not like '%a CA that is not trusted%'
             then outbox_internal.setting_command('outbox.url', '...', case when d.has_url then d.destination end)
           else '' end
  from destination d;
end;
comment on function outbox_internal.connection_problem(text, text, text) is
  'Why a destination is not connected, and the command that ends it, from the reason and the words that a worker reports.'
  ' outbox_health shows it.';

create function outbox_internal.table_command()
returns text language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  with part as (
    select c.oid, c.relowner, c.relrowsecurity and c.relforcerowsecurity as is_secured
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.relkind in ('r', 'p') and (
      c.oid in (select d.objid from pg_depend d join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
                where d.classid = 'pg_class'::regclass and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e')
      or c.oid in (select i.inhrelid from pg_inherits i where i.inhparent = '@extschema@.outbox_history'::regclass))
  )
  select f.command
  from (
    select 1 as rank, format('ALTER TABLE %s OWNER TO %I', p.oid::regclass, current_setting('outbox.worker_role')) as command
    from part p where pg_get_userbyid(p.relowner) <> current_setting('outbox.worker_role')
    union all
    select 2, format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY', p.oid::regclass) from part p where p.is_secured
    union all
    select 3, format('ALTER TABLE %s DISABLE TRIGGER %I', p.oid::regclass, t.tgname)
    from part p join pg_trigger t on t.tgrelid = p.oid and not t.tgisinternal and t.tgenabled <> 'D'
    where not exists (select from pg_depend d where d.classid = 'pg_proc'::regclass and d.objid = t.tgfoid
                      and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e')
  ) f
  order by f.rank, f.command limit 1;
end;
comment on function outbox_internal.table_command() is
  'The command that undoes a change of a table of the extension that stops its workers; NULL = none is found.'
  ' outbox_health shows it.';

create function outbox_internal.lag_cause(
  destination text, partition smallint, seq bigint, out cause text, out remedy text
) returns record language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  select f.cause, f.remedy
  from (
    (select 1 as rank,
            case when h.gid is not null then format('a prepared transaction has it locked: %s', h.gid)
                 else format('the session with pid %s%s keeps the workers waiting by its locks%s', h.pid,
                             ' (' || concat_ws(', ', a.usename, nullif(a.application_name, '')) || ')',
                             ', last statement: ' || substr(regexp_replace(a.query, '\s+', ' ', 'g'), 1, 100)) end as cause,
            case when h.gid is not null then format('COMMIT PREPARED %1$L, or ROLLBACK PREPARED %1$L', h.gid)
                 else format('end its transaction, or select pg_terminate_backend(%s)', h.pid) end as remedy
     from (
       select k.pid, g.gid
       from @extschema@.outbox o
       join pg_locks k on k.locktype = 'transactionid' and k.transactionid = o.xmax and k.granted
       left join pg_prepared_xacts g on g.transaction = o.xmax
       where o.destination = lag_cause.destination and o.partition = lag_cause.partition and o.seq = lag_cause.seq
       union all
       select b.pid, null from @extschema@.outbox_workers w cross join lateral unnest(pg_blocking_pids(w.pid)) b (pid)
     ) h left join pg_stat_activity a on a.pid = h.pid
     where h.gid is not null or a.xact_start < clock_timestamp() - interval '1 second'
       and h.pid not in (select w.pid from @extschema@.outbox_workers w)
     limit 1)
    union all
    select 2, format('its destination may take at most %s a second', r.most),
           'if it can take more: ' || outbox_internal.setting_command('outbox.max_rate', (2 * r.most)::text, d.destination)
    from outbox_internal.destinations() d
    cross join lateral (
      select coalesce((select substr(o, 10) from unnest(d.options) o where o like 'max\_rate=%'),
                      current_setting('outbox.max_rate'))::bigint as most) r
    -- A worker does not pass the rest of its share on to others.
    where d.destination = lag_cause.destination and r.most > 0
      and (outbox_internal.destination_stats(d.destination))[6] / 60 >= 0.9 * r.most / greatest(1, (
        select count(*) from @extschema@.outbox_workers w where w.heartbeat_until > clock_timestamp()))
    union all
    select 3, null,
           format('see the other checks; if all are ok, the workers, or what they deliver to, are too slow: %s; or raise'
                  ' outbox.batch_size',
                  outbox_internal.setting_command('outbox.workers',
                                                  (current_setting('outbox.workers')::integer + 1)::text))
  ) f
  order by f.rank limit 1;
end;
comment on function outbox_internal.lag_cause(text, smallint, bigint) is
  'Why a message that has not failed waits, as far as it is known, and the remedy. outbox_health shows it.';

create view @extschema@.outbox_health as
with worker as (
  select w.worker_id from @extschema@.outbox_workers w
  where w.heartbeat_until > pg_catalog.clock_timestamp() and not outbox_internal.has_ended(w.worker_id)
), connection as (
  select c.destination, c.state, c.reason, c.detail
  from @extschema@.outbox_connections c join worker w on w.worker_id = c.worker_id
), server as (
  select outbox_internal.is_preloaded() as preloaded, outbox_internal.server_state() as obstacle,
         pg_catalog.current_setting('outbox.worker_role') as worker_role,
         pg_catalog.current_setting('outbox.workers')::integer as workers
), waiting as materialized ( -- read once for all checks
  select f.destination, f.partition, f.seq, f.enqueued_at, f.is_blocked, f.is_stopped from outbox_internal.first_shown f
), failing as (
  select distinct on (c.destination) c.destination, c.reason, c.detail from connection c
  where c.state in ('down', 'connecting', 'connected') and c.reason <> 'standby'
     or c.state in ('starting', 'connecting')
  order by c.destination, c.reason is null, c.state = 'connected'
)
select 'preload' as "check", null::text as destination, s.preloaded as ok,
       case when not s.preloaded
         then 'outbox is not in shared_preload_libraries: no worker runs, messages wait' end as problem,
       case when not s.preloaded then coalesce(
         (select 'ALTER SYSTEM SET shared_preload_libraries = '
                 || pg_catalog.string_agg(pg_catalog.quote_literal(pg_catalog.btrim(l.name)), ', ' order by l.n)
                 || '; then restart the server'
          from pg_catalog.pg_settings p, pg_catalog.unnest(pg_catalog.string_to_array(
                 pg_catalog.concat_ws(',', nullif(p.setting, ''), 'outbox'), ',')) with ordinality l (name, n)
          where p.name = 'shared_preload_libraries'), -- which not every role sees
         'add outbox to shared_preload_libraries and restart the server') end as remedy
from server s
union all
select 'enabled', null, pg_catalog.current_setting('outbox.enabled')::boolean,
       case when not pg_catalog.current_setting('outbox.enabled')::boolean
         then 'outbox.enabled is off: messages wait' end,
       case when not pg_catalog.current_setting('outbox.enabled')::boolean
            then outbox_internal.setting_command('outbox.enabled', 'on') end
union all
select 'standby', null, not pg_catalog.pg_is_in_recovery(),
       case when pg_catalog.pg_is_in_recovery()
         then 'this server is a standby: nothing is delivered from here' end,
       case when pg_catalog.pg_is_in_recovery()
         then 'ask the primary; after a promotion the workers of this server start by themselves' end
union all
select 'version', null, v.problem is null, v.problem, v.remedy
from outbox_internal.version_problem() v
union all
select 'standbys', null, b.problem is null, b.problem, b.remedy
from outbox_internal.standby_problem((select pg_catalog.min(c.detail) from connection c
                                      where c.reason = 'standby')) b
union all
select 'identity', null, a.why is null, 'nothing is delivered from this database until it is adopted: ' || a.why,
       case when a.why is not null
         then 'select outbox_adopt(), if this database, not the original, must deliver the waiting messages' end
from outbox_internal.not_adopted() a (why)
union all
select 'partitions', null, p.highest is null,
       'messages are in partition ' || outbox_internal.partition_label(p.highest)
         || ', which does not exist: they came from a database with more partitions',
       'select outbox_configure(partition_count => ' || p.highest + 1 || ')'
from (select pg_catalog.max(f.partition)::integer as highest from outbox_internal.first_shown f
      where f.partition >= (select s.partition_count from @extschema@.outbox_settings s)) p
union all
select 'sequence', null, p.problem is null, p.problem, p.remedy
from pg_catalog.pg_sequence q left join outbox_internal.beyond_sequence b on true
cross join lateral (select
  case when b.seq is not null
         then 'outbox_events has seq ' || b.seq || ', and its sequence has not given it out: publishing fails with 23505'
       when q.seqcache > 1
         then 'each session draws ' || q.seqcache || ' seqs of outbox_events ahead: events of a key are sent out of order'
       when q.seqincrement < 0 or q.seqcycle
         then 'seqs of outbox_events do not always grow: events of a key are sent out of order' end as problem,
  case when b.seq is not null
         then pg_catalog.format('select setval(s, greatest(%s, nextval(s))) from (select %L::regclass) x (s)', b.seq,
                                '@extschema@.outbox_events_seq_seq')
       when q.seqcache > 1 or q.seqincrement < 0 or q.seqcycle
         then 'alter sequence @extschema@.outbox_events_seq_seq increment 1 cache 1 no cycle' end as remedy) p
where q.seqrelid = '@extschema@.outbox_events_seq_seq'::pg_catalog.regclass
union all
select 'role', null, p.problem is null, p.problem, p.remedy
from server s left join pg_catalog.pg_roles r on r.rolname = s.worker_role
join pg_catalog.pg_class t on t.oid = '@extschema@.outbox'::pg_catalog.regclass
join pg_catalog.pg_roles o on o.oid = t.relowner
cross join lateral (
  select pg_catalog.min(pg_catalog.quote_ident(x.rolname)) as member from pg_catalog.pg_auth_members g
  join pg_catalog.pg_roles x on x.oid = g.member where g.roleid = r.oid and not x.rolsuper) m
cross join lateral (select
  case when r.rolname is null
         then pg_catalog.format('role %I, which the workers run as, does not exist', s.worker_role)
       when r.rolsuper then pg_catalog.format('role %I is a superuser: the workers do not run as a superuser',
                                              s.worker_role)
       when m.member is not null
         then pg_catalog.format('role %s is a member of %I, and could become a superuser', m.member, s.worker_role)
              collate "default"
       end as problem,
  case when r.rolname is null and not o.rolsuper
         then pg_catalog.format('ALTER SYSTEM SET outbox.worker_role = %L; SELECT pg_reload_conf()', o.rolname)
       when r.rolname is null
         then pg_catalog.format('CREATE ROLE %I and make it the owner of the tables of outbox and of its functions with'
                                ' SECURITY DEFINER; DROP EXTENSION would drop the messages', s.worker_role)
       when r.rolsuper then pg_catalog.format('ALTER ROLE %I NOSUPERUSER', s.worker_role)
       when m.member is not null then pg_catalog.format('REVOKE %I FROM %s', s.worker_role, m.member) end as remedy) p
union all
select 'schema', null, p.problem is null, p.problem, p.remedy
from (select) one left join (select x.problem, x.remedy from outbox_internal.schema_problem() x limit 1) p on true
union all
select 'workers', null, p.problem is null, p.problem, p.remedy
from server s left join (
  select w.worker_id, w.pid, w.heartbeat_at from @extschema@.outbox_workers w
  join pg_catalog.pg_stat_activity a on a.pid = w.pid
  where w.worker_id like 'server-%' and w.heartbeat_until <= pg_catalog.clock_timestamp()
    and not outbox_internal.has_ended(w.worker_id)
  order by w.worker_id limit 1) h on true
cross join lateral (select
  case when pg_catalog.pg_is_in_recovery() then null
       when h.pid is not null then pg_catalog.format('%s hangs: its process %s wrote its last heartbeat at %s',
                                                     h.worker_id, h.pid, pg_catalog.date_trunc('seconds', h.heartbeat_at))
       when s.workers = 0 and not exists (select from worker) then 'outbox.workers is 0: nothing is delivered'
       when not exists (select from worker) then 'no worker is alive in this database'
         || case s.obstacle when 'slots' then ': max_worker_processes is used up'
                            when 'time slices' then ' now: there are more databases than worker slots,'
                                              ' so they are served in turn'
                            when 'entries' then ': the server already has the most workers, 128'
                            when 'databases' then ': the server already serves the most databases, 128'
                            when 'excluded' then ': outbox.databases does not name it'
                            when 'role' then ': its role is missing or a superuser'
                            else '' end
       when s.obstacle = 'slots' then 'not every worker of this database runs: max_worker_processes is used up'
       when s.obstacle = 'entries'
         then 'not every worker of this database runs: the server already has the most workers, 128'
       when s.obstacle = 'time slices'
         then 'there are more databases than worker slots: this one is served in turn with others' end as problem,
  case when pg_catalog.pg_is_in_recovery() then null
       when h.pid is not null then outbox_internal.resume_command(h.pid)
       when s.workers = 0 and not exists (select from worker) then outbox_internal.setting_command('outbox.workers', '1')
       when s.obstacle in ('slots', 'time slices')
         then pg_catalog.format('raise max_worker_processes by %s or more and restart the server',
                                outbox_internal.missing_slots())
       when s.obstacle = 'entries'
         then 'lower outbox.workers, narrow outbox.databases, or end workers outside the server, and reload'
       when exists (select from worker) then null
       when s.obstacle = 'databases'
         then 'drop a database, or close one with ALTER DATABASE ... ALLOW_CONNECTIONS false; databases without the'
              ' extension count, too'
       when not s.preloaded then 'see the check "preload"'
       when s.obstacle = 'excluded'
         then outbox_internal.setting_command('outbox.databases', pg_catalog.current_setting('outbox.databases') || ','
                                              || pg_catalog.current_database())
       when s.obstacle = 'role' then 'see the check "role"'
       else 'wait a few seconds; then search the server log for "outbox"' end as remedy) p
union all
select 'destination', p.destination, p.problem is null, p.problem, p.remedy
from (select) one left join (
  select distinct on (u.destination) u.destination, u.detail as problem,
         case when u.detail like '%password_file%'
              then 'make the file readable for the server''s user only, with the password as its first line, or name'
                   ' another one: ' || outbox_internal.setting_command('outbox.password_file', '...')
              when u.detail like '%outbox.tls\_%'
              then 'let the file be in PEM, and a key readable for the server''s user only, or name another one: '
                   || outbox_internal.setting_command(pg_catalog.substring(u.detail, 'outbox.tls_\w+'), '...')
              when u.destination = 'default'
              then 'name the broker: ' || outbox_internal.setting_command('outbox.url', 'amqp://localhost')
              else pg_catalog.format('ALTER SERVER %I OPTIONS (...); see docs/destinations.md',
                                     u.destination) end as remedy
  from connection u where u.state = 'unconfigured'
    and (u.destination <> 'default' or pg_catalog.current_setting('outbox.url') <> ''
         or (select pg_catalog.count(*) from outbox_internal.destinations()) = 1
         or exists (select from waiting f where f.destination = 'default'))
  union all
  select 'default', 'outbox.url is empty: there is no broker to deliver to',
         'name the broker: ' || outbox_internal.setting_command('outbox.url', 'amqp://localhost')
  where not exists (select from worker) and pg_catalog.current_setting('outbox.url') = ''
    and (select d.server from outbox_internal.destinations() d where d.destination = 'default') is null
  union all
  select 'default', pg_catalog.format('the server "default" does not count: its owner %I is no member of outbox_admin',
                                      pg_catalog.pg_get_userbyid(s.srvowner)) collate "default",
         'ALTER SERVER "default" OWNER TO outbox_admin, or DROP SERVER "default"'
  from pg_catalog.pg_foreign_server s join pg_catalog.pg_foreign_data_wrapper w on w.oid = s.srvfdw
  where s.srvname = 'default' and w.fdwname in ('outbox_amqp', 'outbox_http')
    and not pg_catalog.pg_has_role(s.srvowner, 'outbox_admin', 'usage')
  union all
  select m.destination, 'messages wait for this destination, which does not exist',
         pg_catalog.format('create it again, with its exchange or URL: CREATE SERVER %1$I FOREIGN DATA WRAPPER outbox_amqp'
                           ' OPTIONS (exchange ''...''); or discard them: select outbox_discard(seq, destination)'
                           ' from outbox_messages where destination = %1$L and status in (''ready'', ''blocked'','
                           ' ''retrying'', ''scheduled'', ''dead'')',
                           m.destination)
  from (select distinct f.destination from waiting f where not f.is_blocked
        except select d.destination from outbox_internal.destinations() d) m) p on true
union all
select 'database', null, e.message is null, 'a statement of a worker fails: ' || e.message,
       case when e.message is not null
         then coalesce('undo what the error names, for example: ' || outbox_internal.table_command(),
                       'undo what the error names: the tables of outbox belong to ' || e.worker_role
                         || ', and have neither row security nor triggers of others')
              || '; the log of the server has the whole error' end
from (select) one left join (
  -- A worker tries again after half a second; what ends within a few tries is no problem.
  select g.t[i + 2] as message, s.worker_role
  from server s, (select outbox_internal.error_groups() as t offset 0) g,
       pg_catalog.generate_series(1, pg_catalog.cardinality(g.t), 7) i
  where g.t[i + 1] = 'database' and g.t[i + 3]::bigint > 3
    and pg_catalog.to_timestamp(g.t[i + 5]::double precision / 1e6)
        > pg_catalog.clock_timestamp() - interval '10 seconds'
  order by g.t[i + 5]::double precision desc limit 1) e on true
union all
select 'source', null, p.problem is null, p.problem,
       case when p.problem is not null
         then 'messages wait until it can be read: correct it, or name its columns again: select outbox_source_set('
              || (select pg_catalog.quote_literal(s.relation) || pg_catalog.string_agg(
                    pg_catalog.format(', %s => %L', c.name, pg_catalog.to_jsonb(s) ->> c.name), '' order by c.n)
                  from @extschema@.outbox_source s,
                       pg_catalog.unnest('{seq,type,created_at,id,aggregate_type,aggregate_id,operation,payload,'
                         'previous_payload,metadata,headers,actor,correlation_id,key}'::text[]) with ordinality c (name, n)
                  where pg_catalog.to_jsonb(s) ->> c.name is not null
                  group by s.relation) || ')' end
from (select outbox_internal.source_problem() as problem) p
union all
select 'bodies', p.destination, p.why is null, p.why[1] || ': the messages of this destination wait', p.why[2]
from (select) one left join (
  select d.destination, b.why from outbox_internal.destinations() d
  cross join lateral (select outbox_internal.body_problem(d.destination) as why) b
  where b.why is not null) p on true
union all
select 'paused', z.destination, z.destination is null,
       case when z.destination is not null
            then pg_catalog.format('%s by %s since %s%s',
                                   case when z.busy then pg_catalog.format('pausing, %s in flight, paused',
                                          coalesce((outbox_internal.destination_stats(z.destination))[1], 0))
                                        else 'paused' end, z.paused_by,
                                   pg_catalog.date_trunc('seconds', z.since), coalesce(': ' || z.reason, '')) end,
       case when z.destination is not null then pg_catalog.format('select outbox_resume(%L)', z.destination) end
from (select) one left join (
  select x.*, exists (select from connection c where c.destination = x.destination
                      and c.state not in ('paused', 'not adopted')) as busy
  from @extschema@.outbox_paused x) z on true
union all
select 'broker', f.destination, p.problem is null, p.problem, p.remedy
from (select) one left join failing f on true
left join lateral outbox_internal.connection_problem(f.destination, f.reason, f.detail) p on f.destination is not null
union all
select 'blocked', b.destination, b.destination is null, 'the broker blocks publishers: ' || b.detail,
       case when b.destination is null then null
            when b.detail like '%disk%'
              then 'free disk on the broker, or lower its limit: rabbitmqctl set_disk_free_limit 50MB'
            when b.detail like '%memory%'
              then 'let its consumers take messages, or raise its limit: rabbitmqctl set_vm_memory_high_watermark 0.6'
            else 'see rabbitmq-diagnostics alarms on the broker' end
         || '; delivery resumes by itself'
from (select) one left join (
  select c.destination, coalesce(pg_catalog.min(c.detail), '') as detail from connection c
  where c.state = 'blocked' group by 1) b on true
union all
select 'retrying', null, r.n = 0,
       case when r.n > 0
            then pg_catalog.format('%s message(s) have failed three times or more, for example seq %s to %s, since %s: %s',
                                   case when r.n = 10000 then '10000 or more' else r.n::text end, f.seq, f.destination,
                                   pg_catalog.date_trunc('seconds', f.enqueued_at), f.last_error) collate "default" end,
       case when r.n > 0
         then 'select seq, destination, attempts, last_error from outbox_messages where status = ''retrying''; correct the'
              ' cause, then outbox_retry(seq, destination) tries at once' end
from (select pg_catalog.count(*) as n
      from (select from @extschema@.outbox_waiting w where w.state = 'b' and w.attempts >= 3 limit 10000) x) r
left join lateral (select w.seq, w.destination, w.enqueued_at, w.last_error from @extschema@.outbox_waiting w
                   where w.state = 'b' and w.attempts >= 3 and r.n > 0 order by w.seq limit 1) f on true
union all
select 'dead letters', null, d.n = 0,
       case when d.n > 0
            then pg_catalog.format('%s dead letter(s), for example: %s',
                                   case when d.n = 10000 then '10000 or more' else d.n::text end, d.reason) end,
       case when d.n > 0 then 'select * from outbox_dead; then outbox_retry(seq, destination) or outbox_discard(seq, destination)' end
from (select c.dead as n, x.reason from outbox_internal.dead_counts c
      left join lateral (select y.reason from @extschema@.outbox_dead y
                         where y.seq = (select outbox_internal.first_dead(false)) and c.dead > 0 limit 1) x on true) d
union all
select 'keys', null, b.keys = 0,
       case when b.keys > 0
         then pg_catalog.format('%s key(s) are blocked by a dead letter, for example: %s (seq %s)',
         case when b.keys = 10000 then '10000 or more' else b.keys::text end, b.key, b.seq) end,
       case when b.keys > 0
         then pg_catalog.format('select outbox_retry(%s, %2$L), or outbox_discard(%1$s, %2$L), unblocks the key; with'
                                ' outbox.on_dead = skip none blocks', b.seq, b.destination) end
from (select (select c.blocking from outbox_internal.dead_counts c) as keys,
             case when y.whole then 'partition ' || outbox_internal.partition_label(y.partition::integer)
                  else y.key end as key, y.seq, y.destination
      from (select) one left join (
        select d.key, d.partition, d.seq, d.destination, exists (
          select from outbox_internal.destinations() x
          where x.destination = d.destination and 'ordering=partition' = any (x.options)) as whole
        from @extschema@.outbox_dead d
        where d.blocks and d.seq = (select outbox_internal.first_dead(true))
          and (select c.blocking > 0 from outbox_internal.dead_counts c) limit 1) y on true) b
union all
select 'room', f.destination, f.destination is null,
       case when f.destination is not null
            then pg_catalog.format('%s of %s messages pending: %s', f.pending, f.max_pending,
                                   case when f.pending >= f.max_pending then 'the queue is full, enqueue is refused'
                                     else 'the queue is nearly full' end) end,
       case when f.destination is not null
            then 'see the other checks for why they wait; or raise the limit: '
                 || outbox_internal.setting_command('outbox.max_pending', (2 * f.max_pending)::text, f.destination) end
from (select) one left join (
  select x.destination, x.n[11]::bigint as pending, x.n[12]::bigint as max_pending
  from (select d.destination, outbox_internal.destination_stats(d.destination) as n
        from outbox_internal.destinations() d) x
  where x.n[11] >= 0.9 * x.n[12]) f on true
union all
select 'transactions', null, p.problem is null, p.problem, p.remedy
from (select pg_catalog.string_agg(case when t.prepared
               then pg_catalog.format('transaction %s has been prepared for %s', t.xid,
                                      pg_catalog.date_trunc('seconds', t.age))
               else pg_catalog.format('the session with pid %s%s has enqueued and not ended for %s%s', t.pid,
                                      ' (' || t.who || ')', pg_catalog.date_trunc('seconds', t.age),
                                      ', last statement: ' || t.query) end, '; ') as problem,
             pg_catalog.min(case when t.prepared and t.gid is not null
               then pg_catalog.format('COMMIT PREPARED %1$L, or ROLLBACK PREPARED %1$L', t.gid)
               when t.prepared then 'COMMIT PREPARED or ROLLBACK PREPARED; see pg_prepared_xacts'
               else pg_catalog.format('later messages of its keys wait for it: end it, or select'
                                      ' pg_terminate_backend(%s)', t.pid) end) as remedy
      from (select x.pid, x.xid, x.prepared, x.age, g.gid,
                   pg_catalog.concat_ws(', ', a.usename::text collate "default", nullif(a.application_name, '')) as who,
                   nullif(pg_catalog.substr(pg_catalog.regexp_replace(a.query, '\s+', ' ', 'g'), 1, 100), '') as query
            from outbox_internal.open_transactions() x
            left join pg_catalog.pg_stat_activity a on a.pid = x.pid and not x.prepared
            left join pg_catalog.pg_prepared_xacts g on g.transaction = x.xid and x.prepared
            where x.age > case when x.prepared then interval '1 minute' else interval '30 seconds' end
            order by x.age desc limit 3) t) p
union all
select 'locks', null, h.pid is null,
       case when h.pid is not null
            then pg_catalog.format('process %s%s has had rows of outbox_partitions locked since %s: no other worker can'
                                   ' take over %s partition(s)',
                                   h.pid, ' (' || h.kind || ')', pg_catalog.date_trunc('seconds', h.since),
                                   h.partitions) end,
       case when h.pid is not null then outbox_internal.resume_command(h.pid) end
from (select) one left join (
  -- The lease has run out, so its worker has not renewed it, and an open transaction has the row locked: that of the
  -- worker, if it hangs while it settles. Partitions first: such rows are rare, and pg_locks is expensive.
  select l.pid, pg_catalog.min(a.backend_type) as kind,
         coalesce(pg_catalog.min(a.xact_start), pg_catalog.min(p.lease_until)) as since,
         pg_catalog.count(*) as partitions
  from (select q.xmax, q.lease_until from @extschema@.outbox_partitions q
        where q.lease_owner is not null and q.lease_until <= pg_catalog.clock_timestamp() offset 0) p
  cross join lateral (
    select k.pid from pg_catalog.pg_locks k where k.locktype = 'transactionid' and k.transactionid = p.xmax
      and k.granted offset 0) l
  left join pg_catalog.pg_stat_activity a on a.pid = l.pid
  group by l.pid order by partitions desc limit 1) h on true
union all
select 'lag', null, s.seq is null,
       case when s.seq is not null
            then pg_catalog.format('the oldest message that can be delivered, seq %s to %s, has waited for %s%s', s.seq,
                                   s.destination, pg_catalog.date_trunc('seconds', s.age), ': ' || c.cause)
              collate "default" end,
       c.remedy
from (select) one left join (
  select f.destination, f.partition, f.seq, pg_catalog.statement_timestamp() - f.enqueued_at as age
  from waiting f
  where not f.is_blocked and not f.is_stopped and f.enqueued_at < pg_catalog.statement_timestamp() - interval '1 minute'
    -- A retry keeps its first time, and what an open transaction holds cannot be delivered: see the other checks.
    and exists (select from @extschema@.outbox o where o.destination = f.destination and o.partition = f.partition
                and o.seq = f.seq and o.attempts = 0)
    and not exists (select from outbox_internal.open_transactions() t where t.low < f.seq)
  order by f.enqueued_at limit 1) s on true
left join lateral outbox_internal.lag_cause(s.destination, s.partition, s.seq) c on s.seq is not null;
comment on view @extschema@.outbox_health is
  'One row a check, and one row a destination where a check finds several: ok or not, the problem, the remedy.';
