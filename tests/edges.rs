//! Every function of the extension is called with arguments at the edges, by every role, in every kind of transaction.
//! No call may fail with an internal error (XX000) or end the session. Each error of the extension has a hint.

use postgres::Client;
use postgres::error::{DbError, SqlState};
use support::{Cluster, wait_until};
use support::{DB, Session, idle_cluster, quiet_cluster_with};

/// Edge values of a type, as SQL.
fn edges(of: &str) -> &'static [&'static str] {
    match of {
        "bigint" => &["0", "-1", "1", "9223372036854775807", "-9223372036854775808"],
        "integer" => &["0", "-1", "1", "2147483647", "-2147483648"],
        "smallint" => &["0", "-1", "1", "32767", "-32768"],
        "boolean" => &["true", "false"],
        "double precision" | "real" | "numeric" => &["0", "-1", "'NaN'", "'Infinity'", "'-Infinity'", "1e300"],
        "timestamp with time zone" => &[
            "now()",
            "'infinity'",
            "'-infinity'",
            "'4714-11-24 BC'",
            "'294276-12-31'",
        ],
        "interval" => &["'0'", "'-1 day'", "'178000000 years'", "'-178000000 years'"],
        "jsonb" | "json" => &[
            "'null'",
            "'{}'",
            "'[]'",
            "'\"x\"'",
            "'{\"a\": null}'",
            "'{\"status\": 7}'",
            "'1e400'",
        ],
        "uuid" => &["'00000000-0000-0000-0000-000000000000'"],
        "oid" | "regclass" | "regprocedure" | "regproc" | "xid" => &["'0'", "'4294967295'", "'1259'"],
        "tid" => &["'(0,0)'", "'(4294967295,65535)'"],
        "\"char\"" => &["''", "'p'", "'z'"],
        "name" => &["''", "'x'"],
        "bigint[]" | "integer[]" | "smallint[]" => &[
            "'{}'",
            "'{NULL}'",
            "'{1,NULL}'",
            "'{1,2}'",
            "'{{1,2},{3,4}}'",
            "'{-1,0}'",
        ],
        "tid[]" => &["'{}'", "'{NULL}'", "'{\"(0,1)\"}'"],
        "\"char\"[]" => &["'{}'", "'{NULL}'", "'{p,z}'"],
        "text[]" => &["'{}'", "'{NULL}'", "'{x,NULL}'", "'{\"a=b\"}'", "'{{a,b},{c,d}}'"],
        "record" => &[
            "row()",
            "row(1)",
            "row('x'::text, null)",
            "(select x from (select 7 as id, 'y'::text as type) x)",
            "(select x from (select 'i'::text as id) x)",
            "(select x from outbox_internal.event_text x limit 1)",
        ],
        _ => &[
            "''",
            "'x'",
            "'p07'",
            "'default'",
            "'%'",
            "repeat('y', 300)",
            "'a\"b'",
            "'{}'",
            "'1 day'",
        ],
    }
}

/// The functions of the extension, each with the types of its arguments.
fn functions(session: &mut Client) -> Vec<(String, Vec<String>)> {
    let rows = session.query(
        "select p.oid::regproc::text,
                array(select format_type(t, null) from unnest(p.proargtypes) with ordinality a (t, n) order by n)
         from pg_proc p join pg_depend d on d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e'
           join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
         where p.prokind = 'f' and p.prorettype not in ('trigger'::regtype, 'event_trigger'::regtype)
         order by 1, 2",
        &[],
    );
    let rows = rows.expect("the functions");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Calls of a function: first with NULL only, then `count` pseudo-random calls, the same in each run.
fn calls(name: &str, types: &[String], count: usize) -> Vec<String> {
    let mut state = name.bytes().fold(0x9E37_79B9_7F4A_7C15_u64, |state, byte| {
        (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    });
    let mut dice = move |sides: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize % sides
    };
    let mut call = |by_chance: bool| {
        let arguments = types.iter().map(|of| {
            let values = edges(of);
            let value = match by_chance && dice(8) > 0 {
                true => values[dice(values.len())],
                false => "null",
            };
            format!("({value})::{of}")
        });
        format!("select * from {name}({})", arguments.collect::<Vec<_>>().join(", "))
    };
    let count = if types.is_empty() { 0 } else { count };
    (0..=count).map(|n| call(n > 0)).collect()
}

/// The role of a caller, and the kind and the end of its transaction.
#[derive(Clone, Copy)]
struct Way {
    role: &'static str,
    begin: &'static str,
    prepares: bool,
}

const PLAIN: Way = Way {
    role: "postgres",
    begin: "begin",
    prepares: false,
};

/// Roles below the superuser: one in each group role, and one without rights.
const ROLES: [(&str, &str); 6] = [
    ("plain", ""),
    ("writer", "in role outbox_writer"),
    ("reader", "in role outbox_consumer"),
    ("monitor", "in role outbox_monitor"),
    ("courier", "in role outbox_relay"),
    ("boss", "in role outbox_admin"),
];

fn make_roles(cluster: &Cluster) {
    for (role, of) in ROLES {
        cluster.exec(DB, &format!("create role {role} {of}"));
    }
}

/// Whether the extension raised the error, and not the server. Errors of the extension must have a hint.
fn is_ours(error: &DbError) -> bool {
    let file = error.file().unwrap_or_default();
    file.ends_with(".rs") || error.routine() == Some("exec_stmt_raise")
}

/// The defect of an error: an internal error, the end of the session, or an error of the extension without a hint.
fn defect(error: &postgres::Error) -> Option<String> {
    match error.as_db_error() {
        None => Some(error.to_string()),
        Some(db_error)
            if db_error.code().code().starts_with("XX") || is_ours(db_error) && db_error.hint().is_none() =>
        {
            Some(format!("{}: {}", db_error.code().code(), db_error.message()))
        }
        Some(_) => None,
    }
}

/// The defects of all calls.
fn defects(cluster: &Cluster, count: usize, way: Way) -> Vec<String> {
    let connect = || {
        let mut session = cluster.connect(DB);
        let role = format!("set role {}", way.role);
        session.run(&role);
        session
    };
    let mut session = connect();
    let functions = functions(&mut session);
    assert!(functions.len() > 100, "only {} functions were found", functions.len());
    let mut defects = Vec::new();
    for (name, types) in &functions {
        for call in calls(name, types, count) {
            // All changes are rolled back, and a wait is cut short by the timeout.
            let sql = format!("{}; set local statement_timeout = '300ms'; {call}", way.begin);
            let called = session.batch_execute(&sql);
            let mut answers = vec![called];
            if way.prepares && answers[0].is_ok() {
                let prepared = session.batch_execute("prepare transaction 'of the sweep'");
                let undo = match &prepared {
                    Ok(()) => "rollback prepared 'of the sweep'",
                    Err(_) => "rollback",
                };
                answers.push(prepared);
                answers.push(session.batch_execute(undo));
            }
            let messages = answers.iter().filter_map(|answer| defect(answer.as_ref().err()?));
            let Way { role, begin, .. } = way;
            defects.extend(messages.map(|what| format!("{role}, {begin}: {call}: {what}")));
            if session.batch_execute("rollback").is_err() {
                session = connect();
            }
        }
    }
    defects
}

fn assert_none(defects: &[String]) {
    assert!(defects.is_empty(), "{} defects:\n{}", defects.len(), defects.join("\n"));
}

/// The start time of the server and its checkpointer, to detect that a call stopped or restarted the server.
fn started(cluster: &Cluster) -> String {
    let sql =
        "select pg_postmaster_start_time()::text || pid from pg_stat_activity where backend_type = 'checkpointer'";
    cluster.query_one(DB, sql)
}

fn quiet() -> Cluster {
    idle_cluster(&["max_prepared_transactions = 0"])
}

#[test]
fn no_call_of_any_function_is_answered_with_an_internal_error() {
    let cluster = quiet();
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'o', '1'); select outbox_publish('T', '{}', available_at => now() + '1 h')",
    );
    let before = started(&cluster);
    assert_none(&defects(&cluster, 25, PLAIN));
    assert_eq!(started(&cluster), before);
}

#[test]
fn no_role_gets_an_internal_error_in_any_kind_of_transaction() {
    let cluster = quiet_cluster_with(&["max_prepared_transactions = 4"]);
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'o', '1'); select outbox_publish('T', '{}', available_at => now() + '1 h')",
    );
    make_roles(&cluster);
    let before = started(&cluster);
    let mut all = Vec::new();
    for role in ROLES.map(|(role, _)| role).into_iter().chain(["postgres"]) {
        for (begin, prepares) in [
            ("begin", false),
            ("begin read only", false),
            ("begin isolation level serializable", false),
            ("begin", true),
        ] {
            all.extend(defects(&cluster, 6, Way { role, begin, prepares }));
        }
    }
    assert_none(&all);
    assert_eq!(started(&cluster), before);
    let prepared: i64 = cluster.query_one(DB, "select count(*) from pg_prepared_xacts");
    assert_eq!(prepared, 0);
}

#[test]
fn a_standby_reports_that_it_is_read_only() {
    let cluster = quiet();
    cluster.exec(DB, "select outbox_publish('T', '{}', 'o', '1')");
    make_roles(&cluster);
    let standby = cluster.copy(true, &[]);
    wait_until("the standby to have the event", support::LONG, || {
        standby.query_one::<i64>(DB, "select count(*) from outbox_events") == 1
    });
    for call in [
        "select outbox_publish('T', '{}')",
        "select outbox_enqueue(1)",
        "select outbox_enqueue(1, 'key')",
        "select outbox_enqueue_many('{1,2}')",
    ] {
        let refused = standby.connect(DB).batch_execute(call).expect_err(call);
        assert_eq!(
            refused.code(),
            Some(&SqlState::READ_ONLY_SQL_TRANSACTION),
            "{call}: {refused:?}"
        );
    }
    let partition: String = standby.query_one(DB, "select outbox_partition_of('x')");
    assert_eq!(
        partition,
        cluster.query_one::<String>(DB, "select outbox_partition_of('x')")
    );
    let before = started(&standby);
    assert_none(&defects(&standby, 5, PLAIN));
    for (role, _) in ROLES {
        assert_none(&defects(&standby, 2, Way { role, ..PLAIN }));
    }
    assert_eq!(started(&standby), before);
}

#[test]
fn a_null_in_an_array_is_refused() {
    let cluster = quiet();
    let refused = cluster
        .connect(DB)
        .batch_execute("select outbox_enqueue_many('{1,NULL}')")
        .expect_err("it is refused");
    assert_eq!(refused.code(), Some(&SqlState::NULL_VALUE_NOT_ALLOWED), "{refused:?}");
}

#[test]
fn prepare_transaction_without_a_transaction_shows_the_error_of_the_server() {
    let cluster = quiet();
    let mut session = cluster.connect(DB);
    session.run("begin; select outbox_publish('T', '{}', 'o', '1')");
    let refused = session
        .batch_execute("prepare transaction 'x'")
        .expect_err("it is refused");
    assert_eq!(
        refused.code(),
        Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE),
        "{refused:?}"
    );
    let message = refused.as_db_error().map(|error| error.message().to_owned());
    assert_eq!(message.as_deref(), Some("prepared transactions are disabled"));
}

#[test]
fn immutable_functions_are_parallel_safe() {
    let unsafe_ones: Vec<String> = quiet().query_one(
        DB,
        "select array(select p.oid::regprocedure::text from pg_proc p
           join pg_depend d on d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e'
           join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
         where p.provolatile = 'i' and p.proparallel <> 's')",
    );
    assert!(unsafe_ones.is_empty(), "{unsafe_ones:?}");
}
