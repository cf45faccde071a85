#!/bin/sh
# Write requirements/lock.txt: every package that bide, its extras and its development need, with versions and hashes.
#
# The lock file names no package index: it installs from whichever the machine uses.
set -eu
cd "$(dirname "$0")/.."
uv_release=0.13.8 # pinned, so that the same inputs give the same file on every machine

if [ "$(.lock-venv/bin/uv --version 2>/dev/null | cut -d ' ' -f 2)" != "$uv_release" ]; then
    "${PYTHON:-python3}" -m venv --clear .lock-venv
    .lock-venv/bin/python -m pip -qq --disable-pip-version-check install "uv==$uv_release"
fi
.lock-venv/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
    --all-extras --group dev --generate-hashes --no-annotate --no-header --no-emit-index-url \
    --output-file requirements/lock.txt pyproject.toml
echo "lock: $(grep -c == requirements/lock.txt) packages in requirements/lock.txt"
