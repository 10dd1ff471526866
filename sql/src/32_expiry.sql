-- Expired messages: after expires_at a message becomes a dead letter, unsent, and blocks nothing. The worker that holds
-- a claimed message ends it before it hands it over; all others end here. Maintenance scans outbox a piece at a time,
-- when the first of them expires: an index would make each enqueue and claim more expensive. Lock order as everywhere:
-- outbox_partitions, outbox, the rest.

create index on @extschema@.outbox_waiting (expires_at) where expires_at is not null;

create function outbox_internal.dead_letter(
  tids tid[], waiting_tids tid[], leased bigint[], out destination text, out count bigint
) returns setof record language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  seqs bigint[];
  destinations text[];
begin
  with ready as materialized (
    select o.ctid as row_tid from @extschema@.outbox o
    where o.ctid = any (tids) and o.expires_at <= clock_timestamp()
      and (o.claim_token is null
           or case when o.claim_token < 0
                   then o.claim_until <= clock_timestamp() and not outbox_internal.claims_last(o.claim_token)
                   else leased is not null and not (o.partition::bigint << 48 | o.claim_token) = any (leased) end)
    for update skip locked
  ), late as materialized (
    select w.ctid as row_tid from @extschema@.outbox_waiting w
    where w.ctid = any (waiting_tids) and w.expires_at <= clock_timestamp() for update skip locked
  ), gone as (
    delete from @extschema@.outbox o using ready r where o.ctid = r.row_tid
    returning o.seq, o.enqueued_at, o.expires_at, o.attempts, o.partition, o.replayed, o.destination, o.key,
              o.attempts > 0 as has_failed
  ), gone_late as (
    delete from @extschema@.outbox_waiting w using late l where w.ctid = l.row_tid
    returning w.seq, w.enqueued_at, w.expires_at, w.attempts, w.partition, w.replayed, w.destination, w.key,
              w.state = 'b' as has_failed
  ), expired as (
    select * from gone union all select * from gone_late
  ), written as (
    insert into @extschema@.outbox_dead
      (seq, enqueued_at, expires_at, attempts, partition, replayed, destination, key, reason, error_code)
    select e.seq, e.enqueued_at, e.expires_at, e.attempts, e.partition, e.replayed, e.destination, e.key,
           'expired: it was not sent in time', 'expired'
    from expired e
    on conflict on constraint outbox_dead_pkey do update
    set died_at = excluded.died_at, expires_at = excluded.expires_at, attempts = excluded.attempts,
        replayed = excluded.replayed, reason = excluded.reason, error_code = excluded.error_code,
        blocks = excluded.blocks
  )
  select array_agg(e.seq), array_agg(e.destination),
         count(case when e.has_failed then outbox_internal.record_gone(e.partition, e.seq) end)
    into seqs, destinations from expired e;
  if seqs is not null then
    perform outbox_internal.notify_dead(seqs, destinations);
  end if;
  return query select d, count(*) from unnest(destinations) d group by 1;
end
$$;
comment on function outbox_internal.dead_letter(tid[], tid[], bigint[]) is
  'Makes dead letters of messages in outbox and outbox_waiting that have expired and that no worker holds. A claim by'
  ' a lease that is not among leased does not count (NULL = every claim counts). Returns how many of each destination.';

create function outbox_internal.expire(
  first_block bigint, blocks integer, batch integer,
  out destinations text[], out counts bigint[], out next_block bigint, out more boolean,
  out next_expiry timestamptz
) language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
declare
  moment constant timestamptz := clock_timestamp(); -- once: an index cannot be searched for a value that changes
  from_tid constant tid := format('(%s,0)', first_block);
  to_tid constant tid := format('(%s,0)', first_block + blocks);
  seen tid[];
  late tid[];
  leased bigint[];
  all_blocks constant bigint := pg_relation_size('@extschema@.outbox') / current_setting('block_size')::integer;
begin
  seen := array(
    select o.ctid from @extschema@.outbox o
    where o.ctid >= from_tid and o.ctid < to_tid and o.expires_at <= moment
      and (o.claim_token is null
           or case when o.claim_token < 0
                   then o.claim_until <= moment and not outbox_internal.claims_last(o.claim_token)
                   else not exists (select from @extschema@.outbox_partitions p
                                    where p.partition = o.partition and p.lease_epoch = o.claim_token
                                      and p.lease_owner is not null)
              end)
    limit batch);
  late := array(
    select w.ctid from @extschema@.outbox_waiting w where w.expires_at <= moment order by w.expires_at limit batch);
  if cardinality(seen) + cardinality(late) > 0 then
    if exists (select from @extschema@.outbox o where o.ctid = any (seen) and o.claim_token > 0) then
      -- Leftover claims. Locked, so that no worker takes the lease, and claims by it, before COMMIT.
      leased := array(
        select p.partition::bigint << 48 | p.lease_epoch from @extschema@.outbox_partitions p
        where p.lease_owner is not null order by p.partition for key share);
    end if;
    select array_agg(b.destination), array_agg(b.count) into destinations, counts
    from outbox_internal.dead_letter(seen, late, leased) b;
  end if;
  more := cardinality(seen) = batch or cardinality(late) = batch;
  next_block := case when cardinality(seen) = batch then first_block
                     when first_block + blocks < all_blocks then first_block + blocks else 0 end;
  next_expiry := least(
    (select w.expires_at from @extschema@.outbox_waiting w where w.expires_at is not null
     order by w.expires_at limit 1),
    (select min(o.expires_at) from @extschema@.outbox o where o.ctid >= from_tid and o.ctid < to_tid));
end
$$;
comment on function outbox_internal.expire(bigint, integer, integer) is
  'Worker protocol: makes dead letters of up to batch messages that have expired, in this number of blocks of outbox'
  ' from first_block on and in outbox_waiting. Returns how many of which destination expired, where to continue (0 = all'
  ' was scanned), whether more have expired already, and when the first of those that remain expires.';
