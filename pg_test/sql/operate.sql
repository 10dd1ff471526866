-- What operators see and do: the views, outbox_retry and outbox_discard on a message in every state.
-- No worker runs here; two calls of the workers' protocol stand in for one.
create extension outbox;
set client_min_messages = warning; -- the NOTICE of outbox_retry has times

-- an empty outbox
select pending, in_flight, dead, oldest_pending_age, published_total, failed_total, published_per_s,
       failed_per_s, stats_reset <= clock_timestamp() as reset_before_now from outbox_status;
select * from outbox_worker_status;
select partition_key, lease_owner, lease_ttl, first_waiting_seq from outbox_partition_status order by 1 limit 2;
\pset format unaligned
select * from outbox_health;
\pset format aligned

-- one message of each status
select outbox_publish(t, '{}', 'order', '42') from unnest('{Held,Failed,Given up,Given up too,Sent}'::text[]) t;
select pending, oldest_pending_age < '1 hour' as young from outbox_status;
create temp table claimed as select * from outbox_internal.claim_unleased('default', -1, 3600, 100, 1000000);
select outbox_internal.settle('regress', array_agg(tid), array_agg(c.seq), array_agg('default'::text), array_agg(partition),
                     array_agg(claim_token), array_agg(action), array_agg(3600000::bigint), array_agg(reason), array_agg(reason)) as settled
from claimed c
join (values (2, 'r'::"char", 'unroutable'), (3, 'd', 'unroutable'), (4, 'd', 'unroutable'), (5, 'p', null)) a (seq, action, reason)
  on a.seq = c.seq;
select outbox_publish('Waits', '{}', 'order', '42'), outbox_publish('Due', '{}', 'order', '42', available_at => '2999-01-01');
create temp view messages as
select seq, type, status, reference_status, attempts, retry_count, published_at is not null as sent, last_error, error_message
from outbox_messages order by seq;
select * from messages;
select dead from outbox_status;
select partition_key, first_waiting_seq from outbox_partition_status where first_waiting_seq is not null;
\pset format unaligned
select "check", ok, problem, remedy from outbox_health where "check" in ('dead letters', 'lag');
\pset format aligned

-- retry: a dead one comes back, one that waits goes at once; the rest it leaves
select seq, outbox_retry(seq) from generate_series(1, 8) seq;
select * from messages;
-- a dead one that was retried is not dead any more
select dead from outbox_status;
select outbox_retry(3, 'default') as waits_again, outbox_retry(3, 'nowhere') as elsewhere;

-- discard: what waits or is dead ends with a reason; what is in flight is left to its worker
\set SHOW_CONTEXT never
select outbox_discard(1); \echo :SQLSTATE
select outbox_discard(2, reason => 'order withdrawn') as retrying, outbox_discard(3) as was_dead, outbox_discard(5) as published,
       outbox_discard(6, 'nowhere') as elsewhere, outbox_discard(7, 'default', 'never mind') as scheduled, outbox_discard(8) as missing;
select * from messages;
select outbox_discard(2) as again, outbox_retry(2) as back;
select outbox_retry(null) as retry_null, outbox_discard(null) as discard_null;

-- both are part of the transaction
begin;
select outbox_discard(6), outbox_retry(4);
rollback;
select seq, status from messages where seq in (4, 6);
-- what has ended may be enqueued again
select outbox_enqueue(5), outbox_enqueue(7), outbox_enqueue(5);
select seq, status from messages where seq in (5, 7) order by seq, status;

-- a dead one that was enqueued again meanwhile waits once, whatever its key was then, and goes at once if it was scheduled
truncate outbox, outbox_waiting, outbox_dead, outbox_history;
insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
select seq, now(), 1, 11, 'default', 'order:42', 'unroutable' from generate_series(1, 2) seq;
select outbox_enqueue(1, 'other'), outbox_enqueue(2, 'other', available_at => '2999-01-01');
select seq, type, status, attempts from messages;
select outbox_retry(1), outbox_retry(2);
select seq, type, status, attempts from messages;
-- one whose claim is over waits: it may be retried
update outbox set claim_token = -1, claim_until = now() - interval '1 second' where seq = 1;
select status, outbox_retry(seq) from messages where seq = 1;
-- behind a failed one of its key there is nothing to retry, but to discard
insert into outbox_waiting (seq, enqueued_at, partition, state, destination, key) values (3, now(), 11, 'g', 'default', 'order:42');
select status, outbox_retry(seq) from messages where seq = 3;
select outbox_discard(3);
select seq, status from messages order by seq;
drop view messages;
drop extension outbox;
