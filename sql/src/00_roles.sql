-- Roles: who runs the workers, and the groups a DBA grants. Runs first, as the superuser of CREATE EXTENSION.
-- Roles belong to the whole server, so another database may have made them already, or be making them right now:
-- both are fine, and DROP EXTENSION leaves them.

do $roles$
declare
  worker_role constant name := coalesce(nullif(pg_catalog.current_setting('outbox.worker_role', true), ''), 'outbox_worker');
  role_name name;
begin
  foreach role_name in array array[worker_role, 'outbox_writer', 'outbox_monitor', 'outbox_admin', 'outbox_consumer', 'outbox_relay',
                                     'outbox_policy' -- has no rights: conditions on outbox_events run as it
                                    ]::name[] loop
    begin
      if not exists (select from pg_catalog.pg_roles r where r.rolname = role_name) then
        execute pg_catalog.format('create role %I nologin', role_name);
        if role_name = worker_role and pg_catalog.current_setting('server_version_num')::int < 170000 then
          -- Before 17 a background worker needs LOGIN. No password and CONNECTION LIMIT 0 keep clients out; the
          -- limit does not count background workers (CountUserBackends in procarray.c).
          execute pg_catalog.format('alter role %I login connection limit 0', role_name);
        end if;
      end if;
    exception when duplicate_object or unique_violation then
      null; -- made by a CREATE EXTENSION in another database meanwhile
    end;
  end loop;

  if (select r.rolsuper from pg_catalog.pg_roles r where r.rolname = worker_role) then
    raise warning 'role "%" is a superuser; the workers will not start as it', worker_role
      using hint = pg_catalog.format('ALTER ROLE %I NOSUPERUSER;', worker_role);
  end if;
  execute pg_catalog.format('grant connect on database %I to %I', pg_catalog.current_database(), worker_role);
  execute pg_catalog.format('grant usage on schema @extschema@ to %I, outbox_writer, outbox_monitor, outbox_admin, outbox_consumer, outbox_relay',
                            worker_role);
  execute pg_catalog.format('grant create on schema @extschema@ to %I', worker_role); -- partitions of the history
  grant outbox_writer, outbox_monitor, outbox_consumer, outbox_relay to outbox_admin;
end
$roles$;
