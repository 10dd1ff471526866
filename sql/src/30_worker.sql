-- The protocol of a worker: heartbeat, lease, claim, settle. The in-server workers call these functions and nothing else;
-- a foreign relay may call the same. Time is the database's. Lock order: outbox_partitions, then outbox, then the rest.
-- A claim and a settle are planned once and reused for years of table sizes, so the plans that read a whole table are
-- switched off for them: the right one is always an index or a ctid. JIT is off with them, since a plan that still holds
-- a switched-off scan (of a table of one row) looks dear enough to be compiled each time.

create function @extschema@.outbox_heartbeat(worker text, pid integer, ttl_s integer)
returns setof text language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  insert into @extschema@.outbox_workers as w (worker_id, pid, heartbeat_until)
  values (worker, outbox_heartbeat.pid, clock_timestamp() + make_interval(secs => ttl_s))
  on conflict (worker_id) do update set
    heartbeat_at = clock_timestamp(), heartbeat_until = excluded.heartbeat_until, pid = excluded.pid,
    started_at = case when w.pid = excluded.pid then w.started_at else excluded.started_at end;
  return query select w.worker_id from @extschema@.outbox_workers w
    where w.heartbeat_until > clock_timestamp() or w.worker_id = worker order by 1;
end
$$;
comment on function @extschema@.outbox_heartbeat(text, integer, integer) is
  'Worker protocol: I live for ttl_s more seconds. Returns the ids of all live workers.';

create function @extschema@.outbox_report(worker text, state text, reason text, detail text)
returns void language sql volatile set search_path = pg_catalog, pg_temp as $$
  update @extschema@.outbox_workers w set state = $2, reason = $3, detail = $4 where w.worker_id = $1;
$$;
comment on function @extschema@.outbox_report(text, text, text, text) is
  'Worker protocol: what this worker knows of its broker; outbox_health shows it.';

create function @extschema@.outbox_leases(out partition smallint, out lease_owner text, out live boolean, out lease_epoch bigint)
returns setof record language sql stable set search_path = pg_catalog, pg_temp as $$
  select p.partition, p.lease_owner, p.lease_owner is not null and p.lease_until > clock_timestamp(), p.lease_epoch
  from @extschema@.outbox_partitions p order by p.partition;
$$;
comment on function @extschema@.outbox_leases() is
  'Worker protocol: every partition with its lease, to plan from.';

create function @extschema@.outbox_lease_take(worker text, partitions smallint[], ttl_s integer, out partition smallint, out lease_epoch bigint)
returns setof record language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  -- One's own lease is taken anew after a restart: the epoch grows, so what the earlier process still does is fenced off.
  return query
  with free as (
    select p.partition as id from @extschema@.outbox_partitions p
    where p.partition = any (partitions)
      and (p.lease_owner is null or p.lease_owner = worker or p.lease_until <= clock_timestamp())
    order by p.partition for update skip locked
  )
  update @extschema@.outbox_partitions p
  set lease_owner = worker, lease_until = clock_timestamp() + make_interval(secs => ttl_s),
      lease_epoch = p.lease_epoch + 1, updated_at = clock_timestamp()
  from free where p.partition = free.id
  returning p.partition, p.lease_epoch;
end
$$;
comment on function @extschema@.outbox_lease_take(text, smallint[], integer) is
  'Worker protocol: takes those of the partitions that are free; returns them with their new epoch.';

create function @extschema@.outbox_lease_renew(worker text, partitions smallint[], epochs bigint[], ttl_s integer)
returns setof smallint language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  return query
  with mine as (
    select p.partition as id from @extschema@.outbox_partitions p
    join unnest(partitions, epochs) as l (partition, epoch) on l.partition = p.partition
    where p.lease_owner = worker and p.lease_epoch = l.epoch and p.lease_until > clock_timestamp()
    order by p.partition for update of p
  )
  update @extschema@.outbox_partitions p
  set lease_until = clock_timestamp() + make_interval(secs => ttl_s), updated_at = clock_timestamp()
  from mine where p.partition = mine.id returning p.partition;
end
$$;
comment on function @extschema@.outbox_lease_renew(text, smallint[], bigint[], integer) is
  'Worker protocol: prolongs leases that are still held; a partition that is not returned is lost.';

create function @extschema@.outbox_lease_release(worker text, partitions smallint[], epochs bigint[])
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  update @extschema@.outbox_partitions p
  set lease_owner = null, lease_until = null, updated_at = clock_timestamp()
  from unnest(partitions, epochs) as l (partition, epoch)
  where p.partition = l.partition and p.lease_owner = worker and p.lease_epoch = l.epoch;
end
$$;
comment on function @extschema@.outbox_lease_release(text, smallint[], bigint[]) is
  'Worker protocol: gives leases back.';

create function @extschema@.outbox_leave(worker text)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  update @extschema@.outbox_partitions p set lease_owner = null, lease_until = null, updated_at = clock_timestamp()
  where p.lease_owner = worker;
  delete from @extschema@.outbox_workers w where w.worker_id = worker;
end
$$;
comment on function @extschema@.outbox_leave(text) is
  'Worker protocol: a worker that ends in order gives back its leases and its place.';

create function @extschema@.outbox_purge_workers()
returns bigint language sql volatile set search_path = pg_catalog, pg_temp as $$
  with gone as (delete from @extschema@.outbox_workers w
                where w.heartbeat_until < clock_timestamp() - interval '1 minute' returning 1)
  select count(*) from gone;
$$;
comment on function @extschema@.outbox_purge_workers() is
  'Worker protocol: removes workers whose heartbeat ended more than a minute ago.';

create type @extschema@.outbox_claimed as (
  tid tid, seq bigint, destination text, partition smallint, key text, attempts integer, claim_token bigint,
  id text, type text, aggregate_type text, aggregate_id text, operation text, payload text, previous_payload text,
  metadata text, headers text, actor text, correlation_id text, created_at text, created_at_s bigint
);
comment on type @extschema@.outbox_claimed is
  'A claimed message with its event. id is NULL where the event store lacks the event.';

create view @extschema@.outbox_with_event as
select o.ctid as row_tid, o.seq, o.destination, o.partition, o.key, o.attempts, o.available_at, o.claim_token,
       e.id, e.type, e.aggregate_type, e.aggregate_id, e.operation, e.payload, e.previous_payload, e.metadata, e.headers,
       e.actor, e.correlation_id, e.created_at, coalesce(e.body_bytes, 0)::bigint as body_bytes
from @extschema@.outbox o left join @extschema@.outbox_events e on e.seq = o.seq;
comment on view @extschema@.outbox_with_event is
  'Internal: waiting messages with their events, as a claim reads them.';

create function @extschema@.outbox_claim(
  worker text, destination text, partitions smallint[], epochs bigint[], limits integer[], bytes_max bigint
) returns setof @extschema@.outbox_claimed language plpgsql volatile
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
begin
  return query
  with pick as materialized (
    select due.*, l.epoch, sum(due.body_bytes) over (order by due.seq) - due.body_bytes as bytes_before
    from unnest(partitions, epochs, limits) as l (partition, epoch, n)
    -- Claimed by an earlier epoch counts as unclaimed: whoever takes a lease over takes all that is not settled.
    cross join lateral (
      select o.* from @extschema@.outbox_with_event o
      where o.destination = outbox_claim.destination and o.partition = l.partition
        and o.available_at <= now() and o.claim_token is distinct from l.epoch
      order by o.destination, o.partition, o.seq limit l.n
    ) due
    where exists (select from @extschema@.outbox_partitions p
                  where p.partition = l.partition and p.lease_owner = outbox_claim.worker and p.lease_epoch = l.epoch)
  ), claimed as (
    update @extschema@.outbox o set claim_token = pick.epoch
    from pick where o.ctid = pick.row_tid and pick.bytes_before < bytes_max
    returning o.ctid as row_tid, o.claim_token, pick.seq, pick.destination, pick.partition, pick.key, pick.attempts,
      pick.id, pick.type, pick.aggregate_type, pick.aggregate_id, pick.operation, pick.payload, pick.previous_payload,
      pick.metadata, pick.headers, pick.actor, pick.correlation_id, pick.created_at
  )
  select c.row_tid, c.seq, c.destination, c.partition, c.key, c.attempts, c.claim_token,
         c.id::text, c.type, c.aggregate_type, c.aggregate_id, c.operation, c.payload::text, c.previous_payload::text,
         c.metadata::text, c.headers::text, c.actor, c.correlation_id,
         to_char(c.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
         floor(extract(epoch from c.created_at))::bigint
  from claimed c order by c.seq;
end
$$;
comment on function @extschema@.outbox_claim(text, text, smallint[], bigint[], integer[], bigint) is
  'Worker protocol: claims due messages of leased partitions, up to a limit each, in order of seq, with their events; stops after bytes_max of bodies.';

create function @extschema@.outbox_claim_unleased(
  destination text, token bigint, claim_ttl_s integer, batch integer, bytes_max bigint
) returns setof @extschema@.outbox_claimed language plpgsql volatile
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
begin
  return query
  with locked as materialized (
    select o.ctid as tid from @extschema@.outbox o
    where o.destination = outbox_claim_unleased.destination and o.available_at <= now()
      and o.claim_token is distinct from outbox_claim_unleased.token
    limit batch for update skip locked
  ), pick as materialized (
    select o.*, sum(o.body_bytes) over (order by o.seq) - o.body_bytes as bytes_before
    from locked join @extschema@.outbox_with_event o on o.row_tid = locked.tid
  ), claimed as (
    -- available_at moves ahead by the claim's time to live: when it passes, another worker may claim the row.
    update @extschema@.outbox o
    set claim_token = outbox_claim_unleased.token, available_at = now() + make_interval(secs => claim_ttl_s)
    from pick where o.ctid = pick.row_tid and pick.bytes_before < bytes_max
    returning o.ctid as row_tid, o.claim_token, pick.seq, pick.destination, pick.partition, pick.key, pick.attempts,
      pick.id, pick.type, pick.aggregate_type, pick.aggregate_id, pick.operation, pick.payload, pick.previous_payload,
      pick.metadata, pick.headers, pick.actor, pick.correlation_id, pick.created_at
  )
  select c.row_tid, c.seq, c.destination, c.partition, c.key, c.attempts, c.claim_token,
         c.id::text, c.type, c.aggregate_type, c.aggregate_id, c.operation, c.payload::text, c.previous_payload::text,
         c.metadata::text, c.headers::text, c.actor, c.correlation_id,
         to_char(c.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
         floor(extract(epoch from c.created_at))::bigint
  from claimed c order by c.seq;
end
$$;
comment on function @extschema@.outbox_claim_unleased(text, bigint, integer, integer, bigint) is
  'Worker protocol with leasing off: claims due messages of any partition for claim_ttl_s seconds; stops after bytes_max of bodies. No order is promised.';

create function @extschema@.outbox_settle(
  worker text, tids tid[], seqs bigint[], destinations text[], partitions smallint[], tokens bigint[],
  actions "char"[], delays_ms bigint[], reasons text[]
) returns integer language plpgsql volatile
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  leased constant boolean := tokens[1] > 0;
  -- The fence: what this worker holds now, by lease and epoch. A row is changed only under it, and only if the row still
  -- carries the token, so a worker that lost its lease changes nothing.
  held constant bigint[] := array(
    select p.partition::bigint << 48 | p.lease_epoch
    from @extschema@.outbox_partitions p where p.lease_owner = outbox_settle.worker);
  changed integer;
begin
  with ended as materialized (
    select * from unnest(tids, seqs, destinations, partitions, tokens, actions, delays_ms, reasons)
      as u (row_tid, seq, destination, partition, token, action, delay_ms, reason)
    where not leased or (u.partition::bigint << 48 | u.token) = any (held)
  ), gone as (
    delete from @extschema@.outbox o using ended u
    where o.ctid = u.row_tid and o.seq = u.seq and o.destination = u.destination and o.claim_token = u.token
      and u.action in ('p', 'd')
    returning o.seq, o.enqueued_at, o.attempts, o.partition, o.destination, o.key, o.last_error, u.action, u.reason
  ), published as (
    insert into @extschema@.outbox_history (seq, enqueued_at, published_at, attempts, partition, destination, key, last_error)
    select g.seq, g.enqueued_at, clock_timestamp(), g.attempts + 1, g.partition, g.destination, g.key, g.last_error
    from gone g where g.action = 'p'
  ), dead as (
    insert into @extschema@.outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
    select g.seq, g.enqueued_at, g.attempts + 1, g.partition, g.destination, g.key, g.reason
    from gone g where g.action = 'd'
    on conflict (destination, seq) do update
    set died_at = excluded.died_at, attempts = excluded.attempts, reason = excluded.reason
  ), back as (
    -- r = try again after the delay, one attempt spent; f = freed, no attempt spent
    update @extschema@.outbox o
    set claim_token = null,
        attempts = o.attempts + case when u.action = 'r' then 1 else 0 end,
        available_at = case when u.action = 'r' then clock_timestamp() + u.delay_ms * interval '1 millisecond'
                            when leased then o.available_at else '-infinity' end,
        last_error = case when u.action = 'r' then u.reason else o.last_error end
    from ended u
    where o.ctid = u.row_tid and o.seq = u.seq and o.destination = u.destination and o.claim_token = u.token
      and u.action in ('r', 'f')
    returning 1
  )
  select (select count(*) from gone) + (select count(*) from back) into changed;
  return changed;
end
$$;
comment on function @extschema@.outbox_settle(text, tid[], bigint[], text[], smallint[], bigint[], "char"[], bigint[], text[]) is
  'Worker protocol: ends claimed messages in one statement. Actions: p published, d dead, r retry after delays_ms, f freed. Returns how many rows changed; fewer than given means that rows moved or the claim is lost.';

create function @extschema@.outbox_locate(seqs bigint[], destinations text[], partitions smallint[])
returns tid[] language sql stable set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $$
  select array_agg(coalesce((select o.ctid from @extschema@.outbox o
                             where o.destination = u.destination and o.partition = u.partition and o.seq = u.seq),
                            '(0,0)'::tid) order by u.i)
  from unnest($1, $2, $3) with ordinality as u (seq, destination, partition, i);
$$;
comment on function @extschema@.outbox_locate(bigint[], text[], smallint[]) is
  'Worker protocol: where messages lie now, after something (VACUUM FULL, an update by hand) moved them.';

create function @extschema@.outbox_trim(retention_s integer, batch integer)
returns bigint language sql volatile set search_path = pg_catalog, pg_temp as $$
  with old as (
    delete from @extschema@.outbox_history h
    where h.ctid = any (array(
      select x.ctid from @extschema@.outbox_history x
      where x.published_at < clock_timestamp() - make_interval(secs => retention_s) limit batch))
    returning 1)
  select count(*) from old;
$$;
comment on function @extschema@.outbox_trim(integer, integer) is
  'Removes up to batch rows of history that are older than retention_s; returns how many.';
