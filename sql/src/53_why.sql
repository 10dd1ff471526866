-- Why a message is not delivered: reasons in words, each with a code and its remedy, for psql, outboxctl and the page.
-- The cost is bounded: no lane is read beyond its first rows, whatever waits.

create function outbox_internal.message_rows(
  of_seq bigint, out seq bigint, out destination text, out partition_key text, out partition smallint, out key text,
  out status text, out attempts integer, out crashes smallint, out available_at timestamptz,
  out enqueued_at timestamptz, out ended_at timestamptz, out last_error text, out replayed boolean,
  out expires_at timestamptz, out blocks boolean, out claim_token bigint, out error_code text
) returns setof record language sql volatile set search_path = pg_catalog, pg_temp
begin atomic
  select m.seq, m.destination, outbox_internal.partition_label(m.partition::integer), m.partition, m.key, m.status,
         m.attempts, m.crashes, m.available_at, m.enqueued_at, m.ended_at, m.last_error, m.replayed, m.expires_at,
         m.blocks, m.claim_token, case when m.last_error is not null then coalesce(m.error_code, 'text') end
  from (
    -- No index of outbox begins with seq: looked up in each lane.
    select o.* from outbox_internal.first_pending l cross join lateral (
      select x.* from outbox_internal.ready_messages x
      where x.destination = l.destination and x.partition = l.partition and x.seq = of_seq offset 0) o
    union all
    select w.* from outbox_internal.waiting_messages w where w.seq = of_seq
    union all
    select d.* from outbox_internal.dead_messages d where d.seq = of_seq
    union all
    select h.* from outbox_internal.ended_messages h where h.seq = of_seq) m
  -- Else it was a message of another event: there was another source.
  where m.ended_at is null or m.status = 'dead' or m.ended_at <@ (select t.current from outbox_internal.event_times t)
  -- What has not ended comes first, then dead letters; in each group the latest.
  order by m.status in ('published', 'discarded'), m.status = 'dead', m.status not in ('ready', 'in flight'),
           coalesce(m.ended_at, m.available_at) desc nulls last;
end;
comment on function outbox_internal.message_rows(bigint) is
  'The rows of the message with this seq in all tables, one for each destination and replay: as outbox_messages has'
  ' them, without the event, and with an index.';

create function outbox_internal.obstacles(
  messages jsonb, out destination text, out seq bigint, out rank bigint, out reason text, out why text, out remedy text,
  out behind bigint, out commands jsonb
) returns setof record language sql volatile set search_path = pg_catalog, pg_temp
begin atomic
  with message as materialized (
    select m.destination collate "C" as destination, substr(m.partition_key, 2)::smallint as partition, m.seq, m.key,
           m.status, coalesce(m.alone, false) as alone
    from jsonb_to_recordset(messages)
         m (destination text, partition_key text, seq bigint, key text, status text, alone boolean)
    where not pg_is_in_recovery()
  ), problem as materialized (
    select h."check", h.destination, h.problem, h.remedy, h.commands, row_number() over () as n
    from outbox_internal.problems h
    where h."check" in ('preload', 'enabled', 'identity', 'role', 'triggers', 'workers', 'database', 'source', 'standbys',
                        'partitions', 'broker', 'blocked', 'destination', 'paused', 'lag')
  ), hindrance as materialized ( -- the problems of each message
    select m.destination, m.seq, p."check", p.destination as of_destination, p.problem, p.remedy, p.commands, p.n
    from message m join problem p
      on p.destination = m.destination
        or p.destination is null and p."check" not in ('standbys', 'partitions')
        or p."check" = 'partitions' and not exists (select from @extschema@.outbox_partitions x, @extschema@.outbox_settings s
                                                    where x.partition = m.partition)
  ), place as materialized (
    select s.destination, s.state, s.reason, s.detail from @extschema@.outbox_destination_status s
    where s.destination in (select m.destination from message m)
  ), lane as materialized (
    select l.destination, l.partition, b.blocker, outbox_internal.partition_label(l.partition::integer) as label,
           -- Messages in flight are the first of their lane.
           (select t.seq
            from (select o.seq, o.status from outbox_internal.ready_messages o
                  where o.destination = l.destination and o.partition = l.partition order by o.seq limit 1000) t
            where t.status = 'ready' order by t.seq limit 1) as first,
           coalesce((select substr(x, 10)::bigint from unnest(d.options) x where x like 'max\_rate=%'),
                    current_setting('outbox.max_rate')::bigint) as max_rate,
           'ordering=partition' = any (d.options) as is_ordered,
           p.partition is not null and s.leasing
             and (p.lease_owner is null or p.lease_until <= clock_timestamp()) as is_free
    from (select distinct m.destination, m.partition from message m) l
    cross join @extschema@.outbox_settings s
    left join outbox_internal.destinations() d on d.destination = l.destination
    left join outbox_internal.blocked_lanes() b on b.destination = l.destination and b.partition = l.partition
    left join @extschema@.outbox_partitions p on p.partition = l.partition
  ), transaction as materialized (
    select t.pid, t.xid, g.gid, t.age, t.low, t.prepared
    from outbox_internal.open_transactions t left join pg_prepared_xacts g on g.transaction = t.xid and t.prepared
    where t.age > interval '1 second' order by t.age desc limit 100
  ), obstacle as materialized (
    select m.destination, m.seq, 1 as rank, 'in flight' as reason, 'message_in_flight' as code, '{}'::text[] as args,
           null::bigint as behind
    from message m
    where m.status = 'in flight'
      and not exists (select from place p where p.destination = m.destination and p.reason = 'standby')
    union all
    select m.destination, m.seq, 2, concat_ws(' ', 'behind', nullif(b.status, 'ready')), 'message_behind_' || b.status,
           array['behind', b.seq::text, 'unit', case when b.whole then 'partition' else 'key' end,
                 'due', date_trunc('seconds', b.due_at)::text, 'error', b.error],
           b.seq
    from message m join lane l on l.destination = m.destination and l.partition = m.partition
    cross join lateral (
      -- The strongest first. A message that was put behind another may wait behind a later seq, if that was replayed or
      -- retried by hand.
      (select d.seq, 'dead' as status, d.reason as error, null::timestamptz as due_at, true as whole
       from @extschema@.outbox_dead d
       where d.seq = l.blocker and d.destination = m.destination and l.blocker < m.seq
       union all
       select w.seq, 'retrying', w.last_error, w.due_at, true from @extschema@.outbox_waiting w
       where w.seq = l.blocker and w.destination = m.destination and l.blocker < m.seq)
      union all
      (select d.seq, 'dead', d.reason, null, false from @extschema@.outbox_dead d
       where m.alone and d.blocks and d.partition = m.partition and d.destination = m.destination and d.key = m.key
       order by d.seq limit 1)
      union all
      (select w.seq, 'retrying', w.last_error, w.due_at, false
       from (select x.* from @extschema@.outbox_waiting x where x.due_at is not null order by x.due_at limit 10000) w
       where m.alone and w.state = 'b' and w.partition = m.partition and w.destination = m.destination
         and w.key = m.key and (w.seq < m.seq or m.status = 'blocked' and w.seq <> m.seq)
       order by w.seq limit 1)
      union all
      (select o.seq, 'ready', null, null, false
       from (select x.* from @extschema@.outbox x
             where x.destination = m.destination and x.partition = m.partition order by x.seq limit 10000) o
       where m.alone and o.seq < m.seq and o.key = m.key
       order by o.seq limit 1)
      limit 1) b
    union all
    select m.destination, m.seq, 3, 'standby', 'message_awaits_standbys', array['awaited', p.detail], null
    from message m join place p on p.destination = m.destination and p.reason = 'standby'
    union all -- what no check reports
    select m.destination, m.seq, 200, p.state,
           case p.state when 'missing' then 'message_without_destination' when 'not served' then 'message_not_served'
                        when 'paused' then 'message_after_pause' else 'message_at_destination' end,
           array['state', concat_ws(': ', p.state, p.reason, p.detail), 'unconfigured', case p.state when 'unconfigured' then '' end],
           null
    from message m join place p on p.destination = m.destination
    where p.state <> 'connected'
      and not exists (select from hindrance h
                      where h.destination = m.destination and h.seq = m.seq
                        and (h.of_destination is not null or p.state in ('not served', 'paused', 'not adopted')))
    union all
    select m.destination, m.seq, 300, 'no owner', 'message_without_owner', array['label', l.label], null
    from message m join lane l on l.destination = m.destination and l.partition = m.partition and l.is_free
    where not exists (select from hindrance h where h.destination = m.destination and h.seq = m.seq)
    union all
    select m.destination, m.seq, 400, 'transaction',
           case when t.prepared then 'message_behind_prepared' else 'message_behind_transaction' end,
           array['age', date_trunc('seconds', t.age)::text, 'pid', t.pid::text, 'xid', t.xid::text, 'gid', t.gid], null
    from message m join lane l on l.destination = m.destination and l.partition = m.partition
    cross join lateral (select x.* from transaction x where x.low <= m.seq order by x.age desc limit 1) t
    where (m.key is not null or l.is_ordered) and m.status <> 'scheduled'
  ), found as materialized (
    select s.destination, s.seq, 0 as rank, 'standby server' as reason, 'message_on_standby' as code, '{}'::text[] as args,
           null::bigint as behind
    from jsonb_to_recordset(messages) s (destination text, seq bigint) where pg_is_in_recovery()
    union all
    select o.* from obstacle o
    union all
    select m.destination, m.seq, 500, case when m.seq <= l.first then 'next' else 'earlier' end,
           case when m.seq <= l.first then 'message_next' else 'message_after_earlier' end,
           array['label', l.label, 'first', l.first::text, 'max_rate', nullif(l.max_rate, 0)::text], null
    from message m join lane l on l.destination = m.destination and l.partition = m.partition
    where m.status not in ('scheduled', 'retrying')
      and not exists (select from obstacle o where o.destination = m.destination and o.seq = m.seq)
      and not exists (select from hindrance h where h.destination = m.destination and h.seq = m.seq)
  )
  select f.destination, f.seq, f.rank::bigint, f.reason, w.problem, w.remedy, f.behind, w.commands
  from found f
  cross join lateral outbox_internal.worded(f.code, f.args || array['destination', f.destination, 'seq', f.seq::text]) w
  union all
  select h.destination, h.seq, 100 + h.n, h."check",
         format(case h."check" when 'paused' then 'Destination %1$s is %2$s.' else '%2$s.' end, h.destination, h.problem),
         h.remedy, null, h.commands
  from hindrance h;
end;
comment on function outbox_internal.obstacles(jsonb) is
  'Why each of these messages is not delivered, the lowest rank first. A message is an object with destination,'
  ' partition_key, seq, key and status; with alone, the message of its key that it waits behind is looked for, too. The page'
  ' shows the first reason of each message.';

create function @extschema@.outbox_why(
  seq bigint, inout destination text default null, out reason text, out why text, out remedy text, out behind bigint,
  out commands jsonb
) returns setof record language sql volatile parallel unsafe set search_path = pg_catalog, pg_temp
begin atomic
  with message as materialized (
    select m.* from @extschema@.outbox_settings s -- first, as everywhere: obstacles() reads it
    cross join outbox_internal.message_rows($1) m
    where m.status not in ('published', 'discarded') and (m.destination = $2 or $2 is null)
  ), own as (
    select m.destination, 0::bigint as rank, m.status as reason, w.problem as why, w.remedy, null::bigint as behind, w.commands
    from message m
    cross join lateral outbox_internal.worded('message_' || m.status, array[
      'seq', m.seq::text, 'destination', m.destination, 'error', m.last_error,
      'at', date_trunc('seconds', m.available_at)::text, 'blocks', case when m.blocks then '' end,
      m.error_code, case m.error_code when 'unroutable' then (
        select u.remedy from outbox_internal.unroutable u where u.seq = m.seq and u.destination = m.destination) else '' end]) w
    where m.status in ('dead', 'scheduled', 'retrying')
  )
  select x.destination, x.reason, x.why, x.remedy, x.behind, x.commands
  from (
    select o.* from own o where not (o.reason <> 'dead' and pg_is_in_recovery())
    union all
    select o.destination, o.rank, o.reason, o.why, o.remedy, o.behind, o.commands
    from (select jsonb_agg(to_jsonb(m) || '{"alone": true}') as messages from message m where m.status <> 'dead') a
    cross join lateral outbox_internal.obstacles(a.messages) o) x
  order by x.destination, x.rank;
end;
comment on function @extschema@.outbox_why(bigint, text) is
  'Why a message is not delivered, at one destination or at all: one row a reason, the most specific first, in a word'
  ' and in a sentence, with its remedy and the commands in it, and the message that it waits behind. No row = it has ended,'
  ' or there is none.';
