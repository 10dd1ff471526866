-- Traps in two schemas of the role mallory, for a session that has them first in its search_path: whatever a statement
-- names without a schema is there, and logs if it is used with the rights of another role.
create role mallory in role outbox_admin;
create schema evil authorization mallory;
create schema shapes authorization mallory;
grant usage on schema evil, shapes to public;
-- For the views below.
grant select on all tables in schema public, outbox_internal to mallory;
create function evil.sprung(what text) returns boolean language plpgsql set search_path = pg_catalog as $$
begin
  if current_user <> 'mallory' then
    raise log 'a trap ran as %: %', current_user, what;
  end if;
  return true;
end
$$;
do $make$
declare
  thing record;
begin
  perform set_config('check_function_bodies', 'off', true);
  -- A domain for each type.
  for thing in select t.typname as name from pg_type t
               where t.typnamespace = 'pg_catalog'::regnamespace and t.typtype in ('b', 'e', 'r', 'm') and t.typcategory <> 'A'
  loop
    execute format('create domain evil.%1$I as pg_catalog.%1$I check (evil.sprung(%2$L))', thing.name, 'type ' || thing.name);
  end loop;
  -- A composite type for each type, and casts to it.
  for thing in select t.typname as name from pg_type t
               where t.typnamespace = 'pg_catalog'::regnamespace and t.typtype in ('b', 'e', 'r', 'm') and t.typcategory <> 'A'
  loop
    execute format('create type shapes.%I as (n integer)', thing.name);
  end loop;
  for thing in
    select s.typname as name, t.oid as source, row_number() over () as n
    from pg_type s, pg_type t
    where s.typnamespace = 'shapes'::regnamespace and s.typtype = 'c'
      and t.oid = any ('{text,int2,int4,int8,bool,uuid,jsonb,name,oid,tid,timestamptz,text[],int8[],regclass}'::regtype[])
      and s.typname = any ('{text,int2,int4,int8,bool,uuid,jsonb,json,name,oid,tid,timestamptz,interval,regclass,char,varchar}')
  loop
    execute format('create function shapes.cast_%s(%s) returns shapes.%I language plpgsql as'
                   ' $$ begin perform evil.sprung(%L); return null; end $$',
                   thing.n, format_type(thing.source, null), thing.name, 'cast to ' || thing.name);
    execute format('create cast (%s as shapes.%I) with function shapes.cast_%s(%1$s) as implicit',
                   format_type(thing.source, null), thing.name, thing.n);
  end loop;
  -- A function for each function.
  for thing in
    select p.oid, p.proname as name, p.proretset as is_set, p.proargtypes, a.names, a.values,
           format_type(p.prorettype, null) as returns, p.prorettype = 'void'::regtype as is_void
    from pg_proc p
    cross join lateral (
      select coalesce(string_agg(format_type(t, null), ', ' order by n), '') as names,
             coalesce(string_agg('$' || n, ', ' order by n), '') as values,
             coalesce(bool_and(y.typtype <> 'p'), true) as is_plain
      from unnest(p.proargtypes) with ordinality u (t, n) join pg_type y on y.oid = t) a
    join pg_type r on r.oid = p.prorettype
    where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f' and a.is_plain and p.proargmodes is null
      and p.provariadic = 0 and (r.typtype <> 'p' or p.prorettype = 'void'::regtype)
  loop
    execute format('create function evil.%I(%s) returns %s %s language plpgsql as $$ begin perform evil.sprung(%L); %s; end $$',
                   thing.name, thing.names, case when thing.is_set then 'setof' else '' end, thing.returns,
                   'function ' || thing.oid::regprocedure,
                   format(case when thing.is_set then 'return query select * from'
                          when thing.is_void then 'perform' else 'return' end || ' pg_catalog.%I(%s)', thing.name, thing.values));
  end loop;
  -- An operator for each operator.
  for thing in
    select o.oprname as name, o.oid::regoperator::text as operator, format_type(o.oprleft, null) as of_left,
           format_type(o.oprright, null) as of_right, format_type(o.oprresult, null) as result, row_number() over () as n
    from pg_operator o join pg_type l on l.oid = o.oprleft join pg_type r on r.oid = o.oprright
    where o.oprnamespace = 'pg_catalog'::regnamespace and o.oprkind = 'b' and l.typtype <> 'p' and r.typtype <> 'p'
  loop
    execute format('create function evil.operator_%s(%s, %s) returns %s language plpgsql as'
                   ' $$ begin perform evil.sprung(%L); return $1 operator(pg_catalog.%s) $2; end $$',
                   thing.n, thing.of_left, thing.of_right, thing.result, 'operator ' || thing.operator, thing.name);
    execute format('create operator evil.%s (function = evil.operator_%s, leftarg = %s, rightarg = %s)',
                   thing.name, thing.n, thing.of_left, thing.of_right);
  end loop;
  -- A view for each relation.
  for thing in
    select c.oid::regclass as relation, c.relname as name, a.columns
    from pg_class c cross join lateral (
      select string_agg(quote_ident(a.attname), ', ' order by a.attnum) as columns from pg_attribute a
      where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.atttypid <> all ('{anyarray,pg_statistic[]}'::regtype[])) a
    where c.relnamespace in ('pg_catalog'::regnamespace, 'public'::regnamespace, 'outbox_internal'::regnamespace)
      and c.relkind in ('r', 'p', 'v')
  loop
    execute format('create view evil.%I as select %s from %s where evil.sprung(%L)', thing.name, thing.columns,
                   thing.relation, 'relation ' || thing.name);
  end loop;
  -- A collation for each collation.
  for thing in select distinct c.collname as name from pg_collation c
               where c.collnamespace = 'pg_catalog'::regnamespace and c.collname not like '%-x-icu'
  loop
    execute format('create collation evil.%I (locale = ''C'')', thing.name);
  end loop;
end
$make$;
create function evil.compare(text, text) returns integer language plpgsql immutable as $$
begin
  perform evil.sprung('operator class');
  return pg_catalog.bttextcmp($1, $2);
end
$$;
create operator class evil.text_ops for type text using btree as
  operator 1 <, operator 2 <=, operator 3 =, operator 4 >=, operator 5 >, function 1 evil.compare(text, text);
grant select on all tables in schema evil to public;
