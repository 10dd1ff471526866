//! Tests that `outboxctl top` shows the current state, obeys the keys, and restores the terminal. On a real Postgres, a
//! real RabbitMQ, and a pseudo terminal with an emulator that returns what a user would see.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use support::program::outboxctl;
use support::screen::Screen;
use support::{Broker, Cluster, Mode, Proxy, StopMode, process};
use support::{
    DB, Stage, all_of, exchange_and_queue, idle_cluster, outbox_cluster_with, wait_drained, wait_published, wait_true,
};

/// `outboxctl top` for a database of `cluster`, with further arguments.
fn top_of(cluster: &Cluster, arguments: &[&str]) -> Command {
    top_as("postgres", cluster, arguments)
}

fn top_as(user: &str, cluster: &Cluster, arguments: &[&str]) -> Command {
    top_at(cluster.port(), user, arguments)
}

fn top_at(port: u16, user: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(outboxctl());
    command.args(["-h", "127.0.0.1", "-p", &port.to_string(), "-U", user, "-d", DB, "top"]);
    // An interval among the arguments overrides the default of the tests.
    if !arguments.contains(&"--interval-ms") {
        command.args(["--interval-ms", "200"]);
    }
    command.args(arguments);
    for name in ["NO_COLOR", "COLUMNS", "LINES", "RUST_BACKTRACE"] {
        command.env_remove(name);
    }
    command.env("TERM", "xterm-256color");
    command
}

fn wait_for_dead(cluster: &Cluster, dead: i64) {
    let sql = format!("select dead = {dead} from outbox_status");
    wait_true(cluster, &format!("{dead} dead letter(s)"), &sql);
}

/// A cluster with three published messages and one dead letter, which no queue is bound to receive; and its exchange
/// and queue.
fn three_published_one_dead(broker: &Broker) -> (Cluster, String, String) {
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.max_attempts = 1"]);
    broker.unbind(&queue, &exchange, "#");
    broker.bind(&queue, &exchange, "order.placed");
    for n in 1..=3 {
        let sql = format!("select outbox_publish('Placed', '{{\"n\": {n}}}', 'order', '{n}', 'placed')");
        cluster.exec(DB, &sql);
    }
    cluster.exec(
        DB,
        "select outbox_publish('Lost', '{\"n\": 4}', 'order', '4711', 'lost')",
    );
    wait_published(&cluster, 3);
    wait_for_dead(&cluster, 1);
    (cluster, exchange, queue)
}

#[test]
fn a_dead_letter_is_found_read_and_retried_by_keyboard_and_the_terminal_is_restored() {
    let broker = Broker::shared();
    let (cluster, exchange, queue) = three_published_one_dead(broker);
    let mut screen = Screen::start(top_of(&cluster, &["--allow-actions"]), 150, 40);
    let parts = [
        "Summary",
        "Throughput",
        "1 Partitions",
        "2 Workers",
        "5 Messages",
        "4711",
    ];
    let fact = |text: &str, name: &str, value: &str| {
        let words: Vec<&str> = text
            .split(|c: char| c.is_whitespace() || c == '│')
            .filter(|word| !word.is_empty())
            .collect();
        words.windows(2).any(|pair| pair == [name, value])
    };
    screen.wait_until("the state of the cluster", |shown| {
        // A minute with one failed message, its error, and no part that could not be read.
        let errors = shown.split("4 Recent errors").nth(1).unwrap_or_default();
        parts.iter().all(|part| shown.contains(part))
            && fact(shown, "published", "3")
            && fact(shown, "dead", "1")
            && fact(shown, "pending", "0")
            && (shown.contains("16 of 16") && shown.contains("1 of 1"))
            && shown.contains("A server-1 16")
            && shown.contains("! dead letters: 1 dead letter(s)")
            && (shown.contains("x failed") && shown.contains("last minute"))
            && (errors.contains("default") && errors.contains("unroutable"))
            && !shown.contains("not readable")
    });
    assert!(!screen.pty.is_cooked() && screen.screen().alternate_screen());

    // The complete message: its event, and why it is dead.
    screen.pty.send("\r");
    let shown = screen.wait_for(&["payload", "attempt 1"]);
    assert!(shown.contains(r#""n": 4"#) && shown.contains("order:4711"), "{shown}");
    assert!(shown.contains("NO_ROUTE") && shown.contains("Lost"), "{shown}");
    assert!(
        shown.contains("attempt 1") && shown.contains("by server-1, dead"),
        "{shown}"
    );
    screen.pty.send("\u{1b}");
    screen.wait_for(&["Summary"]);

    // The cause is fixed. The user retries, cancels, retries again and confirms.
    broker.bind(&queue, &exchange, "order.lost");
    screen.pty.send("r");
    screen.wait_for(&["Retry message", "Type y"]);
    screen.pty.send("n");
    screen.wait_for(&["Nothing was done."]);
    screen.pty.send("r");
    screen.wait_for(&["Type y"]);
    screen.pty.send("y");
    screen.wait_for(&["is delivered again."]);
    screen.wait_until("no dead letter and 4 published", |text| {
        fact(text, "dead", "0") && fact(text, "published", "4")
    });
    wait_drained(&cluster);
    let last = all_of(broker, &queue).pop().expect("a message");
    assert_eq!(last.json()["payload"], json!({"n": 4}));

    // A destination is paused and resumed.
    screen.pty.send("3p");
    screen.wait_for(&["Pause destination default?"]);
    screen.pty.send("y");
    screen.wait_for(&["Delivery to default is paused", "outbox_resume"]);
    assert!(cluster.query_one::<bool>(DB, "select exists (select from outbox_paused)"));
    screen.pty.send("p");
    screen.wait_for(&["Resume destination default?"]);
    screen.pty.send("y");
    screen.wait_for(&["Delivery to default is resumed"]);

    screen.pty.send("q");
    screen.assert_restored(0);
}

#[test]
fn the_screen_follows_terminal_size_and_published_messages() {
    let cluster = Stage::new(&[]).cluster;
    let mut screen = Screen::start(top_of(&cluster, &[]), 200, 50);
    screen.wait_for(&["Summary", "this session"]);
    cluster.exec(
        DB,
        "select count(*) from (select outbox_publish('T', '{}') from generate_series(1, 1234)) m",
    );
    screen.wait_for(&["1,234"]);
    for (columns, lines) in [(100, 40), (60, 24), (12, 5), (1, 1), (150, 40)] {
        screen.resize(columns, lines);
        let what = format!("a frame of {columns} × {lines}");
        if columns >= 60 {
            screen.wait_until(&what, |text| {
                let mut rows = text.lines();
                let first = rows.next().unwrap_or_default();
                first.starts_with("outboxctl top") && rows.any(|row| row.contains("5 Messages"))
            });
        }
    }
    screen.pty.send("?");
    screen.wait_for(&["Keys", "ctrl-c"]);
    screen.pty.send("\u{1b}");
    screen.wait_for(&["Summary"]);
    screen.pty.send("\u{3}");
    screen.assert_restored(0);
}

#[test]
fn a_signal_ends_the_program_cleanly_and_the_terminal_is_restored() {
    let cluster = idle_cluster(&[]);
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let mut screen = Screen::start(top_of(&cluster, &[]), 100, 30);
        screen.wait_for(&["Summary"]);
        process::signal(screen.pty.pid(), signal);
        screen.assert_restored(0);
    }
}

#[test]
fn a_lost_connection_is_shown_and_restored() {
    let cluster = idle_cluster(&[]);
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    let mut screen = Screen::start(top_of(&cluster, &[]), 100, 40);
    screen.wait_for(&["! workers: outbox.workers is 0"]);
    cluster.exec(
        DB,
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'outboxctl top'",
    );
    screen.wait_until("the connection to be restored", |text| {
        !text.contains("Connection lost")
    });
    cluster.stop(StopMode::Immediate);
    let shown = screen.wait_for(&["Connection lost", "Next try in"]);
    assert!(shown.contains("Summary"), "the last numbers stay:\n{shown}");
    cluster.start_again();
    screen.wait_until("no banner", |text| {
        text.contains("Summary") && !text.contains("Connection lost")
    });
    screen.pty.send("q");
    screen.assert_restored(0);
}

#[test]
fn an_unresponsive_server_is_shown_and_q_still_quits() {
    let cluster = idle_cluster(&[]);
    let proxy = Proxy::start(cluster.port());
    let mut screen = Screen::start(top_at(proxy.port(), "postgres", &["--allow-actions"]), 100, 40);
    screen.wait_for(&["Summary"]);
    proxy.mode(Mode::Blackhole);
    screen.wait_for(&["Connection lost: the server has not answered for 15 s."]);
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    screen.wait_until("no banner", |text| {
        text.contains("Summary") && !text.contains("Connection lost")
    });
    proxy.mode(Mode::Blackhole);
    screen.pty.send("q");
    screen.assert_restored(0);
}

#[test]
fn a_refresh_reads_a_bounded_number_of_rows_with_any_backlog() {
    let cluster = support::quiet_cluster(); // maintenance reads pending messages
    cluster.draw_seqs(30_000);
    cluster.exec(
        DB,
        "select outbox_enqueue_many(array(select g from generate_series(1, 20000) g), 'one key');
         select outbox_enqueue(n, n::text, available_at => now() + interval '1 h') from generate_series(20001, 30000) n;
         insert into outbox_waiting (seq, enqueued_at, partition, state, destination, key)
         select n, now(), n % 16, 'g', 'default', 'k' from generate_series(30001, 40000) n",
    );
    cluster.exec(DB, "analyze");
    cluster.exec(DB, "select pg_stat_reset()");
    let once = top_of(&cluster, &["--once"]).output().expect("run outboxctl");
    let text = String::from_utf8_lossy(&once.stdout).into_owned();
    assert!(
        text.contains("30,000") && text.contains("scheduled") && !text.contains("not readable"),
        "{text}"
    );
    // The statistics of a session are complete when it has ended.
    wait_true(
        &cluster,
        "the session to end",
        "select not exists (select from pg_stat_activity where application_name = 'outboxctl top')",
    );
    let read: i64 = cluster.query_one(
        DB,
        "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::int8 from pg_stat_user_tables
         where relname in ('outbox', 'outbox_waiting', 'outbox_events')",
    );
    assert!((1..=1_000).contains(&read), "{read} rows read, of 40,000");
}

#[test]
fn no_control_character_of_a_hostile_text_reaches_the_terminal() {
    let cluster = idle_cluster(&[]);
    // The text clears the screen, sets the title, rings the terminal, and reverses the direction of text.
    cluster.exec(
        DB,
        r"select outbox_pause(reason => E'owned\x1b[2J\x1b]0;gotcha\x07\u009b31m\u202E 日本')",
    );
    let mut screen = Screen::start(top_of(&cluster, &[]), 200, 40);
    screen.wait_for(&["owned␛[2J␛]0;gotcha␇□31m□ 日本"]);
    screen.pty.send("3\r");
    screen.wait_for(&["Destination default", "gotcha␇"]);
    screen.pty.send("\u{1b}");
    screen.wait_for(&["Summary"]);
    screen.pty.send("q");
    screen.assert_restored(0);
    let written = screen.pty.written();
    let has = |what: &[u8]| written.windows(what.len()).any(|bytes| bytes == what);
    assert!(has("gotcha".as_bytes()));
    for what in ["\u{1b}]0;", "\u{7}", "\u{9b}", "\u{202e}"] {
        assert!(!has(what.as_bytes()), "{what:?} went to the terminal");
    }

    let once = top_of(&cluster, &["--once"])
        .env("COLUMNS", "200")
        .output()
        .expect("run outboxctl");
    let text = String::from_utf8(once.stdout).expect("UTF-8");
    assert!(
        text.contains("gotcha␇") && !text.chars().any(|c| c.is_control() && c != '\n'),
        "{text}"
    );
}

/// The text that the program last gave to the clipboard of the terminal (OSC 52).
fn clipboard(written: &[u8]) -> String {
    let written = String::from_utf8_lossy(written);
    let (_, last) = written.rsplit_once("\u{1b}]52;c;").expect("a sequence OSC 52");
    let encoded = last.split("\u{1b}\\").next().unwrap_or_default();
    let text = BASE64_STANDARD.decode(encoded).expect("base64");
    String::from_utf8(text).expect("UTF-8")
}

#[test]
fn y_copies_a_command_that_retries_all_dead_letters_of_a_cause_and_no_other() {
    let cluster = idle_cluster(&[]);
    cluster.exec(
        DB,
        r#"create server "it's $(date)" foreign data wrapper outbox_http options (url 'https://receiver.example/');
           select outbox_publish('T', '{}', 'order', n::text, destination => case when n > 1 then 'it''s $(date)' end)
           from generate_series(1, 303) n;
           insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
             select seq, enqueued_at, 15, partition, destination, key,
                    case seq when 2 then 'HTTP 410: gone' else
                      format(E'HTTP 422: order-%s has \\ "no"\n currency\x1b, or it''s 100%% required', seq) end
             from outbox;
           delete from outbox"#,
    );
    let mut screen = Screen::start(top_of(&cluster, &[]), 80, 24);
    screen.wait_for(&["200+ × to it's $(date): HTTP 422", " more: h"]);
    screen.pty.send("y");
    screen.wait_for(&["Copied: outboxctl retry --destination"]);
    let command = clipboard(&screen.pty.written());
    assert!(!command.contains(char::is_control), "{command:?}");
    let program = outboxctl();
    let path = format!("{}:/usr/bin:/bin", program.parent().expect("a directory").display());
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{command} --yes")]).env("PATH", path);
    shell
        .env("PGHOST", "127.0.0.1")
        .env("PGPORT", cluster.port().to_string());
    let output = shell
        .env("PGUSER", "postgres")
        .env("PGDATABASE", DB)
        .output()
        .expect("run a shell");
    assert!(output.status.success(), "{command}: {output:?}");
    let left: String = cluster.query_one(DB, "select string_agg(seq::text, ',' order by seq) from outbox_dead");
    assert_eq!(left, "1,2", "another destination, and another cause: {command}");

    // The command of one message is that of outbox_why(), and that of an alert the one in its remedy.
    screen.wait_until("the group to be gone", |shown| !shown.contains(" × "));
    screen.pty.send("g/order:1\r");
    screen.wait_for(&["/order:1"]);
    screen.pty.send("y");
    screen.wait_for(&["Copied: outboxctl retry 1 --destination default"]);
    assert_eq!(
        clipboard(&screen.pty.written()),
        "outboxctl retry 1 --destination default"
    );
    screen.pty.send("h");
    screen.wait_for(&["Health", "workers"]);
    screen.pty.send("y");
    screen.wait_for(&["Copied: ALTER SYSTEM"]);
    let command = clipboard(&screen.pty.written());
    assert_eq!(
        command,
        "ALTER SYSTEM SET outbox.workers = '1'; SELECT pg_reload_conf()"
    );
    screen.pty.send("\u{1b}");
    screen.wait_for(&["Summary"]);
    screen.pty.send("q");
    screen.assert_restored(0);
}

#[test]
fn a_monitor_reads_everything_but_payloads_and_the_server_refuses_more() {
    let cluster = idle_cluster(&[]);
    cluster.exec(
        DB,
        "create role watcher login; grant outbox_monitor to watcher; select outbox_publish('T', '{}', 'order', '42')",
    );
    let mut screen = Screen::start(top_as("watcher", &cluster, &[]), 150, 40);
    let shown = screen.wait_for(&["watcher@postgres", "order:42"]);
    assert!(!shown.contains("permission denied"), "{shown}");
    screen.pty.send("\r");
    screen.wait_for(&["not readable: permission denied", "GRANT outbox_admin"]);
    screen.pty.send("\u{1b}");
    screen.wait_for(&["Summary"]);
    screen.pty.send("d");
    screen.wait_for(&["Actions are off: start with --allow-actions."]);

    // With the flag the server decides, and its refusal is shown.
    let mut screen = Screen::start(top_as("watcher", &cluster, &["--allow-actions"]), 150, 40);
    screen.wait_for(&["order:42"]);
    screen.pty.send("dy");
    screen.wait_for(&["permission denied for function outbox_discard"]);
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 1);
}

#[test]
fn without_a_terminal_top_prints_a_line_per_refresh_or_one_frame() {
    let cluster = idle_cluster(&[]);
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    wait_true(&cluster, "the counters", "select pending = 1 from outbox_status");
    let mut child: Child = top_of(&cluster, &[])
        .stdout(Stdio::piped())
        .spawn()
        .expect("run outboxctl");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    for _ in 0..3 {
        let line = lines.next().expect("a line").expect("UTF-8");
        assert!(line.contains("pending 1, in flight 0, dead 0, published 0"), "{line}");
        assert!(line.contains("workers: outbox.workers is 0"), "{line}");
    }
    process::signal(child.id(), libc::SIGTERM);
    assert!(child.wait().expect("wait").success());

    let once = top_of(&cluster, &["--once"])
        .env("COLUMNS", "90")
        .output()
        .expect("run outboxctl");
    assert!(once.status.success());
    let text = String::from_utf8(once.stdout).expect("UTF-8");
    assert!(
        text.starts_with("outboxctl top") && text.contains("5 Messages"),
        "{text}"
    );
    assert!(text.lines().all(|line| line.chars().count() <= 90), "{text}");

    // The same frame as JSON, for programs.
    let once = top_of(&cluster, &["--once", "--json"]).output().expect("run outboxctl");
    let frame: Value = serde_json::from_slice(&once.stdout).expect("JSON");
    assert_eq!(frame["status"]["pending"], json!(1));
    assert_eq!(frame["problems"][0]["check"], json!("workers"));
    assert_eq!(frame["messages"][0]["seq"], json!(1));

    // A reader that closes the pipe causes no error.
    let mut child: Child = top_of(&cluster, &[])
        .stdout(Stdio::piped())
        .spawn()
        .expect("run outboxctl");
    drop(child.stdout.take());
    assert!(child.wait().expect("wait").success());
}

#[test]
fn a_failure_to_start_gives_an_exit_code_and_one_sentence() {
    let cluster = Cluster::builder().start();
    let missing = top_of(&cluster, &["--once"]).output().expect("run outboxctl");
    assert_eq!(missing.status.code(), Some(4));
    let message = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(
        message.contains("does not have the extension outbox") && message.contains("HINT"),
        "{message}"
    );
    cluster.stop(StopMode::Fast);
    let gone = top_of(&cluster, &["--once"]).output().expect("run outboxctl");
    assert_eq!(gone.status.code(), Some(3));
    let usage = top_of(&cluster, &["--interval-ms", "1"])
        .output()
        .expect("run outboxctl");
    assert_eq!(usage.status.code(), Some(2));
}
