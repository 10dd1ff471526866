//! Runs every function while the overloads exist: by workers, by the superuser, by outboxctl.

use postgres::error::SqlState;
use support::{Receiver, Reply};
use support::{beside_maintenance, unconnected_cluster};

use super::*;

/// A server with two destinations: a receiver that accepts everything, and one that accepts nothing.
fn cluster(receiver: &Receiver, conf: &[&str]) -> Cluster {
    let lines = [
        "outbox.http_allow = '127.0.0.1'",
        "outbox.max_attempts = 1",
        "track_functions = all",
    ];
    let cluster = unconnected_cluster("", "nowhere", &[&lines[..], conf].concat());
    cluster.exec(
        DB,
        &format!(
            "create server \"default\" foreign data wrapper outbox_http options (url '{}');
             create server sour foreign data wrapper outbox_http
               options (url '{}', max_attempts '1', dead_letters_to 'default')",
            receiver.url("/sweet"),
            receiver.url("/sour")
        ),
    );
    cluster
}

fn receiver() -> Receiver {
    Receiver::start(|request| Reply::status(if request.path.contains("sour") { 400 } else { 200 }))
}

fn publish(cluster: &Cluster, id: &str, more: &[(&str, &str)]) {
    cluster.exec(DB, &publication(cluster, id, more));
}

fn publication(cluster: &Cluster, id: &str, more: &[(&str, &str)]) -> String {
    let id = format!("'{id}'");
    let given = [
        ("type", "'T'"),
        ("payload", "'{}'"),
        ("aggregate_type", "'a'"),
        ("aggregate_id", &*id),
    ];
    exact(cluster, "outbox_publish", &[&given[..], more].concat())
}

fn wait_for_ended(cluster: &Cluster) {
    wait_unharmed(
        cluster,
        "all to be delivered",
        "select not exists (select from outbox) and not exists (select from outbox_waiting where due_at < now() + interval '1 hour')",
    );
}

#[test]
fn no_overload_is_called_by_workers_or_by_commands_of_users() {
    let receiver = receiver();
    let cluster = cluster(&receiver, &["outbox.workers = 1"]);
    make_overloads(&cluster);
    cluster.restart(); // workers start, and maintenance runs first

    everything(&cluster);
    by_outboxctl::commands(&cluster);
    by_outboxctl::work(&cluster, &deliver);
    // Without leases, workers claim with other functions.
    call(
        &cluster,
        "outbox_configure",
        &[("leasing", "false"), ("partition_count", "4")],
    );
    everything(&cluster);
    by_outboxctl::work(&cluster, &deliver);
    // Pending messages get new partitions, and the views show them.
    call(&cluster, "outbox_pause", &[]);
    wait_unharmed(
        &cluster,
        "the worker to pause",
        "select exists (select from outbox_connections where destination = 'default' and state = 'paused')",
    );
    publish(&cluster, "paused", &[]);
    read(&cluster);
    call(&cluster, "outbox_configure", &[("leasing", "true")]);
    call(&cluster, "outbox_resume", &[]);
    // Workers check leases that are over by the wall clock against another clock.
    wait_unharmed(
        &cluster,
        "the partitions to be owned",
        "select bool_and(lease_owner is not null and lease_until > now()) from outbox_partitions",
    );
    cluster.exec(DB, "update outbox_partitions set lease_until = now() - interval '1 s'");
    wait_unharmed(
        &cluster,
        "the leases to be renewed",
        "select bool_and(lease_until > now()) from outbox_partitions",
    );
    wait_for_ended(&cluster);
    // outbox_health calls these only for a problem.
    for (name, given) in [
        ("worded", &[("code", "''"), ("args", "'{}'::text[]")][..]),
        ("facts", &[("destination", "'default'")]),
        ("message_rows", &[("of_seq", "1")]),
        ("obstacles", &[("messages", "'[]'")]),
        (
            "search",
            &[
                ("statuses", "'{ready,dead,published}'"),
                ("criteria", "'{\"word\": \"T\", \"type\": \"T\"}'"),
            ],
        ),
        ("restore_function", &[("name", "'outbox_retry'")]),
        // A worker calls it if more than four destinations share a rewind.
        (
            "lanes_with_messages",
            &[
                ("destinations", "'{default}'"),
                ("partitions", "'{1}'"),
                ("seqs", "'{1}'"),
            ],
        ),
        // These are called only with a source.
        ("source_event", &[("seq", "1")]),
        ("source_row_of", &[("texts", "'{1,failed,no}'")]),
    ] {
        call(&cluster, &format!("outbox_internal.{name}"), given);
    }
    call(&cluster, "outbox_why", &[("seq", "1")]);
    // A worker outside calls it only with a source.
    cluster.exec(
        DB,
        "select outbox_internal.work_begin('reader'); select outbox_internal.work_events('server-1', '{}', 0)",
    );
    assert_unharmed(&cluster);
    // A function that is not called proves nothing. The exceptions: the server itself calls them, or their bodies are
    // inlined into another statement. `locate` runs only after rows have moved,
    // `refuse_virtual` on Postgres 18. `remove_initial_privileges` is for the scripts of the extension.
    let beside =
        "{refuse_virtual,outbox_amqp_validator,outbox_http_validator,outbox_partition_label,outbox_trim_inbox,attach_name,claim,
                   claim_unleased,has_ended,lease_is_live,locate,event_shown,partition_label,
                   remove_initial_privileges,crash_weight}";
    call(
        &cluster,
        "outbox_internal.locate",
        &[
            ("seqs", "'{1}'"),
            ("destinations", "'{default}'"),
            ("partitions", "'{1}'"),
        ],
    );
    let uncalled = format!(
        "select coalesce(string_agg(p.proname, ' ' order by p.proname), '') from pg_proc p
         join pg_depend d on d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e'
         join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
         left join pg_stat_user_functions f on f.funcid = p.oid
         where p.pronargs > 0 and coalesce(f.calls, 0) = 0 and p.proname <> all ('{beside}')"
    );
    cluster.stop(support::StopMode::Fast); // sessions report their calls when they end
    cluster.start_again();
    assert_eq!(cluster.query_one::<String>(DB, &uncalled), "");
}

/// Delivers messages with every kind of end, and waits until all have ended.
fn deliver(cluster: &Cluster) {
    for n in 0..3 {
        publish(cluster, &format!("w{n}"), &[]);
        publish(cluster, "fails outside", &[("destination", "'sour'")]);
    }
    // Late enough that it still waits when it is written, on any machine.
    publish(
        cluster,
        "soon",
        &[("available_at", "clock_timestamp() + interval '1 s'")],
    );
    wait_for_ended(cluster);
    wait_unharmed(
        cluster,
        "a dead letter",
        "select exists (select from outbox_dead where key = 'a:fails outside')",
    );
    call(
        cluster,
        "outbox_discard_where",
        &[("key", "'a:fails outside'"), ("dry_run", "false")],
    );
    call(
        cluster,
        "outbox_discard_where",
        &[("key", "'a:fails outside'"), ("dry_run", "false")],
    );
    wait_for_ended(cluster);
}

fn everything(cluster: &Cluster) {
    let run = |name: &str, given: &[(&str, &str)]| call(cluster, name, given);
    for n in 0..3 {
        publish(cluster, &format!("k{n}"), &[]);
        publish(cluster, "same", &[("headers", "'{\"h\": 1}'")]);
        publish(cluster, "fails", &[("destination", "'sour'")]);
    }
    publish(cluster, "later", &[("available_at", "now() + interval '1 day'")]);
    // Late enough that it still waits when it is written, on any machine.
    publish(
        cluster,
        "soon",
        &[("available_at", "clock_timestamp() + interval '1 s'")],
    );
    let soon = [("expires_at", "clock_timestamp() + interval '1 ms'")];
    let expires = publication(cluster, "old", &soon);
    wait_until("a message that expires before a worker sends it", LONG, || {
        match cluster.connect(DB).batch_execute(&expires) {
            // It is refused if that time has passed already.
            Err(error) if error.code() == Some(&SqlState::INVALID_PARAMETER_VALUE) => false,
            done => done.is_ok() || panic!("{expires}: {done:?}"),
        }
    });
    run(
        "outbox_store",
        &[("body", "'no json'"), ("headers", "'{\"type\": \"X\"}'")],
    );
    cluster.exec(
        DB,
        &format!(
            "do $$ declare s bigint; begin
               insert into outbox_events (id, type, payload, aggregate_id) values (gen_random_uuid(), 'T', '{{}}', 'x') returning seq into s;
               perform 1 from ({}) q; end $$",
            exact(cluster, "outbox_enqueue", &[("seq", "s")])
        ),
    );
    wait_for_ended(cluster);
    let seq: i64 = cluster.query_one(DB, "select min(seq) from outbox_history");
    let seq = seq.to_string();
    run("outbox_wait", &[("seq", &seq)]);
    // Dead letters are retried, and become dead letters again.
    wait_unharmed(cluster, "dead letters", "select count(*) >= 2 from outbox_dead");
    let dead: i64 = cluster.query_one(DB, "select min(seq) from outbox_dead where destination = 'sour'");
    let dead = dead.to_string();
    run(
        "outbox_retry",
        &[("seq", &dead), ("destination", "'sour'"), ("reason", "'r'")],
    );
    wait_for_ended(cluster);
    run(
        "outbox_retry_where",
        &[("destination", "'sour'"), ("type", "'T'"), ("dry_run", "false")],
    );
    wait_for_ended(cluster);
    run("outbox_discard", &[("seq", &dead), ("destination", "'sour'")]);
    run("outbox_discard_where", &[("seq_from", "1"), ("dry_run", "true")]);
    run("outbox_discard_where", &[("seq_from", "1"), ("dry_run", "false")]);
    run(
        "outbox_replay",
        &[("destination", "null"), ("key", "'a:k1'"), ("dry_run", "false")],
    );
    run(
        "outbox_replay",
        &[
            ("source_destination", "'default'"),
            ("type", "'T'"),
            ("dry_run", "false"),
        ],
    );
    wait_for_ended(cluster);
    // Manual operations and relays.
    run("outbox_pause", &[("destination", "'default'"), ("reason", "'r'")]);
    publish(cluster, "by relay", &[]);
    publish(cluster, "by relay too", &[]);
    for (mark, more) in [
        ("outbox_mark_published", None),
        ("outbox_mark_failed", Some(("error", "'e'"))),
    ] {
        let fetched = cluster
            .connect(DB)
            .query_one(&exact(cluster, "outbox_fetch_unpublished", &[("max_rows", "1")]), &[]);
        let fetched = match fetched {
            Ok(row) => row,
            // Without leases the workers may have claimed it just before they noticed the pause.
            Err(_) => continue,
        };
        let (seq, token): (i64, i64) = (fetched.get("seq"), fetched.get("claim_token"));
        let (seq, token) = (seq.to_string(), token.to_string());
        let mut given = vec![("seq", &*seq), ("claim_token", &*token)];
        given.extend(more);
        run(mark, &given);
    }
    run("outbox_resume", &[("destination", "'default'")]);
    wait_for_ended(cluster);
    run("outbox_run_pass", &[]);
    publish(cluster, "by hand", &[]);
    run("outbox_relay", &[("timeout", "'10 s'")]);
    run("outbox_drain", &[]);
    run("outbox_check", &[("destination", "'default'")]);
    run(
        "outbox_purge",
        &[("aggregate_type", "'a'"), ("aggregate_id", "'k0'"), ("dry_run", "true")],
    );
    run(
        "outbox_purge",
        &[
            ("aggregate_type", "'a'"),
            ("aggregate_id", "'k0'"),
            ("dry_run", "false"),
        ],
    );
    cluster.exec(DB, "update outbox_identity set restored = true");
    run("outbox_adopt", &[]);
    run(
        "outbox_inbox_assign",
        &[("consumer", "'c'"), ("owner", "'outbox_consumer'")],
    );
    run("outbox_inbox_receive", &[("consumer", "'c'"), ("message_id", "'m'")]);
    run("outbox_inbox_forget", &[("consumer", "'c'")]);
    run("outbox_partition_of", &[("key", "'k'")]);
    run("outbox_crc32", &[("key", "'k'")]);
    // Maintenance runs these once a minute, and perhaps now.
    let run_beside = |name: &str, given: &[(&str, &str)]| {
        let sql = exact(cluster, name, given);
        beside_maintenance(|| cluster.connect(DB).batch_execute(&sql));
    };
    for trim in [
        "outbox_trim_inbox",
        "outbox_internal.expire_dead",
        "outbox_internal.drop_partitions",
    ] {
        run_beside(trim, &[("retention_s", "0"), ("batch", "10")]);
    }
    for trim in ["outbox_internal.trim_events", "outbox_internal.trim_attempts"] {
        run(trim, &[("after", "0"), ("retention_s", "0"), ("batch", "1000")]);
    }
    run_beside("outbox_internal.make_partitions", &[("retention_s", "86400")]);
    run(
        "outbox_internal.expire",
        &[("first_block", "0"), ("blocks", "100"), ("batch", "100")],
    );
    capture(cluster);
    source(cluster);
    partitioner(cluster);
    read(cluster);
}

/// Events by triggers on tables.
fn capture(cluster: &Cluster) {
    cluster.exec(
        DB,
        "create table orders (id integer primary key, seq bigint default 7, note text)",
    );
    call(
        cluster,
        "outbox_capture",
        &[("relation", "'orders'"), ("aggregate_id", "'id'")],
    );
    cluster.exec(
        DB,
        "insert into orders values (1), (2); update orders set note = 'x'; delete from orders",
    );
    call(cluster, "outbox_uncapture", &[("relation", "'orders'")]);
    call(
        cluster,
        "outbox_attach",
        &[
            ("relation", "'orders'"),
            ("when_sql", "'note is not null'"),
            ("key", "'note'"),
        ],
    );
    cluster.draw_seqs(1_000_000);
    cluster.exec(DB, "insert into orders values (3, 1000000, 'k')");
    call(cluster, "outbox_detach", &[("relation", "'orders'")]);
    call(
        cluster,
        "outbox_subscribe",
        &[
            ("destination", "'default'"),
            ("types", "'{T}'"),
            ("aggregate_types", "'{order}'"),
            ("headers", "'{\"a\": 1}'"),
            ("when_sql", "'actor is null'"),
        ],
    );
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'order', '1', headers => '{\"a\": 1}')",
    );
    call(cluster, "outbox_unsubscribe", &[("destination", "'default'")]);
    cluster.exec(DB, "drop table orders");
    wait_for_ended(cluster);
}

/// Events in a table of the user.
fn source(cluster: &Cluster) {
    call(
        cluster,
        "outbox_retry_where",
        &[("seq_from", "1"), ("dry_run", "false")],
    );
    cluster.exec(DB, "delete from outbox_waiting"); // a message scheduled for tomorrow would prevent the change
    wait_for_ended(cluster);
    call(
        cluster,
        "outbox_discard_where",
        &[("seq_from", "1"), ("dry_run", "false")],
    );
    cluster.exec(
        DB,
        "create role keeper; create table journal (seq bigint primary key, kind text, at timestamptz default now());
         alter table journal owner to keeper; insert into journal values (2000001, 'K'), (2000002, 'K'), (2000003, 'K')",
    );
    call(
        cluster,
        "outbox_source_set",
        &[
            ("relation", "'journal'"),
            ("seq", "'seq'"),
            ("type", "'kind'"),
            ("created_at", "'at'"),
        ],
    );
    call(cluster, "outbox_enqueue_many", &[("seqs", "'{2000001,2000002}'")]);
    call(
        cluster,
        "outbox_enqueue",
        &[("seq", "2000003"), ("destination", "'sour'")],
    );
    wait_for_ended(cluster);
    wait_unharmed(
        cluster,
        "a dead letter",
        "select exists (select from outbox_dead where seq = 2000003)",
    );
    call(
        cluster,
        "outbox_discard_where",
        &[("type", "'K'"), ("dry_run", "false")],
    );
    call(cluster, "outbox_replay", &[("type", "'K'"), ("dry_run", "false")]);
    wait_for_ended(cluster);
    call(cluster, "outbox_pause", &[]);
    call(
        cluster,
        "outbox_replay",
        &[("seq_from", "2000001"), ("dry_run", "false")],
    );
    call(cluster, "outbox_fetch_unpublished", &[("claim_ttl", "'1 s'")]);
    wait_unharmed(
        cluster,
        "the claims to run out",
        "select not exists (select from outbox where claim_until > now())",
    );
    call(cluster, "outbox_resume", &[]);
    wait_for_ended(cluster);
    call(
        cluster,
        "outbox_discard_where",
        &[("seq_from", "1"), ("dry_run", "false")],
    );
    call(cluster, "outbox_source_reset", &[]);
    cluster.exec(DB, "drop table journal; drop role keeper");
}

fn partitioner(cluster: &Cluster) {
    cluster.exec(
        DB,
        "create role author; create schema shop; create function shop.first(key text, partition_count integer) returns integer
           language sql immutable return 0;
         alter function shop.first(text, integer) owner to author; grant usage on schema shop to author",
    );
    call(cluster, "outbox_configure", &[("partitioner", "'shop.first'")]);
    publish(cluster, "of the first", &[]);
    call(
        cluster,
        "outbox_replay",
        &[("key", "'a:of the first'"), ("dry_run", "false")],
    );
    call(cluster, "outbox_partition_of", &[("key", "'k'")]);
    call(cluster, "outbox_configure", &[("partitioner", "''")]);
    wait_for_ended(cluster);
    cluster.exec(DB, "drop schema shop cascade; drop role author");
}

/// Reads all views as the superuser.
fn read(cluster: &Cluster) {
    let views: Vec<String> = cluster.query_one(
        DB,
        "select array_agg(c.oid::regclass::text) from pg_class c
         join pg_depend d on d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e'
         join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox' where c.relkind = 'v'",
    );
    assert!(views.len() > 10, "{views:?}");
    for view in views {
        cluster.exec(DB, &format!("select * from {view}"));
    }
    assert_unharmed(cluster);
}
