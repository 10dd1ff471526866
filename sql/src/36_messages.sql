-- Messages of all tables in one form: the only place that names their status. Searches read one table along an index, so
-- each table has a view, and what a view computes must not keep the planner from merging it into the query.

create function outbox_internal.claim_is_live(claim_token bigint, partition smallint, claim_until timestamptz)
returns boolean language sql stable set search_path = pg_catalog, pg_temp
begin atomic
  select case
    when claim_token is null then false
    when claim_token < 0 then claim_until > now() or outbox_internal.claims_last(claim_token)
    else exists (select from @extschema@.outbox_partitions p where p.partition = $2 and p.lease_epoch = $1
                   and (p.lease_until > now() or outbox_internal.leases_last(p.lease_owner)))
  end;
end;
comment on function outbox_internal.claim_is_live(bigint, smallint, timestamptz) is
  'Whether a worker holds this message for delivery right now.';

create view outbox_internal.ready_messages as
select o.seq, o.destination, o.partition, o.key,
       case when o.claim_token is not null and outbox_internal.claim_is_live(o.claim_token, o.partition, o.claim_until)
              or outbox_internal.is_taken(o.destination, o.partition, o.seq) then 'in flight' else 'ready' end as status,
       null::"char" as state, o.attempts, o.crashes, o.enqueued_at as available_at, o.enqueued_at,
       null::timestamptz as ended_at, o.enqueued_at as changed_at, o.last_error, o.error_code, o.replayed, o.expires_at,
       null::boolean as blocks, o.claim_token
from @extschema@.outbox o;
comment on view outbox_internal.ready_messages is
  'The messages of outbox: ready or in flight.';

create view outbox_internal.waiting_messages as
select w.seq, w.destination, w.partition, w.key,
       case w.state when 'b' then 'retrying' when 'g' then 'blocked' else 'scheduled' end as status,
       w.state, w.attempts, w.crashes, w.due_at as available_at, w.enqueued_at,
       null::timestamptz as ended_at, w.enqueued_at as changed_at, w.last_error, w.error_code, w.replayed, w.expires_at,
       null::boolean as blocks, null::bigint as claim_token
from @extschema@.outbox_waiting w;
comment on view outbox_internal.waiting_messages is
  'The messages of outbox_waiting: retrying, blocked or scheduled.';

create view outbox_internal.dead_messages as
select d.seq, d.destination, d.partition, d.key, 'dead' as status,
       null::"char" as state, d.attempts, null::smallint as crashes, null::timestamptz as available_at, d.enqueued_at,
       d.died_at as ended_at, d.died_at as changed_at, d.reason as last_error, d.error_code, d.replayed, d.expires_at,
       d.blocks, null::bigint as claim_token
from @extschema@.outbox_dead d;
comment on view outbox_internal.dead_messages is
  'The messages of outbox_dead.';

create view outbox_internal.ended_messages as
select h.seq, h.destination, h.partition, h.key, case when h.discarded then 'discarded' else 'published' end as status,
       null::"char" as state, h.attempts, null::smallint as crashes, null::timestamptz as available_at, h.enqueued_at,
       h.published_at as ended_at, h.published_at as changed_at, h.last_error, h.error_code, h.replayed,
       null::timestamptz as expires_at, null::boolean as blocks, null::bigint as claim_token
from @extschema@.outbox_history h;
comment on view outbox_internal.ended_messages is
  'The messages of outbox_history: published or discarded.';
