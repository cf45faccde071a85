#!/bin/sh
# Install the font Inter if it is missing, for the pictures of the console. In a bare Linux, the browser has DejaVu only.
set -eu
what=Inter
otherwise='or put the font into ~/.local/share/fonts'
. "$(dirname "$0")/packages.sh"

command -v fc-list >/dev/null && fc-list : family | grep -qx 'Inter\(,.*\)\?' && exit 0

need_packages "the pictures of the console need the font Inter, which is missing" '--cask font-inter' ''
update_packages
install_packages fonts-inter fontconfig
