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

# invoke-rc.d and deb-systemd-invoke ask policy-rc.d before they start a service. An existing policy-rc.d is not changed
# (that of containers denies everything). Otherwise deny everything during the installation: no service of a dependency
# (such as cron) starts, and running services are not affected.
policy=/usr/sbin/policy-rc.d
mark='# made by bide for the time of an installation'
drop_policy() {
    if grep -qsF "$mark" "$policy"; then rm -f "$policy"; fi
}
drop_policy # left by a run that was killed
if [ ! -e "$policy" ]; then
    trap drop_policy EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    {
        echo '#!/bin/sh'
        echo "$mark"
        echo 'exit 101'
    } >"$policy"
    chmod 755 "$policy"
fi

update_packages
install_packages rabbitmq-server

services=rabbitmq-server.service
[ "$epmd_was_here" = yes ] || services="$services epmd.service epmd.socket"
# The same as 'systemctl disable'; packages also enable their services on machines without systemd.
for service in $services; do
    rm -f /etc/systemd/system/*.wants/"$service"
done
if [ -d /run/systemd/system ]; then
    # The services may be running by now, if the machine's own policy-rc.d allows that.
    # shellcheck disable=SC2086
    { systemctl daemon-reload && systemctl stop $services; } >/dev/null 2>&1 || true
fi
if [ -e /etc/init.d/rabbitmq-server ]; then
    update-rc.d rabbitmq-server disable >/dev/null 2>&1 || true
fi
say "installed; its system-wide service is off ('systemctl enable --now rabbitmq-server' turns it on)"
