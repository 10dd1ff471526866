-- The part of the update script that is written by hand: what changes tables, indexes, triggers and data. `make sql` adds
-- what it derives from the install scripts of the two versions: functions, views, types, comments, owners, rights and
-- plans. A statement that needs a new function stands after the marker, and so does one that removes what the old views
-- read. New columns stand behind the others, as in sql/src.

-- The name of a consumer belongs to a role.
create table @extschema@.outbox_inbox_owners (
  consumer text collate "C" primary key,
  owner    name not null -- by name, so that a dump can be restored where it does not exist
);
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_inbox_owners', '');
alter table @extschema@.outbox_audit drop constraint outbox_audit_action_check,
  add constraint outbox_audit_action_check check (action in ('retry', 'discard', 'replay', 'purge', 'configure', 'forget',
                                                             'adopt', 'source', 'pause', 'resume', 'assign',
                                                             'subscribe', 'unsubscribe'));

-- Restores without triggers, and copies without the sequence.
alter table @extschema@.outbox_dead enable always trigger outbox_dead_changed;
alter table @extschema@.outbox_settings enable always trigger outbox_settings_replace;
alter table @extschema@.outbox_identity enable always trigger outbox_identity_replace;
alter table @extschema@.outbox_source enable always trigger outbox_source_apply;
alter table @extschema@.outbox_identity drop constraint outbox_identity_pkey;
alter table @extschema@.outbox_identity replica identity full;

create index on @extschema@.outbox_waiting (seq) where state = 'b' and attempts >= 3; -- outbox_health counts them

-- A message that is put off is not charged.
alter table @extschema@.outbox_attempts_log drop constraint outbox_attempts_log_outcome_check,
  add check (outcome in ('retried', 'deferred', 'dead'));

-- A new version of the C library may sort texts of the database's collation differently, and then finds nothing in their
-- index.
drop index @extschema@.outbox_waiting_destination_partition_key_seq_idx;
create index on @extschema@.outbox_waiting (destination, partition, key collate "C", seq) where state = 'g';

-- What outbox_attach put on outbox_events becomes a subscription; to drop a policy drops its trigger.
create table @extschema@.outbox_subscriptions (
  destination     text collate "C" primary key,
  types           text[], -- NULL = all
  aggregate_types text[], -- NULL = all
  headers         jsonb,  -- what the headers of the event contain
  when_sql        text,   -- a condition over the columns of the event; NULL = none
  since           timestamptz not null default pg_catalog.now(),
  subscribed_by   text        not null default session_user
);
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_subscriptions', '');
insert into @extschema@.outbox_subscriptions (destination, when_sql)
select p.destination, p.settings::pg_catalog.jsonb operator(pg_catalog.->>) 'when' from @extschema@.outbox_policies p;
delete from @extschema@.outbox_policies;
alter extension outbox drop table @extschema@.outbox_policies; -- DROP TABLE leaves it in the list of what a dump contains
drop table @extschema@.outbox_policies;

-- The generated statements stand here.

-- By row, as logical replication applies changes.
create trigger outbox_subscriptions_changed after insert or update or delete on @extschema@.outbox_subscriptions
  for each row execute function outbox_internal.subscriptions_changed();
alter table @extschema@.outbox_subscriptions enable always trigger outbox_subscriptions_changed;
do $subscriptions$
declare
  policy record;
begin
  for policy in delete from @extschema@.outbox_subscriptions s returning s.destination, s.when_sql loop
    if policy.destination operator(pg_catalog.=) 'default' then
      raise warning 'rows that are inserted into outbox_events are no longer enqueued by themselves'
        using hint = 'Call outbox_enqueue(seq) after the INSERT, or outbox_publish() instead of it.';
      continue;
    end if;
    begin
      perform @extschema@.outbox_subscribe(policy.destination, null::text[], null::text[], null::jsonb,
                                            policy.when_sql);
      raise warning 'destination "%" is subscribed to the events for the default destination, instead of attached to'
          ' outbox_events', policy.destination
        using hint = 'Events that are published for another destination no longer go there.';
    exception when others then
      raise warning 'destination "%" is no longer attached to outbox_events: %', policy.destination, sqlerrm
        using hint = pg_catalog.format('Its condition was: %s. Call outbox_subscribe().', policy.when_sql);
    end;
  end loop;
end
$subscriptions$;

-- Core records a grant of this script as a part of the extension, and keeps the record after DROP EXTENSION. Since version
-- 17 it keeps the role from being dropped, because DROP OWNED BY fails at grants on parameters. No statement removes it:
-- ALTER EXTENSION has no parameters, and REVOKE would take the grant back.
select outbox_internal.remove_initial_privileges(p.oid)
from pg_catalog.pg_parameter_acl p where p.parname = 'outbox.replaying';
