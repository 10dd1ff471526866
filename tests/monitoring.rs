//! Tests the views for dashboards: outbox_throughput, outbox_errors, outbox_attempts and outbox_passes on a real
//! Postgres, compared with what consumers received.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use postgres::Client;
use serde_json::{Value, json};
use support::{Broker, Cluster, Receiver, Reply, StopMode, fresh_names};
use support::{
    DB, LONG, Session, Stage, all_of, dead_port, outbox_cluster_with, publish_many, unconnected_cluster, wait_drained,
    wait_paused, wait_published, wait_true, wait_until,
};

/// Creates a destination whose exchange routes messages of type "Good" to a queue, and others to none; returns the
/// queue.
fn picky_destination(cluster: &Cluster, broker: &Broker, name: &str, max_attempts: u32) -> String {
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "Good");
    cluster.exec(
        DB,
        &format!(
            "create server {name} foreign data wrapper outbox_amqp
             options (exchange '{exchange}', routing_key '{{type}}', max_attempts '{max_attempts}')"
        ),
    );
    wait_true(
        cluster,
        &format!("{name} to be connected"),
        &format!("select state = 'connected' from outbox_destination_status where destination = '{name}'"),
    );
    queue
}

/// A server whose default destination is paused for a relay, and that has entries for its databases.
fn relay_cluster(conf: &[&str]) -> Cluster {
    let builder = Cluster::builder().conf("outbox.workers = 0");
    let cluster = conf.iter().fold(builder, |builder, line| builder.conf(line)).start();
    cluster.exec(DB, "create extension outbox; select outbox_pause()");
    wait_true(
        &cluster,
        "the counters",
        "select exists (select from outbox_throughput)",
    );
    cluster
}

/// Claims a message as a relay does; returns its seq and token.
fn fetch(relay: &mut Client) -> (i64, i64) {
    let row = relay.query_one("select seq, claim_token from outbox_fetch_unpublished(1)", &[]);
    let row = row.expect("a message");
    (row.get(0), row.get(1))
}

fn fail(relay: &mut Client, (seq, token): (i64, i64), error: &str) {
    let row = relay.query_one("select outbox_mark_failed($1, $2, $3)", &[&seq, &token, &error]);
    assert!(row.expect("mark failed").get::<_, bool>(0));
}

/// [published, retried, failed] of all minutes.
fn sums(cluster: &Cluster, database: &str) -> [i64; 3] {
    cluster
        .query_one::<Vec<i64>>(
            database,
            "select array[sum(published), sum(retried), sum(failed)]::bigint[] from outbox_throughput",
        )
        .try_into()
        .expect("three sums")
}

fn texts(cluster: &Cluster, database: &str, sql: &str) -> Vec<String> {
    let rows = cluster.connect(database).query(sql, &[]).expect(sql);
    rows.iter().map(|row| row.get(0)).collect()
}

/// Each group as "destination kind count message", by that text.
fn errors(cluster: &Cluster, database: &str) -> Vec<String> {
    let sql = "select format('%s %s %s %s', destination, kind, count, message) from outbox_errors order by 1";
    texts(cluster, database, sql)
}

/// Waits until this number of failures is counted, which happens just after their transaction becomes visible.
fn wait_for_failures(cluster: &Cluster, count: u32) {
    wait_true(
        cluster,
        &format!("{count} failures in outbox_errors"),
        &format!("select coalesce(sum(count), 0) >= {count} from outbox_errors"),
    );
}

// ---- outbox_throughput ----------------------------------------------------------------------------------------------

#[test]
fn throughput_adds_up_to_what_consumers_received_and_what_failed() {
    let conf = ["outbox.retry_backoff = '10ms'", "outbox.workers = 3"];
    let stage = Stage::new(&conf);
    let picky = picky_destination(&stage, stage.broker, "orders", 3);
    assert_eq!(sums(&stage, DB), [0; 3]);
    for _ in 0..20 {
        publish_many(&stage, "default", "Any", 40);
        publish_many(&stage, "orders", "Good", 7);
    }
    publish_many(&stage, "orders", "Bad", 5);
    wait_drained(&stage);
    wait_published(&stage, 20 * 47);
    wait_true(
        &stage,
        "the workers to count",
        "select sum(published_total) = 940 and sum(dead_total) = 5 from outbox_destination_status",
    );
    let got = stage.all().len() + all_of(stage.broker, &picky).len();
    assert_eq!(sums(&stage, DB), [got as i64, 10, 5]); // each bad message was tried three times
    let shape: String = stage.query_one(
        DB,
        "select format('%s %s %s %s', count(*), max(minute) - min(minute),
                       max(minute) = date_trunc('minute', clock_timestamp()),
                       array_agg(minute) = array_agg(minute order by minute)) from outbox_throughput",
    );
    assert!(shape == "61 01:00:00 t t" || shape == "61 01:00:00 f t", "{shape}"); // f: a minute began in between
    let odd: i64 = stage.query_one(
        DB,
        "select count(*) from outbox_throughput
         where published < 0 or (published > 0) <> (p95_ms is not null) or p95_ms <= 0",
    );
    assert_eq!(odd, 0, "a minute with a p95 and nothing published, or the reverse");
}

#[test]
fn the_p95_of_a_minute_is_the_latency_of_the_slow_messages() {
    let cluster = Stage::new(&[]).cluster;
    cluster.exec(DB, "select outbox_pause()");
    wait_paused(&cluster, "default");
    publish_many(&cluster, "default", "Slow", 3);
    wait_true(
        &cluster,
        "the messages to wait",
        "select oldest_pending_age > interval '700 ms' from outbox_destination_status where destination = 'default'",
    );
    cluster.exec(DB, "select outbox_resume()");
    wait_published(&cluster, 3);
    wait_true(
        &cluster,
        "the worker to count",
        "select sum(published) = 3 from outbox_throughput",
    );
    // Nothing else was confirmed, so the statistics of the destination describe the same messages.
    let (minute, all): (f64, f64) = {
        let row = cluster.connect(DB).query_one(
            "select (select max(p95_ms) from outbox_throughput),
                    (select p95_ms::float8 from outbox_destination_status where destination = 'default')",
            &[],
        );
        let row = row.expect("p95");
        (row.get(0), row.get(1))
    };
    assert!(minute > 700.0 / 1.26, "{minute}");
    assert!(
        (0.79..1.26).contains(&(minute / all)),
        "{minute}, and of the destination {all}"
    );
}

#[test]
fn marks_of_a_relay_are_counted_when_the_relay_commits() {
    let cluster = relay_cluster(&[
        "outbox.max_attempts = 2",
        "outbox.retry_backoff = '1ms'",
        "outbox.on_dead = skip",
    ]);
    publish_many(&cluster, "default", "T", 2);
    let mut relay = cluster.connect(DB);
    let (held, second) = (fetch(&mut relay), fetch(&mut relay));
    relay.run("begin");
    fail(&mut relay, held, "rolled back");
    assert_eq!(sums(&cluster, DB), [0; 3]);
    relay.run("rollback");
    assert_eq!(sums(&cluster, DB), [0; 3]);
    relay.run("begin; savepoint s");
    fail(&mut relay, held, "rolled back");
    relay.run("rollback to s; savepoint s");
    fail(&mut relay, held, "no luck");
    relay.run("release s; commit");
    assert_eq!(sums(&cluster, DB), [0, 1, 0]);
    let row = relay.query_one("select outbox_mark_published($1, $2)", &[&second.0, &second.1]);
    assert!(row.expect("mark published").get::<_, bool>(0));
    assert_eq!(sums(&cluster, DB), [1, 1, 0]);
    let in_time = "select max(p95_ms) between 0.1 and 3600000 and count(p95_ms) = 1 from outbox_throughput";
    assert!(cluster.query_one::<bool>(DB, in_time), "also for a relay");
    wait_true(
        &cluster,
        "the failed message to be due",
        "select bool_and(due_at < clock_timestamp()) from outbox_waiting",
    );
    let again = fetch(&mut relay);
    assert_eq!(again.0, held.0);
    fail(&mut relay, again, "no luck");
    assert_eq!(sums(&cluster, DB), [1, 1, 1]);
    // One cause, whether or not it was the last attempt.
    assert_eq!(errors(&cluster, DB), ["default failed 2 no luck"]);
    let attempts =
        "select format('%s %s %s %s', attempt, outcome, error, worker_id is null) from outbox_attempts order by at";
    assert_eq!(
        texts(&cluster, DB, attempts),
        ["1 retried no luck t", "2 dead no luck t"]
    );
}

#[test]
fn each_kind_of_failure_has_the_same_code_in_every_table_and_view() {
    let receiver = Receiver::start(|request| Reply::status(if request.path == "/refuse" { 422 } else { 500 }));
    let stage = Stage::new(&["outbox.max_attempts = 1", "outbox.retry_backoff = '10ms'"]);
    let (exchange, queue) = fresh_names();
    let full = format!("{queue}-full");
    let bounded = json!({"x-max-length": 1, "x-overflow": "reject-publish"});
    stage.broker.declare_exchange(&exchange, "topic", true);
    for (queue, kind, args) in [(&queue, "Good", Value::Null), (&full, "Full", bounded)] {
        stage.broker.declare_queue(queue, args);
        stage.broker.bind(queue, &exchange, kind);
    }
    stage.broker.publish(&exchange, "Full", b"{}");
    stage.exec(DB, "select outbox_pause()");
    stage.exec(
        DB,
        &format!(
            "create server picky foreign data wrapper outbox_amqp options (exchange '{exchange}', routing_key '{{type}}');
             create server later foreign data wrapper outbox_amqp
               options (exchange '{exchange}', routing_key '{{type}}', max_attempts '9', retry_backoff '1h', retry_backoff_max '1h');
             create server failing foreign data wrapper outbox_http options (url '{}');
             create server refusing foreign data wrapper outbox_http options (url '{}');
             select outbox_publish('T', '{{}}', expires_at => clock_timestamp() + interval '100 ms');
             select outbox_publish('Bad', '{{}}', destination => d) from unnest('{{picky,later,failing,refusing}}'::text[]) d;
             select outbox_publish('Full', '{{}}', destination => 'picky')",
            receiver.url("/fail"),
            receiver.url("/refuse")
        ),
    );
    // A message that a queue refuses is charged if others arrive meanwhile.
    wait_until("five dead letters and one that waits", LONG, || {
        publish_many(&stage, "picky", "Good", 1);
        stage.query_one::<bool>(
            DB,
            "select (select count(*) = 5 from outbox_dead) and exists (select from outbox_waiting where destination = 'later')",
        )
    });
    let dead = "select format('%s %s', destination, error_code) from outbox_dead order by 1";
    let five = [
        "default expired",
        "failing failed",
        "picky nacked",
        "picky unroutable",
        "refusing refused",
    ];
    assert_eq!(texts(&stage, DB, dead), five);
    let shown = "select format('%s %s', destination, error_code) from outbox_messages where status = 'dead' order by 1";
    assert_eq!(texts(&stage, DB, shown), five);
    let waiting = "select destination || ' ' || error_code from outbox_waiting";
    assert_eq!(texts(&stage, DB, waiting), ["later unroutable"]);
    let attempts = "select distinct format('%s %s', destination, error_code) from outbox_attempts order by 1";
    let tried = [
        "failing failed",
        "later unroutable",
        "picky nacked",
        "picky unroutable",
        "refusing refused",
    ];
    assert_eq!(texts(&stage, DB, attempts), tried);
    // They are counted just after their transaction becomes visible.
    let mut recorded: Vec<&str> = five.into_iter().chain(["later unroutable"]).collect();
    recorded.sort_unstable();
    let kinds = "select format('%s %s', destination, kind) from outbox_errors
                 where kind in ('nacked', 'unroutable', 'refused', 'unsendable', 'expired', 'failed') order by 1";
    wait_until("each failure in outbox_errors", LONG, || {
        texts(&stage, DB, kinds) == recorded
    });

    // A retry keeps it, and a message that never failed has none.
    stage.exec(DB, "select outbox_pause('refusing')");
    wait_paused(&stage, "refusing");
    stage.exec(
        DB,
        "select outbox_retry(seq, destination) from outbox_dead where destination = 'refusing';
         select outbox_publish('T', '{}', destination => 'refusing')",
    );
    let codes = "select coalesce(error_code, 'none') from outbox_messages where destination = 'refusing' order by seq";
    assert_eq!(texts(&stage, DB, codes), ["refused", "none"]);

    // Of a row of before only the text is known.
    stage.exec(
        DB,
        "update outbox_dead set error_code = null; update outbox_waiting set error_code = null;
         update outbox_attempts_log set error_code = null",
    );
    let unknown = "select distinct error_code from outbox_messages where status in ('dead', 'retrying')
                   union select error_code from outbox_attempts
                   union select m.error_code from outbox_dead d, outbox_internal.message_rows(d.seq) m where m.status = 'dead'";
    assert_eq!(texts(&stage, DB, unknown), ["text"]);
}

#[test]
fn an_expired_message_counts_as_a_failure_of_its_minute_and_not_as_an_attempt() {
    let cluster = Stage::new(&[]).cluster;
    cluster.exec(DB, "select outbox_pause()");
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', expires_at => clock_timestamp() + interval '100 ms')",
    );
    wait_true(&cluster, "a dead letter", "select exists (select from outbox_dead)");
    wait_true(
        &cluster,
        "maintenance to count",
        "select sum(failed) = 1 from outbox_throughput",
    );
    let of_destination = "select sum(failed) from outbox_destination_throughput where length = '1 minute'";
    assert_eq!(
        cluster.query_one::<i64>(DB, &format!("select ({of_destination})::bigint")),
        1
    );
    assert_eq!(sums(&cluster, DB), [0, 0, 1]);
    wait_for_failures(&cluster, 1);
    assert_eq!(
        errors(&cluster, DB),
        ["default expired 1 expired: it was not sent in time"]
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_attempts"), 0);
}

#[test]
fn a_restart_resets_the_statistics_and_keeps_the_attempts() {
    let cluster = relay_cluster(&["outbox.max_attempts = 1"]);
    publish_many(&cluster, "default", "T", 1);
    let mut relay = cluster.connect(DB);
    let held = fetch(&mut relay);
    fail(&mut relay, held, "no luck");
    assert_eq!(sums(&cluster, DB), [0, 0, 1]);
    let before: String = cluster.query_one(DB, "select stats_reset::text from outbox_status");
    drop(relay);
    cluster.stop(StopMode::Immediate);
    cluster.start_again();
    wait_true(
        &cluster,
        "the counters",
        "select exists (select from outbox_throughput)",
    );
    assert_eq!(sums(&cluster, DB), [0; 3]);
    assert_eq!(errors(&cluster, DB), Vec::<String>::new());
    assert!(cluster.query_one::<bool>(DB, &format!("select stats_reset > '{before}' from outbox_status")));
    assert_eq!(texts(&cluster, DB, "select outcome from outbox_attempts"), ["dead"]);
}

// ---- outbox_errors --------------------------------------------------------------------------------------------------

#[test]
fn failures_with_one_cause_share_a_row_and_a_success_adds_none() {
    let stage = Stage::new(&["outbox.retry_backoff = '10ms'"]);
    picky_destination(&stage, stage.broker, "orders", 3);
    publish_many(&stage, "default", "Any", 20);
    publish_many(&stage, "orders", "Good", 20);
    wait_published(&stage, 40);
    assert_eq!(errors(&stage, DB), Vec::<String>::new());
    publish_many(&stage, "orders", "Bad", 4);
    stage.draw_seqs(70_123);
    stage.exec(DB, "select outbox_enqueue(555, 'k'), outbox_enqueue(70123, 'other')"); // their events do not exist
    wait_drained(&stage);
    wait_for_failures(&stage, 14);
    let groups = errors(&stage, DB);
    let [missing, unroutable] = &groups[..] else {
        panic!("{groups:?}")
    };
    assert_eq!(missing, "default unsendable 2 the event store has no event with seq #");
    assert!(
        unroutable.starts_with("orders unroutable 12 unroutable: no queue is bound to exchange")
            && unroutable.ends_with("for routing key \"Bad\" (312 NO_ROUTE)"),
        "{unroutable}"
    );
    let of_each =
        "select bool_and(exists (select from outbox_dead d where d.seq = e.last_seq and d.destination = e.destination))
                   from outbox_errors e";
    assert!(
        stage.query_one::<bool>(DB, of_each),
        "the last message is one of the failed ones"
    );
    assert!(stage.query_one::<bool>(
        DB,
        "select bool_and(first_at <= last_at and last_at <= clock_timestamp()) from outbox_errors"
    ));
    // The most recent group comes first.
    publish_many(&stage, "orders", "Bad", 1);
    wait_for_failures(&stage, 17);
    assert_eq!(
        texts(&stage, DB, "select destination || ' ' || count from outbox_errors"),
        ["orders 15", "default 2"]
    );
}

#[test]
fn a_destination_that_goes_down_is_recorded_as_one_failure_each_time() {
    let cluster = unconnected_cluster(&format!("amqp://127.0.0.1:{}", dead_port()), "nowhere", &[]);
    wait_true(
        &cluster,
        "the destination to be down",
        "select bool_or(state = 'down') from outbox_destination_status",
    );
    wait_for_failures(&cluster, 1);
    let found = errors(&cluster, DB);
    assert!(
        found.len() == 1 && found[0].starts_with("default unreachable 1 ") && found[0].contains("Connection refused"),
        "{found:?}"
    );
    assert!(cluster.query_one::<bool>(DB, "select last_seq is null from outbox_errors"));
}

#[test]
fn error_groups_are_bounded_in_number_and_length_and_the_oldest_is_evicted() {
    let cluster = relay_cluster(&["outbox.max_attempts = 1", "outbox.on_dead = skip"]);
    publish_many(&cluster, "default", "T", 121);
    let mut relay = cluster.connect(DB);
    for n in 0..120_u8 {
        let word: String = [b'a' + n / 26, b'a' + n % 26].map(char::from).iter().collect();
        let held = fetch(&mut relay);
        fail(&mut relay, held, &format!("cause {word}"));
    }
    let found = errors(&cluster, DB);
    assert_eq!(found.len(), 100);
    let of = |found: &[String], word: &str| found.iter().any(|line| line.ends_with(&format!("cause {word}")));
    assert!(of(&found, "ep") && of(&found, "au") && !of(&found, "at"), "{found:?}"); // the last 100 of 0 to 119
    let held = fetch(&mut relay);
    fail(&mut relay, held, &"ä".repeat(300));
    let longest: i32 = cluster.query_one(DB, "select max(length(message)) from outbox_errors");
    assert!((90..=200).contains(&longest), "{longest} characters");
    assert_eq!(errors(&cluster, DB).len(), 100);
}

#[test]
fn each_database_has_its_own_statistics_and_a_new_extension_starts_empty() {
    let cluster = relay_cluster(&["outbox.max_attempts = 1"]);
    cluster.exec(DB, "create database shop");
    cluster.exec("shop", "create extension outbox; select outbox_pause()");
    support::wait_until("the counters of the other database", support::LONG, || {
        cluster.query_one::<bool>("shop", "select exists (select from outbox_throughput)")
    });
    cluster.exec("shop", "select outbox_publish('T', '{}')");
    let mut relay = cluster.connect("shop");
    let held = fetch(&mut relay);
    fail(&mut relay, held, "no luck");
    assert_eq!(sums(&cluster, "shop"), [0, 0, 1]);
    assert_eq!(errors(&cluster, "shop"), ["default failed 1 no luck"]);
    assert_eq!(sums(&cluster, DB), [0; 3]);
    assert_eq!(errors(&cluster, DB), Vec::<String>::new());
    cluster.exec("shop", "drop extension outbox; create extension outbox");
    assert_eq!(errors(&cluster, "shop"), Vec::<String>::new());
}

// ---- outbox_attempts ------------------------------------------------------------------------------------------------

#[test]
fn a_message_that_fails_three_times_and_then_succeeds_shows_three_attempts() {
    let requests = AtomicUsize::new(0);
    let receiver = Receiver::start(move |_| match requests.fetch_add(1, Ordering::SeqCst) {
        0..3 => Reply::status(500),
        _ => Reply::status(200),
    });
    let conf = ["outbox.http_allow = '127.0.0.1'", "outbox.retry_backoff = '10ms'"];
    let cluster = unconnected_cluster("", "nowhere", &conf);
    let url = receiver.url("/in");
    cluster.exec(
        DB,
        &format!("create server hook foreign data wrapper outbox_http options (url '{url}')"),
    );
    publish_many(&cluster, "hook", "T", 1);
    wait_published(&cluster, 1);
    let attempts = "select format('%s %s %s %s %s %s', a.seq, a.destination, a.attempt, a.outcome, a.worker_id,
                                  a.at between h.enqueued_at and h.published_at)
                    from outbox_attempts a left join outbox_history h on h.seq = a.seq order by a.at";
    let three = [
        "1 hook 1 retried server-1 t",
        "1 hook 2 retried server-1 t",
        "1 hook 3 retried server-1 t",
    ];
    assert_eq!(texts(&cluster, DB, attempts), three);
    let errors_sql = "select distinct error from outbox_attempts";
    assert_eq!(texts(&cluster, DB, errors_sql), ["HTTP 500 Internal Server Error"]);
    publish_many(&cluster, "hook", "T", 1);
    wait_published(&cluster, 2);
    assert_eq!(
        texts(&cluster, DB, attempts),
        three,
        "a message sent at the first attempt has none"
    );
    let history = "select string_agg(attempts::text, ' ' order by seq) from outbox_history";
    assert_eq!(cluster.query_one::<String>(DB, history), "4 1");
    wait_for_failures(&cluster, 3);
    wait_true(
        &cluster,
        "the count of both",
        "select sum(published) = 2 from outbox_throughput",
    );
    assert_eq!(sums(&cluster, DB), [2, 3, 0]);
    assert_eq!(errors(&cluster, DB), ["hook failed 3 HTTP 500 Internal Server Error"]);
}

#[test]
fn the_last_twenty_attempts_are_kept_until_their_message_is_removed() {
    let cluster = relay_cluster(&[
        "outbox.max_attempts = 26",
        "outbox.retry_backoff = '1ms'",
        "outbox.retry_backoff_max = '1ms'",
    ]);
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'customer', 'mallory'), outbox_publish('T', '{}', 'customer', 'bob')",
    );
    let mut relay = cluster.connect(DB);
    let mut tried = 0;
    while tried < 52 {
        let due = "select exists (select from outbox) or exists (select from outbox_waiting where due_at <= clock_timestamp())";
        wait_true(&cluster, "a message to be due", due);
        let held = fetch(&mut relay);
        fail(&mut relay, held, "no luck with seq 7");
        tried += 1;
    }
    let kept = "select format('%s %s %s %s', seq, count(*), min(attempt), max(attempt)) from outbox_attempts group by seq order by seq";
    assert_eq!(texts(&cluster, DB, kept), ["1 20 7 26", "2 20 7 26"]);
    let last = "select outcome from outbox_attempts where attempt = 26";
    assert_eq!(texts(&cluster, DB, last), ["dead", "dead"]);

    // A dead letter keeps its attempts, however old they are.
    let trim = "select removed from outbox_internal.trim_attempts(0, 60, 1000, clock_timestamp() + interval '1 hour')";
    assert_eq!(cluster.query_one::<i64>(DB, trim), 0);
    cluster.exec(DB, "select outbox_discard(1)");
    let early = "select removed from outbox_internal.trim_attempts(0, 60, 1000)";
    assert_eq!(cluster.query_one::<i64>(DB, early), 0);
    let in_pieces = "select format('%s %s %s', reached, removed, more) from outbox_internal.trim_attempts(0, 60, 10, clock_timestamp() + interval '1 hour')";
    assert_eq!(texts(&cluster, DB, in_pieces), ["1 20 t"]);
    assert_eq!(texts(&cluster, DB, kept), ["2 20 7 26"]);

    // Erasure.
    let purged =
        "select rows from outbox_purge('customer', 'bob', dry_run => false) where table_name = 'outbox_attempts_log'";
    assert_eq!(cluster.query_one::<i64>(DB, &purged.replace("false", "true")), 20);
    assert_eq!(cluster.query_one::<i64>(DB, purged), 20);
    assert_eq!(texts(&cluster, DB, kept), Vec::<String>::new());
}

#[test]
fn maintenance_removes_old_attempts_with_the_history() {
    let cluster = Stage::new(&[]).cluster;
    cluster.exec(
        DB,
        "insert into outbox_attempts_log
         select n, 'default', now() - n * interval '10 days', 1, 'retried', 'no luck', null from generate_series(1, 5) n;
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, reason)
         values (5, now(), 1, 0, 'default', 'no luck');
         alter database postgres set outbox.retention = '25 d'",
    );
    wait_true(
        &cluster,
        "the old attempts to be removed",
        "select array_agg(seq order by seq) = '{1,2,5}' from outbox_attempts",
    );
}

// ---- outbox_passes --------------------------------------------------------------------------------------------------

#[test]
fn the_passes_of_all_workers_add_up_and_have_the_keys_of_a_pass() {
    let conf = ["outbox.retry_backoff = '10ms'", "outbox.workers = 2"];
    let stage = Stage::new(&conf);
    picky_destination(&stage, stage.broker, "orders", 3);
    publish_many(&stage, "default", "Any", 50);
    publish_many(&stage, "orders", "Bad", 2);
    wait_drained(&stage);
    wait_published(&stage, 50);
    wait_true(
        &stage,
        "the passes to be recorded",
        "select coalesce(sum(claimed) = 56 and sum(published) = 50 and sum(failed) = 6, false) from outbox_passes",
    );
    // Both workers have taken their leases in one of the passes.
    let shares =
        "select format('%s %s', worker_id, sum(leased_count) > 0) from outbox_passes group by worker_id order by 1";
    assert_eq!(texts(&stage, DB, shares), ["server-1 t", "server-2 t"]);
    let columns = "select attname::text from pg_attribute where attrelid = 'outbox_passes'::regclass and attnum > 2";
    let columns: BTreeSet<String> = texts(&stage, DB, columns).into_iter().collect();
    let keys: BTreeSet<String> = texts(&stage, DB, "select jsonb_object_keys(outbox_run_pass())")
        .into_iter()
        .collect();
    assert_eq!(columns, keys);
    assert_eq!(keys.len(), 13);
    let odd: i64 = stage.query_one(
        DB,
        "select count(*) from outbox_passes
         where claimed + published + failed + purged_stale + leased_count + released_count = 0 or duration_ms < 0
            or at > clock_timestamp() or active_workers not in (1, 2) or ts::timestamptz <> date_trunc('second', at)",
    );
    assert_eq!(odd, 0, "a pass without work or with a wrong time");
}

#[test]
fn the_passes_of_a_worker_are_bounded_and_the_oldest_is_evicted() {
    let cluster = Stage::new(&[]).cluster;
    let mut client = cluster.connect(DB);
    for n in 1..=130 {
        client.run("select outbox_publish('T', '{}')");
        wait_published(&cluster, n);
    }
    wait_true(
        &cluster,
        "120 passes",
        "select count(*) = 120 and min(leased_count) = 0 and max(leased_count) = 0 from outbox_passes",
    );
}

// ---- without the library --------------------------------------------------------------------------------------------

#[test]
fn without_preload_the_views_are_empty_and_health_reports_why() {
    let cluster = Cluster::builder().preload(false).start();
    cluster.exec(DB, "create extension outbox");
    for view in ["outbox_throughput", "outbox_errors", "outbox_attempts", "outbox_passes"] {
        let rows: i64 = cluster.query_one(DB, &format!("select count(*) from {view}"));
        assert_eq!(rows, 0, "{view}");
    }
    assert!(!support::health(&cluster, "preload").0);
}

/// The planner may evaluate a function in FROM several times a row. Its result changes while messages come and go.
#[test]
fn no_view_fails_while_messages_come_and_go() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "even.#");
    let conf = [
        "outbox.retry_backoff = '1ms'",
        "outbox.retry_backoff_max = '5ms'",
        "outbox.routing_key = '{aggregate_type}.x'",
    ];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    let views: Vec<String> = cluster.query_one(
        DB,
        "select array_agg(format('%s', c.oid::regclass) order by 1) from pg_class c
         join pg_depend d on d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e'
         where c.relkind = 'v' and c.relnamespace = 'public'::regnamespace",
    );
    assert!(views.iter().any(|view| view == "outbox_health"), "{views:?}");
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for kind in ["even", "odd"] {
            let (cluster, ended) = (&cluster, &ended);
            scope.spawn(move || {
                let mut client = cluster.connect(DB);
                for n in 0.. {
                    if ended.load(Ordering::Acquire) {
                        return;
                    }
                    client.run(&format!("select outbox_publish('T', '{{}}', '{kind}', '{}')", n % 50));
                }
            });
        }
        let mut client = cluster.connect(DB);
        let read = || {
            for round in 0..60 {
                for view in &views {
                    if let Err(error) = client.simple_query(&format!("select * from {view}")) {
                        return Some(format!("{view}, round {round}: {error:?}"));
                    }
                }
            }
            None
        };
        let failed = { read }();
        ended.store(true, Ordering::Release);
        assert_eq!(failed, None);
    });
}
