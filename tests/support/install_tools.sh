#!/bin/sh
# Checks for the packages that a target needs and installs the missing ones.
# Its argument says for what:
#
# - ctl: outboxctl
# - build: the extension
# - packages: deb and rpm
# - servers: the demo and the benchmarks
# - tests: tests/suite.rs
# - systems: tests/systems.rs
# - majors: other versions of the servers
#
# On Debian and its derivatives this script installs missing packages with apt, as root or with sudo, and announces that
# first. On other systems it prints what is missing. It goes on without a package that only a few tests need: they are
# skipped.
set -eu

group=${1:-build}
missing=""
optional=""
exists() { # exists PATH-OR-COMMAND
  case $1 in
    /*) [ -e "$1" ] ;;
    *) command -v "$1" >/dev/null 2>&1 ;;
  esac
}
has_libclang() {
  [ -z "${LIBCLANG_PATH:-}" ] || return 0
  for library in /usr/lib*/libclang[.-][0-9s]*so* /usr/lib/*/libclang[.-][0-9s]*so* /usr/lib*/llvm*/lib*/libclang[.-][0-9s]*so*; do
    [ ! -e "$library" ] || return 0
  done
  return 1
}
need() { # need PACKAGES PATH-OR-COMMAND
  exists "$2" || missing="$missing $1"
}
want() { # want TESTS PACKAGES: without these packages, those tests are skipped
  optional="$optional$1|$2
"
}

command -v cargo >/dev/null 2>&1 || {
  echo "outbox needs Rust: install it from https://rustup.rs, then try again." >&2
  exit 1
}

# The major of the server. Without a server, the path asks for one, or else the archive decides.
pg_config=${PG_CONFIG:-pg_config}
version=$("$pg_config" --version 2>/dev/null || true)
major=$(echo "$version $pg_config" | sed -nE 's,^PostgreSQL ([0-9]+).*,\1,p; s,^ /usr/lib/postgresql/([0-9]+)/.*,\1,p')
bindir=$("$pg_config" --bindir 2>/dev/null || true)
headers=$("$pg_config" --includedir-server 2>/dev/null || true)
server=""
case $group in
  ctl | majors) ;;
  build | packages) [ -d "$headers" ] || server=missing ;;
  *) { [ -d "$headers" ] && [ -x "$bindir/postgres" ] && [ -x "$bindir/pg_dump" ]; } || server=missing ;;
esac
need "gcc libc6-dev" cc
# pgrx reads the headers of the server with libclang. Debian's package of the headers brings it, those below target/majors
# do not.
case $group in
  ctl | majors) ;;
  *) [ -n "$server" ] || has_libclang || missing="$missing libclang-dev" ;;
esac
case $group in
  majors)
    need patchelf patchelf
    need npm npm
    python3 -c 'import pip' >/dev/null 2>&1 || missing="$missing python3-pip" ;;
  servers | tests | systems)
    [ -n "${OUTBOX_RABBITMQ_BINDIR:-}" ] || exists /opt/rabbitmq/sbin/rabbitmq-server ||
      need rabbitmq-server /usr/lib/rabbitmq/bin/rabbitmq-server ;;
esac
case $group in packages | systems)
  # The tools that write packages come from PyPI, into an environment below target/.
  /usr/bin/python3 -c 'import ensurepip, tomllib, venv' >/dev/null 2>&1 || missing="$missing python3-venv" ;;
esac
case $group in tests | systems)
  # Some tests run libraries from PyPI, in separate environments below target/; see example_packages.sh.
  python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv" ;;
esac
if [ "$group" = tests ]; then
  need openssl openssl
  need pgbouncer /usr/sbin/pgbouncer
  # As root, tests of several hosts make them with network namespaces.
  { exists /usr/sbin/ip && exists /usr/sbin/nft; } || want "several hosts" "iproute2 nftables"
fi
if [ "$group" = systems ]; then
  # A clean Debian in which packages are installed, and what reads and checks packages.
  need debootstrap /usr/sbin/debootstrap
  need rpm rpm
  need cpio cpio
  need lintian lintian
  need binutils readelf
  # The examples of consumers use packages from npm too.
  need nodejs node
  need npm npm
  # The programs of docs/publishing.md.
  php=/usr/share/php
  exists php || want "PDO" "php-cli php-pgsql"
  exists $php/Doctrine/DBAL/autoload.php || want "Doctrine" "php-cli php-pgsql php-doctrine-dbal"
  exists $php/Illuminate/Database/autoload.php || want "Laravel" "php-cli php-pgsql php-illuminate-database"
  ruby -e 'require "active_record"; require "pg"' >/dev/null 2>&1 || want "Rails" "ruby ruby-pg ruby-activerecord"
  { exists javac && exists /usr/share/java/postgresql.jar; } || want "JDBC" "default-jdk-headless libpostgresql-jdbc-java"
  exists /usr/share/java/spring3-jdbc.jar || want "Spring" "default-jdk-headless libpostgresql-jdbc-java libspring-jdbc-java"
  { exists go && exists /usr/share/gocode/src/github.com/jackc/pgx/v4; } || want "Go" "golang-go golang-github-jackc-pgx-v4-dev"
  # The Symfony application of docs/consumers.md.
  symfony=$php/Symfony/Component
  { exists $php/Symfony/Bundle/FrameworkBundle/autoload.php && exists $symfony/Messenger/Bridge/Amqp/autoload.php &&
    exists $symfony/PropertyInfo/autoload.php && exists $symfony/Serializer/autoload.php; } ||
    want "Symfony" "php-cli php-amqp php-symfony-framework-bundle php-symfony-amqp-messenger php-symfony-property-info \
php-symfony-property-access php-symfony-serializer php-symfony-yaml php-symfony-console"
  # Tests open the page of outboxctl serve in a browser, which needs a font, and check its metrics and alerts.
  exists chromium || want "the browser" chromium
  need fonts-liberation /usr/share/fonts/truetype/liberation
  exists prometheus || want "Prometheus" prometheus
fi
[ -n "$missing$server$optional" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
  cannot_install="apt-get is not available to install them"
elif [ "$(id -u)" = 0 ]; then sudo=""
elif command -v sudo >/dev/null 2>&1; then sudo=sudo
else
  cannot_install="only root can install them, with \`apt-get install\`"
fi
if [ -n "${cannot_install:-}" ]; then
  [ -z "$server" ] || missing="$missing postgresql${major:+-$major} postgresql-server-dev-${major:-all}"
  if [ -n "$missing" ]; then
    echo "outbox needs these packages (Debian's names), and $cannot_install:$missing" >&2
    exit 1
  fi
  printf %s "$optional" | while IFS='|' read -r tests packages; do
    echo "outbox: tests with $tests will be skipped without $packages: $cannot_install"
  done
  exit 0
fi
apt() { $sudo env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -qq "$@"; }
echo "outbox: asking apt for the packages that are missing"
# apt waits for the locks of dpkg, but not for the lock of the package lists.
tries=0
until printed=$(apt update 2>&1); do
  case $printed in
    *"Unable to lock"* | *"Could not get lock"*) ;;
    *) tries=120 ;;
  esac
  if [ "$tries" -ge 120 ]; then
    echo "$printed" >&2
    [ -z "$missing$server" ] || exit 1
    break
  fi
  [ "$tries" != 0 ] || echo "outbox: another apt is running; waiting for it, up to 10 minutes"
  tries=$((tries + 1))
  ${OUTBOX_APT_WAIT:-sleep 5}
done
offers() { # offers PACKAGES
  for package in "$@"; do
    # No virtual package: Ubuntu's chromium is one, and installs a snap.
    case $(LC_ALL=C apt-cache policy "$package" 2>/dev/null) in *"Candidate: (none)"*) return 1 ;; esac
  done
  apt install --simulate --no-install-recommends "$@" >/dev/null 2>&1
}
add() { # add PACKAGES, each once
  for package in "$@"; do
    case " $missing " in *" $package "*) ;; *) missing="$missing $package" ;; esac
  done
}
if [ -n "$server" ]; then
  for offered in ${major:-15 18 17 16} ""; do
    ! offers "postgresql-$offered" "postgresql-server-dev-$offered" || break
  done
  if [ -z "$offered" ]; then
    echo "outbox needs Postgres ${major:-15, 16, 17 or 18} with its headers, which apt does not offer here" >&2
    exit 1
  fi
  add "postgresql-$offered" "postgresql-server-dev-$offered"
fi
while IFS='|' read -r tests packages; do
  # shellcheck disable=SC2086
  if [ -z "$tests" ]; then :
  elif offers $packages; then add $packages
  else echo "outbox: tests with $tests will be skipped: apt cannot install $packages here"
  fi
done <<END
$optional
END
[ -n "$missing" ] || exit 0

echo "outbox: installing with apt, which takes a minute or two:$missing"
# No target needs a server that starts with the machine. So apt makes no cluster, and the broker it installs is disabled.
conf=/etc/postgresql-common/createcluster.conf
ours=""
if [ -n "$server" ] && [ ! -e "$conf" ]; then
  ours=$conf
  $sudo mkdir -p "${conf%/*}"
  echo 'create_main_cluster = false' | $sudo tee "$conf" >/dev/null
fi
# shellcheck disable=SC2086
apt install -y --no-install-recommends $missing >/dev/null || failed=$?
# Later installations make a cluster, as if this one had not been: ucf keeps the file of the package beside ours.
if [ -n "$ours" ]; then
  if [ -e "$ours.ucf-dist" ]; then $sudo mv "$ours.ucf-dist" "$ours"; else $sudo rm -f "$ours"; fi
fi
[ -z "${failed:-}" ] || exit "$failed"
[ -d /run/systemd/system ] || exit 0
for package in $missing; do
  case $package in
    rabbitmq-server) units="rabbitmq-server.service epmd.service epmd.socket" ;;
    prometheus | pgbouncer) units=$package.service ;;
    *) continue ;;
  esac
  # shellcheck disable=SC2086
  $sudo systemctl disable --now --quiet $units || true
done
