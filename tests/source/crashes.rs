//! Kills of a worker and of the server, and changes of the table, while workers in and outside the server deliver the
//! events of a source. An oracle judges what arrived.

use super::{MAPPED, SHOP, set_source};
use support::chaos::rounds;
use support::courier::{Outside, make_courier};
use support::faults::{Faults, Message, read_messages};
use support::load::{Load, Plan};
use support::oracle::judge;
use support::{Cluster, DB, Stage, arrived, process, wait_drained, wait_for, wait_true};

/// The messages of the source, as the oracle of faults needs them.
fn messages(cluster: &Cluster) -> Vec<Message> {
    let sql = "select e.data->>'label', m.seq, m.enqueued_at, coalesce(m.published_at, clock_timestamp()), coalesce(m.key, ''), 0::bigint
               from outbox_messages m join shop.events e on e.position = m.seq where e.data->>'label' is not null";
    read_messages(cluster, DB, sql, &[])
}

#[test]
fn kills_and_changes_of_the_table_lose_and_reorder_no_event_and_send_none_that_is_not_committed() {
    let stage = Stage::new(&["outbox.workers = 2"]);
    stage.exec(DB, SHOP);
    stage.exec(DB, &set_source(MAPPED));
    make_courier(&stage);
    let _outside = Outside::start(&stage, "reader");
    let wait_for_all = || {
        let all = "select count(*) = 3 and sum(partitions) = 16 from outbox_worker_status
                   where alive and partitions > 0 and state = 'connected'";
        wait_true(&stage, "all workers", all);
    };
    wait_for_all();
    let plan = Plan {
        keys: 200,
        writers: 4,
        mixed: true,
        statement: "select shop.write($1::jsonb, $2::text)",
        ..Plan::default()
    };
    let load = Load::start(&stage, &plan);
    let mut faults = Faults::default();
    for number in 0..2 * rounds(2) {
        load.wait_for_more(300);
        faults.during(3, || {
            match number % 2 {
                0 => {
                    let sql = "select pid from pg_stat_activity where backend_type = 'outbox worker' limit 1";
                    let pid = wait_for("a worker", support::LONG, || {
                        let row = stage.connect(DB).query_opt(sql, &[]).expect("the workers");
                        row.map(|row| row.get::<_, i32>(0))
                    });
                    let offset = stage.log_offset();
                    process::signal(pid as u32, libc::SIGKILL); // Postgres restarts all its processes then
                    stage.wait_for_log("all server processes terminated", offset);
                }
                _ => {
                    stage.kill_postmaster();
                    stage.start_again();
                }
            }
            wait_for_all();
        });
        load.wait_for_more(100);
        let rewrite = if number % 2 == 0 { "jsonb" } else { "json" };
        stage.exec(
            DB,
            &format!("alter table shop.events add column more{number} int default 1, alter column meta type {rewrite} using meta::{rewrite}"),
        );
    }
    load.wait_for_more(100);
    let sent = load.stop();
    wait_drained(&stage);
    let arrived = arrived(&stage.all());
    let verdict = judge(&sent, &arrived);
    println!("{} arrived, {} again", arrived.len(), verdict.doubled.len());
    faults.assert_explain(&verdict, &messages(&stage));
}
