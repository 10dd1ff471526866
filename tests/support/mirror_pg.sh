#!/bin/sh
# usage: mirror_pg.sh PG_CONFIG ROOT
# Makes ROOT a private copy of a Postgres installation, into which `make install DESTDIR=ROOT` may put the extension.
# Called by the Makefile before the tests. The last line of its output is the ROOT it used.
#
# Postgres computes its share and lib directories from the path of its executable, after it has resolved symbolic
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

# Started by root, the servers run as user postgres, and root's clone may be in a home directory of mode 0700.
if [ "$(id -u)" = 0 ] && ! id postgres >/dev/null 2>&1; then
    echo "as root, the servers run as user postgres, which does not exist here: add it, or run this as another user" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ] && ! setpriv --reuid=postgres --regid=postgres --init-groups test -x "$root"; then
    private=${TMPDIR:-/tmp}/outbox-mirror-root
    echo "user postgres cannot enter $root: the mirror is in $private" >&2
    mkdir -p "$private"
    chmod 755 "$private"
    # Any user may create that name in /tmp. Run no program from a directory that another user owns.
    [ ! -L "$private" ] && [ -O "$private" ] || { echo "$private belongs to another user: remove it" >&2; exit 1; }
    root=$private/$(printf %s "$root" | cksum | cut -d' ' -f1)
    mkdir -p "$root"
fi

# A mirror is reused while its stamp matches the installation: its version, and the time the server was installed.
stamp=$root/mirror.stamp
wanted="$bindir $("$pg_config" --version) $(stat -L -c %Y "$bindir/postgres")"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "$root"
    exit 0
fi

# Never empty a directory that this script did not make.
if [ ! -f "$stamp" ] && [ -n "$(ls -A "$root")" ]; then
    echo "$root is neither empty nor a mirror" >&2
    exit 1
fi
: > "$stamp"
find "$root" -mindepth 1 -maxdepth 1 ! -name mirror.stamp -exec rm -rf {} +

# Makes links to all files of a directory, in real directories, so that `make install` can add files beside them. Leaves
# out an outbox extension that is installed system-wide: an installer that writes through a link would change it.
link_tree() {
    mkdir -p "$root$1"
    cp -as "$1/." "$root$1/"
    find "$root$1" -name 'outbox*' -exec rm -rf {} +
}

mkdir -p "$root$bindir"
cp -a "$bindir/." "$root$bindir/"
link_tree "$sharedir"
link_tree "$pkglibdir"

# Links the libraries that the programs find relative to themselves (a run path with $ORIGIN). System libraries need no
# link.
ldd "$bindir/postgres" "$bindir/initdb" "$bindir/psql" | sed -n 's/.* => \(\/[^ ]*\) (.*/\1/p' | sort -u |
    while read -r library; do
        library=$(realpath -s "$library")
        case $library in
        /lib/* | /lib64/* | /usr/lib/* | /usr/lib64/*) continue ;;
        esac
        mkdir -p "$root$(dirname "$library")"
        ln -sf "$library" "$root$library"
    done

# Verify the mirror before the stamp declares it complete.
found=$("$root$bindir/pg_config" --sharedir)
[ "$found" = "$root$sharedir" ] || { echo "the mirror looks for its files in $found" >&2; exit 1; }

echo "$wanted" > "$stamp"
echo "$root"
