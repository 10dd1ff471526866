-- Everything that the extension has in this database, one line a fact, without oids. Two databases with the same lines
-- have the same extension. Used by upgrade.rs.
with member as (
  select d.classid, d.objid, i.type, i.identity
  from pg_depend d
  join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
  cross join lateral pg_identify_object(d.classid, d.objid, 0) i
  where d.refclassid = 'pg_extension'::regclass and d.deptype = 'e'
), relation as (
  select m.identity, c.* from member m join pg_class c on m.classid = 'pg_class'::regclass and c.oid = m.objid
  union all
  select format('index %s', c.oid::regclass), c.*
  from member m join pg_index i on m.classid = 'pg_class'::regclass and i.indrelid = m.objid
  join pg_class c on c.oid = i.indexrelid
), fact(what, fact) as (
  select m.type || ' ' || m.identity, 'comment ' || coalesce(obj_description(m.objid, c.relname), '')
  from member m join pg_class c on c.oid = m.classid
  union all
  select m.type || ' ' || m.identity, 'initial rights ' || format('%s %s', p.objsubid, (
    select string_agg(a::text, ', ' order by a::text) from unnest(p.initprivs) a))
  from member m join pg_init_privs p on p.classoid = m.classid and p.objoid = m.objid
  union all
  select 'parameter ' || a.parname, 'initial rights ' || p.initprivs::text
  from pg_init_privs p join pg_parameter_acl a on p.classoid = 'pg_parameter_acl'::regclass and p.objoid = a.oid
  union all
  select m.identity, format('owner %s, rights %s, leakproof %s: %s', p.proowner::regrole,
    (select string_agg(a::text, ', ' order by a::text) from unnest(p.proacl) a), p.proleakproof,
    pg_get_functiondef(p.oid))
  from member m join pg_proc p on m.classid = 'pg_proc'::regclass and p.oid = m.objid
  union all
  select r.identity, format('kind %s, owner %s, rights %s, options %s, persistence %s, security %s %s, identity %s',
    r.relkind, r.relowner::regrole, (select string_agg(a::text, ', ' order by a::text) from unnest(r.relacl) a),
    r.reloptions, r.relpersistence, r.relrowsecurity, r.relforcerowsecurity, r.relreplident)
  from relation r
  union all
  select r.identity, format('column %s %s %s, not null %s, identity %s, generated %s, default %s, storage %s, %s,'
    ' statistics %s, options %s, collation %s, rights %s, dropped %s, comment %s', a.attnum, a.attname,
    format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, a.attgenerated,
    pg_get_expr(d.adbin, d.adrelid), a.attstorage, a.attcompression, nullif(a.attstattarget, -1),
    -- Some minors keep a version of the row type there, which differs in each database.
    (select string_agg(o, ', ' order by o) from unnest(a.attoptions) o where o not like 'pg_attver=%'),
    a.attcollation::regcollation, (select string_agg(x::text, ', ' order by x::text) from unnest(a.attacl) x),
    a.attisdropped, col_description(a.attrelid, a.attnum))
  from relation r
  join pg_attribute a on a.attrelid = r.oid and a.attnum > 0
  left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
  union all
  select r.identity, format('constraint %s %s, comment %s', k.conname, pg_get_constraintdef(k.oid),
    obj_description(k.oid, 'pg_constraint'))
  from relation r join pg_constraint k on k.conrelid = r.oid
  union all
  select r.identity, format('index %s, valid %s', pg_get_indexdef(r.oid), i.indisvalid)
  from relation r join pg_index i on i.indexrelid = r.oid
  union all
  select r.identity, format('trigger %s, enabled %s, comment %s', pg_get_triggerdef(t.oid), t.tgenabled,
    obj_description(t.oid, 'pg_trigger'))
  from relation r join pg_trigger t on t.tgrelid = r.oid and not t.tgisinternal
  union all
  select r.identity, 'rule ' || pg_get_ruledef(u.oid) from relation r join pg_rewrite u on u.ev_class = r.oid
  union all
  select r.identity, format('policy %s %s %s %s', p.polname, p.polcmd, pg_get_expr(p.polqual, r.oid),
    pg_get_expr(p.polwithcheck, r.oid))
  from relation r join pg_policy p on p.polrelid = r.oid
  union all
  select r.identity, format('partitions %s', pg_get_partkeydef(r.oid)) from relation r where r.relkind = 'p'
  union all
  select r.identity, format('sequence %s', row(s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmax, s.seqmin,
    s.seqcache, s.seqcycle)::text)
  from relation r join pg_sequence s on s.seqrelid = r.oid
  union all
  select m.identity, format('type %s %s, owner %s, rights %s, labels %s', t.typtype, t.typcategory,
    t.typowner::regrole, (select string_agg(a::text, ', ' order by a::text) from unnest(t.typacl) a),
    (select string_agg(e.enumlabel, ', ' order by e.enumsortorder) from pg_enum e where e.enumtypid = t.oid))
  from member m join pg_type t on m.classid = 'pg_type'::regclass and t.oid = m.objid
  union all
  select m.identity, format('attribute %s %s %s', a.attnum, a.attname, format_type(a.atttypid, a.atttypmod))
  from member m join pg_type t on m.classid = 'pg_type'::regclass and t.oid = m.objid
  join pg_attribute a on a.attrelid = t.typrelid and a.attnum > 0
  union all
  select m.identity, format('schema, owner %s, rights %s', n.nspowner::regrole,
    (select string_agg(a::text, ', ' order by a::text) from unnest(n.nspacl) a))
  from member m join pg_namespace n on m.classid = 'pg_namespace'::regclass and n.oid = m.objid
  union all
  select m.identity, format('foreign data wrapper, owner %s, handler %s, validator %s, rights %s, options %s',
    w.fdwowner::regrole, w.fdwhandler::regproc, w.fdwvalidator::regproc,
    (select string_agg(a::text, ', ' order by a::text) from unnest(w.fdwacl) a), w.fdwoptions)
  from member m join pg_foreign_data_wrapper w on m.classid = 'pg_foreign_data_wrapper'::regclass and w.oid = m.objid
  union all
  select m.identity, format('server, owner %s, wrapper %s, rights %s, options %s', s.srvowner::regrole, w.fdwname,
    (select string_agg(a::text, ', ' order by a::text) from unnest(s.srvacl) a), s.srvoptions)
  from member m join pg_foreign_server s on m.classid = 'pg_foreign_server'::regclass and s.oid = m.objid
  join pg_foreign_data_wrapper w on w.oid = s.srvfdw
  union all
  select 'extension outbox', format('version %s, schema %s, relocatable %s', x.extversion, x.extnamespace::regnamespace,
    x.extrelocatable)
  from pg_extension x where x.extname = 'outbox'
  union all
  select 'extension outbox', format('dumps %s %s', c.config::regclass, c.condition)
  from pg_extension x cross join lateral unnest(x.extconfig, x.extcondition) c (config, condition)
  where x.extname = 'outbox'
)
select line from (select what || ': ' || fact as line from fact) f order by line collate "C";
