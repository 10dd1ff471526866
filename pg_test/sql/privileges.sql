-- What roles may do: the groups outbox_writer, outbox_monitor and outbox_admin, and a role in none of them.
create extension outbox;
create role regress_writer in role outbox_writer;
create role regress_monitor in role outbox_monitor;
create role regress_admin in role outbox_admin;
create role regress_relay in role outbox_relay;
create role regress_other;

-- functions
select f.name, has_function_privilege('regress_other', p.oid, 'execute') as other,
       has_function_privilege('regress_writer', p.oid, 'execute') as writer,
       has_function_privilege('regress_monitor', p.oid, 'execute') as monitor,
       has_function_privilege('regress_admin', p.oid, 'execute') as admin,
       has_function_privilege('regress_relay', p.oid, 'execute') as relay
from unnest('{publish,enqueue,enqueue_many,store,wait,fetch_unpublished,mark_published,mark_failed,attach,detach,capture,uncapture,retry,discard,retry_where,discard_where,replay,purge,source_set,source_reset,inbox_receive,inbox_forget,partition_of,partition_label,crc32,uuid_v7}'::text[]) with ordinality f (name, n)
join pg_proc p on p.proname = 'outbox_' || f.name order by f.n;
-- what is internal: no role may create there, and which may call what
select r as role, has_schema_privilege(r, 'outbox_internal', 'usage') as usage,
       has_schema_privilege(r, 'outbox_internal', 'create') as creates
from unnest('{regress_other,regress_writer,regress_monitor,regress_admin,regress_relay,outbox_consumer,outbox_worker}'::name[])
  with ordinality u (r, n) order by n;
\pset format unaligned
select r as role, string_agg(p.proname, ' ' order by p.proname) filter (where has_function_privilege(r, p.oid, 'execute')) as may_call
from pg_proc p, unnest('{regress_other,regress_writer,regress_monitor,regress_relay}'::name[]) with ordinality u (r, n)
where p.pronamespace = 'outbox_internal'::regnamespace group by r, n order by n;
\pset format aligned

-- views and tables
select t.name, has_table_privilege('regress_other', t.name, 'select') as other,
       has_table_privilege('regress_writer', t.name, 'select') as writer,
       has_table_privilege('regress_monitor', t.name, 'select') as monitor,
       has_table_privilege('regress_admin', t.name, 'select') as admin,
       has_table_privilege('regress_admin', t.name, 'insert, update, delete, truncate') as admin_writes
from unnest('{outbox_status,outbox_health,outbox_worker_status,outbox_partition_status,outbox_messages,outbox_events,
              outbox,outbox_history,outbox_dead,outbox_partitions,outbox_workers,outbox_settings,outbox_subscriptions,outbox_source,
              outbox_throughput,outbox_errors,outbox_attempts,outbox_passes,outbox_attempts_log}'::text[]) with ordinality t (name, n)
order by t.n;

-- and they are enough: a writer needs only EXECUTE
\set SHOW_CONTEXT never
set role regress_writer;
select outbox_publish('OrderPlaced', '{}', 'order', '42', 'placed');
reset role;
select setval(pg_get_serial_sequence('outbox_events', 'seq'), 8) as drawn;
set role regress_writer;
select outbox_enqueue(1), outbox_enqueue(7, 'k'),
       outbox_enqueue_many('{1,7,8}', 'k');
select count(*) from outbox_messages; \echo :SQLSTATE
select count(*) from outbox_status; \echo :SQLSTATE
select outbox_discard(1); \echo :SQLSTATE
set role regress_monitor;
select dead, in_flight from outbox_status;
select "check", ok from outbox_health where "check" = 'dead letters';
select count(*) from outbox_worker_status;
select count(*) from outbox_partition_status where first_waiting_seq is not null;
select payload from outbox_messages; \echo :SQLSTATE
select outbox_publish('T', '{}'); \echo :SQLSTATE
select outbox_retry(1); \echo :SQLSTATE
set role regress_admin;
select outbox_publish('T', '{}', 'order', '42') > 1 as published, outbox_retry(1), outbox_discard(7, reason => 'mistaken'),
       outbox_discard(8);
select seq, status, type, payload, last_error from outbox_messages where seq in (1, 7, 8) order by seq;
set role regress_other;
select outbox_partition_of('order-42', 64), outbox_partition_label(7), outbox_crc32('a');
select outbox_publish('T', '{}'); \echo :SQLSTATE
reset role;

drop extension outbox;
drop role regress_writer, regress_monitor, regress_admin, regress_relay, regress_other;
