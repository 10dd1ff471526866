-- How workers share messages: the number of partitions, the function that gives the partition of a key, and whether
-- workers lease partitions. A change ends the workers, moves waiting messages, and lets the workers begin again.

create function outbox_internal.send_workers_away()
returns boolean language c volatile as 'MODULE_PATHNAME', 'outbox_send_workers_away_wrapper';
comment on function outbox_internal.send_workers_away() is
  'Lets the workers of this database settle what is in flight and end; they come back when the transaction ends.'
  ' False if some are still there.';

create function outbox_internal.repartition(
  seq bigint, key text, partition smallint, old @extschema@.outbox_settings, new @extschema@.outbox_settings
) returns smallint language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  if old.partitioner is distinct from '' and partition <> coalesce(
       outbox_internal.partition_by(old.partitioner, old.partitioner_owner, key, old.partition_count::integer),
       seq % old.partition_count) then
    return partition % new.partition_count; -- it was given by name
  end if;
  return coalesce(
    outbox_internal.partition_by(new.partitioner, new.partitioner_owner, key, new.partition_count::integer),
    seq % new.partition_count);
end
$$;
comment on function outbox_internal.repartition(
  bigint, text, smallint, @extschema@.outbox_settings, @extschema@.outbox_settings) is
  'The partition of a waiting message under other settings.';

create function outbox_internal.partitioner(partitioner text)
returns setof pg_catalog.pg_proc language sql stable set search_path = pg_catalog, pg_temp as $$
  -- From the catalogs: the worker role may lack USAGE on the schema.
  select p.* from pg_proc p join pg_namespace n on n.oid = p.pronamespace
  where array[n.nspname, p.proname]::text[] = parse_ident(partitioner)
    and p.pronargs = 2 and p.proargtypes[0] = 'text'::regtype and p.proargtypes[1] = 'integer'::regtype;
$$;
comment on function outbox_internal.partitioner(text) is
  'The function (text, integer) of this name with its schema.';

create function @extschema@.outbox_configure(
  partition_count integer default null, leasing boolean default null, partitioner text default null
)
returns void language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_configure_wrapper';
comment on function @extschema@.outbox_configure(integer, boolean, text) is
  'Changes how workers share messages: the number of partitions, whether workers lease them (order per key) or claim'
  ' rows (no order), and the partitioner. The partitioner is the function that gives the partition of a key (empty ='
  ' CRC-32). It belongs to the caller or to a role whose rights the caller has. NULL = unchanged. Waits for open'
  ' transactions that have enqueued, and moves waiting messages. No message is lost, sent twice or reordered.';

create function outbox_internal.rewrite_settings(settings @extschema@.outbox_settings)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  -- Deleted and inserted, not updated: a transaction with an older snapshot then finds no row, and fails instead of going
  -- by what was before.
  truncate @extschema@.outbox_settings;
  insert into @extschema@.outbox_settings (partition_count, leasing, partitioner, partitioner_owner)
  values (settings.partition_count, settings.leasing, settings.partitioner, settings.partitioner_owner);
end
$$;
comment on function outbox_internal.rewrite_settings(@extschema@.outbox_settings) is
  'Writes the settings of this database, whose table is locked against all. Transactions with an older snapshot fail then.';

create function outbox_internal.configure_for(named_by oid, partition_count integer, leasing boolean, partitioner text)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  old @extschema@.outbox_settings;
  new @extschema@.outbox_settings;
  before text;
  found_function pg_proc;
  is_damaged boolean := false;
begin
  if partition_count not between 1 and 1024 then
    raise exception 'partition_count % is out of range', partition_count
      using errcode = 'numeric_value_out_of_range', hint = 'Use a count from 1 to 1024.';
  end if;
  -- Waits for every transaction that has enqueued, also prepared ones, and blocks new ones.
  lock table @extschema@.outbox_settings in access exclusive mode;
  select * into old from @extschema@.outbox_settings;
  if not found then
    is_damaged := true;
    select coalesce(nullif(count(*), 0), current_setting('outbox.partition_count')::bigint)
    into old.partition_count from @extschema@.outbox_partitions;
    old.leasing := current_setting('outbox.leasing');
  else
    is_damaged := (select count(*) from @extschema@.outbox_partitions) <> old.partition_count;
    old.partitions := '{}'; -- a long one is stored in another table, which TRUNCATE empties, too
  end if;
  before := old.partitioner;
  new := old;
  new.partition_count := coalesce(partition_count, old.partition_count);
  new.leasing := coalesce(leasing, old.leasing);
  if partitioner = '' then
    new.partitioner := null;
    new.partitioner_owner := null;
  elsif partitioner is not null then
    select * into found_function from outbox_internal.partitioner(partitioner);
    if found_function.oid is null or found_function.prokind <> 'f' or found_function.prorettype <> 'integer'::regtype
       or found_function.proretset then
      raise exception 'the function %(key text, partition_count integer) returns integer does not exist', partitioner
        using errcode = 'undefined_function', hint = 'Name it with its schema, for example ''shop.by_tenant''.';
    end if;
    new.partitioner := format('%I.%I', (select n.nspname from pg_namespace n where n.oid = found_function.pronamespace),
                              found_function.proname);
    if found_function.provolatile <> 'i' then
      raise exception 'function % is not immutable', new.partitioner
        using errcode = 'invalid_parameter_value',
              hint = 'A key must always be in the same partition. If it is: ALTER FUNCTION ... IMMUTABLE.';
    end if;
    -- It runs as its owner, whichever role enqueues. So it is not called before that is known to be allowed.
    new.partitioner_owner := pg_get_userbyid(found_function.proowner);
    if exists (select from pg_roles r where r.oid = found_function.proowner and r.rolsuper) then
      raise exception 'function % belongs to a superuser', new.partitioner
        using errcode = 'insufficient_privilege',
              hint = format('It runs as its owner: ALTER FUNCTION %s(text, integer) OWNER TO a role that may do no more'
                            ' than it needs.', new.partitioner);
    end if;
    if not pg_has_role(named_by, found_function.proowner, 'usage') then
      raise exception '% may not act as %, who owns function %', quote_ident(pg_get_userbyid(named_by)),
        quote_ident(new.partitioner_owner), new.partitioner
        using errcode = 'insufficient_privilege',
              hint = format('It runs as its owner: GRANT %I TO %I, or name a function that you own.',
                            new.partitioner_owner, pg_get_userbyid(named_by));
    end if;
    perform outbox_internal.partition_by(new.partitioner, new.partitioner_owner, k, new.partition_count::integer)
    from unnest('{a,order:42,"",~}'::text[]) k;
  end if;
  if not is_damaged and (new.partition_count, new.leasing) = (old.partition_count, old.leasing)
     and (new.partitioner, new.partitioner_owner) is not distinct from (old.partitioner, old.partitioner_owner) then
    return;
  end if;
  -- A partitioner that cannot be called any more, or that is not known any more, does not say which keys it placed by name:
  -- all keys are placed again.
  if old.partitions is null or old.partitioner is not null and not exists (
       select from outbox_internal.partitioner(old.partitioner) p join pg_roles r on r.oid = p.proowner
       where r.rolname = old.partitioner_owner and not r.rolsuper) then
    old.partitioner := '';
  end if;
  if not outbox_internal.send_workers_away() then
    raise exception 'the workers of this database did not end in time'
      using errcode = 'object_in_use', hint = 'Try again; see outbox_worker_status.';
  end if;
  -- Not against readers: a view may have one of these, and wait for another.
  lock table @extschema@.outbox_partitions, @extschema@.outbox, @extschema@.outbox_waiting, @extschema@.outbox_dead
    in exclusive mode;
  perform outbox_internal.rewrite_settings(new);
  -- Every lease ends here.
  update @extschema@.outbox_partitions p
  set lease_owner = null, lease_until = null, lease_epoch = p.lease_epoch + 1, updated_at = clock_timestamp();
  if not new.leasing then
    -- Without leases no message waits for another, and no worker would bring these back.
    perform from outbox_internal.make_ready(array(
      select w.ctid from @extschema@.outbox_waiting w where w.state = 'g'));
    update @extschema@.outbox_dead d set blocks = false where d.blocks;
  end if;
  update @extschema@.outbox o
  set partition = outbox_internal.repartition(o.seq, o.key, o.partition, old, new),
      claim_token = null, claim_until = null;
  perform outbox_internal.record_shown(o.destination, o.partition, min(o.seq)) from @extschema@.outbox o
  group by o.destination, o.partition;
  update @extschema@.outbox_waiting w
  set partition = outbox_internal.repartition(w.seq, w.key, w.partition, old, new);
  update @extschema@.outbox_dead d
  set partition = outbox_internal.repartition(d.seq, d.key, d.partition, old, new);
  perform outbox_internal.record_audit('configure'::text, jsonb_build_object(
    'partition_count', new.partition_count, 'leasing', new.leasing, 'partitioner', new.partitioner,
    'partition_count_before', old.partition_count, 'leasing_before', old.leasing, 'partitioner_before', before),
    null::bigint, null::text);
end
$$;
comment on function outbox_internal.configure_for(oid, integer, boolean, text) is
  'The same as outbox_configure(), as the owner of the tables, for the role that called it.';
