//! The inbox: a consumer does its work once for each message, however often the message arrives. On a real Postgres,
//! with maintenance by a real server.

use std::thread;

use postgres::Client;
use postgres::error::SqlState;
use serde_json::{Value, json};
use support::Cluster;
use support::{DB, Session, Stage, wait_true};

/// A server that does not preload the library, which a database that only consumes does not need.
fn consuming_cluster() -> Cluster {
    let cluster = Cluster::builder().preload(false).start();
    cluster.exec(
        DB,
        "create extension outbox; create role reader login in role outbox_consumer",
    );
    cluster
}

/// A session of a role that may call outbox_inbox_receive and nothing else.
fn reader(cluster: &Cluster) -> Client {
    reader_named(cluster, "reader")
}

fn reader_named(cluster: &Cluster, role: &str) -> Client {
    let login = cluster
        .conn_string(DB)
        .replace("user=postgres", &format!("user={role}"));
    Client::connect(&login, postgres::NoTls).expect("connect")
}

fn receive(client: &mut Client, consumer: &str, id: &str) -> bool {
    let row = client.query_one("select outbox_inbox_receive($1, $2)", &[&consumer, &id]);
    row.expect("receive").get(0)
}

fn code(client: &mut Client, sql: &str) -> SqlState {
    let error = client.batch_execute(sql).expect_err(sql);
    error.code().unwrap_or_else(|| panic!("{sql}: {error:?}")).clone()
}

#[test]
fn a_message_is_new_once_for_each_consumer_and_again_after_a_rollback() {
    let cluster = consuming_cluster();
    let mut reader = reader(&cluster);
    assert!(receive(&mut reader, "search", "m1"));
    assert!(!receive(&mut reader, "search", "m1"));
    assert!(receive(&mut reader, "cache", "m1"));
    assert!(receive(&mut reader, "search", "m2"));
    for (begin, end) in [("begin", "rollback"), ("begin; savepoint s", "rollback to s; commit")] {
        reader.run(begin);
        assert!(receive(&mut reader, "search", "m3"), "{begin}");
        assert!(!receive(&mut reader, "search", "m3"), "{begin}");
        reader.run(end);
    }
    assert!(receive(&mut reader, "search", "m3"));
}

#[test]
fn a_concurrent_receive_of_the_same_message_waits_for_the_first() {
    let cluster = consuming_cluster();
    for (end, is_new) in [("commit", false), ("rollback", true)] {
        let (mut first, mut second) = (reader(&cluster), reader(&cluster));
        first.run("begin");
        assert!(receive(&mut first, "search", end));
        let found = thread::scope(|scope| {
            let waiting = scope.spawn(|| receive(&mut second, "search", end));
            wait_true(
                &cluster,
                "the second session to wait",
                "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and usename = 'reader')",
            );
            first.run(end);
            waiting.join().expect("no panic")
        });
        assert_eq!(found, is_new, "after {end}");
    }
}

#[test]
fn four_processes_that_get_every_message_do_the_work_of_each_once() {
    const MESSAGES: usize = 300;
    let cluster = consuming_cluster();
    cluster.exec(
        DB,
        "create table done (id text, by int); grant insert on done to reader",
    );
    thread::scope(|scope| {
        for process in 0..4 {
            let mut client = reader(&cluster);
            scope.spawn(move || {
                for n in 0..MESSAGES {
                    let id = format!("m{}", (n * 7 + process * 3) % MESSAGES);
                    let mut work = client.transaction().expect("begin");
                    let row = work.query_one("select outbox_inbox_receive('c', $1)", &[&id]);
                    if row.expect("receive").get(0) {
                        work.execute("insert into done values ($1, $2)", &[&id, &(process as i32)])
                            .expect("work");
                    }
                    // Some consumers crash before they commit, and the message arrives again.
                    match n % 10 {
                        9 => drop(work),
                        _ => work.commit().expect("commit"),
                    }
                }
            });
        }
    });
    let mut last = reader(&cluster);
    for n in 0..MESSAGES {
        let mut work = last.transaction().expect("begin");
        let id = format!("m{n}");
        if work
            .query_one("select outbox_inbox_receive('c', $1)", &[&id])
            .expect("receive")
            .get(0)
        {
            work.execute("insert into done values ($1, 9)", &[&id]).expect("work");
        }
        work.commit().expect("commit");
    }
    let counts = "select array[count(*), count(distinct id)] from done";
    assert_eq!(cluster.query_one::<Vec<i64>>(DB, counts), [MESSAGES as i64; 2]);
}

#[test]
fn a_consumer_may_receive_and_nothing_else_and_bad_ids_are_refused() {
    let cluster = consuming_cluster();
    let mut reader = reader(&cluster);
    for sql in [
        "select * from outbox_inbox",
        "delete from outbox_inbox",
        "select outbox_inbox_forget('search')",
        "select outbox_trim_inbox(0, 10)",
        "select outbox_publish('T', '{}')",
    ] {
        assert_eq!(code(&mut reader, sql), SqlState::INSUFFICIENT_PRIVILEGE, "{sql}");
    }
    for (sql, expected) in [
        (
            "select outbox_inbox_receive(null, 'm')",
            SqlState::NULL_VALUE_NOT_ALLOWED,
        ),
        (
            "select outbox_inbox_receive('c', null)",
            SqlState::NULL_VALUE_NOT_ALLOWED,
        ),
        (
            "select outbox_inbox_receive(repeat('c', 256), 'm')",
            SqlState::PROGRAM_LIMIT_EXCEEDED,
        ),
        (
            "select outbox_inbox_receive('c', repeat('ü', 128))",
            SqlState::PROGRAM_LIMIT_EXCEEDED,
        ),
    ] {
        assert_eq!(code(&mut reader, sql), expected, "{sql}");
    }
    assert!(receive(&mut reader, &"c".repeat(255), &"m".repeat(255)));
}

#[test]
fn an_admin_makes_a_consumer_forget_one_message_or_all_and_the_audit_records_it() {
    let cluster = consuming_cluster();
    cluster.exec(
        DB,
        "select outbox_inbox_receive(c, m) from unnest('{search,cache}'::text[]) c, unnest('{m1,m2,m3}'::text[]) m",
    );
    let forget = |arguments: &str| {
        cluster.exec(DB, "drop role if exists boss; create role boss in role outbox_admin");
        let mut boss = cluster.connect(DB);
        boss.run("set role boss");
        let sql = format!("select outbox_inbox_forget({arguments})");
        boss.value::<i64>(sql.as_str())
    };
    assert_eq!(forget("'search', 'm2'"), 1);
    assert_eq!(forget("'search', 'm2'"), 0);
    assert_eq!(forget("'search'"), 2);
    let remaining = "select array_agg(consumer || ' ' || message_id order by 1) from outbox_inbox";
    assert_eq!(
        cluster.query_one::<Vec<String>>(DB, remaining),
        ["cache m1", "cache m2", "cache m3"]
    );
    let audit = "select jsonb_agg(jsonb_build_array(acted_as, action, filter, count) order by at) from outbox_audit";
    let expected = json!([
        ["boss", "forget", {"consumer": "search", "message_id": "m2"}, 1],
        ["boss", "forget", {"consumer": "search"}, 2]
    ]);
    assert_eq!(cluster.query_one::<Value>(DB, audit), expected);
}

#[test]
fn the_name_of_a_consumer_belongs_to_the_first_role_that_uses_it() {
    let cluster = consuming_cluster();
    cluster.exec(
        DB,
        "create role other login in role outbox_consumer; create role shop; create role boss in role outbox_admin",
    );
    let mut reader = reader(&cluster);
    let mut other = reader_named(&cluster, "other");
    assert!(cluster.query_one::<bool>(DB, "select outbox_inbox_receive('search', 'm0')"));
    assert!(receive(&mut reader, "search", "m1"), "a superuser owns no name");
    let taken = "select outbox_inbox_receive('search', 'm2')";
    let error = other.batch_execute(taken).expect_err("another role");
    let error = error.as_db_error().expect("an error of the server");
    assert_eq!(error.code(), &SqlState::INSUFFICIENT_PRIVILEGE);
    assert_eq!(error.message(), "consumer \"search\" belongs to role reader");
    assert!(
        error
            .hint()
            .is_some_and(|hint| hint.contains("outbox_inbox_assign('search', ")),
        "{error:?}"
    );
    assert!(
        receive(&mut reader, "search", "m2"),
        "a message that the other role named"
    );
    assert!(receive(&mut other, "cache", "m1"), "a name of its own");
    cluster.exec(DB, "grant reader to other");
    assert!(receive(&mut other, "search", "m3"), "a member of the owner");
    cluster.exec(DB, "revoke reader from other");

    // An administrator passes it on, for example to a group of roles.
    assert_eq!(
        code(&mut reader, "select outbox_inbox_assign('search', 'shop')"),
        SqlState::INSUFFICIENT_PRIVILEGE
    );
    let assign = "set role boss; select outbox_inbox_assign('search', 'shop'); reset role; grant shop to other";
    cluster.exec(DB, assign);
    assert!(receive(&mut other, "search", "m4"));
    assert_eq!(
        code(&mut reader, "select outbox_inbox_receive('search', 'm5')"),
        SqlState::INSUFFICIENT_PRIVILEGE
    );
    let audit = "select jsonb_build_array(acted_as, filter) from outbox_audit where action = 'assign'";
    assert_eq!(
        cluster.query_one::<Value>(DB, audit),
        json!(["boss", {"consumer": "search", "owner": "shop"}])
    );
    let mut boss = cluster.connect(DB);
    boss.run("set role boss");
    for (sql, expected) in [
        (
            "select outbox_inbox_assign('search', 'nobody')",
            SqlState::UNDEFINED_OBJECT,
        ),
        (
            "select outbox_inbox_assign(null, 'shop')",
            SqlState::NULL_VALUE_NOT_ALLOWED,
        ),
    ] {
        assert_eq!(code(&mut boss, sql), expected, "{sql}");
    }
    // Without an owner, or with one that does not exist, the next role owns it.
    boss.run("select outbox_inbox_assign('search', null)");
    assert!(receive(&mut reader, "search", "m5"));
    cluster.exec(
        DB,
        "alter role shop rename to store; update outbox_inbox_owners set owner = 'shop'",
    );
    assert!(cluster.query_one::<bool>(DB, "select outbox_inbox_receive('search', 'm6')"));
    assert!(receive(&mut other, "search", "m7"));
    let owners = "select array_agg(consumer || ' ' || owner order by consumer) from outbox_inbox_owners";
    assert_eq!(
        cluster.query_one::<Vec<String>>(DB, owners),
        ["cache shop", "search other"]
    );
}

#[test]
fn of_two_roles_that_use_a_new_name_at_a_time_one_owns_it() {
    let cluster = consuming_cluster();
    cluster.exec(DB, "create role other login in role outbox_consumer");
    for (end, is_refused) in [("commit", true), ("rollback", false)] {
        let (mut first, mut second) = (reader(&cluster), reader_named(&cluster, "other"));
        first.run("begin");
        assert!(receive(&mut first, end, "m1"));
        let received = thread::scope(|scope| {
            let sql = format!("select outbox_inbox_receive('{end}', 'm2')");
            let waiting = scope.spawn(move || second.batch_execute(&sql));
            wait_true(
                &cluster,
                "the second session to wait",
                "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and usename = 'other')",
            );
            first.run(end);
            waiting.join().expect("no panic")
        });
        let refusal = received.err().and_then(|error| error.code().cloned());
        let expected = is_refused.then_some(SqlState::INSUFFICIENT_PRIVILEGE);
        assert_eq!(refusal, expected, "after {end}");
    }
}

#[test]
fn received_messages_are_remembered_for_the_configured_time() {
    let cluster = Stage::new(&[]).cluster;
    // In one transaction: maintenance may begin at any time, and must see none of the rows before the batch size is
    // set.
    let mut client = cluster.connect(DB);
    let mut both = client.transaction().expect("a transaction");
    let rows = "insert into outbox_inbox (consumer, message_id, received_at)
                select 'c', n::text, now() - n * interval '1 day' from generate_series(0, 20) n";
    both.run(rows);
    let trimmed = both.query_one("select outbox_trim_inbox(15 * 86400 + 3600, 2)", &[]);
    assert_eq!(trimmed.expect("a batch").get::<_, i64>(0), 2, "a batch");
    both.commit().expect("commit");
    // A changed setting starts maintenance at once. With the default of seven days, rows of 0 to 6 days remain.
    cluster.exec(DB, "alter database postgres set outbox.batch_size = 10");
    wait_true(
        &cluster,
        "the old rows to be removed",
        "select max(message_id::int) = 6 from outbox_inbox",
    );
    cluster.exec(DB, "alter database postgres set outbox.inbox_retention = '3.5 d'");
    wait_true(
        &cluster,
        "further rows to be removed",
        "select count(*) = 4 from outbox_inbox",
    );
    assert!(!cluster.query_one::<bool>(DB, "select outbox_inbox_receive('c', '2')"));
    assert!(cluster.query_one::<bool>(DB, "select outbox_inbox_receive('c', '5')"));
}
