//! Tests that README.md and docs/tutorial.md work for a reader without other documents. Their blocks run in order, on a
//! server with the library only, and the results are compared with those that the pages show.

use serde_json::Value;
use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use support::private_broker::for_rabbitmqadmin;
use support::program::example_packages;
use support::{Broker, Cluster, Consumer, LONG, Pty, Size, markdown, process, program, wait_until};

const SHOP: &str = "shop";
const PROGRAMS: &str = "Publish and consume";
const RABBITMQ: &str = "Quick start with your RabbitMQ";

/// A page, with the servers of the test instead of those of its examples.
pub struct Page {
    name: &'static str,
    text: String,
}

impl Page {
    pub fn open(name: &'static str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
        let text = std::fs::read_to_string(path).expect(name);
        Self { name, text }
    }

    /// Replaces an example value by the one of this machine; the page must contain it.
    fn replace(&mut self, theirs: &str, ours: &str) {
        assert!(self.text.contains(theirs), "{} has no {theirs}", self.name);
        self.text = self.text.replace(theirs, ours);
    }

    /// The blocks of a kind (`sql`, `sh`, `json`, or none) below a heading, without their indentation.
    pub fn blocks(&self, heading: &str, kind: &str) -> Vec<String> {
        let (_, section) = self
            .text
            .split_once(&format!("# {heading}\n"))
            .unwrap_or_else(|| panic!("{} has no {heading}", self.name));
        let section = section.split("\n## ").next().unwrap_or_default();
        markdown::blocks(section, kind)
    }

    pub fn one(&self, heading: &str, kind: &str) -> String {
        let [block] = &self.blocks(heading, kind)[..] else {
            panic!("not one block of {kind:?} under {heading}")
        };
        block.clone()
    }
}

/// The output of psql, without the count of rows.
fn psql(cluster: &Cluster, sql: &str) -> String {
    let mut child = Command::new(cluster.installation().bin("psql"))
        .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-P", "footer=off", "-d"])
        .arg(cluster.conn_string(SHOP))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start psql");
    let mut input = child.stdin.take().expect("piped");
    input.write_all(sql.as_bytes()).expect("write to psql");
    drop(input);
    let ran = child.wait_with_output().expect("wait for psql");
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{errors}\n{sql}");
    let lines: Vec<&str> = std::str::from_utf8(&ran.stdout)
        .expect("UTF-8")
        .lines()
        .map(str::trim_end)
        .collect();
    lines.join("\n").trim_end().to_owned()
}

fn cells(row: &str) -> Vec<&str> {
    row.split('|').map(str::trim).collect()
}

/// The settings with the grant, the check, and the question why nothing arrives.
fn rabbitmq_steps(readme: &Page) -> (String, String, String) {
    let steps = readme.blocks(RABBITMQ, "sql");
    let [settings, ask] = &steps[..] else {
        panic!("other steps: {steps:#?}")
    };
    let (settings, check) = settings
        .trim_end()
        .rsplit_once('\n')
        .expect("a check behind the settings");
    assert!(check.contains("outbox_check()"), "{check}");
    (settings.to_owned(), check.to_owned(), ask.clone())
}

fn shell(script: &str) {
    let status = Command::new("sh").args(["-euc", script]).status().expect("run sh");
    assert!(status.success(), "{script}");
}

/// A command line exactly as in README.md; only the location of the server comes from the environment.
fn outboxctl(cluster: &Cluster, line: &str) -> Command {
    let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
    assert_eq!(words.next(), Some("outboxctl"), "{line}");
    let mut command = Command::new(program::outboxctl());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG")) {
        command.env_remove(name);
    }
    command
        .args(words)
        .env("PGHOST", "127.0.0.1")
        .env("PGPORT", cluster.port().to_string())
        .env("PGUSER", "postgres");
    command
}

#[test]
fn the_readme_produces_the_output_it_shows() {
    let broker = Broker::start_sized(Size::default());
    let queue = "orders";
    let cluster = Cluster::builder()
        .preload(false)
        .conf("shared_preload_libraries = 'auto_explain'")
        .start();
    cluster.exec("postgres", "create role app login");
    cluster.exec("postgres", "create database shop");
    let password = cluster.data_dir().with_file_name("outbox.password");
    let mut readme = Page::open("README.md");
    readme.replace("/etc/postgresql/outbox.password", &password.display().to_string());
    readme.replace("broker.example:5672", &format!("127.0.0.1:{}", broker.port()));
    readme.replace("rabbitmqctl ", &format!("{} ", broker.ctl_script().display()));
    let (plugins, management_port) = broker.plugins_script();
    readme.replace("rabbitmq-plugins ", &format!("{} ", plugins.display()));
    if !process::we_are_root() {
        readme.replace("-o postgres -g postgres ", ""); // the server runs as the user of the test
    }

    let steps = readme.blocks("Install", "sql");
    let [preload, create] = &steps[..] else {
        panic!("other steps: {steps:#?}")
    };
    psql(&cluster, preload);
    cluster.restart();
    assert_eq!(
        psql(&cluster, "show shared_preload_libraries").lines().last(),
        Some(" auto_explain, outbox"),
        "libraries that were preloaded stay"
    );
    psql(&cluster, create);
    let scripts = readme.blocks(RABBITMQ, "sh");
    let [user, bind] = &scripts[..] else {
        panic!("other scripts: {scripts:#?}")
    };
    shell(user);
    let (settings, check, ask) = rabbitmq_steps(&readme);
    psql(&cluster, &settings);
    wait_until("each step of the check to pass", LONG, || {
        let printed = psql(&cluster, &check);
        let ok: Vec<&str> = printed
            .lines()
            .skip(2)
            .filter_map(|line| line.split('|').nth(1))
            .collect();
        ok.len() >= 8 && ok.iter().all(|ok| ok.trim() == "t")
    });
    let (enable, declare) = bind.split_once('\n').expect("one command to enable the plugin");
    shell(enable);
    shell(&for_rabbitmqadmin(declare, management_port));
    let consumer = Consumer::new(&broker, queue);

    let tutorial = Page::open("docs/tutorial.md");
    let steps = tutorial.blocks("4. Write data and event in one transaction", "sql");
    psql(&cluster, steps[0].split("\n\n").next().expect("the table"));
    let example = readme.blocks(PROGRAMS, "sql").remove(0);
    let (transaction, query) = example.split_once("select seq").expect("a transaction and a query");
    let (query, shown_row) = query.split_once("\n-- ").expect("a row below the query");
    psql(&cluster, transaction);
    assert!(psql(&cluster, "select total from orders").ends_with("99.90"));
    let shown: Value = serde_json::from_str(&readme.blocks(PROGRAMS, "json")[0]).expect("JSON");
    let message = consumer.recv(LONG).expect("the message that README.md shows");
    let mut received = message.json();
    for variable in ["id", "created_at"] {
        received[variable] = shown[variable].clone();
    }
    assert_eq!(received, shown);
    assert_eq!(message.routing_key, "order.placed");
    wait_until("what README.md shows", LONG, || {
        let printed = psql(&cluster, &format!("select seq{query}"));
        let rows: Vec<Vec<&str>> = printed.lines().skip(2).map(cells).collect();
        rows == [cells(shown_row)]
    });
    let answer = psql(&cluster, &ask);
    assert!(
        answer.lines().all(|line| !line.contains(" f "))
            && answer.lines().filter(|line| line.contains("-+-")).count() == 2,
        "no problem, and no message that waits: only the two headings: {answer}"
    );

    let commands = readme.one("Where to look", "sh");
    let commands: Vec<&str> = commands.lines().collect();
    let [status, show, top, serve] = commands[..] else {
        panic!("unexpected commands: {commands:#?}")
    };
    for (line, wanted) in [(status, "published"), (show, "OrderPlaced")] {
        let ran = outboxctl(&cluster, line).output().expect("run outboxctl");
        let stdout = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && stdout.contains(wanted), "{line}: {ran:?}");
    }
    let mut command = outboxctl(&cluster, top);
    command.env("TERM", "xterm");
    let mut screen = Pty::start(command, 120, 40);
    wait_until("the screen", LONG, || {
        String::from_utf8_lossy(&screen.written()).contains("Throughput")
    });
    screen.send("q");
    assert!(screen.wait().success());
    // The default port may be in use here.
    let mut command = outboxctl(&cluster, serve);
    command
        .args(["--listen", "127.0.0.1:0", "--json"])
        .stdout(Stdio::piped());
    let mut page = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl serve");
    let mut first_line = String::new();
    let output = page.stdout.take().expect("piped");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut first_line).expect("its first line");
    process::kill(&mut page);
    assert!(
        first_line.contains("\"url\":\"http://127.0.0.1:") && first_line.contains("shop"),
        "{first_line}"
    );

    drop(consumer);
    let programs = readme.blocks(PROGRAMS, "python");
    let [publish, consume] = &programs[..] else {
        panic!("other programs: {programs:#?}")
    };
    let python = |program: &str| {
        let mut command = Command::new(example_packages().join("python/bin/python3"));
        command
            .args(["-c", program])
            .env("DATABASE_URL", cluster.conn_string(SHOP))
            .env("AMQP_URL", broker.url())
            .stdout(Stdio::piped());
        process::spawn_bound(command, libc::SIGKILL).expect("start python")
    };
    assert!(python(publish).wait().expect("its end").success(), "{publish}");
    let mut receiving = python(consume);
    let mut line = String::new();
    let output = receiving.stdout.take().expect("piped");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).expect("its first line");
    process::kill(&mut receiving);
    assert!(line.contains(r#""key":"order:43""#), "{line}");
}

/// The first of the quick starts: no broker, and nothing but the library on the server. The second can follow it.
#[test]
fn the_readme_brings_an_event_to_the_terminal() {
    let cluster = Cluster::builder().start();
    cluster.exec("postgres", "create role app login");
    cluster.exec("postgres", "create database shop");
    const START: &str = "Quick start on your terminal";
    let mut readme = Page::open("README.md");
    let mut listen = outboxctl(&cluster, readme.one(START, "sh").trim());
    listen.args(["--port", "0"]).stdout(Stdio::piped()); // the default port may be in use here
    let mut listen = process::spawn_bound(listen, libc::SIGKILL).expect("start outboxctl listen");
    let mut lines = std::io::BufReader::new(listen.stdout.take().expect("piped")).lines();
    let mut next = || lines.next().expect("a line").expect("text");
    let said = next();
    let url = said
        .strip_prefix("Listening at ")
        .and_then(|rest| rest.split_once(". "));
    let (url, _) = url.expect("its address");
    next(); // how to make a destination
    readme.replace("http://127.0.0.1:8081/", url);
    psql(&cluster, &readme.blocks("Install", "sql")[1]);
    let steps = readme.blocks(START, "sql");
    let [allow, start] = &steps[..] else {
        panic!("other steps: {steps:#?}")
    };
    psql(&cluster, allow);
    let (_, shown) = start.split_once("-- The terminal shows: ").expect("what it shows");
    psql(&cluster, start);
    assert_eq!(next(), shown.trim());
    process::kill(&mut listen);
    psql(&cluster, &rabbitmq_steps(&readme).0);
    let follows = "select pg_has_role('app', 'outbox_writer', 'member') and not exists (select from pg_foreign_server)";
    assert!(cluster.query_one::<bool>(SHOP, follows));
}

#[test]
fn the_tutorial_produces_the_output_it_shows() {
    let broker = Broker::start_sized(Size::default());
    let cluster = Cluster::builder()
        .conf(&format!("outbox.url = '{}'", broker.url()))
        .conf("outbox.exchange = 'events'")
        .conf("outbox.exchange_type = 'topic'")
        .start();
    cluster.exec("postgres", "create database shop");
    psql(
        &cluster,
        "create schema outbox; create extension outbox schema outbox;
         alter database shop set search_path = \"$user\", public, outbox",
    );
    let tutorial = Page::open("docs/tutorial.md");
    let [check] = &tutorial.blocks("2. Install it, and connect it to your RabbitMQ", "sql")[..] else {
        panic!("another step 2")
    };
    wait_until("each step of the check to pass", LONG, || {
        let printed = psql(&cluster, check);
        !printed
            .lines()
            .skip(2)
            .any(|line| line.split('|').nth(1).is_some_and(|ok| ok.trim() == "f"))
    });

    let program = cluster.data_dir().with_file_name("consumer.py");
    std::fs::write(&program, tutorial.one("3. Prepare a consumer", "python")).expect("write consumer.py");
    let mut command = Command::new(example_packages().join("python/bin/python3"));
    command
        .arg(&program)
        .env("AMQP_URL", broker.url())
        .stdout(Stdio::piped());
    let mut consumer = process::spawn_bound(command, libc::SIGKILL).expect("start consumer.py");
    let mut lines = std::io::BufReader::new(consumer.stdout.take().expect("piped")).lines();
    let mut next = || lines.next().expect("a line").expect("text");
    assert_eq!(next(), "waiting");

    let steps = tutorial.blocks("4. Write data and event in one transaction", "sql");
    let [commit, roll_back] = &steps[..] else {
        panic!("another step 4")
    };
    psql(&cluster, commit);
    let line = next();
    assert!(line.contains(" OrderPlaced ") && line.contains("99.9"), "{line}");
    psql(&cluster, roll_back);
    psql(
        &cluster,
        "select outbox_publish('OrderPaid', '{}', 'order', '42', 'paid')",
    );
    let line = next();
    assert!(line.contains(" OrderPaid "), "nothing of the rolled back order: {line}");

    psql(&cluster, &tutorial.one("5. See where a message is", "sql"));
    let steps = tutorial.blocks("6. Let one fail", "sql");
    let [publish, query, retry] = &steps[..] else {
        panic!("another step 6")
    };
    psql(&cluster, publish);
    wait_until("the failed attempt", LONG, || {
        psql(&cluster, query).contains("NO_ROUTE")
    });
    broker.bind("orders", "events", "invoice.*");
    psql(&cluster, retry);
    let line = next();
    assert!(line.contains(" InvoiceIssued "), "{line}");
    wait_until("the invoice to be published", LONG, || {
        psql(&cluster, query).contains("published")
    });
    process::kill(&mut consumer);
}

#[test]
fn each_make_target_in_the_docs_and_in_ci_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let makefile = std::fs::read_to_string(root.join("Makefile")).expect("Makefile");
    let mut found = 0;
    for path in [
        "README.md",
        "CONTRIBUTING.md",
        "docs/outboxctl.md",
        "docs/benchmarks.md",
        "docs/packages.md",
        "docs/releasing.md",
        ".ci/run",
        ".github/workflows/ci.yml",
    ] {
        let text = std::fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        let text = text.replace("run: ", "\n").replace("&& ", "\n");
        let lines = text.lines().flat_map(|line| line.split('`'));
        for words in lines.filter_map(|line| line.trim_start().strip_prefix("make ")) {
            // Text in quotes is for the program that make starts.
            let words = words
                .split(['#', '"', '}'])
                .next()
                .unwrap_or_default()
                .split_whitespace();
            for target in words.filter(|word| !word.contains('=')) {
                let makes = |line: &str| {
                    let targets = line.split_once(": ").map_or("", |(targets, _)| targets);
                    targets.split(' ').any(|made| made == target)
                };
                assert!(makefile.lines().any(makes), "{path}: make {target}");
                found += 1;
            }
        }
    }
    assert!(found > 10, "{found}");
}
