//! The roles that may capture, writers that need no rights for it, and the role that the code of users runs as.

use super::{events_of, refused, server};
use support::DB;
use support::Session;

const DENIED: &str = "42501";

#[test]
fn a_writer_needs_rights_on_the_table_only() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    cluster.draw_seqs(7);
    client.run("create role app; create schema shop; grant usage on schema shop to app; revoke all on schema public from public;
         create table shop.a (id int primary key, secret text); grant insert, update, delete, select (id) on shop.a to app;
         create table shop.journal (seq bigint); grant insert on shop.journal to app;
         select outbox_capture('shop.a'), outbox_attach('shop.journal')");
    let write = "set role app; insert into shop.a values (1, 's'); update shop.a set secret = 't' where id = 1;
                 delete from shop.a where id = 1";
    assert_eq!(
        events_of(&mut client, write),
        [
            r#"ACreated 1 {"id": 1, "secret": "s"}"#,
            r#"AUpdated 1 {"id": 1, "secret": "t"}"#,
            r#"ADeleted 1 {"id": 1}"#,
        ]
    );
    client.run("set role app; insert into shop.journal values (7); reset role");
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox where seq = 7"),
        1
    );
    for sql in [
        "select from public.outbox_events",
        "select public.outbox_publish('T', '{}')",
        "select public.outbox_captured()",
        "select from shop.a where secret = 't'",
    ] {
        assert_eq!(refused(&mut client, &format!("set role app; {sql}")).0, DENIED, "{sql}");
    }
}

#[test]
fn rows_that_a_policy_hides_are_captured_as_well() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create role app; create table a (id int primary key, tenant text); grant all on a to app;
         alter table a enable row level security, force row level security;
         create policy mine on a to app using (tenant = 'app') with check (true);
         select outbox_capture('a')",
    );
    assert_eq!(
        events_of(
            &mut client,
            "set role app; insert into a values (1, 'app'), (2, 'other'); delete from a"
        ),
        [
            r#"ACreated 1 {"id": 1, "tenant": "app"}"#,
            r#"ACreated 2 {"id": 2, "tenant": "other"}"#,
            r#"ADeleted 1 {"id": 1}"#,
        ]
    );
}

#[test]
fn only_an_owner_that_may_publish_captures_a_table() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run("create role owner in role outbox_writer; create role member in role owner; create role stranger in role outbox_writer;
         create role poor; create schema shop; grant all on schema shop to public; set role owner;
         create table shop.a (id int primary key); grant all on shop.a to public; reset role;
         set role poor; create table shop.b (id int primary key, seq int); reset role");
    let calls = |table: &str| {
        [
            format!("select outbox_capture('{table}')"),
            format!("select outbox_uncapture('{table}')"),
            format!("select outbox_attach('{table}', seq => 'id')"),
            format!("select outbox_detach('{table}')"),
        ]
    };
    for call in calls("shop.a") {
        for who in ["stranger", "poor"] {
            assert_eq!(
                refused(&mut client, &format!("set role {who}; {call}")).0,
                DENIED,
                "{who}: {call}"
            );
        }
        for who in ["owner", "member"] {
            client.run(&format!("set role {who}; {call}"));
        }
    }
    // A role that may not publish cannot publish through its own table, with any trigger.
    for call in calls("shop.b") {
        assert_eq!(
            refused(&mut client, &format!("set role poor; {call}")).0,
            DENIED,
            "{call}"
        );
    }
    for function in ["outbox_captured", "outbox_attached"] {
        let sql = format!(
            "set role poor; create trigger t after insert on shop.b for each statement execute function public.{function}('{{}}')"
        );
        assert_eq!(refused(&mut client, &sql).0, DENIED, "{function}");
    }
}

/// CREATE TRIGGER asks for the privilege TRIGGER only, and the destination for a right of the owner.
#[test]
fn a_role_that_may_create_triggers_on_the_table_of_another_sends_nothing_by_it() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create server partner foreign data wrapper outbox_http options (url 'https://partner.example/');
         create role app in role outbox_writer; create table t (id int primary key, seq bigint); grant all on t to app",
    );
    for function in ["outbox_captured", "outbox_attached"] {
        let sql = format!(
            "set role app; create trigger x after insert on t referencing new table as outbox_new for each statement
               execute function {function}('{{\"seq\": \"seq\", \"destination\": \"partner\"}}')"
        );
        assert_eq!(refused(&mut client, &sql).0, DENIED, "{function}");
    }
    // Its own table, and any other trigger.
    client.run(
        "create schema app authorization app; set role app; create table app.t (seq bigint);
         create trigger x after insert on app.t referencing new table as outbox_new for each statement
           execute function outbox_attached('{\"seq\": \"seq\"}');
         create trigger y before update on t for each row execute function suppress_redundant_updates_trigger()",
    );
}

/// The condition, the key, the id of an aggregate, and a function that to_jsonb calls: a cast made by the owner of a
/// type.
#[test]
fn the_code_of_users_runs_as_the_writer_and_never_as_the_worker_role() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    cluster.draw_seqs(7);
    client.run("create role mallory in role outbox_writer; create role app; create schema evil authorization mallory;
         create table caught (who name, what text); grant insert on caught to public; grant usage on schema evil to public;
         set role mallory;
         create function evil.spy(what text) returns text language plpgsql as
           $$ begin insert into public.caught values (current_user, what); return what; end $$;
         create type evil.mood as enum ('good');
         create function evil.mood_json(evil.mood) returns json language plpgsql as
           $$ begin perform evil.spy('cast'); return '1'; end $$;
         create cast (evil.mood as json) with function evil.mood_json(evil.mood);
         create table evil.a (id int primary key, mood evil.mood); grant insert on evil.a to app;
         create table evil.journal (seq bigint); grant insert on evil.journal to app;
         select outbox_capture('evil.a', aggregate_id => $$evil.spy('id') || id$$);
         select outbox_attach('evil.journal', $$evil.spy('when') <> ''$$, key => $$evil.spy('key')$$);
         reset role; set role app;
         insert into evil.a values (1, 'good'); insert into evil.journal values (7); reset role");
    let caught: String = cluster.query_one(DB, "select string_agg(distinct who || ' ' || what, ', ') from caught");
    assert_eq!(caught, "app cast, app id, app key, app when");
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 2);

    // A subscription is everyone's: its condition runs as a role without rights, also for a superuser who publishes.
    client.run(
        "select outbox_subscribe('default', when_sql => $$evil.spy('event') <> ''$$);
         delete from caught; set role app; insert into evil.a values (2, 'good'); reset role;
         select outbox_publish('T', '{}')",
    );
    let caught: String = cluster.query_one(
        DB,
        "select string_agg(distinct who || ' ' || what, ', ') from caught where what = 'event'",
    );
    assert_eq!(caught, "outbox_policy event");
    let may: i64 = cluster.query_one(
        DB,
        "select count(*) from pg_class c
         where (c.relnamespace = 'public'::regnamespace and c.relname like 'outbox%'
                or c.relnamespace = 'outbox_internal'::regnamespace)
           and has_table_privilege('outbox_policy', c.oid, 'select, insert, update, delete')",
    );
    assert_eq!(may, 0, "tables that outbox_policy may use");
}

#[test]
fn the_condition_of_a_subscription_cannot_change_role_or_leave_state_behind() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create function climb(what text) returns boolean language plpgsql as
           $$ begin execute what; return true; end $$;
         create role app in role outbox_writer",
    );
    for what in [
        "set role postgres",
        "reset role",
        "reset session authorization",
        "create temp table t ()",
        "listen x",
        "declare c cursor with hold for select 1",
        "select from public.outbox_settings",
        "select public.outbox_publish('T', '{}')",
        "insert into public.outbox_subscriptions values ('x')",
    ] {
        client.run(&format!(
            "select outbox_subscribe('default', when_sql => $$public.climb('{}')$$)",
            what.replace('\'', "''")
        ));
        for publish in [
            "set role app; select outbox_publish('T', '{}')",
            "select outbox_publish('T', '{}')",
        ] {
            let (state, message) = refused(&mut client, publish);
            assert_eq!(state, DENIED, "{what}: {message}");
            client.run("reset role");
        }
    }
    let setting =
        "select outbox_subscribe('default', when_sql => $$set_config('timezone', 'Asia/Tokyo', false) <> ''$$);
                   set timezone = 'UTC'; select outbox_publish('T', '{}')";
    client.run(setting);
    assert_eq!(client.value::<String>("show timezone"), "UTC");
}

#[test]
fn the_search_path_of_the_writer_changes_no_expression() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    cluster.draw_seqs(7);
    client.run(
        "create schema evil;
         create function evil.trap(text, text) returns boolean language sql as 'select false';
         create operator evil.~~ (function = evil.trap, leftarg = text, rightarg = text);
         create function evil.upper(text) returns text language sql as $$select 'evil'$$;
         create table a (id text primary key); create table journal (seq bigint, kind text);
         select outbox_capture('a', aggregate_id => 'upper(id)'), outbox_attach('journal', $$kind like 'Order%'$$);
         set search_path = evil, pg_catalog, public;
         insert into public.journal values (7, 'OrderPlaced')",
    );
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox where seq = 7"),
        1
    );
    client.run("delete from outbox");
    assert_eq!(
        events_of(&mut client, "insert into a values ('x')"),
        [r#"ACreated X {"id": "x"}"#]
    );
}

#[test]
fn without_the_role_for_conditions_the_error_says_how_to_create_it() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run("select outbox_subscribe('default', when_sql => 'true'); drop role outbox_policy");
    let publish = "select outbox_publish('T', '{}')";
    let error = client.batch_execute(publish).expect_err("no role");
    let error = error.as_db_error().expect("an error of the server");
    assert!(error.message().contains("outbox_policy"), "{error:?}");
    let hint = error.hint().expect("a hint").to_owned();
    assert!(hint.contains("CREATE ROLE outbox_policy NOLOGIN"), "{hint}");
    client.run(&format!("create role outbox_policy nologin; {publish}"));
}
