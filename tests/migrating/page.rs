//! Runs a page of docs/migrating/ block by block, and starts a server with a database `shop` for it.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::{Command, Stdio};

use postgres::{Client, NoTls};
use serde_json::Value;
use support::markdown::blocks;
use support::{Broker, Cluster, Delivery, fresh_names, wait_until};

use support::{LONG, Session, all_of};

const SHOP: &str = "shop";

/// The SQL blocks of a page, with the headings above them.
pub struct Page {
    name: String,
    blocks: Vec<(String, String)>,
    run: RefCell<BTreeSet<usize>>,
}

impl Page {
    /// Opens a page with `replacements`, such as an exchange that no other test uses; the page must contain each
    /// replaced text.
    pub fn open(name: &str, replacements: &[(&str, &str)]) -> Self {
        let path = format!("{}/../docs/migrating/{name}", env!("CARGO_MANIFEST_DIR"));
        let mut text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        for (theirs, ours) in replacements {
            assert!(text.contains(theirs), "{name} does not contain {theirs}");
            text = text.replace(theirs, ours);
        }
        let mut blocks = Vec::new();
        for section in text.split("\n## ").skip(1) {
            let (heading, rest) = section.split_once('\n').expect("a heading");
            for block in rest.split("```sql\n").skip(1) {
                let (sql, _) = block.split_once("```").expect("the end of a block");
                blocks.push((heading.to_owned(), sql.to_owned()));
            }
        }
        Self {
            name: name.to_owned(),
            blocks,
            run: RefCell::default(),
        }
    }

    /// Runs the blocks of a section; returns the lines that each printed, columns separated by a bar.
    pub fn section(&self, shop: &Shop, heading: &str) -> Vec<Vec<String>> {
        let numbers = self.numbers(heading);
        numbers.into_iter().map(|number| self.block(shop, number)).collect()
    }

    /// Runs one block of a section.
    pub fn nth(&self, shop: &Shop, heading: &str, n: usize) -> Vec<String> {
        self.block(shop, self.numbers(heading)[n])
    }

    /// Runs the blocks of "Roll back"; calls `meanwhile` once delivery is asked to stop.
    pub fn roll_back(&self, shop: &Shop, meanwhile: impl FnOnce()) {
        self.stop_delivery(shop, meanwhile);
        self.go_back(shop);
    }

    pub fn stop_delivery(&self, shop: &Shop, meanwhile: impl FnOnce()) {
        self.nth(shop, "Roll back", 0);
        meanwhile();
        wait_until("nothing to be in flight", LONG, || {
            self.nth(shop, "Roll back", 1) == ["0"]
        });
    }

    pub fn go_back(&self, shop: &Shop) {
        assert_eq!(self.numbers("Roll back").len(), 3, "{}: blocks of Roll back", self.name);
        self.nth(shop, "Roll back", 2);
        assert!(shop.is_true("select not exists (select from pg_extension where extname = 'outbox')"));
    }

    /// Runs the only block of a section, which must fail; returns the error output of psql.
    pub fn refused(&self, shop: &Shop, heading: &str) -> String {
        let numbers = self.numbers(heading);
        assert_eq!(numbers.len(), 1, "{}, {heading}", self.name);
        shop.psql(&self.blocks[numbers[0]].1).expect_err("a refusal")
    }

    /// Panics unless each block of the page has run.
    pub fn finish(self) {
        let missed = (0..self.blocks.len()).filter(|number| !self.run.borrow().contains(number));
        let missed: Vec<_> = missed.map(|number| &self.blocks[number]).collect();
        assert!(missed.is_empty(), "{}: never run: {missed:#?}", self.name);
    }

    fn numbers(&self, heading: &str) -> Vec<usize> {
        let matching = self
            .blocks
            .iter()
            .enumerate()
            .filter(|(_, (found, _))| found == heading);
        let numbers: Vec<usize> = matching.map(|(number, _)| number).collect();
        assert!(!numbers.is_empty(), "{}: no SQL under {heading:?}", self.name);
        numbers
    }

    fn block(&self, shop: &Shop, number: usize) -> Vec<String> {
        let (heading, sql) = &self.blocks[number];
        self.run.borrow_mut().insert(number);
        match shop.psql(sql) {
            Ok(lines) => lines,
            Err(error) => panic!("{}, {heading}: {error}\n{sql}", self.name),
        }
    }
}

/// A server whose database `shop` has the old system, and a broker.
pub struct Shop {
    pub cluster: Cluster,
    pub broker: &'static Broker,
}

impl Shop {
    /// Creates the old system's tables with `tables`, as the role of the application, which may write and nothing else.
    pub fn with(tables: &str, conf: &[&str]) -> Self {
        let broker = Broker::shared();
        let builder = Cluster::builder().conf(&format!("outbox.url = '{}'", broker.url()));
        let cluster = conf.iter().fold(builder, |builder, line| builder.conf(line)).start();
        cluster.exec("postgres", "create role shop login");
        cluster.exec("postgres", "create database shop");
        for block in blocks(include_str!("../../docs/migrating/README.md"), "sql") {
            cluster.exec(SHOP, &block);
        }
        cluster.exec(
            SHOP,
            &format!("grant create on schema public to shop; set role shop; {tables}"),
        );
        Self { cluster, broker }
    }

    /// A session of the application.
    pub fn application(&self) -> Client {
        let login = self.cluster.conn_string(SHOP).replace("user=postgres", "user=shop");
        Client::connect(&login, NoTls).expect("connect as the application")
    }

    /// A session of a superuser.
    pub fn superuser(&self) -> Client {
        self.cluster.connect(SHOP)
    }

    /// Runs `sql` in one transaction of the application.
    pub fn writes(&self, sql: &str) {
        let mut client = self.application();
        client.run(sql);
    }

    pub fn exec(&self, sql: &str) {
        self.cluster.exec(SHOP, sql);
    }

    pub fn texts(&self, sql: &str) -> Vec<String> {
        let rows = self.superuser().query(sql, &[]);
        let rows = rows.unwrap_or_else(|error| panic!("{sql}: {error:#?}"));
        rows.iter().map(|row| row.get(0)).collect()
    }

    pub fn is_true(&self, sql: &str) -> bool {
        self.cluster.query_one(SHOP, sql)
    }

    pub fn wait(&self, what: &str, sql: &str) {
        wait_until(what, LONG, || self.is_true(sql));
    }

    /// Waits until each destination is connected or reports no problem.
    pub fn wait_connected(&self) {
        self.wait(
            "a worker that is connected to each destination",
            "select count(*) > 0 and bool_and(state in ('connected', 'paused', 'unconfigured'))
             from outbox.outbox_destination_status",
        );
    }

    /// Waits until no message is left to deliver, and the counters, which follow a moment later, show it.
    pub fn wait_drained(&self) {
        self.wait(
            "the outbox to be empty",
            "select not exists (select from outbox.outbox) and not exists (select from outbox.outbox_waiting)
                and (select pending = 0 and in_flight = 0 from outbox.outbox_status)",
        );
    }

    /// Declares a queue that receives everything from an exchange; the workers declare the exchange.
    pub fn bind(&self, kind: &str) -> (String, String) {
        let (exchange, queue) = fresh_names();
        self.broker.declare_exchange(&exchange, kind, true);
        self.broker.declare_queue(&queue, Value::Null);
        self.broker.bind(&queue, &exchange, "#");
        (exchange, queue)
    }

    /// The messages that a queue has received since the last call.
    pub fn arrived(&self, queue: &str) -> Vec<Delivery> {
        all_of(self.broker, queue)
    }

    /// The lines that psql prints, or its error output.
    fn psql(&self, sql: &str) -> Result<Vec<String>, String> {
        let mut command = Command::new(self.cluster.installation().bin("psql"));
        command.args([
            "-X",
            "-q",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
            "-v",
            "VERBOSITY=verbose",
            "-d",
        ]);
        command.arg(self.cluster.conn_string(SHOP));
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG")) {
            command.env_remove(name);
        }
        let pipes = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = pipes.spawn().expect("run psql");
        let mut input = child.stdin.take().expect("a pipe");
        input.write_all(sql.as_bytes()).expect("write to psql");
        drop(input);
        let output = child.wait_with_output().expect("wait for psql");
        let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout)
                .lines()
                .map(str::to_owned)
                .collect()),
            false => Err(complaints),
        }
    }
}

pub fn ids(deliveries: &[Delivery]) -> Vec<&str> {
    let id = |delivery: &'_ Delivery| delivery.message_id.is_some();
    assert!(deliveries.iter().all(id), "a message without an id: {deliveries:?}");
    deliveries
        .iter()
        .filter_map(|delivery| delivery.message_id.as_deref())
        .collect()
}

pub fn sorted<T: Ord>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut items: Vec<T> = items.into_iter().collect();
    items.sort();
    items
}
