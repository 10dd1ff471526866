//! Databases in encodings other than UTF-8: messages are delivered in UTF-8. A call refuses text that cannot be
//! converted. If such text is in the tables already, its message becomes a dead letter and blocks no other message.

use postgres::Client;
use postgres::error::{DbError, SqlState};
use serde_json::{Value, json};
use std::process::Command;
use support::program::outboxctl;
use support::{Broker, Cluster, wait_until};
use support::{DB, LONG, Session, all_of, exchange_and_queue};

/// An encoding, and a word whose bytes differ from those in UTF-8.
const LATIN1: (&str, &str) = ("LATIN1", "José ½");
const WIN1251: (&str, &str) = ("WIN1251", "Жук №5");
const EUC_JP: (&str, &str) = ("EUC_JP", "日本語");
/// An SQL_ASCII database stores the bytes that the client sent: here UTF-8.
const SQL_ASCII: (&str, &str) = ("SQL_ASCII", "José ½");

struct Served {
    broker: &'static Broker,
    cluster: Cluster,
    exchange: String,
    queue: String,
    db: &'static str,
}

/// A database with the encoding, and a worker that delivers to a queue.
fn served(encoding: &'static str) -> Served {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = Cluster::builder()
        .conf(&format!("outbox.url = '{}'", broker.url()))
        .conf(&format!("outbox.exchange = '{exchange}'"))
        .conf("outbox.databases = 'other'")
        .start();
    cluster.exec(
        DB,
        &format!("create database other encoding '{encoding}' locale 'C' template template0"),
    );
    cluster.exec("other", "create extension outbox");
    let served = Served {
        broker,
        cluster,
        exchange,
        queue,
        db: "other",
    };
    served.wait(
        "a worker",
        "select count(*) = 1 from outbox_worker_status where state = 'connected'",
    );
    served
}

impl Served {
    fn session(&self) -> Client {
        self.cluster.connect(self.db)
    }

    fn wait(&self, what: &str, sql: &str) {
        wait_until(what, LONG, || self.cluster.query_one(self.db, sql));
    }

    fn wait_drained(&self) {
        self.wait(
            "the outbox to be empty",
            "select not exists (select from outbox) and not exists (select from outbox_waiting)",
        );
    }

    fn text(&self, sql: &str) -> String {
        self.cluster.query_one(self.db, sql)
    }

    fn refused(&self, sql: &str) -> DbError {
        let refused = self.session().batch_execute(sql).expect_err("it is refused");
        refused
            .as_db_error()
            .unwrap_or_else(|| panic!("{sql}: {refused:?}"))
            .clone()
    }

    /// The bodies that arrived, once the outbox is empty.
    fn bodies(&self) -> Vec<Value> {
        self.wait_drained();
        all_of(self.broker, &self.queue)
            .iter()
            .map(|message| message.json())
            .collect()
    }

    fn ctl(&self, args: &[&str]) -> String {
        let output = Command::new(outboxctl())
            .arg("-d")
            .arg(self.cluster.conn_string(self.db))
            .args(args)
            .output()
            .expect("run outboxctl");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(
            output.status.success(),
            "outboxctl {args:?}: {text} {}",
            String::from_utf8_lossy(&output.stderr)
        );
        text
    }
}

/// The values of `name` in the payloads, sorted.
fn names(bodies: &[Value]) -> Vec<&str> {
    let name = |body: &'_ Value| body["payload"]["name"].as_str().map(str::len);
    assert!(bodies.iter().all(|body| name(body).is_some()), "{bodies:?}");
    let mut names: Vec<&str> = bodies
        .iter()
        .filter_map(|body| body["payload"]["name"].as_str())
        .collect();
    names.sort_unstable();
    names
}

fn everything_is_delivered_in_utf8((encoding, word): (&'static str, &'static str)) {
    let served = served(encoding);
    let mut session = served.session();
    session.run(&format!(
        "create table people (id int primary key, name text);
             select outbox_capture('people');
             insert into people values (1, '{word}');
             update people set name = '{word}!';
             delete from people;"
    ));
    let payload = json!({ "name": word }).to_string();
    session.run(&format!(
            r#"select outbox_publish('{word}', '{payload}', '{word}', '1', operation => '{word}', previous_payload => '{payload}',
                 metadata => '{payload}', headers => '{{"x-name": "{word}"}}', actor => '{word}', correlation_id => '{word}');
               select outbox_publish('Due', '{payload}', 'order', '{word}', available_at => now() + '100 ms');
               select outbox_publish('Expiring', '{payload}', 'order', '{word}', expires_at => now() + '1 h');
               set outbox.actor = '{word}'; set outbox.metadata = '{payload}'; set outbox.headers = '{{"x-name": "{word}"}}';
               select count(outbox_publish('Many', '{payload}', 'order', '{word}')) from generate_series(1, 20);
               reset outbox.actor; reset outbox.metadata; reset outbox.headers;
               with event as (insert into outbox_events (id, type, aggregate_type, aggregate_id, payload)
                              values (gen_random_uuid(), 'Own', '{word}', '{word}', '{payload}') returning seq)
               select outbox_enqueue(seq) from event"#
        ));
    let bodies = served.bodies();
    let captured = bodies.iter().filter(|body| body["aggregate_type"] == "people");
    assert_eq!(captured.count(), 3);
    let of = |kind: &str| bodies.iter().filter(|body| body["type"] == kind).collect::<Vec<_>>();
    let [whole] = of(word)[..] else { panic!("{bodies:?}") };
    for part in ["aggregate_type", "operation", "actor", "correlation_id"] {
        assert_eq!(whole[part], word, "{part}");
    }
    for part in ["payload", "previous_payload", "metadata"] {
        assert_eq!(whole[part]["name"], word, "{part}");
    }
    let many = of("Many");
    assert_eq!(many.len(), 20);
    assert!(
        many.iter()
            .all(|body| body["actor"] == word && body["metadata"]["name"] == word)
    );
    for kind in ["Due", "Expiring", "Own"] {
        let [one] = of(kind)[..] else {
            panic!("{kind}: {bodies:?}")
        };
        assert_eq!(one["payload"]["name"], word);
    }
    assert_eq!(served.text("select coalesce(min(problem), '') from outbox_health"), "");
    assert_eq!(
        served.text(&format!(
            "select key from outbox_messages where key = '{word}:{word}' limit 1"
        )),
        format!("{word}:{word}")
    );
    for args in [
        &["list"][..],
        &["list", "--status", "published"],
        &["--json", "show", "1"],
    ] {
        served.ctl(args);
    }
    assert!(
        served
            .ctl(&["list", "--status", "published", "--key", &format!("{word}:{word}")])
            .contains(word)
    );
    // The partition is the same in every database, computed from the UTF-8 bytes: other programs compute it too.
    let expected = served
        .cluster
        .query_one::<i64>(DB, &format!("select {}::bigint", crc32fast(word)));
    assert_eq!(
        served
            .cluster
            .query_one::<i64>(served.db, &format!("select outbox_crc32('{word}')")),
        expected
    );
}

/// CRC-32 as in zlib: a second implementation, independent of the product's.
fn crc32fast(text: &str) -> u32 {
    !text.bytes().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xEDB8_8320 * (crc & 1)))
    })
}

#[test]
fn a_latin1_database_delivers_in_utf8() {
    everything_is_delivered_in_utf8(LATIN1);
}

#[test]
fn a_win1251_database_delivers_in_utf8() {
    everything_is_delivered_in_utf8(WIN1251);
}

#[test]
fn a_multibyte_database_delivers_in_utf8() {
    everything_is_delivered_in_utf8(EUC_JP);
}

#[test]
fn an_sql_ascii_database_delivers_text_that_is_utf8() {
    everything_is_delivered_in_utf8(SQL_ASCII);
}

#[test]
fn destinations_and_sources_with_names_of_the_encoding_work() {
    let (encoding, word) = LATIN1;
    let served = served(encoding);
    let (exchange, url) = (&served.exchange, served.broker.url());
    served
        .session().run(&format!(
            r#"create schema "café";
               create role "rené"; grant usage, create on schema "café" to "rené"; 
               create table "café"."événement" (nº int primary key, "naïve" text, at timestamptz default now());
               insert into "café"."événement" values (1, '{word}');
               alter table "café"."événement" owner to "rené";
               create server "señor" foreign data wrapper outbox_amqp options (url '{url}', exchange '{exchange}', routing_key 'ñ.{{key}}');
               select outbox_source_set('café.événement', seq => 'nº', type => '''Évé''', created_at => 'at',
                 payload => 'jsonb_build_object(''name'', "naïve")', aggregate_id => 'naïve');
               select outbox_enqueue(1, destination => 'señor');"#
        ));
    let bodies = served.bodies();
    assert_eq!(names(&bodies), [word]);
    assert_eq!(bodies[0]["type"], "Évé");
    served.session().run(&format!(
        r#"select outbox_source_reset();
               select outbox_publish('T', '{{"name": "{word}"}}', 'o', 'é', destination => 'señor');"#
    ));
    assert_eq!(names(&served.bodies()), [word]);
    let refused = served.refused("select outbox_publish('T', '{}', destination => 'niño')");
    assert_eq!(refused.code(), &SqlState::UNDEFINED_OBJECT);
    assert!(refused.message().contains("ni\\u00f1o"), "{refused:?}");
    assert!(
        refused.hint().is_some_and(|hint| hint.contains("CREATE SERVER ...")),
        "{refused:?}"
    );
}

#[test]
fn an_error_of_the_server_keeps_the_characters_of_the_encoding() {
    let served = served(LATIN1.0);
    served
        .session()
        .run(r#"alter table outbox_events add constraint "señal" check (type <> 'Ñ')"#);
    let refused = served.refused("select outbox_publish('Ñ', '{}')");
    assert_eq!(refused.constraint(), Some("señal"));
    assert!(refused.message().contains("señal"), "{refused:?}");
}

#[test]
fn a_text_that_cannot_become_utf8_is_refused_at_the_call() {
    let served = served(SQL_ASCII.0);
    let bad = r"convert_from('\x4aff'::bytea, 'SQL_ASCII')";
    for call in [
        format!("select outbox_publish({bad}, '{{}}')"),
        format!("select outbox_publish('T', to_jsonb({bad}))"),
        format!("select outbox_publish('T', '{{}}', headers => jsonb_build_object('x', {bad}))"),
        format!("select outbox_publish('T', '{{}}', actor => {bad})"),
        format!("select outbox_publish('T', '{{}}', 'o', {bad})"),
        format!("select set_config('outbox.actor', {bad}, false), outbox_publish('T', '{{}}')"),
        format!("select outbox_enqueue(1, {bad})"),
        format!(
            "create table t (id int primary key, name text); select outbox_capture('t'); insert into t select 1, {bad}"
        ),
        format!(
            "with e as (insert into outbox_events (id, type, aggregate_id, payload) values (gen_random_uuid(), 'T', {bad}, '{{}}')
                        returning seq) select 1 from e; select outbox_enqueue(max(seq)) from outbox_events"
        ),
    ] {
        let refused = served.refused(&call);
        assert_eq!(refused.code(), &SqlState::CHARACTER_NOT_IN_REPERTOIRE, "{call}: {refused:?}");
        assert!(refused.message().contains("cannot be converted from SQL_ASCII to UTF-8"), "{refused:?}");
    }
}

#[test]
fn a_stored_message_that_cannot_become_utf8_becomes_a_dead_letter_and_blocks_no_other() {
    let served = served(SQL_ASCII.0);
    served.session().run(
        r#"create server "default" foreign data wrapper outbox_amqp options (dead_letters_to 'default');
              create function bad() returns text language sql as $$ select convert_from('\x4aff'::bytea, 'SQL_ASCII') $$;
              insert into outbox_events (seq, id, type, actor, payload) values
                (1001, gen_random_uuid(), 'T', bad(), '{}'), (1003, gen_random_uuid(), 'T', null, to_jsonb(bad())),
                (1005, gen_random_uuid(), bad(), null, '{}'), (1007, gen_random_uuid(), 'T', null, '{}');
              insert into outbox_events (seq, id, type, payload)
                select n, gen_random_uuid(), 'Good', '{}' from unnest('{1002,1004,1006}'::int8[]) n;
              begin;
              select outbox_enqueue(n) from unnest('{1001,1002,1003,1004,1005,1006}'::int8[]) n;
              insert into outbox (seq, destination, partition, key) values (1007, 'default', 1, bad());
              commit;"#,
    );
    let bodies = served.bodies();
    assert_eq!(
        served.text("select string_agg(seq::text, ',' order by seq) from outbox_dead"),
        "1001,1003,1005,1007"
    );
    let of_type = |name| bodies.iter().filter(move |body| body["type"] == name);
    assert_eq!(of_type("Good").count(), 3);
    let mut told: Vec<_> = of_type("outbox.dead_letter")
        .map(|body| body["payload"]["seq"].as_i64())
        .collect();
    told.sort();
    assert_eq!(told, [1001, 1003, 1005, 1007].map(Some), "their notices can be read");
}
