//! Runs the examples of docs/. Every block of SQL runs in the order of its page, as a superuser of a database with the
//! extension, a worker and a broker. `ELSEWHERE` names the pages whose steps other tests follow.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::markdown::blocks;
use support::{Broker, Cluster, LONG, fresh_names, program, wait_until};

const SHOP: &str = "shop";

/// Pages whose blocks another test runs.
const ELSEWHERE: [(&str, &str); 7] = [
    ("docs/packages.md", "tests/packages.rs"),
    ("docs/testing.md", "each_result_of_testing_md_is_as_the_page_shows"),
    ("docs/tutorial.md", "tests/readme.rs"),
    ("docs/publishing.md", "tests/publishing.rs"),
    ("docs/migrating/", "tests/migrating.rs"),
    ("docs/migrations.md", "tests/migrations.rs"),
    ("docs/scaling/", "tests/scaling.rs"),
];

/// A page, and what its examples require.
struct Page {
    name: &'static str,
    before: &'static str,
    /// Placeholders, and their replacements in the test.
    replacements: &'static [(&'static str, &'static str)],
    /// Blocks with these beginnings run in a new database, after this SQL.
    alone: &'static [(&'static str, &'static str)],
}

const WITH_EXTENSION: &str = "create schema outbox; create extension outbox schema outbox;";
const PAUSED: &str =
    "create schema outbox; create extension outbox schema outbox; select outbox.outbox_pause('default')";
const SOURCE: &str = "create schema outbox; create extension outbox schema outbox; create schema shop;
    create table shop.events (global_sequence bigint, event_type text, recorded_at timestamptz, data jsonb);
    create table events (global_sequence bigint, event_id uuid, event_type text, recorded_at timestamptz);
    create table bodies (event_id uuid, body jsonb);
    create role merchant; alter table shop.events owner to merchant; grant select on events, bodies to public;
    grant usage on schema shop to public";

const PAGES: &[Page] = &[
    Page {
        name: "docs/capture.md",
        before: "create role shop",
        replacements: &[],
        alone: &[("create table journal", PAUSED)],
    },
    Page {
        name: "docs/consumers.md",
        before: "create table documents (id text primary key, body jsonb, seq bigint);
                 create role invoicing_blue; create role invoicing_green;",
        replacements: &[
            ("$message_id", "'01a1fc85-047b-72cc-b926-c7a014466422'"),
            ("$aggregate_id, $body, $seq", "'42', '{}', 1"),
        ],
        alone: &[],
    },
    Page {
        name: "docs/destinations.md",
        before: "create role shop;",
        replacements: &[
            (
                "whsec_NEW… whsec_OLD…",
                "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            ),
            ("whsec_NEW…", "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"),
        ],
        alone: &[],
    },
    Page {
        name: "docs/formats.md",
        before: "",
        replacements: &[],
        alone: &[],
    },
    Page {
        name: "docs/monitor.md",
        before: "",
        replacements: &[],
        alone: &[],
    },
    Page {
        name: "docs/operate/backup.md",
        before: "",
        replacements: &[],
        alone: &[("drop owned by", "")],
    },
    Page {
        name: "docs/operate/daily.md",
        before: "",
        replacements: &[("'5 minutes'", "'1 second'")],
        alone: &[],
    },
    Page {
        name: "docs/operate/incidents.md",
        before: "create server audit foreign data wrapper outbox_amqp",
        replacements: &[],
        alone: &[],
    },
    Page {
        name: "docs/operate/install.md",
        before: "",
        replacements: &[],
        alone: &[
            ("create schema outbox;", ""),
            ("create extension outbox", "create schema outbox;"),
        ],
    },
    Page {
        name: "docs/operate/sizes.md",
        before:
            "create server audit foreign data wrapper outbox_amqp; create server hook foreign data wrapper outbox_http;
                 create schema shop; create role shop_owner; grant usage, create on schema shop to shop_owner;",
        replacements: &[],
        alone: &[],
    },
    Page {
        name: "docs/relays.md",
        before: "create role mover;",
        replacements: &[],
        alone: &[],
    },
    Page {
        name: "docs/settings.md",
        before: "",
        replacements: &[],
        alone: &[],
    },
    Page {
        name: "docs/sources.md",
        before: "create role shop",
        replacements: &[],
        alone: &[("create view shop.outgoing", SOURCE)],
    },
    Page {
        name: "docs/sql-api.md",
        before: "create role search_team",
        replacements: &[("'5 minutes'", "'1 second'")],
        alone: &[
            ("select outbox_source_set", SOURCE),
            ("select seq, claim_token", PAUSED),
        ],
    },
    Page {
        name: "docs/subscriptions.md",
        before: "",
        replacements: &[],
        alone: &[],
    },
    Page {
        name: "docs/troubleshooting.md",
        before: "",
        replacements: &[],
        alone: &[],
    },
    Page {
        name: "docs/work.md",
        before: "create server orders_bus foreign data wrapper outbox_amqp;",
        replacements: &[],
        alone: &[],
    },
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every page below docs/, with its text.
fn pages() -> Vec<(String, String)> {
    let mut pages = Vec::new();
    let mut todo = vec![root().join("docs")];
    while let Some(directory) = todo.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory").flatten() {
            let path = entry.path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                let name = path.strip_prefix(root()).expect("below the root").display().to_string();
                pages.push((name, std::fs::read_to_string(&path).expect("a page")));
            }
        }
    }
    pages.sort();
    pages
}

/// Runs statements as psql does: each in a separate transaction unless it is in an explicit one. Returns what it
/// prints.
fn psql(cluster: &Cluster, database: &str, sql: &str) -> Result<String, String> {
    let mut child = Command::new(cluster.installation().bin("psql"))
        .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d"])
        .arg(cluster.conn_string(database))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start psql");
    let mut input = child.stdin.take().expect("piped");
    input.write_all(sql.as_bytes()).expect("write to psql");
    drop(input);
    let output = child.wait_with_output().expect("wait for psql");
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn run(page: &Page) {
    let broker = Broker::shared();
    let cluster = Cluster::builder()
        .conf(&format!("outbox.url = '{}'", broker.url()))
        .start();
    cluster.exec("postgres", "create database shop");
    let path = "alter database shop set search_path = \"$user\", public, outbox";
    psql(&cluster, SHOP, &format!("{WITH_EXTENSION} {path}")).expect("the extension");
    wait_until("a worker", LONG, || {
        cluster.query_one(SHOP, "select exists (select from outbox_worker_status where alive)")
    });
    psql(&cluster, SHOP, page.before).expect(page.before);
    let mut text = std::fs::read_to_string(root().join(page.name)).expect(page.name);
    for (placeholder, value) in page.replacements {
        assert!(text.contains(placeholder), "{} has no {placeholder}", page.name);
        text = text.replace(placeholder, value);
    }
    let blocks = blocks(&text, "sql");
    assert!(!blocks.is_empty(), "{} has no SQL", page.name);
    for (number, block) in blocks.iter().enumerate() {
        let alone = page.alone.iter().find(|(begin, _)| block.starts_with(begin));
        let database = match alone {
            None => SHOP.to_owned(),
            Some((_, before)) => {
                let database = format!("alone_{number}");
                cluster.exec("postgres", &format!("create database {database}"));
                psql(&cluster, &database, before).expect(before);
                psql(
                    &cluster,
                    &database,
                    &path.replace("database shop", &format!("database {database}")),
                )
                .expect(path);
                database
            }
        };
        if block.starts_with("drop owned by") {
            // Roles belong to the server, so the page says to drop the extension in every database first.
            let sql =
                "select datname::text from pg_database where datallowconn and datname not in ('template1', 'postgres')";
            for row in cluster.connect("postgres").query(sql, &[]).expect("the databases") {
                let database: String = row.get(0);
                psql(&cluster, &database, "drop extension if exists outbox cascade").expect("drop the extension");
                psql(&cluster, &database, block.lines().next().unwrap_or_default()).expect("drop what the roles own");
            }
        }
        psql(&cluster, &database, block).unwrap_or_else(|error| panic!("{}: {error}\n{block}", page.name));
        if block.contains("alter system") {
            psql(&cluster, SHOP, "alter system reset all; select pg_reload_conf()").expect("reset the settings");
        }
    }
}

macro_rules! pages {
    ($($test:ident: $page:expr,)*) => {
        $(#[test]
        fn $test() {
            run(PAGES.iter().find(|page| page.name == $page).expect($page));
        })*

        #[test]
        fn every_page_with_sql_is_run() {
            let tested = [$($page),*];
            for (name, text) in pages() {
                let elsewhere = ELSEWHERE.iter().any(|(page, _)| name.starts_with(page));
                let has_sql = !blocks(&text, "sql").is_empty();
                assert_eq!(tested.contains(&name.as_str()), has_sql && !elsewhere, "{name}");
            }
        }
    };
}

pages! {
    the_sql_of_capture_runs: "docs/capture.md",
    the_sql_of_consumers_runs: "docs/consumers.md",
    the_sql_of_destinations_runs: "docs/destinations.md",
    the_sql_of_formats_runs: "docs/formats.md",
    the_sql_of_monitor_runs: "docs/monitor.md",
    the_sql_of_backup_runs: "docs/operate/backup.md",
    the_sql_of_daily_runs: "docs/operate/daily.md",
    the_sql_of_incidents_runs: "docs/operate/incidents.md",
    the_sql_of_install_runs: "docs/operate/install.md",
    the_sql_of_sizes_runs: "docs/operate/sizes.md",
    the_sql_of_relays_runs: "docs/relays.md",
    the_sql_of_settings_runs: "docs/settings.md",
    the_sql_of_sources_runs: "docs/sources.md",
    the_sql_of_sql_api_runs: "docs/sql-api.md",
    the_sql_of_subscriptions_runs: "docs/subscriptions.md",
    the_sql_of_troubleshooting_runs: "docs/troubleshooting.md",
    the_sql_of_work_runs: "docs/work.md",
}

/// Below a statement the page shows its row as a comment: "-- a | b".
#[test]
fn each_result_of_testing_md_is_as_the_page_shows() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "fanout", true);
    broker.declare_queue(&queue, serde_json::Value::Null);
    broker.bind(&queue, &exchange, "");
    let cluster = Cluster::builder()
        .conf(&format!("outbox.url = '{}'", broker.url()))
        .conf(&format!("outbox.exchange = '{exchange}'"))
        .start();
    cluster.exec("postgres", "create database shop");
    let path = "alter database shop set search_path = \"$user\", public, outbox";
    psql(&cluster, SHOP, path).expect(path);
    let text = std::fs::read_to_string(root().join("docs/testing.md")).expect("the page");
    let mut compared = 0;
    for block in blocks(&text, "sql") {
        // The relay waits only 2 s for a worker that ends because of its new settings and comes back.
        let (alone, rest) = match block.split_once('\n') {
            Some((first, rest)) if first.ends_with("set outbox.enabled = off;") => (first, rest),
            _ => ("", &*block),
        };
        if !alone.is_empty() {
            psql(&cluster, SHOP, alone).expect(alone);
            let is_paused = "select exists (select from outbox_worker_status where alive and state = 'paused')";
            wait_until("the worker to pause", LONG, || cluster.query_one(SHOP, is_paused));
        }
        let printed = psql(&cluster, SHOP, rest).unwrap_or_else(|error| panic!("{error}\n{block}"));
        let mut rows = printed.lines();
        for row in block.lines().filter_map(|line| line.strip_prefix("-- ")) {
            let row = row.replace(" | ", "|");
            assert!(
                rows.any(|printed| printed == row),
                "no {row:?} of\n{block}\nin\n{printed}"
            );
            compared += 1;
        }
        let is_served = "select exists (select from outbox_worker_status where alive)";
        wait_until("a worker", LONG, || cluster.query_one(SHOP, is_served));
    }
    assert_eq!(compared, 8);
    wait_until("health after the tables were emptied", LONG, || {
        cluster.query_one(SHOP, "select bool_and(ok) from outbox_health")
    });
    assert_eq!(
        broker.queue_len(&queue),
        3,
        "the paused one, and those that were delivered by hand"
    );
}

#[test]
fn every_outboxctl_command_line_in_the_docs_is_valid() {
    let mut all = pages();
    all.push((
        "README.md".to_owned(),
        std::fs::read_to_string(root().join("README.md")).expect("README.md"),
    ));
    let mut count = 0;
    for (page, text) in all {
        for line in blocks(&text, "sh").iter().flat_map(|block| block.lines()) {
            let line = line
                .split(" #")
                .next()
                .unwrap_or_default()
                .split(" | ")
                .next()
                .unwrap_or_default();
            let Some(arguments) = line.trim().strip_prefix("outboxctl ") else {
                continue;
            };
            // A shell resolves quotes, variables and files.
            let script = format!("set -- {arguments} --help; exec \"$OUTBOXCTL\" \"$@\"");
            let output = Command::new("sh")
                .args(["-c", &script])
                .env("OUTBOXCTL", program::outboxctl())
                .output()
                .expect("run sh");
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{page}: {line}\n{stderr}");
            count += 1;
        }
    }
    assert!(count >= 15, "{count}");
}
