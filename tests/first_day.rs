//! The errors of a first day with the product. Each answer must name the problem, and what to do.

use postgres::error::SqlState;
use serde_json::Value;
use std::collections::HashSet;
use std::io::Write;
use std::time::Duration;
use support::wait::Pauses;
use support::{Broker, Cluster, Mode, Proxy, Size, wait_for, wait_until};
use support::{DB, LONG, health, idle_cluster, refused, unconnected_cluster, wait_for_problem};

/// The steps of outbox_check that fail, with their details.
fn failed_steps(cluster: &Cluster, database: &str) -> Vec<(String, String)> {
    let rows = cluster
        .connect(database)
        .query("select step, detail from outbox_check() where ok is not true", &[])
        .expect("outbox_check");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[test]
fn a_check_right_after_create_extension_waits_for_the_first_worker() {
    let broker = Broker::start_sized(Size::default());
    broker.add_user("relay", "right");
    let cluster = Cluster::builder()
        // Without a password file the password is guest.
        .conf(&format!("outbox.url = 'amqp://relay@127.0.0.1:{}'", broker.port()))
        .start();
    // The check waits 2 s for the first worker. Only a machine that loses time may need longer to start it.
    let mut n = 0;
    let failed = wait_for("an answer of the first worker", LONG, || {
        n += 1;
        let database = format!("database{n}");
        cluster.exec(DB, &format!("create database {database}"));
        cluster.exec(&database, "create extension outbox");
        let pauses = Pauses::watch();
        let failed = failed_steps(&cluster, &database);
        let is_expected = failed.iter().map(|(step, _)| step).eq(["connection", "exchange"]);
        assert!(is_expected || pauses.end() > Duration::from_millis(500), "{failed:?}");
        is_expected.then_some(failed)
    });
    assert!(failed[0].1.contains("auth_refused"), "{failed:?}");
}

#[test]
fn health_reports_that_a_worker_connects_for_the_first_time() {
    let broker = Broker::shared();
    let proxy = Proxy::start(broker.port());
    proxy.mode(Mode::Blackhole);
    let cluster = unconnected_cluster(&proxy.url(), "events", &[]);
    wait_until("the attempt to connect", LONG, || proxy.accepted() > 0);
    wait_until("health to report it", LONG, || {
        health(&cluster, "broker") == (false, "default: connecting to the broker".to_owned())
    });
}

#[test]
fn health_names_an_amqp_url_with_a_port_of_http() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let cluster = unconnected_cluster(&format!("amqp://127.0.0.1:{port}"), "events", &[]);
    let problem = wait_for_problem(&cluster, "broker");
    assert!(
        problem.contains(
            "the peer speaks HTTP, not AMQP: 15672 is the management port of RabbitMQ; the port for AMQP is 5672"
        ),
        "{problem}"
    );
}

#[test]
fn headers_that_are_not_an_object_are_an_invalid_argument() {
    let cluster = idle_cluster(&[]);
    for headers in ["[]", "7", "null", "\"text\""] {
        let error = refused(
            &cluster,
            &format!("select outbox_publish('T', '{{}}', headers => '{headers}')"),
        );
        assert_eq!(error.code(), &SqlState::INVALID_PARAMETER_VALUE, "{headers}: {error:?}");
        assert_eq!(error.message(), "headers are not a JSON object");
        assert!(error.hint().is_some_and(|hint| hint.contains("tenant")), "{error:?}");
    }
    cluster.exec(DB, "select outbox_publish('T', '{}', headers => '{\"a\": 1}')");
}

/// What psql prints to standard error.
fn complaints_of_psql(cluster: &Cluster, sql: &str) -> String {
    let output = std::process::Command::new(cluster.installation().bin("psql"))
        .args(["--no-psqlrc", "--dbname", &cluster.conn_string(DB), "--command", sql])
        .output()
        .expect("run psql");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn setting_and_resetting_a_source_prints_nothing() {
    let cluster = idle_cluster(&[]);
    cluster.exec(
        DB,
        "create role shop; create table events (seq bigint primary key, type text, at timestamptz); alter table events owner to shop",
    );
    for sql in [
        "select outbox_source_set('events', seq => 'seq', type => 'type', created_at => 'at')",
        "select outbox_source_set('events', seq => 'seq', type => 'upper(type)', created_at => 'at')",
        "select outbox_source_reset()",
    ] {
        assert_eq!(complaints_of_psql(&cluster, sql), "", "{sql}");
    }
    cluster.exec(DB, "select outbox_publish('T', '{}')");
}

#[test]
fn a_set_of_a_setting_that_only_workers_read_warns() {
    let cluster = idle_cluster(&[]);
    let psql = |sql: &str| complaints_of_psql(&cluster, sql);
    let printed = psql("set outbox.url = 'amqp://localhost'");
    assert!(
        printed.contains("WARNING:  outbox.url has no effect in a session")
            && printed.contains("HINT:  ALTER DATABASE"),
        "{printed}"
    );
    for quiet in [
        "set outbox.actor = 'ann'",
        "set outbox.max_attempts = 3",
        "alter database postgres set outbox.url = 'amqp://localhost'",
        "reset outbox.url",
    ] {
        let printed = psql(quiet);
        assert!(!printed.contains("WARNING"), "{quiet}: {printed}");
    }
}

#[test]
fn a_user_without_permission_on_the_exchange_gets_the_command_that_grants_it() {
    let broker = Broker::start_sized(Size::default());
    broker.add_user("relay", "guest");
    let others = ["^mine$", "^(events|mine)$", "^read$"];
    broker.ctl(&[&["set_permissions", "relay"][..], &others].concat());
    let url = format!("amqp://relay@127.0.0.1:{}", broker.port());
    let cluster = unconnected_cluster(&url, "events", &["outbox.exchange_type = 'topic'"]);
    let problem = wait_for_problem(&cluster, "broker");
    assert!(
        problem.contains("permission") && !problem.contains("password"),
        "{problem}"
    );
    let remedy = support::Remedy::wait(&cluster, "\"check\" = 'broker'");
    broker.shell(remedy.command());
    support::wait_healthy(&cluster, "broker");
    let after = broker.ctl(&["list_user_permissions", "relay"]);
    assert!(others.iter().all(|pattern| after.contains(pattern)), "{after}");
}

#[test]
fn the_first_event_of_a_user_who_may_not_write_is_a_problem_at_each_look_until_it_arrives() {
    let broker = Broker::start_sized(Size::default());
    broker.declare_exchange("events", "topic", true);
    broker.declare_queue("events", Value::Null);
    broker.bind("events", "events", "#");
    broker.add_user("relay", "guest");
    broker.ctl(&["set_permissions", "relay", "^events$", "^$", "^$"]);
    let url = format!("amqp://relay@127.0.0.1:{}", broker.port());
    let cluster = unconnected_cluster(&url, "events", &[]);
    support::wait_healthy(&cluster, "broker"); // nothing was sent yet
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    let problem = wait_for_problem(&cluster, "broker");
    assert!(problem.contains("lacks a permission"), "{problem}");
    // The broker refuses it again and again, and takes the next connection each time.
    let mut connections = HashSet::new();
    while connections.len() < 4 {
        let is_ok: bool = cluster.query_one(
            DB,
            "select bool_or(ok) or exists (select from outbox_destination_status where state <> 'down')
             from outbox_health where \"check\" = 'broker'",
        );
        assert!(!is_ok, "with connection {}", connections.len());
        connections.extend(broker.ctl(&["list_connections", "name"]).lines().map(str::to_owned));
    }
    broker.ctl(&["set_permissions", "relay", "^events$", "^events$", "^$"]);
    support::wait_published(&cluster, 1);
    support::wait_healthy(&cluster, "broker");
}

#[test]
fn an_exchange_with_another_property_is_named_with_what_differs_and_what_to_correct() {
    let broker = Broker::start_sized(Size::default());
    broker.declare_exchange("brief", "topic", false);
    broker.declare_exchange("spread", "fanout", true);
    for (exchange, differs, correct) in [("brief", "durable", ""), ("spread", "type", "fanout")] {
        let cluster = unconnected_cluster(&broker.url(), exchange, &["outbox.exchange_type = 'topic'"]);
        let wanted = "let the worker only check that the exchange exists: ";
        let problem = wait_for_problem(&cluster, "broker");
        let named = format!("the exchange exists, and its property \"{differs}\" differs: ");
        assert!(problem.contains(&named), "{problem}");
        let remedy = "select remedy from outbox_health where \"check\" = 'broker' and destination";
        let by_setting: String = cluster.query_one(DB, &format!("{remedy} = 'default'"));
        assert_eq!(
            by_setting,
            format!("{wanted}ALTER SYSTEM SET outbox.exchange_type = ''; SELECT pg_reload_conf()")
        );
        cluster.set_conf("outbox.exchange_type", correct);
        support::wait_healthy(&cluster, "broker");
        cluster.exec(
            DB,
            &format!(
                "create server other foreign data wrapper outbox_amqp options (exchange '{exchange}', exchange_type 'topic')"
            ),
        );
        wait_for_problem(&cluster, "broker");
        let by_option: String = cluster.query_one(DB, &format!("{remedy} = 'other'"));
        assert_eq!(
            by_option,
            format!("{wanted}ALTER SERVER other OPTIONS (SET exchange_type '')")
        );
        cluster.exec(
            DB,
            &format!("alter server other options (set exchange_type '{correct}')"),
        );
        support::wait_healthy(&cluster, "broker");
    }
}

#[test]
fn an_unroutable_message_names_the_exchange_and_the_routing_key_that_no_queue_is_bound_for() {
    let broker = Broker::start_sized(Size::default());
    let cluster = unconnected_cluster(&broker.url(), "events", &["outbox.exchange_type = 'topic'"]);
    cluster.exec(
        DB,
        "select outbox_publish('InvoiceIssued', '{}', 'invoice', n::text, 'issued') from generate_series(1, 2) n",
    );
    let wanted = "no queue is bound to exchange \"events\" for routing key \"invoice.issued\"";
    wait_until("both messages to fail", LONG, || {
        let failed = format!("select count(*) = 2 from outbox_messages where last_error like '%{wanted}%'");
        cluster.query_one(DB, &failed)
    });
    let groups: i64 = cluster.query_one(
        DB,
        &format!("select count(*) from outbox_errors where kind = 'unroutable' and message like '%{wanted}%'"),
    );
    assert_eq!(groups, 1);
    // A monitor may not read events.
    cluster.exec(DB, "create role eyes login; grant outbox_monitor to eyes");
    let mut eyes = cluster.connect(DB);
    eyes.batch_execute("set role eyes").expect("a monitor");
    let row = eyes.query_one("select remedy from outbox_why(1) where reason = 'retrying'", &[]);
    let remedy: String = row.expect("a reason").get(0);
    let wanted = "bind a queue to exchange \"events\" for routing key \"invoice.issued\"; then select outbox_retry(1, ";
    assert!(remedy.starts_with(wanted), "{remedy}");
}

/// Runs outboxctl on the database of a cluster. Returns the exit code and the standard error.
fn outboxctl(cluster: &Cluster, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = support::program::outboxctl_at(cluster, arguments);
    let output = command.output().expect("run outboxctl");
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn status_ends_with_exit_code_1_if_asked_to_and_a_check_fails() {
    let broker = Broker::start_sized(Size::default());
    let cluster = unconnected_cluster(&broker.url(), "events", &["outbox.exchange_type = 'topic'"]);
    support::wait_connected(&cluster);
    assert_eq!(outboxctl(&cluster, &["status", "--exit-code"]).0, Some(0));
    cluster.exec(DB, "select outbox_pause()");
    assert_eq!(outboxctl(&cluster, &["status"]).0, Some(0));
    assert_eq!(outboxctl(&cluster, &["status", "--exit-code"]).0, Some(1));
}

#[test]
fn a_wrong_command_line_ends_with_exit_code_2_and_an_outboxctl_error() {
    let cluster = support::quiet_cluster();
    for (arguments, wanted) in [
        (&["lst"][..], "outboxctl: unrecognized subcommand 'lst'"),
        (
            &["list", "--partition", "1024"],
            "outboxctl: invalid value '1024' for '--partition <PARTITION>'",
        ),
    ] {
        let (code, stderr) = outboxctl(&cluster, arguments);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.starts_with(wanted), "{stderr}");
    }
    assert_eq!(outboxctl(&cluster, &["list", "--partition", "7"]).0, Some(0));
}

#[test]
fn the_check_says_whose_user_and_password_a_server_without_a_mapping_has() {
    let cluster = idle_cluster(&[]);
    cluster.exec(
        DB,
        "create server same foreign data wrapper outbox_amqp options (exchange 'other');
         create server elsewhere foreign data wrapper outbox_amqp options (url 'amqp://courier@127.0.0.1');
         create server hook foreign data wrapper outbox_http options (url 'https://example.com/')",
    );
    for (destination, wanted) in [
        ("same", "user and password are in the settings"),
        (
            "elsewhere",
            "the user is the one in the option url, the password is guest",
        ),
        ("hook", "no secret is used"),
    ] {
        let detail = format!("select detail from outbox_check('{destination}') where step = 'mapping'");
        assert_eq!(
            cluster.query_one::<String>(DB, &detail),
            format!("there is no user mapping for outbox_worker: {wanted}")
        );
    }
}

#[test]
fn a_wrong_destination_names_those_that_the_caller_may_use() {
    let cluster = idle_cluster(&[]);
    cluster.exec(
        DB,
        "create role shop; grant outbox_writer to shop;
         create server audit foreign data wrapper outbox_http; create server secret foreign data wrapper outbox_http;
         grant usage on foreign server audit to shop",
    );
    let publish = "select outbox_publish('T', '{}', destination => 'adit')";
    let detail = |sql: &str| refused(&cluster, sql).detail().expect("a DETAIL").to_owned();
    assert_eq!(
        detail(&format!("set role shop; {publish}")),
        "The caller may use: \"default\", \"audit\"."
    );
    for number in 1..=9 {
        cluster.exec(DB, &format!("create server z{number} foreign data wrapper outbox_http"));
    }
    let all = detail(publish);
    assert!(
        all.ends_with("\"secret\", \"z1\", \"z2\", \"z3\", \"z4\", \"z5\", \"z6\", \"z7\", …."),
        "{all}"
    );
}

#[test]
fn an_aggregate_type_without_an_aggregate_id_is_said_once_in_a_session() {
    let cluster = idle_cluster(&[]);
    let quiet = "select outbox_publish('T', '{}'), outbox_publish('T', '{}', aggregate_id => '1'), outbox_publish('T', '{}', 'order', '1')";
    assert_eq!(complaints_of_psql(&cluster, quiet), "");
    let printed = complaints_of_psql(
        &cluster,
        "select outbox_publish('T', '{}', 'order') from generate_series(1, 3)",
    );
    assert_eq!(printed.matches("NOTICE:").count(), 1, "{printed}");
    assert!(
        printed.contains("has no key") && printed.contains("HINT:  Pass the aggregate_id"),
        "{printed}"
    );
}

#[test]
fn a_publish_while_a_source_is_set_is_refused_without_a_context() {
    let cluster = idle_cluster(&[]);
    cluster.exec(
        DB,
        "create role shop; create table events (seq bigint primary key, type text, at timestamptz); alter table events owner to shop;
         select outbox_source_set('events', seq => 'seq', type => 'type', created_at => 'at')",
    );
    for more in ["", ", id => outbox_uuid_v7(), if_exists => 'skip'"] {
        let error = refused(&cluster, &format!("select outbox_publish('T', '{{}}'{more})"));
        assert_eq!(error.code(), &SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
        assert_eq!(
            error.message(),
            "outbox_events takes no events: they are read from public.events"
        );
        assert!(
            error.hint().is_some_and(|hint| hint.contains("outbox_enqueue(seq)")),
            "{error:?}"
        );
        assert_eq!(error.where_(), None);
    }
}

#[test]
fn a_retry_that_changes_nothing_says_why() {
    let stage = support::Stage::new(&[]);
    stage.publish("arrives");
    support::wait_published(&stage, 1);
    let printed = complaints_of_psql(&stage, "select outbox_retry(1)");
    assert!(printed.contains("NOTICE:  message 1 was published at "), "{printed}");
    let (_, replay) = printed.split_once("HINT:  ").expect("a HINT");
    let replay = replay.split_once(" sends it again.").expect("a command").0;
    assert_eq!(stage.query_one::<i64>(DB, replay), 1);
    let printed = complaints_of_psql(&stage, "select outbox_retry(7)");
    assert!(printed.contains("NOTICE:  message 7 does not exist"), "{printed}");
}

#[test]
fn a_second_database_is_told_that_it_shares_the_exchange_of_the_first() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "events", &[]);
    let warned = |database: &str, before: &str| {
        cluster.exec(DB, &format!("create database {database}"));
        cluster.exec(DB, before);
        let output = std::process::Command::new(cluster.installation().bin("psql"))
            .args([
                "-X",
                "--dbname",
                &cluster.conn_string(database),
                "--command",
                "create extension outbox",
            ])
            .output()
            .expect("run psql");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let shared = warned("shop", "");
    assert!(
        shared.contains("WARNING:  events of this database go to the same exchange as those of database postgres")
            && shared.contains("ALTER DATABASE shop SET outbox.exchange"),
        "{shared}"
    );
    let exists = "select detail from outbox_check() where step = 'exists'";
    let said: String = cluster.query_one("shop", exists);
    assert!(said.contains("as in database postgres"), "{said}");
    cluster.exec(DB, "alter database shop set outbox.exchange = 'shop'");
    let said: String = cluster.query_one("shop", exists);
    assert!(!said.contains("postgres"), "{said}");
    assert_eq!(warned("hall", "alter database hall set outbox.exchange = 'hall'"), "");
}

#[test]
fn the_check_and_health_name_the_user_whose_login_the_broker_refuses() {
    let broker = Broker::start_sized(Size::default());
    broker.add_user("relay", "right");
    let cluster = unconnected_cluster(&format!("amqp://relay@127.0.0.1:{}", broker.port()), "events", &[]);
    let problem = wait_for_problem(&cluster, "broker");
    assert!(problem.contains("user \"relay\": "), "{problem}");
    wait_until("the log to name it", LONG, || {
        cluster.log().contains("user \"relay\": ")
    });
}
