//! Tests of privileges: EXECUTE is all that an application needs, and code of other roles never runs as the worker
//! role.

use postgres::error::SqlState;
use support::Cluster;
use support::DB;
use support::{LONG, Session, health, idle_cluster, refused, tool, wait_until};

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
    "outbox_subscriptions",
];

#[test]
fn a_role_that_holds_only_execute_can_enqueue_and_nothing_else() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create role app; grant execute on function outbox_enqueue(bigint, text, text, timestamptz, text, timestamptz) to app;
         select outbox_publish('T', '{}', 'order', '42', 'placed', available_at => now() + '1 day')",
    );
    cluster.draw_seqs(7);
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
const OPEN: &str = "outbox_crc32 outbox_partition_label outbox_partition_of outbox_uuid_v7 partition_label row_deleted row_inserted row_updated";

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
        "outbox_internal.settle('', null, null, null, null, null, null, null, null, null)",
        "outbox_internal.lease_release('server-1', '{0}', '{1}')",
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

/// Whatever ALTER DEFAULT PRIVILEGES can grant, on all schemas and on this one, to roles and to all roles.
const DEFAULTS: &str = "
  create role mallory;
  do $$ declare kind text; place text; begin
    foreach kind in array '{tables,sequences,functions,types,schemas}'::text[] loop
      foreach place in array '{\"\",in schema public}'::text[] loop
        continue when kind = 'schemas' and place <> '';
        execute format('alter default privileges %s grant all on %s to public', place, kind);
        execute format('alter default privileges %s grant all on %s to mallory with grant option', place, kind);
      end loop;
    end loop;
  end $$;";

/// What `mallory` and all roles may do with what is not theirs, but for the functions in `OPEN` and the use of types.
fn opened(cluster: &Cluster, database: &str) -> String {
    cluster.query_one(
        database,
        "select coalesce(string_agg(format('%s %s', a.what, x.privilege_type), ', ' order by a.what), '')
         from (select c.oid::regclass::text as what, c.relacl as acl from pg_class c
               where c.relname ~ '^outbox' or c.relnamespace = 'outbox_internal'::regnamespace
               union all select n.nspname, n.nspacl from pg_namespace n where n.nspname = 'outbox_internal'
               union all select format_type(t.oid, null), t.typacl from pg_type t
                 where t.typnamespace = 'outbox_internal'::regnamespace) a
         cross join aclexplode(a.acl) x
         where x.grantee = 'mallory'::regrole or x.grantee = 0 and x.privilege_type <> 'USAGE'",
    )
}

#[test]
fn default_privileges_open_nothing_of_the_extension() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(
        DB,
        &format!("{DEFAULTS} grant create on schema public to mallory; create extension outbox"),
    );
    assert_eq!(open_to(&cluster, "public"), OPEN);
    assert_eq!(open_to(&cluster, "mallory"), OPEN);
    assert_eq!(opened(&cluster, DB), "");
    for sql in [
        "select outbox_internal.wake(0, '{}', '{}')",
        "create function outbox_internal.wake(integer) returns void language sql as 'select'",
        "select * from outbox_internal.event_text",
        "select payload from outbox_events",
        "delete from outbox",
        "update outbox_settings set leasing = false",
        "update outbox_identity set restored = true",
        "select nextval('outbox_events_seq_seq')",
    ] {
        assert!(denied(&cluster, "mallory", sql), "{sql}");
    }
    // What is made at run time, as the worker role.
    let with_partition = |day: &str| {
        format!(
            "insert into outbox_history (seq, destination, partition, attempts, enqueued_at, published_at)
             values (1, 'default', 0, 1, '{day}', '{day}');
             select outbox_internal.make_partitions(86400, '{day}')"
        )
    };
    cluster.exec(
        DB,
        &format!(
            "alter default privileges for role outbox_worker grant all on tables to mallory, public;
             alter default privileges for role outbox_worker in schema public grant all on tables to mallory;
             {}",
            with_partition("2030-01-01")
        ),
    );
    let parts: i64 = cluster.query_one(DB, "select count(*) from outbox_history_partitions()");
    assert!(parts > 0);
    assert_eq!(opened(&cluster, DB), "");
}

#[test]
fn a_grant_after_create_extension_stays_also_in_a_dump_and_is_no_alarm() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(
        DB,
        &format!("{DEFAULTS} create extension outbox; grant select on outbox_history, outbox_status to mallory"),
    );
    cluster.exec(DB, "create database copy");
    let allowed = "outbox_history SELECT, outbox_status SELECT";
    assert_eq!(opened(&cluster, DB), allowed);
    assert!(health(&cluster, "schema").0);
    let file = cluster.data_dir().with_file_name("dump");
    let file = file.to_str().expect("a path");
    tool(&cluster, "pg_dump", &["-Fc", "-f", file, DB]);
    tool(&cluster, "pg_restore", &["--exit-on-error", "-d", "copy", file]);
    assert_eq!(opened(&cluster, "copy"), allowed);
}

/// The names of two schemas are exchanged while a statement waits for the lock of a table.
#[test]
fn a_trigger_of_the_extension_comes_on_no_table_of_another_role_by_a_name_that_moves() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create role victim; create role mallory in role outbox_writer; grant create on database postgres to mallory;
         create schema first authorization mallory; create schema second authorization mallory;
         grant create, usage on schema second to victim; grant usage on schema public to mallory;
         create table first.orders (id integer primary key); alter table first.orders owner to mallory;
         create table second.orders (id integer primary key, seq bigint); alter table second.orders owner to victim;
         grant trigger on second.orders to mallory",
    );
    let on = "select coalesce(string_agg(distinct tgrelid::regclass::text, ' '), '') from pg_trigger where tgrelid::regclass::text ~ 'orders'";
    for (call, is_refused, ends_on) in [
        (
            "create trigger by_hand after insert on first.orders referencing new table as outbox_new
             for each statement execute function public.outbox_attached('{\"seq\": \"id\"}')",
            true,
            "",
        ),
        ("select public.outbox_capture('first.orders')", false, "third.orders"),
        (
            "select public.outbox_attach('first.orders', seq => 'id')",
            false,
            "third.orders",
        ),
    ] {
        let mut holder = cluster.connect(DB);
        holder.run("set role mallory; begin; lock table first.orders in access exclusive mode");
        let mut caller = cluster.connect(DB);
        let pid: i32 = caller.query_one("select pg_backend_pid()", &[]).expect("a pid").get(0);
        caller.run("set role mallory");
        let waiting = std::thread::spawn(move || caller.batch_execute(call));
        let waits = format!("select cardinality(pg_blocking_pids({pid})) > 0");
        wait_until("it to wait", LONG, || cluster.query_one(DB, &waits));
        holder.run("alter schema first rename to third; alter schema second rename to first; commit");
        let done = waiting.join().expect("no panic");
        let code = done.as_ref().err().and_then(|error| error.code()).cloned();
        assert_eq!(
            code,
            is_refused.then_some(SqlState::INSUFFICIENT_PRIVILEGE),
            "{call}: {done:?}"
        );
        assert_eq!(cluster.query_one::<String>(DB, on), ends_on, "{call}");
        cluster.exec(
            DB,
            "alter schema first rename to second; alter schema third rename to first; set role mallory;
             select public.outbox_uncapture('first.orders'), public.outbox_detach('first.orders')",
        );
    }
}

#[test]
fn a_trigger_uses_a_destination_only_while_the_owner_of_its_table_may() {
    let cluster = cluster();
    cluster.draw_seqs(9);
    cluster.exec(
        DB,
        r#"create server audit foreign data wrapper outbox_amqp options (url 'amqp://localhost');
           create role shopkeeper in role outbox_writer; create schema shop authorization shopkeeper; set role shopkeeper;
           create table shop.orders (id int primary key); create table shop.events (seq bigint);
           create trigger by_hand after insert on shop.events referencing new table as outbox_new for each statement
             execute function public.outbox_attached('{"seq": "seq", "destination": "audit"}')"#,
    );
    let is_refused = |sql: &str| {
        let error = refused(&cluster, sql); // as a superuser
        assert_eq!(error.code(), &SqlState::INSUFFICIENT_PRIVILEGE, "{error:?}");
        let hint = error.hint().unwrap_or_default().to_owned();
        assert!(
            hint.contains("GRANT USAGE ON FOREIGN SERVER audit TO shopkeeper"),
            "{error:?}"
        );
        hint
    };
    let remedy = is_refused("insert into shop.events values (1)");
    cluster.exec(DB, &remedy);
    cluster.exec(DB, "insert into shop.events values (1)");
    cluster.exec(
        DB,
        "set role shopkeeper; select public.outbox_capture('shop.orders', destination => 'audit');
         insert into shop.orders values (1)",
    );
    cluster.exec(DB, "revoke usage on foreign server audit from shopkeeper");
    is_refused("insert into shop.events values (2)");
    is_refused("insert into shop.orders values (2)");
}

#[test]
fn a_server_named_default_counts_only_if_an_administrator_owns_it() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create role intruder; grant usage on foreign data wrapper outbox_http to intruder; set role intruder;
         create server \"default\" foreign data wrapper outbox_http options (url 'https://example.com')",
    );
    let counts = "select server is not null from outbox_internal.destinations() where destination = 'default'";
    assert!(!cluster.query_one::<bool>(DB, counts));
    let (_, problem) = health(&cluster, "destination");
    assert!(problem.contains("its owner intruder"), "{problem}");
    cluster.exec(DB, "alter server \"default\" owner to postgres");
    assert!(cluster.query_one::<bool>(DB, counts));
    assert!(!health(&cluster, "destination").1.contains("its owner"));
}

#[test]
fn a_session_that_takes_the_name_of_pg_restore_leaves_no_message_out() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create role writer login in role outbox_writer; create role shopkeeper; create schema shop authorization shopkeeper",
    );
    let mut writer = cluster.connect(DB);
    writer.run("set session authorization writer; set application_name = 'pg_restore'");
    cluster.exec(
        DB,
        "set role shopkeeper;
         create table shop.events (seq bigint primary key, type text, at timestamptz); reset role;
         select outbox_source_set('shop.events', seq => 'seq', type => 'type', created_at => 'at')",
    );
    let closed = writer
        .batch_execute("select outbox_publish('T', '{}')")
        .expect_err("closed");
    assert_eq!(
        closed.code(),
        Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE),
        "{closed:?}"
    );
}

#[test]
fn nobody_becomes_a_member_of_the_worker_role_and_health_names_one_that_is() {
    let cluster = cluster();
    cluster.exec(DB, "create role intruder");
    for statement in [
        "grant outbox_worker to intruder",
        "grant outbox_writer, outbox_worker to intruder",
        "create role another in role outbox_worker",
        "alter group outbox_worker add user intruder",
    ] {
        let error = refused(&cluster, statement);
        assert_eq!(
            error.code(),
            &SqlState::INSUFFICIENT_PRIVILEGE,
            "{statement}: {error:?}"
        );
    }
    cluster.exec(
        DB,
        "grant outbox_writer to intruder; revoke outbox_worker from intruder",
    );
    assert!(health(&cluster, "role").0);
    // As it may have been before an update of the library.
    cluster.exec(
        DB,
        "alter role outbox_worker rename to hidden; grant hidden to intruder; alter role hidden rename to outbox_worker",
    );
    let (ok, problem) = health(&cluster, "role");
    assert!(
        !ok && problem.contains("intruder is a member of outbox_worker"),
        "{problem}"
    );
    let remedy: String = cluster.query_one(DB, "select remedy from outbox_health where \"check\" = 'role'");
    cluster.exec(DB, &remedy);
    assert!(health(&cluster, "role").0);
}

#[test]
fn health_names_a_function_that_was_altered() {
    let cluster = cluster();
    assert!(health(&cluster, "schema").0);
    for (alter, back) in [
        (
            "alter function outbox_retry reset search_path",
            "alter function outbox_retry set search_path = pg_catalog, pg_temp",
        ),
        (
            "alter function outbox_retry security invoker",
            "alter function outbox_retry security definer",
        ),
    ] {
        cluster.exec(DB, alter);
        let (ok, problem) = health(&cluster, "schema");
        assert!(!ok && problem.contains("function outbox_retry"), "{alter}: {problem}");
        cluster.exec(DB, back);
        assert!(health(&cluster, "schema").0);
    }
    cluster.exec(
        DB,
        "do $$ begin execute replace(pg_get_functiondef('outbox_retry'::regproc), 'begin', 'begin perform 1;'); end $$",
    );
    assert!(!health(&cluster, "schema").0);
}

#[test]
fn a_role_that_others_have_prepared_is_not_adopted() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "drop extension outbox; create role intruder; create role member in role outbox_writer",
    );
    for (prepare, what) in [
        ("alter role outbox_admin login", "has the attribute LOGIN"),
        ("alter role outbox_monitor bypassrls", "has the attribute BYPASSRLS"),
        ("alter role outbox_worker superuser", "has the attribute SUPERUSER"),
        (
            "grant outbox_admin to intruder with admin option",
            "has the member intruder with ADMIN OPTION",
        ),
        ("grant outbox_policy to intruder", "has the member intruder"),
        (
            "grant pg_read_all_data to outbox_worker",
            "is a member of pg_read_all_data",
        ),
    ] {
        cluster.exec(DB, prepare);
        let error = refused(&cluster, "create extension outbox");
        assert!(error.message().contains(what), "{prepare}: {error:?}");
        cluster.exec(DB, error.hint().expect("a hint"));
    }
    cluster.exec(DB, "create extension outbox"); // with a member of outbox_writer
}

#[test]
fn a_seq_that_no_event_has_had_cannot_be_enqueued() {
    let cluster = cluster();
    cluster.exec(DB, "create role writer in role outbox_writer");
    let mut client = cluster.connect(DB);
    client.run("set role writer");
    let mut refused = |sql: &str| {
        let error = client.batch_execute(sql).expect_err(sql);
        assert_eq!(error.code(), Some(&SqlState::NO_DATA_FOUND), "{sql}: {error:?}");
    };
    refused("select outbox_enqueue(1, key => 'k')");
    cluster.exec(DB, "select outbox_publish('T', '{}') from generate_series(1, 3)");
    cluster.exec(DB, "delete from outbox; delete from outbox_events where seq = 2");
    refused("select outbox_enqueue_many(array[3, 4], 'k')");
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 0);
    // One that is gone, or is not committed yet, has had its seq.
    cluster.exec(DB, "select outbox_enqueue(2, key => 'k')");
}
