#!/bin/sh
# Checks for the packages that a target needs and installs the missing ones.
# Its argument says for what:
#
# - ctl: outboxctl
# - build: the extension
# - packages: deb and rpm
# - servers: the demo and the benchmarks
# - tests: all of it
# - majors: other versions of the servers
#
# On Debian and its derivatives this script installs missing packages with apt, as root or with sudo, and announces that
# first. On other systems it prints what is missing.
set -eu

missing=""
need() { # need PACKAGE PATH-OR-COMMAND
  case $2 in
    /*) [ -e "$2" ] || missing="$missing $1" ;;
    *) command -v "$2" >/dev/null 2>&1 || missing="$missing $1" ;;
  esac
}

command -v cargo >/dev/null 2>&1 || {
  echo "outbox needs Rust: install it from https://rustup.rs, then try again." >&2
  exit 1
}

pg_config=${PG_CONFIG:-/usr/lib/postgresql/15/bin/pg_config}
if [ "${1:-build}" = majors ]; then
  need patchelf patchelf
  need npm npm
  python3 -c 'import pip' >/dev/null 2>&1 || missing="$missing python3-pip"
elif [ "${1:-build}" != ctl ] && ! { command -v "$pg_config" && [ -d "$("$pg_config" --includedir-server)" ]; } >/dev/null 2>&1; then
  missing="$missing postgresql-15 postgresql-server-dev-15"
fi
need "gcc libc6-dev" cc
case ${1:-build} in servers | tests)
  need rabbitmq-server /usr/lib/rabbitmq/bin/rabbitmq-server
  need postgresql-client-15 "$("$pg_config" --bindir 2>/dev/null || echo /usr/lib/postgresql/15/bin)/pg_dump" ;;
esac
case ${1:-build} in packages | tests)
  # The tools that write packages come from PyPI, into an environment below target/.
  /usr/bin/python3 -c 'import ensurepip, tomllib, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
esac
if [ "${1:-build}" = tests ]; then
  # A clean Debian in which packages are installed, and what reads and checks packages.
  need debootstrap debootstrap
  need rpm rpm
  need cpio cpio
  need lintian lintian
  need binutils readelf
  need openssl openssl
  need pgbouncer /usr/sbin/pgbouncer
  # Tests of several hosts make them with network namespaces.
  need iproute2 /usr/sbin/ip
  need nftables /usr/sbin/nft
  # Some tests check messages with libraries from PyPI, in separate environments below target/. The examples of
  # consumers use packages from PyPI and npm; see example_packages.sh.
  python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
  need nodejs node
  need npm npm
  # The programs of docs/publishing.md.
  need "php-cli php-pgsql" php
  need php-doctrine-dbal /usr/share/php/Doctrine/DBAL/autoload.php
  need php-illuminate-database /usr/share/php/Illuminate/Database/autoload.php
  ruby -e 'require "active_record"; require "pg"' >/dev/null 2>&1 || missing="$missing ruby ruby-pg ruby-activerecord"
  need default-jdk-headless javac
  need libpostgresql-jdbc-java /usr/share/java/postgresql.jar
  need libspring-jdbc-java /usr/share/java/spring3-jdbc.jar
  need golang-go go
  need golang-github-jackc-pgx-v4-dev /usr/share/gocode/src/github.com/jackc/pgx/v4
  # The Symfony application of docs/consumers.md.
  need php-symfony-framework-bundle /usr/share/php/Symfony/Bundle/FrameworkBundle/autoload.php
  need "php-symfony-amqp-messenger php-amqp" /usr/share/php/Symfony/Component/Messenger/Bridge/Amqp/autoload.php
  need php-symfony-property-info /usr/share/php/Symfony/Component/PropertyInfo/autoload.php
  need "php-symfony-serializer php-symfony-property-access php-symfony-yaml php-symfony-console" \
    /usr/share/php/Symfony/Component/Serializer/autoload.php
  # Tests open the page of outboxctl serve in a browser, which needs a font, and check its metrics and alerts with
  # Prometheus.
  need chromium chromium
  need fonts-liberation /usr/share/fonts/truetype/liberation
  need prometheus prometheus
fi
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
  echo "outbox needs these packages (Debian's names), and apt-get is not available to install them:$missing" >&2
  exit 1
fi
if [ "$(id -u)" = 0 ]; then sudo=""
elif command -v sudo >/dev/null 2>&1; then sudo=sudo
else
  echo "outbox needs these packages; install them as root, then try again:$missing" >&2
  exit 1
fi
echo "outbox: installing with apt, which takes a minute or two:$missing"
# No target needs a server that starts with the machine. So apt makes no cluster, and the broker it installs is disabled.
conf=/etc/postgresql-common/createcluster.conf
ours=""
if [ ! -e "$conf" ]; then
  ours=$conf
  $sudo mkdir -p "${conf%/*}"
  echo 'create_main_cluster = false' | $sudo tee "$conf" >/dev/null
fi
apt() { $sudo env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -qq "$@"; }
# apt waits for the locks of dpkg, but not for the lock of the package lists.
tries=0
until printed=$(apt update 2>&1); do
  case $printed in
    *"Unable to lock"* | *"Could not get lock"*) ;;
    *) tries=120 ;;
  esac
  if [ "$tries" -ge 120 ]; then
    echo "$printed" >&2
    exit 1
  fi
  [ "$tries" != 0 ] || echo "outbox: another apt is running; waiting for it, up to 10 minutes"
  tries=$((tries + 1))
  ${OUTBOX_APT_WAIT:-sleep 5}
done
# shellcheck disable=SC2086
apt install -y --no-install-recommends $missing >/dev/null
# Later installations make a cluster, as if this one had not been: ucf keeps the file of the package beside ours.
if [ -n "$ours" ]; then
  if [ -e "$ours.ucf-dist" ]; then $sudo mv "$ours.ucf-dist" "$ours"; else $sudo rm -f "$ours"; fi
fi
case "$missing" in
  *rabbitmq-server*)
    if [ -d /run/systemd/system ]; then
      $sudo systemctl disable --now --quiet rabbitmq-server.service epmd.service epmd.socket || true
    fi ;;
esac
case "$missing" in
  *prometheus*)
    if [ -d /run/systemd/system ]; then
      $sudo systemctl disable --now --quiet prometheus.service || true
    fi ;;
esac
case "$missing" in
  *pgbouncer*)
    if [ -d /run/systemd/system ]; then
      $sudo systemctl disable --now --quiet pgbouncer.service || true
    fi ;;
esac
