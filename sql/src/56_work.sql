-- For workers outside the server (outboxctl work): what a session needs that does not share the memory of the workers.
-- Such a worker shares partitions, leases and claims with those in the server, so it calls the same functions
-- (30_worker.sql), which check that the session is the worker that it says. A worker cannot settle what another has
-- claimed. What it learns from shared memory keeps the order of keys. Before a claim, this is the seq from which its
-- lanes must be read again. After the claim, it is the open transactions and the commits since (crates/core, engine).
-- Lock order: as in 30_worker.sql.

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

create function outbox_internal.work_count(destination text, ended bigint[], delivery_us bigint[])
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
  'Worker outside: what must be read again since the last call: partition, lane (a group of destinations) and the seq'
  ' from which, three numbers each. Before the claims of a pass.';

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
  ' in flight; leases_changed: the other workers must read the leases. Returns three counters to pass next (commits,'
  ' workers and scheduled messages), and whether to leave: 1 immediately, 2 in order, for a statement in this'
  ' database.';

-- ---- what a worker outside calls: its life --------------------------------------------------------------------------

create function outbox_internal.work_begin(label text, out worker text, out token bigint)
language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
begin
  worker := outbox_internal.work_join(coalesce(label, ''));
  token := outbox_internal.work_token();
  if exists (select from @extschema@.outbox_workers w
             where w.worker_id = worker and w.pid is distinct from pg_backend_pid()) then
    raise exception 'a worker has the name "%"', worker using errcode = 'object_in_use',
      hint = 'Start it with another --name.';
  end if;
  perform outbox_internal.work_adopt(coalesce((
    select array_agg(n order by x.transaction::text::bigint, i) from pg_prepared_xacts x
    cross join lateral (
      values (1, x.transaction::text::bigint), (2, (extract(epoch from x.prepared) * 1000000)::bigint)) v (i, n)
    where x.database = current_database()), '{}'));
end
$$;
comment on function outbox_internal.work_begin(text) is
  'Worker outside: this session is a worker from now on. Returns its name (work-, the label, and a number of its own) and'
  ' the token of its claims when leasing is off.';

create function outbox_internal.work_refresh(
  out leasing boolean, out not_adopted text, out has_source boolean, out defaults text, out now_us bigint
)
language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
begin
  select s.leasing into leasing from @extschema@.outbox_settings s;
  not_adopted := outbox_internal.legible(outbox_internal.not_adopted());
  has_source := exists (select from @extschema@.outbox_source);
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
  ' here, and whether events are in a source. Then a text that changes with the settings that a new session'
  ' would have, and the time in microseconds since 1970.';

create function outbox_internal.work_lease(
  renew smallint[], renew_epochs bigint[], release smallint[], release_epochs bigint[], take smallint[],
  out partition smallint, out lease_epoch bigint, out ttl_s integer
) returns setof record language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  me constant text := outbox_internal.work_me();
  lasts_s constant integer := extract(epoch from current_setting('outbox.lease_ttl')::interval);
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

create function outbox_internal.work_standbys()
returns text language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_work_standbys_wrapper';
comment on function outbox_internal.work_standbys() is
  'Worker outside: the position of WAL that is on disk, behind the commits of all messages that the worker has claimed.'
  ' Then a line for each connected standby: the position up to which it has flushed WAL, and its name.';

create function outbox_internal.work_report_in_flight(destination text, in_flight integer)
returns void language sql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
  -- There is room for the statistics of a limited number of destinations, and none for those that do not exist.
  select outbox_internal.work_in_flight($1, $2) where outbox_internal.destination_exists($1);
$$;
comment on function outbox_internal.work_report_in_flight(text, integer) is
  'Worker outside: the number of messages of a destination that it has in flight.';

-- ---- what a worker outside calls: messages --------------------------------------------------------------------------

create function outbox_internal.work_claim_unleased(
  destination text, token bigint, claim_ttl_s integer, batch integer, bytes_max bigint
) returns setof outbox_internal.claimed language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
begin
  if (select s.leasing from @extschema@.outbox_settings s) then
    raise exception 'partitions are leased' using errcode = 'object_not_in_prerequisite_state', hint = 'Begin again.';
  end if;
  if token is distinct from outbox_internal.work_token() then
    raise exception 'the token is not that of this worker' using errcode = 'insufficient_privilege',
      hint = 'Claim with the token that work_begin() returned.';
  end if;
  return query select * from outbox_internal.claim_unleased(destination, token, claim_ttl_s, batch, bytes_max);
end
$$;
comment on function outbox_internal.work_claim_unleased(text, bigint, integer, integer, bigint) is
  'Worker outside, with leasing off: claims as claim_unleased() does, only with its own token.';

create function outbox_internal.work_events(
  worker text, tids tid[], bytes_max bigint, out seq bigint, out fault text, out error text, out id text, out type text,
  out aggregate_type text, out aggregate_id text, out operation text, out payload text, out previous_payload text,
  out metadata text, out headers text, out actor text, out correlation_id text, out created_at text,
  out created_at_s bigint
) returns setof record language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  me constant text := outbox_internal.check_worker(worker);
  token constant bigint := outbox_internal.work_token();
  texts constant text[] := outbox_internal.source_events(array(
    select o.seq from @extschema@.outbox o
    where o.ctid = any (tids)
      and (o.claim_token = token or exists (
        select from @extschema@.outbox_partitions p
        where p.partition = o.partition and p.lease_owner = me and p.lease_epoch = o.claim_token))
    order by o.seq), bytes_max, true);
begin
  for i in 1 .. cardinality(texts) by 15 loop
    seq := texts[i];
    fault := texts[i + 1];
    error := texts[i + 2];
    id := texts[i + 3];
    type := texts[i + 4];
    aggregate_type := texts[i + 5];
    aggregate_id := texts[i + 6];
    operation := texts[i + 7];
    payload := texts[i + 8];
    previous_payload := texts[i + 9];
    metadata := texts[i + 10];
    headers := texts[i + 11];
    actor := texts[i + 12];
    correlation_id := texts[i + 13];
    created_at := texts[i + 14];
    created_at_s := floor(extract(epoch from created_at::timestamptz));
    return next;
  end loop;
end
$$;
comment on function outbox_internal.work_events(text, tid[], bigint) is
  'Worker outside: the events of messages that it has claimed, from the source, read as its owner. fault and error: why'
  ' one could not be read (failed), or that there is none (missing). Stops after bytes_max of bodies.';

create function outbox_internal.work_settle(
  worker text, tids tid[], seqs bigint[], destinations text[], partitions smallint[], tokens bigint[],
  actions "char"[], delays_ms bigint[], reasons text[], codes text[], delivery_us bigint[]
) returns integer language plpgsql volatile parallel unsafe security definer
set search_path = pg_catalog, pg_temp as $$
declare
  n constant integer := coalesce(cardinality(seqs), 0);
  counts bigint[]; -- published, retried, dead, expired, released
  times bigint[];
  gone bigint;
  discarded bigint;
  changed integer;
begin
  if n = 0 or n > 10000 or (n = all (array[cardinality(tids), cardinality(destinations), cardinality(partitions),
       cardinality(tokens), cardinality(actions), cardinality(delays_ms), cardinality(reasons),
       cardinality(codes)])) is not true then
    raise exception 'the arrays are not all of one length, from 1 to 10000' using errcode = 'array_subscript_error',
      hint = 'Give an element for each message.';
  end if;
  if (destinations[1] = all (destinations)) is not true or exists (
    select from unnest(actions, delays_ms, reasons, codes) u (action, delay_ms, reason, code)
    where coalesce(u.action not in ('p', 'd', 'D', 'B', 'x', 'r', 'w', 'f'), true)
      or u.action = 'r' and coalesce(u.delay_ms not between -1000000000000 and 1000000000000, true)
      or u.action in ('d', 'D', 'B', 'x', 'r') and (u.reason is null or u.code is null)
      or u.code not in ('nacked', 'unroutable', 'refused', 'unsendable', 'expired', 'failed')) then
    raise exception 'the destinations differ, or an action or a code is unknown, or an action lacks its delay, reason or code'
      using errcode = 'invalid_parameter_value',
      hint = 'Settle messages of one destination. Actions: p, f, w; d, D, B, x with a reason and a code; r with these'
             ' and a delay in ms.';
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
    outbox_internal.check_worker(worker), tids, seqs, destinations, partitions, tokens, actions, delays_ms,
    array(select left(r, 500) from unnest(reasons) with ordinality u (r, i) order by i), codes);
  if changed > 0 then
    select array[count(*) filter (where a = 'p'), count(*) filter (where a = 'r' and ms >= 0),
                 count(*) filter (where a in ('D', 'B') or a = 'd' and coalesce(ms, 0) >= 0),
                 count(*) filter (where a = 'x'), count(*) filter (where a = 'f' or a = 'r' and ms < 0)],
           count(*) filter (where a = 'd' and ms < 0)
      into counts, discarded from (select a, ms from unnest(actions, delays_ms) u (a, ms) limit changed) c;
    gone := counts[1] + counts[3] + counts[4];
    perform outbox_internal.record_ended(counts[1], counts[2] + counts[3], gone);
    perform outbox_internal.record_pending(destinations[1], -gone - discarded);
    times := array(select t from unnest(delivery_us) t where t >= 0 limit changed);
    perform outbox_internal.record_delivery_times(times);
    perform outbox_internal.work_count(destinations[1], counts, times);
  end if;
  return changed;
end
$$;
comment on function outbox_internal.work_settle(
  text, tid[], bigint[], text[], smallint[], bigint[], "char"[], bigint[], text[], text[], bigint[]) is
  'Worker outside: ends messages of a destination as settle() does, on disk when it is committed, and records them in the'
  ' statistics. delivery_us: the delivery times of the published ones.';
