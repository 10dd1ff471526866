-- The error of each failed attempt of a message, kept as long as the message, and reported to shared memory for
-- outbox_errors. Written by the settle of failures, so a message that is published at the first attempt costs nothing
-- here.

create table @extschema@.outbox_attempts_log (
  seq         bigint      not null,
  destination text collate "C" not null,
  at          timestamptz not null,
  attempt     integer     not null,
  outcome     text        not null check (outcome in ('retried', 'deferred', 'dead')),
  error       text,
  worker_id   text,
  error_code  text,
  primary key (seq, destination, at)
);
comment on table @extschema@.outbox_attempts_log is
  'Attempts that failed, the last 20 of each message. Kept as long as the message waits or is dead, else for'
  ' outbox.retention.';
comment on column @extschema@.outbox_attempts_log.error_code is
  'The kind of the failure in error, a word of outbox_errors.kind; NULL = only the text is known.';
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_attempts_log', '');

create function outbox_internal.record_error(destination text, error text, code text, seq bigint, count bigint)
returns void language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_record_error_wrapper';
comment on function outbox_internal.record_error(text, text, text, bigint, bigint) is
  'At COMMIT, adds this number of failed messages to outbox_errors, the last of them seq (NULL = unknown). code: their'
  ' kind.';

create function outbox_internal.record_failed(failed @extschema@.outbox_attempts_log[])
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  perform outbox_internal.record_error(f.destination, f.error, f.error_code, max(f.seq), count(*))
  from unnest(failed) f where f.outcome <> 'deferred' group by f.destination, f.error, f.error_code;
  -- An expired message was not sent.
  insert into @extschema@.outbox_attempts_log select f.* from unnest(failed) f where f.outcome <> 'expired'
  on conflict do nothing;
  delete from @extschema@.outbox_attempts_log l
  using unnest(failed) f cross join lateral (
    select x.at from @extschema@.outbox_attempts_log x
    where x.seq = f.seq and x.destination = f.destination order by x.at desc offset 20 limit 1) old
  where l.seq = f.seq and l.destination = f.destination and l.at <= old.at;
  perform outbox_internal.notify_dead(array_agg(f.seq), array_agg(f.destination))
  from unnest(failed) f where f.outcome in ('dead', 'expired') having count(*) > 0;
end
$$;
comment on function outbox_internal.record_failed(@extschema@.outbox_attempts_log[]) is
  'Part of a settle in which messages failed, were put off or expired.';

create function outbox_internal.trim_attempts(
  after bigint, retention_s integer, batch integer, moment timestamptz default pg_catalog.clock_timestamp(),
  out reached bigint, out removed bigint, out more boolean
) language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
declare
  seen bigint;
  first bigint;
  last bigint;
begin
  select count(*), min(x.seq), max(x.seq) into seen, first, last
  from (select l.seq from @extschema@.outbox_attempts_log l where l.seq > after order by l.seq limit batch) x;
  delete from @extschema@.outbox_attempts_log l
  where l.seq between first and last and l.at < moment - make_interval(secs => retention_s)
    and (l.seq, l.destination) not in (select u.seq, u.destination from outbox_internal.unended(first, last) u);
  get diagnostics removed = row_count;
  reached := coalesce(last, after);
  more := seen = batch;
end
$$;
comment on function outbox_internal.trim_attempts(bigint, integer, integer, timestamptz) is
  'Reads up to batch failed attempts after a seq and removes those that are older than retention_s and whose message'
  ' neither waits nor is dead. Returns how far it got and whether more may be old beyond.';
