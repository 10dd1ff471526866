-- Manual actions on one message, and on a destination: retry, discard; pause, resume; wait until all is delivered.

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

create function outbox_internal.revive(tids tid[])
returns bigint language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  partitions constant smallint[] := (select s.partitions from outbox_internal.settings_now() s);
  ready record; -- the messages that came back
begin
  with revived as ( -- an older snapshot than outbox_configure() fails here: that call has moved each dead letter
    delete from @extschema@.outbox_dead d where d.ctid = any (tids) returning d.*
  ), made_due as (
    -- It may already wait again: it was enqueued again while it was dead.
    update @extschema@.outbox_waiting w set due_at = now(), attempts = 0, crashes = 0, expires_at = null
    from revived r where w.seq = r.seq and w.destination = r.destination and w.state <> 'g'
  ), back as (
    insert into @extschema@.outbox as o (destination, partition, seq, key, replayed, enqueued_at, last_error, error_code)
    select r.destination, r.partition, r.seq, r.key, r.replayed, r.enqueued_at, r.reason, r.error_code from revived r
    where (select true from @extschema@.outbox_waiting w where w.seq = r.seq and w.destination = r.destination) is null
      and outbox_internal.find_row(r.seq, r.destination, partitions) is null
    on conflict do nothing
    returning o.destination, o.partition, o.seq
  )
  select (select count(*) from revived) as revived, array_agg(b.destination) as destinations,
         array_agg(b.partition) as partitions, array_agg(b.seq) as seqs
    into ready from back b;
  if ready.revived > 0 then
    perform outbox_internal.record_ready(ready.destinations, ready.partitions, ready.seqs);
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
    returning o.seq, o.enqueued_at, o.attempts, o.partition, o.replayed, o.destination, o.key, null::text as reason,
              o.error_code
  ), of_waiting as (
    delete from @extschema@.outbox_waiting w where w.ctid = any (waiting)
    returning w.seq, w.enqueued_at, w.attempts, w.partition, w.replayed, w.destination, w.key, null::text as reason,
              w.error_code
  ), of_dead as (
    delete from @extschema@.outbox_dead d where d.ctid = any (dead)
    returning d.seq, d.enqueued_at, d.attempts, d.partition, d.replayed, d.destination, d.key, d.reason,
              d.error_code
  ), written as (
    insert into @extschema@.outbox_history
      (seq, enqueued_at, published_at, attempts, partition, discarded, replayed, destination, key, last_error,
       error_code)
    select x.seq, x.enqueued_at, clock_timestamp(), x.attempts, x.partition, true, x.replayed, x.destination, x.key,
           coalesce(reason, 'dead for longer than outbox.dead_retention: ' || x.reason), x.error_code
    from (select * from of_outbox union all select * from of_waiting union all select * from of_dead) x
    returning partition, seq
  ), of_partition as (
    select w.partition, min(w.seq) as first, count(*) as n from written w group by 1
  )
  select coalesce(sum(p.n), 0), (select count(*) from of_outbox) + (select count(*) from of_waiting),
         count(outbox_internal.record_gone(p.partition, p.first)) -- keys may continue
    into discarded, waited
  from of_partition p;
end
$$;
comment on function outbox_internal.discard(tid[], tid[], tid[], text) is
  'Moves these rows of outbox, outbox_waiting and outbox_dead to the history, as discarded for a reason (NULL = dead'
  ' for too long). error_code stays that of the last failure. Returns how many, and how many of them waited.';

create function @extschema@.outbox_retry(seq bigint, destination text default null, reason text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  partitions constant smallint[] := (select s.partitions from outbox_internal.settings_now() s);
  to_destination constant text := outbox_internal.destination_of(outbox_retry.seq, outbox_retry.destination);
  changed boolean;
  ready smallint; -- the partition in which it can be delivered already
  found_at record;
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
    select m.status, m.destination, date_trunc('seconds', m.ended_at) as ended_at into found_at
    from outbox_internal.message_rows(outbox_retry.seq) m
    where m.destination = outbox_retry.destination or outbox_retry.destination is null limit 1;
    raise notice 'message % %', outbox_retry.seq, case
        when not found then 'does not exist'
        when found_at.status in ('published', 'discarded')
          then format('was %s at %s, destination "%s"', found_at.status, found_at.ended_at, found_at.destination)
        else format('is %s', found_at.status) end
      using hint = case
        when not found then 'See outbox_messages.'
        when found_at.status in ('published', 'discarded')
          then format('select outbox_replay(seq_from => %1$s, seq_to => %1$s, dry_run => false) sends it again.',
                      outbox_retry.seq)
        else format('select * from outbox_why(%s) says what it waits for.', outbox_retry.seq) end;
    return false;
  end if;
  if ready is not null then
    perform outbox_internal.record_back(to_destination, ready, outbox_retry.seq);
  end if;
  perform outbox_internal.wake(0::bigint);
  if changed then
    perform outbox_internal.record_audit(
      'retry'::text, jsonb_build_object('seq', outbox_retry.seq, 'destination', to_destination), 1::bigint,
      outbox_retry.reason);
  end if;
  return true;
end
$$;
comment on function @extschema@.outbox_retry(bigint, text, text) is
  'Brings a dead message back, or makes one that waits for a time due immediately; its attempts start again, and it no'
  ' longer expires. False if there is none, and for one that waits behind another of its key.';

create function @extschema@.outbox_discard(seq bigint, destination text default null, reason text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  partitions constant smallint[] := (select s.partitions from outbox_internal.settings_now() s);
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
  perform outbox_internal.wake(-ended.waited);
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

create function @extschema@.outbox_pause(destination text default 'default', reason text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
begin
  if not outbox_internal.destination_exists(outbox_pause.destination) then
    raise exception 'destination "%" does not exist', destination
      using errcode = 'undefined_object', hint = 'See outbox_destination_status.';
  end if;
  insert into @extschema@.outbox_paused (destination, reason) values (destination, reason) on conflict do nothing;
  if not found then
    return false;
  end if;
  perform outbox_internal.wake(0::bigint);
  perform outbox_internal.record_audit(
    'pause'::text, jsonb_build_object('destination', destination), null::bigint, reason);
  return true;
end
$$;
comment on function @extschema@.outbox_pause(text, text) is
  'Stops delivery to a destination, within about a second, until outbox_resume(); messages in flight then are settled.'
  ' Enqueue goes on. False if it is paused already.';

create function @extschema@.outbox_resume(destination text default 'default', reason text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  relay_until timestamptz;
begin
  -- Locked first, judged by the next statement, which then sees a claim that a relay is making.
  select p.relay_until into relay_until from @extschema@.outbox_paused p
  where p.destination = outbox_resume.destination for update;
  if not found then
    return false;
  end if;
  if relay_until > clock_timestamp() and (select s.leasing from @extschema@.outbox_settings s) then
    relay_until := (select max(o.claim_until) from @extschema@.outbox o
                    where o.destination = outbox_resume.destination and o.claim_token < 0);
    if relay_until > clock_timestamp() then
      raise exception 'a relay holds messages of destination "%"', destination
        using errcode = 'object_in_use',
              hint = format('Stop it and try again; messages that it does not mark are free after %s.', relay_until);
    end if;
  end if;
  delete from @extschema@.outbox_paused p where p.destination = outbox_resume.destination;
  perform outbox_internal.wake(0::bigint);
  perform outbox_internal.record_audit(
    'resume'::text, jsonb_build_object('destination', destination), null::bigint, reason);
  return true;
end
$$;
comment on function @extschema@.outbox_resume(text, text) is
  'Resumes delivery to a paused destination. False if it is not paused. Refused while a relay holds messages of'
  ' it.';

-- ---- before maintenance ---------------------------------------------------------------------------------------------

create function @extschema@.outbox_drain(timeout interval default '1 minute')
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
    if began >= deadline or not exists (
         select from outbox_internal.first_pending f where not exists (
           select from outbox_internal.blocked_lanes() l
           where l.destination = f.destination and l.partition = f.partition and l.blocker < f.seq)) then
      with blocked as materialized (
        select b.* from outbox_internal.blockers b
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
comment on function @extschema@.outbox_drain(interval) is
  'Waits until no message waits or is in flight that could be delivered now: not scheduled, backing off, or behind'
  ' one of these or a dead letter. Returns how many are left when the timeout is over; 0 = drained.';
