//! A dead letter becomes an event of its own for the destination that its destination names.

use super::{Host, Stage};
use support::{DB, Event, LONG, Receiver, Reply, Session, wait_drained, wait_true, wait_until};

pub fn a_dead_letter_sends_a_notice_and_the_notice_none(host: Host) {
    let receiver = Receiver::start(|_| Reply::status(422));
    let stage = Stage::of_nothing(host, &[]);
    let url = receiver.url("/ops");
    stage.destination(
        "ops",
        "http",
        &format!("url '{url}', max_attempts '1', dead_letters_to 'shop'"),
    );
    let url = receiver.url("/shop");
    stage.destination(
        "shop",
        "http",
        &format!("url '{url}', max_attempts '1', dead_letters_to 'ops'"),
    );
    let mut client = stage.cluster.connect(DB);
    client.publish(Event::new("poison").to("shop").key("7"));
    wait_until("the notice", LONG, || receiver.requests().len() == 2);
    wait_true(
        &stage.cluster,
        "it to be dead, too",
        "select count(*) = 2 from outbox_dead",
    );
    wait_drained(&stage.cluster);
    let requests = receiver.requests();
    let (event, notice) = (requests[0].json(), requests[1].json());
    assert_eq!(requests[1].path, "/ops");
    assert_eq!(notice["type"], "outbox.dead_letter");
    let told = &notice["payload"];
    for field in ["id", "type", "aggregate_type", "aggregate_id"] {
        assert_eq!(told[field], event[field], "{field}");
    }
    assert_eq!(told["destination"], "shop");
    assert_eq!(told["kind"], "refused");
    assert_eq!(told["attempts"], 1);
    assert_eq!(told["blocks"], true);
    let reason = client.value::<String>("select reason from outbox_dead where destination = 'shop'");
    assert_eq!(told["reason"], reason);
    assert_eq!(requests.len(), 2);
}
