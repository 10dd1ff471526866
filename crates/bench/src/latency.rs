//! Rows latency and commits. Latency: the time from sending COMMIT until a consumer has the message, the outbox ÷ an
//! application that publishes after its commit. The outbox gets the event by outbox_publish(); then, with the
//! application's table of events as the source, its seq by outbox_enqueue(). Commits: the rate of transactions with
//! outbox_publish() ÷ with an INSERT of the event: while delivery is paused, and while the worker delivers.

use crate::clients::{Application, Method, Pace, Until};
use crate::options::{Options, Placement, name};
use crate::report::{BenchReport, Side};
use crate::servers::Servers;

/// Makes the application's table of events the source. Its owner is no superuser, as expressions run as the owner.
const SOURCE: &str = "create role application; alter table app_events owner to application;
    select outbox_source_set('app_events', seq => 'seq', id => 'id', type => 'type', created_at => 'created_at',
      aggregate_type => 'aggregate_type', aggregate_id => 'aggregate_id', operation => 'operation', payload => 'payload')";

pub fn latency(options: &Options, report: &mut BenchReport) {
    let servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    let mut application = Application::new(servers);
    compare(options, report, &mut application, "latency", Method::Publish);
    // A source is set only while no message waits.
    application.servers.sql_execute("select outbox_drain()");
    application.servers.sql_execute(SOURCE);
    compare(
        options,
        report,
        &mut application,
        "latency of a source",
        Method::InsertAndEnqueue,
    );
}

fn compare(options: &Options, report: &mut BenchReport, application: &mut Application, what: &str, ours: Method) {
    for &queue in &options.queues {
        application.servers.queue = queue;
        for &rate in &options.rates {
            let row = format!("{what}, {}, {rate}/s", name(&queue));
            report.compare(&row, ["outbox", "publish after commit"], |side| {
                let method = if side == Side::Ours {
                    ours
                } else {
                    Method::InsertAndPublishLater
                };
                application
                    .run(method, Pace::PerSecond(rate), options.seconds, Until::Received)
                    .latency()
            });
        }
    }
}

pub fn commits(options: &Options, report: &mut BenchReport) {
    let servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    servers.pause();
    let mut application = Application::new(servers);
    for (sessions, synchronous_commit, delivers) in [
        (1, "on", false),
        (16, "on", false),
        (16, "off", false),
        (16, "on", true),
    ] {
        application
            .servers
            .cluster
            .set_conf("synchronous_commit", synchronous_commit);
        let row = match delivers {
            true => format!("commits, {sessions} sessions, while the worker delivers"),
            false => format!("commits, {sessions} sessions, synchronous_commit {synchronous_commit}"),
        };
        let pace = Pace::AsFastAsPossible(sessions);
        report.compare(&row, ["outbox_publish", "INSERT"], |side| {
            application.forget();
            if side == Side::Other {
                return application
                    .run(Method::Insert, pace, options.seconds, Until::Committed)
                    .rate();
            }
            if delivers {
                application.servers.resume();
                support::wait_connected(&application.servers.cluster);
            }
            let transactions = application.run(Method::Publish, pace, options.seconds, Until::Committed);
            application.servers.pause();
            transactions.rate()
        });
    }
}
