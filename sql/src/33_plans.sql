-- How the statements that workers run again and again are planned: one list of settings for all of them. The session of
-- a worker has the same (crates/core/src/session.rs); these are for other sessions that call the functions, as relays
-- do. A claim and a settle are planned once and reused for years of table sizes. So the plans that read a whole table
-- are switched off for them: the right one is always an index or a ctid. JIT is off with them, because a plan that
-- still contains a switched-off scan (of a table of one row) looks expensive enough to be compiled each time.

do $plans$
declare
  planned_once constant text := 'set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off'
    ' set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off';
  -- The plan is made without knowledge of the tables: vacuum may have seen outbox empty just before a million rows
  -- came. If one row is expected, a bitmap or a sort of the whole lane looks as cheap as the index that returns the
  -- first rows in order. It then costs a second for each claim. So both are off for statements that want the first of
  -- many rows.
  first_rows constant text := ' set enable_sort = off';
  -- The most that a claim needs.
  of_bodies constant text := ' set work_mem = ''128MB''';
  -- By ctid, also if vacuum saw an empty outbox and any plan looks cheap.
  by_place constant text := ' set enable_indexscan = off';
  thing record;
begin
  for thing in
    select * from (values
      ('claim', first_rows || of_bodies), ('claim_waiting', first_rows || of_bodies),
      ('claim_unleased', first_rows || of_bodies),
      ('due', first_rows), ('blocked_keys', first_rows), ('expire', first_rows), ('settle', by_place)) f (name, besides)
  loop
    execute pg_catalog.format('alter function outbox_internal.%I %s%s', thing.name, planned_once, thing.besides);
  end loop;
end
$plans$;
