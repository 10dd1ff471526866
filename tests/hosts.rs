//! Workers in the server and workers outside it must behave the same: both are thin hosts of one worker, crates/worker.
//! Each test here runs against both, on a real Postgres, a real RabbitMQ and receivers of webhooks. `server::…` uses
//! workers in the server, `outside::…` uses `outbox.workers = 0` and processes of `outboxctl work`.

mod claims;
mod destinations;
mod keys;
mod lanes;
mod leases;
mod notices;
mod running;
mod subscriptions;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use support::courier::{Outside, make_courier};
use support::{Broker, Cluster, Receiver, Reply, wait_until};
use support::{DB, LONG, server_file, unconnected_cluster, wait_for_heartbeat, wait_true};

/// Makes two tests of each function: one for each host.
macro_rules! on_both_hosts {
    ($($module:ident :: $name:ident),* $(,)?) => {
        mod server {
            $(#[test] fn $name() { crate::hosts::$module::$name(crate::hosts::Host::Server) })*
        }
        mod outside {
            $(#[test] fn $name() { crate::hosts::$module::$name(crate::hosts::Host::Outside) })*
        }
    };
}

on_both_hosts! {
    keys::two_workers_deliver_every_message_once_and_in_order,
    keys::a_failed_message_is_retried_and_messages_behind_it_wait,
    keys::an_open_or_prepared_transaction_holds_its_keys_and_no_other,
    keys::a_worker_keeps_the_order_of_a_whole_partition,
    destinations::a_receiver_that_hangs_is_down_until_it_answers_a_message,
    destinations::a_destination_with_invalid_options_is_named_and_delays_no_other,
    destinations::while_a_message_is_tried_alone_nothing_is_claimed_and_no_pass_spins,
    destinations::a_destination_that_is_down_tries_one_message_and_others_continue,
    destinations::a_destination_that_is_created_during_a_request_is_served_by_it,
    destinations::a_destination_at_a_loopback_address_gets_nothing_until_the_setting_names_it,
    claims::a_claim_is_an_update_that_returns_what_it_claims,
    claims::a_row_that_changes_while_a_claim_waits_for_it_is_not_overtaken,
    claims::a_backlog_goes_while_an_index_is_not_ready,
    lanes::locked_rows_delay_their_lane_and_no_other,
    lanes::an_error_in_one_lane_loses_no_claimed_message_of_other_lanes,
    leases::queued_messages_are_not_sent_when_a_worker_resumes_after_its_lease,
    leases::messages_queued_under_an_old_lease_are_not_sent_under_a_new_one,
    leases::queued_messages_are_not_sent_by_a_worker_that_waits_for_a_lock_past_its_lease,
    leases::a_worker_alone_that_stalls_past_its_lease_settles_what_was_confirmed,
    leases::with_leasing_off_no_other_worker_takes_what_a_slow_receiver_delays,
    leases::a_changed_setting_takes_effect_at_once_and_the_leases_are_refreshed,
    notices::a_dead_letter_sends_a_notice_and_the_notice_none,
    subscriptions::an_id_that_sessions_publish_at_once_arrives_once,
    subscriptions::subscriptions_that_change_under_load_lose_and_double_nothing,
    running::parked_messages_are_released_while_the_database_is_not_adopted_and_go_in_order_afterwards,
    running::a_broker_that_stops_and_starts_loses_nothing_and_charges_nothing,
    running::a_new_password_is_read_without_a_reload_and_ends_no_working_connection,
    running::a_paused_destination_waits_and_continues_in_order,
    running::a_message_committed_with_a_pause_is_not_overtaken,
    running::workers_that_are_stopped_cleanly_repeat_nothing,
    running::a_message_in_flight_while_the_partitions_change_is_sent_once,
    running::a_message_waits_with_its_worker_for_the_standby,
    running::no_memory_of_a_worker_is_in_transparent_huge_pages,
}

/// Where the workers run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    Server,
    Outside,
}

/// A worker id, and the process that runs the worker.
pub struct Worker {
    pub id: String,
    pub pid: u32,
}

/// A server with workers of one host.
pub struct Stage {
    host: Host,
    /// The workers outside the server, by their names: the first is w0.
    outside: RefCell<Vec<Outside>>,
    /// With the password of the broker; None = the default password.
    password_file: RefCell<Option<PathBuf>>,
    pub cluster: Cluster,
}

impl Stage {
    /// A server without running workers. Its default destination is `exchange` of the broker at `url`.
    pub fn idle(host: Host, url: &str, exchange: &str, conf: &[&str]) -> Self {
        let mut lines = vec!["outbox.workers = 0", "outbox.http_allow = '127.0.0.1'"];
        lines.extend(conf);
        let cluster = unconnected_cluster(url, exchange, &lines);
        make_courier(&cluster);
        Self {
            host,
            outside: RefCell::default(),
            password_file: RefCell::default(),
            cluster,
        }
    }

    /// Like [`Self::idle`], with one running worker.
    pub fn new(host: Host, url: &str, exchange: &str, conf: &[&str]) -> Self {
        let stage = Self::idle(host, url, exchange, conf);
        stage.work(1);
        stage
    }

    /// A server with one worker that delivers to `exchange` of the shared broker.
    pub fn of_broker(host: Host, exchange: &str, conf: &[&str]) -> Self {
        Self::new(host, &Broker::shared().url(), exchange, conf)
    }

    /// A server with one worker and no usable default destination: it delivers only to destinations that the test
    /// makes.
    pub fn of_nothing(host: Host, conf: &[&str]) -> Self {
        Self::new(host, "", "nowhere", conf)
    }

    /// Starts `count` workers where none runs. Waits until they share the partitions and know the states of their
    /// destinations.
    pub fn work(&self, count: usize) {
        match self.host {
            Host::Server => self.cluster.set_conf("outbox.workers", &count.to_string()),
            Host::Outside => {
                let password_file = self.password_file.borrow();
                let start = |number| {
                    let log = self.log_file(number);
                    Outside::spawn_with_log(&self.cluster, &format!("w{number}"), password_file.as_deref(), &log)
                };
                self.outside.replace((0..count).map(start).collect());
            }
        }
        self.wait_shared(count);
    }

    /// Writes the password of the broker to the file that workers started from now on read it from.
    pub fn write_password(&self, password: &str) {
        let path = server_file(&self.cluster, "broker.password", password, 0o600);
        if self.password_file.replace(Some(path.clone())).is_none() {
            self.cluster
                .set_conf("outbox.password_file", &path.display().to_string());
        }
    }

    /// Waits until `count` workers share the partitions, and know the states of their destinations.
    pub fn wait_shared(&self, count: usize) {
        let is_known = "state not in ('starting', 'connecting')";
        wait_true(
            &self.cluster,
            &format!("{count} workers to share the partitions"),
            &format!(
                "select count(*) = {count} and bool_and({is_known}) and (not s.leasing
                   or sum(w.partitions) = s.partition_count and min(w.partitions) >= sum(w.partitions)::int / {count})
                 from outbox_worker_status w, outbox_settings s where w.alive group by s.leasing, s.partition_count"
            ),
        );
    }

    /// Stops all workers in an orderly way; they release their leases.
    pub fn stop(&self) {
        match self.host {
            Host::Server => self.cluster.set_conf("outbox.workers", "0"),
            Host::Outside => {
                for outside in self.outside.take() {
                    assert_eq!(outside.stop(), Some(0));
                }
            }
        }
        wait_true(
            &self.cluster,
            "the workers to stop",
            "select not exists (select from outbox_worker_status where alive)
                and not exists (select from outbox_partitions where lease_owner is not null)",
        );
    }

    /// The running workers.
    pub fn workers(&self) -> Vec<Worker> {
        let worker = |filter: &str| -> (String, i32) {
            let sql =
                format!("select worker_id, pid from outbox_worker_status where alive and worker_id like '{filter}'");
            let row = self.cluster.connect(DB).query_one(&sql, &[]);
            let row = row.unwrap_or_else(|error| panic!("worker {filter}: {error:?}"));
            (row.get(0), row.get(1))
        };
        match self.host {
            Host::Server => {
                let count: i64 = self
                    .cluster
                    .query_one(DB, "select count(*) from outbox_worker_status where alive");
                let of = |number| {
                    let (id, pid) = worker(&format!("server-{number}"));
                    Worker { id, pid: pid as u32 }
                };
                (1..=count).map(of).collect()
            }
            Host::Outside => {
                // The server knows only the process of the worker's session.
                let of = |(number, outside): (usize, &Outside)| Worker {
                    id: worker(&format!("work-w{number}-%")).0,
                    pid: outside.child.as_ref().expect("it runs").id(),
                };
                self.outside.borrow().iter().enumerate().map(of).collect()
            }
        }
    }

    /// Makes a destination that the workers may use.
    pub fn destination(&self, name: &str, kind: &str, options: &str) {
        self.cluster.exec(
            DB,
            &format!(
                "create server {name} foreign data wrapper outbox_{kind} options ({options});
                 grant usage on foreign server {name} to courier"
            ),
        );
    }

    /// Waits until a destination is in this state, and returns its reason and detail.
    pub fn wait_for_state(&self, destination: &str, state: &str) -> String {
        let of = format!("from outbox_destination_status where destination = '{destination}'");
        wait_true(
            &self.cluster,
            &format!("destination {destination} to be {state}"),
            &format!("select exists (select {of} and state = '{state}')"),
        );
        let why = format!("select concat_ws(' ', reason, detail) {of}");
        self.cluster.query_one(DB, &why)
    }

    /// Waits until every worker has written `count` further heartbeats, which it does when it refreshes its leases.
    pub fn wait_for_heartbeats(&self, count: usize) {
        (0..count).for_each(|_| wait_for_heartbeat(&self.cluster));
    }

    /// The log of the workers so far.
    pub fn log(&self) -> String {
        match self.host {
            Host::Server => self.cluster.log(),
            Host::Outside => {
                let started = self.outside.borrow().len();
                let logs = (0..started).map(|number| std::fs::read_to_string(self.log_file(number)));
                logs.map(|log| log.expect("the log of a worker")).collect()
            }
        }
    }

    pub fn wait_logged(&self, text: &str) {
        wait_until(&format!("a worker to log {text:?}"), LONG, || self.log().contains(text));
    }

    fn log_file(&self, number: usize) -> PathBuf {
        self.cluster.data_dir().join(format!("log-w{number}"))
    }
}

/// The labels of one key, in their order.
pub fn of_key(labels: &[String], key: &str) -> Vec<String> {
    let start = format!("{key} ");
    labels
        .iter()
        .filter(|label| label.starts_with(&start))
        .cloned()
        .collect()
}

/// A receiver of webhooks that withholds its answer to some messages: the first request for each of them waits until
/// the test allows the answer.
pub struct Patient {
    receiver: Receiver,
    held: Labels,
    /// Labels of the messages whose first request is answered.
    answered: Labels,
}

type Labels = Arc<Mutex<BTreeSet<String>>>;

impl Patient {
    pub fn start(held: &[&str]) -> Self {
        let held: BTreeSet<String> = held.iter().map(|label| (*label).to_owned()).collect();
        let (held, answered) = (Arc::new(Mutex::new(held)), Labels::default());
        let (still_held, has_answered, requested) = (Arc::clone(&held), Arc::clone(&answered), Labels::default());
        let receiver = Receiver::start(move |request| {
            let label = request.label();
            let is_first = requested.lock().expect("no panic").insert(label.clone());
            wait_until("the test to allow the answer", LONG, || {
                !is_first || !still_held.lock().expect("no panic").contains(&label)
            });
            has_answered.lock().expect("no panic").insert(label);
            Reply::status(200)
        });
        Self {
            receiver,
            held,
            answered,
        }
    }

    pub fn url(&self) -> String {
        self.receiver.url("/")
    }

    pub fn hold(&self, label: &str) {
        self.held.lock().expect("no panic").insert(label.to_owned());
    }

    /// Answers the first request for a message; the request has arrived.
    pub fn answer(&self, label: &str) {
        self.held.lock().expect("no panic").remove(label);
        wait_until(&format!("the answer for {label:?}"), LONG, || {
            self.answered.lock().expect("no panic").contains(label)
        });
    }

    /// The labels of all requests, in order of arrival.
    pub fn labels(&self) -> Vec<String> {
        self.receiver.labels()
    }

    pub fn wait_for(&self, label: &str) {
        wait_until(&format!("the message {label:?}"), LONG, || {
            self.labels().iter().any(|requested| requested == label)
        });
    }
}

impl Drop for Patient {
    fn drop(&mut self) {
        self.held.lock().expect("no panic").clear();
    }
}
