//! To which destinations an event goes that names none: by the lists, headers and conditions of subscriptions, however
//! it is enqueued, by whoever does it, and whatever else happens to the destination. On a real Postgres.

use postgres::error::SqlState;
use postgres::{Client, IsolationLevel};
use support::{
    Cluster, Receiver, Reply, Session, Stage, all_of, health, quiet_cluster, quiet_cluster_with, refused,
    unconnected_cluster, wait_drained, wait_true,
};
use support::{DB, Event};

/// A server on which nothing is delivered, with the destinations audit and search.
fn cluster() -> Cluster {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create server audit foreign data wrapper outbox_amqp options (url 'amqp://localhost');
         create server search foreign data wrapper outbox_http options (url 'https://search.example/')",
    );
    cluster
}

/// The destinations of the messages that a statement enqueues, with their events.
fn enqueued(client: &mut Client, sql: &str) -> String {
    client.run("delete from outbox; delete from outbox_waiting");
    client.run(sql);
    client.value(
        "select coalesce(string_agg(e.type || ' ' || m.destination, ', ' order by m.seq, m.destination), '')
         from (select seq, destination from outbox union all select seq, destination from outbox_waiting) m
         join outbox_events e using (seq)",
    )
}

#[test]
fn an_event_goes_to_each_destination_whose_subscription_it_meets() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    let publish = "select outbox_publish('A', '{\"total\": 1}', 'order', '7'),
                          outbox_publish('B', '{\"total\": 9}', 'cart', '7', headers => '{\"tenant\": \"acme\", \"n\": 1}'),
                          outbox_publish('C', '{}')";
    for (arguments, expected) in [
        ("", "A audit, A default, B audit, B default, C audit, C default"),
        (
            ", types => '{A,C}'",
            "A audit, A default, B default, C audit, C default",
        ),
        (", types => '{}'", "A default, B default, C default"),
        (
            ", aggregate_types => '{cart,order}', types => '{A,C}'",
            "A audit, A default, B default, C default",
        ),
        (
            ", headers => '{\"tenant\": \"acme\"}'",
            "A default, B audit, B default, C default",
        ),
        (
            ", headers => '{\"tenant\": \"acme\", \"n\": 2}'",
            "A default, B default, C default",
        ),
        (
            ", when_sql => $$(payload ->> 'total')::int > 3$$",
            "A default, B audit, B default, C default",
        ),
        (
            ", types => '{A,B}', when_sql => $$headers ->> 'tenant' is null -- or so$$",
            "A audit, A default, B default, C default",
        ),
    ] {
        client.run(&format!("select outbox_subscribe('audit'{arguments})"));
        assert_eq!(enqueued(&mut client, publish), expected, "{arguments}");
    }
    // What names a destination goes there and nowhere else.
    client.run("select outbox_subscribe('audit'), outbox_subscribe('search')");
    let named = "select outbox_publish('A', '{}', destination => 'audit')";
    assert_eq!(enqueued(&mut client, named), "A audit");
    // The default destination has a subscription to everything, until it gets another one.
    client.run("select outbox_unsubscribe('audit'), outbox_subscribe('default', types => '{B}')");
    assert_eq!(
        enqueued(&mut client, publish),
        "A search, B default, B search, C search"
    );
    client.run("select outbox_unsubscribe('search')");
    assert_eq!(enqueued(&mut client, publish), "B default");
    assert!(client.value::<bool>("select outbox_unsubscribe('default')"));
    assert!(!client.value::<bool>("select outbox_unsubscribe('default')"));
    assert_eq!(enqueued(&mut client, publish), "A default, B default, C default");
}

/// Postgres itself says which values are equal.
#[test]
fn headers_are_equal_if_jsonb_has_them_as_equal() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    let deep = |number: &str| format!("{}{number}{}", "[".repeat(50), "]".repeat(50));
    let (deep_1, deep_1_0, deep_2) = (deep("1"), deep("1.0"), deep("2"));
    let values = [
        "1",
        "1.0",
        "\"1\"",
        "100000000000000000001",
        "100000000000000000002",
        "0.1",
        "0.1000000000000000000001",
        "1e400",
        "-1e400",
        "10e399",
        "0",
        "-0.00",
        "null",
        "true",
        r#""é\\\"{,""#,
        r#""\u00e9\\\u0022{,""#,
        "[1, {\"a\": 2}]",
        "[1.0, {\"a\": 3, \"a\": 2.0}]",
        "[{\"a\": 2}, 1]",
        "{\"b\": 1, \"aa\": []}",
        "{\"aa\": [], \"b\": 1.0}",
        "{}",
        &deep_1,
        &deep_1_0,
        &deep_2,
    ];
    for asked in values {
        client.run(&format!(
            "select outbox_subscribe('audit', headers => '{{\"n\": {asked}}}')"
        ));
        for given in values {
            // Another header that no subscription names.
            let headers = format!("{{\"n\": {given}, \"x\": 1e400}}");
            let is_equal: bool = client.value(&format!("select '{asked}'::jsonb = '{given}'::jsonb"));
            let publish = format!("select outbox_publish('A', '{{}}', headers => '{headers}')");
            let expected = if is_equal { "A audit, A default" } else { "A default" };
            assert_eq!(enqueued(&mut client, &publish), expected, "{asked} = {given}");
        }
    }
    // A source of the user may store json, as it was written.
    client.run(
        r#"delete from outbox; delete from outbox_waiting; create role shopkeeper; create schema shop authorization shopkeeper; set role shopkeeper;
           create table shop.events (seq bigint primary key, at timestamptz default now(), headers json); reset role;
           select outbox_source_set('shop.events', seq => 'seq', type => $$'A'$$, created_at => 'at', headers => 'headers');
           select outbox_subscribe('audit', headers => '{"né": {"b": 1, "aa": ["/"]}, "z": 0}');
           insert into shop.events (seq, headers)
           values (1, '{ "n\u00e9" : {"aa":["\/"],"b":2,"b":1e0},"z":2, "z" :-0e9 , "s":"\ud800"}'), (2, '[]'), (3, null),
                  (4, '"né"');
           select outbox_enqueue_many('{1,2,3,4}')"#,
    );
    let messages: String =
        client.value("select string_agg(seq::text, ',' order by seq) from outbox where destination = 'audit'");
    assert_eq!(messages, "1");
}

#[test]
fn subscriptions_apply_however_an_event_is_enqueued() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    client.run(
        "create table item (id int primary key); select outbox_capture('item');
         create table journal (seq bigint); select outbox_attach('journal');
         create role shopkeeper; create schema shop authorization shopkeeper; set role shopkeeper;
         create table shop.events (seq bigint primary key, kind text, at timestamptz default now(), data jsonb);
         reset role;
         select outbox_subscribe('audit', types => '{A,ItemCreated}'),
                outbox_subscribe('search', when_sql => $$payload ? 'a'$$)",
    );
    let stored = "with e as (insert into outbox_events (id, type, payload)
                             values (gen_random_uuid(), 'A', '{\"a\": 1}'), (gen_random_uuid(), 'B', '{}') returning seq)";
    for (sql, expected) in [
        (
            "select outbox_publish('A', '{\"a\": 1}', available_at => '2999-01-01')".to_owned(),
            "A audit, A default, A search",
        ),
        (
            "select outbox_store('{}', '{\"type\": \"A\"}')".to_owned(),
            "A audit, A default",
        ),
        (
            "insert into item values (1), (2)".to_owned(),
            "ItemCreated audit, ItemCreated default, ItemCreated audit, ItemCreated default",
        ),
        (
            format!("{stored} select outbox_enqueue(seq) from e"),
            "A audit, A default, A search, B default",
        ),
        (
            format!("{stored} select outbox_enqueue_many(array_agg(seq), 'a key') from e"),
            "A audit, A default, A search, B default",
        ),
        (
            format!("{stored} insert into journal select seq from e"),
            "A audit, A default, A search, B default",
        ),
    ] {
        assert_eq!(enqueued(&mut client, &sql), expected, "{sql}");
    }
    let again: i64 = client.value("select outbox_enqueue_many(array_agg(distinct seq)) from outbox");
    assert_eq!(again, 0, "events that wait already");
    let counted: i64 = client.value(
        "with e as (insert into outbox_events (id, type, payload) values (gen_random_uuid(), 'A', '{}') returning seq)
         select outbox_enqueue_many(array_agg(seq)) from e",
    );
    assert_eq!(counted, 1, "one event, two messages");
    // A type must be known, so the event must be stored.
    client.run("select setval(pg_get_serial_sequence('outbox_events', 'seq'), 1000)");
    let error = refused(&cluster, "select outbox_enqueue(999, 'a key')");
    assert_eq!(error.code(), &SqlState::NO_DATA_FOUND);
    client.run("delete from outbox; delete from outbox_waiting");
    client.run(
        "select outbox_source_set('shop.events', seq => 'seq', type => 'kind', created_at => 'at', payload => 'data')",
    );
    client.run(
        "insert into shop.events (seq, kind, data) values (1, 'A', '{\"a\": 1}'), (2, 'B', '{}');
         select outbox_enqueue_many('{1,2}')",
    );
    let messages: String =
        client.value("select string_agg(seq || ' ' || destination, ', ' order by seq, destination) from outbox");
    assert_eq!(messages, "1 audit, 1 default, 1 search, 2 default");
}

#[test]
fn a_session_follows_a_subscription_from_its_commit_on() {
    let cluster = cluster();
    let (mut client, mut other) = (cluster.connect(DB), cluster.connect(DB));
    let publish = "select outbox_publish('A', '{}')";
    assert_eq!(enqueued(&mut client, publish), "A default");
    let mut open = other.transaction().expect("begin");
    open.run("select outbox_subscribe('audit')");
    assert_eq!(enqueued(&mut client, publish), "A default", "not committed");
    open.commit().expect("commit");
    assert_eq!(enqueued(&mut client, publish), "A audit, A default");
    // In its own transaction at once, and no longer after a rollback.
    let mut own = client.transaction().expect("begin");
    let mut inner = own.savepoint("one").expect("savepoint");
    inner.run("select outbox_subscribe('search')");
    inner.run("delete from outbox");
    inner.run(publish);
    assert_eq!(inner.value::<i64>("select count(*) from outbox"), 3);
    inner.rollback().expect("rollback");
    own.run("delete from outbox");
    own.run(publish);
    assert_eq!(own.value::<i64>("select count(*) from outbox"), 2);
    // Another session's change applies within a transaction that goes on.
    other.run("select outbox_unsubscribe('audit')");
    own.run("delete from outbox");
    own.run(publish);
    assert_eq!(own.value::<i64>("select count(*) from outbox"), 1);
    own.rollback().expect("rollback");
    // A transaction with one snapshot keeps the subscriptions that it sees, and leaves none to the session.
    let mut old = client
        .build_transaction()
        .isolation_level(IsolationLevel::RepeatableRead)
        .start()
        .expect("begin");
    old.run("select 1");
    other.run("select outbox_subscribe('search')");
    old.run("delete from outbox");
    old.run(publish);
    assert_eq!(old.value::<i64>("select count(*) from outbox"), 1);
    old.commit().expect("commit");
    assert_eq!(enqueued(&mut client, publish), "A default, A search");
    other.run("truncate outbox_subscriptions");
    assert_eq!(enqueued(&mut client, publish), "A default");
}

#[test]
fn sessions_with_one_snapshot_a_transaction_keep_the_subscriptions_too() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    let condition = "$$(payload ->> 'n')::int > 3$$";
    cluster.exec(
        DB,
        &format!("select outbox_subscribe('search', when_sql => {condition})"),
    );
    let reads =
        "select seq_scan + coalesce(idx_scan, 0) from pg_stat_xact_user_tables where relname = 'outbox_subscriptions'";
    let plans = "select count(*) from pg_backend_memory_contexts where name like 'CachedPlan%'";
    let failing = "do $$ begin
                     for i in 1 .. 50 loop
                       begin
                         perform outbox_publish('A', '{\"n\": \"x\"}');
                       exception when others then null;
                       end;
                     end loop;
                   end $$";
    client.run("set default_transaction_isolation = 'repeatable read'");
    client.run("select outbox_publish('A', '{\"n\": 4}')");
    client.run("begin");
    let before: i64 = client.value(reads);
    client.run("select outbox_publish('A', '{\"n\": 4}')");
    assert_eq!(client.value::<i64>(reads), before);
    client.run("commit");
    // Also in a transaction that sees older ones than there are: no failed publish leaves a plan of the condition.
    client.run("begin; select from outbox_subscriptions");
    cluster.exec(
        DB,
        &format!("select outbox_subscribe('audit', when_sql => {condition})"),
    );
    client.run(failing);
    let before = (client.value::<i64>(reads), client.value::<i64>(plans));
    client.run(failing);
    assert_eq!((client.value::<i64>(reads), client.value::<i64>(plans)), before);
    assert_eq!(
        enqueued(&mut client, "select outbox_publish('B', '{\"n\": 4}')"),
        "B default, B search"
    );
    client.run("commit");
    let published = enqueued(&mut client, "select outbox_publish('C', '{\"n\": 4}')");
    assert_eq!(published, "C audit, C default, C search");
}

#[test]
fn sessions_follow_what_logical_replication_changes() {
    let cluster = quiet_cluster_with(&["wal_level = logical"]);
    cluster.exec("postgres", "create database source");
    for database in [DB, "source"] {
        cluster.exec(database, "create extension if not exists outbox");
        let server = "create server audit foreign data wrapper outbox_amqp options (url 'amqp://localhost')";
        cluster.exec(database, server);
    }
    cluster.exec("source", "create publication changes for table outbox_subscriptions");
    cluster.exec(
        "source",
        "select pg_create_logical_replication_slot('changes', 'pgoutput')",
    );
    let source = cluster.conn_string("source");
    cluster.exec(
        DB,
        &format!(
            "create subscription changes connection '{source}' publication changes with (create_slot = false, copy_data = false)"
        ),
    );
    let mut client = cluster.connect(DB);
    assert_eq!(enqueued(&mut client, "select outbox_publish('A', '{}')"), "A default");
    cluster.exec("source", "select outbox_subscribe('audit')");
    wait_true(&cluster, "the row", "select exists (select from outbox_subscriptions)");
    assert_eq!(
        enqueued(&mut client, "select outbox_publish('B', '{}')"),
        "B audit, B default"
    );
}

#[test]
fn an_administrator_with_usage_on_the_server_subscribes_it_and_no_one_else() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    client.run(
        "create role ada in role outbox_admin; create role bob in role outbox_admin; create role writer in role outbox_writer;
         grant usage on foreign server audit to ada",
    );
    client.run("set role ada; select outbox_subscribe('audit', types => '{A}'); reset role");
    for sql in [
        "set role bob; select outbox_subscribe('audit')",
        "set role bob; select outbox_unsubscribe('audit')",
        "set role writer; select outbox_subscribe('audit')",
        "set role writer; select outbox_unsubscribe('default')",
        "set role ada; insert into outbox_subscriptions values ('search')",
    ] {
        assert_eq!(
            refused(&cluster, sql).code(),
            &SqlState::INSUFFICIENT_PRIVILEGE,
            "{sql}"
        );
    }
    // A writer needs no right on the destination.
    assert_eq!(
        enqueued(
            &mut client,
            "set role writer; select outbox_publish('A', '{}'); reset role"
        ),
        "A audit, A default"
    );
    let recorded: String =
        client.value("select string_agg(acted_as || ' ' || action || ' ' || filter, ', ') from outbox_audit");
    assert_eq!(recorded, r#"ada subscribe {"types": ["A"], "destination": "audit"}"#);
    let seen = "set role outbox_monitor; select destination from outbox_subscriptions";
    assert!(client.batch_execute(seen).is_ok());
}

#[test]
fn bad_subscriptions_are_refused_with_what_to_write() {
    let cluster = cluster();
    for (sql, code, message) in [
        (
            "select outbox_subscribe('nowhere')",
            SqlState::UNDEFINED_OBJECT,
            "destination \"nowhere\" does not exist",
        ),
        (
            "select outbox_subscribe(null)",
            SqlState::NULL_VALUE_NOT_ALLOWED,
            "destination is NULL",
        ),
        (
            "select outbox_subscribe('audit', '{A,null}')",
            SqlState::NULL_VALUE_NOT_ALLOWED,
            "types contains NULL",
        ),
        (
            "select outbox_subscribe('audit', array[repeat('t', 256)])",
            SqlState::PROGRAM_LIMIT_EXCEEDED,
            "types is 256 bytes long",
        ),
        (
            "select outbox_subscribe('audit', headers => '[]')",
            SqlState::INVALID_PARAMETER_VALUE,
            "headers are not",
        ),
        (
            "select outbox_subscribe('audit', headers => '{}')",
            SqlState::INVALID_PARAMETER_VALUE,
            "headers are not",
        ),
        (
            "create function forbidden(jsonb) returns boolean language plpgsql strict as 'begin return true; end';
             revoke execute on function forbidden from public;
             select outbox_subscribe('audit', when_sql => 'public.forbidden(payload)')",
            SqlState::INVALID_PARAMETER_VALUE,
            "when_sql is not",
        ),
        (
            "select outbox_subscribe('audit', when_sql => 'total > 3')",
            SqlState::INVALID_PARAMETER_VALUE,
            "when_sql is not",
        ),
        (
            "select outbox_subscribe('audit', when_sql => 'type')",
            SqlState::INVALID_PARAMETER_VALUE,
            "when_sql is not",
        ),
        (
            "select outbox_subscribe('audit', when_sql => '')",
            SqlState::INVALID_PARAMETER_VALUE,
            "when_sql is not",
        ),
        (
            "select outbox_subscribe('audit', when_sql => 'count(*) > 1')",
            SqlState::INVALID_PARAMETER_VALUE,
            "",
        ),
    ] {
        let error = refused(&cluster, sql);
        assert_eq!(error.code(), &code, "{sql}: {error:?}");
        assert!(
            error.message().contains(message) && error.hint().is_some(),
            "{sql}: {error:?}"
        );
    }
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox_subscriptions"),
        0
    );
}

#[test]
fn an_error_in_a_condition_is_an_error_of_the_publish_and_names_the_destination() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "select outbox_subscribe('search', types => '{A}', when_sql => $$(payload ->> 'n')::int > 3$$)",
    );
    let error = refused(&cluster, "select outbox_publish('A', '{\"n\": \"many\"}')");
    assert_eq!(error.code(), &SqlState::INVALID_TEXT_REPRESENTATION);
    let detail = error.detail().unwrap_or_default();
    assert!(
        detail.contains("the subscription of \"search\" is (payload ->> 'n')::int > 3"),
        "{error:?}"
    );
    // Types that it does not ask for are not touched by it.
    cluster.exec(DB, "select outbox_publish('B', '{\"n\": \"many\"}')");
}

#[test]
fn a_subscribed_destination_that_is_dropped_stops_no_publish_and_health_ends_it() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    client.run("select outbox_subscribe('audit'); drop server audit");
    assert_eq!(enqueued(&mut client, "select outbox_publish('A', '{}')"), "A default");
    let (_, problem) = health(&cluster, "destination");
    assert!(problem.contains("it is subscribed, and does not exist"), "{problem}");
    let remedy: String = client.value("select remedy from outbox_health where destination = 'audit'");
    let command = remedy.split(';').next().expect("a command");
    client.run(command);
    assert_eq!(
        client.value::<i64>("select count(*) from outbox_health where destination = 'audit'"),
        0
    );
    // With a server of another kind under its name, too.
    client.run(
        "select outbox_subscribe('search'); drop server search; create foreign data wrapper other;
         create server search foreign data wrapper other",
    );
    assert_eq!(enqueued(&mut client, "select outbox_publish('A', '{}')"), "A default");
}

#[test]
fn a_full_destination_refuses_what_it_is_subscribed_to() {
    let stage = Stage::new(&[]);
    let full = stage.destination(stage.broker, "audit", "max_pending '2'");
    stage.exec(
        DB,
        "select outbox_pause('audit'), outbox_subscribe('audit', types => '{T}')",
    );
    support::wait_stats(&stage, "audit", "pending = 0 and max_pending = 2");
    stage.publish("one");
    stage.publish("two");
    let error = refused(&stage, &Event::new("three").sql());
    assert_eq!(error.code(), &SqlState::CONFIGURATION_LIMIT_EXCEEDED);
    assert!(error.message().contains("\"audit\" is full"), "{error:?}");
    stage.exec(DB, "select outbox_resume('audit')");
    wait_drained(&stage);
    assert_eq!(stage.labels(), ["one", "two"]);
    assert_eq!(support::labels(&all_of(stage.broker, &full)), ["one", "two"]);
}

/// A thousand customers, each with its own URL.
#[test]
fn an_event_goes_to_one_of_a_thousand_subscribers_by_a_header() {
    let receiver = Receiver::start(|_| Reply::status(200));
    let cluster = unconnected_cluster("", "nowhere", &[]);
    let create = format!(
        "create server customer_%s foreign data wrapper outbox_http options (url %L)', n, '{}' || n",
        receiver.url("/")
    );
    cluster.exec(
        DB,
        &format!(
            "do $$ begin
               for n in 1..1000 loop
                 execute format('{create});
                 perform outbox_subscribe('customer_' || n, types => '{{T}}', headers => jsonb_build_object('tenant', n::text));
               end loop;
             end $$;
             select outbox_subscribe('default', types => '{{}}')"
        ),
    );
    let mut client = cluster.connect(DB);
    for n in [1, 500, 1000] {
        client.publish(Event::new(n).with(&format!("headers => '{{\"tenant\": \"{n}\"}}'")));
    }
    wait_drained(&cluster);
    let mut received: Vec<String> = receiver
        .requests()
        .iter()
        .map(|request| format!("{} {}", request.path, request.label()))
        .collect();
    received.sort();
    assert_eq!(received, ["/1 1", "/1000 1000", "/500 500"]);
}

/// A superuser or a restore may write the row. What no subscription can mean would take every event, or fail each
/// publish.
#[test]
fn a_row_that_no_subscription_can_have_is_refused() {
    let cluster = cluster();
    for row in [
        "headers) values ('audit', '[1]')",
        "headers) values ('audit', '\"x\"')",
        "types) values ('audit', '{A,NULL}')",
        "aggregate_types) values ('audit', '{NULL}')",
    ] {
        let sql = format!("insert into outbox_subscriptions (destination, {row}");
        assert_eq!(refused(&cluster, &sql).code(), &SqlState::CHECK_VIOLATION, "{sql}");
    }
    let mut client = cluster.connect(DB);
    assert_eq!(enqueued(&mut client, "select outbox_publish('A', '{}')"), "A default");
}
