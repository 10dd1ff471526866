//! The events of captured rows come in the order in which the rows were written: whatever writes them, at whatever
//! depth of triggers, functions and cascades, and whatever a savepoint takes back.

use postgres::Client;
use support::{DB, Session};

use super::{events_of, refused, server, taken};

/// The events of statements, after tables and functions were made and captured without any.
fn told(client: &mut Client, setup: &str, write: &str) -> Vec<String> {
    client.run(setup);
    taken(client);
    events_of(client, write)
}

// ---- a statement inside of another one ------------------------------------------------------------------------------

#[test]
fn a_function_in_returning_that_changes_the_row_makes_its_event_after_that_of_the_row() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table item (id int primary key, v int); select outbox_capture('item');
         create function up(i int) returns int language plpgsql as
           $$ begin update item set v = v + 1 where id = i; return i; end $$;
         create function again(i int) returns int language plpgsql as
           $$ begin insert into item values (i, 9); return i; end $$";
    assert_eq!(
        told(
            &mut client,
            setup,
            "insert into item values (1, 1), (2, 1) returning up(id)"
        ),
        [
            r#"ItemCreated 1 {"v": 1, "id": 1}"#,
            r#"ItemUpdated 1 {"v": 2, "id": 1}"#,
            r#"ItemCreated 2 {"v": 1, "id": 2}"#,
            r#"ItemUpdated 2 {"v": 2, "id": 2}"#,
        ]
    );
    assert_eq!(
        events_of(&mut client, "delete from item returning again(id)"),
        [
            r#"ItemDeleted 1 {"id": 1}"#,
            r#"ItemCreated 1 {"v": 9, "id": 1}"#,
            r#"ItemDeleted 2 {"id": 2}"#,
            r#"ItemCreated 2 {"v": 9, "id": 2}"#,
        ]
    );
}

#[test]
fn a_before_trigger_that_replaces_the_row_makes_deleted_before_created() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table item (id int primary key, v text); insert into item values (1, 'old');
         create function replace_it() returns trigger language plpgsql as
           $$ begin delete from item where id = new.id; return new; end $$;
         create trigger replace_it before insert on item for each row execute function replace_it();
         select outbox_capture('item')";
    assert_eq!(
        told(&mut client, setup, "insert into item values (1, 'new')"),
        [r#"ItemDeleted 1 {"id": 1}"#, r#"ItemCreated 1 {"v": "new", "id": 1}"#,]
    );
}

#[test]
fn a_before_statement_trigger_that_empties_the_table_makes_deleted_first_whatever_its_name() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table item (id int primary key, v int); insert into item values (1, 1);
         create function wipe() returns trigger language plpgsql as $$ begin delete from item; return null; end $$;
         create trigger zap before insert on item for each statement execute function wipe();
         select outbox_capture('item')";
    let again = "insert into item values (1, 2); alter trigger zap on item rename to a; insert into item values (1, 3)";
    assert_eq!(
        told(&mut client, setup, again),
        [
            r#"ItemDeleted 1 {"id": 1}"#,
            r#"ItemCreated 1 {"v": 2, "id": 1}"#,
            r#"ItemDeleted 1 {"id": 1}"#,
            r#"ItemCreated 1 {"v": 3, "id": 1}"#,
        ]
    );
}

#[test]
fn a_trigger_that_closes_the_version_before_makes_its_event_before_that_of_the_new_one() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table price (id int generated always as identity primary key, v int, open bool default true);
         create function close_it() returns trigger language plpgsql as
           $$ begin update price set open = false where open; return new; end $$;
         create trigger close_it before insert on price for each row execute function close_it();
         insert into price (v) values (10); select outbox_capture('price')";
    assert_eq!(
        told(&mut client, setup, "insert into price (v) values (20), (30)"),
        [
            r#"PriceUpdated 1 {"id": 1, "open": false}"#,
            r#"PriceCreated 2 {"v": 20, "id": 2, "open": true}"#,
            r#"PriceUpdated 2 {"id": 2, "open": false}"#,
            r#"PriceCreated 3 {"v": 30, "id": 3, "open": true}"#,
        ]
    );
}

#[test]
fn a_data_modifying_cte_that_is_read_in_part_has_the_order_of_its_writes() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table item (id int primary key, v text); insert into item values (1, 'a'), (2, 'b');
         select outbox_capture('item')";
    let write = "with d as (delete from item returning id) insert into item select id, 'new' from d limit 1";
    assert_eq!(
        told(&mut client, setup, write),
        [
            r#"ItemDeleted 1 {"id": 1}"#,
            r#"ItemCreated 1 {"v": "new", "id": 1}"#,
            r#"ItemDeleted 2 {"id": 2}"#,
        ]
    );
}

#[test]
fn a_merge_has_the_order_of_its_rows() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table item (id int primary key, v text); insert into item values (1, 'a');
         select outbox_capture('item')";
    let write = "merge into item using (values (1, 'a', true), (1, 'b', false)) s (id, v, gone) on item.v = s.v
                 when matched and s.gone then delete when not matched then insert values (s.id, s.v)";
    assert_eq!(
        told(&mut client, setup, write),
        [r#"ItemDeleted 1 {"id": 1}"#, r#"ItemCreated 1 {"v": "b", "id": 1}"#,]
    );
    // The row takes another id, and a new row its old one.
    let write = "merge into item using (values (1, 'b'), (1, 'c')) s (id, v) on item.v = s.v
                 when matched then update set id = 2 when not matched then insert values (s.id, s.v)";
    assert_eq!(
        events_of(&mut client, write),
        [
            r#"ItemDeleted 1 {"id": 1}"#,
            r#"ItemCreated 1 {"v": "c", "id": 1}"#,
            r#"ItemCreated 2 {"v": "b", "id": 2}"#,
        ]
    );
}

// ---- cascades -------------------------------------------------------------------------------------------------------

const FAMILY: &str = "create table parent (id int primary key); insert into parent values (1);
    create table kid (id int primary key, parent int references parent on delete cascade, v int);
    insert into kid values (1, 1, 0), (2, 1, 0); select outbox_capture('kid')";

#[test]
fn a_trigger_of_the_parent_that_changes_rows_before_the_cascade_makes_updated_before_deleted() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    for (name, when) in [("a", "before"), ("A", "after")] {
        let setup = format!(
            "drop table if exists kid, parent; {FAMILY};
             create or replace function mark() returns trigger language plpgsql as
               $$ begin update kid set v = v + 1 where parent = old.id; return old; end $$;
             create trigger \"{name}\" {when} delete on parent for each row execute function mark()"
        );
        assert_eq!(
            told(&mut client, &setup, "delete from parent"),
            [
                r#"KidUpdated 1 {"v": 1, "id": 1}"#,
                r#"KidUpdated 2 {"v": 1, "id": 2}"#,
                r#"KidDeleted 1 {"id": 1}"#,
                r#"KidDeleted 2 {"id": 2}"#,
            ],
            "{when}"
        );
    }
}

#[test]
fn a_trigger_that_writes_a_row_again_after_set_null_or_a_cascade_makes_its_event_after_theirs() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table parent (id int primary key); insert into parent values (1), (2);
         create table kid (id int primary key, parent int references parent on delete set null, v text default '');
         insert into kid values (1, 1), (2, 1);
         create function orphan() returns trigger language plpgsql as $$ begin
           if old.parent is not null and new.parent is null then update kid set v = 'orphan' where id = new.id; end if;
           return null; end $$;
         create trigger orphan after update on kid for each row execute function orphan();
         create table toy (id int primary key, parent int references parent on delete cascade);
         insert into toy values (1, 2), (2, 2);
         create function keep() returns trigger language plpgsql as
           $$ begin insert into toy values (old.id, null); return null; end $$;
         create trigger keep after delete on toy for each row execute function keep();
         select outbox_capture('kid'), outbox_capture('toy')";
    assert_eq!(
        told(&mut client, setup, "delete from parent where id = 1"),
        [
            r#"KidUpdated 1 {"id": 1, "parent": null}"#,
            r#"KidUpdated 2 {"id": 2, "parent": null}"#,
            r#"KidUpdated 1 {"v": "orphan", "id": 1}"#,
            r#"KidUpdated 2 {"v": "orphan", "id": 2}"#,
        ]
    );
    assert_eq!(
        events_of(&mut client, "delete from parent"),
        [
            r#"ToyDeleted 1 {"id": 1}"#,
            r#"ToyDeleted 2 {"id": 2}"#,
            r#"ToyCreated 1 {"id": 1, "parent": null}"#,
            r#"ToyCreated 2 {"id": 2, "parent": null}"#,
        ]
    );
}

/// A statement that is over had begun at the depth of triggers that the cascade has.
#[test]
fn a_statement_that_is_over_does_not_reverse_a_later_cascade() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = format!(
        "{FAMILY};
         create function siblings() returns trigger language plpgsql as $$ begin
           if pg_trigger_depth() = 1 then update kid set v = v + 1 where parent = new.parent and id <> new.id; end if;
           return null; end $$;
         create trigger siblings after update on kid for each row execute function siblings()"
    );
    let write = "begin; update kid set v = 10 where id = 1; delete from parent where id = 1; commit";
    assert_eq!(
        told(&mut client, &setup, write),
        [
            r#"KidUpdated 1 {"v": 10, "id": 1}"#,
            r#"KidUpdated 2 {"v": 1, "id": 2}"#,
            r#"KidDeleted 1 {"id": 1}"#,
            r#"KidDeleted 2 {"id": 2}"#,
        ]
    );
}

#[test]
fn no_statement_draws_more_seqs_than_it_has_events() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table item (id int primary key, v int); select outbox_capture('item');
         create function up() returns trigger language plpgsql as
           $$ begin update item set v = v + 1 where id = new.id and v < 2; return null; end $$;
         create trigger up after insert or update on item for each row execute function up();
         begin; insert into item select g, 0 from generate_series(1, 1000) g",
    );
    for id in 1..=50 {
        client.run(&format!("delete from item where id = {id}"));
    }
    client.run("commit");
    let drawn: i64 = client.value("select max(seq) from outbox_events");
    assert_eq!(drawn, 3_050);
}

// ---- savepoints -----------------------------------------------------------------------------------------------------

/// The block is rolled back after the events of the outer statement were stored in it.
#[test]
fn a_block_that_is_rolled_back_takes_only_its_own_events_back() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table item (id int primary key, v int); select outbox_capture('item');
         create function fails(i int) returns int language plpgsql as $$ begin
           begin
             update item set v = 100 where id = i; -- stores the events of the rows before
             begin insert into item values (i + 10, 0); exception when others then end;
             raise exception 'no';
           exception when raise_exception then
           end;
           update item set v = v + 1 where id = i;
           return i; end $$";
    assert_eq!(
        told(
            &mut client,
            setup,
            "insert into item values (1, 1), (2, 1) returning fails(id)"
        ),
        [
            r#"ItemCreated 1 {"v": 1, "id": 1}"#,
            r#"ItemUpdated 1 {"v": 2, "id": 1}"#,
            r#"ItemCreated 2 {"v": 1, "id": 2}"#,
            r#"ItemUpdated 2 {"v": 2, "id": 2}"#,
        ]
    );
}

#[test]
fn the_error_of_an_event_is_one_of_its_statement_and_a_block_may_catch_it() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table item (id int primary key, name text);
         select outbox_capture('item', aggregate_id => $$nullif(name, 'bad')$$)",
    );
    assert_eq!(refused(&mut client, "insert into item values (1, 'bad')").0, "22004");
    assert_eq!(
        events_of(
            &mut client,
            "do $$ begin insert into item values (1, 'a');
               begin insert into item values (2, 'bad'); exception when null_value_not_allowed then end;
               insert into item values (3, 'c'); end $$"
        ),
        [
            r#"ItemCreated a {"id": 1, "name": "a"}"#,
            r#"ItemCreated c {"id": 3, "name": "c"}"#,
        ]
    );
}

// ---- other events ---------------------------------------------------------------------------------------------------

#[test]
fn an_event_that_a_function_publishes_has_its_place_among_those_of_the_rows() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table item (id int primary key, v int); select outbox_capture('item');
         create function says(i int) returns bigint language sql as $$
           select outbox_publish('Said', jsonb_build_object('of', i), 'item', i::text) $$";
    assert_eq!(
        told(
            &mut client,
            setup,
            "insert into item values (1, 1), (2, 1) returning says(id)"
        ),
        [
            r#"ItemCreated 1 {"v": 1, "id": 1}"#,
            r#"Said 1 {"of": 1}"#,
            r#"ItemCreated 2 {"v": 1, "id": 2}"#,
            r#"Said 2 {"of": 2}"#,
        ]
    );
}

#[test]
fn rows_that_a_trigger_of_outbox_events_writes_come_after_the_event() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table item (id int primary key); create table log (id int generated always as identity primary key, of text);
         select outbox_capture('item'), outbox_capture('log');
         grant usage on schema public to outbox_worker; grant insert on log to outbox_worker;
         create function logs() returns trigger language plpgsql set search_path = public as $$ begin
           if new.type = 'ItemCreated' then insert into log (of) values (new.aggregate_id); end if; return null; end $$;
         create trigger logs after insert on outbox_events for each row execute function logs()";
    let events = told(&mut client, setup, "insert into item values (1), (2)");
    let place = |event: &str| {
        events
            .iter()
            .position(|told| told.starts_with(event))
            .unwrap_or_else(|| panic!("{events:?}"))
    };
    assert_eq!(events.len(), 4, "{events:?}");
    assert!(
        place("ItemCreated 1") < place("LogCreated 1") && place("ItemCreated 2") < place("LogCreated 2"),
        "{events:?}"
    );
}

// ---- ids and partitions ---------------------------------------------------------------------------------------------

#[test]
fn a_row_with_a_new_id_that_is_changed_at_once_is_created_before_it_is_updated() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = "create table item (id int primary key, v int); insert into item values (1, 1), (2, 1);
         select outbox_capture('item');
         create function up(i int) returns int language plpgsql as
           $$ begin update item set v = v + 1 where id = i; return i; end $$";
    assert_eq!(
        told(&mut client, setup, "update item set id = id + 10 returning up(id)"),
        [
            r#"ItemDeleted 1 {"id": 1}"#,
            r#"ItemCreated 11 {"v": 1, "id": 11}"#,
            r#"ItemUpdated 11 {"v": 2, "id": 11}"#,
            r#"ItemDeleted 2 {"id": 2}"#,
            r#"ItemCreated 12 {"v": 1, "id": 12}"#,
            r#"ItemUpdated 12 {"v": 2, "id": 12}"#,
        ]
    );
}

const SALES: &str = "create table sale (id int, area int, v int, primary key (id, area)) partition by list (area);
    create table sale_1 partition of sale for values in (1);
    create table sale_2 (v int, junk int, area int not null, id int not null); alter table sale_2 drop junk;
    alter table sale attach partition sale_2 for values in (2);
    insert into sale values (1, 1, 0), (2, 1, 0)";

#[test]
fn a_row_that_moves_to_another_partition_is_updated_by_update_and_by_merge() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    for write in [
        "update sale set area = 2, v = 7 where id = 1",
        "merge into sale using (values (1)) s (id) on sale.id = s.id when matched then update set area = 2, v = 7",
    ] {
        let setup = format!("drop table if exists sale; {SALES}; select outbox_capture('sale', aggregate_id => 'id')");
        let moved = [r#"SaleUpdated 1 {"v": 7, "id": 1, "area": 2}"#];
        assert_eq!(told(&mut client, &setup, write), moved, "{write}");
        // A foreign key that refers to the table is one more reader of the move.
        client.run("create table bill (id int, area int, foreign key (id, area) references sale on update cascade)");
        assert_eq!(
            events_of(&mut client, &write.replace("id = 1", "id = 2").replace("(1)", "(2)")),
            [r#"SaleUpdated 2 {"v": 7, "id": 2, "area": 2}"#],
            "{write}"
        );
        client.run("drop table bill");
    }
}

#[test]
fn a_row_that_is_lost_on_its_way_to_another_partition_is_deleted() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let setup = format!(
        "{SALES}; create function refuse() returns trigger language plpgsql as 'begin return null; end';
         create trigger refuse before insert on sale_2 for each row when (new.id = 2) execute function refuse();
         select outbox_capture('sale', aggregate_id => 'id')"
    );
    assert_eq!(
        told(&mut client, &setup, "update sale set area = 2, v = 1"),
        [
            r#"SaleUpdated 1 {"v": 1, "id": 1, "area": 2}"#,
            r#"SaleDeleted 2 {"id": 2, "area": 1}"#
        ]
    );
    // The next row of the query is no half of that move, also if it has the same aggregate.
    let setup = format!(
        "drop table sale; {}",
        setup.replace("create function", "create or replace function")
    );
    let setup = setup.replace("aggregate_id => 'id'", "aggregate_id => 'id % 2'");
    let merge = "merge into sale using (values (2), (4)) s (id) on sale.id = s.id
         when matched then update set area = 2 when not matched then insert values (s.id, 1, 5)";
    assert_eq!(
        told(&mut client, &setup, merge),
        [
            r#"SaleDeleted 0 {"id": 2, "area": 1}"#,
            r#"SaleCreated 0 {"v": 5, "id": 4, "area": 1}"#
        ]
    );
}

#[test]
fn a_statement_of_many_batches_keeps_the_order_of_rows_moves_and_new_ids() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(&format!(
        "{SALES}; delete from sale; select outbox_capture('sale', aggregate_id => 'id');
         create function up(i int) returns int language plpgsql as
           $$ begin if i % 7 = 0 then update sale set v = v + 1 where id = i; end if; return i; end $$"
    ));
    let orders = |client: &mut Client| -> Vec<String> {
        let sql = "select string_agg(type, ' ' order by seq) as types from outbox_events group by aggregate_id";
        let sql = format!("select array_agg(distinct types order by types) from ({sql}) e");
        let types = client.value(&sql);
        taken(client);
        types
    };
    client.run("insert into sale select g, 1, 0 from generate_series(1, 1200) g returning up(id)");
    assert_eq!(orders(&mut client), ["SaleCreated", "SaleCreated SaleUpdated"]);
    client.run("update sale set area = 2, v = 100 returning up(id)");
    assert_eq!(orders(&mut client), ["SaleUpdated", "SaleUpdated SaleUpdated"]);
    client.run("update sale set id = id + 7000 returning up(id)");
    assert_eq!(
        orders(&mut client),
        ["SaleCreated", "SaleCreated SaleUpdated", "SaleDeleted"]
    );
    client.run("delete from sale");
    assert_eq!(orders(&mut client), ["SaleDeleted"]);
}

// ---- two sessions ---------------------------------------------------------------------------------------------------

/// The row that the statement found is locked; when the other transaction has ended, it takes the new version
/// (EvalPlanQual). An insert that loses the race for a key becomes an update.
#[test]
fn a_statement_that_waited_for_another_session_reports_the_rows_that_it_wrote() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run("create table item (id int primary key, v int); insert into item values (1, 0), (2, 0); select outbox_capture('item')");
    let waits = "select exists (select from pg_locks where not granted)";
    for (first, second, told) in [
        (
            "update item set v = v + 1 where id = 1",
            "update item set v = v + 10",
            vec![
                r#"ItemUpdated 1 {"v": 1, "id": 1}"#,
                r#"ItemUpdated 1 {"v": 11, "id": 1}"#,
                r#"ItemUpdated 2 {"v": 10, "id": 2}"#,
            ],
        ),
        (
            "insert into item values (3, 1)",
            "insert into item values (3, 2) on conflict (id) do update set v = item.v + excluded.v",
            vec![
                r#"ItemCreated 3 {"v": 1, "id": 3}"#,
                r#"ItemUpdated 3 {"v": 3, "id": 3}"#,
            ],
        ),
        (
            "delete from item where id = 1",
            "delete from item",
            vec![
                r#"ItemDeleted 1 {"id": 1}"#,
                r#"ItemDeleted 2 {"id": 2}"#,
                r#"ItemDeleted 3 {"id": 3}"#,
            ],
        ),
    ] {
        client.run(&format!("begin; {first}"));
        let mut other = cluster.connect(DB);
        let waiting = std::thread::spawn(move || other.run(second));
        support::wait_true(&cluster, "the other session to wait", waits);
        client.run("commit");
        waiting.join().expect("the other session");
        assert_eq!(taken(&mut client), told, "{second}");
    }
}

// ---- what is no write -----------------------------------------------------------------------------------------------

#[test]
fn no_call_but_that_of_a_trigger_notes_a_row() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create role app; create table item (id int primary key, v int); insert into item values (1, 1); grant all on item to app;
         select outbox_capture('item'); create table other (a oid, b tid); insert into other values (1, '(0,1)')",
    );
    for call in [
        "select outbox_internal.row_inserted('item'::regclass, '(0,1)')",
        "select outbox_internal.row_inserted(tableoid, ctid) from item",
        "select outbox_internal.row_inserted(i.tableoid, i.ctid) from item i join other o on o.b = i.ctid",
        "update item set v = 2 returning outbox_internal.row_updated(tableoid, ctid, ctid)",
        "merge into item using other o on true
           when matched and outbox_internal.row_deleted(item.tableoid, item.ctid) then delete",
        "insert into item values (1, 2) on conflict (id) do update set v = 3
           where outbox_internal.row_deleted(item.tableoid, item.ctid)",
        "delete from item where outbox_internal.row_deleted(tableoid, ctid)",
        "create index on item ((outbox_internal.row_inserted(tableoid, '(0,1)')))",
    ] {
        client.batch_execute(call).expect_err(call);
    }
    assert!(taken(&mut client).is_empty());
    // A trigger of a user with our clause notes no row a second time, and none that was not written: the first one is
    // kept.
    client.run(
        "create function nothing() returns trigger language plpgsql as 'begin return null; end';
         create trigger a after insert on item for each row
           when (outbox_internal.row_inserted(new.tableoid, new.ctid)) execute function nothing();
         create trigger b before delete on item for each row
           when (outbox_internal.row_deleted(old.tableoid, old.ctid)) execute function nothing()",
    );
    assert_eq!(
        events_of(&mut client, "insert into item values (2, 2); delete from item"),
        [r#"ItemCreated 2 {"v": 2, "id": 2}"#, r#"ItemDeleted 2 {"id": 2}"#]
    );
    assert_eq!(client.value::<i64>("select count(*) from item where id = 1"), 1);
}

/// The table of the clause has no trigger that fires: what it noted is stored at the end of the transaction.
#[test]
fn a_commit_succeeds_and_stores_what_a_foreign_trigger_left() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table item (id int primary key); select outbox_capture('item');
         create function nothing() returns trigger language plpgsql as 'begin return null; end';
         create trigger a after insert on item for each row
           when (outbox_internal.row_inserted(new.tableoid, new.ctid)) execute function nothing();
         alter table item disable trigger outbox_capture_insert",
    );
    assert_eq!(
        events_of(&mut client, "begin; insert into item values (1), (2); commit"),
        [r#"ItemCreated 1 {"id": 1}"#, r#"ItemCreated 2 {"id": 2}"#]
    );
    client.run(
        "alter table item rename id to code; alter table item drop constraint item_pkey; insert into item values (3)",
    );
    assert_eq!(client.value::<i64>("select count(*) from item"), 3);
}
