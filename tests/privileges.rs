//! Tests of privileges: EXECUTE is all that an application needs, and code of other roles never runs as the worker
//! role.

use postgres::error::SqlState;
use support::Cluster;
use support::DB;
use support::{Session, idle_cluster};

/// A server with the extension and no worker: nothing is delivered here.
fn cluster() -> Cluster {
    idle_cluster(&[])
}

fn denied(cluster: &Cluster, role: &str, sql: &str) -> bool {
    let mut client = cluster.connect(DB);
    client.run(&format!("set role {role}"));
    match client.batch_execute(sql) {
        Ok(()) => false,
        Err(error) => error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE),
    }
}

const TABLES: [&str; 17] = [
    "outbox",
    "outbox_identity",
    "outbox_audit",
    "outbox_inbox",
    "outbox_waiting",
    "outbox_history",
    "outbox_history_default",
    "outbox_dead",
    "outbox_attempts_log",
    "outbox_events",
    "outbox_partitions",
    "outbox_workers",
    "outbox_connections",
    "outbox_paused",
    "outbox_source",
    "outbox_settings",
    "outbox_policies",
];

#[test]
fn a_role_that_holds_only_execute_can_enqueue_and_nothing_else() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create role app; grant execute on function outbox_enqueue(bigint, text, text, timestamptz, text, timestamptz) to app;
         select outbox_publish('T', '{}', 'order', '42', 'placed', available_at => now() + '1 day')",
    );
    assert!(!denied(&cluster, "app", "select outbox_enqueue(7, 'k')"));
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox where seq = 7 and key = 'k'"),
        1
    );
    assert!(denied(&cluster, "app", "select outbox_publish('T', '{}')"));
    for table in TABLES {
        for sql in [
            format!("select from {table}"),
            format!("delete from {table}"),
            format!("insert into {table} default values"),
        ] {
            assert!(denied(&cluster, "app", &sql), "{sql}");
        }
    }
}

#[test]
fn each_group_role_may_do_what_its_name_says() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create role writer in role outbox_writer; create role monitor in role outbox_monitor; create role boss in role outbox_admin",
    );
    assert!(!denied(
        &cluster,
        "writer",
        "select outbox_publish('T', '{}', 'order', '42')"
    ));
    assert!(denied(&cluster, "writer", "select outbox_discard(1)"));
    for view in [
        "outbox_status",
        "outbox_health",
        "outbox_worker_status",
        "outbox_destination_status",
        "outbox_partition_status",
        "outbox_throughput",
        "outbox_destination_throughput",
        "outbox_latency",
        "outbox_errors",
        "outbox_attempts",
        "outbox_passes",
    ] {
        assert!(!denied(&cluster, "monitor", &format!("select * from {view}")), "{view}");
        assert!(denied(&cluster, "writer", &format!("select * from {view}")), "{view}");
    }
    for payloads in ["outbox_events", "outbox_messages"] {
        assert!(
            denied(&cluster, "monitor", &format!("select * from {payloads}")),
            "{payloads}"
        );
        assert!(
            !denied(&cluster, "boss", &format!("select * from {payloads}")),
            "{payloads}"
        );
    }
    for call in ["outbox_adopt()", "outbox_drain('0 s')"] {
        assert!(denied(&cluster, "monitor", &format!("select {call}")), "{call}");
        assert!(!denied(&cluster, "boss", &format!("select {call}")), "{call}");
    }
    assert!(denied(&cluster, "monitor", "select outbox_retry(1)"));
    assert!(!denied(&cluster, "boss", "select outbox_retry(1)"));
    assert!(!denied(
        &cluster,
        "boss",
        "select outbox_discard(1, reason => 'no longer needed')"
    ));
}

/// The functions of the extension that every role may call. A role without USAGE on the schema can call them only
/// inside another function.
const OPEN: &str = "outbox_crc32 outbox_partition_label outbox_partition_of outbox_uuid_v7 partition_label";

fn open_to(cluster: &Cluster, role: &str) -> String {
    let sql = format!(
        "select coalesce(string_agg(p.proname, ' ' order by p.proname), '')
         from pg_proc p join pg_depend d on d.objid = p.oid and d.classid = 'pg_proc'::regclass and d.deptype = 'e'
         join pg_extension e on e.oid = d.refobjid and e.extname = 'outbox'
         where has_function_privilege('{role}', p.oid, 'execute')"
    );
    cluster.query_one(DB, &sql)
}

#[test]
fn only_the_worker_role_may_call_the_worker_protocol() {
    let cluster = cluster();
    assert_eq!(open_to(&cluster, "public"), OPEN);
    cluster.exec(DB, "create role boss in role outbox_admin");
    for call in [
        "outbox_internal.claim_unleased('default', -1, 60, 1, 1000000)",
        "outbox_internal.settle('', null, null, null, null, null, null, null, null)",
        "outbox_internal.leave('server-1')",
    ] {
        for role in ["boss", "outbox_consumer"] {
            assert!(denied(&cluster, role, &format!("select {call}")), "{role}: {call}");
        }
    }
}

/// In this schema another role could create the objects that the schema is there to keep out.
#[test]
fn no_role_may_create_in_the_internal_schema() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(
        DB,
        "create role landlord; alter database postgres owner to landlord; alter schema public owner to postgres;
         create extension outbox; create role boss in role outbox_admin",
    );
    for role in ["landlord", "outbox_worker", "boss", "outbox_monitor", "outbox_relay"] {
        for sql in [
            "create function outbox_internal.wake(integer) returns void language sql as 'select'",
            "create table outbox_internal.claimed_too ()",
            "create type outbox_internal.kind as enum ('a')",
            "create operator outbox_internal.= (function = int4eq, leftarg = integer, rightarg = integer)",
            "alter schema outbox_internal rename to mine",
            "drop schema outbox_internal cascade",
        ] {
            assert!(denied(&cluster, role, sql), "{role}: {sql}");
        }
    }
    // Health reports it when a role is granted the right later.
    cluster.exec(DB, "grant create on schema outbox_internal to outbox_worker");
    assert_eq!(
        cluster.query_one::<String>(DB, r#"select remedy from outbox_health where "check" = 'schema'"#),
        "revoke create on schema outbox_internal from outbox_worker"
    );
}

#[test]
fn default_privileges_open_no_function_and_nothing_in_the_internal_schema() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(
        DB,
        "create role mallory; grant create on schema public to mallory;
         alter default privileges grant all on schemas to public, mallory;
         alter default privileges grant all on functions to public; alter default privileges grant all on functions to mallory with grant option;
         alter default privileges grant all on tables to public, mallory;
         alter default privileges grant all on types to mallory;
         create extension outbox",
    );
    assert_eq!(open_to(&cluster, "public"), OPEN);
    assert_eq!(open_to(&cluster, "mallory"), OPEN);
    let open: String = cluster.query_one(
        DB,
        "select coalesce(string_agg(format('%s %s', a.what, x.privilege_type), ', '), '')
         from (select 'the schema' as what, n.nspacl as acl from pg_namespace n where n.nspname = 'outbox_internal'
               union all
               select c.relname, c.relacl from pg_class c where c.relnamespace = 'outbox_internal'::regnamespace) a
         cross join aclexplode(a.acl) x where x.grantee in (0, 'mallory'::regrole)",
    );
    assert_eq!(open, "");
    for sql in [
        "select outbox_internal.wake(0, '{}', '{}')",
        "create function outbox_internal.wake(integer) returns void language sql as 'select'",
        "select * from outbox_internal.event_text",
    ] {
        assert!(denied(&cluster, "mallory", sql), "{sql}");
    }
}

#[test]
fn a_callers_own_operators_and_functions_never_run_as_the_worker_role() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create role mallory in role outbox_writer; create schema evil authorization mallory;
         create table evil.caught (who text); grant all on evil.caught to public; grant usage on schema evil to public;
         set role mallory;
         create function evil.trap(bigint, bigint) returns boolean language plpgsql as
           $$ begin insert into evil.caught values (current_user); return true; end $$;
         create operator evil.= (function = evil.trap, leftarg = bigint, rightarg = bigint);
         create function evil.trap_mod(bigint, smallint) returns bigint language plpgsql as
           $$ begin insert into evil.caught values (current_user); return 0; end $$;
         create operator evil.% (function = evil.trap_mod, leftarg = bigint, rightarg = smallint);
         create function evil.unnest(bigint[]) returns setof bigint language plpgsql as
           $$ begin insert into evil.caught values (current_user); return query select 1::bigint; end $$;
         set search_path = evil, pg_catalog, public;
         select outbox_enqueue(1, 'k'); select outbox_enqueue_many('{2,3}', 'k'); select outbox_publish('T', '{}', 'a', 'b');
         select outbox_partition_of('x');",
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from evil.caught"), 0);
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 4);
}

#[test]
fn the_traps_of_the_test_above_catch_a_careless_statement() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create schema evil; create table evil.caught (who text);
         create function evil.trap_mod(bigint, smallint) returns bigint language plpgsql as
           $$ begin insert into evil.caught values (current_user); return 0; end $$;
         create operator evil.% (function = evil.trap_mod, leftarg = bigint, rightarg = smallint);
         set search_path = evil, pg_catalog; select 7::bigint % 2::smallint;",
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from evil.caught"), 1);
}
