//! Tests that the session of a caller changes nothing in what runs with the rights of another role: its search_path,
//! the objects that it finds there first, and its settings.

use support::{Cluster, DB, Remedy, Session, health, idle_cluster, quiet_cluster, refused, run_remedy, wait_healthy};

/// What each trap logs. A comparison by a collation of the caller fails instead.
const SPRUNG: &str = "a trap ran as";
const OF_A_COLLATION: &str = "could not create locale";

/// The search_path of a session of mallory, whose schemas the traps are in; and tables of its own with the names of
/// ours.
const CAUGHT: [&str; 3] = [
    "evil, pg_catalog, public",
    "shapes, pg_catalog, public",
    "pg_catalog, pg_temp, public",
];

const OF_THE_SESSION: &str = "
do $$
declare
  thing record;
begin
  for thing in select c.oid::regclass as relation, c.relname as name from pg_class c
               where c.relnamespace in ('public'::regnamespace, 'outbox_internal'::regnamespace) and c.relkind in ('r', 'p', 'v')
  loop
    execute format('create temporary view %I as select * from %s where evil.sprung(%L)', thing.name, thing.relation,
                   'temporary relation ' || thing.name);
  end loop;
end $$";

/// A server with traps, and with a trigger on each table of messages whose function names nothing with its schema.
fn trapped() -> Cluster {
    let cluster = idle_cluster(&[]);
    let mut client = cluster.connect(DB);
    client.run(include_str!("raised/traps.sql"));
    for row in client
        .query(
            "select 'type' as kind, count(*) from pg_type where typnamespace = 'evil'::regnamespace and typtype = 'd'
             union all select 'function', count(*) from pg_proc where pronamespace = 'evil'::regnamespace
             union all select 'operator', count(*) from pg_operator where oprnamespace = 'evil'::regnamespace
             union all select 'cast', 10 * count(*) from pg_cast x join pg_type t on t.oid = x.casttarget
               where t.typnamespace = 'shapes'::regnamespace
             union all select 'relation', count(*) from pg_class where relnamespace = 'evil'::regnamespace and relkind = 'v'
             union all select 'collation', 20 * count(*) from pg_collation where collnamespace = 'evil'::regnamespace",
            &[],
        )
        .expect("what there is")
    {
        let (kind, count): (String, i64) = (row.get(0), row.get(1));
        assert!(count > 50, "{count} traps: {kind}");
    }
    // As a libc that was replaced leaves it: to compare with it is an error.
    client.run(
        "update pg_collation set collcollate = 'nowhere', collctype = 'nowhere' where collnamespace = 'evil'::regnamespace",
    );
    cluster
}

/// A session of mallory.
fn session(cluster: &Cluster, search_path: &str) -> postgres::Client {
    let mut client = cluster.connect(DB);
    client.run("set session authorization mallory");
    client.run(OF_THE_SESSION);
    client.run(&format!("set search_path = {search_path}"));
    client
}

fn traps(cluster: &Cluster, from: usize) -> Vec<String> {
    let log = cluster.log();
    let lines = log[from..].lines();
    let sprung = lines.filter(|line| line.contains(SPRUNG) || line.contains(OF_A_COLLATION));
    sprung.map(str::to_owned).collect()
}

/// Everything that runs with the rights of the worker role in a session of a member of outbox_admin.
const CALLS: &[&str] = &[
    "outbox_publish('T', '{}', 'a', '1', headers => '{\"h\": 1}')",
    "outbox_publish('T', '{}', 'a', '1', id => '00000000-0000-7000-8000-000000000001', if_exists => 'skip')",
    "outbox_publish('T', '{}', 'a', '1', id => '00000000-0000-7000-8000-000000000001', if_exists => 'skip')",
    "outbox_publish('T', '{}', 'a', '2', available_at => 'tomorrow', expires_at => '2100-01-01')",
    "outbox_publish('T', '{}', 'a', '2', available_at => 'tomorrow')",
    "outbox_publish('T', '{}', 'a', '3', destination => 'audit')",
    "outbox_store('{}', '{\"type\": \"T\"}', key => 'k')",
    "outbox_subscribe('audit', '{T}', '{a}', '{\"h\": 1}', 'actor is null')",
    "outbox_subscribe('default', '{T}')",
    "outbox_publish('T', '{}', 'a', '4', headers => '{\"h\": 1}')",
    "outbox_publish('T', '{}', 'a', '4', headers => '{\"h\": 1}', if_exists => 'skip', id => '00000000-0000-7000-8000-000000000002')",
    "outbox_enqueue(1)",
    "outbox_enqueue_many('{1,2}', available_at => 'tomorrow')",
    "outbox_enqueue(100, 'k')",
    "outbox_unsubscribe('audit')",
    "outbox_unsubscribe('default')",
    "outbox_configure(partitioner => 'evil.first')",
    "outbox_publish('T', '{}', 'a', '5')",
    "outbox_partition_of('k')",
    "outbox_configure(partition_count => 4, partitioner => '')",
    "outbox_capture('evil.orders')",
    "outbox_attach('evil.journal', key => 'kind')",
    "outbox_retry(1)",
    "outbox_discard(2, reason => 'r')",
    "outbox_retry_where(destination => 'audit', type => 'T', dry_run => false)",
    "outbox_discard_where(seq_from => 1, type => 'T', dry_run => false)",
    "outbox_replay(type => 'T', dry_run => false)",
    "outbox_purge('a', '5', dry_run => false)",
    "outbox_pause('audit', 'r')",
    "outbox_resume('audit')",
    "outbox_drain('1 ms')",
    "outbox_adopt()",
    "outbox_inbox_assign('c', 'outbox_admin')",
    "outbox_inbox_receive('c', 'm')",
    "outbox_inbox_forget('c')",
    "outbox_fetch_unpublished(max_rows => 1)",
    "outbox_mark_failed(1, 1, 'e')",
    "outbox_mark_published(1, 1)",
    "outbox_history_partitions()",
    "outbox_source_problem()",
    "outbox_discard_where(seq_from => 1, dry_run => false)",
];

/// With all messages gone.
const OF_A_SOURCE: &[&str] = &[
    "outbox_source_set('evil.journal', seq => 'seq', type => 'kind', created_at => 'at', aggregate_id => 'kind')",
    "outbox_subscribe('audit', '{T}', when_sql => 'actor is null')",
    "outbox_enqueue(1)",
    "outbox_enqueue(2, 'k')",
    "outbox_source_problem()",
    "outbox_unsubscribe('audit')",
];

#[test]
fn nothing_that_a_callers_search_path_finds_runs_with_other_rights() {
    let cluster = trapped();
    cluster.exec(
        DB,
        "create server audit foreign data wrapper outbox_amqp options (url 'amqp://localhost'); grant usage on foreign server audit to mallory;
         create function public.careless() returns trigger language plpgsql as $$
         begin
           perform count(*) from pg_class where relname = 'x'::name and relname collate \"C\" > 'a';
           perform 'x'::text || lower(new.seq::text);
           return new;
         end $$;
         create table evil.orders (id integer primary key, note text); create table evil.journal (seq bigint primary key, kind text, at timestamptz);
         alter table evil.orders owner to mallory; alter table evil.journal owner to mallory;
         set role mallory; set search_path = pg_catalog;
         create function evil.first(key text, partition_count integer) returns integer language sql immutable return 0",
    );
    for is_careless in [false, true] {
        if is_careless {
            for table in [
                "outbox_events",
                "outbox",
                "outbox_waiting",
                "outbox_dead",
                "outbox_history_default",
            ] {
                cluster.exec(
                    DB,
                    &format!(
                        "create trigger careless before insert on {table} for each row execute function careless()"
                    ),
                );
            }
        }
        for search_path in CAUGHT {
            cluster.exec(
                DB,
                "insert into outbox_events (seq, id, type, payload) overriding system value
                 select n, gen_random_uuid(), 'T', '{}' from generate_series(1, 2) n",
            );
            cluster.draw_seqs(2);
            let from = cluster.log_offset();
            let mut client = session(&cluster, search_path);
            for call in CALLS {
                let done = client.batch_execute(&format!("select public.{call}"));
                assert_eq!(traps(&cluster, from), [""; 0], "{search_path}: {call}");
                let code = done
                    .as_ref()
                    .err()
                    .and_then(|error| error.code())
                    .map(|code| code.code().to_owned());
                // No event has had that seq yet; and it is no relay while workers deliver.
                let is_expected = matches!(code.as_deref(), None | Some("P0002" | "55000"));
                assert!(is_expected, "{search_path}: {call}: {done:?}");
            }
            for write in [
                "insert into evil.orders values (1, 'x')",
                "update evil.orders set note = 'y'",
                "delete from evil.orders",
                "select public.outbox_uncapture('evil.orders')",
                "insert into evil.journal values (1, 'k', pg_catalog.now())",
                "select public.outbox_detach('evil.journal')",
                "select public.outbox_discard_where(seq_from => 1, dry_run => false)",
            ] {
                client
                    .batch_execute(write)
                    .unwrap_or_else(|error| panic!("{search_path}: {write}: {error:?}"));
            }
            cluster.exec(
                DB,
                "delete from outbox; delete from outbox_waiting; delete from outbox_dead; delete from outbox_events",
            );
            cluster.exec(DB, "insert into evil.journal values (2, 'k', now())");
            for call in OF_A_SOURCE {
                let call = format!("select public.{call}");
                client
                    .batch_execute(&call)
                    .unwrap_or_else(|error| panic!("{search_path}: {call}: {error:?}"));
            }
            cluster.exec(
                DB,
                "delete from outbox; delete from outbox_waiting; delete from outbox_dead; delete from evil.journal",
            );
            client.run("select public.outbox_source_reset()");
            client.run("select * from public.outbox_status, public.outbox_health, public.outbox_messages");
            assert_eq!(traps(&cluster, from), [""; 0], "{search_path}");
        }
    }
}

#[test]
fn each_kind_of_trap_catches_a_careless_function() {
    let cluster = trapped();
    for (search_path, kind, body) in [
        (CAUGHT[0], "type text", "perform $$x$$::text"),
        (CAUGHT[0], "function lower(text)", "perform lower($$X$$)"),
        (CAUGHT[0], "operator =(integer,integer)", "perform 1 = 1"),
        (CAUGHT[0], "relation pg_class", "perform relname from pg_class limit 1"),
        (
            CAUGHT[0],
            "relation outbox_settings",
            "perform partition_count from outbox_settings",
        ),
        (
            CAUGHT[0],
            OF_A_COLLATION,
            "perform pg_catalog.lower($$X$$ collate \"C\")",
        ),
        (
            CAUGHT[0],
            "operator class",
            "create temporary table t (a) as select $$b$$ from generate_series(1, 9);
                                        create index on t (a text_ops)",
        ),
        (CAUGHT[1], "cast to text", "perform 1::bigint::text"),
        (
            CAUGHT[2],
            "temporary relation outbox_settings",
            "perform partition_count from outbox_settings",
        ),
    ] {
        cluster.exec(
            DB,
            &format!(
                "create or replace function public.careless() returns void language plpgsql security definer as 'begin {body}; end';
                 grant execute on function public.careless() to mallory"
            ),
        );
        let from = cluster.log_offset();
        let _ = session(&cluster, search_path).batch_execute("select public.careless()");
        let sprung = traps(&cluster, from);
        assert!(sprung.iter().any(|line| line.contains(kind)), "{kind}: {sprung:?}");
    }
}

/// Its function found a table in the search_path of the caller.
#[test]
fn a_trigger_that_finds_no_name_any_more_is_named_by_health_with_the_command_that_helps() {
    let cluster = idle_cluster(&[]);
    assert!(health(&cluster, "schema").0);
    cluster.exec(
        DB,
        "create schema shop; create table shop.journal (seq bigint);
         create function shop.note() returns trigger language plpgsql as $$ begin insert into journal values (new.seq); return new; end $$;
         grant usage on schema shop to outbox_worker; grant insert on shop.journal to outbox_worker;
         create trigger note after insert on outbox_events for each row execute function shop.note()",
    );
    let error = refused(
        &cluster,
        "set search_path = public, shop; select outbox_publish('T', '{}')",
    );
    assert!(error.message().contains("\"journal\" does not exist"), "{error:?}");
    let (ok, problem) = health(&cluster, "schema");
    assert!(
        !ok && problem.contains("shop.note() runs in statements on public.outbox_events"),
        "{problem}"
    );
    run_remedy(&cluster, "schema");
    wait_healthy(&cluster, "schema");
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from shop.journal"), 1);
    // A check, a default and a policy run there as well. What needs no search_path is left alone.
    cluster.exec(
        DB,
        "create function shop.is_short(text) returns boolean language plpgsql as 'begin return length($1) < 100; end';
         create function shop.is_known(text) returns boolean language sql immutable return $1 is not null;
         alter table outbox_events add check (shop.is_known(type)), add check (shop.is_short(type))",
    );
    let (_, problem) = health(&cluster, "schema");
    assert!(problem.contains("shop.is_short(text)"), "{problem}");
    run_remedy(&cluster, "schema");
    wait_healthy(&cluster, "schema");
}

/// Each of these changes what words in SQL mean, and every role may set it.
#[test]
fn a_callers_settings_change_nothing_in_a_trigger_on_the_events() {
    let cluster = idle_cluster(&[]);
    cluster.exec(
        DB,
        r"create role app in role outbox_writer; create table public.seen (quoted text, is_null boolean, elements text[], name text);
          grant insert on public.seen to outbox_worker;
          create function public.see() returns trigger language plpgsql set search_path = public, pg_temp as $$
          begin
            execute 'insert into seen values (''\\'', $1 = null, ''{NULL}''::text[], quote_ident(''plain''))' using 'x'::text;
            return new;
          end $$;
          create trigger see after insert on outbox_events for each row execute function public.see();
          set session authorization app;
          set standard_conforming_strings = off; set transform_null_equals = on; set array_nulls = off; set quote_all_identifiers = on;
          select outbox_publish('T', '{}')",
    );
    let seen: String = cluster.query_one(DB, "select s::text from seen s");
    assert_eq!(seen, r#"("\\\\",,{NULL},plain)"#);
}

#[test]
fn health_says_when_the_role_that_created_the_extension_is_no_superuser_any_more() {
    const ELSEWHERE: &str = "elsewhere";
    let cluster = quiet_cluster();
    cluster.exec(DB, "create role chief superuser login");
    cluster.exec(DB, "create database elsewhere");
    cluster.exec(ELSEWHERE, "set role chief; create extension outbox; reset role");
    let schema = r#"select coalesce(code, 'ok') from outbox_health where "check" = 'schema'"#;
    assert_eq!(cluster.query_one::<String>(ELSEWHERE, schema), "ok");
    cluster.exec(ELSEWHERE, "alter role chief nosuperuser");
    let checks = "select count(*) from outbox_health";
    assert!(cluster.query_one::<i64>(ELSEWHERE, checks) > 20, "all of them are read");
    // The first problem is that it owns the schema of the workers.
    for _ in 0..5 {
        let Some(remedy) = Remedy::find(&cluster, ELSEWHERE, r#""check" = 'schema'"#) else {
            break;
        };
        cluster.exec(ELSEWHERE, remedy.command());
    }
    assert_eq!(cluster.query_one::<String>(ELSEWHERE, schema), "ok");
    let owned = "select count(*) from pg_shdepend where refobjid = 'chief'::regrole and deptype = 'o'
                 and dbid = (select oid from pg_database where datname = current_database())";
    assert_eq!(cluster.query_one::<i64>(ELSEWHERE, owned), 0);
}
