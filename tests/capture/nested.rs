//! Tests of triggers that change a captured table again: the events of a row come in the order of its changes, so the
//! last one has what is in the table.

use postgres::Client;
use support::{DB, LONG, Session, Stage, wait_drained};

use super::server;

/// Counts v of the row up, by one each time, up to 3.
const COUNTS_UP: &str = "create function count_up() returns trigger language plpgsql as $$ begin
    update item set v = v + 1 where v < 3 and id = new.id; return null; end $$";

/// The values of v in the events of each row, in order of seq, and v in the table.
fn told(client: &mut Client) -> Vec<(i32, Vec<i32>, i32)> {
    let sql = "select i.id, array_agg((e.payload->>'v')::int order by e.seq), min(i.v)
               from item i join outbox_events e on e.aggregate_id = i.id::text group by i.id order by i.id";
    let rows = client.query(sql, &[]).expect("the events");
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect()
}

/// Each event has its message under the same seq, and each message its event.
fn assert_enqueued(client: &mut Client) {
    let odd: i64 = client.value(
        "select count(*) from outbox o full join outbox_events e on e.seq = o.seq and o.key = 'item:' || e.aggregate_id
         where o.seq is null or e.seq is null",
    );
    assert_eq!(odd, 0);
}

#[test]
fn a_row_trigger_that_changes_the_row_again_makes_its_event_after_that_of_the_statement() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(COUNTS_UP);
    let table = "create table item (id int primary key, v int)";
    let parts = "create table item (id int, v int, primary key (id)) partition by range (id);
                 create table item_1 partition of item for values from (0) to (3);
                 create table item_2 partition of item for values from (3) to (9)";
    for create in [table, parts] {
        for name in ["a", "zz"] {
            for (write, rows) in [
                ("insert into item values (1, 0), (2, 0), (3, 0)", 3),
                ("insert into item values (1, 0) on conflict (id) do update set v = 0", 1),
                ("copy item from program 'printf \"1\\t0\\n2\\t0\\n\"'", 2),
                (
                    "with w as (insert into item values (1, 0) returning id) select * from w",
                    1,
                ),
                (
                    "merge into item using (values (1), (2)) s (id) on item.id = s.id when not matched then insert values (s.id, 0)",
                    2,
                ),
            ] {
                client.run(create);
                client.run(&format!(
                    "select outbox_capture('item');
                     create trigger {name} after insert or update on item for each row execute function count_up()"
                ));
                client.run(write);
                let told = told(&mut client);
                assert_eq!(told.len(), rows, "{write}");
                for (id, values, last) in told {
                    assert_eq!((values, last), (vec![0, 1, 2, 3], 3), "{create} {name} {write}: {id}");
                }
                assert_enqueued(&mut client);
                client.run("drop table item; delete from outbox; delete from outbox_events");
            }
        }
    }
}

#[test]
fn statement_triggers_upserts_and_errors_keep_the_order() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table item (id int primary key, v int); create table source (id int);
         create function all_up() returns trigger language plpgsql as $$ begin
           if exists (select from item where v < 3) then update item set v = v + 1 where v < 3; end if;
           return null; end $$;
         create function fails_once() returns trigger language plpgsql as $$ begin
           if pg_trigger_depth() = 1 then
             begin update item set v = 100; raise exception 'no'; exception when others then end;
           end if;
           update item set v = v + 1 where v < 3; return null; end $$;
         create function from_source() returns trigger language plpgsql as $$ begin
           insert into item values (new.id, 0); return null; end $$;
         create trigger s after insert on source for each row execute function from_source();
         select outbox_capture('item')",
    );
    for (trigger, write) in [
        (
            "before insert on item for each statement execute function all_up()",
            "insert into item values (1, 0); insert into item values (2, 0)",
        ),
        (
            "after insert or update on item for each statement execute function all_up()",
            "insert into item values (1, 0)",
        ),
        (
            "after insert or update on item for each row execute function all_up()",
            "insert into item values (1, 0); insert into item values (1, 0), (2, 0) on conflict (id) do update set v = 0",
        ),
        (
            "after insert or update on item for each row execute function fails_once()",
            "insert into item values (1, 0)",
        ),
        // The outer statement is on another table.
        (
            "after insert or update on item for each row execute function all_up()",
            "insert into source values (1); insert into source values (2)",
        ),
        (
            "after insert or update on item for each row execute function all_up()",
            "begin; insert into source values (1); update item set v = 0; commit",
        ),
    ] {
        client.run(&format!("create trigger a {trigger}"));
        client.run(write);
        for (id, values, last) in told(&mut client) {
            assert_eq!(values.last(), Some(&last), "{trigger}, {write}: {id} {values:?}");
            let grows = |pair: &[i32]| pair[1] == 0 || pair[1] == pair[0] + 1;
            assert!(
                values[0] == 0 && values.windows(2).all(grows),
                "{trigger}, {write}: {id} {values:?}"
            );
        }
        assert_enqueued(&mut client);
        client.run(
            "drop trigger a on item; truncate source; delete from item; delete from outbox; delete from outbox_events",
        );
    }
}

#[test]
fn the_consumer_gets_the_changes_of_a_row_in_order_also_by_the_fast_path_and_a_second_destination() {
    let stage = Stage::new(&[]);
    let other = stage.destination(stage.broker, "audit", "");
    let mut client = stage.connect(DB);
    client.run(COUNTS_UP);
    client.run(
        "create table item (id int primary key, v int); select outbox_capture('item');
         select outbox_subscribe('audit');
         create trigger a after insert or update on item for each row execute function count_up();
         insert into item select n, 0 from generate_series(1, 20) n",
    );
    wait_drained(&stage);
    for received in [stage.consumer().recv_n(80, LONG), support::all_of(stage.broker, &other)] {
        assert_eq!(received.len(), 80);
        for id in 1..=20 {
            let of_row = received.iter().map(|delivery| delivery.json()["payload"].clone());
            let values: Vec<i64> = of_row
                .filter(|row| row["id"] == id)
                .map(|row| row["v"].as_i64().expect("v"))
                .collect();
            assert_eq!(values, [0, 1, 2, 3], "{id}");
        }
    }
}
