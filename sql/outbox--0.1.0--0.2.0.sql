-- From 0.1.0 to 0.2.0. A test compares what this script makes with a fresh install.
\echo Use "ALTER EXTENSION outbox UPDATE" to load this file. \quit

-- A name in a view, a default or the body of a function (BEGIN ATOMIC) is looked up once, now, and only in this schema.
select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

-- The library may still be that of before an upgrade.
load 'outbox';
do $library$
declare
  sql constant text := (select x.extversion from pg_catalog.pg_extension x where x.extname = 'outbox');
  -- The library of 0.1.0 lacks the setting.
  library constant text := coalesce(pg_catalog.current_setting('outbox.library_version', true), '0.1.0');
begin
  if pg_catalog.string_to_array(library, '.')::integer[] < pg_catalog.string_to_array(sql, '.')::integer[] then
    raise exception 'version % of the extension needs its library, and this server runs that of %', sql, library
      using errcode = 'object_not_in_prerequisite_state',
            detail = 'A preloaded library stays until the server restarts.',
            hint = 'Restart the server, then try again.';
  end if;
end
$library$;

-- ---- messages wait for standbys, and library and extension may differ -----------------------------------------------

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

create function outbox_internal.work_standbys()
returns text language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_standbys_wrapper';
comment on function outbox_internal.work_standbys() is
  'Worker outside: the position of WAL that is on disk, behind the commits of all messages that the worker has claimed.'
  ' Then a line for each connected standby: the position up to which it has flushed WAL, and its name.';

-- As the install script does it: neither PUBLIC nor a role of ALTER DEFAULT PRIVILEGES may call a new function.
do $owner$
declare
  worker_role constant name := pg_catalog.current_setting('outbox.worker_role');
  thing record;
begin
  for thing in
    select p.oid::pg_catalog.regprocedure as identity,
           pg_catalog.string_agg(distinct case a.grantee when 0 then 'public'
             else pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) end, ', ') as grantees
    from pg_catalog.pg_proc p
    cross join lateral pg_catalog.aclexplode(coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) a
    where p.pronamespace = 'outbox_internal'::pg_catalog.regnamespace and a.grantee <> p.proowner
      and p.proname = any (array['missing_standbys', 'standby_problem', 'version_problem', 'work_standbys'])
    group by p.oid
  loop
    execute pg_catalog.format('revoke all on function %s from %s', thing.identity, thing.grantees);
    execute pg_catalog.format('grant execute on function %s to %I', thing.identity, worker_role);
  end loop;
end
$owner$;
grant execute on function
  outbox_internal.missing_standbys, outbox_internal.standby_problem, outbox_internal.version_problem
  to outbox_monitor;
grant execute on function outbox_internal.work_standbys to outbox_relay;

create or replace view @extschema@.outbox_health as
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
  select f.destination, f.enqueued_at, f.is_blocked, f.is_stopped from outbox_internal.first_shown f
), failing as (
  select distinct on (c.destination) c.destination, c.reason, c.detail,
         case when d.wrapper = 'outbox_http' then 'the receiver' else 'the broker' end as peer
  from connection c left join outbox_internal.destinations() d on d.destination = c.destination
  where c.state in ('down', 'connecting', 'connected') and c.reason <> 'standby'
     or c.state in ('starting', 'connecting')
  order by c.destination, c.reason is null, c.state = 'connected'
)
select 'preload' as "check", null::text as destination, s.preloaded as ok,
       case when not s.preloaded
         then 'outbox is not in shared_preload_libraries: no worker runs, messages wait' end as problem,
       case when not s.preloaded then 'add outbox to shared_preload_libraries and restart the server' end as remedy
from server s
union all
select 'enabled', null, pg_catalog.current_setting('outbox.enabled')::boolean,
       case when not pg_catalog.current_setting('outbox.enabled')::boolean
         then 'outbox.enabled is off: messages wait' end,
       case when not pg_catalog.current_setting('outbox.enabled')::boolean
            then 'set outbox.enabled = on (ALTER SYSTEM or ALTER DATABASE)' end
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
select 'role', null, p.problem is null, p.problem, p.remedy
from server s left join pg_catalog.pg_roles r on r.rolname = s.worker_role
cross join lateral (select
  case when r.rolname is null
         then pg_catalog.format('role %I, which the workers run as, does not exist', s.worker_role)
       when r.rolsuper then pg_catalog.format('role %I is a superuser: the workers do not run as a superuser',
                                              s.worker_role) end as problem,
  case when r.rolname is null
    then pg_catalog.format('DROP EXTENSION and CREATE EXTENSION outbox, or CREATE ROLE %I and make it owner of the'
                           ' outbox tables', s.worker_role)
       when r.rolsuper then pg_catalog.format('ALTER ROLE %I NOSUPERUSER', s.worker_role) end as remedy) p
union all
select 'schema', null, p.problem is null, p.problem, p.remedy
from (select) one left join (select x.problem, x.remedy from outbox_internal.schema_problem() x limit 1) p on true
union all
select 'workers', null, p.problem is null, p.problem, p.remedy
from server s cross join lateral (select
  case when pg_catalog.pg_is_in_recovery() then null
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
       when s.workers = 0 and not exists (select from worker) then 'set outbox.workers to 1 or more and reload'
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
       when s.obstacle = 'excluded' then 'add it to outbox.databases, or make that empty, and reload'
       when s.obstacle = 'role' then 'see the check "role"'
       else 'wait a few seconds; then search the server log for "outbox"' end as remedy) p
union all
select 'destination', p.destination, p.problem is null, p.problem, p.remedy
from (select) one left join (
  select distinct on (u.destination) u.destination, u.detail as problem,
         case when u.detail like '%password_file%'
              then 'make the file readable for the server''s user only, with the password as its first line'
              when u.detail like '%outbox.tls\_%'
              then 'correct the file or the setting; the files are in PEM,'
                   ' and the key is readable for the server''s user only'
              when u.destination = 'default'
              then 'ALTER SYSTEM SET outbox.url = ''amqp://localhost'', or another broker; then SELECT pg_reload_conf()'
              else pg_catalog.format('ALTER SERVER %I OPTIONS (...); see docs/destinations.md',
                                     u.destination) end as remedy
  from connection u where u.state = 'unconfigured'
    and (u.destination <> 'default' or pg_catalog.current_setting('outbox.url') <> ''
         or (select pg_catalog.count(*) from outbox_internal.destinations()) = 1
         or exists (select from waiting f where f.destination = 'default'))
  union all
  select 'default', 'outbox.url is empty: there is no broker to deliver to',
         'ALTER SYSTEM SET outbox.url = ''amqp://localhost'', or another broker; then SELECT pg_reload_conf()'
  where not exists (select from worker) and pg_catalog.current_setting('outbox.url') = ''
    and (select d.server from outbox_internal.destinations() d where d.destination = 'default') is null
  union all
  select m.destination, 'messages wait for this destination, which does not exist',
         pg_catalog.format('CREATE SERVER %I FOREIGN DATA WRAPPER ..., or discard the messages with outbox_discard()',
                           m.destination)
  from (select distinct f.destination from waiting f where not f.is_blocked
        except select d.destination from outbox_internal.destinations() d) m) p on true
union all
select 'source', null, p.problem is null, p.problem,
       case when p.problem is not null
         then 'messages wait until it can be read: correct it, or call outbox_source_set() for the same relation' end
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
cross join lateral (select
  case f.reason
    when 'auth_refused' then f.peer || ' refuses the '
                             || case f.peer when 'the broker' then 'user or password: ' else 'credentials: ' end
    when 'permission_denied' then 'the user of the broker lacks a permission: '
    when 'vhost_refused' then 'the broker refuses the virtual host: '
    when 'exchange_missing' then 'the exchange does not exist: '
    when 'exchange_mismatch' then 'the exchange exists with other properties: '
    when 'unreachable' then f.peer || ' cannot be reached: '
    when 'timeout' then f.peer || ' does not answer: '
    when 'tls_failed' then 'TLS with ' || f.peer || ' failed: '
    when 'address_refused' then 'the address is not public: '
    when 'endpoint_refused' then 'the URL does not accept messages: '
    when 'throttled' then 'the receiver asks for fewer requests: '
    when 'unavailable' then 'the receiver reports that it is not available: '
    when 'unconfirmed' then 'the broker is connected and does not confirm: '
    else case when f.reason is not null then 'the connection to ' || f.peer || ' failed: '
              when f.peer is not null then 'connecting to ' || f.peer end
  end || coalesce(f.detail, '') as problem,
  case when f.peer is not null and f.reason is null then 'wait a few seconds'
       when f.reason = 'permission_denied' then coalesce(
         (select pg_catalog.format('on the broker: rabbitmqctl set_permissions -p %s %s ''^%s$'' ''^%3$s$'' ''^$''',
                                   m[2], m[3], pg_catalog.regexp_replace(m[1], '([].*+?^${}()|\\[])', '\\\1', 'g'))
          from pg_catalog.regexp_match(f.detail, 'exchange ''(.*)'' in vhost ''(.*)'' refused for user ''(.*)''') m),
         'grant the user configure and write permission on the exchange')
       when f.reason = 'unconfirmed'
    then 'check the queues behind the exchange: one may be deleted or without a quorum; the worker sends unconfirmed'
         ' messages again by itself'
       when f.destination <> 'default' or f.peer = 'the receiver' then
    case f.reason
      when 'auth_refused' then pg_catalog.format('check the credentials: ALTER USER MAPPING FOR %I SERVER %I',
                                                 pg_catalog.current_setting('outbox.worker_role'), f.destination)
      when 'exchange_missing'
        then 'declare the exchange, or give the server the option exchange_type so that the worker declares it'
      when 'exchange_mismatch' then 'make the option exchange_type fit the exchange, or empty it to only check'
      when 'address_refused' then 'name the host or its network in outbox.http_allow, if it is meant'
      when 'throttled' then 'nothing: delivery resumes when the receiver allows it'
      else pg_catalog.format('check the options of the server (\des+ %I) and the peer', f.destination)
    end
  else case f.reason
    when 'auth_refused' then 'check the user in outbox.url and the password in outbox.password_file'
    when 'vhost_refused' then 'check the path of outbox.url and the user''s permissions'
    when 'exchange_missing' then 'declare the exchange, or set outbox.exchange_type so that the worker declares it'
    when 'exchange_mismatch' then 'make outbox.exchange_type fit the exchange, or empty it to only check'
    when 'unreachable' then 'start the broker, or check host and port in outbox.url'
    when 'timeout' then 'check the network and the broker''s load'
    when 'tls_failed' then 'check the broker''s certificate, the host in outbox.url and outbox.tls_ca_file;'
                           ' for a client certificate, outbox.tls_cert_file'
    else case when f.reason is not null then 'see the broker''s log' end
  end end as remedy) p
union all
select 'blocked', b.destination, b.destination is null, 'the broker blocks publishers: ' || b.detail,
       case when b.destination is not null then 'free memory or disk on the broker; delivery resumes by itself' end
from (select) one left join (
  select c.destination, coalesce(pg_catalog.min(c.detail), '') as detail from connection c
  where c.state = 'blocked' group by 1) b on true
union all
select 'dead letters', null, d.n = 0,
       case when d.n > 0
            then pg_catalog.format('%s dead letter(s), for example: %s',
                                   case when d.n = 10000 then '10000 or more' else d.n::text end, d.reason) end,
       case when d.n > 0 then 'select * from outbox_dead; then outbox_retry(seq) or outbox_discard(seq)' end
from (select c.dead as n, x.reason from outbox_internal.dead_counts c
      left join lateral (select y.reason from @extschema@.outbox_dead y
                         where y.seq = (select outbox_internal.first_dead(false)) and c.dead > 0 limit 1) x on true) d
union all
select 'keys', null, b.keys = 0,
       case when b.keys > 0
         then pg_catalog.format('%s key(s) are blocked by a dead letter, for example: %s (seq %s)',
         case when b.keys = 10000 then '10000 or more' else b.keys::text end, b.key, b.seq) end,
       case when b.keys > 0
         then 'outbox_retry(seq) or outbox_discard(seq) unblocks the key; with outbox.on_dead = skip none blocks' end
from (select (select c.blocking from outbox_internal.dead_counts c) as keys,
             case when y.whole then 'partition ' || outbox_internal.partition_label(y.partition::integer)
                  else y.key end as key, y.seq
      from (select) one left join (
        select d.key, d.partition, d.seq, exists (
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
       case when f.destination is not null then 'see the other checks for why they wait; or raise max_pending' end
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
               else pg_catalog.format('the session with pid %s has enqueued and not ended for %s', t.pid,
                                      pg_catalog.date_trunc('seconds', t.age)) end, '; ') as problem,
             pg_catalog.min(case when t.prepared then 'COMMIT PREPARED or ROLLBACK PREPARED; see pg_prepared_xacts'
               else pg_catalog.format('later messages of its keys wait for it: end it, or pg_terminate_backend(%s)',
                                      t.pid) end) as remedy
      from (select x.pid, x.xid, x.prepared, x.age from outbox_internal.open_transactions() x
            where x.age > case when x.prepared then interval '1 minute' else interval '30 seconds' end
            order by x.age desc limit 3) t) p
union all
select 'locks', null, h.pid is null,
       case when h.pid is not null
            then pg_catalog.format('process %s%s has had rows of outbox_partitions locked since %s: no other worker can'
                                   ' take over %s partition(s)',
                                   h.pid, ' (' || h.kind || ')', pg_catalog.date_trunc('seconds', h.since),
                                   h.partitions) end,
       case when h.pid is not null
            then pg_catalog.format('if it is stopped, kill -CONT %s at the shell of the server; else'
                                   ' pg_terminate_backend(%s)', h.pid, h.pid) end
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
select 'lag', null, coalesce(s.age < interval '1 minute', true),
       case when s.age >= interval '1 minute'
            then pg_catalog.format('the oldest message that can be delivered has waited for %s',
                                   pg_catalog.date_trunc('seconds', s.age)) end,
       case when s.age >= interval '1 minute' then 'see the other checks; if all are ok, raise outbox.batch_size' end
from (select pg_catalog.statement_timestamp() - pg_catalog.min(f.enqueued_at) as age
      from waiting f where not f.is_blocked and not f.is_stopped) s;

-- ---- rates with three decimals: 3 messages a minute are 0.05 a second -----------------------------------------------

create or replace view @extschema@.outbox_status as
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

create or replace view @extschema@.outbox_destination_status as
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

-- ---- an event has at most 15 MiB ------------------------------------------------------------------------------------

create or replace function @extschema@.outbox_fetch_unpublished(
  max_rows integer default 100, destination text default 'default', claim_ttl interval default '15 s',
  out seq bigint, out id uuid, out type text, out payload jsonb, out headers jsonb, out key text, out attempts integer,
  out claim_token bigint, out claim_until timestamptz, out aggregate_type text, out aggregate_id text,
  out operation text, out previous_payload jsonb, out metadata jsonb, out actor text, out correlation_id text,
  out created_at timestamptz, out replayed boolean, out message_id text
) returns setof record language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set jit = off
-- Bodies in outbox_events stay out of line until they are sent. Those of a source are copied: 32 MiB of text and the
-- last of them may take six times as much as jsonb.
set work_mem = '512MB' as $$
#variable_conflict use_column
declare
  to_destination constant text := coalesce(outbox_fetch_unpublished.destination, 'default');
  ttl_s constant double precision := ceil(extract(epoch from claim_ttl));
  bytes_max constant bigint := 33554432; -- as a claim of a worker
  event_bytes_max constant integer := 15728640; -- EVENT_BYTES_MAX in crates/core
  is_converted constant boolean := getdatabaseencoding() <> 'UTF8';
  claims outbox_internal.relayed[];
  events outbox_internal.source_row[];
  given integer := 0;
  bytes bigint := 0;
  wanted integer;
  got integer;
  bad bigint[];
begin
  if max_rows is null or max_rows not between 1 and 10000 then
    raise exception 'max_rows is %', coalesce(max_rows::text, 'NULL')
      using errcode = 'invalid_parameter_value', hint = 'Give a number from 1 to 10000.';
  end if;
  if ttl_s is null or ttl_s not between 1 and 86400 then
    raise exception 'claim_ttl is %', coalesce(claim_ttl::text, 'NULL')
      using errcode = 'invalid_parameter_value', hint = 'Give a time from 1 second to 1 day.';
  end if;
  if not outbox_internal.destination_exists(to_destination) then
    raise exception 'destination "%" does not exist', to_destination
      using errcode = 'undefined_object', hint = 'See outbox_destination_status.';
  end if;
  -- A message that can never be given to a relay fails, as with a worker. It must not delay
  -- later messages, so a few more rounds follow.
  if not exists (select from @extschema@.outbox_source) then
    for turn in 1 .. 10 loop
      claims := array(select c from outbox_internal.relay_claim(max_rows, to_destination, ttl_s, bytes_max) c);
      exit when claims = '{}';
      bad := array(
        select c.seq
        from unnest(claims) c join @extschema@.outbox_events e on e.seq = c.seq
        cross join lateral (select case
          when e.body_bytes > event_bytes_max then
            format('the event has %s bytes, which exceeds the limit of 15 MiB', e.body_bytes)
          when is_converted then (
            select outbox_internal.unreadable(c.key, t) from outbox_internal.event_text t where t.event_tid = e.ctid)
          end as why offset 0) u
        where u.why is not null
          and outbox_internal.end_claim(c.seq, c.claim_token, to_destination, u.why, false, true));
      return query
      select c.seq, e.id, e.type, e.payload, e.headers, c.key, c.attempts, c.claim_token, c.claim_until,
             e.aggregate_type, e.aggregate_id, e.operation, e.previous_payload, e.metadata, e.actor, e.correlation_id,
             e.created_at, c.replayed, e.id::text
      from unnest(claims) c left join @extschema@.outbox_events e on e.seq = c.seq
      where c.seq <> all (bad) order by c.seq;
      exit when found;
    end loop;
    return;
  end if;
  -- The size of the events of a source is known when they are read: the first ones determine how many more are claimed.
  wanted := least(max_rows, 25);
  for turn in 1 .. 10 loop
    claims := array(select c from outbox_internal.relay_claim(wanted, to_destination, ttl_s, bytes_max) c
                    order by c.seq);
    exit when claims = '{}';
    events := array(select e from outbox_internal.source_rows(
                      array(select c.seq from unnest(claims) c order by 1), bytes_max - bytes) e);
    perform outbox_internal.end_claim(c.seq, c.claim_token, to_destination, e.error, false, e.fault = 'missing')
    from unnest(claims) c join unnest(events) e on e.seq = c.seq where e.fault is not null;
    return query
    select c.seq, case when e.id ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then e.id::uuid end, e.type,
           e.payload,
           e.headers, c.key, c.attempts, c.claim_token, c.claim_until, e.aggregate_type, e.aggregate_id, e.operation,
           e.previous_payload, e.metadata, e.actor, e.correlation_id, e.created_at, c.replayed, e.id
    from unnest(claims) c join unnest(events) e on e.seq = c.seq where e.fault is null order by c.seq;
    get diagnostics got = row_count;
    given := given + got;
    bytes := bytes + (
      select coalesce(sum(coalesce(pg_column_size(e.payload), 0) + coalesce(pg_column_size(e.previous_payload), 0)
                          + coalesce(pg_column_size(e.metadata), 0) + coalesce(pg_column_size(e.headers), 0)), 0)
      from unnest(events) e);
    if cardinality(events) < cardinality(claims) then
      perform outbox_internal.relay_return(
        array(select c from unnest(claims) c where not exists (select from unnest(events) e where e.seq = c.seq)),
        to_destination);
      exit;
    end if;
    exit when given >= max_rows or bytes >= bytes_max or (given > 0 and cardinality(claims) < wanted);
    wanted := least(max_rows - given, greatest(1, (bytes_max - bytes) * given / greatest(bytes, 1)));
  end loop;
end
$$;

-- ---- a request waits for a worker that starts again -----------------------------------------------------------------

create or replace function outbox_internal.request_workers(
  read_limit bigint, until timestamptz, out worker_id text, out done boolean, out claimed bigint, out published bigint,
  out failed bigint, out duration_us bigint, out backoff_ms bigint, out renewed_heartbeat boolean,
  out purged_stale bigint, out active_workers bigint, out desired_count bigint, out owned_count bigint,
  out leased_count bigint, out released_count bigint
) returns setof record language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  none_since timestamptz := clock_timestamp(); -- since when no worker runs; NULL = one runs
  request_id bigint;
  answers bigint[] := '{}';
  states bigint[] := '{}';
  problem text;
  remedy text;
begin
  loop
    if coalesce(request_id, 0) = 0 then
      request_id := outbox_internal.begin_request(read_limit);
    end if;
    if request_id > 0 then
      answers := outbox_internal.answers(
        request_id, ceil(greatest(1, least(1000, extract(epoch from until - clock_timestamp()) * 1000)))::integer);
      states := array(select answers[i + 2] from generate_series(0, cardinality(answers) - 1, 14) i);
      exit when 2 = all (states) and states <> '{}';
      none_since := case when states = '{}' then coalesce(none_since, clock_timestamp()) end;
    else
      perform pg_sleep(0.01);
    end if;
    exit when clock_timestamp() >= until;
    -- A worker that is new, or starts again, runs by then.
    exit when states = '{}' and request_id is not null and clock_timestamp() > none_since + interval '2 seconds';
  end loop;
  perform outbox_internal.end_request();

  if request_id is null then
    raise exception 'another session has a request to the workers of this database'
      using errcode = 'lock_not_available', hint = 'Call again, or with a longer timeout.';
  elsif states = '{}' then
    select h.problem, h.remedy into problem, remedy
    from @extschema@.outbox_health h where h."check" in ('preload', 'workers') and not h.ok order by h."check" limit 1;
    if problem is null and exists (
      select from @extschema@.outbox_workers w where w.heartbeat_until > clock_timestamp()
        and w.worker_id like 'work-%') then
      problem := 'Workers outside the server do not take part.';
      remedy := 'Set outbox.workers, or run outboxctl work --once.';
    end if;
    raise exception 'no worker runs in this database'
      using errcode = 'object_not_in_prerequisite_state', detail = coalesce(problem, 'The last one has just ended.'),
            hint = coalesce(remedy, 'Call again.');
  end if;
  return query
  select format('server-%s', a[1] + 1), a[2] = 2, a[3], a[4], a[5], a[6], a[7], a[8] = 1, a[9], a[10], a[11], a[12],
         a[13], a[14]
  from (select answers[i + 1 : i + 14] as a from generate_series(0, cardinality(answers) - 1, 14) i) w
  where a[2] > 0;
end
$$;

-- ---- no message waits for another without leases --------------------------------------------------------------------

create or replace function outbox_internal.configure_for(named_by oid, partition_count integer, leasing boolean, partitioner text)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  old @extschema@.outbox_settings;
  new @extschema@.outbox_settings;
  before text;
begin
  if partition_count not between 1 and 1024 then
    raise exception 'partition_count % is out of range', partition_count
      using errcode = 'numeric_value_out_of_range', hint = 'Use a count from 1 to 1024.';
  end if;
  -- Waits for every transaction that has enqueued, also prepared ones, and blocks new ones.
  lock table @extschema@.outbox_settings in access exclusive mode;
  select * into strict old from @extschema@.outbox_settings;
  before := old.partitioner;
  new := old;
  new.partition_count := coalesce(partition_count, old.partition_count);
  new.leasing := coalesce(leasing, old.leasing);
  if partitioner = '' then
    new.partitioner := null;
    new.partitioner_owner := null;
  elsif partitioner is not null then
    select c.name, c.owner into new.partitioner, new.partitioner_owner
    from outbox_internal.check_partitioner(partitioner, new.partition_count::integer, named_by) c;
  end if;
  if (new.partition_count, new.leasing) = (old.partition_count, old.leasing)
     and (new.partitioner, new.partitioner_owner) is not distinct from (old.partitioner, old.partitioner_owner) then
    return;
  end if;
  -- A partitioner that cannot be called any more does not say which keys it placed by name: all keys are placed again.
  if old.partitioner is not null and not exists (
       select from outbox_internal.partitioner(old.partitioner) p join pg_roles r on r.oid = p.proowner
       where r.rolname = old.partitioner_owner and not r.rolsuper) then
    old.partitioner := '';
  end if;
  if not outbox_internal.send_workers_away() then
    raise exception 'the workers of this database did not end in time'
      using errcode = 'object_in_use', hint = 'Try again; see outbox_worker_status.';
  end if;
  lock table @extschema@.outbox_partitions, @extschema@.outbox, @extschema@.outbox_waiting, @extschema@.outbox_dead
    in access exclusive mode;
  -- Deleted and inserted, not updated: a transaction with an older snapshot then finds no row, and fails instead of
  -- using the old count.
  truncate @extschema@.outbox_settings;
  insert into @extschema@.outbox_settings (partition_count, leasing, partitioner, partitioner_owner)
  values (new.partition_count, new.leasing, new.partitioner, new.partitioner_owner);
  -- Every lease ends here.
  update @extschema@.outbox_partitions p
  set lease_owner = null, lease_until = null, lease_epoch = p.lease_epoch + 1, updated_at = clock_timestamp();
  delete from @extschema@.outbox_partitions p where p.partition >= new.partition_count;
  if not new.leasing then
    -- Without leases no message waits for another, and no worker would bring these back.
    with freed as (
      delete from @extschema@.outbox_waiting w where w.state = 'g'
      returning w.seq, w.enqueued_at, w.attempts, w.partition, w.crashes, w.replayed, w.destination, w.key,
                w.last_error, w.expires_at
    )
    insert into @extschema@.outbox
      (seq, enqueued_at, attempts, partition, crashes, replayed, destination, key, last_error, expires_at)
    select f.* from freed f
    on conflict do nothing;
    update @extschema@.outbox_dead d set blocks = false where d.blocks;
  end if;
  update @extschema@.outbox o
  set partition = outbox_internal.repartition(o.seq, o.key, o.partition, old, new),
      claim_token = null, claim_until = null;
  perform from @extschema@.outbox o where outbox_internal.record_shown(o.destination, o.partition, o.seq);
  update @extschema@.outbox_waiting w
  set partition = outbox_internal.repartition(w.seq, w.key, w.partition, old, new);
  update @extschema@.outbox_dead d
  set partition = outbox_internal.repartition(d.seq, d.key, d.partition, old, new);
  perform outbox_internal.record_audit('configure'::text, jsonb_build_object(
    'partition_count', new.partition_count, 'leasing', new.leasing, 'partitioner', new.partitioner,
    'partition_count_before', old.partition_count, 'leasing_before', old.leasing, 'partitioner_before', before),
    null::bigint, null::text);
end
$$;

-- ---- the roles can be dropped after the extension -------------------------------------------------------------------

-- Core keeps a grant of this script as a part of the extension, also after DROP EXTENSION. Since version 17 its record
-- keeps the role from being dropped, because DROP OWNED BY fails at grants on parameters. This one needs no record.
do $record$
declare
  parameter constant oid := (select p.oid from pg_catalog.pg_parameter_acl p where p.parname = 'outbox.replaying');
begin
  delete from pg_catalog.pg_init_privs i
  where i.classoid = 'pg_catalog.pg_parameter_acl'::pg_catalog.regclass and i.objoid = parameter;
  delete from pg_catalog.pg_shdepend d
  where d.classid = 'pg_catalog.pg_parameter_acl'::pg_catalog.regclass and d.objid = parameter and d.deptype = 'i';
end
$record$;
