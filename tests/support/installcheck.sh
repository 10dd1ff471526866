#!/bin/sh
# usage: installcheck.sh PG_CONFIG VERSION
#
# Runs the SQL of pg_test/ with pg_regress: psql must print what pg_test/expected contains. The server is the running one of
# PGHOST, PGPORT and PGUSER, with the installed extension. The database contrib_regression is dropped and created there.
# Results and differences are in target/installcheck. `make installcheck` calls it, and tests/regress.rs calls that.
set -eu
cd "$(dirname "$0")/../.."
pg_regress=$(dirname "$("$1" --pgxs)")/../test/regress/pg_regress

refuse() {
  echo "outbox: $*" >&2
  exit 1
}
[ -x "$pg_regress" ] || refuse "no $pg_regress: Debian has it in the postgresql-client of the major"
# A worker would change what the views show.
problem=$("$("$1" --bindir)/psql" -X -A -t -q -d postgres -c "select case
  when current_setting('outbox.library_version', true) is null
    then 'has not preloaded the library: add outbox to shared_preload_libraries, and restart it'
  when current_setting('outbox.library_version') <> '$2'
    then 'runs version ' || current_setting('outbox.library_version') || ' of the library, not $2: make install, and restart it'
  when current_setting('outbox.workers') <> '0' then 'has workers: set outbox.workers = 0' end") || refuse "no server to test"
[ -z "$problem" ] || refuse "the server $problem"

mkdir -p target/installcheck
"$pg_regress" --bindir="$("$1" --bindir)" --inputdir=pg_test --outputdir=target/installcheck --encoding=UTF8 --no-locale \
  --dbname=contrib_regression $(cd pg_test/sql && ls | sed 's/\.sql$//')
