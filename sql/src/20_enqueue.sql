-- The functions that an application calls inside its own transaction. The C functions check the caller's rights (USAGE
-- on a destination) and then run as the owner of the tables, the worker role, so a caller needs only EXECUTE. They have
-- no SET clause, which would cost time at each call: src/pg/spi.rs sets what their statements run with, if there are any.

create function @extschema@.outbox_enqueue(
  seq bigint, key text default null, destination text default null, available_at timestamptz default null,
  partition_key text default null, expires_at timestamptz default null
) returns boolean language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_enqueue_wrapper';
comment on function @extschema@.outbox_enqueue(bigint, text, text, timestamptz, text, timestamptz) is
  'Enqueues the event with this seq, in the caller''s transaction. True if newly enqueued, false if it already waits'
  ' for that destination. Without a key the event is looked up and its aggregate is the key.';

create function @extschema@.outbox_enqueue_many(
  seqs bigint[], key text default null, destination text default null, available_at timestamptz default null,
  partition_key text default null, expires_at timestamptz default null
) returns bigint language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_enqueue_many_wrapper';
comment on function @extschema@.outbox_enqueue_many(bigint[], text, text, timestamptz, text, timestamptz) is
  'Enqueues many events at once; returns how many were newly enqueued.';

create function outbox_internal.find_row(seq bigint, destination text, partitions smallint[])
returns tid language sql stable set search_path = pg_catalog, pg_temp as $$
  -- Each partition is queried separately; OFFSET 0 makes sure of that. A planner without statistics takes outbox for
  -- empty, and would read all waiting messages of the destination. From Postgres 18 on a session keeps the plan, so one
  -- that was made for a small outbox must fit a large one too.
  select o.ctid from unnest($3) p (n)
  cross join lateral (select x.ctid from @extschema@.outbox x
                      where x.destination = $2 and x.partition = p.n and x.seq = $1 offset 0) o limit 1;
$$;
comment on function outbox_internal.find_row(bigint, text, smallint[]) is
  'Where the row of a message is in outbox, in any partition; NULL if there is none.';

-- A function that users call and other functions of the extension need has a second name in outbox_internal. In the schema
-- of the extension another role may create an overload with more arguments that have defaults, and the call is ambiguous.
create function outbox_internal.crc32(key text)
returns bigint language c immutable strict parallel safe as 'MODULE_PATHNAME', 'outbox_crc32_wrapper';
comment on function outbox_internal.crc32(text) is
  'outbox_crc32(), as outbox_purge() calls it.';
create function @extschema@.outbox_crc32(key text)
returns bigint language c immutable strict parallel safe as 'MODULE_PATHNAME', 'outbox_crc32_wrapper';
comment on function @extschema@.outbox_crc32(text) is
  'The IEEE CRC-32 of the UTF-8 bytes of a key.';

create function outbox_internal.partition_label(partition integer)
returns text language sql immutable strict parallel safe
return 'p' || pg_catalog.lpad(partition::text, greatest(2, pg_catalog.length(partition::text)), '0');
comment on function outbox_internal.partition_label(integer) is
  'The same as outbox_partition_label().';
create function @extschema@.outbox_partition_label(partition integer)
returns text language sql immutable strict parallel safe return outbox_internal.partition_label(partition);
comment on function @extschema@.outbox_partition_label(integer) is
  'The label of a partition: p and at least two digits, as in p07.';

create function outbox_internal.partition_by(partitioner text, owner text, key text, partition_count integer)
returns integer language c stable as 'MODULE_PATHNAME', 'outbox_partition_by_wrapper';
comment on function outbox_internal.partition_by(text, text, text, integer) is
  'The partition of a key by a partitioner (NULL = CRC-32). It runs as its owner, restricted, and as no other role than'
  ' this'
  ' one.';

create function @extschema@.outbox_partition_of(key text, partition_count integer default null)
returns text language plpgsql stable parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  divisor constant integer := coalesce(partition_count, (select s.partition_count from @extschema@.outbox_settings s));
  partitioner constant text := (select s.partitioner from @extschema@.outbox_settings s);
  owner constant text := (select s.partitioner_owner from @extschema@.outbox_settings s);
begin
  if divisor not between 1 and 1024 then
    raise exception 'partition_count % is out of range', divisor
      using errcode = 'numeric_value_out_of_range', hint = 'Use a count from 1 to 1024.';
  end if;
  return outbox_internal.partition_label(outbox_internal.partition_by(partitioner, owner, key, divisor));
end
$$;
comment on function @extschema@.outbox_partition_of(text, integer) is
  'The partition of a key, as a label. It is the CRC-32 of the key''s UTF-8 bytes modulo the count (NULL = the count'
  ' of this database), or the result of the partitioner of this database.';

create function @extschema@.outbox_uuid_v7()
returns uuid language c volatile parallel safe as 'MODULE_PATHNAME', 'outbox_uuid_v7_wrapper';
comment on function @extschema@.outbox_uuid_v7() is
  'A new UUID of version 7, which sorts by time.';

create function outbox_internal.publish(
  type text, payload jsonb, aggregate_type text, aggregate_id text, operation text, previous_payload jsonb,
  metadata jsonb, headers jsonb, actor text, correlation_id text, destination text, available_at timestamptz, id uuid,
  expires_at timestamptz, if_exists text default 'error'
) returns bigint language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_publish_wrapper';
comment on function outbox_internal.publish(
  text, jsonb, text, text, text, jsonb, jsonb, jsonb, text, text, text, timestamptz, uuid, timestamptz, text) is
  'outbox_publish(), as outbox_store() calls it.';
create function @extschema@.outbox_publish(
  type text, payload jsonb, aggregate_type text default null, aggregate_id text default null,
  operation text default null, previous_payload jsonb default null, metadata jsonb default null,
  headers jsonb default null, actor text default null, correlation_id text default null,
  destination text default null, available_at timestamptz default null, id uuid default null,
  expires_at timestamptz default null, if_exists text default 'error'
) returns bigint language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_publish_wrapper';
comment on function @extschema@.outbox_publish(
  text, jsonb, text, text, text, jsonb, jsonb, jsonb, text, text, text, timestamptz, uuid, timestamptz, text) is
  'Stores one event in outbox_events and enqueues it, in the caller''s transaction; returns its seq, or NULL while'
  ' outbox.replaying is on. Its aggregate is the key: events of one aggregate are delivered in order. With if_exists ='
  ' ''skip'' a repeated id enqueues nothing and returns the seq of the first.';

-- For messaging libraries.
create function @extschema@.outbox_store(
  body text, headers jsonb default null, destination text default null, id uuid default null, key text default null,
  available_at timestamptz default null, expires_at timestamptz default null, if_exists text default 'error'
) returns bigint language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
declare
  payload jsonb;
begin
  begin
    payload := body::jsonb;
  exception when data_exception or program_limit_exceeded then
    payload := to_jsonb(body); -- not JSON, or more than jsonb accepts
  end;
  return outbox_internal.publish(
    coalesce(nullif(headers->>'type', ''), 'Message'), payload, null::text, key, null::text, null::jsonb, null::jsonb,
    headers, null::text, null::text, destination, available_at, id, expires_at, if_exists);
end
$$;
comment on function @extschema@.outbox_store(text, jsonb, text, uuid, text, timestamptz, timestamptz, text) is
  'Stores a message as messaging libraries know it (body, headers, name of the transport) and enqueues it; returns'
  ' its seq. Its type is the header type, else Message. A body that is not JSON becomes a JSON string. Without a key'
  ' it is not ordered.';

create function outbox_internal.record_shown(destination text, partition smallint, seq bigint)
returns boolean language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_record_shown_wrapper';
comment on function outbox_internal.record_shown(text, smallint, bigint) is
  'This transaction puts a message into outbox, where views look for the first waiting one; published at COMMIT.'
  ' Returns true.';

create function outbox_internal.wake(more_waiting bigint)
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_wake_wrapper';
comment on function outbox_internal.wake(bigint) is
  'At COMMIT, notifies the workers of this database of a change by hand: the number of pending messages changed by'
  ' this much.';

create function outbox_internal.record_back(destination text, partition smallint, seq bigint)
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_record_back_wrapper';
comment on function outbox_internal.record_back(text, smallint, bigint) is
  'At COMMIT, lets the worker of a lane read it again from this message on: it was put into outbox by hand.';

create function outbox_internal.record_gone(partition smallint, seq bigint)
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_record_gone_wrapper';
comment on function outbox_internal.record_gone(smallint, bigint) is
  'At COMMIT, lets the worker of a partition read again which keys are blocked: this message is gone, and others may have'
  ' waited behind it.';

create function outbox_internal.record_enqueued(destination text, partition smallint, seq bigint)
returns boolean language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_record_enqueued_wrapper';
comment on function outbox_internal.record_enqueued(text, smallint, bigint) is
  'At COMMIT, counts a message without a key that a statement has put into outbox, and lets the workers read it. Always'
  ' true.';

create function outbox_internal.record_pending(destination text, more bigint)
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_record_pending_wrapper';
comment on function outbox_internal.record_pending(text, bigint) is
  'At COMMIT, changes the number of pending messages of a destination by this much.';

create function outbox_internal.record_highest(seq bigint)
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_record_highest_wrapper';
comment on function outbox_internal.record_highest(bigint) is
  'A message with this seq, and none with a higher one, is put into outbox, whether or not this transaction commits.';

create function outbox_internal.record_ready(destinations text[], partitions smallint[], seqs bigint[])
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform outbox_internal.record_highest(max(s)) from unnest(seqs) s;
  perform outbox_internal.record_pending(d, count(*)) from unnest(destinations) d group by d;
  perform outbox_internal.record_shown(m.destination, m.partition, min(m.seq))
  from unnest(destinations, partitions, seqs) m (destination, partition, seq) group by m.destination, m.partition;
  perform outbox_internal.record_back(m.destination, m.partition, min(m.seq))
  from unnest(destinations, partitions, seqs) m (destination, partition, seq) group by m.destination, m.partition;
  perform outbox_internal.wake(coalesce(cardinality(seqs), 0)::bigint);
end
$$;
comment on function outbox_internal.record_ready(text[], smallint[], bigint[]) is
  'At COMMIT, counts messages that were put into outbox by hand as pending, and lets the workers read each lane from the'
  ' first of them on.';

create function outbox_internal.is_taken(destination text, partition smallint, seq bigint)
returns boolean language c stable strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_is_taken_wrapper';
comment on function outbox_internal.is_taken(text, smallint, bigint) is
  'Whether a worker has this unclaimed message in flight on the fast path. Changes nothing.';

create function outbox_internal.withdraw_unless_taken(destination text, partition smallint, seq bigint)
returns boolean language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_withdraw_unless_taken_wrapper';
comment on function outbox_internal.withdraw_unless_taken(text, smallint, bigint) is
  'Withdraws an unclaimed message from the fast path: from now on it must be claimed. False if a worker has it in flight'
  ' there.';
