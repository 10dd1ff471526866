//! Seqs that meant events of another source before: what has ended then is taken for no message of now.

use super::{MAPPED, SHOP, set_source};
use crate::outboxctl::Ctl;
use support::{Cluster, DB, Stage, wait_drained, wait_true};

const RESET: &str = "select outbox_source_reset()";
const PUBLISH: &str = "select outbox_publish('Stored', '{}', 'person', 'ann')";

fn replay(cluster: &Cluster, seq: i64) -> i64 {
    let sql = format!("select outbox_replay(seq_from => {seq}, seq_to => {seq}, dry_run => false)");
    let replayed = cluster.query_one(DB, &sql);
    wait_drained(cluster);
    replayed
}

/// The rows of a seq in the history: its keys, in order of their ends.
fn history(cluster: &Cluster, seq: i64) -> Vec<String> {
    let sql = format!("select array_agg(key order by published_at) from outbox_history where seq = {seq}");
    cluster.query_one::<Option<Vec<String>>>(DB, &sql).unwrap_or_default()
}

fn erased(cluster: &Cluster, kind: &str, id: &str) -> i64 {
    let purge = |dry_run| {
        let sql = format!(
            "select rows from outbox_purge('{kind}', '{id}', dry_run => {dry_run}) where table_name = 'outbox_history'"
        );
        cluster.query_one::<i64>(DB, &sql)
    };
    let counted = purge(true);
    assert_eq!(purge(false), counted, "as many as were counted");
    counted
}

/// Seq 1 is an event of outbox_events, and then one of shop.events; seq 2 one of shop.events, whose first attempt
/// fails, and then, after a reset, one of outbox_events.
fn stage() -> Stage {
    let stage = Stage::new(&["outbox.retry_min = '50 ms'"]);
    stage.exec(DB, SHOP);
    stage.exec(DB, PUBLISH);
    wait_drained(&stage);
    stage.exec(DB, &set_source(MAPPED));
    stage.exec(DB, "select shop.write('{}', 'zoe')");
    wait_drained(&stage);
    stage.exec(
        DB,
        "begin; select shop.write('{}', 'bob'); update shop.events set \"eventKind\" = null where stream_id = 'bob'; commit",
    );
    wait_true(
        &stage,
        "a failed attempt",
        "select exists (select from outbox_attempts where seq = 2)",
    );
    stage.exec(DB, "update shop.events set \"eventKind\" = 'Fixed'");
    wait_drained(&stage);
    stage.exec(DB, RESET);
    stage.exec(DB, PUBLISH);
    wait_drained(&stage);
    assert_eq!(history(&stage, 2), ["order:bob", "person:ann"]);
    stage.all();
    stage
}

#[test]
fn a_replay_after_a_reset_sends_each_event_under_its_own_key() {
    let stage = stage();
    assert_eq!(replay(&stage, 2), 1);
    let delivered = stage.all();
    assert_eq!(delivered.len(), 1);
    assert_eq!(delivered[0].json()["key"], "person:ann");
    assert_eq!(
        replay(&stage, 1),
        1,
        "it was in outbox_events before the source was set, and is again"
    );
    let keys = history(&stage, 1);
    assert_eq!(
        keys,
        ["person:ann", "order:zoe", "person:ann"],
        "not the key of the latest message"
    );
    // The rows of the source may have changed, so what it had before is not sent again.
    stage.exec(DB, &set_source(MAPPED));
    assert_eq!(replay(&stage, 2), 0);
    stage.exec(DB, "select shop.write('{}', 'eve')");
    wait_drained(&stage);
    assert_eq!(replay(&stage, 3), 1);
    stage.exec(DB, RESET);
    assert_eq!(replay(&stage, 3), 0);
}

#[test]
fn a_purge_after_a_reset_erases_no_other_aggregate() {
    let stage = stage();
    assert_eq!(erased(&stage, "person", "ann"), 2, "seqs 1 and 2 of outbox_events");
    assert_eq!(history(&stage, 2), ["order:bob"]);
    assert_eq!(erased(&stage, "order", "bob"), 1);
    assert_eq!(erased(&stage, "order", "zoe"), 1);
    let left = "select (select count(*) from outbox_history) + (select count(*) from outbox_attempts)";
    assert_eq!(stage.query_one::<i64>(DB, left), 0);
}

#[test]
fn a_purge_while_a_source_is_set_erases_what_outbox_events_had_of_the_aggregate() {
    let stage = stage();
    stage.exec(DB, &set_source(MAPPED));
    assert_eq!(erased(&stage, "person", "ann"), 2);
    assert_eq!(history(&stage, 2), ["order:bob"]);
    let failed = "select count(*) from outbox_attempts where seq = 2";
    assert_eq!(stage.query_one::<i64>(DB, failed), 1, "of the order");
}

#[test]
fn views_show_no_event_of_outbox_events_for_a_message_of_a_source() {
    let stage = stage();
    let shown = "select array_agg(coalesce(type, '-') order by published_at) from outbox_messages where seq = 2";
    assert_eq!(stage.query_one::<Vec<String>>(DB, shown), ["-", "Stored"]);
    let shown = Ctl::new(&stage, &["show", "2", "--json"]).run().json();
    let text = shown.to_string();
    assert!(text.contains("person:ann") && !text.contains("order:bob"), "{text}");
    assert!(
        !text.contains("its type is NULL"),
        "an attempt of the other message: {text}"
    );
    assert_eq!(stage.query_one::<String>(DB, "select outbox_wait(2)"), "published");
    stage.exec(DB, &set_source(MAPPED));
    assert_eq!(stage.query_one::<String>(DB, "select outbox_wait(2)"), "unknown");
}
