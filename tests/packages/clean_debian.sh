#!/bin/sh
# usage: clean_debian.sh ROOT SUITE MIRROR PACKAGES MAJOR PORT
#
# Follows the steps of packaging/Dockerfile and packaging/compose.yml in a new Debian at ROOT:
# - apt installs the packages of the directory PACKAGES;
# - a server starts with the command of the image, and compose-init.sh makes its database ready;
# - it delivers an event to the broker of RABBITMQ_URL, RABBITMQ_PASSWORD and EXCHANGE;
# - apt removes the packages.
#
# tests/packages.rs calls it as root, with `unshare`: mounts and processes end with this script.
set -eu
umask 022

root=$1 suite=$2 mirror=$3 packages=$4 major=$5
export PGPORT="$6" MAJOR="$5" POSTGRES_USER=postgres POSTGRES_DB=shop MONITOR_PASSWORD=monitor
export HOOK_URL=http://127.0.0.1:8081/ HOOK_HOST=127.0.0.1
export PGDATA="/var/lib/postgresql/$major/main" LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
project=$(cd "$(dirname "$0")/../.." && pwd)

step() { echo "--- $*"; }
in_root() { PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" "$@"; }
quiet() { "$@" >"$root.log" 2>&1 || { tail -n 20 "$root.log"; exit 1; }; }
as() { user=$1; shift; in_root setpriv --reuid="$user" --regid="$user" --init-groups "$@"; }
sql() { as postgres psql -X -d "$POSTGRES_DB" -v ON_ERROR_STOP=1 -Atqc "$1"; }
server() { as postgres pg_ctlcluster --skip-systemctl-redirect "$major" main "$@"; }

step a new Debian
mount --make-rprivate /
# The scripts of the suites are one and the same, and this debootstrap may be older than the suite.
quiet debootstrap --variant=minbase "$suite" "$root" "$mirror" /usr/share/debootstrap/scripts/sid
cp /etc/resolv.conf "$root/etc/resolv.conf"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mkdir "$root/packages"
mount --bind "$packages" "$root/packages"
# No package starts its server: this script does.
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
# The lists of Debian testing are valid for a week, and a mirror may be older.
echo 'Acquire::Check-Valid-Until "false";' > "$root/etc/apt/apt.conf.d/90mirror"
echo force-unsafe-io > "$root/etc/dpkg/dpkg.cfg.d/unsafe-io" # this Debian survives no crash, and need not
quiet in_root apt-get update
quiet in_root apt-get -y --no-install-recommends install "postgresql-$major" systemd man-db

step the step of the Dockerfile
install=$(sed -n '/^RUN /,/[^\\]$/p' "$project/packaging/Dockerfile" | sed -E 's/^RUN --mount=[^ ]*//')
quiet in_root sh -euc "$install"
in_root dpkg -s "postgresql-$major-outbox" outboxctl | grep ^Status

step the units and their user
in_root systemd-analyze verify outboxctl-serve@shop.service outboxctl-work@shop.service
in_root id -un outboxctl

step the server of the compose file delivers an event
printf '%s\n' "port = $PGPORT" "listen_addresses = ''" >> "$root/etc/postgresql/$major/main/postgresql.conf"
start="-c $(sed -n 's/^CMD \["postgres", "-c", "\(.*\)"\]$/\1/p' "$project/packaging/Dockerfile")"
server start -o "$start"
as postgres createdb "$POSTGRES_DB"
cp "$project/packaging/compose-init.sh" "$root/init.sh"
as postgres sh /init.sh
server restart -o "$start"
seq=$(sql "select outbox_publish('Installed', '{\"by\": \"apt\"}', 'package', '$major', 'x')")
sql "select outbox_wait($seq, '60 s')"
sql "create role outboxctl login; grant outbox_monitor to outboxctl"
as outboxctl outboxctl show "$seq" -d "$POSTGRES_DB"

# What the image for CloudNativePG has.
mkdir -p "$root/volume/lib" "$root/volume/share/extension" "$root/volume/licenses"
sed -n "s/\${MAJOR}/$major/g; s/^COPY --from=server //p" "$project/packaging/Dockerfile" | while read -r from to; do
  in_root sh -euc "cp $from /volume$to"
done

step apt removes the packages
sql "drop extension outbox cascade" # and the destination hook
server stop
quiet in_root apt-get -y remove "postgresql-$major-outbox" outboxctl
find "$root/usr" "$root/etc" -name '*outbox*'
server start
sql "select 'the server works without them'"
server stop

[ "$major" -ge 18 ] || exit 0 # older servers find an extension in their own directories alone
step the server delivers with the image volume of CloudNativePG
server start -o "$start -c extension_control_path='\$system:/volume/share' -c dynamic_library_path='\$libdir:/volume/lib'"
sql "create extension outbox schema outbox"
seq=$(sql "select outbox_publish('Mounted', '{}', 'package', '$major', 'x')")
sql "select outbox_wait($seq, '60 s')"
server stop
