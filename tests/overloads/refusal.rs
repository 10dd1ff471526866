//! Tests that CREATE EXTENSION checks what other roles have created in its schema or may create there, and that
//! outbox_health checks it later.

use super::*;
use postgres::error::SqlState;
use support::{health, refused, wait_healthy};

fn bare_cluster() -> Cluster {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(DB, MALLORY);
    cluster
}

#[test]
fn create_extension_refuses_a_schema_with_objects_that_shadow_its_own() {
    let cluster = bare_cluster();
    for (make, drop, kind) in [
        (
            "create function public.outbox_wake(integer, text, text) returns void language sql as 'select'",
            "drop function public.outbox_wake(integer, text, text)",
            "function public.outbox_wake(integer,text,text)",
        ),
        (
            "create procedure public.outbox_own() language sql as 'select'",
            "drop procedure public.outbox_own()",
            "function public.outbox_own()",
        ),
        (
            "create table public.outbox_history_p20300101 (n integer)",
            "drop table public.outbox_history_p20300101",
            "table public.outbox_history_p20300101",
        ),
        (
            "create type public.outbox_kind as enum ('a')",
            "drop type public.outbox_kind",
            "type public.outbox_kind",
        ),
    ] {
        cluster.exec(DB, &format!("set role mallory; {make}"));
        let db_error = refused(&cluster, "create extension outbox");
        assert_eq!(db_error.code(), &SqlState::DUPLICATE_OBJECT, "{db_error:?}");
        assert!(db_error.message().contains(kind), "{db_error:?}");
        assert!(
            db_error.detail().is_some_and(|detail| detail.contains("mallory")),
            "{db_error:?}"
        );
        assert!(
            db_error.hint().is_some_and(|hint| hint.contains("SCHEMA outbox")),
            "{db_error:?}"
        );
        cluster.exec(DB, &format!("set role mallory; {drop}"));
    }
    // In another schema these objects cause no refusal; nor do objects that only have a similar name.
    cluster.exec(
        DB,
        "set role mallory; create function public.outbox_wake(integer, text, text) returns void language sql as 'select';
         create table public.outboxes (n integer); reset role;
         create schema outbox; create extension outbox schema outbox",
    );
    assert_eq!(
        cluster.query_one::<i64>(
            DB,
            r#"select count(*) from outbox.outbox_health where "check" = 'schema' and ok"#
        ),
        1
    );
    cluster.exec(
        DB,
        "drop extension outbox; drop function public.outbox_wake(integer, text, text)",
    );
    cluster.exec(DB, "create extension outbox");
}

#[test]
fn no_view_calls_objects_that_were_in_the_schema_before() {
    let cluster = bare_cluster();
    cluster.exec(
        DB,
        "set role mallory;
         create function public.trap(bigint, numeric) returns numeric language plpgsql as
           $$ begin raise log 'an overload ran as %', current_user; return 1; end $$;
         create operator public./ (function = public.trap, leftarg = bigint, rightarg = numeric);
         create function public.trap(bigint, double precision) returns double precision language plpgsql as
           $$ begin raise log 'an overload ran as %', current_user; return 1; end $$;
         create operator public./ (function = public.trap, leftarg = bigint, rightarg = double precision);
         reset role; create extension outbox; select * from outbox_status; select * from outbox_health",
    );
    assert_unharmed(&cluster);
    // It does run where nothing prevents it.
    cluster.exec(DB, "select 7::bigint / 60.0");
    assert!(cluster.log().contains(SPRUNG), "the trap does not run");
}

/// The warnings of CREATE EXTENSION.
fn warnings(cluster: &Cluster) -> Vec<String> {
    let from = cluster.log_offset();
    cluster.exec(DB, "create extension outbox");
    let log = cluster.log();
    let recent = log.get(from..).unwrap_or_default();
    let warnings = recent
        .lines()
        .filter(|line| line.contains("WARNING"))
        .map(str::to_owned);
    warnings.collect()
}

#[test]
fn create_extension_warns_of_a_role_that_may_create_in_its_schema_and_health_names_a_later_one() {
    let cluster = bare_cluster();
    let warnings_found = warnings(&cluster);
    assert_eq!(warnings_found.len(), 1, "{warnings_found:?}");
    assert!(
        warnings_found[0].contains("role mallory may create functions in schema public"),
        "{warnings_found:?}"
    );
    let (ok, problem) = health(&cluster, "schema");
    assert!(!ok && problem.contains("mallory"), "{problem}");
    // The remedy of health is a command.
    for _ in 0..2 {
        let remedy: Option<String> =
            cluster.query_one(DB, r#"select remedy from outbox_health where "check" = 'schema'"#);
        assert_eq!(remedy.as_deref(), Some("revoke create on schema public from mallory"));
        cluster.exec(DB, &remedy.unwrap_or_default());
        wait_healthy(&cluster, "schema");
        cluster.exec(DB, "grant create on schema public to mallory");
    }
    cluster.exec(DB, "revoke create on schema public from mallory; drop extension outbox");
    assert_eq!(warnings(&cluster), [""; 0]);

    // The first: a database that comes from PostgreSQL 14. The second: an owner of the database who is no superuser.
    for (grant, problem, remedy) in [
        (
            "grant create on schema public to public",
            "every role",
            "revoke create on schema public from public",
        ),
        (
            "alter database postgres owner to mallory",
            "belongs to a role that is not a superuser",
            "alter schema public owner to postgres",
        ),
    ] {
        cluster.exec(DB, grant);
        let (ok, shown) = health(&cluster, "schema");
        assert!(!ok && shown.contains(problem), "{shown}");
        let found: String = cluster.query_one(DB, r#"select remedy from outbox_health where "check" = 'schema'"#);
        assert_eq!(found, remedy);
        cluster.exec(DB, remedy);
        wait_healthy(&cluster, "schema");
    }
}

/// A name with any number of arguments is ambiguous. So a role that may create in the schema can make a user's call
/// fail. It cannot take over that call, and cannot even break one of the extension.
#[test]
fn an_overload_with_further_defaults_stops_calls_of_users_but_never_runs_and_health_names_it() {
    let cluster = bare_cluster();
    cluster.exec(
        DB,
        "create extension outbox; set role mallory;
         create function public.outbox_not_adopted(text default '') returns text language plpgsql as
           $$ begin raise log 'an overload ran as %', current_user; end $$;
         create function public.outbox_pause(text, text, text default '') returns boolean language plpgsql as
           $$ begin raise log 'an overload ran as %', current_user; end $$",
    );
    let db_error = refused(&cluster, "select public.outbox_pause('default'::text, null::text)");
    assert_eq!(db_error.code(), &SqlState::AMBIGUOUS_FUNCTION, "{db_error:?}");
    for drop in [
        "drop function public.outbox_not_adopted(text)",
        "drop function public.outbox_pause(text,text,text)",
    ] {
        let remedy: String = cluster.query_one(DB, r#"select remedy from outbox_health where "check" = 'schema'"#);
        assert_eq!(remedy, drop);
        cluster.exec(DB, drop);
    }
    cluster.exec(DB, "select public.outbox_pause('default'::text, null::text)");
    assert!(!cluster.log().contains(SPRUNG));
}
