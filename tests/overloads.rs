//! Tests against a role that may create in the schema of the extension, and that puts overloads beside its functions.
//! No call of the extension may run one of them, with any rights. The tests create the overloads from pg_proc, so they
//! attack functions that are added later as well.

mod attack;
mod by_outboxctl;
mod owners;
mod refusal;

use support::{Cluster, wait_until};
use support::{DB, LONG};

/// The text that the body of each overload logs before it fails.
const SPRUNG: &str = "an overload ran";

/// A role without further rights that may create in the schema.
const MALLORY: &str = "create role mallory; grant create, usage on schema public to mallory";

/// Creates overloads of every function of the extension: for each argument one with each of these types, and those
/// without the last arguments that have a default. Each logs the role it runs as, and fails.
const MAKE_OVERLOADS: &str = r#"
set role mallory;
do $do$
declare
  other_types constant text[] := '{text,varchar,name,smallint,integer,bigint,numeric,float8,boolean,oid,timestamptz,timestamp,interval,json,jsonb,anyelement,record,"text[]","smallint[]","integer[]","bigint[]",anyarray}';
  f record;
  other text;
  place integer;
  lacking integer;
begin
  for f in
    select p.oid, p.proname, p.pronargdefaults as defaults, p.proretset,
           pg_catalog.format_type(p.prorettype, null) as returns, p.proargmodes is not null as has_out,
           a.args, (select count(*) from unnest(a.modes) m where m in ('i', 'b')) as n_in
    from pg_proc p join pg_depend d on d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e'
    join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
    cross join lateral (
      select array_agg(format_type(t, null) order by n) as args,
             array_agg(coalesce(p.proargmodes[n], 'i') order by n) as modes
      from unnest(coalesce(p.proallargtypes, p.proargtypes::oid[])) with ordinality u (t, n)) a
    where p.pronargs > 0 and p.prorettype <> 'trigger'::regtype
  loop
    for place in 1 .. f.n_in loop
      foreach other in array other_types loop
        perform pg_temp.overload(f.oid, place, other, 0);
      end loop;
    end loop;
    for lacking in 1 .. f.defaults loop
      perform pg_temp.overload(f.oid, 0, null, lacking);
    end loop;
  end loop;
end
$do$;
reset role;
"#;

/// Creates one overload: the argument at `place` has another type, or the last `lacking` arguments are missing.
const OVERLOAD: &str = r#"
create function pg_temp.overload(of oid, place integer, other text, lacking integer) returns void language plpgsql as $f$
declare
  f pg_proc;
  inputs integer := 0;
  arguments text[];
  mode "char";
  type text;
  returns text := '';
begin
  select * into f from pg_proc p where p.oid = of;
  for n in 1 .. coalesce(cardinality(f.proallargtypes), f.pronargs) loop
    mode := coalesce(f.proargmodes[n], 'i');
    type := format_type(coalesce(f.proallargtypes[n], f.proargtypes[n - 1]), null);
    if mode = 'i' then
      inputs := inputs + 1;
      continue when inputs > f.pronargs - lacking;
      type := case when inputs = place then other else type end;
    end if;
    continue when mode = 't';
    arguments := arguments || format('%s %I %s', case mode when 'o' then 'out' else 'in' end, coalesce(f.proargnames[n], 'a' || n), type);
  end loop;
  if f.proargmodes is null then
    returns := format('returns %s %s', case when f.proretset then 'setof' else '' end, format_type(f.prorettype, null));
  elsif f.proretset then
    returns := 'returns setof record';
  end if;
  execute format('create function public.%I(%s) %s language plpgsql as %L', f.proname, array_to_string(arguments, ', '), returns,
    format('begin raise log %L, current_user; raise exception %L; end', 'an overload ran as %: '
           || replace(format('%s(%s)', f.proname, array_to_string(arguments, ', ')), '%', '%%'), 'an overload ran'));
exception when duplicate_function or invalid_function_definition or feature_not_supported or insufficient_privilege then
  null; -- that is the function itself, or there can be no such one; or it would name a type of a schema closed to this role
end
$f$;
grant execute on function pg_temp.overload(oid, integer, text, integer) to public;
"#;

/// Creates the overloads in the schema public.
fn make_overloads(cluster: &Cluster) {
    cluster.exec(DB, MALLORY);
    cluster.exec(DB, &format!("{OVERLOAD}{MAKE_OVERLOADS}"));
    let made: i64 = cluster.query_one(DB, "select count(*) from pg_proc where proowner = 'mallory'::regrole");
    assert!(made > 3000, "{made} overloads");
}

/// A call of a function of the extension with every argument, each with its exact type, as a careful user writes it. An
/// argument that is not in `given` has its default.
fn exact(cluster: &Cluster, name: &str, given: &[(&str, &str)]) -> String {
    let (schema, plain) = name.split_once('.').unwrap_or(("public", name));
    let rows = cluster
        .connect(DB)
        .query(
            "select coalesce(p.proargnames[n], ''), format_type(p.proargtypes[n - 1], null),
                    pg_get_function_arg_default(p.oid, n)
             from pg_proc p join pg_depend d on d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e'
             cross join generate_series(1, p.pronargs) n
             where p.proname = $1 and p.pronamespace = $2::text::regnamespace order by n",
            &[&plain, &schema],
        )
        .expect("the arguments");
    let mut unused: Vec<&str> = given.iter().map(|(argument, _)| *argument).collect();
    let arguments: Vec<String> = rows
        .iter()
        .map(|row| {
            let (argument, kind, default): (String, String, Option<String>) = (row.get(0), row.get(1), row.get(2));
            let value = given
                .iter()
                .find(|(name, _)| *name == argument)
                .map(|(_, value)| *value);
            unused.retain(|name| *name != argument);
            let value = value
                .or(default.as_deref())
                .unwrap_or_else(|| panic!("{name} needs {argument}"));
            format!("({value})::{kind}")
        })
        .collect();
    assert!(unused.is_empty(), "{name} has no argument {unused:?}");
    format!("select * from {schema}.{plain}({})", arguments.join(", "))
}

/// Runs a call that `exact` builds.
fn call(cluster: &Cluster, name: &str, given: &[(&str, &str)]) {
    cluster.exec(DB, &exact(cluster, name, given));
}

/// Asserts that no overload has run, and that no call was ambiguous or did not find its function.
fn assert_unharmed(cluster: &Cluster) {
    let log = cluster.log();
    let bad: Vec<&str> = log
        .lines()
        .filter(|line| line.contains(SPRUNG) || line.contains("is not unique") || line.contains("does not exist"))
        .take(20)
        .collect();
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Waits until `sql` returns true; stops as soon as an overload has run.
fn wait_unharmed(cluster: &Cluster, what: &str, sql: &str) {
    wait_until(what, LONG, || {
        assert_unharmed(cluster);
        cluster
            .try_connect(DB)
            .is_ok_and(|mut client| client.query_one(sql, &[]).is_ok_and(|row| row.get(0)))
    });
}
