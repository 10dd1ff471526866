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

create table @extschema@.outbox_inbox_owners (
  consumer text collate "C" primary key,
  owner    name not null -- by name, so that a dump can be restored where it does not exist
);
comment on table @extschema@.outbox_inbox_owners is
  'Which role owns the name of a consumer: the first one that used it. Its members may use the name, too.';
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_inbox_owners', '');

create function @extschema@.outbox_inbox_receive(consumer text, message_id text)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  caller constant name := coalesce(nullif(current_setting('role'), 'none'), session_user);
  owner name;
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
  loop
    select o.owner into owner from @extschema@.outbox_inbox_owners o
    where o.consumer = outbox_inbox_receive.consumer and to_regrole(quote_ident(o.owner)) is not null;
    -- A superuser, who may use every name, owns none: a try by hand must not take it from the application.
    exit when owner is not null
      or not exists (select from pg_roles r where r.rolname = caller and not r.rolsuper);
    insert into @extschema@.outbox_inbox_owners as o (consumer, owner) values (outbox_inbox_receive.consumer, caller)
    on conflict (consumer) do update set owner = excluded.owner where to_regrole(quote_ident(o.owner)) is null;
  end loop;
  if not pg_has_role(caller, owner, 'usage') then
    raise exception 'consumer "%" belongs to role %', outbox_inbox_receive.consumer, quote_ident(owner)
      using errcode = 'insufficient_privilege',
            hint = format('Use another name, or: GRANT %1$I TO %2$I; or as a member of outbox_admin:'
                          ' SELECT outbox_inbox_assign(%3$L, %2$L).', owner, caller, outbox_inbox_receive.consumer);
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
  ' caller''s transaction: a rollback forgets it. The name belongs to the first role that uses it.';

create function @extschema@.outbox_inbox_assign(consumer text, owner name)
returns void language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  if outbox_inbox_assign.consumer is null then
    raise exception 'consumer is NULL'
      using errcode = 'null_value_not_allowed', hint = 'Pass the name of a consumer.';
  end if;
  if outbox_inbox_assign.owner is null then
    delete from @extschema@.outbox_inbox_owners o where o.consumer = outbox_inbox_assign.consumer;
  elsif to_regrole(quote_ident(outbox_inbox_assign.owner)) is null then
    raise exception 'role "%" does not exist', outbox_inbox_assign.owner
      using errcode = 'undefined_object', hint = 'Pass a role, or NULL for the next one that uses the name.';
  else
    insert into @extschema@.outbox_inbox_owners as o (consumer, owner)
    values (outbox_inbox_assign.consumer, outbox_inbox_assign.owner)
    on conflict (consumer) do update set owner = excluded.owner;
  end if;
  perform outbox_internal.record_audit(
    'assign'::text,
    jsonb_build_object('consumer', outbox_inbox_assign.consumer, 'owner', outbox_inbox_assign.owner),
    null::bigint, null::text);
end
$$;
comment on function @extschema@.outbox_inbox_assign(text, name) is
  'Gives the name of a consumer to a role, such as a group of roles that share it; NULL = to the next one that uses it.';

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

-- Where no worker runs, its owner or a superuser calls it.
create function @extschema@.outbox_trim_inbox(
  retention_s integer, batch integer, moment timestamptz default pg_catalog.clock_timestamp()
) returns bigint language sql volatile
set search_path = pg_catalog, pg_temp as $$
  with old as (
    delete from @extschema@.outbox_inbox i
    where i.ctid = any (array(
      select x.ctid from @extschema@.outbox_inbox x where x.received_at < moment - make_interval(secs => retention_s)
      order by x.received_at limit batch for update skip locked))
    returning 1)
  select count(*) from old;
$$;
comment on function @extschema@.outbox_trim_inbox(integer, integer, timestamptz) is
  'Forgets up to batch received messages that are older than retention_s; returns how many.';
