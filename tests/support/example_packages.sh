#!/bin/sh
# Installs the packages that examples/, docs/tutorial.md, docs/publishing.md and docs/consumers.md import, from PyPI and
# npm. They go below target/examples: a venv for Python, and node_modules for the examples (node) and the consumers
# (consumers). Announces that first. Does nothing if all packages are installed. Called by tests/support/program.rs.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
dir=$root/target/examples
python="$root/examples/python/requirements.txt $root/tests/publishing/requirements.txt $root/tests/consumers/requirements.txt"
# shellcheck disable=SC2086
wanted=$(cat $python "$root/examples/node/package-lock.json" "$root/tests/consumers/package-lock.json" | cksum)
[ "$(cat "$dir/installed" 2>/dev/null)" != "$wanted" ] || exit 0

echo "outbox: installing the packages of the examples below target/examples, from PyPI and npm" >&2
rm -rf "$dir"
mkdir -p "$dir/node" "$dir/consumers"
python3 -m venv "$dir/python"
for file in $python; do
  "$dir/python/bin/pip" install --quiet --disable-pip-version-check --requirement "$file"
done
cp "$root/examples/node/package.json" "$root/examples/node/package-lock.json" "$dir/node/"
cp "$root/tests/consumers/package.json" "$root/tests/consumers/package-lock.json" "$dir/consumers/"
for modules in node consumers; do
  (cd "$dir/$modules" && npm ci --silent --no-audit --no-fund)
done
echo "$wanted" > "$dir/installed"
