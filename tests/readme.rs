//! Does README.md do what it says, for somebody who has nothing but README.md? Its blocks are run in their order on a server
//! that has the library and nothing else; what it shows of results is compared with what comes.

use serde_json::Value;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use support::{Broker, Cluster, Consumer, Pty, fresh_names, process, program, wait_until};

const LONG: Duration = Duration::from_secs(60);
const SHOP: &str = "shop";

/// README.md, with servers of our own in the place of its examples.
struct Readme(String);

impl Readme {
    fn open() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
        Self(std::fs::read_to_string(path).expect("README.md"))
    }

    fn say_instead(&mut self, theirs: &str, ours: &str) {
        assert!(self.0.contains(theirs), "README.md says nothing of {theirs}");
        self.0 = self.0.replace(theirs, ours);
    }

    /// The blocks of a kind (`sql`, `sh`, `json`, or none) below a heading, without what they are indented by.
    fn blocks(&self, heading: &str, kind: &str) -> Vec<String> {
        let (_, section) = self
            .0
            .split_once(&format!("# {heading}\n"))
            .unwrap_or_else(|| panic!("README.md has no {heading}"));
        let section = section.split("\n## ").next().unwrap_or_default();
        let mut blocks = Vec::new();
        let mut lines = section.lines();
        while let Some(line) = lines.next() {
            let Some(found) = line.trim_start().strip_prefix("```") else {
                continue;
            };
            let indent = line.len() - line.trim_start().len();
            let inside = lines.by_ref().take_while(|line| line.trim() != "```");
            let block: Vec<&str> = inside.map(|line| line.get(indent..).unwrap_or_default()).collect();
            if found == kind {
                blocks.push(block.join("\n"));
            }
        }
        blocks
    }

    fn one(&self, heading: &str, kind: &str) -> String {
        let [block] = &self.blocks(heading, kind)[..] else {
            panic!("not one block of {kind:?} under {heading}")
        };
        block.clone()
    }
}

/// As psql prints it, without the count of rows.
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
    input.write_all(sql.as_bytes()).expect("tell psql");
    drop(input);
    let ran = child.wait_with_output().expect("wait for psql");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}\n{sql}");
    let lines: Vec<&str> = std::str::from_utf8(&ran.stdout)
        .expect("UTF-8")
        .lines()
        .map(str::trim_end)
        .collect();
    lines.join("\n").trim_end().to_owned()
}

fn shell(script: &str) {
    let status = Command::new("sh").args(["-euc", script]).status().expect("run sh");
    assert!(status.success(), "{script}");
}

/// A command line of README.md as it stands there, with nothing but the place of the server in its surroundings.
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
fn who_follows_the_readme_gets_what_it_shows() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    let cluster = Cluster::builder().preload(false).start();
    cluster.exec("postgres", "create role app login");
    cluster.exec("postgres", "create database shop");
    let password = cluster.data_dir().with_file_name("outbox.password");
    let mut readme = Readme::open();
    readme.say_instead("/etc/postgresql/outbox.password", &password.display().to_string());
    readme.say_instead("'the password'", &format!("'{}'", broker.password()));
    let address = format!("{}@127.0.0.1:{}", broker.user(), broker.port());
    readme.say_instead("relay@broker.example:5672", &address);
    readme.say_instead("outbox.exchange = 'events'", &format!("outbox.exchange = '{exchange}'"));
    if !process::we_are_root() {
        readme.say_instead("-o postgres -g postgres ", ""); // it is ours, and so is the server
    }

    psql(&cluster, &readme.one("Install", "sql"));
    cluster.restart();
    const START: &str = "Quick start with your RabbitMQ";
    let scripts = readme.blocks(START, "sh");
    let [secret, bind] = &scripts[..] else {
        panic!("the scripts are others: {scripts:#?}")
    };
    shell(secret);
    let steps = readme.blocks(START, "sql");
    let [settings, create, check, ask] = &steps[..] else {
        panic!("the steps are others: {steps:#?}")
    };
    psql(&cluster, settings);
    psql(&cluster, create);
    wait_until("each step of the check to be well", LONG, || {
        let said = psql(&cluster, check);
        let ok: Vec<&str> = said.lines().skip(2).filter_map(|line| line.split('|').nth(1)).collect();
        ok.len() >= 8 && ok.iter().all(|ok| ok.trim() == "t")
    });
    // That needs a plugin of RabbitMQ; here it is done by the protocol.
    let key = bind
        .split("routing_key='")
        .nth(1)
        .and_then(|rest| rest.split('\'').next());
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, key.expect("a binding"));
    let consumer = Consumer::new(broker, &queue);

    psql(&cluster, "create table orders (id int primary key, total numeric)");
    let example = readme.blocks("outbox", "sql").remove(0);
    let (transaction, look) = example.split_once("select seq").expect("a transaction, and a look");
    psql(&cluster, transaction);
    let shown: Value = serde_json::from_str(&readme.blocks("outbox", "json")[0]).expect("JSON");
    let message = consumer.recv(LONG).expect("the message that README.md shows");
    let mut came = message.json();
    for its_own in ["id", "created_at"] {
        came[its_own] = shown[its_own].clone();
    }
    assert_eq!(came, shown);
    assert_eq!(message.routing_key, "order.placed");
    let table = &readme.blocks("outbox", "")[0];
    wait_until("what README.md shows", LONG, || {
        psql(&cluster, &format!("select seq{look}")) == table.trim_end()
    });
    assert_eq!(
        psql(&cluster, ask).lines().count(),
        2,
        "nothing is wrong: the head alone"
    );

    let commands = readme.one("Where to look", "sh");
    let commands: Vec<&str> = commands.lines().collect();
    let [status, show, top, serve] = commands[..] else {
        panic!("the commands are others: {commands:#?}")
    };
    for (line, wanted) in [(status, "published"), (show, "OrderPlaced")] {
        let ran = outboxctl(&cluster, line).output().expect("run outboxctl");
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.contains(wanted), "{line}: {ran:?}");
    }
    let mut command = outboxctl(&cluster, top);
    command.env("TERM", "xterm");
    let mut screen = Pty::start(command, 120, 40);
    wait_until("the screen", LONG, || {
        String::from_utf8_lossy(&screen.written()).contains("Throughput")
    });
    screen.send("q");
    assert!(screen.wait().success());
    // The default port may be taken here.
    let mut command = outboxctl(&cluster, serve);
    command
        .args(["--listen", "127.0.0.1:0", "--json"])
        .stdout(Stdio::piped());
    let mut page = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl serve");
    let mut said = String::new();
    let output = page.stdout.take().expect("piped");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut said).expect("its first line");
    process::kill(&mut page);
    assert!(
        said.contains("\"url\":\"http://127.0.0.1:") && said.contains("shop"),
        "{said}"
    );
}

#[test]
fn each_make_target_of_the_docs_is_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let makefile = std::fs::read_to_string(root.join("Makefile")).expect("Makefile");
    let mut found = 0;
    for path in [
        "README.md",
        "CONTRIBUTING.md",
        "docs/outboxctl.md",
        "docs/benchmarks.md",
    ] {
        let text = std::fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        let lines = text.lines().flat_map(|line| line.split('`'));
        for words in lines.filter_map(|line| line.trim_start().strip_prefix("make ")) {
            // What stands in quotes is for the program that it starts.
            let words = words.split(['#', '"']).next().unwrap_or_default().split_whitespace();
            for target in words.filter(|word| !word.contains('=')) {
                assert!(makefile.contains(&format!("\n{target}: ")), "{path}: make {target}");
                found += 1;
            }
        }
    }
    assert!(found > 10, "{found}");
}
