-- Is this the database that is to deliver, or a copy of it? A copy carries the messages that wait in the original, and
-- would send them a second time. So the database keeps where it was adopted: system identifier of the server, OID of
-- the database, outbox.identity. A standby that is promoted is still the same.

create function outbox_internal.system_identifier()
returns bigint language c stable as 'MODULE_PATHNAME', 'outbox_system_identifier_wrapper';
comment on function outbox_internal.system_identifier() is
  'The number that initdb gave this server; its standbys and physical copies have the same.';

create table @extschema@.outbox_identity (
  singleton         boolean     primary key default true check (singleton),
  system_identifier bigint      not null default outbox_internal.system_identifier(),
  database          oid         not null,
  identity          text        not null,
  restored          boolean     not null default false,
  adopted_at        timestamptz not null default pg_catalog.clock_timestamp()
);
comment on table @extschema@.outbox_identity is
  'One row: where this database was adopted. Where that is not here, nothing is delivered until outbox_adopt().'
  ' Written at CREATE EXTENSION.';
comment on column @extschema@.outbox_identity.restored is
  'The row, or the extension itself, came with a dump.';

create function outbox_internal.identity_replace() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  -- A dump brings a row of its own. It may come after the messages, so what a dump restores is silent from CREATE
  -- EXTENSION on: pg_dump's scripts and pg_restore begin with SET row_security = off, which hardly anybody else says.
  delete from @extschema@.outbox_identity;
  new.restored := found or current_setting('row_security') = 'off';
  return new;
end
$$;
comment on function outbox_internal.identity_replace() is
  'Keeps outbox_identity at one row and notices a dump that is restored.';
create trigger outbox_identity_replace before insert on @extschema@.outbox_identity
  for each row execute function outbox_internal.identity_replace();
comment on trigger outbox_identity_replace on @extschema@.outbox_identity is
  'Internal: keeps outbox_identity at one row and notices a dump that is restored.';

create function outbox_internal.here(out database oid, out identity text)
language sql stable set search_path = pg_catalog, pg_temp as $$
  select d.oid, coalesce(current_setting('outbox.identity', true), '')
  from pg_database d where d.datname = current_database();
$$;
comment on function outbox_internal.here() is
  'Which database this is, and outbox.identity.';

-- Asked each second: PL/pgSQL keeps the plan, where SQL makes it anew at each call.
create function outbox_internal.not_adopted()
returns text language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return case
    when i.singleton is null then 'outbox_identity is empty'
    when i.restored then 'it was restored from a dump'
    when i.system_identifier <> outbox_internal.system_identifier()
      then 'it comes from another server, by a copy or by pg_upgrade'
    when i.database <> here.database then 'it is a copy of another database'
    when i.identity <> here.identity
      then format('outbox.identity is %L, but it was adopted as %L', here.identity, i.identity)
  end
  from (select d.oid as database, coalesce(current_setting('outbox.identity', true), '') as identity
        from pg_database d where d.datname = current_database()) here
  left join @extschema@.outbox_identity i on true;
end
$$;
comment on function outbox_internal.not_adopted() is
  'What outbox_not_adopted() says.';
create function @extschema@.outbox_not_adopted()
returns text language sql stable return outbox_internal.not_adopted();
comment on function @extschema@.outbox_not_adopted() is
  'Why nothing is delivered until outbox_adopt(), in words; NULL if this database is adopted.';

create function @extschema@.outbox_adopt(reason text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  why constant text := outbox_internal.not_adopted();
begin
  if why is null then
    return false;
  end if;
  insert into @extschema@.outbox_identity (database, identity)
  select here.database, here.identity from outbox_internal.here() here
  where not exists (select from @extschema@.outbox_identity);
  update @extschema@.outbox_identity
  set system_identifier = outbox_internal.system_identifier(), database = here.database, identity = here.identity,
      restored = false, adopted_at = clock_timestamp()
  from outbox_internal.here() here;
  perform outbox_internal.wake(0::bigint, '{}'::smallint[], '{}'::bigint[]);
  perform outbox_internal.record_audit('adopt'::text, jsonb_build_object('why', why), null::bigint, reason);
  return true;
end
$$;
comment on function @extschema@.outbox_adopt(text) is
  'Lets a copy deliver: a restored dump, a copied database or server, one after pg_upgrade. Within about a second.'
  ' False if it is adopted already.';

select pg_catalog.pg_extension_config_dump('@extschema@.outbox_identity', '');
