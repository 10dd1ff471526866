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
    let login = cluster.conn_string(DB).replace("user=postgres", "user=reader");
    Client::connect(&login, postgres::NoTls).expect("connect as reader")
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
