#!/bin/sh
# Install the npm packages that examples/wire/node/package-lock.json pins by their hashes, unless they are installed.
set -eu
cd "$(dirname "$0")/../examples/wire/node"
# npm writes this file when it has installed everything.
stamp=node_modules/.package-lock.json
if [ -e "$stamp" ] && [ ! package-lock.json -nt "$stamp" ]; then exit 0; fi
npm ci --silent --ignore-scripts --no-audit --no-fund ||
    { echo "npm: the pinned packages could not be installed: is the package registry reachable?" >&2; exit 1; }
touch "$stamp"
