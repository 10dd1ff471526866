-- How the statements of functions are planned: the only place that sets it. These settings are for the sessions of users
-- and relays. A worker's session has them for itself (crates/core/src/session_settings.rs), so functions that only
-- workers or maintenance call are not in the list.
--
-- Functions are called for years at any size of their tables, and vacuum may have seen outbox empty just before a million
-- rows came. So plans that read a whole table are switched off: the right one is always an index or a ctid. JIT is off
-- with them, because a plan that still contains a switched-off scan (of a table of one row) looks expensive enough to be
-- compiled each time.

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
      ('claim', planned_once || of_bodies), ('claim_waiting', planned_once || of_bodies), ('claim_unleased', of_bodies),
      ('claim_chosen', planned_once || of_bodies), ('choose_unleased', planned_once), ('mark', planned_once || ' set enable_tidscan = on'),
      ('due', planned_once),
      ('make_ready', planned_once), ('blocked_keys', planned_once), ('destinations_with_messages', planned_once),
      ('lanes_with_messages', planned_once),
      ('expire', planned_once), ('dead_letter', planned_once),
      -- By ctid, also if vacuum saw an empty outbox and any plan looks cheap; but what it calls uses an index.
      ('settle', planned_once || ' set enable_indexscan = off'),
      ('record_failed', in_order || ' set enable_indexscan = on'),
      -- Waits for a lock no longer than a worker's session, also for a relay.
      ('notify_dead', row_by_row || ' set enable_indexscan = on set lock_timeout = ''500ms'''),
      ('work_claim_unleased', of_bodies), ('work_events', planned_once || ' set enable_tidscan = on' || of_bodies),
      -- Relays and waits.
      ('outbox_fetch_unpublished', in_order || of_bodies), ('relay_claim', in_order), ('claimable_heads', in_order),
      ('unended', in_order), ('outbox_relay', in_order),
      ('destinations', lookup), ('destination_exists', lookup), ('record_owners', lookup), ('find_row', lookup), ('end_claim', lookup), ('outcome', lookup),
      -- Manual actions.
      ('dead_matching', row_by_row), ('revive', row_by_row), ('discard', row_by_row),
      ('outbox_trim_inbox', in_order),
      -- Why a message waits.
      ('message_rows', row_by_row), ('obstacles', row_by_row),
      -- Each statement is planned with its values. The function itself allows more to one that searches all of outbox.
      ('search', lookup || ' set enable_sort = off set enable_hashjoin = off set enable_mergejoin = off'),
      -- Planned with its values: BRIN finds the range that they are in.
      ('outbox_replay', lookup || ' set plan_cache_mode = force_custom_plan'),
      -- Reads the history of an aggregate as a whole.
      ('outbox_purge', ' set enable_nestloop = off set jit = off')) f (name, plan)
    full join (
      select x.oid, x.proname, x.proconfig from pg_proc x
      join outbox_internal.members m on m.classid = 'pg_proc'::regclass and m.objid = x.oid
    ) p on p.proname = f.name
    -- An earlier version may have set others.
    where f.name is not null or p.proconfig::text ~ '[{,"](enable_|jit=|plan_cache_mode=|work_mem=)'
  loop
    execute format('alter function %s reset all set search_path = pg_catalog, pg_temp%s', thing.identity, thing.plan);
  end loop;
end
$$;
comment on function outbox_internal.set_plans() is
  'For the scripts of the extension, and after a function was replaced: sets how the statements of functions are planned.';
select outbox_internal.set_plans();
