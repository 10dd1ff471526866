//! A function of the user's own gives the partition of a key: is it asked, checked, kept from the worker's rights, and
//! changed without loss?

mod common;

use common::load::{Load, Plan};
use common::oracle::{Arrived, judge};
use common::{DB, all_of, exchange_and_queue, outbox_cluster_with, refused, unconnected_cluster, wait_drained};
use postgres::error::SqlState;
use support::{Broker, Cluster};

const BY_TENANT: &str = "create role planner; create schema shop; grant usage, create on schema shop to public;
  create function shop.by_tenant(key text, partition_count integer)
  returns integer language sql immutable as $$ select length(split_part(key, ':', 2)) % partition_count $$;
  alter function shop.by_tenant(text, integer) owner to planner";

fn quiet_cluster() -> Cluster {
    let cluster = unconnected_cluster("", "x", &["outbox.workers = 0"]);
    cluster.exec(DB, BY_TENANT);
    cluster
}

/// The partitions of what waits and has a key, in order of seq.
fn waiting(cluster: &Cluster) -> Vec<i32> {
    cluster.query_one(
        DB,
        "select array_agg(partition::int order by seq) from outbox where key is not null",
    )
}

#[test]
fn the_function_gives_the_partition_of_what_waits_and_of_what_comes() {
    let cluster = quiet_cluster();
    cluster.exec(DB, "select outbox_publish('T', '{}', 'a', 'four')");
    let mut session = cluster.connect(DB); // its statements are planned before the change
    session
        .batch_execute("select outbox_publish('T', '{}', 'a', 'three')")
        .expect("publish");
    cluster.exec(DB, "select outbox_configure(partitioner => 'shop.by_tenant')");
    assert_eq!(waiting(&cluster), [4, 5]);
    session
        .batch_execute("select outbox_publish('T', '{}', 'a', 'three')")
        .expect("publish");
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
    // Without a key there is nothing to ask it about.
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    // Another count: it is asked again; what was put somewhere by name stays a name.
    cluster.exec(DB, "select outbox_configure(partition_count => 4)");
    assert_eq!(waiting(&cluster), [0, 1, 1, 2, 1, 1, 1]);
    session
        .batch_execute("select outbox_publish('T', '{}', 'a', 'seven77')")
        .expect("publish");
    assert!(waiting(&cluster).contains(&3));
    cluster.exec(DB, "select outbox_configure(partitioner => '')");
    let by_crc: bool = cluster.query_one(
        DB,
        "select bool_and(partition = outbox_crc32(key) % 4) from outbox where key is not null and seq <> 13",
    );
    assert!(by_crc);
    session
        .batch_execute("select outbox_publish('T', '{}', 'a', 'seven77')")
        .expect("publish");
    let last = "select bool_and(partition = outbox_crc32(key) % 4) from outbox where key = 'a:seven77'";
    assert!(cluster.query_one::<bool>(DB, last));
}

#[test]
fn what_cannot_be_a_partitioner_is_refused_when_it_is_set() {
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
        let said = refusal(name);
        assert_eq!(said.code(), &sqlstate, "{name}: {said:?}");
        assert!(said.hint().is_some(), "{name}: {said:?}");
    }
    // One that goes wrong later is an error of the call, and nothing is lost.
    cluster.exec(DB, "select outbox_configure(partitioner => 'shop.by_tenant')");
    cluster.exec(
        DB,
        "create or replace function shop.by_tenant(key text, partition_count integer) returns integer language sql
         immutable as 'select partition_count'",
    );
    let said = refused(&cluster, "select outbox_publish('T', '{}', 'a', 'b')");
    assert_eq!(said.code(), &SqlState::NUMERIC_VALUE_OUT_OF_RANGE);
    cluster.exec(DB, "drop function shop.by_tenant");
    let said = refused(&cluster, "select outbox_publish('T', '{}', 'a', 'b')");
    assert_eq!(said.code(), &SqlState::UNDEFINED_FUNCTION);
    assert!(
        said.hint().is_some_and(|hint| hint.contains("outbox_configure")),
        "{said:?}"
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
        let said = refused(&cluster, &publish(id));
        assert_eq!(said.code(), &SqlState::INSUFFICIENT_PRIVILEGE, "{id}: {said:?}");
    }
    // A function that the caller put into its own search_path is not found by it.
    let trap = "create function pg_temp.my_function() returns void language sql as 'select'; create schema mine;
                create function mine.my_function() returns void language sql as 'select';
                grant usage on schema mine to author; set search_path = mine, public;";
    let said = refused(&cluster, &format!("{trap} {}", publish("path")));
    assert_eq!(said.code(), &SqlState::UNDEFINED_FUNCTION, "{said:?}");
    assert_eq!(waiting(&cluster), [3]);
}

#[test]
fn another_partitioner_under_load_loses_doubles_and_reorders_nothing() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.workers = 2"]);
    cluster.exec(
        DB,
        "create function public.by_length(key text, partition_count integer) returns integer language sql immutable
         as 'select length(key) % partition_count'; create role planner; alter function public.by_length owner to planner",
    );
    let load = Load::start(&cluster, &Plan::default());
    for partitioner in ["public.by_length", "", "public.by_length"] {
        load.wait_for_more(40);
        cluster.exec(DB, &format!("select outbox_configure(partitioner => '{partitioner}')"));
    }
    load.wait_for_more(40);
    let sent = load.stop();
    wait_drained(&cluster);
    let arrived: Vec<Arrived> = all_of(broker, &queue).iter().map(Arrived::new).collect();
    judge(&sent, &arrived).assert_perfect();
    let right = "select bool_and(partition = length(key) % 16) from outbox_history
                 where enqueued_at > (select max(enqueued_at) - interval '100 ms' from outbox_history)";
    assert!(cluster.query_one::<bool>(DB, right));
}

/// A partitioner that says who it runs as, of this owner.
fn telling(owner: &str) -> String {
    format!(
        "create or replace function shop.telling(key text, partition_count integer) returns integer language plpgsql immutable as
           $$ begin raise log 'the partitioner ran as %', current_user; return 1; end $$;
         alter function shop.telling(text, integer) owner to {owner}"
    )
}

#[test]
fn who_names_a_partitioner_has_the_rights_of_its_owner_who_is_no_superuser() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        &format!(
            "create role boss in role outbox_admin; create role stranger; {}",
            telling("postgres")
        ),
    );
    let name = "select outbox_configure(partitioner => 'shop.telling')";
    let as_boss = format!("set role boss; {name}");
    // Not as the superuser, whoever names it, ...
    for sql in [&as_boss[..], name] {
        let said = refused(&cluster, sql);
        assert_eq!(said.code(), &SqlState::INSUFFICIENT_PRIVILEGE, "{sql}: {said:?}");
        assert!(said.message().contains("superuser"), "{said:?}");
        assert!(said.hint().is_some_and(|hint| hint.contains("OWNER TO")), "{said:?}");
    }
    // ... nor as another role whose rights the caller lacks, ...
    cluster.exec(DB, &telling("stranger"));
    let said = refused(&cluster, &as_boss);
    assert_eq!(said.code(), &SqlState::INSUFFICIENT_PRIVILEGE, "{said:?}");
    assert_eq!(
        said.message(),
        "boss may not act as stranger, who owns function shop.telling"
    );
    assert!(
        said.hint().is_some_and(|hint| hint.contains("GRANT stranger TO boss")),
        "{said:?}"
    );
    // ... also if a definer function of a third role calls for a superuser.
    cluster.exec(
        DB,
        "create schema trap authorization boss; set role boss;
         create function trap.spring() returns void language sql security definer as
           $$ select public.outbox_configure(partitioner => 'shop.telling') $$",
    );
    let said = refused(&cluster, "select trap.spring()");
    assert_eq!(said.code(), &SqlState::INSUFFICIENT_PRIVILEGE, "{said:?}");
    assert!(!cluster.log().contains("the partitioner ran"), "{}", cluster.log());
    // It ran nowhere so far, and nobody reaches it.
    cluster.exec(DB, "select outbox_partition_of('k')");
    assert!(!cluster.log().contains("the partitioner ran"));

    for allow in [
        "grant stranger to boss",
        "alter function shop.telling(text, integer) owner to boss",
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
fn a_partitioner_runs_as_nobody_but_the_owner_it_had_when_it_was_named() {
    let cluster = quiet_cluster();
    cluster.exec(DB, &format!("create role stranger; {}", telling("planner")));
    cluster.exec(DB, "select outbox_configure(partitioner => 'shop.telling')");
    let mut session = cluster.connect(DB);
    let publish = "select outbox_publish('T', '{}', 'a', 'b')";
    session.batch_execute(publish).expect("publish");
    for owner in ["stranger", "postgres"] {
        cluster.exec(DB, &telling(owner));
        for sql in [publish, "select outbox_partition_of('k')"] {
            let error = session.batch_execute(sql).expect_err(sql);
            let said = error.as_db_error().unwrap_or_else(|| panic!("{error:?}"));
            assert_eq!(said.code(), &SqlState::INSUFFICIENT_PRIVILEGE, "{owner}: {said:?}");
            assert!(
                said.hint().is_some_and(|hint| hint.contains("outbox_configure")),
                "{said:?}"
            );
        }
        assert!(!cluster.log().contains(&format!("the partitioner ran as {owner}")));
    }
    // Named again it runs as the new owner, in sessions that knew the old one, too.
    cluster.exec(DB, &telling("stranger"));
    cluster.exec(DB, "select outbox_configure(partitioner => 'shop.telling')");
    session.batch_execute(publish).expect("publish");
    assert!(cluster.log().contains("the partitioner ran as stranger"));
    assert_eq!(waiting(&cluster), [1, 1]);
    // One that is gone can be given up while its messages wait; they are placed as the next ones will be.
    cluster.exec(
        DB,
        "drop function shop.telling(text, integer); select outbox_configure(partitioner => '')",
    );
    session.batch_execute(publish).expect("publish");
    let by_crc: bool = cluster.query_one(DB, "select bool_and(partition = outbox_crc32(key) % 16) from outbox");
    assert!(by_crc);
}
