-- For consumers: the ids of received messages. Needs no worker and no preloaded library, so it also serves a database
-- that only consumes. One index answers every call; the index of the time is for maintenance.

create table @extschema@.outbox_inbox (
  consumer    text collate "C" not null,
  message_id  text collate "C" not null,
  received_at timestamptz      not null default pg_catalog.now(),
  primary key (consumer, message_id)
);
create index on @extschema@.outbox_inbox (received_at);
comment on table @extschema@.outbox_inbox is
  'Ids of messages that consumers have received. Kept for outbox.inbox_retention.';
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_inbox', '');

create function @extschema@.outbox_inbox_receive(consumer text, message_id text)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  if outbox_inbox_receive.consumer is null or outbox_inbox_receive.message_id is null then
    raise exception '% is NULL', case when outbox_inbox_receive.consumer is null then 'consumer' else 'message_id' end
      using errcode = 'null_value_not_allowed', hint = 'Pass a name of the consumer and the message_id of the message.';
  end if;
  if greatest(octet_length(outbox_inbox_receive.consumer), octet_length(outbox_inbox_receive.message_id)) > 255 then
    raise exception 'consumer or message_id is longer than 255 bytes'
      using errcode = 'program_limit_exceeded',
      hint = 'A message_id of AMQP is never longer; shorten the name of the consumer.';
  end if;
  -- If another transaction is receiving the same message, this waits for its end: false if it commits, true if it does
  -- not.
  insert into @extschema@.outbox_inbox (consumer, message_id)
  values (outbox_inbox_receive.consumer, outbox_inbox_receive.message_id) on conflict do nothing;
  return found;
end
$$;
comment on function @extschema@.outbox_inbox_receive(text, text) is
  'True if this consumer receives this message for the first time, false if it has received it before. Part of the'
  ' caller''s transaction: a rollback forgets it.';

create function @extschema@.outbox_inbox_forget(consumer text, message_id text default null)
returns bigint language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  forgotten bigint;
begin
  delete from @extschema@.outbox_inbox i
  where i.consumer = outbox_inbox_forget.consumer
    and (outbox_inbox_forget.message_id is null or i.message_id = outbox_inbox_forget.message_id);
  get diagnostics forgotten = row_count;
  if forgotten > 0 then
    perform outbox_internal.record_audit('forget'::text,
      jsonb_build_object('consumer', outbox_inbox_forget.consumer, 'message_id', outbox_inbox_forget.message_id),
      forgotten, null::text);
  end if;
  return forgotten;
end
$$;
comment on function @extschema@.outbox_inbox_forget(text, text) is
  'Lets a consumer receive a message (NULL = all) as for the first time, for example before a replay; returns how'
  ' many were forgotten.';

create function outbox_internal.trim_inbox(
  retention_s integer, batch integer, moment timestamptz default pg_catalog.clock_timestamp()
) returns bigint language sql volatile
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
  with old as (
    delete from @extschema@.outbox_inbox i
    where i.ctid = any (array(
      select x.ctid from @extschema@.outbox_inbox x where x.received_at < moment - make_interval(secs => retention_s)
      order by x.received_at limit batch for update skip locked))
    returning 1)
  select count(*) from old;
$$;
comment on function outbox_internal.trim_inbox(integer, integer, timestamptz) is
  'The same as outbox_trim_inbox().';
-- Where no worker runs, its owner or a superuser calls it.
create function @extschema@.outbox_trim_inbox(
  retention_s integer, batch integer, moment timestamptz default pg_catalog.clock_timestamp()
) returns bigint language sql volatile return outbox_internal.trim_inbox(retention_s, batch, moment);
comment on function @extschema@.outbox_trim_inbox(integer, integer, timestamptz) is
  'Forgets up to batch received messages that are older than retention_s; returns how many.';
