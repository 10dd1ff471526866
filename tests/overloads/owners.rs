//! If foreign code did run with the rights of the worker role, it must not be able to change what a superuser runs.

use postgres::error::SqlState;

use super::*;
use support::{Session, idle_cluster};

#[test]
fn views_and_functions_that_run_with_the_rights_of_their_caller_belong_to_a_superuser() {
    let cluster = idle_cluster(&[]);
    let elsewhere: String = cluster.query_one(
        DB,
        "select coalesce(string_agg(i.identity, ', '), '')
         from pg_depend d join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
         cross join pg_identify_object(d.classid, d.objid, 0) i
         left join pg_class c on d.classid = 'pg_class'::regclass and c.oid = d.objid
         left join pg_proc p on d.classid = 'pg_proc'::regclass and p.oid = d.objid
         join pg_roles r on r.oid = coalesce(c.relowner, p.proowner)
         where d.deptype = 'e' and (c.relkind = 'v' or not p.prosecdef) and not r.rolsuper",
    );
    assert_eq!(elsewhere, "");
    // A superuser owns no SECURITY DEFINER function, and no table that such functions write.
    let superusers: String = cluster.query_one(
        DB,
        "select coalesce(string_agg(i.identity, ', '), '')
         from pg_depend d join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
         cross join pg_identify_object(d.classid, d.objid, 0) i
         left join pg_class c on d.classid = 'pg_class'::regclass and c.oid = d.objid
         left join pg_proc p on d.classid = 'pg_proc'::regclass and p.oid = d.objid
         join pg_roles r on r.oid = coalesce(c.relowner, p.proowner)
         where d.deptype = 'e' and (c.relkind in ('r', 'p') or p.prosecdef) and r.rolsuper",
    );
    assert_eq!(superusers, "");
}

#[test]
fn the_worker_role_can_replace_no_view_and_no_function_that_a_view_calls() {
    let cluster = idle_cluster(&[]);
    let mut worker = cluster.connect(DB);
    worker.run("set role outbox_worker");
    // The owner of a view could run the first statement without CREATE on the schema.
    for sql in [
        "create or replace rule \"_RETURN\" as on select to outbox_internal.live_workers do instead
           select worker_id, pid from outbox_workers",
        "create or replace view outbox_internal.live_workers as select worker_id, pid from outbox_workers",
        "create function outbox_internal.wake(integer, text, text) returns void language sql as 'select'",
        "create or replace function outbox_internal.has_ended(worker text) returns boolean language sql volatile as 'select true'",
        "create or replace function outbox_internal.destinations(out destination text, out wrapper text, out server oid, out options text[],
           out paused boolean) returns setof record language sql as 'select null::text, null::text, null::oid, null::text[], true'",
        "alter function outbox_not_adopted() reset all",
        "alter function outbox_internal.work_begin(text) rename to work_begun",
        "alter function outbox_publish set search_path = public",
    ] {
        let error = worker.batch_execute(sql).expect_err(sql);
        assert_eq!(error.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{sql}: {error:?}");
    }
}
