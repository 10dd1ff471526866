//! Tests the functions of docs/sql-api.md: whether the list is complete, which roles may call each, and the calls as
//! drivers make them. pg_test/ tests results and refusals.

use std::collections::BTreeMap;
use support::{Session, idle_cluster};

use support::Cluster;
use support::DB;

const SQL_API: &str = include_str!("../docs/sql-api.md");

/// The row of docs/sql-api.md for each function in its tables.
fn listed() -> BTreeMap<String, String> {
    let begin = SQL_API.find("\n## All functions\n").expect("the list");
    let rows = SQL_API[begin..]
        .lines()
        .skip_while(|line| !line.starts_with("|---"))
        .skip(1)
        .take_while(|line| line.starts_with('|'));
    let mut all = BTreeMap::new();
    for row in rows {
        let mut cells = row.split('|').skip(1).map(str::trim);
        let (role, functions) = (cells.next().unwrap_or_default(), cells.next().unwrap_or_default());
        for name in functions
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|name| name.starts_with("outbox_"))
        {
            assert_eq!(all.insert(name.to_owned(), role.replace('`', "")), None, "{name} twice");
        }
    }
    all
}

#[test]
fn the_docs_list_each_function_and_the_roles_that_may_call_it() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(DB, "create schema relay; create extension outbox schema relay");
    let rows = cluster
        .connect(DB)
        .query(
            "select p.proname::text, coalesce(string_agg(a.role, ', ' order by a.role), 'a superuser, or the worker role')
             from pg_proc p left join lateral (
               select case x.grantee when 0 then 'everyone' else x.grantee::regrole::text end as role
               from aclexplode(p.proacl) x
               where x.grantee <> p.proowner and x.grantee <> 'outbox_worker'::regrole) a on true
             where p.pronamespace = 'relay'::regnamespace group by p.oid, p.proname",
            &[],
        )
        .expect("the functions");
    let count = rows.len();
    let there: BTreeMap<String, String> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(count, there.len(), "a name twice");
    assert_eq!(there, listed());
}

/// In this schema another role could create a function that fits a call better, or makes it ambiguous.
#[test]
fn the_extension_calls_no_function_in_its_own_schema() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(DB, "create schema relay; create extension outbox schema relay");
    let calls: String = cluster.query_one(
        DB,
        r"with ours as (
            select p.* from pg_proc p where p.pronamespace in ('relay'::regnamespace, 'outbox_internal'::regnamespace)
          )
          select coalesce(string_agg(format('%s: %s', c.caller, c.callee), ', '), '') from (
            -- In the text of a function. What makes triggers names the functions that they call.
            select f.proname as caller, m.match[1] as callee
            from ours f cross join lateral regexp_matches(f.prosrc, 'relay\.(outbox_[a-z0-9_]+)\s*\(', 'g') m (match)
            where m.match[1] in (select g.proname from ours g) and m.match[1] not in ('outbox_attached', 'outbox_captured')
            union all
            -- Bound when it was created: a view, a function with BEGIN ATOMIC, a default, a trigger.
            select pg_describe_object(d.classid, d.objid, d.objsubid), g.proname
            from pg_depend d join ours g on d.refclassid = 'pg_proc'::regclass and d.refobjid = g.oid
              and g.pronamespace = 'relay'::regnamespace
            where d.deptype = 'n' and d.classid <> 'pg_foreign_data_wrapper'::regclass
          ) c",
    );
    assert_eq!(calls, "");
}

#[test]
fn the_documented_calls_work_with_untyped_parameters() {
    let cluster = idle_cluster(&[]);
    let mut client = cluster.connect(DB);
    client.run("create table a (id int primary key); create table journal (seq bigint, kind text)");
    // As node-postgres does: the statement is parsed without types, and the server infers them.
    for call in [
        "select outbox_publish($1, $2, $3, $4, $5)",
        "select outbox_enqueue($1)",
        "select outbox_enqueue($1, $2)",
        "select outbox_enqueue($1, key => $2, available_at => $3)",
        "select outbox_enqueue_many($1, $2)",
        "select outbox_partition_of($1)",
        "select outbox_partition_of($1, $2)",
        "select outbox_retry($1)",
        "select outbox_retry($1, reason => $2)",
        "select outbox_pause($1, $2)",
        "select outbox_resume($1, $2)",
        "select outbox_discard($1, reason => $2)",
        "select outbox_attach($1, $2)",
        "select outbox_detach($1)",
        "select outbox_capture($1, aggregate_type => $2, columns => $3)",
        "select outbox_uncapture($1)",
        "select outbox_source_set($1, seq => $2, type => $3, created_at => $4, payload => $5)",
        "select outbox_source_reset()",
        "select outbox_retry_where(type => $1, error_like => $2, died_after => $3, dry_run => $4)",
        "select outbox_discard_where(seq_from => $1, max_rows => $2, reason => $3)",
        "select outbox_inbox_receive($1, $2)",
        "select outbox_inbox_assign($1, $2)",
        "select outbox_adopt($1)",
        "select outbox_drain($1)",
        "select * from outbox_check($1)",
        "select outbox_run_pass($1)",
        "select * from outbox_relay($1, $2)",
        "select * from outbox_purge($1, $2, $3, dry_run => $4)",
        "select outbox_replay(seq_from => $1, seq_to => $2, type => $3, dry_run => $4)",
        "select outbox_store($1, $2, $3, $4)",
        "select outbox_wait($1, $2)",
        "select * from outbox_fetch_unpublished($1, $2, $3)",
        "select outbox_mark_published($1, $2)",
        "select outbox_mark_failed($1, $2, $3)",
    ] {
        client.prepare(call).unwrap_or_else(|error| panic!("{call}: {error:?}"));
    }
    // As psycopg does: quoted literals.
    for call in [
        "select outbox_publish('OrderPlaced', '{\"order\": 1}', 'order', '1', 'placed')",
        "select setval(pg_get_serial_sequence('outbox_events', 'seq'), 11)",
        "select outbox_enqueue('1')",
        "select outbox_enqueue('9', 'k', NULL, '2030-01-01')",
        "select outbox_enqueue_many('{10,11}', 'k')",
        "select outbox_partition_of('k', '16')",
        "select outbox_retry('9')",
        "select outbox_discard('9', NULL, 'why')",
        "select outbox_attach('journal', 'kind is not null', destination => 'default')",
        "select outbox_detach('journal')",
        "select outbox_capture('a', 'thing', columns => '{id}')",
        "select outbox_uncapture('a')",
        "select outbox_retry_where(type => 'T', died_before => '2030-01-01', seq_to => '7', dry_run => 'false')",
        "select outbox_adopt('why')",
        "select outbox_drain('0 s')",
        "select outbox_discard_where(key => 'k', max_rows => '10')",
        "select outbox_store('O:8:\"stdClass\"', '{\"type\": \"T\"}', NULL, '01a1fc85-047b-72cc-b926-c7a014466422')",
        "select outbox_wait('9', '0')",
        "select outbox_mark_failed('9', '-1', 'why')",
        "select outbox_check('default')",
        "select outbox_replay(created_from => '2030-01-01', source_destination => 'default', dry_run => 'false')",
    ] {
        client.run(call);
    }
}
