-- Owners and rights. Tables and SECURITY DEFINER functions belong to the worker role, so that neither the workers nor
-- these functions need a superuser. Views and all other functions stay with the superuser who created the extension.
-- They run with the rights of the role that reads or calls them, superusers included, so a role that may replace them
-- has those rights. The owner of a view does not even need CREATE on the schema for that. PUBLIC may only use what is
-- harmless. This script runs last, when every object exists. `make sql` puts the two blocks and the grants into the update
-- script, for what is new there.

do $functions$
begin
  execute pg_catalog.format(
    'create or replace view outbox_internal.installed_functions as'
    ' select i.key as name, i.value as digest from pg_catalog.jsonb_each_text(%L) i',
    (select pg_catalog.jsonb_object_agg(f.name, f.digest order by f.name) from outbox_internal.definer_functions f));
end
$functions$;

do $owner$
declare
  worker_role constant name := pg_catalog.current_setting('outbox.worker_role');
  thing record;
begin
  for thing in
    select i.type, i.identity, p.prosecdef as is_definer, closed.grantees
    from pg_catalog.pg_depend d
    cross join lateral pg_catalog.pg_identify_object(d.classid, d.objid, d.objsubid) i
    left join pg_catalog.pg_proc p on d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass and p.oid = d.objid
    left join pg_catalog.pg_class c on d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass and c.oid = d.objid
    left join pg_catalog.pg_type t on d.classid = 'pg_catalog.pg_type'::pg_catalog.regclass and t.oid = d.objid
    left join pg_catalog.pg_namespace n on d.classid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
      and n.oid = d.objid
    -- The table of a sequence.
    left join pg_catalog.pg_depend s on s.classid = d.classid and s.objid = c.oid and c.relkind = 'S'
      and s.refclassid = d.classid and s.deptype = 'i'
    left join pg_catalog.pg_class o on o.oid = s.refobjid
    cross join lateral (
      -- PUBLIC may call a new function, and ALTER DEFAULT PRIVILEGES may have granted more, to other roles too: on
      -- everything that was made above. What is granted after CREATE EXTENSION stays.
      select pg_catalog.string_agg(distinct case a.grantee when 0 then 'public'
               else pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) end, ', ') as grantees
      from pg_catalog.aclexplode(coalesce(p.proacl, c.relacl, t.typacl, n.nspacl,
                                          pg_catalog.acldefault('f', p.proowner))) a
      where a.grantee <> coalesce(p.proowner, c.relowner, t.typowner, n.nspowner)
        and (a.grantee <> 0 or t.oid is null)) closed -- PUBLIC may use any type
    where d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass and d.deptype = 'e'
      and d.refobjid = (select x.oid from pg_catalog.pg_extension x where x.extname = 'outbox')
      and i.type in ('schema', 'table', 'view', 'sequence', 'type', 'function')
  loop
    if thing.grantees is not null then
      execute pg_catalog.format('revoke all on %s %s from %s', pg_catalog.replace(thing.type, 'view', 'table'),
                                thing.identity, thing.grantees);
    end if;
    case
      when thing.type = 'schema' then
        -- No role gets CREATE. USAGE is for the functions that run as the caller, and the statements of outboxctl.
        execute pg_catalog.format('grant usage on schema %s to %I, outbox_writer, outbox_monitor, outbox_relay',
                                  thing.identity, worker_role);
      when thing.type = 'table' or thing.is_definer then
        execute pg_catalog.format('alter %s %s owner to %I', thing.type, thing.identity, worker_role);
      when thing.type = 'view' then
        execute pg_catalog.format('grant select on %s to %I', thing.identity, worker_role);
      when thing.type in ('sequence', 'type') then
        null; -- a sequence belongs to the owner of its table
      else
        execute pg_catalog.format('grant execute on function %s to %I', thing.identity, worker_role);
    end case;
  end loop;
end
$owner$;

-- Every function of the extension has a unique name, so the name alone identifies it.

-- ---- outbox_writer --------------------------------------------------------------------------------------------------

grant execute on function
  @extschema@.outbox_enqueue, @extschema@.outbox_enqueue_many, @extschema@.outbox_publish, @extschema@.outbox_store,
  outbox_internal.publish, @extschema@.outbox_wait
  to outbox_writer;
-- For the owner of a table. A trigger runs as the writing role, but EXECUTE is checked for the role that creates it.
grant execute on function
  @extschema@.outbox_attach, @extschema@.outbox_detach, @extschema@.outbox_capture, @extschema@.outbox_uncapture,
  @extschema@.outbox_attached, @extschema@.outbox_captured, outbox_internal.tables_for_triggers, outbox_internal.lock_own_table,
  outbox_internal.check_destination, outbox_internal.check_expression, outbox_internal.attach_name,
  outbox_internal.capture_children, outbox_internal.is_captured
  to outbox_writer;

-- ---- PUBLIC ---------------------------------------------------------------------------------------------------------

-- Core checks EXECUTE of the WHEN clause of a trigger for the one who writes. They refuse any other call.
grant execute on function outbox_internal.row_inserted, outbox_internal.row_updated, outbox_internal.row_deleted
  to public;
-- An SQL function that is inlined into a statement makes its calls as the caller, without USAGE on the schema.
grant execute on function
  @extschema@.outbox_partition_of, @extschema@.outbox_partition_label, outbox_internal.partition_label,
  @extschema@.outbox_crc32, @extschema@.outbox_uuid_v7
  to public;

-- ---- outbox_monitor -------------------------------------------------------------------------------------------------

grant select on
  @extschema@.outbox, @extschema@.outbox_waiting, @extschema@.outbox_dead, @extschema@.outbox_history,
  @extschema@.outbox_attempts_log, @extschema@.outbox_audit, @extschema@.outbox_inbox,
  @extschema@.outbox_inbox_owners, @extschema@.outbox_partitions,
  @extschema@.outbox_workers, @extschema@.outbox_connections, @extschema@.outbox_paused, @extschema@.outbox_settings,
  @extschema@.outbox_identity, @extschema@.outbox_source, @extschema@.outbox_source_changes, @extschema@.outbox_subscriptions,
  @extschema@.outbox_status, @extschema@.outbox_health, @extschema@.outbox_worker_status,
  @extschema@.outbox_partition_status, @extschema@.outbox_destination_status, @extschema@.outbox_throughput,
  @extschema@.outbox_destination_throughput, @extschema@.outbox_latency,
  @extschema@.outbox_errors, @extschema@.outbox_attempts, @extschema@.outbox_passes,
  outbox_internal.members, outbox_internal.ready_messages, outbox_internal.waiting_messages, outbox_internal.dead_messages, outbox_internal.ended_messages,
  outbox_internal.blockers, outbox_internal.first_pending, outbox_internal.first_shown,
  outbox_internal.counters, outbox_internal.dead_counts, outbox_internal.first_dead, outbox_internal.server,
  outbox_internal.destination_statistics, outbox_internal.event_times, outbox_internal.open_transactions, outbox_internal.live_workers, outbox_internal.hanging_workers, outbox_internal.connections,
  outbox_internal.wrappers, outbox_internal.kinds, outbox_internal.sharers, outbox_internal.findings,
  outbox_internal.problems, outbox_internal.unroutable, outbox_internal.definer_functions, outbox_internal.installed_functions
  to outbox_monitor;
grant execute on function
  @extschema@.outbox_is_preloaded, @extschema@.outbox_open_transactions, @extschema@.outbox_not_adopted,
  @extschema@.outbox_source_problem, @extschema@.outbox_history_partitions,
  @extschema@.outbox_check, @extschema@.outbox_run_pass, @extschema@.outbox_why
  to outbox_monitor;
-- The functions that those call as the caller, the views, and the statements of outboxctl.
grant execute on function
  outbox_internal.shared_memory, outbox_internal.not_adopted, outbox_internal.source_problem,
  outbox_internal.history_partitions, outbox_internal.system_identifier, outbox_internal.schema_problem,
  outbox_internal.worded, outbox_internal.facts, outbox_internal.kind_texts, outbox_internal.mapping_problem,
  outbox_internal.server_workers, outbox_internal.has_ended, outbox_internal.leases_last,
  outbox_internal.claims_last, outbox_internal.destinations, outbox_internal.blocked_lanes, outbox_internal.request_recheck,
  outbox_internal.claim_is_live, outbox_internal.is_taken, outbox_internal.message_rows, outbox_internal.obstacles,
  outbox_internal.search
  to outbox_monitor;

-- The views read the tables as their owner. If that role loses its superuser rights, outbox_health can still say so.
grant select on
  @extschema@.outbox, @extschema@.outbox_waiting, @extschema@.outbox_dead, @extschema@.outbox_history,
  @extschema@.outbox_history_default, @extschema@.outbox_events, @extschema@.outbox_attempts_log, @extschema@.outbox_audit,
  @extschema@.outbox_inbox, @extschema@.outbox_inbox_owners, @extschema@.outbox_partitions, @extschema@.outbox_workers,
  @extschema@.outbox_connections, @extschema@.outbox_paused, @extschema@.outbox_settings, @extschema@.outbox_identity,
  @extschema@.outbox_source, @extschema@.outbox_source_changes, @extschema@.outbox_subscriptions,
  outbox_internal.destination_owners
  to current_user;
grant select on sequence @extschema@.outbox_events_seq_seq to current_user;

-- ---- outbox_admin, outbox_consumer ----------------------------------------------------------------------------------

grant execute on function
  @extschema@.outbox_retry, @extschema@.outbox_discard, @extschema@.outbox_retry_where,
  @extschema@.outbox_discard_where, @extschema@.outbox_replay, @extschema@.outbox_purge, @extschema@.outbox_configure,
  @extschema@.outbox_pause, @extschema@.outbox_resume, @extschema@.outbox_adopt, @extschema@.outbox_drain,
  @extschema@.outbox_source_set, @extschema@.outbox_source_reset, @extschema@.outbox_subscribe,
  @extschema@.outbox_unsubscribe, @extschema@.outbox_inbox_forget,
  @extschema@.outbox_inbox_assign
  to outbox_admin;
grant select on @extschema@.outbox_events, @extschema@.outbox_messages to outbox_admin; -- payloads
-- With the rights of the caller on the source.
grant execute on function outbox_internal.source_row_of, outbox_internal.source_event, outbox_internal.event_shown
  to outbox_admin;

grant execute on function @extschema@.outbox_inbox_receive(text, text) to outbox_consumer;

-- ---- outbox_relay ---------------------------------------------------------------------------------------------------

grant execute on function
  @extschema@.outbox_fetch_unpublished, @extschema@.outbox_mark_published, @extschema@.outbox_mark_failed,
  @extschema@.outbox_relay
  to outbox_relay;
-- Workers outside the server.
grant execute on function
  outbox_internal.legible, outbox_internal.of_utf8, outbox_internal.unreadable, outbox_internal.is_on_disk,
  outbox_internal.heartbeat, outbox_internal.report, outbox_internal.destinations, outbox_internal.leases,
  outbox_internal.leave, outbox_internal.purge_workers, outbox_internal.claim, outbox_internal.claim_waiting,
  outbox_internal.waits, outbox_internal.due, outbox_internal.next_due_ms, outbox_internal.blocked_keys,
  outbox_internal.destinations_with_messages, outbox_internal.lanes_with_messages, outbox_internal.locate,
  outbox_internal.work_begin, outbox_internal.work_refresh, outbox_internal.work_lease, outbox_internal.work_standbys,
  outbox_internal.work_quit, outbox_internal.work_rewinds, outbox_internal.work_shared_state, outbox_internal.work_wait,
  outbox_internal.work_report_in_flight, outbox_internal.work_claim_unleased, outbox_internal.work_events, outbox_internal.work_settle
  to outbox_relay;

-- ---- the rest -------------------------------------------------------------------------------------------------------

-- A session that replays old data may be silent; a role that may set this may lose events. So may a superuser.
do $grant$
begin
  if not pg_catalog.has_parameter_privilege('outbox_admin', 'outbox.replaying', 'set') then
    -- The catalog belongs to the whole server, and another database may be granting at this moment.
    lock table pg_catalog.pg_parameter_acl in share row exclusive mode;
    grant set on parameter outbox.replaying to outbox_admin;
  end if;
end
$grant$;

-- Core records a grant of this script as a part of the extension, and keeps the record after DROP EXTENSION. Since version
-- 17 it keeps the role from being dropped, because DROP OWNED BY fails at grants on parameters. No statement removes it:
-- ALTER EXTENSION has no parameters, and REVOKE would take the grant back.
select outbox_internal.remove_initial_privileges(p.oid)
from pg_catalog.pg_parameter_acl p where p.parname = 'outbox.replaying';

insert into @extschema@.outbox_settings (partition_count, leasing)
values (pg_catalog.current_setting('outbox.partition_count')::smallint,
        pg_catalog.current_setting('outbox.leasing')::boolean);

insert into @extschema@.outbox_identity default values;

-- Checked again: another role may have created a function in the meantime. Roles that may still create later do not raise an
-- error but a warning.
do $schema$
declare
  risk record;
begin
  for risk in
    select p.code, w.problem, w.remedy
    from outbox_internal.schema_problem() p cross join lateral outbox_internal.worded(p.code, p.args) w
  loop
    if risk.code = 'function_foreign' then
      raise exception '%', risk.problem using errcode = 'duplicate_object', hint = risk.remedy || ';';
    end if;
    raise warning '%', risk.problem
      using hint = risk.remedy || '; or create the extension in a schema of its own:'
        ' CREATE SCHEMA outbox; CREATE EXTENSION outbox SCHEMA outbox;';
  end loop;
end
$schema$;

-- Core shows no NOTICE of a script.
do $shared$
declare
  shared record;
begin
  for shared in
    select pg_catalog.string_agg(pg_catalog.quote_ident(s.database), ', ' order by s.database) as others, s.place, s.wrapper,
           pg_catalog.current_database() as own
    from outbox_internal.sharers s group by s.place, s.wrapper
  loop
    raise warning 'events of this database go to the same % as those of database %', shared.place, shared.others
      using detail = 'Each has the destination of the settings of the server, unless it has a server "default".',
      hint = pg_catalog.format('If it shall have its own: ALTER DATABASE %1$I SET outbox.%2$s = %1$L; or CREATE SERVER'
        ' "default" FOREIGN DATA WRAPPER %3$s OPTIONS (%2$s %1$L); with other options as it needs them.',
        shared.own, shared.place, shared.wrapper);
  end loop;
end
$shared$;

-- The launcher reads the databases again when this commits.
select outbox_internal.installed();
