#!/bin/sh
# Installs what examples/ import, from PyPI and npm, below target/examples: a venv for Python, node_modules for Node. Says
# so first. Does nothing where both are there as the examples ask for. Called by tests/examples.rs.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
dir=$root/target/examples
wanted=$(cat "$root/examples/python/requirements.txt" "$root/examples/node/package-lock.json" | cksum)
[ "$(cat "$dir/installed" 2>/dev/null)" != "$wanted" ] || exit 0

echo "outbox: installing the packages of the examples below target/examples, from PyPI and npm" >&2
rm -rf "$dir"
mkdir -p "$dir/node"
python3 -m venv "$dir/python"
"$dir/python/bin/pip" install --quiet --disable-pip-version-check --requirement "$root/examples/python/requirements.txt"
cp "$root/examples/node/package.json" "$root/examples/node/package-lock.json" "$dir/node/"
(cd "$dir/node" && npm ci --silent --no-audit --no-fund)
echo "$wanted" > "$dir/installed"
