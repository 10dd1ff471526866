#!/bin/sh
# usage: mirror_pg.sh PG_CONFIG ROOT
# Makes ROOT a private copy of a Postgres installation, into which `make install DESTDIR=ROOT` may put the extension.
# Called by the Makefile before the tests; the last line of its output is the ROOT it used.
#
# Postgres computes its share and lib directories from the place of its own executable, after it has resolved symbolic
# links. So the programs are real copies, at the same paths below ROOT, and everything else is a tree of links.
set -eu
umask 022 # the servers may run as another user

pg_config=$1
root=$2

bindir=$("$pg_config" --bindir)
sharedir=$("$pg_config" --sharedir)
pkglibdir=$("$pg_config" --pkglibdir)

mkdir -p "$root"
root=$(cd "$root" && pwd -P)

# As root, the servers run as user postgres, and root's clone may lie under a home of mode 0700.
if [ "$(id -u)" = 0 ] && ! setpriv --reuid=postgres --regid=postgres --init-groups test -x "$root"; then
    private=${TMPDIR:-/tmp}/outbox-mirror-root
    echo "user postgres cannot enter $root: the mirror is in $private" >&2
    mkdir -p "$private"
    chmod 755 "$private"
    # Anyone may create that name in /tmp; run nothing out of a directory that is not ours.
    [ ! -L "$private" ] && [ -O "$private" ] || { echo "$private is not ours: remove it" >&2; exit 1; }
    root=$private/$(printf %s "$root" | cksum | cut -d' ' -f1)
    mkdir -p "$root"
fi

# A mirror is as good as the installation it was made from: the version, and the time the server was installed.
stamp=$root/mirror.stamp
wanted="$bindir $("$pg_config" --version) $(stat -L -c %Y "$bindir/postgres")"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "$root"
    exit 0
fi

# Never empty a directory that this script has not made.
if [ ! -f "$stamp" ] && [ -n "$(ls -A "$root")" ]; then
    echo "$root is neither empty nor a mirror" >&2
    exit 1
fi
: > "$stamp"
find "$root" -mindepth 1 -maxdepth 1 ! -name mirror.stamp -exec rm -rf {} +

# Links to each file of a directory, under real directories: `make install` adds files beside them. An extension that is
# installed system-wide is left out, or an installer that writes through a link would change the real one.
link_tree() {
    mkdir -p "$root$1"
    cp -as "$1/." "$root$1/"
    find "$root$1" -name 'outbox*' -exec rm -rf {} +
}

mkdir -p "$root$bindir"
cp -a "$bindir/." "$root$bindir/"
link_tree "$sharedir"
link_tree "$pkglibdir"

# Libraries that the programs find relative to themselves (a run path with $ORIGIN). Those of the system are found as
# they are, and a link to one of them would only be unused.
ldd "$bindir/postgres" "$bindir/initdb" "$bindir/psql" | sed -n 's/.* => \(\/[^ ]*\) (.*/\1/p' | sort -u |
    while read -r library; do
        library=$(realpath -s "$library")
        case $library in
        /lib/* | /lib64/* | /usr/lib/* | /usr/lib64/*) continue ;;
        esac
        mkdir -p "$root$(dirname "$library")"
        ln -sf "$library" "$root$library"
    done

# The proof that it is a mirror, before the stamp says so.
found=$("$root$bindir/pg_config" --sharedir)
[ "$found" = "$root$sharedir" ] || { echo "the mirror looks for its files in $found" >&2; exit 1; }

echo "$wanted" > "$stamp"
echo "$root"
