//! Does a call that had to wait go by what is committed when it goes on? And can calls not wait for each other in a
//! circle? Each test holds a lock in one session, lets another wait for it, and changes what that one has read.

use postgres::error::SqlState;
use postgres::{Client, Error};
use std::thread::{self, JoinHandle};
use std::time::Instant;
use support::wait::patient;
use support::{Cluster, DB, LONG, Session, idle_cluster, wait_until};

/// A destination `audit` that gets all events for the default one, and a table whose rows are captured, and one with
/// seqs of events that is attached.
fn cluster() -> Cluster {
    let cluster = idle_cluster(&["deadlock_timeout = '200ms'"]);
    cluster.exec(
        DB,
        "create server audit foreign data wrapper outbox_amqp options (url 'amqp://localhost');
         create table orders (id integer primary key); select outbox_capture('orders');
         create table chosen (seq bigint); select outbox_attach('chosen')",
    );
    cluster.draw_seqs(1); // seq 1 is for events that a test stores itself
    cluster
}

/// A statement that runs in a session of its own.
struct Beside {
    pid: i32,
    run: JoinHandle<Result<(), Error>>,
}

impl Beside {
    fn run(cluster: &Cluster, sql: &str) -> Self {
        let mut client = cluster.connect(DB);
        let pid = client.query_one("select pg_backend_pid()", &[]).expect("a pid").get(0);
        let sql = sql.to_owned();
        let run = thread::spawn(move || client.batch_execute(&sql));
        Self { pid, run }
    }

    fn wait_blocked(self, cluster: &Cluster) -> Self {
        let waits = format!("select cardinality(pg_blocking_pids({})) > 0", self.pid);
        wait_until("it to wait", LONG, || {
            assert!(!self.run.is_finished(), "it did not wait");
            cluster.query_one(DB, &waits)
        });
        self
    }

    fn end(self) -> Result<(), Error> {
        self.run.join().expect("no panic")
    }
}

fn begin(cluster: &Cluster, sql: &str) -> Client {
    let mut client = cluster.connect(DB);
    client.batch_execute(&format!("begin; {sql}")).expect(sql);
    client
}

fn destinations(cluster: &Cluster) -> Vec<String> {
    cluster.query_one(
        DB,
        "select coalesce(array_agg(m.destination order by 1), '{}') from (
           select destination::text from outbox union all select destination from outbox_waiting) m",
    )
}

/// Stores event 1.
const EVENT: &str = "insert into outbox_events (seq, id, type, payload, aggregate_id) overriding system value
                     values (1, gen_random_uuid(), 'T', '{}', 'x')";

const ID: &str = "'00000000-0000-7000-8000-000000000001'";

/// What holds something, and a call that waits for it.
fn waits() -> Vec<(String, String)> {
    let id = format!("id => {ID}");
    let mut waits = Vec::new();
    for (lock, calls) in [
        (
            "lock table outbox_events in share mode",
            vec![
                "select outbox_publish('T', '{}', 'a', '1')".to_owned(),
                format!("select outbox_publish('T', '{{}}', 'a', '1', {id}, if_exists => 'skip')"),
                "select outbox_publish('T', '{}', 'a', '1', available_at => now() + '1 day')".to_owned(),
                "select outbox_store('{}', key => 'k')".to_owned(),
                "insert into orders values (1)".to_owned(),
            ],
        ),
        (
            "lock table outbox in share mode",
            vec![
                "select outbox_publish('T', '{}', 'a', '1')".to_owned(),
                "select outbox_enqueue(1)".to_owned(),
                "insert into chosen values (1)".to_owned(),
                "insert into orders values (1)".to_owned(),
            ],
        ),
        (
            "lock table outbox_waiting in share mode",
            vec![
                "select outbox_publish('T', '{}', 'a', '1', available_at => now() + '1 day')".to_owned(),
                "select outbox_enqueue(1, available_at => now() + '1 day')".to_owned(),
            ],
        ),
        (
            "lock table outbox_settings in access exclusive mode",
            vec![
                "select outbox_publish('T', '{}', 'a', '1')".to_owned(),
                "select outbox_enqueue(1)".to_owned(),
            ],
        ),
        (
            "select from outbox_events for update",
            vec!["select outbox_enqueue(1)".to_owned()],
        ),
    ] {
        waits.extend(calls.into_iter().map(|call| (lock.to_owned(), call)));
    }
    // The id of a transaction that rolls back.
    for if_exists in ["error", "skip"] {
        waits.push((
            format!("select outbox_publish('T', '{{}}', {id})"),
            format!("select outbox_publish('T', '{{}}', 'a', '1', {id}, if_exists => '{if_exists}')"),
        ));
    }
    waits
}

#[test]
fn a_call_that_waited_goes_by_the_subscriptions_of_when_it_goes_on() {
    let cluster = cluster();
    for (lock, call) in waits() {
        for (before, change, expected) in [
            (
                "select outbox_subscribe('audit')",
                "select outbox_unsubscribe('audit')",
                &["default"][..],
            ),
            (
                "select outbox_unsubscribe('audit')",
                "select outbox_subscribe('audit')",
                &["audit", "default"],
            ),
        ] {
            cluster.exec(
                DB,
                &format!(
                    "{before}; delete from orders; delete from chosen; truncate outbox, outbox_waiting;
                     delete from outbox_events; {EVENT}"
                ),
            );
            let mut holder = begin(&cluster, &lock);
            let waiting = Beside::run(&cluster, &call).wait_blocked(&cluster);
            cluster.exec(DB, change);
            holder.batch_execute("rollback").expect("rollback");
            waiting
                .end()
                .unwrap_or_else(|error| panic!("{lock}; {call}: {error:?}"));
            assert_eq!(destinations(&cluster), expected, "{lock}; {call}; {change}");
        }
    }
}

/// What docs/guarantees.md says of a transaction with a snapshot of its own.
#[test]
fn a_call_with_an_older_snapshot_goes_by_its_subscriptions() {
    let cluster = cluster();
    cluster.exec(DB, "select outbox_subscribe('audit')");
    let mut reader = begin(
        &cluster,
        "set transaction isolation level repeatable read; select from outbox_events",
    );
    cluster.exec(DB, "select outbox_unsubscribe('audit')");
    reader
        .batch_execute("select outbox_publish('T', '{}', 'a', '1'); commit")
        .expect("publish");
    assert_eq!(destinations(&cluster), ["audit", "default"]);
}

#[test]
fn a_call_that_waited_for_outbox_configure_goes_by_the_new_settings() {
    let cluster = cluster();
    cluster.exec(DB, EVENT);
    for (n, call) in [
        "select outbox_publish('T', '{}', 'a', '1')",
        "select outbox_enqueue(1, 'a:1', 'audit')",
        "select outbox_replay(seq_from => 1, destination => 'audit', dry_run => false)",
    ]
    .iter()
    .enumerate()
    {
        cluster.exec(
            DB,
            "delete from outbox where destination = 'audit'; insert into outbox_history (seq, destination, partition, key, attempts, published_at, enqueued_at)
             select 1, 'default', 0, 'a:1', 0, now(), now() where not exists (select from outbox_history)",
        );
        let count = 1000 + n as i32;
        let mut holder = begin(&cluster, &format!("select outbox_configure({count})"));
        let waiting = Beside::run(&cluster, call).wait_blocked(&cluster);
        holder.batch_execute("commit").expect("commit");
        waiting.end().unwrap_or_else(|error| panic!("{call}: {error:?}"));
        let wrong: i64 = cluster.query_one(
            DB,
            &format!("select count(*) from outbox where partition <> outbox_crc32(key) % {count}"),
        );
        assert_eq!(wrong, 0, "{call}");
    }
}

#[test]
fn a_publish_that_waited_for_outbox_source_set_is_refused() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create role shopkeeper; create table journal (seq bigint primary key, type text, at timestamptz); alter table journal owner to shopkeeper",
    );
    let mut holder = begin(
        &cluster,
        "select outbox_source_set('journal', seq => 'seq', type => 'type', created_at => 'at')",
    );
    let waiting = Beside::run(&cluster, "select outbox_publish('T', '{}', 'a', '1')").wait_blocked(&cluster);
    holder.batch_execute("commit").expect("commit");
    let error = waiting.end().expect_err("the source is set");
    assert_eq!(
        error.code(),
        Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE),
        "{error:?}"
    );
}

/// One that was in a transaction with an older snapshot would enqueue seqs of the old source.
#[test]
fn a_call_with_an_older_snapshot_than_outbox_source_set_fails() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create role shopkeeper; create table journal (seq bigint primary key, type text, at timestamptz); alter table journal owner to shopkeeper;
         select outbox_publish('T', '{}', 'a', '1'); delete from outbox",
    );
    for change in [
        "select outbox_source_set('journal', seq => 'seq', type => 'type', created_at => 'at')",
        "select outbox_source_reset()",
    ] {
        let mut reader = begin(
            &cluster,
            "set transaction isolation level repeatable read; select from orders",
        );
        cluster.exec(DB, change);
        let error = reader
            .batch_execute("select outbox_enqueue(1, 'k')")
            .expect_err("the source has changed");
        assert_eq!(
            error.code(),
            Some(&SqlState::T_R_SERIALIZATION_FAILURE),
            "{change}: {error:?}"
        );
    }
}

/// Its condition waits, so DDL gets in between: REINDEX has the table, and waits for an index. What the publish has
/// read so far must not keep it there, for the publish needs the table to write.
#[test]
fn a_publish_that_has_looked_for_its_id_and_reindex_do_not_wait_for_each_other() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "select outbox_subscribe('audit', when_sql => '(select true from pg_advisory_xact_lock(1))')",
    );
    for if_exists in ["error", "skip"] {
        cluster.exec(DB, "delete from outbox_events");
        let mut holder = begin(&cluster, "select pg_advisory_xact_lock(1)");
        let call = format!("select outbox_publish('T', '{{}}', id => {ID}, if_exists => '{if_exists}')");
        let publish = Beside::run(&cluster, &call).wait_blocked(&cluster);
        let reindex = Beside::run(&cluster, "reindex table outbox_events").wait_blocked(&cluster);
        holder.batch_execute("commit").expect("commit");
        for (what, end) in [("publish", publish.end()), ("reindex", reindex.end())] {
            end.unwrap_or_else(|error| panic!("{if_exists}: {what}: {error:?}"));
        }
    }
}

#[test]
fn a_session_that_stores_its_events_itself_and_outbox_source_set_wait_for_each_other_in_one_order() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create role shopkeeper; create table journal (seq bigint primary key, type text, at timestamptz); alter table journal owner to shopkeeper",
    );
    let mut writer = begin(&cluster, EVENT);
    let set = Beside::run(
        &cluster,
        "select outbox_source_set('journal', seq => 'seq', type => 'type', created_at => 'at')",
    )
    .wait_blocked(&cluster);
    writer
        .batch_execute("select outbox_enqueue(1); commit")
        .expect("enqueue");
    let error = set.end().expect_err("a message waits");
    assert_eq!(
        error.code(),
        Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE),
        "{error:?}"
    );
}

/// A transaction reads a view, outbox_configure() comes, and the transaction reads the others.
#[test]
fn views_and_outbox_configure_do_not_wait_for_each_other_in_a_circle() {
    let cluster = cluster();
    cluster.exec(DB, "select outbox_publish('T', '{}', 'a', '1')");
    let views: Vec<String> = cluster.query_one(
        DB,
        "select array_agg(c.oid::regclass::text order by 1) from pg_class c
         join pg_depend d on d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e'
         join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox' where c.relkind = 'v'",
    );
    for (n, view) in views.iter().enumerate() {
        let mut reader = begin(&cluster, &format!("select * from {view}"));
        let boss = Beside::run(&cluster, &format!("select outbox_configure({})", 4 + n % 2));
        let waits = format!("select cardinality(pg_blocking_pids({})) > 0", boss.pid);
        wait_until("it to end or to wait", LONG, || {
            boss.run.is_finished() || cluster.query_one(DB, &waits)
        });
        for view in ["outbox_status", "outbox_messages", "outbox_health"] {
            let read = reader.batch_execute(&format!("select * from {view}"));
            read.unwrap_or_else(|error| panic!("{view}: {error:?}"));
        }
        reader.run("commit");
        boss.end().unwrap_or_else(|error| panic!("{view}: {error:?}"));
    }
}

/// All that locks tables of the outbox, at once.
#[test]
fn no_deadlock_comes_of_calls_that_run_at_the_same_time() {
    let cluster = cluster();
    cluster.exec(DB, &format!("{EVENT}; select outbox_subscribe('audit'); select outbox_publish('T', '{{}}', 'a', '1') from generate_series(1, 50)"));
    let until = Instant::now() + patient(std::time::Duration::from_secs(8));
    let scripts: &[&[&str]] = &[
        &[
            "select * from outbox_health",
            "select * from outbox_status",
            "select * from outbox_messages limit 10",
            "select * from outbox_why(1)",
        ],
        &["select outbox_configure(4)", "select outbox_configure(5)"],
        &[
            "select outbox_publish('T', '{}', 'a', '1', id => gen_random_uuid())",
            "select outbox_publish('T', '{}', available_at => now() + '1 day')",
        ],
        &[
            "insert into orders select coalesce(max(id), 0) + 1 from orders",
            "select outbox_enqueue(1, 'k', 'audit')",
            "select outbox_enqueue_many('{1,2,3}')",
        ],
        &[
            "reindex table outbox_events",
            "reindex table outbox",
            "reindex table outbox_waiting",
        ],
        &[
            "select outbox_retry(1)",
            "select outbox_discard_where(seq_from => 1, dry_run => false)",
            "select outbox_replay(seq_from => 1, max_rows => 5, dry_run => false)",
            "select outbox_purge('a', '7', dry_run => false)",
        ],
        &[
            "select outbox_subscribe('audit', '{T}')",
            "select outbox_unsubscribe('audit')",
            "select outbox_wait(1, '1 ms')",
        ],
    ];
    let sessions: Vec<_> = scripts
        .iter()
        .map(|script| {
            let mut client = cluster.connect(DB);
            thread::spawn(move || {
                let mut count = 0;
                for sql in script.iter().cycle() {
                    if let Err(error) = client.batch_execute(sql) {
                        let code = error.code().map(SqlState::code).unwrap_or_default().to_owned();
                        // outbox_purge() and others do not wait for a row; what was read may have moved.
                        assert!(
                            ["55P03", "40001", "55006", "P0002", "55000", "21000"].contains(&&*code),
                            "{sql}: {error:?}"
                        );
                    }
                    count += 1;
                    if Instant::now() >= until {
                        return count;
                    }
                }
                count
            })
        })
        .collect();
    for (session, script) in sessions.into_iter().zip(scripts) {
        let count = session.join().unwrap_or_else(|_| panic!("{script:?}"));
        assert!(count > 3, "{script:?} ran {count} times");
    }
}
