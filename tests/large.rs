//! The cost of large messages. Each is read once, with any number of waiting messages. No statement uses a temporary
//! file. The memory of a worker is bounded. Measured in blocks, rows and bytes, never in time, on a real Postgres and a
//! real RabbitMQ.

use serde_json::json;
use support::{Broker, Cluster};
use support::{
    DB, exchange_and_queue_with, outbox_cluster_with, pause, quiet_cluster_with, wait_drained, wait_published,
    wait_true,
};

/// A body of 1 MB as text. It compresses well, so the tables stay small and only its copies are large.
const BODY: &str = "jsonb_build_object('text', repeat('x', 1000000))";
/// The limit that docs/operate/sizes.md states.
const MEMORY_MIB_MAX: u64 = 256;
/// Too little memory for a sort or hash of large messages, which would spill to a temporary file.
const LITTLE_MEMORY: &str = "work_mem = '64kB'";

/// An exchange whose only queue keeps one message, so that the broker need not keep them all.
fn exchange(broker: &Broker) -> String {
    exchange_and_queue_with(broker, json!({"x-max-length": 1})).0
}

fn cluster(conf: &[&str]) -> Cluster {
    let broker = Broker::shared();
    let conf: Vec<&str> = [LITTLE_MEMORY].iter().chain(conf).copied().collect();
    outbox_cluster_with(broker, &exchange(broker), &conf)
}

/// Publishes `count` messages, each with a different key.
fn publish(cluster: &Cluster, count: i32) {
    let sql = format!("select count(outbox_publish('T', {BODY}, 'o', i::text)) from generate_series(1, {count}) i");
    cluster.query_one::<i64>(DB, &sql);
}

/// Counters of the cumulative statistics so far.
#[derive(Clone, Copy, Debug)]
struct Work {
    /// Blocks of the tables that a claim reads, with their indexes and TOAST tables.
    blocks: i64,
    /// Updated rows of outbox: messages that were claimed or released.
    changed: i64,
    /// Deleted rows of outbox: messages that were settled for good.
    ended: i64,
}

fn work(cluster: &Cluster) -> Work {
    let row = cluster
        .connect(DB)
        .query_one(
            "select (select sum(coalesce(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit, 0)
                             + coalesce(toast_blks_read + toast_blks_hit + tidx_blks_read + tidx_blks_hit, 0))::bigint
                     from pg_statio_user_tables where relname in ('outbox', 'outbox_events')),
                    n_tup_upd, n_tup_del from pg_stat_user_tables where relname = 'outbox'",
            &[],
        )
        .expect("statistics");
    Work {
        blocks: row.get(0),
        changed: row.get(1),
        ended: row.get(2),
    }
}

/// The work of the worker to deliver all messages that `make` stores. The worker is paused until they are stored.
fn work_of_a_drain(cluster: &Cluster, count: i32, make: impl Fn(i32)) -> Work {
    pause(cluster);
    make(count);
    // A session reports its statistics at its end.
    let settled =
        "select count(*) = 0 from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()";
    wait_true(cluster, "the session to end", settled);
    let before = work(cluster);
    cluster.set_conf("outbox.enabled", "on");
    wait_drained(cluster);
    let reported = format!(
        "select n_tup_del >= {} from pg_stat_user_tables where relname = 'outbox'",
        before.ended + i64::from(count)
    );
    wait_true(cluster, "the statistics of the worker", &reported);
    let after = work(cluster);
    Work {
        blocks: after.blocks - before.blocks,
        changed: after.changed - before.changed,
        ended: after.ended - before.ended,
    }
}

fn assert_no_temporary_file(cluster: &Cluster) {
    let temporary = "select temp_files from pg_stat_database where datname = current_database()";
    assert_eq!(cluster.query_one::<i64>(DB, temporary), 0, "temporary files");
}

/// The peak memory of the worker, in MiB.
fn peak_of_worker_mib(cluster: &Cluster) -> u64 {
    peak_mib(cluster.query_one(DB, "select pid from outbox_worker_status where alive"))
}

/// The peak memory of a process of the server, in MiB.
fn peak_mib(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the status of a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).expect("VmHWM");
    kib.parse::<u64>().expect("a number") / 1024
}

#[test]
fn a_large_message_costs_the_same_with_few_and_many_waiting() {
    let cluster = cluster(&["shared_buffers = '16MB'", "autovacuum = off"]);
    let few = work_of_a_drain(&cluster, 40, |count| publish(&cluster, count));
    let many = work_of_a_drain(&cluster, 200, |count| publish(&cluster, count));
    let [few_each, many_each] = [few, many].map(|work| work.blocks as f64 / work.ended as f64);
    assert!(
        many_each <= 2.0 * few_each,
        "with 40 messages each costs {few_each:.1} blocks, with 200 messages {many_each:.1}"
    );
    assert_no_temporary_file(&cluster);
    let peak = peak_of_worker_mib(&cluster);
    assert!(peak <= MEMORY_MIB_MAX, "the worker used {peak} MiB");
}

/// The size of the next rows is not that of those before.
#[test]
fn a_statement_over_captured_rows_of_very_different_sizes_takes_bounded_memory() {
    let cluster = support::idle_cluster(&["shared_buffers = '16MB'"]);
    let mut client = cluster.connect(DB);
    client
        .batch_execute(
            "create table item (id int primary key, t text);
             insert into item select g, case when g <= 700 then 'x' else repeat('x', 4000000) end from generate_series(1, 740) g;
             select outbox_capture('item')",
        )
        .expect("the rows");
    let row = client.query_one("select pg_backend_pid()", &[]).expect("the process");
    client
        .batch_execute("update item set t = t || 'y'")
        .expect("the update");
    let peak = peak_mib(row.get(0));
    assert!(peak <= MEMORY_MIB_MAX, "the session used {peak} MiB");
    let events: i64 = cluster.query_one(DB, "select count(*) from outbox_events");
    assert_eq!(events, 740);
}

/// The user's expression for the key may be of any size. It is refused anyway.
#[test]
fn keys_of_attached_rows_take_bounded_memory_whatever_their_size() {
    for is_source in [false, true] {
        let cluster = support::idle_cluster(&["shared_buffers = '16MB'"]);
        let mut client = cluster.connect(DB);
        let key = "repeat('k', 4000000)";
        client
            .batch_execute(&match is_source {
                false => format!("create table journal (seq bigint primary key); select outbox_attach('journal', key => $${key}$$)"),
                true => format!(
                    "create table journal (seq bigint primary key); create role shop; alter table journal owner to shop;
                     select outbox_source_set('journal', seq => 'seq', type => $$'T'$$, created_at => 'now()', key => $${key}$$);
                     select outbox_attach('journal')"
                ),
            })
            .expect("the table");
        let row = client.query_one("select pg_backend_pid()", &[]).expect("the process");
        let error = client
            .batch_execute("insert into journal select generate_series(1, 200)")
            .expect_err("keys that are too long");
        let peak = peak_mib(row.get(0));
        assert!(
            peak <= MEMORY_MIB_MAX,
            "the session used {peak} MiB, source: {is_source}"
        );
        let error = error.as_db_error().expect("an error of the server");
        assert_eq!(error.code().code(), "54000", "{error:?}");
        assert!(
            error
                .message()
                .ends_with("is more than 255 bytes long; the limit is 255"),
            "{error:?}"
        );
    }
}

#[test]
fn messages_behind_a_dead_letter_return_without_a_temporary_file() {
    let cluster = cluster(&[]);
    cluster.draw_seqs(999_999);
    cluster.exec(DB, "select outbox_enqueue(999999, key => 'o:1')"); // the event does not exist
    wait_true(
        &cluster,
        "the dead letter",
        "select exists (select from outbox_dead where blocks)",
    );
    cluster.exec(
        DB,
        &format!("select outbox_publish('T', {BODY}, 'o', '1') from generate_series(1, 100)"),
    );
    wait_true(
        &cluster,
        "all messages to wait",
        "select count(*) = 100 from outbox_waiting where state = 'g'",
    );
    cluster.exec(DB, "select outbox_discard(999999)");
    wait_drained(&cluster);
    wait_published(&cluster, 100);
    assert_no_temporary_file(&cluster);
}

/// Configures the user's table `event` as the source of events.
fn set_source(cluster: &Cluster) {
    cluster.exec(
        DB,
        "create table event (id bigint generated by default as identity primary key, kind text not null default 'T',
                             at timestamptz not null default now(), body jsonb);
         create role shop; alter table event owner to shop;
         select outbox_source_set('event', seq => 'id', type => 'kind', created_at => 'at', payload => 'body')",
    );
}

#[test]
fn a_large_event_of_a_source_is_claimed_once_with_many_waiting() {
    let cluster = cluster(&[]);
    set_source(&cluster);
    let drain = work_of_a_drain(&cluster, 240, |count| {
        cluster.exec(
            DB,
            &format!(
                "with new as (insert into event (body) select {BODY} from generate_series(1, {count}) returning id)
                 select outbox_enqueue_many(array_agg(id)) from new"
            ),
        );
    });
    assert_claimed_once(drain);
    assert_no_temporary_file(&cluster);
}

/// Makes a relay fetch and mark all messages, with fetches that ask for more than exist. Returns the largest number of
/// messages in a fetch, and the work of all fetches.
fn work_of_a_relay(cluster: &Cluster, count: i32, make: impl Fn(i32)) -> (i64, Work) {
    make(count);
    let sessions_ended =
        "select count(*) = 0 from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()";
    wait_true(cluster, "the session to end", sessions_ended);
    let before = work(cluster);
    let mut relay = cluster.connect(DB);
    // length() decompresses each body, as for a client.
    let fetch =
        "select seq, claim_token, length(payload::text) from outbox_fetch_unpublished(10000, claim_ttl => '1 h')";
    let mark = "select bool_and(outbox_mark_published(s, t)) from unnest($1::int8[], $2::int8[]) m (s, t)";
    let mut largest = 0;
    loop {
        let rows = relay.query(fetch, &[]).expect("fetch");
        let (seqs, tokens): (Vec<i64>, Vec<i64>) = rows
            .iter()
            .map(|row| (row.get::<_, i64>(0), row.get::<_, i64>(1)))
            .unzip();
        if seqs.is_empty() {
            break;
        }
        let marked = relay.query_one(mark, &[&seqs, &tokens]).expect("mark");
        assert!(marked.get::<_, bool>(0));
        largest = largest.max(seqs.len() as i64);
    }
    drop(relay);
    wait_true(cluster, "the session of the relay to end", sessions_ended);
    let after = work(cluster);
    let all = Work {
        blocks: after.blocks - before.blocks,
        changed: after.changed - before.changed,
        ended: after.ended - before.ended,
    };
    assert_eq!(all.ended, i64::from(count));
    (largest, all)
}

#[test]
fn a_claim_ends_with_the_message_that_reaches_its_limit_of_bytes() {
    let cluster = quiet_cluster_with(&["outbox.partition_count = 1"]);
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'item', 'k') from generate_series(1, 10);
         select outbox_internal.lease_take('w', '{0}', 3600)",
    );
    let limit = "(select 3 * max(body_bytes) from outbox_events)";
    let epoch = "(select lease_epoch from outbox_partitions)";
    let moves_behind = "with gone as (delete from outbox returning *)
        insert into outbox_waiting (seq, enqueued_at, attempts, partition, crashes, replayed, state, destination, key)
        select seq, enqueued_at, attempts, partition, crashes, replayed, 'g', destination, key from gone";
    for (before, claim) in [
        (
            "select",
            format!("claim('w', 'default', '{{0}}', array[{epoch}], '{{100}}', '{{0}}', {limit})"),
        ),
        ("select", format!("claim_unleased('default', -1, 3600, 100, {limit})")),
        (
            moves_behind,
            format!("claim_waiting('w', 'default', 0::smallint, 'item:k', array[{epoch}], 100, 100, {limit})"),
        ),
    ] {
        let mut client = cluster.connect(DB);
        let mut rolled_back = client.transaction().expect("begin");
        rolled_back.batch_execute(before).expect(before);
        let sql = format!("select count(seq), string_agg(remark, ' ') from outbox_internal.{claim}");
        let row = rolled_back.query_one(&sql, &[]).expect(&sql);
        assert_eq!((row.get(0), row.get(1)), (3_i64, Some("cut")), "{claim}");
    }
}

/// 32 MiB of bodies, and the message that exceeds that.
const FETCHED_MAX: i64 = 34;

#[test]
fn a_fetch_of_a_relay_returns_no_more_bodies_than_a_claim_of_a_worker() {
    let cluster = cluster(&["autovacuum = off"]);
    cluster.exec(DB, "select outbox_pause('default')");
    let (_, few) = work_of_a_relay(&cluster, 40, |count| publish(&cluster, count));
    let (largest, many) = work_of_a_relay(&cluster, 200, |count| publish(&cluster, count));
    assert!(largest <= FETCHED_MAX, "{largest} messages of 1 MB in one fetch");
    let [few_each, many_each] = [few, many].map(|work| work.blocks as f64 / work.ended as f64);
    assert!(
        many_each <= 2.0 * few_each,
        "with 40 messages each costs {few_each:.1} blocks, with 200 messages {many_each:.1}"
    );
    assert_claimed_once(many);
    assert_no_temporary_file(&cluster);
}

#[test]
fn a_fetch_of_a_relay_returns_a_bounded_number_of_source_events() {
    let cluster = cluster(&[]);
    set_source(&cluster);
    cluster.exec(DB, "select outbox_pause('default')");
    let (largest, work) = work_of_a_relay(&cluster, 240, |count| {
        cluster.exec(
            DB,
            &format!(
                "with new as (insert into event (body) select {BODY} from generate_series(1, {count}) returning id)
                 select outbox_enqueue_many(array_agg(id)) from new"
            ),
        );
    });
    assert!(largest <= 2 * FETCHED_MAX, "{largest} messages of 1 MB in one fetch");
    assert_claimed_once(work);
    assert_no_temporary_file(&cluster);
}

/// A reader that decides by the size of the rows so far how many it reads next has read all large ones at once.
#[test]
fn events_of_a_source_are_read_up_to_a_limit_of_bytes_however_small_the_first_ones_are() {
    let cluster = cluster(&[]);
    set_source(&cluster);
    cluster.exec(
        DB,
        &format!(
            "insert into event (body) select '{{}}' from generate_series(1, 30);
             insert into event (body) select {BODY} from generate_series(1, 30)"
        ),
    );
    let read = "select count(*) from unnest(outbox_internal.source_events(array(select generate_series(1, 60)::bigint), 2000000, false)) t
                where length(t) > 900000";
    let large: i64 = cluster.query_one(DB, read);
    assert!(
        (1..=3).contains(&large),
        "{large} events of 1 MB where 2 MB was the limit"
    );
}

#[test]
fn a_fetch_of_a_relay_takes_no_more_memory_for_events_that_grow_as_jsonb() {
    let cluster = cluster(&["shared_buffers = '16MB'"]);
    // As jsonb a list of small numbers takes six times as much as its text.
    cluster.exec(
        DB,
        "create table event (id bigint generated by default as identity primary key, kind text not null default 'T',
                             at timestamptz not null default now(), body json);
         create role shop; alter table event owner to shop;
         select outbox_source_set('event', seq => 'id', type => 'kind', created_at => 'at', payload => 'body');
         select outbox_pause('default');
         with new as (insert into event (body) select ('[' || repeat('1,', 500000) || '1]')::json
                      from generate_series(1, 60) returning id)
         select outbox_enqueue_many(array_agg(id)) from new",
    );
    let mut relay = cluster.connect(DB);
    let pid = relay.query_one("select pg_backend_pid()", &[]).expect("pid").get(0);
    let fetch =
        "select count(*), sum(pg_column_size(payload)) from outbox_fetch_unpublished(10000, claim_ttl => '1 h')";
    let mut fetched = 0;
    for _ in 0..3 {
        let row = relay.query_one(fetch, &[]).expect("fetch");
        let (count, bytes): (i64, i64) = (row.get(0), row.get(1));
        assert!((1..=40 << 20).contains(&bytes), "{bytes} bytes in a fetch of {count}");
        fetched += count;
    }
    let claimed: i64 = cluster.query_one(DB, "select count(*) from outbox where claim_until > clock_timestamp()");
    assert_eq!(claimed, fetched, "what is not returned is claimed by nobody");
    let peak = peak_mib(pid);
    assert!(peak <= MEMORY_MIB_MAX, "the session of the relay used {peak} MiB");
    assert_no_temporary_file(&cluster);
}

/// Asserts that a claim without knowledge of the message sizes releases some messages again, but not most.
fn assert_claimed_once(drain: Work) {
    let changes = drain.changed as f64 / drain.ended as f64;
    assert!(
        changes <= 4.0,
        "each message is updated {changes:.1} times before it is settled: {drain:?}"
    );
}
