-- CREATE EXTENSION in a schema of choice: what is there, what it is called, what its comments say.
\pset format unaligned
create schema relay;
create extension outbox schema relay;
create extension if not exists outbox;

-- everything lies in that schema, or in outbox_internal, and nothing without a comment
select i.schema, i.type, string_agg(i.identity, ', ' order by i.identity) filter (
         where obj_description(d.objid, d.classid::regclass::name) is null) as without_comment
from pg_depend d cross join lateral pg_identify_object(d.classid, d.objid, 0) i
where d.refclassid = 'pg_extension'::regclass and d.deptype = 'e'
  and d.refobjid = (select oid from pg_extension where extname = 'outbox')
  and i.type in ('schema', 'table', 'view', 'function', 'type')
  -- from 17 on the row types of tables belong to the extension, and need no comment
  and not exists (select from pg_type t left join pg_class c on c.oid = t.typrelid
                  where d.classid = 'pg_type'::regclass and t.oid = d.objid and (c.relkind <> 'c' or t.typelem <> 0))
group by i.schema, i.type order by i.schema, i.type;
-- no name is used twice, so a comment or a grant needs no list of types
select pronamespace::regnamespace, proname from pg_proc
where pronamespace in ('relay'::regnamespace, 'outbox_internal'::regnamespace)
group by pronamespace, proname having count(*) > 1;

-- what applications and operators call
\df relay.outbox_publish
\df relay.outbox_enqueue
\df relay.outbox_enqueue_many
\df relay.outbox_attach
\df relay.outbox_detach
\df relay.outbox_capture
\df relay.outbox_uncapture
\df relay.outbox_partition_of
\df relay.outbox_partition_label
\df relay.outbox_crc32
\df relay.outbox_uuid_v7
\df relay.outbox_retry
\df relay.outbox_discard

-- the views that docs/sql-api.md lists, with their columns in order
select c.relname, string_agg(format('%s %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' order by a.attnum) as columns
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
where c.oid in ('relay.outbox_messages'::regclass, 'relay.outbox_status'::regclass, 'relay.outbox_worker_status'::regclass,
                'relay.outbox_partition_status'::regclass, 'relay.outbox_health'::regclass, 'relay.outbox_throughput'::regclass,
                'relay.outbox_errors'::regclass, 'relay.outbox_attempts'::regclass, 'relay.outbox_passes'::regclass)
group by c.relname order by c.relname;

-- it works from there, whatever the search_path says
set search_path = pg_catalog;
select relay.outbox_publish('OrderPlaced', '{"order": 42}', 'order', '42', 'placed');
select setval('relay.outbox_events_seq_seq', 7) as drawn;
select relay.outbox_enqueue_many('{1,7}', 'k');
select seq, status, key, partition_key from relay.outbox_messages order by seq;
reset search_path;
-- it does not move, and no second one fits into the database
alter extension outbox set schema public;
create extension outbox schema public;

-- a drop leaves the schema empty, the other one goes, and the roles stay
drop extension outbox;
drop schema relay;
select count(*) from pg_namespace where nspname = 'outbox_internal';
-- one that is there is not taken over; from 18 on the error has a context
\set SHOW_CONTEXT never
create schema outbox_internal;
create extension outbox;
drop schema outbox_internal;
-- up to 16 a background worker needs a role with LOGIN
select rolname, rolsuper, rolcanlogin and rolconnlimit <> 0 as logs_in from pg_roles where rolname like 'outbox%' order by rolname;
