-- Event sources: events are read from a table or view of the user instead of outbox_events. There is one source for
-- each database, because only the seq of a message says where its event is. When a source is set,
-- src/session/source_checks.rs checks it. Workers read it as the owner of the relation, restricted and read-only
-- (src/store/source.rs).

create table @extschema@.outbox_source (
  singleton        boolean     primary key default true check (singleton),
  relation         text        not null, -- schema.name, quoted where needed
  relation_oid     oid         not null, -- its OID when it was set: distinguishes a renamed table from another one
  owner            text        not null, -- its owner then; the expressions run only as this role
  since            timestamptz not null default pg_catalog.clock_timestamp(),
  -- SQL expressions over a row of it. NULL = no such value, except: id = made from seq, payload = the row, key = the
  -- aggregate
  seq              text        not null,
  type             text        not null,
  created_at       text        not null,
  id               text,
  aggregate_type   text,
  aggregate_id     text,
  operation        text,
  payload          text,
  previous_payload text,
  metadata         text,
  headers          text,
  actor            text,
  correlation_id   text,
  key              text
);
comment on table @extschema@.outbox_source is
  'The event source, if it is not outbox_events: its relation, and the expressions for the columns of an event.'
  ' Written by outbox_source_set() and outbox_source_reset().';
-- Its name sorts after outbox_events, so psql restores old events before their table is closed.
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_source', '');

create table @extschema@.outbox_source_changes (
  changed_at timestamptz primary key,
  relation   text -- whose events seqs mean from then on; NULL = those of outbox_events
);
comment on table @extschema@.outbox_source_changes is
  'When seqs began to mean other events. So what ended before is not taken for a message of now.';
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_source_changes', '');

create view outbox_internal.seq_periods as
select tstzrange(c.changed_at, lead(c.changed_at) over (order by c.changed_at)) as during, c.relation,
       lead(c.changed_at) over (order by c.changed_at) is null as is_last
from (select '-infinity'::timestamptz, null::text
      union all
      select s.changed_at, s.relation from @extschema@.outbox_source_changes s) c (changed_at, relation);
comment on view outbox_internal.seq_periods is
  'Whose events seqs meant in each period: those of a relation, or (NULL) those of outbox_events.';

create view outbox_internal.event_times as
select p.stored,
       -- The rows of another relation may have changed since it was the source before.
       case when p.relation is null then p.stored else p.last end as current
from (select coalesce(range_agg(x.during) filter (where x.relation is null), '{}') as stored,
             range_agg(x.during) filter (where x.is_last) as last,
             max(x.relation) filter (where x.is_last) as relation
      from outbox_internal.seq_periods x) p;
comment on view outbox_internal.event_times is
  'When seqs meant events of outbox_events; and the times at which a message ended whose seq means the same event now.';

create function outbox_internal.events_closed() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  -- With several jobs pg_restore may restore outbox_source, and so this trigger, before the events. Any session can take
  -- its name, but only a role with the rights of the owner writes there itself.
  if current_setting('application_name') = 'pg_restore'
     and pg_has_role(session_user, (select c.relowner from pg_class c where c.oid = tg_relid), 'usage') then
    return null;
  end if;
  raise exception 'outbox_events takes no events: they are read from %',
      (select s.relation from @extschema@.outbox_source s)
    using errcode = 'object_not_in_prerequisite_state',
          hint = 'Write the event there and call outbox_enqueue(seq), or attach the table by outbox_attach(). select'
                 ' outbox_source_reset() goes back to outbox_events.';
end
$$;
comment on function outbox_internal.events_closed() is
  'Refuses events in outbox_events while they are read from a source.';

create function outbox_internal.source_apply() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if tg_op = 'INSERT' then
    -- Its presence shows sessions that there is a source: they read the cache, not a table.
    create or replace trigger outbox_source before insert on @extschema@.outbox_events
      for each statement execute function outbox_internal.events_closed();
  else
    drop trigger if exists outbox_source on @extschema@.outbox_events;
  end if;
  return null;
end
$$;
comment on function outbox_internal.source_apply() is
  'Closes outbox_events while there is a source, and opens it again; as its owner or a superuser.';
create trigger outbox_source_apply after insert or delete on @extschema@.outbox_source
  for each row execute function outbox_internal.source_apply();
alter table @extschema@.outbox_source enable always trigger outbox_source_apply;
comment on trigger outbox_source_apply on @extschema@.outbox_source is
  'Internal: closes outbox_events while there is a source.';
create trigger outbox_source_kept before delete or truncate on @extschema@.outbox_source
  for each statement execute function outbox_internal.keep_rows();
comment on trigger outbox_source_kept on @extschema@.outbox_source is
  'Internal: outbox_source_reset() removes the row, and opens outbox_events.';

create function outbox_internal.source_write(source @extschema@.outbox_source, seq_is_lost boolean)
returns boolean language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  old @extschema@.outbox_source;
  settings @extschema@.outbox_settings;
  reads_the_same boolean;
  changed_at timestamptz;
begin
  -- Waits for every transaction that has enqueued, also prepared ones, and blocks new ones. One that inserts its events
  -- itself has their table before it enqueues.
  lock table @extschema@.outbox_events in share row exclusive mode;
  lock table @extschema@.outbox_settings in access exclusive mode;
  select * into old from @extschema@.outbox_source;
  if source.relation is null and old.relation is null then
    -- The row may be lost, and outbox_events still closed.
    if exists (select from pg_trigger t where t.tgrelid = '@extschema@.outbox_events'::regclass and t.tgname = 'outbox_source')
    then
      drop trigger outbox_source on @extschema@.outbox_events;
      return true;
    end if;
    return false;
  end if;
  -- Waiting messages must find their events afterwards. Names of columns may change: without this nothing could be read
  -- then.
  reads_the_same := coalesce((source.relation = old.relation or source.relation_oid = old.relation_oid)
                             and (source.seq = old.seq or seq_is_lost), false);
  if not reads_the_same
     and (exists (select from @extschema@.outbox) or exists (select from @extschema@.outbox_waiting)
          or exists (select from @extschema@.outbox_dead)) then
    raise exception 'the source cannot be changed while messages wait for their events'
      using errcode = 'object_not_in_prerequisite_state',
            detail = 'Their seqs mean events of ' || coalesce(old.relation, 'outbox_events') || '.',
            hint = 'Stop enqueuing, wait for outbox_drain(), and retry or discard the dead letters; see'
                   ' outbox_discard_where().';
  end if;
  if not outbox_internal.send_workers_away() then
    raise exception 'the workers of this database did not end in time'
      using errcode = 'object_in_use', hint = 'Try again; see outbox_worker_status.';
  end if;
  changed_at := clock_timestamp(); -- no message has an end that is later
  if not reads_the_same then
    insert into @extschema@.outbox_source_changes values (changed_at, source.relation);
  end if;
  delete from @extschema@.outbox_source;
  select * into settings from @extschema@.outbox_settings;
  perform outbox_internal.rewrite_settings(settings); -- a transaction with an older snapshot would read the old source
  if source.relation is not null then
    source.singleton := true;
    source.since := case when reads_the_same then old.since else changed_at end;
    insert into @extschema@.outbox_source select source.*;
  end if;
  perform outbox_internal.record_audit(
    'source'::text, coalesce(to_jsonb(source) - 'singleton' - 'since' - 'relation_oid' - 'owner', '{}')
      || jsonb_build_object('relation_before', old.relation), null::bigint, null::text);
  return true;
end
$$;
comment on function outbox_internal.source_write(@extschema@.outbox_source, boolean) is
  'Makes this the source (relation NULL = outbox_events), unless messages wait for events of another one. It was'
  ' checked before. seq_is_lost: the seq of the current source cannot be read any more.';

create function @extschema@.outbox_source_set(
  relation regclass, seq text, type text, created_at text, id text default null, aggregate_type text default null,
  aggregate_id text default null, operation text default null, payload text default null,
  previous_payload text default null, metadata text default null, headers text default null, actor text default null,
  correlation_id text default null, key text default null
) returns void language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_source_set_wrapper';
comment on function @extschema@.outbox_source_set(
  regclass, text, text, text, text, text, text, text, text, text, text, text, text, text, text) is
  'Makes a table or view the source of events: from now on messages get their events there, by seq. Each further'
  ' argument is a column or an SQL expression over one row. For a member of the role that owns it; expressions run as'
  ' that role. Refused while messages wait, unless they find their events as before.';

create function @extschema@.outbox_source_reset()
returns boolean language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
begin
  return outbox_internal.source_write(null::@extschema@.outbox_source, false);
end
$$;
comment on function @extschema@.outbox_source_reset() is
  'Makes outbox_events the source of events again. False if it is already. Refused while messages wait.';

create function outbox_internal.source_problem()
returns text language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_source_problem_wrapper';
comment on function outbox_internal.source_problem() is
  'outbox_source_problem(), as outbox_health calls it.';
create function @extschema@.outbox_source_problem()
returns text language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_source_problem_wrapper';
comment on function @extschema@.outbox_source_problem() is
  'Why the source cannot be read at all; NULL if it can, or none is set. outbox_health shows it.';

create type outbox_internal.source_row as (
  seq bigint, fault text, error text, id text, type text, aggregate_type text, aggregate_id text, operation text,
  payload jsonb, previous_payload jsonb, metadata jsonb, headers jsonb, actor text, correlation_id text,
  created_at timestamptz
);
comment on type outbox_internal.source_row is
  'An event of the source. fault and error: why it could not be read (failed), or that there is none (missing).';

create function outbox_internal.source_events(seqs bigint[], bytes_max bigint, limited boolean)
returns text[] language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_source_events_wrapper';
comment on function outbox_internal.source_events(bigint[], bigint, boolean) is
  'The events of these seqs in the source, read as its owner, restricted: 15 texts each, in the order of source_row.'
  ' Stops after bytes_max of bodies. limited: as for a worker, whose rows may take 2 s each.';

create function outbox_internal.source_event(seq bigint)
returns text[] language c stable strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_source_event_wrapper';
comment on function outbox_internal.source_event(bigint) is
  'The event of this seq in the source as source_events() has it, read with the rights of the caller, restricted, by'
  ' superusers as the owner. fault unreadable: the caller may not read it. Empty if no source is set.';

create function outbox_internal.source_row_of(texts text[])
returns outbox_internal.source_row language plpgsql stable strict parallel unsafe
set search_path = pg_catalog, pg_temp as $$
declare
  event outbox_internal.source_row;
begin
  event := row(texts[1], texts[2], texts[3], texts[4], texts[5], texts[6], texts[7], texts[8], texts[9], texts[10],
               texts[11], texts[12], texts[13], texts[14], texts[15]);
  return event;
exception when data_exception or program_limit_exceeded then
  -- Some values are valid json, but not jsonb.
  event := null;
  event.seq := texts[1];
  event.fault := 'failed';
  event.error := format('%s (SQLSTATE %s)', sqlerrm, sqlstate);
  return event;
end
$$;
comment on function outbox_internal.source_row_of(text[]) is
  'The event of 15 texts of source_events(). failed: it is no event with jsonb.';

create function outbox_internal.source_matching(
  seqs bigint[], type text, aggregate_type text, aggregate_id text, created_from timestamptz, created_to timestamptz
) returns bigint[] language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_source_matching_wrapper';
comment on function outbox_internal.source_matching(bigint[], text, text, text, timestamptz, timestamptz) is
  'Those of the seqs whose event in the source meets all criteria that are not NULL. An event that cannot be read'
  ' meets none; a warning names it.';
