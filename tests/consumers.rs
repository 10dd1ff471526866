//! Do the programs of docs/consumers.md get a message? Each runs as it stands on the page, and reads an event that a
//! worker published to its queue. What else a framework needs is in tests/consumers/.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use support::markdown::blocks;
use support::program::example_packages;
use support::workdir::ServerDir;
use support::{Broker, Cluster, PrivateBroker, Size, process, wait_until};
use support::{DB, LONG, outbox_cluster, wait_drained};

/// The queue of every program of the page.
const QUEUE: &str = "orders";
const EXCHANGE: &str = "events";

/// A program that consumes, and the file with what it prints. Killed when it is dropped.
struct Consumer {
    child: Child,
    printed: PathBuf,
}

impl Consumer {
    fn start(mut command: Command, directory: &ServerDir) -> Self {
        let printed = directory.path().join("printed");
        let file = std::fs::File::create(&printed).expect("a file for what is printed");
        command
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a file"))
            .stderr(file);
        let child = process::spawn_bound(command, libc::SIGKILL).expect("start a consumer");
        Self { child, printed }
    }

    fn printed(&self) -> String {
        std::fs::read_to_string(&self.printed).expect("what is printed")
    }

    /// Waits until it has printed all of `texts`.
    fn wait_for(&mut self, texts: &[&str]) {
        wait_until(&format!("a consumer to print {texts:?}"), LONG, || {
            // In this order: it may print the last text and end between the two.
            let has_ended = self.child.try_wait().expect("a child").is_some();
            let printed = self.printed();
            let is_complete = texts.iter().all(|text| printed.contains(text));
            assert!(is_complete || !has_ended, "it ended: {printed}");
            is_complete
        });
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        process::kill(&mut self.child);
    }
}

/// A broker with the queue of the page, and a server whose worker publishes to it.
struct Stage {
    broker: PrivateBroker,
    cluster: Cluster,
    directory: ServerDir,
}

impl Stage {
    fn new() -> Self {
        let broker = Broker::start_sized(Size::default());
        broker.declare_bound(EXCHANGE, QUEUE, Value::Null);
        let cluster = outbox_cluster(&broker, EXCHANGE);
        Self {
            broker,
            cluster,
            directory: ServerDir::create("consumers"),
        }
    }

    /// Writes the only block of a language below a heading of the page to a file.
    fn program(&self, heading: &str, language: &str, name: &str) -> PathBuf {
        let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/consumers.md"));
        let page = page.expect("the page");
        let section = page.split(&format!("\n## {heading}\n")).nth(1).expect(heading);
        let found = blocks(section.split("\n## ").next().unwrap_or_default(), language);
        let [program] = &found[..] else {
            panic!("{heading}: {} blocks of {language}", found.len());
        };
        let path = self.directory.path().join(name);
        std::fs::write(&path, program).expect("write a program");
        path
    }

    fn url(&self) -> String {
        let broker = &self.broker;
        format!(
            "amqp://{}:{}@127.0.0.1:{}",
            broker.user(),
            broker.password(),
            broker.port()
        )
    }

    /// Publishes an order to a destination with the format `payload` and these options, and returns the id of its
    /// event.
    fn publish(&self, order: i64, options: &str) -> String {
        self.cluster.exec(
            DB,
            &format!(
                "create server payloads foreign data wrapper outbox_amqp
                   options (exchange '{EXCHANGE}', format 'payload'{options})"
            ),
        );
        let seq: i64 = self.cluster.query_one(
            DB,
            &format!(
                "select outbox_publish('OrderPlaced', jsonb_build_object('order', {order}), 'order', 'A-{order}', 'placed',
                                       destination => 'payloads')"
            ),
        );
        wait_drained(&self.cluster);
        self.cluster
            .query_one(DB, &format!("select id::text from outbox_events where seq = {seq}"))
    }

    fn finish(self) {
        self.directory.finish();
    }
}

#[test]
fn a_celery_worker_calls_a_task_for_each_event() {
    let stage = Stage::new();
    stage.program("Celery and kombu", "python", "shop.py");
    let mut celery = Command::new(example_packages().join("python/bin/celery"));
    celery
        .args(["-A", "shop", "worker", "--pool", "solo", "--loglevel", "info"])
        .env("CELERY_BROKER_URL", stage.url());
    let mut consumer = Consumer::start(celery, &stage.directory);
    let event = stage.publish(41, "");
    consumer.wait_for(&[&format!("order 41 by event {event}")]);
    drop(consumer);
    stage.finish();
}

#[test]
fn a_nest_controller_gets_an_event_by_its_type() {
    let stage = Stage::new();
    let program = stage.program("NestJS", "typescript", "shop.ts");
    let modules = example_packages().join("consumers/node_modules");
    std::os::unix::fs::symlink(&modules, stage.directory.path().join("node_modules")).expect("link the packages");
    let options = "--experimentalDecorators --target es2022 --module commonjs --skipLibCheck --strict";
    let compiled = Command::new(modules.join(".bin/tsc"))
        .args(options.split(' '))
        .arg(&program)
        .current_dir(stage.directory.path())
        .output()
        .expect("run tsc");
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stdout)
    );
    let mut node = Command::new("node");
    node.arg(program.with_extension("js")).env("AMQP_URL", stage.url());
    let mut consumer = Consumer::start(node, &stage.directory);
    let event = stage.publish(42, "");
    consumer.wait_for(&[&format!("order 42 by event {event}")]);
    drop(consumer);
    stage.finish();
}

#[test]
fn a_symfony_handler_gets_an_object_of_the_class_in_the_header() {
    const SYMFONY: [&str; 5] = [
        "php",
        "/usr/share/php/Symfony/Bundle/FrameworkBundle/autoload.php",
        "/usr/share/php/Symfony/Component/Messenger/Bridge/Amqp/autoload.php",
        "/usr/share/php/Symfony/Component/PropertyInfo/autoload.php",
        "/usr/share/php/Symfony/Component/Serializer/autoload.php",
    ];
    if support::skip_without("a Symfony handler gets an object", &SYMFONY) {
        return;
    }
    let stage = Stage::new();
    let yaml = stage.program("Symfony Messenger", "yaml", "messenger.yaml");
    let event = stage.publish(43, r#", headers '{"type": "App\\Message\\{type}"}'"#);
    let mut php = Command::new("php");
    php.args(["-d", "include_path=/usr/share/php"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("consumers/symfony.php"))
        .args([&yaml, stage.directory.path()])
        .env("RABBITMQ_DSN", format!("{}/%2f/{EXCHANGE}", stage.url()));
    let mut consumer = Consumer::start(php, &stage.directory);
    consumer.wait_for(&[
        r#""order":43"#,
        r#""aggregate_id":"A-43""#,
        &format!(r#""id":"{event}""#),
    ]);
    drop(consumer);
    stage.finish();
}
