-- What a person does by hand: bring a message back, or give it up.

create function @extschema@.outbox_claim_is_live(claim_token bigint, partition smallint, available_at timestamptz)
returns boolean language sql stable set search_path = pg_catalog, pg_temp as $$
  select case
    when claim_token is null then false
    when claim_token < 0 then available_at > now()
    else exists (select from @extschema@.outbox_partitions p where p.partition = $2 and p.lease_epoch = $1 and p.lease_until > now())
  end;
$$;
comment on function @extschema@.outbox_claim_is_live(bigint, smallint, timestamptz) is
  'Internal: whether a worker holds this message for delivery right now.';

create function @extschema@.outbox_retry(seq bigint, destination text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  found_one boolean;
  risen_count bigint;
begin
  with risen as (
    delete from @extschema@.outbox_dead d
    where d.seq = outbox_retry.seq and d.destination = coalesce(outbox_retry.destination, d.destination)
    returning d.*
  ), again as (
    insert into @extschema@.outbox (destination, partition, seq, key, enqueued_at, last_error)
    select r.destination, r.partition, r.seq, r.key, r.enqueued_at, r.reason from risen r
    on conflict do nothing
    returning 1
  ), sooner as (
    update @extschema@.outbox o set available_at = '-infinity', attempts = 0
    where o.partition = any ((select s.partitions from @extschema@.outbox_settings s)::smallint[])
      and o.destination = any (array(select coalesce(outbox_retry.destination, 'default')))
      and o.seq = outbox_retry.seq and o.claim_token is null
      and not exists (select from risen)
    returning 1
  )
  select exists (select from risen) or exists (select from sooner), x.n into found_one, risen_count
  from (select count(*) as n from again) x;
  perform @extschema@.outbox_wake(risen_count);
  return found_one;
end
$$;
comment on function @extschema@.outbox_retry(bigint, text) is
  'Brings a dead message back, or lets a waiting one go at once; its attempts start anew. False if there is none. No destination = all of them.';

create function @extschema@.outbox_discard(seq bigint, destination text default null, reason text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  ended bigint;
  waited bigint;
begin
  if exists (select from @extschema@.outbox o
             where o.seq = outbox_discard.seq and o.destination = coalesce(outbox_discard.destination, 'default')
               and o.partition = any ((select s.partitions from @extschema@.outbox_settings s)::smallint[])
               and @extschema@.outbox_claim_is_live(o.claim_token, o.partition, o.available_at)) then
    raise exception 'message % is on its way to the broker', seq
      using errcode = 'object_in_use', hint = 'Try again in a moment: it is then published, or free to be discarded.';
  end if;
  with waiting as (
    delete from @extschema@.outbox o
    where o.seq = outbox_discard.seq and o.destination = coalesce(outbox_discard.destination, 'default')
      and o.partition = any ((select s.partitions from @extschema@.outbox_settings s)::smallint[])
    returning o.seq, o.enqueued_at, o.attempts, o.partition, o.destination, o.key
  ), dead as (
    delete from @extschema@.outbox_dead d
    where d.seq = outbox_discard.seq and d.destination = coalesce(outbox_discard.destination, d.destination)
    returning d.seq, d.enqueued_at, d.attempts, d.partition, d.destination, d.key
  ), written as (
    insert into @extschema@.outbox_history (seq, enqueued_at, published_at, attempts, partition, discarded, destination, key, last_error)
    select x.seq, x.enqueued_at, clock_timestamp(), x.attempts, x.partition, true, x.destination, x.key,
           coalesce(outbox_discard.reason, 'discarded by ' || session_user)
    from (select * from waiting union all select * from dead) x
    returning 1
  )
  select count(*), (select count(*) from waiting) from written into ended, waited;
  perform @extschema@.outbox_wake(-waited);
  return ended > 0;
end
$$;
comment on function @extschema@.outbox_discard(bigint, text, text) is
  'Gives up a dead or waiting message: it is never delivered and goes to the history with the reason. False if there is none.';
