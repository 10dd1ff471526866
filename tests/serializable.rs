//! SERIALIZABLE transactions that publish, enqueue, capture or receive with keys of their own do not conflict with each
//! other: nothing of the outbox reads where the others insert.

use postgres::Client;
use support::{Cluster, DB, Session, quiet_cluster_with};

/// What transaction `{n}` does with rows and keys of its own. `{e}` is an event of an earlier transaction.
const CALLS: [(&str, &str); 14] = [
    ("publish", "select outbox_publish('T', '{}', 'a', '{n}')"),
    ("publish without a key", "select outbox_publish('T', '{}')"),
    (
        "publish with an id",
        "select outbox_publish('T', '{}', 'a', '{n}', id => outbox_uuid_v7())",
    ),
    (
        "publish later with an id",
        "select outbox_publish('T', '{}', 'a', '{n}', id => outbox_uuid_v7(), available_at => now() + '1 h')",
    ),
    ("store", "select outbox_store('{}', key => 'k{n}')"),
    ("enqueue", "select outbox_enqueue({e})"),
    ("enqueue with a key", "select outbox_enqueue({e}, 'k{n}')"),
    (
        "enqueue later",
        "select outbox_enqueue({e}, available_at => now() + '1 h')",
    ),
    ("enqueue many", "select outbox_enqueue_many(array[{e}, {e} + 1])"),
    (
        "insert an event and enqueue it",
        "with e as (insert into outbox_events (id, type, payload) values (outbox_uuid_v7(), 'T', '{}') returning seq)
         select outbox_enqueue(seq) from e",
    ),
    ("capture an insert", "insert into captured values ({n})"),
    ("capture an update", "update captured set v = 1 where id = -{n}"),
    ("attach", "insert into attached (k) values ('k{n}')"),
    ("receive", "select outbox_inbox_receive('c', outbox_uuid_v7()::text)"),
];

fn cluster() -> Cluster {
    let cluster = quiet_cluster_with(&[]);
    cluster.exec(
        DB,
        "create table captured (id int primary key, v int) with (fillfactor = 50);
         insert into captured select -n from generate_series(1, 2000) n;
         select outbox_capture('captured');
         create table attached (seq bigint generated always as identity primary key, k text);
         select outbox_attach('attached', key => 'k');
         insert into outbox_events (id, type, payload, aggregate_type, aggregate_id)
         select outbox_uuid_v7(), 'T', '{}', 'b', n::text from generate_series(1, 2000) n;
         analyze",
    );
    cluster
}

fn call(sql: &str, number: usize) -> String {
    sql.replace("{n}", &number.to_string())
        .replace("{e}", &(2 * number).to_string())
}

fn begin(cluster: &Cluster) -> Client {
    let mut client = cluster.connect(DB);
    client.run("begin isolation level serializable");
    client
}

#[test]
fn serializable_transactions_with_keys_of_their_own_do_not_conflict() {
    let cluster = cluster();
    let mut number = 0;
    let mut refused = Vec::new();
    for (what, sql) in CALLS {
        number += 3;
        let (mut first, mut second) = (begin(&cluster), begin(&cluster));
        let result = (|| {
            first.batch_execute(&call(sql, number))?;
            second.batch_execute(&call(sql, number + 1))?;
            first.batch_execute(&call(sql, number + 2).replace("'k", "'l"))?;
            first.batch_execute("commit")?;
            second.batch_execute("commit")
        })();
        if let Err(error) = result {
            refused.push(format!("{what}: {error:?}"));
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

#[test]
fn calls_take_no_predicate_lock_on_an_index_or_a_whole_table_of_messages() {
    let cluster = cluster();
    let locks = "select coalesce(string_agg(l.relation::regclass || ' ' || l.locktype, ', '), '')
                 from pg_locks l join pg_class c on c.oid = l.relation
                 where l.mode = 'SIReadLock' and l.locktype <> 'tuple' and l.pid = pg_backend_pid()
                   and c.relname !~ '^(outbox_settings|outbox_subscriptions|outbox_inbox_owners|captured)'";
    let mut taken = Vec::new();
    for (number, (what, sql)) in CALLS.iter().enumerate() {
        let mut client = begin(&cluster);
        client.batch_execute(&call(sql, 500 + number)).expect(what);
        let found: String = client.query_one(locks, &[]).expect("its locks").get(0);
        if !found.is_empty() {
            taken.push(format!("{what}: {found}"));
        }
    }
    assert!(taken.is_empty(), "{}", taken.join("\n"));
}
