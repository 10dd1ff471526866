-- Manual actions on many messages at once, and the audit: the user and role behind each retry, discard, replay,
-- erasure, pause and configuration. The row of the audit belongs to the transaction that did the work: a rollback
-- undoes both.

create table @extschema@.outbox_audit (
  at               timestamptz not null default pg_catalog.clock_timestamp(),
  actor            text        not null, -- session_user: who logged in
  acted_as         text        not null, -- the role of SET ROLE, else the same
  action           text        not null check (action in ('retry', 'discard', 'replay', 'purge', 'configure', 'forget',
                                                          'adopt', 'source', 'pause', 'resume', 'assign',
                                                          'subscribe', 'unsubscribe')),
  filter           jsonb       not null,
  count            bigint,
  reason           text,
  application_name text,
  client_addr      inet
);
create index on @extschema@.outbox_audit (at);
alter table @extschema@.outbox_audit replica identity full; -- see outbox_history_default
comment on table @extschema@.outbox_audit is
  'Manual actions: who, when, what, on how many messages, and why. Only the functions write it; kept for a year.';
comment on column @extschema@.outbox_audit.filter is
  'The arguments of the call. Of a purge the CRC-32 of the key, not the key.';
comment on column @extschema@.outbox_audit.count is
  'How many messages were changed; NULL for what changes no message: configure, adopt, source, assign, pause,'
  ' resume, subscribe and unsubscribe.';
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_audit', '');

create function outbox_internal.record_audit(action text, filter jsonb, count bigint, reason text)
returns void language sql volatile set search_path = pg_catalog, pg_temp as $$
  -- current_user is the owner of the function here; the setting role still has the role of the caller.
  insert into @extschema@.outbox_audit (actor, acted_as, action, filter, count, reason, application_name, client_addr)
  values (session_user, coalesce(nullif(current_setting('role'), 'none'), session_user), $1, jsonb_strip_nulls($2), $3,
          $4, current_setting('application_name'), inet_client_addr());
$$;
comment on function outbox_internal.record_audit(text, jsonb, bigint, text) is
  'Writes a row of the audit.';

create function outbox_internal.criteria(filter jsonb, max_rows integer)
returns jsonb language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
begin
  filter := jsonb_strip_nulls(filter);
  if filter = '{}' then
    raise exception 'no criterion is given: this would be every message'
      using errcode = 'invalid_parameter_value',
      hint = 'Name the messages; for all of them use seq_from => 1.';
  end if;
  if max_rows < 1 then
    raise exception 'max_rows is %', max_rows
      using errcode = 'invalid_parameter_value', hint = 'Give a number above 0, or NULL for no limit.';
  end if;
  return filter;
end
$$;
comment on function outbox_internal.criteria(jsonb, integer) is
  'The criteria that were given; an error if there are none.';

create function outbox_internal.dead_matching(filter jsonb, max_rows integer, out row_tid tid)
returns setof tid language plpgsql stable rows 100
set search_path = pg_catalog, pg_temp as $$
declare
  f_destination constant text := filter->>'destination';
  f_type text := filter->>'type';
  f_aggregate_type text := filter->>'aggregate_type';
  f_aggregate_id text := filter->>'aggregate_id';
  f_key constant text := filter->>'key';
  f_error_like constant text := filter->>'error_like';
  f_after constant timestamptz := filter->>'died_after';
  f_before constant timestamptz := filter->>'died_before';
  f_attempts constant integer := coalesce(filter->>'attempts_below', '2147483647');
  f_from constant bigint := coalesce(filter->>'seq_from', '-9223372036854775808');
  f_to constant bigint := coalesce(filter->>'seq_to', '9223372036854775807');
  chosen bigint[];
begin
  if num_nonnulls(f_type, f_aggregate_type, f_aggregate_id) > 0 and exists (select from @extschema@.outbox_source) then
    -- Events of a source: of the messages that meet the other criteria.
    chosen := outbox_internal.source_matching(array(
      select distinct d.seq
      from outbox_internal.dead_matching(filter - '{type,aggregate_type,aggregate_id}'::text[], null::integer) m
      join @extschema@.outbox_dead d on d.ctid = m.row_tid),
      f_type, f_aggregate_type, f_aggregate_id, null::timestamptz, null::timestamptz);
    f_type := null;
    f_aggregate_type := null;
    f_aggregate_id := null;
  end if;
  return query
  select d.ctid from @extschema@.outbox_dead d left join @extschema@.outbox_events e on e.seq = d.seq
  where d.seq between f_from and f_to and (chosen is null or d.seq = any (chosen))
    and (f_destination is null or d.destination = f_destination)
    and (f_key is null or d.key = f_key)
    and (f_error_like is null or d.reason like f_error_like)
    and (f_after is null or d.died_at >= f_after)
    and (f_before is null or d.died_at < f_before) and d.attempts < f_attempts
    and (f_type is null or e.type = f_type)
    and (f_aggregate_type is null or e.aggregate_type = f_aggregate_type)
    and (f_aggregate_id is null or e.aggregate_id = f_aggregate_id)
  order by d.seq limit max_rows;
end
$$;
comment on function outbox_internal.dead_matching(jsonb, integer) is
  'The rows of the dead letters that meet all criteria, the first max_rows by seq.';

create function @extschema@.outbox_retry_where(
  destination text default null, type text default null, aggregate_type text default null,
  aggregate_id text default null, key text default null, error_like text default null,
  died_after timestamptz default null, died_before timestamptz default null, seq_from bigint default null,
  seq_to bigint default null, max_rows integer default 10000, reason text default null, dry_run boolean default true,
  attempts_below integer default null
) returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  filter constant jsonb := outbox_internal.criteria(
    jsonb_build_object('destination', destination, 'type', type, 'aggregate_type', aggregate_type,
      'aggregate_id', aggregate_id, 'key', key, 'error_like', error_like, 'died_after', died_after,
      'died_before', died_before, 'seq_from', seq_from, 'seq_to', seq_to, 'attempts_below', attempts_below), max_rows);
  retried bigint;
begin
  perform outbox_internal.settings_now(); -- first, as everywhere
  if coalesce(dry_run, true) then
    return (select count(*) from outbox_internal.dead_matching(filter, max_rows));
  end if;
  retried := outbox_internal.revive(array(select m.row_tid from outbox_internal.dead_matching(filter, max_rows) m));
  if retried > 0 then
    perform outbox_internal.record_audit('retry'::text, filter || jsonb_build_object('max_rows', max_rows), retried,
                                          outbox_retry_where.reason);
  end if;
  return retried;
end
$$;
comment on function @extschema@.outbox_retry_where(
  text, text, text, text, text, text, timestamptz, timestamptz, bigint, bigint, integer, text, boolean, integer) is
  'Retries the dead letters that meet all criteria, the first max_rows by seq; returns how many. Only counts them,'
  ' unless dry_run is false.';

create function @extschema@.outbox_discard_where(
  destination text default null, type text default null, aggregate_type text default null,
  aggregate_id text default null, key text default null, error_like text default null,
  died_after timestamptz default null, died_before timestamptz default null, seq_from bigint default null,
  seq_to bigint default null, max_rows integer default 10000, reason text default null, dry_run boolean default true,
  attempts_below integer default null
) returns bigint language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  filter constant jsonb := outbox_internal.criteria(
    jsonb_build_object('destination', destination, 'type', type, 'aggregate_type', aggregate_type,
      'aggregate_id', aggregate_id, 'key', key, 'error_like', error_like, 'died_after', died_after,
      'died_before', died_before, 'seq_from', seq_from, 'seq_to', seq_to, 'attempts_below', attempts_below), max_rows);
  discarded bigint;
begin
  perform outbox_internal.settings_now(); -- first, as everywhere
  if coalesce(dry_run, true) then
    return (select count(*) from outbox_internal.dead_matching(filter, max_rows));
  end if;
  select d.discarded into discarded from outbox_internal.discard(
    '{}'::tid[], '{}'::tid[], array(select m.row_tid from outbox_internal.dead_matching(filter, max_rows) m),
    coalesce(outbox_discard_where.reason, 'discarded by ' || session_user)) d;
  if discarded > 0 then
    perform outbox_internal.wake(0::bigint);
    perform outbox_internal.record_audit('discard'::text, filter || jsonb_build_object('max_rows', max_rows),
                                          discarded, outbox_discard_where.reason);
  end if;
  return discarded;
end
$$;
comment on function @extschema@.outbox_discard_where(
  text, text, text, text, text, text, timestamptz, timestamptz, bigint, bigint, integer, text, boolean, integer) is
  'Discards the dead letters that meet all criteria, the first max_rows by seq; returns how many. Only counts them,'
  ' unless dry_run is false.';
