//! Tests what happens to the leases when a worker is stopped in the middle of a transaction, when the machine is
//! suspended, and when the clock is set.

use std::time::Duration;

use support::clock::cluster_with_clock;
use support::courier::{Outside, make_courier};
use support::wait::try_wait_for;
use support::{Broker, Consumer, process, wait_for, wait_until};

use support::*;

#[test]
fn health_names_the_process_that_locks_leases_and_the_partitions_return_when_it_resumes() {
    let broker = Broker::start();
    let (exchange, _) = exchange_and_queue(&broker);
    let conf = [
        "outbox.workers = 2",
        "outbox.lease_ttl = '2s'",
        "outbox.lease_renew = '1s'",
        "outbox.heartbeat_ttl = '2s'",
    ];
    let cluster = outbox_cluster_with(&broker, &exchange, &conf);
    assert!(health(&cluster, "locks").0);
    let mut holder = cluster.connect(DB);
    // Another worker may wait for the leases that this one has locked. A worker that has taken them over may wait with
    // a claim, which locks no leases.
    let waits = format!(
        "select max(pid) from pg_stat_activity
         where backend_type = 'outbox worker' and query = 'outbox: settle' and {} = any (pg_blocking_pids(pid))",
        holder.value::<i32>("select pg_backend_pid()")
    );
    let stop_one = || {
        let pid = cluster.query_one::<Option<i32>>(DB, &waits)?;
        process::suspend(pid as u32);
        let still = cluster.query_one::<Option<i32>>(DB, &waits) == Some(pid);
        if !still {
            process::signal(pid as u32, libc::SIGCONT);
        }
        still.then_some(pid)
    };
    // A settle locks the leases before it waits for a row. A worker that has lost its leases before never waits; then
    // there is another message.
    let stopped = wait_for("a worker that is stopped while it settles", LONG, || {
        broker.suspend();
        cluster.publish("1");
        wait_true(
            &cluster,
            "the message to be in flight",
            "select in_flight > 0 from outbox_status",
        );
        holder.run("begin; select from outbox for update");
        broker.resume();
        let stopped = try_wait_for(Duration::from_secs(10), stop_one);
        if stopped.is_none() {
            holder.run("commit");
            wait_drained(&cluster);
        }
        stopped
    });
    holder.run("commit");
    let named = format!("process {stopped} (outbox worker) has had rows");
    let remedy = wait_for("health to name the stopped worker", LONG, || {
        // One query: a slow process may be named at times.
        let check = r#"select coalesce(problem, ''), remedy from outbox_health where "check" = 'locks'"#;
        let row = holder.query_one(check, &[]).expect("outbox_health");
        row.get::<_, String>(0)
            .starts_with(&named)
            .then(|| row.get::<_, String>(1))
    });
    assert!(remedy.contains(&format!("kill -CONT {stopped}")), "{remedy}");
    process::signal(stopped as u32, libc::SIGCONT);
    wait_healthy(&cluster, "locks");
    wait_drained(&cluster);
}

#[test]
fn health_names_a_worker_that_hangs_and_the_remedy_ends_that() {
    let conf = [
        "outbox.lease_ttl = '2s'",
        "outbox.lease_renew = '1s'",
        "outbox.heartbeat_ttl = '2s'",
    ];
    let stage = Stage::new(&conf);
    let pid: i32 = stage.query_one(DB, "select pid from outbox_workers");
    suspend_worker(&stage, pid as u32);
    let problem = wait_for_problem(&stage, "workers");
    let hangs = format!("server-1 hangs: its process {pid} wrote its last heartbeat at ");
    assert!(problem.starts_with(&hangs), "{problem}");
    let remedy = "select remedy from outbox_health where \"check\" = 'workers'";
    let remedy: String = stage.query_one(DB, remedy);
    assert!(remedy.contains(&format!("kill -CONT {pid} at the shell")), "{remedy}");
    process::signal(pid as u32, libc::SIGCONT);
    wait_healthy(&stage, "workers");
}

#[test]
fn health_names_user_application_and_statement_of_a_transaction_that_stays_open() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let (cluster, clock) = cluster_with_clock(broker, &exchange, &[]);
    let mut late = cluster.connect(DB);
    late.run("set application_name = 'till 7'; begin");
    late.run("select outbox_publish('T',\n '{}')");
    clock.set(60, 0);
    let problem = wait_for_problem(&cluster, "transactions");
    let ends = "(postgres, till 7) has enqueued and not ended for";
    assert!(problem.contains(ends), "{problem}");
    assert!(
        problem.ends_with(", last statement: select outbox_publish('T', '{}')"),
        "{problem}"
    );
    let pid: i32 = late.value("select pg_backend_pid()");
    let remedy: String = cluster.query_one(DB, "select remedy from outbox_health where \"check\" = 'transactions'");
    assert!(remedy.contains(&format!("pg_terminate_backend({pid})")), "{remedy}");
    cluster.exec(DB, &format!("select pg_terminate_backend({pid})"));
    wait_healthy(&cluster, "transactions");
}

/// One worker outside has died, one in the server hangs, and the clock goes back by an hour.
#[test]
fn a_clock_that_is_set_back_prolongs_no_lease_of_a_dead_or_hung_worker() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let conf = [
        "outbox.workers = 2",
        "outbox.lease_ttl = '4s'",
        "outbox.lease_renew = '1s'",
        "outbox.heartbeat_ttl = '4s'",
    ];
    let (cluster, clock) = cluster_with_clock(broker, &exchange, &conf);
    make_courier(&cluster);
    let mut outside = Outside::start(&cluster, "dead");
    let owners = "select array_agg(distinct split_part(lease_owner, '-', 1) || split_part(lease_owner, '-', 2))
                  from outbox_partition_status where lease_owner is not null";
    let all_own = || cluster.query_one::<Vec<String>>(DB, owners).len() == 3;
    wait_until("three workers to share the partitions", LONG, all_own);
    let hung: i32 = cluster.query_one(DB, "select pid from outbox_workers where worker_id = 'server-2'");
    suspend_worker(&cluster, hung as u32);
    process::kill(outside.child.as_mut().expect("it runs"));
    clock.set(-3600, 0);
    wait_true(
        &cluster,
        "the other worker to own all partitions",
        "select bool_and(coalesce(lease_owner = 'server-1', false)) from outbox_partitions",
    );
    process::signal(hung as u32, libc::SIGCONT);
}

/// A suspend advances both clocks but no timer of a process, so a publisher knew that its lease was over before its
/// worker did. The leases here are so long that nothing else renews them before the test gives up.
#[test]
fn neither_a_suspended_machine_nor_a_changed_clock_stalls_delivery() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = ["outbox.lease_ttl = '20min'", "outbox.lease_renew = '10min'"];
    let (cluster, clock) = cluster_with_clock(broker, &exchange, &conf);
    let consumer = Consumer::new(broker, &queue);
    let now = "select extract(epoch from clock_timestamp())::bigint";
    let began: i64 = cluster.query_one(DB, now);
    let states = [
        (0, 0),
        (3600, 3600),
        (7200, 7200),
        (0, 7200),
        (3600, 10_800),
        (-3600, 10_800),
        (0, 10_800),
    ];
    for (n, (wall, boot)) in (1..).zip(states) {
        clock.set(wall, boot);
        let shown = cluster.query_one::<i64>(DB, now) - began;
        assert!(
            (wall..wall + 1800).contains(&shown),
            "the clock shows {shown} s, not {wall}"
        );
        cluster.publish(n.to_string());
        assert_eq!(
            consumer.next().label(),
            n.to_string(),
            "with the clocks {wall} s and {boot} s off"
        );
        wait_published(&cluster, n as usize);
    }
}

/// By the wall clock all leases are over, but their workers have messages in flight and rely on the leases.
#[test]
fn setting_the_clock_forward_takes_no_lease_from_a_worker_with_messages_in_flight() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let conf = [
        "outbox.workers = 2",
        "outbox.lease_ttl = '20min'",
        "outbox.lease_renew = '10min'",
        "outbox.heartbeat_ttl = '20min'",
    ];
    let (cluster, clock) = cluster_with_clock(&broker, &exchange, &conf);
    wait_true(
        &cluster,
        "two workers to share the partitions",
        "select count(*) = 2 from outbox_worker_status where alive and partitions = 8",
    );
    let leases = "select string_agg(format('%s %s %s', partition, lease_owner, lease_epoch), ',' order by partition)
                  from outbox_partitions";
    let before: String = cluster.query_one(DB, leases);
    broker.suspend();
    cluster.exec(
        DB,
        "select outbox_publish('T', to_jsonb(n), 'o', n::text) from generate_series(1, 32) n",
    );
    wait_true(
        &cluster,
        "all to be in flight",
        "select in_flight = 32 from outbox_status",
    );
    clock.set(3600, 0);
    // Each worker has checked the leases by the new clock.
    wait_true(
        &cluster,
        "the leases to be renewed",
        "select bool_and(lease_until > clock_timestamp()) from outbox_partitions",
    );
    assert_eq!(cluster.query_one::<String>(DB, leases), before);
    broker.resume();
    wait_drained(&cluster);
    wait_published(&cluster, 32);
    assert_eq!(all_of(&broker, &queue).len(), 32, "each message arrives once");
}
