//! An expression of a source that traps every cancel, so that a cancel cannot end it. A worker that evaluates it can be
//! ended, and leaves the database, as fast as any other worker.

use support::stops::stop_in_time;
use support::*;
use support::{Cluster, wait_until};

use super::{SHOP, set_source};

/// Never returns. Two nested blocks trap the cancel, and a handler continues.
const STUBBORN: &str = "set role shopkeeper;
  create function shop.stubborn(data jsonb) returns jsonb language plpgsql as $$
  begin
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
  end $$;
  reset role";

/// A server with a worker that evaluates that expression, again and again, in database `shop`.
fn stuck() -> Cluster {
    let tireless = ["outbox.max_attempts = 1000", "outbox.retry_backoff = '10ms'"];
    let Stage { cluster, .. } = Stage::new(&tireless);
    cluster.exec(DB, "create database shop");
    for sql in [
        "create extension outbox",
        SHOP,
        STUBBORN,
        &set_source(", payload => 'shop.stubborn(data)'"),
        "select shop.write('{}', '1')",
    ] {
        cluster.exec("shop", sql);
    }
    wait_until_stuck(&cluster);
    cluster
}

/// Waits until a worker evaluates it and returns its process id. No other statement of a worker takes as long.
fn wait_until_stuck(cluster: &Cluster) -> i32 {
    let sql = "select max(pid) from pg_stat_activity
               where backend_type = 'outbox worker' and datname = 'shop' and state = 'active'
                 and clock_timestamp() - query_start > interval '0.2 s'";
    let mut client = cluster.connect(DB);
    let mut pid = None;
    wait_until("a worker to evaluate it", LONG, || {
        pid = client.value(sql);
        pid.is_some()
    });
    pid.expect("a process id")
}

#[test]
fn outbox_check_answers_while_an_expression_traps_cancels() {
    let cluster = stuck();
    for _ in 0..3 {
        wait_until_stuck(&cluster);
        let mut client = cluster.connect("shop");
        client.run("set statement_timeout = '60s'");
        let steps = client.query("select step, ok from outbox_check()", &[]);
        let steps = steps.unwrap_or_else(|error| panic!("outbox_check: {error:?}"));
        let failing: Vec<String> = (steps.iter())
            .filter(|row| !row.get::<_, Option<bool>>(1).unwrap_or(false))
            .map(|row| row.get(0))
            .collect();
        assert!(steps.len() > 3 && failing.is_empty(), "{failing:?}");
    }
}

#[test]
fn a_worker_in_an_expression_that_traps_cancels_can_be_ended() {
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
fn a_cancel_ends_an_expression_that_traps_cancels_and_is_charged_to_its_row() {
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
fn a_fast_stop_ends_in_time_while_an_expression_traps_cancels() {
    let cluster = stuck();
    wait_until_stuck(&cluster);
    stop_in_time(&cluster);
}

#[test]
fn a_database_is_renamed_and_dropped_while_an_expression_in_it_traps_cancels() {
    let cluster = stuck();
    admin(&cluster).run("alter database shop rename to store");
    admin(&cluster).run("alter database store rename to shop");
    wait_until_stuck(&cluster);
    admin(&cluster).run("drop database shop");
    let cluster = stuck();
    admin(&cluster).run("drop database shop with (force)");
}
