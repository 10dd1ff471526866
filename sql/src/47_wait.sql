-- The wait of a session for the end of one message.

create function outbox_internal.await_end(seen bigint, timeout_ms integer)
returns bigint language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_await_end_wrapper';
comment on function outbox_internal.await_end(bigint, integer) is
  'Waits until a message of this database ended since seen was returned, at most this long (seen NULL: not at all);'
  ' returns the value to pass next.';

create function outbox_internal.has_enqueued()
returns boolean language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_has_enqueued_wrapper';
comment on function outbox_internal.has_enqueued() is
  'Whether this transaction has enqueued, or changed waiting messages by hand.';

create function outbox_internal.outcome(seq bigint, destination text, during tstzmultirange, partitions smallint[])
returns text language sql volatile set search_path = pg_catalog, pg_temp as $$
  select case
    when outbox_internal.find_row($1, $2, $4) is not null
      or exists (select from @extschema@.outbox_waiting w where w.seq = $1 and w.destination = $2) then 'waits'
    when exists (select from @extschema@.outbox_dead d where d.seq = $1 and d.destination = $2) then 'dead'
    else coalesce((select h.status from outbox_internal.ended_messages h
                   where h.seq = $1 and h.destination = $2 and h.ended_at <@ $3
                     and h.ended_at >= coalesce(lower($3), '-infinity') -- which leaves partitions out
                   order by h.ended_at desc limit 1), 'unknown')
  end;
$$;
comment on function outbox_internal.outcome(bigint, text, tstzmultirange, smallint[]) is
  'Waits, dead, discarded, published or unknown: where a message is now. Of its history only what ended at these times'
  ' is read.';

create function @extschema@.outbox_wait(seq bigint, timeout interval default '30 s', destination text default null)
returns text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  to_destination constant text := coalesce(destination, 'default');
  until timestamptz;
  during tstzmultirange := (select t.current from outbox_internal.event_times t);
  partitions smallint[];
  seen bigint;
  outcome text;
begin
  if seq is null then
    raise exception 'seq is NULL'
      using errcode = 'null_value_not_allowed', hint = 'Pass the seq of an event, as outbox_publish returns it.';
  end if;
  perform outbox_internal.check_request('outbox_wait'::text, timeout, true);
  until := clock_timestamp() + timeout;
  perform from @extschema@.outbox_settings; -- first, as everywhere
  -- It cannot have ended before its event existed.
  during := during * coalesce(
    (select tstzmultirange(tstzrange(e.created_at - interval '1 minute', null)) from @extschema@.outbox_events e
     where e.seq = outbox_wait.seq and not exists (select from @extschema@.outbox_source)), during);
  seen := outbox_internal.await_end(null::bigint, 0);
  loop
    select s.partitions into partitions from @extschema@.outbox_settings s;
    outcome := (select outbox_internal.outcome(seq, to_destination, during, partitions));
    if outcome <> 'waits' then
      return outcome;
    end if;
    if clock_timestamp() >= until then
      return 'timeout';
    end if;
    -- Each end wakes it; the second is for an end without a notification.
    seen := outbox_internal.await_end(
      seen, ceil(greatest(1, least(1000, extract(epoch from until - clock_timestamp()) * 1000)))::integer);
  end loop;
end
$$;
comment on function @extschema@.outbox_wait(bigint, interval, text) is
  'Waits until a message has ended: published, dead or discarded; else timeout, or unknown if there is none. Outside'
  ' of the transaction that enqueues it, at READ COMMITTED.';
