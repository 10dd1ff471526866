-- Erasure: all rows of one aggregate (a person, say) are deleted, wherever its messages are. Its events are locked first,
-- because that may wait for sessions that enqueue them again. Then the messages, without waiting:
-- a worker that waits for this session, which waits for the worker, would be a deadlock.

create function @extschema@.outbox_purge(
  aggregate_type text, aggregate_id text, reason text default null, dry_run boolean default true
) returns table (table_name text, rows bigint) language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  kind constant text := outbox_purge.aggregate_type;
  who constant text := outbox_purge.aggregate_id;
  whole constant text := coalesce(kind || ':', '') || who;
  crc constant bigint := outbox_internal.crc32(whole);
  has_source boolean; -- a seq means another event then
  stored tstzmultirange; -- when it meant one of outbox_events
  events bigint[];
  seqs bigint[]; -- of messages whose events are or were in outbox_events
  unended bigint[]; -- of those that have not ended, whose events may be in a source
  ended bigint[]; -- of those that have, and when a seq meant this event
  times tstzmultirange[];
  n bigint[];
  removed record;
  message record;
begin
  if who is null then
    raise exception 'aggregate_id is NULL' using errcode = 'null_value_not_allowed',
      hint = 'Name the aggregate as its events do; its type may be NULL.';
  end if;
  if not coalesce(dry_run, true) then
    lock table @extschema@.outbox_events in row exclusive mode; -- before outbox_settings, by whoever writes events
  end if;
  perform outbox_internal.settings_now();
  has_source := exists (select from @extschema@.outbox_source);
  if has_source then
    raise notice 'the events themselves are in %', (select s.relation from @extschema@.outbox_source s)
      using hint = 'Erase them there; the only other messages that are found are those whose key is the aggregate.';
  end if;
  stored := (select t.stored from outbox_internal.event_times t);
  -- Locked first: no session enqueues one of them again until then.
  events := case when coalesce(dry_run, true) then array(
    select e.seq from @extschema@.outbox_events e
    where e.aggregate_id = who and e.aggregate_type is not distinct from kind)
  else array(
    select e.seq from @extschema@.outbox_events e
    where e.aggregate_id = who and e.aggregate_type is not distinct from kind order by e.seq for update) end;
  unended := array(
    select o.seq from @extschema@.outbox o where o.key = whole
    union select w.seq from @extschema@.outbox_waiting w where w.key = whole
    union select d.seq from @extschema@.outbox_dead d where d.key = whole);
  -- The event is gone already, but the key still names the aggregate.
  seqs := events || array(
    select m.seq from (
      select h.seq from @extschema@.outbox_history h where h.key = whole and h.published_at <@ stored
      union select u.seq from unnest(unended) u (seq) where not has_source
    ) m
    where (select true from @extschema@.outbox_events e where e.seq = m.seq) is null);
  select array_agg(m.seq), array_agg(m.during) into ended, times
  from (
    select s.seq, stored as during from unnest(seqs) s (seq)
    union all
    select m.seq, tstzmultirange(m.during) from (
      select h.seq, p.during from @extschema@.outbox_history h
      join outbox_internal.seq_periods p on p.relation is not null and h.published_at <@ p.during
      where h.key = whole
      union
      select u.seq, p.during from unnest(unended) u (seq)
      join outbox_internal.seq_periods p on p.relation is not null and p.is_last) m
  ) m;
  unended := case when has_source then unended else seqs end;
  if coalesce(dry_run, true) then
    return query
    select 'outbox_events', cardinality(events)::bigint
    union all select 'outbox', count(*) from @extschema@.outbox o join unnest(unended) s (seq) on s.seq = o.seq
    union all select 'outbox_waiting', count(*) from @extschema@.outbox_waiting w join unnest(unended) s (seq) on s.seq = w.seq
    union all select 'outbox_dead', count(*) from @extschema@.outbox_dead d join unnest(unended) s (seq) on s.seq = d.seq
    union all select 'outbox_history', count(*) from @extschema@.outbox_history h
      join unnest(ended, times) e (seq, during) on e.seq = h.seq and h.published_at <@ e.during
    union all select 'outbox_attempts_log', count(*) from @extschema@.outbox_attempts_log l
      join unnest(ended, times) e (seq, during) on e.seq = l.seq and l.at <@ e.during
    union all select 'outbox_audit', count(*) from @extschema@.outbox_audit a
      where (a.filter->>'aggregate_id' = who and coalesce(a.filter->>'aggregate_type', kind) is not distinct from kind)
       or a.filter->>'key' = whole;
    return;
  end if;
  begin
    -- In the order in which a message may move from one to the next.
    perform count(*) from (select from @extschema@.outbox_dead d join unnest(unended) s (seq) on s.seq = d.seq
                           for update of d nowait) locked;
    perform count(*) from (select from @extschema@.outbox_waiting w join unnest(unended) s (seq) on s.seq = w.seq
                           for update of w nowait) locked;
    perform count(*) from (select from @extschema@.outbox o join unnest(unended) s (seq) on s.seq = o.seq
                           for update of o nowait) locked;
  exception when lock_not_available then
    raise exception 'another session is changing a message of this aggregate'
      using errcode = 'object_in_use', hint = 'Try again in a moment.';
  end;
  with erased as (
    delete from @extschema@.outbox_events e using unnest(events) s (seq) where e.seq = s.seq returning 1
  ), ready as (
    delete from @extschema@.outbox o using unnest(unended) s (seq) where o.seq = s.seq
    returning o.seq, o.destination, o.partition,
              outbox_internal.claim_is_live(o.claim_token, o.partition, o.claim_until) as is_claimed
  ), waiting as (
    delete from @extschema@.outbox_waiting w using unnest(unended) s (seq) where w.seq = s.seq returning w.destination, w.partition, w.seq
  ), dead as (
    delete from @extschema@.outbox_dead d using unnest(unended) s (seq) where d.seq = s.seq
    returning d.partition, d.seq
  ), history as (
    delete from @extschema@.outbox_history h using unnest(ended, times) e (seq, during)
    where h.seq = e.seq and h.published_at <@ e.during returning 1
  ), attempts as (
    delete from @extschema@.outbox_attempts_log l using unnest(ended, times) e (seq, during)
    where l.seq = e.seq and l.at <@ e.during returning 1
  ), audit as (
    -- Manual actions may have named it.
    update @extschema@.outbox_audit a
    set filter = a.filter - 'aggregate_id' - 'key' || jsonb_build_object('key_crc32', crc)
    where (a.filter->>'aggregate_id' = who and coalesce(a.filter->>'aggregate_type', kind) is not distinct from kind)
       or a.filter->>'key' = whole returning 1
  )
  select array[(select count(*) from erased), (select count(*) from ready), (select count(*) from waiting),
               (select count(*) from dead), (select count(*) from history), (select count(*) from attempts),
               (select count(*) from audit)] as counts,
         array(select w.destination from waiting w) as waiting, r.*, c.*
    into removed
  from (select array_agg(r.seq) as seqs, array_agg(r.destination) as destinations, array_agg(r.partition) as partitions,
               array_agg(r.is_claimed) as claimed from ready r) r
  cross join (
    select array_agg(x.partition) as of_partitions, array_agg(x.seq) as of_seqs
    from (select r.partition, r.seq from ready r union all select w.partition, w.seq from waiting w
          union all select * from dead) x) c;
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
    perform outbox_internal.record_gone(g.partition, min(g.seq)) -- keys may continue
    from unnest(removed.of_partitions, removed.of_seqs) g (partition, seq) group by g.partition;
    perform outbox_internal.wake(-n[2] - n[3]);
    perform outbox_internal.record_audit(
      'purge'::text, jsonb_build_object('key_crc32', crc), n[1], outbox_purge.reason);
  end if;
  return query
  select t.table_name, n[t.i]
  from unnest(array['outbox_events', 'outbox', 'outbox_waiting', 'outbox_dead', 'outbox_history', 'outbox_attempts_log',
                    'outbox_audit']) with ordinality t (table_name, i);
end
$$;
comment on function @extschema@.outbox_purge(text, text, text, boolean) is
  'Erases the events of one aggregate and all of their messages, waiting, dead or ended; returns the number of rows of'
  ' each table. Only counts them, unless dry_run is false. Sent messages cannot be recalled.';
