//! Tests that outbox_health explains why messages do not move, and reports no problem when everything works.

use std::sync::{Arc, Mutex};

use postgres::NoTls;
use support::{Broker, Cluster, Consumer, Receiver, Reply, process, wait_until};

use super::{has_worker, problems};
use support::*;

#[test]
fn without_preload_create_extension_hints_at_it_and_messages_are_stored() {
    let cluster = Cluster::builder().preload(false).start();
    let notices = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&notices);
    let mut config: postgres::Config = cluster.conn_string(DB).parse().expect("a connection string");
    config.notice_callback(move |notice| heard.lock().expect("no panic").push(notice));
    let mut client = config.connect(NoTls).expect("connect");
    client.run("create extension outbox");
    let hint = notices
        .lock()
        .expect("no panic")
        .iter()
        .find_map(|notice| notice.hint().map(str::to_owned))
        .expect("a NOTICE with a HINT");
    assert!(hint.contains("shared_preload_libraries"), "{hint}");

    cluster.publish("1");
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 1);
    let (ok, problem) = health(&cluster, "preload");
    assert!(!ok && problem.contains("shared_preload_libraries"), "{problem}");
    let (ok, problem) = health(&cluster, "workers");
    assert!(!ok && problem.contains("no worker"), "{problem}");
    let failing = problems(&cluster);
    assert_eq!(failing, ["preload", "workers", "destination"]);
}

/// Without the library no process counts; a status of 0 would be false while a message waits.
#[test]
fn without_preload_the_status_does_not_report_zero_pending() {
    let cluster = Cluster::builder().preload(false).start();
    cluster.exec(DB, "create extension outbox");
    cluster.publish("1");
    let pending: Option<i64> = cluster.query_one(DB, "select pending from outbox_status");
    assert_ne!(pending, Some(0));
}

#[test]
fn messages_enqueued_without_preload_are_delivered_after_preload() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = Cluster::builder().preload(false).start();
    cluster.exec(DB, "create extension outbox");
    cluster.publish("1");
    cluster.set_conf("outbox.url", &broker.url());
    cluster.set_conf("outbox.exchange", &exchange);
    cluster.set_conf("shared_preload_libraries", "outbox");
    cluster.restart();
    assert_eq!(Consumer::new(broker, &queue).next().label(), "1");
}

#[test]
fn health_reports_no_problem_when_everything_works() {
    let cluster = Stage::new(&[]).cluster;
    assert_eq!(problems(&cluster), [""; 0]);
}

#[test]
fn health_names_an_empty_url() {
    let cluster = unconnected_cluster("", "x", &[]);
    wait_healthy(&cluster, "workers");
    let problem = wait_for_problem(&cluster, "destination");
    assert!(problem.contains("outbox.url is empty"), "{problem}");
    assert_eq!(problems(&cluster), ["destination"]);
}

#[test]
fn health_names_a_broker_that_is_down() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &[]);
    let problem = wait_for_problem(&cluster, "broker");
    assert!(problem.contains("cannot be reached"), "{problem}");
    assert_eq!(problems(&cluster), ["broker"]);
}

#[test]
fn health_names_a_wrong_password_until_the_right_one_is_set() {
    let broker = Broker::start();
    broker.add_user("relay", "right-pass");
    let (exchange, _) = exchange_and_queue(&broker);
    let url = format!("amqp://relay@127.0.0.1:{}", broker.port());
    let cluster = unconnected_cluster(&url, &exchange, &[]);
    // The password in the protocol's default is wrong as well, so health reports this first.
    let problem = wait_for_problem(&cluster, "broker");
    assert!(problem.contains("refuses the user or password"), "{problem}");

    cluster.set_conf(
        "outbox.password_file",
        server_file(&cluster, "wrong", "wrong-pass", 0o600)
            .to_str()
            .expect("UTF-8"),
    );
    let problem = wait_for_problem(&cluster, "broker");
    assert!(!problem.contains("wrong-pass"), "{problem}");
    let shown = "select concat((select string_agg(w::text, '') from outbox_workers w), (select string_agg(c::text, '') from outbox_connections c))";
    let shown: String = cluster.query_one(DB, shown);
    assert!(shown.contains("server-1") && !shown.contains("wrong-pass"), "{shown}");
    assert_eq!(problems(&cluster), ["broker"]);

    cluster.set_conf(
        "outbox.password_file",
        server_file(&cluster, "open", "right-pass", 0o644)
            .to_str()
            .expect("UTF-8"),
    );
    let problem = wait_for_problem(&cluster, "destination");
    assert!(problem.contains("chmod 600"), "{problem}");

    cluster.set_conf(
        "outbox.password_file",
        server_file(&cluster, "right", "right-pass", 0o600)
            .to_str()
            .expect("UTF-8"),
    );
    wait_connected(&cluster);
    assert!(!cluster.log().contains("-pass"), "a password is in the log");
}

/// A Kubernetes secret: root owns the file, and the group of the server may read it.
#[test]
fn a_password_file_of_root_that_the_group_of_the_server_reads_is_used() {
    let Some(account) = process::postgres_account() else {
        return skip("a file of root", "only root can make one");
    };
    let broker = Broker::start();
    broker.add_user("relay", "right-pass");
    let (exchange, _) = exchange_and_queue(&broker);
    let url = format!("amqp://relay@127.0.0.1:{}", broker.port());
    let cluster = unconnected_cluster(&url, &exchange, &[]);
    let mounted = |name: &str, owner: u32, mode: u32| {
        let path = server_file(&cluster, name, "right-pass", mode);
        std::os::unix::fs::chown(&path, Some(owner), Some(account.gid)).expect("chown");
        cluster.set_conf("outbox.password_file", path.to_str().expect("UTF-8"));
    };
    for (name, owner, mode, words) in [
        ("of_the_server", account.uid, 0o640, "chmod 600 it"),
        ("of_others", 0, 0o644, "chmod 640 it"),
        ("written", 0, 0o660, "chmod 640 it"),
    ] {
        mounted(name, owner, mode);
        wait_until(words, LONG, || {
            let (_, problem) = health(&cluster, "destination");
            problem.contains(name) && problem.contains(words)
        });
    }
    mounted("secret", 0, 0o640);
    wait_connected(&cluster);
}

#[test]
fn health_names_workers_set_to_zero() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &["outbox.workers = 0"]);
    let (ok, problem) = health(&cluster, "workers");
    assert!(!ok && problem.contains("outbox.workers is 0"), "{problem}");
    assert_eq!(problems(&cluster), ["workers"]);
}

#[test]
fn health_names_enabled_off_and_messages_wait_until_it_is_on() {
    let stage = Stage::new(&[]);
    stage.exec(DB, "alter system set outbox.enabled = off");
    stage.reload();
    wait_workers_paused(&stage);
    stage.publish("1");
    let (ok, problem) = health(&stage, "enabled");
    assert!(!ok && problem.contains("outbox.enabled is off"), "{problem}");
    assert_eq!(problems(&stage), ["enabled"]);
    // A whole pass of the worker, with the answers to all that it sent.
    stage.exec(DB, "select outbox_run_pass('5 min')");
    assert_eq!(stage.broker.queue_len(&stage.queue), 0);
    stage.exec(DB, "alter system reset outbox.enabled");
    stage.reload();
    assert_eq!(stage.consumer().next().label(), "1");
}

#[test]
fn health_names_a_database_that_is_excluded_from_delivery() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &["outbox.databases = 'another'"]);
    let excluded = || {
        health(&cluster, "workers")
            .1
            .contains("outbox.databases does not name it")
    };
    wait_until("the reason", LONG, excluded);
    assert!(!cluster.query_one::<bool>(DB, &has_worker(DB)));
    cluster.set_conf("outbox.databases", "another, postgres");
    wait_healthy(&cluster, "workers");
}

#[test]
fn health_names_exhausted_worker_slots() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &["max_worker_processes = 2"]);
    let used_up = || {
        health(&cluster, "workers")
            .1
            .contains("max_worker_processes is used up")
    };
    wait_until("the reason", LONG, used_up);
    assert_eq!(problems(&cluster), ["workers"]);
}

#[test]
fn health_counts_the_worker_slots_that_are_missing() {
    // The launcher of this extension and that of logical replication take two slots. One is left for the first of three
    // workers.
    let conf = ["max_worker_processes = 3", "outbox.workers = 3"];
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &conf);
    cluster.exec(DB, "create database shop");
    cluster.exec("shop", "create extension outbox");
    let remedy = r#"select coalesce(remedy, '') from outbox_health where "check" = 'workers'"#;
    for db in [DB, "shop"] {
        // The worker of postgres has nothing to do, so a process has visited shop. Health then knows that shop wants
        // three workers as well.
        wait_until("the number of missing slots", LONG, || {
            cluster.query_one::<String>(db, remedy).contains("by 5 or more")
        });
    }
}

#[test]
fn health_names_dead_letters() {
    let cluster = Stage::new(&[]).cluster;
    cluster.draw_seqs(4711);
    cluster.exec(DB, "select outbox_enqueue(4711, 'key')");
    let problem = wait_for_problem(&cluster, "dead letters");
    assert!(problem.contains("1 dead") && problem.contains("4711"), "{problem}");
    cluster.exec(DB, "select outbox_discard(4711)");
    wait_healthy(&cluster, "dead letters");
}

/// A row that the workers may not see is no missing row, and what they may not write is not lost.
#[test]
fn while_a_table_of_the_outbox_is_not_as_it_was_messages_wait_and_health_says_why() {
    let stage = Stage::new(&[]);
    let cases = [
        (
            "alter table {} enable row level security; alter table {} force row level security",
            "alter table {} no force row level security; alter table {} disable row level security",
            &["outbox_events", "outbox", "outbox_partitions", "outbox_history"][..],
        ),
        (
            "alter table {} owner to postgres",
            "alter table {} owner to outbox_worker",
            &["outbox_events", "outbox_history", "outbox_settings"],
        ),
        (
            "create function fails() returns trigger language plpgsql as $$ begin raise exception 'no {}'; end $$;
             create trigger fails before insert or delete on {} for each row execute function fails()",
            "drop trigger fails on {}; drop function fails",
            &["outbox_history", "outbox"],
        ),
    ];
    let mut published = 0;
    for (alter, back, tables) in cases {
        for table in tables {
            pause(&stage);
            stage.publish_run("default", "k", 3);
            published += 3;
            stage.exec(DB, &alter.replace("{}", table));
            stage.set_conf("outbox.enabled", "on");
            let problem = wait_for_problem(&stage, "database");
            assert!(problem.contains(table), "{alter} of {table}: {problem}");
            let why = "select exists (select from outbox_why((select min(seq) from outbox)) where reason = 'database')";
            let is_held_up = *table != "outbox_settings"; // only sessions read it
            assert!(
                !is_held_up || stage.query_one::<bool>(DB, why),
                "{alter} of {table}: outbox_why"
            );
            stage.exec(DB, &back.replace("{}", table));
            wait_drained(&stage);
            assert_eq!(
                stage.query_one::<i64>(DB, "select count(*) from outbox_dead"),
                0,
                "{alter} of {table}"
            );
            wait_healthy(&stage, "database");
        }
    }
    wait_published(&stage, published);
}

#[test]
fn health_names_messages_that_keep_failing_and_does_not_take_them_for_a_backlog() {
    let is_well = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let seen = Arc::clone(&is_well);
    let receiver = Receiver::start(move |_| match seen.load(std::sync::atomic::Ordering::Acquire) {
        true => Reply::status(200),
        false => Reply::status(500),
    });
    let conf = [
        "outbox.http_allow = '127.0.0.1'",
        "outbox.retry_backoff = '20ms'",
        "outbox.retry_backoff_max = '20ms'",
        "outbox.max_attempts = 1000",
    ];
    let cluster = unconnected_cluster("", "x", &conf);
    let url = receiver.url("/");
    cluster.exec(
        DB,
        &format!("create server hook foreign data wrapper outbox_http options (url '{url}')"),
    );
    (0..5).for_each(|n| _ = cluster.publish(Event::new(n).key(n.to_string()).to("hook")));
    let problem = wait_for_problem(&cluster, "retrying");
    assert!(problem.contains("to hook") && problem.contains("HTTP 500"), "{problem}");
    // They are as old as they are, and no backlog.
    for table in ["outbox", "outbox_waiting"] {
        cluster.exec(
            DB,
            &format!("update {table} set enqueued_at = now() - interval '1 hour'"),
        );
    }
    for _ in 0..20 {
        assert!(health(&cluster, "lag").0, "{}", health(&cluster, "lag").1);
    }
    is_well.store(true, std::sync::atomic::Ordering::Release);
    wait_drained(&cluster);
    wait_healthy(&cluster, "retrying");
}
