#!/bin/sh
# Install RabbitMQ if it is missing, with the system's package manager if that is allowed.
#
# bide runs a private broker from the installed files. The package would also enable and start a system-wide broker that
# listens on every interface. This script prevents that for a package that it installs.
set -eu
what=rabbitmq
otherwise='or set BIDE_RABBITMQ_HOME to the folder of an unpacked one, or, for the demo, BIDE_URL to a broker elsewhere'
. "$(dirname "$0")/packages.sh"

# The same locations as in bide.local_broker.installation.
found() {
    for home in "${BIDE_RABBITMQ_HOME:-/nonexistent}" /usr/lib/rabbitmq/lib/rabbitmq_server-* \
        /opt/homebrew/opt/rabbitmq /usr/local/opt/rabbitmq; do
        [ -x "$home/sbin/rabbitmq-server" ] && return 0
    done
    command -v rabbitmq-server >/dev/null
}

if [ -n "${BIDE_URL:-}" ] || found; then
    exit 0
fi

need_packages 'RabbitMQ 3.10 or newer is missing' rabbitmq ''

# Packages with a service, and whether they were installed before: only services that this script installs are disabled.
epmd_was_here=no
[ -e /usr/bin/epmd ] && epmd_was_here=yes

deny_services
update_packages
install_packages rabbitmq-server

services=rabbitmq-server.service
[ "$epmd_was_here" = yes ] || services="$services epmd.service epmd.socket"
# shellcheck disable=SC2086
disable_services $services
if [ -e /etc/init.d/rabbitmq-server ]; then
    update-rc.d rabbitmq-server disable >/dev/null 2>&1 || true
fi
say "installed; its system-wide service is off ('systemctl enable --now rabbitmq-server' turns it on)"
