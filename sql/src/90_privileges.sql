-- Who owns and who may. Tables and definer functions belong to the worker role, so that neither the workers nor the definer
-- functions need a superuser. Views and all other functions stay with the superuser who created the extension: they run with
-- the rights of who reads or calls them, superusers too, so whoever may replace them has those rights. The owner of a view needs
-- not even CREATE on the schema for that. Nothing is open to PUBLIC but what is harmless. Last, when every object stands.

do $owner$
declare
  worker_role constant name := pg_catalog.current_setting('outbox.worker_role');
  thing record;
begin
  for thing in
    select i.type, i.identity, p.prosecdef as is_definer
    from pg_catalog.pg_depend d
    cross join lateral pg_catalog.pg_identify_object(d.classid, d.objid, d.objsubid) i
    left join pg_catalog.pg_proc p on d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass and p.oid = d.objid
    where d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass and d.deptype = 'e'
      and d.refobjid = (select x.oid from pg_catalog.pg_extension x where x.extname = 'outbox')
      and i.type in ('table', 'view', 'function')
  loop
    if thing.type = 'function' then
      execute pg_catalog.format('revoke all on function %s from public', thing.identity);
    end if;
    case
      when thing.type = 'table' or thing.is_definer then
        execute pg_catalog.format('alter %s %s owner to %I', thing.type, thing.identity, worker_role);
      when thing.type = 'view' then
        execute pg_catalog.format('grant select on %s to %I', thing.identity, worker_role);
      else
        execute pg_catalog.format('grant execute on function %s to %I', thing.identity, worker_role);
    end case;
  end loop;
end
$owner$;

grant execute on function
  @extschema@.outbox_enqueue(bigint, text, text, timestamptz, text, timestamptz),
  @extschema@.outbox_enqueue_many(bigint[], text, text, timestamptz, text, timestamptz),
  @extschema@.outbox_publish(text, jsonb, text, text, text, jsonb, jsonb, jsonb, text, text, text, timestamptz, uuid, timestamptz),
  @extschema@.outbox_store(text, jsonb, text, uuid, text, timestamptz, timestamptz), @extschema@.outbox_wait(bigint, interval, text)
  to outbox_writer;
-- For who owns a table. A trigger runs as the one who writes, but EXECUTE is asked of the one who makes it.
grant execute on function
  @extschema@.outbox_attach(regclass, text, text, text, text), @extschema@.outbox_detach(regclass, text),
  @extschema@.outbox_capture(regclass, text, text, text, text, text, text[], text), @extschema@.outbox_uncapture(regclass),
  @extschema@.outbox_tables_for_triggers(regclass), @extschema@.outbox_check_destination(text),
  @extschema@.outbox_check_expression(regclass, text, text, boolean), @extschema@.outbox_attach_name(text),
  @extschema@.outbox_attached(), @extschema@.outbox_captured()
  to outbox_writer;

grant execute on function
  @extschema@.outbox_partition_of(text, integer), @extschema@.outbox_partition_label(integer),
  @extschema@.outbox_crc32(text), @extschema@.outbox_uuid_v7()
  to public;

grant select on
  @extschema@.outbox_status, @extschema@.outbox_worker_status, @extschema@.outbox_partition_status,
  @extschema@.outbox_health, @extschema@.outbox, @extschema@.outbox_waiting, @extschema@.outbox_history,
  @extschema@.outbox_dead, @extschema@.outbox_audit, @extschema@.outbox_inbox, @extschema@.outbox_partitions, @extschema@.outbox_workers, @extschema@.outbox_settings,
  @extschema@.outbox_identity, @extschema@.outbox_destination_status, @extschema@.outbox_connections, @extschema@.outbox_paused,
  @extschema@.outbox_first_pending, @extschema@.outbox_first_that_could_go, @extschema@.outbox_first_shown, @extschema@.outbox_dead_counts, @extschema@.outbox_source, @extschema@.outbox_attempts_log,
  @extschema@.outbox_throughput, @extschema@.outbox_errors, @extschema@.outbox_attempts, @extschema@.outbox_ticks
  to outbox_monitor;
grant execute on function
  @extschema@.outbox_is_preloaded(), @extschema@.outbox_nothing_waits(), @extschema@.outbox_first_waiting(), @extschema@.outbox_first_dead(boolean), @extschema@.outbox_counters(), @extschema@.outbox_server_state(), @extschema@.outbox_registry(),
  @extschema@.outbox_server_workers(), @extschema@.outbox_has_ended(text), @extschema@.outbox_leases_last(text),
  @extschema@.outbox_open_transactions(), @extschema@.outbox_missing_slots(),
  @extschema@.outbox_claim_is_live(bigint, smallint, timestamptz), @extschema@.outbox_destinations(), @extschema@.outbox_is_taken(text, smallint, bigint),
  @extschema@.outbox_system_identifier(), @extschema@.outbox_here(), @extschema@.outbox_not_adopted(),
  @extschema@.outbox_destination_figures(text), @extschema@.outbox_ask_for_a_look(text), @extschema@.outbox_check(text),
  @extschema@.outbox_tick(interval), @extschema@.outbox_source_problem(), @extschema@.outbox_closed_lanes(),
  @extschema@.outbox_schema_problem(), @extschema@.outbox_minutes(), @extschema@.outbox_faults(), @extschema@.outbox_recent_ticks(), @extschema@.outbox_body_problem(text)
  to outbox_monitor;

grant execute on function
  @extschema@.outbox_retry(bigint, text, text), @extschema@.outbox_discard(bigint, text, text),
  @extschema@.outbox_retry_where(text, text, text, text, text, text, timestamptz, timestamptz, bigint, bigint, integer, text, boolean, integer),
  @extschema@.outbox_discard_where(text, text, text, text, text, text, timestamptz, timestamptz, bigint, bigint, integer, text, boolean, integer),
  @extschema@.outbox_replay(bigint, bigint, timestamptz, timestamptz, text, text, text, text, text, text, integer, text, boolean),
  @extschema@.outbox_purge(text, text, text, boolean),
  @extschema@.outbox_configure(integer, boolean, text), @extschema@.outbox_pause(text, text), @extschema@.outbox_resume(text, text),
  @extschema@.outbox_adopt(text), @extschema@.outbox_drain(interval),
  @extschema@.outbox_source_set(regclass, text, text, text, text, text, text, text, text, text, text, text, text, text, text),
  @extschema@.outbox_source_reset()
  to outbox_admin;
grant usage on foreign data wrapper outbox_amqp to outbox_admin;
grant usage on foreign data wrapper outbox_http to outbox_admin;
grant select on @extschema@.outbox_events, @extschema@.outbox_messages to outbox_admin; -- payloads

grant execute on function @extschema@.outbox_inbox_receive(text, text) to outbox_consumer;
grant execute on function @extschema@.outbox_inbox_forget(text, text) to outbox_admin;

grant execute on function
  @extschema@.outbox_fetch_unpublished(integer, text, interval), @extschema@.outbox_mark_published(bigint, bigint, text),
  @extschema@.outbox_mark_failed(bigint, bigint, text, text), @extschema@.outbox_relay(integer, interval)
  to outbox_relay;
-- Workers outside the server.
grant execute on function
  @extschema@.outbox_legible(text), @extschema@.outbox_of_utf8(bytea),
  @extschema@.outbox_work_begin(text), @extschema@.outbox_work_look(), @extschema@.outbox_work_destinations(),
  @extschema@.outbox_work_heartbeat(), @extschema@.outbox_work_leases(),
  @extschema@.outbox_work_lease(smallint[], bigint[], smallint[], bigint[], smallint[]), @extschema@.outbox_work_purge(),
  @extschema@.outbox_work_report(text, text, text, text), @extschema@.outbox_work_leave(), @extschema@.outbox_work_quit(),
  @extschema@.outbox_work_reopened(smallint[]), @extschema@.outbox_work_glance(smallint[]),
  @extschema@.outbox_work_wait(bigint[], integer, integer, boolean), @extschema@.outbox_work_holds(text, integer),
  @extschema@.outbox_work_claim(text, smallint[], bigint[], integer[], bigint[], bigint),
  @extschema@.outbox_work_claim_waiting(text, smallint, text, bigint, bigint, integer),
  @extschema@.outbox_work_claim_unleased(text, integer), @extschema@.outbox_work_due(smallint[], bigint[]),
  @extschema@.outbox_work_next_due_ms(), @extschema@.outbox_work_gates(smallint[]), @extschema@.outbox_work_pending(smallint[]),
  @extschema@.outbox_work_settle(text, text[], bigint[], smallint[], bigint[], text[], bigint[], text[], bigint[])
  to outbox_relay;

-- A session that replays old data may be silent; who may say so may lose events. A superuser may too.
do $grant$
begin
  if not pg_catalog.has_parameter_privilege('outbox_admin', 'outbox.replaying', 'set') then
    -- The catalog belongs to the whole server, and another database may be granting at this moment.
    lock table pg_catalog.pg_parameter_acl in share row exclusive mode;
    grant set on parameter outbox.replaying to outbox_admin;
  end if;
end
$grant$;

insert into @extschema@.outbox_settings (partition_count, leasing)
values (pg_catalog.current_setting('outbox.partition_count')::smallint, pg_catalog.current_setting('outbox.leasing')::boolean);

insert into @extschema@.outbox_identity (database, identity)
select here.database, here.identity from @extschema@.outbox_here() here;

-- Again: somebody may have created a function meanwhile. What could be created later is not refused, but said.
do $schema$
declare
  risk record;
begin
  for risk in select p.problem, p.remedy from @extschema@.outbox_schema_problem() p loop
    if risk.remedy like 'drop %' then
      raise exception '%', risk.problem using errcode = 'duplicate_object', hint = risk.remedy || ';';
    end if;
    raise warning '%', risk.problem
      using hint = risk.remedy || '; or create the extension in a schema of its own: CREATE SCHEMA outbox; CREATE EXTENSION outbox SCHEMA outbox;';
  end loop;
end
$schema$;

-- The launcher looks for new databases when this commits.
create function @extschema@.outbox_installed()
returns void language c volatile as 'MODULE_PATHNAME', 'outbox_installed_wrapper';
comment on function @extschema@.outbox_installed() is
  'Internal: tells the launcher at COMMIT that this database has the extension; warns if the library is not preloaded.';
revoke all on function @extschema@.outbox_installed() from public;
select @extschema@.outbox_installed();
