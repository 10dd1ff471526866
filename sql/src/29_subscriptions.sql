-- Subscriptions: an event for the default destination goes to each subscribed destination whose lists and condition it
-- meets, in the same transaction. Sessions keep them until the table changes; src/session/store/subscriptions.rs reads it.

create table @extschema@.outbox_subscriptions (
  destination     text collate "C" primary key,
  types           text[] check (pg_catalog.array_position(types, null) is null), -- NULL = all
  aggregate_types text[] check (pg_catalog.array_position(aggregate_types, null) is null), -- NULL = all
  headers         jsonb  check (pg_catalog.jsonb_typeof(headers) = 'object'), -- what the headers of the event contain
  when_sql        text,   -- a condition over the columns of the event; NULL = none
  since           timestamptz not null default pg_catalog.now(),
  subscribed_by   text        not null default session_user
);
comment on table @extschema@.outbox_subscriptions is
  'Which events for the default destination each destination gets. The default destination gets all unless it has a row.'
  ' Written by outbox_subscribe() and outbox_unsubscribe().';
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_subscriptions', '');

create function outbox_internal.subscriptions_changed() returns trigger language c volatile parallel unsafe
as 'MODULE_PATHNAME', 'outbox_subscriptions_changed_wrapper';
comment on function outbox_internal.subscriptions_changed() is
  'At COMMIT, lets all sessions read the subscriptions again.';
-- By row, as logical replication applies changes.
create trigger outbox_subscriptions_changed after insert or update or delete on @extschema@.outbox_subscriptions
  for each row execute function outbox_internal.subscriptions_changed();
alter table @extschema@.outbox_subscriptions enable always trigger outbox_subscriptions_changed;
comment on trigger outbox_subscriptions_changed on @extschema@.outbox_subscriptions is
  'Internal: lets all sessions read the subscriptions again.';

create function @extschema@.outbox_subscribe(
  destination text, types text[] default null, aggregate_types text[] default null, headers jsonb default null,
  when_sql text default null
) returns void language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_subscribe_wrapper';
comment on function @extschema@.outbox_subscribe(text, text[], text[], jsonb, text) is
  'From now on the destination also gets the events for the default destination that have one of these types, one of'
  ' these aggregate types and these headers (NULL = all), and for which when_sql holds. A further call replaces what the'
  ' last one said. For members of outbox_admin with USAGE on the server.';

create function @extschema@.outbox_unsubscribe(destination text)
returns boolean language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_unsubscribe_wrapper';
comment on function @extschema@.outbox_unsubscribe(text) is
  'Ends the subscription of a destination; messages that wait for it stay. False: it had none.';
