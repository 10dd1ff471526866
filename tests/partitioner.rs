//! Tests a user's function that gives the partition of a key. It is called, its result is checked, it gets none of the
//! worker's rights, and it can be changed without loss.

use postgres::error::SqlState;
use support::Cluster;
use support::load::{Load, Plan};
use support::oracle::judge;
use support::{DB, Session, Stage, arrived, idle_cluster, refused, wait_drained};

const BY_TENANT: &str = "create role planner; create schema shop; grant usage, create on schema shop to public;
  create function shop.by_tenant(key text, partition_count integer)
  returns integer language sql immutable as $$ select length(split_part(key, ':', 2)) % partition_count $$;
  alter function shop.by_tenant(text, integer) owner to planner";

fn quiet_cluster() -> Cluster {
    let cluster = idle_cluster(&[]);
    cluster.exec(DB, BY_TENANT);
    cluster
}

/// The partitions of pending messages with a key, in order of seq.
fn waiting(cluster: &Cluster) -> Vec<i32> {
    cluster.query_one(
        DB,
        "select array_agg(partition::int order by seq) from outbox where key is not null",
    )
}

#[test]
fn the_function_assigns_partitions_to_waiting_and_new_messages() {
    let cluster = quiet_cluster();
    cluster.exec(DB, "select outbox_publish('T', '{}', 'a', 'four')");
    let mut session = cluster.connect(DB); // this session plans its statements before the change
    session.run("select outbox_publish('T', '{}', 'a', 'three')");
    cluster.exec(DB, "select outbox_configure(partitioner => 'shop.by_tenant')");
    assert_eq!(waiting(&cluster), [4, 5]);
    session.run("select outbox_publish('T', '{}', 'a', 'three')");
    cluster.draw_seqs(14);
    cluster.exec(
        DB,
        "select outbox_enqueue(10, 'a:0123456789'); select outbox_enqueue_many('{11,12}', 'a:x');
         select outbox_enqueue(13, 'a:x', partition_key => 'p09'); select outbox_enqueue(14, 'a:xx', available_at => now() + '1h')",
    );
    assert_eq!(waiting(&cluster), [4, 5, 5, 10, 1, 1, 9]);
    assert_eq!(cluster.query_one::<i16>(DB, "select partition from outbox_waiting"), 2);
    assert_eq!(
        cluster.query_one::<String>(DB, "select outbox_partition_of('a:seven77')"),
        "p07"
    );
    assert_eq!(
        cluster.query_one::<String>(DB, "select outbox_partition_of('a:seven77', 5)"),
        "p02"
    );
    // Without a key the function is not called.
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    // After a change of the count the function is called again; an explicitly named partition keeps its name.
    cluster.exec(DB, "select outbox_configure(partition_count => 4)");
    assert_eq!(waiting(&cluster), [0, 1, 1, 2, 1, 1, 1]);
    session.run("select outbox_publish('T', '{}', 'a', 'seven77')");
    assert!(waiting(&cluster).contains(&3));
    cluster.exec(DB, "select outbox_configure(partitioner => '')");
    let by_crc: bool = cluster.query_one(
        DB,
        "select bool_and(partition = outbox_crc32(key) % 4) from outbox where key is not null and seq <> 13",
    );
    assert!(by_crc);
    session.run("select outbox_publish('T', '{}', 'a', 'seven77')");
    let last = "select bool_and(partition = outbox_crc32(key) % 4) from outbox where key = 'a:seven77'";
    assert!(cluster.query_one::<bool>(DB, last));
}

#[test]
fn an_unusable_partitioner_is_refused_when_it_is_set() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create function volatile_one(text, integer) returns integer language sql as 'select 0';
         create function too_wide(text, integer) returns bigint language sql immutable as 'select 0::bigint';
         create function too_far(text, integer) returns integer language sql immutable as 'select $2';
         create function nothing(text, integer) returns integer language sql immutable as 'select null::integer';
         create function other_way(integer, text) returns integer language sql immutable as 'select 0';
         alter function volatile_one owner to planner; alter function too_far owner to planner; alter function nothing owner to planner",
    );
    let refusal = |name: &str| refused(&cluster, &format!("select outbox_configure(partitioner => '{name}')"));
    for (name, sqlstate) in [
        ("nowhere", SqlState::UNDEFINED_FUNCTION),
        ("public.too_wide", SqlState::UNDEFINED_FUNCTION),
        ("public.other_way", SqlState::UNDEFINED_FUNCTION),
        ("public.volatile_one", SqlState::INVALID_PARAMETER_VALUE),
        ("public.too_far", SqlState::NUMERIC_VALUE_OUT_OF_RANGE),
        ("public.nothing", SqlState::NUMERIC_VALUE_OUT_OF_RANGE),
    ] {
        let db_error = refusal(name);
        assert_eq!(db_error.code(), &sqlstate, "{name}: {db_error:?}");
        assert!(db_error.hint().is_some(), "{name}: {db_error:?}");
    }
    // An error of the function later is an error of the call, and nothing is lost.
    cluster.exec(DB, "select outbox_configure(partitioner => 'shop.by_tenant')");
    cluster.exec(
        DB,
        "create or replace function shop.by_tenant(key text, partition_count integer) returns integer language sql
         immutable as 'select partition_count'",
    );
    let db_error = refused(&cluster, "select outbox_publish('T', '{}', 'a', 'b')");
    assert_eq!(db_error.code(), &SqlState::NUMERIC_VALUE_OUT_OF_RANGE);
    cluster.exec(DB, "drop function shop.by_tenant");
    let db_error = refused(&cluster, "select outbox_publish('T', '{}', 'a', 'b')");
    assert_eq!(db_error.code(), &SqlState::UNDEFINED_FUNCTION);
    assert!(
        db_error.hint().is_some_and(|hint| hint.contains("outbox_configure")),
        "{db_error:?}"
    );
    cluster.exec(
        DB,
        "select outbox_configure(partitioner => ''); select outbox_publish('T', '{}', 'a', 'b')",
    );
}

#[test]
fn a_partitioner_runs_as_its_owner_and_can_do_nothing_else() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create role author; create role teller in role outbox_writer; grant create on schema public to author;
         set role author;
         create function public.nosy(key text, partition_count integer) returns integer language plpgsql immutable as $$
         begin
           if current_user <> 'author' then raise exception 'it runs as %', current_user; end if;
           perform public.try(split_part(key, ':', 2)); -- nothing checks what an immutable function calls
           return 3;
         end $$;
         create function public.try(what text) returns void language plpgsql as $$ begin
           case what
             when 'tables' then create temp table t ();
             when 'role' then set role outbox_worker;
             when 'rows' then delete from public.outbox;
             when 'path' then perform my_function();
             else null;
           end case;
         end $$;
         reset role; select outbox_configure(partitioner => 'public.nosy')",
    );
    let publish = |id: &str| format!("set role teller; select outbox_publish('T', '{{}}', 'a', '{id}')");
    cluster.exec(DB, &publish("harmless"));
    assert_eq!(waiting(&cluster), [3]);
    for id in ["tables", "role", "rows"] {
        let db_error = refused(&cluster, &publish(id));
        assert_eq!(db_error.code(), &SqlState::INSUFFICIENT_PRIVILEGE, "{id}: {db_error:?}");
    }
    // The function does not find a function that the caller put into the caller's search_path.
    let trap = "create function pg_temp.my_function() returns void language sql as 'select'; create schema mine;
                create function mine.my_function() returns void language sql as 'select';
                grant usage on schema mine to author; set search_path = mine, public;";
    let db_error = refused(&cluster, &format!("{trap} {}", publish("path")));
    assert_eq!(db_error.code(), &SqlState::UNDEFINED_FUNCTION, "{db_error:?}");
    assert_eq!(waiting(&cluster), [3]);
}

#[test]
fn changing_the_partitioner_under_load_loses_duplicates_and_reorders_nothing() {
    let stage = Stage::new(&["outbox.workers = 2"]);
    stage.exec(
        DB,
        "create function public.by_length(key text, partition_count integer) returns integer language sql immutable
         as 'select length(key) % partition_count'; create role planner; alter function public.by_length owner to planner",
    );
    let load = Load::start(&stage, &Plan::default());
    for partitioner in ["public.by_length", "", "public.by_length"] {
        load.wait_for_more(40);
        stage.exec(DB, &format!("select outbox_configure(partitioner => '{partitioner}')"));
    }
    load.wait_for_more(40);
    let sent = load.stop();
    wait_drained(&stage);
    let arrived = arrived(&stage.all());
    judge(&sent, &arrived).assert_perfect();
    let right = "select bool_and(partition = length(key) % 16) from outbox_history
                 where enqueued_at > (select max(enqueued_at) - interval '100 ms' from outbox_history)";
    assert!(stage.query_one::<bool>(DB, right));
}

/// A partitioner, owned by `owner`, that reports the role it runs as.
fn report_role(owner: &str) -> String {
    format!(
        "create or replace function shop.report_role(key text, partition_count integer) returns integer
           language plpgsql immutable as
           $$ begin raise log 'the partitioner ran as %', current_user; return 1; end $$;
         alter function shop.report_role(text, integer) owner to {owner}"
    )
}

#[test]
fn setting_a_partitioner_needs_the_rights_of_its_owner_who_is_no_superuser() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        &format!(
            "create role boss in role outbox_admin; create role stranger; {}",
            report_role("postgres")
        ),
    );
    let name = "select outbox_configure(partitioner => 'shop.report_role')";
    let as_boss = format!("set role boss; {name}");
    // It cannot run as the superuser, whichever role sets it, ...
    for sql in [&as_boss[..], name] {
        let db_error = refused(&cluster, sql);
        assert_eq!(
            db_error.code(),
            &SqlState::INSUFFICIENT_PRIVILEGE,
            "{sql}: {db_error:?}"
        );
        assert!(db_error.message().contains("superuser"), "{db_error:?}");
        assert!(
            db_error.hint().is_some_and(|hint| hint.contains("OWNER TO")),
            "{db_error:?}"
        );
    }
    // ... nor as another role whose rights the caller lacks, ...
    cluster.exec(DB, &report_role("stranger"));
    let db_error = refused(&cluster, &as_boss);
    assert_eq!(db_error.code(), &SqlState::INSUFFICIENT_PRIVILEGE, "{db_error:?}");
    assert_eq!(
        db_error.message(),
        "boss may not act as stranger, who owns function shop.report_role"
    );
    assert!(
        db_error
            .hint()
            .is_some_and(|hint| hint.contains("GRANT stranger TO boss")),
        "{db_error:?}"
    );
    // ... not even if a definer function of a third role calls it for a superuser.
    cluster.exec(
        DB,
        "create schema trap authorization boss; set role boss;
         create function trap.spring() returns void language sql security definer as
           $$ select public.outbox_configure(partitioner => 'shop.report_role') $$",
    );
    let db_error = refused(&cluster, "select trap.spring()");
    assert_eq!(db_error.code(), &SqlState::INSUFFICIENT_PRIVILEGE, "{db_error:?}");
    assert!(!cluster.log().contains("the partitioner ran"), "{}", cluster.log());
    // So far it has run for no role, and no role can call it.
    cluster.exec(DB, "select outbox_partition_of('k')");
    assert!(!cluster.log().contains("the partitioner ran"));

    for allow in [
        "grant stranger to boss",
        "alter function shop.report_role(text, integer) owner to boss",
    ] {
        cluster.exec(DB, allow);
        cluster.exec(DB, &as_boss);
        assert_eq!(
            cluster.query_one::<String>(DB, "select outbox_partition_of('k')"),
            "p01"
        );
        cluster.exec(DB, "set role boss; select outbox_configure(partitioner => '')");
    }
    assert!(cluster.log().contains("the partitioner ran as stranger"));
    assert!(cluster.log().contains("the partitioner ran as boss"));
    assert!(!cluster.log().contains("the partitioner ran as postgres"));
}

#[test]
fn a_partitioner_runs_only_as_the_owner_it_had_when_it_was_set() {
    let cluster = quiet_cluster();
    cluster.exec(DB, &format!("create role stranger; {}", report_role("planner")));
    cluster.exec(DB, "select outbox_configure(partitioner => 'shop.report_role')");
    let mut session = cluster.connect(DB);
    let publish = "select outbox_publish('T', '{}', 'a', 'b')";
    session.run(publish);
    for owner in ["stranger", "postgres"] {
        cluster.exec(DB, &report_role(owner));
        for sql in [publish, "select outbox_partition_of('k')"] {
            let error = session.batch_execute(sql).expect_err(sql);
            let db_error = error.as_db_error().unwrap_or_else(|| panic!("{error:?}"));
            assert_eq!(
                db_error.code(),
                &SqlState::INSUFFICIENT_PRIVILEGE,
                "{owner}: {db_error:?}"
            );
            assert!(
                db_error.hint().is_some_and(|hint| hint.contains("outbox_configure")),
                "{db_error:?}"
            );
        }
        assert!(!cluster.log().contains(&format!("the partitioner ran as {owner}")));
    }
    // When it is set again it runs as the new owner, also in sessions that knew the old one.
    cluster.exec(DB, &report_role("stranger"));
    cluster.exec(DB, "select outbox_configure(partitioner => 'shop.report_role')");
    session.run(publish);
    assert!(cluster.log().contains("the partitioner ran as stranger"));
    assert_eq!(waiting(&cluster), [1, 1]);
    // A dropped partitioner can be unset while messages wait; they get the partitions that new ones will get.
    cluster.exec(
        DB,
        "drop function shop.report_role(text, integer); select outbox_configure(partitioner => '')",
    );
    session.run(publish);
    let by_crc: bool = cluster.query_one(DB, "select bool_and(partition = outbox_crc32(key) % 16) from outbox");
    assert!(by_crc);
}
