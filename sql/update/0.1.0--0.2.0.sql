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
                                                             'adopt', 'source', 'pause', 'resume', 'assign'));

-- Restores without triggers, and copies without the sequence.
alter table @extschema@.outbox_dead enable always trigger outbox_dead_changed;
alter table @extschema@.outbox_settings enable always trigger outbox_settings_replace;
alter table @extschema@.outbox_identity enable always trigger outbox_identity_replace;
alter table @extschema@.outbox_policies enable always trigger outbox_policies_apply;
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

-- The generated statements stand here.

-- Core records a grant of this script as a part of the extension, and keeps the record after DROP EXTENSION. Since version
-- 17 it keeps the role from being dropped, because DROP OWNED BY fails at grants on parameters. No statement removes it:
-- ALTER EXTENSION has no parameters, and REVOKE would take the grant back.
select outbox_internal.remove_initial_privileges(p.oid)
from pg_catalog.pg_parameter_acl p where p.parname = 'outbox.replaying';
