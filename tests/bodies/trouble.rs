//! Failures of the function that makes bodies: messages that it fails for, actions that it may not take, time that it
//! takes from others, and functions that cannot be used.

use support::{Cluster, Consumer};

use super::{numbers, publish, shop_stage};
use support::*;

const TWO_TRIES: &[&str] = &["outbox.max_attempts = 2", "outbox.retry_backoff = '10ms'"];

/// Seq, attempts and reason of all dead letters.
fn dead(cluster: &Cluster) -> Vec<(i64, i32, String)> {
    let rows = cluster
        .connect(DB)
        .query("select seq, attempts, reason from outbox_dead order by seq", &[]);
    rows.expect("dead letters")
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2)))
        .collect()
}

fn wait_dead(cluster: &Cluster, n: usize) -> Vec<(i64, i32, String)> {
    wait_true(
        cluster,
        "dead letters",
        &format!("select count(*) >= {n} from outbox_dead"),
    );
    let dead = dead(cluster);
    assert_eq!(dead.len(), n, "{dead:?}");
    dead
}

#[test]
fn the_error_of_a_message_is_charged_to_it_and_the_others_go_out() {
    let stage = shop_stage(TWO_TRIES);
    let function = |body: &str| {
        format!(
            "set role shopkeeper; create or replace function shop.checked(event jsonb) returns jsonb language plpgsql as $$
             declare n int := event->'payload'->'n'; begin {body} return jsonb_build_object('n', n); end $$"
        )
    };
    stage.exec(
        DB,
        &function(
            "case n when 1 then raise 'the first'; when 50 then n := 1 / (n - 50); when 70 then return null;
                    when 100 then perform 'x'::int; else null; end case;",
        ),
    );
    // A function of its own, since a large value of type jsonb takes long to make.
    stage.exec(
        DB,
        "set role shopkeeper; create function shop.big(event jsonb) returns text language sql as
           $$ select repeat('x', 15 * 1048576 + 1) $$",
    );
    let queue = stage.destination(stage.broker, "search", "body 'shop.checked'");
    stage.destination(stage.broker, "big", "body 'shop.big'");
    publish(&stage, "search", 100);
    // The event of message 101 does not exist, so the function is never called for it.
    stage.draw_seqs(101);
    stage.exec(
        DB,
        "select outbox_enqueue(101, 'none', 'search'), outbox_enqueue(71, 'none', 'big')",
    );
    let dead = wait_dead(&stage, 6);
    wait_drained(&stage);
    let expected = [
        (1, 2, "the first (SQLSTATE P0001)"),
        (50, 2, "division by zero (SQLSTATE 22012)"),
        (70, 1, "shop.checked returned NULL: there is no body to send"),
        (
            71,
            1,
            "shop.big returned 15728641 bytes, which exceeds the limit of 15 MiB",
        ),
        (100, 2, "invalid input syntax for type integer: \"x\" (SQLSTATE 22P02)"),
        (101, 1, "the event store has no event with seq 101"),
    ];
    for ((seq, attempts, reason), (row, tries, words)) in dead.iter().zip(expected) {
        assert_eq!((*seq, *attempts), (row, tries), "{reason}");
        assert!(reason.contains(words), "{reason}");
    }
    let ill = [1, 50, 70, 100];
    let well: Vec<i64> = (1..=100).filter(|n| !ill.contains(n)).collect();
    assert_eq!(numbers(&all_of(stage.broker, &queue)), well);
    stage.exec(DB, &function(""));
    stage.exec(
        DB,
        "select outbox_discard(101, 'search'), outbox_discard(71, 'big');
         select outbox_retry(seq, 'search') from outbox_dead",
    );
    wait_drained(&stage);
    assert_eq!(numbers(&all_of(stage.broker, &queue)), ill);
}

#[test]
fn only_its_key_waits_behind_a_message_that_has_no_body() {
    // Two attempts, because a slow machine may exceed the time limit of a body once.
    let stage = shop_stage(TWO_TRIES);
    stage.exec(
        DB,
        "set role shopkeeper; create function shop.checked(event jsonb) returns jsonb language sql as
           $$ select case when event->'payload'->>'n' = '2' then null else event->'payload' end $$",
    );
    let queue = stage.destination(stage.broker, "search", "body 'shop.checked'");
    stage.exec(
        DB,
        "select outbox_publish('T', jsonb_build_object('n', i), 'order', (i / 10)::text, destination => 'search')
         from generate_series(1, 14) i",
    );
    wait_true(
        &stage,
        "a blocked key",
        "select count(*) = 7 and exists (select from outbox_dead where seq = 2) from outbox_waiting where state = 'g'",
    );
    wait_published(&stage, 6);
    assert_eq!(numbers(&all_of(stage.broker, &queue)), [1, 10, 11, 12, 13, 14]);
    stage.exec(DB, "select outbox_discard(2, 'search')");
    wait_drained(&stage);
    assert_eq!(numbers(&all_of(stage.broker, &queue)), [3, 4, 5, 6, 7, 8, 9]);
}

#[test]
fn a_function_runs_as_its_owner_and_can_do_nothing_but_read() {
    let stage = shop_stage(TWO_TRIES);
    stage.exec(
        DB,
        "create schema trap; grant usage on schema trap to public;
         create function trap.escape() returns void security definer language plpgsql as
           $$ begin create temp table left_behind (); end $$;
         create function trap.climb() returns void security definer language plpgsql as
           $$ begin perform set_config('role', 'postgres', false); end $$;
         create function public.lower(text) returns text language sql as $$ select 'trapped' $$;
         create table public.orders (); grant select on public.orders to public;
         set role shopkeeper;
         create table shop.own (n int); create sequence shop.numbers;
         create function shop.nosy(event jsonb) returns jsonb language plpgsql as $$ begin
           case event->'payload'->>'what'
             when 'role' then set role outbox_worker;
             when 'reset' then reset role;
             when 'config' then perform set_config('role', 'outbox_worker', false);
             when 'authorization' then set session authorization postgres;
             when 'temporary' then create temp table orders ();
             when 'definer' then perform trap.escape();
             when 'climb' then perform trap.climb();
             when 'outbox' then delete from public.outbox;
             when 'events' then perform 1 from public.outbox_events;
             when 'own' then insert into shop.own values (1);
             when 'sequence' then perform nextval('shop.numbers');
             when 'cursor' then execute 'declare c cursor with hold for select 1';
             when 'setting' then set transaction_read_only = off;
             when 'commit' then commit;
             when 'publish' then perform public.outbox_publish('T', '{}');
             when 'unqualified' then perform 1 from orders;
             when 'nothing' then
               perform set_config('my.mark', 'left behind', false), set_config('search_path', 'public', false);
             else null;
           end case;
           return jsonb_build_object('who', current_user, 'path', current_setting('search_path'), 'lower', lower('X'),
                                     'mark', current_setting('my.mark', true), 'temp', to_regclass('pg_temp.orders'));
         end $$",
    );
    let queue = stage.destination(stage.broker, "nosy", "body 'shop.nosy'");
    let tricks = [
        ("role", "42501"),
        ("reset", "42501"),
        ("config", "42501"),
        ("authorization", "42501"),
        ("temporary", "25006"),
        ("definer", "25006"),
        ("climb", "42501"),
        ("outbox", "25006"),
        ("events", "42501"),
        ("own", "25006"),
        ("sequence", "25006"),
        ("cursor", "42501"),
        ("setting", "25001"),
        ("commit", "2D000"),
        ("publish", "42501"),
        ("unqualified", "42P01"),
    ];
    let publish = |what: &str| {
        stage.exec(
            DB,
            &format!(
                "select outbox_publish('T', '{{\"what\": \"{what}\"}}', 'trick', '{what}', destination => 'nosy')"
            ),
        );
    };
    tricks.iter().for_each(|(what, _)| publish(what));
    let dead = wait_dead(&stage, tricks.len());
    for ((_, attempts, reason), (what, sqlstate)) in dead.iter().zip(tricks) {
        assert_eq!(*attempts, 2, "{what}: {reason}");
        assert!(reason.contains(sqlstate), "{what}: {reason}");
    }
    // Settings that the function makes must not persist: the session is the worker's and may last for years.
    publish("nothing");
    wait_published(&stage, 1);
    publish("else");
    wait_drained(&stage);
    let arrived = all_of(stage.broker, &queue);
    assert_eq!(arrived.len(), 2);
    assert_eq!(arrived[0].json()["path"], "public");
    let plain = arrived[1].json();
    assert_eq!(plain["who"], "shopkeeper");
    assert_eq!(plain["path"], "pg_catalog, pg_temp");
    assert_eq!(plain["lower"], "x");
    assert_ne!(plain["mark"], "left behind");
    assert!(plain["temp"].is_null(), "{plain}");
    assert_eq!(stage.query_one::<i64>(DB, "select count(*) from shop.own"), 0);
}

#[test]
fn messages_wait_while_their_function_cannot_be_used_and_go_when_it_is_fixed() {
    let stage = shop_stage(TWO_TRIES);
    let queue = stage.destination(stage.broker, "search", "body 'shop.short'");
    let (consumer, other) = (Consumer::new(stage.broker, &queue), stage.consumer());
    stage.exec(
        DB,
        "create role clerk in role outbox_admin; create role stranger; grant create on schema shop to stranger, clerk;
         alter server search owner to clerk; grant shopkeeper to clerk;
         create schema attic authorization shopkeeper",
    );
    let make = "set role shopkeeper; create function shop.short(event jsonb) returns jsonb language sql as 'select event->''payload'''";
    let instead = |returns: &str, sql: &str| {
        format!(
            "drop function shop.short(jsonb); create function shop.short(event jsonb) returns {returns} language sql as '{sql}';
             alter function shop.short(jsonb) owner to shopkeeper"
        )
    };
    let (number, several) = (instead("int", "select 1"), instead("setof jsonb", "select event"));
    let again = format!("drop function shop.short(jsonb); {make}");
    let troubles = [
        ("drop function shop.short(jsonb)", make, "does not exist"),
        (
            "alter function shop.short(jsonb) set schema attic",
            "alter function attic.short(jsonb) set schema shop",
            "does not exist",
        ),
        (
            "alter function shop.short(jsonb) owner to postgres",
            "alter function shop.short(jsonb) owner to shopkeeper",
            "belongs to a superuser",
        ),
        (
            "alter function shop.short(jsonb) owner to stranger",
            "alter function shop.short(jsonb) owner to shopkeeper",
            "clerk, who owns the server, may not act as stranger",
        ),
        (
            "revoke shopkeeper from clerk",
            "grant shopkeeper to clerk",
            "may not act as shopkeeper",
        ),
        (
            "alter server search owner to stranger",
            "alter server search owner to clerk",
            "may not act as shopkeeper",
        ),
        (&*number, &again, "does not return text"),
        (&*several, &again, "does not return text"),
        (
            "revoke execute on function shop.short(jsonb) from public, shopkeeper",
            "grant execute on function shop.short(jsonb) to shopkeeper",
            "42501",
        ),
    ];
    // The owner of a server needs a right on its wrapper.
    stage.exec(DB, "grant outbox_admin to stranger");
    for (n, (trouble, fix, words)) in troubles.into_iter().enumerate() {
        let n = n as i64 + 1;
        let (ok, problem) = health(&stage, "bodies");
        assert!(ok, "{trouble}: {problem}");
        let offset = stage.log_offset();
        // In two transactions: a commit may wake the worker a moment before the invalidation reaches its caches.
        stage.exec(DB, trouble);
        stage.exec(
            DB,
            &format!(
                "select outbox_publish('T', '{{\"n\": {n}}}', 'order', '1', destination => 'search');
                 select outbox_publish('T', '{n}')"
            ),
        );
        if n == 1 {
            stage.wait_for_log(
                "no body for destination search: function shop.short(jsonb) does not exist",
                offset,
            );
        }
        let problem = wait_for_problem(&stage, "bodies");
        assert!(
            problem.contains(words) && problem.starts_with("search: "),
            "{trouble}: {problem}"
        );
        assert_eq!(
            other.recv(LONG).expect("a message to the other destination").json()["payload"],
            n
        );
        let ticked = "select (outbox_run_pass('60 s')->>'duration_ms')::float8 < 30000";
        assert!(stage.query_one::<bool>(DB, ticked), "a pass waits for {trouble}");
        let untouched = "select attempts = 0 and claim_token is null from outbox where destination = 'search'";
        assert!(stage.query_one::<bool>(DB, untouched), "{trouble}");
        stage.exec(DB, fix);
        assert_eq!(consumer.next().json()["n"], n, "{trouble}");
    }
    wait_drained(&stage);
    assert!(dead(&stage).is_empty());
}

#[test]
fn a_function_that_takes_too_long_is_charged_and_no_other_destination_waits_for_it() {
    let stage = shop_stage(&["outbox.max_attempts = 1"]);
    stage.exec(
        DB,
        "set role shopkeeper; create function shop.slow(event jsonb) returns jsonb language plpgsql as $$
         begin while event->'payload'->>'n' <> '3' loop null; end loop; return event->'payload'; end $$",
    );
    let queue = stage.destination(stage.broker, "slow", "body 'shop.slow'");
    publish(&stage, "slow", 30);
    wait_true(
        &stage,
        "the first dead letter",
        "select exists (select from outbox_dead)",
    );
    // The slow messages take the worker a minute and a half; no other destination may wait that long.
    for n in 1..=20 {
        stage.exec(DB, &format!("select outbox_publish('T', '{n}')"));
    }
    wait_true(
        &stage,
        "another destination to be served",
        "select count(*) = 20 from outbox_history where destination = 'default'",
    );
    let given_up = dead(&stage);
    assert!(
        (1..25).contains(&given_up.len()),
        "{} of 29 became dead letters meanwhile",
        given_up.len()
    );
    assert_eq!(stage.all().len(), 20);
    assert!(
        given_up.iter().all(|(_, _, reason)| reason.contains("57014")),
        "{given_up:?}"
    );
    // A message whose body is made in time is delivered among them.
    stage.exec(
        DB,
        "set role shopkeeper; create or replace function shop.slow(event jsonb) returns jsonb language sql as 'select event->''payload'''",
    );
    wait_drained(&stage);
    let came = all_of(stage.broker, &queue).len();
    assert_eq!(came + dead(&stage).len(), 30);
    assert!(came > 0);
}

#[test]
fn a_function_waits_half_a_second_for_a_lock() {
    let stage = shop_stage(&["outbox.max_attempts = 100", "outbox.retry_backoff = '100ms'"]);
    stage.exec(
        DB,
        "set role shopkeeper; create table shop.orders (n int); insert into shop.orders values (1);
         create function shop.order_of(event jsonb) returns jsonb language plpgsql as
           $$ begin return (select jsonb_build_object('n', o.n) from shop.orders o); end $$",
    );
    let queue = stage.destination(stage.broker, "search", "body 'shop.order_of'");
    let mut holder = stage.connect(DB);
    holder.run("begin; lock table shop.orders in access exclusive mode");
    publish(&stage, "search", 1);
    wait_true(
        &stage,
        "an attempt to fail",
        "select exists (select from outbox_waiting where attempts > 0 and last_error like '%55P03%')",
    );
    holder.run("commit");
    wait_drained(&stage);
    assert_eq!(numbers(&all_of(stage.broker, &queue)), [1]);
}
