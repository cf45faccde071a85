#!/bin/sh
# Install the command ip (iproute2) and libfaketime if they are missing, for the tests that run a cluster in network
# namespaces, and set the clocks of its nodes.
set -eu
what=iproute2
otherwise='or put an ip that knows network namespaces in the PATH, and libfaketimeMT.so.1 in /usr/lib/faketime'
. "$(dirname "$0")/packages.sh"

# Other systems have no network namespaces, and the tests report that.
[ "$(uname -s)" = Linux ] || exit 0
packages=
command -v ip >/dev/null || packages=iproute2
[ -n "$(find /usr/lib* -path '*/faketime/libfaketimeMT.so.1' 2>/dev/null)" ] || packages="$packages libfaketime"
[ -n "$packages" ] || exit 0

need_packages "the tests cut nodes of a cluster off with 'ip' and set their clocks with libfaketime, and one is missing" "iproute2mac libfaketime" ''
update_packages
# shellcheck disable=SC2086 # a list of names
install_packages $packages
