//! Claims: one statement marks rows that were chosen before, and what it returns is claimed.

use support::Broker;

use super::{Host, Stage, of_key};
use support::{DB, Session, all_of, exchange_and_queue, labels, wait_published, wait_true};

const MESSAGES: usize = 300;

fn publish(key: &str, messages: usize) -> String {
    format!(
        "select outbox_publish('T', jsonb_build_object('label', '{key} ' || n), 'item', '{key}', 'x')
         from generate_series(1, {messages}) n"
    )
}

fn numbered(key: &str, messages: usize) -> Vec<String> {
    (1..=messages).map(|n| format!("{key} {n}")).collect()
}

pub fn a_claim_is_an_update_that_returns_what_it_claims(host: Host) {
    let conf = [
        "shared_preload_libraries = 'outbox,pg_stat_statements'",
        "pg_stat_statements.track = all",
        "outbox.fast_path = off",
    ];
    let (exchange, _) = exchange_and_queue(Broker::shared());
    let stage = Stage::idle(host, &Broker::shared().url(), &exchange, &conf);
    stage.cluster.exec(DB, "create extension pg_stat_statements");
    let marked = "select coalesce(sum(rows), 0)::bigint from pg_stat_statements
                  where userid = 'outbox_worker'::regrole
                    and query ~* 'update \\S*outbox o\\s+set claim_token.*returning'";
    for leasing in [true, false] {
        let configure = format!("select outbox_configure(leasing => {leasing})");
        stage.cluster.exec(DB, &configure);
        stage.cluster.exec(DB, "select pg_stat_statements_reset()");
        stage.cluster.exec(DB, "truncate outbox_history");
        stage.cluster.exec(DB, &publish("k", MESSAGES));
        stage.work(1);
        wait_published(&stage.cluster, MESSAGES);
        stage.stop();
        let marked = stage.cluster.query_one::<i64>(DB, marked) as usize;
        // A message may be claimed again, for example if the first pass has no connection yet.
        assert!(
            (MESSAGES..2 * MESSAGES).contains(&marked),
            "{marked} marked, leasing {leasing}"
        );
    }
}

pub fn a_row_that_changes_while_a_claim_waits_for_it_is_not_overtaken(host: Host) {
    let (exchange, queue) = exchange_and_queue(Broker::shared());
    let stage = Stage::idle(host, &Broker::shared().url(), &exchange, &[]);
    stage.cluster.exec(DB, &publish("k", 5));
    // The claim of this row waits for the transaction, and goes on when it has changed the row.
    let mut other = stage.cluster.connect(DB);
    other.run("begin; update outbox set last_error = 'changed', claim_token = -7, claim_until = now() where seq = 2");
    stage.work(1);
    wait_true(
        &stage.cluster,
        "a claim to wait for the row",
        "select exists (select from pg_stat_activity where wait_event = 'transactionid'
                        and (backend_type like 'outbox%' or application_name = 'outboxctl work'))",
    );
    other.run("commit");
    wait_published(&stage.cluster, 5);
    assert_eq!(labels(&all_of(Broker::shared(), &queue)), numbered("k", 5));
}

pub fn a_backlog_goes_while_an_index_is_not_ready(host: Host) {
    let (exchange, queue) = exchange_and_queue(Broker::shared());
    let stage = Stage::idle(host, &Broker::shared().url(), &exchange, &["outbox.fast_path = off"]);
    // No page has room for the new version of a row, so each needs entries in all indexes.
    let fill = format!("alter table outbox set (fillfactor = 100); {}", publish("k", MESSAGES));
    stage.cluster.exec(DB, &fill);
    stage.cluster.exec(DB, "vacuum full outbox");
    let mut holder = stage.cluster.connect(DB);
    holder.run("begin; lock table outbox in row exclusive mode");
    let mut builder = stage.cluster.connect(DB);
    let cancel = builder.cancel_token();
    let built = std::thread::spawn(move || {
        builder.batch_execute("create index concurrently unfinished on outbox (claim_token)")
    });
    wait_true(
        &stage.cluster,
        "the index to exist and not to be ready",
        "select exists (select from pg_index where indexrelid = to_regclass('unfinished') and not indisready)",
    );
    stage.work(1);
    wait_published(&stage.cluster, MESSAGES);
    cancel.cancel_query(postgres::NoTls).expect("cancel");
    built.join().expect("no panic").expect_err("the build was canceled");
    holder.run("rollback");
    // Left behind as it is, until somebody drops it.
    stage.cluster.exec(DB, &publish("l", MESSAGES));
    wait_published(&stage.cluster, 2 * MESSAGES);
    let arrived = labels(&all_of(Broker::shared(), &queue));
    for key in ["k", "l"] {
        assert_eq!(of_key(&arrived, key), numbered(key, MESSAGES));
    }
    let problem = "select string_agg(problem, '; ') from outbox_health where \"check\" = 'database' and not ok";
    assert_eq!(stage.cluster.query_one::<Option<String>>(DB, problem), None);
}
