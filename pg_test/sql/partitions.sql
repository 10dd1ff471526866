-- The partition of a key: the vectors of docs/sql-api.md, which every other producer must meet.
create extension outbox;
select key, outbox_crc32(key), outbox_partition_of(key) as of_16, outbox_partition_of(key, 64) as of_64
from (values (1, 'order-42'), (2, 'Ünï'), (3, ''), (4, 'a'), (5, '注文-7'), (6, '🐇'), (7, '123456789')) v (n, key)
order by n;

-- the key of a message gives its partition; without a key, its seq; or the partition key
select setval(pg_get_serial_sequence('outbox_events', 'seq'), 103) as drawn;
select outbox_enqueue(100, 'order-42'), outbox_enqueue(101, 'Ünï'), outbox_enqueue(102, ''),
       outbox_publish('T', '{}'), outbox_publish('T', '{}'), outbox_enqueue(103, 'order-42', partition_key => 'p07');
select seq, key, partition_key from outbox_messages order by seq;

-- labels have two digits or more
select n, outbox_partition_label(n) from unnest('{0,7,42,100,1023}'::int[]) n;
select outbox_partition_of('order-42', 1) as of_1, outbox_partition_of('order-42', 1024) as of_1024,
       outbox_partition_of('order-42', null) = outbox_partition_of('order-42') as null_is_the_default,
       outbox_partition_of(null) is null as null_has_none;

-- the count is that of CREATE EXTENSION, whatever the setting says later
drop extension outbox;
set outbox.partition_count = 64;
create extension outbox;
reset outbox.partition_count;
select outbox_partition_of('order-42'), count(*) from outbox_partition_status;
select setval(pg_get_serial_sequence('outbox_events', 'seq'), 100) as drawn;
select outbox_enqueue(100, 'order-42');
select seq, key, partition_key from outbox_messages;

\set SHOW_CONTEXT never
select outbox_partition_of('k', 0); \echo :SQLSTATE
select outbox_partition_of('k', 1025); \echo :SQLSTATE
select outbox_enqueue(1, 'k', partition_key => 'p64'); \echo :SQLSTATE
drop extension outbox;
