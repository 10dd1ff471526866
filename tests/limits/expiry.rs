//! expires_at: an expired message is not delivered, wherever it is at that time, and no other message is delayed.

use super::publish;
use support::Cluster;
use support::oracle::{Fate, Sent, judge};
use support::*;

fn wait_expired(cluster: &Cluster, n: usize) {
    wait_true(
        cluster,
        &format!("{n} expired messages"),
        &format!("select count(*) = {n} from outbox_dead where reason like 'expired: %' and not blocks"),
    );
}

/// The record of a message that must not be delivered.
fn unwanted(sent: Sent) -> Sent {
    Sent {
        fate: Fate::RolledBack,
        ..sent
    }
}

const SOON: &str = "expires_at => clock_timestamp() + '0.7 s'";

#[test]
fn a_message_that_expires_during_a_pause_is_not_sent_and_its_key_continues() {
    let stage = Stage::new(&[]);
    stage.exec(DB, "select outbox_pause()");
    let sent = [
        publish(&stage, "m1"),
        unwanted(publish(&stage, Event::new("m2").with(SOON))),
        publish(&stage, Event::new("m3").with("expires_at => now() + '1 day'")),
        unwanted(publish(
            &stage,
            Event::new("m4")
                .with(SOON)
                .with("available_at => clock_timestamp() + '0.6 s'"),
        )),
        unwanted(publish(&stage, Event::new("m5").key("other").with(SOON))),
    ];
    wait_expired(&stage, 3);
    wait_stats(&stage, "default", "pending = 2 and dead_total = 3");
    let attempts: i64 = stage.query_one(DB, "select sum(attempts) from outbox_dead");
    assert_eq!(attempts, 0);
    stage.exec(DB, "select outbox_resume()");
    wait_published(&stage, 2);
    judge(&sent, &arrived(&stage.all())).assert_perfect();

    // A retry by an operator delivers the message even after its time.
    stage.exec(DB, "select outbox_retry(seq) from outbox_dead where seq in (2, 5)");
    wait_published(&stage, 4);
    stage.exec(DB, "select outbox_retry_where(seq_from => 1, dry_run => false)");
    wait_published(&stage, 5);
    assert_eq!(stage.query_one::<i64>(DB, "select count(*) from outbox_dead"), 0);
}

#[test]
fn a_backlog_expires_while_the_broker_is_down_and_makes_room() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &["outbox.max_pending = 20010"]);
    wait_stats(&cluster, "default", "pending = 0 and max_pending = 20010");
    let mut client = cluster.connect(DB);
    client.run(
        "begin;
             select outbox_publish('T', '{}', aggregate_id => (n % 100)::text, expires_at => clock_timestamp() + '3 s')
             from generate_series(1, 20000) n;
             select outbox_publish('T', '{}') from generate_series(1, 10);
             savepoint s",
    );
    let error = client
        .batch_execute("select outbox_publish('T', '{}')")
        .expect_err("full");
    assert_eq!(error.code().map(|code| code.code()), Some("53400"));
    // One message is claimed under a lease that is over, another under a current lease.
    client.run("rollback to s; update outbox set claim_token = 1 where seq = 1;
             update outbox o set claim_token = p.lease_epoch from outbox_partitions p where o.seq = 2 and p.partition = o.partition;
             commit");
    wait_expired(&cluster, 19_999);
    wait_stats(&cluster, "default", "pending = 11");
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    assert_eq!(cluster.query_one::<i64>(DB, "select pending from outbox_status"), 12);
    assert!(cluster.query_one::<bool>(DB, "select exists (select from outbox where seq = 2)"));
}

#[test]
fn a_message_that_expires_between_two_attempts_unblocks_its_key() {
    let stage = Stage::new(&["outbox.retry_backoff = '1 h'", "outbox.retry_backoff_max = '1 h'"]);
    stage.broker.unbind(&stage.queue, &stage.exchange, "#");
    stage.broker.bind(&stage.queue, &stage.exchange, "item.changed");
    let bad = publish(&stage, Event::new("m1").operation("bad").with(SOON));
    wait_true(
        &stage,
        "the first attempt to fail",
        "select exists (select from outbox_waiting where state = 'b') or exists (select from outbox_dead)",
    );
    let sent = [unwanted(bad), publish(&stage, "m2")];
    wait_expired(&stage, 1);
    wait_published(&stage, 1);
    // A worker looks for keys that are no longer blocked every 30 s in any case.
    let is_immediate = "select h.published_at - d.died_at < interval '10 s' from outbox_history h, outbox_dead d";
    assert!(stage.query_one::<bool>(DB, is_immediate));
    judge(&sent, &arrived(&stage.all())).assert_perfect();
}

#[test]
fn without_leases_expired_messages_are_not_sent_either() {
    let stage = Stage::new(&["outbox.leasing = off"]);
    pause(&stage);
    let sent = [
        unwanted(publish(&stage, Event::new("m1").with(SOON))),
        publish(&stage, Event::new("m2").with("expires_at => now() + '1 day'")),
    ];
    wait_expired(&stage, 1);
    stage.set_conf("outbox.enabled", "on");
    wait_published(&stage, 1);
    judge(&sent, &arrived(&stage.all())).assert_perfect();
}

#[test]
fn a_relay_gets_no_expired_message() {
    for leasing in ["on", "off"] {
        let cluster = idle_cluster(&[&format!("outbox.leasing = {leasing}")]);
        cluster.exec(DB, "select outbox_pause()");
        publish(
            &cluster,
            Event::new("m1").with("expires_at => clock_timestamp() + '10 ms'"),
        );
        publish(&cluster, "m2");
        wait_true(
            &cluster,
            "the first message to expire",
            "select not exists (select from outbox where seq = 1 and expires_at >= clock_timestamp())",
        );
        let got: Vec<i64> = cluster.query_one(DB, "select array_agg(seq) from outbox_fetch_unpublished()");
        assert_eq!(got, [2]);
        wait_expired(&cluster, 1);
    }
}
