-- Is this the database that delivers, or a copy of it? A copy contains the waiting messages of the original, and would
-- send them a second time. So the database records where it was adopted: system identifier of the server, OID of the
-- database, outbox.identity. A promoted standby keeps all three.

create function outbox_internal.system_identifier()
returns bigint language c stable as 'MODULE_PATHNAME', 'outbox_system_identifier_wrapper';
comment on function outbox_internal.system_identifier() is
  'The number that initdb gave this server; its standbys and physical copies have the same one.';

create table @extschema@.outbox_identity (
  singleton         boolean     not null default true check (singleton),
  system_identifier bigint      not null default outbox_internal.system_identifier(),
  database          oid         not null,
  identity          text        not null,
  restored          boolean     not null default false,
  adopted_at        timestamptz not null default pg_catalog.clock_timestamp(),
  highest_seq       bigint      not null default 0
);
-- No primary key: if a restore adds its row without the trigger, there are two, and that shows.
alter table @extschema@.outbox_identity replica identity full;
comment on table @extschema@.outbox_identity is
  'One row: where this database was adopted. If that is not this database, nothing is delivered until outbox_adopt().'
  ' Written at CREATE EXTENSION.';
comment on column @extschema@.outbox_identity.restored is
  'The row, or the extension itself, came from a dump.';
comment on column @extschema@.outbox_identity.highest_seq is
  'The highest seq of outbox_events that maintenance has seen drawn. A sequence behind it gives new events the seqs of old'
  ' ones; outbox_health names that.';

create function outbox_internal.identity_replace() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  highest bigint;
begin
  -- A dump contains its own row. The row may come after the messages, so a restored database delivers nothing from
  -- CREATE EXTENSION on. A restore is recognised by SET row_security = off: pg_dump's scripts and pg_restore begin with
  -- it, and other sessions hardly ever use it.
  select max(i.highest_seq) into highest from @extschema@.outbox_identity i;
  new.highest_seq := greatest(new.highest_seq, highest);
  delete from @extschema@.outbox_identity;
  new.restored := found or current_setting('row_security') = 'off';
  new.database := coalesce(new.database, (select d.oid from pg_database d where d.datname = current_database()));
  new.identity := coalesce(new.identity, current_setting('outbox.identity', true), '');
  return new;
end
$$;
comment on function outbox_internal.identity_replace() is
  'Keeps outbox_identity at one row, by default that of this database, and notices a dump that is restored.';
create trigger outbox_identity_replace before insert on @extschema@.outbox_identity
  for each row execute function outbox_internal.identity_replace();
alter table @extschema@.outbox_identity enable always trigger outbox_identity_replace;
comment on trigger outbox_identity_replace on @extschema@.outbox_identity is
  'Internal: keeps outbox_identity at one row and notices a dump that is restored.';

create view outbox_internal.drawn_seq as
select q.last_value - case when q.is_called then 0 else 1 end as seq from @extschema@.outbox_events_seq_seq q;
comment on view outbox_internal.drawn_seq is
  'The last seq of outbox_events that was drawn; 0 = none yet.';

create function outbox_internal.record_drawn_seq()
returns void language sql volatile set search_path = pg_catalog, pg_temp
begin atomic
  -- Not FROM: rows of a sequence cannot be locked.
  update @extschema@.outbox_identity i set highest_seq = (select d.seq from outbox_internal.drawn_seq d)
  where i.highest_seq < (select d.seq from outbox_internal.drawn_seq d);
end;
comment on function outbox_internal.record_drawn_seq() is
  'Maintenance: writes down the last seq that was drawn, so that seqs that begin again are noticed.';

-- Called each second: PL/pgSQL keeps the plan, an SQL function would plan again at each call.
create function outbox_internal.not_adopted()
returns text language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return case
    when i.singleton is null then 'outbox_identity is empty'
    when i.restored or i.is_doubled then 'it was restored from a dump'
    when i.system_identifier <> outbox_internal.system_identifier()
      then 'it comes from another server, by a copy or by pg_upgrade'
    when i.database <> here.database then 'it is a copy of another database'
    when i.identity <> here.identity
      then format('outbox.identity is %L, but it was adopted as %L', here.identity, i.identity)
  end
  from (select d.oid as database, coalesce(current_setting('outbox.identity', true), '') as identity
        from pg_database d where d.datname = current_database()) here
  left join (select x.*, pg_catalog.count(*) over () > 1 as is_doubled from @extschema@.outbox_identity x limit 1) i on true;
end
$$;
comment on function outbox_internal.not_adopted() is
  'The same as outbox_not_adopted().';
create function @extschema@.outbox_not_adopted()
returns text language sql stable return outbox_internal.not_adopted();
comment on function @extschema@.outbox_not_adopted() is
  'Why nothing is delivered until outbox_adopt(), as a text; NULL if this database is adopted.';

create function @extschema@.outbox_adopt(reason text default null, destination text default null)
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  why text;
  highest integer;
begin
  if outbox_adopt.destination is not null then
    select d.not_adopted into why from outbox_internal.destinations() d
    where d.destination = outbox_adopt.destination and d.server is not null;
    if not found then
      raise exception 'destination "%" is no server', outbox_adopt.destination
        using errcode = 'undefined_object', hint = 'See outbox_destination_status.';
    end if;
    update outbox_internal.destination_owners o
    set owner = s.owner, owner_oid = s.owner_oid, server = s.server, wrapper = s.wrapper, options = s.options
    from outbox_internal.servers s
    where s.destination = o.destination and s.destination = outbox_adopt.destination and not s.is_adopted;
    if not found then
      return false;
    end if;
    perform outbox_internal.wake(0::bigint);
    perform outbox_internal.record_audit(
      'adopt'::text, jsonb_build_object('destination', outbox_adopt.destination, 'why', why), null::bigint, reason);
    return true;
  end if;
  why := outbox_internal.not_adopted();
  if why is null then
    return false;
  end if;
  insert into @extschema@.outbox_identity default values; -- in place of the others
  update @extschema@.outbox_identity set restored = false; -- the trigger takes each session with row_security off for a restore
  -- What a restore without the settings, or a copy without the sequence, leaves behind.
  select max(p.partition) into highest
  from (select o.partition from @extschema@.outbox o union all select w.partition from @extschema@.outbox_waiting w
        union all select d.partition from @extschema@.outbox_dead d) p;
  if highest >= (select s.partition_count from @extschema@.outbox_settings s) then
    perform outbox_internal.configure_for(null::oid, least(highest + 1, 1024), null::boolean, null::text);
  end if;
  perform setval('@extschema@.outbox_events_seq_seq', k.seq)
  from (select greatest((select max(e.seq) from @extschema@.outbox_events e), i.highest_seq) as seq
        from @extschema@.outbox_identity i) k, outbox_internal.drawn_seq d
  where k.seq > d.seq;
  perform outbox_internal.record_owners();
  perform outbox_internal.wake(0::bigint);
  perform outbox_internal.record_audit('adopt'::text, jsonb_build_object('why', why), null::bigint, reason);
  return true;
end
$$;
comment on function @extschema@.outbox_adopt(text, text) is
  'Lets a copy deliver, within about a second: a restored dump, a copied database or server, a database after'
  ' pg_upgrade. With a destination, lets its server have the messages of that name, although the server before it belonged'
  ' to another role. False if it is adopted already.';

select pg_catalog.pg_extension_config_dump('@extschema@.outbox_identity', '');
