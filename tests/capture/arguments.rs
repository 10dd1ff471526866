//! Which tables and arguments does outbox_capture take, and what do those make of a row that it did not expect?

use support::{DB, Session, health, type_sql, wait_healthy};

use super::{events_of, refused, server};

/// A key of AMQP has at most 255 bytes. A user cannot shorten the key of a row that exists.
#[test]
fn a_row_with_a_longer_id_than_a_key_is_written_changed_and_deleted() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run("create table page (url text primary key, n int)");
    client.run("insert into page values (repeat('u', 300), 0)"); // before it is captured
    client.run("select outbox_capture('page')");
    let digest: String = client.value("select encode(sha256(convert_to(repeat('u', 300), 'UTF8')), 'hex')");
    let last: String = client.value("select repeat('v', 250)"); // with the aggregate_type exactly 255 bytes
    let types = |events: Vec<String>| {
        let words = events
            .iter()
            .map(|event| event.split(' ').take(2).collect::<Vec<_>>().join(" "));
        words.collect::<Vec<_>>()
    };
    let writes = "update page set n = 1; delete from page; insert into page values (repeat('u', 300), 2);
                  insert into page values (repeat('v', 250), 3), (repeat('w', 251), 4)";
    let beyond: String = client.value("select encode(sha256(convert_to(repeat('w', 251), 'UTF8')), 'hex')");
    assert_eq!(
        types(events_of(&mut client, writes)),
        [
            format!("PageUpdated {digest}"),
            format!("PageDeleted {digest}"),
            format!("PageCreated {digest}"),
            format!("PageCreated {last}"),
            format!("PageCreated {beyond}"),
        ]
    );
}

#[test]
fn a_trigger_that_is_disabled_or_dropped_is_named_with_the_command_that_ends_it() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        r#"create schema shop; create table shop."Order lines" (n int primary key, deleted timestamptz);
           select outbox_capture('shop."Order lines"', 'line', columns => '{n}', soft_delete_column => 'deleted');
           create table log (seq bigint); select outbox_attach('log', key => 'seq::text')"#,
    );
    assert!(health(&cluster, "capture").0);
    let captured = || {
        let mut client = cluster.connect(DB);
        let written = r#"insert into shop."Order lines" values (1); update shop."Order lines" set n = 2; delete from shop."Order lines""#;
        events_of(&mut client, written).len()
    };
    let events = captured();
    for (fault, words) in [
        (
            r#"alter table shop."Order lines" disable trigger outbox_capture_update"#,
            "trigger outbox_capture_update of table shop.\"Order lines\" is disabled",
        ),
        (r#"alter table shop."Order lines" disable trigger all"#, "is disabled"),
        (r#"alter table shop."Order lines" disable trigger user"#, "is disabled"),
        (
            r#"alter table shop."Order lines" enable replica trigger outbox_capture_insert"#,
            "fires in replication only",
        ),
        (
            r#"drop trigger outbox_capture_delete on shop."Order lines""#,
            "has lost a trigger of outbox_capture: DELETE makes no event",
        ),
        (
            "alter table log disable trigger outbox_attach_default",
            "trigger outbox_attach_default of table public.log is disabled",
        ),
    ] {
        client.run(fault);
        let (is_healthy, problem) = health(&cluster, "capture");
        assert!(!is_healthy && problem.contains(words), "{fault}: {problem}");
        let remedy: String = client.value("select remedy from outbox_health where \"check\" = 'capture'");
        type_sql(&cluster, &remedy);
        wait_healthy(&cluster, "capture");
        assert_eq!(captured(), events, "{fault}: {remedy}");
    }
}

/// A trigger sees the value of a stored generated column, and none of a virtual one, which Postgres 18 has.
#[test]
fn a_generated_column_identifies_rows_only_if_it_is_stored() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table s (id int primary key, name text generated always as ('n' || id) stored);
         select outbox_capture('s', aggregate_id => 'name'); insert into s values (7)",
    );
    let id: String = client.value("select aggregate_id from outbox_events");
    assert_eq!(id, "n7");
    if client.value::<i32>("select current_setting('server_version_num')::integer") < 180_000 {
        return;
    }
    client.run(
        "create table t (id int primary key, seq int generated always as (id) virtual,
                         name text generated always as ('n' || id) virtual,
                         gone timestamptz generated always as (null) virtual)",
    );
    for call in [
        "outbox_capture('t', aggregate_id => 'name')",
        "outbox_capture('t', aggregate_id => 'lower(r.name)')",
        "outbox_capture('t', soft_delete_column => 'gone')",
        "outbox_attach('t')",
        "outbox_attach('t', seq => 'id', key => 'name')",
        "outbox_attach('t', seq => 'id', when_sql => 'name > ''n''')",
    ] {
        let (code, message) = refused(&mut client, &format!("select {call}"));
        assert_eq!(code, "0A000", "{call}: {message}");
        assert!(
            message.ends_with("uses a virtual generated column of table public.t"),
            "{call}: {message}"
        );
    }
    client.run("select outbox_capture('t', aggregate_id => '''n'' || id')");
    client.run("select outbox_attach('t', when_sql => 'r is not null', seq => 'id')");
}
