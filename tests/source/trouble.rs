//! Tests of failures of a source: rows that cannot be read, expressions that exceed their rights, and a missing source.

use postgres::error::SqlState;
use support::Cluster;

use super::{MAPPED, SHOP, numbers, set_source, write};
use support::*;

const TWO_TRIES: &[&str] = &["outbox.max_attempts = 2", "outbox.retry_backoff = '10ms'"];

/// The dead letters: seq, attempts and reason, by seq.
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
fn the_error_of_a_row_is_charged_to_it_and_the_others_go_out() {
    let stage = Stage::new(TWO_TRIES);
    stage.exec(DB, SHOP);
    stage.exec(
        DB,
        "set role shopkeeper; create function shop.checked(n int) returns int language plpgsql immutable as $$
         begin if n = 70 then raise 'seventy'; end if; return n; end $$",
    );
    let checked = ", payload => 'jsonb_build_object(''n'', shop.checked((data->>''n'')::int), ''i'', 1 / ((data->>''n'')::int - 50))',
                   actor => 'case data->>''n'' when ''30'' then (''x'' || uid)::int end'";
    stage.exec(DB, &set_source(checked));
    write(&stage, 100);
    stage.exec(DB, "select outbox_enqueue(101, 'none')"); // no row
    let dead = wait_dead(&stage, 4);
    wait_drained(&stage);
    let expected = [
        (30, 2, "invalid input syntax for type integer", "22P02"),
        (50, 2, "division by zero", "22012"),
        (70, 2, "seventy", "P0001"),
        (101, 1, "shop.events has no row with seq 101", ""),
    ];
    for ((seq, attempts, reason), (row, tries, words, sqlstate)) in dead.iter().zip(expected) {
        assert_eq!((*seq, *attempts), (row, tries), "{reason}");
        assert!(reason.contains(words) && reason.contains(sqlstate), "{reason}");
    }
    let ill = [30, 50, 70];
    let well: Vec<i64> = (1..=100).filter(|n| !ill.contains(n)).collect();
    assert_eq!(numbers(&stage.all()), well);
    stage.exec(DB, &set_source(MAPPED));
    stage.exec(
        DB,
        "select outbox_discard(101); select outbox_retry(seq) from outbox_dead",
    );
    wait_drained(&stage);
    assert_eq!(numbers(&stage.all()), ill);
}

#[test]
fn a_seq_that_matches_two_rows_counts_as_no_match() {
    let stage = Stage::new(&["outbox.max_attempts = 1"]);
    stage.exec(DB, SHOP);
    stage.exec(
        DB,
        "set role shopkeeper; create view shop.twice as select e.*, case g when 2 then 'b' else 'a' end as half
           from shop.events e cross join lateral generate_series(1, case e.position when 2 then 2 else 1 end) g",
    );
    stage.exec(DB, &set_source(MAPPED).replace("shop.events", "shop.twice"));
    write(&stage, 3);
    let dead = wait_dead(&stage, 1);
    assert!(dead[0].0 == 2 && dead[0].2.contains("more than one row"), "{dead:?}");
    wait_drained(&stage);
    assert_eq!(numbers(&stage.all()), [1, 3]);
}

#[test]
fn expressions_run_as_the_owner_and_can_do_nothing_else() {
    let stage = Stage::new(TWO_TRIES);
    stage.exec(DB, SHOP);
    stage.exec(
        DB,
        "set role shopkeeper; create function shop.nosy(what text) returns jsonb language plpgsql as $$ begin
           case what
             when 'role' then set role outbox_worker;
             when 'reset' then reset role;
             when 'authorization' then set session authorization postgres;
             when 'tables' then create temp table t ();
             when 'rows' then delete from public.outbox;
             when 'own rows' then update shop.events set data = '1';
             when 'setting' then set transaction_read_only = off;
             when 'commit' then commit;
             when 'nothing' then perform set_config('my.mark', 'left behind', false);
             else null;
           end case;
           return to_jsonb(current_user || ' ' || current_setting('search_path') || ' ' || current_setting('transaction_read_only'));
         end $$",
    );
    stage.exec(DB, &set_source(", payload => 'shop.nosy(data#>>''{}'')'"));
    let tricks = [
        "role",
        "reset",
        "authorization",
        "tables",
        "rows",
        "own rows",
        "setting",
        "commit",
    ];
    for what in tricks.iter().chain(&["nothing"]) {
        stage.exec(DB, &format!("select shop.write(to_jsonb('{what}'::text), '{what}')"));
    }
    let dead = wait_dead(&stage, tricks.len());
    for ((_, attempts, reason), what) in dead.iter().zip(tricks) {
        assert_eq!(*attempts, 2, "{what}: {reason}");
        // Rights, read-only, too late for read-write, no transaction control.
        let sqlstates = ["42501", "25006", "25001", "2D000"];
        assert!(
            sqlstates.iter().any(|sqlstate| reason.contains(sqlstate)),
            "{what}: {reason}"
        );
    }
    wait_drained(&stage);
    let arrived = stage.all();
    assert_eq!(arrived.len(), 1);
    assert_eq!(arrived[0].json()["payload"], "shopkeeper pg_catalog, pg_temp on");
    // A session that enqueues without a key runs the expressions as well, and lends them none of its rights.
    stage.exec(DB, &set_source(", key => 'shop.nosy(data#>>''{}'')::text'"));
    stage.exec(DB, "create role teller in role outbox_writer");
    for what in tricks {
        let seq: i64 = stage.query_one(
            DB,
            &format!("select position from shop.events where stream_id = '{what}'"),
        );
        let db_error = refused(&stage, &format!("set role teller; select outbox_enqueue({seq})"));
        let sqlstates = ["42501", "25006", "25001", "2D000"];
        assert!(sqlstates.contains(&db_error.code().code()), "{what}: {db_error:?}");
    }
    let mut teller = stage.connect(DB);
    teller.run("set role teller; select outbox_enqueue(9)");
    let mark = teller
        .query_one("select current_setting('my.mark', true)", &[])
        .expect("a setting");
    assert_eq!(mark.get::<_, Option<String>>(0).unwrap_or_default(), "");
    let key = "select exists (select from outbox_history where seq = 9 and key like '%shopkeeper%')";
    wait_true(&stage, "a key that the owner made", key);
}

#[test]
fn the_code_of_a_source_never_runs_as_a_superuser() {
    let stage = Stage::new(&[]);
    stage.exec(DB, SHOP);
    stage.exec(
        DB,
        "create table trap (seq bigint, at timestamptz); create table caught (as_role text);
         create function spring() returns text language plpgsql as $$ begin
           insert into caught values (current_user); return 'T'; end $$",
    );
    let trap = "select outbox_source_set('trap', seq => 'seq', type => 'public.spring()', created_at => 'at')";
    let error = refused(&stage, trap);
    assert_eq!(error.code(), &SqlState::INSUFFICIENT_PRIVILEGE, "{error:?}");
    assert!(
        error
            .hint()
            .is_some_and(|hint| hint.contains("ALTER TABLE public.trap OWNER TO")),
        "{error:?}"
    );

    // The owner becomes a superuser later.
    stage.exec(DB, &set_source(", payload => 'data'"));
    stage.exec(DB, "alter role shopkeeper superuser");
    stage.exec(
        DB,
        "insert into shop.events (\"eventKind\", stream_id, data)
         select 'Written', 's' || n, jsonb_build_object('n', n) from generate_series(1, 3) n;
         select outbox_enqueue(position, 'key ' || position) from shop.events",
    );
    let problem = "select coalesce(outbox_source_problem(), '') like '%its owner is a superuser%'";
    wait_true(&stage, "the problem to be shown", problem);
    stage.exec(DB, "alter role shopkeeper nosuperuser");
    wait_drained(&stage);
    assert_eq!(numbers(&stage.all()), [1, 2, 3]);

    // A row that outbox_source_set did not write.
    stage.exec(
        DB,
        "update outbox_source set relation = 'public.trap', relation_oid = 'trap'::regclass, owner = 'postgres',
           seq = 'seq', type = 'public.spring()', created_at = 'at', payload = null",
    );
    wait_true(&stage, "the problem of the row", problem);
    let asked = stage.connect(DB).batch_execute("select outbox_enqueue(1)");
    assert!(asked.is_err(), "the key was read");
    assert_eq!(stage.query_one::<i64>(DB, "select count(*) from caught"), 0);
}

#[test]
fn forced_row_security_applies_to_the_owner() {
    let stage = Stage::new(&[]);
    stage.exec(DB, SHOP);
    stage.exec(DB, &set_source(MAPPED));
    stage.exec(
        DB,
        "alter table shop.events enable row level security, force row level security;
         create policy open_ones on shop.events using (data->>'n' <> '2');
         insert into shop.events (\"eventKind\", data) select 'T', jsonb_build_object('n', i) from generate_series(1, 3) i;
         select outbox_enqueue(i, 'key ' || i) from generate_series(1, 3) i",
    );
    let dead = wait_dead(&stage, 1);
    assert!(dead[0].2.contains("no row with seq 2"), "{dead:?}");
    wait_drained(&stage);
    assert_eq!(numbers(&stage.all()), [1, 3]);
}

#[test]
fn a_broken_source_holds_its_messages_until_it_is_fixed() {
    let stage = Stage::new(TWO_TRIES);
    let consumer = stage.consumer();
    stage.exec(DB, SHOP);
    stage.exec(DB, &set_source(MAPPED));
    // Each statement takes a lock: a worker is woken before its caches are invalidated by a commit.
    let troubles = [
        (
            "alter table shop.events drop data",
            "alter table shop.events add data jsonb",
            "42703",
        ),
        (
            "alter table shop.events rename to gone",
            "alter table shop.gone rename to events",
            "42P01",
        ),
        (
            "lock shop.events; revoke select on shop.events from shopkeeper",
            "grant select on shop.events to shopkeeper",
            "42501",
        ),
        (
            "alter table shop.events owner to postgres",
            "alter table shop.events owner to shopkeeper",
            "belongs to another role",
        ),
        (
            "alter table shop.events rename position to place",
            "select outbox_source_set('shop.events', seq => 'place', type => 'eventKind', created_at => 'at')",
            "42703",
        ),
    ];
    let mut seq = 0;
    for (trouble, fix, sqlstate) in troubles {
        let (ok, problem) = health(&stage, "source");
        assert!(ok, "{trouble}: {problem}");
        seq += 1;
        let offset = stage.log_offset();
        stage.exec(
            DB,
            &format!("begin; insert into shop.events (\"eventKind\") values ('T'); select outbox_enqueue({seq}, 'k'); {trouble}; commit"),
        );
        stage.wait_for_log("the source shop.events cannot be read: ", offset);
        let problem = wait_for_problem(&stage, "source");
        assert!(problem.contains(sqlstate), "{problem}");
        // Four failures within seconds are what the check for statements of the workers counts.
        let count = r#"select coalesce(sum(count), 0) > 4 from outbox_errors where kind = 'source'"#;
        wait_true(&stage, "the source to fail again and again", count);
        assert_eq!(health(&stage, "database"), (true, String::new()), "{trouble}");
        let untouched = format!("select attempts = 0 and claim_token is null from outbox where seq = {seq}");
        assert!(stage.query_one::<bool>(DB, &untouched), "{trouble}");
        stage.exec(DB, fix);
        let delivery = consumer.next();
        assert_eq!(delivery.json()["seq"], seq);
    }
    wait_drained(&stage);
    assert!(dead(&stage).is_empty());
}

#[test]
fn a_locked_source_charges_nothing_and_a_slow_row_is_charged_alone() {
    let stage = Stage::new(&["outbox.max_attempts = 1"]);
    stage.exec(DB, SHOP);
    stage.exec(
        DB,
        "set role shopkeeper; create function shop.never() returns jsonb language plpgsql as 'begin loop null; end loop; end'",
    );
    stage.exec(
        DB,
        &set_source(", payload => 'case data->>''n'' when ''3'' then shop.never() else data end'"),
    );
    let mut holder = stage.connect(DB);
    let offset = stage.log_offset();
    write(&stage, 2);
    wait_drained(&stage);
    holder.run("begin; lock table shop.events in access exclusive mode");
    stage.exec(DB, "select outbox_enqueue(1, 'again')");
    stage.wait_for_log("lock timeout (SQLSTATE 55P03)", offset);
    holder.run("commit");
    wait_published(&stage, 3);
    write(&stage, 10);
    let dead = wait_dead(&stage, 1);
    assert!(dead[0].2.contains("57014"), "{dead:?}");
    wait_drained(&stage);
    assert_eq!(numbers(&stage.all()), [1, 1, 1, 2, 2, 4, 5, 6, 7, 8, 9, 10]);
}

/// The expression traps every cancel, and so the one that a time limit sends.
#[test]
fn an_expression_that_traps_cancels_is_charged_to_its_row_and_delivery_continues() {
    let stage = Stage::new(TWO_TRIES);
    stage.exec(DB, SHOP);
    stage.exec(
        DB,
        "set role shopkeeper; create function shop.stubborn(data jsonb) returns jsonb language plpgsql as $$ begin
           while data->>'n' = '2' loop
             begin loop null; end loop; exception when query_canceled then loop null; end loop; end;
           end loop;
           return data; end $$",
    );
    stage.exec(DB, &set_source(", payload => 'shop.stubborn(data)'"));
    let worker = "select pid from pg_stat_activity where backend_type = 'outbox worker'";
    wait_connected(&stage);
    let before: i32 = stage.query_one(DB, worker);
    write(&stage, 3);
    let dead = wait_dead(&stage, 1);
    wait_drained(&stage);
    let reason = "canceling statement due to statement timeout (SQLSTATE 57014)";
    assert!(
        (dead[0].0, dead[0].1) == (2, 2) && dead[0].2.starts_with(reason),
        "{dead:?}"
    );
    assert_eq!(numbers(&stage.all()), [1, 3]);
    assert_eq!(stage.query_one::<i32>(DB, worker), before);
}
