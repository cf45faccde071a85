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
