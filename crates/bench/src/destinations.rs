//! Row destinations: the worker's processor time for a message of one destination beside 1,000 others ÷ beside 10. Then
//! how long such a message waits while 100 destinations that hang are replaced and dropped. All are by HTTP.

use std::thread;
use std::time::{Duration, Instant};

use support::{Receiver, Reply, create_receivers, publish_to_each};

use crate::cpu;
use crate::options::{Options, Placement};
use crate::report::{BenchReport, Sample, Side};
use crate::servers::{LONG, Servers};

const MANY: usize = 1_000;
const FEW: usize = 10;
const HANG: usize = 100;
/// Messages of a run, one after the other.
const MESSAGES: u32 = 300;
/// Messages while those that hang are replaced, and again while they are dropped.
const MEANWHILE: u32 = 20;

pub fn destinations(options: &Options, report: &mut BenchReport) {
    let mut many = Site::start(MANY, options, report);
    let mut few = Site::start(FEW, options, report);
    report.compare("destinations", ["beside 1,000", "beside 10"], |side| {
        let site = match side {
            Side::Ours => &mut many,
            Side::Other => &mut few,
        };
        site.run()
    });
    report.goal("CPU of the worker, a message", "a ratio of at most 1.5", |ratio, _| {
        ratio <= 1.5
    });
    report.goal("longest wait while 100 hang", "at most 1,000 ms", |_, ours| {
        ours <= 1_000.0
    });
}

/// A server with destinations, and their receivers.
struct Site {
    servers: Servers,
    works: Receiver,
    hangs: Receiver,
    /// Replaced connections get another limit of time, in s.
    timeout_s: u32,
}

impl Site {
    fn start(count: usize, options: &Options, report: &mut BenchReport) -> Self {
        // Through the table: a message of the fast path names its destination, and needs no claim.
        let conf = ["outbox.fast_path = off", "outbox.confirm_timeout = '1h'"];
        let servers = Servers::start(Placement::Unpinned, options.first_queue(), &conf, report);
        let (works, hangs) = (
            Receiver::start(|_| Reply::status(200)),
            Receiver::start(|_| Reply::Hang),
        );
        create_receivers(&servers.cluster, "d", count, &works);
        let mut site = Self {
            servers,
            works,
            hangs,
            timeout_s: 3_600,
        };
        (0..20).for_each(|_| _ = site.deliver()); // warm-up
        site
    }

    /// Publishes a message, and returns how long it took until the receiver had it.
    fn deliver(&mut self) -> Duration {
        let began = Instant::now();
        self.servers
            .sql_execute("select outbox_publish('T', '{}', destination => 'd1')");
        while self.works.take_requests().is_empty() {
            assert!(began.elapsed() < LONG, "the message does not arrive");
            thread::sleep(Duration::from_micros(200));
        }
        began.elapsed()
    }

    fn longest(&mut self) -> Duration {
        (0..MEANWHILE).map(|_| self.deliver()).max().expect("some")
    }

    fn run(&mut self) -> Sample {
        let worker = self.servers.processes(&[]).workers[0];
        let before = cpu::of_process(worker);
        let mut took: Vec<Duration> = (0..MESSAGES).map(|_| self.deliver()).collect();
        let us = (cpu::of_process(worker) - before) / f64::from(MESSAGES);
        took.sort_unstable();
        let ms = |took: Duration| took.as_secs_f64() * 1e3;
        Sample::default()
            .result("CPU of the worker, a message", "µs", us)
            .result(
                "longest wait while 100 hang",
                "ms",
                ms(self.longest_while_others_hang()),
            )
            .detail("median wait", "ms", ms(took[took.len() / 2]))
            .detail("longest wait", "ms", ms(took[took.len() - 1]))
    }

    fn longest_while_others_hang(&mut self) -> Duration {
        // Others in each run: their messages stay when they are dropped.
        self.timeout_s -= 1;
        let prefix = format!("h{}-", self.timeout_s);
        create_receivers(&self.servers.cluster, &prefix, HANG, &self.hangs);
        publish_to_each(&self.servers.cluster, &prefix, HANG, 1, "'{}'");
        let began = Instant::now();
        while self.hangs.requests().len() < HANG {
            assert!(began.elapsed() < LONG, "the messages do not arrive");
            thread::sleep(Duration::from_millis(10));
        }
        let timeout = format!("{} s", self.timeout_s);
        self.servers.cluster.set_conf("outbox.confirm_timeout", &timeout);
        let replaced = self.longest();
        let drop = format!("execute format('drop server %I cascade', '{prefix}' || n)");
        self.servers
            .sql_execute(&format!("do $$ begin for n in 1..{HANG} loop {drop}; end loop; end $$"));
        let dropped = self.longest();
        self.hangs.take_requests();
        replaced.max(dropped)
    }
}
