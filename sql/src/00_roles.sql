-- Roles: the role that the workers run as, and the groups that a DBA grants. This script runs first, as the superuser
-- of CREATE EXTENSION. Roles belong to the whole server, so another database may have created them already, or may be
-- creating them now. Both are fine, and DROP EXTENSION leaves them.

-- A name in a view, a default or the body of a function (BEGIN ATOMIC) is looked up once, now, and only in this schema.
select pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

-- Statements that are made with format() or raised name the schema.
do $schema$
begin
  if pg_catalog.strpos('@extschema@', '%') > 0 then
    raise exception 'the name of the schema has a percent sign' using errcode = 'invalid_schema_name',
      hint = 'CREATE SCHEMA outbox; CREATE EXTENSION outbox SCHEMA outbox;';
  end if;
end
$schema$;

-- The library may still be that of before an upgrade. `make sql` begins every update script with this block, too.
load 'outbox';
do $library$
declare
  sql constant text := (select x.extversion from pg_catalog.pg_extension x where x.extname = 'outbox');
  library constant text := pg_catalog.current_setting('outbox.library_version');
begin
  if pg_catalog.string_to_array(library, '.')::integer[] < pg_catalog.string_to_array(sql, '.')::integer[] then
    raise exception 'version % of the extension needs its library, and this server runs that of %', sql, library
      using errcode = 'object_not_in_prerequisite_state',
            detail = 'A preloaded library stays until the server restarts.',
            hint = 'Restart the server, then try again.';
  end if;
end
$library$;

-- Other roles may have created objects in the schema of the extension before. A name that is used there must be ours.
do $foreign$
declare
  foreign_object record;
begin
  select o.* into foreign_object
  from (select 'function' as kind, p.oid::pg_catalog.regprocedure::text as name, p.proname as plain, p.proowner as owner
        from pg_catalog.pg_proc p where p.pronamespace = pg_catalog.to_regnamespace('@extschema@')
        union all
        select case c.relkind when 'v' then 'view' when 'S' then 'sequence' when 'i' then 'index' when 'c' then 'type'
          else 'table' end,
               c.oid::pg_catalog.regclass::text, c.relname, c.relowner
        from pg_catalog.pg_class c where c.relnamespace = pg_catalog.to_regnamespace('@extschema@')
        union all
        select 'type', t.oid::pg_catalog.regtype::text, t.typname, t.typowner
        from pg_catalog.pg_type t where t.typnamespace = pg_catalog.to_regnamespace('@extschema@') and t.typrelid = 0
        ) o
  where o.plain ~ '^outbox(_|$)' order by o.kind, o.name limit 1;
  if found then
    raise exception 'schema % holds % %, which is not of the extension',
        '@extschema@', foreign_object.kind, foreign_object.name
      using errcode = 'duplicate_object',
            detail = pg_catalog.format('It belongs to role %I. What begins with outbox_ there could be taken for an'
                                       ' object of the extension.',
                                       pg_catalog.pg_get_userbyid(foreign_object.owner)),
            hint = pg_catalog.format('CREATE SCHEMA outbox; CREATE EXTENSION outbox SCHEMA outbox; or drop or rename'
                                     ' the %s.', foreign_object.kind);
  end if;
end
$foreign$;

-- Functions that users do not call. No other role may create in this schema, so no other function can match a call
-- better. It is an error if a schema of this name exists: another role may create in it.
create schema outbox_internal;
comment on schema outbox_internal is
  'What the functions, views and workers of the extension outbox call. Not for calling: it changes with any version.';

do $roles$
declare
  worker_role constant name := coalesce(nullif(pg_catalog.current_setting('outbox.worker_role', true), ''),
                                        'outbox_worker');
  role_name name;
  flaw record;
begin
  foreach role_name in array array[
    worker_role, 'outbox_writer', 'outbox_monitor', 'outbox_admin', 'outbox_consumer', 'outbox_relay',
    'outbox_policy' -- has no rights: conditions of subscriptions run as this role
  ]::name[] loop
    begin
      if not exists (select from pg_catalog.pg_roles r where r.rolname = role_name) then
        execute pg_catalog.format('create role %I nologin', role_name);
        if role_name = worker_role and pg_catalog.current_setting('server_version_num')::int < 170000 then
          -- Before version 17 a background worker needs LOGIN. No password and CONNECTION LIMIT 0 keep clients out; the
          -- limit does not count background workers (CountUserBackends in procarray.c).
          execute pg_catalog.format('alter role %I login connection limit 0', role_name);
        end if;
      end if;
    exception when duplicate_object or unique_violation then
      null; -- created in the meantime by a CREATE EXTENSION in another database
    end;
    -- Whoever made a role before may have kept a way into it. Members of the groups may be those of another database.
    select f.* into flaw
    from pg_catalog.pg_roles r, lateral (
      select 'has the attribute ' || a.name as what,
             case when a.name = 'LOGIN' and r.rolname = worker_role
                  then pg_catalog.format('ALTER ROLE %I CONNECTION LIMIT 0;', r.rolname)
                  else pg_catalog.format('ALTER ROLE %I NO%s;', r.rolname, a.name) end as remedy
      from (values ('SUPERUSER', r.rolsuper), ('CREATEROLE', r.rolcreaterole), ('CREATEDB', r.rolcreatedb),
              ('REPLICATION', r.rolreplication), ('BYPASSRLS', r.rolbypassrls),
              ('LOGIN', r.rolcanlogin and (r.rolname <> worker_role or r.rolconnlimit <> 0))) a (name, is_set)
      where a.is_set
      union all
      select pg_catalog.format('has the member %I%s', m.rolname,
                               case when g.admin_option then ' with ADMIN OPTION' else '' end),
             pg_catalog.format('REVOKE %I FROM %I;', r.rolname, m.rolname)
      from pg_catalog.pg_auth_members g join pg_catalog.pg_roles m on m.oid = g.member
      where g.roleid = r.oid and not m.rolsuper and (r.rolname in (worker_role, 'outbox_policy') or g.admin_option)
      union all
      select pg_catalog.format('is a member of %I', g.roleid::pg_catalog.regrole::text),
             pg_catalog.format('REVOKE %s FROM %I;', g.roleid::pg_catalog.regrole, r.rolname)
      from pg_catalog.pg_auth_members g
      where g.member = r.oid and r.rolname in (worker_role, 'outbox_policy')) f
    where r.rolname = role_name limit 1;
    if found then
      raise exception 'role "%" exists already and %', role_name, flaw.what
        using errcode = 'object_not_in_prerequisite_state', hint = flaw.remedy,
              detail = 'Who has such a role could take over what the extension may do.';
    end if;
  end loop;

  execute pg_catalog.format('grant connect on database %I to %I', pg_catalog.current_database(), worker_role);
  execute pg_catalog.format(
    'grant usage on schema @extschema@'
    ' to %I, outbox_writer, outbox_monitor, outbox_admin, outbox_consumer, outbox_relay', worker_role);
  execute pg_catalog.format('grant create on schema @extschema@ to %I', worker_role); -- partitions of the history
  grant outbox_writer, outbox_monitor, outbox_consumer, outbox_relay to outbox_admin;
end
$roles$;
