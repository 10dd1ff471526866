//! Tests of queries of the source by SQL: the events of a relay's claims, and the events that meet criteria.

use super::{MAPPED, SHOP, set_source};
use postgres::error::SqlState;
use serde_json::{Value, json};
use support::Cluster;
use support::{DB, Session, refused, unconnected_cluster, wait_paused, wait_true};

/// No worker delivers: messages wait for a relay.
fn relayed_cluster(more: &str) -> Cluster {
    relayed_cluster_with("", more)
}

/// A cluster like `relayed_cluster`, after running `before`, which creates what the expressions need.
fn relayed_cluster_with(before: &str, more: &str) -> Cluster {
    let cluster = unconnected_cluster(
        "",
        "nowhere",
        &["outbox.max_attempts = 2", "outbox.retry_backoff = '1h'"],
    );
    cluster.exec(DB, SHOP);
    cluster.exec(DB, before);
    cluster.exec(DB, &set_source(more));
    cluster.exec(DB, "select outbox_pause()");
    wait_paused(&cluster, "default");
    cluster
}

/// Enqueues an event with this `n`, of a separate stream.
fn write(cluster: &Cluster, kind: &str, n: i32) {
    cluster.exec(
        DB,
        &format!(
            "insert into shop.events (\"eventKind\", stream_id, data) values ('{kind}', 's{n}', '{{\"n\": {n}}}');
             select outbox_enqueue(currval('shop.events_position_seq'), 'k{n}')"
        ),
    );
}

fn all(cluster: &Cluster, sql: &str) -> Value {
    cluster.query_one(DB, &format!("select coalesce(jsonb_agg(x), '[]') from ({sql}) x"))
}

fn count(cluster: &Cluster, sql: &str) -> i64 {
    cluster.query_one(DB, sql)
}

#[test]
fn a_relay_gets_the_events_of_the_source_and_failing_rows_are_charged() {
    let cluster = relayed_cluster(", id => 'uid', payload => $$jsonb_build_object('tenth', 10 / (data->>'n')::int)$$");
    for n in [1, 0, 5, 2] {
        write(&cluster, "Written", n);
    }
    cluster.exec(DB, "delete from shop.events where position = 3");
    let fetch =
        "select seq, id, type, payload, aggregate_type, aggregate_id, key, attempts, claim_token is not null as held,
                        message_id like 'id-%' as named, created_at > now() - interval '1 hour' as young
                 from outbox_fetch_unpublished(10)";
    let event = |seq: i32, n: i32, tenth: i32| {
        json!({"seq": seq, "id": null, "type": "Written", "payload": {"tenth": tenth}, "aggregate_type": "order",
               "aggregate_id": format!("s{n}"), "key": format!("k{n}"), "attempts": 0, "held": true, "named": true, "young": true})
    };
    assert_eq!(all(&cluster, fetch), json!([event(1, 1, 10), event(4, 2, 5)]));
    let failed: String = cluster.query_one(
        DB,
        "select last_error from outbox_waiting where seq = 2 and attempts = 1",
    );
    assert_eq!(failed, "division by zero (SQLSTATE 22012)");
    let missing: String = cluster.query_one(DB, "select reason from outbox_dead where seq = 3");
    assert_eq!(missing, "shop.events has no row with seq 3");
    assert!(cluster.query_one::<bool>(
        DB,
        "select bool_and(outbox_mark_published(seq, claim_token)) from outbox where claim_token is not null"
    ));
    assert_eq!(
        count(&cluster, "select count(*) from outbox_history where not discarded"),
        2
    );
}

#[test]
fn failing_messages_do_not_end_a_relay_without_a_limit() {
    let cluster = relayed_cluster(", payload => $$jsonb_build_object('tenth', 10 / (data->>'n')::int)$$");
    for n in [0, 1] {
        write(&cluster, "Written", n);
    }
    let fetched = all(&cluster, "select seq from outbox_fetch_unpublished(1)");
    assert_eq!(
        fetched,
        json!([{"seq": 2}]),
        "the first message was charged, and the call returned the next"
    );
}

#[test]
fn a_uuid_id_is_sent_as_a_uuid_with_and_without_leases() {
    let cluster = relayed_cluster(", id => $$md5(position::text)::uuid$$, payload => 'data'");
    cluster.exec(DB, "select outbox_configure(leasing => false)");
    write(&cluster, "Written", 7);
    let fetched = all(
        &cluster,
        "select seq, id::text = message_id as same, id = md5('1')::uuid as known, payload from outbox_fetch_unpublished()",
    );
    assert_eq!(
        fetched,
        json!([{"seq": 1, "same": true, "known": true, "payload": {"n": 7}}])
    );
}

#[test]
fn a_relay_needs_no_right_on_the_source_which_is_read_as_its_owner_and_cannot_write() {
    let cluster = relayed_cluster_with(
        "set role shopkeeper;
         create table shop.traces (who text); grant usage on schema shop to public; grant all on shop.traces to public;
         create function shop.read_as(data jsonb) returns json language plpgsql as $$ begin
           if data->>'n' = '2' then insert into shop.traces values (current_user); end if;
           return to_json(current_user); end $$;
         reset role; create role courier in role outbox_relay",
        ", payload => 'shop.read_as(data)'",
    );
    for n in [1, 2] {
        write(&cluster, "Written", n);
    }
    let mut courier = cluster.connect(DB);
    courier.run("set role courier");
    let denied = courier.query("select * from shop.events", &[]).expect_err("no right");
    assert_eq!(denied.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE));
    let rows = courier
        .query("select seq, payload from outbox_fetch_unpublished()", &[])
        .expect("events");
    let rows: Vec<(i64, Value)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(rows, [(1, json!("shopkeeper"))]);
    let failed: String = cluster.query_one(DB, "select last_error from outbox_waiting where seq = 2");
    assert!(failed.contains("(SQLSTATE 25006)"), "{failed}");
    assert_eq!(count(&cluster, "select count(*) from shop.traces"), 0);
}

#[test]
fn a_source_that_cannot_be_read_is_the_callers_error_and_nothing_is_claimed() {
    let cluster = relayed_cluster(MAPPED);
    write(&cluster, "Written", 1);
    cluster.exec(DB, "alter table shop.events rename column data to body");
    let db_error = refused(&cluster, "select outbox_fetch_unpublished()");
    assert_eq!(
        db_error.code(),
        &SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
        "{db_error:?}"
    );
    assert!(
        db_error.message().contains("shop.events cannot be read"),
        "{db_error:?}"
    );
    assert_eq!(
        count(
            &cluster,
            "select count(*) from outbox where claim_token is null and attempts = 0"
        ),
        1
    );
}

#[test]
fn dead_letters_and_history_are_selected_by_columns_of_the_source() {
    // The aggregate of the event with n = 3 cannot be evaluated.
    let cluster = relayed_cluster(", payload => 'data', correlation_id => 'uid'");
    cluster.exec(
        DB,
        &set_source(", payload => 'data'").replace("'stream_id'", "$$(6 / (3 - (data->>'n')::int))::text$$"),
    );
    for (kind, n) in [("Placed", 1), ("Placed", 2), ("Placed", 3), ("Paid", 4), ("Paid", 5)] {
        write(&cluster, kind, n);
    }
    // The third message fails at a relay. The first and the fourth are refused for good by their receiver.
    for _ in 0..2 {
        cluster.exec(DB, "select outbox_fetch_unpublished()");
        cluster.exec(
            DB,
            "select case when seq in (1, 4) then outbox_mark_failed(seq, claim_token, 'not taken')
                         else outbox_mark_published(seq, claim_token) end
             from outbox where claim_token is not null;
             update outbox_waiting set due_at = now()",
        );
    }
    wait_true(
        &cluster,
        "three dead letters",
        "select array_agg(seq order by seq) = '{1,3,4}' from outbox_dead",
    );
    let counted = |call: &str| count(&cluster, &format!("select {call}"));
    assert_eq!(
        counted("outbox_retry_where(type => 'Placed')"),
        2,
        "the type of the third can be evaluated"
    );
    let offset = cluster.log_offset();
    assert_eq!(
        counted("outbox_retry_where(aggregate_type => 'order', aggregate_id => '-6')"),
        1,
        "the fourth"
    );
    cluster.wait_for_log(
        "1 event(s) of shop.events cannot be read and are left out, one of them with seq 3",
        offset,
    );
    assert_eq!(
        counted("outbox_retry_where(aggregate_type => 'order', aggregate_id => '-6')"),
        1,
        "the fourth"
    );
    assert_eq!(
        counted("outbox_discard_where(type => 'Paid', error_like => 'something else%')"),
        0
    );
    assert_eq!(counted("outbox_discard_where(type => 'Paid', dry_run => false)"), 1);
    let gone = "select seq = 4 from outbox_history where discarded";
    assert!(cluster.query_one::<bool>(DB, gone));
    assert_eq!(
        counted("outbox_retry_where(type => 'Placed', max_rows => 1, dry_run => false)"),
        1
    );
    assert!(cluster.query_one::<bool>(DB, "select array_agg(seq) = '{1}' from outbox"));

    // Ended: 2 Placed, 5 Paid, 4 Paid (discarded).
    assert_eq!(counted("outbox_replay(type => 'Paid')"), 2);
    assert_eq!(counted("outbox_replay(type => 'Paid', seq_from => 5)"), 1);
    assert_eq!(counted("outbox_replay(aggregate_id => '6')"), 1, "the second");
    cluster.exec(
        DB,
        "update shop.events set at = '2020-02-02 12:00+00' where position = 5",
    );
    assert_eq!(
        counted("outbox_replay(created_from => '2020-02-02', created_to => '2020-02-03')"),
        1
    );
    assert_eq!(
        counted("outbox_replay(created_to => '2020-02-02 12:00+00')"),
        0,
        "up to, not including"
    );
    assert_eq!(
        counted("outbox_replay(type => 'Paid', created_to => '2021-01-01', dry_run => false)"),
        1
    );
    assert!(cluster.query_one::<bool>(DB, "select seq = 5 from outbox where replayed"));
}

#[test]
fn a_replay_by_type_reads_a_long_history_piece_by_piece() {
    let cluster = relayed_cluster(", payload => 'data'");
    cluster.exec(
        DB,
        "insert into shop.events (\"eventKind\", stream_id, data)
           select case when n % 5000 = 0 then 'Rare' else 'Usual' end, 's', '{}' from generate_series(1, 25000) n;
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination, key)
           select position, now(), clock_timestamp(), 1, 3, 'default', 'k' from shop.events",
    );
    assert_eq!(
        count(&cluster, "select outbox_replay(type => 'Rare', max_rows => null)"),
        5
    );
    assert_eq!(
        count(
            &cluster,
            "select outbox_replay(type => 'Rare', max_rows => 2, dry_run => false)"
        ),
        2
    );
    assert_eq!(
        count(&cluster, "select outbox_replay(type => 'Usual', max_rows => null)"),
        24995
    );
}

#[test]
fn a_cancel_or_a_timeout_ends_the_call_and_is_not_charged_to_a_row() {
    let cluster = relayed_cluster_with(
        "create function shop.slow(data jsonb) returns json language plpgsql as $$ begin
           perform pg_advisory_xact_lock(4711); return '{}'; end $$",
        ", payload => 'shop.slow(data)'",
    );
    write(&cluster, "Written", 1);
    let mut holder = cluster.connect(DB);
    holder.run("select pg_advisory_lock(4711)");
    let db_error = refused(
        &cluster,
        "set statement_timeout = '300ms'; select outbox_fetch_unpublished()",
    );
    assert_eq!(db_error.code(), &SqlState::QUERY_CANCELED, "{db_error:?}");
    assert_eq!(
        count(
            &cluster,
            "select count(*) from outbox where attempts = 0 and claim_token is null"
        ),
        1
    );
}
