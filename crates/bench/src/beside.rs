//! Row beside: what applications pay while the worker delivers on the same cores. The rate of transactions with
//! outbox_publish(), whose messages are delivered meanwhile ÷ with an INSERT of the event, while nothing is delivered. And
//! the time of a COMMIT with outbox_publish() on a machine that has little to do, with delivery ÷ without.

use crate::clients::{Application, Method, Pace, Transactions, Until};
use crate::options::{Options, Placement};
use crate::report::{BenchReport, Side};
use crate::servers::Servers;

const SESSIONS: u32 = 16;
/// The transactions a second of the one session whose COMMITs are timed.
const RATE: u32 = 100;

pub fn beside(options: &Options, report: &mut BenchReport) {
    let servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    servers.pause();
    let mut application = Application::new(servers);
    let row = format!("beside, {SESSIONS} sessions");
    let pace = Pace::AsFastAsPossible(SESSIONS);
    report.compare(&row, ["publish, deliver", "INSERT"], |side| {
        match side {
            Side::Ours => while_delivering(&mut application, pace, options.seconds),
            Side::Other => while_paused(&mut application, Method::Insert, pace, options.seconds),
        }
        .rate_beside()
    });
    report.goal("", "a ratio of at least 0.8", |ratio, _| ratio >= 0.8);
    let row = format!("beside, COMMIT at {RATE}/s, median");
    let pace = Pace::OneSession(RATE);
    report.compare(&row, ["delivery", "paused"], |side| {
        match side {
            Side::Ours => while_delivering(&mut application, pace, options.seconds),
            Side::Other => while_paused(&mut application, Method::Publish, pace, options.seconds),
        }
        .commit()
    });
}

fn while_paused(application: &mut Application, method: Method, pace: Pace, seconds: u32) -> Transactions {
    application.forget();
    application.run(method, pace, seconds, Until::Committed)
}

fn while_delivering(application: &mut Application, pace: Pace, seconds: u32) -> Transactions {
    application.forget();
    application.servers.resume();
    support::wait_connected(&application.servers.cluster);
    let transactions = application.run(Method::Publish, pace, seconds, Until::Published);
    application.servers.pause();
    transactions
}
