//! What remains of a process that ends without the ordinary end of its transaction? Nothing: each test ends a process
//! of another kind, in each state in which it owns something in shared memory.

use std::path::PathBuf;
use std::process::Command;
use std::thread;

use postgres::Client;
use postgres::error::SqlState;
use support::process;
use support::*;

/// A stage with a second destination, which keeps one order for each partition. There an entry that is left holds all
/// messages.
fn stage(conf: &[&str]) -> Stage {
    let stage = Stage::new(conf);
    stage.destination(stage.broker, "lanes", "ordering 'partition'");
    stage
}

/// Asserts that no process has left anything: no entry of open transactions, no request, and no database that waits for
/// its workers to leave. `published`: the messages that were published before.
fn nothing_remains(stage: &Stage, published: usize) {
    let open: Vec<String> = (stage.connect(DB))
        .query("select t::text from outbox_open_transactions() t", &[])
        .expect("the open transactions")
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(open, [""; 0], "open transactions");
    stage.publish(Event::new("to its key").key("a"));
    stage.publish(Event::new("to its partition").key("a").to("lanes"));
    wait_published(stage, published + 2);
    stage.exec(DB, "select outbox_run_pass('10 s')");
}

/// The id of the process that runs this session.
fn pid(client: &mut Client) -> i32 {
    client.value("select pg_backend_pid()")
}

fn terminate(stage: &Stage, pid: i32) {
    stage.exec(DB, &format!("select pg_terminate_backend({pid})"));
    wait_true(
        stage,
        "the process to end",
        &format!("select not exists (select from pg_stat_activity where pid = {pid})"),
    );
}

/// Waits until a process waits for this kind of event.
fn wait_for_wait(stage: &Stage, pid: i32, event: &str) {
    wait_true(
        stage,
        event,
        &format!("select wait_event = '{event}' from pg_stat_activity where pid = {pid}"),
    );
}

// ---- parallel workers -----------------------------------------------------------------------------------------------

#[test]
fn a_parallel_worker_is_refused_before_it_announces_anything() {
    let stage = stage(&[]);
    let seq = stage.publish("before");
    wait_published(&stage, 1);
    let mut outcomes = Vec::new();
    for call in [
        "outbox_publish('T', '{}', 'item', 'a')",
        "outbox_publish('T', '{}', 'item', 'a', destination => 'lanes')",
        "outbox_publish('T', '{}', 'item', 'a', id => gen_random_uuid(), if_exists => 'skip')",
        &format!("outbox_enqueue({seq}, 'a')"),
        &format!("outbox_enqueue_many(array[{seq}], 'a', 'lanes')"),
        &format!("outbox_wait({seq})"),
        "outbox_run_pass('10 s')",
        "outbox_configure(partition_count => 4)",
        "outbox_pause()",
        "outbox_internal.wake(1)",
        "outbox_internal.record_back('default', 0::smallint, 1)",
        "outbox_internal.record_gone(0::smallint, 1)",
        "outbox_internal.send_workers_away()",
        "outbox_internal.work_join('w')",
    ] {
        let mut client = stage.connect(DB);
        client.run(&format!(
            "create or replace function in_worker() returns text language plpgsql parallel safe as
             $$ begin perform {call}; return 'done'; end $$;
             select set_config(name, 'on', false) from pg_settings
             where name in ('force_parallel_mode', 'debug_parallel_query')"
        ));
        outcomes.push((call.to_owned(), client.batch_execute("select in_worker()")));
    }
    nothing_remains(&stage, 1);
    for (call, outcome) in outcomes {
        let error = outcome.expect_err(&call);
        let error = error.as_db_error().expect("an error of the server");
        assert_eq!(error.code(), &SqlState::INVALID_TRANSACTION_STATE, "{call}: {error}");
        let place = error.where_().unwrap_or_default();
        assert!(place.contains("parallel worker"), "{call}: {place}");
    }
}

#[test]
fn the_refusal_of_a_parallel_worker_says_which_command_helps() {
    let stage = stage(&[]);
    let mut client = stage.connect(DB);
    client.run(
        "create function tell(n integer) returns bigint language sql parallel safe as
         $$ select outbox_publish('T', to_jsonb(n)) $$;
         create table many as select n from generate_series(1, 100) n",
    );
    client.run(
        "set parallel_setup_cost = 0; set parallel_tuple_cost = 0; set min_parallel_table_scan_size = 0;
         set parallel_leader_participation = off",
    );
    let tell = "select count(*) from many where tell(n) > 0";
    let error = client.batch_execute(tell).expect_err(tell);
    let error = error.as_db_error().expect("an error of the server");
    assert_eq!(
        error.message(),
        "outbox cannot enqueue, wait or change anything during a parallel operation"
    );
    assert_eq!(error.hint(), Some("ALTER FUNCTION ... PARALLEL UNSAFE."));
    client.run("alter function tell parallel unsafe");
    client.run(tell);
    wait_published(&stage, 100);
}

// ---- sessions -------------------------------------------------------------------------------------------------------

#[test]
fn a_session_that_is_terminated_leaves_nothing_in_any_state() {
    let stage = stage(&[]);
    let id = "00000000-0000-4000-8000-000000000001";
    let publish = |more: &str| format!("select outbox_publish('T', '{{\"label\": \"never\"}}', 'item', 'a'{more})");

    // Its messages are placed.
    let mut open = stage.connect(DB);
    open.run(&format!("begin; {}; savepoint s; {}", publish(""), publish("")));
    terminate(&stage, pid(&mut open));

    // Its key is announced, and it waits for the id of another session.
    let mut first = stage.connect(DB);
    let with_id = publish(&format!(", id => '{id}', if_exists => 'skip'"));
    first.run(&format!("begin; {with_id}"));
    let mut second = stage.connect(DB);
    let its_pid = pid(&mut second);
    let waiting = thread::spawn(move || second.batch_execute(&with_id).expect_err("an ended session"));
    wait_for_wait(&stage, its_pid, "transactionid");
    terminate(&stage, its_pid);
    waiting.join().expect("no panic");
    first.run("rollback");

    // It has a request to the workers, or waits for a message.
    let blocked = stage.publish(Event::new("scheduled").with("available_at => now() + '1 hour'"));
    let wait = format!("select outbox_wait({blocked}, '1 hour')");
    let mut holder = stage.connect(DB);
    holder.run("begin; lock table outbox_paused in access exclusive mode");
    for call in ["select outbox_run_pass('1 hour')", wait.as_str()] {
        let mut client = stage.connect(DB);
        let (its_pid, call) = (pid(&mut client), call.to_owned());
        let waiting = thread::spawn(move || client.batch_execute(&call).expect_err("an ended session"));
        wait_for_wait(&stage, its_pid, "Extension");
        terminate(&stage, its_pid);
        waiting.join().expect("no panic");
    }
    holder.run("rollback");

    nothing_remains(&stage, 0);
}

/// A commit that waits for the lock of NOTIFY has its messages in slots of the fast path already.
#[test]
fn sessions_that_are_terminated_while_they_commit_leave_no_slot_of_the_fast_path() {
    let stage = stage(&[]);
    miss_standby(&stage);
    let mut holder = stage.connect(DB);
    let holders_pid = pid(&mut holder);
    let holding =
        thread::spawn(move || holder.batch_execute("set synchronous_commit = on; create table held (); notify first"));
    wait_for_wait(&stage, holders_pid, "SyncRep");
    // There are 256 slots, and a transaction fills at most 8 of them.
    let committing = (0..33).map(|_| {
        let mut client = stage.connect(DB);
        let its_pid = pid(&mut client);
        client.run("begin; select outbox_publish('T', '{}', 'item', 'a') from generate_series(1, 8); notify second");
        let committing = thread::spawn(move || client.batch_execute("commit").expect_err("an ended session"));
        wait_for_wait(&stage, its_pid, "object");
        (its_pid, committing)
    });
    for (pid, committing) in committing.collect::<Vec<_>>() {
        terminate(&stage, pid);
        committing.join().expect("no panic");
    }
    terminate(&stage, holders_pid);
    holding.join().expect("no panic").expect_err("an ended session");
    nothing_remains(&stage, 0);

    let mut blocker = stage.connect(DB);
    blocker.run("begin; lock table outbox_paused in access exclusive mode"); // no worker claims
    let consumer = stage.consumer();
    stage.publish(Event::new("fast").key("fast"));
    wait_for("the message on the fast path", LONG, || {
        (consumer.next().label() == "fast").then_some(())
    });
    blocker.run("rollback");
}

#[test]
fn after_a_session_was_killed_nothing_of_it_remains() {
    let stage = stage(&[]);
    for call in [
        "begin; select outbox_publish('T', '{}', 'item', 'a')",
        "begin; select outbox_internal.begin_request(0, false)",
        "begin; select outbox_internal.send_workers_away()",
    ] {
        let mut client = stage.connect(DB);
        client.run(call);
        let offset = stage.log_offset();
        process::signal(pid(&mut client) as u32, libc::SIGKILL);
        stage.wait_for_log("ready to accept connections", offset);
        wait_connected(&stage);
    }
    nothing_remains(&stage, 0);
}

// ---- other processes of the server ----------------------------------------------------------------------------------

/// Compiles the functions of tests/ends/process.c for the server of the tests.
fn library(stage: &Stage) -> PathBuf {
    let dir = std::env::temp_dir().join(fresh_names().0);
    std::fs::create_dir_all(&dir).expect("a directory");
    let library = dir.join("process.so");
    // The server is a mirror of an installation, which has the headers.
    let include = stage.installation().pg_config("--includedir-server");
    let mirror = std::env::var("OUTBOX_PG_ROOT").unwrap_or_default();
    let include = include.strip_prefix(&mirror).unwrap_or(&include);
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-w", "-I", include, "-o"])
        .arg(&library)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/ends/process.c"))
        .status();
    assert!(made.expect("cc").success(), "process.c");
    library
}

#[test]
fn a_background_worker_of_another_extension_leaves_nothing_however_it_ends() {
    let stage = stage(&[]);
    let library = library(&stage);
    let library = library.display();
    let mut client = stage.connect(DB);
    client.run(&format!(
        "create function run_worker(text, text) returns void language c as '{library}', 'run_worker'"
    ));
    for how in ["error", "fatal", "proc_exit"] {
        client.run(&format!("select run_worker('{library}', '{how}')"));
    }
    nothing_remains(&stage, 0);
}

#[test]
fn a_walsender_that_is_terminated_leaves_nothing() {
    let stage = stage(&[]);
    let mut psql = Command::new(stage.installation().bin("psql"))
        .args(["-X", "-q", "-d"])
        .arg(format!(
            "{} replication=database application_name=walsender",
            stage.conn_string(DB)
        ))
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("psql");
    let sql = "begin;\nselect outbox_publish('T', '{}', 'item', 'a');\n";
    std::io::Write::write_all(psql.stdin.as_mut().expect("its input"), sql.as_bytes()).expect("written");
    let walsender =
        "select pid from pg_stat_activity where backend_type = 'walsender' and state = 'idle in transaction'";
    wait_true(
        &stage,
        "the walsender to have published",
        &format!("select exists ({walsender}) and exists (select from outbox_open_transactions())"),
    );
    terminate(&stage, stage.query_one(DB, walsender));
    drop(psql.stdin.take());
    psql.wait().expect("psql ends");
    nothing_remains(&stage, 0);
}

#[test]
fn an_apply_worker_that_fails_after_it_published_leaves_nothing() {
    let stage = stage(&["wal_level = logical"]);
    stage.exec(DB, "create database source");
    for database in [DB, "source"] {
        stage.exec(database, "create table orders (id integer primary key)");
    }
    stage.exec("source", "create publication orders for table orders");
    stage.exec(
        "source",
        "select pg_create_logical_replication_slot('orders', 'pgoutput')",
    );
    let offset = stage.log_offset();
    stage.exec(
        DB,
        &format!(
            "create function fails() returns trigger language plpgsql as $$ begin
               perform public.outbox_publish('T', '{{}}', 'item', 'a'); raise 'the trigger fails'; end $$;
             create trigger fails after insert on orders for each row execute function fails();
             alter table orders enable always trigger fails;
             create subscription orders connection '{}' publication orders with (create_slot = false, copy_data = false)",
            stage.conn_string("source")
        ),
    );
    stage.exec("source", "insert into orders values (1)");
    stage.wait_for_log("the trigger fails", offset);
    stage.exec(DB, "alter subscription orders disable");
    wait_true(
        &stage,
        "the apply worker to end",
        "select not exists (select from pg_stat_activity where backend_type like 'logical replication%worker' and datname = 'postgres')",
    );
    nothing_remains(&stage, 0);
}

#[test]
fn an_autovacuum_worker_that_fails_after_it_published_leaves_nothing() {
    let stage = stage(&["autovacuum_naptime = '1 s'", "autovacuum_analyze_threshold = 1"]);
    let offset = stage.log_offset();
    stage.exec(
        DB,
        "create function fails(n integer) returns integer immutable language plpgsql as $$ begin
           if (select backend_type from pg_stat_activity where pid = pg_backend_pid()) = 'autovacuum worker' then
             perform public.outbox_publish('T', '{}', 'item', 'a'); raise 'the expression fails';
           end if;
           return n; end $$;
         create table orders (n integer); create index on orders (fails(n));
         insert into orders select n from generate_series(1, 100) n",
    );
    stage.wait_for_log("the expression fails", offset);
    stage.exec(DB, "drop table orders");
    nothing_remains(&stage, 0);
}

// ---- what is left nevertheless --------------------------------------------------------------------------------------

#[test]
fn what_a_process_has_left_is_not_named_and_is_freed_by_the_launcher() {
    let stage = stage(&[]);
    let library = library(&stage);
    let mut left = stage.connect(DB);
    left.run(&format!(
        "create function name_no_process(integer) returns void language c as '{}', 'name_no_process'",
        library.display()
    ));
    left.run("begin; select outbox_publish('T', '{}', 'item', 'a')");
    let named = "select count(*) from outbox_open_transactions()";
    assert_eq!(stage.query_one::<i64>(DB, named), 1);
    left.run("select name_no_process(current_setting('max_prepared_transactions')::integer)");
    assert_eq!(stage.query_one::<i64>(DB, named), 0);
    let (is_healthy, problem) = health(&stage, "transactions");
    assert!(is_healthy, "{problem}");
    stage.reload(); // the launcher reads the databases again, as it does every minute
    nothing_remains(&stage, 0);
    left.run("rollback");
    nothing_remains(&stage, 2);
}
