#!/bin/sh
# Make sure that a RabbitMQ is installed, with the system's package manager where that is allowed.
#
# bide runs a private broker of its own from the installed files. The package would also enable and start
# a system-wide one that listens on every interface: this script sees to it that an installation made here starts none.
set -eu
what=rabbitmq
otherwise='or set BIDE_RABBITMQ_HOME to the folder of an unpacked one, or, for the demo, BIDE_URL to a broker elsewhere'
. "$(dirname "$0")/packages.sh"

# The same places as bide.local_broker.installation looks at.
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

# Packages that carry a service, and whether they were here before: only what this script brings is switched off.
epmd_was_here=no
[ -e /usr/bin/epmd ] && epmd_was_here=yes

# invoke-rc.d and deb-systemd-invoke ask policy-rc.d before they start anything. A policy that the machine has
# already (containers deny everything) is its owner's: leave it. Else deny everything until the end of the installation:
# no service starts that comes along (cron, for one), and none that runs is touched.
policy=/usr/sbin/policy-rc.d
mark='# made by bide for the time of an installation'
drop_policy() {
    if grep -qsF "$mark" "$policy"; then rm -f "$policy"; fi
}
drop_policy # of a run that was killed
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
# What 'systemctl disable' does; the packages enable their services on machines without systemd too.
for service in $services; do
    rm -f /etc/systemd/system/*.wants/"$service"
done
if [ -d /run/systemd/system ]; then
    # They run by now where the machine's own policy-rc.d allows starting.
    # shellcheck disable=SC2086
    { systemctl daemon-reload && systemctl stop $services; } >/dev/null 2>&1 || true
fi
if [ -e /etc/init.d/rabbitmq-server ]; then
    update-rc.d rabbitmq-server disable >/dev/null 2>&1 || true
fi
say "installed; its system-wide service is off ('systemctl enable --now rabbitmq-server' turns it on)"
