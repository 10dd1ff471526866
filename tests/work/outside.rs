//! Tests of delivery by workers outside the server: they lose, duplicate and reorder nothing, alone and beside
//! background workers. This holds also when they start, stop or are killed, and when the server is.

use std::time::{Duration, SystemTime};

use serde_json::json;
use support::{Broker, Consumer, Receiver, Reply, process, wait_for};

use super::{Outside, make_courier, wait_for_file, wait_for_shares, wait_for_total, without_workers};
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::{arrived, judge};
use support::{
    DB, LONG, Remedy, Session, Stage, all_of, as_survived, create_destinations, exchange_and_queue,
    exchange_and_queue_with, extremes, miss_standby, refused, wait_drained, wait_healthy, wait_published, wait_true,
    within,
};

fn plan() -> Plan {
    Plan {
        keys: 200,
        writers: 4,
        mixed: true,
        ..Plan::default()
    }
}

#[test]
fn large_messages_reach_work_without_a_temporary_file() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue_with(broker, json!({"x-max-length": 1}));
    let cluster = without_workers(broker, &exchange, &["work_mem = '256kB'"]);
    cluster.exec(
        DB,
        "select outbox_publish('T', jsonb_build_object('text', repeat('x', 1000000)), 'o', i::text)
         from generate_series(1, 60) i",
    );
    let outside = Outside::start(&cluster, "porter");
    wait_drained(&cluster);
    wait_published(&cluster, 60);
    let temporary = "select temp_files from pg_stat_database where datname = current_database()";
    assert_eq!(outside.stop(), Some(0));
    assert_eq!(cluster.query_one::<i64>(DB, temporary), 0, "temporary files");
}

#[test]
fn an_idle_worker_outside_waits_in_the_server_and_reads_shared_memory_once_a_pass() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &["track_functions = all"]);
    create_destinations(&cluster, "d", 50, "outbox_http", "url 'http://127.0.0.1:1/'");
    let outside = Outside::start(&cluster, "idler");
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    wait_published(&cluster, 1);
    let calls = || -> Vec<i64> {
        let sql = "select array(select coalesce((select s.calls from pg_stat_user_functions s where s.funcname = f), 0)
                                from unnest('{work_lease,work_rewinds,work_wait}'::text[]) f)";
        cluster.query_one(DB, sql)
    };
    // It renews its leases every five seconds, and each wait takes a second.
    let is_idle = || {
        let first = calls();
        let last = wait_for("its leases, twice", LONG, || {
            Some(calls()).filter(|calls| calls[0] > first[0] + 1)
        });
        let [leases, rewinds, waits] = [0, 1, 2].map(|n| last[n] - first[n]);
        Some(()).filter(|()| waits <= 20 * leases && rewinds <= waits + leases)
    };
    wait_for("it to wait", LONG, is_idle);
    assert_eq!(outside.stop(), Some(0));
}

#[test]
fn work_delivers_all_in_order_without_background_workers() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    let load = Load::start(&cluster, &plan());
    load.wait_for_more(100); // a backlog
    let outside = Outside::start(&cluster, "alone");
    load.wait_for_more(400);
    let sent = load.stop();
    wait_drained(&cluster);
    let arrived = arrived(&all_of(broker, &queue));
    judge(&sent, &arrived).assert_perfect();
    // Its messages count in the same statistics as those of background workers.
    wait_for_total(&cluster, arrived.len() as i64);
    wait_healthy(&cluster, "workers");
    let unasked = refused(&cluster, "select outbox_run_pass()");
    assert!(
        unasked.detail().is_some_and(|why| why.contains("outside")),
        "{unasked:?}"
    );
    let by_minute = "select sum(published)::bigint, bool_or(p95_ms > 0) from outbox_throughput";
    let row = cluster.connect(DB).query_one(by_minute, &[]).expect("throughput");
    assert_eq!(
        (row.get::<_, i64>(0), row.get::<_, bool>(1)),
        (arrived.len() as i64, true)
    );
    let of_destination = "select published_total, pending, in_flight, p50_ms > 0 from outbox_destination_status";
    let row = cluster.connect(DB).query_one(of_destination, &[]).expect("statistics");
    assert_eq!(row.get::<_, i64>(0), arrived.len() as i64);
    assert!(row.get::<_, bool>(3), "the latencies");
    wait_true(
        &cluster,
        "nothing to be in flight",
        "select in_flight = 0 and pending = 0 from outbox_status",
    );

    assert_eq!(outside.stop(), Some(0));
    let gone = "select not exists (select from outbox_workers) and not exists (select from outbox_partitions where lease_owner is not null)";
    assert!(cluster.query_one::<bool>(DB, gone), "the worker released everything");
}

#[test]
fn twenty_messages_sent_one_by_one_do_not_wait_for_the_poll() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &["outbox.idle_backoff = '1s'"]);
    let _outside = Outside::start(&cluster, "awake");
    let consumer = Consumer::new(broker, &queue);
    let mut client = cluster.connect(DB);
    // With polling each message would take a second: the worker has nothing more to do for the previous one.
    within("twenty messages", Duration::from_secs(10), || {
        for n in 1..=20 {
            client
                .execute("select outbox_publish('T', '{}', 'item', 'a', 'x')", &[])
                .expect("publish");
            consumer.next();
            wait_published(&cluster, n);
        }
    });
}

#[test]
fn background_workers_and_work_together_lose_duplicate_and_reorder_nothing() {
    let stage = Stage::new(&["outbox.workers = 2"]);
    make_courier(&stage);
    let load = Load::start(&stage, &plan());
    let first = Outside::start(&stage, "first");
    wait_for_shares(&stage, 3);
    let _second = Outside::start(&stage, "second");
    wait_for_shares(&stage, 4);
    load.wait_for_more(400);
    let of_outside = "select count(*) = 2 from outbox_worker_status where worker_id like 'work-%' and partitions = 4";
    assert!(stage.query_one::<bool>(DB, of_outside));
    assert_eq!(first.stop(), Some(0));
    wait_for_shares(&stage, 3);
    let _third = Outside::start(&stage, "third");
    wait_for_shares(&stage, 4);
    load.wait_for_more(400);
    let sent = load.stop();
    wait_drained(&stage);
    judge(&sent, &arrived(&all_of(stage.broker, &stage.queue))).assert_perfect();
}

#[test]
fn the_partitions_of_a_killed_worker_move_within_the_lease_and_nothing_is_lost() {
    let conf = [
        "outbox.lease_ttl = '8s'",
        "outbox.lease_renew = '1s'",
        "outbox.heartbeat_ttl = '1h'",
    ];
    let stage = Stage::new(&conf);
    make_courier(&stage);
    let load = Load::start(&stage, &plan());
    let outside = Outside::start(&stage, "doomed");
    wait_for_shares(&stage, 2);
    load.wait_for_more(200);
    let mut faults = Faults::default();
    faults.during(1, || {
        outside.kill();
        wait_true(
            &stage,
            "the background worker to own all partitions",
            "select partitions = 16 from outbox_worker_status where worker_id = 'server-1'",
        );
    });
    load.wait_for_more(100);
    let sent = load.stop();
    wait_drained(&stage);
    let verdict = judge(&sent, &arrived(&all_of(stage.broker, &stage.queue)));
    faults.assert_explain(&verdict, &messages(&stage));
}

#[test]
fn a_worker_suspended_past_its_lease_sends_nothing_more_and_resumes_when_it_wakes() {
    let conf = ["outbox.lease_ttl = '8s'", "outbox.lease_renew = '1s'"];
    let stage = Stage::new(&conf);
    make_courier(&stage);
    let load = Load::start(&stage, &plan());
    let output = stage.data_dir().join("output");
    let outside = Outside::start_with_log(&stage, "drowsy", &output);
    wait_for_shares(&stage, 2);
    load.wait_for_more(100);
    let pid = outside.child.as_ref().expect("it runs").id();
    let (mut faults, began) = (Faults::default(), SystemTime::now());
    process::signal(pid, libc::SIGSTOP);
    wait_true(
        &stage,
        "the background worker to own all partitions",
        "select partitions = 16 from outbox_worker_status where worker_id = 'server-1'",
    );
    load.wait_for_more(100);
    process::signal(pid, libc::SIGCONT);
    wait_for_file(&output, "the worker to notice", |output| {
        output.contains("the leases have run out")
    });
    wait_for_shares(&stage, 2);
    faults.hung_since(began, 1);
    load.wait_for_more(100);
    let sent = load.stop();
    wait_drained(&stage);
    let verdict = judge(&sent, &arrived(&all_of(stage.broker, &stage.queue)));
    faults.assert_explain(&verdict, &messages(&stage));
}

#[test]
fn a_sent_message_is_on_disk_even_if_its_commit_was_asynchronous() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    // Only workers flush commits to disk.
    let conf = ["wal_writer_delay = '10s'", "wal_writer_flush_after = '1GB'"];
    let cluster = without_workers(broker, &exchange, &conf);
    let _outside = Outside::start(&cluster, "durable");
    let consumer = Consumer::new(broker, &queue);
    // A settle flushes everything before it to disk, so no settle may run in between.
    let mut holder = cluster.connect(DB);
    holder.run("begin; select from outbox_partitions for update");
    let mut client = cluster.connect(DB);
    client.run("set synchronous_commit = off; select outbox_publish('T', '{}', 'item', 'a', 'x')");
    consumer.next();
    cluster.kill_postmaster();
    cluster.start_again();
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_events"), 1);
}

/// The settings that the server accepts for a role, though only a superuser may set some of them.
#[test]
fn work_delivers_under_any_setting_of_its_role() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    let consumer = Consumer::new(broker, &queue);
    let mut client = cluster.connect(DB);
    for round in 0..extremes::ROUNDS {
        let mut settings = extremes::of_round(&mut client, round);
        // Some settings may be intended for a role, and with a missing library Postgres lets no session begin.
        let is_not_its_own =
            |name: &str| name.contains("role") || name.contains("authorization") || name.contains("preload");
        settings.retain(|(name, _)| name == "session_replication_role" || !is_not_its_own(name));
        let taken = extremes::set(&mut client, "role courier", &settings);
        assert!(taken > 130, "{taken} settings were taken");
        let outside = Outside::start(&cluster, &format!("odd{round}"));
        client.run("select outbox_publish('T', '1', 'thing', '1')");
        consumer.next();
        wait_drained(&cluster);
        assert_eq!(outside.stop(), Some(0), "round {round}");
        client.run("alter role courier reset all");
    }
}

#[test]
fn no_commit_of_work_waits_for_a_missing_standby() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    miss_standby(&cluster);
    let outside = Outside::start(&cluster, "alone");
    let load = Load::start(&cluster, &plan());
    load.wait_for_more(200);
    let sent = load.stop();
    wait_drained(&cluster);
    judge(&sent, &arrived(&all_of(broker, &queue))).assert_perfect();
    assert_eq!(outside.stop(), Some(0));
}

#[test]
fn server_crashes_lose_and_reorder_nothing_and_work_reconnects_by_itself() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    // Only workers and producers flush commits to disk.
    let conf = [
        "wal_writer_delay = '10s'",
        "wal_writer_flush_after = '1GB'",
        "outbox.lease_ttl = '6s'",
    ];
    let cluster = without_workers(broker, &exchange, &conf);
    let _outside = Outside::start(&cluster, "steady");
    let asynchronous = Plan {
        synchronous_commit: false,
        writers: 8,
        ..plan()
    };
    let load = Load::start(&cluster, &asynchronous);
    let mut faults = Faults::default();
    for _ in 0..4 {
        load.wait_for_more(400);
        faults.during(1, || {
            cluster.kill_postmaster();
            cluster.start_again();
            // The worker reconnects by itself, with a new session and a new name.
            wait_true(
                &cluster,
                "the worker to be back",
                "select exists (select from outbox_worker_status where alive and state = 'connected' and partitions = 16)",
            );
        });
        load.wait_for_more(100);
    }
    let sent = load.stop();
    wait_drained(&cluster);
    let survived = as_survived(&cluster, &sent);
    let verdict = judge(&survived, &arrived(&all_of(broker, &queue)));
    faults.assert_explain(&verdict, &messages(&cluster));
}

#[test]
fn changing_the_number_of_partitions_beside_work_loses_duplicates_and_reorders_nothing() {
    let stage = Stage::new(&[]);
    make_courier(&stage);
    let _outside = Outside::start(&stage, "flexible");
    wait_for_shares(&stage, 2);
    let load = Load::start(&stage, &plan());
    for count in [5, 16] {
        load.wait_for_more(100);
        stage.exec(DB, &format!("select outbox_configure(partition_count => {count})"));
        wait_true(
            &stage,
            "both workers to own partitions again",
            "select count(*) = 2 and sum(partitions) = (select partition_count from outbox_settings)
             from outbox_worker_status where alive and partitions > 0 and state = 'connected'",
        );
    }
    load.wait_for_more(100);
    let sent = load.stop();
    wait_drained(&stage);
    judge(&sent, &arrived(&all_of(stage.broker, &stage.queue))).assert_perfect();
}

#[test]
fn with_leasing_off_each_message_is_sent_once() {
    let stage = Stage::new(&["outbox.leasing = off"]);
    make_courier(&stage);
    let _outside = Outside::start(&stage, "loose");
    let load = Load::start(&stage, &plan());
    load.wait_for_more(400);
    let sent = load.stop();
    wait_drained(&stage);
    Faults::default().assert_explain_repeats(
        &judge(&sent, &arrived(&all_of(stage.broker, &stage.queue))),
        &messages(&stage),
    );
}

#[test]
fn named_destinations_use_the_user_mapping_of_the_role_of_work() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let receiver = Receiver::start(|_| Reply::status(204));
    let cluster = without_workers(broker, &exchange, &["outbox.http_allow = '127.0.0.1'"]);
    cluster.exec(
        DB,
        &format!(
            "create server hook foreign data wrapper outbox_http options (url '{}');
             grant usage on foreign server hook to courier;
             create user mapping for courier server hook options (bearer_token 'of-the-courier');
             create user mapping for outbox_worker server hook options (bearer_token 'of-the-worker');",
            receiver.url("/")
        ),
    );
    let _outside = Outside::start(&cluster, "postman");
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'item', n::text, 'x', destination => d)
         from generate_series(1, 5) n, unnest(array['hook', 'default']) d",
    );
    wait_published(&cluster, 10);
    assert_eq!(all_of(broker, &queue).len(), 5);
    let requests = receiver.requests();
    assert_eq!(requests.len(), 5);
    for request in requests {
        assert_eq!(request.header("authorization"), "Bearer of-the-courier");
    }
}

#[test]
fn a_worker_outside_posts_nothing_without_the_secret_of_the_destination() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let receiver = Receiver::start(|_| Reply::status(204));
    let cluster = without_workers(broker, &exchange, &["outbox.http_allow = '127.0.0.1'"]);
    cluster.exec(
        DB,
        &format!(
            "create server hook foreign data wrapper outbox_http options (url '{}');
             create user mapping for outbox_worker server hook options (bearer_token 'of-the-worker')",
            receiver.url("/")
        ),
    );
    let _outside = Outside::start(&cluster, "postman");
    cluster.exec(DB, "select outbox_publish('T', '{}', destination => 'hook')");
    let remedy = |problem: &str| {
        let condition = format!(r#""check" = 'destination' and destination = 'hook' and problem = '{problem}'"#);
        Remedy::wait(&cluster, &condition)
    };
    let create = remedy("there is a user mapping for outbox_worker and none for courier");
    cluster.exec(
        DB,
        &create
            .command()
            .replace(" OPTIONS (signing_secret :'signing_secret')", ""),
    );
    let grant = remedy("courier cannot read its user mapping without USAGE on the server");
    cluster.exec(DB, grant.command());
    let fill = remedy("the user mapping for courier is empty");
    assert_eq!(receiver.requests().len(), 0);
    let token = fill
        .command()
        .replace("signing_secret :'signing_secret'", "bearer_token 'of-the-courier'");
    cluster.exec(DB, &token);
    wait_published(&cluster, 1);
    let requests = receiver.requests();
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].header("authorization"), "Bearer of-the-courier");
}

/// A source with events of each kind: to be sent, one whose type is NULL, one that takes longer than a worker waits,
/// and one that is gone.
const JOURNAL: &str = "create schema desk; create role clerk; grant usage, create on schema desk to clerk; set role clerk;
    create table desk.journal (position bigint generated always as identity primary key, kind text, at timestamptz default now(), body jsonb);
    create function desk.slow(body jsonb) returns jsonb language plpgsql as $$
      begin while body ? 'slow' loop null; end loop; return body; end $$;
    reset role;
    select outbox_source_set('desk.journal', seq => 'position', type => 'kind', created_at => 'at', payload => 'desk.slow(body)',
                             key => $$'k' || position$$);";

#[test]
fn work_delivers_the_events_of_a_source_and_charges_a_row_that_fails_alone() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    cluster.exec(DB, JOURNAL);
    let outside = Outside::start(&cluster, "reader");
    cluster.exec(
        DB,
        "with e as (insert into desk.journal (kind, body)
           select case i when 3 then null else 'T' end, case i when 4 then '{\"slow\": 1}' else jsonb_build_object('n', i) end
           from generate_series(1, 9) i returning position)
         select outbox_enqueue(position) from e;
         delete from desk.journal where position = 5",
    );
    wait_published(&cluster, 6);
    wait_true(
        &cluster,
        "the other three",
        "select (select count(*) from outbox_waiting where seq = 3 and last_error like '%its type is NULL%'
                                                         or seq = 4 and last_error like '%statement timeout%')
              + (select count(*) from outbox_dead where seq = 5 and reason like '%has no row%') = 3",
    );
    let mut sent: Vec<i64> = (all_of(broker, &queue).iter())
        .map(|delivery| delivery.json()["payload"]["n"].as_i64().expect("a number"))
        .collect();
    sent.sort_unstable();
    assert_eq!(sent, [1, 2, 6, 7, 8, 9]);
    assert_eq!(outside.stop(), Some(0));
}

#[test]
fn a_source_that_cannot_be_read_holds_the_messages_of_work_until_it_is_fixed() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    cluster.exec(DB, JOURNAL);
    let outside = Outside::start(&cluster, "patient");
    cluster.exec(
        DB,
        "alter table desk.journal rename body to text;
         with e as (insert into desk.journal (kind, text) select 'T', '{}' from generate_series(1, 20) returning position)
         select outbox_enqueue(position, 'k' || position) from e",
    );
    wait_true(
        &cluster,
        "a claim",
        "select n_tup_upd > 0 from pg_stat_user_tables where relid = 'outbox'::regclass",
    );
    cluster.exec(DB, "alter table desk.journal rename text to body");
    wait_published(&cluster, 20);
    assert_eq!(all_of(broker, &queue).len(), 20);
    let charged = "select count(*) from outbox_history where attempts > 1";
    assert_eq!(cluster.query_one::<i64>(DB, charged), 0, "no attempt is charged");
    assert_eq!(outside.stop(), Some(0));
}

#[test]
fn a_worker_outside_reads_no_event_that_it_has_not_claimed() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    cluster.exec(DB, JOURNAL);
    cluster.exec(
        DB,
        "with e as (insert into desk.journal (kind, body) values ('T', '{}') returning position)
         select outbox_enqueue(position) from e",
    );
    let mut session = cluster.connect(DB);
    let worker: String = session
        .query_one("select worker from outbox_internal.work_begin('spy')", &[])
        .expect("a worker")
        .get(0);
    let sql = "select count(*) from outbox_internal.work_events($1, array(select ctid from outbox), 1000000)";
    let read: i64 = session.query_one(sql, &[&worker]).expect("no event").get(0);
    assert_eq!(read, 0);
}
