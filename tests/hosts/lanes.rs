//! Lanes that the worker claims one by one, because another session locks rows of one lane.

use postgres::Client;
use support::Broker;

use super::{Host, Stage, of_key};
use support::{DB, Session, all_of, exchange_and_queue, labels, wait_published};

const KEYS: usize = 60;
const OF_EACH: usize = 3;

/// A server without running workers, with messages of many keys. Returns the lanes that have messages, in the order of
/// a claim.
fn backlog(host: Host, exchange: &str) -> (Stage, Vec<i16>) {
    let stage = Stage::idle(host, &Broker::shared().url(), exchange, &[]);
    stage.cluster.exec(
        DB,
        &format!(
            "select outbox_publish('T', jsonb_build_object('label', 'k' || k || ' ' || n), 'item', 'k' || k, 'x')
             from generate_series(1, {OF_EACH}) n, generate_series(1, {KEYS}) k"
        ),
    );
    let lanes: Vec<i16> = stage.cluster.query_one(
        DB,
        "select array_agg(distinct partition order by partition) from outbox",
    );
    assert!(lanes.len() > 4, "{lanes:?}");
    (stage, lanes)
}

fn waiting_in(stage: &Stage, lanes: &[i16]) -> usize {
    let sql = format!("select count(*) from outbox where partition = any ('{}')", array(lanes));
    stage.cluster.query_one::<i64>(DB, &sql) as usize
}

fn array(lanes: &[i16]) -> String {
    format!("{lanes:?}").replace('[', "{").replace(']', "}")
}

/// A session that locks the rows of a lane.
fn hold(stage: &Stage, lane: i16) -> Client {
    let mut holder = stage.cluster.connect(DB);
    let sql = format!("begin; select from outbox where partition = {lane} for update");
    holder.run(&sql);
    holder
}

/// Asserts that each message arrived once, and the messages of a key in order.
fn assert_all_came(queue: &str) {
    let arrived = labels(&all_of(Broker::shared(), queue));
    assert_eq!(arrived.len(), KEYS * OF_EACH);
    for key in (1..=KEYS).map(|k| format!("k{k}")) {
        let wanted: Vec<String> = (1..=OF_EACH).map(|n| format!("{key} {n}")).collect();
        assert_eq!(of_key(&arrived, &key), wanted);
    }
}

pub fn locked_rows_delay_their_lane_and_no_other(host: Host) {
    let (exchange, queue) = exchange_and_queue(Broker::shared());
    let (stage, lanes) = backlog(host, &exchange);
    let locked = lanes[lanes.len() / 2];
    let behind = waiting_in(&stage, &[locked]);
    let mut holder = hold(&stage, locked);
    stage.work(1);
    wait_published(&stage.cluster, KEYS * OF_EACH - behind);
    stage.wait_logged("another session has locked messages");
    assert_eq!(waiting_in(&stage, &lanes), behind);
    holder.run("rollback");
    wait_published(&stage.cluster, KEYS * OF_EACH);
    assert_all_came(&queue);
}

pub fn an_error_in_one_lane_loses_no_claimed_message_of_other_lanes(host: Host) {
    let (exchange, queue) = exchange_and_queue(Broker::shared());
    let (stage, lanes) = backlog(host, &exchange);
    // The first lane makes the worker claim lane by lane, and the error occurs when it claims the other lanes.
    let (locked, failing) = (lanes[0], lanes[lanes.len() - 1]);
    stage.cluster.exec(
        DB,
        &format!(
            "create table public.broken ();
             insert into public.broken default values;
             create function public.fail() returns trigger language plpgsql security definer as $$
               begin
                 if exists (select from public.broken) then
                   raise exception 'this lane is broken';
                 end if;
                 return new;
               end $$;
             create trigger fail before update on outbox for each row when (new.partition = {failing})
               execute function public.fail()"
        ),
    );
    let all = KEYS * OF_EACH;
    let (behind_lock, behind_error) = (waiting_in(&stage, &[locked]), waiting_in(&stage, &[failing]));
    let mut holder = hold(&stage, locked);
    stage.work(1);
    stage.wait_logged("this lane is broken");
    wait_published(&stage.cluster, all - behind_lock - behind_error);
    stage.cluster.exec(DB, "delete from public.broken");
    wait_published(&stage.cluster, all - behind_lock);
    assert_eq!(waiting_in(&stage, &lanes), behind_lock);
    holder.run("rollback");
    wait_published(&stage.cluster, all);
    assert_all_came(&queue);
}
