#!/bin/sh
# Install Firefox for the long tests if it is missing, with the system's package manager if that is allowed.
set -eu
what=firefox
otherwise='or put a firefox-esr or firefox in the PATH'
. "$(dirname "$0")/packages.sh"

# The names that tests/firefox.py looks for.
found() { command -v firefox-esr || command -v firefox; }

! found >/dev/null || exit 0
missing='a test looks at the console with Firefox, and none is here'

need_packages "$missing" '--cask firefox' ''
update_packages
install_packages firefox-esr
found >/dev/null || die "firefox-esr is installed, but not in the PATH: put it there"
