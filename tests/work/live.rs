//! Tests of the screen of `outboxctl work`: it shows the outbox and what the worker does, obeys the keys, restores the
//! terminal, and never delays the worker. On a pseudo terminal with an emulator that returns what a user would see.

use std::process::Command;

use support::{Broker, Cluster, Mode, Proxy, StopMode, process, program, wait_until};

use super::{without_workers, work, work_as};
use support::screen::Screen;
use support::{DB, LONG, all_of, exchange_and_queue, wait_drained, wait_published, wait_true};

/// Sets the environment of a common terminal.
fn seen(mut command: Command) -> Command {
    for name in ["NO_COLOR", "COLUMNS", "LINES", "RUST_BACKTRACE"] {
        command.env_remove(name);
    }
    command.env("TERM", "xterm-256color");
    command
}

/// Starts a worker that may read the views, and waits until it is connected and has all partitions.
fn start(cluster: &Cluster, columns: u16, lines: u16) -> Screen {
    cluster.exec(DB, "grant outbox_monitor to courier");
    let mut screen = Screen::start(seen(work(cluster, &["--name", "live"])), columns, lines);
    screen.wait_for(&["outboxctl work", "work-live-", "connected", "16 of 16"]);
    screen
}

fn publish(cluster: &Cluster, count: usize) {
    let sql = format!("select outbox_publish('T', '{{}}', 'item', n::text, 'x') from generate_series(1, {count}) n");
    cluster.exec(DB, &sql);
}

fn assert_gone(cluster: &Cluster) {
    let left = "select exists (select from outbox_workers) or exists (select from outbox_partitions where lease_owner is not null)";
    assert!(!cluster.query_one::<bool>(DB, left), "a worker or a lease is left");
}

#[test]
fn the_terminal_emulator_wraps_text_in_one_cell() {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "read line; printf 'much 日本語 text\\n'"]);
    let mut screen = Screen::start(command, 60, 24);
    screen.resize(1, 1);
    screen.pty.send("\n");
    screen.pty.wait();
    wait_until("all of it", LONG, || {
        screen.screen();
        String::from_utf8_lossy(&screen.pty.written()).contains("text")
    });
    screen.screen();
}

#[test]
fn a_user_sees_deliveries_and_can_pause_and_quit() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &["outbox.lease_renew = '1s'"]);
    let mut screen = start(&cluster, 100, 50);
    screen.wait_for(&["courier@postgres", "partitions, by leases", "A work-live-"]);
    publish(&cluster, 5);
    screen.wait_for(&["published  5 ", "claimed    5 "]);

    // Paused at the terminal, the worker keeps its partitions and claims nothing, and the other sessions see its state.
    screen.pty.send(" ");
    screen.wait_for(&["HELD: claims nothing", "paused", "held at the terminal"]);
    wait_true(
        &cluster,
        "the other sessions to see the state",
        "select state = 'paused' and detail = 'held at the terminal of this worker' and partitions = 16 from outbox_worker_status",
    );
    publish(&cluster, 7);
    wait_true(
        &cluster,
        "a renewed lease",
        "select min(updated_at) > (select max(enqueued_at) from outbox) from outbox_partitions",
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 7);
    let waiting = cluster.query_one::<i64>(DB, "select count(distinct partition) from outbox");
    screen.wait_for(&["pending    7 ", &format!("+ with messages {waiting}")]);
    screen.pty.send(" ");
    wait_published(&cluster, 12);
    screen.wait_for(&["published  12 ", "connected"]);
    assert_eq!(all_of(broker, &queue).len(), 12);

    screen.pty.send("?");
    screen.wait_for(&["Keys", "ctrl-c"]);
    screen.pty.send("\u{1b}");
    // crossterm leaves a key that arrives together with a change of the terminal's size unread until the next key.
    screen.wait_until("the help to close", |text| !text.contains("Esc goes back"));
    // Also a terminal that is smaller for a moment, and has lost its content.
    let sizes = [
        (60, 24),
        (12, 5),
        (1, 1),
        (60, 24),
        (1, 1),
        (60, 24),
        (100, 50),
        (1, 1),
        (100, 50),
    ];
    for (columns, lines) in sizes {
        screen.resize(columns, lines);
        if columns >= 60 {
            let what = format!("a frame of {columns} × {lines}");
            screen.wait_until(&what, |text| {
                let mut rows = text.lines();
                rows.next().is_some_and(|row| row.starts_with("outboxctl work"))
                    && rows.any(|row| row.contains("7 Log"))
            });
        }
    }
    screen.pty.send("q");
    screen.assert_restored(0);
    assert_gone(&cluster);
    wait_until("the totals", LONG, || {
        screen.text().contains("claimed 12 published 12 failed 0 in ")
    });
}

#[test]
fn failed_messages_are_shown_with_their_reason() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &["outbox.max_attempts = 1"]);
    broker.unbind(&queue, &exchange, "#");
    cluster.exec(
        DB,
        "create server nowhere foreign data wrapper outbox_amqp options (url 'amqp://127.0.0.1:1', exchange 'x');
         grant usage on foreign server nowhere to courier",
    );
    let mut screen = start(&cluster, 150, 40);
    publish(&cluster, 2);
    screen.wait_for(&["unroutable", "dead letter", "died       2 ", "failed     2 "]);
    screen.wait_for(&["nowhere", "down", "unreachable"]);
    screen.wait_until("the error group", |text| text.contains(" default     unroutable"));
    screen.pty.send("4\r");
    screen.wait_for(&["count           2", "destination     default", "NO_ROUTE"]);
    screen.pty.send("\u{1b}");

    cluster.stop(StopMode::Immediate);
    let shown = screen.wait_for(&["SESSION LOST for", "tries again"]);
    assert!(shown.contains("died       2 "), "the last numbers stay:\n{shown}");
    cluster.start_again();
    screen.wait_until("a session", |text| {
        !text.contains("SESSION LOST") && text.contains("connected")
    });
    broker.bind(&queue, &exchange, "#");
    publish(&cluster, 3); // two of them are behind the dead letters of their keys
    screen.wait_for(&["published  1 ", "died       2 "]);
    screen.pty.send("q");
    screen.assert_restored(0);
}

#[test]
fn without_the_right_to_read_the_outbox_a_worker_shows_itself_and_the_grant() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    let mut screen = Screen::start(seen(work(&cluster, &["--name", "live"])), 150, 40);
    let shown = screen.wait_for(&[
        "16 of 16",
        "! the outbox is not readable: permission denied",
        "GRANT outbox_monitor",
    ]);
    assert!(shown.contains("7 Log") && !shown.contains("5 Messages"), "{shown}");
    publish(&cluster, 5);
    screen.wait_for(&["published  5 ", "connected"]);
    screen.pty.send("q");
    screen.assert_restored(0);
    assert_gone(&cluster);
}

#[test]
fn a_signal_ends_the_program_cleanly_and_the_terminal_is_restored() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let mut screen = start(&cluster, 80, 24);
        process::signal(screen.pty.pid(), signal);
        screen.assert_restored(0);
        assert_gone(&cluster);
    }
    let mut screen = start(&cluster, 80, 24);
    screen.pty.send("\u{3}");
    screen.assert_restored(0);
    assert_gone(&cluster);
}

#[test]
fn a_second_interrupt_does_not_wait_for_an_unresponsive_server() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    let proxy = Proxy::start(cluster.port());
    let command = work_as(proxy.port(), "courier", DB, &["--name", "live"]);
    let mut screen = Screen::start(seen(command), 100, 30);
    screen.wait_for(&["work-live-", "connected", "16 of 16"]);
    proxy.mode(Mode::Blackhole);
    screen.pty.send("\u{3}");
    screen.wait_for(&["ENDING"]);
    screen.pty.send("\u{3}");
    screen.assert_restored(3);
}

#[test]
fn a_terminal_that_is_not_read_stops_neither_delivery_nor_shutdown() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    for (end, published) in [("\u{3}", 3000), ("SIGTERM", 6000)] {
        let mut screen = start(&cluster, 200, 60);
        screen.pty.read(false);
        // A change of the size draws a whole frame; many frames do not fit into the terminal's buffer.
        let mut lines = 60;
        wait_until("a terminal without room", LONG, || {
            lines = if lines == 60 { 50 } else { 60 };
            screen.pty.resize(200, lines);
            screen.pty.is_full()
        });
        publish(&cluster, 3000);
        wait_published(&cluster, published);
        wait_drained(&cluster);
        assert_eq!(all_of(broker, &queue).len(), 3000);
        assert!(screen.pty.is_full(), "the screen was drawn meanwhile");
        match end {
            "SIGTERM" => process::signal(screen.pty.pid(), libc::SIGTERM),
            key => screen.pty.send(key),
        }
        wait_until("its end, while no program reads the terminal", LONG, || {
            screen.pty.has_ended()
        });
        screen.pty.read(true);
        screen.assert_restored(0);
        assert_gone(&cluster);
    }
}

#[test]
fn without_a_screen_work_prints_lines() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    // In the background, a program that changes the settings of the terminal would be stopped.
    let mut background = Command::new("sh");
    let of_shell = work(&cluster, &["--name", "live"]);
    background.args(["-c", "set -m; \"$0\" \"$@\" & echo pid $!; wait"]);
    background.arg(program::outboxctl()).args(of_shell.get_args());
    let mut dumb = seen(work(&cluster, &["--name", "live"]));
    dumb.env("TERM", "dumb");
    let plain = seen(work(&cluster, &["--name", "live", "--no-screen"]));
    let json = seen(work(&cluster, &["--name", "live", "--json"]));
    for (command, words) in [
        (plain, "partitions 16 of 16"),
        (dumb, "partitions 16 of 16"),
        (seen(background), "partitions 16 of 16"),
        (json, "\"owned_count\":16"),
    ] {
        let mut screen = Screen::start(command, 200, 30);
        screen.wait_for(&[words]);
        assert!(screen.pty.is_cooked() && !screen.screen().alternate_screen());
        let of_shell = screen
            .text()
            .lines()
            .find_map(|line| line.strip_prefix("pid ")?.trim().parse().ok());
        process::signal(of_shell.unwrap_or(screen.pty.pid()), libc::SIGTERM);
        screen.assert_restored(0);
    }
}

#[test]
fn a_password_is_prompted_for_once_before_the_screen_opens() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    cluster.exec(
        DB,
        "alter role courier password 'opensesame'; grant outbox_monitor to courier",
    );
    let path = cluster.data_dir().join("pg_hba.conf");
    let rules = std::fs::read_to_string(&path).expect("pg_hba.conf");
    let rules = format!("host all courier 127.0.0.1/32 scram-sha-256\n{rules}");
    std::fs::write(&path, rules).expect("write pg_hba.conf");
    cluster.reload();
    let mut command = seen(work(&cluster, &["--name", "live"]));
    command
        .env("HOME", "/nowhere")
        .env_remove("PGPASSWORD")
        .env_remove("PGPASSFILE");
    let mut screen = Screen::start(command, 100, 50);
    screen.wait_for(&["Password for user courier:"]);
    assert!(!screen.screen().alternate_screen());
    screen.pty.send("opensesame\r");
    // The screen reads the outbox in a separate session.
    screen.wait_for(&["16 of 16", "pending    0 "]);
    cluster.exec(
        DB,
        "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'courier'",
    );
    wait_true(
        &cluster,
        "another worker",
        "select max(partitions) = 16 and count(*) = 1 from outbox_worker_status where alive and state = 'connected'",
    );
    screen.pty.send("q");
    screen.assert_restored(0);
    assert!(!String::from_utf8_lossy(&screen.pty.written()).contains("opensesame"));
}

#[test]
fn a_fatal_error_is_printed_after_the_terminal_is_restored() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    let mut screen = start(&cluster, 100, 40);
    cluster.exec(DB, "drop extension outbox");
    screen.assert_restored(5);
    wait_until("the totals and the reason", LONG, || {
        let text = screen.text();
        let (sum, why) = (text.find("claimed 0 published 0"), text.find("does not exist"));
        sum.is_some() && sum < why
    });
}
