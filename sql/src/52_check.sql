-- Whether a destination can be used, in words. A session opens no socket: it requests the workers to try, through
-- shared memory, and reads their findings in outbox_connections.

create function outbox_internal.request_recheck(destination text)
returns boolean language c volatile strict as 'MODULE_PATHNAME', 'outbox_request_recheck_wrapper';
comment on function outbox_internal.request_recheck(text) is
  'Requests the workers that serve a destination to check it again; false if no worker can.';

create function @extschema@.outbox_check(
  destination text default 'default', out step text, out ok boolean, out detail text
) returns setof record language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
declare
  requested_at constant timestamptz := clock_timestamp();
  patience constant interval := '5 seconds';
  -- Just after CREATE EXTENSION the launcher is about to start the first worker.
  expects_worker constant boolean := current_setting('outbox.workers')::integer > 0
    and exists (select from outbox_internal.server s where s.preloaded and s.obstacle is null);
  worker_role constant name := current_setting('outbox.worker_role');
  described record;
  kind record;
  pause record;
  workers bigint;
  answers bigint;
  is_requested boolean := false;
  seen record;
  stale text := '';
  mapping_problem text[];
begin
  destination := coalesce(destination, 'default');
  select d.*, d.destination = 'default' and d.server is null as by_settings into described
  from outbox_internal.destinations() d where d.destination = outbox_check.destination;
  step := 'exists';
  ok := described.destination is not null;
  if not ok then
    detail := format('destination "%s" does not exist: CREATE SERVER %1$I FOREIGN DATA WRAPPER %s', destination,
                     (select string_agg(k.wrapper, ' or ') from outbox_internal.kinds k));
    return next;
    return;
  end if;
  select k.* into kind from outbox_internal.kinds k
  where k.wrapper = described.wrapper or described.wrapper is null and k.of_settings;
  detail := case when described.by_settings then 'described by the settings outbox.url and so on' || coalesce(
                   (select ', as in database ' || string_agg(quote_ident(s.database), ', ' order by s.database)
                           || ' unless a server "default" is there: ALTER DATABASE ' || quote_ident(current_database())
                           || ' SET outbox.' || min(s.place) || ' = ... separates them'
                    from outbox_internal.sharers s), '')
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
  mapping_problem := outbox_internal.mapping_problem(described.server);
  ok := mapping_problem is null;
  detail := case
    when not ok then (
      select w.problem || ': ' || w.remedy
      from outbox_internal.worded(mapping_problem[1], mapping_problem[2:] || array[
        'destination', described.destination, 'wrapper', described.wrapper]) w)
    when described.by_settings then 'none needed: user and password are in the settings'
    when exists (select from pg_user_mappings m where m.srvid = described.server and m.usename = worker_role)
      then format('there is a user mapping for %I', worker_role)
    when exists (select from pg_user_mappings m where m.srvid = described.server and m.umuser = 0)
      then 'there is a user mapping for PUBLIC'
    else format('there is no user mapping for %I: ', worker_role) || case
      when not kind.of_settings or exists (select from unnest(described.options) o where o like 'url=%')
        then kind.without_mapping
      else 'user and password are in the settings' end end;
  return next;

  -- Workers see only committed data, and this session sees only what they committed.
  loop
    select count(*), count(*) filter (where c.rechecked_at >= requested_at) into workers, answers
    from outbox_internal.live_workers w
    left join @extschema@.outbox_connections c on c.worker_id = w.worker_id and c.destination = outbox_check.destination
    where w.worker_id like 'server-%'; -- workers outside do not take part
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
  ok := pause.destination is null and described.not_adopted is null
    and not exists (select from outbox_internal.findings f where f."check" = 'enabled');
  detail := case
    when described.not_adopted is not null
      then format('not adopted, %s: messages wait for outbox_adopt(destination => %L)', described.not_adopted, destination)
    when pause.destination is not null
      then format('paused by %s%s: messages wait for outbox_resume(%L)', pause.paused_by, ', ' || pause.reason,
                  destination)
    when not ok then 'outbox.enabled is off: messages wait'
    else 'neither paused nor switched off' end;
  return next;

  select c.state, c.reason, c.detail, c.since, count(*) over () as workers into seen
  from outbox_internal.connections c where c.destination = outbox_check.destination and c.is_live
  order by c.severity limit 1;
  step := 'worker';
  ok := found;
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

  step := 'connection';
  ok := case when seen.state = 'connected' then true when seen.state in ('down', 'blocked') then false end;
  detail := case
    when ok and not kind.connects_first then 'no problem is known: it is not tried before a message is sent to it'
    when ok then concat_ws(', ', format('connected since %s', date_trunc('seconds', seen.since)), seen.detail) || stale
    when seen.state in ('down', 'blocked') then concat_ws(': ', seen.state, seen.reason, seen.detail) || stale
    when seen.state = 'connecting' then 'a worker is connecting' || stale
    when seen.state in ('paused', 'pausing') then 'not checked while nothing is delivered'
    else 'not known' end;
  return next;

  if kind.place is not null then
    step := kind.place;
    ok := case when seen.state = 'connected' then true when starts_with(seen.reason, kind.place || '_') then false end;
    detail := case when ok then format('the %s exists', kind.place) || stale
                   when not ok then seen.detail || stale
                   else 'not known without a connection' end;
    return next;
  end if;

  step := 'database'; -- what holds the messages of all destinations back, and no step above says
  detail := (select format('%s: %s', p.problem, p.remedy) from outbox_internal.problems p
             where p."check" in ('identity', 'role', 'triggers', 'database', 'source', 'partitions') and p.destination is null
             limit 1);
  ok := detail is null;
  detail := coalesce(detail, 'nothing holds all messages back');
  return next;
end
$$;
comment on function @extschema@.outbox_check(text) is
  'Whether a destination can be used, step by step; ok is NULL where that is not known. Workers that are not connected'
  ' try immediately; it waits for their answer, 5 s at most.';
