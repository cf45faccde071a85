#!/bin/sh
# Make sure that there is a Chromium for the tests, with the system's package manager where that is allowed.
set -eu
LC_ALL=C
export LC_ALL

say() { echo "browser: $*" >&2; }
die() { say "$*"; exit 1; }
otherwise='or put a chromium or google-chrome in the PATH'

# The names that tests/browser.py looks for.
found() { command -v chromium || command -v chromium-browser || command -v google-chrome || command -v google-chrome-stable; }

! found >/dev/null || exit 0
missing='the tests look at reports with Chromium, and none is here'

if ! command -v apt-get >/dev/null; then
    case $(uname -s) in
    Darwin) die "$missing: run 'brew install --cask chromium', $otherwise" ;;
    *) die "$missing: install it, $otherwise" ;;
    esac
fi
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null && exec sudo -n sh "$0"
    die "$missing: run 'sudo sh $0' once, $otherwise"
fi

log=$(mktemp "${TMPDIR:-/tmp}/bide-apt.XXXXXX")
apt() { DEBIAN_FRONTEND=noninteractive apt-get -q -y "$@" </dev/null >>"$log" 2>&1; }
apt update || true # an unreachable third-party source does not matter; a missing package shows below
say "installing chromium with apt-get"
# Without a font there would be no letters to look at.
apt install --no-install-recommends chromium fonts-dejavu-core ||
    die "apt-get could not install chromium, see $log ('$(tail -n 1 "$log")'): mend that, $otherwise"
rm -f "$log"
found >/dev/null || die "chromium is installed, but not in the PATH: put it there"
