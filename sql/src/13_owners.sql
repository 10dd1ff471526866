-- Whose is the name of a destination? Messages and subscriptions have the name of a server, and a name that is free again
-- can be taken by each role that may create servers. So the database records the owner of the server of each name, and
-- the server of another owner gets nothing until outbox_adopt(destination => ...).

create table outbox_internal.destination_owners (
  destination name primary key,
  owner       text not null,
  owner_oid   oid,
  server      oid,
  wrapper     name,
  options     text[]
);
comment on table outbox_internal.destination_owners is
  'For the name of each destination that is a server, or was one: whose server may have its messages.';
comment on column outbox_internal.destination_owners.owner is
  'The name of the role. It counts while owner_oid is NULL: in a restored dump.';
comment on column outbox_internal.destination_owners.server is
  'The server itself: it stays the same when it gets another owner. NULL = it was renamed, or the row was restored.';
comment on column outbox_internal.destination_owners.options is
  'The options of the server when it was last changed. A dropped server is made again with them.';
select pg_catalog.pg_extension_config_dump('outbox_internal.destination_owners', '');

create function outbox_internal.destination_owners_restore() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  -- CREATE SERVER comes before the rows of a dump, and has recorded the role that restores. OIDs mean nothing here.
  delete from outbox_internal.destination_owners o where o.destination = new.destination;
  if found or not exists (select from pg_foreign_server s where s.oid = new.server and s.srvname = new.destination) then
    new.owner_oid := null;
    new.server := null;
  end if;
  return new;
end
$$;
comment on function outbox_internal.destination_owners_restore() is
  'Lets the rows of a dump replace those that CREATE SERVER wrote during its restore.';
create trigger destination_owners_restore before insert on outbox_internal.destination_owners
  for each row execute function outbox_internal.destination_owners_restore();
alter table outbox_internal.destination_owners enable always trigger destination_owners_restore;
comment on trigger destination_owners_restore on outbox_internal.destination_owners is
  'Internal: lets the rows of a dump replace those of its restore.';

create view outbox_internal.servers as
select s.srvname as destination, w.wrapper, s.oid as server, s.srvowner as owner_oid, s.srvoptions as options,
       pg_get_userbyid(s.srvowner) as owner, o.owner as owner_before,
       (o.destination is null or o.server = s.oid or o.owner_oid = s.srvowner
        or o.owner_oid is null and o.owner = pg_get_userbyid(s.srvowner)) is true as is_adopted
from pg_foreign_server s join outbox_internal.wrappers w on w.oid = s.srvfdw
left join outbox_internal.destination_owners o on o.destination = s.srvname
-- One named "default" stands for the settings, if its owner may change where all default messages go.
where (s.srvname <> 'default' or pg_has_role(s.srvowner, 'outbox_admin', 'usage'));
comment on view outbox_internal.servers is
  'The servers of outbox that count. One is adopted if it is the one that had the name before, if its owner had that one, or if the'
  ' name is new.';

create function outbox_internal.record_owners()
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  -- A server that was renamed may not come back under another owner: the name stays with the owner.
  update outbox_internal.destination_owners o set server = null
  from pg_foreign_server s where s.oid = o.server and s.srvname <> o.destination;
  update outbox_internal.destination_owners o
  set owner = s.owner, owner_oid = s.owner_oid, server = s.server, wrapper = s.wrapper, options = s.options
  from outbox_internal.servers s
  where s.destination = o.destination and s.is_adopted
    and (o.owner, o.owner_oid, o.server, o.wrapper, o.options)
        is distinct from (s.owner::text, s.owner_oid, s.server, s.wrapper, s.options);
  insert into outbox_internal.destination_owners (destination, owner, owner_oid, server, wrapper, options)
  select s.destination, s.owner, s.owner_oid, s.server, s.wrapper, s.options
  from outbox_internal.servers s where s.owner_before is null
  on conflict do nothing; -- a worker may record the same one
end
$$;
comment on function outbox_internal.record_owners() is
  'Records new names of servers, and of servers that are adopted new owners and options.';

create view outbox_internal.former_servers as
select o.destination::text as destination,
       format('CREATE SERVER %I FOREIGN DATA WRAPPER %I%s', o.destination, o.wrapper,
              (select ' OPTIONS (' || string_agg(format('%I %L', x.name, x.value), ', ' order by x.n) || ')'
               from pg_options_to_table(o.options) with ordinality x (name, value, n))) as command, o.owner::text as owner
from outbox_internal.destination_owners o where o.wrapper is not null;
comment on view outbox_internal.former_servers is
  'The commands that make servers again, with the options that they had.';

create function outbox_internal.on_server_change()
returns event_trigger language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  server record;
begin
  perform outbox_internal.record_owners();
  if tg_event = 'ddl_command_start' then
    return; -- REASSIGN OWNED has no event: its new owners are recorded before a server can be dropped
  end if;
  for server in
    select s.* from outbox_internal.servers s join pg_event_trigger_ddl_commands() c on c.objid = s.server
    where c.classid = 'pg_foreign_server'::regclass and not s.is_adopted
  loop
    raise warning 'destination "%" gets no messages until an administrator adopts it', server.destination
      using detail = format('The server of that name belonged to %I; this one belongs to %I.', server.owner_before, server.owner),
            hint = format('select outbox_adopt(destination => %L)', server.destination);
  end loop;
end
$$;
comment on function outbox_internal.on_server_change() is
  'Records the owners of servers in the transaction that creates or changes them, and warns of a name that was another''s.';
create event trigger outbox_servers on ddl_command_end when tag in ('CREATE SERVER', 'ALTER SERVER')
  execute function outbox_internal.on_server_change();
alter event trigger outbox_servers enable always;
comment on event trigger outbox_servers is
  'Internal: records the owners of the servers of outbox.';
create event trigger outbox_servers_dropped on ddl_command_start when tag in ('DROP SERVER', 'DROP OWNED')
  execute function outbox_internal.on_server_change();
alter event trigger outbox_servers_dropped enable always;
comment on event trigger outbox_servers_dropped is
  'Internal: records the owners of the servers of outbox before one is dropped.';
