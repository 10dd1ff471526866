//! Row idle: the processor time of a server whose outbox has nothing to do ÷ that of a server without the extension.
//! The broker is connected and has nothing to do either.

use std::thread;
use std::time::{Duration, Instant};

use support::{Cluster, wait_true};

use crate::cpu;
use crate::options::{Options, Placement};
use crate::report::{BenchReport, Sample, Side};
use crate::servers::{DB, Servers};

pub fn idle(options: &Options, report: &mut BenchReport) {
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    let plain = Cluster::builder().conf("fsync = on").preload(false).start();
    // The time after a start is not idle: maintenance counts messages, and the checkpointer writes what the start has
    // changed.
    wait_true(
        &servers.cluster,
        "maintenance to end",
        "select not exists (select from pg_stat_activity where backend_type = 'outbox maintenance')
            and exists (select from outbox_status where pending = 0)",
    );
    // Autovacuum, too, has work after a start: the catalogs have changed.
    for tidy_up in ["vacuum analyze", "checkpoint"] {
        servers.sql_execute(tidy_up);
        plain.exec(DB, tidy_up);
    }
    let worker = servers.processes(&[]).workers[0];
    let length = Duration::from_secs(options.idle_seconds.into());
    report.compare("idle", ["with the outbox", "without"], |side| match side {
        Side::Ours => {
            let before = cpu::of_process(worker);
            let all = percent_of_a_core(&servers.cluster, length);
            let of_worker = (cpu::of_process(worker) - before) / length.as_secs_f64() / 1e4;
            Sample::default()
                .result("", "%", all)
                .detail("of it the worker", "%", of_worker)
        }
        Side::Other => Sample::default().result("", "%", percent_of_a_core(&plain, length)),
    });
    report.goal("", "at most 0.2 % with the outbox", |_, ours| ours <= 0.2);
}

fn percent_of_a_core(cluster: &Cluster, length: Duration) -> f64 {
    let (before, from) = (cpu::of_server(cluster.pid()), Instant::now());
    thread::sleep(length);
    (cpu::of_server(cluster.pid()) - before) / from.elapsed().as_secs_f64() / 1e4
}
