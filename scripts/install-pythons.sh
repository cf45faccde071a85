#!/bin/sh
# Install newer Pythons for the test of the wheel: those of the Debian roots that broker-root.sh makes.
#
#   trixie   Python 3.13          forky   the newest release
#
# They run by chroot, as root. The test finds them beside the Pythons of PATH.
set -eu
cd "$(dirname "$0")/.."
LC_ALL=C
export LC_ALL

say() { echo "pythons: $*" >&2; }
die() { say "$*"; exit 1; }

for suite in trixie forky; do
    root=$(scripts/broker-root.sh "$suite")
    # One process at a time, as in broker-root.sh.
    exec 9>"$root/../.$suite.lock"
    flock 9
    if ! chroot "$root" /usr/bin/python3 -c 'import ensurepip' 2>/dev/null; then
        say "installing Python in $root"
        log=$root.pythons.log
        # shellcheck disable=SC2016
        unshare --mount --propagation private sh -eu -c '
            apt() {
                DEBIAN_FRONTEND=noninteractive chroot "$1" apt-get -q -y -o Acquire::Check-Valid-Until=false "$2" $3
            }
            mountpoint -q "$1/proc" || mount -t proc proc "$1/proc"
            mount --rbind /dev "$1/dev"
            apt "$1" update ""
            apt "$1" install "--no-install-recommends python3-venv"
            apt "$1" clean ""
            rm -rf "$1/var/lib/apt/lists"
        ' sh "$root" >"$log" 2>&1 9>&- </dev/null || die "installing Python failed: the last lines of $log are
$(tail -n 5 "$log")"
    fi
    chroot "$root" /usr/bin/python3 --version | sed "s|^|$suite: |"
done
