# shellcheck shell=sh
# What the scripts share that install something: sourced by them, with $what (for messages) and $otherwise (the other way
# out) set.
LC_ALL=C
export LC_ALL

say() { echo "$what: $*" >&2; }
die() { say "$*"; exit 1; }

# Go on only as somebody who may install packages: need_packages MISSING BREW ELSE
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

# Have apt-get look for what is to be had. What it says is in $log until something is installed.
update_packages() {
    log=$(mktemp "${TMPDIR:-/tmp}/bide-apt.XXXXXX")
    apt update || true # an unreachable third-party source does not matter; a missing package shows below
}

# install_packages PACKAGE...: the first one is what is wanted.
install_packages() {
    say "installing $1 with apt-get"
    apt install --no-install-recommends "$@" ||
        die "apt-get could not install $1, see $log ('$(tail -n 1 "$log")'): mend that, $otherwise"
    rm -f "$log"
}
