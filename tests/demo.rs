//! Runs the program of `make demo`. Without a terminal it ends by itself. On a terminal it keeps the page up until
//! Enter, and the dead letter can be retried on the page.

use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use support::http::{Answer, ask};
use support::{Broker, LONG, Pty, program, wait_until};

/// Makes the tests run one at a time: they share a broker and the names in it.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn demo() -> Command {
    program::outboxctl(); // panics if it was not built
    let mut demo = Command::new(env!("CARGO_BIN_EXE_demo"));
    demo.env("OUTBOX_BROKER_PORT", Broker::shared().port().to_string());
    demo
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    text.split_once(before)?.1.split_once(after).map(|(found, _)| found)
}

#[test]
fn without_a_terminal_both_receivers_get_their_events_and_a_dead_letter_is_retried() {
    let _alone = alone();
    let ran = demo().stdin(Stdio::null()).output().expect("run the demo");
    let printed = String::from_utf8_lossy(&ran.stdout);
    assert!(
        ran.status.success(),
        "{printed}{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    assert!(printed.lines().count() <= 50, "more than a page: {printed}");
    let mut rest = &*printed;
    // In this order. Each text came from the servers, and the demo read the fix from the output of `show`.
    for shown in [
        "Listening at http://127.0.0.1:",
        "RabbitMQ:  #2 OrderPlaced order:42 {\"order\": 42}",
        "warehouse: #2 OrderPlaced order:42 {\"order\": 42}",
        "RabbitMQ:  #3 OrderPaid order:42 {\"order\": 42}",
        "RabbitMQ:  #4 OrderPlaced order:43 {\"order\": 43}",
        "warehouse: #4 OrderPlaced order:43 answered 422 {\"order\": 43}",
        "2   | OrderPlaced | order:42 | warehouse   | published",
        "3   | OrderPaid   | order:42 | default     | published",
        "4   | OrderPlaced | order:43 | warehouse   | dead",
        "$ outboxctl show 4 --destination warehouse",
        "HTTP 422 Unprocessable Entity",
        "Fix: outboxctl retry 4 --destination warehouse",
        "$ outboxctl retry 4 --destination warehouse --yes",
        "warehouse: #4 OrderPlaced order:43 {\"order\": 43}",
    ] {
        let (_, after) = rest
            .split_once(shown)
            .unwrap_or_else(|| panic!("no {shown:?} in {rest}\nof {printed}"));
        rest = after;
    }
}

#[test]
fn on_a_terminal_the_page_stays_until_enter_and_two_clicks_retry_the_dead_letter() {
    let _alone = alone();
    let mut terminal = Pty::start(demo(), 200, 50);
    let seen = |terminal: &Pty| String::from_utf8_lossy(&terminal.written()).into_owned();
    wait_until("the demo to wait for Enter", LONG, || {
        assert!(!terminal.has_ended(), "{}", seen(&terminal));
        seen(&terminal).contains("press Enter")
    });
    let before = seen(&terminal);
    let port: u16 = between(&before, "the page http://127.0.0.1:", "/")
        .and_then(|port| port.parse().ok())
        .expect("the address of the page");
    // Until then a user works with the server.
    let server = between(&before, "export ", "\r\n").expect("where the server is");
    let connection = server.replace("PGHOST=", "host=").replace("PGPORT=", "port=");
    let connection = connection.replace("PGUSER=", "user=").replace("PGDATABASE=", "dbname=");
    postgres::Client::connect(&connection, postgres::NoTls)
        .and_then(|mut client| client.batch_execute("select outbox_publish('Tried', '{}', 'order', '7', 'tried')"))
        .expect("the server that the demo names");
    let of_the_page = [("Sec-Fetch-Site", "same-origin")]; // as a browser sends it
    let get = |path: &str| -> Answer { ask(port, "GET", path, &of_the_page, "") };
    let message = "message/4?destination=warehouse";
    wait_until("the page to lead to the dead letter", LONG, || {
        get("/").body.contains(&format!("href=\"{message}\""))
    });
    let shown = get(&format!("/{message}")).body;
    assert!(shown.contains("Retry now"), "{shown}");
    let token = between(&shown, "name=\"form_token\" value=\"", "\"").expect("a form");
    let headers = [
        ("Content-Type", "application/x-www-form-urlencoded"),
        ("Origin", &*format!("http://127.0.0.1:{port}")),
    ];
    let sent = format!("verb=retry&seq=4&destination=warehouse&form_token={token}");
    let answer = ask(port, "POST", "/act/message", &headers, &sent);
    assert_eq!(answer.status, 303, "{}", answer.body);
    terminal.send("\n");
    let status = terminal.wait();
    wait_until("the end of the output", LONG, || {
        seen(&terminal).contains("How to continue")
    });
    let after = seen(&terminal);
    assert!(status.success(), "{after}");
    let after = after.strip_prefix(&*before).expect("the output only grows");
    assert!(
        after.contains("That was done on the page.")
            && after.contains("warehouse: #4 OrderPlaced order:43 {\"order\": 43}"),
        "{after}"
    );
}
