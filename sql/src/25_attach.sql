-- Publication policy: a trigger on an event table enqueues the rows that a condition chooses. Everything that the
-- trigger needs is in its one argument, so a dump of the table contains it; src/session/capture.rs reads it. Lock order:
-- the table of the user first; CREATE TRIGGER waits for its writers.

create function @extschema@.outbox_attached() returns trigger language c volatile parallel unsafe
set search_path = pg_catalog, pg_temp set timezone = 'UTC' set datestyle = 'ISO, MDY' set intervalstyle = 'postgres'
set bytea_output = 'hex' set extra_float_digits = 1
as 'MODULE_PATHNAME', 'outbox_attached_wrapper';
comment on function @extschema@.outbox_attached() is
  'Internal: the trigger of outbox_attach. Runs as the one who writes; only the pointers are written with other'
  ' rights.';

create function outbox_internal.check_destination(destination text)
returns void language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_check_destination_wrapper';
comment on function outbox_internal.check_destination(text) is
  'Raises an error if the destination does not exist.';

create function outbox_internal.lock_own_table(relation regclass)
returns boolean language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_lock_own_table_wrapper';
comment on function outbox_internal.lock_own_table(regclass) is
  'Locks a table as CREATE TRIGGER does, so that its name stays until the end of the transaction. False if the caller is'
  ' not its owner, or no longer is under the lock.';

create function outbox_internal.tables_for_triggers(relation regclass) returns setof regclass
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  class pg_class;
  place regclass;
  foreign_partition regclass;
begin
  select * into class from pg_class c where c.oid = relation;
  if class.oid is null then
    raise exception 'the table does not exist' using errcode = 'undefined_table',
      hint = 'Pass its name, for example ''shop.orders''.';
  end if;
  if class.relkind not in ('r', 'p') then
    raise exception '% is not a table', relation using errcode = 'wrong_object_type',
      hint = 'Name a table or a partitioned table: only these have transition tables with the rows of a statement.';
  end if;
  -- The triggers are created by its name. It could be that of another table when the statement gets its lock.
  if not outbox_internal.lock_own_table(relation) then
    raise exception 'must be owner of table %', relation using errcode = 'insufficient_privilege',
      hint = format('Call it as a member of role %s.', class.relowner::regrole);
  end if;
  -- Members of the extension, and the partitions of its history, which are not members.
  if exists (select from pg_depend d join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
             where d.classid = 'pg_class'::regclass and d.objid = coalesce(pg_partition_root(relation), relation)
               and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e') then
    raise exception '% belongs to outbox', relation using errcode = 'wrong_object_type',
      hint = case when relation = '@extschema@.outbox_events'::regclass
             then 'Events of outbox_publish() are enqueued; call outbox_enqueue(seq) for rows that you insert yourself.'
                  ' outbox_subscribe() chooses what further destinations get.'
             else 'Name another table.' end;
  end if;
  select p.relid into foreign_partition
  from pg_partition_tree(relation) p join pg_class c on c.oid = p.relid and c.relkind = 'f' limit 1;
  if foreign_partition is not null then
    raise exception '% has a foreign table for a partition', relation
      using errcode = 'wrong_object_type', detail = format('The partition is %s.', foreign_partition),
        hint = 'Postgres does not report which rows were written there.';
  end if;
  return next relation;
  for place in select p.relid from pg_partition_tree(relation) p where p.relid <> relation order by p.level, p.relid loop
    if not outbox_internal.lock_own_table(place) then
      raise exception 'must be owner of table %', place using errcode = 'insufficient_privilege',
        detail = format('It is a partition of %s.', relation), hint = 'Let one role own all partitions.';
    end if;
    return next place;
  end loop;
end
$$;
comment on function outbox_internal.tables_for_triggers(regclass) is
  'A table and its partitions, because a statement that names a partition fires only the triggers of that partition.'
  ' They stay locked. An error if the caller may not create triggers on one, or if it cannot have them.';

create function outbox_internal.refuse_virtual(relation regclass, argument text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  raise exception '% uses a virtual generated column of table %', argument, relation
    using errcode = 'feature_not_supported', detail = 'A trigger sees no value of it.',
      hint = 'Write the expression of the column instead, or make the column STORED.';
end
$$;
comment on function outbox_internal.refuse_virtual(regclass, text) is
  'Raises the error for an argument that names a virtual generated column.';

create function outbox_internal.check_expression(relation regclass, argument text, expression text, condition boolean)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  cause text;
  others text;
begin
  begin
    -- An invented row, as in the trigger: it has no ctid or tableoid. WHERE refuses aggregates and set-returning
    -- functions, which would make one row of many, or many of one.
    execute format('explain select from jsonb_populate_record(null::%s, ''{}'') r where (%s' || chr(10) || ')'
                   || case when condition then '' else '::text is not null' end, relation, expression);
  exception when others then
    get stacked diagnostics cause = message_text;
    raise exception '% is not %', argument,
        case when condition then 'a condition' else 'an expression' end || ' over a row of ' || relation
      using errcode = 'invalid_parameter_value', detail = format('%s: %s.', expression, cause),
        hint = 'Write SQL over the columns of the table. Name your functions and operators with their schema:'
               ' shop.f(total), price operator(shop.<) 1.';
  end;
  select string_agg(format('null::%s as %I', format_type(a.atttypid, a.atttypmod), a.attname), ', ')
           filter (where a.attgenerated <> 'v') into others
  from pg_attribute a where a.attrelid = relation and a.attnum > 0 and not a.attisdropped
  having bool_or(a.attgenerated = 'v');
  if others is not null then
    begin
      execute format('explain select from (select %s) r where (%s' || chr(10) || ')::text is not null', others, expression);
    exception
      when undefined_column then
        perform outbox_internal.refuse_virtual(relation, argument);
      when others then null; -- a function of the whole row
    end;
  end if;
end
$$;
comment on function outbox_internal.check_expression(regclass, text, text, boolean) is
  'Raises an error unless this is an SQL expression over a row of the table.';

create function outbox_internal.attach_name(destination text) returns name
language sql immutable parallel safe
return case when pg_catalog.octet_length('outbox_attach_' || destination) < 64 then 'outbox_attach_' || destination
            else 'outbox_attach_' || pg_catalog.md5(destination) end;
comment on function outbox_internal.attach_name(text) is
  'The name of the trigger that outbox_attach creates for a destination.';

create function @extschema@.outbox_attach(
  relation regclass, when_sql text default null, key text default null, destination text default null,
  seq text default 'seq'
) returns void language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  target constant text := coalesce(destination, 'default');
  settings text;
  place regclass;
begin
  perform outbox_internal.tables_for_triggers(relation);
  perform outbox_internal.check_destination(destination);
  if not exists (select from pg_attribute a
                 where a.attrelid = relation and a.attname = seq and a.attnum > 0 and not a.attisdropped
                   and a.atttypid in ('int2'::regtype, 'int4'::regtype, 'int8'::regtype)) then
    raise exception 'table % has no integer column %', relation, coalesce(quote_ident(seq), 'NULL')
      using errcode = 'undefined_column',
      hint = 'Name the column with the seq of the event: seq => ''global_sequence''.';
  end if;
  if exists (select from pg_attribute a where a.attrelid = relation and a.attname = seq and a.attgenerated = 'v') then
    perform outbox_internal.refuse_virtual(relation, 'seq'::text);
  end if;
  if when_sql is not null then
    perform outbox_internal.check_expression(relation, 'when_sql'::text, when_sql, true);
  end if;
  if key is not null then
    perform outbox_internal.check_expression(relation, 'key'::text, key, false);
  end if;
  settings := jsonb_strip_nulls(jsonb_build_object(
    'when', when_sql, 'key', key, 'seq', seq, 'destination', nullif(target, 'default')))::text;

  for place in select t from outbox_internal.tables_for_triggers(relation) t loop
    execute format('create or replace trigger %I after insert on %s referencing new table as outbox_new
                    for each statement execute function @extschema@.outbox_attached(%L)',
                   outbox_internal.attach_name(target), place, settings);
  end loop;
end
$$;
comment on function @extschema@.outbox_attach(regclass, text, text, text, text) is
  'From now on enqueues the rows inserted into an event table for which when_sql holds (NULL = all). The key is the'
  ' value of an SQL expression over the row. A further call changes both. For the owner of the table.';

create function @extschema@.outbox_detach(relation regclass, destination text default null)
returns boolean language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  target constant text := coalesce(destination, 'default');
  trigger_name constant name := outbox_internal.attach_name(target);
  place regclass;
  was_attached boolean := false;
begin
  perform outbox_internal.tables_for_triggers(relation);
  for place in
    select t.tgrelid from pg_trigger t
    where t.tgname = trigger_name and t.tgrelid in (select p from outbox_internal.tables_for_triggers(relation) p)
  loop
    execute format('drop trigger %I on %s', trigger_name, place);
    was_attached := true;
  end loop;
  return was_attached;
end
$$;
comment on function @extschema@.outbox_detach(regclass, text) is
  'Ends outbox_attach for a destination (NULL = the default one). False if it was not attached. For the owner of the'
  ' table.';
