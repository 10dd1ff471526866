//! Events of a source as people see them: outbox_messages, `show` and `list` read them with the rights of the reader.

use super::{SHOP, set_source};
use crate::outboxctl::Ctl;
use support::{Cluster, DB, Session, Stage, wait_drained};

/// Two orders of a source, delivered. The payload is an expression that shows who runs it.
fn stage() -> Stage {
    let stage = Stage::new(&[]);
    stage.exec(DB, SHOP);
    stage.exec(
        DB,
        "set role shopkeeper;
         create function shop.body(data jsonb) returns jsonb language sql stable as $$ select data || jsonb_build_object('reader', current_user::text) $$",
    );
    stage.exec(DB, &set_source(", payload => 'shop.body(data)'"));
    stage.exec(
        DB,
        "select shop.write('{\"n\": 1}', 'a'), shop.write('{\"n\": 2}', 'b')",
    );
    wait_drained(&stage);
    stage.exec(
        DB,
        "create role auditor in role outbox_admin; grant usage on schema shop to auditor;
         create role operator in role outbox_admin, pg_execute_server_program; grant usage on schema shop to operator",
    );
    stage
}

/// What a role sees of the message with this seq: the type and the reader of its event, or why it sees none.
fn seen_by(cluster: &Cluster, role: &str, seq: i64) -> (Option<String>, Option<String>, Option<String>) {
    let mut session = cluster.connect(DB);
    session.run(&format!("set role {role}"));
    let sql = "select type, payload->>'reader', event_error from outbox_messages where seq = $1";
    let row = session.query_one(sql, &[&seq]).expect("a message");
    (row.get(0), row.get(1), row.get(2))
}

#[track_caller]
fn assert_hidden(seen: (Option<String>, Option<String>, Option<String>), why: &str) {
    let (kind, reader, error) = seen;
    assert_eq!((kind, reader), (None, None));
    assert!(error.as_ref().is_some_and(|error| error.contains(why)), "{error:?}");
}

#[test]
fn outbox_messages_has_the_event_of_a_source_as_its_reader_may_read_it() {
    let stage = stage();
    assert_hidden(seen_by(&stage, "auditor", 1), "permission denied for table events");
    stage.exec(
        DB,
        "grant select (position, \"eventKind\", at, stream, stream_id) on shop.events to auditor",
    );
    assert_hidden(seen_by(&stage, "auditor", 1), "permission denied for table events");
    stage.exec(DB, "grant select on shop.events to auditor, operator");
    let shown = (Some("Written".to_owned()), Some("auditor".to_owned()), None);
    assert_eq!(seen_by(&stage, "auditor", 1), shown);
    stage.exec(
        DB,
        "alter table shop.events enable row level security;
         create policy of_a on shop.events for select to auditor using (stream_id = 'a')",
    );
    assert_eq!(seen_by(&stage, "auditor", 1), shown);
    assert_hidden(seen_by(&stage, "auditor", 2), "has no row with seq 2");
    // The message is there for all of them.
    let mut session = stage.connect(DB);
    session.run("set role auditor");
    let seen = "select count(*) from outbox_messages where status = 'published'";
    assert_eq!(session.query_one(seen, &[]).expect("count").get::<_, i64>(0), 2);
}

#[test]
fn no_expression_of_a_source_runs_as_a_role_that_could_harm_the_server() {
    let stage = stage();
    stage.exec(DB, "grant select on shop.events to operator");
    assert_hidden(seen_by(&stage, "operator", 1), "programs of the server");
    let shown = (Some("Written".to_owned()), Some("shopkeeper".to_owned()), None);
    assert_eq!(seen_by(&stage, "postgres", 1), shown, "a superuser reads as the owner");
    // Nor does it write, or change the session, as any reader.
    stage.exec(
        DB,
        "grant select on shop.events to auditor; create table shop.log (x int); grant insert on shop.log to public;
         create or replace function shop.body(data jsonb) returns jsonb language plpgsql as $$
           begin insert into shop.log values (1); return data; end $$",
    );
    assert_hidden(seen_by(&stage, "auditor", 1), "read-only");
    assert_hidden(seen_by(&stage, "postgres", 1), "read-only");
}

#[test]
fn show_and_list_have_the_events_of_a_source() {
    let stage = stage();
    let shown = Ctl::new(&stage, &["show", "2", "--json"]).run().json();
    assert_eq!(shown["event"]["type"], "Written");
    assert_eq!(shown["event"]["payload"]["n"], 2);
    let text = Ctl::new(&stage, &["show", "1"]).run().well();
    assert!(text.contains("\"n\": 1"), "{text}");
    let listed = Ctl::new(
        &stage,
        &[
            "list",
            "--json",
            "--status",
            "published",
            "--type",
            "Written",
            "--aggregate-id",
            "b",
        ],
    );
    let seqs: Vec<i64> = (listed.run().json_lines().iter())
        .map(|row| row["seq"].as_i64().expect("a seq"))
        .collect();
    assert_eq!(seqs, [2]);
    let id = uuid_of(&stage, 2);
    let refused = Ctl::new(&stage, &["list", "--id", &id]).run().failed(5);
    assert!(refused.contains("its id") && refused.contains("seq"), "{refused}");
}

/// The id in outbox_events of an event with this seq, which is stored past the source, as a restore could.
fn uuid_of(cluster: &Cluster, seq: i64) -> String {
    let insert = "insert into outbox_events (seq, id, type, payload) values ($, gen_random_uuid(), 'Other', '{}') returning id::text";
    let mut session = cluster.connect(DB);
    session.run("set session_replication_role = replica");
    session
        .query_one(&insert.replace('$', &seq.to_string()), &[])
        .expect("an id")
        .get(0)
}

#[test]
fn a_query_that_asks_for_no_event_reads_none() {
    let stage = stage();
    stage.exec(
        DB,
        "insert into outbox_history select seq + 10, enqueued_at, published_at, 1, 0, false, false, 'default', null, null
         from outbox_history, generate_series(1, 1000)",
    );
    let read = "select seq_scan + coalesce(idx_scan, 0) from pg_stat_user_tables where relid = 'shop.events'::regclass";
    let before: i64 = stage.query_one(DB, read);
    assert_eq!(
        stage.query_one::<i64>(DB, "select count(*) from outbox_messages where status = 'published'"),
        2002
    );
    assert_eq!(stage.query_one::<i64>(DB, read), before);
}
