//! Tests of relays, which claim and mark messages by SQL: their claims, marks, fences and order, beside real workers.
//! Also tests of waiting for the end of a message.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use postgres::error::SqlState;
use postgres::{Client, Row};
use serde_json::Value;
use support::{Cluster, wait_for, wait_until, within};
use support::{DB, Session, Stage, wait_true};

/// A server without workers, its destination paused for a relay.
fn relay_cluster(conf: &[&str]) -> Cluster {
    let builder = Cluster::builder().conf("outbox.workers = 0");
    let cluster = conf.iter().fold(builder, |builder, line| builder.conf(line)).start();
    cluster.exec(DB, "create extension outbox; select outbox_pause()");
    cluster
}

fn store(cluster: &Cluster, body: &str, key: Option<&str>) -> i64 {
    let mut client = cluster.connect(DB);
    let row = client.query_one("select outbox_store($1, key => $2)", &[&body, &key]);
    row.expect("store").get(0)
}

#[derive(Debug, Clone)]
struct Held {
    seq: i64,
    token: i64,
    body: String,
}

fn held(row: &Row) -> Held {
    Held {
        seq: row.get("seq"),
        token: row.get("claim_token"),
        body: row.get::<_, Value>("payload").as_str().unwrap_or_default().to_owned(),
    }
}

fn fetch(relay: &mut Client, max_rows: i32) -> Vec<Held> {
    fetch_for(relay, max_rows, "1 hour")
}

fn fetch_for(relay: &mut Client, max_rows: i32, ttl: &str) -> Vec<Held> {
    let sql = format!("select * from outbox_fetch_unpublished($1, claim_ttl => '{ttl}')");
    relay
        .query(&sql, &[&max_rows])
        .expect("fetch")
        .iter()
        .map(held)
        .collect()
}

fn published(relay: &mut Client, message: &Held) -> bool {
    let row = relay.query_one("select outbox_mark_published($1, $2)", &[&message.seq, &message.token]);
    row.expect("mark published").get(0)
}

fn failed(relay: &mut Client, message: &Held) -> bool {
    let row = relay.query_one(
        "select outbox_mark_failed($1, $2, 'no luck')",
        &[&message.seq, &message.token],
    );
    row.expect("mark failed").get(0)
}

fn bodies(messages: &[Held]) -> Vec<&str> {
    messages.iter().map(|message| message.body.as_str()).collect()
}

fn refusal(client: &mut Client, sql: &str) -> (SqlState, String) {
    let error = client.batch_execute(sql).expect_err(sql);
    let error = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}"));
    (error.code().clone(), error.hint().unwrap_or_default().to_owned())
}

// ---- what is stored -------------------------------------------------------------------------------------------------

#[test]
fn a_stored_message_keeps_body_headers_id_and_type() {
    let cluster = relay_cluster(&[]);
    cluster.exec(
        DB,
        r#"select outbox_store('{"order": 1}', '{"type": "App\\Placed", "bus": "main"}', id => '01a1fc85-047b-72cc-b926-c7a014466422');
           select outbox_store('O:8:"stdClass":0:{}'); select outbox_store(E'a\u0001b'); select outbox_store('"\u0000"')"#,
    );
    let mut relay = cluster.connect(DB);
    let rows = relay
        .query(
            "select id::text, type, payload, headers, key from outbox_fetch_unpublished()",
            &[],
        )
        .expect("fetch");
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[0].get::<_, String>(0), "01a1fc85-047b-72cc-b926-c7a014466422");
    assert_eq!(rows[0].get::<_, String>(1), "App\\Placed");
    assert_eq!(rows[0].get::<_, Value>(2), serde_json::json!({"order": 1}));
    assert_eq!(rows[0].get::<_, Value>(3)["bus"], "main");
    assert_eq!(rows[1].get::<_, String>(1), "Message");
    assert_eq!(rows[1].get::<_, Value>(2), r#"O:8:"stdClass":0:{}"#);
    assert_eq!(rows[2].get::<_, Value>(2), "a\u{1}b");
    assert_eq!(
        rows[3].get::<_, Value>(2),
        r#""\u0000""#,
        "JSON, but none that jsonb takes"
    );
    assert!(rows.iter().all(|row| row.get::<_, Option<String>>(4).is_none()));
}

// ---- claims ---------------------------------------------------------------------------------------------------------

#[test]
fn a_claim_of_a_relay_is_the_update_of_the_workers() {
    let cluster = relay_cluster(&[
        "shared_preload_libraries = 'outbox,pg_stat_statements'",
        "pg_stat_statements.track = all",
    ]);
    cluster.exec(DB, "create extension pg_stat_statements");
    (0..20).for_each(|n| _ = store(&cluster, &n.to_string(), Some(&(n % 3).to_string())));
    let mut relay = cluster.connect(DB);
    let claimed = fetch(&mut relay, 100).len() as i64;
    let marked = "select sum(rows)::bigint from pg_stat_statements
                  where userid = 'outbox_worker'::regrole and query ~* 'update \\S*outbox o\\s+set claim_token.*returning'";
    assert_eq!((claimed, cluster.query_one::<i64>(DB, marked)), (3, 3)); // one of each key
}

#[test]
fn two_relays_share_the_messages_and_duplicate_none() {
    const MESSAGES: usize = 400;
    for leasing in ["on", "off"] {
        let cluster = relay_cluster(&[&format!("outbox.leasing = {leasing}")]);
        cluster.exec(
            DB,
            &format!("select outbox_store(n::text || ' ', key => 'k' || n % 7) from generate_series(1, {MESSAGES}) n"),
        );
        let shares: Vec<Vec<i64>> = thread::scope(|scope| {
            let relays: Vec<_> = (0..2)
                .map(|_| {
                    let mut relay = cluster.connect(DB);
                    scope.spawn(move || {
                        let mut seqs = Vec::new();
                        relay_until_empty(&mut relay, &mut seqs);
                        seqs
                    })
                })
                .collect();
            relays
                .into_iter()
                .map(|relay| relay.join().expect("no panic"))
                .collect()
        });
        let mut all: Vec<i64> = shares.concat();
        all.sort_unstable();
        assert_eq!(all, (1..=MESSAGES as i64).collect::<Vec<_>>(), "leasing {leasing}");
        let history = "select count(*) from outbox_history where not discarded";
        assert_eq!(cluster.query_one::<i64>(DB, history), MESSAGES as i64);
    }
}

/// Fetches and marks until the outbox is empty.
fn relay_until_empty(relay: &mut Client, seqs: &mut Vec<i64>) {
    wait_until("the outbox to be empty", support::LONG, || {
        for message in fetch(relay, 10) {
            assert!(published(relay, &message), "{message:?}");
            seqs.push(message.seq);
        }
        let row = relay.query_one("select not exists (select from outbox)", &[]);
        row.expect("look").get(0)
    });
}

#[test]
fn the_messages_of_a_dead_relay_are_claimed_again_and_its_token_is_stale() {
    for leasing in ["on", "off"] {
        let cluster = relay_cluster(&[&format!("outbox.leasing = {leasing}")]);
        store(&cluster, "a", Some("k"));
        let mut first = cluster.connect(DB);
        let old = fetch_for(&mut first, 10, "1 s");
        assert_eq!(bodies(&old), ["a"]);
        let mut second = cluster.connect(DB);
        let again = wait_for("the claim to run out", support::LONG, || {
            let found = fetch(&mut second, 10);
            (!found.is_empty()).then_some(found)
        });
        assert_eq!(bodies(&again), ["a"]);
        assert_ne!(again[0].token, old[0].token);
        assert!(!published(&mut first, &old[0]), "the token is stale");
        assert!(!failed(&mut first, &old[0]), "the token is stale");
        assert!(published(&mut second, &again[0]));
        assert!(!published(&mut second, &again[0]), "once");
        assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_history"), 1);
    }
}

#[test]
fn an_expired_claim_cannot_be_marked_even_if_it_was_not_taken_over() {
    let cluster = relay_cluster(&[]);
    store(&cluster, "a", None);
    let mut relay = cluster.connect(DB);
    let held = fetch_for(&mut relay, 1, "1 s");
    wait_true(
        &cluster,
        "the claim to run out",
        "select claim_until < clock_timestamp() from outbox",
    );
    assert!(!published(&mut relay, &held[0]));
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 1);
}

#[test]
fn the_claims_of_workers_cannot_be_marked() {
    let cluster = relay_cluster(&[]);
    store(&cluster, "a", None);
    cluster.exec(
        DB,
        "update outbox set claim_token = 17, claim_until = now() + interval '1 hour';
         update outbox_partitions set lease_owner = '', lease_epoch = 17",
    );
    assert!(!cluster.query_one::<bool>(DB, "select outbox_mark_published(1, 17)"));
}

// ---- order ----------------------------------------------------------------------------------------------------------

#[test]
fn a_claim_returns_the_first_message_of_each_key_and_none_behind_a_failed_one() {
    let cluster = relay_cluster(&["outbox.retry_backoff = '1 s'", "outbox.max_attempts = 2"]);
    for (body, key) in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a"), ("b2", "b")] {
        store(&cluster, body, Some(key));
    }
    store(&cluster, "free", None);
    let mut relay = cluster.connect(DB);
    let first = fetch(&mut relay, 100);
    assert_eq!(bodies(&first), ["a1", "b1", "free"]);
    assert_eq!(fetch(&mut relay, 100).len(), 0, "all messages are claimed");
    assert!(failed(&mut relay, &first[0]) && published(&mut relay, &first[1]) && published(&mut relay, &first[2]));
    let second = fetch(&mut relay, 100);
    assert_eq!(bodies(&second), ["b2"], "a1 failed, so a2 is blocked");
    assert!(published(&mut relay, &second[0]));
    let retried = wait_for("a1 to be due", support::LONG, || fetch(&mut relay, 100).pop());
    assert_eq!(retried.body, "a1");
    assert!(failed(&mut relay, &retried));
    let dead = "select blocks and reason = 'no luck' and attempts = 2 from outbox_dead";
    assert!(cluster.query_one::<bool>(DB, dead));
    assert_eq!(fetch(&mut relay, 100).len(), 0, "key a is blocked by its dead letter");
    cluster.exec(DB, "select outbox_discard(seq) from outbox_dead");
    for body in ["a2", "a3"] {
        let next = fetch(&mut relay, 100);
        assert_eq!(bodies(&next), [body]);
        assert!(published(&mut relay, &next[0]));
    }
}

#[test]
fn messages_behind_a_failed_message_of_a_worker_are_claimed_in_order() {
    let cluster = relay_cluster(&[]);
    for body in ["a1", "a2", "a3"] {
        store(&cluster, body, Some("a"));
    }
    // The state that a worker leaves: the first backs off, the second is behind it, the third came later.
    cluster.exec(
        DB,
        "with gone as (delete from outbox where seq < 3 returning *)
         insert into outbox_waiting (seq, enqueued_at, due_at, attempts, partition, state, destination, key)
         select seq, enqueued_at, case seq when 1 then now() + interval '1 hour' end, 1, partition,
                (case seq when 1 then 'b' else 'g' end)::\"char\", destination, key from gone",
    );
    let mut relay = cluster.connect(DB);
    assert_eq!(fetch(&mut relay, 9).len(), 0);
    cluster.exec(DB, "update outbox_waiting set due_at = now() where state = 'b'");
    for body in ["a1", "a2", "a3"] {
        let next = fetch(&mut relay, 9);
        assert_eq!(bodies(&next), [body]);
        assert!(published(&mut relay, &next[0]));
    }
}

#[test]
fn a_message_waits_for_an_open_transaction_that_may_commit_an_earlier_one() {
    let cluster = relay_cluster(&[]);
    let mut slow = cluster.connect(DB);
    slow.run("begin; select outbox_store('early', key => 'k')");
    store(&cluster, "late", Some("k"));
    store(&cluster, "other", Some("another key"));
    let mut relay = cluster.connect(DB);
    assert_eq!(bodies(&fetch(&mut relay, 9)), ["other"]);
    slow.run("commit");
    for body in ["early", "late"] {
        let next = fetch(&mut relay, 9);
        assert_eq!(bodies(&next), [body]);
        assert!(published(&mut relay, &next[0]));
    }
}

#[test]
fn a_long_run_of_one_key_hides_no_other_key() {
    let cluster = relay_cluster(&["outbox.partition_count = 1"]);
    cluster.exec(
        DB,
        "select outbox_store('long', key => 'long') from generate_series(1, 500); select outbox_store('short', key => 'short')",
    );
    assert_eq!(bodies(&fetch(&mut cluster.connect(DB), 2)), ["long", "short"]);
}

// ---- beside workers -------------------------------------------------------------------------------------------------

#[test]
fn a_relay_is_refused_what_workers_deliver_and_takes_over_at_a_pause_without_duplicates() {
    const MESSAGES: i64 = 1000;
    // Without the limit, a worker would deliver all of it before the pause.
    let stage = Stage::new(&["outbox.max_rate = 300"]);
    let mut relay = stage.connect(DB);
    let (code, hint) = refusal(&mut relay, "select outbox_fetch_unpublished()");
    assert_eq!(code, SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
    assert!(hint.contains("outbox_pause('default')"), "{hint}");
    stage.exec(
        DB,
        &format!("select outbox_store(n || ' ', key => 'k' || n % 50) from generate_series(1, {MESSAGES}) n"),
    );
    wait_true(
        &stage,
        "a few to be published",
        "select count(*) > 100 from outbox_history",
    );
    stage.exec(DB, "select outbox_pause(reason => 'a relay takes over')");
    let mut seqs = Vec::new();
    relay_until_empty(&mut relay, &mut seqs);
    let by_worker = stage.broker.queue_len(&stage.queue) as i64;
    assert!(!seqs.is_empty(), "the pause came too late to test anything");
    assert_eq!(by_worker + seqs.len() as i64, MESSAGES, "no message twice");
    assert_eq!(
        stage.query_one::<i64>(DB, "select count(*) from outbox_history"),
        MESSAGES
    );
    let mut of_key: Vec<(i64, i64)> = Vec::new();
    for delivery in stage.all() {
        let seq: i64 = serde_json::from_slice::<Value>(&delivery.body).expect("JSON")["seq"]
            .as_i64()
            .expect("a seq");
        of_key.push((seq % 50, seq));
    }
    of_key.extend(seqs.iter().map(|seq| (seq % 50, *seq)));
    for key in 0..50 {
        let run: Vec<i64> = of_key.iter().filter(|(k, _)| *k == key).map(|(_, seq)| *seq).collect();
        assert!(run.is_sorted(), "key {key}: {run:?}");
    }

    // Back to the workers: refused while the relay has claims.
    store(&stage, "held", None);
    let held = fetch(&mut relay, 1);
    let (code, hint) = refusal(&mut relay, "select outbox_resume()");
    assert_eq!(code, SqlState::OBJECT_IN_USE);
    assert!(hint.contains("free after"), "{hint}");
    assert!(failed(&mut relay, &held[0]));
    stage.exec(
        DB,
        "select outbox_resume(); select outbox_retry(seq) from outbox_waiting",
    );
    assert_eq!(
        stage.query_one::<String>(DB, &format!("select outbox_wait({}, '2 min')", held[0].seq)),
        "published"
    );
    assert_eq!(stage.broker.queue_len(&stage.queue), 1);
}

#[test]
fn a_paused_worker_releases_what_it_parked_for_an_open_transaction() {
    let stage = Stage::new(&[]);
    let mut slow = stage.connect(DB);
    slow.run("begin; select outbox_store('early', key => 'k')");
    store(&stage, "late", Some("k"));
    wait_true(
        &stage,
        "the worker to claim",
        "select exists (select from outbox where claim_token > 0)",
    );
    stage.exec(DB, "select outbox_pause()");
    wait_true(
        &stage,
        "the message to be free",
        "select not exists (select from outbox where claim_token is not null)",
    );
    slow.run("commit");
    let mut relay = stage.connect(DB);
    for body in ["early", "late"] {
        let next = fetch(&mut relay, 9);
        assert_eq!(bodies(&next), [body]);
        assert!(published(&mut relay, &next[0]));
    }
    stage.exec(DB, "select outbox_resume()");
    let fence = store(&stage, "fence", None);
    assert_eq!(
        stage.query_one::<String>(DB, &format!("select outbox_wait({fence}, '2 min')")),
        "published"
    );
    let sent = stage.all();
    assert_eq!(
        (sent.len(), sent[0].json()["payload"].clone()),
        (1, Value::from("fence"))
    );
}

#[test]
fn a_worker_that_has_not_noticed_a_pause_claims_nothing() {
    let cluster = relay_cluster(&[]);
    store(&cluster, "a", Some("k"));
    let claim = "select count(c.seq) from (select array_agg(partition order by partition) p, array_agg(lease_epoch order by partition) e from outbox_partitions) l
         cross join lateral outbox_internal.claim('w', 'default', l.p, l.e, array_fill(9, array[16]), array_fill(0::bigint, array[16]), 1000000) c";
    cluster.exec(
        DB,
        "select outbox_internal.lease_take('w', array(select partition from outbox_partitions), 60)",
    );
    assert_eq!(cluster.query_one::<i64>(DB, claim), 0);
    cluster.exec(DB, "select outbox_resume()");
    assert_eq!(cluster.query_one::<i64>(DB, claim), 1, "the claim itself is valid");
    cluster.exec(DB, "select outbox_pause()");
    assert_eq!(
        fetch(&mut cluster.connect(DB), 9).len(),
        0,
        "the worker has the message in flight"
    );
    cluster.exec(DB, "update outbox_partitions set lease_until = now()");
    assert_eq!(bodies(&fetch(&mut cluster.connect(DB), 9)), ["a"], "the lease is over");
}

// ---- waiting --------------------------------------------------------------------------------------------------------

#[test]
fn waiting_ends_with_the_settle_and_not_at_the_next_poll() {
    const ROUNDS: u32 = 30;
    let cluster = Stage::new(&[]).cluster;
    let mut client = cluster.connect(DB);
    // With polling once a second it would end at the same point of a second each time.
    within("the waits", Duration::from_secs(u64::from(ROUNDS) / 2), || {
        for round in 0..ROUNDS {
            let seq = store(&cluster, &format!("round {round}"), Some("k"));
            let row = client
                .query_one("select outbox_wait($1, '2 min')", &[&seq])
                .expect("wait");
            assert_eq!(row.get::<_, String>(0), "published");
        }
    });
}

#[test]
fn a_waiting_session_is_woken_by_a_mark_a_dead_letter_and_a_discard() {
    let cluster = relay_cluster(&["outbox.max_attempts = 1"]);
    let mut relay = cluster.connect(DB);
    // Each session had just polled: its next poll would come a second later.
    within("the waits", Duration::from_secs(6), || {
        for outcome in ["published", "dead", "discarded"].repeat(4) {
            let seq = store(&cluster, outcome, None);
            let mut waiter = cluster.connect(DB);
            let found: String = thread::scope(|scope| {
                let waiting = scope.spawn(move || {
                    let row = waiter.query_one("select outbox_wait($1, '2 min')", &[&seq]);
                    row.expect("wait").get(0)
                });
                wait_for_a_waiting_session(&cluster);
                match outcome {
                    "discarded" => {
                        relay.execute("select outbox_discard($1)", &[&seq]).expect("discard");
                    }
                    "dead" => assert!(fetch(&mut relay, 1).iter().all(|held| failed(&mut relay, held))),
                    _ => assert!(fetch(&mut relay, 1).iter().all(|held| published(&mut relay, held))),
                }
                waiting.join().expect("no panic")
            });
            assert_eq!(found, outcome);
            // The message has ended, so the call returns at once.
            assert_eq!(
                cluster.query_one::<String>(DB, &format!("select outbox_wait({seq}, '0')")),
                outcome
            );
        }
    });
}

fn wait_for_a_waiting_session(cluster: &Cluster) {
    wait_true(
        cluster,
        "a session that waits",
        "select exists (select from pg_stat_activity where query like 'select outbox_wait%' and wait_event = 'Extension')",
    );
}

#[test]
fn waiting_ends_by_timeout_cancel_and_statement_timeout() {
    let cluster = relay_cluster(&[]);
    let seq = store(&cluster, "never", None);
    let wait = format!("select outbox_wait({seq}, '1 h')");
    assert_eq!(
        cluster.query_one::<String>(DB, &format!("select outbox_wait({seq}, '50 ms')")),
        "timeout"
    );
    assert_eq!(cluster.query_one::<String>(DB, "select outbox_wait(4711)"), "unknown");
    let mut client = cluster.connect(DB);
    client.run("set statement_timeout = '100ms'");
    assert_eq!(refusal(&mut client, &wait).0, SqlState::QUERY_CANCELED);
    client.run("reset statement_timeout");
    let code = thread::scope(|scope| {
        let waiting = scope.spawn(|| refusal(&mut client, &wait).0);
        wait_for_a_waiting_session(&cluster);
        cluster.exec(
            DB,
            "select pg_cancel_backend(pid) from pg_stat_activity where query like 'select outbox_wait%' and wait_event = 'Extension'",
        );
        waiting.join().expect("no panic")
    });
    assert_eq!(code, SqlState::QUERY_CANCELED);
}

#[test]
fn waiting_is_refused_where_it_could_never_end() {
    let cluster = relay_cluster(&[]);
    let mut client = cluster.connect(DB);
    let own = "begin; select outbox_wait(outbox_publish('T', '{}'))";
    let (code, hint) = refusal(&mut client, own);
    assert_eq!(code, SqlState::ACTIVE_SQL_TRANSACTION);
    assert!(hint.contains("Commit first"), "{hint}");
    client.run("rollback");
    // A message that was rolled back to a savepoint is not enqueued.
    client.run("begin; savepoint s; select outbox_publish('T', '{}'); rollback to s; select outbox_wait(1); commit");
    let (code, hint) = refusal(
        &mut client,
        "begin isolation level repeatable read; select outbox_wait(1)",
    );
    assert_eq!(code, SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
    assert!(hint.contains("READ COMMITTED"), "{hint}");
    client.run("rollback");
    for sql in [
        "select outbox_wait(1, '2 h')",
        "select outbox_wait(1, '-1 s')",
        "select outbox_wait(1, null)",
    ] {
        assert_eq!(refusal(&mut client, sql).0, SqlState::INVALID_PARAMETER_VALUE, "{sql}");
    }
    assert_eq!(
        refusal(&mut client, "select outbox_wait(null)").0,
        SqlState::NULL_VALUE_NOT_ALLOWED
    );
}

// ---- rights ---------------------------------------------------------------------------------------------------------

#[test]
fn a_relay_needs_its_group_role_which_grants_nothing_else() {
    let cluster = relay_cluster(&[]);
    cluster.exec(
        DB,
        "create role mover in role outbox_relay; create role app in role outbox_writer; create role outsider;
         select outbox_store('a')",
    );
    let mut client = cluster.connect(DB);
    let denied = |client: &mut Client, role: &str, sql: &str| {
        client.run(&format!("set role {role}"));
        client
            .batch_execute(sql)
            .is_err_and(|error| error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE))
    };
    for sql in [
        "select outbox_fetch_unpublished()",
        "select outbox_mark_published(1, -1)",
        "select outbox_mark_failed(1, -1, 'e')",
    ] {
        assert!(!denied(&mut client, "mover", sql), "{sql}");
        assert!(denied(&mut client, "app", sql), "{sql}");
        assert!(denied(&mut client, "outsider", sql), "{sql}");
    }
    for sql in ["select outbox_store('b')", "select outbox_wait(1, '0')"] {
        assert!(!denied(&mut client, "app", sql), "{sql}");
        assert!(denied(&mut client, "mover", sql), "{sql}");
    }
    for sql in [
        "select from outbox",
        "delete from outbox_events",
        "select outbox_internal.end_claim(1, -1, 'default', null, true)",
        "select outbox_internal.settle('', null, null, null, null, null, null, null, null, null)",
        "select outbox_internal.await_end(null, 0)",
        "select outbox_resume()",
    ] {
        assert!(denied(&mut client, "mover", sql), "{sql}");
    }
}

#[test]
fn bad_arguments_are_refused_with_a_hint() {
    let cluster = relay_cluster(&[]);
    let mut client = cluster.connect(DB);
    for (sql, code) in [
        ("select outbox_fetch_unpublished(0)", SqlState::INVALID_PARAMETER_VALUE),
        (
            "select outbox_fetch_unpublished(null)",
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (
            "select outbox_fetch_unpublished(claim_ttl => '0')",
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (
            "select outbox_fetch_unpublished(claim_ttl => '2 days')",
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (
            "begin isolation level repeatable read; select outbox_fetch_unpublished()",
            SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
        ),
        (
            "select outbox_fetch_unpublished(destination => 'nowhere')",
            SqlState::UNDEFINED_OBJECT,
        ),
    ] {
        let (found, hint) = refusal(&mut client, sql);
        client.run("rollback");
        assert_eq!(found, code, "{sql}");
        assert!(!hint.is_empty(), "{sql}");
    }
}

// ---- the documentation ----------------------------------------------------------------------------------------------

#[test]
fn the_python_relay_of_the_docs_works() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let installed = Command::new(tests.join("support/example_packages.sh")).status();
    assert!(installed.expect("run example_packages.sh").success(), "psycopg");
    let docs = std::fs::read_to_string(tests.join("../docs/relays.md")).expect("docs/relays.md");
    let (_, program) = docs.split_once("```python\n").expect("a program");
    let (program, _) = program.split_once("```").expect("its end");

    let cluster = relay_cluster(&[]);
    cluster.exec(
        DB,
        "create role mover login in role outbox_relay;
         select outbox_store('n ' || n, key => 'k') from generate_series(1, 5) n",
    );
    let login = cluster.conn_string(DB).replace("user=postgres", "user=mover");
    let output = Command::new(tests.join("../target/examples/python/bin/python3"))
        .args(["-c", program, &login])
        .output()
        .expect("run python");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8_lossy(&output.stdout);
    let sent: Vec<&str> = printed
        .lines()
        .map(|line| line.rsplit("Message ").next().unwrap_or_default())
        .collect();
    assert_eq!(sent, ["n 1", "n 2", "n 3", "n 4", "n 5"]);
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_history"), 5);

    store(&cluster, "bad", None);
    let fails = program
        .replace("print(", "raise ValueError(")
        .replace(", flush=True", "");
    let output = Command::new(tests.join("../target/examples/python/bin/python3"))
        .args(["-c", &fails, &login])
        .output()
        .expect("run python");
    assert_eq!(
        output.status.code(),
        Some(1),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(cluster.query_one::<bool>(
        DB,
        "select attempts = 1 and last_error like '%bad%' from outbox_waiting"
    ));
}
