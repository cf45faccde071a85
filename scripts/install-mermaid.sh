#!/bin/sh
# Install the script that draws the diagrams of the documentation site, pinned by its hash, unless it is installed.
set -eu
cd "$(dirname "$0")/.."
release=12.3.0
hash=336df803d87a38b70a01e736e666c8f7601d2ce42f5e47c8fafe5d721074b9a3
file=.mermaid/mermaid.min.js
die() { echo "mermaid: $*" >&2; exit 1; }

check() { echo "$hash  $file" | sha256sum --check --status; }
if [ -e "$file" ] && check; then exit 0; fi
scripts/install-node.sh
rm -rf .mermaid
mkdir .mermaid
(cd .mermaid && npm pack --silent "mermaid@$release" >/dev/null) ||
    die "the pinned package could not be downloaded: is the package registry reachable?"
tar -xzf ".mermaid/mermaid-$release.tgz" -C .mermaid --strip-components=2 package/dist/mermaid.min.js
rm ".mermaid/mermaid-$release.tgz"
check || die "$file has another hash than the pinned one"
