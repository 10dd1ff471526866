-- Ended messages are kept for a time and then removed: history by whole partitions, dead letters and events in batches.
-- Maintenance calls these functions once a minute. Each takes the time as an argument, so that a test can pass another
-- one.
--
-- A partition of the history is created at run time and is not a member of the extension. A dump contains it like any
-- table and attaches it again, and DROP EXTENSION drops it with its parent. Three rules keep a restore free of
-- conflicts:
-- * No partition is created while the history is empty. A restore attaches its partitions before it loads the first
--   row, and a worker may already run in the new database then.
-- * The parent has no index. ATTACH would create one of the same name in the partition, before the dump creates its
--   own.
-- * Only the default partition is a member, with its rows dumped as configuration.

create table @extschema@.outbox_history_default partition of @extschema@.outbox_history default;
-- No key identifies a row. Without a replica identity Postgres would refuse each delete while there is a
-- publication FOR ALL TABLES. The same holds for the other partitions, and for the audit.
alter table @extschema@.outbox_history_default replica identity full;
-- Rows arrive nearly in order of both columns: BRIN costs next to nothing for each row and finds a seq or a day.
-- Maintenance summarises it. autosummarize would ask autovacuum, whose queue is soon full, and which then logs a line
-- for every 16 blocks.
create index on @extschema@.outbox_history_default using brin (published_at, seq) with (pages_per_range = 16);
comment on table @extschema@.outbox_history_default is
  'History without a partition: of the first minutes, or written while the clock was wrong. A settle never fails'
  ' because a partition is missing.';
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_history_default', '');

create index on @extschema@.outbox_dead (died_at);

create function outbox_internal.history_partitions(
  out partition regclass, out starts_at timestamptz, out ends_at timestamptz
) returns setof record language sql stable set search_path = pg_catalog, pg_temp set datestyle = 'ISO' as $$
  select i.inhrelid::regclass, substring(b.bound from 'FROM \(''([^'']+)''\)')::timestamptz,
         substring(b.bound from 'TO \(''([^'']+)''\)')::timestamptz
  from pg_inherits i join pg_class c on c.oid = i.inhrelid
  cross join lateral pg_get_expr(c.relpartbound, c.oid) as b (bound)
  where i.inhparent = '@extschema@.outbox_history'::regclass and b.bound <> 'DEFAULT' order by 2;
$$;
comment on function outbox_internal.history_partitions() is
  'The same as outbox_history_partitions().';
create function @extschema@.outbox_history_partitions(
  out partition regclass, out starts_at timestamptz, out ends_at timestamptz
) returns setof record language sql stable
begin atomic
  select p.partition, p.starts_at, p.ends_at from outbox_internal.history_partitions() p;
end;
comment on function @extschema@.outbox_history_partitions() is
  'The partitions of outbox_history, except the default one, and the time range of each.';

-- ATTACH locks the default partition against all sessions and reads it. It waits for readers of the history, and
-- settles that need the default partition wait behind it. So it gives up soon, and the worker tries again a minute
-- later; it runs three steps ahead, so there is time for that.
create function outbox_internal.make_partitions(
  retention_s integer, moment timestamptz default pg_catalog.clock_timestamp()
) returns integer language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set timezone = 'UTC' set lock_timeout = '200ms' as $$
declare
  step constant text := case
    when retention_s < 2 * 86400 then 'hour' when retention_s <= 60 * 86400 then 'day' else 'month' end;
  width constant interval := '1 ' || step;
  at timestamptz := moment; -- each time range before it has its partition
  starts timestamptz;
  ends timestamptz;
  stray timestamptz;
  name text;
  grantee text;
  made integer := 0;
begin
  lock table only @extschema@.outbox_history in share update exclusive mode; -- one at a time
  if not exists (select from @extschema@.outbox_history) then
    return 0;
  end if;
  while at < moment + 3 * width loop
    select p.ends_at into ends from outbox_internal.history_partitions() p where at >= p.starts_at and at < p.ends_at;
    if not found then
      select greatest(date_trunc(step, at), max(p.ends_at) filter (where p.ends_at <= at)),
             least(date_trunc(step, at) + width, min(p.starts_at) filter (where p.starts_at > at))
        into starts, ends from outbox_internal.history_partitions() p;
      -- Rows in the default partition stay there; the new partition begins after them, and after the rows that arrive
      -- meanwhile.
      select max(h.published_at) into stray from @extschema@.outbox_history_default h
        where h.published_at >= starts and h.published_at < ends;
      if stray is not null then
        starts := date_trunc('minute', greatest(stray, at)) + interval '2 minutes';
      end if;
      name := 'outbox_history_p' || to_char(starts, case step when 'hour' then 'YYYYMMDDHH24' else 'YYYYMMDD' end);
      if starts < ends and to_regclass(format('@extschema@.%I', name)) is null then
        execute format('create table @extschema@.%I (like @extschema@.outbox_history_default including all)', name);
        execute format('alter table @extschema@.%I replica identity full', name);
        -- ALTER DEFAULT PRIVILEGES may have granted more on it than there is on the history.
        for grantee in
          select distinct case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
          from pg_class c cross join aclexplode(c.relacl) a
          where c.oid = to_regclass(format('@extschema@.%I', name)) and a.grantee <> c.relowner
        loop
          execute format('revoke all on @extschema@.%I from %s', name, grantee);
        end loop;
        execute format('alter table @extschema@.outbox_history attach partition @extschema@.%I'
                       ' for values from (%L) to (%L)', name, starts, ends);
        made := made + 1;
      end if;
    end if;
    at := ends;
  end loop;
  return made;
end
$$;
comment on function outbox_internal.make_partitions(integer, timestamptz) is
  'Creates partitions of the history ahead: one for an hour, a day or a month, depending on retention_s (NULL ='
  ' forever); returns how many. None while the history is empty.';

create function outbox_internal.summarize_history(
  moment timestamptz default pg_catalog.clock_timestamp(), most integer default 1000
) returns integer language plpgsql volatile set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $$
declare
  index record;
  before integer;
  summarised integer := 0;
begin
  for index in
    select i.indexrelid::regclass as name, c.reloptions::text like '%autosummarize=%' as asks,
           -- New rows go into these; those of the past were summarised while they were new.
           p.partition is null or (p.starts_at <= moment and p.ends_at > moment - interval '1 day') as grows,
           pg_relation_size(i.indrelid) / current_setting('block_size')::bigint as blocks,
           coalesce((select o.option_value from pg_options_to_table(c.reloptions) o
                     where o.option_name = 'pages_per_range'), '128')::bigint as pages
    from pg_inherits h join pg_index i on i.indrelid = h.inhrelid join pg_class c on c.oid = i.indexrelid
    join pg_am a on a.oid = c.relam and a.amname = 'brin'
    left join outbox_internal.history_partitions() p on p.partition = h.inhrelid
    where h.inhparent = '@extschema@.outbox_history'::regclass
  loop
    begin
      if index.asks then -- an earlier version created it, or a dump contained it
        execute format('alter index %s reset (autosummarize)', index.name);
      end if;
      if index.grows or index.asks then
        -- Rows arrive at the end: from there back to the first summarised range. A minute of a drain takes half a
        -- second of processor time, so there is a pause after each range, without locks.
        before := summarised;
        for number in reverse (index.blocks - 1) / index.pages .. 0 loop
          exit when brin_summarize_range(index.name, number * index.pages) = 0;
          summarised := summarised + 1;
          if summarised - before = most then
            summarised := summarised + brin_summarize_new_values(index.name);
            exit;
          end if;
          perform pg_sleep(0.005);
        end loop;
      end if;
    exception when lock_not_available or insufficient_privilege then
      null; -- a vacuum holds it, or another role owns it; the next run tries again
    end;
  end loop;
  return summarised;
end
$$;
comment on function outbox_internal.summarize_history(timestamptz, integer) is
  'Summarises new ranges of the BRIN indexes of the history, and ends their requests to autovacuum; returns the number'
  ' of ranges. It pauses after each of the first `most` of an index.';

-- DROP locks the whole history against all sessions: it waits for its readers, and every settle waits behind it.
create function outbox_internal.drop_partitions(
  retention_s integer, batch integer, moment timestamptz default pg_catalog.clock_timestamp()
) returns integer language plpgsql volatile set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $$
declare
  old regclass;
  dropped integer := 0;
begin
  for old in select p.partition from outbox_internal.history_partitions() p
             where p.ends_at <= moment - make_interval(secs => retention_s) loop
    exit when dropped = batch;
    begin
      execute format('drop table %s', old);
      dropped := dropped + 1;
    exception when insufficient_privilege or dependent_objects_still_exist then
      raise warning 'partition % of the history is kept: %', old, sqlerrm
        using hint = format('Make %I its owner, and drop what depends on it.', current_user);
    end;
  end loop;
  return dropped;
end
$$;
comment on function outbox_internal.drop_partitions(integer, integer, timestamptz) is
  'Drops partitions of the history, up to batch, of which every row is older than retention_s; returns how many.';

create function outbox_internal.expire_dead(
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
    perform outbox_internal.wake(0::bigint);
  end if;
  return discarded;
end
$$;
comment on function outbox_internal.expire_dead(integer, integer, timestamptz) is
  'Discards up to batch dead letters that are older than retention_s: they go to the history with a reason; returns'
  ' how many.';

create function outbox_internal.unended(low bigint, high bigint, out seq bigint, out destination text)
returns setof record language sql stable
set search_path = pg_catalog, pg_temp as $$
  -- outbox is indexed by lane (destination, partition), then seq. The destinations are found by leaps over the index.
  -- Each lane is queried separately, which OFFSET 0 makes sure of: one join would read the whole index.
  with recursive d as (
    (select o.destination from @extschema@.outbox o order by 1 limit 1)
    union all
    select (select o.destination from @extschema@.outbox o where o.destination > d.destination order by 1 limit 1)
    from d where d.destination is not null
  )
  select waiting.seq, d.destination from d cross join @extschema@.outbox_partitions p
  cross join lateral (select o.seq from @extschema@.outbox o
                      where o.destination = d.destination and o.partition = p.partition and o.seq between low and high
                      offset 0) waiting
  union all
  select w.seq, w.destination from @extschema@.outbox_waiting w where w.seq between low and high
  union all
  select x.seq, x.destination from @extschema@.outbox_dead x where x.seq between low and high;
$$;
comment on function outbox_internal.unended(bigint, bigint) is
  'The messages with a seq from low to high that wait or are dead. Their events must stay.';

create function outbox_internal.trim_events(
  after bigint, retention_s integer, batch integer, moment timestamptz default pg_catalog.clock_timestamp(),
  out reached bigint, out removed bigint, out more boolean
) language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
declare
  cutoff constant timestamptz := moment - make_interval(secs => retention_s);
  seen bigint;
  last bigint;
  old bigint[];
begin
  select count(*), max(x.seq) into seen, last
  from (select e.seq from @extschema@.outbox_events e where e.seq > after order by e.seq limit batch) x;
  -- Locked first, judged by the next statement: a session that enqueues an old event again locks it before it writes
  -- the message. So the session is either seen there, or skipped here, or finds no event.
  old := array(select e.seq from @extschema@.outbox_events e
               where e.seq > after and e.seq <= last and e.created_at < cutoff order by e.seq for update skip locked);
  reached := coalesce(old[cardinality(old)], after);
  more := seen = batch and reached > after;
  delete from @extschema@.outbox_events e
  where e.seq = any (old) and e.seq not in (select u.seq from outbox_internal.unended(old[1], reached) u);
  get diagnostics removed = row_count;
end
$$;
comment on function outbox_internal.trim_events(bigint, integer, integer, timestamptz) is
  'Reads up to batch events after a seq and removes those that are older than retention_s and of which no message'
  ' waits or is dead. Returns how far it got and whether more may be old beyond.';
