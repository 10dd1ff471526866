//! Notices of dead letters: who may have them sent where, and what keeps one from being written. On a real Postgres.

use postgres::Client;
use support::{
    Cluster, DB, Event, LONG, Receiver, Reply, Session, quiet_cluster, unconnected_cluster, wait_true, wait_until,
};

/// A server on which nothing is delivered, with the destination shop, whose dead letters are told to ops.
fn cluster() -> Cluster {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create server ops foreign data wrapper outbox_http options (url 'https://ops.example/');
         create role seller; grant outbox_admin to seller;
         create server shop foreign data wrapper outbox_http options (url 'https://shop.example/', dead_letters_to 'ops');
         alter server shop owner to seller",
    );
    cluster
}

/// Makes dead letters of `count` new messages for shop; returns how many notices that wrote.
fn notices_of(cluster: &Cluster, count: usize) -> i64 {
    let mut client = cluster.connect(DB);
    for n in 0..count {
        client.publish(Event::new(n as i64).to("shop"));
    }
    client.run(
        "delete from outbox where destination <> 'shop'; update outbox set expires_at = now() - interval '1 second'",
    );
    let dead: i64 = client.value(
        "select count from outbox_internal.dead_letter(array(select ctid from outbox), '{}', null) where destination = 'shop'",
    );
    assert_eq!(dead, count as i64);
    client.value("select count(*) from outbox join outbox_events e using (seq) where e.type = 'outbox.dead_letter'")
}

/// Asserts that health names this problem, and that the command that it gives ends it.
fn assert_problem_ends(cluster: &Cluster, problem: &str) {
    let of = "from outbox_health where destination = 'shop' and not ok";
    let found: String = cluster.query_one(DB, &format!("select problem {of}"));
    assert!(found.contains(problem), "{found}");
    let remedy: String = cluster.query_one(DB, &format!("select remedy {of}"));
    cluster.exec(DB, remedy.split(';').next().expect("a command"));
    assert_eq!(cluster.query_one::<i64>(DB, &format!("select count(*) {of}")), 0);
}

#[test]
fn only_who_may_enqueue_for_a_destination_has_notices_sent_there() {
    let cluster = cluster();
    assert_eq!(notices_of(&cluster, 1), 0);
    assert_problem_ends(
        &cluster,
        "notices of its dead letters do not reach ops: seller has no USAGE on it",
    );
    assert_eq!(notices_of(&cluster, 3), 3);
    // The default destination is open to all.
    cluster.exec(DB, "alter server shop options (set dead_letters_to 'default')");
    assert_eq!(notices_of(&cluster, 1), 1);
}

#[test]
fn a_notice_for_a_destination_that_does_not_exist_keeps_no_message_from_ending() {
    let cluster = cluster();
    cluster.exec(DB, "drop server ops");
    assert_eq!(notices_of(&cluster, 1), 0);
    assert_problem_ends(&cluster, "ops: it does not exist");
}

#[test]
fn with_a_source_there_is_no_notice_and_health_says_so() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create table events (seq bigint primary key, at timestamptz default now()); alter table events owner to seller;
         select outbox_source_set('events', seq => 'seq', type => '''T''', created_at => 'at');
         insert into events values (1); select outbox_enqueue(1, destination => 'shop');
         update outbox set expires_at = now() - interval '1 second';
         select outbox_internal.dead_letter(array(select ctid from outbox), '{}', null)",
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_dead"), 1);
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 0);
    assert_problem_ends(&cluster, "ops: events are read from a source");
}

#[test]
fn an_error_in_writing_a_notice_is_a_warning_and_the_message_is_dead() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "grant usage on foreign server ops to seller;
         create function refuse() returns trigger language plpgsql as $$ begin raise 'no more events'; end $$;
         create trigger refuse before insert on outbox_events for each row when (new.type = 'outbox.dead_letter')
           execute function refuse()",
    );
    let offset = cluster.log_offset();
    assert_eq!(notices_of(&cluster, 2), 0);
    cluster.wait_for_log("no notice of 2 dead letter(s): no more events", offset);
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_dead"), 2);
}

#[test]
fn a_failed_assertion_in_writing_a_notice_is_a_warning_too() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "alter server shop options (set dead_letters_to 'default');
         create function refuse() returns trigger language plpgsql as $$ begin assert false, 'no more events'; end $$;
         create trigger refuse before insert on outbox_events for each row when (new.type = 'outbox.dead_letter')
           execute function refuse()",
    );
    assert_eq!(notices_of(&cluster, 1), 0);
}

/// A session of a relay that has claimed message 1, for shop, for its last attempt; and the statement that fails it.
fn claimed_by_relay(cluster: &Cluster) -> (Client, String) {
    let mut client = cluster.connect(DB);
    client.run(
        "alter server shop options (set dead_letters_to 'default', add max_attempts '1'); select outbox_pause('shop')",
    );
    client.publish(Event::new("x").key("7").to("shop"));
    let token: i64 = client.value("select claim_token from outbox_fetch_unpublished(1, 'shop')");
    (client, format!("select outbox_mark_failed(1, {token}, 'no', 'shop')"))
}

#[test]
fn a_relay_waits_only_briefly_for_a_lock_that_keeps_a_notice_from_being_written() {
    let cluster = cluster();
    let (mut client, fails) = claimed_by_relay(&cluster);
    let mut holder = cluster.connect(DB);
    holder.run("begin; lock table outbox_events in share mode"); // as CREATE INDEX does
    client.run("set statement_timeout = '30s'");
    assert!(client.value::<bool>(&fails));
    assert_eq!(client.value::<i64>("select count(*) from outbox"), 0);
}

#[test]
fn the_notice_of_a_relay_says_that_the_dead_letter_blocks_its_key() {
    let cluster = cluster();
    let (mut client, fails) = claimed_by_relay(&cluster);
    assert!(client.value::<bool>(&fails));
    assert!(client.value::<bool>("select blocks from outbox_dead"));
    assert!(
        client.value::<bool>(
            "select (payload -> 'blocks')::boolean from outbox_events where type = 'outbox.dead_letter'"
        )
    );
}

#[test]
fn the_default_destination_has_notices_by_a_server_of_that_name() {
    let cluster = cluster();
    cluster.exec(
        DB,
        "create server \"default\" foreign data wrapper outbox_amqp options (dead_letters_to 'ops');
         select outbox_publish('T', '{}');
         update outbox set expires_at = now() - interval '1 second';
         select outbox_internal.dead_letter(array(select ctid from outbox), '{}', null)",
    );
    assert_eq!(cluster.query_one::<String>(DB, "select destination from outbox"), "ops");
    // Of the rights of its owner, as the other options of that server.
    cluster.exec(
        DB,
        "create role other; alter foreign data wrapper outbox_amqp owner to current_user; grant usage on foreign data wrapper outbox_amqp to other;
         alter server \"default\" owner to other; delete from outbox_dead; delete from outbox;
         select outbox_publish('T', '{}');
         update outbox set expires_at = now() - interval '1 second';
         select outbox_internal.dead_letter(array(select ctid from outbox), '{}', null)",
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 0);
}

#[test]
fn purging_an_aggregate_erases_what_notices_say_of_it() {
    let cluster = cluster();
    cluster.exec(DB, "alter server shop options (set dead_letters_to 'default')");
    let mut client = cluster.connect(DB);
    client.publish(Event::new("customer").key("7").to("shop"));
    client.run(
        "update outbox set expires_at = now() - interval '1 second';
         select outbox_internal.dead_letter(array(select ctid from outbox), '{}', null)",
    );
    let (kind, id): (String, String) = {
        let event = client
            .query_one("select aggregate_type, aggregate_id from outbox_events limit 1", &[])
            .expect("it");
        (event.get(0), event.get(1))
    };
    let left = "select (select count(*) from outbox_events) + (select count(*) from outbox)";
    assert_eq!(client.value::<i64>(left), 3);
    client.run(&format!("select outbox_purge('{kind}', '{id}', dry_run => false)"));
    assert_eq!(client.value::<i64>(left), 0);
}

/// What a worker has read of outbox_dead; it reports that when it ends.
fn read_of_dead_letters(cluster: &Cluster) -> i64 {
    let worker = "select coalesce(max(pid), 0) from pg_stat_activity where backend_type = 'outbox worker'";
    let before: i32 = cluster.query_one(DB, worker);
    cluster.exec(DB, &format!("select pg_terminate_backend({before})"));
    wait_true(
        cluster,
        "another worker",
        &format!("select ({worker}) not in (0, {before})"),
    );
    cluster.query_one(
        DB,
        "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relname = 'outbox_dead'",
    )
}

#[test]
fn no_worker_reads_the_blocked_keys_again_because_of_a_notice() {
    let receiver = Receiver::start(|_| Reply::status(200));
    let cluster = unconnected_cluster("", "x", &["outbox.http_allow = '127.0.0.1'"]);
    cluster.exec(
        DB,
        &format!(
            "create server ops foreign data wrapper outbox_http options (url '{0}');
             create server shop foreign data wrapper outbox_http options (url '{0}', dead_letters_to 'ops');
             insert into outbox_events (seq, id, type, payload)
               select n, gen_random_uuid(), 'T', '{{}}' from generate_series(1, 1000) n;
             insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason, blocks)
               select n, now(), 1, n % 16, 'shop', 'k' || n, 'refused', true from generate_series(1, 1000) n;
             select setval('outbox_events_seq_seq', 1000)",
            receiver.url("/")
        ),
    );
    let before = read_of_dead_letters(&cluster);
    for told in 1..=20 {
        cluster.exec(
            DB,
            &format!("select outbox_internal.notify_dead('{{{told}}}', '{{shop}}')"),
        );
        wait_until("the notice", LONG, || receiver.requests().len() == told);
    }
    let after = read_of_dead_letters(&cluster);
    assert!(after - before < 10_000, "{}", after - before);
}
