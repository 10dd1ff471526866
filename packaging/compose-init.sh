#!/bin/sh
# Makes a new database ready: the extension, its two destinations, the password of the broker and the role of the monitor.
# The image of Postgres runs it once, as user postgres, for packaging/compose.yml.
set -eu

(umask 077; printf '%s\n' "$RABBITMQ_PASSWORD" > "$PGDATA/outbox.password")
psql -X -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -d "$POSTGRES_DB" -v url="$RABBITMQ_URL" -v exchange="${EXCHANGE:-events}" \
  -v password_file="$PGDATA/outbox.password" -v hook_url="$HOOK_URL" -v hook_host="$HOOK_HOST" -v monitor_password="$MONITOR_PASSWORD" <<'EOF'
alter system set outbox.url = :'url';
alter system set outbox.password_file = :'password_file';
alter system set outbox.exchange = :'exchange';
alter system set outbox.exchange_type = 'topic';
alter system set outbox.http_allow = :'hook_host';
create schema outbox;
create extension outbox schema outbox;
create server hook foreign data wrapper outbox_http options (url :'hook_url');
alter database :"DBNAME" set search_path = "$user", public, outbox;
create role monitor login password :'monitor_password';
grant outbox_admin to monitor;
EOF
