-- Destinations: where messages go. One always exists, "default", described by the settings outbox.url and so on. Others
-- are foreign servers, so that CREATE SERVER, GRANT USAGE, user mappings, \des and pg_dump work as usual.

create function outbox_internal.kind_texts()
returns text[] language c immutable parallel safe as 'MODULE_PATHNAME', 'outbox_kind_texts_wrapper';
comment on function outbox_internal.kind_texts() is
  'The kinds of destinations that the library knows; the view kinds names the texts of each.';

create view outbox_internal.kinds as
select k.n[i] as wrapper, k.n[i + 1] as protocol, k.n[i + 2] as about, k.n[i + 3] as peer,
       k.n[i + 4]::boolean as connects_first, k.n[i + 5] as place, k.n[i + 6] as without_mapping, i = 1 as of_settings
from (select outbox_internal.kind_texts() as n offset 0) k cross join generate_series(1, cardinality(k.n), 7) i;
comment on view outbox_internal.kinds is
  'The kinds of destinations: foreign data wrapper, protocol, what a destination is, the word for what is at its other end,'
  ' whether it connects before the first message, to what (NULL = that is not checked), and what it logs in with if there is no'
  ' user mapping.';

create function outbox_internal.add_kinds()
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  kind record;
begin
  for kind in select k.* from outbox_internal.kinds k loop
    continue when exists (select from pg_foreign_data_wrapper w where w.fdwname = kind.wrapper);
    execute format(
      'create function %1$s.%2$I(options text[], catalog oid)'
      ' returns void language c strict as ''MODULE_PATHNAME'', ''outbox_validator_wrapper'';'
      ' comment on function %1$s.%2$I(text[], oid) is %4$L;'
      ' create foreign data wrapper %3$I no handler validator %1$s.%2$I;'
      ' comment on foreign data wrapper %3$I is %5$L;'
      ' grant usage on foreign data wrapper %3$I to outbox_admin',
      '@extschema@', kind.wrapper || '_validator', kind.wrapper,
      format('Internal: checks the options of servers and user mappings of %s.', kind.wrapper), kind.about);
  end loop;
end
$$;
comment on function outbox_internal.add_kinds() is
  'For the scripts of the extension: makes the foreign data wrapper of each kind that has none.';
select outbox_internal.add_kinds();

create view outbox_internal.members as
select d.classid, d.objid from pg_extension x join pg_depend d on d.refobjid = x.oid
where x.extname = 'outbox' and d.refclassid = 'pg_extension'::regclass and d.deptype = 'e';
comment on view outbox_internal.members is
  'The objects of the extension, as in pg_depend.';

create view outbox_internal.wrappers as
select w.oid, w.fdwname as wrapper
from pg_foreign_data_wrapper w join outbox_internal.members m
  on m.classid = 'pg_foreign_data_wrapper'::regclass and m.objid = w.oid;
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
