#!/bin/sh
# Install MariaDB for the tests if it is missing, with the system's package manager if that is allowed.
#
# These packages have the programs alone, without a service.
set -eu
what=mariadb
otherwise='or put mariadbd and mariadb-install-db in the PATH'
. "$(dirname "$0")/packages.sh"

PATH=$PATH:/usr/sbin:/usr/local/sbin # as in tests/databases.py
found() { command -v mariadbd >/dev/null && command -v mariadb-install-db >/dev/null && command -v my_print_defaults >/dev/null; }

! found || exit 0
need_packages 'the tests of bide timeouts run MariaDB, and it is missing' mariadb ''
update_packages
install_packages mariadb-server-core mariadb-client-core
