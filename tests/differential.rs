//! Compares the direct write paths with SQL statements. The usual publish and the usual enqueue must write the row that
//! the statements write, or fail with the same error: random changes of the two tables × random events. A claim must
//! bring the same messages. The settle of published messages must write the same history, whatever a user has added to
//! its tables. The JSON that a worker reads must equal the result of the cast. On a real Postgres.

use postgres::{Client, NoTls, Transaction};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::mpsc;
use support::chaos::{Dice, seeds};
use support::decoding;
use support::decoding::Insert;
use support::{DB, Session, Stage, pause, unconnected_cluster, wait_drained, wait_true};

/// Changes that a transaction makes and rolls back. Some of them refuse some events, or fail after other changes.
const CHANGES: &[&str] = &[
    "alter table {t} add column extra text default 'x'",
    "alter table {t} add column extra float8 default random(); update {t} set extra = 1; alter table {t} drop column extra",
    "alter table {t} add column extra int not null default 7",
    "alter table {t} add column extra text; alter table {t} drop column extra",
    "alter table {t} add column extra text not null",
    "alter table outbox_events alter aggregate_id set not null",
    "alter table outbox_events alter actor set not null",
    "alter table outbox_events alter metadata set not null",
    "alter table outbox_events alter id drop not null",
    "alter table outbox alter key set not null",
    "alter table outbox alter expires_at set not null",
    "alter table outbox_events alter actor set default 'clerk'",
    "alter table outbox_events alter created_at set default '2001-01-01Z'",
    "alter table outbox_events alter created_at drop default",
    "alter table outbox alter attempts set default 3",
    "alter table outbox alter last_error set default 'none yet'",
    "alter table outbox alter destination set default 'elsewhere'",
    "alter table outbox_events add constraint c check (aggregate_id <> 'b') not valid",
    "alter table outbox_events add constraint c check (body_bytes < 100) not valid",
    "alter table outbox add constraint c check (key is not null) not valid",
    "alter table outbox add constraint c check (partition < 8) not valid",
    "alter table outbox_events drop constraint outbox_events_type_check",
    "alter table outbox_events alter body_bytes drop expression; alter table outbox_events alter body_bytes set default 5",
    "alter table outbox_events enable row level security",
    "alter table outbox_events enable row level security; alter table outbox_events force row level security",
    "alter table outbox enable row level security; alter table outbox force row level security;
     create policy p on outbox using (true) with check (key is null)",
    "alter table outbox_settings enable row level security; alter table outbox_settings force row level security",
    "create rule r as on insert to outbox do also notify n",
    "create rule r as on insert to outbox_events do instead nothing",
    "create trigger g before insert on {t} for each row execute function stamp()",
    "create trigger g before insert on {t} for each row execute function nothing()",
    "create trigger g after insert on {t} for each row execute function nothing()",
    "create trigger g after insert on {t} for each statement execute function nothing()",
    "create trigger g before insert on {t} for each row execute function stamp(); alter table {t} disable trigger g",
    "create unique index u on outbox_events (aggregate_id)",
    "create unique index u on outbox (key)",
    "create unique index u on outbox (key) where attempts = 0",
    "create index u on outbox_events ((payload ->> 'a'))",
    "create index u on outbox_events (octet_length(actor)) where type = 'T'",
    "alter table outbox_events add constraint u exclude using btree (type with =)",
    "alter table outbox_events add constraint u unique (type) deferrable initially immediate",
    "revoke insert on {t} from outbox_worker",
    "revoke select on {t} from outbox_worker",
    "revoke insert (type) on outbox_events from outbox_worker",
    "revoke insert on outbox_events from outbox_worker; grant insert (id, type, aggregate_type, aggregate_id, operation,
     payload, previous_payload, metadata, headers, actor, correlation_id) on outbox_events to outbox_worker",
    "revoke select on outbox_settings from outbox_worker",
    "revoke all on sequence outbox_events_seq_seq from outbox_worker",
    "revoke all on schema public from public",
    "create table child () inherits (outbox_events)",
    "alter table {t} set unlogged",
    "alter table {t} replica identity nothing",
    "alter table {t} replica identity full",
    "create publication p for table outbox_events, outbox",
    "alter table outbox_events rename actor to a; alter table outbox_events rename correlation_id to actor;
     alter table outbox_events rename a to correlation_id",
    "alter table outbox_events alter seq drop identity",
    "alter table outbox_events alter seq set generated always",
    "alter table outbox_events alter payload set compression pglz; alter table outbox_events alter payload set storage external",
    "alter table {t} set (fillfactor = 20)",
    "cluster outbox_events using outbox_events_pkey",
    "insert into outbox_settings (partition_count, leasing) values (5, true)",
    "set session_replication_role = replica; delete from outbox_settings; reset session_replication_role",
    "select outbox_subscribe('audit')",
    "select outbox_subscribe('audit', types => '{T}', headers => '{\"h\": 1}')",
    "select outbox_subscribe('audit', aggregate_types => '{a,b}', when_sql => $$payload ? 'a'$$)",
    "select outbox_subscribe('audit', when_sql => '1 / length(operation) = 1')",
    "select outbox_subscribe('default', types => '{T}')",
];

/// Triggers that do nothing but force the next publish to use statements.
const BY_STATEMENT: &str =
    "create trigger z_by_statement before insert on outbox_events for each statement execute function nothing();
     create trigger z_by_statement before insert on outbox for each statement execute function nothing()";

const SETUP: &str = "
    create function nothing() returns trigger language plpgsql as $$ begin return new; end $$;
    create function stamp() returns trigger language plpgsql as $$ begin
      return jsonb_populate_record(new, case tg_table_name when 'outbox' then '{\"last_error\": \"stamped\"}'
                                        else '{\"operation\": \"stamped\"}' end::jsonb); end $$;
    create server audit foreign data wrapper outbox_amqp options (url 'amqp://localhost');
    create extension amcheck";

/// The seq of an event that is stored and not yet enqueued.
const STORED: i64 = 1_000_000;

struct Random(Dice);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0.below(n)
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }

    /// An element of `good`, or rarely one of `bad`: a value that is refused.
    fn mostly<'a>(&mut self, good: &[&'a str], bad: &[&'a str]) -> &'a str {
        match self.below(30) {
            0 => self.one(bad),
            _ => self.one(good),
        }
    }

    /// JSON with strings of all lengths, each with characters that must be escaped, at any position.
    fn json(&mut self, depth: usize) -> Value {
        let many = if depth == 0 { 0 } else { self.below(5) };
        match self.below(if depth == 0 { 5 } else { 8 }) {
            0 => Value::Null,
            1 => Value::Bool(self.below(2) == 0),
            2 => self
                .one(&["0", "-7", "99.90", "1e-7", "12345678901234567890.123"])
                .parse()
                .expect("a number"),
            3 | 4 => Value::String(self.string()),
            5 | 6 => (0..many).map(|_| self.json(depth - 1)).collect(),
            _ => (0..many).map(|_| (self.string(), self.json(depth - 1))).collect(),
        }
    }

    fn string(&mut self) -> String {
        const PLAIN: [char; 8] = ['a', 'Z', ' ', '/', '\u{7f}', 'ä', '€', '😀'];
        let longest = [3, 40, 300][self.below(3)];
        let length = self.below(longest);
        let escaped_in = 1 + self.below(100);
        let mut character = || match self.below(escaped_in) {
            0 => [b'"', b'\\', self.below(31) as u8 + 1][self.below(3)].into(),
            _ => PLAIN[self.below(PLAIN.len())],
        };
        (0..length).map(|_| character()).collect()
    }

    fn publish(&mut self) -> String {
        let kind = self.mostly(
            &["'T'", "'Other'", "repeat('t', 255)"],
            &["''", "null", "repeat('t', 256)"],
        );
        let json = [
            "'null'",
            "'{}'",
            "'{\"a\": 1, \"b\": [1.50, null, \"ä\"]}'",
            "'[]'",
            "to_jsonb(repeat('xy', 3000))",
            "to_jsonb(repeat(md5('a'), 400))",
        ];
        let mut text = || {
            let good = ["null", "'a'", "'b'", "'ä b'", "repeat('k', 100)"];
            self.mostly(&good, &["repeat('k', 256)", "repeat('ä', 128)"]).to_owned()
        };
        let (aggregate_type, aggregate_id, operation) = (text(), text(), text());
        let (actor, correlation_id) = (text(), text());
        let payload = self.mostly(&json, &["null"]);
        let (previous_payload, metadata) = (
            self.mostly(&json, &["null"]),
            self.mostly(&["null", json[2]], &["'[]'"]),
        );
        let headers = self.mostly(&["null", "'{\"h\": 1}'"], &["'[]'", "'null'"]);
        let expires_at = self.one(&["null", "null", "'2999-01-01Z'"]);
        format!(
            "select outbox_publish({kind}, {payload}, {aggregate_type}, {aggregate_id}, {operation}, {previous_payload},
               {metadata}, {headers}, {actor}, {correlation_id}, expires_at => {expires_at})"
        )
    }

    /// Of an event that is stored.
    fn enqueue(&mut self) -> String {
        let key = self.mostly(&["null", "'a'", "'ä b'", "repeat('k', 255)"], &["repeat('k', 256)"]);
        let destination = self.mostly(&["null", "'default'", "'audit'"], &["'nowhere'"]);
        let expires_at = self.one(&["null", "null", "'2999-01-01Z'"]);
        format!("select outbox_enqueue({STORED}, {key}, {destination}, expires_at => {expires_at})")
    }
}

/// The error in all fields that a program can act on, or the rows without their id.
type Outcome = Result<Vec<Value>, [String; 5]>;

const ROWS: &str = "select to_jsonb(e) - 'id' from outbox_events e where e.seq > $1
                    union all select to_jsonb(o) from outbox o where o.seq > $1 order by 1";

/// Of a publish with the seq behind `last`.
fn outcome(round: &mut Transaction, publish: &str, last: i64) -> Outcome {
    let set = "select setval(s, $1) from to_regclass('outbox_events_seq_seq') s where s is not null";
    round.query(set, &[&last]).expect("set the sequence");
    let mut one = round.savepoint("one").expect("savepoint");
    let outcome = match one.query_one(publish, &[]) {
        Ok(_) => {
            let rows = one.query(ROWS, &[&last]).expect("rows");
            Ok(rows.iter().map(|row| row.get(0)).collect())
        }
        Err(error) => {
            let error = error.as_db_error().unwrap_or_else(|| panic!("{publish}: {error}"));
            let or_none = |name: Option<&str>| name.unwrap_or_default().to_owned();
            Err([
                format!("{} {}", error.code().code(), error.message()),
                or_none(error.schema()),
                or_none(error.table()),
                or_none(error.column()),
                or_none(error.constraint()),
            ])
        }
    };
    one.rollback().expect("rollback");
    outcome
}

/// The number of rounds of a seed.
const ROUNDS: usize = 150;

fn session(conn: &str, notices: mpsc::Sender<String>) -> Client {
    let mut config: postgres::Config = conn.parse().expect("a connection string");
    config.notice_callback(move |notice| {
        let _ = notices.send(notice.message().to_owned());
    });
    let mut client = config.connect(NoTls).expect("connect");
    let listen =
        "load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on";
    client.run(listen);
    client
}

#[test]
fn after_any_change_both_paths_write_the_same_row_or_fail_with_the_same_error() {
    seeds(1).for_each(|seed| compare_both_paths(Random(Dice::new(seed))));
}

fn compare_both_paths(mut random: Random) {
    let conf = ["outbox.enabled = off", "wal_level = logical", "autovacuum = off"];
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "nowhere", &conf);
    cluster.exec(DB, SETUP);
    cluster.exec(DB, "create publication inserts for all tables");
    let store = "insert into outbox_events (seq, id, type, payload, aggregate_type, aggregate_id)
                 values ($1, gen_random_uuid(), 'T', '{\"a\": 1}', 'a', 'b')";
    cluster.connect(DB).execute(store, &[&STORED]).expect("store an event");
    decoding::make_slot(&mut cluster.connect(DB), "s");
    let (notice_sender, notices) = mpsc::channel();
    let mut client = session(&cluster.conn_string(DB), notice_sender);
    let (mut direct, mut refused) = (0, 0);
    for number in 0..ROUNDS {
        let mut round = client.transaction().expect("begin");
        let mut changes = Vec::new();
        for _ in 0..random.below(3) {
            let table = random.one(&["outbox", "outbox_events"]);
            let change = random.one(CHANGES).replace("{t}", table);
            let mut one = round.savepoint("change").expect("savepoint");
            if one.batch_execute(&change).is_ok() {
                one.commit().expect("release");
                changes.push(change);
            }
        }
        let publish = match random.below(3) {
            0 => random.enqueue(),
            _ => random.publish(),
        };
        notices.try_iter().for_each(drop);
        round.run("set local client_min_messages = log");
        let first = outcome(&mut round, &publish, 1_000 * (number as i64 + 1));
        round.run("set local client_min_messages = warning");
        let inserts = notices
            .try_iter()
            .filter(|notice| notice.to_lowercase().contains("insert into"));
        direct += usize::from(inserts.count() == 0 && first.is_ok());
        refused += usize::from(first.is_err());
        round.run(BY_STATEMENT);
        let second = outcome(&mut round, &publish, 1_000 * (number as i64 + 1));
        assert_eq!(first, second, "round {number}: {changes:?}, then {publish}");
        round.rollback().expect("rollback");
    }
    println!("{ROUNDS} rounds: {direct} without a statement, {refused} refused");
    assert!(
        direct > ROUNDS / 10 && refused > ROUNDS / 20,
        "{direct} without a statement, {refused} refused"
    );
    assert_committed_rows_are_sound(&mut client, &mut random, ROUNDS / 6);
}

/// Checks tables, indexes and the stream of logical decoding, with rows written by both paths alternately.
fn assert_committed_rows_are_sound(client: &mut Client, random: &mut Random, count: usize) {
    let drop = BY_STATEMENT
        .replace("create", "drop")
        .replace("before insert", "")
        .replace("for each statement execute function nothing()", "");
    client.run("create index on outbox_events (type); select outbox_subscribe('audit', types => '{T}')");
    decoding::inserts(client, "s", "inserts"); // the earlier ones
    let mut compared = 0;
    for _ in 0..count {
        let publish = random.publish();
        let mut streams = Vec::new();
        for by_statement in [false, true] {
            if by_statement {
                client.run(BY_STATEMENT);
            }
            let done = client.batch_execute(&format!("begin; set local timezone = 'UTC'; {publish}; commit"));
            if done.is_err() {
                client.run("rollback");
            }
            if by_statement {
                client.run(&drop);
            }
            let stream = decoding::inserts(client, "s", "inserts");
            streams.push(stream.into_iter().map(without_own).collect::<Vec<_>>());
        }
        assert_eq!(streams[0], streams[1], "{publish}");
        compared += streams[0].len();
    }
    assert!(compared > count, "{compared} rows of {count} events");
    assert_sound(client, &["outbox_events", "outbox"]);
}

/// A row of the stream without its unique values: seq, id, times, and the partition of a message without a key.
fn without_own(mut insert: Insert) -> Insert {
    let own = ["seq", "id", "created_at", "enqueued_at", "partition"];
    insert.columns.retain(|name, _| !own.contains(&name.as_str()));
    insert
}

/// A destination whose delivery is paused.
fn paused() -> (Stage, Client) {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    client.run(SETUP);
    pause(&stage);
    (stage, client)
}

#[test]
fn a_claim_brings_the_same_messages_with_and_without_a_statement() {
    let (stage, mut client) = paused();
    for seed in seeds(3) {
        let mut random = Random(Dice::new(seed));
        for _ in 0..100 {
            let _ = client.query(&random.publish(), &[]); // some are refused
        }
        for _ in 0..20 {
            let publish = "select outbox_publish('T', $1::jsonb, metadata => jsonb_build_object('m', $1::jsonb),
                             headers => jsonb_build_object('h', $1::jsonb), actor => repeat('x', 70000))";
            client.query(publish, &[&random.json(4)]).expect("publish");
        }
    }
    // Two were claimed before, and one has lost its event.
    client.run(
        "update outbox set claim_token = -7, claim_until = now() - interval '1 s' where seq % 50 = 0;
         delete from outbox_events where seq = (select max(seq) from outbox)",
    );
    let mut deliver = |change: &str, undo: &str| {
        client.run(change);
        stage.set_conf("outbox.enabled", "on");
        wait_drained(&stage);
        pause(&stage);
        client.run(undo);
        let messages = stage.all().into_iter().map(|mut message| {
            let own = ["attempt", "replayed", "lease_epoch"];
            message.headers.retain(|name, _| !own.contains(&name.as_str()));
            let texts = (
                message.routing_key,
                message.kind,
                message.content_type,
                message.correlation_id,
            );
            let rest = (message.app_id, message.timestamp, message.headers);
            (message.message_id, (message.body, texts, rest))
        });
        let messages: BTreeMap<_, _> = messages.collect();
        let dead = "select reason from outbox_dead where seq = (select max(seq) from outbox_dead)";
        let reason: String = client.query_one(dead, &[]).expect("a dead letter").get(0);
        (messages, reason)
    };
    // The view is read by statements only.
    let hidden = "alter view outbox_internal.event_text rename to hidden";
    let directly = deliver(hidden, "alter view outbox_internal.hidden rename to event_text");
    assert!(
        directly.0.len() > 100 && directly.1.contains("has no event"),
        "{}",
        directly.1
    );
    let again = "alter table outbox add column other int;
                 create trigger t before update on outbox for each row execute function stamp();
                 select outbox_replay(1, dry_run => false); select outbox_retry(seq) from outbox_dead";
    let by_statement = deliver(again, "drop trigger t on outbox; alter table outbox drop column other");
    assert_eq!(directly, by_statement);
    let stamped = "select count(*) from outbox_history where last_error = 'stamped'";
    let stamped: i64 = client.query_one(stamped, &[]).expect("count").get(0);
    assert_eq!(
        stamped as usize,
        by_statement.0.len(),
        "a claim runs the triggers of an UPDATE"
    );
}

#[test]
fn claimed_rows_that_do_not_fit_in_their_page_are_found_by_all_indexes() {
    let (stage, mut client) = paused();
    client.run(
        "alter table outbox set (fillfactor = 100); create index on outbox (claim_token, seq) include (key);
         create index on outbox using brin (claim_token);
         do $$ begin for n in 1..500 loop perform outbox_publish('T', '{}', 'item', n::text); end loop; end $$",
    );
    client.run("vacuum full outbox");
    // A settle waits for the history, a claim does not.
    let mut holder = stage.connect(DB);
    holder.run("begin; lock table outbox_history in share mode");
    stage.set_conf("outbox.enabled", "on");
    let claimed = "select count(*) = 500 and bool_and(claim_token is not null) from outbox";
    wait_true(&stage, "the messages to be claimed", claimed);
    assert_sound(&mut client, &["outbox"]);
    let by_index = "set enable_seqscan = off; set enable_bitmapscan = off";
    client.run(by_index);
    let found = "select count(*) from outbox where claim_token > 0";
    assert_eq!(client.query_one(found, &[]).expect("count").get::<_, i64>(0), 500);
    client.run("set enable_bitmapscan = on; set enable_indexscan = off; set enable_indexonlyscan = off");
    assert_eq!(client.query_one(found, &[]).expect("count").get::<_, i64>(0), 500);
    holder.run("rollback");
    wait_drained(&stage);
}

/// Changes of the tables that a settle writes, how each is undone, and whether published messages are then settled by a
/// statement.
const SETTLE_CHANGES: &[(&str, &str, bool)] = &[
    ("", "", false),
    (
        "create trigger g before insert on outbox_history for each row execute function nothing()",
        "drop trigger g on outbox_history",
        true,
    ),
    (
        "create trigger g after insert on outbox_history for each statement execute function nothing()",
        "drop trigger g on outbox_history",
        true,
    ),
    (
        "create trigger g before insert on outbox_history_default for each row execute function nothing()",
        "drop trigger g on outbox_history_default",
        true,
    ),
    (
        "create trigger g after delete on outbox for each row execute function nothing()",
        "drop trigger g on outbox",
        true,
    ),
    (
        "alter table outbox_history add column extra text default 'x'",
        "alter table outbox_history drop column extra",
        true,
    ),
    ("vacuum full outbox", "vacuum full outbox", false),
    (
        "alter table outbox_history add constraint c check (attempts < 100) not valid",
        "alter table outbox_history drop constraint c",
        true,
    ),
    (
        "alter table outbox enable row level security",
        "alter table outbox disable row level security",
        true,
    ),
    (
        "alter table outbox_history enable row level security",
        "alter table outbox_history disable row level security",
        true,
    ),
    (
        "create index i on outbox_history_default (key, seq)",
        "drop index i",
        false,
    ),
    (
        "create index i on outbox_history_default (seq) where key is null",
        "drop index i",
        true,
    ),
    (
        "create publication p for table outbox, outbox_history",
        "drop publication p",
        false,
    ),
    (
        "alter table outbox replica identity full",
        "alter table outbox replica identity default",
        false,
    ),
    (
        "delete from outbox_history_default; create table now (like outbox_history_default including all);
         alter table outbox_history attach partition now for values from ('2020-01-01') to ('2100-01-01')",
        "alter table outbox_history detach partition now; drop table now",
        false,
    ),
    (
        "delete from outbox_history_default; create table now (like outbox_history_default including all);
         alter table outbox_history attach partition now for values from ('2020-01-01') to (maxvalue)",
        "alter table outbox_history detach partition now; drop table now",
        true,
    ),
    ("", "", false),
];

#[test]
fn after_any_change_published_messages_have_the_history_that_the_statement_writes() {
    let stage = Stage::new(&["wal_level = logical"]);
    let mut client = stage.connect(DB);
    client.run(SETUP);
    for (change, undo, by_statement) in SETTLE_CHANGES {
        pause(&stage);
        client.run(
            "do $$ begin for n in 1..300 loop
               perform outbox_publish('T', '{}', 'item', nullif(n % 20, 0)::text, 'x');
             end loop; end $$;
             update outbox set attempts = 2, last_error = 'earlier', error_code = 'failed', replayed = true where seq % 7 = 0;
             update outbox set attempts = 1, last_error = (select string_agg(md5(n::text), '') from generate_series(1, 300) n)
               where seq % 11 = 0;
             drop table if exists expected;
             create temp table expected as
               select seq, enqueued_at, attempts + 1 as attempts, partition, false as discarded, replayed, destination, key, last_error,
                      error_code
               from outbox",
        );
        client.run(change);
        stage.set_conf("outbox.enabled", "on");
        wait_drained(&stage);
        let rows = "select seq, enqueued_at, attempts, partition, discarded, replayed, destination, key, last_error, error_code
                    from outbox_history where seq >= (select min(seq) from expected)";
        let wrong = format!("(table expected except all {rows}) union all ({rows} except all table expected)");
        let wrong = client.query(&wrong, &[]).expect("compare");
        assert_eq!(wrong.len(), 0, "{change}");
        // A direct settle has one time for all rows of its transaction, a statement one for each row.
        let times = "select bool_or(times > 1), sum(rows), count(*), bool_and(began_before) from (
                       select count(distinct published_at) as times, count(*) as rows,
                              bool_and(published_at > enqueued_at) as began_before
                       from outbox_history where seq >= (select min(seq) from expected) group by xmin::text) x";
        let times = client.query_one(times, &[]).expect("times");
        let (separate, is_later): (bool, bool) = (times.get(0), times.get(3));
        assert_eq!((separate, is_later), (*by_statement, true), "{change}: {times:?}");
        let found = "set enable_seqscan = off;
                     create temp view by_index as select count(*) from outbox_history h
                       where (seq, published_at) in (select seq, published_at from outbox_history)
                         and seq between (select min(seq) from expected) and (select max(seq) from expected);";
        client.run(found);
        let found = client.query_one("select count from by_index", &[]).expect("by index");
        assert_eq!(found.get::<_, i64>(0), 300, "{change}");
        client.run("drop view by_index; reset enable_seqscan");
        assert_sound(&mut client, &["outbox", "outbox_history_default"]);
        client.run(undo);
    }
}

/// Checks tables and their B-trees.
fn assert_sound(client: &mut Client, tables: &[&str]) {
    let indexes = "select bt_index_check(i.indexrelid, heapallindexed => true) from pg_index i
                   join pg_class c on c.oid = i.indexrelid join pg_am a on a.oid = c.relam and a.amname = 'btree'
                   where i.indrelid = any ($1::text[]::regclass[])";
    client.query(indexes, &[&tables]).expect("indexes are sound");
    let heaps = "select h.msg from unnest($1::text[]) t, verify_heapam(t, check_toast => true) h";
    assert_eq!(
        client.query(heaps, &[&tables]).expect("heaps").len(),
        0,
        "tables are sound"
    );
}

#[test]
fn json_is_read_as_the_cast_returns_it() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "nowhere", &["outbox.enabled = off"]);
    let mut client = cluster.connect(DB);
    // Values that are compressed, stored out of line, and stored in place.
    client.run("create temp table t (j jsonb)");
    for seed in seeds(25) {
        let mut random = Random(Dice::new(seed));
        let some: Vec<Value> = (0..50).map(|_| random.json(4)).collect();
        client
            .execute("insert into t select unnest($1::jsonb[])", &[&some])
            .expect("insert");
    }
    let more = "insert into t select to_jsonb(repeat(chr(n), 40)) from generate_series(1, 300) n;
                insert into t select to_jsonb(repeat(md5(n::text), 40)) from generate_series(1, 30) n;
                insert into t select to_jsonb(repeat('plain text', 20000)) union all select '1e400' union all select '[[], {}, [[1]]]'
                union all select (select jsonb_object_agg(n, md5(n::text)) from generate_series(1, 5000) n)";
    client.run(more);
    let wrong = "select j::text, outbox_internal.json_text(j) from t where outbox_internal.json_text(j) is distinct from j::text limit 1";
    let wrong: Vec<(String, String)> = (client.query(wrong, &[]).expect("compare").iter())
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    assert_eq!(wrong, [], "the result of the cast, and the text that was read");
    // The same for times, with those before our era and the ends of the range.
    let times = "select t from unnest(array['4713-01-01 BC', '0044-03-15 12:00:00.5 BC', '0001-01-01', '1969-12-31 23:59:59.999999',
                   '2000-01-01', '9999-12-31', '294276-12-31 23:59:59.999999', 'infinity', '-infinity']::timestamptz[]) t
                 union all select '2026-01-01Z'::timestamptz + random() * interval '400 days' from generate_series(1, 1000)";
    let wrong = format!(
        "select t::text from ({times}) x (t)
         where outbox_internal.utc_text(t) is distinct from to_char(t at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')
            or abs(extract(year from t)) < 200000 and outbox_internal.unix_seconds(t) is distinct from floor(extract(epoch from t))::bigint"
    );
    let wrong: Vec<String> = (client.query(wrong.as_str(), &[]).expect("compare").iter())
        .map(|row| row.get(0))
        .collect();
    assert_eq!(wrong, [""; 0], "times");
    let counts =
        "select count(*) filter (where j::text like '%\\u00%'), count(*) filter (where length(j::text) > 1000) from t";
    let counts = client.query_one(counts, &[]).expect("count");
    assert!(
        counts.get::<_, i64>(0) > 20 && counts.get::<_, i64>(1) > 20,
        "{counts:?}"
    );
}
