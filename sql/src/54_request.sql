-- One pass of the workers immediately, and delivery on request. A session opens no socket: it posts a request to the
-- workers in shared memory and waits for their answers. It only reads; its request ends with its transaction at the
-- latest.

create function outbox_internal.begin_request(read_limit bigint, goes_on boolean)
returns bigint language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_begin_request_wrapper';
comment on function outbox_internal.begin_request(bigint, boolean) is
  'Requests delivery up to a seq from the workers; 0 = one pass. goes_on: after another request, and leaves alone what'
  ' has failed since. Returns the id of the request; 0 = there is no worker, NULL = the request of another session'
  ' is not finished.';

create type outbox_internal.answer as (
  number bigint, state bigint, claimed bigint, published bigint, failed bigint, duration_us bigint, backoff_ms bigint,
  renewed_heartbeat bigint, purged_stale bigint, active_workers bigint, desired_count bigint, owned_count bigint,
  leased_count bigint, released_count bigint
);
comment on type outbox_internal.answer is
  'The answer of a worker to a request: its number, the state (0 not noticed, 1 running, 2 done), the results of its pass.';

create function outbox_internal.answers(request_id bigint, timeout_ms integer)
returns setof outbox_internal.answer language c volatile strict parallel unsafe as 'MODULE_PATHNAME', 'outbox_answers_wrapper';
comment on function outbox_internal.answers(bigint, integer) is
  'Waits until the workers have answered the request, at most this long; returns a row for each worker.';

create function outbox_internal.end_request()
returns void language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_end_request_wrapper';
comment on function outbox_internal.end_request() is
  'Ends the request of this session to the workers.';

create function outbox_internal.check_request(caller text, timeout interval, reads_ends boolean)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
  if timeout is null or extract(epoch from timeout) not between 0 and 3600 then
    raise exception 'timeout is %', coalesce(timeout::text, 'NULL')
      using errcode = 'invalid_parameter_value', hint = 'Give a time up to 1 hour; when it is over, call again.';
  end if;
  if reads_ends and current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception '%() cannot see the end of a message in a % transaction', caller,
      upper(current_setting('transaction_isolation'))
      using errcode = 'object_not_in_prerequisite_state', hint = 'Call it after COMMIT, at READ COMMITTED.';
  end if;
  if outbox_internal.has_enqueued() then
    raise exception 'this transaction has enqueued messages, which no worker sees before it commits'
      using errcode = 'active_sql_transaction', hint = format('Commit first, then call %s().', caller);
  end if;
end
$$;
comment on function outbox_internal.check_request(text, interval, boolean) is
  'Refuses a call that would wait in vain. reads_ends: it waits until it sees that messages have ended.';

create function outbox_internal.request_workers(read_limit bigint, goes_on boolean, until timestamptz)
returns outbox_internal.answer[] language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  none_since timestamptz := clock_timestamp(); -- since when no worker runs; NULL = one runs
  request_id bigint;
  answers outbox_internal.answer[] := '{}';
  states bigint[] := '{}';
  problem text;
  remedy text;
begin
  loop
    if coalesce(request_id, 0) = 0 then
      request_id := outbox_internal.begin_request(read_limit, goes_on);
    end if;
    if request_id > 0 then
      answers := array(select a from outbox_internal.answers(
        request_id, ceil(greatest(1, least(1000, extract(epoch from until - clock_timestamp()) * 1000)))::integer) a);
      states := array(select a.state from unnest(answers) a);
      exit when 2 = all (states) and states <> '{}';
      none_since := case when states = '{}' then coalesce(none_since, clock_timestamp()) end;
    else
      perform pg_sleep(0.01);
    end if;
    exit when clock_timestamp() >= until;
    -- A worker that is new, or starts again, runs by then.
    exit when states = '{}' and request_id is not null and clock_timestamp() > none_since + interval '2 seconds';
  end loop;
  perform outbox_internal.end_request();

  if request_id is null then
    raise exception 'another session has a request to the workers of this database'
      using errcode = 'lock_not_available', hint = 'Call again, or with a longer timeout.';
  elsif states = '{}' then
    select h.problem, h.remedy into problem, remedy
    from outbox_internal.problems h where h."check" in ('preload', 'workers') order by h."check" limit 1;
    if problem is null and exists (
      select from @extschema@.outbox_workers w where w.heartbeat_until > clock_timestamp()
        and w.worker_id like 'work-%') then
      problem := 'Workers outside the server do not take part.';
      remedy := 'Set outbox.workers, or run outboxctl work --once.';
    end if;
    raise exception 'no worker runs in this database'
      using errcode = 'object_not_in_prerequisite_state', detail = coalesce(problem, 'The last one has just ended.'),
            hint = coalesce(remedy, 'Call again.');
  end if;
  return answers;
end
$$;
comment on function outbox_internal.request_workers(bigint, boolean, timestamptz) is
  'Requests delivery as begin_request() does, and waits for the answers of the workers, which it returns as answers()'
  ' does.';

create function @extschema@.outbox_run_pass(timeout interval default '30 s')
returns jsonb language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  answers outbox_internal.answer[];
  pass jsonb;
begin
  perform outbox_internal.check_request('outbox_run_pass'::text, timeout, false);
  answers := outbox_internal.request_workers(0::bigint, false, clock_timestamp() + timeout);
  select jsonb_build_object(
           'claimed', sum(a.claimed), 'published', sum(a.published), 'failed', sum(a.failed),
           'duration_ms', round(max(a.duration_us) / 1000.0, 2), 'backoff_ms', min(a.backoff_ms),
           'renewed_heartbeat', bool_and(a.renewed_heartbeat = 1), 'purged_stale', sum(a.purged_stale),
           'active_workers', max(a.active_workers), 'desired_count', sum(a.desired_count),
           'owned_count', sum(a.owned_count), 'leased_count', sum(a.leased_count), 'released_count', sum(a.released_count),
           'ts', to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
    into pass
  from unnest(answers) a where a.state > 0 having count(*) > 0;
  if pass is null then
    raise exception 'no worker has begun within %', timeout
      using errcode = 'object_not_in_prerequisite_state',
            detail = 'A worker reads a request between two steps: it may be waiting for a lock, or for the disk.',
            hint = 'Call again with a longer timeout; pg_stat_activity shows what the worker waits for.';
  end if;
  return pass;
end
$$;
comment on function @extschema@.outbox_run_pass(interval) is
  'One pass of every worker of this database, immediately: claim, publish, settle. Waits for its end and returns the'
  ' result of all workers together, in the 13 keys of a pass.';

-- ---- delivery by hand -----------------------------------------------------------------------------------------------

create function @extschema@.outbox_relay(
  max_rows integer default 100, timeout interval default '30 s', out messages bigint, out published bigint,
  out failed bigint, out dead bigint, out waiting bigint, out ok boolean
) language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  began constant timestamptz := clock_timestamp();
  chosen jsonb;
  outcomes text[];
  left_before bigint;
  idle_rounds integer := 0;
  enabled constant boolean := current_setting('outbox.enabled')::boolean;
  goes_on boolean := false; -- by hand, after the first request
  message record;
  lane text; -- who sends the message, and where to; NULL = nobody knows
  run text; -- the lane of the last message
  run_end bigint; -- its seq
begin
  perform outbox_internal.check_request('outbox_relay'::text, timeout, true);
  if max_rows is null or max_rows not between 1 and 10000 then
    raise exception 'max_rows is %', coalesce(max_rows::text, 'NULL')
      using errcode = 'invalid_parameter_value', hint = 'Give a number from 1 to 10000.';
  end if;
  if not enabled and not (select s.leasing from @extschema@.outbox_settings s) then
    raise exception 'outbox_relay() delivers nothing with outbox.enabled off and leasing off'
      using errcode = 'object_not_in_prerequisite_state', detail = 'Without leases a worker cannot stop at a seq.',
            hint = 'select outbox_configure(leasing => true), or switch outbox.enabled on.';
  end if;

  -- What could be delivered now: not scheduled, backing off, behind one of these or a dead letter, or paused.
  with blocked as materialized (
    select b.* from outbox_internal.blockers b
  ), lanes as materialized (
    select l.* from outbox_internal.blocked_lanes() l
  ), open as materialized (
    select d.destination from outbox_internal.destinations() d where not d.paused
  ), ready as (
    select x.*, l.partition, false as follows
    from outbox_internal.first_pending l join open d on d.destination = l.destination
    cross join lateral (
      select o.seq, o.destination, o.attempts from @extschema@.outbox o
      where o.destination = l.destination and o.partition = l.partition
        and not exists (select from blocked c where c.destination = o.destination and c.partition = o.partition
                        and c.key = o.key)
        and not exists (select from lanes c where c.destination = o.destination and c.partition = o.partition
                        and c.blocker < o.seq)
      order by o.destination, o.partition, o.seq limit max_rows) x
    union all
    select w.seq, w.destination, w.attempts, w.partition, false from @extschema@.outbox_waiting w
    join open d on d.destination = w.destination
    where w.due_at <= clock_timestamp()
    union all
    select x.*, g.partition, true
    from open d
    cross join lateral outbox_internal.blocked_keys(
      d.destination, (select s.partitions from @extschema@.outbox_settings s)) g
    cross join lateral (
      select w.seq, w.destination, w.attempts from @extschema@.outbox_waiting w
      where w.state = 'g' and w.destination = d.destination and w.partition = g.partition and w.key collate "C" = g.key
      order by w.seq limit max_rows) x
    where g.followers and not exists (
      select from blocked c where c.destination = d.destination and c.partition = g.partition and c.key = g.key)
  )
  select jsonb_agg(to_jsonb(n) order by n.seq), count(*) into chosen, messages
  -- The messages of an event are delivered together.
  from (select r.* from ready r order by r.seq fetch first max_rows rows with ties) n;
  -- By hand, in stored order: a run of messages that one worker sends to one destination is one request. A message that
  -- follows another of its key is a run: a worker fetches it after those that are ready. A lease may move to another
  -- worker at any time, so it is read for each message.
  for message in
    select c.* from jsonb_to_recordset(chosen) c (seq bigint, destination text, partition smallint, follows boolean)
    where not enabled order by c.seq
  loop
    lane := (select p.lease_owner || ' ' || message.destination from @extschema@.outbox_partitions p
             where p.partition = message.partition and p.lease_until > clock_timestamp() and not message.follows);
    if message.seq > run_end and (lane is distinct from run or run is null) then
      perform outbox_internal.request_workers(run_end, goes_on, began + timeout);
      goes_on := true;
      exit when clock_timestamp() >= began + timeout;
    elsif message.seq = run_end and lane is distinct from run then
      lane := null;
    end if;
    run := lane;
    run_end := message.seq;
  end loop;
  waiting := messages;
  while waiting > 0 and idle_rounds < 2 loop
    left_before := waiting;
    if not goes_on or clock_timestamp() < began + timeout then
      perform outbox_internal.request_workers((chosen->-1->>'seq')::bigint, goes_on, began + timeout);
      goes_on := not enabled;
    end if;
    outcomes := array(
      select case when f.outcome = 'waits' and (
                    exists (select from @extschema@.outbox_waiting w
                            where w.seq = c.seq and w.destination = c.destination and w.attempts > c.attempts)
                    or exists (select from @extschema@.outbox o
                               where o.ctid = (select outbox_internal.find_row(c.seq, c.destination, s.partitions))
                                 and o.attempts > c.attempts)) then 'failed'
                  else f.outcome end
      from jsonb_to_recordset(chosen) c (seq bigint, destination text, attempts integer)
      cross join @extschema@.outbox_settings s
      cross join lateral outbox_internal.outcome(
        c.seq, c.destination, tstzmultirange(tstzrange(began - interval '1 minute', null)), s.partitions)
        f (outcome));
    waiting := (select count(*) from unnest(outcomes) f where f in ('waits', 'unknown'));
    -- A message that waited behind another of its key, or reached another worker, is delivered in the next round.
    idle_rounds := case when waiting < left_before then 0 else idle_rounds + 1 end;
    exit when clock_timestamp() >= began + timeout;
  end loop;
  select count(*) filter (where f = 'published'), count(*) filter (where f = 'failed'),
         count(*) filter (where f in ('dead', 'discarded'))
    into published, failed, dead from unnest(outcomes) f;
  ok := published = messages;
end
$$;
comment on function @extschema@.outbox_relay(integer, interval) is
  'Makes the workers deliver the first max_rows messages that could be delivered, and waits until each has been tried.'
  ' It does so with outbox.enabled off too, and then in order of seq. ok: all of them are published.';
