//! Tests that a session gets one pass of the workers when it requests one, and manual delivery where delivery is
//! switched off. On a real Postgres and a real RabbitMQ.

use postgres::error::SqlState;
use serde_json::Value;
use std::thread;
use std::time::{Duration, Instant};
use support::{Broker, Cluster, Mode, Proxy, fresh_names, process, wait_until};
use support::{
    DB, LONG, Session, Stage, all_of, exchange_and_queue, idle_cluster, outbox_cluster_with, pause, refused,
    unconnected_cluster, wait_connected, wait_drained, wait_paused, wait_published, wait_true, wait_workers_paused,
};

/// The keys of the JSON line that workers of other systems print.
const KEYS: [&str; 13] = [
    "active_workers",
    "backoff_ms",
    "claimed",
    "desired_count",
    "duration_ms",
    "failed",
    "leased_count",
    "owned_count",
    "published",
    "purged_stale",
    "released_count",
    "renewed_heartbeat",
    "ts",
];

fn run_pass_within(cluster: &Cluster, timeout: &str) -> Value {
    let text: String = cluster.query_one(DB, &format!("select outbox_run_pass('{timeout}')::text"));
    let pass: Value = serde_json::from_str(&text).expect("JSON");
    let mut keys: Vec<&str> = pass
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect();
    keys.sort_unstable();
    assert_eq!(keys, KEYS);
    pass
}

fn pass(cluster: &Cluster) -> Value {
    run_pass_within(cluster, "60 s")
}

fn counts(pass: &Value) -> [i64; 3] {
    ["claimed", "published", "failed"].map(|key| pass[key].as_i64().unwrap_or_else(|| panic!("{key} of {pass}")))
}

/// Writes `count` messages that no worker has noticed; a worker notices them within a second, or on request.
fn unseen(cluster: &Cluster, count: usize) {
    cluster.exec(DB, "select outbox_pause()");
    wait_paused(cluster, "default");
    publish(cluster, "routable", 1, count);
    cluster.exec(DB, "delete from outbox_paused"); // outbox_resume() would wake the workers
}

/// Publishes messages with these payloads, each with a different key.
fn publish(cluster: &Cluster, aggregate_type: &str, from: usize, to: usize) {
    cluster.exec(
        DB,
        &format!(
            "select outbox_publish('T', to_jsonb(n), '{aggregate_type}', n::text) from generate_series({from}, {to}) n"
        ),
    );
}

fn payloads(broker: &Broker, queue: &str) -> Vec<i64> {
    let arrived = all_of(broker, queue);
    let payload = |delivery: &support::Delivery| delivery.json()["payload"].as_i64().expect("a number");
    arrived.iter().map(payload).collect()
}

/// An exchange that routes keys that begin with `routable`, and no others; returns the exchange and its queue.
fn picky(broker: &Broker) -> (String, String) {
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "routable.#");
    (exchange, queue)
}

fn url(proxy: &Proxy) -> String {
    format!("amqp://127.0.0.1:{}", proxy.port())
}

/// A cluster whose worker is connected through a proxy.
fn proxied(broker: &Broker, exchange: &str) -> (Cluster, Proxy) {
    let proxy = Proxy::start(broker.port());
    let cluster = unconnected_cluster(&url(&proxy), exchange, &[]);
    wait_connected(&cluster);
    (cluster, proxy)
}

fn wait_both(cluster: &Cluster) {
    let sql = "select count(*) = 2 from outbox_worker_status where alive and partitions = 8";
    wait_true(cluster, "both workers to own their partitions", sql);
}

/// [messages, published, failed, dead, waiting], and whether the relay succeeded completely.
fn relay(cluster: &Cluster, call: &str) -> ([i64; 5], bool) {
    let sql = format!("select messages, published, failed, dead, waiting, ok from outbox_relay({call})");
    let row = cluster.connect(DB).query_one(&sql, &[]).expect("outbox_relay");
    ([0, 1, 2, 3, 4].map(|column| row.get(column)), row.get(5))
}

fn in_another_session<T: Send + 'static>(
    cluster: &Cluster,
    sql: &'static str,
    read: impl FnOnce(Result<postgres::Row, postgres::Error>) -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    let mut client = cluster.connect(DB);
    let thread = thread::spawn(move || read(client.query_one(sql, &[])));
    wait_true(
        cluster,
        "the other session to wait",
        &format!(
            "select exists (select from pg_stat_activity where pid <> pg_backend_pid() and state = 'active'
                and query = $${sql}$$ and wait_event_type = 'Extension')"
        ),
    );
    thread
}

// ---- outbox_run_pass ------------------------------------------------------------------------------------------------

#[test]
fn a_pass_delivers_at_once_and_reports_its_work() {
    let stage = Stage::new(&[]);
    for round in 1.. {
        unseen(&stage, 10);
        let done = pass(&stage);
        let published: i64 = stage.query_one(DB, "select count(*) from outbox_history");
        if counts(&done)[0] < 10 && round < 5 {
            wait_published(&stage, 10 * round); // the worker found some by itself just before the request
            continue;
        }
        assert_eq!(counts(&done), [10, 10, 0]);
        assert_eq!(published as usize, 10 * round, "it returned before all was settled");
        assert_eq!(stage.broker.queue_len(&stage.queue) as usize, 10 * round);
        assert_eq!(done["backoff_ms"], 0);
        assert_eq!(done["renewed_heartbeat"], true);
        assert_eq!(done["active_workers"], 1);
        assert_eq!([&done["desired_count"], &done["owned_count"]], [16, 16]);
        assert!(done["duration_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{done}");
        break;
    }
    let idle = pass(&stage);
    assert_eq!(counts(&idle), [0, 0, 0]);
    assert_eq!(idle["backoff_ms"], 1000);
    let is_now = "select abs(extract(epoch from now() - (outbox_run_pass()->>'ts')::timestamptz)) < 60";
    assert!(stage.query_one::<bool>(DB, is_now));
}

#[test]
fn a_pass_adds_up_the_work_of_several_workers() {
    let broker = Broker::shared();
    let (exchange, queue) = picky(broker);
    let conf = ["outbox.workers = 2", "outbox.retry_backoff = '1h'"];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    wait_both(&cluster);
    cluster.exec(
        DB,
        "insert into outbox_workers (worker_id, heartbeat_until) values ('gone', now() - interval '1 day')",
    );
    for round in 1.. {
        unseen(&cluster, 30);
        let done = pass(&cluster);
        if counts(&done)[0] < 30 && round < 5 {
            wait_published(&cluster, 30 * round);
            continue;
        }
        assert_eq!(counts(&done), [30, 30, 0]);
        assert_eq!(broker.queue_len(&queue) as usize, 30 * round);
        assert_eq!(done["active_workers"], 2);
        assert_eq!([&done["desired_count"], &done["owned_count"]], [16, 16]);
        assert_eq!(done["renewed_heartbeat"], true);
        break;
    }
    assert!(!cluster.query_one::<bool>(
        DB,
        "select exists (select from outbox_workers where worker_id = 'gone')"
    ));
}

#[test]
fn a_pass_counts_failures() {
    let broker = Broker::shared();
    let (exchange, _) = picky(broker);
    let conf = ["outbox.retry_backoff = '1h'", "outbox.enabled = off"];
    let cluster = unconnected_cluster(&broker.url(), &exchange, &conf);
    publish(&cluster, "routable", 1, 3);
    publish(&cluster, "nowhere", 4, 5);
    wait_workers_paused(&cluster);
    // While it is off, a worker claims nothing.
    assert_eq!(counts(&pass(&cluster)), [0, 0, 0]);
    cluster.write_conf("outbox.enabled", "on");
    // The worker notices the reload and the request in either order.
    let sql = "select pg_reload_conf() and outbox_run_pass() is not null";
    assert!(cluster.query_one::<bool>(DB, sql));
    let ended = "select (select count(*) from outbox_history) = 3 and (select count(*) from outbox_waiting where state = 'b') = 2";
    wait_true(&cluster, "three published, two failed", ended);
    // The worker checks each second for messages that are due; if it was faster, the pass claims none or one. Each
    // round charges both messages once, and a pass that claimed both counts both.
    let mut attempts = 2;
    wait_until("a pass that finds the two", LONG, || {
        cluster.exec(DB, "update outbox_waiting set due_at = now()"); // this notifies no worker
        let failed = counts(&pass(&cluster));
        attempts += 2;
        let charged =
            format!("select count(*) = 2 and sum(attempts) = {attempts} from outbox_waiting where state = 'b'");
        wait_true(&cluster, "both to be charged", &charged);
        assert!(failed == [2, 0, 2] || failed[0] < 2, "{failed:?}");
        failed == [2, 0, 2]
    });
}

#[test]
fn a_pass_reconnects_where_the_broker_was_down() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    proxy.mode(Mode::Refuse);
    let cluster = unconnected_cluster(&url(&proxy), &exchange, &[]);
    publish(&cluster, "routable", 1, 5);
    wait_true(
        &cluster,
        "a few attempts to have failed",
        "select coalesce(bool_and(state = 'down' and clock_timestamp() > since + interval '3 s'), false) from outbox_connections",
    );
    assert_eq!(counts(&pass(&cluster)), [0, 0, 0]); // the pass does not give up at its timeout
    proxy.mode(Mode::Pass);
    let done = pass(&cluster);
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_history"), 5);
    assert_eq!(broker.queue_len(&queue), 5);
    assert!(counts(&done)[0] == 5 || counts(&done)[0] == 0, "{done}"); // 0 if the next attempt was due
}

#[test]
fn a_pass_is_refused_where_no_worker_could_answer() {
    let cluster = idle_cluster(&[]);
    let no_worker = refused(&cluster, "select outbox_run_pass()");
    assert_eq!(no_worker.code(), &SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
    assert_eq!(no_worker.message(), "no worker runs in this database");
    assert!(
        no_worker
            .detail()
            .is_some_and(|why| why.contains("outbox.workers is 0"))
    );
    assert!(no_worker.hint().is_some_and(|what| what.contains("outbox.workers")));
    let call = "begin; select outbox_publish('T', '{}'); select outbox_run_pass()";
    let enqueued = refused(&cluster, call);
    assert_eq!(enqueued.code(), &SqlState::ACTIVE_SQL_TRANSACTION);
    assert!(enqueued.hint().is_some_and(|what| what.contains("Commit first")));
    for timeout in ["-1 s", "2 hours"] {
        let odd = refused(&cluster, &format!("select outbox_run_pass('{timeout}')"));
        assert_eq!(odd.code(), &SqlState::INVALID_PARAMETER_VALUE);
    }
    let unloaded = Cluster::builder().preload(false).start();
    unloaded.exec(DB, "create extension outbox");
    let refusal = refused(&unloaded, "select outbox_run_pass()");
    assert!(
        refusal
            .hint()
            .is_some_and(|what| what.contains("shared_preload_libraries"))
    );
}

#[test]
fn a_pass_that_waits_for_a_broker_can_be_cancelled_and_ends_with_its_timeout() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let (cluster, proxy) = proxied(broker, &exchange);
    proxy.mode(Mode::DropReplies);
    publish(&cluster, "routable", 1, 3);
    wait_true(&cluster, "all in flight", "select in_flight = 3 from outbox_status");
    let mut client = cluster.connect(DB);
    client.run("set statement_timeout = '300ms'");
    let cancelled = client
        .batch_execute("select outbox_run_pass('1 hour')")
        .expect_err("no confirm");
    assert_eq!(cancelled.code(), Some(&SqlState::QUERY_CANCELED), "{cancelled:?}");
    // The session is still connected, and blocks no other request.
    assert_eq!(counts(&run_pass_within(&cluster, "300 ms"))[1], 0);
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    wait_published(&cluster, 3);
    assert_eq!(counts(&pass(&cluster)), [0, 0, 0]);
}

#[test]
fn a_request_to_a_worker_that_ends_is_answered_by_its_successor() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let (cluster, proxy) = proxied(broker, &exchange);
    proxy.mode(Mode::DropReplies);
    publish(&cluster, "routable", 1, 3);
    wait_true(&cluster, "all in flight", "select in_flight = 3 from outbox_status");
    let request = in_another_session(&cluster, "select outbox_run_pass('5 min')::text", |answer| {
        answer.map(|row| row.get::<_, String>(0))
    });
    let pid: i32 = cluster.query_one(DB, "select pid from outbox_worker_status");
    cluster.exec(DB, &format!("select pg_terminate_backend({pid})"));
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    let answer = request.join().expect("a session").expect("an answer");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["owned_count"], 16, "{answer}");
    wait_published(&cluster, 3);
}

/// Without the launcher, which starts it, the worker has no successor.
#[test]
fn a_request_gives_up_only_after_a_time_without_a_worker_however_long_one_ran() {
    const PATIENCE: Duration = Duration::from_secs(2);
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let (cluster, proxy) = proxied(broker, &exchange);
    proxy.mode(Mode::DropReplies);
    publish(&cluster, "routable", 1, 3);
    wait_true(&cluster, "all in flight", "select in_flight = 3 from outbox_status");
    let request = in_another_session(&cluster, "select outbox_run_pass('5 min')::text", |answer| {
        answer.map(|_| ()).map_err(|error| (Instant::now(), error))
    });
    wait_true(
        &cluster,
        "a request that is older than that time",
        "select clock_timestamp() > query_start + interval '2.1 s' from pg_stat_activity where query like 'select outbox_run_pass%'",
    );
    let pid_of = |kind| {
        let sql = format!("select pid from pg_stat_activity where backend_type = 'outbox {kind}'");
        cluster.query_one::<i32>(DB, &sql)
    };
    let launcher = pid_of("launcher") as u32;
    process::suspend(launcher);
    let ran = Instant::now();
    cluster.exec(DB, &format!("select pg_terminate_backend({})", pid_of("worker")));
    let answer = request.join().expect("a session");
    process::signal(launcher, libc::SIGCONT);
    let (gave_up, error) = answer.expect_err("no worker");
    let message = error.as_db_error().map(|error| error.message().to_owned());
    assert_eq!(message.as_deref(), Some("no worker runs in this database"));
    assert!(gave_up >= ran + PATIENCE, "after {:?}", gave_up - ran);
}

#[test]
fn concurrent_requests_are_answered_one_after_the_other() {
    let cluster = Stage::new(&[]).cluster;
    let sessions: Vec<_> = (0..4)
        .map(|_| {
            let mut client = cluster.connect(DB);
            thread::spawn(move || {
                for _ in 0..10 {
                    client.query_one("select outbox_run_pass()", &[]).expect("an answer");
                }
            })
        })
        .collect();
    for session in sessions {
        session.join().expect("a session");
    }
    let asks = cluster.query_one::<i64>(DB, "select outbox_internal.begin_request(0, false)");
    assert_eq!(asks, 41);
}

// ---- outbox_relay ---------------------------------------------------------------------------------------------------

#[test]
fn with_delivery_off_a_relay_delivers_its_limit_in_order_and_stops() {
    let stage = Stage::new(&["outbox.workers = 2"]);
    wait_both(&stage);
    pause(&stage);
    // Messages of three keys over all partitions, and messages without a key.
    for n in 1..=20 {
        let key = ["'a'", "'b'", "'c'", "null"][n % 4];
        let sql = format!("select outbox_publish('T', '{n}', case when {key} is not null then 'thing' end, {key})");
        stage.exec(DB, &sql);
    }
    stage.exec(
        DB,
        "select outbox_publish('T', '99', available_at => now() + interval '1 day')",
    );
    assert_eq!(relay(&stage, "4"), ([4, 4, 0, 0, 0], true));
    let published = "select string_agg(seq::text, ' ' order by seq) from outbox_history";
    assert_eq!(stage.query_one::<String>(DB, published), "1 2 3 4");
    let unclaimed = "select count(*) from outbox where claim_token is null";
    assert_eq!(stage.query_one::<i64>(DB, unclaimed), 16);
    assert_eq!(payloads(stage.broker, &stage.queue), [1, 2, 3, 4]);
    assert_eq!(relay(&stage, "100, '60 s'"), ([16, 16, 0, 0, 0], true));
    assert_eq!(payloads(stage.broker, &stage.queue), Vec::from_iter(5..=20));
    // Only scheduled messages are left, and no worker sends them.
    assert_eq!(relay(&stage, ""), ([0, 0, 0, 0, 0], true));
    publish(&stage, "later", 21, 22);
    assert_eq!(counts(&pass(&stage)), [0, 0, 0]);
    assert_eq!(stage.query_one::<i64>(DB, unclaimed), 2);
    stage.set_conf("outbox.enabled", "on");
    wait_published(&stage, 22);
    let mut arrived = payloads(stage.broker, &stage.queue);
    arrived.sort_unstable();
    assert_eq!(arrived, [21, 22]);
}

#[test]
fn a_relay_delivers_in_stored_order_with_several_workers_and_destinations() {
    let stage = Stage::new(&["outbox.workers = 2"]);
    let server = format!(
        "create server second foreign data wrapper outbox_amqp options (exchange '{}')",
        stage.exchange
    );
    stage.exec(DB, &server);
    wait_both(&stage);
    pause(&stage);
    let sql = "select outbox_publish('T', to_jsonb(n), 'thing', n::text,
                 destination => case when n % 3 = 0 then 'second' else 'default' end) from generate_series(1, 60) n";
    stage.exec(DB, sql);
    // The messages of one event go together, whatever the limit.
    stage.exec(DB, "select outbox_enqueue(60, destination => 'default')");
    assert_eq!(relay(&stage, "41"), ([41, 41, 0, 0, 0], true));
    assert_eq!(payloads(stage.broker, &stage.queue), Vec::from_iter(1..=41));
    assert_eq!(relay(&stage, "19"), ([20, 20, 0, 0, 0], true));
    let mut rest = Vec::from_iter(42..=60);
    rest.push(60);
    assert_eq!(payloads(stage.broker, &stage.queue), rest);
}

/// Workers choose their rows without it, where they can.
#[test]
fn a_claim_by_a_statement_takes_the_first_messages_of_all_its_lanes() {
    let cluster = idle_cluster(&[]);
    publish(&cluster, "routable", 1, 9);
    let all = "array(select partition from outbox_partitions order by partition)";
    cluster.exec(DB, &format!("select outbox_internal.lease_take('w', {all}, 60)"));
    let claim = format!(
        "select array_agg(c.seq order by c.seq) filter (where c.seq is not null), bool_or(c.remark = 'cut')
         from outbox_internal.claim('w', 'default', {all}, array(select lease_epoch from outbox_partitions order by partition),
                                    array_fill(9, array[16]), array_fill(0::bigint, array[16]), 1000000, most => 4) c"
    );
    let row = cluster.connect(DB).query_one(&claim, &[]).expect("a claim");
    let claimed: (Vec<i64>, Option<bool>) = (row.get(0), row.get(1));
    assert_eq!(claimed, (vec![1, 2, 3, 4], Some(true)));
}

/// The rows of a claim are far fewer than the messages, and half of those are in one partition.
#[test]
fn a_relay_delivers_in_stored_order_in_many_claims() {
    let stage = Stage::new(&["outbox.batch_size = 20"]);
    pause(&stage);
    let sql = "select outbox_publish('T', to_jsonb(n), 'thing', case when n <= 100 then 'a' else n::text end)
               from generate_series(1, 200) n";
    stage.exec(DB, sql);
    assert_eq!(relay(&stage, "200"), ([200, 200, 0, 0, 0], true));
    assert_eq!(payloads(stage.broker, &stage.queue), Vec::from_iter(1..=200));
}

#[test]
fn a_relay_skips_what_fails_and_tries_it_again_when_its_time_has_come() {
    let broker = Broker::shared();
    let (exchange, queue) = picky(broker);
    let conf = ["outbox.retry_backoff = '1h'", "outbox.max_attempts = 2"];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    pause(&cluster);
    publish(&cluster, "routable", 1, 2);
    cluster.exec(
        DB,
        "select outbox_publish('T', n::text::jsonb, 'nowhere', 'x') from generate_series(3, 4) n",
    );
    publish(&cluster, "routable", 5, 6);
    // Message 4 waits behind 3.
    assert_eq!(relay(&cluster, ""), ([6, 4, 1, 0, 1], false));
    let mut arrived = payloads(broker, &queue);
    arrived.sort_unstable();
    assert_eq!(arrived, [1, 2, 5, 6]);
    // Neither can be sent now, nor can a later message of their key.
    cluster.exec(DB, "select outbox_publish('T', '7', 'nowhere', 'x')");
    assert_eq!(relay(&cluster, ""), ([0, 0, 0, 0, 0], true));
    cluster.exec(DB, "update outbox_waiting set due_at = now() where state = 'b'");
    assert_eq!(relay(&cluster, ""), ([3, 0, 0, 1, 2], false));
    assert_eq!(relay(&cluster, ""), ([0, 0, 0, 0, 0], true)); // its key is blocked until a user acts
    broker.bind(&queue, &exchange, "nowhere.#");
    cluster.exec(DB, "select outbox_retry(seq) from outbox_dead");
    assert_eq!(relay(&cluster, ""), ([3, 3, 0, 0, 0], true));
    assert_eq!(payloads(broker, &queue), [3, 4, 7]);
}

#[test]
fn a_relay_tries_a_failing_message_once_however_soon_it_is_due() {
    let broker = Broker::shared();
    let (exchange, _) = picky(broker);
    let conf = [
        "outbox.retry_backoff = '1ms'",
        "outbox.retry_backoff_max = '1ms'",
        "outbox.max_attempts = 1000",
        "outbox.batch_size = 10", // many claims, and time until the failed message is due
    ];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    pause(&cluster);
    publish(&cluster, "nowhere", 1, 500);
    for attempt in 1..=3 {
        assert_eq!(relay(&cluster, "500"), ([500, 0, 500, 0, 0], false));
        let attempts = "select min(attempts) || ' ' || max(attempts) from outbox_waiting";
        assert_eq!(
            cluster.query_one::<String>(DB, attempts),
            format!("{attempt} {attempt}")
        );
    }
}

#[test]
fn a_relay_of_several_workers_tries_a_failing_message_once_too() {
    let broker = Broker::shared();
    let (exchange, queue) = picky(broker);
    let conf = [
        "outbox.workers = 2",
        "outbox.retry_backoff = '1ms'",
        "outbox.retry_backoff_max = '1ms'",
    ];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    wait_both(&cluster);
    pause(&cluster);
    let sql = "select outbox_publish('T', to_jsonb(n), case n % 2 when 0 then 'nowhere' else 'routable' end, n::text)
               from generate_series(1, 40) n";
    cluster.exec(DB, sql);
    assert_eq!(relay(&cluster, ""), ([40, 20, 20, 0, 0], false));
    let attempts = "select count(*) || ' ' || max(attempts) from outbox_waiting";
    assert_eq!(cluster.query_one::<String>(DB, attempts), "20 1");
    assert_eq!(payloads(broker, &queue), Vec::from_iter((1..=40).step_by(2)));
}

#[test]
fn a_relay_leaves_out_a_paused_destination_and_one_that_is_down() {
    let stage = Stage::new(&[]);
    let exchange = &stage.exchange;
    stage.exec(
        DB,
        &format!(
            "create server held foreign data wrapper outbox_amqp options (exchange '{exchange}');
             create server lost foreign data wrapper outbox_amqp options (url 'amqp://127.0.0.1:1', exchange 'x');
             select outbox_pause('held')"
        ),
    );
    pause(&stage);
    for name in ["held", "lost", "default"] {
        let sql = format!("select outbox_publish('T', '1', destination => '{name}') from generate_series(1, 3)");
        stage.exec(DB, &sql);
    }
    // The relay knows that two destinations are down: it waits for neither until its timeout.
    assert_eq!(relay(&stage, "100, '10 min'"), ([6, 3, 0, 0, 3], false));
    assert_eq!(stage.broker.queue_len(&stage.queue), 3);
    let left = "select string_agg(destination, ' ' order by seq) from outbox where claim_token is null";
    assert_eq!(stage.query_one::<String>(DB, left), "held held held lost lost lost");
}

#[test]
fn a_relay_beside_delivering_workers_waits_until_all_has_ended() {
    let broker = Broker::shared();
    let (exchange, queue) = picky(broker);
    let conf = ["outbox.workers = 2", "outbox.retry_backoff = '1h'"];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    let mut client = cluster.connect(DB);
    for _ in 0..5 {
        client.run("select outbox_publish('T', '1', 'routable', n::text) from generate_series(1, 2000) n");
        let row = client
            .query_one("select ok, waiting from outbox_relay(10000)", &[])
            .expect("a relay");
        assert!(row.get::<_, bool>(0));
        assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 0);
    }
    assert_eq!(broker.queue_len(&queue), 10_000);
    publish(&cluster, "nowhere", 1, 1);
    let (found, ok) = relay(&cluster, "");
    assert!(
        [([1, 0, 1, 0, 0], false), ([0, 0, 0, 0, 0], true)].contains(&(found, ok)),
        "{found:?}"
    );
    wait_true(
        &cluster,
        "a failed message",
        "select count(*) = 1 from outbox_waiting where attempts = 1",
    );
}

#[test]
fn a_cancelled_relay_sends_nothing_more() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let (cluster, proxy) = proxied(broker, &exchange);
    pause(&cluster);
    publish(&cluster, "routable", 1, 3);
    proxy.mode(Mode::DropReplies);
    let relayed = in_another_session(&cluster, "select ok from outbox_relay(100, '5 min')", |answer| {
        answer.err().and_then(|error| error.code().cloned())
    });
    wait_true(&cluster, "all in flight", "select in_flight = 3 from outbox_status");
    let cancel =
        "select bool_and(pg_cancel_backend(pid)) from pg_stat_activity where query like 'select ok from outbox_relay%'";
    assert!(cluster.query_one::<bool>(DB, cancel));
    assert_eq!(relayed.join().expect("a session"), Some(SqlState::QUERY_CANCELED));
    publish(&cluster, "routable", 4, 6);
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    wait_true(
        &cluster,
        "all messages to be released",
        "select in_flight = 0 from outbox_status",
    );
    assert_eq!(counts(&pass(&cluster)), [0, 0, 0]); // one whole pass with a connection later
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox where claim_token is null"),
        6
    );
    assert_eq!(relay(&cluster, ""), ([6, 6, 0, 0, 0], true));
}

#[test]
fn a_relay_does_not_wait_for_a_transaction_that_holds_a_key() {
    let stage = Stage::new(&[]);
    pause(&stage);
    let mut open = stage.connect(DB);
    open.run("begin; select outbox_publish('T', '1', 'thing', 'a')");
    stage.exec(DB, "select outbox_publish('T', '2', 'thing', 'a')");
    stage.exec(DB, "select outbox_publish('T', '3', 'thing', 'b')");
    assert_eq!(relay(&stage, "100, '60 s'"), ([2, 1, 0, 0, 1], false));
    wait_true(
        &stage,
        "the parked messages to be released",
        "select bool_and(claim_token is null) from outbox",
    );
    open.run("commit");
    assert_eq!(relay(&stage, ""), ([2, 2, 0, 0, 0], true));
    assert_eq!(payloads(stage.broker, &stage.queue), [3, 1, 2]);
}

#[test]
fn a_relay_is_refused_with_bad_arguments_or_in_an_unsuitable_state() {
    let cluster = Stage::new(&[]).cluster;
    pause(&cluster);
    for (sql, code, word) in [
        ("select outbox_relay(0)", &SqlState::INVALID_PARAMETER_VALUE, "10000"),
        ("select outbox_relay(null)", &SqlState::INVALID_PARAMETER_VALUE, "10000"),
        (
            "select outbox_relay(1, '-1 s')",
            &SqlState::INVALID_PARAMETER_VALUE,
            "1 hour",
        ),
        (
            "begin; select outbox_publish('T', '{}'); select outbox_relay()",
            &SqlState::ACTIVE_SQL_TRANSACTION,
            "Commit first",
        ),
        (
            "begin isolation level repeatable read; select outbox_relay()",
            &SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
            "READ COMMITTED",
        ),
    ] {
        let refusal = refused(&cluster, sql);
        assert_eq!(refusal.code(), code, "{sql}");
        assert!(
            refusal.hint().is_some_and(|hint| hint.contains(word)),
            "{sql}: {refusal:?}"
        );
    }
    publish(&cluster, "routable", 1, 1);
    cluster.exec(DB, "select outbox_configure(leasing => false)");
    let refusal = refused(&cluster, "select outbox_relay()");
    assert_eq!(refusal.code(), &SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
    assert!(refusal.hint().is_some_and(|hint| hint.contains("leasing => true")));
    cluster.set_conf("outbox.workers", "0");
    cluster.exec(DB, "select outbox_configure(leasing => true)");
    wait_true(&cluster, "no worker", "select outbox_internal.server_workers() = '{}'");
    let refusal = refused(&cluster, "select outbox_relay()");
    assert_eq!(refusal.message(), "no worker runs in this database");
}

#[test]
fn without_leases_a_relay_beside_workers_also_waits() {
    let stage = Stage::new(&["outbox.leasing = off", "outbox.workers = 2"]);
    publish(&stage, "routable", 1, 500);
    let (found, ok) = relay(&stage, "1000");
    assert!(ok && found[0] == found[1], "{found:?}");
    wait_drained(&stage);
    assert_eq!(stage.broker.queue_len(&stage.queue), 500);
    assert_eq!(pass(&stage)["owned_count"], 0);
}

#[test]
fn a_monitor_may_request_a_pass_and_a_relay_role_a_relay() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(
        DB,
        "create extension outbox; create role watcher in role outbox_monitor; create role courier in role outbox_relay;
         create role stranger",
    );
    let code = |role: &str, call: &str| {
        let refusal = refused(&cluster, &format!("set role {role}; select {call}"));
        refusal.code().clone()
    };
    let (denied, no_worker) = (
        SqlState::INSUFFICIENT_PRIVILEGE,
        SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
    );
    assert_eq!(code("watcher", "outbox_run_pass('0')"), no_worker);
    assert_eq!(code("watcher", "outbox_relay(1, '0')"), denied);
    assert_eq!(code("stranger", "outbox_run_pass()"), denied);
    assert_eq!(code("courier", "outbox_run_pass()"), denied);
    cluster.exec(DB, "set role courier; select outbox_relay(1, '0')"); // there is nothing to deliver
}
