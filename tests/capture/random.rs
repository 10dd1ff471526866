//! Random statements in random nests, against what logical decoding says of the same transactions: the order of WAL is
//! the order of the writes. random.sql makes the tables, the triggers and the statements; each seed makes others.

use postgres::Client;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use support::chaos::{Dice, seeds};
use support::{DB, Session, idle_cluster};

const TABLES: [&str; 3] = ["a", "b", "p"];

type Row = BTreeMap<String, Option<i64>>;

#[derive(Clone, Debug, PartialEq)]
enum Change {
    Insert(Row),
    Update { old: Row, new: Row },
    Delete(Row),
}

/// A change of a table, partitions counted as the table.
type Written = (String, Change);

/// A server whose WAL can be decoded.
fn server() -> support::Cluster {
    let cluster = idle_cluster(&["wal_level = logical"]);
    cluster.connect(DB).run(
        "select pg_create_logical_replication_slot('order', 'test_decoding'); create sequence k; create sequence budget",
    );
    cluster
}

/// Tables with triggers of all kinds, the rows that they begin with, and then transactions. `aggregate_id`: an argument
/// of outbox_capture.
fn write_at_random(client: &mut Client, seed: u64, aggregate_id: &str) {
    let mut dice = Dice::new(seed);
    let fraction = dice.below(1 << 20) as f64 / f64::from(1 << 20);
    client.run(&format!(
        "set statement_timeout = '10s'; set client_min_messages = error; select setseed({fraction})"
    ));
    client.run(include_str!("random.sql"));
    for table in TABLES {
        client.run(&format!(
            "select outbox_capture('{table}', operations => 'sql'{aggregate_id})"
        ));
    }
    client.run("delete from outbox; delete from outbox_events");
    decoded(client);
    for rows in [
        "a (id, v) select g, g from generate_series(1, 9) g",
        "b (id, p, v) select g, 1 + g % 4, g from generate_series(1, 9) g",
        "p (id, p, v) select g, g % 4, g from generate_series(1, 9) g",
    ] {
        try_run(client, &format!("insert into {rows} on conflict do nothing"));
    }
    for _ in 0..6 {
        try_run(
            client,
            "select set_config('test.depth', '0', false), setval('budget', 1)",
        );
        match dice.below(20) {
            0..3 => copy(client, &mut dice, "p (id, p, v)", 3),
            3..6 => copy(client, &mut dice, "a (id, v)", 2),
            6..12 => statement(client),
            12..14 => {
                for step in ["begin", "", "savepoint s", "", "rollback to s", "", "commit"] {
                    step_of_transaction(client, step);
                }
            }
            _ => {
                for step in ["begin", "", "", "savepoint s", "", "release s", "commit"] {
                    step_of_transaction(client, step);
                }
            }
        }
    }
    client.run("rollback; reset statement_timeout");
}

fn step_of_transaction(client: &mut Client, step: &str) {
    match step {
        "" => statement(client),
        step => try_run(client, step),
    }
}

fn statement(client: &mut Client) {
    if let Ok(row) = client.query_one("select random_statement()", &[]) {
        try_run(client, row.get(0));
    }
}

/// Statements may fail, but not because of the outbox.
fn try_run(client: &mut Client, sql: &str) {
    if let Err(error) = client.batch_execute(sql) {
        let error = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}"));
        let is_ours = error.code().code().starts_with("XX") || error.where_().is_some_and(|at| at.contains("outbox"));
        assert!(!is_ours && !error.message().contains("captured"), "{sql}: {error:?}");
    }
}

fn copy(client: &mut Client, dice: &mut Dice, columns: &str, count: usize) {
    let mut rows = String::new();
    for _ in 0..6 {
        let values = [40 + dice.below(50), dice.below(4), 1];
        let values = values.map(|value| value.to_string());
        rows += &format!("{}\n", values[..count].join("\t"));
    }
    if let Ok(mut copy) = client.copy_in(&format!("copy {columns} from stdin")) {
        let _ = copy.write_all(rows.as_bytes()).and_then(|()| copy.flush());
        let _ = copy.finish();
    }
}

/// What was written since the last call, in the order of WAL. A row that moves to another partition is updated, if
/// nothing was written in between.
fn decoded(client: &mut Client) -> Vec<Written> {
    let sql = "select data from pg_logical_slot_get_changes('order', null, null, 'include-xids', '0')";
    let mut changes: Vec<Written> = Vec::new();
    for line in client.query(sql, &[]).expect("decode") {
        let Some((table, change)) = of_line(line.get(0)) else {
            continue;
        };
        let is_move = match (changes.last(), &change) {
            (Some((of, Change::Delete(old))), Change::Insert(new)) => *of == table && old.get("k") == new.get("k"),
            _ => false,
        };
        match (change, is_move.then(|| changes.pop())) {
            (Change::Insert(new), Some(Some((table, Change::Delete(old))))) => {
                changes.push((table, Change::Update { old, new }));
            }
            (change, _) => changes.push((table, change)),
        }
    }
    changes.retain(|(_, change)| !matches!(change, Change::Update { old, new } if old == new));
    changes
}

/// `table public.a: UPDATE: old-key: id[integer]:1 v[integer]:2 new-tuple: id[integer]:1 v[integer]:3`
fn of_line(line: &str) -> Option<Written> {
    let (table, rest) = line.strip_prefix("table public.")?.split_once(": ")?;
    let table = &table[..1];
    if !TABLES.contains(&table) {
        return None;
    }
    let (operation, columns) = rest.split_once(": ")?;
    let row = |columns: &str| -> Row {
        let values = columns.split(' ').filter_map(|column| {
            let (name, value) = column.split_once(':')?;
            Some((name.split_once('[')?.0.to_owned(), value.parse().ok()))
        });
        // An old row leaves out what is NULL.
        let all = ["id", "v", "k"].iter().chain((table != "a").then_some(&"p"));
        all.map(|name| (String::from(*name), None)).chain(values).collect()
    };
    let change = match operation {
        "INSERT" => Change::Insert(row(columns)),
        "DELETE" => Change::Delete(row(columns)),
        _ => {
            let (old, new) = columns.strip_prefix("old-key: ")?.split_once(" new-tuple: ")?;
            Change::Update {
                old: row(old),
                new: row(new),
            }
        }
    };
    Some((table.to_owned(), change))
}

struct Told {
    table: String,
    operation: String,
    id: String,
    payload: Row,
    previous: Option<Row>,
}

/// The events, in order of seq.
fn told(client: &mut Client) -> Vec<Told> {
    let sql = "select aggregate_type, operation, aggregate_id, payload::text, previous_payload::text
               from outbox_events order by seq";
    let row = |json: String| -> Row {
        let json: BTreeMap<String, Value> = serde_json::from_str(&json).expect("an object");
        json.into_iter().map(|(name, value)| (name, value.as_i64())).collect()
    };
    let events = client.query(sql, &[]).expect("the events");
    let event = |event: &postgres::Row| Told {
        table: event.get(0),
        operation: event.get(1),
        id: event.get(2),
        payload: row(event.get(3)),
        previous: event.get::<_, Option<String>>(4).map(row),
    };
    events.iter().map(event).collect()
}

/// An event as text, without the columns that did not change.
fn text_of_event(event: &Told) -> String {
    let Told {
        table,
        operation,
        id,
        payload,
        previous,
    } = event;
    match (operation.as_str(), previous) {
        ("UPDATE", Some(previous)) => {
            let changed = previous.keys().map(|name| (name, previous[name], payload[name]));
            format!("{table} {id} {:?}", changed.collect::<Vec<_>>())
        }
        ("DELETE", Some(previous)) => format!("{table} {id} deleted {previous:?}"),
        _ => format!("{table} {id} created {payload:?}"),
    }
}

fn text_of_change((table, change): &Written) -> String {
    let id = |row: &Row| row["k"].unwrap_or_default();
    match change {
        Change::Insert(row) => format!("{table} {} created {row:?}", id(row)),
        Change::Delete(row) => format!("{table} {} deleted {row:?}", id(row)),
        Change::Update { old, new } => {
            let changed = old.keys().filter(|name| old[*name] != new[*name]);
            let changed = changed.map(|name| (name, old[name], new[name]));
            format!("{table} {} {:?}", id(new), changed.collect::<Vec<_>>())
        }
    }
}

/// The aggregate is a column that no statement changes, so each change of a row has its event at its place.
#[test]
fn events_of_random_nests_have_the_order_of_the_writes() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let mut written = 0;
    for seed in seeds(25) {
        write_at_random(&mut client, seed, ", aggregate_id => 'k'");
        let told: Vec<String> = told(&mut client).iter().map(text_of_event).collect();
        let changes: Vec<String> = decoded(&mut client).iter().map(text_of_change).collect();
        let place = told
            .iter()
            .zip(&changes)
            .take_while(|(told, change)| told == change)
            .count();
        assert!(
            told == changes,
            "seed {seed}, change {place}: told {:?}, written {:?}",
            told.get(place..(place + 4).min(told.len())),
            changes.get(place..(place + 4).min(changes.len())),
        );
        written += changes.len();
    }
    assert!(written > 0, "the statements wrote nothing");
}

/// The aggregate is the primary key, which statements change. A consumer that applies the events in order creates no
/// row that it has, changes and deletes none that it has not, and has the rows of the tables at the end.
#[test]
fn a_consumer_that_applies_the_events_of_random_nests_has_the_rows_of_the_tables() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    for seed in seeds(25) {
        write_at_random(&mut client, seed, "");
        let mut rows: BTreeMap<(String, String), Row> = BTreeMap::new();
        for event in told(&mut client) {
            let text = text_of_event(&event);
            let key = (event.table, event.id);
            match event.operation.as_str() {
                "INSERT" => assert_eq!(rows.insert(key, event.payload), None, "seed {seed}: {text}"),
                "DELETE" => assert_eq!(rows.remove(&key), event.previous, "seed {seed}: {text}"),
                _ => {
                    let row = rows
                        .get_mut(&key)
                        .unwrap_or_else(|| panic!("seed {seed}: {text}: no such row"));
                    for (name, value) in event.previous.unwrap_or_default() {
                        assert_eq!(row.insert(name, None), Some(value), "seed {seed}: {text}");
                    }
                    row.extend(event.payload);
                }
            }
        }
        let mut applied: Vec<(String, Row)> = rows.into_iter().map(|((table, _), row)| (table, row)).collect();
        let mut stored = Vec::new();
        for table in TABLES {
            for row in client
                .query(&format!("select to_jsonb(x)::text from {table} x"), &[])
                .expect("the rows")
            {
                let json: BTreeMap<String, Value> = serde_json::from_str(row.get(0)).expect("an object");
                let row = json.into_iter().map(|(name, value)| (name, value.as_i64())).collect();
                stored.push((table.to_owned(), row));
            }
        }
        applied.sort();
        stored.sort();
        assert!(applied == stored, "seed {seed}: applied {applied:?}, stored {stored:?}");
    }
}
