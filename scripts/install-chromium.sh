#!/bin/sh
# Install Chromium for the tests if it is missing, with the system's package manager if that is allowed.
set -eu
what=browser
otherwise='or put a chromium or google-chrome in the PATH'
. "$(dirname "$0")/packages.sh"

# The names that tests/browser.py looks for.
found() { command -v chromium || command -v chromium-browser || command -v google-chrome || command -v google-chrome-stable; }

! found >/dev/null || exit 0
missing='the tests look at reports with Chromium, and none is here'

need_packages "$missing" '--cask chromium' ''
update_packages
# Without a font, pages would have no text.
install_packages chromium fonts-dejavu-core
found >/dev/null || die "chromium is installed, but not in the PATH: put it there"
