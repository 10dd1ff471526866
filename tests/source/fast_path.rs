//! Messages of a source on the fast path: the session hands over the message, and the worker reads the row after
//! COMMIT.

use super::{MAPPED, SHOP, body, set_source};
use support::{Consumer, DB, LONG, Session, Stage, wait_drained, wait_until};

/// A source, and a worker that has read all its lanes to their end.
fn stage() -> (Stage, Consumer) {
    let stage = Stage::new(&[]);
    stage.exec(DB, SHOP);
    stage.exec(DB, &set_source(MAPPED));
    stage.exec(DB, "select shop.write('{\"n\": 0}', 'first')");
    let consumer = stage.consumer();
    consumer.next();
    wait_drained(&stage);
    (stage, consumer)
}

#[test]
fn a_message_of_a_source_is_sent_as_committed_before_it_is_claimed() {
    let (stage, consumer) = stage();
    let mut other = stage.connect(DB);
    let mut held = other.transaction().expect("begin");
    held.run("lock table outbox_paused in access exclusive mode"); // each claim reads it
    for (sql, n) in [
        ("select shop.write('{\"n\": 1}', 's')", 1),
        // The row changes after it was enqueued.
        (
            "begin; select shop.write('{\"n\": 1}', 's'); update shop.events set data = '{\"n\": 2}' where stream_id = 's'; commit",
            2,
        ),
        // What it was before the savepoint counts.
        (
            "begin; select shop.write('{\"n\": 3}', 't'); savepoint s; update shop.events set data = '{}' where stream_id = 't';
             rollback to s; commit",
            3,
        ),
        (
            "select outbox_attach('shop.events', seq => 'position');
             insert into shop.events (\"eventKind\", stream_id, data) values ('Attached', 'u', '{\"n\": 4}')",
            4,
        ),
    ] {
        stage.exec(DB, sql);
        let delivery = consumer.next();
        assert_eq!(body(&delivery, "payload")["n"], n, "{sql}");
    }
    let rows = "select count(*) from outbox";
    wait_until("the settle without a claim", LONG, || {
        held.query_one(rows, &[]).expect("count").get::<_, i64>(0) == 0
    });
    held.rollback().expect("rollback");
    wait_drained(&stage);
}

#[test]
fn a_row_that_fails_or_is_missing_ends_its_own_message_on_the_fast_path_too() {
    let (stage, consumer) = stage();
    let mut other = stage.connect(DB);
    let mut held = other.transaction().expect("begin");
    held.run("lock table outbox_paused in access exclusive mode");
    stage.exec(
        DB,
        "begin; select shop.write('{\"n\": 1}', 'a'), shop.write('{\"n\": 2}', 'b'), shop.write('{\"n\": 3}', 'c');
         update shop.events set \"eventKind\" = null where stream_id = 'a'; delete from shop.events where stream_id = 'b'; commit",
    );
    assert_eq!(body(&consumer.next(), "payload")["n"], 3);
    let ended =
        "select (select count(*) from outbox_waiting where last_error like '%its type is NULL%' and attempts = 1)
                      + (select count(*) from outbox_dead where reason like '%has no row with seq%')";
    wait_until("both ends", LONG, || {
        held.query_one(ended, &[]).expect("count").get::<_, i64>(0) == 2
    });
    held.rollback().expect("rollback");
}
