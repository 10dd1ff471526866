//! Tests of setting a source: what is refused, what is closed while a source is set, and what a dump contains.

use std::process::Command;

use postgres::error::SqlState;
use support::Cluster;

use super::{MAPPED, SHOP, body, set_source, write};
use support::*;

fn quiet_cluster() -> Cluster {
    let cluster = idle_cluster(&[]);
    cluster.exec(DB, SHOP);
    cluster
}

#[test]
fn an_unreadable_source_is_refused_when_it_is_set() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create sequence shop.numbers; create temp table brief (seq int, type text, at timestamptz);
         alter table shop.events add raw bytea, add local timestamp, add note text",
    );
    let set = |relation: &str, change: &str| {
        let given = [("seq", "position"), ("type", "eventKind"), ("created_at", "at")];
        let kept = given
            .iter()
            .filter(|(part, _)| !change.starts_with(&format!("{part} =>")));
        let mut parts: Vec<String> = kept.map(|(part, value)| format!("{part} => '{value}'")).collect();
        parts.extend([change.to_owned()].into_iter().filter(|change| !change.is_empty()));
        format!("select outbox_source_set({relation}, {})", parts.join(", "))
    };
    let events = "'shop.events'";
    for (relation, change, sqlstate) in [
        ("'shop.numbers'", "", SqlState::WRONG_OBJECT_TYPE),
        ("'outbox_events'", "", SqlState::WRONG_OBJECT_TYPE),
        ("'outbox_history'", "", SqlState::WRONG_OBJECT_TYPE),
        ("null", "", SqlState::UNDEFINED_TABLE),
        (events, "seq => null", SqlState::NULL_VALUE_NOT_ALLOWED),
        (events, "type => null", SqlState::NULL_VALUE_NOT_ALLOWED),
        (events, "seq => 'uid'", SqlState::DATATYPE_MISMATCH),
        (events, "seq => 'nowhere'", SqlState::INVALID_PARAMETER_VALUE),
        (events, "created_at => 'local'", SqlState::DATATYPE_MISMATCH),
        (events, "payload => 'note'", SqlState::DATATYPE_MISMATCH),
        (events, "payload => 'raw'", SqlState::DATATYPE_MISMATCH),
        (events, "id => 'max(uid)'", SqlState::INVALID_PARAMETER_VALUE),
        (
            events,
            "id => 'generate_series(1, 2)'",
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (events, "id => '$1'", SqlState::INVALID_PARAMETER_VALUE),
        (events, "key => '1/0'", SqlState::INVALID_PARAMETER_VALUE),
        (
            events,
            "id => 'uid) from shop.events; drop table shop.events; --'",
            SqlState::INVALID_PARAMETER_VALUE,
        ),
    ] {
        let db_error = refused(&cluster, &set(relation, change));
        assert_eq!(db_error.code(), &sqlstate, "{relation} {change}: {db_error:?}");
        assert!(db_error.hint().is_some(), "{relation} {change}: {db_error:?}");
    }
    assert!(!cluster.query_one::<bool>(DB, "select exists (select from outbox_source)"));
    // The caller must be a member of the owner's role and an administrator; one of the two is not enough.
    cluster.exec(
        DB,
        "create role stranger in role outbox_admin; grant usage on schema shop to stranger",
    );
    let as_role = |role: &str| format!("set role {role}; {}", set_source(MAPPED));
    for role in ["stranger", "shopkeeper"] {
        let db_error = refused(&cluster, &as_role(role));
        assert_eq!(
            db_error.code(),
            &SqlState::INSUFFICIENT_PRIVILEGE,
            "{role}: {db_error:?}"
        );
    }
    cluster.exec(DB, "grant shopkeeper to stranger");
    cluster.exec(DB, &as_role("stranger"));
    let audit: String = cluster.query_one(
        DB,
        "select acted_as || ' ' || (filter->>'relation') from outbox_audit where action = 'source'",
    );
    assert_eq!(audit, "stranger shop.events");
}

#[test]
fn outbox_events_is_closed_while_there_is_a_source() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create table shop.carts (id int primary key); select outbox_capture('shop.carts')",
    );
    let mut session = cluster.connect(DB); // this session plans its statements before
    session.run("select outbox_publish('T', '{}')");
    cluster.exec(DB, "delete from outbox");
    cluster.exec(DB, &set_source(MAPPED));
    for sql in [
        "select outbox_publish('T', '{}')",
        "select outbox_store('text')",
        "insert into shop.carts values (1)",
        "insert into outbox_events (id, type, payload) values (gen_random_uuid(), 'T', '{}')",
    ] {
        let db_error = refused(&cluster, sql);
        assert_eq!(
            db_error.code(),
            &SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
            "{sql}: {db_error:?}"
        );
        assert!(db_error.message().contains("shop.events"), "{db_error:?}");
        assert!(
            db_error.hint().is_some_and(|hint| hint.contains("outbox_enqueue")),
            "{db_error:?}"
        );
    }
    let known = session
        .batch_execute("select outbox_publish('T', '{}')")
        .expect_err("refused");
    assert_eq!(known.code(), Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE));
    assert!(cluster.query_one::<bool>(DB, "select outbox_source_reset()"));
    assert!(!cluster.query_one::<bool>(DB, "select outbox_source_reset()"));
    session.run("select outbox_publish('T', '{}')");
    cluster.exec(DB, "insert into shop.carts values (1)");
}

#[test]
fn the_source_stays_while_messages_wait_for_their_events() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "set role shopkeeper; create view shop.others as select * from shop.events",
    );
    cluster.exec(DB, &set_source(MAPPED));
    write(&cluster, 3);
    let other = set_source(MAPPED).replace("shop.events", "shop.others");
    let other_seq = set_source(MAPPED).replace("'position'", "'position + 1'");
    let held = |sql: &str| {
        let db_error = refused(&cluster, sql);
        assert_eq!(
            db_error.code(),
            &SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
            "{sql}: {db_error:?}"
        );
        assert!(
            db_error.hint().is_some_and(|hint| hint.contains("outbox_drain")),
            "{db_error:?}"
        );
    };
    let states = [
        "select",
        "with m as (delete from outbox returning *) insert into outbox_waiting
           (seq, enqueued_at, due_at, partition, state, destination) select seq, now(), '2999-01-01', partition, 's', destination from m",
        "with m as (delete from outbox_waiting returning *) insert into outbox_dead
           (seq, enqueued_at, attempts, partition, destination, reason) select seq, now(), 1, partition, destination, 'x' from m",
    ];
    for state in states {
        cluster.exec(DB, state);
        for sql in [&other, &other_seq, "select outbox_source_reset()"] {
            held(sql);
        }
        // What a column is used for may change; the rows stay the same.
        cluster.exec(DB, &set_source(", payload => 'data', actor => 'uid'"));
    }
    cluster.exec(
        DB,
        "alter table shop.events rename to happened; alter table shop.happened rename position to place",
    );
    cluster.exec(
        DB,
        &set_source("")
            .replace("shop.events", "shop.happened")
            .replace("'position'", "'place'"),
    );
    held(&other);
    cluster.exec(DB, "select outbox_discard_where(seq_from => 1, dry_run => false)");
    cluster.exec(DB, "select outbox_source_reset()");
}

#[test]
fn setting_a_source_waits_for_transactions_that_have_enqueued() {
    let cluster = quiet_cluster();
    let mut producer = cluster.connect(DB);
    producer.run("begin; select outbox_publish('T', '{}')");
    let db_error = refused(&cluster, &format!("set lock_timeout = '200ms'; {}", set_source(MAPPED)));
    assert_eq!(db_error.code(), &SqlState::LOCK_NOT_AVAILABLE);
    producer.run("commit");
    let db_error = refused(&cluster, &set_source(MAPPED));
    assert_eq!(db_error.code(), &SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
}

#[test]
fn a_session_enqueues_from_the_source_that_is_set_or_not_at_all() {
    let cluster = quiet_cluster();
    cluster.exec(DB, &set_source(MAPPED));
    let write = "insert into shop.events (\"eventKind\", stream_id) values ('T', '1')";
    cluster.exec(DB, &format!("{write}; {write}"));
    let (mut operator, mut older) = (cluster.connect(DB), cluster.connect(DB));
    older.run("begin isolation level repeatable read; select from shop.events");
    let with_key = set_source(&format!("{MAPPED}, key => '''second'''"));
    operator.run(&format!("begin; {with_key}"));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| cluster.exec(DB, "select outbox_enqueue(1)"));
        let sql =
            "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and query like '%enqueue(1)%')";
        wait_true(&cluster, "the session to wait for the lock", sql);
        operator.run("commit");
        waits.join().expect("enqueued");
    });
    let keys = "select string_agg(key, ' ') from outbox";
    assert_eq!(cluster.query_one::<String>(DB, keys), "second");
    let error = older
        .batch_execute("select outbox_enqueue(2)")
        .expect_err("changed since");
    assert_eq!(error.code(), Some(&SqlState::T_R_SERIALIZATION_FAILURE));
    older.run("rollback; begin isolation level repeatable read; select outbox_enqueue(2); commit");
    assert_eq!(cluster.query_one::<String>(DB, keys), "second second");
}

#[test]
fn ended_messages_are_replayed_and_erased_by_their_pointer() {
    let stage = Stage::new(&[]);
    stage.exec(DB, SHOP);
    stage.exec(
        DB,
        "select outbox_publish('Old', '{}', 'order', 's1') from generate_series(1, 3)",
    );
    wait_drained(&stage);
    stage.exec(DB, &set_source(MAPPED));
    write(&stage, 2);
    wait_drained(&stage);
    stage.all();
    let again: i64 = stage.query_one(DB, "select outbox_replay(seq_from => 1, seq_to => 3, dry_run => false)");
    assert_eq!(again, 2, "the old event with seq 3 is not in this source");
    wait_drained(&stage);
    let arrived = stage.all();
    assert_eq!(arrived.len(), 2);
    for delivery in arrived {
        assert_eq!(body(&delivery, "type"), "Written");
        assert!(delivery.headers.contains_key("replayed"));
    }
    stage.exec(DB, "select outbox_purge('order', 's1', dry_run => false)");
    let left: (i64, i64) = (
        stage.query_one(DB, "select count(*) from outbox_history where key = 'order:s1'"),
        stage.query_one(DB, "select count(*) from shop.events where stream_id = 's1'"),
    );
    assert_eq!(left, (0, 1), "pointers, events");
}

#[test]
fn a_dump_carries_the_source_and_what_waits_for_it() {
    let stage = Stage::new(&[]);
    stage.exec(DB, SHOP);
    stage.exec(DB, "select outbox_publish('Old', '{}', 'old', '1')");
    wait_drained(&stage);
    stage.exec(DB, &set_source(MAPPED));
    pause(&stage);
    write(&stage, 5);
    stage.all();
    for (name, restore) in [
        (
            "by_psql",
            "pg_dump -h $H -p $P -U postgres postgres | psql -q -h $H -p $P -U postgres -v ON_ERROR_STOP=1 by_psql",
        ),
        (
            "by_jobs",
            "pg_dump -h $H -p $P -U postgres -Fc -f $D postgres && pg_restore -h $H -p $P -U postgres -j 3 -d by_jobs $D",
        ),
    ] {
        stage.exec(DB, &format!("create database {name}"));
        let programs = stage.installation().bin("psql");
        let programs = programs.parent().expect("a directory").display();
        let dump = std::env::temp_dir().join(format!("outbox-dump-{}", stage.port()));
        let done = Command::new("sh")
            .args(["-c", restore])
            .env("PATH", format!("{programs}:/usr/bin:/bin"))
            .env("H", "127.0.0.1")
            .env("P", stage.port().to_string())
            .env("D", &dump)
            .output()
            .expect("a shell");
        let _ = std::fs::remove_file(dump);
        assert!(
            done.status.success(),
            "{name}: {}",
            String::from_utf8_lossy(&done.stderr)
        );
        assert_eq!(stage.query_one::<i64>(name, "select count(*) from outbox_events"), 1);
        let db_error = stage
            .connect(name)
            .batch_execute("select outbox_publish('T', '{}')")
            .expect_err("refused");
        assert_eq!(
            db_error.code(),
            Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE),
            "{name}"
        );
        stage.exec(name, "select outbox_adopt()");
    }
    stage.set_conf("outbox.enabled", "on");
    wait_drained(&stage);
    for name in ["by_psql", "by_jobs"] {
        let ended =
            "select count(*) = 5 and not exists (select from outbox_dead) from outbox_history where key <> 'old:1'";
        support::wait_until("the copies to be drained", LONG, || stage.query_one(name, ended));
    }
    let arrived = stage.all();
    assert_eq!(arrived.len(), 15);
    assert!(arrived.iter().all(|delivery| body(delivery, "type") == "Written"));
}
