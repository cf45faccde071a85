#!/bin/sh
# Install PostgreSQL for the tests if it is missing, with the system's package manager if that is allowed.
#
# The tests run a private server from the installed files. The package would also enable and start a system-wide one.
set -eu
what=postgresql
otherwise='or put a postgres and its initdb in the PATH'
. "$(dirname "$0")/packages.sh"

# The same locations as in tests/databases.py.
found() {
    for home in /usr/lib/postgresql/*/bin; do
        [ -x "$home/initdb" ] && return 0
    done
    command -v postgres >/dev/null
}

! found || exit 0
need_packages 'the tests of bide timeouts run PostgreSQL, and it is missing' postgresql ''
deny_services
update_packages
install_packages postgresql
disable_services postgresql.service
say "installed; its system-wide service is off ('systemctl enable --now postgresql' turns it on)"
