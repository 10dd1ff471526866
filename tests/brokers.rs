//! What differs between the versions of RabbitMQ for the consumers of a message. docs/consumers.md says the same.

use serde_json::json;
use std::path::Path;
use std::process::Command;
use support::private_broker::for_rabbitmqadmin;
use support::{Broker, PrivateBroker, Return, Size, fresh_names, markdown, wait_until};
use support::{DB, LONG, outbox_cluster, wait_drained};

/// More than the limit of every version.
const RETURNS_MAX: u32 = 30;
/// The delivery limit of the policy in docs/consumers.md.
const DOCUMENTED_LIMIT: i32 = 5;

/// A quorum queue that gets the messages of an exchange, and the queue of its dead letters.
struct Queues {
    exchange: String,
    queue: String,
    dead: String,
}

impl Queues {
    fn declare(broker: &Broker, queue: &str) -> Self {
        let (exchange, _) = fresh_names();
        let queue = queue.to_owned();
        let dead = format!("{queue}.dead");
        broker.declare_queue(&dead, json!(null));
        broker.declare_queue(&queue, json!({"x-queue-type": "quorum"}));
        broker.declare_exchange(&exchange, "topic", true);
        broker.bind(&queue, &exchange, "#");
        Self { exchange, queue, dead }
    }

    /// Returns the message of the queue again and again. After how many times the broker gives it up, if it does.
    fn returns_until_dead(&self, broker: &Broker, how: Return) -> Option<u32> {
        for returns in 1..=RETURNS_MAX {
            assert!(broker.take_and_return(&self.queue, how), "{how:?}: no message");
            let is_dead = || broker.queue_len(&self.dead) == 1;
            wait_until("the message to be back or dead", LONG, || {
                broker.queue_len(&self.queue) == 1 || is_dead()
            });
            if is_dead() {
                return Some(returns);
            }
        }
        None
    }
}

/// Publishes one message by the outbox to a quorum queue, and returns it as `how` says until the broker gives it up.
fn returns_until_dead(broker: &PrivateBroker, queue: &str, how: Return) -> Option<u32> {
    let queues = Queues::declare(broker, queue);
    let cluster = outbox_cluster(broker, &queues.exchange);
    cluster.exec(DB, "select outbox_publish('T', '{}', 'order', '1')");
    wait_drained(&cluster);
    queues.returns_until_dead(broker, how)
}

/// The first commands of a section of docs/consumers.md.
fn documented(section: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/consumers.md");
    let page = std::fs::read_to_string(page).expect("read docs/consumers.md");
    let (_, section) = page.split_once(&format!("## {section}")).expect("the section");
    markdown::blocks(section, "sh").remove(0)
}

fn run(script: &str) {
    let status = Command::new("sh").args(["-euc", script]).status().expect("run sh");
    assert!(status.success(), "{script}");
}

/// Runs the command of docs/consumers.md that sets the policy of the queue `orders`, for another queue and limit.
fn set_policy(broker: &PrivateBroker, queue: &str, limit: Option<i32>) {
    let block = documented("Messages that a consumer returns");
    let documented = format!(r#", "delivery-limit": {DOCUMENTED_LIMIT}"#);
    assert!(block.contains(&documented), "{block}");
    let wanted = limit.map_or(String::new(), |limit| format!(r#", "delivery-limit": {limit}"#));
    let script = block
        .replace(&documented, &wanted)
        .replace("orders", queue)
        .replace("rabbitmqctl ", &format!("{} ", broker.ctl_script().display()));
    run(&script);
}

#[test]
fn what_a_quorum_queue_does_with_a_message_that_is_returned_again_and_again_depends_on_the_version() {
    let broker = Broker::start_sized(Size::default());
    let found = [
        ("rejected", Return::Reject),
        ("nacked", Return::Nack),
        ("left", Return::Leave),
    ]
    .map(|(queue, how)| {
        set_policy(&broker, queue, None);
        returns_until_dead(&broker, queue, how)
    });
    let expected = match broker.version() {
        (3, _) => [None, None, None],
        (4, 0..3) => [Some(21), Some(21), Some(21)],
        _ => [Some(21), None, Some(21)],
    };
    assert_eq!(found, expected, "RabbitMQ {:?}: reject, nack, leave", broker.version());
}

#[test]
fn the_policy_of_the_docs_sets_a_dead_letter_exchange_and_a_delivery_limit() {
    let broker = Broker::start_sized(Size::default());
    set_policy(&broker, "orders", Some(DOCUMENTED_LIMIT));
    let limited = returns_until_dead(&broker, "orders", Return::Reject);
    assert_eq!(limited, Some(DOCUMENTED_LIMIT as u32 + 1));
    if broker.version() >= (4, 0) {
        set_policy(&broker, "unlimited", Some(-1));
        assert_eq!(returns_until_dead(&broker, "unlimited", Return::Reject), None);
    }
}

#[test]
fn the_alternate_exchange_of_the_docs_keeps_what_no_queue_takes() {
    let broker = Broker::start_sized(Size::default());
    let (exchange, _) = fresh_names();
    broker.declare_exchange(&exchange, "fanout", true);
    let (plugins, management_port) = broker.plugins_script();
    run(&format!("{} enable rabbitmq_management", plugins.display()));
    let script = for_rabbitmqadmin(&documented("Messages that no queue takes"), management_port);
    run(&script
        .replace("orders", &exchange)
        .replace("rabbitmqctl ", &format!("{} ", broker.ctl_script().display())));
    let cluster = outbox_cluster(&broker, &exchange);
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'order', '1') from generate_series(1, 20)",
    );
    wait_drained(&cluster);
    let published = "select count(*) = 20 and not bool_or(discarded) from outbox_history";
    assert!(cluster.query_one::<bool>(DB, published));
    assert_eq!(broker.queue_len("unrouted"), 20);
}
