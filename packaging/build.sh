#!/bin/sh
# usage: build.sh deb|rpm PG_CONFIG
#
# Puts the packages of the extension, for the major of PG_CONFIG, and of outboxctl into target/packages. `make deb`,
# `make rpm` and release.sh call it.
#
# It fills a directory with the files of each package, by `make install`, and nfpm packs that directory. Their
# SBOMs (*.cdx.json) are beside the packages. Files have the time of the last commit, so that two builds are the same.
set -eu
umask 022

kind=$1 pg_config=$2
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
out=target/packages
venv=target/packaging

MAJOR=$("$pg_config" --version | sed -E 's/^PostgreSQL ([0-9]+).*/\1/')
meta() { /usr/bin/python3 -c "import json; print(json.load(open('META.json'))$1)"; }
MAINTAINER=$(meta "['maintainer']")
HOMEPAGE=$(meta "['resources']['homepage']")
VERSION=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
case $(uname -m) in x86_64) ARCH=amd64 ;; aarch64) ARCH=arm64 ;; *) ARCH=$(uname -m) ;; esac
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y Cargo.lock)
export GLIBC MAINTAINER HOMEPAGE VERSION ARCH SOURCE_DATE_EPOCH MAJOR NAME STAGE

say() { echo "outbox: $*"; }
run_make() { ${MAKE:-make} --no-print-directory PG_CONFIG="$pg_config" "$@" >/dev/null; }

# An environment for the tools of PyPI, made again when requirements.txt changes.
tools() {
  wanted=$(cksum < packaging/requirements.txt)
  [ "$(cat $venv/installed 2>/dev/null)" != "$wanted" ] || return 0
  say "installing the tools that write packages below $venv, from PyPI"
  rm -rf $venv
  /usr/bin/python3 -m venv $venv
  $venv/bin/pip install --quiet --disable-pip-version-check --requirement packaging/requirements.txt
  echo "$wanted" > $venv/installed
}

# documents DIRECTORY NAME SBOM CRATE FLAGS…: licences, changelog and SBOM of package NAME, in its directory and beside it.
documents() {
  doc=$1 name=$2 sbom=$3 crate=$4
  shift 4
  install -d "$doc"
  install -m 644 README.md SECURITY.md "$doc/"
  if [ "$kind" = deb ]; then
    printf '%s (%s-1) unstable; urgency=medium\n\n  * Release %s; changelog.gz has its changes.\n\n -- %s  %s\n' \
      "$name" "$VERSION" "$VERSION" "$MAINTAINER" "$(LC_ALL=C date -uRd "@$SOURCE_DATE_EPOCH")" | gzip -9n > "$doc/changelog.Debian.gz"
  else
    install -m 644 LICENSE-APACHE "$doc/" # each Debian has it, and lintian refuses a copy
  fi
  gzip -9n < CHANGELOG.md > "$doc/changelog.gz"
  /usr/bin/python3 packaging/third_party.py "$crate" "$out/$sbom" "$doc/third-party-licences" "$@"
  gzip -9n "$doc/third-party-licences"
  install -m 644 "$out/$sbom" "$doc/sbom.cdx.json"
  {
    echo "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/"
    echo "Comment: $crate is linked with the crates of sbom.cdx.json; third-party-licences.gz has their licences."
    echo
    echo "Files: *"
    echo "Copyright: $(sed -n 's/^Copyright (c) //p' LICENSE-MIT)"
    echo "License: Apache-2.0 or Expat"
    echo
    echo "License: Apache-2.0"
    echo " /usr/share/common-licenses/Apache-2.0 has the text on Debian, LICENSE-APACHE beside this file on others."
    echo
    echo "License: Expat"
    sed -n '/^Permission/,$p' LICENSE-MIT | sed 's/^$/./; s/^/ /'
  } > "$doc/copyright"
}

pack() { # pack CONFIG PROGRAM
  strip --strip-unneeded "$STAGE$2"
  # The oldest glibc on which the program starts: it depends on the glibc of this machine.
  GLIBC=$(readelf --version-info --wide "$STAGE$2" | sed -nE 's/.*Name: GLIBC_([0-9.]+) .*/\1/p' | sort -V | tail -n 1)
  find "$STAGE" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
  made=$($venv/bin/nfpm package --config "packaging/$1" --packager "$kind" --target $out/) || { echo "$made" >&2; exit 1; }
  say "made ${made##*created package: }"
}

case $kind in
  deb)
    NAME=postgresql-$MAJOR-outbox
    lib=/usr/lib/postgresql/$MAJOR/lib share=/usr/share/postgresql/$MAJOR/extension ;;
  rpm) # The name and the directories are those of the PostgreSQL project's own packages.
    NAME=outbox_$MAJOR
    lib=/usr/pgsql-$MAJOR/lib share=/usr/pgsql-$MAJOR/share/extension ;;
  *)
    echo "usage: build.sh deb|rpm PG_CONFIG" >&2
    exit 2 ;;
esac
mkdir -p $out
tools

STAGE=$out/stage/$kind/extension
rm -rf "$STAGE"
run_make install LIBDIR="$STAGE$lib" SHAREDIR="$STAGE$share"
doc=$STAGE/usr/share/doc/$NAME
documents "$doc" "$NAME" "outbox-$MAJOR.cdx.json" outbox --no-default-features --features "pg$MAJOR"
find docs -name '*.md' | while read -r page; do install -D -m 644 "$page" "$doc/$page"; done
pack extension.yml "$lib/outbox.so"

STAGE=$out/stage/$kind/outboxctl
rm -rf "$STAGE"
run_make install-ctl DESTDIR="$STAGE" PREFIX=/usr
find "$STAGE/usr/share/man" -name '*.1' -exec gzip -9n {} +
install -D -m 644 -t "$STAGE/usr/lib/systemd/system" packaging/outboxctl-*.service
install -D -m 644 packaging/outboxctl.sysusers "$STAGE/usr/lib/sysusers.d/outboxctl.conf"
doc=$STAGE/usr/share/doc/outboxctl
documents "$doc" outboxctl outboxctl.cdx.json outboxctl
for page in outboxctl work monitor top; do install -D -m 644 docs/$page.md "$doc/docs/$page.md"; done
install -D -m 644 -t "$doc/examples" contrib/*
pack outboxctl.yml /usr/bin/outboxctl
