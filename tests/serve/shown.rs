//! Tests of what the monitor shows: in a browser, scene by scene, and as HTML where a browser adds nothing.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::monitor::{Monitor, encoded};
use super::{MARKUP, quiet_cluster, stage, stage_with};
use support::clock::cluster_with_clock;
use support::obstacles::obstacles;
use support::{Broker, Cluster, Receiver, Reply, StopMode, wait_until};
use support::{DB, LONG, Stage, unconnected_cluster, wait_published, wait_true};

const PACKAGES: [&str; 2] = ["playwright==1.56.0", "axe-playwright-python==0.1.8"];

pub const BROWSER: &str = "/usr/bin/chromium";

/// Python with a driver for Debian's Chromium; installed at the first call.
fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/venv/serve");
        let (python, ready) = (dir.join("bin/python"), dir.join("ready"));
        let wanted = PACKAGES.join("\n");
        if std::fs::read_to_string(&ready).is_ok_and(|made| made == wanted) {
            return python;
        }
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&dir));
        run(Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
            .args(PACKAGES));
        std::fs::write(ready, wanted).expect("write target/venv/serve/ready");
        python
    })
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

/// Plays scenes of serve/browser.py: "pictures" for the docs, or everything that a user does.
fn play(cluster: &Cluster, scenes: &str) {
    play_on(&Monitor::start(cluster, &["--allow-actions"]), cluster, scenes);
}

pub fn play_on(monitor: &Monitor, cluster: &Cluster, scenes: &str) {
    let mut browser = Command::new(python());
    browser
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("serve/browser.py"))
        .args([scenes, &monitor.url()])
        .arg(cluster.installation().bin("psql"))
        .args(["--dbname", &cluster.conn_string(DB)]);
    run(&mut browser);
}

/// The names in the pictures.
const PICTURED: (&str, &str) = ("events", "orders");

/// Takes the pictures of three destinations without a problem. The monitor has read an hour: the clock of the server
/// passes it in a minute.
fn picture_healthy() {
    let broker = Broker::shared();
    broker.declare_exchange(PICTURED.0, "topic", true);
    let (cluster, clock) = cluster_with_clock(broker, PICTURED.0, &["outbox.workers = 2"]);
    add_destination(&cluster, "audit");
    add_destination(&cluster, "billing");
    let past_hour = MADE_UP.replace(
        "date_trunc('minute', now()) - n",
        "date_trunc('minute', now() + '65 min') - n",
    );
    cluster.exec(DB, &past_hour);
    let monitor = Monitor::start(&cluster, &["--allow-actions"]);
    for step in 0..=66 {
        clock.set(step * 55, step * 55); // with the time of a step less than a minute: none is left out
        let minute = "select to_char(clock_timestamp() at time zone 'UTC', 'HH24:MI')";
        wait_until("the monitor to read this minute", LONG, || {
            let shown = format!("class=\"when\">{}", cluster.query_one::<String>(DB, minute));
            monitor.page("/").contains(&shown)
        });
    }
    wait_true(
        &cluster,
        "three connections",
        "select count(*) = 3 and bool_and(state = 'connected') from outbox_destination_status",
    );
    wait_until("no problem", LONG, || !monitor.page("/").contains(" problem"));
    play_on(&monitor, &cluster, "healthy");
}

/// The same with problems: dead letters, and destination audit is paused.
fn troubled() -> Cluster {
    let cluster = stage_with("", PICTURED.0, PICTURED.1);
    add_destination(&cluster, "billing");
    wait_true(
        &cluster,
        "a connection",
        "select exists (select from outbox_destination_status where destination = 'billing' and state = 'connected')",
    );
    cluster.exec(DB, MADE_UP);
    cluster
}

fn add_destination(cluster: &Cluster, name: &str) {
    let (url, exchange) = (Broker::shared().url(), PICTURED.0);
    cluster.exec(
        DB,
        &format!("create server {name} foreign data wrapper outbox_amqp options (url '{url}', exchange '{exchange}')"),
    );
}

/// A day of history for pictures. All numbers come from one table, so they agree with each other, and with the dead
/// letters that the cluster really has: they failed in the last whole minute. Where there are some, what is pending is
/// real as well.
const MADE_UP: &str = "
    create table made_up as
    select d.destination, date_trunc('minute', now()) - n * interval '1 min' as minute,
           (d.base * (1 + 0.45 * sin(n / 9.0 + d.shift) + 0.1 * sin(n * 1.7 + d.shift)))::bigint as published,
           (case when n % 17 = d.shift::integer then d.base / 60 else 0 end)::bigint as retried,
           (select count(*) from outbox_dead x where n = 1 and x.destination = d.destination) as failed,
           (d.base * (0.02 + case d.shift when 2.0 then 1.5 * exp(-power((n - 38) / 5.0, 2)) else 0 end))::bigint as pending
    from (values ('default', 900, 0.0), ('billing', 260, 2.0), ('audit', 110, 4.0)) d (destination, base, shift),
         generate_series(0, 1440) n;
    create or replace view outbox_throughput as
    select minute, sum(published)::bigint as published, sum(retried)::bigint as retried, sum(failed)::bigint as failed,
           (4.8 + 0.9 * sin(extract(epoch from date_trunc('minute', now()) - minute)::float8 / 300))::float8 as p95_ms
    from made_up where minute > now() - interval '61 min' group by minute order by minute;
    create or replace view outbox_destination_throughput as
    select destination, minute as start, interval '1 min' as length, published, retried, failed
    from made_up where minute > now() - interval '61 min'
    union all
    select destination, date_bin('10 min', minute, '2000-01-01Z'), interval '10 min', sum(published)::bigint,
           sum(retried)::bigint, sum(failed)::bigint
    from made_up group by 1, 2;
    alter view outbox_destination_status rename to real_destination_status;
    create view outbox_destination_status as
    select r.destination, r.described_by, r.state, r.since, r.reason, r.detail,
           coalesce(r.oldest_pending_age, nullif(n.in_flight, 0) * interval '2 ms') as oldest_pending_age, coalesce(n.in_flight, 0) as in_flight,
           m.published as published_total, m.retried + m.failed as failed_total, r.dead_total, r.released_total, m.per_s as published_per_s,
           n.p50 as p50_ms, n.p50 * 2 as p95_ms, n.p50 * 3 as p99_ms, r.stats_reset,
           case when n.in_flight > 0 then
             (select p.pending from made_up p where p.destination = r.destination and p.minute = date_trunc('minute', clock_timestamp()))
           else r.pending end as pending, r.max_pending
    from real_destination_status r
    left join (select v.destination, v.p50,
                      case when exists (select from outbox_dead) then 0 else v.in_flight end as in_flight
               from (values ('default', 6::bigint, 2.1), ('billing', 2, 2.4), ('audit', 1, 3.3)) v (destination, in_flight, p50)) n
      on n.destination = r.destination and r.state = 'connected'
    left join (select destination, sum(published)::bigint as published, sum(retried)::bigint as retried,
                      sum(failed)::bigint as failed,
                      max(published) filter (where minute = date_trunc('minute', now()) - interval '1 min') / 60.0 as per_s
               from made_up group by 1) m on m.destination = r.destination;
    alter view outbox_status rename to real_status;
    create view outbox_status as
    select (select sum(pending) from outbox_destination_status)::bigint as pending,
           (select sum(in_flight) from outbox_destination_status)::bigint as in_flight, r.dead,
           (select max(oldest_pending_age) from outbox_destination_status where state = 'connected') as oldest_pending_age,
           (select sum(published_total) from outbox_destination_status)::bigint as published_total,
           (select sum(failed_total) from outbox_destination_status)::bigint as failed_total,
           (select sum(published_per_s) from outbox_destination_status) as published_per_s,
           (select sum(retried + failed) from made_up where minute = date_trunc('minute', now()) - interval '1 min') / 60.0
             as failed_per_s, r.stats_reset
    from real_status r;
    grant select on outbox_status, outbox_destination_status to outbox_monitor";

#[test]
fn a_user_finds_and_fixes_problems_in_a_browser() {
    if support::skip_without("a user finds and fixes problems in a browser", &[BROWSER]) {
        return;
    }
    if std::env::var("OUTBOX_ACCEPT").is_ok_and(|accept| accept == "1") {
        picture_healthy();
        play(&troubled(), "pictures");
    }
    play(&stage(MARKUP), "scenes");
}

/// The content of Pillar's monitor: workers with their heartbeats, the lease of each partition with its worker and end,
/// and the throughput.
#[test]
fn the_pages_show_workers_leases_and_recent_throughput() {
    const MESSAGES: usize = 30;
    let cluster = Stage::new(&["outbox.workers = 2"]).cluster;
    wait_true(
        &cluster,
        "two workers to share the partitions",
        "select count(*) = 2 and bool_and(partitions = 8 and state = 'connected') from outbox_worker_status where alive",
    );
    cluster.exec(
        DB,
        &format!("select outbox_publish('T', '{{}}', 'a', n::text, 'x') from generate_series(1, {MESSAGES}) n"),
    );
    wait_published(&cluster, MESSAGES);
    let monitor = Monitor::start(&cluster, &[]);
    let mut client = cluster.connect(DB);
    let workers = client
        .query("select worker_id, pid from outbox_worker_status", &[])
        .expect("workers");
    assert_eq!(workers.len(), 2);
    for row in &workers {
        let (id, pid): (String, i32) = (row.get(0), row.get(1));
        wait_until("the page to show the worker as it is", LONG, || {
            let page = monitor.page("/workers");
            let tile = page
                .split("<section")
                .find(|tile| tile.contains(&id))
                .unwrap_or_default();
            [
                &format!("<dd>{pid}</dd>"),
                "<dd>8</dd>",
                "Heartbeat ",
                "ago, valid for ",
                "connected",
            ]
            .iter()
            .all(|part| tile.contains(*part))
        });
    }
    let leases = "select partition_key, lease_owner, lease_epoch from outbox_partition_status";
    let leases = client.query(leases, &[]).expect("leases");
    assert_eq!(leases.len(), 16);
    for row in &leases {
        let (label, owner, epoch): (String, String, i64) = (row.get(0), row.get(1), row.get(2));
        wait_until("the page to show the lease as it is", LONG, || {
            let page = monitor.page("/partitions");
            let line = page
                .split("<tr>")
                .find(|line| line.contains(&format!("data-label=\"Partition\"><b>{label}</b>")));
            line.is_some_and(|line| {
                line.contains(&owner)
                    && line.contains(&format!(">{epoch}<"))
                    && line.contains("until the lease expires")
            })
        });
    }
    wait_until("the page to show what was published", LONG, || {
        monitor
            .page("/")
            .contains(&format!("The last 1 h: {MESSAGES} published, 0 retried, 0 failed"))
    });
    assert!(
        !monitor.page("/").contains("retry or discard them"),
        "there is no dead letter"
    );
}

#[test]
fn of_a_message_that_has_ended_the_page_shows_the_attempt_that_was_sent_and_no_lease_epoch() {
    let stage = Stage::new(&["outbox.max_attempts = 1"]);
    stage.exec(
        DB,
        "create server away foreign data wrapper outbox_amqp options (exchange '', routing_key 'no-such-queue')",
    );
    let published = stage.publish("sent");
    let dead: i64 = stage.query_one(DB, "select outbox_publish('T', '{}', destination => 'away')");
    wait_published(&stage, 1);
    wait_true(&stage, "a dead letter", "select count(*) = 1 from outbox_dead");
    stage.exec(DB, "select outbox_pause()");
    support::wait_paused(&stage, "default");
    let ready = stage.publish("ready");
    let monitor = Monitor::start(&stage, &[]);
    for (path, epochs) in [
        (format!("/message/{published}"), 0),
        (format!("/message/{dead}?destination=away"), 0),
        (format!("/message/{ready}"), 1),
    ] {
        let page = monitor.page(&path);
        assert!(page.contains("<dt>attempt</dt><dd>1</dd>"), "{path}: {page}");
        assert_eq!(page.matches("<dt>lease_epoch</dt>").count(), epochs, "{path}: {page}");
    }
}

#[test]
fn a_stuck_message_is_found_and_fixed_with_two_clicks() {
    if support::skip_without("a stuck message is found and fixed with two clicks", &[BROWSER]) {
        return;
    }
    play(&obstacles(), "obstacles");
}

/// The events of ended messages come first and are many; none of them matches the search.
#[test]
fn a_search_by_type_reads_no_more_events_than_it_shows_messages() {
    let cluster = support::quiet_cluster(); // maintenance reads events
    cluster.exec(
        DB,
        "insert into outbox_events (id, type, payload)
         select gen_random_uuid(), 'T' || n % 20, '{}' from generate_series(1, 80000) n;
         insert into outbox (seq, partition, key) select n, n % 16, n::text from generate_series(60001, 80000) n",
    );
    cluster.exec(DB, "vacuum analyze");
    cluster.exec(DB, "select pg_stat_reset()");
    let mut monitor = Monitor::start(&cluster, &[]);
    let found = listed(&monitor, "ready", "type:T7");
    assert_eq!((found.len(), found[0]), (50, 60_007));
    assert_eq!(monitor.terminate(), Some(0));
    let read = "select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) from pg_stat_user_tables where relname = 'outbox_events'";
    wait_true(
        &cluster,
        "the sessions to report their statistics",
        &format!("select ({read}) > 0"),
    );
    let read: i64 = cluster.query_one(DB, read);
    assert!(read < 3000, "{read} rows of outbox_events read");
}

/// Ten messages that have not ended: one in flight, two retrying, two blocked by these, one scheduled, four ready.
#[test]
fn pending_is_the_sum_of_ready_in_flight_retrying_blocked_and_scheduled_wherever_it_is_shown() {
    let receiver = Receiver::start(|request| match request.path.as_str() {
        "/fails" => Reply::status(500),
        _ => Reply::Hang,
    });
    let conf = [
        "outbox.http_allow = '127.0.0.1'",
        "outbox.retry_backoff = '1h'",
        "outbox.retry_backoff_max = '1h'",
    ];
    let cluster = unconnected_cluster("", "nowhere", &conf);
    for name in ["hangs", "fails", "paused"] {
        let url = receiver.url(&format!("/{name}"));
        cluster.exec(
            DB,
            &format!("create server {name} foreign data wrapper outbox_http options (url '{url}')"),
        );
    }
    cluster.exec(DB, "select outbox_pause('paused', 'a test')");
    for (to, key, count) in [
        ("hangs", "h", 1),
        ("fails", "f", 2),
        ("fails", "g", 2),
        ("paused", "p", 4),
    ] {
        cluster.publish_run(to, key, count);
    }
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', available_at => now() + interval '1 day', destination => 'fails')",
    );
    let statuses = [
        ("ready", 4),
        ("in flight", 1),
        ("retrying", 2),
        ("blocked", 2),
        ("scheduled", 1),
    ];
    let words = statuses.map(|(status, count)| format!("{status} {count}"));
    let mut sorted = words.to_vec();
    sorted.sort();
    let of_sql = "select array_agg(status || ' ' || n order by status)
                  from (select status, count(*) as n from outbox_messages where reference_status = 'PENDING' group by 1) x";
    wait_until("messages of each status", LONG, || {
        cluster.query_one::<Option<Vec<String>>>(DB, of_sql).as_ref() == Some(&sorted)
    });

    let pending = "select array[s.pending, (select sum(d.pending)::bigint from outbox_destination_status d), s.in_flight] from outbox_status s";
    wait_until("the counters", LONG, || {
        cluster.query_one::<Vec<i64>>(DB, pending) == [10, 10, 1]
    });
    let of_ctl = |args: &[&str]| {
        let mut command = Command::new(support::program::outboxctl());
        let output = command
            .args(args)
            .arg("--json")
            .arg("-d")
            .arg(cluster.conn_string(DB))
            .output()
            .expect("outboxctl");
        let rows = String::from_utf8(output.stdout).expect("JSON");
        rows.lines()
            .map(|row| serde_json::from_str(row).expect("JSON"))
            .collect::<Vec<Value>>()
    };
    let status = of_ctl(&["status"]).remove(0);
    assert_eq!(
        (&status["messages"]["pending"], &status["messages"]["in_flight"]),
        (&10.into(), &1.into())
    );
    let monitor = Monitor::start(&cluster, &[]);
    for (status, count) in statuses {
        let option = status.replace(' ', "-");
        let listed = of_ctl(&["list", "--status", &option]);
        assert_eq!(listed.len(), count, "{status}: {listed:?}");
        assert!(listed.iter().all(|row| row["status"] == status), "{listed:?}");
        let (capital, rest) = status.split_at(1);
        let tone = if status == "retrying" { " warn" } else { "" };
        let tab = format!(
            "{}{rest} <span class=\"count{tone}\">{count}</span>",
            capital.to_uppercase()
        );
        wait_until(&format!("the tab {tab}"), LONG, || {
            let page = monitor.page(&format!("/messages?tab={option}"));
            page.contains(&tab) && page.contains("10 pending:") && seqs(&page).len() == count
        });
    }
    let tile = "Pending</a></dt><dd class=\"value\">10</dd>";
    wait_until("the tile", LONG, || monitor.page("/").contains(tile));
}

/// The seqs of the list, in its order.
fn listed(monitor: &Monitor, tab: &str, search: &str) -> Vec<i64> {
    seqs(&monitor.page(&format!("/messages?tab={tab}&q={}", encoded(search))))
}

/// Seqs of the messages of a page of a list, in its order.
fn seqs(page: &str) -> Vec<i64> {
    let list = page.split("<tbody>").nth(1).unwrap_or_default();
    let links = list.split("<a href=\"message/").skip(1);
    links.filter_map(|rest| rest.split('?').next()?.parse().ok()).collect()
}

/// The address of the page before (`prev`) or after (`next`) this one.
fn link(page: &str, which: &str) -> Option<String> {
    let rest = page.split(&format!("rel=\"{which}\" href=\"")).nth(1)?;
    Some(format!("/{}", rest.split('"').next()?.replace("&amp;", "&")))
}

#[test]
fn each_tab_and_each_search_term_find_their_messages() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create server audit foreign data wrapper outbox_http options (url 'https://localhost/');
         select outbox_publish(case n % 2 when 1 then 'A' else 'B' end, '{}', 'order', n::text,
                               destination => case when n > 4 then 'audit' end,
                               correlation_id => case when n = 3 then 'request-7' end) from generate_series(1, 6) n; -- 1 to 6: pending
         select outbox_publish('S', '{}', available_at => now() + interval '1 h'); -- 7: scheduled
         select outbox_publish('X', '{}', 'order', n::text) from generate_series(8, 13) n;
         insert into outbox_waiting (seq, enqueued_at, due_at, attempts, partition, state, destination, key, last_error)
           select seq, enqueued_at, now() + interval '1 min', 2, partition, 'b', destination, key, '50% lost' from outbox where seq = 8;
         insert into outbox_waiting (seq, enqueued_at, attempts, partition, state, destination, key)
           select seq, enqueued_at, 0, partition, 'g', destination, key from outbox where seq = 9;
         insert into outbox_dead (seq, enqueued_at, died_at, attempts, partition, destination, key, reason)
           select seq, enqueued_at, now() - interval '3 h', 15, partition, destination, key, 'too_large' from outbox where seq = 10;
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
           select seq, enqueued_at, 15, partition, destination, key, 'unroutable' from outbox where seq = 11;
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, discarded, destination, key, last_error)
           select seq, enqueued_at, now() - case when seq = 12 then interval '2 days' else interval '1 min' end, 1, partition,
                  seq = 13, destination, key, 'withdrawn' from outbox where seq >= 12;
         delete from outbox where seq >= 8;
         -- 6 is with a worker
         update outbox_partitions set lease_owner = 'server-1', lease_until = now() + interval '1 h';
         update outbox o set claim_token = p.lease_epoch from outbox_partitions p where p.partition = o.partition and o.seq = 6",
    );
    let monitor = Monitor::start(&cluster, &[]);
    let partition_of_3: String = cluster.query_one(DB, "select outbox_partition_of('order:3')");
    for (tab, search, wanted) in [
        ("latest", "", &[13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1][..]),
        ("latest", "X", &[13, 12, 11, 10, 9, 8]),
        ("latest", "type:A", &[5, 3, 1]),
        ("latest", "key:order:13", &[13]),
        ("latest", "since:2031-01-01", &[]),
        ("ready", "", &[1, 2, 3, 4, 5]),
        ("in-flight", "", &[6]),
        ("scheduled", "", &[7]),
        ("retrying", "", &[8]),
        ("blocked", "", &[9]),
        ("dead", "", &[11, 10]),
        ("published", "", &[12]),
        ("discarded", "", &[13]),
        ("ready", "type:A", &[1, 3, 5]),
        ("ready", "agg:order:4", &[4]),
        ("ready", "agg:customer", &[]),
        ("ready", "destination:audit", &[5]),
        ("ready", "destination:default type:B", &[2, 4]),
        ("ready", "key:order:2", &[2]),
        ("ready", "key:\"order:2\"", &[2]),
        ("ready", &format!("partition:{partition_of_3} key:order:3"), &[3]),
        ("ready", "since:1h", &[1, 2, 3, 4, 5]),
        ("ready", "since:2031-01-01", &[]),
        ("retrying", "error:50%", &[8]),
        ("retrying", "error:5%0", &[]),
        ("dead", "error:too_large", &[10]),
        ("dead", "error:too-large", &[]),
        ("dead", "error:t*large", &[10]),
        ("dead", "error:large*too", &[]),
        ("dead", "since:2h", &[11]),
        ("dead", "since:4h", &[11, 10]),
        ("dead", "seq:10", &[10]),
        ("ready", "order:2", &[2]),
        ("ready", "B", &[2, 4]),
        ("ready", "request-7", &[3]),
        ("ready", "correlation:request-7", &[3]),
        ("ready", "correlation:request-8", &[]),
        ("dead", "LARGE", &[10]),
        ("published", "X", &[12]),
        ("published", "nothing", &[]),
        ("published", "since:1h", &[]),
        ("published", "type:X", &[12]),
        ("published", "key:order:13", &[]),
        ("discarded", "error:withdrawn", &[13]),
    ] {
        assert_eq!(listed(&monitor, tab, search), wanted, "{tab} {search}");
    }
    let refused = monitor.page("/messages?q=order%20placed");
    assert!(refused.contains("only one word can be searched for"), "{refused}");
    let id: String = cluster.query_one(DB, "select id::text from outbox_events where seq = 12");
    let answer = monitor.get(&format!("/messages?q={}", id.to_uppercase()));
    assert_eq!(
        (answer.status, answer.header("location")),
        (303, Some("/message/12")),
        "an id leads to its message"
    );
}

/// The number beside the title of a tab.
fn number_of(page: &str, title: &str) -> Option<String> {
    let tab = page.split(&format!("\">{title} <span class=\"count")).nth(1)?;
    Some(tab.split(['>', '<']).nth(1)?.to_owned())
}

#[test]
fn a_search_that_finds_nothing_in_its_tab_shows_where_its_matches_are() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "insert into outbox_waiting (seq, enqueued_at, due_at, attempts, partition, state, destination, key, last_error)
           select n, now(), now() + interval '1 h', 2, 0, 'b', 'default', n::text, 'no cart' from generate_series(1, 1200) n;
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
           select n, now(), 15, 0, 'default', 'cart', 'no' from generate_series(1201, 1203) n;
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination, key)
           values (1204, now(), now(), 1, 0, 'default', 'cart')",
    );
    let monitor = Monitor::start(&cluster, &[]);
    let page = monitor.page("/messages?tab=ready&q=cart");
    assert!(page.contains("No message matches the search."), "{page}");
    let wanted = [
        ("Ready", "0"),
        ("In flight", "0"),
        ("Retrying", "1,000+"),
        ("Dead", "3"),
        ("Scheduled", "0+"), // a word looks at events: 1,000 of the 1,200 rows of its table
        ("Published", "1"),
        ("Discarded", "0"),
    ];
    // On a busy machine the time for a number may be over before all is counted.
    wait_until("the number of matches in each tab", LONG, || {
        let page = monitor.page("/messages?tab=ready&q=cart");
        let number = |title: &str| number_of(&page, title);
        wanted
            .iter()
            .all(|(title, wanted)| number(title).as_deref() == Some(*wanted))
    });
    assert_eq!(
        seqs(&monitor.page("/messages?q=cart"))[..5],
        [1204, 1203, 1202, 1201, 1200]
    );
}

#[test]
fn the_list_begins_with_the_newest_messages_of_all_statuses() {
    let stage = Stage::new(&[]);
    stage.publish("first");
    wait_published(&stage, 1);
    let page = Monitor::start(&stage, &[]).page("/messages");
    let tabs = page.split("<nav class=\"tabs\"").nth(1).expect("tabs");
    let first = tabs.split("<a ").nth(1).expect("a tab");
    assert!(
        first.contains("aria-current=\"page\"") && first.contains(">Latest"),
        "{first}"
    );
    assert_eq!(seqs(&page).len(), 1, "{page}");
    assert!(page.contains(">published</span>"), "{page}");
}

/// Of each lane a number of messages, however many wait.
#[test]
fn the_newest_messages_and_the_numbers_of_matches_cost_the_same_whatever_waits() {
    let cluster = support::quiet_cluster(); // maintenance reads the tables
    let read_of = |path: &str| {
        cluster.exec(DB, "select pg_stat_reset()");
        let mut monitor = Monitor::start(&cluster, &[]);
        let before =
            "select sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_user_tables
                      where relname in ('outbox', 'outbox_waiting', 'outbox_dead', 'outbox_events')";
        monitor.page(path);
        assert_eq!(monitor.terminate(), Some(0));
        wait_true(
            &cluster,
            "the sessions to end",
            "select count(*) = 1 from pg_stat_activity where backend_type = 'client backend'",
        );
        cluster.query_one::<i64>(DB, before)
    };
    let fill = |from: u32, to: u32| {
        cluster.exec(
            DB,
            &format!(
                "insert into outbox_events (seq, id, type, payload) select n, gen_random_uuid(), 'T', '{{}}' from generate_series({from}, {to}) n;
                 insert into outbox (seq, partition, key) select n, n % 16, n::text from generate_series({from}, {to}) n;
                 insert into outbox_waiting (seq, enqueued_at, due_at, attempts, partition, state, destination, key)
                   select n, now(), now() + interval '1 h', 1, 0, 'b', 'default', 'w' || n from generate_series({from}, {to}) n;
                 insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
                   select n, now(), 15, 0, 'default', 'd' || n, 'r' from generate_series({from}, {to}) n"
            ),
        );
        cluster.exec(DB, "vacuum analyze");
    };
    const PATHS: [&str; 4] = [
        "/messages",
        "/messages?q=key:none",
        "/messages?q=type:none",
        "/messages?q=none",
    ];
    fill(1, 50_000);
    let few = PATHS.map(read_of);
    fill(50_001, 150_000);
    let many = PATHS.map(read_of);
    for ((path, few), many) in PATHS.iter().zip(few).zip(many) {
        assert!(
            many < few + few / 5 + 2000,
            "{path}: {few} rows read with 50,000 messages of each table, {many} with 150,000"
        );
    }
}

#[test]
fn an_action_that_is_asked_about_can_be_cancelled() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
           select n, now(), 15, 0, 'default', 'k', 'r' from generate_series(1, 3) n",
    );
    let monitor = Monitor::start(&cluster, &["--allow-actions"]);
    for (asked, back) in [
        ("message?verb=retry&m=1+default", "message/1?destination=default"),
        (
            "message?verb=retry&tab=dead&q=key%3Ak&m=1+default&m=2+default",
            "messages?tab=dead&amp;q=key%3Ak",
        ),
        ("bulk?verb=retry&q=key%3Ak", "messages?tab=dead&amp;q=key%3Ak"),
        ("pause?destination=default", "destinations"),
    ] {
        let page = monitor.follow(&format!("/act/{asked}")).body;
        let link = format!("href=\"{back}\">Cancel</a>");
        assert!(page.contains(&link), "{asked}: {page}");
    }
}

#[test]
fn a_group_of_errors_leads_to_all_its_messages_and_to_no_other() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        r#"create server audit foreign data wrapper outbox_http options (url 'https://localhost/');
           select outbox_publish('T', '{}', 'order', n::text, destination => case n when 5 then 'audit' end)
           from generate_series(1, 6) n;
           insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
             select seq, enqueued_at, 15, partition, destination, key,
                    case seq when 3 then 'refused: "order" 3 is 100% lost' else format('refused: order-%s is 100%% lost', seq) end
             from outbox where seq in (1, 2, 3, 5);
           insert into outbox_waiting (seq, enqueued_at, due_at, attempts, partition, state, destination, key, last_error)
             select seq, enqueued_at, now() + interval '1 h', 2, partition, 'b', destination, key, format('refused: order-%s is 100%% lost', seq)
             from outbox where seq in (4, 6);
           delete from outbox;
           select outbox_internal.record_error('default', format('refused: order-%s is 100%% lost', seq), 'refused', seq, 1)
           from generate_series(1, 2) seq"#,
    );
    let monitor = Monitor::start(&cluster, &[]);
    let page = monitor.page("/");
    let group = page.split("<ul class=\"errors\"").nth(1).expect("errors");
    assert!(group.contains("refused: order-# is 100% lost"), "{group}");
    let of_tab = |tab: &str| {
        let links = group.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next());
        let mut links = links.filter(|link| link.starts_with(&format!("messages?tab={tab}&")));
        format!("/{}", links.next().expect("a link").replace("&amp;", "&"))
    };
    // Message 3 has another error, and 5 another destination.
    assert_eq!(seqs(&monitor.page(&of_tab("dead"))), [2, 1]);
    assert_eq!(seqs(&monitor.page(&of_tab("retrying"))), [4, 6]);
}

#[test]
fn pages_of_a_list_follow_each_other_without_gap_or_overlap() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'order', n::text) from generate_series(1, 330) n;
         insert into outbox_dead (seq, enqueued_at, died_at, attempts, partition, destination, key, reason)
           select seq, enqueued_at, now() - seq / 7 * interval '1 s', 15, partition, destination, key, 'r' from outbox where seq <= 120;
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination, key)
           select seq, enqueued_at, now() - seq / 7 * interval '100 s', 1, partition, destination, key from outbox where seq between 121 and 210;
         insert into outbox_waiting (seq, enqueued_at, due_at, attempts, partition, state, destination, key)
           select seq, enqueued_at, now() + seq / 7 * interval '1 s', 2, partition, 'b', destination, key from outbox where seq between 211 and 270;
         delete from outbox where seq <= 270",
    );
    let monitor = Monitor::start(&cluster, &[]);
    for (tab, first, last) in [
        ("dead&view=each", 1, 120),
        ("dead&view=each&order=reversed", 1, 120),
        ("published", 121, 210),
        ("retrying&view=each", 211, 270),
        ("retrying&order=reversed", 211, 270),
        ("ready", 271, 330),
    ] {
        let mut path = format!("/messages?tab={tab}");
        let mut seen: Vec<i64> = Vec::new();
        loop {
            let page = monitor.page(&path);
            seen.extend(seqs(&page));
            match link(&page, "next") {
                Some(next) => path = next,
                None => break,
            }
        }
        let back = link(&monitor.page(&path), "prev").expect("a page before the last");
        let before = seqs(&monitor.page(&back));
        assert!(
            seen.windows(before.len()).any(|page| page == before),
            "{tab}: {before:?}"
        );
        let is_reversed = tab.ends_with("reversed");
        assert_eq!(seen.first() > seen.last(), is_reversed, "{tab}: {seen:?}");
        let mut sorted = seen.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (first..=last).collect::<Vec<_>>(), "{tab}");
    }
}

#[test]
fn a_message_page_shows_what_is_sent() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create server bill foreign data wrapper outbox_amqp
           options (url 'amqp://rabbit.example', exchange 'bills', routing_key '{aggregate_type}.{header:tenant|none}', format 'payload');
         select outbox_publish('OrderPlaced', '{\"total\": 99.90}', 'Order', '42', 'placed', destination => 'bill',
                               headers => '{\"tenant\": \"acme\"}', correlation_id => 'c-1')",
    );
    let monitor = Monitor::start(&cluster, &[]);
    let page = monitor.page("/message/1");
    for part in [
        "bills",
        "order.acme",
        "amqp://rabbit.example",
        "application/json",
        "16 bytes",
        "Body as sent",
        "{&quot;total&quot;: 99.90}",
        "c-1",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(page.contains("outbox.workers is 0: nothing is delivered."));
    assert!(page.contains("select * from outbox_messages where seq = 1 and destination = 'bill';"));
    let payload = monitor.get("/message/1/payload");
    assert_eq!(payload.body, r#"{"total": 99.90}"#);
    assert_eq!(
        payload.header("content-disposition"),
        Some("attachment; filename=\"message-1.json\"")
    );
    assert_eq!(monitor.get("/message/2").status, 404);
}

#[test]
fn a_discarded_message_is_replayed_alone_to_its_destination() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create server audit foreign data wrapper outbox_http options (url 'https://localhost/');
         select outbox_publish('T', '{}', 'order', n::text) from generate_series(1, 2) n;
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, discarded, destination, key)
           select seq, enqueued_at, now(), 1, partition, false, 'default', key from outbox
           union all select seq, enqueued_at, now() - interval '1 min', 1, partition, true, 'audit', 'audited' from outbox where seq = 1;
         delete from outbox",
    );
    let monitor = Monitor::start(&cluster, &["--allow-actions"]);
    let tab = monitor.page("/messages?tab=discarded");
    assert!(
        tab.contains("\"act/message?verb=replay") && !tab.contains("\"act/bulk"),
        "{tab}"
    );
    let all = monitor.follow("/act/bulk?verb=replay&q=").body;
    assert!(all.contains("Replay 3 published or discarded messages"), "{all}");
    let published = monitor.follow("/act/bulk?verb=replay&q=destination%3Adefault").body;
    assert!(published.contains("Replay 2 published messages"), "{published}");

    let page = monitor.page("/message/1?destination=audit");
    let call = page
        .split_once("select outbox_replay(")
        .and_then(|(_, rest)| rest.split_once("dry_run"));
    let (criteria, _) = call.expect("the call in SQL");
    let counted = format!(
        "select outbox_replay({})",
        criteria.replace("&gt;", ">").trim_end_matches(", ")
    );
    assert_eq!(cluster.query_one::<i64>(DB, &counted), 1, "{counted}");
    let token = Monitor::form_token(&monitor.follow("/act/message?verb=replay&m=1+audit").body);
    let replay = |message: &str| {
        let form = [("verb", "replay"), ("m", message), ("form_token", &token)];
        monitor.post("/act/message", &[], &form).status
    };
    assert_eq!(replay("2 audit"), 409, "it never was at that destination");
    assert_eq!(replay("1 audit"), 303);
    let replayed = "select string_agg(concat_ws(' ', seq, destination, key), ',') from outbox where replayed";
    assert_eq!(cluster.query_one::<String>(DB, replayed), "1 audit audited");
}

#[test]
fn a_lost_database_is_reported_and_comes_back() {
    let cluster = quiet_cluster();
    let monitor = Monitor::start(&cluster, &[]);
    assert!(!monitor.page("/").contains("The database does not answer"));
    cluster.stop(StopMode::Fast);
    wait_until("the page to report that the database is gone", LONG, || {
        monitor.page("/").contains("The database does not answer")
    });
    let metrics = monitor.page("/metrics");
    assert!(metrics.contains("\noutbox_up 0\n"), "{metrics}");
    assert!(
        !metrics.contains("outbox_pending_messages"),
        "old numbers would look current"
    );
    assert_eq!(
        monitor.get("/messages").status,
        200,
        "the page shows the error in place of the list"
    );
    assert_eq!(monitor.get("/audit").status, 503);
    cluster.start_again();
    wait_until("the page to work again", LONG, || {
        !monitor.page("/").contains("The database does not answer")
    });
    assert_eq!(monitor.get("/audit").status, 200);
}

#[test]
fn a_standby_is_reported_as_a_standby_and_delivers_nothing() {
    let primary = quiet_cluster();
    let standby = primary.copy(true, &[]);
    let page = Monitor::start(&standby, &[]).page("/");
    assert!(page.contains("This server is a standby"), "{page}");
    assert!(!page.contains("No worker<"), "a standby needs no worker");
    assert!(!Monitor::start(&primary, &[]).page("/").contains("standby"));
}

/// The number of links of all pages at this prefix, which are all relative to the base path and lead to a page.
pub fn links_below(monitor: &Monitor, base: &str, prefix: &str) -> usize {
    let mut seen = 0;
    for page in [
        "/",
        "/messages",
        "/message/1",
        "/destinations",
        "/partitions",
        "/workers",
        "/audit",
    ] {
        let path = format!("{prefix}{page}");
        let shown = monitor.page(&path);
        let (_, shown) = shown
            .split_once(&format!("<base href=\"{base}/\">"))
            .expect("the base path");
        for part in [" href=\"", " src=\"", " action=\""] {
            let elements = shown.split(part).skip(1).filter_map(|rest| rest.split('>').next());
            let elements = elements.filter(|element| !element.contains("all databases"));
            for link in elements.filter_map(|element| element.split(['"', '#']).next()) {
                assert!(!link.starts_with('/'), "{path}: {link}");
                if part != " action=\"" {
                    let link = format!("{base}/{}", link.replace("&amp;", "&").trim_start_matches("./"));
                    assert_eq!(monitor.follow(&link).status, 200, "{path}: {link}");
                }
                seen += 1;
            }
        }
    }
    seen
}

/// The first event of a stream of parts of a page.
pub fn first_event(monitor: &Monitor, path: &str) -> String {
    use std::io::{BufRead, BufReader, Write};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", monitor.port)).expect("connect");
    let ask = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stream.write_all(ask.as_bytes()).expect("ask for the stream");
    let mut lines = BufReader::new(stream).lines();
    let data = lines.find_map(|line| line.expect("the stream").strip_prefix("data: ").map(str::to_owned));
    data.expect("parts")
}

/// nginx with `proxy_pass http://127.0.0.1:8080;` passes the path on, and with a slash at the end it does not. Both are
/// tried.
#[test]
fn under_a_path_prefix_of_a_proxy_every_link_keeps_the_prefix() {
    const BASE: &str = "/ops/outbox";
    let cluster = quiet_cluster();
    cluster.exec(DB, "select outbox_publish('T', '{}', 'order', '1')");
    let monitor = Monitor::start(&cluster, &["--allow-actions", "--base-path", BASE]);
    let seen = ["", BASE].map(|prefix| links_below(&monitor, BASE, prefix));
    assert!(seen.iter().sum::<usize>() > 100, "{seen:?} links");
    assert_eq!(monitor.get(BASE).status, 200);
    let led = monitor.get(&format!("{BASE}/messages?q=1"));
    assert_eq!(led.header("location"), Some(format!("{BASE}/message/1").as_str()));
    let data = first_event(&monitor, &format!("{BASE}/events?page=overview"));
    assert!(
        data.contains("href=\\\"messages") && !data.contains("href=\\\"/"),
        "{data}"
    );
}

#[test]
fn a_database_without_a_message_shows_how_to_publish_one() {
    let cluster = quiet_cluster();
    let monitor = Monitor::start(&cluster, &[]);
    let page = monitor.page("/");
    let start = page.split("Publish a message").nth(1).expect("how to publish");
    let statement = start
        .split("<pre tabindex=\"0\">")
        .nth(1)
        .and_then(|rest| rest.split('<').next());
    cluster.exec(
        DB,
        &statement
            .expect("a statement")
            .replace("&quot;", "\"")
            .replace("&gt;", ">"),
    );
    wait_until("the page to show the message instead", LONG, || {
        let page = monitor.page("/");
        page.contains("Pending</a></dt><dd class=\"value\">1</dd>") && !page.contains("Publish a message")
    });
}

#[test]
fn an_alert_names_the_destination_and_its_kind_and_says_since_when_and_how_many_messages_wait() {
    let cluster = unconnected_cluster("", "x", &["outbox.http_allow = '127.0.0.1'"]);
    for (name, port, messages) in [("few", 1, 1), ("many", 2, 3)] {
        cluster.exec(
            DB,
            &format!(
                "create server {name} foreign data wrapper outbox_http options (url 'http://127.0.0.1:{port}/');
                 select outbox_publish('T', '{{}}', destination => '{name}') from generate_series(1, {messages})"
            ),
        );
    }
    let monitor = Monitor::start(&cluster, &[]);
    wait_until("both alerts", LONG, || {
        let page = monitor.page("/");
        let of = |name: &str, waiting: &str| {
            let at = page.find(&format!("<strong>HTTP receiver {name}</strong>"))?;
            let alert = page[at..].split("</li>").next()?;
            (alert.contains(" Since ") && alert.contains(waiting)).then_some(at)
        };
        // The one that holds up the most comes first.
        matches!((of("many", " 3 messages wait."), of("few", " 1 message waits.")), (Some(many), Some(few)) if many < few)
    });
}

#[test]
fn differing_versions_are_reported() {
    let cluster = quiet_cluster();
    // A version that outboxctl works with: only the last number is another one.
    let (major, minor) = (env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"));
    let version = format!("{major}.{minor}.999");
    let pretend = format!("update pg_extension set extversion = '{version}' where extname = 'outbox'");
    cluster.exec(DB, &pretend);
    let page = Monitor::start(&cluster, &[]).page("/");
    assert!(page.contains(&format!("The extension is {version}")), "{page}");
}

#[test]
fn a_server_without_the_library_is_reported() {
    let cluster = Cluster::builder().preload(false).start();
    cluster.exec(DB, "create extension outbox; select outbox_publish('T', '{}')");
    let monitor = Monitor::start(&cluster, &[]);
    let page = monitor.page("/");
    assert!(page.contains("is not in shared_preload_libraries"), "{page}");
    assert!(page.contains("Not counted"), "{page}");
    assert_eq!(listed(&monitor, "ready", ""), [1]);
    assert!(
        !monitor.page("/metrics").contains("outbox_pending_messages"),
        "a number that no process counts"
    );
}

#[test]
fn the_extension_is_found_in_any_schema() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(
        DB,
        r#"create schema "Our Ops"; create extension outbox schema "Our Ops";
           select "Our Ops".outbox_publish('T', '{}', 'order', '1');
           -- what a search_path would find first
           create view public.outbox_status as select 1 as one; create table public.outbox_dead (one int);
           -- and what would fit a careless call better
           create function "Our Ops".outbox_partition_label(smallint) returns text language sql as $$ select 'p' || 1 / 0 $$;
           create function "Our Ops".outbox_retry_where(destination text, max_rows int, dry_run boolean)
             returns bigint language sql as 'select 1 / 0::bigint'"#,
    );
    let monitor = Monitor::start(&cluster, &["--allow-actions"]);
    assert!(monitor.page("/").contains("Published a minute"));
    assert_eq!(listed(&monitor, "ready", ""), [1]);
    let count = monitor.follow("/act/bulk?verb=retry&q=destination%3Adefault").body;
    assert!(count.contains("Retry 0 dead letters"), "{count}");
    let token = Monitor::form_token(&monitor.follow("/act/pause?destination=default").body);
    let paused = monitor.post("/act/pause", &[], &[("destination", "default"), ("form_token", &token)]);
    assert_eq!(paused.status, 303, "{}", paused.body);
    let count: i64 = cluster.query_one(DB, r#"select count(*) from "Our Ops".outbox_paused"#);
    assert_eq!(count, 1);
}

#[test]
fn serve_ends_on_a_signal_while_a_page_is_open() {
    use std::io::{Read, Write};
    let cluster = quiet_cluster();
    let mut monitor = Monitor::start(&cluster, &[]);
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", monitor.port)).expect("connect");
    stream
        .write_all(b"GET /events?page=overview HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .expect("ask for the stream");
    let mut seen = Vec::new();
    let mut part = [0; 4096];
    while !String::from_utf8_lossy(&seen).contains("data: ") {
        let n = stream.read(&mut part).expect("read the stream");
        assert!(n > 0, "the stream ended: {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&part[..n]);
    }
    assert_eq!(monitor.terminate(), Some(0));
}

#[test]
fn the_page_shows_and_finds_the_events_of_a_source() {
    let cluster = quiet_cluster();
    let id = "00000000-0000-0000-0000-000000000002";
    cluster.exec(
        DB,
        &format!(
            "create role shop; create schema shop authorization shop; set role shop;
             create table shop.events (n bigint primary key, what text, of text, at timestamptz default now(), data json);
             insert into shop.events values (1, 'Written', 'a', default, '{{\"n\": 1}}'), (2, 'Read', 'b', default, '{{\"n\": 2}}');
             reset role;
             insert into outbox_events (seq, id, type, payload) values (2, '{id}', 'Old', '{{}}');
             select outbox_source_set('shop.events', seq => 'n', type => 'what', created_at => 'at', aggregate_type => '''o''',
                                      aggregate_id => 'of', payload => 'data');
             select outbox_enqueue_many('{{1,2}}')"
        ),
    );
    let monitor = Monitor::start(&cluster, &[]);
    let page = monitor.page("/message/2");
    assert!(page.contains("permission denied for schema shop"), "{page}");
    cluster.exec(
        DB,
        "grant usage on schema shop to outbox_admin; grant select on shop.events to outbox_admin",
    );
    let page = monitor.page("/message/2");
    assert!(page.contains("Read") && !page.contains("Old"), "{page}");
    assert!(monitor.get("/message/2/payload").body.contains("\"n\""));
    assert_eq!(listed(&monitor, "pending", "agg:o:b"), [2]);
    assert_eq!(listed(&monitor, "pending", "type:Written"), [1]);
    let found = monitor.page(&format!("/messages?tab=pending&q=id%3A{id}"));
    assert!(found.contains("cannot find an event of a source by its id"), "{found}");
}
