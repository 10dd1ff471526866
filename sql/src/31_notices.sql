-- Notices of dead letters: an event for the destination that the option dead_letters_to names. It is written where the
-- dead letter is, in the same transaction, and has no key: it waits behind nothing, and nothing behind it.

-- Names have the type name, so that settle finds one in the index among 1,000 servers.
create view outbox_internal.notice_receivers as
select n.destination, n.receiver::text as receiver, n.owner, p.code
from (
  select s.destination, quote_ident(s.owner) as owner, s.owner_oid,
         substr(o.option, length('dead_letters_to=') + 1)::name as receiver
  from outbox_internal.servers s cross join unnest(s.options) o (option)
  where s.is_adopted and starts_with(o.option, 'dead_letters_to=')) n
left join (pg_foreign_server r join outbox_internal.wrappers v on v.oid = r.srvfdw) on r.srvname = n.receiver
left join lateral (
  select x.code
  from (values
    (exists (select from @extschema@.outbox_source), 'notices_with_source'),
    (n.receiver <> 'default' and r.oid is null, 'notice_receiver_missing'),
    (n.receiver <> 'default' and not has_server_privilege(n.owner_oid, r.oid, 'usage'), 'notice_receiver_refused')
  ) x (applies, code)
  where x.applies limit 1) p on true;
comment on view outbox_internal.notice_receivers is
  'Destinations with the option dead_letters_to: where the notices of their dead letters go, and why none does (NULL ='
  ' they do).';

create function outbox_internal.notify_dead(seqs bigint[], destinations text[])
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
  told text[];
  receivers text[];
  written integer;
begin
  begin
    select array_agg(r.destination), array_agg(r.receiver) into told, receivers
    from outbox_internal.notice_receivers r where r.destination = any (destinations::name[]) and r.code is null;
    if told is null then
      return;
    end if;
    with notice as materialized (
      select nextval('@extschema@.outbox_events_seq_seq') as seq, r.receiver, d.partition, e.aggregate_type, e.aggregate_id,
             outbox_internal.legible(jsonb_build_object(
               'destination', d.destination, 'seq', d.seq, 'id', e.id, 'type', e.type, 'aggregate_type', e.aggregate_type,
               'aggregate_id', e.aggregate_id, 'key', case when e.seq is not null then d.key end, 'kind', coalesce(d.error_code, 'text'),
               'reason', d.reason, 'attempts', d.attempts, 'blocks', d.blocks, 'enqueued_at', d.enqueued_at,
               'died_at', d.died_at)::text)::jsonb as payload
      from unnest(seqs, destinations) u (seq, destination)
      join unnest(told, receivers) r (destination, receiver) on r.destination = u.destination
      -- OFFSET 0: each is looked up in the index, whatever the planner takes the tables for.
      cross join lateral (select x.* from @extschema@.outbox_dead x
                          where x.seq = u.seq and x.destination = u.destination offset 0) d
      left join lateral (select x.* from @extschema@.outbox_events x where x.seq = u.seq offset 0) e on true
      where e.type is distinct from 'outbox.dead_letter' -- a notice of a notice could go round in a circle
    ), event as (
      -- It has the aggregate of the event, so that outbox_purge() finds it.
      insert into @extschema@.outbox_events (seq, id, type, aggregate_type, aggregate_id, payload)
      select n.seq, gen_random_uuid(), 'outbox.dead_letter', n.aggregate_type, n.aggregate_id, n.payload from notice n
    ), message as (
      insert into @extschema@.outbox (seq, destination, partition) select n.seq, n.receiver, n.partition from notice n
    )
    select count(outbox_internal.record_enqueued(n.receiver, n.partition, n.seq)) into written from notice n;
  exception when others or assert_failure then
    raise warning 'no notice of % dead letter(s): %', cardinality(seqs), sqlerrm
      using errcode = sqlstate, hint = 'The messages are dead letters all the same: see outbox_dead.';
  end;
end
$$;
comment on function outbox_internal.notify_dead(bigint[], text[]) is
  'For new dead letters: writes an event for the destination that dead_letters_to names. An error of that is a warning,'
  ' because it must not keep other messages from being settled. It waits only briefly for a lock.';
