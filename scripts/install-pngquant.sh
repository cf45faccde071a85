#!/bin/sh
# Install the command pngquant if it is missing, which gives the pictures of the console a palette.
set -eu
what=pngquant
otherwise='or put pngquant in the PATH'
. "$(dirname "$0")/packages.sh"

command -v pngquant >/dev/null && exit 0

need_packages "the pictures of the console need the command pngquant, which is missing" pngquant ''
update_packages
install_packages pngquant
