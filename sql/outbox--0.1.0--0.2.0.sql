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

create function outbox_internal.remove_initial_privileges(parameter oid)
returns void language c volatile strict as 'MODULE_PATHNAME', 'outbox_remove_initial_privileges_wrapper';
comment on function outbox_internal.remove_initial_privileges(oid) is
  'For the scripts of the extension: removes core''s record that the privileges of an object are part of it.';

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

create or replace function outbox_internal.schema_problem(out problem text, out remedy text)
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

create function outbox_internal.destination_of(seq bigint, destination text)
returns text language plpgsql stable set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  places text[];
begin
  if destination is not null then
    return destination;
  end if;
  places := array(select d.destination from @extschema@.outbox_dead d where d.seq = seq order by 1);
  if places = '{}' then
    places := array(select w.destination from @extschema@.outbox_waiting w where w.seq = seq order by 1);
  end if;
  if cardinality(places) > 1 and 'default' <> all (places) then
    raise exception 'message % is at several destinations: %', seq, array_to_string(places, ', ')
      using errcode = 'cardinality_violation',
            hint = format('Name one as the second argument: (%s, %L).', seq, places[1]);
  end if;
  return case when cardinality(places) > 0 and 'default' <> all (places) then places[1] else 'default' end;
end
$$;
comment on function outbox_internal.destination_of(bigint, text) is
  'The destination that a call about one message means if it names none: the default one, unless the message is dead or'
  ' waits at another one only.';

create function outbox_internal.ttl_max()
returns interval language sql stable
begin atomic
  select greatest(pg_catalog.current_setting('outbox.lease_ttl')::interval,
                  pg_catalog.current_setting('outbox.heartbeat_ttl')::interval);
end;
comment on function outbox_internal.ttl_max() is
  'Worker protocol: no lease or heartbeat lasts longer from now on.';

create function outbox_internal.claims_last(token bigint)
returns boolean language c volatile strict as 'MODULE_PATHNAME', 'outbox_claims_last_wrapper';
comment on function outbox_internal.claims_last(bigint) is
  'Worker protocol with leasing off: whether the worker with this token still renews its claims, from shared memory.';

create function outbox_internal.renumber(seqs bigint[], destinations text[], partitions smallint[])
returns bigint[] language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  sequence constant regclass := pg_get_serial_sequence('@extschema@.outbox_events', 'seq');
  old constant bigint[] := array(select distinct s from unnest(renumber.seqs) s order by s);
  new constant bigint[] := array(select nextval(sequence) from generate_series(1, cardinality(old)));
  renumbered constant bigint[] := array(
    select new[dense_rank() over (order by u.seq)] from unnest(renumber.seqs) with ordinality u (seq, n) order by u.n);
begin
  update @extschema@.outbox_events e set seq = m.new
  from unnest(old, new) m (old, new) where e.seq = m.old;
  update @extschema@.outbox o set seq = m.new
  from unnest(renumber.seqs, renumbered, renumber.destinations, renumber.partitions) m (old, new, destination, partition)
  where o.destination = m.destination and o.partition = m.partition and o.seq = m.old;
  return renumbered;
end
$$;
comment on function outbox_internal.renumber(bigint[], text[], smallint[]) is
  'Gives messages of this transaction and their events new seqs, in this order: what happened before them was written'
  ' after them. Returns the new seqs.';

-- ---- the name of a consumer belongs to a role -----------------------------------------------------------------------

create table @extschema@.outbox_inbox_owners (
  consumer text collate "C" primary key,
  owner    name not null -- by name, so that a dump can be restored where it does not exist
);
comment on table @extschema@.outbox_inbox_owners is
  'Which role owns the name of a consumer: the first one that used it. Its members may use the name, too.';
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_inbox_owners', '');

create or replace function @extschema@.outbox_inbox_receive(consumer text, message_id text)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  caller constant name := coalesce(nullif(current_setting('role'), 'none'), session_user);
  owner name;
begin
  if outbox_inbox_receive.consumer is null or outbox_inbox_receive.message_id is null then
    raise exception '% is NULL', case when outbox_inbox_receive.consumer is null then 'consumer' else 'message_id' end
      using errcode = 'null_value_not_allowed', hint = 'Pass a name of the consumer and the message_id of the message.';
  end if;
  if greatest(octet_length(outbox_inbox_receive.consumer), octet_length(outbox_inbox_receive.message_id)) > 255 then
    raise exception 'consumer or message_id is longer than 255 bytes'
      using errcode = 'program_limit_exceeded',
      hint = 'A message_id of AMQP is never longer; shorten the name of the consumer.';
  end if;
  loop
    select o.owner into owner from @extschema@.outbox_inbox_owners o
    where o.consumer = outbox_inbox_receive.consumer and to_regrole(quote_ident(o.owner)) is not null;
    -- A superuser, who may use every name, owns none: a try by hand must not take it from the application.
    exit when owner is not null
      or not exists (select from pg_roles r where r.rolname = caller and not r.rolsuper);
    insert into @extschema@.outbox_inbox_owners as o (consumer, owner) values (outbox_inbox_receive.consumer, caller)
    on conflict (consumer) do update set owner = excluded.owner where to_regrole(quote_ident(o.owner)) is null;
  end loop;
  if not pg_has_role(caller, owner, 'usage') then
    raise exception 'consumer "%" belongs to role %', outbox_inbox_receive.consumer, quote_ident(owner)
      using errcode = 'insufficient_privilege',
            hint = format('Use another name, or: GRANT %1$I TO %2$I; or as a member of outbox_admin:'
                          ' SELECT outbox_inbox_assign(%3$L, %2$L).', owner, caller, outbox_inbox_receive.consumer);
  end if;
  -- If another transaction is receiving the same message, this waits for its end: false if it commits, true if it does
  -- not.
  insert into @extschema@.outbox_inbox (consumer, message_id)
  values (outbox_inbox_receive.consumer, outbox_inbox_receive.message_id) on conflict do nothing;
  return found;
end
$$;
comment on function @extschema@.outbox_inbox_receive(text, text) is
  'True if this consumer receives this message for the first time, false if it has received it before. Part of the'
  ' caller''s transaction: a rollback forgets it. The name belongs to the first role that uses it.';

create function @extschema@.outbox_inbox_assign(consumer text, owner name)
returns void language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  if outbox_inbox_assign.consumer is null then
    raise exception 'consumer is NULL'
      using errcode = 'null_value_not_allowed', hint = 'Pass the name of a consumer.';
  end if;
  if outbox_inbox_assign.owner is null then
    delete from @extschema@.outbox_inbox_owners o where o.consumer = outbox_inbox_assign.consumer;
  elsif to_regrole(quote_ident(outbox_inbox_assign.owner)) is null then
    raise exception 'role "%" does not exist', outbox_inbox_assign.owner
      using errcode = 'undefined_object', hint = 'Pass a role, or NULL for the next one that uses the name.';
  else
    insert into @extschema@.outbox_inbox_owners as o (consumer, owner)
    values (outbox_inbox_assign.consumer, outbox_inbox_assign.owner)
    on conflict (consumer) do update set owner = excluded.owner;
  end if;
  perform outbox_internal.record_audit(
    'assign'::text,
    jsonb_build_object('consumer', outbox_inbox_assign.consumer, 'owner', outbox_inbox_assign.owner),
    null::bigint, null::text);
end
$$;
comment on function @extschema@.outbox_inbox_assign(text, name) is
  'Gives the name of a consumer to a role, such as a group of roles that share it; NULL = to the next one that uses it.';

alter table @extschema@.outbox_audit drop constraint outbox_audit_action_check,
  add constraint outbox_audit_action_check check (action in ('retry', 'discard', 'replay', 'purge', 'configure', 'forget',
                                                             'adopt', 'source', 'pause', 'resume', 'assign'));
comment on column @extschema@.outbox_audit.count is
  'How many messages were changed; NULL for what changes no message: configure, adopt, source, assign, pause and'
  ' resume.';

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

create function outbox_internal.record_ready(
  destinations text[], partitions smallint[], seqs bigint[], counts bigint[]
) returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform outbox_internal.record_shown(l.destination, l.partition, l.seq)
  from unnest(destinations, partitions, seqs) l (destination, partition, seq);
  perform outbox_internal.record_pending(l.destination, sum(l.n)::bigint)
  from unnest(destinations, counts) l (destination, n) group by l.destination;
  perform outbox_internal.wake(coalesce(sum(c), 0)::bigint, coalesce(partitions, '{}'), coalesce(seqs, '{}'))
  from unnest(counts) c;
end
$$;
comment on function outbox_internal.record_ready(text[], smallint[], bigint[], bigint[]) is
  'At COMMIT, notifies the workers of messages that were put into outbox by hand: of each lane the first seq and how'
  ' many, which count as pending.';

create function outbox_internal.make_ready(
  tids tid[], out destination text, out partition smallint, out seq bigint
) returns setof record language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  for destination, partition, seq in
    with gone as (
      delete from @extschema@.outbox_waiting w where w.ctid = any (tids)
      returning w.seq, w.enqueued_at, w.attempts, w.partition, w.crashes, w.replayed, w.destination, w.key, w.last_error,
                w.expires_at
    )
    insert into @extschema@.outbox as o
      (seq, enqueued_at, attempts, partition, crashes, replayed, destination, key, last_error, expires_at)
    select g.* from gone g
    on conflict do nothing
    returning o.destination, o.partition, o.seq
  loop
    perform outbox_internal.record_shown(destination, partition, seq);
    return next;
  end loop;
end
$$;
comment on function outbox_internal.make_ready(tid[]) is
  'Moves these rows of outbox_waiting to outbox; returns where they are now.';

create function outbox_internal.withdraw_unless_taken(destination text, partition smallint, seq bigint)
returns boolean language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_withdraw_unless_taken_wrapper';
comment on function outbox_internal.withdraw_unless_taken(text, smallint, bigint) is
  'Withdraws an unclaimed message from the fast path: from now on it must be claimed. False if a worker has it in flight'
  ' there.';

create function outbox_internal.revive(tids tid[])
returns bigint language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  partitions constant smallint[] := (select s.partitions from @extschema@.outbox_settings s);
  ready record; -- of each lane the first message that came back, and how many
begin
  with revived as ( -- an older snapshot than outbox_configure() fails here: that call has moved each dead letter
    delete from @extschema@.outbox_dead d where d.ctid = any (tids) returning d.*
  ), made_due as (
    -- It may already wait again: it was enqueued again while it was dead.
    update @extschema@.outbox_waiting w set due_at = now(), attempts = 0, crashes = 0, expires_at = null
    from revived r where w.seq = r.seq and w.destination = r.destination and w.state <> 'g'
  ), back as (
    insert into @extschema@.outbox as o (destination, partition, seq, key, replayed, enqueued_at, last_error)
    select r.destination, r.partition, r.seq, r.key, r.replayed, r.enqueued_at, r.reason from revived r
    where (select true from @extschema@.outbox_waiting w where w.seq = r.seq and w.destination = r.destination) is null
      -- Each lane is queried separately, which OFFSET 0 makes sure of: otherwise a planner without statistics reads the
      -- whole destination.
      and (select true from unnest(partitions) p (n)
           cross join lateral (select from @extschema@.outbox x
                               where x.destination = r.destination and x.partition = p.n and x.seq = r.seq offset 0) x
           limit 1) is null
    on conflict do nothing
    returning o.destination, o.partition, o.seq
  ), lanes as (
    select b.destination, b.partition, min(b.seq) as low, count(*) as n from back b group by 1, 2
  )
  select (select count(*) from revived) as revived, array_agg(l.destination) as destinations,
         array_agg(l.partition) as partitions, array_agg(l.low) as lows, array_agg(l.n) as counts
    into ready from lanes l;
  if ready.revived > 0 then
    perform outbox_internal.record_ready(ready.destinations, ready.partitions, ready.lows, ready.counts);
  end if;
  return ready.revived;
end
$$;
comment on function outbox_internal.revive(tid[]) is
  'Brings these dead letters back; their attempts start again, and they no longer expire. Returns how many.';

create function outbox_internal.discard(
  ready tid[], waiting tid[], dead tid[], reason text, out discarded bigint, out waited bigint
) language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
begin
  with of_outbox as (
    delete from @extschema@.outbox o where o.ctid = any (ready)
    returning o.seq, o.enqueued_at, o.attempts, o.partition, o.replayed, o.destination, o.key, null::text as reason
  ), of_waiting as (
    delete from @extschema@.outbox_waiting w where w.ctid = any (waiting)
    returning w.seq, w.enqueued_at, w.attempts, w.partition, w.replayed, w.destination, w.key, null::text as reason
  ), of_dead as (
    delete from @extschema@.outbox_dead d where d.ctid = any (dead)
    returning d.seq, d.enqueued_at, d.attempts, d.partition, d.replayed, d.destination, d.key, d.reason
  ), written as (
    insert into @extschema@.outbox_history
      (seq, enqueued_at, published_at, attempts, partition, discarded, replayed, destination, key, last_error)
    select x.seq, x.enqueued_at, clock_timestamp(), x.attempts, x.partition, true, x.replayed, x.destination, x.key,
           coalesce(reason, 'dead for longer than outbox.dead_retention: ' || x.reason)
    from (select * from of_outbox union all select * from of_waiting union all select * from of_dead) x
    returning 1
  )
  select count(*), (select count(*) from of_outbox) + (select count(*) from of_waiting) from written
    into discarded, waited;
end
$$;
comment on function outbox_internal.discard(tid[], tid[], tid[], text) is
  'Moves these rows of outbox, outbox_waiting and outbox_dead to the history, as discarded for a reason (NULL = dead'
  ' for too long). Returns how many, and how many of them waited.';

create function outbox_internal.expire_heads(destination text, partitions smallint[], lane_rows bigint)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  expired record;
begin
  for expired in
    select b.count from outbox_internal.dead_letter(
      array(select x.tid from unnest(partitions) p (n) cross join lateral (
              select o.ctid as tid, o.expires_at from @extschema@.outbox o
              where o.destination = expire_heads.destination and o.partition = p.n
              order by o.destination, o.partition, o.seq limit lane_rows) x
            where x.expires_at <= clock_timestamp()),
      array(select w.ctid from @extschema@.outbox_waiting w
            where w.expires_at <= (select clock_timestamp()) and w.destination = expire_heads.destination limit 1000),
      null::bigint[]) b
  loop
    perform outbox_internal.record_pending(destination, -expired.count);
    perform outbox_internal.record_ended(0::bigint, 0::bigint, expired.count);
    perform outbox_internal.record_error(
      destination, 'expired: it was not sent in time'::text, true, null::bigint, expired.count);
  end loop;
end
$$;
comment on function outbox_internal.expire_heads(text, smallint[], bigint) is
  'Makes dead letters of the expired messages in the way of a relay: among the first rows of each lane, and among'
  ' those that wait.';

create function outbox_internal.claimable_heads(
  destination text, partitions smallint[], lane_rows integer, by_partition boolean,
  out tid tid, out seq bigint, out key text, out partition smallint
) returns setof record language sql stable
set search_path = pg_catalog, pg_temp as $$
  with blocked as materialized (
    select g.partition, g.key, g.blocker from outbox_internal.blocked_keys($2) g
    where g.destination = $1 and g.blocker is not null
  ), lane as (
    select x.*, row_number() over (partition by x.partition, case when not $4 then x.key end order by x.seq) as place
    from unnest($2) p (n) cross join lateral (
      select o.ctid as tid, o.seq, o.partition, o.key, o.claim_token, o.claim_until from @extschema@.outbox o
      where o.destination = $1 and o.partition = p.n and (o.expires_at is null or o.expires_at > clock_timestamp())
      order by o.destination, o.partition, o.seq limit $3) x
  )
  select l.tid, l.seq, l.key, l.partition from lane l
  where (l.claim_token is null or not outbox_internal.claim_is_live(l.claim_token, l.partition, l.claim_until))
    -- A worker notices a pause later.
    and not outbox_internal.is_taken($1, l.partition, l.seq)
    and (l.key is null and not $4
         or l.place = 1
            and not exists (select from blocked c where c.partition = l.partition and ($4 or c.key = l.key)
                            and c.blocker < l.seq)
            and not exists (select from @extschema@.outbox_waiting w
                            where w.state = 'g' and w.destination = $1 and w.partition = l.partition and w.key collate "C" = l.key
                              and w.seq < l.seq))
  order by l.seq;
$$;
comment on function outbox_internal.claimable_heads(text, smallint[], integer, boolean) is
  'Messages that a relay may claim, as one snapshot shows them among the first rows of each lane. These are messages'
  ' without a key, and the first of each key unless it is claimed or behind one that failed. With by_partition the'
  ' first of each partition.';

alter function outbox_internal.judge rename to decide_failure;
comment on function outbox_internal.decide_failure(text, text[], bigint, integer, text, boolean) is
  'The outcome of a failure, or of a message that can never be sent, by the rules of a destination: the action for'
  ' settle() (r, d, D or B), delay in ms, reason. Its wrapper and options describe the destination (NULL = by the settings).';

alter function outbox_internal.held rename to behind_open_transactions;
drop function outbox_internal.request_workers(bigint, timestamptz);
create function outbox_internal.request_workers(read_limit bigint, until timestamptz)
returns bigint[] language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
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
  return answers;
end
$$;
comment on function outbox_internal.request_workers(bigint, timestamptz) is
  'Requests delivery up to a seq, 0 = one pass, and waits for the answers of the workers, which it returns as answers()'
  ' does.';

create function outbox_internal.set_plans()
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  lookup constant text := ' set enable_seqscan = off set jit = off';
  -- If one row is expected, a bitmap or a sort of the whole lane looks as cheap as the index that returns the first rows
  -- in order. It then costs a second for each claim.
  in_order constant text := lookup || ' set enable_bitmapscan = off set enable_sort = off';
  row_by_row constant text := in_order || ' set enable_hashjoin = off set enable_mergejoin = off';
  planned_once constant text := row_by_row || ' set plan_cache_mode = force_generic_plan';
  -- A result of 32 MiB of bodies and the last message, whose 15 MiB of text may take six times as much, stays in memory.
  of_bodies constant text := ' set work_mem = ''128MB''';
  thing record;
begin
  for thing in
    select p.oid::regprocedure as identity, f.plan
    from (values
      -- The protocol.
      ('claim', planned_once), ('claim_waiting', planned_once), ('claim_unleased', planned_once), ('due', planned_once),
      ('make_ready', planned_once), ('blocked_keys', planned_once), ('expire', planned_once), ('dead_letter', planned_once),
      -- By ctid, also if vacuum saw an empty outbox and any plan looks cheap; but what it calls uses an index.
      ('settle', planned_once || ' set enable_indexscan = off'),
      ('record_failed', in_order || ' set enable_indexscan = on'),
      ('work_claim', of_bodies), ('work_claim_waiting', of_bodies), ('work_claim_unleased', of_bodies),
      -- Relays and waits.
      ('outbox_fetch_unpublished', in_order || of_bodies), ('relay_claim', in_order), ('claimable_heads', in_order),
      ('expire_heads', in_order), ('next', in_order), ('unended', in_order),
      ('find_row', lookup), ('end_claim', lookup), ('outcome', lookup), ('outbox_relay', lookup),
      -- Manual actions, and captured tables.
      ('dead_matching', row_by_row), ('revive', row_by_row), ('discard', row_by_row), ('renumber', row_by_row),
      ('trim_inbox', in_order),
      -- Why a message waits.
      ('message_rows', row_by_row), ('obstacles', row_by_row),
      -- Planned with its values: BRIN finds the range that they are in.
      ('outbox_replay', lookup || ' set plan_cache_mode = force_custom_plan'),
      ('replayable', lookup || ' set plan_cache_mode = force_custom_plan'),
      -- Reads the history of an aggregate as a whole.
      ('outbox_purge', ' set enable_nestloop = off set jit = off')) f (name, plan)
    left join (
      select x.oid, x.proname from pg_proc x
      join pg_depend d on d.classid = 'pg_proc'::regclass and d.objid = x.oid and d.deptype = 'e'
      join pg_extension e on d.refclassid = 'pg_extension'::regclass and e.oid = d.refobjid and e.extname = 'outbox'
    ) p on p.proname = f.name
  loop
    execute format('alter function %s reset all set search_path = pg_catalog, pg_temp%s', thing.identity, thing.plan);
  end loop;
end
$$;
comment on function outbox_internal.set_plans() is
  'For the scripts of the extension, and after a function was replaced: sets how the statements of functions are planned.';
create function outbox_internal.message_rows(
  of_seq bigint, out seq bigint, out destination text, out partition_key text, out partition smallint, out key text,
  out status text, out attempts integer, out crashes smallint, out available_at timestamptz,
  out enqueued_at timestamptz, out ended_at timestamptz, out last_error text, out replayed boolean,
  out expires_at timestamptz, out blocks boolean, out claim_token bigint
) returns setof record language sql volatile set search_path = pg_catalog, pg_temp
begin atomic
  select m.seq, m.destination, outbox_internal.partition_label(m.partition::integer), m.partition, m.key, m.status,
         m.attempts, m.crashes, m.available_at, m.enqueued_at, m.ended_at, m.last_error, m.replayed, m.expires_at,
         m.blocks, m.claim_token
  from (
    select o.seq, o.destination, o.partition, o.key,
           case when outbox_internal.claim_is_live(o.claim_token, o.partition, o.claim_until)
                  or outbox_internal.is_taken(o.destination, o.partition, o.seq) then 'in flight'
                else 'ready' end as status,
           o.attempts, o.crashes, o.enqueued_at as available_at, o.enqueued_at, null::timestamptz as ended_at,
           o.last_error, o.replayed, o.expires_at, null::boolean as blocks, o.claim_token
    -- No index of outbox begins with seq: looked up in each lane.
    from outbox_internal.first_pending l cross join lateral (
      select x.* from @extschema@.outbox x
      where x.destination = l.destination and x.partition = l.partition and x.seq = of_seq offset 0) o
    union all
    select w.seq, w.destination, w.partition, w.key,
           case w.state when 'b' then 'retrying' when 'g' then 'blocked' else 'scheduled' end,
           w.attempts, w.crashes, w.due_at, w.enqueued_at, null, w.last_error, w.replayed, w.expires_at, null, null
    from @extschema@.outbox_waiting w where w.seq = of_seq
    union all
    select d.seq, d.destination, d.partition, d.key, 'dead', d.attempts, null, null, d.enqueued_at, d.died_at, d.reason,
           d.replayed, d.expires_at, d.blocks, null
    from @extschema@.outbox_dead d where d.seq = of_seq
    union all
    select h.seq, h.destination, h.partition, h.key, case when h.discarded then 'discarded' else 'published' end,
           h.attempts, null, null, h.enqueued_at, h.published_at, h.last_error, h.replayed, null, null, null
    from @extschema@.outbox_history h where h.seq = of_seq) m
  -- What has not ended comes first, then dead letters; in each group the latest.
  order by m.status in ('published', 'discarded'), m.status = 'dead', m.status not in ('ready', 'in flight'),
           coalesce(m.ended_at, m.available_at) desc nulls last;
end;
comment on function outbox_internal.message_rows(bigint) is
  'The rows of the message with this seq in all tables, one for each destination and replay: as outbox_messages has'
  ' them, without the event, and with an index.';

create function outbox_internal.obstacles(
  messages jsonb, out destination text, out seq bigint, out rank bigint, out reason text, out why text, out remedy text,
  out behind bigint
) returns setof record language sql volatile set search_path = pg_catalog, pg_temp
begin atomic
  with message as materialized (
    select m.destination collate "C" as destination, substr(m.partition_key, 2)::smallint as partition, m.seq, m.key,
           m.status, coalesce(m.alone, false) as alone
    from jsonb_to_recordset(messages)
         m (destination text, partition_key text, seq bigint, key text, status text, alone boolean)
    where not pg_is_in_recovery()
  ), problem as materialized (
    select h."check", h.destination, h.problem, h.remedy, row_number() over () as n
    from @extschema@.outbox_health h
    where not h.ok and h."check" in ('preload', 'enabled', 'identity', 'role', 'workers', 'source', 'standbys', 'partitions',
                                     'broker', 'blocked', 'destination', 'bodies', 'paused')
  ), hindrance as materialized ( -- the problems of each message
    select m.destination, m.seq, p."check", p.destination as of_destination, p.problem, p.remedy, p.n
    from message m join problem p
      on p.destination = m.destination
        or p.destination is null and p."check" not in ('standbys', 'partitions')
        or p."check" = 'partitions' and not exists (select from @extschema@.outbox_partitions x where x.partition = m.partition)
  ), place as materialized (
    select s.destination, s.state, s.reason, s.detail from @extschema@.outbox_destination_status s
    where s.destination in (select m.destination from message m)
  ), lane as materialized (
    select l.destination, l.partition, b.blocker, outbox_internal.partition_label(l.partition::integer) as label,
           -- Messages in flight are the first of their lane.
           (select t.seq
            from (select o.* from @extschema@.outbox o
                  where o.destination = l.destination and o.partition = l.partition order by o.seq limit 1000) t
            where not outbox_internal.claim_is_live(t.claim_token, t.partition, t.claim_until)
              and not outbox_internal.is_taken(t.destination, t.partition, t.seq)
            order by t.seq limit 1) as first,
           coalesce((select substr(x, 10)::bigint from unnest(d.options) x where x like 'max\_rate=%'),
                    current_setting('outbox.max_rate')::bigint) as max_rate,
           'ordering=partition' = any (d.options) as is_ordered,
           p.partition is not null and s.leasing
             and (p.lease_owner is null or p.lease_until <= clock_timestamp()) as is_free
    from (select distinct m.destination, m.partition from message m) l
    cross join @extschema@.outbox_settings s
    left join outbox_internal.destinations() d on d.destination = l.destination
    left join outbox_internal.blocked_lanes() b on b.destination = l.destination and b.partition = l.partition
    left join @extschema@.outbox_partitions p on p.partition = l.partition
  ), transaction as materialized (
    select t.pid, t.xid, g.gid, t.age, t.low
    from outbox_internal.open_transactions() t left join pg_prepared_xacts g on g.transaction = t.xid and t.prepared
    where t.age > interval '1 second' order by t.age desc limit 100
  ), obstacle as materialized (
    select m.destination, m.seq, 1 as rank, 'in flight' as reason,
           'A worker holds it: it is being sent, or it is parked for an open transaction with its key.' as why,
           null as remedy, null::bigint as behind
    from message m
    where m.status = 'in flight'
      and not exists (select from place p where p.destination = m.destination and p.reason = 'standby')
    union all
    select m.destination, m.seq, 2, concat_ws(' ', 'behind', nullif(b.status, 'ready')),
           format('It waits behind message %s of its %s%s', b.seq, case when b.whole then 'partition' else 'key' end,
                  case b.status when 'dead' then ', which is dead: ' || b.error
                    when 'retrying' then format(', which failed and is retried at %s: %s',
                                                date_trunc('seconds', b.due_at), b.error)
                    else '.' end),
           case b.status when 'dead' then format('select outbox_retry(%s, %L), or outbox_discard(%1$s, %2$L)', b.seq,
                                                 m.destination)
             when 'retrying' then format('select outbox_retry(%s, %L)', b.seq, m.destination) end,
           b.seq
    from message m join lane l on l.destination = m.destination and l.partition = m.partition
    cross join lateral (
      -- The strongest first. A message that was put behind another may wait behind a later seq, if that was replayed or
      -- retried by hand.
      (select d.seq, 'dead' as status, d.reason as error, null::timestamptz as due_at, true as whole
       from @extschema@.outbox_dead d
       where d.seq = l.blocker and d.destination = m.destination and l.blocker < m.seq
       union all
       select w.seq, 'retrying', w.last_error, w.due_at, true from @extschema@.outbox_waiting w
       where w.seq = l.blocker and w.destination = m.destination and l.blocker < m.seq)
      union all
      (select d.seq, 'dead', d.reason, null, false from @extschema@.outbox_dead d
       where m.alone and d.blocks and d.partition = m.partition and d.destination = m.destination and d.key = m.key
       order by d.seq limit 1)
      union all
      (select w.seq, 'retrying', w.last_error, w.due_at, false
       from (select x.* from @extschema@.outbox_waiting x where x.due_at is not null order by x.due_at limit 10000) w
       where m.alone and w.state = 'b' and w.partition = m.partition and w.destination = m.destination
         and w.key = m.key and (w.seq < m.seq or m.status = 'blocked' and w.seq <> m.seq)
       order by w.seq limit 1)
      union all
      (select o.seq, 'ready', null, null, false
       from (select x.* from @extschema@.outbox x
             where x.destination = m.destination and x.partition = m.partition order by x.seq limit 10000) o
       where m.alone and o.seq < m.seq and o.key = m.key
       order by o.seq limit 1)
      limit 1) b
    union all
    select m.destination, m.seq, 3, 'standby', format('Destination %s %s.', m.destination, p.detail),
           (select x.remedy from problem x where x."check" = 'standbys'), null
    from message m join place p on p.destination = m.destination and p.reason = 'standby'
    union all
    select h.destination, h.seq, 100 + h.n, h."check",
           format(case h."check" when 'paused' then 'Destination %1$s is %2$s.' else '%2$s.' end, h.destination,
                  h.problem), h.remedy, null
    from hindrance h
    union all -- what no check reports
    select m.destination, m.seq, 200, p.state,
           case p.state when 'missing' then format('Destination %s no longer exists.', m.destination)
             when 'not served' then format('No worker serves destination %s yet.', m.destination)
             when 'paused' then format('Destination %s was resumed; delivery continues within about a second.',
                                       m.destination)
             else format('Destination %s is %s.', m.destination, concat_ws(': ', p.state, p.reason, p.detail)) end,
           case p.state when 'missing' then 'create it with CREATE SERVER, or discard the message'
             when 'unconfigured' then format('select * from outbox_check(%L)', m.destination) end, null
    from message m join place p on p.destination = m.destination
    where p.state <> 'connected'
      and not exists (select from hindrance h
                      where h.destination = m.destination and h.seq = m.seq
                        and (h.of_destination is not null or p.state in ('not served', 'paused', 'not adopted')))
    union all
    select m.destination, m.seq, 300, 'no owner', format('No worker owns partition %s at the moment.', l.label), null, null
    from message m join lane l on l.destination = m.destination and l.partition = m.partition and l.is_free
    where not exists (select from hindrance h where h.destination = m.destination and h.seq = m.seq)
    union all
    select m.destination, m.seq, 400, 'transaction',
           format(case when t.pid is null then 'A prepared transaction that has enqueued has been open for %s (xid %s)%s'
                       else 'A transaction that has enqueued has been open for %s (pid %s)%s' end,
                  date_trunc('seconds', t.age), coalesce(t.pid::text, t.xid::text),
                  '; if it has enqueued with the key of this message, the message waits for it.'),
           case when t.pid is not null then format('end it, or select pg_terminate_backend(%s)', t.pid)
             when t.gid is not null then format('COMMIT PREPARED %1$L, or ROLLBACK PREPARED %1$L', t.gid)
             else 'COMMIT PREPARED or ROLLBACK PREPARED; see pg_prepared_xacts' end, null
    from message m join lane l on l.destination = m.destination and l.partition = m.partition
    cross join lateral (select x.* from transaction x where x.low <= m.seq order by x.age desc limit 1) t
    where (m.key is not null or l.is_ordered) and m.status <> 'scheduled'
  )
  select s.destination, s.seq, 0, 'standby server', 'This server is a standby: only the workers of its primary deliver.',
         null::text, null::bigint
  from jsonb_to_recordset(messages) s (destination text, seq bigint) where pg_is_in_recovery()
  union all
  select o.* from obstacle o
  union all
  select m.destination, m.seq, 500, case when m.seq <= l.first then 'next' else 'earlier' end,
         case when m.seq <= l.first then 'Nothing blocks it: it is the next message of its partition.'
              else format('Nothing blocks it: earlier messages of %s go first%s%s.', l.label, ', from ' || l.first || ' on',
                          case when l.max_rate > 0
                               then format(', at most %s a second to %s', l.max_rate, l.destination) end) end, null, null
  from message m join lane l on l.destination = m.destination and l.partition = m.partition
  where m.status not in ('scheduled', 'retrying')
    and not exists (select from obstacle o where o.destination = m.destination and o.seq = m.seq);
end;
comment on function outbox_internal.obstacles(jsonb) is
  'Why each of these messages is not delivered, the lowest rank first. A message is an object with destination,'
  ' partition_key, seq, key and status; with alone, the message of its key that it waits behind is looked for, too. The page'
  ' shows the first reason of each message.';

create function @extschema@.outbox_why(
  seq bigint, inout destination text default null, out reason text, out why text, out remedy text, out behind bigint
) returns setof record language sql volatile parallel unsafe set search_path = pg_catalog, pg_temp
begin atomic
  with message as materialized (
    select m.* from outbox_internal.message_rows($1) m
    where m.status not in ('published', 'discarded') and (m.destination = $2 or $2 is null)
  ), own as (
    select m.destination, 0::bigint as rank, m.status as reason,
           case m.status
             when 'dead' then format('It was given up%s: %s', case when m.blocks then ', and later messages of its key wait for it' end,
                                     m.last_error)
             when 'scheduled' then format('It is scheduled for %s.', date_trunc('seconds', m.available_at))
             else format('Its last attempt failed, and the next one is due at %s: %s%s',
                         date_trunc('seconds', m.available_at), m.last_error,
                         case when m.last_error like 'unroutable%' then '; bind a queue for it first' end) end as why,
           format(case m.status when 'dead' then 'select outbox_retry(%s, %L), or outbox_discard(%1$s, %2$L)'
                                else 'select outbox_retry(%s, %L)' end, m.seq, m.destination) as remedy,
           null::bigint as behind
    from message m where m.status in ('dead', 'scheduled', 'retrying')
  )
  select x.destination, x.reason, x.why, x.remedy, x.behind
  from (
    select o.* from own o where not (o.reason <> 'dead' and pg_is_in_recovery())
    union all
    select o.destination, o.rank, o.reason, o.why, o.remedy, o.behind
    from (select jsonb_agg(to_jsonb(m) || '{"alone": true}') as messages from message m where m.status <> 'dead') a
    cross join lateral outbox_internal.obstacles(a.messages) o) x
  order by x.destination, x.rank;
end;
comment on function @extschema@.outbox_why(bigint, text) is
  'Why a message is not delivered, at one destination or at all: one row a reason, the most specific first, in a word'
  ' and in a sentence, with its remedy, and the message that it waits behind. No row = it has ended, or there is none.';

-- As the install script does it: neither PUBLIC nor a role of ALTER DEFAULT PRIVILEGES may call a new function.
do $owner$
declare
  worker_role constant name := pg_catalog.current_setting('outbox.worker_role');
  thing record;
begin
  for thing in
    select p.oid::pg_catalog.regprocedure as identity, p.prosecdef as is_definer,
           pg_catalog.string_agg(distinct case a.grantee when 0 then 'public'
             else pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) end, ', ') as grantees
    from pg_catalog.pg_proc p
    cross join lateral pg_catalog.aclexplode(coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) a
    where p.pronamespace in ('outbox_internal'::pg_catalog.regnamespace, '@extschema@'::pg_catalog.regnamespace)
      and a.grantee <> p.proowner
      and p.proname = any (array['missing_standbys', 'standby_problem', 'version_problem', 'work_standbys',
                                'definer_functions', 'installed_functions', 'destination_of', 'renumber',
                                'claims_last', 'ttl_max', 'remove_initial_privileges', 'outbox_inbox_assign', 'resume_command',
                                'setting_command', 'connection_problem', 'table_command', 'lag_cause',
                                'restore_function', 'message_rows', 'obstacles', 'outbox_why',
                                'set_plans', 'record_ready', 'make_ready', 'withdraw_unless_taken', 'revive', 'discard',
                                'request_workers', 'claimable_heads', 'expire_heads'])
    group by p.oid
  loop
    execute pg_catalog.format('revoke all on function %s from %s', thing.identity, thing.grantees);
    execute pg_catalog.format(case when thing.is_definer then 'alter function %s owner to %I'
                                else 'grant execute on function %s to %I' end, thing.identity, worker_role);
  end loop;
  execute pg_catalog.format('alter table @extschema@.outbox_inbox_owners owner to %I', worker_role);
end
$owner$;
grant execute on function
  outbox_internal.missing_standbys, outbox_internal.standby_problem, outbox_internal.version_problem,
  outbox_internal.definer_functions, outbox_internal.installed_functions, outbox_internal.claims_last,
  outbox_internal.resume_command, outbox_internal.setting_command, outbox_internal.connection_problem,
  outbox_internal.table_command, outbox_internal.lag_cause,
  outbox_internal.message_rows, outbox_internal.obstacles, @extschema@.outbox_why
  to outbox_monitor;
grant execute on function outbox_internal.work_standbys to outbox_relay;
grant select on @extschema@.outbox_inbox_owners to outbox_monitor;
grant execute on function @extschema@.outbox_inbox_assign to outbox_admin;

-- ---- restores without triggers, and copies without the sequence -----------------------------------------------------

alter table @extschema@.outbox_dead enable always trigger outbox_dead_changed;
alter table @extschema@.outbox_settings enable always trigger outbox_settings_replace;
alter table @extschema@.outbox_identity enable always trigger outbox_identity_replace;
alter table @extschema@.outbox_policies enable always trigger outbox_policies_apply;
alter table @extschema@.outbox_source enable always trigger outbox_source_apply;
alter table @extschema@.outbox_identity drop constraint outbox_identity_pkey;
alter table @extschema@.outbox_identity replica identity full;

create view outbox_internal.beyond_sequence as
select e.seq
from (select pg_catalog.max(x.seq) as seq from @extschema@.outbox_events x) e, @extschema@.outbox_events_seq_seq q
where q.is_called and e.seq > q.last_value; -- a sequence that nobody uses is behind whatever others insert
comment on view outbox_internal.beyond_sequence is
  'The highest seq of outbox_events, if its sequence has not given it out: rows were copied without the sequence.';
grant select on outbox_internal.beyond_sequence to outbox_worker, outbox_monitor;

create or replace function outbox_internal.not_adopted()
returns text language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return case
    when i.singleton is null then 'outbox_identity is empty'
    when i.restored or i.is_doubled then 'it was restored from a dump'
    when i.system_identifier <> outbox_internal.system_identifier()
      then 'it comes from another server, by a copy or by pg_upgrade'
    when i.database <> here.database then 'it is a copy of another database'
    when i.identity <> here.identity
      then format('outbox.identity is %L, but it was adopted as %L', here.identity, i.identity)
  end
  from (select d.oid as database, coalesce(current_setting('outbox.identity', true), '') as identity
        from pg_database d where d.datname = current_database()) here
  left join (select x.*, pg_catalog.count(*) over () > 1 as is_doubled from @extschema@.outbox_identity x limit 1) i on true;
end
$$;

create or replace function @extschema@.outbox_adopt(reason text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  why constant text := outbox_internal.not_adopted();
  highest integer;
begin
  if why is null then
    return false;
  end if;
  delete from @extschema@.outbox_identity;
  insert into @extschema@.outbox_identity default values;
  update @extschema@.outbox_identity set restored = false; -- the trigger takes each session with row_security off for a restore
  -- What a restore without the settings, or a copy without the sequence, leaves behind.
  select max(p.partition) into highest
  from (select o.partition from @extschema@.outbox o union all select w.partition from @extschema@.outbox_waiting w
        union all select d.partition from @extschema@.outbox_dead d) p;
  if highest >= (select s.partition_count from @extschema@.outbox_settings s) then
    perform outbox_internal.configure_for(null::oid, least(highest + 1, 1024), null::boolean, null::text);
  end if;
  perform setval('@extschema@.outbox_events_seq_seq', e.seq)
  from (select max(x.seq) as seq from @extschema@.outbox_events x) e, @extschema@.outbox_events_seq_seq q
  where e.seq > q.last_value;
  perform outbox_internal.wake(0::bigint, '{}'::smallint[], '{}'::bigint[]);
  perform outbox_internal.record_audit('adopt'::text, jsonb_build_object('why', why), null::bigint, reason);
  return true;
end
$$;

create index on @extschema@.outbox_waiting (seq) where state = 'b' and attempts >= 3; -- outbox_health counts them

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

-- ---- a lease that ran out is renewed ------------------------------------------------------------------------------------

create or replace function outbox_internal.lease_renew(worker text, partitions smallint[], epochs bigint[], ttl_s integer)
returns setof smallint language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  return query
  with mine as (
    select p.partition as id from @extschema@.outbox_partitions p
    join unnest(partitions, epochs) as l (partition, epoch) on l.partition = p.partition
    where p.lease_owner = worker and p.lease_epoch = l.epoch
    order by p.partition for update of p
  )
  update @extschema@.outbox_partitions p
  set lease_until = clock_timestamp() + make_interval(secs => ttl_s), updated_at = clock_timestamp()
  from mine where p.partition = mine.id returning p.partition;
end
$$;
comment on function outbox_internal.lease_renew(text, smallint[], bigint[], integer) is
  'Worker protocol: renews leases, also such as have run out and no other worker has taken; a partition that is not'
  ' returned is lost.';

-- ---- a worker renews its claims, with leasing off ------------------------------------------------------------------------

comment on column @extschema@.outbox.claim_until is
  'With leasing off: until when the claim holds at least: the worker renews it in shared memory. NULL otherwise.';

create or replace function outbox_internal.claim_unleased(
  destination text, token bigint, claim_ttl_s integer, batch integer, bytes_max bigint
) returns setof outbox_internal.claimed language sql volatile
set search_path = pg_catalog, pg_temp as $$
  with locked as materialized (
    select o.ctid as row_tid, outbox_internal.commit_position(o.xmin) as wal_position, o.seq, o.claim_token, o.crashes
    from @extschema@.outbox o
    where o.destination = $1
      and (o.claim_until is null or o.claim_until <= now() and not outbox_internal.claims_last(o.claim_token))
      and o.claim_token is distinct from $2
      and (o.expires_at is null or o.expires_at > clock_timestamp())
    limit $4 for update skip locked
  ), pick as materialized (
    select l.row_tid, l.wal_position, l.seq, case when l.claim_token is null then 0 else 1 end as crashed,
           sum(x.share) over (order by l.seq) - x.share as bytes_before, e.ctid as event_tid
    from locked l left join @extschema@.outbox_events e on e.seq = l.seq
    cross join lateral (select coalesce(e.body_bytes, 0) + outbox_internal.suspicion(
      l.crashes + case when l.claim_token is null then 0 else 1 end, $5) as share) x
  ), claimed as (
    -- Another worker may claim the row once claim_until has passed and this worker no longer renews its claims.
    update @extschema@.outbox o
    set claim_token = $2, claim_until = now() + make_interval(secs => $3),
        crashes = o.crashes + pick.crashed
    from pick where o.ctid = pick.row_tid and pick.bytes_before < $5
    returning o.ctid as tid, o.seq, o.destination, o.partition, o.key, o.attempts, o.crashes::integer, o.claim_token,
              pick.wal_position, o.replayed, o.enqueued_at, null::text as remark, o.expires_at, pick.event_tid
  )
  select c.tid, c.seq, c.destination, c.partition, c.key, c.attempts, c.crashes, c.claim_token, c.wal_position,
         c.replayed, c.enqueued_at, c.remark, c.expires_at, e.*
  from (
    select * from claimed
    union all
    select null, null, null, null, null, null, null, null, null, null, null, r.remark, null, null
    from (select count(*) as seen, count(*) filter (where p.bytes_before < $5) as wanted,
                 (select count(*) from claimed) as got from pick p) n
    cross join lateral outbox_internal.remarks(n.seen, n.wanted, n.got, false) r (remark)
    order by 2
  ) c
  left join lateral (select t.* from outbox_internal.event_text t where t.event_tid = c.event_tid offset 0) e on true
  order by c.seq;
$$;
comment on function outbox_internal.claim_unleased(text, bigint, integer, integer, bigint) is
  'Worker protocol with leasing off: claims messages of any partition for claim_ttl_s seconds; stops after bytes_max'
  ' of bodies. Without any order.';

create or replace function outbox_internal.claim_is_live(claim_token bigint, partition smallint, claim_until timestamptz)
returns boolean language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  select case
    when claim_token is null then false
    when claim_token < 0 then claim_until > now() or outbox_internal.claims_last(claim_token)
    else exists (select from @extschema@.outbox_partitions p where p.partition = $2 and p.lease_epoch = $1
                   and (p.lease_until > now() or outbox_internal.leases_last(p.lease_owner)))
  end;
end;
comment on function outbox_internal.claim_is_live(bigint, smallint, timestamptz) is
  'Whether a worker holds this message for delivery right now.';

create or replace function outbox_internal.dead_letter(
  tids tid[], waiting_tids tid[], leased bigint[], out destination text, out count bigint, out blocking boolean
) returns setof record language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  return query
  with ready as materialized (
    select o.ctid as row_tid from @extschema@.outbox o
    where o.ctid = any (tids) and o.expires_at <= clock_timestamp()
      and (o.claim_token is null
           or case when o.claim_token < 0
                   then o.claim_until <= clock_timestamp() and not outbox_internal.claims_last(o.claim_token)
                   else leased is not null and not (o.partition::bigint << 48 | o.claim_token) = any (leased) end)
    for update skip locked
  ), late as materialized (
    select w.ctid as row_tid from @extschema@.outbox_waiting w
    where w.ctid = any (waiting_tids) and w.expires_at <= clock_timestamp() for update skip locked
  ), gone as (
    delete from @extschema@.outbox o using ready r where o.ctid = r.row_tid
    returning o.seq, o.enqueued_at, o.expires_at, o.attempts, o.partition, o.replayed, o.destination, o.key,
              o.attempts > 0 as has_failed
  ), gone_late as (
    delete from @extschema@.outbox_waiting w using late l where w.ctid = l.row_tid
    returning w.seq, w.enqueued_at, w.expires_at, w.attempts, w.partition, w.replayed, w.destination, w.key,
              w.state = 'b' as has_failed
  ), expired as (
    select * from gone union all select * from gone_late
  ), written as (
    insert into @extschema@.outbox_dead
      (seq, enqueued_at, expires_at, attempts, partition, replayed, destination, key, reason)
    select e.seq, e.enqueued_at, e.expires_at, e.attempts, e.partition, e.replayed, e.destination, e.key,
           'expired: it was not sent in time'
    from expired e
    on conflict on constraint outbox_dead_pkey do update
    set died_at = excluded.died_at, expires_at = excluded.expires_at, attempts = excluded.attempts,
        replayed = excluded.replayed, reason = excluded.reason, blocks = excluded.blocks
  )
  select e.destination, count(*), bool_or(e.has_failed) from expired e group by 1;
end
$$;
comment on function outbox_internal.dead_letter(tid[], tid[], bigint[]) is
  'Makes dead letters of messages in outbox and outbox_waiting that have expired and that no worker holds. A claim by'
  ' a lease that is not among leased does not count (NULL = every claim counts). Returns how many of each destination,'
  ' and whether others may have waited behind one of them.';

create or replace function outbox_internal.expire(
  first_block bigint, blocks integer, batch integer,
  out destinations text[], out counts bigint[], out blocking boolean, out next_block bigint, out more boolean,
  out next_expiry timestamptz
) language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
declare
  moment constant timestamptz := clock_timestamp(); -- once: an index cannot be searched for a value that changes
  from_tid constant tid := format('(%s,0)', first_block);
  to_tid constant tid := format('(%s,0)', first_block + blocks);
  seen tid[];
  late tid[];
  leased bigint[];
  all_blocks constant bigint := pg_relation_size('@extschema@.outbox') / current_setting('block_size')::integer;
begin
  seen := array(
    select o.ctid from @extschema@.outbox o
    where o.ctid >= from_tid and o.ctid < to_tid and o.expires_at <= moment
      and (o.claim_token is null
           or case when o.claim_token < 0
                   then o.claim_until <= moment and not outbox_internal.claims_last(o.claim_token)
                   else not exists (select from @extschema@.outbox_partitions p
                                    where p.partition = o.partition and p.lease_epoch = o.claim_token
                                      and p.lease_owner is not null)
              end)
    limit batch);
  late := array(
    select w.ctid from @extschema@.outbox_waiting w where w.expires_at <= moment order by w.expires_at limit batch);
  if cardinality(seen) + cardinality(late) > 0 then
    if exists (select from @extschema@.outbox o where o.ctid = any (seen) and o.claim_token > 0) then
      -- Leftover claims. Locked, so that no worker takes the lease, and claims by it, before COMMIT.
      leased := array(
        select p.partition::bigint << 48 | p.lease_epoch from @extschema@.outbox_partitions p
        where p.lease_owner is not null order by p.partition for key share);
    end if;
    select array_agg(b.destination), array_agg(b.count), bool_or(b.blocking) into destinations, counts, blocking
    from outbox_internal.dead_letter(seen, late, leased) b;
  end if;
  more := cardinality(seen) = batch or cardinality(late) = batch;
  next_block := case when cardinality(seen) = batch then first_block
                     when first_block + blocks < all_blocks then first_block + blocks else 0 end;
  next_expiry := least(
    (select w.expires_at from @extschema@.outbox_waiting w where w.expires_at is not null
     order by w.expires_at limit 1),
    (select min(o.expires_at) from @extschema@.outbox o where o.ctid >= from_tid and o.ctid < to_tid));
end
$$;
comment on function outbox_internal.expire(bigint, integer, integer) is
  'Worker protocol: makes dead letters of up to batch messages that have expired, in this number of blocks of outbox'
  ' from first_block on and in outbox_waiting. Returns how many of which destination expired, and whether others may'
  ' have waited behind one. Returns also where to continue (0 = all was scanned), whether more have expired already,'
  ' and when the first of those that remain expires.';

create or replace function outbox_internal.work_heartbeat()
returns setof text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  perform set_config('synchronous_commit', 'off', true);
  if not (select s.leasing from @extschema@.outbox_settings s) then
    perform outbox_internal.work_own('{}', outbox_internal.work_ttl_s()); -- renews its claims
  end if;
  -- No longer than its leases: no other signal shows the end of such a worker, and both then end at once.
  return query select outbox_internal.legible(h) from outbox_internal.heartbeat(
    outbox_internal.work_me(), pg_backend_pid(), outbox_internal.work_ttl_s()) h;
end
$$;
comment on function outbox_internal.work_heartbeat() is
  'Worker outside: the heartbeat, for outbox.lease_ttl more. Returns the ids of all live workers.';

-- ---- a scheduled message unblocks no other ------------------------------------------------------------------------------

comment on function outbox_internal.work_wait(bigint[], integer, integer, boolean) is
  'Worker outside: waits until there may be work, at most timeout_ms. in_flight is the number of messages that it has'
  ' in flight; leases_changed: the other workers must read the leases. Returns four counters to pass next (commits,'
  ' workers, unblocked and scheduled messages), and whether to leave: 1 at once, 2 in order, for a statement in this'
  ' database.';

-- ---- the leases of due messages are locked ------------------------------------------------------------------------------

create or replace function outbox_internal.due(
  worker text, partitions smallint[], epochs bigint[], batch integer, of_destination text default null,
  out destination text, out partition smallint, out seq bigint
) returns setof record language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  held smallint[];
begin
  if partitions is not null then
    -- Locked until COMMIT: otherwise the next owner could have read the lane before the rows are in it.
    held := array(
      select p.partition from unnest(partitions, epochs) as l (partition, epoch)
      join @extschema@.outbox_partitions p on p.partition = l.partition and p.lease_epoch = l.epoch
      where p.lease_owner = due.worker and p.partition in (
        select w.partition from @extschema@.outbox_waiting w
        where w.due_at <= clock_timestamp() and w.partition = any (partitions)
          and (of_destination is null or w.destination = of_destination)
        order by w.due_at limit batch)
      order by p.partition for key share of p);
    if held = '{}' then
      return;
    end if;
  end if;
  return query
  select r.destination, r.partition, r.seq from outbox_internal.make_ready(array(
    select w.ctid from @extschema@.outbox_waiting w
    where w.due_at <= clock_timestamp() and (of_destination is null or w.destination = of_destination)
      and (held is null or w.partition = any (held))
    order by w.due_at limit batch for update of w skip locked)) r;
end
$$;
comment on function outbox_internal.due(text, smallint[], bigint[], integer, text) is
  'Worker protocol: brings back due messages of these leases or (NULL) of all partitions, of a destination or (NULL)'
  ' of all; returns where they are now.';

-- ---- a clock that is set back prolongs no lease -------------------------------------------------------------------------

create or replace function outbox_internal.lease_is_live(lease_owner text, lease_until timestamptz)
returns boolean language sql volatile
begin atomic
  -- Its publisher uses the clock of leases_last(), and must not trust a lease that another worker takes. The wall clock
  -- may have been set since the lease was written.
  select $1 is not null and not outbox_internal.has_ended($1)
     and (outbox_internal.leases_last($1)
          or $2 > pg_catalog.clock_timestamp() and $2 <= pg_catalog.clock_timestamp() + outbox_internal.ttl_max());
end;
comment on function outbox_internal.lease_is_live(text, timestamptz) is
  'Worker protocol: whether a lease holds. It is over when both the wall clock and the clock of its worker say so, or'
  ' when the worker has ended. So a wall clock that is set forward ends no lease, and one that is set back prolongs none.';

create or replace function outbox_internal.purge_workers()
returns bigint language sql volatile set search_path = pg_catalog, pg_temp as $$
  with gone as (delete from @extschema@.outbox_workers w
                where w.heartbeat_until not between clock_timestamp() - interval '1 minute'
                                                and clock_timestamp() + outbox_internal.ttl_max()
                  and not outbox_internal.leases_last(w.worker_id) and w.worker_id not like 'server-%'
                   or outbox_internal.has_ended(w.worker_id) returning 1)
  select count(*) from gone;
$$;
comment on function outbox_internal.purge_workers() is
  'Worker protocol: removes workers that have ended, and those outside whose heartbeat ended more than a minute ago.';

-- ---- a message that is put off is not charged --------------------------------------------------------------------------

alter table @extschema@.outbox_attempts_log drop constraint outbox_attempts_log_outcome_check,
  add check (outcome in ('retried', 'deferred', 'dead'));
comment on view @extschema@.outbox_attempts is
  'Attempts that failed, the last 20 of each message: which one, when, what became of the message (retried, deferred,'
  ' dead), the error, the worker (NULL = a relay). Give a seq.';

create or replace function outbox_internal.record_failed(failed @extschema@.outbox_attempts_log[])
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform outbox_internal.record_error(f.destination, f.error, f.outcome <> 'retried', max(f.seq), count(*))
  from unnest(failed) f where f.outcome <> 'deferred' group by f.destination, f.error, f.outcome <> 'retried';
  -- An expired message was not sent.
  insert into @extschema@.outbox_attempts_log select f.* from unnest(failed) f where f.outcome <> 'expired'
  on conflict do nothing;
  delete from @extschema@.outbox_attempts_log l
  using unnest(failed) f cross join lateral (
    select x.at from @extschema@.outbox_attempts_log x
    where x.seq = f.seq and x.destination = f.destination order by x.at desc offset 20 limit 1) old
  where l.seq = f.seq and l.destination = f.destination and l.at <= old.at;
end
$$;
comment on function outbox_internal.record_failed(@extschema@.outbox_attempts_log[]) is
  'Part of a settle in which messages failed, were put off or expired.';

create or replace function outbox_internal.settle(
  worker text, tids tid[], seqs bigint[], destinations text[], partitions smallint[], tokens bigint[],
  actions "char"[], delays_ms bigint[], reasons text[]
) returns integer language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  leased constant boolean := tokens[1] > 0;
  -- The fence: what this worker holds now, by lease and epoch. It is needed for every change of a row. The row must
  -- carry its token or none (it was in flight on the fast path before any claim), so a worker that lost its lease
  -- changes nothing. The leases are locked until COMMIT: the next owner then sees all that was settled under them.
  held constant bigint[] := array(
    select p.partition::bigint << 48 | p.lease_epoch
    from @extschema@.outbox_partitions p
    where p.lease_owner = settle.worker and leased and p.partition = any (partitions)
    order by p.partition for key share);
  failed @extschema@.outbox_attempts_log[];
  changed integer;
begin
  with ended as materialized (
    select * from unnest(tids, seqs, destinations, partitions, tokens, actions, delays_ms, reasons)
      as u (row_tid, seq, destination, partition, token, action, delay_ms, reason)
    where not leased or (u.partition::bigint << 48 | u.token) = any (held)
  ), gone as (
    delete from @extschema@.outbox o using ended u
    where o.ctid = u.row_tid and o.seq = u.seq and o.destination = u.destination and o.partition = u.partition
      and (o.claim_token = u.token or o.claim_token is null and leased) and u.action <> 'f'
    returning o.seq, o.enqueued_at, o.attempts, o.partition, o.crashes, o.replayed, o.destination, o.key, o.last_error,
      o.expires_at, u.action, u.delay_ms, u.reason
  ), published as (
    insert into @extschema@.outbox_history
      (seq, enqueued_at, published_at, attempts, partition, replayed, destination, key, last_error)
    select g.seq, g.enqueued_at, clock_timestamp(), g.attempts + 1, g.partition, g.replayed, g.destination, g.key,
           g.last_error
    from gone g where g.action = 'p'
  ), dead as (
    -- x = expired, no attempt used
    insert into @extschema@.outbox_dead
      (seq, enqueued_at, expires_at, attempts, partition, replayed, destination, key, reason, blocks)
    select g.seq, g.enqueued_at, g.expires_at, g.attempts + case when g.action = 'x' then 0 else 1 end, g.partition,
           g.replayed, g.destination, g.key, g.reason,
           leased and (g.action = 'B' or g.action = 'D' and g.key is not null)
    from gone g where g.action in ('d', 'D', 'B', 'x')
    on conflict (destination, seq) do update
    set died_at = excluded.died_at, expires_at = excluded.expires_at, attempts = excluded.attempts,
        replayed = excluded.replayed, reason = excluded.reason, blocks = excluded.blocks
  ), waiting as (
    -- r = try again after the delay, one attempt used, or none if the delay is negative; w = behind an earlier one of
    -- its key, none used
    insert into @extschema@.outbox_waiting
      (seq, enqueued_at, due_at, attempts, partition, crashes, replayed, state, destination, key, last_error,
       expires_at)
    select g.seq, g.enqueued_at,
           case when g.action = 'r' then clock_timestamp() + abs(g.delay_ms) * interval '1 millisecond' end,
           g.attempts + case when g.action = 'r' and g.delay_ms >= 0 then 1 else 0 end, g.partition,
           g.crashes, g.replayed, case when g.action = 'r' then 'b' else 'g' end, g.destination, g.key,
           case when g.action = 'r' then g.reason else g.last_error end, g.expires_at
    from gone g where g.action in ('r', 'w')
    on conflict do nothing
  ), freed as (
    -- f = as before, no attempt used
    update @extschema@.outbox o
    set claim_token = null, claim_until = null, last_error = coalesce(u.reason, o.last_error)
    from ended u
    where o.ctid = u.row_tid and o.seq = u.seq and o.destination = u.destination and o.partition = u.partition
      and (o.claim_token = u.token or o.claim_token is null and leased) and u.action = 'f'
    returning 1
  )
  select n.gone + (select count(*) from freed), n.failed into changed, failed
  from (
    select count(*) as gone,
           array_agg(row(g.seq, g.destination, clock_timestamp(), g.attempts + 1,
                         case when g.action = 'x' then 'expired' when g.action <> 'r' then 'dead'
                              when g.delay_ms < 0 then 'deferred' else 'retried' end, g.reason,
                         nullif(settle.worker, ''))::@extschema@.outbox_attempts_log)
             filter (where g.action in ('r', 'd', 'D', 'B', 'x')) as failed
    from gone g) n;
  if failed is not null then
    perform outbox_internal.record_failed(failed);
  end if;
  return changed;
end
$$;
comment on function outbox_internal.settle(
  text, tid[], bigint[], text[], smallint[], bigint[], "char"[], bigint[], text[]) is
  'Worker protocol: ends claimed messages in one statement. Actions: p published, d dead, D dead and its key waits,'
  ' B dead and its partition waits, x expired. More actions: r retry after delays_ms (negative: not'
  ' counted as an attempt), w behind an earlier one of its key, f freed. Returns how many rows changed. Fewer than given'
  ' means that rows moved or the claim is lost.';
-- As the install script has it for the statements of workers.
comment on function outbox_internal.settle(
  text, tid[], bigint[], text[], smallint[], bigint[], "char"[], bigint[], text[]) is
  'Worker protocol: ends claimed messages in one statement. Actions: p published, d dead, D dead and its key waits,'
  ' B dead and its partition waits, x expired. More actions: r retry after delays_ms (negative: not'
  ' counted as an attempt), w behind an earlier one of its key, f freed. Returns how many rows changed. Fewer than given'
  ' means that rows moved or the claim is lost.';

create or replace function outbox_internal.work_settle(
  destination text, tids text[], seqs bigint[], partitions smallint[], tokens bigint[], actions text[],
  delays_ms bigint[], reasons text[], took_us bigint[]
) returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  me constant text := outbox_internal.work_me();
  n constant integer := coalesce(cardinality(seqs), 0);
  destinations constant text[] := array_fill(destination, array[n]);
  short_reasons constant text[] := array(select left(r, 500) from unnest(reasons) with ordinality u (r, i) order by i);
  counts bigint[]; -- published, retried, dead, expired, released
  took bigint[];
  gone bigint;
  changed integer;
begin
  if n = 0 or n > 10000 or destination is null or (n = all (array[cardinality(tids), cardinality(partitions),
       cardinality(tokens), cardinality(actions), cardinality(delays_ms), cardinality(reasons)])) is not true then
    raise exception 'the arrays are not all of one length, from 1 to 10000' using errcode = 'array_subscript_error',
      hint = 'Give a destination, and an element for each message.';
  end if;
  if exists (
    select from unnest(actions, delays_ms, reasons) u (action, delay_ms, reason)
    where coalesce(u.action not in ('p', 'd', 'D', 'B', 'x', 'r', 'w', 'f'), true)
      or u.action = 'r' and coalesce(u.delay_ms not between -1000000000000 and 1000000000000, true)
      or u.action in ('d', 'D', 'B', 'x', 'r') and u.reason is null) then
    raise exception 'an action is unknown, or lacks its delay or reason' using errcode = 'invalid_parameter_value',
      hint = 'Actions: p, f, w; d, D, B, x with a reason; r with a delay in ms and a reason.';
  end if;
  -- The first token shows settle() whether leases apply. (outbox_settings says it too, but is locked while
  -- outbox_configure() waits for just this.)
  if (0 < all (tokens) or outbox_internal.work_token() = all (tokens)) is not true then
    raise exception 'a token is not one of this worker' using errcode = 'insufficient_privilege',
      hint = 'A worker settles only what it has claimed.';
  end if;
  -- A settle that is lost would be sent again. It waits for no standby: a missing one would block the worker.
  perform set_config('synchronous_commit', 'local', true);
  changed := outbox_internal.settle(
    me, tids::tid[], seqs, destinations, partitions, tokens, actions::"char"[], delays_ms,
    short_reasons);
  if changed < n then
    -- Rows that moved (VACUUM FULL) are found again by key. Rows with another token no longer belong to this worker.
    changed := changed + outbox_internal.settle(
      me, outbox_internal.locate(seqs, destinations, partitions), seqs, destinations, partitions, tokens,
      actions::"char"[], delays_ms, short_reasons);
  end if;
  if changed > 0 then
    select array[count(*) filter (where a = 'p'), count(*) filter (where a = 'r' and ms >= 0),
                 count(*) filter (where a in ('d', 'D', 'B')),
                 count(*) filter (where a = 'x'), count(*) filter (where a = 'f' or a = 'r' and ms < 0)]
      into counts from (select a, ms from unnest(actions, delays_ms) u (a, ms) limit changed) c;
    gone := counts[1] + counts[3] + counts[4];
    perform outbox_internal.record_ended(counts[1], counts[2] + counts[3], gone);
    perform outbox_internal.record_pending(destination, -gone);
    took := array(select t from unnest(took_us) t where t >= 0 limit changed);
    perform outbox_internal.record_took(took);
    perform outbox_internal.work_count(destination, counts, took);
  end if;
  return changed;
end
$$;
comment on function outbox_internal.work_settle(
  text, text[], bigint[], smallint[], bigint[], text[], bigint[], text[], bigint[]) is
  'Worker outside: ends messages of a destination that it has claimed, with the actions of settle(), on disk when it'
  ' is committed. took_us: how long the published ones took. Returns how many changed; the others are no longer its'
  ' own.';

-- ---- a server "default" of a role that may not change the default destination does not count ---------------------------

create or replace function outbox_internal.destinations(
  out destination text, out wrapper text, out server oid, out options text[], out paused boolean
) returns setof record language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return query
  with known as (
    select s.srvname::text as name, w.fdwname::text as wrapper, s.oid as server, s.srvoptions as options
    from pg_foreign_server s join pg_foreign_data_wrapper w on w.oid = s.srvfdw
    where w.fdwname in ('outbox_amqp', 'outbox_http')
      and (s.srvname <> 'default' or pg_has_role(s.srvowner, 'outbox_admin', 'usage'))
    union all
    select 'default', null, null, null
  )
  -- A server named "default" stands for the settings, if its owner may change where all default messages go.
  select distinct on (k.name collate "C") k.name, k.wrapper, k.server, k.options,
         exists (select from @extschema@.outbox_paused p where p.destination = k.name)
  from known k order by k.name collate "C", k.server nulls last;
end
$$;

create or replace function outbox_internal.blocked_lanes(out destination text, out partition smallint, out blocker bigint)
returns setof record language plpgsql stable rows 10 set search_path = pg_catalog, pg_temp as $$
declare
  by_partition constant text[] := array(
    select d.destination from outbox_internal.destinations() d where 'ordering=partition' = any (d.options));
begin
  if by_partition = '{}' then
    return; -- reads only the catalog and outbox_paused
  end if;
  return query
  select h.destination, h.partition, min(h.seq)
  from (select w.destination, w.partition, w.seq from @extschema@.outbox_waiting w
        where w.state = 'b' and w.due_at > clock_timestamp() and w.destination = any (by_partition)
        union all
        select d.destination, d.partition, d.seq from @extschema@.outbox_dead d
        where d.blocks and d.destination = any (by_partition)) h
  group by 1, 2;
end
$$;

-- ---- only a restore by a role with the rights of the owner writes old events ------------------------------------------

create or replace function outbox_internal.events_closed() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  -- With several jobs pg_restore may restore outbox_source, and so this trigger, before the events. Any session can take
  -- its name, but only a role with the rights of the owner writes there itself.
  if current_setting('application_name') = 'pg_restore'
     and pg_has_role(session_user, (select c.relowner from pg_class c where c.oid = tg_relid), 'usage') then
    return null;
  end if;
  raise exception 'outbox_events takes no events: they are read from %',
      (select s.relation from @extschema@.outbox_source s)
    using errcode = 'object_not_in_prerequisite_state',
          hint = 'Write the event there and call outbox_enqueue(seq), or attach the table by outbox_attach(). select'
                 ' outbox_source_reset() goes back to outbox_events.';
end
$$;

-- ---- setting a source says nothing of a trigger that is not there --------------------------------------------------------

create or replace function outbox_internal.source_apply() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if tg_op = 'INSERT' then
    -- Its presence shows sessions that there is a source: they read the cache, not a table.
    create or replace trigger outbox_source before insert on @extschema@.outbox_events
      for each statement execute function outbox_internal.events_closed();
  else
    drop trigger if exists outbox_source on @extschema@.outbox_events;
  end if;
  return null;
end
$$;
comment on function outbox_internal.source_apply() is
  'Closes outbox_events while there is a source, and opens it again; as its owner or a superuser.';
-- ---- outbox_health reads the first messages once ----------------------------------------------------------------------

create or replace view outbox_internal.first_shown as
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

-- ---- a call about one message finds its destination --------------------------------------------------------------------

create or replace function @extschema@.outbox_retry(seq bigint, destination text default null, reason text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  partitions constant smallint[] := (select s.partitions from @extschema@.outbox_settings s);
  to_destination constant text := outbox_internal.destination_of(outbox_retry.seq, outbox_retry.destination);
  changed boolean;
  ready smallint; -- the partition in which it can be delivered already
begin
  changed := outbox_internal.revive(array(
    select d.ctid from @extschema@.outbox_dead d
    where d.seq = outbox_retry.seq and d.destination = to_destination)) > 0;
  if not changed then
    update @extschema@.outbox_waiting w set due_at = now(), attempts = 0, crashes = 0, expires_at = null
    where w.destination = to_destination and w.seq = outbox_retry.seq and w.state <> 'g';
    changed := found;
  end if;
  select o.partition into ready from @extschema@.outbox o
  where o.ctid = (select outbox_internal.find_row(outbox_retry.seq, to_destination, partitions))
    and not outbox_internal.claim_is_live(o.claim_token, o.partition, o.claim_until)
    and not outbox_internal.is_taken(o.destination, o.partition, o.seq);
  if not found and not changed then
    return false;
  end if;
  perform outbox_internal.wake(0::bigint, array_remove(array[ready], null),
                               case when ready is null then '{}' else array[outbox_retry.seq] end);
  if changed then
    perform outbox_internal.record_audit(
      'retry'::text, jsonb_build_object('seq', outbox_retry.seq, 'destination', to_destination), 1::bigint,
      outbox_retry.reason);
  end if;
  return true;
end
$$;
comment on function @extschema@.outbox_retry(bigint, text, text) is
  'Brings a dead message back, or makes one that waits for a time due at once; its attempts start again, and it no'
  ' longer expires. False if there is none, and for one that waits behind another of its key.';

create or replace function @extschema@.outbox_discard(seq bigint, destination text default null, reason text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  partitions constant smallint[] := (select s.partitions from @extschema@.outbox_settings s);
  to_destination constant text := outbox_internal.destination_of(outbox_discard.seq, outbox_discard.destination);
  message record;
  ended record;
begin
  -- Locked first, judged by the next statement, which then sees a claim that is being made.
  perform from @extschema@.outbox o
  where o.ctid = (select outbox_internal.find_row(outbox_discard.seq, to_destination, partitions)) for update;
  select o.ctid as tid, o.partition, outbox_internal.claim_is_live(o.claim_token, o.partition, o.claim_until) as is_claimed
    into message
  from @extschema@.outbox o
  where o.ctid = (select outbox_internal.find_row(outbox_discard.seq, to_destination, partitions));
  if message.is_claimed
     or not outbox_internal.withdraw_unless_taken(to_destination, message.partition, outbox_discard.seq) then
    raise exception 'message % is in flight', outbox_discard.seq
      using errcode = 'object_in_use',
      hint = 'Try again in a moment, or when the transaction that it waits for has ended (outbox_open_transactions).';
  end if;
  select * into ended from outbox_internal.discard(
    array[message.tid],
    array(select w.ctid from @extschema@.outbox_waiting w
          where w.seq = outbox_discard.seq and w.destination = to_destination),
    array(select d.ctid from @extschema@.outbox_dead d
          where d.seq = outbox_discard.seq and d.destination = to_destination),
    coalesce(outbox_discard.reason, 'discarded by ' || session_user));
  perform outbox_internal.wake(-ended.waited, '{}'::smallint[], '{}'::bigint[]);
  perform outbox_internal.record_pending(to_destination, -ended.waited);
  if ended.discarded > 0 then
    perform outbox_internal.record_audit(
      'discard'::text, jsonb_build_object('seq', outbox_discard.seq, 'destination', to_destination), 1::bigint,
      outbox_discard.reason);
  end if;
  return ended.discarded > 0;
end
$$;
comment on function @extschema@.outbox_discard(bigint, text, text) is
  'Discards a dead or waiting message: it is never delivered and goes to the history with the reason. Later messages'
  ' of its key continue. False if there is none.';

-- ---- the events of a row come in the order of its changes ---------------------------------------------------------------

create or replace function @extschema@.outbox_capture(
  relation regclass, aggregate_type text default null, type_prefix text default null, operations text default 'http',
  aggregate_id text default null, soft_delete_column text default null, columns text[] default null,
  destination text default null
) returns void language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  table_name name;
  unknown text;
  settings text;
  place regclass;
begin
  perform outbox_internal.tables_for_triggers(relation);
  if relation = '@extschema@.outbox_events'::regclass then
    raise exception '% belongs to outbox', relation using errcode = 'wrong_object_type',
      hint = 'Name another table. outbox_attach enqueues the rows inserted into outbox_events.';
  end if;
  perform outbox_internal.check_destination(destination);
  if operations is null or operations not in ('http', 'sql') then
    raise exception 'operations "%" is unknown', operations using errcode = 'invalid_parameter_value',
      hint = 'Use ''http'' for POST, PATCH and DELETE, or ''sql'' for INSERT, UPDATE and DELETE.';
  end if;
  if columns = '{}' then
    raise exception 'columns is empty' using errcode = 'invalid_parameter_value',
      hint = 'Name the columns that events contain, or leave it out for all.';
  end if;
  select c.name into unknown from unnest(columns || soft_delete_column) c (name)
  where c.name is not null or c.name is null and columns is not null and array_position(columns, null) is not null
  except select a.attname from pg_attribute a where a.attrelid = relation and a.attnum > 0 and not a.attisdropped
  limit 1;
  if found then
    raise exception 'table % has no column %', relation, coalesce(quote_ident(unknown), 'NULL')
      using errcode = 'undefined_column',
      hint = 'Names are as stored: in lower case, unless the table was created with quotes.';
  end if;
  if aggregate_id is not null then
    perform outbox_internal.check_expression(relation, 'aggregate_id'::text, aggregate_id, false);
  elsif not exists (select from pg_index i where i.indrelid = relation and i.indisprimary) then
    raise exception 'table % has no primary key', relation using errcode = 'object_not_in_prerequisite_state',
      hint = 'Name what identifies a row: aggregate_id => ''code'', or any SQL expression over its columns.';
  end if;

  select c.relname into table_name from pg_class c where c.oid = relation;
  aggregate_type := coalesce(aggregate_type, table_name);
  type_prefix := coalesce(type_prefix, (
    select string_agg(upper(left(part, 1)) || substr(part, 2), '' order by n)
    from regexp_split_to_table(table_name, '[^[:alnum:]]+') with ordinality p (part, n)));
  if octet_length(aggregate_type) > 255 or octet_length(type_prefix || 'ForceDeleted') > 255 then
    raise exception 'aggregate_type or type_prefix is too long' using errcode = 'program_limit_exceeded',
      hint = 'AMQP carries 255 bytes; the longest type ends in ForceDeleted.';
  end if;
  settings := jsonb_strip_nulls(jsonb_build_object(
    'aggregate_type', aggregate_type, 'type_prefix', type_prefix, 'operations', operations,
    'aggregate_id', aggregate_id, 'soft_delete_column', soft_delete_column, 'columns', columns,
    'destination', destination))::text;

  for place in select t from outbox_internal.tables_for_triggers(relation) t loop
    execute format($sql$
      create or replace trigger outbox_capture_begin before insert or update or delete on %1$s
        for each statement execute function @extschema@.outbox_captured(%2$L);
      create or replace trigger outbox_capture_insert after insert on %1$s referencing new table as outbox_new
        for each statement execute function @extschema@.outbox_captured(%2$L);
      create or replace trigger outbox_capture_update after update on %1$s
        referencing old table as outbox_old new table as outbox_new
        for each statement execute function @extschema@.outbox_captured(%2$L);
      create or replace trigger outbox_capture_delete after delete on %1$s referencing old table as outbox_old
        for each statement execute function @extschema@.outbox_captured(%2$L);
      create or replace trigger outbox_capture_truncate after truncate on %1$s
        for each statement execute function @extschema@.outbox_captured(%2$L);
      $sql$, place, settings);
  end loop;
end
$$;
comment on function @extschema@.outbox_capture(regclass, text, text, text, text, text, text[], text) is
  'From now on makes an event of each row written to a table, and enqueues it: Created, Updated, Deleted,'
  ' ForceDeleted, Restored. A further call changes the arguments. For the owner of the table.';

-- ---- words of outbox_check, and of a worker whose name is taken --------------------------------------------------------

create or replace function @extschema@.outbox_check(
  destination text default 'default', out step text, out ok boolean, out detail text
) returns setof record language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
declare
  requested_at constant timestamptz := clock_timestamp();
  patience constant interval := '5 seconds';
  -- Just after CREATE EXTENSION the launcher is about to start the first worker.
  expects_worker constant boolean := outbox_internal.is_preloaded() and current_setting('outbox.workers')::integer > 0
    and outbox_internal.server_state() is null;
  worker_role constant name := current_setting('outbox.worker_role');
  described record;
  pause record;
  workers bigint;
  answers bigint;
  is_requested boolean := false;
  seen record;
  stale text := '';
  body_problem text[];
begin
  destination := coalesce(destination, 'default');
  select d.*, d.destination = 'default' and d.server is null as by_settings into described
  from outbox_internal.destinations() d where d.destination = outbox_check.destination;
  step := 'exists';
  ok := described.destination is not null;
  if not ok then
    detail := format('destination "%s" does not exist: CREATE SERVER %1$I FOREIGN DATA WRAPPER outbox_amqp or'
                     ' outbox_http', destination);
    return next;
    return;
  end if;
  detail := case when described.by_settings then 'described by the settings outbox.url, outbox.exchange and so on'
                 else format('a server of %s', described.wrapper) end;
  return next;

  step := 'right';
  ok := described.destination = 'default' or has_server_privilege(described.server, 'USAGE');
  detail := case when described.destination = 'default' then 'every role that may enqueue may use it'
                 when ok then format('role %I may use it', current_user)
                 else format('role %I may not use it: GRANT USAGE ON FOREIGN SERVER %I TO %1$I', current_user,
                             destination) end;
  return next;

  step := 'mapping';
  ok := true;
  detail := case
    when described.by_settings then 'none needed: user and password are in the settings'
    when exists (select from pg_user_mappings m where m.srvid = described.server and m.usename = worker_role)
      then format('there is a user mapping for %I', worker_role)
    when exists (select from pg_user_mappings m where m.srvid = described.server and m.umuser = 0)
      then 'there is a user mapping for PUBLIC'
    else format('there is no user mapping for %I: ', worker_role) || case
      when described.wrapper = 'outbox_http' then 'no secret is used'
      when exists (select from unnest(described.options) o where o like 'url=%')
        then 'the user is the one in the option url, the password is guest'
      else 'user and password are in the settings' end end;
  return next;

  -- Workers see only committed data, and this session sees only what they committed.
  loop
    select count(*), count(*) filter (where c.rechecked_at >= requested_at) into workers, answers
    from @extschema@.outbox_workers w
    left join @extschema@.outbox_connections c on c.worker_id = w.worker_id and c.destination = outbox_check.destination
    where w.heartbeat_until > clock_timestamp() and not outbox_internal.has_ended(w.worker_id)
      and w.worker_id like 'server-%'; -- workers outside do not take part
    exit when workers = answers and (workers > 0 or not expects_worker)
      or current_setting('transaction_isolation') <> 'read committed' or clock_timestamp() > requested_at + patience;
    is_requested := is_requested or outbox_internal.request_recheck(destination);
    -- A new worker is known by then.
    exit when not is_requested and clock_timestamp() > requested_at + interval '2 seconds';
    perform pg_sleep(0.01);
  end loop;
  if answers < workers then
    stale := format(' (as of an earlier check: %s of %s workers did not answer in %s s)', workers - answers, workers,
                    extract(epoch from date_trunc('milliseconds', clock_timestamp() - requested_at))::numeric(9, 1));
  end if;

  select p.* into pause from @extschema@.outbox_paused p where p.destination = outbox_check.destination;
  step := 'delivery';
  ok := pause.destination is null and current_setting('outbox.enabled')::boolean;
  detail := case
    when pause.destination is not null
      then format('paused by %s%s: messages wait for outbox_resume(%L)', pause.paused_by, ', ' || pause.reason,
                  destination)
    when not ok then 'outbox.enabled is off: messages wait'
    else 'neither paused nor switched off' end;
  return next;

  select count(*) as workers,
         (array_agg(c.state order by c.rank))[1] as state, (array_agg(c.reason order by c.rank))[1] as reason,
         (array_agg(c.detail order by c.rank))[1] as detail, (array_agg(c.since order by c.rank))[1] as since
  into seen
  from (select x.*, array_position('{down,blocked,unconfigured,connecting,starting,connected,paused}'::text[],
                                   x.state) as rank
        from @extschema@.outbox_connections x join @extschema@.outbox_workers w on w.worker_id = x.worker_id
        where x.destination = outbox_check.destination and w.heartbeat_until > clock_timestamp()
          and not outbox_internal.has_ended(w.worker_id)) c;
  step := 'worker';
  ok := seen.workers > 0;
  detail := case when ok then format('%s of %s workers serve it', seen.workers, greatest(workers, seen.workers))
                 when workers > 0 then 'no worker serves it yet: they see a new server within a second of its commit'
                 else 'no worker is alive: see outbox_health' end;
  return next;

  step := 'options';
  ok := case seen.state when 'unconfigured' then false when 'paused' then null when 'pausing' then null
    else seen.state <> 'starting' end;
  detail := case when seen.state = 'unconfigured' then seen.detail || stale
                 when ok then 'the options are valid' || stale
                 else 'not known: no worker has checked it' end;
  return next;

  if exists (select from unnest(described.options) o where o like 'body=%') then
    step := 'body';
    body_problem := outbox_internal.body_problem(destination);
    ok := body_problem is null;
    detail := case when ok then 'its function can be called'
                   else format('%s: %s', body_problem[1], body_problem[2]) end;
    return next;
  end if;

  step := 'connection';
  ok := case when seen.state = 'connected' then true when seen.state in ('down', 'blocked') then false end;
  detail := case
    when ok and described.wrapper = 'outbox_http'
      then 'no problem is known: a URL is not tried before a message is sent to it'
    when ok then concat_ws(', ', format('connected since %s', date_trunc('seconds', seen.since)), seen.detail) || stale
    when seen.state in ('down', 'blocked') then concat_ws(': ', seen.state, seen.reason, seen.detail) || stale
    when seen.state = 'connecting' then 'a worker is connecting' || stale
    when seen.state in ('paused', 'pausing') then 'not checked while nothing is delivered'
    else 'not known' end;
  return next;

  if described.wrapper is distinct from 'outbox_http' then
    step := 'exchange';
    ok := case when seen.state = 'connected' then true when seen.reason like 'exchange\_%' then false end;
    detail := case when ok then 'the exchange exists' || stale
                   when seen.reason like 'exchange\_%' then seen.detail || stale
                   else 'not known without a connection' end;
    return next;
  end if;
end
$$;

create or replace function outbox_internal.work_begin(label text)
returns text language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  me constant text := outbox_internal.work_join(coalesce(label, ''));
begin
  if exists (select from @extschema@.outbox_workers w
             where w.worker_id = me and w.pid is distinct from pg_backend_pid()) then
    raise exception 'a worker has the name "%"', me using errcode = 'object_in_use', hint = 'Start it with another --name.';
  end if;
  perform outbox_internal.work_adopt(coalesce((
    select array_agg(n order by x.transaction::text::bigint, i) from pg_prepared_xacts x
    cross join lateral (
      values (1, x.transaction::text::bigint), (2, (extract(epoch from x.prepared) * 1000000)::bigint)) v (i, n)
    where x.database = current_database()), '{}'));
  return me;
end
$$;

-- ---- the status of a message says where it is: ready, in flight, retrying, blocked or scheduled ------------------------

create or replace view @extschema@.outbox_messages as
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
comment on view @extschema@.outbox_status is
  'One row, at a cost that does not grow with the queue. It has the messages pending (all that have not ended), in'
  ' flight and dead (up to 10000), and the age of the oldest that can be delivered now. It has totals since'
  ' stats_reset, and rates of the last minute.';

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
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  to_destination constant text := coalesce(outbox_fetch_unpublished.destination, 'default');
  ttl_s constant double precision := ceil(extract(epoch from claim_ttl));
  bytes_max constant bigint := 33554432; -- as a claim of a worker
  event_bytes_max constant integer := 15728640; -- EVENT_BYTES_MAX in crates/core
  is_converted constant boolean := getdatabaseencoding() <> 'UTF8';
  piece_bytes_max constant bigint := 4194304; -- of text, read from a source in one step
  claims outbox_internal.relayed[];
  texts text[];
  event outbox_internal.source_row;
  given integer := 0;
  bytes bigint := 0;
  wanted integer;
  ended integer;
  message record;
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
      bad := '{}';
      for message in
        select c.seq, c.claim_token, u.why
        from unnest(claims) c join @extschema@.outbox_events e on e.seq = c.seq
        cross join lateral (select case
          when e.body_bytes > event_bytes_max then
            format('the event has %s bytes, which exceeds the limit of 15 MiB', e.body_bytes)
          when is_converted then (
            select outbox_internal.unreadable(c.key, t) from outbox_internal.event_text t where t.event_tid = e.ctid)
          end as why offset 0) u
        where u.why is not null
      loop
        if outbox_internal.end_claim(message.seq, message.claim_token, to_destination, message.why, false, true) then
          bad := bad || message.seq;
        end if;
      end loop;
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
  -- The size of the events of a source is known when they are read: the first ones determine how many more are claimed,
  -- and those without room are given back.
  wanted := least(max_rows, 25);
  for turn in 1 .. 10 loop
    claims := array(select c from outbox_internal.relay_claim(wanted, to_destination, ttl_s, bytes_max) c
                    order by c.seq);
    exit when claims = '{}';
    ended := 0;
    while ended < cardinality(claims) and bytes < bytes_max loop
      texts := outbox_internal.source_events(
        array(select c.seq from unnest(claims[ended + 1:]) c order by 1), piece_bytes_max);
      for i in 1 .. cardinality(texts) by 15 loop
        exit when bytes >= bytes_max;
        ended := ended + 1;
        begin
          event := row(texts[i], texts[i + 1], texts[i + 2], texts[i + 3], texts[i + 4], texts[i + 5], texts[i + 6],
                       texts[i + 7], texts[i + 8], texts[i + 9], texts[i + 10], texts[i + 11], texts[i + 12],
                       texts[i + 13], texts[i + 14]);
        exception when data_exception or program_limit_exceeded then
          -- Some values are valid json, but not jsonb.
          event := null;
          event.seq := texts[i];
          event.fault := 'failed';
          event.error := format('%s (SQLSTATE %s)', sqlerrm, sqlstate);
        end;
        if event.fault is not null then
          perform outbox_internal.end_claim(event.seq, claims[ended].claim_token, to_destination, event.error, false,
                                            event.fault = 'missing');
          continue;
        end if;
        return query
        select event.seq,
               case when event.id ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then event.id::uuid end,
               event.type, event.payload, event.headers, c.key, c.attempts, c.claim_token, c.claim_until,
               event.aggregate_type, event.aggregate_id, event.operation, event.previous_payload, event.metadata,
               event.actor, event.correlation_id, event.created_at, c.replayed, event.id
        from unnest(claims[ended:ended]) c;
        given := given + 1;
        bytes := bytes + coalesce(pg_column_size(event.payload), 0) + coalesce(pg_column_size(event.previous_payload), 0)
          + coalesce(pg_column_size(event.metadata), 0) + coalesce(pg_column_size(event.headers), 0);
      end loop;
    end loop;
    if ended < cardinality(claims) then
      update @extschema@.outbox o set claim_token = null, claim_until = null
      from unnest(claims[ended + 1:]) c
      where o.ctid = (select outbox_internal.find_row(c.seq, to_destination, s.partitions)
                      from @extschema@.outbox_settings s)
        and o.claim_token = c.claim_token;
      exit;
    end if;
    exit when given >= max_rows or bytes >= bytes_max or (given > 0 and cardinality(claims) < wanted);
    wanted := least(max_rows - given, greatest(1, (bytes_max - bytes) * given / greatest(bytes, 1)));
  end loop;
end
$$;

drop function outbox_internal.source_rows(bigint[], bigint);

-- ---- the screen of a worker outside reads the views -----------------------------------------------------------------

drop function outbox_internal.work_pending(smallint[]);

-- ---- the index of keys does not depend on the collation of the database ---------------------------------------------

-- A new version of the C library may sort texts of that collation differently, and then finds nothing in their index.
drop index @extschema@.outbox_waiting_destination_partition_key_seq_idx;
create index on @extschema@.outbox_waiting (destination, partition, key collate "C", seq) where state = 'g';
do $keys$
declare
  thing record;
  definition text;
  part text;
begin
  for thing in
    select p.oid from pg_catalog.pg_proc p
    where p.pronamespace = 'outbox_internal'::pg_catalog.regnamespace
      and p.proname = any (array['claim_waiting', 'waits', 'blocked_keys', 'next'])
  loop
    definition := pg_catalog.pg_get_functiondef(thing.oid);
    foreach part in array array['w.key = $3', 'w.key = $4', 'w.key = l.key', 'w.key = g.key', 'x.key = g.key',
                                'w.key, w.seq limit', 'w.key limit 1', 'w.key) > ']
    loop
      definition := pg_catalog.replace(definition, part,
        pg_catalog.substr(part, 1, 5) || ' collate "C"' || pg_catalog.substr(part, 6));
    end loop;
    execute definition;
  end loop;
end
$keys$;

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
    perform from outbox_internal.make_ready(array(
      select w.ctid from @extschema@.outbox_waiting w where w.state = 'g'));
    update @extschema@.outbox_dead d set blocks = false where d.blocks;
  end if;
  update @extschema@.outbox o
  set partition = outbox_internal.repartition(o.seq, o.key, o.partition, old, new),
      claim_token = null, claim_until = null;
  perform outbox_internal.record_shown(o.destination, o.partition, min(o.seq)) from @extschema@.outbox o
  group by o.destination, o.partition;
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

-- ---- effects are statements of their own -------------------------------------------------------------------------------

create or replace function outbox_internal.identity_replace() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  -- A dump contains its own row. The row may come after the messages, so a restored database delivers nothing from
  -- CREATE EXTENSION on. A restore is recognised by SET row_security = off: pg_dump's scripts and pg_restore begin with
  -- it, and other sessions hardly ever use it.
  delete from @extschema@.outbox_identity;
  new.restored := found or current_setting('row_security') = 'off';
  new.database := coalesce(new.database, (select d.oid from pg_database d where d.datname = current_database()));
  new.identity := coalesce(new.identity, current_setting('outbox.identity', true), '');
  return new;
end
$$;
comment on function outbox_internal.identity_replace() is
  'Keeps outbox_identity at one row, by default that of this database, and notices a dump that is restored.';

create or replace function outbox_internal.record_shown(destination text, partition smallint, seq bigint)
returns boolean language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_record_shown_wrapper';
comment on function outbox_internal.record_shown(text, smallint, bigint) is
  'This transaction puts a message into outbox, where views look for the first waiting one; published at COMMIT.'
  ' Returns true.';

create or replace function outbox_internal.expire_dead(
  retention_s integer, batch integer, moment timestamptz default pg_catalog.clock_timestamp()
) returns bigint language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  discarded bigint;
begin
  select d.discarded into discarded from outbox_internal.discard(
    '{}'::tid[], '{}'::tid[],
    array(select x.ctid from @extschema@.outbox_dead x
          where x.died_at < moment - make_interval(secs => retention_s) order by x.died_at limit batch
          for update skip locked), null::text) d;
  if discarded > 0 then
    perform outbox_internal.wake(0::bigint, '{}'::smallint[], '{}'::bigint[]); -- keys may continue
  end if;
  return discarded;
end
$$;

create or replace function @extschema@.outbox_drain(timeout interval default '1 minute')
returns bigint language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  deadline constant timestamptz := clock_timestamp() + coalesce(timeout, '1 minute');
  began timestamptz;
  could_go bigint; -- messages that wait or are in flight: not scheduled, backing off, or behind such a one or a dead letter
begin
  if pg_current_xact_id_if_assigned() is not null then
    raise exception 'outbox_drain() in a transaction that has written'
      using errcode = 'active_sql_transaction',
            detail = 'No worker sees the enqueued messages before it commits.',
            hint = 'Call it alone, after COMMIT.';
  end if;
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception 'outbox_drain() in a transaction that is %', current_setting('transaction_isolation')
      using errcode = 'active_sql_transaction',
            detail = 'It would not see the progress of the workers.', hint = 'Call it in a READ COMMITTED transaction.';
  end if;
  loop
    began := clock_timestamp(); -- each statement below takes a new snapshot
    if began >= deadline or not exists (select from outbox_internal.first_that_could_go) then
      with blocked as materialized (
        select w.destination, w.partition, w.key from @extschema@.outbox_waiting w
        where w.state = 'b' and w.due_at > clock_timestamp()
        union
        select d.destination, d.partition, d.key from @extschema@.outbox_dead d where d.blocks
      )
      select (select count(*) from @extschema@.outbox o where not exists (
                select from outbox_internal.blocked_lanes() l
                where l.destination = o.destination and l.partition = o.partition and l.blocker < o.seq))
           + (select count(*) from @extschema@.outbox_waiting w where w.due_at <= clock_timestamp())
           + (select count(*) from @extschema@.outbox_waiting w where w.state = 'g' and not exists (
                select from blocked c
                where c.destination = w.destination and c.partition = w.partition and c.key = w.key))
        into could_go;
      exit when could_go = 0 or began >= deadline;
    end if;
    -- One long scan, of what waits behind dead letters, must not use up the whole time.
    perform pg_sleep(greatest(0.1, extract(epoch from clock_timestamp() - began)));
  end loop;
  return could_go;
end
$$;

create or replace function @extschema@.outbox_retry_where(
  destination text default null, type text default null, aggregate_type text default null,
  aggregate_id text default null, key text default null, error_like text default null,
  died_after timestamptz default null, died_before timestamptz default null, seq_from bigint default null,
  seq_to bigint default null, max_rows integer default 10000, reason text default null, dry_run boolean default true,
  attempts_below integer default null
) returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  filter constant jsonb := outbox_internal.criteria(
    jsonb_build_object('destination', destination, 'type', type, 'aggregate_type', aggregate_type,
      'aggregate_id', aggregate_id, 'key', key, 'error_like', error_like, 'died_after', died_after,
      'died_before', died_before, 'seq_from', seq_from, 'seq_to', seq_to, 'attempts_below', attempts_below), max_rows);
  retried bigint;
begin
  perform from @extschema@.outbox_settings; -- first, as everywhere
  if coalesce(dry_run, true) then
    return (select count(*) from outbox_internal.dead_matching(filter, max_rows));
  end if;
  retried := outbox_internal.revive(array(select m.row_tid from outbox_internal.dead_matching(filter, max_rows) m));
  if retried > 0 then
    perform outbox_internal.record_audit('retry'::text, filter || jsonb_build_object('max_rows', max_rows), retried,
                                          outbox_retry_where.reason);
  end if;
  return retried;
end
$$;

create or replace function @extschema@.outbox_replay(
  seq_from bigint default null, seq_to bigint default null, created_from timestamptz default null,
  created_to timestamptz default null, type text default null, aggregate_type text default null,
  aggregate_id text default null, key text default null, source_destination text default null,
  destination text default null, max_rows integer default 10000, reason text default null, dry_run boolean default true
) returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  piece constant integer := 10000;
  settings constant @extschema@.outbox_settings := outbox_internal.settings_now();
  source constant text := (select s.relation from @extschema@.outbox_source s);
  asks_events constant boolean := num_nonnulls(
    created_from, created_to, outbox_replay.type, outbox_replay.aggregate_type, outbox_replay.aggregate_id) > 0;
  filter constant jsonb := outbox_internal.criteria(
    jsonb_build_object('seq_from', seq_from, 'seq_to', seq_to, 'created_from', created_from, 'created_to', created_to,
      'type', type, 'aggregate_type', aggregate_type, 'aggregate_id', aggregate_id, 'key', key,
      'source_destination', source_destination), max_rows);
  wanted constant bigint := coalesce(max_rows, 9223372036854775807);
  -- Few messages have a key: looked up in the history, instead of in all events batch by batch.
  by_key constant boolean := outbox_replay.key is not null and not asks_events;
  reached bigint := coalesce(seq_from, 1) - 1;
  replayed bigint := 0;
  ready record; -- of each lane the first message that came back, and how many
  seqs bigint[];
  is_last boolean;
begin
  if outbox_replay.destination is not null and not outbox_internal.destination_exists(outbox_replay.destination) then
    raise exception 'destination "%" does not exist', outbox_replay.destination
      using errcode = 'undefined_object',
            hint = 'Leave the destination out: then each message goes to its former destination.';
  end if;
  loop
    seqs := case when source is not null or by_key then array(
      select distinct h.seq from @extschema@.outbox_history h
      where h.seq > reached and h.seq <= coalesce(seq_to, 9223372036854775807)
        and (outbox_replay.key is null or h.key = outbox_replay.key)
        and (source is not null or exists (select from @extschema@.outbox_events e where e.seq = h.seq))
      order by 1 limit piece)
    else array(
      select e.seq from @extschema@.outbox_events e
      where e.seq > reached and e.seq <= coalesce(seq_to, 9223372036854775807)
        and (created_from is null or e.created_at >= created_from)
        and (created_to is null or e.created_at < created_to)
        and (outbox_replay.type is null or e.type = outbox_replay.type)
        and (outbox_replay.aggregate_type is null or e.aggregate_type = outbox_replay.aggregate_type)
        and (outbox_replay.aggregate_id is null or e.aggregate_id = outbox_replay.aggregate_id)
      order by e.seq limit piece) end;
    exit when cardinality(seqs) = 0;
    reached := seqs[cardinality(seqs)];
    is_last := cardinality(seqs) < piece;
    if source is not null and asks_events then
      seqs := array(select m.seq
                    from unnest(outbox_internal.source_matching(seqs, outbox_replay.type, outbox_replay.aggregate_type,
                      outbox_replay.aggregate_id, created_from, created_to)) m (seq) order by 1);
    end if;
    if coalesce(dry_run, true) then
      select replayed + count(*) into replayed
      from outbox_internal.replayable(seqs, outbox_replay.key, source_destination, outbox_replay.destination);
    else
      with picked as materialized (
        select * from (
          -- Locked against trim_events(), which does not see the messages of this transaction.
          select r.seq, r.destination, r.key_of
          from outbox_internal.replayable(seqs, outbox_replay.key, source_destination, outbox_replay.destination) r
          join @extschema@.outbox_events e on e.seq = r.seq
          where source is null
          order by r.seq, r.destination limit wanted - replayed for key share of e) built_in
        union all
        select * from (
          select r.seq, r.destination, r.key_of
          from outbox_internal.replayable(seqs, outbox_replay.key, source_destination, outbox_replay.destination) r
          where source is not null
          order by r.seq, r.destination limit wanted - replayed) own
      ), back as (
        insert into @extschema@.outbox as o (destination, partition, seq, key, replayed)
        select p.destination,
               coalesce(outbox_internal.partition_by(settings.partitioner, settings.partitioner_owner, p.key_of,
                                                     settings.partition_count::integer),
                        p.seq % settings.partition_count)::smallint, p.seq, p.key_of, true
        from picked p
        on conflict do nothing
        returning o.destination, o.partition, o.seq
      ), lanes as (
        select b.destination, b.partition, min(b.seq) as low, count(*) as n from back b group by 1, 2
      )
      select coalesce(sum(l.n), 0) as n, array_agg(l.destination) as destinations, array_agg(l.partition) as partitions,
             array_agg(l.low) as lows, array_agg(l.n) as counts
        into ready from lanes l;
      perform outbox_internal.record_ready(ready.destinations, ready.partitions, ready.lows, ready.counts);
      replayed := replayed + ready.n;
    end if;
    exit when is_last or replayed >= wanted;
  end loop;
  replayed := least(replayed, wanted);
  if replayed > 0 and not coalesce(dry_run, true) then
    perform outbox_internal.record_audit('replay'::text,
      filter || jsonb_build_object('destination', outbox_replay.destination, 'max_rows', max_rows), replayed,
      outbox_replay.reason);
  end if;
  return replayed;
end
$$;

create or replace function @extschema@.outbox_purge(
  aggregate_type text, aggregate_id text, reason text default null, dry_run boolean default true
) returns table (table_name text, rows bigint) language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  kind constant text := outbox_purge.aggregate_type;
  who constant text := outbox_purge.aggregate_id;
  whole constant text := coalesce(kind || ':', '') || who;
  crc constant bigint := outbox_internal.crc32(whole);
  n bigint[];
  removed record;
  message record;
begin
  if who is null then
    raise exception 'aggregate_id is NULL' using errcode = 'null_value_not_allowed',
      hint = 'Name the aggregate as its events do; its type may be NULL.';
  end if;
  perform from @extschema@.outbox_settings; -- first, as everywhere
  if exists (select from @extschema@.outbox_source) then
    raise notice 'the events themselves are in %', (select s.relation from @extschema@.outbox_source s)
      using hint = 'Erase them there; the only other messages that are found are those whose key is the aggregate.';
  end if;
  if coalesce(dry_run, true) then
    return query
    with seqs as materialized (select s.seq from outbox_internal.seqs_of(kind, who) s (seq))
    select 'outbox_events', count(*) from @extschema@.outbox_events e
      where e.aggregate_id = who and e.aggregate_type is not distinct from kind
    union all select 'outbox', count(*) from @extschema@.outbox o join seqs on seqs.seq = o.seq
    union all select 'outbox_waiting', count(*) from @extschema@.outbox_waiting w join seqs on seqs.seq = w.seq
    union all select 'outbox_dead', count(*) from @extschema@.outbox_dead d join seqs on seqs.seq = d.seq
    union all select 'outbox_history', count(*) from @extschema@.outbox_history h join seqs on seqs.seq = h.seq
    union all select 'outbox_attempts_log', count(*) from @extschema@.outbox_attempts_log l
      join seqs on seqs.seq = l.seq
    union all select 'outbox_audit', count(*) from @extschema@.outbox_audit a
      where (a.filter->>'aggregate_id' = who and coalesce(a.filter->>'aggregate_type', kind) is not distinct from kind)
       or a.filter->>'key' = whole;
    return;
  end if;
  perform count(*) from (
    select from @extschema@.outbox_events e where e.aggregate_id = who and e.aggregate_type is not distinct from kind
    order by e.seq for update) locked;
  begin
    -- In the order in which a message may move from one to the next.
    perform count(*) from (select from @extschema@.outbox_dead d
                           join outbox_internal.seqs_of(kind, who) s (seq) on s.seq = d.seq
                           for update of d nowait) locked;
    perform count(*) from (select from @extschema@.outbox_waiting w
                           join outbox_internal.seqs_of(kind, who) s (seq) on s.seq = w.seq
                           for update of w nowait) locked;
    perform count(*) from (select from @extschema@.outbox o
                           join outbox_internal.seqs_of(kind, who) s (seq) on s.seq = o.seq
                           for update of o nowait) locked;
  exception when lock_not_available then
    raise exception 'another session is changing a message of this aggregate'
      using errcode = 'object_in_use', hint = 'Try again in a moment.';
  end;
  with seqs as materialized (select s.seq from outbox_internal.seqs_of(kind, who) s (seq)),
  events as (
    delete from @extschema@.outbox_events e
    where e.aggregate_id = who and e.aggregate_type is not distinct from kind returning 1
  ), ready as (
    delete from @extschema@.outbox o using seqs where o.seq = seqs.seq
    returning o.seq, o.destination, o.partition,
              outbox_internal.claim_is_live(o.claim_token, o.partition, o.claim_until) as is_claimed
  ), waiting as (
    delete from @extschema@.outbox_waiting w using seqs where w.seq = seqs.seq returning w.destination
  ), dead as (
    delete from @extschema@.outbox_dead d using seqs where d.seq = seqs.seq returning 1
  ), history as (
    delete from @extschema@.outbox_history h using seqs where h.seq = seqs.seq returning 1
  ), attempts as (
    delete from @extschema@.outbox_attempts_log l using seqs where l.seq = seqs.seq returning 1
  ), audit as (
    -- Manual actions may have named it.
    update @extschema@.outbox_audit a
    set filter = a.filter - 'aggregate_id' - 'key' || jsonb_build_object('key_crc32', crc)
    where (a.filter->>'aggregate_id' = who and coalesce(a.filter->>'aggregate_type', kind) is not distinct from kind)
       or a.filter->>'key' = whole returning 1
  )
  select array[(select count(*) from events), (select count(*) from ready), (select count(*) from waiting),
               (select count(*) from dead), (select count(*) from history), (select count(*) from attempts),
               (select count(*) from audit)] as counts,
         array(select w.destination from waiting w) as waiting, r.*
    into removed
  from (select array_agg(r.seq) as seqs, array_agg(r.destination) as destinations, array_agg(r.partition) as partitions,
               array_agg(r.is_claimed) as claimed from ready r) r;
  for message in
    select * from unnest(removed.seqs, removed.destinations, removed.partitions, removed.claimed)
      as m (seq, destination, partition, is_claimed) order by m.seq
  loop
    if message.is_claimed
       or not outbox_internal.withdraw_unless_taken(message.destination, message.partition, message.seq) then
      raise exception 'message % is in flight', message.seq
        using errcode = 'object_in_use',
        hint = 'Try again in a moment, or when the transaction that it waits for has ended (outbox_open_transactions).';
    end if;
  end loop;
  perform outbox_internal.record_pending(d, -count(*)) from unnest(removed.destinations || removed.waiting) d group by d;
  n := removed.counts;
  if 0 < any (n) then
    perform outbox_internal.wake(-n[2] - n[3], '{}'::smallint[], '{}'::bigint[]); -- keys may continue
    perform outbox_internal.record_audit(
      'purge'::text, jsonb_build_object('key_crc32', crc), n[1], outbox_purge.reason);
  end if;
  return query
  select t.table_name, n[t.i]
  from unnest(array['outbox_events', 'outbox', 'outbox_waiting', 'outbox_dead', 'outbox_history', 'outbox_attempts_log',
                    'outbox_audit']) with ordinality t (table_name, i);
end
$$;

create or replace function outbox_internal.relay_claim(
  max_rows integer, to_destination text, ttl_s double precision, bytes_max bigint
) returns setof outbox_internal.relayed language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  settings constant @extschema@.outbox_settings := outbox_internal.settings_now();
  -- Negative, as those of workers without leases; each call has another one.
  token constant bigint := hashtextextended(gen_random_uuid()::text, 0) | (-9223372036854775808);
  -- A partition is one order, whatever the keys.
  by_partition constant boolean := exists (
    select from outbox_internal.destinations() d
    where d.destination = to_destination and 'ordering=partition' = any (d.options));
  lane_rows bigint := max_rows;
  seqs bigint[];
  keys text[];
  places smallint[];
  held bigint[];
  free bigint[] := '{}';
  message record;
begin
  -- The commit of a claim puts all that it saw on disk.
  if current_setting('synchronous_commit') = 'off' then
    perform set_config('synchronous_commit', 'local', true);
  end if;

  if not settings.leasing then
    perform outbox_internal.due(null::text, null::smallint[], null::bigint[], 1000, to_destination);
    perform outbox_internal.expire_heads(to_destination, settings.partitions, lane_rows);
    return query
    select c.seq, c.key, c.attempts, c.claim_token, now() + ttl_s * interval '1 s', c.replayed
    from outbox_internal.claim_unleased(to_destination, token, ttl_s::integer, max_rows, bytes_max) c
    where c.remark is null;
    return;
  end if;

  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception 'outbox_fetch_unpublished() cannot keep the order of keys in a % transaction',
      upper(current_setting('transaction_isolation'))
      using errcode = 'object_not_in_prerequisite_state', hint = 'Call it at READ COMMITTED.';
  end if;
  -- Blocks outbox_resume(), and serialises the claims of a destination.
  update @extschema@.outbox_paused p
  set relay_until = greatest(p.relay_until, clock_timestamp() + ttl_s * interval '1 s')
  where p.destination = to_destination;
  if not found then
    raise exception 'the workers deliver to destination "%"', to_destination
      using errcode = 'object_not_in_prerequisite_state',
            hint = format('select outbox_pause(%L); or outbox_configure(leasing => false) to share it without order.',
                          to_destination);
  end if;
  perform outbox_internal.due(null::text, null::smallint[], null::bigint[], 1000, to_destination);
  -- There may be no worker that does it.
  perform outbox_internal.expire_heads(to_destination, settings.partitions, lane_rows);
  -- Messages behind one that has ended meanwhile: the first of each key. In a partition with one order, all that wait
  -- by their key from before that order was set.
  perform from outbox_internal.make_ready(array(
    select w.ctid from outbox_internal.blocked_keys(settings.partitions) g
    cross join lateral (
      select x.ctid from @extschema@.outbox_waiting x
      where x.state = 'g' and x.destination = g.destination and x.partition = g.partition and x.key collate "C" = g.key
      order by x.seq limit case when not by_partition then 1 end) w
    where g.destination = to_destination and (g.blocker is null or by_partition) and g.followers));

  -- Read, then read the open transactions, then read again and claim. A transaction with a lower seq of the key is
  -- either still open at the second step, or visible to the third.
  loop
    select array_agg(f.seq), array_agg(f.key), array_agg(f.partition) into seqs, keys, places
    from outbox_internal.claimable_heads(to_destination, settings.partitions, lane_rows::integer, by_partition) f;
    -- Many messages of few keys: read further.
    exit when cardinality(seqs) >= max_rows or by_partition or lane_rows > 100000000 or not exists (
      select from unnest(settings.partitions) p (n) cross join lateral (
        select from @extschema@.outbox o where o.destination = to_destination and o.partition = p.n
        order by o.destination, o.partition, o.seq offset lane_rows limit 1) x);
    lane_rows := lane_rows * 8;
  end loop;
  held := outbox_internal.behind_open_transactions(by_partition, seqs, keys, places);
  for message in
    select c.seq, c.partition from unnest(seqs, places) c (seq, partition)
    where c.seq <> all (held) order by c.seq limit max_rows
  loop
    -- A worker notices a pause later than this session.
    if outbox_internal.withdraw_unless_taken(to_destination, message.partition, message.seq) then
      free := free || message.seq;
    end if;
  end loop;
  return query
  with chosen as materialized (
    select f.tid, f.seq
    from outbox_internal.claimable_heads(to_destination, settings.partitions, lane_rows::integer, by_partition) f
    where f.seq = any (free) order by f.seq
  ), sized as materialized (
    -- Limited by a column: no body is read for it.
    select c.tid, sum(coalesce(e.body_bytes, 0)) over (order by c.seq) - coalesce(e.body_bytes, 0) as bytes_before
    from chosen c left join @extschema@.outbox_events e on e.seq = c.seq
  ), claimed as (
    update @extschema@.outbox o
    set claim_token = token, claim_until = clock_timestamp() + ttl_s * interval '1 s',
        crashes = o.crashes + case when o.claim_token is null then 0 else 1 end
    from sized s where o.ctid = s.tid and s.bytes_before < bytes_max
    returning o.seq, o.key, o.attempts, o.claim_token, o.claim_until, o.replayed
  )
  select c.* from claimed c;
end
$$;

create or replace function outbox_internal.end_claim(
  seq bigint, claim_token bigint, destination text, error text, published boolean, unsendable boolean default false
) returns boolean language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  to_destination constant text := coalesce(end_claim.destination, 'default');
  settings constant @extschema@.outbox_settings := outbox_internal.settings_now();
  verdict text[] := '{p,0,""}';
  message record;
begin
  -- If the commit is lost, the message is sent again.
  if current_setting('synchronous_commit') = 'off' then
    perform set_config('synchronous_commit', 'local', true);
  end if;
  select o.ctid as tid, o.partition, o.key, o.attempts, o.enqueued_at into message from @extschema@.outbox o
  where o.ctid = (select outbox_internal.find_row(end_claim.seq, to_destination, settings.partitions))
    and o.claim_token = end_claim.claim_token and o.claim_token < 0 and o.claim_until > clock_timestamp()
  for update;
  if not found then
    return false;
  end if;
  if not published then
    select outbox_internal.decide_failure(d.wrapper, d.options, end_claim.seq, message.attempts,
                                          coalesce(error, 'failed'), unsendable)
      into verdict
    from (select) one left join outbox_internal.destinations() d on d.destination = to_destination;
  end if;
  if outbox_internal.settle(
       ''::text, array[message.tid], array[end_claim.seq], array[to_destination], array[message.partition],
       array[end_claim.claim_token], array[verdict[1]]::"char"[], array[verdict[2]]::bigint[],
       array[verdict[3]]) <> 1 then
    return false;
  end if;
  if verdict[1] in ('B', 'D') and settings.leasing then
    update @extschema@.outbox_dead d set blocks = true
    where d.destination = to_destination and d.seq = end_claim.seq and (verdict[1] = 'B' or d.key is not null);
  end if;
  perform outbox_internal.record_ended(
    published::integer::bigint, (not published)::integer::bigint, (verdict[1] <> 'r')::integer::bigint);
  perform outbox_internal.record_pending(to_destination, -(verdict[1] <> 'r')::integer::bigint);
  if published then
    perform outbox_internal.record_took(
      array[(extract(epoch from clock_timestamp() - message.enqueued_at) * 1000000)::bigint]);
  end if;
  return true;
end
$$;

create or replace function @extschema@.outbox_relay(
  max_rows integer default 100, timeout interval default '30 s', out messages bigint, out published bigint,
  out failed bigint, out dead bigint, out waiting bigint, out ok boolean
) language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  began constant timestamptz := clock_timestamp();
  chosen jsonb;
  outcomes text[];
  left_before bigint;
  idle_rounds integer := 0;
begin
  perform outbox_internal.check_request('outbox_relay'::text, timeout);
  if max_rows is null or max_rows not between 1 and 10000 then
    raise exception 'max_rows is %', coalesce(max_rows::text, 'NULL')
      using errcode = 'invalid_parameter_value', hint = 'Give a number from 1 to 10000.';
  end if;
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception 'outbox_relay() cannot see the end of a message in a % transaction',
      upper(current_setting('transaction_isolation'))
      using errcode = 'object_not_in_prerequisite_state', hint = 'Call it at READ COMMITTED.';
  end if;
  if not current_setting('outbox.enabled')::boolean and not (select s.leasing from @extschema@.outbox_settings s) then
    raise exception 'outbox_relay() delivers nothing with outbox.enabled off and leasing off'
      using errcode = 'object_not_in_prerequisite_state', detail = 'Without leases a worker cannot stop at a seq.',
            hint = 'select outbox_configure(leasing => true), or switch outbox.enabled on.';
  end if;

  select jsonb_agg(to_jsonb(n) order by n.seq), count(*) into chosen, messages from outbox_internal.next(max_rows) n;
  waiting := messages;
  while waiting > 0 and idle_rounds < 2 loop
    left_before := waiting;
    perform outbox_internal.request_workers((chosen->-1->>'seq')::bigint, began + timeout);
    outcomes := array(
      select case when f.outcome = 'waits' and (
                    exists (select from @extschema@.outbox_waiting w
                            where w.seq = c.seq and w.destination = c.destination and w.attempts > c.attempts)
                    or exists (select from @extschema@.outbox o
                               where o.ctid = (select outbox_internal.find_row(c.seq, c.destination, s.partitions))
                                 and o.attempts > c.attempts)) then 'failed'
                  else f.outcome end
      from jsonb_to_recordset(chosen) c (seq bigint, destination text, attempts integer)
      cross join @extschema@.outbox_settings s
      cross join lateral outbox_internal.outcome(c.seq, c.destination, began - interval '1 minute', s.partitions)
        f (outcome));
    waiting := (select count(*) from unnest(outcomes) f where f in ('waits', 'unknown'));
    -- A message that waited behind another of its key, or reached another worker, is delivered in the next round.
    idle_rounds := case when waiting < left_before then 0 else idle_rounds + 1 end;
    exit when clock_timestamp() >= began + timeout;
  end loop;
  select count(*) filter (where f = 'published'), count(*) filter (where f = 'failed'),
         count(*) filter (where f in ('dead', 'discarded'))
    into published, failed, dead from unnest(outcomes) f;
  ok := published = messages;
end
$$;

comment on column @extschema@.outbox_waiting.state is
  'The status in outbox_messages, as a letter: s = scheduled, b = retrying after a failure, g = blocked behind a message'
  ' of its key that failed or is dead.';

drop function outbox_internal.firsts(text, smallint[], integer, boolean);
drop function outbox_internal.expire_firsts(text, smallint[], bigint);
drop function outbox_internal.here();
drop function outbox_internal.uuid_v7();
drop function outbox_internal.by_partition(text);
drop function outbox_internal.commit_durably();
drop function outbox_internal.relay_return(outbox_internal.relayed[], text);
drop function outbox_internal.could_go();
drop function outbox_internal.fate(bigint, text, integer, timestamptz);
drop function outbox_internal.is_fast_in_flight(text, smallint, bigint);

-- ---- plans are set in one place, and statements that were simplified --------------------------------------------------

create or replace function @extschema@.outbox_discard_where(
  destination text default null, type text default null, aggregate_type text default null,
  aggregate_id text default null, key text default null, error_like text default null,
  died_after timestamptz default null, died_before timestamptz default null, seq_from bigint default null,
  seq_to bigint default null, max_rows integer default 10000, reason text default null, dry_run boolean default true,
  attempts_below integer default null
) returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  filter constant jsonb := outbox_internal.criteria(
    jsonb_build_object('destination', destination, 'type', type, 'aggregate_type', aggregate_type,
      'aggregate_id', aggregate_id, 'key', key, 'error_like', error_like, 'died_after', died_after,
      'died_before', died_before, 'seq_from', seq_from, 'seq_to', seq_to, 'attempts_below', attempts_below), max_rows);
  discarded bigint;
begin
  if coalesce(dry_run, true) then
    return (select count(*) from outbox_internal.dead_matching(filter, max_rows));
  end if;
  select d.discarded into discarded from outbox_internal.discard(
    '{}'::tid[], '{}'::tid[], array(select m.row_tid from outbox_internal.dead_matching(filter, max_rows) m),
    coalesce(outbox_discard_where.reason, 'discarded by ' || session_user)) d;
  if discarded > 0 then
    perform outbox_internal.wake(0::bigint, '{}'::smallint[], '{}'::bigint[]); -- keys may continue
    perform outbox_internal.record_audit('discard'::text, filter || jsonb_build_object('max_rows', max_rows),
                                          discarded, outbox_discard_where.reason);
  end if;
  return discarded;
end
$$;

create or replace function outbox_internal.dead_matching(filter jsonb, max_rows integer, out row_tid tid)
returns setof tid language plpgsql stable rows 100
set search_path = pg_catalog, pg_temp as $$
declare
  f_destination constant text := filter->>'destination';
  f_type text := filter->>'type';
  f_aggregate_type text := filter->>'aggregate_type';
  f_aggregate_id text := filter->>'aggregate_id';
  f_key constant text := filter->>'key';
  f_error_like constant text := filter->>'error_like';
  f_after constant timestamptz := filter->>'died_after';
  f_before constant timestamptz := filter->>'died_before';
  f_attempts constant integer := coalesce(filter->>'attempts_below', '2147483647');
  f_from constant bigint := coalesce(filter->>'seq_from', '-9223372036854775808');
  f_to constant bigint := coalesce(filter->>'seq_to', '9223372036854775807');
  chosen bigint[];
begin
  if num_nonnulls(f_type, f_aggregate_type, f_aggregate_id) > 0 and exists (select from @extschema@.outbox_source) then
    -- Events of a source: of the messages that meet the other criteria.
    chosen := outbox_internal.source_matching(array(
      select distinct d.seq
      from outbox_internal.dead_matching(filter - '{type,aggregate_type,aggregate_id}'::text[], null::integer) m
      join @extschema@.outbox_dead d on d.ctid = m.row_tid),
      f_type, f_aggregate_type, f_aggregate_id, null::timestamptz, null::timestamptz);
    f_type := null;
    f_aggregate_type := null;
    f_aggregate_id := null;
  end if;
  return query
  select d.ctid from @extschema@.outbox_dead d left join @extschema@.outbox_events e on e.seq = d.seq
  where d.seq between f_from and f_to and (chosen is null or d.seq = any (chosen))
    and (f_destination is null or d.destination = f_destination)
    and (f_key is null or d.key = f_key)
    and (f_error_like is null or d.reason like f_error_like)
    and (f_after is null or d.died_at >= f_after)
    and (f_before is null or d.died_at < f_before) and d.attempts < f_attempts
    and (f_type is null or e.type = f_type)
    and (f_aggregate_type is null or e.aggregate_type = f_aggregate_type)
    and (f_aggregate_id is null or e.aggregate_id = f_aggregate_id)
  order by d.seq limit max_rows;
end
$$;

create or replace function @extschema@.outbox_run_pass(timeout interval default '30 s')
returns jsonb language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  answers bigint[];
  pass jsonb;
begin
  perform outbox_internal.check_request('outbox_run_pass'::text, timeout);
  answers := outbox_internal.request_workers(0::bigint, clock_timestamp() + timeout);
  select jsonb_build_object(
           'claimed', sum(a[3]), 'published', sum(a[4]), 'failed', sum(a[5]),
           'duration_ms', round(max(a[6]) / 1000.0, 2), 'backoff_ms', min(a[7]),
           'renewed_heartbeat', bool_and(a[8] = 1), 'purged_stale', sum(a[9]),
           'active_workers', max(a[10]), 'desired_count', sum(a[11]),
           'owned_count', sum(a[12]), 'leased_count', sum(a[13]), 'released_count', sum(a[14]),
           'ts', to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
    into pass
  from (select answers[i + 1 : i + 14] as a from generate_series(0, cardinality(answers) - 1, 14) i) w
  where a[2] > 0 having count(*) > 0;
  if pass is null then
    raise exception 'no worker has begun within %', timeout
      using errcode = 'object_not_in_prerequisite_state',
            detail = 'A worker reads a request between two steps: it may be waiting for a lock, or for the disk.',
            hint = 'Call again with a longer timeout; pg_stat_activity shows what the worker waits for.';
  end if;
  return pass;
end
$$;

-- ---- the roles can be dropped after the extension -------------------------------------------------------------------

-- Core records a grant of this script as a part of the extension, and keeps the record after DROP EXTENSION. Since version
-- 17 it keeps the role from being dropped, because DROP OWNED BY fails at grants on parameters. No statement removes it:
-- ALTER EXTENSION has no parameters, and REVOKE would take the grant back.
select outbox_internal.remove_initial_privileges(p.oid)
from pg_catalog.pg_parameter_acl p where p.parname = 'outbox.replaying';

-- ---- plans are set in one place -------------------------------------------------------------------------------------

do $plans$
declare
  thing record;
begin
  for thing in
    select p.oid::pg_catalog.regprocedure as identity from pg_catalog.pg_proc p
    join pg_catalog.pg_depend d on d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass and d.objid = p.oid and d.deptype = 'e'
    join pg_catalog.pg_extension e on e.oid = d.refobjid and e.extname = 'outbox'
    where exists (select from pg_catalog.unnest(p.proconfig) c where c ~ '^(enable_|jit=|plan_cache_mode=|work_mem=)')
  loop
    execute pg_catalog.format('alter function %s reset all set search_path = pg_catalog, pg_temp', thing.identity);
  end loop;
end
$plans$;
select outbox_internal.set_plans();

-- ---- outbox_health compares functions with these ------------------------------------------------------------------------

do $functions$
begin
  execute pg_catalog.format(
    'create or replace function outbox_internal.installed_functions() returns pg_catalog.jsonb'
    ' language sql immutable parallel safe set search_path = pg_catalog, pg_temp return %L::pg_catalog.jsonb',
    (select pg_catalog.jsonb_object_agg(f.name, f.digest order by f.name) from outbox_internal.definer_functions() f));
end
$functions$;
