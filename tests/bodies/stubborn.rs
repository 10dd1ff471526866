//! A function that traps every cancel, so that a cancel cannot end it. Its error is charged to its message. A worker
//! that runs the function can be ended, and leaves the database, as fast as any other worker.

use support::{Cluster, wait_until};

use super::{numbers, publish, shop_stage};
use support::stops::stop_in_time;
use support::*;

/// Never returns for message 2. Two nested blocks trap the cancel, and a handler continues.
pub const STUBBORN: &str = "set role shopkeeper;
  create function shop.stubborn(event jsonb) returns jsonb language plpgsql as $$
  begin
    if event->'payload'->>'n' = '2' then
      loop
        begin
          loop
            begin
              loop null; end loop;
            exception when query_canceled or others then
              loop null; end loop;
            end;
          end loop;
        exception when query_canceled or others then
          null;
        end;
      end loop;
    end if;
    return event->'payload';
  end $$;
  reset role";

/// A server with a worker that is in that function, again and again, in database `shop`.
fn stuck() -> Cluster {
    let tireless = ["outbox.max_attempts = 1000", "outbox.retry_backoff = '10ms'"];
    let Stage { exchange, cluster, .. } = Stage::new(&tireless);
    cluster.exec(DB, "create database shop");
    cluster.exec("shop", "create extension outbox");
    cluster.exec("shop", super::SHOP);
    cluster.exec("shop", STUBBORN);
    cluster.exec(
        "shop",
        &format!(
            "create server stubborn foreign data wrapper outbox_amqp options (exchange '{exchange}', body 'shop.stubborn');
             select outbox_publish('T', '{{\"n\": 2}}', destination => 'stubborn')"
        ),
    );
    wait_until_stuck(&cluster);
    cluster
}

/// Waits until a worker is in the function and returns its process id. No other statement of a worker takes as long.
fn wait_until_stuck(cluster: &Cluster) -> i32 {
    let sql = "select max(pid) from pg_stat_activity
               where backend_type = 'outbox worker' and datname = 'shop' and state = 'active'
                 and clock_timestamp() - query_start > interval '0.2 s'";
    let mut client = cluster.connect(DB);
    let mut pid = None;
    wait_until("a worker to be in the function", LONG, || {
        pid = client.value(sql);
        pid.is_some()
    });
    pid.expect("a process id")
}

#[test]
fn a_function_that_traps_cancels_is_charged_to_its_message_and_the_worker_continues() {
    let quick = ["outbox.max_attempts = 2", "outbox.retry_backoff = '10ms'"];
    let stage = shop_stage(&quick);
    stage.exec(DB, STUBBORN);
    let queue = stage.destination(stage.broker, "stubborn", "body 'shop.stubborn'");
    let worker = "select pid from pg_stat_activity where backend_type = 'outbox worker'";
    let before: i32 = stage.query_one(DB, worker);
    publish(&stage, "stubborn", 3);
    publish(&stage, "default", 3);
    wait_true(
        &stage,
        "a dead letter, and the others delivered",
        "select (select count(*) from outbox_dead) = 1 and (select count(*) from outbox_history) = 5",
    );
    let dead: String = stage.query_one(DB, "select format('%s %s %s', seq, attempts, reason) from outbox_dead");
    let reason = "2 2 canceling statement due to statement timeout (SQLSTATE 57014)";
    assert!(dead.starts_with(reason), "{dead}");
    assert_eq!(numbers(&all_of(stage.broker, &queue)), [1, 3]);
    assert_eq!(stage.all().len(), 3);
    assert_eq!(stage.query_one::<i32>(DB, worker), before);
}

#[test]
fn outbox_check_answers_while_a_function_traps_cancels() {
    let cluster = stuck();
    for _ in 0..3 {
        wait_until_stuck(&cluster);
        let mut client = cluster.connect("shop");
        client.run("set statement_timeout = '60s'");
        let steps = client.query("select step, ok from outbox_check('stubborn')", &[]);
        let steps = steps.unwrap_or_else(|error| panic!("outbox_check: {error:?}"));
        let failing: Vec<String> = (steps.iter())
            .filter(|row| !row.get::<_, Option<bool>>(1).unwrap_or(false))
            .map(|row| row.get(0))
            .collect();
        assert!(steps.len() > 3 && failing.is_empty(), "{failing:?}");
    }
}

#[test]
fn a_worker_in_a_function_that_traps_cancels_can_be_ended() {
    let cluster = stuck();
    for _ in 0..3 {
        let pid = wait_until_stuck(&cluster);
        let offset = cluster.log_offset();
        cluster.exec(DB, &format!("select pg_terminate_backend({pid})"));
        wait_until("the worker to end", LONG, || {
            cluster.query_one(
                DB,
                &format!("select not exists (select from pg_stat_activity where pid = {pid})"),
            )
        });
        cluster.wait_for_log("outbox server-1: ended", offset);
    }
}

#[test]
fn a_cancel_ends_a_function_that_traps_cancels_and_is_charged_to_its_message() {
    let cluster = stuck();
    for attempts in 1..=3 {
        let pid = wait_until_stuck(&cluster);
        cluster.exec(DB, &format!("select pg_cancel_backend({pid})"));
        let charged = format!("select exists (select from outbox_messages where seq = 1 and attempts >= {attempts})");
        wait_until("the attempt to be charged", LONG, || {
            cluster.query_one("shop", &charged)
        });
    }
}

#[test]
fn a_fast_stop_ends_in_time_while_a_function_traps_cancels() {
    let cluster = stuck();
    wait_until_stuck(&cluster);
    stop_in_time(&cluster);
}

#[test]
fn a_database_is_renamed_and_dropped_while_a_function_in_it_traps_cancels() {
    let cluster = stuck();
    admin(&cluster).run("alter database shop rename to store");
    admin(&cluster).run("alter database store rename to shop");
    wait_until_stuck(&cluster);
    admin(&cluster).run("drop database shop");
    let cluster = stuck();
    admin(&cluster).run("drop database shop with (force)");
}
