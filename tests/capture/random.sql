-- Tables, triggers and statements by chance: which ones, says setseed(). Called by random.rs. A statement may call f() or
-- g(), and fire tr(); each may run a further statement, up to three deep, and roll it back.
drop table if exists a, b, p cascade;
create table a (id int primary key, v int, k bigint default nextval('k'));
create table b (id int primary key, p int references a on delete cascade on update cascade, v int, k bigint default nextval('k'));
create table p (id int, p int, v int, k bigint default nextval('k'), primary key (id, p)) partition by list (p);
create table p1 partition of p for values in (0);
create table p2 (v int, junk int, p int not null, id int not null, k bigint default nextval('k'));
alter table p2 drop column junk; alter table p attach partition p2 for values in (1);
create table p3 partition of p for values in (2, 3) partition by list (p);
create table p31 partition of p3 for values in (2);
create table p32 partition of p3 for values in (3);
alter table a replica identity full; alter table b replica identity full; alter table p1 replica identity full;
alter table p2 replica identity full; alter table p31 replica identity full; alter table p32 replica identity full;
create or replace function random_statement() returns text language plpgsql as $$
declare t text := (array['a','b','a','b','p','p'])[1 + floor(random()*6)]; i int := 1 + floor(random()*9); j int := 1 + floor(random()*9); k int := floor(random()*4); w text := (array[format('id = %s', i), format('id in (%s,%s)', i, j), format('id between %s and %s', i, i + 2), 'true', format('g(id) and id >= %s', i), format('id = %s', i)])[1 + floor(random()*6)];
 x text; r text := case when random() < 0.35 then ' returning f(id)' else '' end; c text;
begin
 x := case t when 'a' then '(id, v)' else '(id, p, v)' end;
 c := case t when 'a' then 'id' when 'b' then 'id' else 'id, p' end;
 return case floor(random()*10)
  when 0 then format('insert into %s %s select g, %s %s from generate_series(%s, %s) g where g(g) on conflict (%s) do update set v = %s.v + 1%s', t, x, case when t = 'a' then '' when t = 'b' then '(select min(id) from a),' else format('%s,', k) end, j, i, i + 2, c, t, r)
  when 1 then format('insert into %s %s select g, %s %s from generate_series(%s, %s) g on conflict do nothing%s', t, x, case when t = 'a' then '' when t = 'b' then '(select max(id) from a),' else format('%s,', k) end, j, i, i + 3, r)
  when 2 then format('delete from %s where %s%s', t, w, r)
  when 3 then format('update %s set v = v + %s where %s%s', t, j, w, r)
  when 4 then format('update %s set id = id + case when random() < 0.5 then 20 else -20 end where %s%s', t, w, r)
  when 5 then format('update p set p = (p + %s) %% 4, v = v + 1 where %s%s', k, w, r)
  when 6 then format('merge into %s using (select g id, g %% 3 k, %s pp from generate_series(%s, %s) g) s on %s.id = s.id%s when matched and s.k = 0 then delete when matched then update set v = %s.v + 1%s when not matched then insert %s values (s.id, %s s.k)', t, k, i, i + 3, t, case when t = 'p' then ' and p.p < 3' else '' end, t, case when t = 'p' then ', p = s.pp' else '' end, x, case when t = 'a' then '' when t = 'b' then 'null,' else 's.pp,' end)
  when 7 then format('with d as (delete from %s where %s returning id), u as (update %s set v = v + 100 where id <= %s returning id) insert into %s %s select id, %s %s from d where f(id) > 0 on conflict do nothing%s', t, w, case t when 'a' then 'b' when 'b' then 'p' else 'a' end, j, t, x, case when t = 'a' then '' when t = 'b' then 'null,' else format('%s,', k) end, i, r)
  when 8 then format('with d as (update %s set v = -v where %s returning id, f(id)) select count(*) from d', t, w)
  else format('do $d$ begin perform act(%L); end $d$', 'do') end;
end $$;
create or replace function act(who text) returns void language plpgsql as $$
declare d int := coalesce(nullif(current_setting('test.depth', true), ''), '0'); s text;
begin
 if d >= 3 or nextval('budget') > 150 or random() < 0.45 + 0.1 * d then return; end if;
 perform set_config('test.depth', (d + 1)::text, true);
 s := random_statement();
 if random() < 0.5 then
  begin execute s; if random() < 0.3 then raise exception 'r'; end if; if random() < 0.3 then begin execute random_statement(); raise exception 'q'; exception when others then null; end; end if; exception when others then null; end;
 else begin execute s; exception when unique_violation or triggered_data_change_violation or foreign_key_violation or cardinality_violation or check_violation or not_null_violation then null; end; end if;
 perform set_config('test.depth', d::text, true);
end $$;
create or replace function f(i int) returns int language plpgsql as $$ begin perform act('f'); return i; end $$;
create or replace function g(i int) returns bool language plpgsql as $$ begin perform act('g'); return true; end $$;
create or replace function tr() returns trigger language plpgsql as $$ begin perform act(tg_name); if tg_level = 'ROW' and tg_when = 'BEFORE' then if random() < 0.1 then return null; end if; if tg_op = 'DELETE' then return old; end if; new.v := new.v + 1; return new; end if; return null; end $$;
do $$ declare t text; o text; w text; n text; begin
 foreach t in array array['a','b','p','p1','p31'] loop foreach w in array array['before','after'] loop
  for i in 1..2 loop if random() < 0.5 then
   o := (array['insert','update','delete','insert or update','insert or update or delete'])[1 + floor(random()*5)];
   n := (array['A','z','outbox_a','p','zz'])[1 + floor(random()*5)] || i || w;
   begin execute format('create trigger %I %s %s on %s for each %s execute function tr()', n, w, o, t, case when random() < 0.7 and not (t = 'p' and w = 'before' and random() < 0.5) then 'row' else 'statement' end); exception when duplicate_object then null; end;
  end if; end loop;
  if w = 'after' and random() < 0.3 then execute format('create constraint trigger %I after insert or update or delete on %s deferrable initially deferred for each row execute function tr()', 'def' || t, t); end if;
 end loop; end loop; end $$;
select set_config('test.depth', '9', false);
