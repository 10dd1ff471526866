-- Destinations: where messages go. One always exists, "default", described by the settings outbox.url and so on. Others
-- are foreign servers, so that CREATE SERVER, GRANT USAGE, user mappings, \des and pg_dump work as usual.

create function outbox_internal.kinds()
returns text[] language c immutable parallel safe as 'MODULE_PATHNAME', 'outbox_kinds_wrapper';
comment on function outbox_internal.kinds() is
  'The kinds of destinations that the library knows, four texts each: foreign data wrapper, protocol, what a destination is,'
  ' and the word for what is at its other end.';

create function outbox_internal.add_kinds()
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  kinds constant text[] := outbox_internal.kinds();
begin
  for n in 1 .. cardinality(kinds) by 4 loop
    continue when exists (select from pg_foreign_data_wrapper w where w.fdwname = kinds[n]);
    execute format(
      'create function %1$s.%2$I(options text[], catalog oid)'
      ' returns void language c strict as ''MODULE_PATHNAME'', ''outbox_validator_wrapper'';'
      ' comment on function %1$s.%2$I(text[], oid) is %4$L;'
      ' create foreign data wrapper %3$I no handler validator %1$s.%2$I;'
      ' comment on foreign data wrapper %3$I is %5$L;'
      ' grant usage on foreign data wrapper %3$I to outbox_admin',
      '@extschema@', kinds[n] || '_validator', kinds[n],
      format('Internal: checks the options of servers and user mappings of %s.', kinds[n]), kinds[n + 2]);
  end loop;
end
$$;
comment on function outbox_internal.add_kinds() is
  'For the scripts of the extension: makes the foreign data wrapper of each kind that has none.';
select outbox_internal.add_kinds();

create view outbox_internal.wrappers as
select w.oid, w.fdwname as wrapper
from pg_foreign_data_wrapper w join pg_depend d on d.classid = 'pg_foreign_data_wrapper'::regclass and d.objid = w.oid
join pg_extension x on d.refclassid = 'pg_extension'::regclass and d.refobjid = x.oid
where d.deptype = 'e' and x.extname = 'outbox';
comment on view outbox_internal.wrappers is
  'The foreign data wrappers whose servers are destinations.';

create function outbox_internal.mapping_problem(server oid)
returns text[] language c stable strict parallel safe as 'MODULE_PATHNAME', 'outbox_mapping_problem_wrapper';
comment on function outbox_internal.mapping_problem(oid) is
  'Why the workers in the server may not use the user mapping of a server: it is empty, as a dump leaves it whose role may'
  ' not read secrets. A code, and names and values by turns; NULL = they may, or there is none.';

create table @extschema@.outbox_paused (
  destination text collate "C" primary key,
  since       timestamptz not null default pg_catalog.now(),
  paused_by   text        not null default session_user,
  reason      text,
  relay_until timestamptz
);
comment on column @extschema@.outbox_paused.relay_until is
  'Until when a relay may hold claims; see outbox_fetch_unpublished().';
comment on table @extschema@.outbox_paused is
  'Destinations to which nothing is delivered until outbox_resume(). Enqueue goes on.';
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_paused', '');
