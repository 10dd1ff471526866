//! Tests of a monitor of several databases: the list, and that each page shows and changes its database alone.

use super::access::{SECRET, USER, dead, dead_letter, file, retry_with};
use super::monitor::{Monitor, refused};
use super::shown::{BROWSER, first_event, links_below, play_on};
use super::{quiet_cluster, stage};
use support::port::free_port;
use support::{Cluster, DB, LONG, wait_until};

const OTHER: &str = "shop+1";
/// What its pages begin with.
const OTHER_PATH: &str = "/db/shop%2B1";
const BOTH: [&str; 4] = ["--dbname", DB, "--dbname", OTHER];

/// Adds a second database.
fn add(cluster: &Cluster) {
    cluster.exec(DB, &format!("create database \"{OTHER}\""));
    cluster.exec(OTHER, "create extension outbox");
}

/// A server with message 1 as a dead letter in each of two databases.
fn two() -> Cluster {
    let cluster = quiet_cluster();
    add(&cluster);
    for database in [DB, OTHER] {
        dead_letter(&cluster, database);
    }
    cluster
}

fn start(cluster: &Cluster, arguments: &[&str]) -> Monitor {
    Monitor::start(cluster, &[&BOTH, arguments].concat())
}

/// The line of a database in the list.
fn line(page: &str, database: &str) -> String {
    let mut lines = page.split("<tr ");
    let line = lines.find(|line| line.starts_with(&format!("data-of=\"{database}\"")));
    line.unwrap_or_else(|| panic!("no {database}: {page}")).to_owned()
}

#[test]
fn a_list_leads_to_the_pages_of_each_database_and_these_lead_back() {
    const BASE: &str = "/ops/outbox";
    let cluster = two();
    let monitor = start(&cluster, &["--allow-actions", "--base-path", BASE]);
    for prefix in ["", BASE] {
        let list = monitor.page(&format!("{prefix}/"));
        for (database, path) in [(DB, "/db/postgres"), (OTHER, OTHER_PATH)] {
            let line = line(&list, database);
            assert!(line.contains(&format!("href=\"{}/\"", &path[1..])), "{line}");
            assert!(line.contains("data-label=\"Dead\">1<"), "{line}");
            let page = monitor.page(&format!("{prefix}{path}/"));
            assert!(
                page.contains(&format!("href=\"{BASE}/\" title=\"all databases\">‹ {database}</a>")),
                "{page}"
            );
            assert!(page.contains(&format!("{database} · Overview")), "{page}");
            links_below(&monitor, &format!("{BASE}{path}"), &format!("{prefix}{path}"));
        }
    }
    assert_eq!(monitor.get("/db/shop+1/workers").status, 200, "decoded by a proxy");
    for path in [
        "/messages",
        "/message/1",
        "/db/nowhere/",
        "/db/",
        "/db/postgres/db/postgres/",
        "/act/done?verb=retry&n=1",
    ] {
        assert_eq!(monitor.follow(path).status, 404, "{path}");
    }
    let data = first_event(&monitor, "/events?page=other");
    assert!(data.contains(&format!("href=\\\"{}/", &OTHER_PATH[1..])), "{data}");
    let data = first_event(&monitor, &format!("{OTHER_PATH}/events?page=overview"));
    assert!(data.contains("href=\\\"messages"), "{data}");
}

#[test]
fn a_page_shows_and_changes_its_database_alone() {
    let cluster = two();
    cluster.exec(OTHER, "update outbox_events set payload = '{\"card\": \"1111\"}'");
    let token = file("databases", SECRET, 0o600);
    let token = token.to_str().expect("UTF-8");
    let monitor = start(
        &cluster,
        &["--allow-actions", "--token-file", token, "--trusted-user-header", USER],
    );

    // One login is for all databases, and leads back to the page.
    let asked = monitor.get_with(&format!("{OTHER_PATH}/message/1"), &[("Accept", "text/html")]);
    assert_eq!(
        asked.header("location"),
        Some(&*format!("{OTHER_PATH}/login?to=%2Fmessage%2F1"))
    );
    assert_eq!(monitor.get("/").status, 401, "the list");
    let login = [("secret", SECRET), ("to", "/message/1")];
    let login = monitor.post(&format!("{OTHER_PATH}/login"), &[], &login);
    assert_eq!(login.header("location"), Some(&*format!("{OTHER_PATH}/message/1")));
    let cookie = login.header("set-cookie").and_then(|cookie| cookie.split(';').next());
    let session = [("Cookie", cookie.expect("a cookie"))];
    let get = |path: &str| monitor.get_with(path, &session).body;
    for (path, card, other) in [("/db/postgres", "4242", "1111"), (OTHER_PATH, "1111", "4242")] {
        for page in ["message/1", "message/1/payload"] {
            let page = get(&format!("{path}/{page}"));
            assert!(page.contains(card) && !page.contains(other), "{page}");
        }
    }

    let token = Monitor::form_token(&get("/db/postgres/message/1"));
    let act = |path: &str, headers: &[(&str, &str)]| {
        let answer = monitor.post(&format!("{path}/act/message"), headers, &retry_with(&token));
        (answer.status, answer.header("location").map(str::to_owned))
    };
    assert_eq!(act("", &session).0, 404, "without a database");
    assert_eq!(act("/db/nowhere", &session).0, 404);
    assert_eq!(act(OTHER_PATH, &[]).0, 401, "without a session");
    let dead_letters = || [DB, OTHER].map(|database| dead(&cluster, database));
    assert_eq!(dead_letters(), [1, 1]);
    let done = Some(format!("{OTHER_PATH}/message/1?destination=default"));
    assert_eq!(act(OTHER_PATH, &session), (303, done));
    assert_eq!(dead_letters(), [1, 0]);
    let audit = "select coalesce(string_agg(application_name, ','), 'none') from outbox_audit";
    let audits = || [DB, OTHER].map(|database| cluster.query_one::<String>(database, audit));
    assert_eq!(audits(), ["none", "outboxctl serve"]);

    // The same for the user whom a proxy names.
    let kim = [(USER, "lee"), ("Sec-Fetch-Site", "same-origin")];
    let bulk = monitor.get_with("/db/postgres/act/bulk?verb=discard&q=", &kim).body;
    assert!(bulk.contains("Discard 1 dead letters"), "{bulk}");
    let token = Monitor::form_token(&bulk);
    let form = [
        ("verb", "discard"),
        ("q", ""),
        ("count", "1"),
        ("typed", "discard 1"),
        ("form_token", &token),
    ];
    let discarded = monitor.post("/db/postgres/act/bulk", &kim[..1], &form);
    assert_eq!(
        discarded.header("location"),
        Some("/db/postgres/act/done?verb=discard&n=1")
    );
    assert_eq!(dead_letters(), [0, 0]);
    assert_eq!(audits(), ["outboxctl serve: lee", "outboxctl serve"]);
}

#[test]
fn a_database_that_is_dropped_leaves_the_others_and_returns() {
    let cluster = two();
    let monitor = start(&cluster, &[]);
    let up = |database: &str, up: u8| format!("\noutbox_up{{database=\"{database}\"}} {up}\n");
    let of = |database: &str| format!("\noutbox_dead_messages{{database=\"{database}\"}} 1\n");
    let metrics = monitor.page("/metrics");
    for database in [DB, OTHER] {
        let state = format!("outbox_destination_state{{database=\"{database}\",destination=\"default\",state=");
        for sample in [up(database, 1), of(database), state] {
            assert!(metrics.contains(&sample), "{sample}: {metrics}");
        }
    }
    // All samples of a metric are together.
    let described: Vec<&str> = metrics.lines().filter(|line| line.starts_with("# TYPE ")).collect();
    let mut names = described.clone();
    names.sort_unstable();
    names.dedup();
    assert_eq!(described.len(), names.len(), "{described:?}");

    cluster.exec(DB, &format!("drop database \"{OTHER}\" with (force)"));
    wait_until("the list to show the loss", LONG, || {
        line(&monitor.page("/"), OTHER).contains("does not exist")
    });
    let list = monitor.page("/");
    let lost = line(&list, OTHER);
    assert!(
        lost.contains("unreachable") && lost.contains("data-label=\"Dead\">–<"),
        "{lost}"
    );
    assert!(line(&list, DB).contains("data-label=\"Dead\">1<"), "{list}");
    let metrics = monitor.page("/metrics");
    for sample in [up(OTHER, 0), up(DB, 1), of(DB)] {
        assert!(metrics.contains(&sample), "{sample}: {metrics}");
    }
    assert!(!metrics.contains(&of(OTHER)), "{metrics}");
    assert!(
        monitor
            .page(&format!("{OTHER_PATH}/"))
            .contains("The database does not answer")
    );
    assert_eq!(monitor.get(&format!("{OTHER_PATH}/audit")).status, 503);
    monitor.page("/db/postgres/audit");

    add(&cluster);
    wait_until("its return", LONG, || {
        !line(&monitor.page("/"), OTHER).contains("unreachable")
    });
}

#[test]
fn a_database_that_does_not_answer_at_the_start_stops_no_other() {
    let cluster = quiet_cluster();
    let nowhere = format!("postgresql://127.0.0.1:{}/shop", free_port());
    let monitor = Monitor::start(&cluster, &["--dbname", DB, "--dbname", &nowhere]);
    assert!(monitor.page("/db/postgres/").contains("Published a minute"));
    let list = monitor.page("/");
    assert!(
        line(&list, "shop").contains("Connection refused") && list.contains(") Databases · "),
        "{list}"
    );

    let conflict = ["--dbname", DB, "--dbname", "host=127.0.0.1 dbname=postgres"];
    for (arguments, code, problem) in [
        (
            &["--dbname", &nowhere, "--dbname", "template1"][..],
            3,
            "Connection refused",
        ),
        (&conflict, 2, "is given twice"),
        (&[&BOTH[..], &["-W"]].concat(), 2, "~/.pgpass"),
    ] {
        let output = refused(&cluster, arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code() == Some(code) && error.contains(problem),
            "{arguments:?}: {error}"
        );
    }
}

#[test]
fn a_user_goes_from_the_list_to_a_database_and_back_in_a_browser() {
    if support::skip_without(
        "a user goes from the list to a database and back in a browser",
        &[BROWSER],
    ) {
        return;
    }
    let cluster = stage("");
    add(&cluster);
    play_on(&start(&cluster, &["--allow-actions"]), &cluster, "databases");
}
