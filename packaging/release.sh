#!/bin/sh
# usage: release.sh [--dry-run] PG_CONFIG…
#
# Builds all files of a release in target/packages: the packages of apt and rpm for the major of each PG_CONFIG, the
# archive for PGXN, the SBOMs, and SHA256SUMS. Then it tags the commit. Called by `make release`.
#
# With --dry-run it tags nothing, and what would refuse the release is only printed.
set -eu

dry_run=""
if [ "${1:-}" = --dry-run ]; then dry_run=yes; shift; fi
cd "$(dirname "$0")/.."
out=target/packages
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)

refuse() {
  echo "outbox: not ready to release $version: $*" >&2
  [ -n "$dry_run" ] || exit 1
}
[ -z "$(git status --porcelain)" ] || refuse "there are changes that are not committed"
grep -q "^## \[$version\]" CHANGELOG.md || refuse "CHANGELOG.md has no section [$version]"
! grep -q "^## \[$version\] - unreleased" CHANGELOG.md || refuse "CHANGELOG.md has no date for $version"
! grep -q '\.invalid' META.json || refuse "META.json has no address yet: replace those that end in .invalid"
! git rev-parse -q --verify "refs/tags/v$version" >/dev/null || refuse "the tag v$version exists"

rm -rf $out # no file of another version gets into the release
for pg_config in "$@"; do
  for kind in deb rpm; do packaging/build.sh $kind "$pg_config"; done
done
git archive --format=zip --prefix="outbox-$version/" --output="$out/outbox-$version.zip" HEAD
echo "outbox: made $out/outbox-$version.zip"
(
  cd $out
  rm -f SHA256SUMS
  find . -maxdepth 1 -type f -name '*outbox*' -printf '%P\n' | LC_ALL=C sort | xargs sha256sum > SHA256SUMS
)
echo "outbox: made $out/SHA256SUMS"

if [ -n "$dry_run" ]; then
  echo "outbox: dry run: v$version is not tagged"
else
  git tag -a "v$version" -m "outbox $version"
  echo "outbox: tagged v$version; push the tag, and upload the files of SHA256SUMS and the zip to PGXN"
fi
