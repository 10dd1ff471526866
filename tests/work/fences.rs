//! The role of a worker outside the server is less trusted than that of background workers: these tests check what it
//! may not do.

use postgres::Client;
use postgres::error::SqlState;
use support::{Broker, Cluster, wait_for};

use super::{make_courier, run, without_workers, work};
use support::{DB, LONG, Session, exchange_and_queue, idle_cluster};

/// A server without workers, and a session of the role of `outboxctl work`.
fn session() -> (Cluster, Client) {
    session_with(&[])
}

fn session_with(conf: &[&str]) -> (Cluster, Client) {
    let cluster = idle_cluster(conf);
    make_courier(&cluster);
    let client = courier(&cluster);
    (cluster, client)
}

fn courier(cluster: &Cluster) -> Client {
    let conn_string = cluster.conn_string(DB).replace("user=postgres", "user=courier");
    Client::connect(&conn_string, postgres::NoTls).expect("a session of the role")
}

/// Makes the session a worker, as soon as the server has found the extension. Returns its name.
fn begin(client: &mut Client, name: &str) -> String {
    wait_for("the server to find the extension", LONG, || {
        match client.query_one("select worker from outbox_internal.work_begin($1)", &[&name]) {
            Err(error) if error.code() == Some(&SqlState::OBJECT_IN_USE) => None,
            begun => Some(begun.expect("a worker").get(0)),
        }
    })
}

#[test]
fn the_workers_outside_of_one_database_leave_room_for_another() {
    let (cluster, mut first) = session();
    begin(&mut first, "x");
    let mut others: Vec<Client> = (1..32).map(|_| courier(&cluster)).collect();
    others.iter_mut().for_each(|other| _ = begin(other, "x"));
    let refused = code(&mut courier(&cluster), "select outbox_internal.work_begin('x')");
    assert_eq!(refused, SqlState::CONFIGURATION_LIMIT_EXCEEDED);
    cluster.exec(DB, "create database another");
    cluster.exec("another", "create extension outbox");
    let conn_string = cluster.conn_string("another").replace("user=postgres", "user=courier");
    begin(
        &mut Client::connect(&conn_string, postgres::NoTls).expect("a session"),
        "x",
    );
}

fn code(client: &mut Client, sql: &str) -> SqlState {
    let error = client.batch_execute(sql).expect_err(sql);
    error.code().unwrap_or_else(|| panic!("{sql}: {error:?}")).clone()
}

#[test]
fn a_role_with_outbox_relay_alone_runs_a_worker_and_reads_no_table() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    cluster.exec(DB, "select outbox_publish('T', '{\"secret\": 1}', 'item', 'a', 'x')");
    let output = run(work(&cluster, &["--once"]));
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_history"), 1);

    let mut client = courier(&cluster);
    let relations = cluster
        .connect(DB)
        .query(
            "select c.oid::regclass::text from pg_class c join pg_depend d on d.objid = c.oid and d.deptype = 'e'
             join pg_extension e on e.oid = d.refobjid and e.extname = 'outbox' where c.relkind in ('r', 'p', 'v', 'S')
             union all select relname::text from pg_class where relname = 'outbox_history_default'",
            &[],
        )
        .expect("the tables");
    assert!(relations.len() > 20, "{} tables and views", relations.len());
    for relation in relations {
        let name: String = relation.get(0);
        let denied = code(&mut client, &format!("select * from {name}"));
        assert_eq!(denied, SqlState::INSUFFICIENT_PRIVILEGE, "{name}");
    }
    // Of these, one works for the tables alone, and one for the memory of other workers.
    for call in [
        "outbox_internal.lease_take('server-1', '{0}', 10)",
        "outbox_internal.settle('', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')",
        "outbox_internal.claim_unleased('default', -1, 1, 1, 1)",
        "outbox_internal.work_own('{0}', 1)",
        "outbox_internal.work_join('x')",
        "outbox_internal.work_count('default', '{1,0,0,0,0}', '{}')",
        "outbox_internal.record_ended(1, 1, 1)",
    ] {
        let denied = code(&mut client, &format!("select * from {call}"));
        assert_eq!(denied, SqlState::INSUFFICIENT_PRIVILEGE, "{call}");
    }
}

/// The calls of the protocol in which a worker says its name. Maintenance removes a worker named server-… that has
/// ended.
const CALLS: [&str; 6] = [
    "heartbeat('other-1', 1, 10)",
    "report('other-1', 'default', 'connected', null, null, null, null, '{}')",
    "leave('other-1')",
    "claim('other-1', 'default', '{0}', '{1}', '{1}', '{0}', 1)",
    "claim_waiting('other-1', 'default', '0', 'k', '{1}', 1, 1, 1)",
    "due('other-1', '{0}', '{1}', 10)",
];

#[test]
fn a_session_acts_as_no_other_worker() {
    // Maintenance removes a worker whose heartbeat is longer.
    let (cluster, mut client) = session_with(&["outbox.heartbeat_ttl = '1h'"]);
    cluster.draw_seqs(2);
    cluster.exec(
        DB,
        "select outbox_enqueue(2, 'k', partition_key => 'p00');
         select outbox_internal.heartbeat('other-1', 1, 3600);
         update outbox_partitions set lease_epoch = 0;
         select outbox_internal.lease_take('other-1', '{0}', 3600);
         insert into outbox_waiting (seq, enqueued_at, due_at, attempts, partition, crashes, replayed, state, destination)
         values (1, now(), now(), 0, 0, 0, false, 's', 'default')",
    );
    for expected in [
        SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, // it is no worker
        SqlState::INSUFFICIENT_PRIVILEGE,
    ] {
        for call in CALLS {
            let refused = code(&mut client, &format!("select * from outbox_internal.{call}"));
            assert_eq!(refused, expected, "{call}");
        }
        begin(&mut client, "other-1");
    }
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_workers"), 1);
    let held = "select count(*) from outbox_partitions where lease_owner = 'other-1'";
    assert_eq!(cluster.query_one::<i64>(DB, held), 1);
}

#[test]
fn a_worker_name_is_unique_to_its_session_and_never_that_of_a_background_worker() {
    let (cluster, mut client) = session();
    let pid: i32 = client.value("select pg_backend_pid()");
    let name = begin(&mut client, "server-1");
    assert_eq!(name, format!("work-server-1-{pid}"));
    assert_eq!(
        client.value::<String>("select worker from outbox_internal.work_begin('other')"),
        name,
        "once"
    );
    client.run(&format!("select outbox_internal.heartbeat('{name}', {pid}, 10)"));
    assert!(cluster.query_one::<bool>(DB, "select alive from outbox_worker_status"));

    let mut another = courier(&cluster);
    let pid: i32 = another.value("select pg_backend_pid()");
    let odd: String = another.value("select worker from outbox_internal.work_begin(repeat('ä x''\n', 100))");
    assert!(
        odd.is_ascii() && odd.len() < 64 && odd.ends_with(&format!("-{pid}")),
        "{odd:?}"
    );
    another.run(&format!(
        "select outbox_internal.leave('{odd}'); select outbox_internal.work_quit()"
    ));
    assert_eq!(
        code(
            &mut another,
            &format!("select outbox_internal.heartbeat('{odd}', {pid}, 10)")
        ),
        SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE
    );
}

/// The token of messages that another worker has claimed, in partition 0 and in partition 1.
const OTHERS_TOKEN: i64 = 77;

fn others_messages(cluster: &Cluster) {
    cluster.draw_seqs(4);
    cluster.exec(
        DB,
        &format!(
            "select outbox_enqueue(n, 'k' || n, partition_key => 'p0' || n % 2) from generate_series(1, 4) n;
             update outbox_partitions set lease_epoch = {OTHERS_TOKEN} - 1;
             select outbox_internal.lease_take('other', '{{0}}', 3600);
             select outbox_internal.claim('other', 'default', '{{0}}', '{{{OTHERS_TOKEN}}}', '{{100}}', '{{0}}', 1000000)"
        ),
    );
    let claimed = format!("select count(*) from outbox where claim_token = {OTHERS_TOKEN}");
    assert_eq!(cluster.query_one::<i64>(DB, &claimed), 2);
}

/// Settles message 2, which another worker has claimed, with this partition, token, action and ctid.
fn settle(worker: &str, partition: i16, token: &str, action: &str, tid: &str) -> String {
    format!(
        "select outbox_internal.work_settle('{worker}', '{{\"{tid}\"}}', '{{2}}', '{{default}}', '{{{partition}}}',
           array[{token}]::bigint[], '{{{action}}}', '{{0}}', '{{why}}', '{{failed}}', '{{}}')"
    )
}

#[test]
fn a_worker_settles_nothing_that_another_worker_has_claimed() {
    let (cluster, mut client) = session_with(&["outbox.lease_ttl = '1h'"]);
    others_messages(&cluster);
    let tid: String = cluster.query_one(DB, "select ctid::text from outbox where seq = 2");
    let me = begin(&mut client, "x");
    client.run(&format!("select outbox_internal.heartbeat('{me}', 1, 10)"));
    let held: Vec<i16> = client
        .query(
            "select partition from outbox_internal.work_lease('{}', '{}', '{}', '{}', '{0,1}')",
            &[],
        )
        .expect("leases")
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(held, [1], "the other partition is leased");
    // Its own lease has the same epoch as the other's.
    for action in ["p", "d", "D", "x", "r", "w", "f"] {
        for partition in [0, 1] {
            let changed: i32 = client.value(&settle(&me, partition, "77", action, &tid));
            assert_eq!(changed, 0, "{action} as of partition {partition}");
        }
    }
    // These tokens pretend that leasing is off: such rows need no lease.
    for token in ["-1", "0", "null", "-9223372036854775807"] {
        let refused = code(&mut client, &settle(&me, 0, token, "p", &tid));
        assert_eq!(refused, SqlState::INSUFFICIENT_PRIVILEGE, "{token}");
    }
    let mixed = format!(
        "select outbox_internal.work_settle('{me}', '{{\"(9,9)\",\"{tid}\"}}', '{{9,2}}', '{{default,default}}', '{{1,0}}', '{{-1,77}}', '{{p,p}}', '{{0,0}}', '{{a,b}}', '{{failed,failed}}', '{{}}')"
    );
    assert_eq!(code(&mut client, &mixed), SqlState::INSUFFICIENT_PRIVILEGE);
    let untouched = format!("select count(*) = 2 from outbox where claim_token = {OTHERS_TOKEN} and partition = 0");
    assert!(cluster.query_one::<bool>(DB, &untouched));
    assert_eq!(
        cluster.query_one::<i64>(DB, "select coalesce(published_total, 0) from outbox_status"),
        0
    );

    // It settles what it has claimed itself.
    let claimed = format!(
        "select count(*) from outbox_internal.claim('{me}', 'default', '{{0,1}}', '{{77,77}}', '{{10,10}}', '{{0,0}}', 1000000)
         where remark is null"
    );
    assert_eq!(client.value::<i64>(&claimed), 2, "only messages under its lease");
    let own: String = cluster.query_one(DB, "select ctid::text from outbox where seq = 1");
    let ended: i32 = client.value(&settle(&me, 1, "77", "p", &own).replace("'{2}'", "'{1}'"));
    assert_eq!(ended, 1);
}

#[test]
fn with_leasing_off_a_worker_settles_only_with_its_own_token() {
    let cluster = idle_cluster(&["outbox.leasing = off"]);
    make_courier(&cluster);
    cluster.draw_seqs(4);
    cluster.exec(
        DB,
        "select outbox_enqueue(n, 'k' || n) from generate_series(1, 4) n;
         select outbox_internal.claim_unleased('default', -5, 3600, 2, 1000000)",
    );
    let mut client = courier(&cluster);
    let me = begin(&mut client, "x");
    let own_token: i64 = client.value("select token from outbox_internal.work_begin('x')");
    let tid: String = cluster.query_one(DB, "select ctid::text from outbox where seq = 2");
    for token in ["-5", "null"] {
        let refused = code(&mut client, &settle(&me, 0, token, "p", &tid));
        assert_eq!(refused, SqlState::INSUFFICIENT_PRIVILEGE, "{token}");
    }
    let as_if_leased: i32 = client.value(&settle(&me, 0, "5", "p", &tid));
    assert_eq!(as_if_leased, 0);
    let row = client
        .query_one(
            "select c.seq, c.partition, c.claim_token, c.tid::text from outbox_internal.work_claim_unleased('default', $1, 10, 100, 1000000) c
             where remark is null order by seq limit 1",
            &[&own_token],
        )
        .expect("a claim");
    let (seq, partition, token, own): (i64, i16, i64, String) = (row.get(0), row.get(1), row.get(2), row.get(3));
    assert!(token < 0 && token == own_token);
    let of_another = "select * from outbox_internal.work_claim_unleased('default', -5, 10, 100, 1000000)";
    assert_eq!(code(&mut client, of_another), SqlState::INSUFFICIENT_PRIVILEGE);
    let ended = settle(&me, partition, &token.to_string(), "p", &own).replace("'{2}'", &format!("'{{{seq}}}'"));
    assert_eq!(client.value::<i32>(&ended), 1);
}

#[test]
fn invalid_calls_are_refused_and_lose_nothing() {
    let (cluster, mut client) = session();
    cluster.draw_seqs(1);
    cluster.exec(DB, "select outbox_enqueue(1, 'k', partition_key => 'p00')");
    let me = begin(&mut client, "x");
    client.run(&format!(
        "select outbox_internal.heartbeat('{me}', 1, 10);
         select outbox_internal.work_lease('{{}}', '{{}}', '{{}}', '{{}}', '{{0}}')"
    ));
    let epoch: i64 = client.value("select lease_epoch from outbox_internal.leases() where partition = 0");
    let claim = format!(
        "select tid::text from outbox_internal.claim('{me}', 'default', '{{0}}', '{{{epoch}}}', '{{10}}', '{{0}}', 1000000)"
    );
    let tid: String = client.value(&claim);
    let settle = |tids: &str, actions: &str, delays: &str, reasons: &str| {
        format!(
            "select outbox_internal.work_settle('{me}', {tids}, '{{1}}', '{{default}}', '{{0}}', '{{{epoch}}}', {actions}, {delays}, {reasons}, '{{failed}}', '{{}}')"
        )
    };
    let tids = format!("'{{\"{tid}\"}}'");
    for (call, expected) in [
        (
            settle(&tids, "'{z}'", "'{0}'", "'{why}'"),
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (
            settle(&tids, "'{NULL}'", "'{0}'", "'{why}'"),
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (
            settle(&tids, "'{r}'", "'{NULL}'", "'{why}'"),
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (
            settle(&tids, "'{r}'", "'{-1000000000001}'", "'{why}'"),
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (
            settle(&tids, "'{d}'", "'{0}'", "'{NULL}'"),
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (
            settle(&tids, "'{d}'", "'{0}'", "'{why}'").replace("{failed}", "{NULL}"),
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (
            settle(&tids, "'{d}'", "'{0}'", "'{why}'").replace("{failed}", "{other}"),
            SqlState::INVALID_PARAMETER_VALUE,
        ),
        (
            settle(&tids, "'{d}'", "'{0}'", "'{why}'").replace("{failed}", "{}"),
            SqlState::ARRAY_SUBSCRIPT_ERROR,
        ),
        (
            settle("'{}'", "'{p}'", "'{0}'", "'{why}'"),
            SqlState::ARRAY_SUBSCRIPT_ERROR,
        ),
        (
            settle(&tids, "'{p,p}'", "'{0}'", "'{why}'"),
            SqlState::ARRAY_SUBSCRIPT_ERROR,
        ),
        (
            settle(&tids, "null", "'{0}'", "'{why}'"),
            SqlState::ARRAY_SUBSCRIPT_ERROR,
        ),
        (
            settle(&tids, "'{p}'", "'{0}'", "'{why}'").replace("{default}", "{NULL}"),
            SqlState::INVALID_PARAMETER_VALUE,
        ),
    ] {
        assert_eq!(code(&mut client, &call), expected, "{call}");
    }
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 1);
    let own = settle(&tids, "'{f}'", "'{NULL}'", "'{NULL}'");
    assert_eq!(client.value::<i32>(&own), 1);
}

#[test]
fn the_entry_of_a_worker_is_freed_however_its_session_ends() {
    let (cluster, mut client) = session();
    let me = begin(&mut client, "x");
    client.run(&format!("select outbox_internal.heartbeat('{me}', 1, 10)"));
    let pid: i32 = client.value("select pg_backend_pid()");
    // A statement that needs the database without workers waits for the worker to leave, and then fails with an error.
    let error = cluster
        .connect(DB)
        .batch_execute("select outbox_configure(partition_count => 4)")
        .expect_err("a worker that does not leave");
    assert_eq!(error.code(), Some(&SqlState::OBJECT_IN_USE), "{error:?}");
    cluster.exec(DB, &format!("select pg_terminate_backend({pid}, 10000)"));
    cluster.exec(DB, "select outbox_configure(partition_count => 4)");
}
