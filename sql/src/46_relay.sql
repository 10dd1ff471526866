-- For relays, in any language: claim, mark published, mark failed. A relay never shares a destination with workers that
-- hold leases: the destination is paused for them. Lock order of a claim: outbox_settings, outbox_paused, outbox.

create function outbox_internal.behind_open_transactions(
  by_partition boolean, seqs bigint[], keys text[], partitions smallint[]
) returns bigint[] language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_behind_open_transactions_wrapper';
comment on function outbox_internal.behind_open_transactions(boolean, bigint[], text[], smallint[]) is
  'Those of the seqs that must wait for an open transaction that has enqueued for their key, or with by_partition for'
  ' their partition, and may commit a lower one.';

create function outbox_internal.decide_failure(
  wrapper text, options text[], seq bigint, attempts integer, error text, unsendable boolean,
  out action text, out delay_ms bigint, out reason text, out code text
) language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_decide_failure_wrapper';
comment on function outbox_internal.decide_failure(text, text[], bigint, integer, text, boolean) is
  'The outcome of a failure, or of a message that can never be sent, by the rules of a destination: the action for'
  ' settle() (r, d, D or B), delay in ms, reason, code. Its wrapper and options describe the destination (NULL = by the settings).';

create function outbox_internal.record_ended(published bigint, failed bigint, gone bigint)
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_record_ended_wrapper';
comment on function outbox_internal.record_ended(bigint, bigint, bigint) is
  'At COMMIT, counts the messages that a relay has ended and wakes the sessions that wait for them.';

create function outbox_internal.record_delivery_times(delivery_us bigint[])
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_record_delivery_times_wrapper';
comment on function outbox_internal.record_delivery_times(bigint[]) is
  'At COMMIT, reports to outbox_throughput the microseconds from enqueue to confirm of the messages that a relay has'
  ' published.';

create function outbox_internal.claimable_heads(
  destination text, partitions smallint[], lane_rows integer, by_partition boolean,
  out tid tid, out seq bigint, out key text, out partition smallint, out claim_token bigint
) returns setof record language sql stable
set search_path = pg_catalog, pg_temp as $$
  with blocked as materialized (
    select g.partition, g.key, g.blocker from outbox_internal.blocked_keys($1, $2) g where g.blocker is not null
  ), lane as (
    select x.*, row_number() over (partition by x.partition, case when not $4 then x.key end order by x.seq) as place
    from unnest($2) p (n) cross join lateral (
      select o.ctid as tid, o.seq, o.partition, o.key, o.claim_token, o.claim_until from @extschema@.outbox o
      where o.destination = $1 and o.partition = p.n and (o.expires_at is null or o.expires_at > clock_timestamp())
      order by o.destination, o.partition, o.seq limit $3) x
  )
  select l.tid, l.seq, l.key, l.partition, l.claim_token from lane l
  where (l.claim_token is null or not outbox_internal.claim_is_live(l.claim_token, l.partition, l.claim_until))
    -- A worker notices a pause later.
    and not outbox_internal.is_taken($1, l.partition, l.seq)
    and (l.key is null and not $4
         or l.place = 1
            and not exists (select from blocked c where c.partition = l.partition and ($4 or c.key = l.key)
                            and c.blocker < l.seq)
            and not exists (select from @extschema@.outbox_waiting w
                            where w.state = 'g' and w.destination = $1 and w.partition = l.partition and w.key collate "C" = l.key
                              and w.seq < l.seq))
  order by l.seq;
$$;
comment on function outbox_internal.claimable_heads(text, smallint[], integer, boolean) is
  'Messages that a relay may claim, as one snapshot shows them among the first rows of each lane. These are messages'
  ' without a key, and the first of each key unless it is claimed or behind one that failed. With by_partition the'
  ' first of each partition.';

create function outbox_internal.settings_now()
returns @extschema@.outbox_settings language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  settings @extschema@.outbox_settings;
begin
  select * into settings from @extschema@.outbox_settings;
  if not found then
    raise exception 'outbox_configure() or outbox_source_set() made changes after this transaction began'
      using errcode = 'serialization_failure', hint = 'Run the transaction again.';
  end if;
  lock table @extschema@.outbox, @extschema@.outbox_waiting, @extschema@.outbox_dead in row exclusive mode;
  return settings;
end
$$;
comment on function outbox_internal.settings_now() is
  'For a call that changes messages, before it reads any: the settings of this database, which stay so until the end of'
  ' this transaction. Locks the tables of messages as their writers do.';

create type outbox_internal.relayed as (
  seq bigint, key text, attempts integer, claim_token bigint, claim_until timestamptz, replayed boolean
);
comment on type outbox_internal.relayed is
  'A message that a relay holds.';

create function outbox_internal.relay_claim(
  max_rows integer, to_destination text, ttl_s double precision, bytes_max bigint
) returns setof outbox_internal.relayed language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  settings constant @extschema@.outbox_settings := outbox_internal.settings_now();
  -- Negative, as those of workers without leases; each call has another one.
  token constant bigint := hashtextextended(gen_random_uuid()::text, 0) | (-9223372036854775808);
  -- A partition is one order, whatever the keys.
  by_partition boolean;
  not_adopted text;
  lane_rows bigint := max_rows;
  seqs bigint[];
  keys text[];
  places smallint[];
  held bigint[];
  free bigint[] := '{}';
  message record;
  chosen outbox_internal.chosen[];
  held_until timestamptz;
begin
  select 'ordering=partition' = any (d.options), d.not_adopted into by_partition, not_adopted
  from outbox_internal.destinations() d where d.destination = to_destination;
  if not_adopted is not null then
    raise exception 'destination "%" is not adopted: %', to_destination, not_adopted
      using errcode = 'object_not_in_prerequisite_state', hint = format('select outbox_adopt(destination => %L)', to_destination);
  end if;
  by_partition := coalesce(by_partition, false);
  -- The commit of a claim puts all that it saw on disk.
  if current_setting('synchronous_commit') = 'off' then
    perform set_config('synchronous_commit', 'local', true);
  end if;

  if settings.leasing then
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
      raise exception 'outbox_fetch_unpublished() cannot keep the order of keys in a % transaction',
        upper(current_setting('transaction_isolation'))
        using errcode = 'object_not_in_prerequisite_state', hint = 'Call it at READ COMMITTED.';
    end if;
    -- Blocks outbox_resume(), and serialises the claims of a destination.
    update @extschema@.outbox_paused p
    set relay_until = greatest(p.relay_until, clock_timestamp() + ttl_s * interval '1 s')
    where p.destination = to_destination;
    if not found then
      raise exception 'the workers deliver to destination "%"', to_destination
        using errcode = 'object_not_in_prerequisite_state',
              hint = format('select outbox_pause(%L); or outbox_configure(leasing => false) to share it without order.',
                            to_destination);
    end if;
  end if;
  -- There may be no worker that does these: brings back what is due, and makes dead letters of expired messages among
  -- the first rows of each lane and among those that wait.
  perform outbox_internal.due(null::text, null::smallint[], null::bigint[], 1000, to_destination);
  perform outbox_internal.record_pending(to_destination, -e.count),
          outbox_internal.record_ended(0::bigint, 0::bigint, e.count),
          outbox_internal.record_error(to_destination, 'expired: it was not sent in time'::text, 'expired'::text, null::bigint,
                                       e.count)
  from outbox_internal.dead_letter(
    array(select x.tid from unnest(settings.partitions) p (n) cross join lateral (
            select o.ctid as tid, o.expires_at from @extschema@.outbox o
            where o.destination = to_destination and o.partition = p.n
            order by o.destination, o.partition, o.seq limit lane_rows) x
          where x.expires_at <= clock_timestamp()),
    array(select w.ctid from @extschema@.outbox_waiting w
          where w.expires_at <= (select clock_timestamp()) and w.destination = to_destination limit 1000),
    null::bigint[]) e;
  if not settings.leasing then
    chosen := outbox_internal.choose_unleased(to_destination, token, max_rows, bytes_max);
  else
    -- Messages behind one that has ended since: the first of each key. In a partition with one order, all that wait
    -- by their key from before that order was set.
    perform from outbox_internal.make_ready(array(
      select w.ctid from outbox_internal.blocked_keys(to_destination, settings.partitions) g
      cross join lateral (
        select x.ctid from @extschema@.outbox_waiting x
        where x.state = 'g' and x.destination = to_destination and x.partition = g.partition and x.key collate "C" = g.key
        order by x.seq limit case when not by_partition then 1 end) w
      where (g.blocker is null or by_partition) and g.followers));

    -- Read, then read the open transactions, then read again and claim. A transaction with a lower seq of the key is
    -- either still open at the second step, or visible to the third.
    loop
      select array_agg(f.seq), array_agg(f.key), array_agg(f.partition) into seqs, keys, places
      from outbox_internal.claimable_heads(to_destination, settings.partitions, lane_rows::integer, by_partition) f;
      -- Many messages of few keys: read further.
      exit when cardinality(seqs) >= max_rows or by_partition or lane_rows > 100000000 or not exists (
        select from unnest(settings.partitions) p (n) cross join lateral (
          select from @extschema@.outbox o where o.destination = to_destination and o.partition = p.n
          order by o.destination, o.partition, o.seq offset lane_rows limit 1) x);
      lane_rows := lane_rows * 8;
    end loop;
    held := outbox_internal.behind_open_transactions(by_partition, seqs, keys, places);
    for message in
      select c.seq, c.partition from unnest(seqs, places) c (seq, partition)
      where c.seq <> all (held) order by c.seq limit max_rows
    loop
      -- A worker notices a pause later than this session.
      if outbox_internal.withdraw_unless_taken(to_destination, message.partition, message.seq) then
        free := free || message.seq;
      end if;
    end loop;
    chosen := array(
      select row(f.tid, f.seq, f.claim_token, coalesce(e.body_bytes, 0), null)::outbox_internal.chosen
      from outbox_internal.claimable_heads(to_destination, settings.partitions, lane_rows::integer, by_partition) f
      left join @extschema@.outbox_events e on e.seq = f.seq
      where f.seq = any (free));
  end if;
  held_until := clock_timestamp() + ttl_s * interval '1 s';
  return query
  select m.seq, m.key, m.attempts, m.claim_token, held_until, m.replayed
  from outbox_internal.mark(
    outbox_internal.within_bytes(chosen, bytes_max),
    array(select distinct c.token from unnest(chosen) c where c.token is not null), null::text, null::smallint[],
    null::bigint[], token, held_until) m;
end
$$;
comment on function outbox_internal.relay_claim(integer, text, double precision, bigint) is
  'Claims messages for outbox_fetch_unpublished(); stops after bytes_max of bodies, by their sizes in outbox_events.';

create function @extschema@.outbox_fetch_unpublished(
  max_rows integer default 100, destination text default 'default', claim_ttl interval default '15 s',
  out seq bigint, out id uuid, out type text, out payload jsonb, out headers jsonb, out key text, out attempts integer,
  out claim_token bigint, out claim_until timestamptz, out aggregate_type text, out aggregate_id text,
  out operation text, out previous_payload jsonb, out metadata jsonb, out actor text, out correlation_id text,
  out created_at timestamptz, out replayed boolean, out message_id text
) returns setof record language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  to_destination constant text := coalesce(outbox_fetch_unpublished.destination, 'default');
  ttl_s constant double precision := ceil(extract(epoch from claim_ttl));
  bytes_max constant bigint := 33554432;
  event_bytes_max constant integer := 15728640; -- EVENT_BYTES_MAX in crates/core
  is_converted constant boolean := getdatabaseencoding() <> 'UTF8';
  piece_bytes_max constant bigint := 4194304; -- of text, read from a source in one step
  claims outbox_internal.relayed[];
  texts text[];
  event outbox_internal.source_row;
  given integer := 0;
  bytes bigint := 0;
  wanted integer;
  ended integer;
  message record;
  bad bigint[];
begin
  if max_rows is null or max_rows not between 1 and 10000 then
    raise exception 'max_rows is %', coalesce(max_rows::text, 'NULL')
      using errcode = 'invalid_parameter_value', hint = 'Give a number from 1 to 10000.';
  end if;
  if ttl_s is null or ttl_s not between 1 and 86400 then
    raise exception 'claim_ttl is %', coalesce(claim_ttl::text, 'NULL')
      using errcode = 'invalid_parameter_value', hint = 'Give a time from 1 second to 1 day.';
  end if;
  if not outbox_internal.destination_exists(to_destination) then
    raise exception 'destination "%" does not exist', to_destination
      using errcode = 'undefined_object', hint = 'See outbox_destination_status.';
  end if;
  -- A message that can never be given to a relay fails, as with a worker. It must not delay
  -- later messages, so a few more rounds follow.
  if not exists (select from @extschema@.outbox_source) then
    for turn in 1 .. 10 loop
      claims := array(select c from outbox_internal.relay_claim(max_rows, to_destination, ttl_s, bytes_max) c);
      exit when claims = '{}';
      bad := '{}';
      for message in
        select c.seq, c.claim_token, u.why
        from unnest(claims) c join @extschema@.outbox_events e on e.seq = c.seq
        cross join lateral (select case
          when e.body_bytes > event_bytes_max then
            format('the event has %s bytes, which exceeds the limit of 15 MiB', e.body_bytes)
          when is_converted then (
            select outbox_internal.unreadable(c.key, t) from outbox_internal.event_text t where t.event_seq = e.seq)
          end as why offset 0) u
        where u.why is not null
      loop
        if outbox_internal.end_claim(message.seq, message.claim_token, to_destination, message.why, false, true) then
          bad := bad || message.seq;
        end if;
      end loop;
      return query
      select c.seq, e.id, e.type, e.payload, e.headers, c.key, c.attempts, c.claim_token, c.claim_until,
             e.aggregate_type, e.aggregate_id, e.operation, e.previous_payload, e.metadata, e.actor, e.correlation_id,
             e.created_at, c.replayed, e.id::text
      from unnest(claims) c left join @extschema@.outbox_events e on e.seq = c.seq
      where c.seq <> all (bad) order by c.seq;
      exit when found;
    end loop;
    return;
  end if;
  -- The size of the events of a source is known when they are read: the first ones determine how many more are claimed,
  -- and those without room are given back.
  wanted := least(max_rows, 25);
  for turn in 1 .. 10 loop
    claims := array(select c from outbox_internal.relay_claim(wanted, to_destination, ttl_s, bytes_max) c
                    order by c.seq);
    exit when claims = '{}';
    ended := 0;
    while ended < cardinality(claims) and bytes < bytes_max loop
      texts := outbox_internal.source_events(
        array(select c.seq from unnest(claims[ended + 1:]) c order by 1), piece_bytes_max, false);
      for i in 1 .. cardinality(texts) by 15 loop
        exit when bytes >= bytes_max;
        ended := ended + 1;
        event := outbox_internal.source_row_of(texts[i:i + 14]);
        if event.fault is not null then
          perform outbox_internal.end_claim(event.seq, claims[ended].claim_token, to_destination, event.error, false,
                                            event.fault = 'missing');
          continue;
        end if;
        return query
        select event.seq,
               case when event.id ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then event.id::uuid end,
               event.type, event.payload, event.headers, c.key, c.attempts, c.claim_token, c.claim_until,
               event.aggregate_type, event.aggregate_id, event.operation, event.previous_payload, event.metadata,
               event.actor, event.correlation_id, event.created_at, c.replayed, event.id
        from unnest(claims[ended:ended]) c;
        given := given + 1;
        bytes := bytes + coalesce(pg_column_size(event.payload), 0) + coalesce(pg_column_size(event.previous_payload), 0)
          + coalesce(pg_column_size(event.metadata), 0) + coalesce(pg_column_size(event.headers), 0);
      end loop;
    end loop;
    if ended < cardinality(claims) then
      update @extschema@.outbox o set claim_token = null, claim_until = null
      from unnest(claims[ended + 1:]) c
      where o.ctid = (select outbox_internal.find_row(c.seq, to_destination, s.partitions)
                      from @extschema@.outbox_settings s)
        and o.claim_token = c.claim_token;
      exit;
    end if;
    exit when given >= max_rows or bytes >= bytes_max or (given > 0 and cardinality(claims) < wanted);
    wanted := least(max_rows - given, greatest(1, (bytes_max - bytes) * given / greatest(bytes, 1)));
  end loop;
end
$$;
comment on function @extschema@.outbox_fetch_unpublished(integer, text, interval) is
  'For relays: claims messages of a destination that no worker delivers for claim_ttl, and returns them with their'
  ' events, in order of seq. Of each key it claims only the first that has not ended; of each partition, where'
  ' partitions are in order. Stops after 32 MiB of bodies. Commit before you send.';

create function outbox_internal.end_claim(
  seq bigint, claim_token bigint, destination text, error text, published boolean, unsendable boolean default false
) returns boolean language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  to_destination constant text := coalesce(end_claim.destination, 'default');
  settings constant @extschema@.outbox_settings := outbox_internal.settings_now();
  action text := 'p';
  delay_ms bigint := 0;
  reason text := '';
  code text;
  message record;
begin
  -- If the commit is lost, the message is sent again.
  if current_setting('synchronous_commit') = 'off' then
    perform set_config('synchronous_commit', 'local', true);
  end if;
  select o.ctid as tid, o.partition, o.key, o.attempts, o.enqueued_at into message from @extschema@.outbox o
  where o.ctid = (select outbox_internal.find_row(end_claim.seq, to_destination, settings.partitions))
    and o.claim_token = end_claim.claim_token and o.claim_token < 0 and o.claim_until > clock_timestamp()
  for update;
  if not found then
    return false;
  end if;
  if not published then
    select f.action, f.delay_ms, f.reason, f.code into action, delay_ms, reason, code
    from (select) one left join outbox_internal.destinations() d on d.destination = to_destination
    cross join lateral outbox_internal.decide_failure(
      d.wrapper, d.options, end_claim.seq, message.attempts, coalesce(error, 'failed'), unsendable) f;
  end if;
  if outbox_internal.settle(
       ''::text, array[message.tid], array[end_claim.seq], array[to_destination], array[message.partition],
       array[end_claim.claim_token],
       array[case when settings.leasing then action else translate(action, 'DB', 'dd') end]::"char"[],
       array[delay_ms], array[reason], array[code]) <> 1 then
    return false;
  end if;
  perform outbox_internal.record_ended(
    published::integer::bigint, (not published)::integer::bigint, (action <> 'r')::integer::bigint);
  perform outbox_internal.record_pending(to_destination, -(action <> 'r')::integer::bigint);
  if published then
    perform outbox_internal.record_delivery_times(
      array[(extract(epoch from clock_timestamp() - message.enqueued_at) * 1000000)::bigint]);
  end if;
  return true;
end
$$;
comment on function outbox_internal.end_claim(bigint, bigint, text, text, boolean, boolean) is
  'Ends a message that a relay holds, if it still does.';

create function @extschema@.outbox_mark_published(seq bigint, claim_token bigint, destination text default 'default')
returns boolean language sql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
  select outbox_internal.end_claim($1, $2, $3, null::text, true, false);
$$;
comment on function @extschema@.outbox_mark_published(bigint, bigint, text) is
  'For relays: the message was delivered; it goes to the history. False if the claim is lost: it expired, or another'
  ' session ended the message.';

create function @extschema@.outbox_mark_failed(
  seq bigint, claim_token bigint, error text, destination text default 'default'
) returns boolean language sql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
  select outbox_internal.end_claim($1, $2, $4, $3, false, false);
$$;
comment on function @extschema@.outbox_mark_failed(bigint, bigint, text, text) is
  'For relays: the message was not delivered. By the rules of the destination it is tried again after a growing'
  ' delay, and after its last attempt it is a dead letter. False if the claim is lost.';
