//! Tests of an upgrade: `alter extension outbox update` under load gives what a fresh install gives and loses nothing,
//! and a library and an extension of different versions deliver and say so. Most tests update to a next version, which
//! upgrade/next.rs makes; one updates to this version.

mod next;

use std::process::Command;
use std::time::SystemTime;

use postgres::Client;
use serde_json::json;
use support::cluster::ClusterBuilder;
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::{Arrived, Fate, Sent, judge};
use support::{Broker, Cluster, Consumer, Installation, Mode, Proxy, StopMode, process};
use support::{
    DB, Event, Session as _, exchange_and_queue, health, wait_drained, wait_healthy, wait_published, wait_true,
};

use self::next::{NEXT, Next};
use crate::tidy::RELEASED;

const OWN: &str = env!("CARGO_PKG_VERSION");
const CATALOG: &str = include_str!("upgrade/catalog.sql");

/// Lines of postgresql.conf: the broker, reached through the proxy at this port, and the exchange.
fn configuration(broker: &Broker, proxy: u16, exchange: &str) -> [String; 2] {
    let url = broker
        .url()
        .replace(&format!(":{}", broker.port()), &format!(":{proxy}"));
    [
        format!("outbox.url = '{url}'"),
        format!("outbox.exchange = '{exchange}'"),
    ]
}

fn start(builder: ClusterBuilder, conf: &[String]) -> Cluster {
    conf.iter().fold(builder, |builder, line| builder.conf(line)).start()
}

/// A server with the library of the next version, and the extension of this one.
fn before_the_update(next: &Next, conf: &[String]) -> Cluster {
    next.install_library();
    let cluster = start(Cluster::builder().installation(next.installation()), conf);
    cluster.exec(DB, &format!("create extension outbox version '{OWN}'"));
    cluster
}

fn version(cluster: &Cluster) -> String {
    cluster.query_one(DB, "select extversion from pg_extension where extname = 'outbox'")
}

/// What the extension has in this database: one line a fact, in order.
fn catalog(cluster: &Cluster, database: &str) -> Vec<String> {
    let rows = cluster.connect(database).query(CATALOG, &[]).expect("the catalog");
    rows.iter().map(|row| row.get(0)).collect()
}

fn count(cluster: &Cluster, status: &str) -> i64 {
    cluster.query_one(
        DB,
        &format!("select count(*) from outbox_messages where status = '{status}'"),
    )
}

#[test]
fn an_update_under_load_gives_a_fresh_install_and_delivers_every_message() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let next = Next::install();
    let [url, name] = configuration(broker, proxy.port(), &exchange);
    let cluster = before_the_update(&next, &[url, name, "outbox.max_attempts = 1".to_owned()]);
    support::wait_connected(&cluster);
    cluster.publish(Event::new("published").key("1"));
    wait_published(&cluster, 1);

    broker.unbind(&queue, &exchange, "#");
    cluster.publish(Event::new("dead").key("2"));
    wait_true(&cluster, "a dead letter", "select exists (select from outbox_dead)");
    cluster.publish(Event::new("behind the dead letter").key("2"));
    broker.bind(&queue, &exchange, "#");

    let (mut faults, began) = (Faults::default(), SystemTime::now());
    proxy.mode(Mode::Blackhole);
    let load = Load::start(&cluster, &Plan::default());
    cluster.publish(Event::new("in flight").key("3"));
    load.wait_for_more(20);
    wait_true(
        &cluster,
        "messages in flight",
        "select in_flight > 0 from outbox_status",
    );
    assert_eq!((count(&cluster, "published"), count(&cluster, "dead")), (1, 1));

    cluster.exec(DB, "alter extension outbox update");
    assert_eq!(version(&cluster), NEXT);
    load.wait_for_more(20);
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    load.wait_for_more(20);
    support::wait_connected(&cluster);
    faults.since(began, 1);
    load.wait_for_more(20);
    let by_hand = |label: &str| Sent {
        label: label.into(),
        payload: json!({ "label": label }),
        fate: Fate::Committed,
    };
    let mut sent = load.stop();
    sent.extend(["published", "dead", "behind the dead letter", "in flight"].map(by_hand));
    wait_drained(&cluster);
    assert_eq!(count(&cluster, "dead"), 1);
    assert!(cluster.query_one::<bool>(DB, "select bool_and(outbox_retry(seq)) from outbox_dead"));
    wait_true(
        &cluster,
        "all messages to be published",
        "select count(*) = count(*) filter (where status = 'published') from outbox_messages",
    );

    let arrived: Vec<Arrived> = support::all_of(broker, &queue).iter().map(Arrived::new).collect();
    faults.assert_explain(&judge(&sent, &arrived), &messages(&cluster));
    wait_healthy(&cluster, "version");

    cluster.exec(DB, "create database fresh");
    cluster.exec("fresh", "create extension outbox");
    assert_equal(&cluster, DB, "fresh");
}

#[test]
fn an_update_from_each_earlier_version_gives_a_fresh_install_and_delivers_what_waits() {
    let broker = Broker::shared();
    let (exchange, _queue) = exchange_and_queue(broker);
    let [url, name] = configuration(broker, broker.port(), &exchange);
    for (earlier, _) in RELEASED {
        let conf = [url.clone(), name.clone(), "outbox.enabled = off".to_owned()];
        let cluster = start(Cluster::builder(), &conf);
        cluster.exec(DB, &format!("create extension outbox version '{earlier}'"));
        cluster.publish(Event::new("waits").key("1"));
        cluster.exec(DB, "alter extension outbox update");
        assert_eq!(version(&cluster), OWN);
        cluster.publish(Event::new("follows").key("1"));
        cluster.set_conf("outbox.enabled", "on");
        wait_published(&cluster, 2);
        wait_healthy(&cluster, "version");
        cluster.exec(DB, "create database fresh");
        cluster.exec("fresh", "create extension outbox");
        assert_equal(&cluster, DB, "fresh");
    }
}

/// The extension is the same in both databases.
fn assert_equal(cluster: &Cluster, updated: &str, fresh: &str) {
    let (updated, fresh) = (catalog(cluster, updated), catalog(cluster, fresh));
    assert!(fresh.len() > 1000, "{} facts", fresh.len());
    let only = |these: &[String], those: &[String]| -> Vec<String> {
        let missing = these.iter().filter(|fact| !those.contains(fact));
        missing.cloned().collect()
    };
    let nothing: Vec<String> = Vec::new();
    let differences = (only(&updated, &fresh), only(&fresh, &updated));
    assert_eq!(differences, (nothing.clone(), nothing), "only updated, only fresh");
}

/// What users and a DBA make of an extension in the schema "Out Box".
const DEPENDENTS: &str = r#"
create schema app;
create function app.views() returns setof name begin atomic
  select c.relname from pg_class c where c.relkind = 'v' and c.relnamespace = '"Out Box"'::regnamespace;
end;
do $$
declare
  view name;
begin
  for view in select app.views() loop
    execute format('create view app.%1$I as select * from "Out Box".%1$I', view);
  end loop;
end
$$;
create function app.publish(type text) returns bigint begin atomic
  select "Out Box".outbox_publish(type => $1, payload => '{}');
end;
create view app.labels as
  select p, "Out Box".outbox_partition_label(p) as label from generate_series(0, 3) p;
create function app.placed() returns trigger language plpgsql as $$
begin
  perform "Out Box".outbox_publish('by the trigger', to_jsonb(new)), app.publish('by the function');
  return null;
end
$$;
create table app.orders (id integer primary key default app.publish('by the default'));
create trigger placed after insert on app.orders for each row execute function app.placed();
create table app.captured (id integer primary key);
select "Out Box".outbox_capture('app.captured');
create server audit foreign data wrapper outbox_amqp options (url 'amqp://localhost');
select "Out Box".outbox_subscribe('audit', when_sql => $$type = 'by the trigger'$$);
create view app.notes as select n.seq from "Out Box".outbox_open_transactions() n (seq);
create role auditor;
grant select on "Out Box".outbox_health to auditor;
grant execute on function "Out Box".outbox_retry to auditor;
revoke execute on function "Out Box".outbox_discard from outbox_admin;
revoke select on "Out Box".outbox_status from outbox_monitor;
"#;

#[test]
fn an_update_keeps_what_users_and_a_dba_made_in_any_schema() {
    let next = Next::install();
    next.install_library();
    let cluster = Cluster::builder()
        .installation(next.installation())
        .conf("outbox.workers = 0")
        .start();
    for (database, version) in [(DB, OWN), ("updated", OWN), ("fresh", NEXT)] {
        if database != DB {
            cluster.exec("postgres", &format!("create database {database}"));
        }
        let install =
            format!(r#"create schema "Out Box"; create extension outbox schema "Out Box" version '{version}'"#);
        cluster.exec(database, &install);
    }
    cluster.exec(DB, DEPENDENTS);
    let public = || -> Vec<(String, u32)> {
        let sql = r#"select i.type || ' ' || i.identity, d.objid
                     from pg_depend d, pg_identify_object(d.classid, d.objid, 0) i
                     where d.deptype = 'e' and d.refclassid = 'pg_extension'::regclass and i.schema = '"Out Box"'
                       and i.type in ('function', 'view', 'table') order by 1"#;
        let rows = cluster.connect(DB).query(sql, &[]).expect("the public objects");
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    };
    let before = public();
    assert!(before.len() > 70, "{before:?}");
    cluster.exec(
        DB,
        "alter default privileges grant all on tables to auditor; alter default privileges grant all on functions to auditor",
    );
    for database in [DB, "updated"] {
        cluster.exec(database, "alter extension outbox update");
    }
    assert_equal(&cluster, "updated", "fresh");

    let after = public();
    // The arguments of a function are part of it.
    let lost = before
        .iter()
        .filter(|object| !after.contains(object))
        .map(|(name, _)| name);
    let lost: Vec<&str> = lost.map(|name| name.split('(').next().unwrap_or_default()).collect();
    let changed = [r#"function "Out Box".outbox_publish"#];
    assert_eq!(lost, changed, "the update made others of them");
    let kept: String = cluster.query_one(
        DB,
        r#"select string_agg(p.oid::regproc::text, ',') from pg_proc p where p.proname like 'outbox\_%\_old'
           and not exists (select from pg_depend d where d.objid = p.oid and d.deptype = 'e')"#,
    );
    assert_eq!(
        kept, r#""Out Box".outbox_publish_old"#,
        "what the functions and defaults of users call"
    );
    cluster.exec(
        DB,
        "do $$
         declare
           view name;
         begin
           for view in select app.views() union all select 'labels' loop
             execute format('select from app.%I', view);
           end loop;
         end
         $$;
         insert into app.orders default values;
         insert into app.captured values (1)",
    );
    let types: String = cluster.query_one(
        DB,
        "select string_agg(type || ' to ' || destination, ', ' order by seq, destination) from app.outbox_messages
         where status = 'ready'",
    );
    assert_eq!(
        types,
        "by the default to default, by the trigger to audit, by the trigger to default, by the function to default, \
         CapturedCreated to default"
    );
    let rights: Vec<bool> = cluster.query_one(
        DB,
        r#"select array[has_table_privilege('auditor', '"Out Box".outbox_health', 'select'),
                        has_function_privilege('auditor', '"Out Box".outbox_retry(bigint, text, text)', 'execute'),
                        has_function_privilege('outbox_admin', '"Out Box".outbox_discard(bigint, text, text)', 'execute'),
                        has_table_privilege('outbox_monitor', '"Out Box".outbox_status', 'select'),
                        has_table_privilege('auditor', '"Out Box".outbox_notes', 'select'),
                        has_function_privilege('auditor', 'outbox_internal.noted()', 'execute')]"#,
    );
    let wanted = [true, true, false, false, false, false];
    assert_eq!(
        rights, wanted,
        "what the DBA granted and revoked, and what default privileges would open"
    );
}

#[test]
fn a_session_that_is_open_during_the_update_enqueues_and_is_delivered_by_what_it_makes() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let consumer = Consumer::new(broker, &queue);
    let next = Next::install();
    let cluster = before_the_update(&next, &configuration(broker, broker.port(), &exchange));
    cluster.exec(
        DB,
        "create table item (id integer primary key); select outbox_capture('item')",
    );
    let mut open = cluster.connect(DB);
    let mut write = |number: i32| {
        open.run(&format!("insert into item values ({number})"));
        open.run(&format!("select outbox_publish('{number}', '{{}}')"));
        [consumer.next().kind, consumer.next().kind].map(Option::unwrap)
    };
    assert_eq!(write(1), ["ItemCreated", "1"]);
    cluster.exec(DB, "alter extension outbox update");
    assert_eq!(write(2), ["ItemCreated", "2"]);
    wait_published(&cluster, 4);
    let notes: Vec<Option<String>> =
        cluster.query_one(DB, "select array_agg(note order by published_at) from outbox_history");
    assert_eq!(notes, vec![Some("none".to_owned()); 4], "the new column of the history");
}

#[test]
fn the_library_has_every_function_of_each_version_that_can_be_created() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    let versions: Vec<String> = {
        let sql = "select version from pg_available_extension_versions where name = 'outbox'";
        let rows = cluster.connect(DB).query(sql, &[]).expect("the versions");
        rows.iter().map(|row| row.get(0)).collect()
    };
    assert!(versions.contains(&OWN.to_owned()), "{versions:?}");
    for version in versions {
        cluster.exec(DB, &format!("create extension outbox version '{version}'"));
        // The validator of C functions looks each one up in the library.
        let validated: i64 = cluster.query_one(
            DB,
            "select count(fmgr_c_validator(p.oid)) from pg_proc p join pg_language l on l.oid = p.prolang
             where l.lanname = 'c' and p.probin like '%outbox%'",
        );
        assert!(validated > 20, "{validated} functions of {version}");
        cluster.exec(DB, "drop extension outbox; drop schema if exists outbox_internal");
    }
}

/// Makes the extension say that it has another version. Only the number changes.
fn pretend(client: &mut Client, version: &str) {
    let sql = "update pg_extension set extversion = $1 where extname = 'outbox'";
    assert_eq!(client.execute(sql, &[&version]).expect("a superuser may"), 1);
}

#[test]
fn an_extension_of_another_version_than_the_library_is_delivered_and_health_says_so() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = support::outbox_cluster(broker, &exchange);
    let consumer = Consumer::new(broker, &queue);
    wait_healthy(&cluster, "version");
    for (version, remedy) in [
        ("0.1.9", "ALTER EXTENSION outbox UPDATE"),
        (
            "0.10.0",
            "install the library of the extension's version and restart the server",
        ),
    ] {
        pretend(&mut cluster.connect(DB), version);
        cluster.publish(Event::new(version).key("1"));
        assert_eq!(consumer.next().label(), version);
        let problem = format!(
            "the library that the server runs is of version {OWN}, and the extension of this database is of version {version}"
        );
        assert_eq!(health(&cluster, "version"), (false, problem));
        let sql = r#"select remedy from outbox_health where "check" = 'version'"#;
        assert_eq!(cluster.query_one::<String>(DB, sql), remedy);
    }
    pretend(&mut cluster.connect(DB), OWN);
    wait_healthy(&cluster, "version");
}

#[test]
fn the_scripts_of_a_version_are_refused_while_the_server_runs_the_library_of_an_earlier_one() {
    let next = Next::install();
    let cluster = Cluster::builder()
        .installation(next.installation())
        .conf("outbox.workers = 0")
        .start();
    cluster.exec(DB, &format!("create extension outbox version '{OWN}'"));
    cluster.exec(DB, "create database other");
    let assert_refused = || {
        for (database, statement) in [
            (DB, "alter extension outbox update"),
            ("other", "create extension outbox"),
        ] {
            let error = cluster.connect(database).batch_execute(statement).expect_err(statement);
            let error = error.as_db_error().expect("an error of the server");
            assert_eq!(error.code().code(), "55000", "{error:?}");
            let message =
                format!("version {NEXT} of the extension needs its library, and this server runs that of {OWN}");
            assert_eq!(error.message(), message);
            assert_eq!(error.hint(), Some("Restart the server, then try again."));
        }
    };
    assert_refused();
    next.install_library();
    assert_refused();
    assert_eq!(version(&cluster), OWN);
    cluster.stop(StopMode::Fast);
    cluster.start_again();
    let (ok, problem) = health(&cluster, "version");
    assert!(!ok && problem.contains(&format!("version {NEXT}")), "{problem}");
    let remedy: String = cluster.query_one(DB, r#"select remedy from outbox_health where "check" = 'version'"#);
    cluster.exec(DB, &remedy);
    cluster.exec("other", "create extension outbox");
    assert_eq!(version(&cluster), NEXT);
    wait_healthy(&cluster, "version");
    assert_equal(&cluster, DB, "other");
}

/// The installation of each major in turn, as `make test-pg-upgrade` names their bin directories.
fn majors() -> Vec<Installation> {
    let list = std::env::var_os("OUTBOX_PG_UPGRADE").expect("run it by `make test-pg-upgrade`");
    std::env::split_paths(&list).map(Installation::at).collect()
}

fn run_as_postgres(command: &mut Command) {
    process::run_as(command, process::postgres_account());
    process::run(command);
}

/// pg_upgrade of a stopped server into a new one of another installation.
fn upgraded(old: &Cluster, installation: &Installation, conf: &[String]) -> Cluster {
    let new = start(Cluster::builder().installation(installation.clone()), conf);
    new.stop(StopMode::Fast);
    // The user of the server may write there.
    let directory = new.data_dir();
    // Version 18 makes checksums by default, and pg_upgrade wants both servers alike.
    if installation.version().contains("PostgreSQL 18") {
        let mut disable = Command::new(installation.bin("pg_checksums"));
        run_as_postgres(disable.args(["--disable", "-D"]).arg(&directory));
    }
    let mut upgrade = Command::new(installation.bin("pg_upgrade"));
    upgrade
        .current_dir(&directory)
        .args(["-U", "postgres", "--socketdir"])
        .arg(&directory)
        .arg("-b")
        .arg(old.installation().bin(""))
        .arg("-B")
        .arg(installation.bin(""))
        .arg("-d")
        .arg(old.data_dir())
        .arg("-D")
        .arg(&directory)
        .args(["-p", &old.port().to_string(), "-P", &new.port().to_string()]);
    run_as_postgres(&mut upgrade);
    new.start_again();
    new
}

#[test]
#[ignore = "needs several majors: `make test-pg-upgrade`"]
fn pg_upgrade_keeps_every_message_and_sends_none_before_the_database_is_adopted() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let proxy = Proxy::start(broker.port());
    let consumer = Consumer::new(broker, &queue);
    let received = || consumer.next().label();
    let majors = majors();
    assert!(majors.len() > 1, "{majors:?}");
    let conf = configuration(broker, proxy.port(), &exchange);
    let mut cluster = start(Cluster::builder().installation(majors[0].clone()), &conf);
    cluster.exec(DB, "create extension outbox");
    for (from, installation) in majors.iter().skip(1).enumerate() {
        support::wait_connected(&cluster);
        let (published, waiting) = (format!("published on {from}"), format!("waiting on {from}"));
        cluster.publish(Event::new(published.as_str()).key("1"));
        assert_eq!(received(), published);
        wait_published(&cluster, 2 * from + 1);
        proxy.mode(Mode::Blackhole);
        cluster.publish(Event::new(waiting.as_str()).key("1"));
        wait_true(
            &cluster,
            "a message in flight",
            "select in_flight = 1 from outbox_status",
        );
        cluster.stop(StopMode::Fast);
        // From here on a worker could send it: one of a server that pg_upgrade runs, or of the new server.
        proxy.mode(Mode::Pass);
        proxy.reset_all();

        cluster = upgraded(&cluster, installation, &conf);
        wait_true(
            &cluster,
            "a worker that delivers nothing",
            "select coalesce(bool_and(alive and state = 'not adopted'), false) from outbox_worker_status",
        );
        consumer.assert_next_is_fence(broker);
        assert_eq!(count(&cluster, "published"), 2 * from as i64 + 1);
        assert_eq!(count(&cluster, "ready") + count(&cluster, "in flight"), 1);
        assert!(cluster.query_one::<bool>(DB, "select outbox_adopt('pg_upgrade')"));
        assert_eq!(received(), waiting);
        wait_published(&cluster, 2 * from + 2);
        println!("{}: {waiting} arrived", installation.version());
    }
}
