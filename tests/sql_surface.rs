//! The calls of docs/sql-api.md as drivers make them. What they answer, and what is refused, is in pg_test/.

mod common;

use common::DB;
use support::Cluster;

#[test]
fn the_documented_calls_work_with_untyped_parameters() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(DB, "create extension outbox");
    let mut client = cluster.connect(DB);
    client
        .batch_execute("create table a (id int primary key); create table journal (seq bigint, kind text)")
        .expect("tables");
    // As node-postgres does: the statement is parsed without types, and the server finds them.
    for call in [
        "select outbox_publish($1, $2, $3, $4, $5)",
        "select outbox_enqueue($1)",
        "select outbox_enqueue($1, $2)",
        "select outbox_enqueue($1, key => $2, available_at => $3)",
        "select outbox_enqueue_many($1, $2)",
        "select outbox_partition_of($1)",
        "select outbox_partition_of($1, $2)",
        "select outbox_retry($1)",
        "select outbox_retry($1, reason => $2)",
        "select outbox_pause($1, $2)",
        "select outbox_resume($1, $2)",
        "select outbox_discard($1, reason => $2)",
        "select outbox_attach($1, $2)",
        "select outbox_detach($1)",
        "select outbox_capture($1, aggregate_type => $2, columns => $3)",
        "select outbox_uncapture($1)",
        "select outbox_source_set($1, seq => $2, type => $3, created_at => $4, payload => $5)",
        "select outbox_source_reset()",
        "select outbox_retry_where(type => $1, error_like => $2, died_after => $3, dry_run => $4)",
        "select outbox_discard_where(seq_from => $1, max_rows => $2, reason => $3)",
        "select outbox_inbox_receive($1, $2)",
        "select outbox_adopt($1)",
        "select outbox_drain($1)",
        "select * from outbox_check($1)",
        "select outbox_tick($1)",
        "select * from outbox_relay($1, $2)",
        "select * from outbox_purge($1, $2, $3, dry_run => $4)",
        "select outbox_replay(seq_from => $1, seq_to => $2, type => $3, dry_run => $4)",
        "select outbox_store($1, $2, $3, $4)",
        "select outbox_wait($1, $2)",
        "select * from outbox_fetch_unpublished($1, $2, $3)",
        "select outbox_mark_published($1, $2)",
        "select outbox_mark_failed($1, $2, $3)",
    ] {
        client.prepare(call).unwrap_or_else(|error| panic!("{call}: {error:?}"));
    }
    // As psycopg does: literals in quotes.
    for call in [
        "select outbox_publish('OrderPlaced', '{\"order\": 1}', 'order', '1', 'placed')",
        "select outbox_enqueue('1')",
        "select outbox_enqueue('9', 'k', NULL, '2030-01-01')",
        "select outbox_enqueue_many('{10,11}', 'k')",
        "select outbox_partition_of('k', '16')",
        "select outbox_retry('9')",
        "select outbox_discard('9', NULL, 'why')",
        "select outbox_attach('journal', 'kind is not null', destination => 'default')",
        "select outbox_detach('journal')",
        "select outbox_capture('a', 'thing', columns => '{id}')",
        "select outbox_uncapture('a')",
        "select outbox_retry_where(type => 'T', died_before => '2030-01-01', seq_to => '7', dry_run => 'false')",
        "select outbox_adopt('why')",
        "select outbox_drain('0 s')",
        "select outbox_discard_where(key => 'k', max_rows => '10')",
        "select outbox_store('O:8:\"stdClass\"', '{\"type\": \"T\"}', NULL, '01a1fc85-047b-72cc-b926-c7a014466422')",
        "select outbox_wait('9', '0')",
        "select outbox_mark_failed('9', '-1', 'why')",
        "select outbox_check('default')",
        "select outbox_replay(created_from => '2030-01-01', source_destination => 'default', dry_run => 'false')",
    ] {
        client
            .batch_execute(call)
            .unwrap_or_else(|error| panic!("{call}: {error:?}"));
    }
}
