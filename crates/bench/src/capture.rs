//! Row capture: the processor time of the writes to a captured table in their session ÷ that of the same writes to a
//! table without triggers. Once by statements of many rows, once by statements of one. Nothing is delivered meanwhile.

use crate::cpu;
use crate::options::{Options, Placement};
use crate::report::{BenchReport, Sample, Side};
use crate::servers::Servers;

const ROWS: u32 = 10_000;
/// Statements of one row each, in one transaction.
const STATEMENTS: u32 = 2_000;

pub fn capture(options: &Options, report: &mut BenchReport) {
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    servers.pause();
    for table in ["captured", "plain"] {
        servers.sql_execute(&format!(
            "create table {table} (id int primary key, name text, price numeric, at timestamptz default now(), n int)"
        ));
    }
    servers.sql_execute("select outbox_capture('captured')");
    servers.sql_execute(
        "alter table captured set (autovacuum_enabled = off); alter table plain set (autovacuum_enabled = off)",
    );
    for table in ["captured", "plain"] {
        run(&mut servers, table); // a warm-up
    }
    report.compare("capture", ["captured", "without"], |side| {
        let table = match side {
            Side::Ours => "captured",
            Side::Other => "plain",
        };
        run(&mut servers, table)
    });
}

/// Inserts, updates and deletes; the processor time of a row, in µs.
fn run(servers: &mut Servers, table: &str) -> Sample {
    servers.sql_execute(&format!(
        "select outbox_uncapture('{table}'); truncate {table}, outbox, outbox_events"
    ));
    if table == "captured" {
        servers.sql_execute("select outbox_capture('captured')");
    }
    let new = "g, 'item ' || g, g * 1.1, now(), g";
    let many = [
        format!("insert into {table} select {new} from generate_series(1, {ROWS}) g"),
        format!("update {table} set n = n + 1"),
        format!("delete from {table}"),
    ];
    let one = |statement: &str| {
        format!("do $$ declare g int; begin for g in 1..{STATEMENTS} loop {statement}; end loop; end $$")
    };
    let single = [
        one(&format!("insert into {table} values ({new})")),
        one(&format!("update {table} set n = n + 1 where id = g")),
        one(&format!("delete from {table} where id = g")),
    ];
    let mut us = |sql: &str, rows: u32| {
        let session = servers.processes(&[]).own_session;
        let before = cpu::of_process(session);
        servers.sql_execute(sql);
        (cpu::of_process(session) - before) / f64::from(rows)
    };
    let [insert, update, delete] = many.map(|sql| us(&sql, ROWS));
    let [insert_one, update_one, delete_one] = single.map(|sql| us(&sql, STATEMENTS));
    Sample::default()
        .result("insert", "µs", insert)
        .result("update", "µs", update)
        .result("delete", "µs", delete)
        .result("insert of one row", "µs", insert_one)
        .result("update of one row", "µs", update_one)
        .result("delete of one row", "µs", delete_one)
}
