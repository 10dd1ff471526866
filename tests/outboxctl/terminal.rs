//! Tests outboxctl on a terminal: questions, colours, a limited width.

use super::connection::who_may;
use super::quiet_cluster;
use std::process::Command;
use support::program::outboxctl;
use support::*;
use support::{Cluster, Pty, wait_until};

/// A program on a terminal of 80 columns, with what a user types and sees.
struct Seated(Pty);

impl Seated {
    fn start(args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(outboxctl());
        command
            .args(args)
            .env("TERM", "xterm")
            .env_remove("NO_COLOR")
            .env_remove("COLUMNS")
            .env("HOME", "/nowhere");
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG")) {
            command.env_remove(name);
        }
        command.envs(variables.iter().copied());
        Self(Pty::start(command, 80, 24))
    }

    fn seen(&self) -> String {
        String::from_utf8_lossy(&self.0.written()).into_owned()
    }

    fn wait_to_see(&self, text: &str) {
        wait_until(&format!("{text:?} on the terminal"), LONG, || {
            self.seen().contains(text)
        });
    }

    fn type_in(&self, text: &str) {
        self.0.send(text);
    }

    /// Waits until the program has ended with this code and its last output has arrived; returns all output.
    fn end(mut self, code: i32, last: &str) -> String {
        let status = self.0.wait();
        assert_eq!(status.code(), Some(code), "{}", self.seen());
        self.wait_to_see(last);
        self.seen()
    }
}

fn dead_letter(cluster: &Cluster) {
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'order', '1');
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
         select seq, enqueued_at, 15, partition, destination, key, E'refused \\x1b[2J by a broker that explains itself at great length' from outbox;
         delete from outbox",
    );
}

fn dead(cluster: &Cluster) -> i64 {
    cluster.query_one(DB, "select count(*) from outbox_dead")
}

#[test]
fn a_command_asks_with_the_count_and_acts_only_on_yes() {
    let cluster = quiet_cluster();
    dead_letter(&cluster);
    let string = cluster.conn_string(DB);
    // The last answer is Ctrl-C.
    for answer in ["n\n", "\n", "yess\n", "\x03"] {
        let seated = Seated::start(&["discard", "--type", "T", "-d", &string], &[]);
        seated.wait_to_see("Discard 1 dead letter? [y/N]");
        assert_eq!(dead(&cluster), 1, "nothing happens before the answer");
        seated.type_in(answer);
        seated.end(5, "nothing is changed");
        assert_eq!(dead(&cluster), 1);
    }
    let seated = Seated::start(&["retry", "1", "-d", &string], &[]);
    seated.wait_to_see("Retry 1 message to default? [y/N]");
    seated.type_in("y\n");
    seated.end(0, "Retried: 1 message.");
    assert_eq!(dead(&cluster), 0);
}

#[test]
fn no_more_messages_are_changed_than_were_counted() {
    let cluster = quiet_cluster();
    dead_letter(&cluster);
    let string = cluster.conn_string(DB);
    let seated = Seated::start(&["discard", "--type", "T", "-d", &string], &[]);
    seated.wait_to_see("Discard 1 dead letter? [y/N]");
    dead_letter(&cluster);
    seated.type_in("y\n");
    seated.end(0, "Discarded: 1 dead letter.");
    assert_eq!(dead(&cluster), 1, "the message that came meanwhile was not confirmed");
}

#[test]
fn each_row_is_one_line_and_colours_need_a_terminal() {
    let cluster = quiet_cluster();
    dead_letter(&cluster);
    let string = cluster.conn_string(DB);
    let args = ["list", "-d", &string];
    // The row ends with its error, truncated.
    let seen = Seated::start(&args, &[]).end(0, "…\r\n");
    assert!(seen.contains("mdead\x1b["), "{seen:?}");
    assert!(!seen.contains("\x1b[2J"), "{seen:?}");
    let plain = Seated::start(&args, &[("NO_COLOR", "1")]).end(0, "…\r\n");
    assert!(!plain.contains('\x1b') && plain.contains("dead"), "{plain:?}");
    let longest = plain.lines().map(|line| line.trim_end().chars().count()).max();
    assert!(longest <= Some(80), "{plain}");
    let dumb = Seated::start(&args, &[("TERM", "dumb")]).end(0, "…\r\n");
    assert!(!dumb.contains('\x1b'), "{dumb:?}");
}

#[test]
fn eighty_columns_show_the_error_of_each_message_and_break_no_word() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create server warehouse foreign data wrapper outbox_http options (url 'https://hooks.example/');
         select outbox_publish('OrderPlacedByCustomer', '{}', 'order-of-a-customer', n::text,
                               destination => case n when 1 then 'warehouse' else 'default' end)
         from generate_series(1, 2) n;
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
         select seq, enqueued_at, seq, partition, destination, key, 'refused by a broker that explains itself' from outbox;
         delete from outbox",
    );
    let string = cluster.conn_string(DB);
    let list = Seated::start(&["list", "-d", &string], &[("NO_COLOR", "1")]).end(0, "…\r\n");
    assert_eq!(list.matches("  refused by a bro").count(), 2, "{list}");
    let status = Seated::start(&["status", "-d", &string], &[("NO_COLOR", "1")]).end(0, "Fix: ");
    let longest = status.lines().map(|line| line.trim_end().chars().count()).max();
    assert!(longest <= Some(80), "{status}");
}

#[test]
fn a_password_is_prompted_for_and_not_echoed() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create role ann login password 'c4nary'; grant outbox_monitor to ann",
    );
    who_may(&cluster, "host all ann 127.0.0.1/32 scram-sha-256");
    let string = format!("host=127.0.0.1 port={} user=ann dbname={DB}", cluster.port());
    for args in [&["list", "-d", &string][..], &["list", "-W", "-d", &string]] {
        let seated = Seated::start(args, &[]);
        seated.wait_to_see("Password for user ann:");
        seated.type_in("c4nax\x7fry\r");
        let seen = seated.end(0, "No message");
        assert!(!seen.contains("c4na"), "{seen:?}");
    }
    let seated = Seated::start(&["list", "-d", &string], &[]);
    seated.wait_to_see("Password for user ann:");
    seated.type_in("wrong\r");
    seated.end(3, "password authentication failed");
    // With -w the program does not ask, and leaves the terminal unchanged.
    let seen = Seated::start(&["list", "-w", "-d", &string], &[]).end(3, "HINT: Put it into");
    assert!(!seen.contains("Password for"), "{seen}");
    // Once it shows something it asks for nothing.
    who_may(&cluster, "host all ann 127.0.0.1/32 trust");
    let seated = Seated::start(&["serve", "-d", &string, "--listen", "127.0.0.1:0"], &[]);
    seated.wait_to_see("Outbox Monitor of");
    who_may(&cluster, "host all ann 127.0.0.1/32 scram-sha-256");
    let ends = "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'ann'";
    cluster.exec(DB, ends);
    let seen = seated.seen();
    let port = seen
        .split("http://127.0.0.1:")
        .nth(1)
        .and_then(|rest| rest.split('/').next()?.parse().ok());
    wait_until("the page to say so", LONG, || {
        let page = support::http::ask(port.expect("a port"), "GET", "/", &[], "");
        page.body.contains("password")
    });
    assert!(!seated.seen().contains("Password for"), "{}", seated.seen());
    let mut seated = Seated::start(&["list", "-d", &string], &[]);
    seated.wait_to_see("Password for user ann:");
    seated.type_in("c4na\x03");
    assert_eq!(seated.0.wait().code(), Some(3));
    assert!(seated.0.is_cooked());
}
