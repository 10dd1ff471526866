-- Events that tables make: what each write says, what a session says of them, which rows of an event table go out, and what
-- is refused.
\set SHOW_CONTEXT never
create extension outbox;
create schema shop;
set search_path = shop, public;
create view said as
  select seq, type, aggregate_type, aggregate_id, operation, payload, previous_payload, key from outbox_events left join outbox using (seq);

-- each write, with rows that are only marked as deleted
create table products (id int primary key, name text, price numeric, deleted_at date);
select outbox_capture('products', aggregate_type => 'PRD', type_prefix => 'Product', soft_delete_column => 'deleted_at');
insert into products values (1, 'Widget', 99.99), (2, 'Gadget', 1);
update products set price = 89.99 where id = 1;
update products set deleted_at = '2026-01-31' where id = 1;
update products set name = 'Widget 2' where id = 1;
update products set deleted_at = null where id = 1;
delete from products where id = 2;
select * from said order by seq;
-- what changes nothing, or touches nothing, says nothing; another id is another aggregate
truncate outbox_events;
update products set price = price; update products set price = 0 where false; delete from products where false;
update products set id = 3;
select * from said order by seq;
-- a rollback takes it back
truncate outbox_events;
begin; insert into products values (4); savepoint s; insert into products values (5); rollback to s; insert into products values (6); commit;
begin; insert into products values (7); rollback;
select type, payload->'id' as id from said order by seq;
-- without the column a DELETE is a Deleted; other words, other columns; called again it replaces what was captured
select outbox_capture('products', operations => 'sql', columns => '{price,id}');
truncate outbox_events;
update products set name = 'unseen';
update products set price = 7, name = 'x' where id = 3;
delete from products;
select * from said order by seq;
select count(*) from pg_trigger where tgrelid = 'products'::regclass;

-- what the session says of its events, and what an event says itself
truncate outbox_events;
set outbox.actor = 'ann@example.com'; set outbox.correlation_id = 'req-1';
set outbox.metadata = '{"source": "admin"}'; set outbox.headers = '{"tenant": "acme"}';
insert into products values (8);
select outbox_publish('T', '{}') > 0, outbox_publish('T', '{}', metadata => '{"a": 1}', headers => '{}', actor => 'bob', correlation_id => '') > 0;
reset outbox.actor; reset outbox.correlation_id; reset outbox.metadata; reset outbox.headers;
insert into products values (9);
select type, actor, correlation_id, metadata, headers from outbox_events order by seq;
set outbox.metadata = '[1]'; \echo :SQLSTATE
set outbox.headers = '{"CC": "x"}'; \echo :SQLSTATE

-- names, and several columns that identify a row
create table "Order Item's" ("order" int, "No." text, "a""b" text, primary key ("No.", "order"));
select outbox_capture('"Order Item''s"');
insert into "Order Item's" values (1, 'x', 'y');
update "Order Item's" set "a""b" = 'z';
create table no_key (code text, n int);
select outbox_capture('no_key'); \echo :SQLSTATE
select outbox_capture('no_key', aggregate_id => 'code || ''/'' || n -- with a comment');
insert into no_key values ('c', 1);
update no_key set n = 1, code = 'c';
delete from no_key;
insert into no_key values (null, 1); \echo :SQLSTATE
select type, aggregate_type, aggregate_id, payload, previous_payload from said where aggregate_type <> 'products' order by seq;

-- what is refused when it is set up
create view a_view as select 1 as id;
select outbox_capture('a_view'); \echo :SQLSTATE
select outbox_capture(null); \echo :SQLSTATE
select outbox_capture('outbox_history'); \echo :SQLSTATE
select outbox_capture('outbox_events'); \echo :SQLSTATE
select outbox_capture('products', operations => 'rest'); \echo :SQLSTATE
select outbox_capture('products', soft_delete_column => 'gone'); \echo :SQLSTATE
select outbox_capture('products', columns => '{id,Name}'); \echo :SQLSTATE
select outbox_capture('products', columns => '{}'); \echo :SQLSTATE
select outbox_capture('products', destination => 'nowhere'); \echo :SQLSTATE
select outbox_capture('products', type_prefix => repeat('x', 250)); \echo :SQLSTATE
select outbox_capture('products', aggregate_id => 'nmae'); \echo :SQLSTATE
select outbox_capture('products', aggregate_id => 'max(id)'); \echo :SQLSTATE
select outbox_capture('products', aggregate_id => 'generate_series(1, id)'); \echo :SQLSTATE
select outbox_capture('products', aggregate_id => 'ctid'); \echo :SQLSTATE
select outbox_capture('products', aggregate_id => '1) from x; drop table x; --'); \echo :SQLSTATE
-- and when it is written
truncate products; \echo :SQLSTATE
select outbox_capture('products');
insert into products values (10, repeat('x', 17000000)); \echo :SQLSTATE
select outbox_capture('products', soft_delete_column => 'deleted_at', columns => '{id,price}');
alter table products rename price to cost;
update products set cost = 1; \echo :SQLSTATE
select outbox_uncapture('products'), outbox_uncapture('products');
truncate outbox_events;
update products set cost = 2;
truncate products;
select count(*) from said;

-- an event table of the application: which rows go out, with which key
create table journal (n bigint primary key, kind text, stream text);
select outbox_attach('journal', $$kind like 'Order%'$$, key => 'stream', seq => 'n');
select setval(pg_get_serial_sequence('outbox_events', 'seq'), 909) as drawn;
insert into journal values (902, 'OrderPaid', 's-1'), (901, 'OrderPlaced', 's-1'), (903, 'Noise', 's-1'), (904, 'OrderOdd', null), (905, null, 's-2');
insert into journal select 906, 'OrderShipped', 's-1' where false;
select seq, key, partition, destination from outbox where seq > 900 order by seq;
-- once attached again, all go; then none
select outbox_attach('journal', seq => 'n');
insert into journal values (907, 'Noise', 's-1');
select outbox_detach('journal'), outbox_detach('journal');
insert into journal values (908, 'Noise', 's-1');
select seq, key from outbox where seq > 906 order by seq;
select outbox_attach('journal'); \echo :SQLSTATE
select outbox_attach('journal', seq => 'kind'); \echo :SQLSTATE
select outbox_attach('journal', 'kind', seq => 'n'); \echo :SQLSTATE
select outbox_attach('journal', key => 'count(*)', seq => 'n'); \echo :SQLSTATE
select outbox_attach('journal', destination => 'nowhere', seq => 'n'); \echo :SQLSTATE
select outbox_attach('outbox', seq => 'seq'); \echo :SQLSTATE
alter table journal drop constraint journal_pkey;
alter table journal alter n drop not null;
select outbox_attach('journal', seq => 'n');
insert into journal values (null); \echo :SQLSTATE
insert into journal values (0); \echo :SQLSTATE
insert into journal values (909, 'x', 'y');
insert into journal values (909, 'x', 'y');

-- outbox_events itself is not attached: outbox_publish enqueues
select outbox_attach('outbox_events'); \echo :SQLSTATE

-- the functions of the triggers are for triggers
select outbox_captured(); \echo :SQLSTATE
create trigger by_hand before insert on journal execute function outbox_attached('{"seq": "n"}');
insert into journal values (910); \echo :SQLSTATE
drop trigger by_hand on journal;
create trigger by_hand after insert on journal execute function outbox_captured('{"seq": "n"}');
insert into journal values (910); \echo :SQLSTATE

drop extension outbox; \echo :SQLSTATE
drop schema shop cascade;
drop extension outbox;
