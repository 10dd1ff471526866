//! A queue that is deleted and declared again while messages to it are unconfirmed. All messages must be delivered, in
//! order per key, and the state must show the unconfirmed ones. Observed with RabbitMQ 3.10: a classic queue loses no
//! confirm. When a quorum queue is deleted, the broker often stops reading from the connection, or closes it with
//! INTERNAL_ERROR.

use serde_json::{Value, json};
use support::{Broker, wait_until};

use support::arrived;
use support::chaos::rounds;
use support::faults::{Faults, messages};
use support::oracle::{Fate, Sent, judge, last_arrivals_out_of_order};
use support::{DB, LONG, all_of, exchange_and_queue, outbox_cluster, wait_healthy};

/// The number of messages in a round, published in one transaction: several windows.
const COUNT: usize = 8_000;
const DELETED: usize = 4;
const KEYS: usize = 50;

/// A second queue of the exchange, the witness, keeps all messages ever sent. A message is confirmed when both queues
/// have it.
fn a_queue_is_deleted_and_declared_again_under_load(arguments: &Value, rounds: usize) {
    let broker = Broker::start();
    let (exchange, witness) = exchange_and_queue(&broker);
    let queue = format!("{witness}-again");
    let declare = || {
        broker.declare_queue(&queue, arguments.clone());
        broker.bind(&queue, &exchange, "#");
    };
    declare();
    let cluster = outbox_cluster(&broker, &exchange);
    let is_drained = || {
        let drained = "select not exists (select from outbox) and not exists (select from outbox_waiting)";
        cluster.query_one::<bool>(DB, drained)
    };
    let mut faults = Faults::default();
    for round in 0..rounds {
        cluster.exec(
            DB,
            &format!(
                "select outbox_publish('T', jsonb_build_object('label', '{round}-' || g), 'a', (g % {KEYS})::text)
                 from generate_series(1, {COUNT}) g"
            ),
        );
        for _ in 0..DELETED {
            wait_until("the queue to take messages", LONG, || {
                broker.queue_len(&queue) > 0 || is_drained()
            });
            faults.during(1, || {
                broker.delete_queue(&queue);
                declare();
            });
        }
        wait_until("all messages to be delivered", LONG * 2, is_drained);
    }
    let log = cluster.log();
    for line in log
        .lines()
        .filter(|line| line.contains("unconfirmed") || line.contains("broker down"))
    {
        println!("{line}");
    }
    // The worker must not wait until the confirm timeout, unless the queue was silent again and again.
    if let Some((_, after)) = log.split_once("unconfirmed for ") {
        let down = after
            .lines()
            .find(|line| line.contains("broker down"))
            .unwrap_or_default();
        assert!(!down.contains("no confirm within"), "{down}");
    }
    let all = arrived(&all_of(&broker, &witness));
    let labels = (0..rounds).flat_map(|round| (1..=COUNT).map(move |n| format!("{round}-{n}")));
    let sent = labels.map(|label| Sent {
        payload: json!({"label": label}),
        label,
        fate: Fate::Committed,
    });
    let verdict = judge(&sent.collect::<Vec<_>>(), &all);
    faults.assert_explain_repeats(&verdict, &messages(&cluster));
    let none = Vec::<String>::new();
    assert_eq!(last_arrivals_out_of_order(&all), none);
    let in_the_last = arrived(&all_of(&broker, &queue));
    assert_eq!(last_arrivals_out_of_order(&in_the_last), none);
    let dead = "select count(*) from outbox_dead";
    assert_eq!(cluster.query_one::<i64>(DB, dead), 0);
    wait_healthy(&cluster, "broker");
}

#[test]
fn a_classic_queue_that_is_deleted_and_declared_again_loses_and_reorders_nothing() {
    a_queue_is_deleted_and_declared_again_under_load(&Value::Null, rounds(2));
}

#[test]
fn a_quorum_queue_that_is_deleted_and_declared_again_loses_and_reorders_nothing() {
    a_queue_is_deleted_and_declared_again_under_load(&json!({"x-queue-type": "quorum"}), rounds(1));
}
