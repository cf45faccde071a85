# shellcheck shell=sh
# Functions of the install scripts, which source this file and set $what (for messages) and $otherwise (an alternative to
# name in errors).
LC_ALL=C
export LC_ALL

say() { echo "$what: $*" >&2; }
die() { say "$*"; exit 1; }

# Exit unless this user may install packages: need_packages MISSING BREW ELSE
need_packages() {
    if ! command -v apt-get >/dev/null; then
        case $(uname -s) in
        Darwin) die "$1: run 'brew install $2'$3, $otherwise" ;;
        *) die "$1: install it, $otherwise" ;;
        esac
    fi
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null && sudo -n true 2>/dev/null && exec sudo -n sh "$0"
        die "$1: run 'sudo sh $0' once, $otherwise"
    fi
}

apt() { DEBIAN_FRONTEND=noninteractive apt-get -q -y "$@" </dev/null >>"$log" 2>&1; }

# Update the package lists of apt-get. Its output is in $log.
update_packages() {
    log=$(mktemp "${TMPDIR:-/tmp}/bide-apt.XXXXXX")
    apt update || true # an unreachable third-party source does not matter; a missing package shows below
}

# install_packages PACKAGE...: the first package is the wanted one.
install_packages() {
    say "installing $1 with apt-get"
    apt install --no-install-recommends "$@" ||
        die "apt-get could not install $1, see $log ('$(tail -n 1 "$log")'): mend that, $otherwise"
    rm -f "$log"
}

# Keep packages from starting services while they are installed, until the script ends.
#
# invoke-rc.d and deb-systemd-invoke ask policy-rc.d before they start a service. An existing policy-rc.d is not changed
# (that of containers denies everything). Otherwise deny everything during the installation: no service of a dependency
# (such as cron) starts, and running services are not affected.
policy=/usr/sbin/policy-rc.d
mark='# made by bide for the time of an installation'
drop_policy() {
    if grep -qsF "$mark" "$policy"; then rm -f "$policy"; fi
}
deny_services() {
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
}

# disable_services SERVICE...: the same as 'systemctl disable --now'; packages also enable their services on machines
# without systemd, where they may start later.
disable_services() {
    for service in "$@"; do
        rm -f /etc/systemd/system/*.wants/"$service"
    done
    if [ -d /run/systemd/system ]; then
        # The services may be running by now, if the machine's own policy-rc.d allows that.
        { systemctl daemon-reload && systemctl stop "$@"; } >/dev/null 2>&1 || true
    fi
}
