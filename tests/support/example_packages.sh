#!/bin/sh
# Installs the packages that examples/, docs/tutorial.md, docs/publishing.md, docs/migrations.md and docs/consumers.md import, from PyPI and
# npm. They go below target/examples: a venv for Python, and node_modules for the examples (node) and the consumers
# (consumers). Announces that first. Does nothing if all packages are installed, and leaves node_modules out where there
# is no npm: some tests need Python alone. Called by tests/support/program.rs.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
dir=$root/target/examples
say() { echo "outbox: installing the packages of the examples below $1, from $2" >&2; }

python="$root/examples/python/requirements.txt $root/tests/publishing/requirements.txt $root/tests/consumers/requirements.txt"
# shellcheck disable=SC2086
wanted=$(cat $python | cksum)
if [ "$(cat "$dir/python/installed" 2>/dev/null)" != "$wanted" ]; then
  say target/examples/python PyPI
  rm -rf "$dir/python"
  mkdir -p "$dir"
  python3 -m venv "$dir/python"
  for file in $python; do
    "$dir/python/bin/pip" install --quiet --disable-pip-version-check --requirement "$file"
  done
  echo "$wanted" > "$dir/python/installed"
fi

command -v npm >/dev/null 2>&1 || exit 0
for modules in node:examples/node consumers:tests/consumers; do
  from=$root/${modules#*:} to=$dir/${modules%%:*}
  wanted=$(cksum < "$from/package-lock.json")
  [ "$(cat "$to/installed" 2>/dev/null)" != "$wanted" ] || continue
  say "target/examples/${modules%%:*}" npm
  rm -rf "$to"
  mkdir -p "$to"
  cp "$from/package.json" "$from/package-lock.json" "$to/"
  (cd "$to" && npm ci --silent --no-audit --no-fund)
  echo "$wanted" > "$to/installed"
done
