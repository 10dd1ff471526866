-- The search of messages, for outboxctl, its page and psql. The view outbox_messages is for one seq: for a page in an
-- order it would read and sort everything. Here each table is read along one of its indexes. outbox is read lane by lane
-- (destination, partition), outbox_waiting and outbox_dead by their keys or times, outbox_history in windows of seqs or
-- times, which its BRIN index finds. Nothing is counted.

create function outbox_internal.search(
  statuses text[], criteria jsonb default '{}', by_delivery boolean default false, descending boolean default false,
  after text[] default null, page_rows integer default 50, read_max integer default null,
  out seq bigint, out destination text, out partition_key text, out key text, out status text, out attempts integer,
  out available_at timestamptz, out enqueued_at timestamptz, out ended_at timestamptz, out age_s double precision,
  out last_error text, out replayed boolean, out expires_at timestamptz, out id text, out type text,
  out aggregate_type text, out aggregate_id text, out operation text, out blocks boolean, out cursor text[],
  out bound text
) returns setof record language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  given constant jsonb := jsonb_strip_nulls(criteria);
  asks_for_events constant boolean := given ?| '{type,aggregate_type,aggregate_id,correlation_id}';
  in_source constant boolean := exists (select from @extschema@.outbox_source);
  reads_events constant boolean := has_table_privilege('@extschema@.outbox_events'::regclass, 'select'::text);
  -- Whether an index of outbox or of the events returns the messages in order. If not, one statement searches all of
  -- outbox and sorts the matches: to read it page by page would search as much, in a worse order. A search with a bound
  -- takes what it finds along the index.
  along_index constant boolean :=
    by_delivery or read_max is not null or 'ready' = any (statuses) and not given ?| '{key,error_like,since,word}';

  -- ---- the order -----------------------------------------------------------------------------------------------------
  types constant jsonb := '{"seq": "bigint", "partition": "smallint", "destination": "text", "key": "text",
                            "available_at": "timestamptz", "ended_at": "timestamptz"}';
  keys constant text[] := case
    when not by_delivery then '{seq}'::text[]
    when statuses <@ '{ready,in flight}' then '{seq,destination}'
    when statuses <@ '{retrying,scheduled}' then '{available_at,seq,destination}'
    when statuses <@ '{blocked}' then '{destination,partition,key,seq}'
    else '{ended_at,seq,destination}' end;
  in_order constant text := (
    select string_agg(format('c.%s%s', k, case when descending then ' desc' end), ', ' order by n)
    from unnest(keys) with ordinality x (k, n));
  cursor_of constant text := (
    select format('array[%s]', string_agg(format('c.%s::text', k), ', ' order by n))
    from unnest(keys) with ordinality x (k, n));
  -- A cursor may have only the first columns of the order, and the index may cover only the very first.
  behind constant text := (
    select format(' and c.%1$s %2$s= ($2)[1]::%3$s and (%4$s) %2$s (%5$s)', keys[1],
                  case when descending then '<' else '>' end, types->>keys[1], string_agg('c.' || k, ', ' order by n),
                  string_agg(format('($2)[%s]::%s', n, types->>k), ', ' order by n))
    from unnest(keys) with ordinality x (k, n) where n <= cardinality(after) having count(*) > 0);

  -- ---- conditions on a lane, a message c, and its event e ------------------------------------------------------------
  of_lane constant text := $q$
    and ($1->>'destination' is null or %1$s.destination = $1->>'destination')
    and ($1->>'partition' is null or %1$s.partition = ($1->>'partition')::smallint)$q$;
  of_seq constant text := $q$
    and ($1->>'seq' is null or c.seq = ($1->>'seq')::bigint)$q$ || case when given ? 'id' then $q$
    and c.seq = (select e.seq from @extschema@.outbox_events e where e.id = ($1->>'id')::uuid)$q$ else '' end;
  of_message constant text := format(of_lane, 'c') || of_seq || $q$
    and ($1->>'key' is null or c.key = $1->>'key')
    and ($1->>'error_like' is null or c.last_error like $1->>'error_like')
    and ($1->>'since' is null
         or c.changed_at >= case when $1->>'since' ~ '^[0-9]+[smhd]$' then now() - ($1->>'since')::interval
                                 else ($1->>'since')::timestamptz end)$q$;
  of_event constant text := $q$
    and ($1->>'type' is null or e.type = $1->>'type')
    and ($1->>'aggregate_type' is null or e.aggregate_type = $1->>'aggregate_type')
    and ($1->>'aggregate_id' is null or e.aggregate_id = $1->>'aggregate_id')
    and ($1->>'correlation_id' is null or e.correlation_id = $1->>'correlation_id')$q$;
  -- Always with OFFSET 0, for one index lookup for each message: a planner that expects more rows would read all events,
  -- or all those of a type.
  its_event constant text := case when in_source then 'outbox_internal.event_shown(c.seq) e where e.error is null'
                                  else '@extschema@.outbox_events e where e.seq = c.seq' end;
  of_all constant text := of_message
    || case when asks_for_events then format(' and exists (select from %s%s offset 0)', its_event, of_event) else '' end
    || case when given ? 'word' then $q$
    and (c.key = $1->>'word' or strpos(lower(c.last_error), lower($1->>'word')) > 0$q$
         || case when reads_events then format($q$
         or exists (select from %s and $1->>'word' in (e.type, e.aggregate_type, e.aggregate_id, e.correlation_id,
                                                       e.actor, e.id::text) offset 0)$q$, its_event) else '' end || ')'
       else '' end;

  -- A window of the times at which messages ended, back from the cursor.
  window_from constant timestamptz := case when given ? 'span_s' then
    coalesce(after[1]::timestamptz, clock_timestamp()) - (given->>'span_s')::bigint * interval '1 s' end;
  stored record;
  most integer;
  is_by_lane boolean;
  rows text;
  horizon text;
  statement text;
  max_seq constant bigint := 9223372036854775807;
  step constant integer := case when descending then -1 else 1 end;
  lowest bigint := 1;
  highest bigint := 0;
  edge bigint;
  seq_from bigint := -step * max_seq;
  seq_to bigint;
  width bigint := 20000;
  is_last boolean;
  found_now bigint;
  found_all bigint := 0;
begin
  if in_source and given ? 'id' then
    raise exception 'cannot find an event of a source by its id' using errcode = 'feature_not_supported',
      hint = 'Filter by seq: SELECT the seq of the event from the source.';
  elsif not reads_events and (asks_for_events or given ? 'id') then
    raise exception 'cannot filter messages by their events' using errcode = 'insufficient_privilege',
      hint = 'This requires SELECT on outbox_events (outbox_admin). Filter by key, destination, error, time or seq.';
  end if;
  if not along_index then
    perform set_config('enable_seqscan'::text, 'on'::text, true), set_config('enable_sort'::text, 'on'::text, true);
  end if;
  for stored in
    select * from (values ('{ready,in flight}'::text[], 'ready'), ('{retrying,blocked,scheduled}', 'waiting'), ('{dead}', 'dead'),
                          ('{published,discarded}', 'ended')) t (kept, name) where t.kept && statuses
  loop
    -- A window of the history is bounded by its time: only rows that are looked at one by one are counted.
    is_by_lane := stored.kept @> '{ready}' and along_index;
    most := case when not stored.kept @> '{published}' or asks_for_events or given ? 'word'
                 then case when is_by_lane then read_max when read_max is not null then greatest(read_max, page_rows) end end;
    rows := format('outbox_internal.%s_messages', stored.name);
    if is_by_lane and asks_for_events and not by_delivery and not in_source and read_max is null then
      -- The events in order of seq, and their messages in outbox, whose index begins with the lane.
      is_by_lane := false;
      rows := format('(
      select e.seq, o.destination, o.partition, o.key, o.status, o.attempts, o.available_at, o.enqueued_at, o.ended_at,
             o.last_error, o.replayed, o.expires_at, o.blocks, o.changed_at
      from @extschema@.outbox_events e cross join outbox_internal.first_pending l cross join lateral (
        select x.* from outbox_internal.ready_messages x
        where x.destination = l.destination and x.partition = l.partition and x.seq = e.seq offset 0) o
      where e.seq >= (select min(f.seq) from outbox_internal.first_pending f)%s%s)', of_event, format(of_lane, 'l'));
    end if;
    rows := format('
    select c.seq, c.destination, c.partition, c.key, c.status, c.attempts, c.available_at, c.enqueued_at, c.ended_at,
           c.last_error, c.replayed, c.expires_at, c.blocks is true as blocks, c.changed_at
    from %s c
    where true%s%s%s%s%s order by %s fetch first %s rows with ties', rows,
      case when is_by_lane then ' and c.destination = l.destination and c.partition = l.partition'
           when stored.kept @> '{published}' and not by_delivery then ' and c.seq between $4 and $5' else '' end,
      case when window_from is not null then ' and c.ended_at > $6' else '' end, behind,
      case when stored.kept <@ statuses then ''
           when not by_delivery or statuses <@ '{ready,published,discarded}'
             then ' and c.status = any ($3)'
           when statuses <@ '{blocked}' then $q$ and c.state = 'g'$q$
           when statuses <@ '{retrying,scheduled}' then ' and c.available_at is not null'
           else '' end, -- those in flight are among the first of their lane
      case when most is null then of_all when stored.kept @> '{published}' then of_message else of_seq end,
      in_order, coalesce(most, page_rows));
    if is_by_lane then
      rows := format('
    select x.* from outbox_internal.first_pending l cross join lateral (%s) x where true%s', rows, format(of_lane, 'l'));
    end if;
    -- Where a search ends that has read as much as it may. A lane that was not read to its end may have further
    -- messages that come before those of other lanes.
    horizon := case
      when most is null or statuses <@ '{in flight}' then 'select null::text[], null::bigint where false'
      when is_by_lane then format('
    select array[%2$s(x.last)::text], %2$s(x.last) from (
      select %3$s(k.seq) as last from scanned k group by k.destination, k.partition having count(*) >= %1$s) x
    having count(*) > 0', most, case when descending then 'max' else 'min' end, case when descending then 'min' else 'max' end)
      else format('
    select %s, null::bigint from scanned c order by %s offset %s limit 1', cursor_of, in_order, most - 1) end;
    statement := format($q$
  with scanned as materialized (%1$s
  ), horizon (cursor, seq) as materialized (%2$s
  ), page as (
    select c.* from (select c.* from scanned c order by %4$s) c
    where c.status = any ($3) and not exists (select from horizon h where c.seq %8$s h.seq)%3$s
    order by %4$s fetch first %5$s rows with ties
  )
  (select c.seq, c.destination, outbox_internal.partition_label(c.partition::integer), c.key, c.status, c.attempts,
          c.available_at, c.enqueued_at, c.ended_at, extract(epoch from statement_timestamp() - c.changed_at)::float8,
          c.last_error, c.replayed, c.expires_at, e.id, e.type, e.aggregate_type, e.aggregate_id, e.operation, c.blocks,
          %6$s, null::text
   from page c left join lateral (%7$s) e on true order by %4$s)
  union all
  select null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
         coalesce(h.cursor, array[$6::text, 9223372036854775807::text, '']),
         case when h.cursor is null then 'time' else 'rows' end
  from (select) one left join horizon h on true where h.cursor is not null or $6 is not null$q$, rows, horizon,
      case when most is null then '' else of_all end, in_order, page_rows, cursor_of,
      case when reads_events then format('
    select e.id::text as id, e.type, e.aggregate_type, e.aggregate_id, e.operation from %s offset 0', its_event)
           else '
    select null as id, null as type, null as aggregate_type, null as aggregate_id, null as operation' end,
      case when descending then '<' else '>' end);
    -- The history in order of seq is read in ranges until the page is full, each eight times as wide as the one before.
    -- The last has no end, because an event may be removed before its message.
    is_last := by_delivery or not stored.kept @> '{published}';
    if not is_last and reads_events and not in_source then
      select coalesce(min(e.seq), 1), coalesce(max(e.seq), 0) into lowest, highest from @extschema@.outbox_events e;
    end if;
    edge := case when not is_last then least(greatest(coalesce(after[1]::bigint, -step * max_seq), lowest), highest) end;
    loop
      edge := edge + step * width;
      is_last := coalesce(case when descending then edge <= lowest else edge >= highest end, true);
      seq_to := case when is_last then step * max_seq else edge end;
      return query execute statement
      using given, after, statuses, least(seq_from, seq_to), greatest(seq_from, seq_to), window_from;
      get diagnostics found_now = row_count;
      found_all := found_all + found_now;
      exit when is_last or found_all >= page_rows;
      seq_from := edge + step;
      width := width * 8;
    end loop;
  end loop;
end
$$;
comment on function outbox_internal.search(text[], jsonb, boolean, boolean, text[], integer, integer) is
  'The messages of these statuses that meet all criteria: at most page_rows, and those that tie with the last one. They are'
  ' in order of seq in each table, or in order of delivery. criteria: destination, partition, key, seq, id, type,'
  ' aggregate_type, aggregate_id, correlation_id, error_like, since (a time, or an age such as 2h) and word. after: the'
  ' cursor of the row behind which the page begins. read_max: at most so many rows are read, of outbox of each lane; span_s:'
  ' only messages that ended so many seconds before the cursor. If that ended the search, the last row has no seq: bound is'
  ' rows or time, and the cursor is where to continue.';
