#!/bin/sh
# Installs what examples/, docs/tutorial.md and docs/publishing.md import, from PyPI and npm, below target/examples: a venv for Python,
# node_modules for Node. Says so first. Does nothing where all is there. Called by tests/support/program.rs.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
dir=$root/target/examples
python="$root/examples/python/requirements.txt $root/tests/publishing/requirements.txt"
# shellcheck disable=SC2086
wanted=$(cat $python "$root/examples/node/package-lock.json" | cksum)
[ "$(cat "$dir/installed" 2>/dev/null)" != "$wanted" ] || exit 0

echo "outbox: installing the packages of the examples below target/examples, from PyPI and npm" >&2
rm -rf "$dir"
mkdir -p "$dir/node"
python3 -m venv "$dir/python"
for file in $python; do
  "$dir/python/bin/pip" install --quiet --disable-pip-version-check --requirement "$file"
done
cp "$root/examples/node/package.json" "$root/examples/node/package-lock.json" "$dir/node/"
(cd "$dir/node" && npm ci --silent --no-audit --no-fund)
echo "$wanted" > "$dir/installed"
