//! Runs the programs of docs/publishing.md as they are on the page, as the role of an application. What a framework
//! sets up is added from tests/publishing/, and nothing else.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::Cluster;
use support::program::example_packages;
use support::workdir::ServerDir;

const SHOP: &str = "shop";

/// Headings whose program runs, with the orders that it places, and what of Debian's packages not every machine has.
type Run = (&'static str, &'static [i64], &'static [&'static str]);
const RUN: [Run; 13] = [
    ("Publish once", &[], &[]),
    ("psql", &[1, 2, 3, 4], &[]),
    ("psycopg", &[10], &[]),
    ("SQLAlchemy", &[20], &[]),
    ("Django", &[30], &[]),
    ("pg", &[40], &[]),
    ("JDBC", &[60], &["javac", "/usr/share/java/postgresql.jar"]),
    (
        "Spring",
        &[65],
        &[
            "javac",
            "/usr/share/java/postgresql.jar",
            "/usr/share/java/spring3-jdbc.jar",
        ],
    ),
    ("Go", &[80], &["go", "/usr/share/gocode/src/github.com/jackc/pgx/v4"]),
    ("Rails", &[90], &["ruby", "/usr/lib/ruby/vendor_ruby/pg.rb"]),
    ("PDO", &[100], &["php"]),
    (
        "Doctrine",
        &[110],
        &["php", "/usr/share/php/Doctrine/DBAL/autoload.php"],
    ),
    (
        "Laravel",
        &[120],
        &["php", "/usr/share/php/Illuminate/Database/autoload.php"],
    ),
];

/// Headings whose packages are not available here, as the page states.
const NOT_RUN: [&str; 3] = ["Prisma", "Npgsql", "EF Core"];

/// A block of code: the heading above it, its language and its text.
struct Block {
    heading: String,
    language: String,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let (mut blocks, mut heading) = (Vec::new(), String::new());
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let text: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            blocks.push(Block {
                heading: heading.clone(),
                language: language.to_owned(),
                text: text.join("\n") + "\n",
            });
        } else if line.starts_with('#') {
            heading = line.trim_start_matches('#').trim().to_owned();
        }
    }
    blocks
}

/// The server, and the directory in which the programs run.
struct Stage {
    cluster: Cluster,
    directory: ServerDir,
}

impl Stage {
    fn new() -> Self {
        let cluster = Cluster::builder().preload(false).start();
        cluster.exec("postgres", "create database shop");
        cluster.exec("postgres", "create role app login");
        cluster.exec(
            SHOP,
            "create schema outbox; create extension outbox schema outbox; grant outbox_writer to app;
             alter database shop set search_path = \"$user\", public, outbox",
        );
        Self {
            cluster,
            directory: ServerDir::create("publishing"),
        }
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.directory.path().join(name);
        std::fs::write(&path, text).expect("write a program");
        path
    }

    fn run(&self, heading: &str, mut command: Command) {
        let port = self.cluster.port();
        command
            .current_dir(self.directory.path())
            .env("DATABASE_URL", format!("postgresql://app@127.0.0.1:{port}/{SHOP}"))
            .env(
                "JDBC_URL",
                format!("jdbc:postgresql://127.0.0.1:{port}/{SHOP}?user=app"),
            )
            .env(
                "PDO_DSN",
                format!("pgsql:host=127.0.0.1;port={port};dbname={SHOP};user=app"),
            )
            .env("NODE_PATH", example_packages().join("node/node_modules"))
            .stdin(Stdio::null());
        let output = command.output().unwrap_or_else(|error| panic!("{heading}: {error}"));
        let printed = [output.stdout, output.stderr].concat();
        assert!(
            output.status.success(),
            "{heading}: {}",
            String::from_utf8_lossy(&printed)
        );
    }

    fn program(&self, block: &Block) {
        let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("publishing");
        let python = example_packages().join("python/bin/python3");
        let with = |program: &str, arguments: &[&Path]| {
            let mut command = Command::new(program);
            command.args(arguments);
            command
        };
        let heading = block.heading.as_str();
        match heading {
            "psql" | "Publish once" => {
                let file = self.file("program.sql", &block.text);
                let mut command = Command::new(self.cluster.installation().bin("psql"));
                command.args([
                    "-X",
                    "-q",
                    "-v",
                    "ON_ERROR_STOP=1",
                    "-h",
                    "127.0.0.1",
                    "-U",
                    "app",
                    "-d",
                    SHOP,
                ]);
                command.args(["-p", &self.cluster.port().to_string(), "-f"]).arg(file);
                self.run(heading, command);
            }
            "psycopg" | "SQLAlchemy" => {
                let file = self.file("program.py", &block.text);
                self.run(heading, with(&python.display().to_string(), &[&file]));
            }
            "Django" => {
                let file = self.file("views.py", &block.text);
                let project = beside.join("django_project.py");
                self.run(heading, with(&python.display().to_string(), &[&project, &file]));
            }
            "pg" => self.run(heading, with("node", &[&self.file("program.js", &block.text)])),
            "JDBC" => self.java(heading, "Publish", &[&self.file("Publish.java", &block.text)]),
            "Spring" => {
                let main = beside.join("Main.java");
                self.java(heading, "Main", &[&self.file("Outbox.java", &block.text), &main]);
            }
            "Go" => {
                // Debian has version 4.
                let text = block.text.replace("pgx/v5", "pgx/v4");
                let mut command = with("go", &[Path::new("run"), &self.file("main.go", &text)]);
                command
                    .env("GO111MODULE", "off")
                    .env("GOPATH", "/usr/share/gocode")
                    .env("GOCACHE", self.directory.path().join("go-cache"));
                self.run(heading, command);
            }
            "Rails" => self.run(heading, with("ruby", &[&self.file("program.rb", &block.text)])),
            "PDO" | "Doctrine" => {
                // Debian's packages have an autoloader each.
                let text = block.text.replace("vendor/autoload.php", "Doctrine/DBAL/autoload.php");
                self.run(heading, php(&[&self.file("program.php", &text)]));
            }
            "Laravel" => {
                let file = self.file("laravel_program.php", &block.text);
                self.run(heading, php(&[&beside.join("laravel.php"), &file]));
            }
            other => panic!("no way to run {other}"),
        }
    }

    /// Compiles a class and runs it.
    fn java(&self, heading: &str, class: &str, files: &[&Path]) {
        let jars = std::fs::read_dir("/usr/share/java")
            .expect("the libraries of Java")
            .flatten();
        let jars = jars.map(|entry| entry.path().display().to_string());
        let wanted = |jar: &String| {
            ["/spring", "/postgresql.", "/commons-logging."]
                .iter()
                .any(|name| jar.contains(name))
        };
        let path: Vec<String> = std::iter::once(".".to_owned()).chain(jars.filter(wanted)).collect();
        let path = path.join(":");
        let mut compile = Command::new("javac");
        compile.args(["-d", ".", "-cp", &path]).args(files);
        self.run(heading, compile);
        let mut run = Command::new("java");
        run.args(["-cp", &path, class]);
        self.run(heading, run);
    }

    fn placed(&self, order: i64) -> bool {
        self.cluster.query_one(
            SHOP,
            &format!(
                "select exists (select from orders where id = {order})
                    and exists (select from outbox_messages where key = 'order:{order}' and type = 'OrderPlaced')"
            ),
        )
    }
}

fn php(arguments: &[&Path]) -> Command {
    let mut command = Command::new("php");
    // Debian's packages of 2022 cause warnings with PHP 8.2.
    command.args(["-d", "include_path=/usr/share/php", "-d", "error_reporting=E_ERROR"]);
    command.args(arguments);
    command
}

#[test]
fn each_program_of_the_page_publishes_in_the_transaction_of_its_data() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/publishing.md");
    let page = std::fs::read_to_string(path).expect("the page");
    let blocks = blocks(&page);
    let stage = Stage::new();
    let (table, programs) = blocks.split_first().expect("blocks");
    assert_eq!(table.language, "sql");
    stage.cluster.exec(
        SHOP,
        &format!(
            "{}; grant all on orders to app",
            table.text.trim_end().trim_end_matches(';')
        ),
    );
    let run: Vec<Run> = RUN
        .into_iter()
        .filter(|(heading, _, needed)| !support::skip_without(&format!("{heading} of docs/publishing.md"), needed))
        .collect();
    for block in programs {
        let is_of = |run: &Run| run.0 == block.heading;
        match run.iter().any(is_of) {
            true => stage.program(block),
            false => assert!(
                RUN.iter().any(is_of) || NOT_RUN.contains(&block.heading.as_str()),
                "{} is not run",
                block.heading
            ),
        }
    }
    for (heading, orders, _) in run {
        for order in orders {
            assert!(stage.placed(*order), "{heading}: order {order}");
        }
    }
    let named: bool = stage.cluster.query_one(
        SHOP,
        "select actor = 'ann' and correlation_id = 'req-7' from outbox_messages where key = 'order:1'",
    );
    assert!(named, "what the transaction set for its events");
    assert_eq!(page.matches("Not run in a test").count(), 2, "for Prisma, and for .NET");
    stage.directory.finish();
}
