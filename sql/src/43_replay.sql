-- Replay: ended messages are sent again, from outbox_events or the source that is set, with the same seq and id, and
-- with a header that says so. A replayed message is a row of outbox like any other, so all rules of delivery hold for
-- it. One call enqueues them in batches, in order of seq, and locks nothing that a producer waits for.

create function @extschema@.outbox_replay(
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
  current constant tstzmultirange := (select t.current from outbox_internal.event_times t);
  asks_events constant boolean := num_nonnulls(
    created_from, created_to, outbox_replay.type, outbox_replay.aggregate_type, outbox_replay.aggregate_id) > 0;
  filter constant jsonb := outbox_internal.criteria(
    jsonb_build_object('seq_from', seq_from, 'seq_to', seq_to, 'created_from', created_from, 'created_to', created_to,
      'type', type, 'aggregate_type', aggregate_type, 'aggregate_id', aggregate_id, 'key', key,
      'source_destination', source_destination), max_rows);
  wanted constant bigint := coalesce(max_rows, 9223372036854775807);
  -- Few messages have a key: looked up in the history, instead of in all events batch by batch.
  by_key constant boolean := outbox_replay.key is not null and not asks_events;
  -- The history has no index in order of seq, only BRIN: without an upper bound each piece would read the rest of it.
  in_windows constant boolean := source is not null or by_key;
  last_seq constant bigint := coalesce(seq_to, 9223372036854775807);
  reach bigint := case when by_key then 9223372036854775807 else piece end;
  upper bigint;
  reached bigint := coalesce(seq_from, 1) - 1;
  replayed bigint := 0;
  seqs bigint[];
  picked record;
  ready record; -- the messages that came back
  is_last boolean;
begin
  if outbox_replay.destination is not null and not outbox_internal.destination_exists(outbox_replay.destination) then
    raise exception 'destination "%" does not exist', outbox_replay.destination
      using errcode = 'undefined_object',
            hint = 'Leave the destination out: then each message goes to its former destination.';
  end if;
  loop
    upper := case when in_windows and reach < last_seq - greatest(reached, 0) then reached + reach else last_seq end;
    seqs := case when in_windows then array(
      select distinct h.seq from @extschema@.outbox_history h
      where h.seq > reached and h.seq <= upper
        and (outbox_replay.key is null or h.key = outbox_replay.key)
        and (source is not null or exists (select from @extschema@.outbox_events e where e.seq = h.seq))
      order by 1 limit piece)
    else array(
      select e.seq from @extschema@.outbox_events e
      where e.seq > reached and e.seq <= upper
        and (created_from is null or e.created_at >= created_from)
        and (created_to is null or e.created_at < created_to)
        and (outbox_replay.type is null or e.type = outbox_replay.type)
        and (outbox_replay.aggregate_type is null or e.aggregate_type = outbox_replay.aggregate_type)
        and (outbox_replay.aggregate_id is null or e.aggregate_id = outbox_replay.aggregate_id)
      order by e.seq limit piece) end;
    if cardinality(seqs) = piece then
      reach := seqs[piece] - reached; -- as far as the next piece is expected to be
      reached := seqs[piece];
      is_last := false;
    else
      is_last := upper = last_seq or not exists (
        select from @extschema@.outbox_history h where h.seq > upper and h.seq <= last_seq);
      reach := least(reach, 4611686018427387903) * 2;
      reached := upper;
    end if;
    exit when cardinality(seqs) = 0 and is_last;
    continue when cardinality(seqs) = 0;
    if source is not null and asks_events then
      seqs := array(select m.seq
                    from unnest(outbox_internal.source_matching(seqs, outbox_replay.type, outbox_replay.aggregate_type,
                      outbox_replay.aggregate_id, created_from, created_to)) m (seq) order by 1);
    end if;
    -- What ended, does not wait there, and has a destination. By the range, which the BRIN of each partition finds; then by
    -- the seqs themselves.
    select coalesce(array_agg(x.seq), '{}') as seqs, array_agg(x.destination) as destinations, array_agg(x.key) as keys
      into picked
    from (
      select ended.* from (
        select distinct on (h.seq, 2) h.seq, coalesce(outbox_replay.destination, h.destination), h.key
        from @extschema@.outbox_history h join unnest(seqs) s (seq) on s.seq = h.seq
        where h.seq between seqs[1] and reached
          -- Else it had another event: there was another source.
          and h.published_at <@ current
          and (outbox_replay.source_destination is null
               or (h.destination = outbox_replay.source_destination and not h.discarded))
          and (outbox_replay.key is null or h.key = outbox_replay.key)
        -- With the key that it had there, if it was there.
        order by h.seq, 2, h.destination = outbox_replay.destination desc, h.published_at desc
      ) as ended (seq, destination, key)
      -- A set: a function of the row would be called for each row in the range.
      where ended.destination in (select d.destination from outbox_internal.destinations() d)
        and not exists (select from outbox_internal.unended(seqs[1], reached) u
                        where u.seq = ended.seq and u.destination = ended.destination)
      order by 1, 2 limit wanted - replayed) x;
    if coalesce(dry_run, true) then
      replayed := replayed + cardinality(picked.seqs);
    else
      if source is null then
        -- Locked against trim_events(), which does not see the messages of this transaction.
        seqs := array(select e.seq from @extschema@.outbox_events e
                      where e.seq = any (picked.seqs) order by e.seq for key share);
      end if;
      with back as (
        insert into @extschema@.outbox as o (destination, partition, seq, key, replayed)
        select p.destination,
               coalesce(outbox_internal.partition_by(settings.partitioner, settings.partitioner_owner, p.key_of,
                                                     settings.partition_count::integer),
                        p.seq % settings.partition_count)::smallint, p.seq, p.key_of, true
        from unnest(picked.seqs, picked.destinations, picked.keys) p (seq, destination, key_of)
        join unnest(seqs) s (seq) on s.seq = p.seq
        on conflict do nothing
        returning o.destination, o.partition, o.seq
      )
      select count(*) as n, array_agg(b.destination) as destinations, array_agg(b.partition) as partitions,
             array_agg(b.seq) as seqs
        into ready from back b;
      perform outbox_internal.record_ready(ready.destinations, ready.partitions, ready.seqs);
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
comment on function @extschema@.outbox_replay(
  bigint, bigint, timestamptz, timestamptz, text, text, text, text, text, text, integer, text, boolean) is
  'Sends events again that were published or discarded and meet all criteria, the first max_rows messages by seq;'
  ' returns how many. They keep seq and id, and have the header replayed. Only counts them, unless dry_run is false.';
