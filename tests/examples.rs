//! Runs the consumers of examples/ on a real RabbitMQ and a real Postgres. They must do what their first lines promise
//! when every message is delivered more than once, old messages arrive after new ones, and the consumer is killed in
//! between.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use amqprs::{BasicProperties, FieldTable, FieldValue};
use serde_json::Value;
use support::program::example_packages;
use support::{Broker, Cluster, Delivery, process, wait_until};
use support::{DB, LONG, all_of, exchange_and_queue, outbox_cluster, wait_published};

const AGGREGATES: usize = 10;
const VERSIONS: usize = 6;

/// A table whose rows become events without a call in the application.
const PRODUCT: &str = "
create table product (id int primary key, name text, price int, category text, deleted_at timestamptz);
select outbox_capture('product', soft_delete_column => 'deleted_at');";

/// The cache of web pages, and the role of its invalidator.
const CACHE: &str = "
create role webcache login in role outbox_consumer;
create table page_cache (key text primary key, page text not null);
create table page_generation (key text primary key, generation bigint not null);
grant select, insert, update, delete on page_cache, page_generation to webcache;";

/// A program of examples/, and the environment variables with the addresses of its servers.
struct Example<'a> {
    file: &'a str,
    env: Vec<(&'a str, String)>,
}

impl Example<'_> {
    fn command(&self, arguments: &[&str]) -> Command {
        let interpreter = match self.file.rsplit('.').next() {
            Some("py") => example_packages().join("python/bin/python3"),
            _ => PathBuf::from("node"),
        };
        let mut command = Command::new(interpreter);
        command
            .arg(
                Path::new(env!("CARGO_MANIFEST_DIR"))
                    .join("../examples")
                    .join(self.file),
            )
            .args(arguments)
            .env("NODE_PATH", example_packages().join("node/node_modules"))
            .envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    fn start(&self) -> Running {
        let mut command = self.command(&["run"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Running(process::spawn_bound(command, libc::SIGKILL).expect("start an example"))
    }

    fn search(&self, words: &str) -> Vec<String> {
        let output = self.command(&["search", words]).output().expect("run an example");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .map(str::to_owned)
            .collect()
    }
}

/// A running example. Dropping it kills the program.
struct Running(Child);

impl Running {
    fn is_alive(&mut self) -> bool {
        self.0.try_wait().expect("a child process").is_none()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        process::kill(&mut self.0);
    }
}

/// A worker, an exchange, the queue of the example, and a queue that gets a copy of each message.
struct Stage {
    broker: &'static Broker,
    cluster: Cluster,
    exchange: String,
    queue: String,
    copies: String,
}

fn stage() -> Stage {
    let broker = Broker::shared();
    let (exchange, copies) = exchange_and_queue(broker);
    let queue = format!("{copies}.example");
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "#");
    let cluster = outbox_cluster(broker, &exchange);
    Stage {
        broker,
        cluster,
        exchange,
        queue,
        copies,
    }
}

impl Stage {
    fn example<'a>(&self, file: &'a str, more: &[(&'a str, String)]) -> Example<'a> {
        let mut env = vec![
            ("AMQP_URL", self.broker.url()),
            ("EXCHANGE", self.exchange.clone()),
            ("QUEUE", self.queue.clone()),
        ];
        env.extend_from_slice(more);
        Example { file, env }
    }

    fn database(&self, user: &str) -> (&'static str, String) {
        (
            "DATABASE",
            format!("postgresql://{user}@127.0.0.1:{}/{DB}", self.cluster.port()),
        )
    }

    /// Publishes VERSIONS events for each page, the last of them as final; then deletes the last page.
    fn publish(&self) {
        self.cluster.exec(
            DB,
            &format!(
                "select outbox_publish('PageSaved', jsonb_build_object('title', 'page ' || page, 'version', version,
                            'state', case version when {VERSIONS} then 'final' else 'draft' end), 'page', page::text,
                            case when page = {AGGREGATES} and version = {VERSIONS} then 'DELETE' else 'PUT' end)
                 from generate_series(1, {VERSIONS}) version, generate_series(1, {AGGREGATES}) page"
            ),
        );
        wait_published(&self.cluster, AGGREGATES * VERSIONS);
    }

    /// Repeats all messages by a replay and the first thirty messages twice as they are. Adds a body that is not a
    /// message of the outbox. Then publishes a last message.
    fn repeat(&self) {
        let first = all_of(self.broker, &self.copies);
        assert_eq!(first.len(), AGGREGATES * VERSIONS);
        self.cluster
            .exec(DB, "select outbox_replay(seq_from => 1, dry_run => false)");
        wait_published(&self.cluster, 2 * AGGREGATES * VERSIONS);
        self.broker.publish("", &self.queue, b"no JSON");
        self.broker.publish("", &self.queue, b"{\"seq\": 1}");
        for delivery in first[..30].iter().chain(&first[..30]) {
            self.publish_again(delivery);
        }
        self.cluster.exec(
            DB,
            "select outbox_publish('PageSaved', '{\"title\": \"theend\"}', 'page', 'last', 'PUT')",
        );
    }

    fn publish_again(&self, delivery: &Delivery) {
        let mut headers = FieldTable::new();
        for name in ["aggregate_type", "aggregate_id"] {
            let value = delivery.headers[name].as_str().expect("a text").to_owned();
            headers.insert(
                name.try_into().expect("short"),
                FieldValue::S(value.try_into().expect("a text")),
            );
        }
        let properties = BasicProperties::default()
            .with_message_id(delivery.message_id.as_deref().expect("an id"))
            .with_headers(headers)
            .finish();
        self.broker.publish_with("", &self.queue, properties, &delivery.body);
    }
}

fn the_index_is_right(file: &str, more: impl Fn(&Stage) -> Vec<(&'static str, String)>) {
    let stage = stage();
    let example = stage.example(file, &more(&stage));
    let mut indexer = example.start();
    stage.publish();
    wait_until("something in the index", LONG, || {
        assert!(indexer.is_alive(), "{file} ended");
        !example.search("page").is_empty()
    });
    drop(indexer); // at an arbitrary moment
    stage.repeat();
    let mut indexer = example.start();
    wait_until("the last message in the index", LONG, || {
        assert!(indexer.is_alive(), "{file} ended");
        example.search("theend") == ["page:last"]
    });
    let mut expected: Vec<String> = (1..AGGREGATES).map(|page| format!("page:{page}")).collect();
    expected.sort();
    assert_eq!(
        example.search("final"),
        expected,
        "the newest state, without deleted pages"
    );
    assert_eq!(example.search("draft"), [""; 0], "an older state came back");
    assert_eq!(example.search("page"), expected);
}

fn the_generations_are_right(file: &str) {
    let stage = stage();
    stage.cluster.exec(DB, CACHE);
    let cached = "insert into page_cache select 'page:' || n, 'old' from generate_series(1, 12) n";
    stage.cluster.exec(DB, cached);
    let example = stage.example(file, &[stage.database("webcache")]);
    let mut invalidator = example.start();
    stage.publish();
    wait_until("a generation", LONG, || {
        assert!(invalidator.is_alive(), "{file} ended");
        stage
            .cluster
            .query_one(DB, "select exists (select from page_generation)")
    });
    drop(invalidator); // at an arbitrary moment
    stage.repeat();
    let mut invalidator = example.start();
    wait_until("the last message", LONG, || {
        assert!(invalidator.is_alive(), "{file} ended");
        let last = "select exists (select from page_generation where key = 'page:last')";
        stage.cluster.query_one(DB, last)
    });
    let wrong = format!(
        "select coalesce(string_agg(key || ' ' || generation, ', '), '') from page_generation
         where generation <> case key when 'page:last' then 1 when 'page:list:*' then {} else {VERSIONS} end",
        AGGREGATES * VERSIONS + 1
    );
    assert_eq!(stage.cluster.query_one::<String>(DB, &wrong), "");
    let keys = "select count(*) from page_generation";
    assert_eq!(stage.cluster.query_one::<i64>(DB, keys), AGGREGATES as i64 + 2);
    let remaining = "select array_agg(key order by key) from page_cache";
    assert_eq!(
        stage.cluster.query_one::<Vec<String>>(DB, remaining),
        ["page:11", "page:12"]
    );
}

/// The index holds the whole row after an update that sends one column of it, and no row that was deleted.
fn captured_rows_are_found(file: &str, more: impl Fn(&Stage) -> Vec<(&'static str, String)>) {
    let stage = stage();
    stage.cluster.exec(DB, PRODUCT);
    let example = stage.example(file, &more(&stage));
    let mut indexer = example.start();
    for (write, words, found) in [
        (
            "insert into product values (1, 'widget', 41, null), (2, 'gadget', 41, 'tools')",
            "41",
            vec!["product:1", "product:2"],
        ),
        ("update product set price = 77 where id = 1", "77", vec!["product:1"]),
        ("update product set deleted_at = now() where id = 1", "widget", vec![]),
        (
            "update product set deleted_at = null where id = 1",
            "widget",
            vec!["product:1"],
        ),
        ("delete from product where id = 2", "gadget", vec![]),
    ] {
        stage.cluster.exec(DB, write);
        wait_until(write, LONG, || {
            assert!(indexer.is_alive(), "{file} ended");
            example.search(words) == found
        });
    }
    assert_eq!(
        example.search("widget"),
        ["product:1"],
        "the columns that did not change"
    );
    assert_eq!(example.search("41"), [""; 0], "the old price, and the deleted row");
    assert_eq!(example.search("None"), [""; 0], "a NULL is no word");
}

/// Each write to a captured table drops the pages that show its row, and no others.
fn captured_rows_are_dropped(file: &str) {
    let stage = stage();
    stage.cluster.exec(DB, &format!("{PRODUCT} {CACHE}"));
    let example = stage.example(file, &[stage.database("webcache")]);
    let mut invalidator = example.start();
    let categories = ["books", "tools", "toys"].map(|name| format!("category:{name}:products"));
    let [books, tools, toys] = [0, 1, 2].map(|n| categories[n].as_str());
    for (generation, (write, kept)) in [
        (
            "insert into product values (1, 'widget', 41, 'tools')",
            vec![books, toys],
        ),
        ("update product set price = 77", vec![]), // its event does not name the category
        ("update product set category = 'toys'", vec![books]),
        ("delete from product", vec![books, tools]),
    ]
    .into_iter()
    .enumerate()
    {
        stage.cluster.exec(
            DB,
            "insert into page_cache select key, 'old'
             from unnest('{order:1,order:list:1,product:1,product:2,product:list:1,product:list:cheap,category:books:products,
                           category:tools:products,category:toys:products}'::text[]) key
             on conflict do nothing",
        );
        stage.cluster.exec(DB, write);
        let done = format!(
            "select exists (select from page_generation where key = 'product:1' and generation > {generation})"
        );
        wait_until(write, LONG, || {
            assert!(invalidator.is_alive(), "{file} ended");
            stage.cluster.query_one(DB, &done)
        });
        let cached = stage
            .cluster
            .query_one::<Vec<String>>(DB, "select array_agg(key order by key collate \"C\") from page_cache");
        let kept = [kept, vec!["order:1", "order:list:1", "product:2"]].concat();
        assert_eq!(cached, kept, "{write}");
    }
    let generations = "select array_agg(key || ' ' || generation order by key collate \"C\") from page_generation";
    assert_eq!(
        stage.cluster.query_one::<Vec<String>>(DB, generations),
        [
            "category:* 1",
            "category:tools:products 2",
            "category:toys:products 2",
            "product:1 4",
            "product:list:* 4"
        ]
    );
}

/// The name of the queue makes the file unique: no other test uses that name.
fn index_file(stage: &Stage) -> Vec<(&'static str, String)> {
    let file = example_packages().join(format!("{}.sqlite", stage.queue));
    vec![("INDEX", file.display().to_string())]
}

#[test]
fn the_search_indexer_in_python_holds_the_newest_state_of_each_page() {
    the_index_is_right("python/search_indexer.py", index_file);
}

#[test]
fn the_search_indexer_in_node_holds_the_newest_state_of_each_page() {
    the_index_is_right("node/search_indexer.js", |stage| vec![stage.database("postgres")]);
}

#[test]
fn the_cache_invalidator_in_python_counts_each_change_once() {
    the_generations_are_right("python/cache_invalidator.py");
}

#[test]
fn the_cache_invalidator_in_node_counts_each_change_once() {
    the_generations_are_right("node/cache_invalidator.js");
}

#[test]
fn the_search_indexer_in_python_merges_updates_of_a_captured_table() {
    captured_rows_are_found("python/search_indexer.py", index_file);
}

#[test]
fn the_search_indexer_in_node_merges_updates_of_a_captured_table() {
    captured_rows_are_found("node/search_indexer.js", |stage| vec![stage.database("postgres")]);
}

#[test]
fn the_cache_invalidator_in_python_drops_lists_and_categories_of_a_captured_table() {
    captured_rows_are_dropped("python/cache_invalidator.py");
}

#[test]
fn the_cache_invalidator_in_node_drops_lists_and_categories_of_a_captured_table() {
    captured_rows_are_dropped("node/cache_invalidator.js");
}
