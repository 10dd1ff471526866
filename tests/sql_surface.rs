//! The SQL that users see: comments, names, untyped parameters, vectors, and an error with a HINT for each bad input.

mod common;

use common::DB;
use support::Cluster;

fn cluster() -> Cluster {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(DB, "create extension outbox");
    cluster
}

#[test]
fn every_object_has_a_comment_and_no_two_functions_share_a_name() {
    let cluster = cluster();
    let bare: String = cluster.query_one(
        DB,
        "select coalesce(string_agg(pg_describe_object(d.classid, d.objid, 0), ', '), '')
         from pg_depend d join pg_extension e on e.oid = d.refobjid and e.extname = 'outbox'
         where d.refclassid = 'pg_extension'::regclass and d.deptype = 'e'
           and d.classid in ('pg_class'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass)
           and not exists (select from pg_class c where d.classid = 'pg_class'::regclass and c.oid = d.objid and c.relkind in ('S', 'i', 'c'))
           and not exists (select from pg_type t where d.classid = 'pg_type'::regclass and t.oid = d.objid
                           and (t.typelem <> 0 or exists (select from pg_class c where c.oid = t.typrelid and c.relkind <> 'c')))
           and coalesce(obj_description(d.objid, d.classid::regclass::text),
                        (select obj_description(t.typrelid, 'pg_class') from pg_type t where t.oid = d.objid)) is null",
    );
    assert_eq!(bare, "", "objects without a comment");
    let overloaded: String = cluster.query_one(
        DB,
        "select coalesce(string_agg(proname, ' '), '') from (select proname from pg_proc where proname like 'outbox%'
         group by proname having count(*) > 1) x",
    );
    assert_eq!(overloaded, "");
}

#[test]
fn public_functions_have_the_documented_arguments() {
    let cluster = cluster();
    let expected = [
        (
            "outbox_enqueue",
            "seq bigint, key text DEFAULT NULL::text, destination text DEFAULT NULL::text, available_at timestamp with time zone DEFAULT NULL::timestamp with time zone, partition_key text DEFAULT NULL::text",
            "boolean",
        ),
        (
            "outbox_enqueue_many",
            "seqs bigint[], key text DEFAULT NULL::text, destination text DEFAULT NULL::text, available_at timestamp with time zone DEFAULT NULL::timestamp with time zone, partition_key text DEFAULT NULL::text",
            "bigint",
        ),
        (
            "outbox_publish",
            "type text, payload jsonb, aggregate_type text DEFAULT NULL::text, aggregate_id text DEFAULT NULL::text, operation text DEFAULT NULL::text, previous_payload jsonb DEFAULT NULL::jsonb, metadata jsonb DEFAULT NULL::jsonb, headers jsonb DEFAULT NULL::jsonb, actor text DEFAULT NULL::text, correlation_id text DEFAULT NULL::text, destination text DEFAULT NULL::text, available_at timestamp with time zone DEFAULT NULL::timestamp with time zone, id uuid DEFAULT NULL::uuid",
            "bigint",
        ),
        (
            "outbox_partition_of",
            "key text, partition_count integer DEFAULT NULL::integer",
            "text",
        ),
        (
            "outbox_retry",
            "seq bigint, destination text DEFAULT NULL::text",
            "boolean",
        ),
        (
            "outbox_discard",
            "seq bigint, destination text DEFAULT NULL::text, reason text DEFAULT NULL::text",
            "boolean",
        ),
    ];
    for (name, arguments, result) in expected {
        let sql = format!(
            "select pg_get_function_arguments('{name}'::regproc) || ' -> ' || pg_get_function_result('{name}'::regproc)"
        );
        assert_eq!(
            cluster.query_one::<String>(DB, &sql),
            format!("{arguments} -> {result}"),
            "{name}"
        );
    }
}

#[test]
fn the_documented_calls_work_with_untyped_parameters() {
    let cluster = cluster();
    let mut client = cluster.connect(DB);
    // As node-postgres does: the statement is parsed without types, and the server finds them.
    for call in [
        "select outbox_publish($1, $2, $3, $4, $5)",
        "select outbox_enqueue($1)",
        "select outbox_enqueue($1, $2)",
        "select outbox_enqueue($1, key => $2, available_at => $3)",
        "select outbox_enqueue_many($1, $2)",
        "select outbox_partition_of($1)",
        "select outbox_partition_of($1, $2)",
        "select outbox_retry($1)",
        "select outbox_discard($1, reason => $2)",
    ] {
        client.prepare(call).unwrap_or_else(|error| panic!("{call}: {error:?}"));
    }
    // As psycopg does: literals in quotes.
    for call in [
        "select outbox_publish('OrderPlaced', '{\"order\": 1}', 'order', '1', 'placed')",
        "select outbox_enqueue('1')",
        "select outbox_enqueue('9', 'k', NULL, '2030-01-01')",
        "select outbox_enqueue_many('{10,11}', 'k')",
        "select outbox_partition_of('k', '16')",
        "select outbox_retry('9')",
        "select outbox_discard('9', NULL, 'why')",
    ] {
        client
            .batch_execute(call)
            .unwrap_or_else(|error| panic!("{call}: {error:?}"));
    }
}

#[test]
fn partitions_match_the_published_vectors() {
    let cluster = cluster();
    for (key, of_16, of_64) in [
        ("order-42", "p14", "p30"),
        ("Ünï", "p04", "p20"),
        ("", "p00", "p00"),
        ("a", "p03", "p03"),
        ("注文-7", "p03", "p19"),
        ("🐇", "p15", "p47"),
        ("123456789", "p06", "p38"),
    ] {
        let both: String = cluster.query_one(
            DB,
            &format!("select outbox_partition_of('{key}') || outbox_partition_of('{key}', 64)"),
        );
        assert_eq!(both, format!("{of_16}{of_64}"), "{key:?}");
    }
}

#[test]
fn bad_input_is_refused_at_the_call_with_a_hint() {
    let cluster = cluster();
    cluster.exec(DB, "select outbox_publish('T', '{}', 'order', '1')");
    let mut client = cluster.connect(DB);
    for (call, sqlstate) in [
        ("select outbox_enqueue(NULL)", "22004"),
        ("select outbox_enqueue(0, 'k')", "22023"),
        ("select outbox_enqueue(-5, 'k')", "22023"),
        ("select outbox_enqueue(999)", "P0002"),
        ("select outbox_enqueue_many(NULL)", "22004"),
        ("select outbox_enqueue_many('{1,NULL}')", "22004"),
        ("select outbox_enqueue_many('{1,999}')", "P0002"),
        ("select outbox_enqueue(1, repeat('k', 256))", "54000"),
        ("select outbox_enqueue(1, 'k', 'nowhere')", "42704"),
        ("select outbox_enqueue(1, 'k', partition_key => 'seven')", "22023"),
        ("select outbox_enqueue(2, 'k', partition_key => 'p99')", "22023"),
        ("select outbox_enqueue(2, 'k', available_at => 'infinity')", "22023"),
        ("select outbox_publish(NULL, '{}')", "22004"),
        ("select outbox_publish('', '{}')", "22004"),
        ("select outbox_publish('T', NULL)", "22004"),
        ("select outbox_publish(repeat('T', 256), '{}')", "54000"),
        (
            "select outbox_publish('T', '{}', repeat('a', 200), repeat('b', 200))",
            "54000",
        ),
        ("select outbox_publish('T', '{}', headers => '[1]')", "54000"),
        (
            "select outbox_publish('T', '{}', headers => '{\"CC\": \"x\"}')",
            "54000",
        ),
        (
            "select outbox_publish('T', '{}', headers => jsonb_build_object('x', repeat('y', 70000)))",
            "54000",
        ),
        ("select outbox_publish('T', to_jsonb(repeat('x', 17000000)))", "54000"),
        ("select outbox_partition_of('k', 0)", "22003"),
        ("select outbox_partition_of('k', 1025)", "22003"),
    ] {
        let error = client.batch_execute(call).expect_err(call);
        let error = error.as_db_error().unwrap_or_else(|| panic!("{call}: {error:?}"));
        assert_eq!(error.code().code(), sqlstate, "{call}: {error}");
        assert!(error.hint().is_some_and(|hint| !hint.is_empty()), "{call}: no hint");
    }
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox"),
        1,
        "nothing else was enqueued"
    );
}
