//! Destinations as foreign servers. Each message goes to the destination that it names, only roles with the right may
//! send to a destination, and a failure of one destination does not affect the others. On a real Postgres and a real
//! RabbitMQ.

use postgres::error::SqlState;
use serde_json::Value;
use support::faults::{Faults, messages_to};
use support::load::{Load, Plan};
use support::oracle::{Arrived, judge, last_arrivals_out_of_order};
use support::stops::stop_in_time;
use support::{Broker, Cluster, Consumer, Delivery, Mode, Proxy, fresh_names};
use support::{
    DB, Event, Remedy, Session, Stage, all_of, dead_port, exchange_and_queue, health, labels, outbox_cluster_with,
    refused, type_sql, unconnected_cluster, wait_connected, wait_drained, wait_for_problem, wait_healthy, wait_paused,
    wait_published, wait_stats, wait_true,
};

/// The labels without repeats: messages that the broker took behind a refused message came twice.
fn distinct(deliveries: &[Delivery]) -> Vec<String> {
    let mut labels = labels(deliveries);
    labels.sort();
    assert!(labels.chunk_by(|a, b| a == b).all(|same| same.len() <= 2), "{labels:?}");
    labels.dedup();
    labels
}

fn state(cluster: &Cluster, destination: &str) -> (String, String) {
    let row = cluster
        .connect(DB)
        .query_one(
            "select state, concat_ws(' ', reason, detail) from outbox_destination_status where destination = $1",
            &[&destination],
        )
        .unwrap_or_else(|error| panic!("destination {destination}: {error:?}"));
    (row.get(0), row.get(1))
}

#[test]
fn a_message_goes_to_the_destination_it_names_and_to_no_other() {
    let stage = Stage::new(&[]);
    let audit = stage.destination(stage.broker, "audit", "routing_key 'audit.{type}'");
    let first = stage.publish("main");
    stage.publish(Event::new("audit").to("audit"));
    // One event enqueued for two destinations is two messages.
    stage.exec(DB, &format!("select outbox_enqueue({first}, destination => 'audit')"));
    wait_published(&stage, 3);
    assert_eq!(stage.labels(), ["main"]);
    let audited = all_of(stage.broker, &audit);
    assert_eq!(labels(&audited), ["main", "audit"]);
    assert_eq!(audited[0].routing_key, "audit.T");
    assert_eq!(state(&stage, "audit").0, "connected");
    let error = refused(&stage, "select outbox_publish('T', '{}', destination => 'nowhere')");
    assert_eq!(error.code(), &SqlState::UNDEFINED_OBJECT);
    assert!(
        error.hint().is_some_and(|hint| hint.contains("CREATE SERVER")),
        "{error:?}"
    );
}

#[test]
fn a_destination_may_be_used_with_usage_and_through_a_security_definer_function() {
    let stage = Stage::new(&[]);
    let audit = stage.destination(stage.broker, "audit", "");
    stage.exec(
        DB,
        "create role teller in role outbox_writer; create role clerk in role outbox_writer;
         grant usage on foreign server audit to teller; grant create on schema public to teller;
         set role teller;
         create function report(label text) returns bigint language sql security definer
           return outbox_publish('T', jsonb_build_object('label', label), destination => 'audit');
         reset role",
    );
    let direct = "select outbox_publish('T', '{\"label\": \"direct\"}', destination => 'audit')";
    let error = refused(&stage, &format!("set role clerk; {direct}"));
    assert_eq!(error.code(), &SqlState::INSUFFICIENT_PRIVILEGE);
    assert!(
        error
            .hint()
            .is_some_and(|hint| hint.contains("GRANT USAGE ON FOREIGN SERVER audit TO clerk")),
        "{error:?}"
    );
    let error = refused(&stage, "set role clerk; select outbox_enqueue(1, 'k', 'audit')");
    assert_eq!(error.code(), &SqlState::INSUFFICIENT_PRIVILEGE);
    stage.exec(DB, &format!("set role teller; {direct}"));
    stage.exec(DB, "set role clerk; select report('through a function')");
    wait_published(&stage, 2);
    assert_eq!(labels(&all_of(stage.broker, &audit)), ["direct", "through a function"]);
}

#[test]
fn bad_options_are_refused_when_they_are_written() {
    let cluster = Stage::new(&[]).cluster;
    let server = "create server s foreign data wrapper outbox_amqp options";
    let unknown = refused(&cluster, &format!("{server} (exchnage 'x')"));
    assert_eq!(unknown.code().code(), "HV00D");
    assert!(
        unknown.hint().is_some_and(|hint| hint.contains("exchange, ")),
        "{unknown:?}"
    );
    for options in [
        "url 'http://x'",
        "url 'amqp://u:hunter2@h'",
        "exchange_type 'hunter2'",
        "max_attempts '0'",
        "routing_key '{nothing}'",
        "confirm_timeout '3 fortnights'",
        "min_send_rate '0'",
    ] {
        let error = refused(&cluster, &format!("{server} ({options})"));
        assert_eq!(error.code(), &SqlState::INVALID_PARAMETER_VALUE, "{options}: {error:?}");
        assert!(
            error.hint().is_some() && !format!("{error:?}").contains("hunter2"),
            "{options}: {error:?}"
        );
    }
    // The call refuses values that do not fit into the routing key of this destination.
    cluster.exec(
        DB,
        &format!("{server} (exchange 'x', routing_key '{{aggregate_id}}.{{type}}')"),
    );
    let publish = |destination: &str| {
        format!("select outbox_publish('T', '{{}}', aggregate_id => repeat('x', 254), destination => {destination})")
    };
    let error = refused(&cluster, &publish("'s'"));
    assert_eq!(error.code(), &SqlState::PROGRAM_LIMIT_EXCEEDED, "{error:?}");
    cluster.exec(DB, &publish("null"));
    cluster.exec(DB, "drop server s");
    // A password belongs in the user mapping: every role can read the options of a server.
    let error = refused(&cluster, &format!("{server} (password 'hunter2')"));
    assert_eq!(error.code().code(), "HV00D");
    cluster.exec(DB, &format!("{server} (exchange 'x')"));
    assert_eq!(
        refused(&cluster, "alter server s options (add url 'nonsense')").code(),
        &SqlState::INVALID_PARAMETER_VALUE
    );
    let error = refused(
        &cluster,
        "create user mapping for outbox_worker server s options (exchange 'x')",
    );
    assert_eq!(error.code().code(), "HV00D");
    assert_eq!(
        refused(&cluster, "alter foreign data wrapper outbox_amqp options (add x 'y')")
            .code()
            .code(),
        "HV00D"
    );
}

#[test]
fn triggers_send_to_the_destinations_that_their_creator_may_use() {
    let stage = Stage::new(&[]);
    stage.destination(stage.broker, "audit", "");
    let search = stage.destination(stage.broker, "search", "");
    stage.exec(
        DB,
        "create role maker; create role writer; grant usage on foreign server search to maker;
         grant create on schema public to maker;
         set role maker; create table thing (id integer primary key, name text); grant insert on thing to writer; reset role;
         grant outbox_writer to maker",
    );
    let error = refused(
        &stage,
        "set role maker; select outbox_capture('thing', destination => 'audit')",
    );
    assert_eq!(error.code(), &SqlState::INSUFFICIENT_PRIVILEGE);
    stage.exec(
        DB,
        "set role maker; select outbox_capture('thing', destination => 'search')",
    );
    // The writer need not know the destination.
    stage.exec(DB, "set role writer; insert into thing values (1, 'one')");
    stage.publish("main");
    wait_published(&stage, 2);
    assert_eq!(stage.labels(), ["main"]);
    let events = all_of(stage.broker, &search);
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].json()["payload"]["name"], "one");
}

#[test]
fn a_fast_stop_ends_in_time_with_many_destinations_that_do_not_answer() {
    let stage = Stage::new(&[]);
    let proxy = Proxy::start(stage.broker.port());
    for n in 1..=8 {
        stage.destination(
            stage.broker,
            &format!("d{n}"),
            &format!("url 'amqp://127.0.0.1:{}'", proxy.port()),
        );
        wait_stats(&stage, &format!("d{n}"), "state = 'connected'");
    }
    proxy.mode(Mode::Blackhole);
    for n in 1..=8 {
        stage.publish(Event::new("one").to(&format!("d{n}")));
    }
    wait_true(
        &stage,
        "every message to be claimed",
        "select count(*) = 8 from outbox where claim_token is not null",
    );
    stop_in_time(&stage);
}

#[test]
fn each_destination_has_its_own_format_headers_and_properties() {
    let stage = Stage::new(&[]);
    let options =
        r#"format 'payload', headers '{"tenant": "{header:tenant|none}-{aggregate_id}"}', app_id 'shop', priority '7'"#;
    let bare = stage.destination(stage.broker, "bare", options);
    let events = stage.destination(
        stage.broker,
        "events",
        "format 'cloudevents', source '/shop/{aggregate_type}'",
    );
    let seq = stage.publish(Event::new("one").to("bare"));
    stage.exec(
        DB,
        &format!("select outbox_enqueue({seq}, 'item:a', 'events'), outbox_enqueue({seq}, 'item:a')"),
    );
    wait_published(&stage, 3);
    let delivery = &all_of(stage.broker, &bare)[0];
    assert_eq!(delivery.body, br#"{"label": "one"}"#);
    assert_eq!(delivery.headers["tenant"], "none-a");
    assert_eq!(delivery.app_id.as_deref(), Some("shop"));
    assert_eq!(delivery.priority, Some(7));
    let event = all_of(stage.broker, &events)[0].json();
    assert_eq!(
        (&event["specversion"], &event["source"]),
        (&"1.0".into(), &"/shop/item".into())
    );
    assert_eq!(event["data"]["label"], "one");
    assert_eq!(stage.labels(), ["one"]);
    for options in [
        "format 'xml'",
        "content_type 'text/plain'",
        "headers '[1]'",
        r#"headers '{"seq": "1"}'"#,
        "priority '256'",
    ] {
        let server = format!("create server s foreign data wrapper outbox_amqp options ({options})");
        assert_eq!(
            refused(&stage, &server).code(),
            &SqlState::INVALID_PARAMETER_VALUE,
            "{options}"
        );
    }
}

#[test]
fn health_has_a_row_for_each_destination_that_fails_and_the_worker_is_not_down() {
    let stage = Stage::new(&[]);
    for name in ["audit", "billing"] {
        let port = dead_port();
        stage.destination(stage.broker, name, &format!("url 'amqp://127.0.0.1:{port}'"));
        stage.publish(Event::new("m").to(name));
    }
    let failing = r#"select coalesce(string_agg(destination, ' ' order by destination), '') from outbox_health
                     where "check" = 'broker' and not ok and problem like '%cannot be reached%'"#;
    wait_true(&stage, "two rows", &format!("select ({failing}) = 'audit billing'"));
    let worker = "select concat_ws('; ', state, detail, destinations, destinations_down) from outbox_worker_status";
    assert_eq!(
        stage.query_one::<String>(DB, worker),
        "connected; 2 of 3 destinations down; 3; 2"
    );
}

#[test]
fn messages_of_stopped_destinations_are_not_late() {
    let stage = Stage::new(&[]);
    stage.destination(
        stage.broker,
        "audit",
        &format!("url 'amqp://127.0.0.1:{}'", dead_port()),
    );
    stage.exec(DB, "select outbox_pause()");
    stage.exec(
        DB,
        "select outbox_publish('T', '{}', destination => d) from unnest('{audit,default}'::text[]) d;
         update outbox set enqueued_at = now() - interval '2 minutes'",
    );
    wait_for_problem(&stage, "broker");
    let oldest = "select oldest_pending_age is null from outbox_status";
    wait_true(&stage, "no message to be late", oldest);
    wait_healthy(&stage, "lag");
    let each = "select count(*) = 2 from outbox_destination_status where oldest_pending_age > interval '1 minute'";
    assert!(stage.query_one::<bool>(DB, each), "each destination shows its age");
    // The check `destination` reports a destination that does not exist.
    stage.exec(DB, "drop server audit cascade");
    wait_for_problem(&stage, "destination");
    wait_true(&stage, "no message to be late", oldest);
}

#[test]
fn a_dead_destination_delays_no_other_and_continues_when_it_is_fixed() {
    let stage = Stage::new(&[]);
    let audit = stage.destination(
        stage.broker,
        "audit",
        &format!("url 'amqp://127.0.0.1:{}'", dead_port()),
    );
    for n in 0..50 {
        stage.publish(Event::new(format!("a{n}")).to("audit"));
        stage.publish(format!("m{n}"));
    }
    wait_published(&stage, 50);
    assert_eq!(stage.all().len(), 50);
    let problem = wait_for_problem(&stage, "broker");
    assert!(
        problem.starts_with("audit: ") && problem.contains("cannot be reached"),
        "{problem}"
    );
    assert_eq!(state(&stage, "audit").0, "down");
    assert_eq!(state(&stage, "default").0, "connected");
    stage.exec(
        DB,
        &format!("alter server audit options (set url '{}')", stage.broker.url()),
    );
    wait_published(&stage, 100);
    wait_healthy(&stage, "broker");
    let arrived = labels(&all_of(stage.broker, &audit));
    let wanted: Vec<String> = (0..50).map(|n| format!("a{n}")).collect();
    assert_eq!(arrived, wanted);
    let charged = "select count(*) from outbox_history where attempts <> 1";
    assert_eq!(stage.query_one::<i64>(DB, charged), 0);
}

#[test]
fn a_paused_destination_waits_and_the_others_do_not() {
    let stage = Stage::new(&[]);
    let audit = stage.destination(stage.broker, "audit", "");
    wait_stats(&stage, "audit", "state = 'connected'");
    assert!(stage.query_one::<bool>(DB, "select outbox_pause('audit', 'moving house')"));
    assert!(
        !stage.query_one::<bool>(DB, "select outbox_pause('audit')"),
        "the destination is paused already"
    );
    wait_paused(&stage, "audit");
    stage.publish(Event::new("later").to("audit"));
    stage.publish("now");
    wait_published(&stage, 1);
    assert_eq!(stage.labels(), ["now"]);
    let (state, reason) = state(&stage, "audit");
    assert!(state == "paused" && reason.contains("moving house"), "{state} {reason}");
    let (ok, problem) = health(&stage, "paused");
    assert!(
        !ok && problem.contains("audit") && problem.contains("moving house"),
        "{problem}"
    );
    assert!(stage.query_one::<bool>(DB, "select outbox_resume('audit')"));
    assert!(
        !stage.query_one::<bool>(DB, "select outbox_resume('audit')"),
        "the destination is not paused"
    );
    wait_published(&stage, 2);
    assert_eq!(labels(&all_of(stage.broker, &audit)), ["later"]);
    assert_eq!(
        refused(&stage, "select outbox_pause('nowhere')").code(),
        &SqlState::UNDEFINED_OBJECT
    );
}

#[test]
fn messages_of_a_dropped_server_wait_for_a_server_with_its_name() {
    let stage = Stage::new(&[]);
    stage.destination(stage.broker, "audit", "");
    wait_stats(&stage, "audit", "state = 'connected'");
    stage.exec(DB, "select outbox_pause('audit')");
    wait_paused(&stage, "audit");
    stage.publish(Event::new("one").to("audit"));
    stage.exec(DB, "drop server audit; select outbox_resume('audit')");
    wait_stats(&stage, "audit", "state = 'missing'");
    let problem = wait_for_problem(&stage, "destination");
    assert!(
        problem.contains("audit") && problem.contains("does not exist"),
        "{problem}"
    );
    wait_true(
        &stage,
        "no worker to serve it",
        "select not exists (select from outbox_connections where destination = 'audit')",
    );
    assert_eq!(
        refused(&stage, "select outbox_publish('T', '{}', destination => 'audit')").code(),
        &SqlState::UNDEFINED_OBJECT
    );
    let audit = stage.destination(stage.broker, "audit", "");
    wait_published(&stage, 1);
    assert_eq!(labels(&all_of(stage.broker, &audit)), ["one"]);
    wait_healthy(&stage, "destination");
}

/// As after a rollback to the library of an earlier version.
#[test]
fn a_destination_of_a_kind_that_the_library_does_not_know_gets_nothing_and_the_others_go_on() {
    let stage = Stage::new(&[]);
    stage.exec(
        DB,
        "create foreign data wrapper outbox_later; alter extension outbox add foreign data wrapper outbox_later;
         create server later foreign data wrapper outbox_later;
         insert into outbox_events (seq, id, type, payload) overriding system value
           values (nextval('outbox_events_seq_seq'), gen_random_uuid(), 'T', '{}');
         insert into outbox (seq, destination, partition) select seq, 'later', 0 from outbox_events",
    );
    wait_true(
        &stage,
        "the worker to refuse it",
        "select state = 'unconfigured' and detail like '%does not know this kind%'
         from outbox_destination_status where destination = 'later'",
    );
    stage.publish("main");
    wait_published(&stage, 1);
    assert_eq!(stage.labels(), ["main"]);
    let error = refused(&stage, "select outbox_publish('T', '{}', destination => 'later')");
    assert_eq!(error.code(), &SqlState::UNDEFINED_OBJECT);
}

#[test]
fn the_password_of_a_user_mapping_logs_in_and_is_shown_nowhere() {
    let broker = Broker::start();
    broker.add_user("courier", "correct-horse");
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = unconnected_cluster(&broker.url(), "amq.topic", &["log_min_messages = debug1"]);
    cluster.exec(
        DB,
        &format!(
            "create server audit foreign data wrapper outbox_amqp options (url '{}', exchange '{exchange}');
             create user mapping for outbox_worker server audit options (user 'courier', password 'wrong-battery')",
            broker.url()
        ),
    );
    cluster.publish(Event::new("one").to("audit"));
    let problem = wait_for_problem(&cluster, "broker");
    assert!(
        problem.starts_with("audit: ") && problem.contains("refuses the user"),
        "{problem}"
    );
    cluster.exec(
        DB,
        "alter user mapping for outbox_worker server audit options (set password 'correct-horse')",
    );
    wait_published(&cluster, 1);
    assert_eq!(labels(&all_of(&broker, &queue)), ["one"]);
    let connections: String = cluster.query_one(DB, "select string_agg(c::text, '') from outbox_connections c");
    let log = cluster.log();
    let statements = log
        .lines()
        .filter(|line| line.contains("correct-horse") || line.contains("wrong-battery"));
    assert_eq!(statements.count(), 0, "a password is in the log");
    assert!(!connections.contains("correct-horse") && !connections.contains("wrong-battery"));
    let mut someone = cluster.connect(DB);
    someone.run("create role someone; set role someone");
    let visible = someone.query_one("select count(*) from pg_user_mappings where umoptions is not null", &[]);
    assert_eq!(visible.expect("an answer").get::<_, i64>(0), 0);
}

#[test]
fn no_broker_is_tried_with_an_empty_user_mapping_until_it_is_filled() {
    let broker = Broker::start();
    broker.add_user("courier", "correct-horse");
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = unconnected_cluster(&broker.url(), "amq.topic", &[]);
    // With the user and password of the settings it would be delivered.
    cluster.exec(
        DB,
        &format!(
            "create server audit foreign data wrapper outbox_amqp options (exchange '{exchange}');
             create user mapping for outbox_worker server audit"
        ),
    );
    cluster.publish(Event::new("one").to("audit"));
    let problem = wait_for_problem(&cluster, "destination");
    assert_eq!(problem, "audit: the user mapping for outbox_worker is empty");
    wait_true(
        &cluster,
        "the worker to refuse it",
        "select exists (select from outbox_destination_status where destination = 'audit' and state = 'unconfigured')",
    );
    assert_eq!(broker.queue_len(&queue), 0);
    let remedy = Remedy::wait(&cluster, "destination = 'audit'");
    let filled = remedy
        .command()
        .replace(":'user'", "'courier'")
        .replace(":'password'", "'correct-horse'");
    type_sql(&cluster, &filled);
    wait_published(&cluster, 1);
    assert_eq!(labels(&all_of(&broker, &queue)), ["one"]);
}

#[test]
fn each_destination_has_its_own_ordering_and_on_dead() {
    let stage = Stage::new(&["outbox.max_attempts = 1"]);
    // Messages of the key "bad" have no binding, so the broker returns them as unroutable.
    let routed = |name: &str, options: &str| {
        let (exchange, queue) = fresh_names();
        stage.broker.declare_exchange(&exchange, "topic", true);
        stage.broker.declare_queue(&queue, Value::Null);
        stage.broker.bind(&queue, &exchange, "Good");
        stage.exec(
            DB,
            &format!(
                "create server {name} foreign data wrapper outbox_amqp
                 options (exchange '{exchange}', routing_key '{{type}}', {options})"
            ),
        );
        queue
    };
    let strict = routed("strict", "on_dead 'block'");
    let skipping = routed("skipping", "on_dead 'skip'");
    let loose = routed("loose", "ordering 'none'");
    for name in ["strict", "skipping", "loose"] {
        wait_stats(&stage, name, "state = 'connected'");
        stage.exec(
            DB,
            &format!(
                "select outbox_publish(case n when 1 then 'Bad' else 'Good' end, jsonb_build_object('label', n::text),
                                       'a', 'one key', destination => '{name}') from generate_series(1, 3) n"
            ),
        );
    }
    wait_true(
        &stage,
        "four published and three dead",
        "select (select count(*) from outbox_history) = 4 and (select count(*) from outbox_dead) = 3",
    );
    assert_eq!(labels(&all_of(stage.broker, &loose)), ["2", "3"]);
    assert_eq!(distinct(&all_of(stage.broker, &skipping)), ["2", "3"]);
    let blocking: String = stage.query_one(DB, "select string_agg(destination, ',') from outbox_dead where blocks");
    assert_eq!(blocking, "strict");
    stage.exec(DB, "select outbox_discard(seq, destination) from outbox_dead");
    wait_drained(&stage);
    assert_eq!(distinct(&all_of(stage.broker, &strict)), ["2", "3"]);
}

#[test]
fn messages_behind_a_dead_letter_are_delivered_when_ordering_is_switched_off() {
    let stage = Stage::new(&["outbox.max_attempts = 1"]);
    let (exchange, queue) = fresh_names();
    stage.broker.declare_exchange(&exchange, "topic", true);
    stage.broker.declare_queue(&queue, Value::Null);
    stage.broker.bind(&queue, &exchange, "Good");
    stage.exec(
        DB,
        &format!(
            "create server s foreign data wrapper outbox_amqp options (exchange '{exchange}', routing_key '{{type}}');
             select outbox_publish(case n when 1 then 'Bad' else 'Good' end, jsonb_build_object('label', n::text),
                                   'a', 'one key', destination => 's') from generate_series(1, 5) n"
        ),
    );
    wait_true(
        &stage,
        "four messages behind a dead one",
        "select (select count(*) from outbox_dead where blocks) = 1
            and (select count(*) from outbox_waiting where state = 'g') = 4",
    );
    stage.exec(DB, "alter server s options (add ordering 'none')");
    wait_published(&stage, 4);
    assert_eq!(distinct(&all_of(stage.broker, &queue)), ["2", "3", "4", "5"]);
}

#[test]
fn a_server_named_default_replaces_the_settings() {
    let broker = Broker::shared();
    let cluster = unconnected_cluster("", "nowhere", &[]);
    let queue = cluster.destination(broker, "\"default\"", &format!("url '{}'", broker.url()));
    cluster.publish("one");
    cluster.publish(Event::new("two").to("default"));
    wait_published(&cluster, 2);
    assert_eq!(labels(&all_of(broker, &queue)), ["one", "two"]);
    wait_connected(&cluster);
    wait_healthy(&cluster, "destination");
}

#[test]
fn named_destinations_work_without_a_default_destination() {
    let broker = Broker::shared();
    let cluster = unconnected_cluster("", "nowhere", &[]);
    wait_for_problem(&cluster, "destination");
    let queue = cluster.destination(broker, "audit", &format!("url '{}'", broker.url()));
    cluster.publish(Event::new("one").to("audit"));
    wait_published(&cluster, 1);
    assert_eq!(labels(&all_of(broker, &queue)), ["one"]);
    wait_healthy(&cluster, "destination");
    cluster.publish("stuck");
    wait_for_problem(&cluster, "destination");
}

#[test]
fn every_destination_keeps_the_order_of_its_keys_during_its_failures() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let conf = [
        "outbox.workers = 2",
        "outbox.retry_backoff = '20ms'",
        "outbox.max_attempts = 1000",
    ];
    let cluster = outbox_cluster_with(&broker, &exchange, &conf);
    let other = cluster.destination(&broker, "other", "");
    // A queue with a limit: the broker nacks further messages while no consumer reads the queue.
    let (narrow_exchange, narrow) = fresh_names();
    broker.declare_exchange(&narrow_exchange, "topic", true);
    broker.declare_queue(
        &narrow,
        serde_json::json!({"x-max-length": 5, "x-overflow": "reject-publish"}),
    );
    broker.bind(&narrow, &narrow_exchange, "#");
    cluster.exec(
        DB,
        &format!(
            "create server narrow foreign data wrapper outbox_amqp options (exchange '{narrow_exchange}');
             create function copy() returns trigger language plpgsql security definer set search_path = public as $$ begin
               perform outbox_enqueue(new.seq, destination => 'other');
               perform outbox_enqueue(new.seq, destination => 'narrow');
               return null; end $$;
             create trigger copy after insert on outbox_events for each row execute function copy()"
        ),
    );
    wait_stats(&cluster, "narrow", "state = 'connected'");
    let plan = Plan {
        keys: 50,
        ..Plan::default()
    };
    let load = Load::start(&cluster, &plan);
    wait_true(
        &cluster,
        "the narrow queue to refuse a message",
        "select exists (select from outbox_waiting where destination = 'narrow' and last_error like 'nacked%')",
    );
    load.wait_for_more(200);
    let mut faults = Faults::default();
    faults.during(2, || {
        broker.stop();
        wait_for_problem(&cluster, "broker");
        load.wait_for_more(100);
        broker.start_again();
        wait_connected(&cluster);
    });
    let consumer = Consumer::new(&broker, &narrow);
    load.wait_for_more(200);
    let sent = load.stop();
    wait_drained(&cluster);
    let arrived = |deliveries: Vec<Delivery>| -> Vec<Arrived> { deliveries.iter().map(Arrived::new).collect() };
    for (name, queue) in [("default", &queue), ("other", &other)] {
        let verdict = judge(&sent, &arrived(all_of(&broker, queue)));
        faults.assert_explain(&verdict, &messages_to(&cluster, DB, name));
    }
    let mut of_narrow = consumer.finish();
    of_narrow.extend(all_of(&broker, &narrow)); // what had not reached the consumer
    let of_narrow = arrived(of_narrow);
    faults.assert_explain_repeats(&judge(&sent, &of_narrow), &messages_to(&cluster, DB, "narrow"));
    assert_eq!(last_arrivals_out_of_order(&of_narrow), Vec::<String>::new());
}

#[test]
fn a_name_that_the_server_would_truncate_is_refused() {
    let cluster = support::unconnected_cluster("amqp://127.0.0.1:1", "none", &[]);
    let (fits, long) = ("a".repeat(63), "a".repeat(64));
    let (fits_quoted, long_quoted) = ("é".repeat(31), "é".repeat(32));
    for name in [&fits, &format!("\"{fits_quoted}\"")] {
        cluster.exec(DB, &format!("create server {name} foreign data wrapper outbox_amqp"));
    }
    cluster.exec(
        DB,
        "create server short foreign data wrapper outbox_http options (url 'http://localhost/')",
    );
    cluster.exec(DB, "create foreign data wrapper other");
    // Server names of other foreign data wrappers are truncated by Postgres as usual.
    cluster.exec(
        DB,
        &format!("create server {}b foreign data wrapper other", "o".repeat(63)),
    );
    cluster.exec(
        DB,
        &format!("alter server {} rename to {}c", "o".repeat(63), "p".repeat(63)),
    );
    for statement in [
        format!("create server {long} foreign data wrapper outbox_amqp"),
        format!(
            "select 1; /* create server x */ CREATE SERVER IF NOT EXISTS -- y\n {long} foreign data wrapper outbox_http options (url 'http://localhost/'); select 2"
        ),
        format!("create server \"{long_quoted}\" foreign data wrapper outbox_amqp"),
        format!("do $$ begin execute format('create server %I foreign data wrapper outbox_amqp', '{long}'); end $$"),
        format!("do $$ begin create server {long} foreign data wrapper outbox_amqp; end $$"),
        format!("alter server short rename to {long}"),
    ] {
        let refused = support::refused(&cluster, &statement);
        assert_eq!(refused.code(), &SqlState::NAME_TOO_LONG, "{statement}: {refused:?}");
        assert!(refused.message().contains("64 bytes; the limit is 63"), "{refused:?}");
        assert!(refused.hint().is_some() && refused.detail().is_some(), "{refused:?}");
    }
    for call in [
        format!("select outbox_publish('T', '{{}}', destination => '{long}')"),
        format!("select outbox_enqueue(1, destination => '{long}')"),
        format!("select outbox_internal.check_destination('{long_quoted}')"),
    ] {
        let refused = support::refused(&cluster, &call);
        assert_eq!(refused.code(), &SqlState::NAME_TOO_LONG, "{call}: {refused:?}");
    }
    // A call with a name that is too long never affects a server whose name has the same beginning.
    for call in [
        format!("select outbox_pause('{long}')"),
        format!("select outbox_fetch_unpublished(destination => '{long}')"),
        format!("select outbox_replay(seq_from => 1, seq_to => 1, destination => '{long}')"),
    ] {
        let refused = support::refused(&cluster, &call);
        assert_eq!(refused.code(), &SqlState::UNDEFINED_OBJECT, "{call}: {refused:?}");
    }
    cluster.exec(
        DB,
        &format!("select outbox_publish('T', '{{}}', destination => '{fits}')"),
    );
}
