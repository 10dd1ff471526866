-- How the statements are planned that workers run again and again: one list of settings for all of them. The session of
-- a worker has the same (crates/core/src/session.rs); these are for who calls the functions from another one, as relays
-- do.
-- A claim and a settle are planned once and reused for years of table sizes, so the plans that read a whole table are
-- switched off for them: the right one is always an index or a ctid. JIT is off with them, since a plan that still
-- holds a switched-off scan (of a table of one row) looks dear enough to be compiled each time.

do $plans$
declare
  planned_once constant text := 'set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off'
    ' set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off';
  -- Nothing is known of the tables when a plan is made: vacuum may have seen outbox empty a moment before a million
  -- rows came. One row expected, a bitmap or a sort of the whole lane looks as cheap as the index that brings the first
  -- rows in order, and costs a second a claim. So those are off wherever the first rows of many are wanted.
  first_rows constant text := ' set enable_sort = off';
  -- What a claim needs at most.
  of_bodies constant text := ' set work_mem = ''128MB''';
  -- By ctid, also where vacuum saw an empty outbox and any plan looks cheap.
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
