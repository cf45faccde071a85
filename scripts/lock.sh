#!/bin/sh
# Write requirements/lock.txt: the packages that bide, its extras and its development need, with versions and hashes.
# Write requirements/sources.txt: the packages that build source distributions among them.
#
# The lock files name no package index: they install from the index that the machine uses.
set -eu
cd "$(dirname "$0")/.."
uv_release=0.13.8 # pinned, so that the same inputs give the same file on every machine

if [ "$(.lock-venv/bin/uv --version 2>/dev/null | cut -d ' ' -f 2)" != "$uv_release" ]; then
    "${PYTHON:-python3}" -m venv --clear .lock-venv
    .lock-venv/bin/python -m pip -qq --disable-pip-version-check install "uv==$uv_release"
fi
pin() {
    .lock-venv/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
        --generate-hashes --no-annotate --no-header --no-emit-index-url --output-file "$@"
}
pin requirements/lock.txt --all-extras --group dev pyproject.toml
pin requirements/sources.txt --group sources
echo "lock: $(grep -c == requirements/lock.txt) packages in requirements/lock.txt"
