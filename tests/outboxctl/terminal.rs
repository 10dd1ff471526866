//! How does it behave where somebody sits before it? On a terminal of its own: asking, colours, a width that ends.

use crate::common::*;
use crate::connection::who_may;
use crate::{program, quiet_cluster};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use support::{Cluster, process, wait_for, wait_until};

/// A program on a terminal of 80 columns, and whoever sits before it.
struct Seated {
    child: Child,
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    seen: String,
}

impl Seated {
    fn start(args: &[&str], variables: &[(&str, &str)]) -> Self {
        let (ours, theirs) = open_terminal();
        let mut command = Command::new(program());
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
        let handle = || Stdio::from(theirs.try_clone().expect("another handle"));
        let child = command
            .stdin(handle())
            .stdout(handle())
            .stderr(handle())
            .spawn()
            .expect("start outboxctl");
        let mut reader = File::from(ours.try_clone().expect("another handle"));
        let (sender, screen) = channel();
        thread::spawn(move || {
            let mut piece = [0; 4096];
            // The terminal reports an error once nobody has it open any more.
            while let Ok(count @ 1..) = reader.read(&mut piece) {
                if sender.send(piece[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            keyboard: File::from(ours),
            screen,
            seen: String::new(),
        }
    }

    fn look(&mut self) -> &str {
        while let Ok(piece) = self.screen.try_recv() {
            self.seen.push_str(&String::from_utf8_lossy(&piece));
        }
        &self.seen
    }

    fn wait_to_see(&mut self, text: &str) {
        wait_until(&format!("{text:?} on the terminal"), LONG, || {
            self.look().contains(text)
        });
    }

    fn type_in(&mut self, text: &str) {
        self.keyboard.write_all(text.as_bytes()).expect("type");
    }

    /// Its exit code, and all that was to be seen.
    fn end(mut self) -> (i32, String) {
        let status = wait_for("outboxctl to end", LONG, || {
            self.child.try_wait().expect("wait for a child")
        });
        // What it wrote last may still be on its way here.
        while let Ok(piece) = self.screen.recv() {
            self.seen.push_str(&String::from_utf8_lossy(&piece));
        }
        (status.code().unwrap_or(-1), self.seen)
    }
}

/// Both ends of a new terminal: ours, and the one for a program.
fn open_terminal() -> (OwnedFd, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    let size = libc::winsize {
        ws_row: 24,
        ws_col: 80,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: both places are ours to write to; no name and no attributes are asked for; the size is only read.
    let opened = unsafe { libc::openpty(&mut ours, &mut theirs, std::ptr::null_mut(), std::ptr::null(), &size) };
    assert_eq!(opened, 0, "openpty: {}", std::io::Error::last_os_error());
    // SAFETY: openpty has just opened them, and nobody else knows them.
    let ends = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
    for fd in [ours, theirs] {
        // SAFETY: plain system call on an open descriptor. No child that another test starts may keep the terminal open.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    ends
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
fn it_asks_with_the_count_and_does_only_what_is_agreed_to() {
    let cluster = quiet_cluster();
    dead_letter(&cluster);
    let string = cluster.conn_string(DB);
    for answer in ["n\n", "\n", "yess\n"] {
        let mut seated = Seated::start(&["discard", "--type", "T", "-d", &string], &[]);
        seated.wait_to_see("Discard 1 dead letter? [y/N]");
        assert_eq!(dead(&cluster), 1, "nothing happens before the answer");
        seated.type_in(answer);
        let (code, seen) = seated.end();
        assert_eq!(code, 5, "{seen}");
        assert!(seen.contains("nothing is changed"), "{seen}");
        assert_eq!(dead(&cluster), 1);
    }
    let mut seated = Seated::start(&["retry", "1", "-d", &string], &[]);
    seated.wait_to_see("Retry 1 message? [y/N]");
    seated.type_in("y\n");
    let (code, seen) = seated.end();
    assert_eq!(code, 0, "{seen}");
    assert!(seen.contains("Retried: 1 message."), "{seen}");
    assert_eq!(dead(&cluster), 0);
}

#[test]
fn ctrl_c_is_an_answer() {
    let cluster = quiet_cluster();
    dead_letter(&cluster);
    let mut seated = Seated::start(&["discard", "--type", "T", "-d", &cluster.conn_string(DB)], &[]);
    seated.wait_to_see("[y/N]");
    process::signal(seated.child.id(), libc::SIGINT);
    let (code, seen) = seated.end();
    assert!(code == 5 && seen.contains("nothing is changed"), "{code} {seen}");
    assert_eq!(dead(&cluster), 1);
}

#[test]
fn no_more_is_changed_than_was_counted() {
    let cluster = quiet_cluster();
    dead_letter(&cluster);
    let string = cluster.conn_string(DB);
    let mut seated = Seated::start(&["discard", "--type", "T", "-d", &string], &[]);
    seated.wait_to_see("Discard 1 dead letter? [y/N]");
    dead_letter(&cluster);
    seated.type_in("y\n");
    let (code, seen) = seated.end();
    assert!(code == 0 && seen.contains("Discarded: 1 dead letter."), "{seen}");
    assert_eq!(dead(&cluster), 1, "nobody has agreed to the one that came meanwhile");
}

#[test]
fn a_row_is_a_line_and_colours_are_only_for_who_wants_them() {
    let cluster = quiet_cluster();
    dead_letter(&cluster);
    let string = cluster.conn_string(DB);
    let args = ["list", "-d", &string];
    let (code, seen) = Seated::start(&args, &[]).end();
    assert_eq!(code, 0, "{seen}");
    assert!(seen.contains("\x1b[31mdead\x1b[0m"), "{seen:?}");
    assert!(seen.contains('…') && !seen.contains("\x1b[2J"), "{seen:?}");
    let (_, plain) = Seated::start(&args, &[("NO_COLOR", "1")]).end();
    assert!(!plain.contains('\x1b') && plain.contains("dead"), "{plain:?}");
    assert!(
        plain.lines().all(|line| line.trim_end().chars().count() <= 80),
        "{plain}"
    );
    let (_, dumb) = Seated::start(&args, &[("TERM", "dumb")]).end();
    assert!(!dumb.contains('\x1b'), "{dumb:?}");
}

#[test]
fn a_password_is_asked_for_and_not_shown() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create role ann login password 'c4nary'; grant outbox_monitor to ann",
    );
    who_may(&cluster, "host all ann 127.0.0.1/32 scram-sha-256");
    let string = format!("host=127.0.0.1 port={} user=ann dbname={DB}", cluster.port());
    for args in [&["list", "-d", &string][..], &["list", "-W", "-d", &string]] {
        let mut seated = Seated::start(args, &[]);
        seated.wait_to_see("Password for user ann:");
        seated.type_in("c4nax\x7fry\r");
        let (code, seen) = seated.end();
        assert_eq!(code, 0, "{seen}");
        assert!(!seen.contains("c4na") && seen.contains("No message"), "{seen:?}");
    }
    let mut seated = Seated::start(&["list", "-d", &string], &[]);
    seated.wait_to_see("Password for user ann:");
    seated.type_in("wrong\r");
    let (code, seen) = seated.end();
    assert!(code == 3 && seen.contains("password authentication failed"), "{seen}");
    // Nobody is asked who does not want to be.
    let (code, seen) = Seated::start(&["list", "-w", "-d", &string], &[]).end();
    assert!(code == 3 && !seen.contains("Password for"), "{seen}");
}
