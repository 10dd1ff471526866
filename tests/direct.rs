//! The usual outbox_publish writes its two rows without a SQL statement. They must be the rows that the statements
//! would write. Everything that a user adds to the tables must apply at once and in every session. On a real Postgres.

use postgres::error::SqlState;
use postgres::{Client, GenericClient, NoTls};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc;
use support::{Cluster, LONG, Session, unconnected_cluster, wait_for};

const DB: &str = support::DB;

fn cluster() -> Cluster {
    unconnected_cluster("amqp://127.0.0.1:1", "nowhere", &["outbox.enabled = off"])
}

/// A session that receives a notice for every statement that a function runs in it.
fn observed_session(cluster: &Cluster) -> (Client, mpsc::Receiver<String>) {
    let (sender, notices) = mpsc::channel();
    let mut config: postgres::Config = cluster.conn_string(DB).parse().expect("a connection string");
    config.notice_callback(move |notice| {
        let _ = sender.send(notice.message().to_owned());
    });
    let mut client = config.connect(NoTls).expect("connect");
    let listen =
        "load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on;
                  set client_min_messages = log";
    client.run(listen);
    (client, notices)
}

const PUBLISH: &str = "select outbox_publish('T', '{\"a\": 1}', 'item', '7')";

const SUBSCRIPTION: &str = "create server audit foreign data wrapper outbox_amqp options (url 'amqp://localhost');
                            select outbox_subscribe('audit', types => '{T}', when_sql => $$payload ? 'a'$$)";

fn publish(client: &mut impl GenericClient) -> i64 {
    client.value(PUBLISH)
}

/// The INSERT statements that a publish of this session ran.
fn statements_of_publish(client: &mut Client, notices: &mpsc::Receiver<String>) -> Vec<String> {
    notices.try_iter().for_each(drop);
    publish(client);
    notices
        .try_iter()
        .filter(|notice| notice.to_lowercase().contains("insert into"))
        .collect()
}

#[test]
fn only_the_usual_publish_runs_no_statement() {
    let cluster = cluster();
    let (mut client, notices) = observed_session(&cluster);
    assert_eq!(statements_of_publish(&mut client, &notices), Vec::<String>::new());
    // An index keeps the direct path, and so does a foreign key that references the events.
    cluster.exec(DB, "create index on outbox_events (type)");
    cluster.exec(
        DB,
        "create table seen (seq bigint references outbox_events on delete cascade)",
    );
    assert_eq!(statements_of_publish(&mut client, &notices), Vec::<String>::new());
    cluster.exec(DB, SUBSCRIPTION);
    assert_eq!(statements_of_publish(&mut client, &notices), Vec::<String>::new());
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox where destination = 'audit'"),
        1
    );
    for (change, undo) in [
        (
            "create index of_payload on outbox_events ((payload ->> 'a'))",
            "drop index of_payload",
        ),
        (
            "alter table outbox_events add constraint more check (seq > 0)",
            "alter table outbox_events drop constraint more",
        ),
        (
            "alter table outbox_events alter created_at set default clock_timestamp()",
            "alter table outbox_events alter created_at set default now()",
        ),
        (
            "alter table outbox add constraint more check (seq > 0)",
            "alter table outbox drop constraint more",
        ),
        (
            "alter table outbox_events enable row level security",
            "alter table outbox_events disable row level security",
        ),
        (
            "create function nothing() returns trigger language plpgsql as 'begin return null; end';
             create trigger t after insert on outbox_events for each statement execute function nothing()",
            "drop function nothing() cascade",
        ),
        (
            "alter table outbox_events add column tenant text default 'x'",
            "alter table outbox_events drop column tenant",
        ),
        (
            "alter table outbox add column tenant text",
            "alter table outbox drop column tenant",
        ),
        (
            "alter table outbox_events alter aggregate_id set not null",
            "alter table outbox_events alter aggregate_id drop not null",
        ),
        (
            "alter table outbox alter key set not null",
            "alter table outbox alter key drop not null",
        ),
        (
            "alter table outbox_events rename actor to a; alter table outbox_events rename correlation_id to actor;
             alter table outbox_events rename a to correlation_id",
            "alter table outbox_events rename actor to a; alter table outbox_events rename correlation_id to actor;
             alter table outbox_events rename a to correlation_id",
        ),
        // ALTER TYPE makes the same change if no view uses the column.
        (
            "update pg_attribute set atttypmod = 0 where attrelid = 'outbox_events'::regclass and attname = 'created_at'",
            "update pg_attribute set atttypmod = -1 where attrelid = 'outbox_events'::regclass and attname = 'created_at'",
        ),
        (
            "create rule r as on insert to outbox_events do also notify n",
            "drop rule r on outbox_events",
        ),
    ] {
        cluster.exec(DB, change);
        let statements = statements_of_publish(&mut client, &notices);
        // One stores the event, and two enqueue it. The other table is written without.
        let count = if change.contains("outbox_events") { 1 } else { 2 };
        assert_eq!(statements.len(), count, "{change}: {statements:?}");
        cluster.exec(DB, undo);
        let statements = statements_of_publish(&mut client, &notices);
        assert_eq!(statements, Vec::<String>::new(), "{undo}");
    }
    // Rights on the sequence of an identity column do not matter, just as with a statement.
    cluster.exec(DB, "revoke all on sequence outbox_events_seq_seq from outbox_worker");
    assert_eq!(statements_of_publish(&mut client, &notices), Vec::<String>::new());
}

/// A constraint or a revoked right refuses every publish, with the error of a statement, also in sessions that have
/// published before.
#[test]
fn what_refuses_a_statement_refuses_every_publish_and_names_the_constraint() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    publish(&mut client);
    let without_aggregate = "select outbox_publish('T', '{}')";
    let set_not_null = "alter table outbox_events alter aggregate_id set not null";
    let (not_null, check, unique) = (
        SqlState::NOT_NULL_VIOLATION,
        SqlState::CHECK_VIOLATION,
        SqlState::UNIQUE_VIOLATION,
    );
    for (change, sql, code, named) in [
        (
            set_not_null,
            without_aggregate,
            &not_null,
            "public.outbox_events aggregate_id",
        ),
        (
            "alter table outbox alter key set not null",
            without_aggregate,
            &not_null,
            "public.outbox key",
        ),
        (
            "alter table outbox_events add constraint no_t check (type <> 'T')",
            PUBLISH,
            &check,
            "public.outbox_events no_t",
        ),
        (
            "create unique index one_type on outbox_events (type)",
            PUBLISH,
            &unique,
            "public.outbox_events one_type",
        ),
        (
            "create unique index one_key on outbox (key)",
            PUBLISH,
            &unique,
            "public.outbox one_key",
        ),
    ] {
        let mut one = client.transaction().expect("begin");
        one.run("delete from outbox; delete from outbox_events");
        one.run(change);
        one.run("savepoint s");
        let first = one.batch_execute(sql);
        let refused = match first {
            Err(refused) => refused,
            Ok(()) => one.batch_execute(sql).expect_err(change),
        };
        let refused = refused.as_db_error().expect("an error of the server").clone();
        assert_eq!(refused.code(), code, "{change}: {refused:?}");
        let what = refused.constraint().or(refused.column()).unwrap_or_default();
        let schema_and_table = (
            refused.schema().unwrap_or_default(),
            refused.table().unwrap_or_default(),
        );
        assert_eq!(
            format!("{}.{} {what}", schema_and_table.0, schema_and_table.1),
            named,
            "{change}"
        );
        one.rollback().expect("rollback");
    }
    for right in [
        "insert on outbox_events",
        "insert on outbox",
        "select on outbox_events",
        "select on outbox_settings",
    ] {
        cluster.exec(DB, &format!("revoke {right} from outbox_worker"));
        let refused = client.batch_execute(PUBLISH).expect_err(right);
        assert_eq!(
            refused.code(),
            Some(&SqlState::INSUFFICIENT_PRIVILEGE),
            "{right}: {refused}"
        );
        cluster.exec(DB, &format!("grant {right} to outbox_worker"));
        publish(&mut client);
    }
}

#[test]
fn a_session_that_needs_statements_plans_them_once() {
    let cluster = unconnected_cluster(
        "",
        "x",
        &[
            "outbox.workers = 0",
            "shared_preload_libraries = 'outbox,pg_stat_statements'",
            "pg_stat_statements.track = all",
            "pg_stat_statements.track_planning = on",
        ],
    );
    let mut client = cluster.connect(DB);
    client.run("create extension pg_stat_statements; select pg_stat_statements_reset()");
    client.run("alter table outbox_events add check (seq > 0); alter table outbox add check (seq > 0)");
    cluster.draw_seqs(1_000_020);
    for call in 0..20 {
        publish(&mut client);
        let sql = "select outbox_publish('T', '{}', 'item', 'a', id => gen_random_uuid()), outbox_enqueue($1, 'k')";
        client
            .query_one(sql, &[&(1_000_000 + i64::from(call))])
            .expect("publish");
    }
    // Maintenance, too, inserts once.
    let sql = "select query, plans from pg_stat_statements where query like 'insert into %' and calls >= 20";
    let inserts = client.query(sql, &[]).expect("the statistics");
    for insert in &inserts {
        let (query, plans): (String, i64) = (insert.get(0), insert.get(1));
        assert!(plans <= 6, "{plans} plans: {query}");
    }
    assert_eq!(inserts.len(), 2, "an event and a pointer");
}

/// The columns of an event and of its message, except those that differ between any two events.
const ROWS: &str =
    "select array_agg(to_jsonb(e) - 'seq' - 'id' order by e.seq), array_agg(to_jsonb(o) - 'seq' order by e.seq)
                    from outbox_events e join outbox o using (seq)";

#[test]
fn direct_rows_equal_those_of_the_statements() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    let large = "repeat(md5(random()::text), 100000)";
    for arguments in [
        "'T', '{}'",
        "'T', '{\"b\": [1, 2.50, null], \"a\": \"ä\\u20ac\"}', 'item', '7', 'created', '{\"old\": true}', '{\"m\": 1}', '{\"h\": \"x\"}', 'me', 'c-1'",
        "'T', '[]', aggregate_id => 'only', expires_at => now() + interval '1 hour'",
        "'T', '3', metadata => 'null'",
        "repeat('t', 60), '\"\"', repeat('a', 60), repeat('b', 60), repeat('o', 100)",
    ] {
        let mut one = client.transaction().expect("begin");
        let publish = format!("select outbox_publish({arguments})");
        one.run("delete from outbox");
        one.run(&publish);
        one.run("alter table outbox_events add check (true)");
        one.run(&publish);
        let row = one.query_one(ROWS, &[]).expect("both");
        let (events, messages): (Vec<serde_json::Value>, Vec<serde_json::Value>) = (row.get(0), row.get(1));
        assert_eq!((events.len(), messages.len()), (2, 2));
        assert_eq!(events[0], events[1], "{arguments}");
        let partition_of_no_key = |message: &serde_json::Value| {
            let mut message = message.clone();
            if message["key"].is_null() {
                message["partition"] = 0.into(); // derived from the seq
            }
            message
        };
        assert_eq!(
            partition_of_no_key(&messages[0]),
            partition_of_no_key(&messages[1]),
            "{arguments}"
        );
        one.rollback().expect("rollback");
    }
    // An event of three megabytes, read through an index.
    let sql = format!("select outbox_publish('Large', to_jsonb({large}), 'item', '8')");
    let seq: i64 = client.value(&sql);
    let sql = "set local enable_seqscan = off; select length(payload #>> '{}') = 3200000 and body_bytes = 3200002
               and id = (select id from outbox_events where seq = $1) from outbox_events where seq = $1";
    let (set, select) = sql.split_once(';').expect("two");
    let mut one = client.transaction().expect("begin");
    one.run(set);
    assert!(one.query_one(select, &[&seq]).expect("the event").get::<_, bool>(0));
}

#[test]
fn changes_of_the_tables_apply_at_once_in_sessions_that_have_published_before() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    publish(&mut client);
    cluster.exec(
        DB,
        "create function stamp() returns trigger language plpgsql as $$
           begin new.actor := 'stamped'; return new; end $$;
         create trigger stamp before insert on outbox_events for each row execute function stamp()",
    );
    let actor = |client: &mut Client, seq: i64| -> Option<String> {
        let row = client.query_one("select actor from outbox_events where seq = $1", &[&seq]);
        row.expect("the event").get(0)
    };
    let seq = publish(&mut client);
    assert_eq!(actor(&mut client, seq).as_deref(), Some("stamped"));
    cluster.exec(DB, "drop trigger stamp on outbox_events");
    let seq = publish(&mut client);
    assert_eq!(actor(&mut client, seq), None);
    // A transaction whose snapshot is older than the constraint.
    let mut old = client.transaction().expect("begin");
    old.run("set transaction isolation level repeatable read; select 1");
    cluster.exec(
        DB,
        "alter table outbox_events add constraint no_t check (type <> 'T') not valid",
    );
    let refused = old.query_one(PUBLISH, &[]).expect_err("the constraint refuses it");
    assert_eq!(refused.code(), Some(&SqlState::CHECK_VIOLATION));
    drop(old);
    cluster.exec(DB, "alter table outbox_events drop constraint no_t");
    // A constraint of the same transaction.
    let mut own = client.transaction().expect("begin");
    own.query_one(PUBLISH, &[]).expect("publish");
    own.run("create trigger stamp before insert on outbox_events for each row execute function stamp()");
    let seq: i64 = own.value(PUBLISH);
    let row = own
        .query_one("select actor from outbox_events where seq = $1", &[&seq])
        .expect("the event");
    assert_eq!(row.get::<_, Option<&str>>(0), Some("stamped"));
    own.rollback().expect("rollback");
    let seq = publish(&mut client);
    assert_eq!(actor(&mut client, seq), None);
}

/// Indexes that are built while sessions publish, of kinds that the direct path does not maintain.
const INDEXES: [&str; 3] = [
    "create index concurrently of_payload on outbox_events ((payload ->> 'a'))",
    "create index concurrently of_some on outbox_events (seq) where type = 'T'",
    "create unique index concurrently of_ids on outbox_events (id, type)",
];

#[test]
fn indexes_miss_no_row_even_if_built_while_other_sessions_publish() {
    let cluster = cluster();
    let (stop, published) = (AtomicBool::new(false), AtomicUsize::new(0));
    cluster.exec(DB, "create extension amcheck");
    let mut client = cluster.connect(DB);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut client = cluster.connect(DB);
                while !stop.load(SeqCst) {
                    let mut one = client.transaction().expect("begin");
                    publish(&mut one);
                    publish(&mut one);
                    match published.fetch_add(1, SeqCst) % 3 {
                        0 => one.rollback().expect("rollback"),
                        _ => one.commit().expect("commit"),
                    }
                }
            });
        }
        for index in INDEXES {
            let before = published.load(SeqCst);
            client.run(index);
            support::wait_until("further messages to be published", support::LONG, || {
                published.load(SeqCst) > before + 50
            });
        }
        stop.store(true, SeqCst);
    });
    let check = "select bt_index_check(indexrelid, heapallindexed => true) from pg_index
                 where indrelid in ('outbox_events'::regclass, 'outbox'::regclass)";
    let checked = client.query(check, &[]).expect("no index lacks a row");
    assert_eq!(checked.len(), 6);
    let sql =
        "select count(*), count(*) filter (where o.seq is not null) from outbox_events left join outbox o using (seq)";
    let row = client.query_one(sql, &[]).expect("counts");
    assert!(row.get::<_, i64>(0) > 100);
    assert_eq!(row.get::<_, i64>(0), row.get::<_, i64>(1));
}

fn message(error: &postgres::Error) -> &str {
    error.as_db_error().map_or("", |error| error.message())
}

#[test]
fn a_direct_publish_is_refused_where_a_statement_is() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    let mut read_only = client.transaction().expect("begin");
    read_only.run("set transaction read only");
    let refused = read_only.query_one(PUBLISH, &[]).expect_err("read only");
    assert_eq!(refused.code(), Some(&SqlState::READ_ONLY_SQL_TRANSACTION));
    assert!(message(&refused).contains("cannot execute INSERT"), "{refused}");
    drop(read_only);
    // A hash index cannot enforce that an id is unique.
    cluster.exec(DB, "create index on outbox_events using hash (id)");
    // Two sessions publish with one id: the second waits for the first, and then fails.
    let with_id = "select outbox_publish('T', '{}', id => '00000000-0000-4000-8000-000000000001')";
    let mut first = client.transaction().expect("begin");
    first.run(with_id);
    let pid: i32 = first.value("select pg_backend_pid()");
    let second = {
        let mut second = cluster.connect(DB);
        std::thread::spawn(move || second.batch_execute(with_id))
    };
    let waits = format!("select exists (select from pg_stat_activity where {pid} = any (pg_blocking_pids(pid)))");
    support::wait_true(&cluster, "the second waits", &waits);
    first.commit().expect("commit");
    let refused = second.join().expect("a thread").expect_err("the id is taken");
    assert_eq!(refused.code(), Some(&SqlState::UNIQUE_VIOLATION));
    let again = client.batch_execute(with_id).expect_err("the id is taken");
    assert_eq!(again.code(), Some(&SqlState::UNIQUE_VIOLATION));
    assert!(message(&again).contains("an event with id"), "{again}");
    let enqueued: i64 = cluster.query_one(DB, "select count(*) from outbox");
    assert_eq!(enqueued, 1);
}

#[test]
fn an_enqueue_waits_for_a_transaction_that_enqueues_the_same_seq() {
    let cluster = cluster();
    cluster.draw_seqs(10);
    let waits =
        |pid: i32| format!("select exists (select from pg_stat_activity where {pid} = any (pg_blocking_pids(pid)))");
    let enqueue = |seq: i64| format!("select outbox_enqueue({seq}, 'k')");
    let race = |seq: i64, isolation: &str, end: &str| {
        let (mut first, mut second) = (cluster.connect(DB), cluster.connect(DB));
        let pid: i32 = first.value("select pg_backend_pid()");
        first.run("begin");
        first.run(&enqueue(seq));
        let sql = enqueue(seq);
        second.run(&format!(
            "begin isolation level {isolation}; select count(*) from outbox"
        ));
        let second = std::thread::spawn(move || {
            let enqueued = second.query_one(&sql, &[]).map(|row| row.get::<_, bool>(0))?;
            second.batch_execute("commit")?;
            Ok::<bool, postgres::Error>(enqueued)
        });
        support::wait_true(&cluster, "the second waits", &waits(pid));
        first.run(end);
        second.join().expect("a thread")
    };
    assert!(!race(1, "read committed", "commit").expect("enqueue"));
    assert!(race(2, "read committed", "rollback").expect("enqueue"));
    assert!(race(3, "repeatable read", "rollback").expect("enqueue"));
    let refused = race(4, "repeatable read", "commit").expect_err("it cannot see the message");
    assert_eq!(refused.code(), Some(&SqlState::T_R_SERIALIZATION_FAILURE));
    let waiting: Vec<i64> = cluster.query_one(DB, "select array_agg(seq order by seq) from outbox");
    assert_eq!(waiting, [1, 2, 3, 4]);
}

/// Whether a call enqueued something, and the index scans of outbox that it began.
fn scans(cluster: &Cluster, seq: i64, key: &str, end: &str) -> (bool, i64) {
    let mut client = cluster.connect(DB);
    let scans = "select pg_stat_get_xact_numscans('outbox_pkey'::regclass)";
    client.run("begin");
    let before: i64 = client.value(scans);
    let enqueued: bool = client.value(&format!("select outbox_enqueue({seq}, '{key}')"));
    let more = client.value::<i64>(scans) - before;
    client.run(end);
    (enqueued, more)
}

/// Waits until the server knows which seqs wait, with seqs from `first` on.
fn wait_counted(cluster: &Cluster, first: i64) {
    let mut seqs = first..;
    let is_known = || scans(cluster, seqs.next().expect("a seq"), "a", "rollback").1 == 0;
    support::wait_until("the messages to be counted", support::LONG, is_known);
}

#[test]
fn a_seq_above_all_that_wait_is_looked_for_in_no_lane() {
    let cluster = cluster();
    cluster.draw_seqs(1_000_000);
    wait_counted(&cluster, 1);
    let enqueue = |seq: i64, key: &str| scans(&cluster, seq, key, "commit");
    assert_eq!(enqueue(100_100, "a"), (true, 0));
    assert_eq!(enqueue(100_101, "a"), (true, 0));
    let (enqueued, lanes) = enqueue(100_101, "another");
    assert!(!enqueued && lanes > 0, "{lanes}");
    let (enqueued, lanes) = enqueue(100_099, "a");
    assert!(enqueued && lanes > 0, "{lanes}");
    // A transaction that is rolled back, and one that has not ended.
    let mut open = cluster.connect(DB);
    open.run("begin; select outbox_enqueue(100200, 'a'); rollback; begin; select outbox_enqueue(100300, 'a')");
    let (enqueued, lanes) = enqueue(100_200, "another");
    assert!(enqueued && lanes > 0, "{lanes}");
    open.run("commit");
    let (enqueued, lanes) = enqueue(100_300, "another");
    assert!(!enqueued && lanes > 0, "{lanes}");
    // Scheduled messages, and those of before a restart.
    cluster.exec(
        DB,
        "select outbox_enqueue(100400, 'a', available_at => now() + interval '1 day')",
    );
    assert!(!enqueue(100_400, "another").0);
    cluster.restart();
    wait_counted(&cluster, 200_000);
    assert!(!enqueue(100_300, "another").0);
    assert!(!enqueue(100_400, "another").0);
    // A dead letter that is brought back.
    cluster.exec(
        DB,
        "insert into outbox_dead (seq, destination, partition, key, enqueued_at, attempts, reason, blocks)
         values (300500, 'default', 0, 'a', now(), 1, 'lost', false)",
    );
    cluster.exec(DB, "select outbox_retry(300500)");
    assert!(!enqueue(300_500, "another").0);
}

const STARTED: &str =
    "select pg_postmaster_start_time()::text || pid from pg_stat_activity where backend_type = 'checkpointer'";

/// An ERROR raised while Postgres has another resource owner than that of the call.
#[test]
fn a_locked_sequence_ends_the_call_and_not_the_server() {
    let cluster = cluster();
    let started: String = cluster.query_one(DB, STARTED);
    let mut client = cluster.connect(DB);
    publish(&mut client);
    let mut other = cluster.connect(DB);
    let mut altered = other.transaction().expect("begin");
    altered.run("alter sequence outbox_events_seq_seq cache 1");
    client.run("set lock_timeout = '500ms'");
    let refused = client.query_one(PUBLISH, &[]).expect_err("the sequence is locked");
    assert_eq!(refused.code(), Some(&SqlState::LOCK_NOT_AVAILABLE), "{refused}");
    altered.rollback().expect("rollback");
    publish(&mut client);
    assert_eq!(
        cluster.query_one::<String>(DB, STARTED),
        started,
        "the server restarted"
    );
}

/// All needed locks are held already, except that of the sequence.
#[test]
fn a_full_lock_table_ends_the_call_in_a_savepoint_and_not_the_server() {
    let small = [
        "outbox.enabled = off",
        "max_connections = 8",
        "max_wal_senders = 0",
        "max_locks_per_transaction = 16",
    ];
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "nowhere", &small);
    let started: String = cluster.query_one(DB, STARTED);
    let (mut client, mut other) = (cluster.connect(DB), cluster.connect(DB));
    // More locks than the fast-path slots of a session, so that each further lock needs an entry in the shared table.
    let tables: Vec<String> = (0..20).map(|n| format!("t{n}")).collect();
    let create: String = tables.iter().map(|t| format!("create table {t} ();")).collect();
    client.run(&create);
    let seq = publish(&mut client);
    let mut full = client.transaction().expect("begin");
    let hold_locks = format!(
        "lock table {} in access share mode; lock table outbox, outbox_events in row exclusive mode;
         select outbox_enqueue({seq}, 'k', 'default', now() + interval '1 day')",
        tables.join(",")
    );
    full.run(&hold_locks);
    let fill = "do $$ begin for n in 1..1000000 loop perform pg_advisory_lock(n); end loop; end $$";
    // A process of the server may release locks between the two statements.
    let refused = wait_for("a publish that gets no lock", LONG, || {
        let filled = other.batch_execute(fill).expect_err("the table of locks is full");
        assert_eq!(filled.code(), Some(&SqlState::OUT_OF_MEMORY), "{filled}");
        let mut inner = full.savepoint("s").expect("savepoint");
        let refused = inner.query_one(PUBLISH, &[]).err();
        inner.rollback().expect("rollback to the savepoint");
        refused
    });
    assert_eq!(refused.code(), Some(&SqlState::OUT_OF_MEMORY), "{refused}");
    other.run("select pg_advisory_unlock_all()");
    publish(&mut full);
    full.commit().expect("commit");
    assert_eq!(
        cluster.query_one::<String>(DB, STARTED),
        started,
        "the server restarted"
    );
}

#[test]
fn a_publish_succeeds_while_other_sessions_change_options_of_the_tables() {
    let cluster = cluster();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Each is announced to all sessions, and waits for none.
            let mut client = cluster.connect(DB);
            for n in 50_000.. {
                for table in ["outbox_events", "outbox"] {
                    client.run(&format!("alter table {table} set (autovacuum_analyze_threshold = {n})"));
                }
                if is_over.load(SeqCst) {
                    return;
                }
            }
        });
        let mut client = cluster.connect(DB);
        let failed = (0..3_000).find_map(|_| client.query("select outbox_publish('T', '{}')", &[]).err());
        is_over.store(true, SeqCst);
        assert!(failed.is_none(), "{failed:?}");
    });
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox join outbox_events using (seq)"),
        3_000
    );
}
