//! Tests that the statistics of a destination are right, and that outbox_check finds what is wrong with it. On a real
//! Postgres and a real RabbitMQ.

use postgres::Row;
use serde_json::Value;
use std::time::{Duration, Instant};
use support::wait::Pauses;
use support::{Broker, Cluster, Mode, Proxy, fresh_names, wait_for, wait_until};
use support::{
    DB, LONG, Session, Stage, dead_port, exchange_and_queue, outbox_cluster_with, publish_many, unconnected_cluster,
    wait_drained, wait_paused, wait_published, wait_stats, wait_true,
};

/// Creates a destination whose exchange routes messages of type "Good" only.
fn picky_destination(cluster: &Cluster, broker: &Broker, name: &str, options: &str) {
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "Good");
    cluster.exec(
        DB,
        &format!(
            "create server {name} foreign data wrapper outbox_amqp
             options (exchange '{exchange}', routing_key '{{type}}'{options})"
        ),
    );
    wait_for_state(cluster, name, "connected");
}

fn wait_for_state(cluster: &Cluster, destination: &str, state: &str) {
    wait_stats(cluster, destination, &format!("state = '{state}'"));
}

/// [published, failed, dead, released, in flight]
fn totals(cluster: &Cluster, destination: &str) -> [i64; 5] {
    cluster
        .query_one::<Vec<i64>>(
            DB,
            &format!(
                "select array[published_total, failed_total, dead_total, released_total, in_flight]
                 from outbox_destination_status where destination = '{destination}'"
            ),
        )
        .try_into()
        .expect("five counts")
}

// ---- statistics -----------------------------------------------------------------------------------------------------

#[test]
fn each_destination_counts_what_was_delivered_what_failed_and_what_died() {
    let stage = Stage::new(&["outbox.retry_backoff = '10ms'", "outbox.workers = 2"]);
    picky_destination(&stage, stage.broker, "orders", ", max_attempts '3'");
    picky_destination(&stage, stage.broker, "audit", ", max_attempts '1'");
    assert_eq!(totals(&stage, "orders"), [0; 5]);
    publish_many(&stage, "orders", "Good", 7);
    publish_many(&stage, "orders", "Bad", 2);
    publish_many(&stage, "audit", "Good", 4);
    publish_many(&stage, "audit", "Bad", 5);
    publish_many(&stage, "default", "Any", 3);
    wait_drained(&stage);
    wait_published(&stage, 14);
    for name in ["orders", "audit", "default"] {
        wait_stats(&stage, name, "in_flight = 0");
    }
    assert_eq!(totals(&stage, "orders"), [7, 6, 2, 0, 0]); // each bad message was tried three times
    assert_eq!(totals(&stage, "audit"), [4, 5, 5, 0, 0]);
    assert_eq!(totals(&stage, "default"), [3, 0, 0, 0, 0]);
    wait_stats(&stage, "orders", "published_per_s = 0.117"); // 7 in a minute
    assert_eq!(
        stage.query_one::<i64>(DB, "select published_total from outbox_status"),
        14
    );
}

#[test]
fn messages_released_by_a_lost_connection_are_not_counted_as_failures() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let cluster = unconnected_cluster(&proxy.url(), &exchange, &[]);
    wait_for_state(&cluster, "default", "connected");
    proxy.mode(Mode::DropReplies);
    publish_many(&cluster, "default", "T", 5);
    wait_stats(&cluster, "default", "in_flight = 5");
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    wait_published(&cluster, 5);
    wait_stats(&cluster, "default", "in_flight = 0");
    let [published, failed, dead, released, in_flight] = totals(&cluster, "default");
    assert_eq!([published, failed, dead, in_flight], [5, 0, 0, 0]);
    // Ten, if the worker handed them over again before it noticed the loss of the connection.
    assert!(released == 5 || released == 10, "{released} released");
}

#[test]
fn the_in_flight_messages_of_a_killed_worker_are_no_longer_counted() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let cluster = unconnected_cluster(&proxy.url(), &exchange, &[]);
    wait_for_state(&cluster, "default", "connected");
    proxy.mode(Mode::DropReplies);
    publish_many(&cluster, "default", "T", 5);
    wait_stats(&cluster, "default", "in_flight = 5");
    let pid: i32 = cluster.query_one(DB, "select pid from outbox_worker_status");
    cluster.exec(DB, &format!("select pg_terminate_backend({pid})"));
    wait_true(
        &cluster,
        "another worker",
        &format!("select exists (select from outbox_worker_status where alive and pid <> {pid})"),
    );
    // The proxy drops replies, so the other worker gets no connection. If the proxy refused connections instead, one
    // that had begun would still be answered.
    wait_stats(&cluster, "default", "in_flight = 0 and published_total = 0");
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    wait_published(&cluster, 5);
    wait_stats(&cluster, "default", "in_flight = 0 and published_total = 5");
}

#[test]
fn percentiles_show_the_latency_of_messages() {
    let cluster = Stage::new(&[]).cluster;
    let quiet = "select p50_ms is null and p99_ms is null and in_flight = 0
                 from outbox_destination_status where destination = 'default'";
    assert!(cluster.query_one::<bool>(DB, quiet));
    cluster.exec(DB, "select outbox_pause()");
    wait_paused(&cluster, "default");
    let before = Instant::now();
    publish_many(&cluster, "default", "T", 1);
    let after = Instant::now();
    wait_true(
        &cluster,
        "the message to wait",
        "select oldest_pending_age > interval '700 ms' from outbox_destination_status where destination = 'default'",
    );
    let at_least = after.elapsed().as_secs_f64() * 1e3;
    cluster.exec(DB, "select outbox_resume()");
    wait_published(&cluster, 1);
    let at_most = before.elapsed().as_secs_f64() * 1e3;
    let counted = |n: i64| {
        let counts = "select sum_ms > 0 and messages = $1 from outbox_latency where below_ms = 'Infinity'";
        wait_true(
            &cluster,
            "the times to be counted",
            &counts.replace("$1", &n.to_string()),
        );
    };
    counted(1);
    let percentile = |name: &str| -> f64 {
        cluster.query_one(
            DB,
            &format!("select {name}::float8 from outbox_destination_status where destination = 'default'"),
        )
    };
    for name in ["p50_ms", "p95_ms", "p99_ms"] {
        let found = percentile(name);
        assert!(
            found > at_least / 1.26 && found < at_most * 1.26,
            "{name} is {found}, the message took {at_least} to {at_most}"
        );
    }
    let began = Instant::now();
    publish_many(&cluster, "default", "T", 30);
    wait_published(&cluster, 31);
    counted(31);
    let (at_most, median) = (began.elapsed().as_secs_f64() * 1e3, percentile("p50_ms"));
    assert!(median > 0.0 && median < at_most * 1.26, "{median}, not above {at_most}");
    assert!(percentile("p99_ms") > at_least / 1.26, "the slow message is included");
}

/// The confirm of a slow broker arrives while its worker waits in the settle of another destination.
#[test]
fn the_latency_of_a_message_ends_when_its_confirm_arrives() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.workers = 1"]);
    let address = format!(", url 'amqp://127.0.0.1:{}'", proxy.port());
    let waits = "select exists (select from pg_locks join pg_stat_activity using (pid)
         where relation = 'outbox'::regclass and not granted and backend_type";
    let (mut publisher, mut holder) = (cluster.connect(DB), cluster.connect(DB));
    let mut round = 0;
    // On a busy machine the confirm or the settle may be too late.
    wait_until("a confirm to arrive while the worker waits", LONG, || {
        round += 1;
        let slow = format!("slow{round}");
        proxy.mode(Mode::Pass);
        picky_destination(&cluster, broker, &slow, &address);
        proxy.mode(Mode::Delay(100));
        let began = Instant::now();
        // The holder gets its lock after the publisher's commit and before the settle. Sending needs no conflicting
        // lock.
        let both = format!(
            "begin; select outbox_publish('Good', '{{}}', destination => d) from unnest('{{{slow},default}}'::text[]) d"
        );
        publisher.run(&both);
        std::thread::scope(|scope| {
            let lock = scope.spawn(|| holder.batch_execute("begin; lock table outbox in share mode"));
            wait_true(&cluster, "the holder to wait", &format!("{waits} = 'client backend')"));
            publisher.run("commit");
            lock.join().expect("the holder").expect("a lock");
        });
        wait_true(&cluster, "the settle to wait", &format!("{waits} like 'outbox%')"));
        let since: String = cluster.query_one(DB, "select coalesce(max(waitstart), now())::text from pg_locks");
        let in_flight = format!("select in_flight = 1 from outbox_destination_status where destination = '{slow}'");
        let came_later: bool = cluster.query_one(DB, &in_flight);
        // The settle is tried again.
        let first_wait = format!("select not exists (select from pg_locks where waitstart = '{since}')");
        wait_true(&cluster, "the settle to give up", &first_wait);
        let waited_ms = began.elapsed().as_millis() as f64;
        holder.run("rollback");
        wait_stats(&cluster, &slow, "published_total = 1");
        let took = format!("select p50_ms::float8 from outbox_destination_status where destination = '{slow}'");
        came_later && cluster.query_one::<f64>(DB, &took) < 0.6 * waited_ms
    });
}

#[test]
fn a_dropped_server_leaves_no_statistics_behind() {
    let stage = Stage::new(&["outbox.workers = 2"]);
    picky_destination(&stage, stage.broker, "brief", "");
    publish_many(&stage, "brief", "Good", 2);
    wait_stats(&stage, "brief", "published_total = 2");
    stage.exec(DB, "drop server brief");
    wait_true(
        &stage,
        "its entry to be free",
        "select not exists (select from outbox_internal.shared_memory('statistics', 'brief') s (in_flight bigint))",
    );
    picky_destination(&stage, stage.broker, "brief", "");
    assert_eq!(totals(&stage, "brief"), [0; 5]);
}

// ---- outbox_check ---------------------------------------------------------------------------------------------------

fn steps(rows: &[Row]) -> Vec<(String, Option<bool>, String)> {
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}

/// The steps of outbox_check that are not ok, with `?` before those whose result is unknown.
fn check(cluster: &Cluster, destination: &str) -> Vec<(String, String)> {
    // The check waits 5 s for an answer. Only a machine that loses time may need longer.
    let rows = wait_for("an answer", LONG, || {
        let pauses = Pauses::watch();
        let sql = "select step, ok, detail from outbox_check($1)";
        let rows = cluster.connect(DB).query(sql, &[&destination]).expect("outbox_check");
        let is_late = steps(&rows)
            .iter()
            .any(|(_, _, detail)| detail.contains("did not answer"));
        (!is_late || pauses.end() < Duration::from_secs(1)).then_some(rows)
    });
    let unwell = steps(&rows).into_iter().filter(|(_, ok, _)| *ok != Some(true));
    unwell
        .map(|(step, ok, detail)| (if ok.is_none() { format!("?{step}") } else { step }, detail))
        .collect()
}

fn names(found: &[(String, String)]) -> Vec<&str> {
    found.iter().map(|(step, _)| step.as_str()).collect()
}

#[test]
fn a_check_of_a_working_destination_reports_ok_and_disturbs_no_connection() {
    let stage = Stage::new(&["outbox.workers = 2"]);
    let since = "select string_agg(since::text, ' ' order by worker_id) from outbox_connections";
    let before: String = stage.query_one(DB, since);
    for _ in 0..3 {
        assert_eq!(check(&stage, "default"), []);
    }
    assert_eq!(stage.query_one::<String>(DB, since), before);
    // An exchange that was declared just now is found, too.
    let (other, _) = exchange_and_queue(stage.broker);
    stage.exec(
        DB,
        &format!("create server fresh foreign data wrapper outbox_amqp options (exchange '{other}')"),
    );
    assert_eq!(check(&stage, "fresh"), []);
    let heard =
        "select count(*) filter (where rechecked_at is not null) from outbox_connections where destination = 'fresh'";
    assert_eq!(stage.query_one::<i64>(DB, heard), 2, "a worker gave no answer");
}

#[test]
fn a_check_of_a_url_does_not_claim_to_have_called_it() {
    let cluster = unconnected_cluster("", "nowhere", &[]);
    let url = format!("http://127.0.0.1:{}/in", dead_port());
    cluster.exec(
        DB,
        &format!("create server hook foreign data wrapper outbox_http options (url '{url}')"),
    );
    wait_for_state(&cluster, "hook", "connected");
    let mut client = cluster.connect(DB);
    let rows = client.query("select step, ok, detail from outbox_check('hook')", &[]);
    let found = steps(&rows.expect("outbox_check"));
    let connection = found.iter().find(|(step, ..)| step == "connection");
    assert!(
        connection.is_some_and(|(.., detail)| detail.contains("it is not tried before a message is sent to it")),
        "{found:?}"
    );
}

#[test]
fn a_check_names_what_is_missing_before_it_asks_a_worker() {
    let stage = Stage::new(&[]);
    let found = check(&stage, "nowhere");
    assert_eq!(names(&found), ["exists"]);
    assert!(found[0].1.contains("CREATE SERVER nowhere"), "{found:?}");
    let (other, _) = exchange_and_queue(stage.broker);
    stage.exec(
        DB,
        &format!(
            "create server audit foreign data wrapper outbox_amqp options (exchange '{other}');
             create role watcher in role outbox_monitor"
        ),
    );
    let mut watcher = stage.connect(DB);
    watcher.run("set role watcher");
    let rows = watcher.query("select step, ok, detail from outbox_check('audit')", &[]);
    let found = steps(&rows.expect("a monitor may check"));
    let unwell: Vec<_> = found.iter().filter(|(_, ok, _)| *ok != Some(true)).collect();
    assert_eq!(unwell.len(), 1, "{found:?}");
    assert!(
        unwell[0].2.contains("GRANT USAGE ON FOREIGN SERVER audit TO watcher"),
        "{unwell:?}"
    );
    stage.exec(DB, "create role stranger");
    let mut stranger = stage.connect(DB);
    stranger.run("set role stranger");
    let refused = stranger.query("select outbox_check()", &[]).expect_err("not for all");
    assert_eq!(refused.code().map(|code| code.code()), Some("42501"));
}

#[test]
fn a_check_distinguishes_a_closed_port_from_a_missing_exchange_and_sees_the_fix_at_once() {
    let stage = Stage::new(&[]);
    let (missing, _) = fresh_names();
    stage.exec(
        DB,
        &format!(
            "create server closed foreign data wrapper outbox_amqp options (url 'amqp://127.0.0.1:{}');
             create server bare foreign data wrapper outbox_amqp options (exchange '{missing}')",
            dead_port()
        ),
    );
    let found = check(&stage, "closed");
    assert_eq!(names(&found), ["connection", "?exchange"]);
    assert!(found[0].1.starts_with("down: unreachable"), "{found:?}");
    let found = check(&stage, "bare");
    assert_eq!(names(&found), ["connection", "exchange"]);
    assert!(
        found[0].1.contains("exchange_missing") && found[1].1.contains(&missing),
        "{found:?}"
    );
    // The next attempt would be seconds away; a check does not wait for it.
    wait_true(
        &stage,
        "a few attempts to have failed",
        "select bool_and(clock_timestamp() > since + interval '3 s') from outbox_connections where state = 'down'",
    );
    stage.broker.declare_exchange(&missing, "topic", true);
    // Without an answer the check would report after its 5 s that the result is unknown.
    assert_eq!(check(&stage, "bare"), []);
    assert_eq!(names(&check(&stage, "closed")), ["connection", "?exchange"]);
}

#[test]
fn a_check_detects_a_wrong_password_and_the_right_one_once_it_is_set() {
    let broker = Broker::start();
    broker.add_user("courier", "correct-horse");
    let (exchange, _) = exchange_and_queue(&broker);
    let cluster = unconnected_cluster(&broker.url(), &exchange, &[]);
    cluster.exec(
        DB,
        "create server audit foreign data wrapper outbox_amqp;
         create user mapping for outbox_worker server audit options (user 'courier', password 'wrong-battery')",
    );
    wait_for_state(&cluster, "audit", "down");
    let found = check(&cluster, "audit");
    assert_eq!(names(&found), ["connection", "?exchange"]);
    assert!(found[0].1.contains("auth_refused"), "{found:?}");
    assert!(!format!("{found:?}").contains("wrong-battery"));
    cluster.exec(
        DB,
        "alter user mapping for outbox_worker server audit options (set password 'correct-horse')",
    );
    assert_eq!(check(&cluster, "audit"), []);
    cluster.exec(DB, "alter server audit options (add url 'amqp://127.0.0.1:1')");
    let found = check(&cluster, "audit");
    assert!(found[0].1.starts_with("down: unreachable"), "{found:?}");
}

#[test]
fn a_check_reports_a_paused_destination_and_a_missing_worker() {
    let cluster = Stage::new(&[]).cluster;
    cluster.exec(DB, "select outbox_pause(reason => 'the broker moves')");
    let found = check(&cluster, "default");
    assert_eq!(names(&found), ["delivery", "?options", "?connection", "?exchange"]);
    assert!(
        found[0].1.contains("the broker moves") && found[0].1.contains("outbox_resume('default')"),
        "{found:?}"
    );
    cluster.exec(DB, "select outbox_resume()");
    assert_eq!(check(&cluster, "default"), []);
    cluster.set_conf("outbox.url", "");
    wait_for_state(&cluster, "default", "unconfigured");
    let found = check(&cluster, "default");
    assert!(
        names(&found).contains(&"options") && found[0].1.contains("outbox.url"),
        "{found:?}"
    );
    cluster.set_conf("outbox.workers", "0");
    wait_for_state(&cluster, "default", "not served");
    let found = check(&cluster, "default");
    assert_eq!(names(&found), ["worker", "?options", "?connection", "?exchange"]);
}
