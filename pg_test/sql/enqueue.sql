-- Publish and enqueue, with and without a key, many at once, again, and in transactions that are undone.
create extension outbox;

-- an event of each shape; the key is its aggregate
select outbox_publish('OrderPlaced', '{"order": 42, "total": 99.90}', 'order', '42', 'placed');
select outbox_publish('Named', 'null', aggregate_id => 'solo');
select outbox_publish('Typed', '[]', aggregate_type => 'order');
select outbox_publish('Bare', '"text"');
select outbox_publish('Full', '{"b": 1, "a": [1.50, "ü"]}', 'Order', '42', 'Changed', previous_payload => '{"b": 0}',
  metadata => '{"source": "regress"}', headers => '{"tenant": "acme"}', actor => 'ann', correlation_id => 'c-1',
  destination => 'default', available_at => '2999-01-01', id => '01a1fc85-047b-72cc-b926-c7a014466422');
select outbox_publish('Late', '{}', 'order', '42', available_at => '2000-01-01');
select outbox_publish('AtOnce', '{}', 'order', '42', available_at => '-infinity');
select seq, type, aggregate_type, aggregate_id, key, partition_key, status, attempts, destination
from outbox_messages order by seq;
\x
select id, type, event_type, aggregate_type, aggregate_id, operation, payload, body, previous_payload, metadata, headers,
       actor, "user", correlation_id, reference_status, transport_name, available_at > now() as waits
from outbox_messages where seq = 5;
\x
select count(distinct id), bool_and(substr(id::text, 15, 1) = '7') as version_7 from outbox_messages;

-- a seq waits once, whatever key it is given
select outbox_enqueue(1) as same_key, outbox_enqueue(1, 'other') as other_key, outbox_enqueue(4) as no_key,
       outbox_enqueue(4, 'k') as a_key, outbox_enqueue(1, 'order:42', partition_key => 'p00') as other_partition;
select outbox_enqueue_many('{1,2,3,4,5,6,7}'), outbox_enqueue_many('{}');
-- with a key an event that is gone is not missed; seqs that repeat count once
select outbox_enqueue(1000, 'ghost'); \echo :SQLSTATE
select setval(pg_get_serial_sequence('outbox_events', 'seq'), 1002) as drawn;
select outbox_enqueue(1000, 'ghost'), outbox_enqueue(1000, 'ghost'), outbox_enqueue_many('{1001,1000,1002,1001}', 'ghost');
select seq, type, key, partition_key, status from outbox_messages where seq > 7 order by seq;

-- events that an application stored itself are found with their keys
insert into outbox_events (id, type, aggregate_type, aggregate_id, payload)
select outbox_uuid_v7(), 'Stored', t, i, '{}'
from (values (1, 'order', '42'), (2, null, 'solo'), (3, 'order', null), (4, null, null)) v (n, t, i) order by n
returning seq;
select outbox_enqueue(1003), outbox_enqueue(1003), outbox_enqueue_many(array(select seq from outbox_events where type = 'Stored'));
select seq, key, partition_key from outbox_messages where type = 'Stored' order by seq;

-- what is rolled back is not there, and its seq is free again
select setval(pg_get_serial_sequence('outbox_events', 'seq'), 2010) as drawn;
begin;
select outbox_enqueue(2000, 'k');
savepoint s;
select outbox_enqueue(2001, 'k'), outbox_enqueue(2000, 'k');
rollback to s;
select outbox_enqueue(2001, 'k'), outbox_enqueue(2002, 'k');
savepoint s2;
select outbox_enqueue_many('{2003,2004}', 'k');
release s2;
commit;
begin;
select outbox_enqueue(2005, 'k');
rollback;
do $$
begin
  perform outbox_enqueue(2006, 'k');
  begin
    perform outbox_enqueue(2007, 'k');
    perform outbox_enqueue(0, 'k');
  exception when invalid_parameter_value then
    perform outbox_enqueue(2008, 'k');
  end;
end
$$;
select seq from outbox_messages where seq >= 2000 order by seq;
drop extension outbox;
