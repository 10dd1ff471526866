-- The protocol of a worker: heartbeat, lease, claim, settle. Every change of state is one of these functions. The other
-- parts of the order of keys (open transactions, cursors) are in shared memory. Times are those of the database. The
-- functions that are SECURITY DEFINER are also called by workers outside the server (56_work.sql), whose role has no
-- access to the tables.
-- 85_plans.sql sets how a claim and a settle are planned. Lock order: outbox_partitions, then outbox, then the rest.

create function outbox_internal.server_workers()
returns text[] language c volatile as 'MODULE_PATHNAME', 'outbox_server_workers_wrapper';
comment on function outbox_internal.server_workers() is
  'Worker protocol: the ids of the workers that run in the server for this database, from shared memory; NULL when'
  ' not preloaded.';

create function outbox_internal.installed()
returns void language c volatile as 'MODULE_PATHNAME', 'outbox_installed_wrapper';
comment on function outbox_internal.installed() is
  'At COMMIT, notifies the launcher that this database has the extension; warns if the library is not preloaded.';

create function outbox_internal.remove_initial_privileges(parameter oid)
returns void language c volatile strict as 'MODULE_PATHNAME', 'outbox_remove_initial_privileges_wrapper';
comment on function outbox_internal.remove_initial_privileges(oid) is
  'For the scripts of the extension: removes core''s record that the privileges of an object are part of it.';

-- These two have no SET clause, so that they are inlined: they are called for each lease and were most of the work of
-- an idle worker.
create function outbox_internal.has_ended(worker text)
returns boolean language sql volatile
begin atomic
  select $1 like 'server-%' and not $1 = any (coalesce(outbox_internal.server_workers(), '{}'));
end;
comment on function outbox_internal.has_ended(text) is
  'Worker protocol: whether a worker in the server is known to have ended, so that its heartbeat and leases need not'
  ' expire. Its name begins with server-; the end of other workers is not known.';

create function outbox_internal.leases_last(worker text)
returns boolean language c volatile strict as 'MODULE_PATHNAME', 'outbox_leases_last_wrapper';
comment on function outbox_internal.leases_last(text) is
  'Worker protocol: whether the last leases of this worker still hold by a clock that does not jump, from shared'
  ' memory; false for a worker without an entry there.';

create function outbox_internal.claims_last(token bigint)
returns boolean language c volatile strict as 'MODULE_PATHNAME', 'outbox_claims_last_wrapper';
comment on function outbox_internal.claims_last(bigint) is
  'Worker protocol with leasing off: whether the worker with this token still renews its claims, from shared memory.';

create function outbox_internal.check_worker(worker text)
returns text language c stable strict as 'MODULE_PATHNAME', 'outbox_check_worker_wrapper';
comment on function outbox_internal.check_worker(text) is
  'Worker protocol: the worker, if this session is that worker or has the rights of the current role; otherwise an error.';

create function outbox_internal.ttl_max()
returns interval language sql stable
begin atomic
  select greatest(pg_catalog.current_setting('outbox.lease_ttl')::interval,
                  pg_catalog.current_setting('outbox.heartbeat_ttl')::interval);
end;
comment on function outbox_internal.ttl_max() is
  'Worker protocol: no lease or heartbeat lasts longer from now on.';

create function outbox_internal.lease_is_live(lease_owner text, lease_until timestamptz)
returns boolean language sql volatile
begin atomic
  -- Its publisher uses the clock of leases_last(), and must not trust a lease that another worker takes. The wall clock
  -- may have been set since the lease was written.
  select $1 is not null and not outbox_internal.has_ended($1)
     and (outbox_internal.leases_last($1)
          or $2 > pg_catalog.clock_timestamp() and $2 <= pg_catalog.clock_timestamp() + outbox_internal.ttl_max());
end;
comment on function outbox_internal.lease_is_live(text, timestamptz) is
  'Worker protocol: whether a lease holds. It is over when both the wall clock and the clock of its worker say so, or'
  ' when the worker has ended. So a wall clock that is set forward ends no lease, and one that is set back prolongs none.';

create function outbox_internal.heartbeat(worker text, pid integer, ttl_s integer)
returns setof text language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  insert into @extschema@.outbox_workers as w (worker_id, pid, heartbeat_until)
  values (outbox_internal.check_worker(worker), heartbeat.pid, clock_timestamp() + make_interval(secs => ttl_s))
  on conflict (worker_id) do update set
    heartbeat_at = clock_timestamp(), heartbeat_until = excluded.heartbeat_until, pid = excluded.pid,
    started_at = case when w.pid = excluded.pid then w.started_at else excluded.started_at end;
  return query select w.worker_id from @extschema@.outbox_workers w
    where w.worker_id = worker
       or outbox_internal.lease_is_live(w.worker_id, w.heartbeat_until) order by 1;
end
$$;
comment on function outbox_internal.heartbeat(text, integer, integer) is
  'Worker protocol: the heartbeat, for ttl_s more seconds. Returns the ids of all live workers.';

create function outbox_internal.report(
  worker text, destination text, state text, reason text, detail text, rechecked_at timestamptz, code text, args jsonb
) returns void language plpgsql volatile
security definer set search_path = pg_catalog, pg_temp as $$
begin
  if state is null then
    delete from @extschema@.outbox_connections c
    where c.worker_id = outbox_internal.check_worker(worker) and c.destination = report.destination;
    return;
  end if;
  insert into @extschema@.outbox_connections as c (worker_id, destination, state, reason, detail, rechecked_at, code, args)
  select w.worker_id, report.destination, report.state, left(report.reason, 100), left(report.detail, 2000),
         report.rechecked_at, left(report.code, 100),
         case when pg_column_size(report.args) <= 10000 and jsonb_typeof(report.args) = 'object' then report.args else '{}' end
  from @extschema@.outbox_workers w
  where w.worker_id = outbox_internal.check_worker(worker)
    and outbox_internal.destination_exists(report.destination) -- it may have been dropped
  on conflict on constraint outbox_connections_pkey do update
  set since = case when c.state = excluded.state then c.since else excluded.since end,
      state = excluded.state, reason = excluded.reason, detail = excluded.detail, code = excluded.code, args = excluded.args,
      rechecked_at = coalesce(excluded.rechecked_at, c.rechecked_at);
end
$$;
comment on function outbox_internal.report(text, text, text, text, text, timestamptz, text, jsonb) is
  'Worker protocol: the state of a destination at this worker (state NULL = it serves it no longer), and when it tried'
  ' if a session requested it; outbox_health shows it.';

create function outbox_internal.destinations(
  out destination text, out wrapper text, out server oid, out options text[], out paused boolean, out not_adopted text
) returns setof record language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
  return query
  with known as (
    select s.destination::text as name, s.wrapper::text as wrapper, s.server, s.options,
           case when not s.is_adopted
                then format('its server belongs to %I, and the one before it belonged to %s%I', s.owner,
                            case when s.owner = s.owner_before then 'another role ' else '' end, s.owner_before) end as why
    from outbox_internal.servers s
    union all
    select 'default', null, null, null, null
  )
  select distinct on (k.name collate "C") k.name, k.wrapper, k.server, k.options,
         exists (select from @extschema@.outbox_paused p where p.destination = k.name), k.why
  from known k order by k.name collate "C", k.server nulls last;
end
$$;
comment on function outbox_internal.destinations() is
  'All destinations: the foreign servers of outbox, and "default" with no server if it is described by the'
  ' settings. not_adopted: why one gets nothing until outbox_adopt(destination => ...).';

create view outbox_internal.blockers as
select w.destination, w.partition, w.key, w.seq from @extschema@.outbox_waiting w
where w.state = 'b' and w.due_at > pg_catalog.clock_timestamp()
union all
select d.destination, d.partition, d.key, d.seq from @extschema@.outbox_dead d where d.blocks;
comment on view outbox_internal.blockers is
  'Messages that others wait behind: those that back off, and dead letters that block.';

create function outbox_internal.blocked_lanes(out destination text, out partition smallint, out blocker bigint)
returns setof record language plpgsql stable rows 10 set search_path = pg_catalog, pg_temp as $$
declare
  by_partition constant text[] := array(
    select d.destination from outbox_internal.destinations() d where 'ordering=partition' = any (d.options));
begin
  if by_partition = '{}' then
    return; -- reads only the catalog and outbox_paused
  end if;
  return query
  select b.destination, b.partition, min(b.seq) from outbox_internal.blockers b
  where b.destination = any (by_partition) group by 1, 2;
end
$$;
comment on function outbox_internal.blocked_lanes() is
  'For destinations with ordering ''partition'': the blocked partitions, and the first message that blocks each. It'
  ' backs off, or is a dead letter that blocks. Later messages stay in outbox.';

create function outbox_internal.destination_exists(destination text)
returns boolean language sql stable set search_path = pg_catalog, pg_temp as $$
  select $1 = 'default' or exists (select from outbox_internal.servers s where s.destination = $1 collate "C");
$$;
comment on function outbox_internal.destination_exists(text) is
  'Whether this destination exists.';

create function outbox_internal.leases(
  out partition smallint, out lease_owner text, out live boolean, out lease_epoch bigint
) returns setof record language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  return query
  select p.partition, p.lease_owner, outbox_internal.lease_is_live(p.lease_owner, p.lease_until), p.lease_epoch
  from @extschema@.outbox_partitions p order by p.partition;
end
$$;
comment on function outbox_internal.leases() is
  'Worker protocol: every partition with its lease, to plan from.';

create function outbox_internal.lease_take(
  worker text, partitions smallint[], ttl_s integer, out partition smallint, out lease_epoch bigint
) returns setof record language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  -- A worker takes its own lease again after a restart: the epoch grows, and fences off what the earlier process still
  -- does.
  return query
  with free as (
    select p.partition as id from @extschema@.outbox_partitions p
    where p.partition = any (partitions)
      and (p.lease_owner is null or p.lease_owner = worker
           or not outbox_internal.lease_is_live(p.lease_owner, p.lease_until))
    order by p.partition for update skip locked
  )
  update @extschema@.outbox_partitions p
  set lease_owner = worker, lease_until = clock_timestamp() + make_interval(secs => ttl_s),
      lease_epoch = p.lease_epoch + 1, updated_at = clock_timestamp()
  from free where p.partition = free.id
  returning p.partition, p.lease_epoch;
end
$$;
comment on function outbox_internal.lease_take(text, smallint[], integer) is
  'Worker protocol: takes those of the partitions that are free; returns them with their new epoch.';

create function outbox_internal.lease_renew(worker text, partitions smallint[], epochs bigint[], ttl_s integer)
returns setof smallint language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  return query
  with mine as (
    select p.partition as id from @extschema@.outbox_partitions p
    join unnest(partitions, epochs) as l (partition, epoch) on l.partition = p.partition
    where p.lease_owner = worker and p.lease_epoch = l.epoch
    order by p.partition for update of p
  )
  update @extschema@.outbox_partitions p
  set lease_until = clock_timestamp() + make_interval(secs => ttl_s), updated_at = clock_timestamp()
  from mine where p.partition = mine.id returning p.partition;
end
$$;
comment on function outbox_internal.lease_renew(text, smallint[], bigint[], integer) is
  'Worker protocol: renews leases, also such as have run out and no other worker has taken; a partition that is not'
  ' returned is lost.';

create function outbox_internal.lease_release(worker text, partitions smallint[], epochs bigint[])
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  update @extschema@.outbox_partitions p
  set lease_owner = null, lease_until = null, updated_at = clock_timestamp()
  from unnest(partitions, epochs) as l (partition, epoch)
  where p.partition = l.partition and p.lease_owner = worker and p.lease_epoch = l.epoch;
end
$$;
comment on function outbox_internal.lease_release(text, smallint[], bigint[]) is
  'Worker protocol: gives leases back.';

create function outbox_internal.leave(worker text)
returns void language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
  update @extschema@.outbox_partitions p set lease_owner = null, lease_until = null, updated_at = clock_timestamp()
  where p.lease_owner = outbox_internal.check_worker(worker);
  delete from @extschema@.outbox_workers w where w.worker_id = outbox_internal.check_worker(worker);
end
$$;
comment on function outbox_internal.leave(text) is
  'Worker protocol: a worker that ends in order gives back its leases and its entry.';

create function outbox_internal.purge_workers()
returns bigint language sql volatile security definer set search_path = pg_catalog, pg_temp as $$
  with gone as (delete from @extschema@.outbox_workers w
                where w.heartbeat_until not between clock_timestamp() - interval '1 minute'
                                                and clock_timestamp() + outbox_internal.ttl_max()
                  and not outbox_internal.leases_last(w.worker_id) and w.worker_id not like 'server-%'
                   or outbox_internal.has_ended(w.worker_id) returning 1)
  select count(*) from gone;
$$;
comment on function outbox_internal.purge_workers() is
  'Worker protocol: removes workers that have ended, and those outside whose heartbeat ended more than a minute ago.';

create function outbox_internal.commit_position(xid)
returns bigint language c volatile strict as 'MODULE_PATHNAME', 'outbox_commit_position_wrapper';
comment on function outbox_internal.commit_position(xid) is
  'Worker protocol: the WAL position that must be on disk for this committed transaction to be durable; 0 = it has'
  ' waited for that.';

-- Never read: a row type. Its first columns are those that mark() returns, its last ones those of event_text.
create view outbox_internal.claimed as
select o.ctid as tid, o.seq, o.partition, o.key, o.attempts, o.crashes::integer as crashes, o.claim_token, o.replayed,
       o.enqueued_at, o.expires_at, null::bigint as wal_position, null::text as remark, e.*
from @extschema@.outbox o, outbox_internal.event_text e where false;
comment on view outbox_internal.claimed is
  'The row type of a claimed message with its event. id is NULL if the event store lacks the event. WAL must be on'
  ' disk up to wal_position before the message is sent: an asynchronous commit is visible before it is durable. With'
  ' a seq the remark says why the message can never be sent. Without a seq the row is not a message, and its remark'
  ' says why the claim has no more. It is cut (the limit of bytes was reached), missed (other sessions changed rows'
  ' meanwhile) or paused (the destination is paused, and nothing was read).';

-- Rows that a claim is about to mark. token: that of an earlier claim, which ended without a settle. share: how much of
-- the limit of bytes it takes.
create type outbox_internal.chosen as (tid tid, seq bigint, token bigint, share bigint, wal_position bigint);
comment on type outbox_internal.chosen is
  'A row of outbox that a claim has chosen and not marked.';

-- Text that leaves the server. A client gets text in its own encoding; if a conversion fails, the whole statement
-- fails, with all its rows. So a text that cannot be UTF-8 is found here, before it is sent, and affects only its row.

create function outbox_internal.unreadable(key text, event record)
returns text language c stable parallel safe as 'MODULE_PATHNAME', 'outbox_unreadable_wrapper';
comment on function outbox_internal.unreadable(text, record) is
  'Why a message with this key and event (a row that has the columns of event_text) can never be sent. The causes'
  ' are a text that cannot be converted to UTF-8, and too many bytes. NULL if it can be sent.';

create function outbox_internal.legible(text)
returns text language c stable strict parallel safe as 'MODULE_PATHNAME', 'outbox_legible_wrapper';
comment on function outbox_internal.legible(text) is
  'The text with a replacement for each character that cannot be converted to UTF-8.';

create function outbox_internal.of_utf8(bytea)
returns text language c stable strict parallel safe as 'MODULE_PATHNAME', 'outbox_of_utf8_wrapper';
comment on function outbox_internal.of_utf8(bytea) is
  'Converts UTF-8 to a text, with a question mark for each character that the encoding of the database lacks.';

-- No SET clause: it is inlined into the claims.
create function outbox_internal.crash_weight(crashes integer, bytes_max bigint)
returns bigint language sql immutable parallel safe as $$
  select case
    when $1 operator(pg_catalog.=) 0 then 0
    when $1 operator(pg_catalog.=) 1 then $2 operator(pg_catalog./) 100
    when $1 operator(pg_catalog.=) 2 then $2 operator(pg_catalog./) 10
    else $2 end;
$$;
comment on function outbox_internal.crash_weight(integer, bigint) is
  'The share of a claim that a message takes with which workers crashed: after one crash a hundred fit, after two ten,'
  ' then one. So the next crash charges few messages in addition to the one that caused it.';

-- A claim chooses rows, limited by body_bytes, and one statement marks them. What the statement returns is claimed: other
-- sessions may have changed rows since they were chosen. Only then the events are read, at the very end, because rows of
-- a CTE, of a sort and of a function in FROM are copied. A worker in the server chooses the rows of its lanes by an index
-- scan and runs the body of mark() as a prepared statement (src/worker/store/claimed.rs).

create function outbox_internal.mark(
  tids tid[], tokens bigint[], worker text, partitions smallint[], epochs bigint[], token bigint, claim_until timestamptz,
  out tid tid, out seq bigint, out partition smallint, out key text, out attempts integer, out crashes integer,
  out claim_token bigint, out replayed boolean, out enqueued_at timestamptz, out expires_at timestamptz
) returns setof record language sql volatile set search_path = pg_catalog, pg_temp as $$
  update @extschema@.outbox o
  set claim_token = coalesce($5[o.partition + 1], $6), claim_until = $7,
      crashes = o.crashes + case when o.claim_token is null then 0 else 1 end
  -- The rows that were chosen, as they were then: this statement may have waited for another worker that marked one. (Up
  -- to the minors of 2025, a row that was found by its ctid is not looked up again after the wait.) "+ 0" leaves the ctid
  -- as the only way to find the rows, whatever the planner thinks of the size of the table.
  where o.ctid = any ($1) and (o.claim_token is null or o.claim_token = any ($2))
    and ($3 is null or o.partition + 0 = any (array(
      select p.partition::integer from @extschema@.outbox_partitions p
      where p.partition = any ($4) and p.lease_owner = $3 and p.lease_epoch = $5[p.partition + 1])))
  returning o.ctid, o.seq, o.partition, o.key, o.attempts, o.crashes::integer, o.claim_token, o.replayed, o.enqueued_at,
            o.expires_at;
$$;
comment on function outbox_internal.mark(tid[], bigint[], text, smallint[], bigint[], bigint, timestamptz) is
  'Worker protocol: claims chosen rows, and returns those that it has claimed, in any order. tokens: those of earlier'
  ' claims that the rows may carry. With a worker, only rows of the partitions that it leases with these epochs (of'
  ' partition n the element n + 1), which become the tokens of the claim; without one, token and claim_until.';

create function outbox_internal.within_bytes(chosen outbox_internal.chosen[], bytes_max bigint, most integer default null)
returns tid[] language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
  select array_agg(c.tid order by c.seq)
  from (select u.tid, u.seq, sum(u.share) over (order by u.seq) - u.share as bytes_before from unnest($1) u
        order by u.seq limit $3) c
  where c.bytes_before < $2;
$$;
comment on function outbox_internal.within_bytes(outbox_internal.chosen[], bigint, integer) is
  'The first of the chosen rows, by seq, until their shares reach bytes_max; at least one, and at most this many.';

create function outbox_internal.claim_chosen(
  chosen outbox_internal.chosen[], worker text, partitions smallint[], epochs bigint[], token bigint,
  claim_until timestamptz, bytes_max bigint, remarks text[] default '{}', most integer default null
) returns setof outbox_internal.claimed language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  tids constant tid[] := outbox_internal.within_bytes(chosen, bytes_max, most);
  wal_position constant bigint := (select max(u.wal_position) from unnest(chosen) u);
begin
  return query
  with marked as materialized (
    select m.* from outbox_internal.mark(
      tids, array(select distinct u.token from unnest(chosen) u where u.token is not null), worker, partitions, epochs,
      token, claim_until) m
  )
  select c.tid, c.seq, c.partition, c.key, c.attempts, c.crashes, c.claim_token, c.replayed, c.enqueued_at,
         c.expires_at, wal_position, c.remark, e.*
  from (
    select m.*, null::text as remark from marked m
    union all
    select null, null, null, null, null, null, null, null, null, null, r.remark
    from unnest(remarks || case when cardinality(tids) < cardinality(chosen) then 'cut' end
                        || case when (select count(*) from marked) < cardinality(tids) then 'missed' end) r (remark)
    where r.remark is not null
    order by 2
  ) c
  left join lateral (select t.* from outbox_internal.event_text t where t.event_seq = c.seq offset 0) e on true
  order by c.seq;
end
$$;
comment on function outbox_internal.claim_chosen(
  outbox_internal.chosen[], text, smallint[], bigint[], bigint, timestamptz, bigint, text[], integer) is
  'Worker protocol: claims chosen rows up to bytes_max of bodies and the number most, by mark(). Returns those that it has'
  ' claimed with their events, in order of seq, and remarks.';

create function outbox_internal.claim(
  worker text, destination text, partitions smallint[], epochs bigint[], limits integer[], cursors bigint[],
  bytes_max bigint, read_limit bigint default 9223372036854775807, most integer default null
) returns setof outbox_internal.claimed language plpgsql volatile
security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  me constant text := outbox_internal.check_worker(worker);
begin
  -- A worker notices a pause later than a relay of another session, which may hold messages by then.
  if exists (select from @extschema@.outbox_paused z where z.destination = claim.destination) then
    return query select * from outbox_internal.claim_chosen(
      '{}', me, partitions, epochs, null, null, bytes_max, '{paused}'::text[]);
    return;
  end if;
  return query select * from outbox_internal.claim_chosen(array(
    select row(due.tid, due.seq, due.claim_token, due.share, due.wal_position)::outbox_internal.chosen
    from unnest(partitions, limits, cursors) as l (partition, n, cursor)
    join @extschema@.outbox_partitions p
      on p.partition = l.partition and p.lease_owner = me and p.lease_epoch = epochs[l.partition + 1]
    -- A row claimed by an earlier epoch counts as unclaimed: the new owner of a lease takes over all unsettled rows.
    cross join lateral (
      select o.ctid as tid, outbox_internal.commit_position(o.xmin) as wal_position, o.seq, o.claim_token,
             coalesce(e.body_bytes, 0) + outbox_internal.crash_weight(
               o.crashes + case when o.claim_token is null then 0 else 1 end, bytes_max) as share
      from @extschema@.outbox o left join @extschema@.outbox_events e on e.seq = o.seq
      where o.destination = claim.destination and o.partition = l.partition and o.seq > l.cursor and o.seq <= read_limit
        and o.claim_token is distinct from p.lease_epoch
      order by o.destination, o.partition, o.seq limit l.n
    ) due
    -- Always true. It leaves one lane for the planner: with more, a planner that takes outbox for empty (vacuum saw
    -- it so) would join each of its rows with all claimed rows.
    where l.n between 1 and 1000000000
  ), me, partitions, epochs, null, null, bytes_max, most => most);
end
$$;
comment on function outbox_internal.claim(
  text, text, smallint[], bigint[], integer[], bigint[], bigint, bigint, integer) is
  'Worker protocol: claims messages of leased partitions with their events, in order of seq, up to the seq'
  ' read_limit. Each partition has a limit and a cursor; the epoch of partition n is the element n + 1. Stops after'
  ' bytes_max of bodies and the number most.';

create function outbox_internal.claim_waiting(
  worker text, destination text, partition smallint, key text, epochs bigint[], read_limit bigint, n integer,
  bytes_max bigint
) returns setof outbox_internal.claimed language plpgsql volatile
security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  me constant text := outbox_internal.check_worker(worker);
  waiting outbox_internal.chosen[];
  tids tid[];
  moved outbox_internal.chosen[];
begin
  -- Locked until COMMIT: otherwise the next owner could have read the lane before the rows are in it.
  perform from @extschema@.outbox_partitions p
  where p.partition = claim_waiting.partition and p.lease_owner = me and p.lease_epoch = epochs[p.partition + 1]
    and not exists (select from @extschema@.outbox_paused z where z.destination = claim_waiting.destination)
  for key share;
  if not found then
    return;
  end if;
  waiting := array(
    select row(w.ctid, w.seq, null, coalesce(e.body_bytes, 0), outbox_internal.commit_position(w.xmin))::outbox_internal.chosen
    from @extschema@.outbox_waiting w left join @extschema@.outbox_events e on e.seq = w.seq
    where w.state = 'g' and w.destination = claim_waiting.destination and w.partition = claim_waiting.partition
      and w.key collate "C" = claim_waiting.key and w.seq <= read_limit
    order by w.destination, w.partition, w.key collate "C", w.seq limit n);
  tids := outbox_internal.within_bytes(waiting, bytes_max);
  moved := array(
    select row(r.tid, r.seq, null, 0, (select max(u.wal_position) from unnest(waiting) u))::outbox_internal.chosen
    from outbox_internal.make_ready(tids) r);
  return query select * from outbox_internal.claim_chosen(
    moved, me, array[claim_waiting.partition], epochs, null, null, bytes_max,
    array[case when cardinality(tids) < cardinality(waiting) then 'cut' end,
          case when cardinality(moved) < cardinality(tids) then 'missed' end]);
end
$$;
comment on function outbox_internal.claim_waiting(text, text, smallint, text, bigint[], bigint, integer, bigint) is
  'Worker protocol: brings back and claims the first n messages of a key that wait behind another, up to the seq'
  ' read_limit; stops after bytes_max of bodies.';

create function outbox_internal.waits(destination text, partition smallint, key text)
returns boolean language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select exists (select from @extschema@.outbox_waiting w
                 where w.state = 'g' and w.destination = $1 and w.partition = $2 and w.key collate "C" = $3);
$$;
comment on function outbox_internal.waits(text, smallint, text) is
  'Worker protocol: whether messages of a key wait behind another.';

create function outbox_internal.choose_unleased(destination text, token bigint, batch integer, bytes_max bigint)
returns outbox_internal.chosen[] language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  return array(
    select row(l.tid, l.seq, l.claim_token,
               coalesce(e.body_bytes, 0) + outbox_internal.crash_weight(
                 l.crashes + case when l.claim_token is null then 0 else 1 end, choose_unleased.bytes_max),
               l.wal_position)::outbox_internal.chosen
    from (
      select o.ctid as tid, outbox_internal.commit_position(o.xmin) as wal_position, o.seq, o.claim_token, o.crashes
      from @extschema@.outbox o
      where o.destination = choose_unleased.destination
        and (o.claim_until is null or o.claim_until <= now() and not outbox_internal.claims_last(o.claim_token))
        and o.claim_token is distinct from choose_unleased.token
        and (o.expires_at is null or o.expires_at > clock_timestamp())
      limit choose_unleased.batch for update skip locked
    ) l left join @extschema@.outbox_events e on e.seq = l.seq);
end
$$;
comment on function outbox_internal.choose_unleased(text, bigint, integer, bigint) is
  'Worker protocol with leasing off: locks rows of any partition that nobody else claims.';

create function outbox_internal.claim_unleased(
  destination text, token bigint, claim_ttl_s integer, batch integer, bytes_max bigint
) returns setof outbox_internal.claimed language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  -- Another worker may claim the row once claim_until has passed and this worker no longer renews its claims.
  return query select * from outbox_internal.claim_chosen(
    outbox_internal.choose_unleased($1, $2, $4, $5), null, null, null, $2, now() + make_interval(secs => $3), $5);
end
$$;
comment on function outbox_internal.claim_unleased(text, bigint, integer, integer, bigint) is
  'Worker protocol with leasing off: claims messages of any partition for claim_ttl_s seconds; stops after bytes_max'
  ' of bodies. Without any order.';

create function outbox_internal.make_ready(
  tids tid[], out destination text, out partition smallint, out seq bigint, out tid tid
) returns setof record language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  for destination, partition, seq, tid in
    with gone as (
      delete from @extschema@.outbox_waiting w where w.ctid = any (tids)
      returning w.seq,
                -- The time of a scheduled message begins when it is due.
                case when w.state = 's' then greatest(w.enqueued_at, least(w.due_at, clock_timestamp())) else w.enqueued_at end
                  as enqueued_at,
                w.attempts, w.partition, w.crashes, w.replayed, w.destination, w.key, w.last_error, w.expires_at, w.error_code
    )
    insert into @extschema@.outbox as o
      (seq, enqueued_at, attempts, partition, crashes, replayed, destination, key, last_error, expires_at, error_code)
    select g.* from gone g
    on conflict do nothing
    returning o.destination, o.partition, o.seq, o.ctid
  loop
    perform outbox_internal.record_shown(destination, partition, seq);
    return next;
  end loop;
end
$$;
comment on function outbox_internal.make_ready(tid[]) is
  'Moves these rows of outbox_waiting to outbox; returns where they are now.';

create function outbox_internal.due(
  worker text, partitions smallint[], epochs bigint[], batch integer, of_destination text default null,
  out destination text, out partition smallint, out seq bigint
) returns setof record language plpgsql volatile
security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  held smallint[];
begin
  if partitions is not null then
    -- Locked until COMMIT: otherwise the next owner could have read the lane before the rows are in it.
    held := array(
      select p.partition from unnest(partitions, epochs) as l (partition, epoch)
      join @extschema@.outbox_partitions p on p.partition = l.partition and p.lease_epoch = l.epoch
      where p.lease_owner = outbox_internal.check_worker(due.worker) and p.partition in (
        select w.partition from @extschema@.outbox_waiting w
        where w.due_at <= clock_timestamp() and w.partition = any (partitions)
          and (of_destination is null or w.destination = of_destination)
        order by w.due_at limit batch)
      order by p.partition for key share of p);
    if held = '{}' then
      return;
    end if;
  end if;
  return query
  select r.destination, r.partition, r.seq from outbox_internal.make_ready(array(
    select w.ctid from @extschema@.outbox_waiting w
    where w.due_at <= clock_timestamp() and (of_destination is null or w.destination = of_destination)
      and (held is null or w.partition = any (held))
    order by w.due_at limit batch for update of w skip locked)) r;
end
$$;
comment on function outbox_internal.due(text, smallint[], bigint[], integer, text) is
  'Worker protocol: brings back due messages of these leases or (NULL) of all partitions, of a destination or (NULL)'
  ' of all; returns where they are now.';

-- Called each second: PL/pgSQL keeps the plan, an SQL function would plan again at each call. The same holds for
-- destinations.
create function outbox_internal.next_due_ms()
returns bigint language plpgsql volatile
security definer set search_path = pg_catalog, pg_temp as $$
declare
  next constant timestamptz := (select min(w.due_at) from @extschema@.outbox_waiting w where w.due_at is not null);
begin
  return case when next is not null then greatest(0, ceil(extract(epoch from next - clock_timestamp()) * 1000)) end;
end
$$;
comment on function outbox_internal.next_due_ms() is
  'Worker protocol: the time in ms until the next waiting message is due; NULL = none waits for a time.';

create function outbox_internal.blocked_keys(
  of_destination text, partitions smallint[], out partition smallint, out key text, out blocker bigint,
  out followers boolean
) returns setof record language plpgsql stable
security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  return query
  select p.n, f.key, min(f.blocker), bool_or(f.followers)
  from unnest(partitions) p (n) cross join lateral (
    (with recursive behind as ( -- one lookup in the index for each key, whatever waits in it
       (select w.key from @extschema@.outbox_waiting w
        where w.state = 'g' and w.destination = of_destination and w.partition = p.n
        order by w.destination, w.partition, w.key collate "C" limit 1)
       union all
       select n.* from behind b cross join lateral (
         select w.key from @extschema@.outbox_waiting w
         where w.state = 'g' and w.destination = of_destination and w.partition = p.n
           and w.key collate "C" > b.key
         order by w.destination, w.partition, w.key collate "C" limit 1) n
     ) select b.key, null::bigint as blocker, true as followers from behind b)
    union all
    (select w.key, w.seq, false from @extschema@.outbox_waiting w
     where w.state = 'b' and w.destination = of_destination and w.partition = p.n and w.key is not null)
    union all
    (select null, w.seq, false from @extschema@.outbox_waiting w -- of those without a key, the first
     where w.state = 'b' and w.destination = of_destination and w.partition = p.n and w.key is null
     order by w.seq limit 1)
    union all
    (select d.key, d.seq, false from @extschema@.outbox_dead d
     where d.blocks and d.destination = of_destination and d.partition = p.n)) f
  group by 1, 2;
end
$$;
comment on function outbox_internal.blocked_keys(text, smallint[]) is
  'Worker protocol: keys of a destination whose messages wait behind one that failed (blocker) or come back from waiting'
  ' behind one. Key NULL: messages without a key, which block others only in a partition with one order.';

create function outbox_internal.destinations_with_messages()
returns setof text language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
  return query
  with recursive ready as ( -- one lookup in the index for each destination
    (select o.destination from @extschema@.outbox o order by o.destination limit 1)
    union all
    select n.* from ready r cross join lateral (
      select o.destination from @extschema@.outbox o where o.destination > r.destination
      order by o.destination limit 1) n
  ), behind as (
    (select w.destination from @extschema@.outbox_waiting w where w.state = 'g' order by w.destination limit 1)
    union all
    select n.* from behind b cross join lateral (
      select w.destination from @extschema@.outbox_waiting w where w.state = 'g' and w.destination > b.destination
      order by w.destination limit 1) n
  ), failed as (
    (select w.destination from @extschema@.outbox_waiting w where w.state = 'b' order by w.destination limit 1)
    union all
    select n.* from failed f cross join lateral (
      select w.destination from @extschema@.outbox_waiting w where w.state = 'b' and w.destination > f.destination
      order by w.destination limit 1) n
  ), dead as (
    (select d.destination from @extschema@.outbox_dead d where d.blocks order by d.destination limit 1)
    union all
    select n.* from dead x cross join lateral (
      select d.destination from @extschema@.outbox_dead d where d.blocks and d.destination > x.destination
      order by d.destination limit 1) n
  )
  select * from ready union select * from behind union select * from failed union select * from dead;
end
$$;
comment on function outbox_internal.destinations_with_messages() is
  'Worker protocol: the destinations with messages that may be delivered, back off, wait behind another or block others.';

create function outbox_internal.lanes_with_messages(destinations text[], partitions smallint[], seqs bigint[])
returns setof bigint language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
  return query
  select u.n - 1 from unnest(destinations, partitions, seqs) with ordinality u (destination, partition, seq, n)
  cross join lateral (
    select from @extschema@.outbox o
    where o.destination = u.destination collate "C" and o.partition = u.partition and o.seq >= u.seq
    order by o.destination, o.partition, o.seq limit 1) found;
end
$$;
comment on function outbox_internal.lanes_with_messages(text[], smallint[], bigint[]) is
  'Worker protocol: of these lanes, those that have messages from their seq on, by their place in the arrays, from zero.';

create function outbox_internal.settle(
  worker text, tids tid[], seqs bigint[], destinations text[], partitions smallint[], tokens bigint[],
  actions "char"[], delays_ms bigint[], reasons text[], codes text[]
) returns integer language plpgsql volatile
set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  leased constant boolean := tokens[1] > 0;
  -- The fence: what this worker holds now, by lease and epoch. It is needed for every change of a row. The row must
  -- carry its token or none (it was in flight on the fast path before any claim), so a worker that lost its lease
  -- changes nothing. The leases are locked until COMMIT: the next owner then sees all that was settled under them.
  held constant bigint[] := array(
    select p.partition::bigint << 48 | p.lease_epoch
    from @extschema@.outbox_partitions p
    where p.lease_owner = settle.worker and leased and p.partition = any (partitions)
    order by p.partition for key share);
  failed @extschema@.outbox_attempts_log[];
  changed integer;
begin
  with ended as materialized (
    select * from unnest(tids, seqs, destinations, partitions, tokens, actions, delays_ms, reasons, codes)
      as u (row_tid, seq, destination, partition, token, action, delay_ms, reason, code)
    where not leased or (u.partition::bigint << 48 | u.token) = any (held)
  ), gone as (
    delete from @extschema@.outbox o using ended u
    where o.ctid = u.row_tid and o.seq = u.seq and o.destination = u.destination and o.partition = u.partition
      and (o.claim_token = u.token or o.claim_token is null and leased) and u.action <> 'f'
    returning o.seq, o.enqueued_at, o.attempts, o.partition, o.crashes, o.replayed, o.destination, o.key, o.last_error,
      o.expires_at, o.error_code, case when u.action = 'd' and u.delay_ms < 0 then 'u'::"char" else u.action end as action,
      u.delay_ms, u.reason, u.code
  ), published as (
    -- u = no queue took it, and its destination discards it then
    insert into @extschema@.outbox_history
      (seq, enqueued_at, published_at, attempts, partition, replayed, destination, key, last_error, error_code, discarded)
    select g.seq, g.enqueued_at, clock_timestamp(), g.attempts + 1, g.partition, g.replayed, g.destination, g.key,
           case when g.action = 'u' then g.reason else g.last_error end,
           case when g.action = 'u' then g.code else g.error_code end, g.action = 'u'
    from gone g where g.action in ('p', 'u')
  ), dead as (
    -- x = expired, no attempt used
    insert into @extschema@.outbox_dead
      (seq, enqueued_at, expires_at, attempts, partition, replayed, destination, key, reason, error_code, blocks)
    select g.seq, g.enqueued_at, g.expires_at, g.attempts + case when g.action = 'x' then 0 else 1 end, g.partition,
           g.replayed, g.destination, g.key, g.reason, g.code,
           g.action = 'B' or g.action = 'D' and g.key is not null
    from gone g where g.action in ('d', 'D', 'B', 'x')
    on conflict (destination, seq) do update
    set died_at = excluded.died_at, expires_at = excluded.expires_at, attempts = excluded.attempts,
        replayed = excluded.replayed, reason = excluded.reason, error_code = excluded.error_code,
        blocks = excluded.blocks
  ), waiting as (
    -- r = try again after the delay, one attempt used, or none if the delay is negative; w = behind an earlier one of
    -- its key, none used
    insert into @extschema@.outbox_waiting
      (seq, enqueued_at, due_at, attempts, partition, crashes, replayed, state, destination, key, last_error,
       error_code, expires_at)
    select g.seq, g.enqueued_at,
           case when g.action = 'r' then clock_timestamp() + abs(g.delay_ms) * interval '1 millisecond' end,
           g.attempts + case when g.action = 'r' and g.delay_ms >= 0 then 1 else 0 end, g.partition,
           g.crashes, g.replayed, case when g.action = 'r' then 'b' else 'g' end, g.destination, g.key,
           case when g.action = 'r' then g.reason else g.last_error end,
           case when g.action = 'r' then g.code else g.error_code end, g.expires_at
    from gone g where g.action in ('r', 'w')
    on conflict do nothing
  ), freed as (
    -- f = as before, no attempt used
    update @extschema@.outbox o
    set claim_token = null, claim_until = null, last_error = coalesce(u.reason, o.last_error),
        error_code = case when u.reason is null or u.reason = o.last_error then o.error_code else u.code end
    from ended u
    where o.ctid = u.row_tid and o.seq = u.seq and o.destination = u.destination and o.partition = u.partition
      and (o.claim_token = u.token or o.claim_token is null and leased) and u.action = 'f'
    returning 1
  )
  select n.gone + (select count(*) from freed), n.failed into changed, failed
  from (
    select count(*) as gone,
           array_agg(row(g.seq, g.destination, clock_timestamp(), g.attempts + 1,
                         case when g.action = 'x' then 'expired' when g.action <> 'r' then 'dead'
                              when g.delay_ms < 0 then 'deferred' else 'retried' end, g.reason,
                         nullif(settle.worker, ''), g.code)::@extschema@.outbox_attempts_log)
             filter (where g.action in ('r', 'd', 'D', 'B', 'x')) as failed
    from gone g) n;
  if failed is not null then
    perform outbox_internal.record_failed(failed);
  end if;
  return changed;
end
$$;
comment on function outbox_internal.settle(
  text, tid[], bigint[], text[], smallint[], bigint[], "char"[], bigint[], text[], text[]) is
  'Worker protocol: ends claimed messages in one statement. Actions: p published, d dead, D dead and its key waits,'
  ' B dead and its partition waits, x expired; d with a negative delay: discarded. More actions: r retry after'
  ' delays_ms (negative: not counted as an attempt), w behind an earlier one of its key, f freed. reasons and codes: the text and'
  ' the kind of a failure. Returns how many rows changed. Fewer than given means that rows moved or the claim is lost.';

create function outbox_internal.locate(seqs bigint[], destinations text[], partitions smallint[])
returns tid[] language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select array_agg(coalesce((select o.ctid from @extschema@.outbox o
                             where o.destination = u.destination and o.partition = u.partition and o.seq = u.seq),
                            '(0,0)'::tid) order by u.i)
  from unnest($1, $2, $3) with ordinality as u (seq, destination, partition, i);
$$;
comment on function outbox_internal.locate(bigint[], text[], smallint[]) is
  'Worker protocol: where messages are now, after VACUUM FULL or an update by hand moved them.';
