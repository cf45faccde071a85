#!/bin/sh
# Install Node 18 or newer and npm for the tests of examples/wire/node if they are missing, with the system's package manager
# if that is allowed.
set -eu
what=node
otherwise='or put a node of release 18 or newer and an npm in the PATH'
. "$(dirname "$0")/packages.sh"

release() { node --version 2>/dev/null | sed -n 's/^v\([0-9]*\)\..*/\1/p'; }
found() { [ "$(release)" -ge 18 ] 2>/dev/null && command -v npm >/dev/null; }

! found || exit 0
need_packages 'the tests run a program with Node 18, and it or npm is missing' node ''
update_packages
# The packages of other distributors contain npm.
if command -v node >/dev/null; then install_packages npm; else install_packages nodejs npm; fi
found || die "nodejs and npm are installed, but node is still $(node --version): put a newer one first in the PATH"
