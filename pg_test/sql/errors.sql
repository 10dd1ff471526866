-- Bad input is refused at the call: a SQLSTATE, a short line, and a HINT that says what to do.
\set SHOW_CONTEXT never
create extension outbox;
select outbox_publish('T', '{}', 'order', '1', id => '01a1fc85-047b-72cc-b926-c7a014466422');

-- outbox_publish
select outbox_publish(null, '{}'); \echo :SQLSTATE
select outbox_publish('', '{}'); \echo :SQLSTATE
select outbox_publish('T', null); \echo :SQLSTATE
select outbox_publish(repeat('T', 256), '{}'); \echo :SQLSTATE
select outbox_publish('T', '{}', repeat('ü', 128), '1'); \echo :SQLSTATE
select outbox_publish('T', '{}', 'order', repeat('i', 256)); \echo :SQLSTATE
select outbox_publish('T', '{}', operation => repeat('o', 256)); \echo :SQLSTATE
select outbox_publish('T', '{}', correlation_id => repeat('c', 256)); \echo :SQLSTATE
select outbox_publish('T', '{}', repeat('a', 200), repeat('b', 200)); \echo :SQLSTATE
select outbox_publish('T', '{}', repeat('a', 200), '1', repeat('o', 200)); \echo :SQLSTATE
select outbox_publish('T', '{}', headers => '[1]'); \echo :SQLSTATE
select outbox_publish('T', '{}', headers => '{"CC": "x"}'); \echo :SQLSTATE
select outbox_publish('T', '{}', headers => '{"BCC": ["x"]}'); \echo :SQLSTATE
select outbox_publish('T', '{}', headers => jsonb_build_object(repeat('n', 256), 1)); \echo :SQLSTATE
select outbox_publish('T', '{}', headers => jsonb_build_object('x', repeat('y', 70000))); \echo :SQLSTATE
select outbox_publish('T', to_jsonb(repeat('x', 17000000))); \echo :SQLSTATE
select outbox_publish('T', '{}', available_at => 'infinity'); \echo :SQLSTATE
select outbox_publish('T', '{}', expires_at => 'infinity'); \echo :SQLSTATE
select outbox_publish('T', '{}', expires_at => '-infinity'); \echo :SQLSTATE
select outbox_publish('T', '{}', expires_at => '2020-01-01'); \echo :SQLSTATE
select outbox_publish('T', '{}', expires_at => '9999-01-01', available_at => '9999-01-01'); \echo :SQLSTATE
select outbox_publish('T', '{}', destination => 'nowhere'); \echo :SQLSTATE
-- core's own message names a constraint of a table
\set VERBOSITY sqlstate
select outbox_publish('T', '{}', id => '01a1fc85-047b-72cc-b926-c7a014466422');
\set VERBOSITY default

-- outbox_enqueue, outbox_enqueue_many
select outbox_enqueue(null); \echo :SQLSTATE
select outbox_enqueue(0, 'k'); \echo :SQLSTATE
select outbox_enqueue(-5, 'k'); \echo :SQLSTATE
select outbox_enqueue(999); \echo :SQLSTATE
select outbox_enqueue(999, 'k'); \echo :SQLSTATE
select setval(pg_get_serial_sequence('outbox_events', 'seq'), 999) as drawn;
select outbox_enqueue(999, repeat('k', 256)); \echo :SQLSTATE
insert into outbox_events (seq, id, type, aggregate_type, aggregate_id, payload)
values (500, outbox_uuid_v7(), 'T', repeat('a', 200), repeat('b', 200), '{}');
select outbox_enqueue(500); \echo :SQLSTATE
delete from outbox_events where seq = 500;
select outbox_enqueue(999, 'k', 'nowhere'); \echo :SQLSTATE
select outbox_enqueue(999, 'k', available_at => 'infinity'); \echo :SQLSTATE
select outbox_enqueue(999, 'k', expires_at => '2020-01-01'); \echo :SQLSTATE
select outbox_enqueue_many('{999}', 'k', expires_at => '2020-01-01'); \echo :SQLSTATE
select outbox_store('{}', expires_at => '2020-01-01'); \echo :SQLSTATE
select outbox_enqueue(999, 'k', partition_key => 'seven'); \echo :SQLSTATE
select outbox_enqueue(999, 'k', partition_key => 'p7'); \echo :SQLSTATE
select outbox_enqueue(999, 'k', partition_key => 'p99'); \echo :SQLSTATE
select outbox_enqueue(999, 'k', partition_key => 'p1024'); \echo :SQLSTATE
select outbox_enqueue_many(null); \echo :SQLSTATE
select outbox_enqueue_many('{1,null}'); \echo :SQLSTATE
select outbox_enqueue_many('{1,0}', 'k'); \echo :SQLSTATE
select outbox_enqueue_many('{1,999,998,997,996,995,994}'); \echo :SQLSTATE

-- an error undoes the whole call, and in a transaction all before it
select seq, type, key from outbox_messages;
begin;
select outbox_enqueue(5, 'k');
select outbox_enqueue(0, 'k'); \echo :SQLSTATE
commit;
select seq, type, key from outbox_messages;
-- what fits exactly is taken
select outbox_publish(repeat('T', 255), '{}', repeat('a', 127), repeat('b', 127), repeat('o', 127),
                      correlation_id => repeat('c', 255)) > 1 as taken;
select octet_length(type) as type, octet_length(key) as key, octet_length(correlation_id) as correlation_id from outbox_messages where seq > 1;
drop extension outbox;
