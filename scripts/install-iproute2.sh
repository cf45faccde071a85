#!/bin/sh
# Install the command ip (iproute2) if it is missing, for the tests that run a cluster in network namespaces.
set -eu
what=iproute2
otherwise='or put an ip that knows network namespaces in the PATH'
. "$(dirname "$0")/packages.sh"

# Other systems have no network namespaces, and the tests report that.
[ "$(uname -s)" = Linux ] || exit 0
! command -v ip >/dev/null || exit 0

need_packages "the tests cut nodes of a cluster off with 'ip', and it is missing" iproute2mac ''
update_packages
install_packages iproute2
