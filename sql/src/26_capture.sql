-- Change capture: triggers that make an event of each row written to a table. Everything that they need is in their one
-- argument, so a dump of the table contains them; src/session/capture.rs reads it, crates/core/src/change.rs makes the
-- events.

create function @extschema@.outbox_captured() returns trigger language c volatile parallel unsafe
set search_path = pg_catalog, pg_temp set timezone = 'UTC' set datestyle = 'ISO, MDY' set intervalstyle = 'postgres'
set bytea_output = 'hex' set extra_float_digits = 1
as 'MODULE_PATHNAME', 'outbox_captured_wrapper';
comment on function @extschema@.outbox_captured() is
  'Internal: the trigger of outbox_capture. Runs as the one who writes; only the events are written with other rights.';

create function outbox_internal.renumber(seqs bigint[], destinations text[], partitions smallint[])
returns bigint[] language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  sequence constant regclass := pg_get_serial_sequence('@extschema@.outbox_events', 'seq');
  old constant bigint[] := array(select distinct s from unnest(renumber.seqs) s order by s);
  new constant bigint[] := array(select nextval(sequence) from generate_series(1, cardinality(old)));
  renumbered constant bigint[] := array(
    select new[dense_rank() over (order by u.seq)] from unnest(renumber.seqs) with ordinality u (seq, n) order by u.n);
begin
  update @extschema@.outbox_events e set seq = m.new
  from unnest(old, new) m (old, new) where e.seq = m.old;
  update @extschema@.outbox o set seq = m.new
  from unnest(renumber.seqs, renumbered, renumber.destinations, renumber.partitions) m (old, new, destination, partition)
  where o.destination = m.destination and o.partition = m.partition and o.seq = m.old;
  return renumbered;
end
$$;
comment on function outbox_internal.renumber(bigint[], text[], smallint[]) is
  'Gives messages of this transaction and their events new seqs, in this order: what happened before them was written'
  ' after them. Returns the new seqs.';

create function @extschema@.outbox_capture(
  relation regclass, aggregate_type text default null, type_prefix text default null, operations text default 'http',
  aggregate_id text default null, soft_delete_column text default null, columns text[] default null,
  destination text default null
) returns void language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  table_name name;
  unknown text;
  settings text;
  place regclass;
  same_type regclass;
begin
  perform outbox_internal.tables_for_triggers(relation);
  perform outbox_internal.check_destination(destination);
  if operations is null or operations not in ('http', 'sql') then
    raise exception 'operations "%" is unknown', operations using errcode = 'invalid_parameter_value',
      hint = 'Use ''http'' for POST, PATCH and DELETE, or ''sql'' for INSERT, UPDATE and DELETE.';
  end if;
  if columns = '{}' then
    raise exception 'columns is empty' using errcode = 'invalid_parameter_value',
      hint = 'Name the columns that events contain, or leave it out for all.';
  end if;
  select c.name into unknown from unnest(columns || soft_delete_column) c (name)
  where c.name is not null or c.name is null and columns is not null and array_position(columns, null) is not null
  except select a.attname from pg_attribute a where a.attrelid = relation and a.attnum > 0 and not a.attisdropped
  limit 1;
  if found then
    raise exception 'table % has no column %', relation, coalesce(quote_ident(unknown), 'NULL')
      using errcode = 'undefined_column',
      hint = 'Names are as stored: in lower case, unless the table was created with quotes.';
  end if;
  if exists (select from pg_attribute a
             where a.attrelid = relation and a.attname = soft_delete_column and a.attgenerated = 'v') then
    perform outbox_internal.refuse_virtual(relation, 'soft_delete_column'::text);
  end if;
  if aggregate_id is not null then
    perform outbox_internal.check_expression(relation, 'aggregate_id'::text, aggregate_id, false);
  elsif not exists (select from pg_index i where i.indrelid = relation and i.indisprimary) then
    raise exception 'table % has no primary key', relation using errcode = 'object_not_in_prerequisite_state',
      hint = 'Name what identifies a row: aggregate_id => ''code'', or any SQL expression over its columns.';
  end if;

  select c.relname into table_name from pg_class c where c.oid = relation;
  if aggregate_type is null then
    aggregate_type := table_name;
    -- Two sessions may capture tables of the same name in two schemas. Held until both see what the first has created.
    perform pg_advisory_xact_lock(hashtextextended('outbox_capture', 0));
    select t.tgrelid into same_type from pg_trigger t
    where t.tgfoid = '@extschema@.outbox_captured()'::regprocedure
      and position(convert_to('"aggregate_type": ' || to_jsonb(aggregate_type)::text, getdatabaseencoding()) in t.tgargs) > 0
      and t.tgrelid <> relation and coalesce(pg_partition_root(t.tgrelid) <> pg_partition_root(relation), true)
    order by t.tgrelid limit 1;
    if found then
      raise exception 'rows of table % already have the aggregate_type "%"', same_type, aggregate_type
        using errcode = 'duplicate_object',
          detail = 'Rows of both tables with the same id would be one aggregate: one key, one order, one outbox_purge.',
          hint = format('Pass aggregate_type => %L; or %L if they are the same things.',
                        (select n.nspname from pg_class c join pg_namespace n on n.oid = c.relnamespace
                         where c.oid = relation) || '.' || table_name, aggregate_type);
    end if;
  end if;
  type_prefix := coalesce(type_prefix, (
    select string_agg(upper(left(part, 1)) || substr(part, 2), '' order by n)
    from regexp_split_to_table(table_name, '[^[:alnum:]]+') with ordinality p (part, n)));
  if octet_length(aggregate_type) > 190 or octet_length(type_prefix || 'ForceDeleted') > 255 then
    raise exception 'aggregate_type or type_prefix is too long' using errcode = 'program_limit_exceeded',
      hint = 'AMQP carries 255 bytes: the longest type ends in ForceDeleted, and behind the aggregate_type a key has a colon'
             ' and up to 64 bytes that stand for a long id.';
  end if;
  settings := jsonb_strip_nulls(jsonb_build_object(
    'aggregate_type', aggregate_type, 'type_prefix', type_prefix, 'operations', operations,
    'aggregate_id', aggregate_id, 'soft_delete_column', soft_delete_column, 'columns', columns,
    'destination', destination))::text;

  for place in select t from outbox_internal.tables_for_triggers(relation) t loop
    execute format($sql$
      create or replace trigger outbox_capture_begin before insert or update or delete on %1$s
        for each statement execute function @extschema@.outbox_captured(%2$L);
      create or replace trigger outbox_capture_insert after insert on %1$s referencing new table as outbox_new
        for each statement execute function @extschema@.outbox_captured(%2$L);
      create or replace trigger outbox_capture_update after update on %1$s
        referencing old table as outbox_old new table as outbox_new
        for each statement execute function @extschema@.outbox_captured(%2$L);
      create or replace trigger outbox_capture_delete after delete on %1$s referencing old table as outbox_old
        for each statement execute function @extschema@.outbox_captured(%2$L);
      create or replace trigger outbox_capture_truncate after truncate on %1$s
        for each statement execute function @extschema@.outbox_captured(%2$L);
      $sql$, place, settings);
  end loop;
end
$$;
comment on function @extschema@.outbox_capture(regclass, text, text, text, text, text, text[], text) is
  'From now on makes an event of each row written to a table, and enqueues it: Created, Updated, Deleted,'
  ' ForceDeleted, Restored. A further call changes the arguments. For the owner of the table.';

create function @extschema@.outbox_uncapture(relation regclass)
returns boolean language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  trigger_name name;
  place regclass;
  was_captured boolean := false;
begin
  for place, trigger_name in
    select t.tgrelid, t.tgname from pg_trigger t
    where t.tgfoid = '@extschema@.outbox_captured()'::regprocedure
      and t.tgrelid in (select p from outbox_internal.tables_for_triggers(relation) p)
  loop
    execute format('drop trigger %I on %s', trigger_name, place);
    was_captured := true;
  end loop;
  return was_captured;
end
$$;
comment on function @extschema@.outbox_uncapture(regclass) is
  'Ends outbox_capture. False if the table was not captured. For the owner of the table.';
