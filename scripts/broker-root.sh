#!/bin/sh
# Create a Debian root file system with a newer RabbitMQ for the tests: broker-root.sh SUITE
#
#   trixie   RabbitMQ 4.0.x          forky   RabbitMQ 4.3.x
#
# The root is $BIDE_BROKER_ROOTS/SUITE (default: ~/.cache/bide/brokers/SUITE); its path is the only line on standard
# output. An existing root is not changed. The mirror is that of the system's apt sources; BIDE_DEBIAN_MIRROR overrides
# it, and is required on Ubuntu.
set -eu
LC_ALL=C
export LC_ALL

say() { echo "broker-root: $*" >&2; }
die() { say "$*"; exit 1; }

[ $# -eq 1 ] || die "usage: broker-root.sh trixie|forky"
suite=$1
case $suite in
trixie | forky) ;;
*) die "no suite '$suite' here: choose trixie (RabbitMQ 4.0) or forky (4.3)" ;;
esac

roots=${BIDE_BROKER_ROOTS:-${XDG_CACHE_HOME:-$HOME/.cache}/bide/brokers}
root=$roots/$suite
installed() { [ -x "$1/usr/lib/rabbitmq/bin/rabbitmq-server" ]; }

if installed "$root"; then
    echo "$root"
    exit 0
fi

[ "$(uname -s)" = Linux ] || die "a Debian root needs Linux; test against another broker with BIDE_TEST_BROKER_HOME=DIR instead"
[ "$(id -u)" -eq 0 ] || die "making a root needs root: run 'sudo -E $0 $suite' once, or point BIDE_TEST_BROKER_HOME at an unpacked RabbitMQ"
for command in apt-get unshare chroot; do
    command -v "$command" >/dev/null || die "'$command' is missing: a Debian or Ubuntu system has it"
done
if ! command -v debootstrap >/dev/null || [ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then
    say "installing debootstrap"
    apt-get update -qq >&2
    apt-get install -qq -y --no-install-recommends debootstrap debian-archive-keyring >&2 ||
        die "debootstrap could not be installed: 'apt-get install debootstrap debian-archive-keyring', then again"
fi

mirror_of_the_system() {
    apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' 'Component: main' | head -n 1
}
mirror=${BIDE_DEBIAN_MIRROR:-$(mirror_of_the_system)}
if [ -z "$mirror" ]; then # the package lists of a fresh machine or container are empty
    apt-get update -qq >&2
    mirror=$(mirror_of_the_system)
fi
[ -n "$mirror" ] || die "the apt sources name no Debian mirror: set BIDE_DEBIAN_MIRROR=URL"

# debootstrap and the apt inside the root do not read a proxy from the system's apt configuration.
proxy=$(apt-config dump --format '%v%n' Acquire::http::Proxy)
if [ -n "$proxy" ] && [ -z "${http_proxy:-}" ]; then
    http_proxy=$proxy
    export http_proxy
fi

# One process at a time. The root is built under another name and renamed, so that it is complete when it appears.
mkdir -p "$roots"
exec 9>"$roots/.$suite.lock"
flock 9
if installed "$root"; then
    echo "$root"
    exit 0
fi
building=$roots/.$suite.partial
rm -rf --one-file-system "$building" "$root"

# A suite that this debootstrap does not know is built with the script of the unstable suite.
script=/usr/share/debootstrap/scripts/$suite
[ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
include=
case $mirror in https:*) include=--include=ca-certificates ;; esac

say "making $root (about a minute, 520 MB)"
log=$roots/$suite.log
# A separate mount namespace: mounts in the root disappear when this process ends.
# shellcheck disable=SC2016
unshare --mount --propagation private sh -eu -c '
    suite=$1 building=$2 mirror=$3 script=$4 include=$5
    debootstrap --variant=minbase $include "$suite" "$building" "$mirror" "$script"
    # Do not start any service, epmd or broker in the root.
    printf "#!/bin/sh\nexit 101\n" >"$building/usr/sbin/policy-rc.d"
    chmod 755 "$building/usr/sbin/policy-rc.d"
    mountpoint -q "$building/proc" || mount -t proc proc "$building/proc"
    mount --rbind /dev "$building/dev"
    apt() {
        DEBIAN_FRONTEND=noninteractive chroot "$building" apt-get -q -y -o Acquire::Check-Valid-Until=false "$@"
    }
    apt update
    apt install --no-install-recommends rabbitmq-server
    apt clean
    rm -rf "$building/var/lib/apt/lists"
' sh "$suite" "$building" "$mirror" "$script" "$include" >"$log" 2>&1 9>&- </dev/null ||
    die "making the root failed: the last lines of $log are
$(tail -n 5 "$log")"

installed "$building" || die "no rabbitmq-server in the new root: see $log"
mv "$building" "$root"
say "made $root"
echo "$root"
