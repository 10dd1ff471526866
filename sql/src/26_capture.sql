-- Change capture: triggers that make an event of each row written to a table. Their WHEN clauses note each row when it is
-- written; a trigger fires once for a query, and stores the events. Everything else that they need is in their one
-- argument, so a dump of the table contains it. src/session/changes.rs and capture.rs read it, crates/core/src/change.rs
-- makes the events.

-- Its settings are those of src/session/changes.rs.
create function @extschema@.outbox_captured() returns trigger language c volatile parallel unsafe
as 'MODULE_PATHNAME', 'outbox_captured_wrapper';
comment on function @extschema@.outbox_captured() is
  'Internal: the trigger of outbox_capture. Stores the events of the rows that a query has written, as the owner of the'
  ' outbox; what users have written runs as the one who wrote the row.';

create function outbox_internal.row_inserted(new_table oid, new_row tid) returns boolean
language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_row_inserted_wrapper';
create function outbox_internal.row_updated(old_table oid, old_row tid, new_row tid) returns boolean
language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_row_updated_wrapper';
create function outbox_internal.row_deleted(old_table oid, old_row tid) returns boolean
language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_row_deleted_wrapper';
comment on function outbox_internal.row_inserted(oid, tid) is
  'The WHEN clause of a trigger of outbox_capture: notes a new row. True for the first row of a query. Refuses any other'
  ' call.';
comment on function outbox_internal.row_updated(oid, tid, tid) is 'As row_inserted, for a row that is replaced.';
comment on function outbox_internal.row_deleted(oid, tid) is 'As row_inserted, for a row that is deleted.';

create function outbox_internal.capture_children(relation regclass) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  child regclass;
begin
  for child in
    with recursive children (relid) as (
      select capture_children.relation::oid
      union select i.inhrelid from pg_inherits i join children c on i.inhparent = c.relid
    )
    select c.relid from children c join pg_class t on t.oid = c.relid and not t.relispartition and t.relkind <> 'p'
    where c.relid <> capture_children.relation
      and not exists (select from pg_trigger g
                      where g.tgrelid = c.relid and g.tgfoid = '@extschema@.outbox_captured()'::regprocedure)
    order by c.relid
  loop
    execute format($sql$
      create trigger outbox_capture_update after update on %1$s for each row
        when (outbox_internal.row_updated(old.tableoid, old.ctid, new.ctid))
        execute function @extschema@.outbox_captured('{"inherited": true}');
      create trigger outbox_capture_delete after delete on %1$s for each row
        when (outbox_internal.row_deleted(old.tableoid, old.ctid))
        execute function @extschema@.outbox_captured('{"inherited": true}');
      $sql$, child);
  end loop;
end
$$;
comment on function outbox_internal.capture_children(regclass) is
  'Tables that inherit from a captured table get triggers for statements that name the captured one.';

create function outbox_internal.is_captured(relation regclass) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return exists (select from pg_trigger t
                 where t.tgrelid = relation and t.tgfoid = '@extschema@.outbox_captured()'::regprocedure
                   and t.tgname = 'outbox_capture_insert' and t.tgparentid = 0);
end
$$;
comment on function outbox_internal.is_captured(regclass) is
  'Whether outbox_capture was called for this table itself.';

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
  root_trigger oid;
begin
  perform outbox_internal.tables_for_triggers(relation);
  perform outbox_internal.check_destination(destination);
  select t.tgparentid into root_trigger from pg_trigger t
  where t.tgrelid = relation and t.tgfoid = '@extschema@.outbox_captured()'::regprocedure and t.tgparentid <> 0 limit 1;
  if found then
    raise exception 'table % is captured as a partition', relation using errcode = 'object_not_in_prerequisite_state',
      hint = format('Call outbox_capture or outbox_uncapture for %s.', pg_partition_root(relation));
  end if;
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

  -- Row triggers of a partitioned table are also those of its partitions, later ones too.
  execute format($sql$
    create or replace trigger outbox_capture_insert after insert on %1$s for each row
      when (outbox_internal.row_inserted(new.tableoid, new.ctid)) execute function @extschema@.outbox_captured(%2$L);
    create or replace trigger outbox_capture_update after update on %1$s for each row
      when (outbox_internal.row_updated(old.tableoid, old.ctid, new.ctid))
      execute function @extschema@.outbox_captured(%2$L);
    create or replace trigger outbox_capture_delete after delete on %1$s for each row
      when (outbox_internal.row_deleted(old.tableoid, old.ctid)) execute function @extschema@.outbox_captured(%2$L);
    $sql$, relation, settings);
  for place in select t from outbox_internal.tables_for_triggers(relation) t loop
    execute format('create or replace trigger outbox_capture_truncate after truncate on %s for each statement
                    execute function @extschema@.outbox_captured(%L)', place, settings);
  end loop;
  if not exists (select from pg_class c where c.oid = relation and (c.relkind = 'p' or c.relispartition)) then
    execute format('create or replace trigger outbox_capture_begin before update or delete on %s for each statement
                    execute function @extschema@.outbox_captured(%L)', relation, settings);
    perform outbox_internal.capture_children(relation);
  end if;
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
  perform outbox_internal.tables_for_triggers(relation);
  if exists (select from pg_trigger t
             where t.tgrelid = relation and t.tgfoid = '@extschema@.outbox_captured()'::regprocedure
               and t.tgparentid <> 0) then
    raise exception 'table % is captured as a partition', relation using errcode = 'object_not_in_prerequisite_state',
      hint = format('Call outbox_uncapture for %s.', pg_partition_root(relation));
  end if;
  was_captured := outbox_internal.is_captured(relation);
  for place, trigger_name in
    with recursive captured (relid) as (
      select p from outbox_internal.tables_for_triggers(relation) p
      union select i.inhrelid from pg_inherits i join captured c on i.inhparent = c.relid
      where not outbox_internal.is_captured(i.inhrelid)
    )
    select t.tgrelid, t.tgname from pg_trigger t join captured c on t.tgrelid = c.relid
    where t.tgfoid = '@extschema@.outbox_captured()'::regprocedure and t.tgparentid = 0
  loop
    execute format('drop trigger %I on %s', trigger_name, place);
  end loop;
  -- It may inherit from a captured table itself.
  for place in
    with recursive parents (relid) as (
      select i.inhparent from pg_inherits i where i.inhrelid = relation
      union select i.inhparent from pg_inherits i join parents p on i.inhrelid = p.relid
    )
    select p.relid from parents p where outbox_internal.is_captured(p.relid)
  loop
    perform outbox_internal.capture_children(place);
  end loop;
  return was_captured;
end
$$;
comment on function @extschema@.outbox_uncapture(regclass) is
  'Ends outbox_capture. False if the table was not captured. For the owner of the table.';
