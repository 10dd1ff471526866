//! Tables of every kind, and every statement that writes to them.

use postgres::Client;
use postgres::error::{DbError, SqlState};
use std::sync::mpsc;
use support::Session;

use super::{events_of, refused, server, taken};
use support::DB;

#[test]
fn two_rows_never_have_the_same_aggregate_and_a_purge_erases_one() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run("create table place (a text, b text, c bool, primary key (a, b, c)); select outbox_capture('place')");
    client.run(r"insert into place values ('x:y', 'z', true), ('x', 'y:z', true), ('x\', 'y:z', true)");
    let ids: Vec<String> = client.value("select array_agg(aggregate_id order by seq) from outbox_events");
    assert_eq!(ids, [r"x\:y:z:t", r"x:y\:z:t", r"x\\:y\:z:t"]);
    client.run(r"select * from outbox_purge('place', 'x:y\:z:t', 'asked for', dry_run => false)");
    let left: Vec<String> = client.value("select array_agg(aggregate_id order by seq) from outbox_events");
    assert_eq!(left, [r"x\:y:z:t", r"x\\:y\:z:t"]);
}

/// A table for each tenant, in a schema of its own.
#[test]
fn tables_of_one_name_in_two_schemas_are_captured_as_two_aggregates() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create schema t1; create schema t2; create schema t3;
         create table t1.orders (id int primary key); create table t2.orders (id int primary key);
         select outbox_capture('t1.orders'), outbox_capture('t1.orders')",
    );
    let error = client
        .batch_execute("select outbox_capture('t2.orders')")
        .expect_err("the same name");
    let error = error.as_db_error().expect("an error of the server");
    assert_eq!(error.code().code(), "42710", "{error:?}");
    let hint = error.hint().expect("a hint");
    assert!(hint.contains("aggregate_type => 't2.orders'"), "{hint}");
    client.run(
        "select outbox_capture('t2.orders', aggregate_type => 't2.orders');
         insert into t1.orders values (1); insert into t2.orders values (1);
         select outbox_purge('orders', '1', 'tenant 1 asked for it', dry_run => false)",
    );
    assert_eq!(taken(&mut client), [r#"OrdersCreated 1 {"id": 1}"#]);
    // The names that count are those that events have, not those of the tables now.
    client.run("alter table t1.orders rename to sales; create table t1.orders (id int primary key)");
    assert_eq!(refused(&mut client, "select outbox_capture('t1.orders')").0, "42710");
    client.run("alter table t1.sales set schema t3; alter schema t3 rename to t4");
    assert_eq!(refused(&mut client, "select outbox_capture('t1.orders')").0, "42710");
    // Both are the same things, as their owner says.
    client.run("select outbox_capture('t1.orders', aggregate_type => 'orders'), outbox_uncapture('t1.orders')");
    client.run("select outbox_capture('t4.sales'), outbox_capture('t1.orders')");
    // A table and its partitions are one.
    client.run(
        "create table t1.part (id int primary key) partition by range (id);
         create schema t5; create table t5.part partition of t1.part for values from (1) to (9);
         select outbox_capture('t5.part'), outbox_capture('t1.part'), outbox_capture('t1.part')",
    );
}

#[test]
fn every_kind_of_write_is_captured() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table a (id int primary key, n int);
         create table b (id int primary key, a int references a on delete cascade on update cascade);
         select outbox_capture('a'), outbox_capture('b', columns => '{a}')",
    );
    assert_eq!(
        events_of(
            &mut client,
            "insert into a values (1, 1), (2, 2);
             insert into a values (2, 20), (3, 30), (1, 1) on conflict (id) do update set n = excluded.n;
             insert into a values (3, 0) on conflict do nothing"
        ),
        [
            r#"ACreated 1 {"n": 1, "id": 1}"#,
            r#"ACreated 2 {"n": 2, "id": 2}"#,
            r#"AUpdated 2 {"n": 20, "id": 2}"#,
            r#"ACreated 3 {"n": 30, "id": 3}"#,
        ]
    );
    assert_eq!(
        events_of(
            &mut client,
            "merge into a using (values (1), (3), (4)) v (id) on v.id = a.id
             when matched and a.id = 1 then delete
             when matched then update set n = 33
             when not matched then insert values (v.id, 44)"
        )
        .into_iter()
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .collect::<Vec<_>>(),
        [
            r#"ACreated 4 {"n": 44, "id": 4}"#,
            r#"ADeleted 1 {"id": 1}"#,
            r#"AUpdated 3 {"n": 33, "id": 3}"#,
        ]
    );
    assert_eq!(
        events_of(
            &mut client,
            "with gone as (delete from a where id = 4 returning id), new as (insert into a select id + 1 from gone returning id)
             insert into b select 1, id from new"
        ),
        [
            r#"ADeleted 4 {"id": 4}"#,
            r#"ACreated 5 {"n": null, "id": 5}"#,
            r#"BCreated 1 {"a": 5}"#,
        ]
    );
    // The action of a foreign key is a write like any other.
    assert_eq!(
        events_of(
            &mut client,
            "update a set id = 6 where id = 5; delete from a where id = 6"
        )
        .len(),
        5
    );
    let mut copy = client.copy_in("copy a from stdin").expect("copy");
    std::io::Write::write_all(&mut copy, b"7\t70\n8\t\\N\n").expect("rows");
    copy.finish().expect("the end of the copy");
    assert_eq!(
        taken(&mut client),
        [r#"ACreated 7 {"n": 70, "id": 7}"#, r#"ACreated 8 {"n": null, "id": 8}"#]
    );
}

/// A consumer that applies the events of an id in order must have all rows at the end.
#[test]
fn an_id_that_moves_to_another_row_is_deleted_before_it_is_created() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table a (id int primary key deferrable, n int); insert into a values (1, 10), (2, 20), (3, 30);
         select outbox_capture('a')",
    );
    assert_eq!(
        events_of(&mut client, "update a set id = id % 3 + 1"),
        [
            r#"ADeleted 1 {"id": 1}"#,
            r#"ADeleted 2 {"id": 2}"#,
            r#"ADeleted 3 {"id": 3}"#,
            r#"ACreated 2 {"n": 10, "id": 2}"#,
            r#"ACreated 3 {"n": 20, "id": 3}"#,
            r#"ACreated 1 {"n": 30, "id": 1}"#,
        ]
    );
}

#[test]
fn writes_of_a_function_to_another_captured_table_are_captured() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run("create table log (id int generated always as identity primary key);
         create table a (id int primary key);
         create function note(int) returns text language sql as 'insert into public.log default values; select $1::text';
         select outbox_capture('log'), outbox_capture('a', aggregate_id => 'public.note(id)')");
    assert_eq!(
        events_of(&mut client, "insert into a values (1), (2)"),
        [
            r#"ACreated 1 {"id": 1}"#,
            r#"ACreated 2 {"id": 2}"#,
            r#"LogCreated 1 {"id": 1}"#,
            r#"LogCreated 2 {"id": 2}"#,
        ]
    );
}

#[test]
fn writes_to_a_partitioned_table_and_to_its_partitions_are_captured() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table sale (id int, n int, primary key (id)) partition by range (id);
         create table sale_1 partition of sale for values from (0) to (100);
         create table sale_2 (n int, junk text, id int not null);
         alter table sale_2 drop column junk; alter table sale attach partition sale_2 for values from (100) to (200);
         select outbox_capture('sale')",
    );
    assert_eq!(
        events_of(
            &mut client,
            "insert into sale values (1, 1), (101, 2);
             insert into sale_1 values (2, 3); insert into sale_2 (id, n) values (102, 4);
             update sale set n = n + 1 where n < 3; update sale_2 set n = 9 where id = 102;
             delete from sale_1 where id = 2"
        ),
        [
            r#"SaleCreated 1 {"n": 1, "id": 1}"#,
            r#"SaleCreated 101 {"n": 2, "id": 101}"#,
            r#"SaleCreated 2 {"n": 3, "id": 2}"#,
            r#"SaleCreated 102 {"n": 4, "id": 102}"#,
            r#"SaleUpdated 1 {"n": 2, "id": 1}"#,
            r#"SaleUpdated 101 {"n": 3, "id": 101}"#,
            r#"SaleUpdated 102 {"n": 9, "id": 102}"#,
            r#"SaleDeleted 2 {"id": 2}"#,
        ]
    );
    // One row moves to another partition; another row does not.
    assert_eq!(
        events_of(
            &mut client,
            "update sale set id = id + 10, n = 5 where id in (1, 101); update sale set id = 150 where id = 11"
        ),
        [
            r#"SaleDeleted 1 {"id": 1}"#,
            r#"SaleDeleted 101 {"id": 101}"#,
            r#"SaleCreated 11 {"n": 5, "id": 11}"#,
            r#"SaleCreated 111 {"n": 5, "id": 111}"#,
            r#"SaleDeleted 11 {"id": 11}"#,
            r#"SaleCreated 150 {"n": 5, "id": 150}"#,
        ]
    );
    // A new partition is captured at once, also if a statement names it. Only TRUNCATE of it waits for the next call.
    assert_eq!(
        events_of(
            &mut client,
            "create table sale_3 partition of sale for values from (200) to (300); insert into sale_3 values (200);
             insert into sale values (201); truncate sale_3; select outbox_capture('sale'); insert into sale_3 values (202)"
        )
        .len(),
        3
    );
    assert_eq!(refused(&mut client, "truncate sale_3").0, "0A000");
    // A partition is captured with its table.
    for call in ["outbox_capture", "outbox_uncapture"] {
        assert_eq!(
            refused(&mut client, &format!("select {call}('sale_1')")).0,
            "55000",
            "{call}"
        );
    }
    // One that is detached, and its rows, are no longer captured.
    assert!(
        events_of(
            &mut client,
            "alter table sale detach partition sale_3; delete from sale_3"
        )
        .is_empty()
    );
    assert_eq!(refused(&mut client, "truncate sale_1").0, "0A000");
    assert_eq!(
        events_of(
            &mut client,
            "select outbox_uncapture('sale'); delete from sale; truncate sale, sale_2"
        ),
        [""; 0]
    );
}

/// As pg_partman does it: the default partition may not have rows of a partition that is attached, so they wait in a
/// temporary table. They are deleted and inserted again, both by names of partitions.
#[test]
fn rows_that_leave_a_default_partition_for_a_new_one_are_deleted_and_created_or_make_no_event() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table sale (id int primary key) partition by range (id); create table sale_rest partition of sale default;
         select outbox_capture('sale'); insert into sale values (1), (101)",
    );
    taken(&mut client);
    let moved = |from: u32, setting: &str| {
        format!(
            "begin; {setting}; create temp table moved (id int) on commit drop;
             with gone as (delete from sale_rest where id between {from} and {from} + 99 returning *) insert into moved select * from gone;
             create table sale_{from} partition of sale for values from ({from}) to ({from} + 100);
             with gone as (delete from moved returning *) insert into sale_{from} select * from gone; commit"
        )
    };
    assert_eq!(
        events_of(&mut client, &moved(1, "set local client_min_messages = warning")),
        [r#"SaleDeleted 1 {"id": 1}"#, r#"SaleCreated 1 {"id": 1}"#]
    );
    assert!(events_of(&mut client, &moved(101, "set local outbox.replaying = on")).is_empty());
    assert_eq!(events_of(&mut client, "delete from sale").len(), 2);
}

/// The warnings of a statement, each with its detail and hint.
fn warnings_of(client: &mut Client, warnings: &mpsc::Receiver<DbError>, sql: &str) -> Vec<String> {
    warnings.try_iter().for_each(drop);
    let _ = client.batch_execute(sql); // some are refused
    let warnings = warnings.try_iter().filter(|warning| warning.severity() == "WARNING");
    warnings
        .map(|warning| {
            assert!(warning.detail().is_some() && warning.hint().is_some(), "{warning:?}");
            warning.message().to_owned()
        })
        .collect()
}

#[test]
fn a_partition_that_comes_or_goes_with_rows_is_named_by_a_warning() {
    let cluster = server();
    let (sender, warnings) = mpsc::channel();
    let mut config: postgres::Config = cluster.conn_string(DB).parse().expect("a connection string");
    config.notice_callback(move |notice| drop(sender.send(notice)));
    let mut client = config.connect(postgres::NoTls).expect("connect");
    let partition = |table: &str, from: u32| {
        format!("create table {table}_{from} partition of {table} for values from ({from}) to ({from} + 10);")
    };
    let numbers = [0, 10, 20, 30, 40, 50, 60, 70].map(|from| partition("sale", from));
    client.run(&format!(
        "create table sale (id int primary key) partition by range (id); {}
         create table sale_deep partition of sale for values from (90) to (100) partition by range (id); {}
         insert into sale select * from generate_series(0, 69); insert into sale values (90);
         create table other (id int primary key) partition by range (id); {}
         insert into other values (1); create table alone (id int primary key); insert into alone values (1);
         create table come (id int primary key); insert into come values (80);
         create table come_empty (like come including all)",
        numbers.concat(),
        partition("sale_deep", 90),
        [0, 10].map(|from| partition("other", from)).concat(),
    ));
    client.run("select outbox_capture('sale')");
    let mut told = |sql: &str| warnings_of(&mut client, &warnings, sql);
    let leaves = |table: &str| {
        vec![format!(
            "the rows of partition \"{table}\" leave the captured table \"sale\" without events"
        )]
    };
    assert_eq!(told("alter table sale detach partition sale_0"), leaves("sale_0"));
    assert_eq!(
        told("alter table sale detach partition sale_10 concurrently"),
        leaves("sale_10")
    );
    // One that stops halfway, because a reader holds the table, is told again where it is finished.
    let mut reader = cluster.connect(DB);
    reader.run("begin; select from sale");
    let halfway = "set lock_timeout = '10ms'; alter table sale detach partition sale_20 concurrently";
    for statement in halfway.split("; ") {
        let expected = if statement.starts_with("set") {
            vec![]
        } else {
            leaves("sale_20")
        };
        assert_eq!(told(statement), expected);
    }
    reader.run("rollback");
    assert_eq!(told("reset lock_timeout"), [""; 0]);
    assert_eq!(
        told("alter table sale detach partition sale_20 finalize"),
        leaves("sale_20")
    );
    assert_eq!(told("drop table sale_30"), leaves("sale_30"));
    assert_eq!(
        told("drop table if exists nowhere, alone, public.sale_40, sale_deep"),
        [leaves("sale_40"), leaves("sale_deep")].concat()
    );
    // A TRUNCATE is refused, except of a partition that is younger than the call of outbox_capture.
    assert_eq!(told("truncate sale_50"), [""; 0]);
    assert_eq!(refused(&mut cluster.connect(DB), "truncate sale_50").0, "0A000");
    assert_eq!(
        told(&format!("{} insert into sale values (100)", partition("sale", 100))),
        [""; 0]
    );
    assert_eq!(told("truncate sale_100"), leaves("sale_100"));
    assert_eq!(
        told("alter table if exists sale attach partition come for values from (80) to (90)"),
        ["the rows of \"come\" join the captured table \"sale\" without events"]
    );
    for silent in [
        "alter table sale attach partition come_empty for values from (200) to (300)",
        "alter table sale detach partition sale_70",
        "drop table come_empty",
        "alter table other detach partition other_0",
        "drop table other_0, other_10",
        "truncate other",
        "drop table if exists nowhere.at_all",
        "alter table if exists nowhere detach partition at_all",
        "alter table sale detach partition nowhere",
        "drop table sale, sale_50",
    ] {
        assert_eq!(told(silent), [""; 0], "{silent}");
    }
    assert!(client.value::<bool>("select to_regclass('sale_60') is null"));
}

#[test]
fn a_child_table_is_captured_through_its_parent_or_when_captured_itself() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table parent (id int primary key, n int); create table child (extra text) inherits (parent);
         select outbox_capture('parent'); insert into child values (1, 1, 'x')",
    );
    assert!(taken(&mut client).is_empty());
    assert_eq!(
        events_of(&mut client, "update parent set n = 2"),
        [r#"ParentUpdated 1 {"n": 2, "id": 1}"#]
    );
    assert_eq!(
        events_of(
            &mut client,
            "select outbox_capture('child', aggregate_id => 'id'); update child set n = 3; update parent set n = 4"
        ),
        [r#"ChildUpdated 1 {"n": 3}"#, r#"ParentUpdated 1 {"n": 4, "id": 1}"#]
    );
    // In one query, and by a MERGE; also of a child of the child, with its columns in another order.
    client.run(
        "create table grandchild (more int, n int, id int not null); alter table grandchild drop more;
         alter table grandchild add extra text; alter table grandchild inherit child",
    );
    client.run("insert into grandchild values (5, 2, 'y')");
    let (state, message) = refused(&mut client, "update parent set n = 5");
    assert_eq!(state, "55000", "{message}");
    assert_eq!(
        events_of(
            &mut client,
            "select outbox_capture('parent');
             with other as (delete from only parent) update parent set n = 6 where id = 2;
             merge into parent using (values (1), (2)) s (id) on parent.id = s.id
               when matched and s.id = 1 then delete when matched then update set n = 7"
        ),
        [
            r#"ParentUpdated 2 {"n": 6, "id": 2}"#,
            r#"ParentDeleted 1 {"id": 1}"#,
            r#"ParentUpdated 2 {"n": 7, "id": 2}"#,
        ]
    );
    // Without its capture the child is captured through the parent; without that of the parent not at all.
    assert_eq!(
        events_of(
            &mut client,
            "select outbox_uncapture('child'); insert into child values (3, 0); update child set n = 1; delete from parent"
        ),
        [r#"ParentDeleted 3 {"id": 3}"#, r#"ParentDeleted 2 {"id": 2}"#]
    );
    client.run("select outbox_uncapture('parent')");
    let left: i64 = client.value("select count(*) from pg_trigger where tgname like 'outbox_capture%'");
    assert_eq!(left, 0);
}

#[test]
fn generated_dropped_added_and_renamed_columns_appear_as_they_are_now() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table a (junk int, id int primary key, n int, twice int generated always as (n * 2) stored);
         alter table a drop column junk; select outbox_capture('a')",
    );
    assert_eq!(
        events_of(&mut client, "insert into a values (1, 2); update a set n = 3"),
        [
            r#"ACreated 1 {"n": 2, "id": 1, "twice": 4}"#,
            r#"AUpdated 1 {"n": 3, "id": 1, "twice": 6}"#,
        ]
    );
    assert_eq!(
        events_of(
            &mut client,
            "alter table a rename id to code; alter table a rename n to m; alter table a add extra text;
             update a set m = 4, extra = 'x'; alter table a rename to b; update b set m = 5; alter table b drop extra;
             insert into b values (2, 0)"
        ),
        [
            r#"AUpdated 1 {"m": 4, "code": 1, "extra": "x", "twice": 8}"#,
            r#"AUpdated 1 {"m": 5, "code": 1, "twice": 10}"#,
            r#"ACreated 2 {"m": 0, "code": 2, "twice": 0}"#,
        ]
    );
    // If a column named in a setting is missing, the write fails: no write goes without its event.
    client.run("select outbox_capture('b', columns => '{code,m}', soft_delete_column => 'm')");
    client.run("alter table b rename m to n");
    let (state, message) = refused(&mut client, "update b set n = 1");
    assert_eq!(
        (state.as_str(), message.contains("\"m\"")),
        ("42703", true),
        "{message}"
    );
    client.run("select outbox_capture('b', aggregate_id => 'n'); alter table b drop column n cascade");
    assert_eq!(refused(&mut client, "update b set code = 7 where code = 1").0, "42703");
    client.run("select outbox_capture('b'); alter table b drop constraint a_pkey");
    let (state, message) = refused(&mut client, "update b set code = 7 where code = 1");
    assert_eq!(state, "55000", "{message}");
}

/// jsonb has no NaN and no infinity, and the format of dates depends on session settings. An event must be the same in
/// every session.
#[test]
fn odd_values_arrive_the_same_with_any_session_settings() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    // A server may be built without libxml.
    let xml = match client.simple_query("select xml '<a/>'") {
        Ok(_) => "xml",
        Err(error) if error.code() == Some(&SqlState::FEATURE_NOT_SUPPORTED) => "text",
        Err(error) => panic!("{error}"),
    };
    client.run(&format!(
            "create table odd (id int primary key, at timestamptz, bytes bytea, f float8, n numeric, i interval, d date, r daterange,
               arr int[], doc json, x {xml});
             select outbox_capture('odd')"
        ));
    let values = r#"'2026-06-01 12:00+02', '\xdead00', 0.1, 123456789012345678901234567890.10, '1 day 2 hours', '2026-01-31',
        '[2026-01-01,2026-02-01)', '{1,NULL}', '{"b":1,  "a":2}', '<a/>'"#;
    let first = events_of(
        &mut client,
        &format!("insert into odd values (1, {values}); delete from odd"),
    );
    assert!(first[0].contains(r#""at": "2026-06-01T10:00:00+00:00""#), "{first:?}");
    assert!(first[0].contains(r#""bytes": "\\xdead00""#), "{first:?}");
    assert!(
        first[0].contains(r#""n": 123456789012345678901234567890.10"#),
        "{first:?}"
    );
    client.run(
        "set timezone = 'Asia/Tokyo'; set datestyle = 'German'; set intervalstyle = 'sql_standard';
         set bytea_output = 'escape'; set extra_float_digits = -10",
    );
    let again = events_of(
        &mut client,
        &format!("insert into odd values (1, {values}); delete from odd"),
    );
    assert_eq!(again, first);
    let special = events_of(
        &mut client,
        "insert into odd (id, at, f, n, d) values (2, 'infinity', 'NaN', 'NaN', '-infinity'), (3, null, '-inf', 'inf', null)",
    );
    assert!(special[0].contains(r#""at": "infinity""#), "{special:?}");
    assert!(special[0].contains(r#""d": "-infinity", "f": "NaN""#), "{special:?}");
    assert!(special[0].contains(r#""n": "NaN""#), "{special:?}");
    assert!(special[1].contains(r#""f": "-Infinity""#), "{special:?}");
    // A json value that jsonb cannot hold: the column can be left out.
    let (state, _) = refused(
        &mut client,
        r#"insert into odd (id, doc) values (4, '{"a": "\u0000"}')"#,
    );
    assert_eq!(state, "22P05");
    assert_eq!(
        events_of(
            &mut client,
            r#"select outbox_capture('odd', columns => '{id,n}'); insert into odd (id, doc) values (4, '{"a": "\u0000"}')"#
        ),
        [r#"OddCreated 4 {"n": null, "id": 4}"#]
    );
    // An event contains a large value only if the value changed.
    client.run("create table big (id int primary key, t text, n int); select outbox_capture('big')");
    let events = events_of(
        &mut client,
        "insert into big values (1, repeat('x', 7000000), 0); update big set n = 1; update big set t = t || 'y'",
    );
    let sizes: Vec<usize> = events.iter().map(|event| event.len() / 1_000_000).collect();
    assert_eq!(sizes, [7, 0, 7]);
    let (state, _) = refused(&mut client, "update big set t = t || t");
    assert_eq!(state, "54000");
}

#[test]
fn names_with_capitals_quotes_and_other_schemas_are_kept() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        r#"create schema "My Shop"; set search_path = "My Shop", public;
           create table "Line""Item" ("Id" int primary key, "r" int, "outbox_new" int, "%s" text, "select" text);
           select outbox_capture('"My Shop"."Line""Item"', soft_delete_column => 'select'); set search_path = public"#,
    );
    assert_eq!(
        events_of(
            &mut client,
            r#"insert into "My Shop"."Line""Item" values (1, 2, 3, '4'); update "My Shop"."Line""Item" set "select" = ''"#
        ),
        [
            r#"LineItemCreated 1 {"r": 2, "%s": "4", "Id": 1, "select": null, "outbox_new": 3}"#,
            r#"LineItemDeleted 1 {"Id": 1, "select": ""}"#,
        ]
    );
    let kind: String = cluster.query_one(
        DB,
        "select pg_get_triggerdef(oid) from pg_trigger where tgname = 'outbox_capture_insert'",
    );
    assert!(kind.contains(r#"ON "My Shop"."Line""Item""#), "{kind}");
}

#[test]
fn triggers_do_not_fire_when_a_replica_applies_changes() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run("create table a (id int primary key); select outbox_capture('a')");
    client
        .run("set session_replication_role = replica; insert into a values (1); set session_replication_role = origin");
    assert!(taken(&mut client).is_empty());
    assert_eq!(events_of(&mut client, "insert into a values (2)").len(), 1);
    // As documented: ENABLE ALWAYS makes the triggers fire there too.
    assert_eq!(
        events_of(
            &mut client,
            "alter table a enable always trigger outbox_capture_insert;
             set session_replication_role = replica; insert into a values (3); set session_replication_role = origin"
        )
        .len(),
        1
    );
}

#[test]
fn writes_to_an_attached_partitioned_table_and_its_partitions_are_enqueued() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    cluster.draw_seqs(101);
    client.run(
        "create table journal (seq bigint, kind text) partition by range (seq);
         create table journal_1 partition of journal for values from (1) to (100);
         create table journal_2 partition of journal for values from (100) to (200);
         select outbox_attach('journal', $$kind <> 'x'$$);
         insert into journal values (1, 'a'), (101, 'b'), (102, 'x'); insert into journal_1 values (2, 'c')",
    );
    let seqs: String = cluster.query_one(DB, "select string_agg(seq::text, ' ' order by seq) from outbox");
    assert_eq!(seqs, "1 2 101");
    client.run("select outbox_detach('journal'); insert into journal_1 values (3, 'd')");
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 3);
}
