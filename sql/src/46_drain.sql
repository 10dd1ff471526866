-- Before maintenance: waits until every message that can be delivered is. It only reads; the workers do the work.

create function outbox_internal.could_go()
returns bigint language sql stable set search_path = pg_catalog, pg_temp as $$
  with blocked as materialized (
    select w.destination, w.partition, w.key from @extschema@.outbox_waiting w
    where w.state = 'b' and w.due_at > clock_timestamp()
    union
    select d.destination, d.partition, d.key from @extschema@.outbox_dead d where d.blocks
  )
  select (select count(*) from @extschema@.outbox o where not exists (
            select from outbox_internal.blocked_lanes() l
            where l.destination = o.destination and l.partition = o.partition and l.blocker < o.seq))
       + (select count(*) from @extschema@.outbox_waiting w where w.due_at <= clock_timestamp())
       + (select count(*) from @extschema@.outbox_waiting w where w.state = 'g' and not exists (
            select from blocked c where c.destination = w.destination and c.partition = w.partition and c.key = w.key));
$$;
comment on function outbox_internal.could_go() is
  'The number of messages that wait or are in flight and are not blocked: not scheduled, backing off, or behind such a'
  ' one or a dead letter.';

create function @extschema@.outbox_drain(timeout interval default '1 minute')
returns bigint language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  deadline constant timestamptz := clock_timestamp() + coalesce(timeout, '1 minute');
  began timestamptz;
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
    if not exists (select from outbox_internal.first_that_could_go) and outbox_internal.could_go() = 0 then
      return 0;
    end if;
    exit when clock_timestamp() >= deadline;
    -- One long scan, of what waits behind dead letters, must not use up the whole time.
    perform pg_sleep(greatest(0.1, extract(epoch from clock_timestamp() - began)));
  end loop;
  return outbox_internal.could_go();
end
$$;
comment on function @extschema@.outbox_drain(interval) is
  'Waits until no message waits or is in flight that could be delivered now: not scheduled, backing off, or behind'
  ' one of these or a dead letter. Returns how many are left when the timeout is over; 0 = drained.';
