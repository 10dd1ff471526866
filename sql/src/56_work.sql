-- For workers outside the server (outboxctl work): the worker protocol for a role without access to the tables,
-- outbox_relay. Such a worker shares partitions, leases and claims with those in the server, so these functions call
-- the same ones (30_worker.sql). The session identifies the worker, not an argument, so a worker cannot settle what
-- another has claimed. What it learns from shared memory keeps the order of keys. Before a claim, this is the seq from
-- which its lanes must be read again. After the claim, it is the open transactions and the commits since
-- (crates/core, engine). Lock order: as in 30_worker.sql.

create function outbox_internal.work_join(label text)
returns text language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_join_wrapper';
comment on function outbox_internal.work_join(text) is
  'This session takes an entry among the workers; returns its name.';

create function outbox_internal.work_quit()
returns void language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_quit_wrapper';
comment on function outbox_internal.work_quit() is
  'This session gives its entry among the workers back.';

create function outbox_internal.work_me()
returns text language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_me_wrapper';
comment on function outbox_internal.work_me() is
  'The worker that this session is; an error if it is none.';

create function outbox_internal.work_token()
returns bigint language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_token_wrapper';
comment on function outbox_internal.work_token() is
  'With leasing off, the token of the claims of the worker that this session is.';

create function outbox_internal.work_own(partitions smallint[], ttl_s integer)
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_own_wrapper';
comment on function outbox_internal.work_own(smallint[], integer) is
  'From now on the worker that this session is reads these partitions, and no other worker, for ttl_s seconds.';

create function outbox_internal.work_adopt(prepared bigint[])
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_adopt_wrapper';
comment on function outbox_internal.work_adopt(bigint[]) is
  'Adds prepared transactions that are older than the shared memory to the open ones: (xid, since in microseconds) one'
  ' after the other. Once for each database.';

create function outbox_internal.work_count(destination text, ended bigint[], took_us bigint[])
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_count_wrapper';
comment on function outbox_internal.work_count(text, bigint[], bigint[]) is
  'Records what a settle ended in the statistics of a destination: [published, retried, dead, expired, released], and'
  ' the delivery times of the published ones.';

create function outbox_internal.work_in_flight(destination text, in_flight integer)
returns void language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_in_flight_wrapper';
comment on function outbox_internal.work_in_flight(text, integer) is
  'How many messages of a destination the worker that this session is has in flight.';

create function outbox_internal.is_on_disk(wal_position bigint)
returns boolean language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_is_on_disk_wrapper';
comment on function outbox_internal.is_on_disk(bigint) is
  'Waits until WAL is on disk up to this position; true.';

-- ---- what a worker outside calls: shared memory ---------------------------------------------------------------------

create function outbox_internal.work_rewinds(partitions smallint[])
returns bigint[] language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_rewinds_wrapper';
comment on function outbox_internal.work_rewinds(smallint[]) is
  'Worker outside: the seq from which each partition must be read again since the last call, for the default'
  ' destination and for all others; -1 = no change. Before a claim.';

create function outbox_internal.work_shared_state(partitions smallint[])
returns bigint[] language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_shared_state_wrapper';
comment on function outbox_internal.work_shared_state(smallint[]) is
  'Worker outside: the number of open transactions that have enqueued, after a claim. Of each: its lowest seq, the'
  ' number of words of its filter of keys, and these with their indexes. Then the result of work_rewinds().';

create function outbox_internal.work_wait(
  seen bigint[], timeout_ms integer, in_flight integer, leases_changed boolean default false
) returns bigint[] language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_wait_wrapper';
comment on function outbox_internal.work_wait(bigint[], integer, integer, boolean) is
  'Worker outside: waits until there may be work, at most timeout_ms. in_flight is the number of messages that it has'
  ' in flight; leases_changed: the other workers must read the leases. Returns four counters to pass next (commits,'
  ' workers, unblocked and scheduled messages), and whether to leave: 1 at once, 2 in order, for a statement in this'
  ' database.';

-- ---- what a worker outside calls: its life --------------------------------------------------------------------------

create function outbox_internal.work_begin(label text)
returns text language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  me constant text := outbox_internal.work_join(coalesce(label, ''));
begin
  if exists (select from @extschema@.outbox_workers w
             where w.worker_id = me and w.pid is distinct from pg_backend_pid()) then
    raise exception 'a worker has the name "%"', me using errcode = 'object_in_use', hint = 'Start it with another --name.';
  end if;
  perform outbox_internal.work_adopt(coalesce((
    select array_agg(n order by x.transaction::text::bigint, i) from pg_prepared_xacts x
    cross join lateral (
      values (1, x.transaction::text::bigint), (2, (extract(epoch from x.prepared) * 1000000)::bigint)) v (i, n)
    where x.database = current_database()), '{}'));
  return me;
end
$$;
comment on function outbox_internal.work_begin(text) is
  'Worker outside: this session is a worker from now on. Returns its name: work-, the label, and a number of its own.';

create function outbox_internal.work_refresh(
  out leasing boolean, out not_adopted text, out source text, out defaults text, out now_us bigint
)
language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform outbox_internal.work_me();
  select s.leasing into leasing from @extschema@.outbox_settings s;
  not_adopted := outbox_internal.legible(outbox_internal.not_adopted());
  source := (select outbox_internal.legible(s.relation) from @extschema@.outbox_source s);
  defaults := (
    select outbox_internal.legible(
             string_agg(format('%s %s %s', s.setdatabase, s.setrole, s.setconfig), ';'
                        order by s.setdatabase, s.setrole))
    from pg_db_role_setting s
    where s.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
      and s.setrole in (0, (select r.oid from pg_roles r where r.rolname = session_user)));
  now_us := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
end
$$;
comment on function outbox_internal.work_refresh() is
  'Worker outside: whether partitions are leased (NULL while that changes), why nothing is to be delivered from'
  ' here, and the source of events that it cannot read. Then a text that changes with the settings that a new session'
  ' would have, and the time in microseconds since 1970.';

create function outbox_internal.work_destinations(
  out destination text, out wrapper text, out server oid, out options text[], out paused boolean
) returns setof record language sql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
  select outbox_internal.legible(d.destination), d.wrapper, d.server,
         (select array_agg(outbox_internal.legible(o) order by i) from unnest(d.options) with ordinality u (o, i)),
         d.paused
  from outbox_internal.destinations() d where outbox_internal.work_me() is not null;
$$;
comment on function outbox_internal.work_destinations() is
  'Worker outside: the destinations that there are, as destinations() has them.';

create function outbox_internal.work_ttl_s()
returns integer language sql stable set search_path = pg_catalog, pg_temp as $$
  select extract(epoch from current_setting('outbox.lease_ttl')::interval)::integer;
$$;
comment on function outbox_internal.work_ttl_s() is
  'Outbox.lease_ttl in seconds.';

create function outbox_internal.work_heartbeat()
returns setof text language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  perform set_config('synchronous_commit', 'off', true);
  if not (select s.leasing from @extschema@.outbox_settings s) then
    perform outbox_internal.work_own('{}', outbox_internal.work_ttl_s()); -- renews its claims
  end if;
  -- No longer than its leases: no other signal shows the end of such a worker, and both then end at once.
  return query select outbox_internal.legible(h) from outbox_internal.heartbeat(
    outbox_internal.work_me(), pg_backend_pid(), outbox_internal.work_ttl_s()) h;
end
$$;
comment on function outbox_internal.work_heartbeat() is
  'Worker outside: the heartbeat, for outbox.lease_ttl more. Returns the ids of all live workers.';

create function outbox_internal.work_leases(
  out partition smallint, out lease_owner text, out live boolean, out lease_epoch bigint
) returns setof record language sql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
  select l.partition, outbox_internal.legible(l.lease_owner), l.live, l.lease_epoch from outbox_internal.leases() l
  where outbox_internal.work_me() is not null;
$$;
comment on function outbox_internal.work_leases() is
  'Worker outside: every partition with its lease, to plan from.';

create function outbox_internal.work_lease(
  renew smallint[], renew_epochs bigint[], release smallint[], release_epochs bigint[], take smallint[],
  out partition smallint, out lease_epoch bigint, out ttl_s integer
) returns setof record language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  me constant text := outbox_internal.work_me();
  lasts_s constant integer := outbox_internal.work_ttl_s();
  held smallint[];
begin
  perform set_config('synchronous_commit', 'off', true);
  perform outbox_internal.lease_release(me, release, release_epochs);
  held := array(select r from outbox_internal.lease_renew(me, renew, renew_epochs, lasts_s) r);
  held := held || array(select t.partition from outbox_internal.lease_take(me, take, lasts_s) t);
  perform outbox_internal.work_own(held, lasts_s);
  return query select p.partition, p.lease_epoch, lasts_s from @extschema@.outbox_partitions p
               where p.lease_owner = me and p.partition = any (held) order by 1;
end
$$;
comment on function outbox_internal.work_lease(smallint[], bigint[], smallint[], bigint[], smallint[]) is
  'Worker outside: renews leases, gives others back and takes free ones. Returns those that it holds now, and how long'
  ' they hold from the call on.';

create function outbox_internal.work_purge()
returns bigint language sql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
  select outbox_internal.purge_workers() where outbox_internal.work_me() is not null;
$$;
comment on function outbox_internal.work_purge() is
  'Worker outside: removes workers that have ended.';

create function outbox_internal.work_standbys()
returns text language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_standbys_wrapper';
comment on function outbox_internal.work_standbys() is
  'Worker outside: the position of WAL that is on disk, behind the commits of all messages that the worker has claimed.'
  ' Then a line for each connected standby: the position up to which it has flushed WAL, and its name.';

create function outbox_internal.work_report(destination text, state text, reason text, detail text)
returns void language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
begin
  if state is not null and not outbox_internal.destination_exists(destination) then
    return; -- dropped meanwhile
  end if;
  perform set_config('synchronous_commit', 'off', true);
  perform outbox_internal.report(
    outbox_internal.work_me(), destination, state, left(reason, 100), left(detail, 1000), null::timestamptz);
end
$$;
comment on function outbox_internal.work_report(text, text, text, text) is
  'Worker outside: the state of a destination (state NULL = it serves it no longer); outbox_health shows it.';

create function outbox_internal.work_report_in_flight(destination text, in_flight integer)
returns void language sql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
  -- There is room for the statistics of a limited number of destinations, and none for those that do not exist.
  select outbox_internal.work_in_flight($1, $2) where outbox_internal.destination_exists($1);
$$;
comment on function outbox_internal.work_report_in_flight(text, integer) is
  'Worker outside: the number of messages of a destination that it has in flight.';

create function outbox_internal.work_leave()
returns void language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform outbox_internal.leave(outbox_internal.work_me());
end
$$;
comment on function outbox_internal.work_leave() is
  'Worker outside: gives its leases back. work_quit() follows, when this is committed.';

-- ---- what a worker outside calls: messages --------------------------------------------------------------------------

create function outbox_internal.work_claim(
  destination text, partitions smallint[], epochs bigint[], limits integer[], cursors bigint[], read_limit bigint
) returns setof outbox_internal.claimed language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  -- A claim that a crash undoes is made again. But a message that a crash could undo must not be sent: the claim waits
  -- for the disk.
  perform set_config('synchronous_commit', 'off', true);
  return query select r.* from outbox_internal.claim(
    outbox_internal.work_me(), destination, partitions, epochs,
    array(select least(greatest(n, 0), 10000) from unnest(limits) with ordinality l (n, i) order by i), cursors,
    33554432::bigint, coalesce(read_limit, 9223372036854775807)) c cross join lateral outbox_internal.readable(c) r
  where outbox_internal.is_on_disk(coalesce(c.wal_position, 0));
end
$$;
comment on function outbox_internal.work_claim(text, smallint[], bigint[], integer[], bigint[], bigint) is
  'Worker outside: claims messages of partitions that it leases, as claim() does, and waits until all of them are on'
  ' disk.';

create function outbox_internal.work_claim_waiting(
  destination text, partition smallint, key text, epoch bigint, read_limit bigint, max_rows integer
) returns setof outbox_internal.claimed language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  others outbox_internal.claimed;
begin
  perform set_config('synchronous_commit', 'off', true);
  return query select r.* from outbox_internal.claim_waiting(
    outbox_internal.work_me(), destination, partition, key, epoch, read_limit, least(greatest(max_rows, 0), 10000),
    33554432::bigint) c
    cross join lateral outbox_internal.readable(c) r
  where outbox_internal.is_on_disk(coalesce(c.wal_position, 0));
  if outbox_internal.waits(destination, partition, key) then
    others.remark := 'more';
    return next others;
  end if;
end
$$;
comment on function outbox_internal.work_claim_waiting(text, smallint, text, bigint, bigint, integer) is
  'Worker outside: claims the first messages of a key that wait behind another, up to the seq read_limit. The remark'
  ' more: there are further ones.';

create function outbox_internal.work_claim_unleased(destination text, max_rows integer)
returns setof outbox_internal.claimed language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if (select s.leasing from @extschema@.outbox_settings s) then
    raise exception 'partitions are leased' using errcode = 'object_not_in_prerequisite_state', hint = 'Begin again.';
  end if;
  perform set_config('synchronous_commit', 'off', true);
  return query select r.* from outbox_internal.claim_unleased(
    destination, outbox_internal.work_token(),
    extract(epoch from current_setting('outbox.claim_ttl')::interval)::integer,
    least(greatest(max_rows, 0), 10000), 33554432::bigint) c cross join lateral outbox_internal.readable(c) r
  where outbox_internal.is_on_disk(coalesce(c.wal_position, 0));
end
$$;
comment on function outbox_internal.work_claim_unleased(text, integer) is
  'Worker outside, with leasing off: claims messages of any partition for outbox.claim_ttl.';

create function outbox_internal.work_due(
  partitions smallint[], epochs bigint[], out destination text, out partition smallint, out seq bigint
) returns setof record language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if partitions is null and (select s.leasing from @extschema@.outbox_settings s) then
    raise exception 'partitions are leased' using errcode = 'object_not_in_prerequisite_state', hint = 'Begin again.';
  end if;
  perform set_config('synchronous_commit', 'off', true);
  return query select outbox_internal.legible(d.destination), d.partition, d.seq
               from outbox_internal.due(outbox_internal.work_me(), partitions, epochs, 1000, null::text) d;
end
$$;
comment on function outbox_internal.work_due(smallint[], bigint[]) is
  'Worker outside: brings back due messages of leases that it holds; with leasing off of all partitions. Returns where'
  ' they are now.';

create function outbox_internal.work_next_due_ms()
returns bigint language sql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
  select outbox_internal.next_due_ms() where outbox_internal.work_me() is not null;
$$;
comment on function outbox_internal.work_next_due_ms() is
  'Worker outside: the time in ms until the next waiting message is due; NULL = none waits for a time.';

create function outbox_internal.work_blocked_keys(
  partitions smallint[], out destination text, out partition smallint, out key text, out blocker bigint,
  out followers boolean
) returns setof record language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  return query
  select outbox_internal.legible(g.destination), g.partition, outbox_internal.legible(g.key), g.blocker, g.followers
  from outbox_internal.blocked_keys(array(
    select p.partition from @extschema@.outbox_partitions p
    where p.partition = any (partitions) and p.lease_owner = outbox_internal.work_me())) g;
end
$$;
comment on function outbox_internal.work_blocked_keys(smallint[]) is
  'Worker outside: keys of its leased partitions whose messages wait behind one that failed (blocker) or come back'
  ' from waiting behind one.';

create function outbox_internal.work_settle(
  destination text, tids text[], seqs bigint[], partitions smallint[], tokens bigint[], actions text[],
  delays_ms bigint[], reasons text[], took_us bigint[]
) returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  me constant text := outbox_internal.work_me();
  n constant integer := coalesce(cardinality(seqs), 0);
  destinations constant text[] := array_fill(destination, array[n]);
  short_reasons constant text[] := array(select left(r, 500) from unnest(reasons) with ordinality u (r, i) order by i);
  counts bigint[]; -- published, retried, dead, expired, released
  took bigint[];
  gone bigint;
  changed integer;
begin
  if n = 0 or n > 10000 or destination is null or (n = all (array[cardinality(tids), cardinality(partitions),
       cardinality(tokens), cardinality(actions), cardinality(delays_ms), cardinality(reasons)])) is not true then
    raise exception 'the arrays are not all of one length, from 1 to 10000' using errcode = 'array_subscript_error',
      hint = 'Give a destination, and an element for each message.';
  end if;
  if exists (
    select from unnest(actions, delays_ms, reasons) u (action, delay_ms, reason)
    where coalesce(u.action not in ('p', 'd', 'D', 'B', 'x', 'r', 'w', 'f'), true)
      or u.action = 'r' and coalesce(u.delay_ms not between -1000000000000 and 1000000000000, true)
      or u.action in ('d', 'D', 'B', 'x', 'r') and u.reason is null) then
    raise exception 'an action is unknown, or lacks its delay or reason' using errcode = 'invalid_parameter_value',
      hint = 'Actions: p, f, w; d, D, B, x with a reason; r with a delay in ms and a reason.';
  end if;
  -- The first token shows settle() whether leases apply. (outbox_settings says it too, but is locked while
  -- outbox_configure() waits for just this.)
  if (0 < all (tokens) or outbox_internal.work_token() = all (tokens)) is not true then
    raise exception 'a token is not one of this worker' using errcode = 'insufficient_privilege',
      hint = 'A worker settles only what it has claimed.';
  end if;
  -- A settle that is lost would be sent again. It waits for no standby: a missing one would block the worker.
  perform set_config('synchronous_commit', 'local', true);
  changed := outbox_internal.settle(
    me, tids::tid[], seqs, destinations, partitions, tokens, actions::"char"[], delays_ms,
    short_reasons);
  if changed < n then
    -- Rows that moved (VACUUM FULL) are found again by key. Rows with another token no longer belong to this worker.
    changed := changed + outbox_internal.settle(
      me, outbox_internal.locate(seqs, destinations, partitions), seqs, destinations, partitions, tokens,
      actions::"char"[], delays_ms, short_reasons);
  end if;
  if changed > 0 then
    select array[count(*) filter (where a = 'p'), count(*) filter (where a = 'r' and ms >= 0),
                 count(*) filter (where a in ('d', 'D', 'B')),
                 count(*) filter (where a = 'x'), count(*) filter (where a = 'f' or a = 'r' and ms < 0)]
      into counts from (select a, ms from unnest(actions, delays_ms) u (a, ms) limit changed) c;
    gone := counts[1] + counts[3] + counts[4];
    perform outbox_internal.record_ended(counts[1], counts[2] + counts[3], gone);
    perform outbox_internal.record_pending(destination, -gone);
    took := array(select t from unnest(took_us) t where t >= 0 limit changed);
    perform outbox_internal.record_took(took);
    perform outbox_internal.work_count(destination, counts, took);
  end if;
  return changed;
end
$$;
comment on function outbox_internal.work_settle(
  text, text[], bigint[], smallint[], bigint[], text[], bigint[], text[], bigint[]) is
  'Worker outside: ends messages of a destination that it has claimed, with the actions of settle(), on disk when it'
  ' is committed. took_us: how long the published ones took. Returns how many changed; the others are no longer its'
  ' own.';
