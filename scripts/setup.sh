#!/bin/sh
# Create .venv with the pinned packages of requirements/lock.txt and bide, editable. If it exists already, this is fast.
#
# PYTHON names the interpreter. The default is the first one found that is Python 3.11 or newer.
set -eu
cd "$(dirname "$0")/.."

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

venv=.venv
stamp=$venv/.installed
# The inputs of the environment: a change of the lock files, the metadata or the folder creates it again.
wanted="$(pwd) $(cat requirements/*.txt | cksum) $(cksum <pyproject.toml)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c ''; then
    exit 0
fi

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
python=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if recent "$candidate"; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || die "bide needs Python 3.11 or newer, and ${PYTHON:-python3} is not: install one, or name it with PYTHON=/path/to/python3"

# Debian has venv's pip in a separate package.
if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    sudo=
    if [ "$(id -u)" -ne 0 ]; then
        sudo='sudo -n'
        { command -v sudo >/dev/null && sudo -n true 2>/dev/null; } || die "this Python cannot make environments: run 'sudo apt-get install $package'"
    fi
    command -v apt-get >/dev/null || die "this Python cannot make environments (no ensurepip): install its venv package, or name another with PYTHON=/path/to/python3"
    say "installing $package with apt-get"
    {
        $sudo apt-get -q update || true
        DEBIAN_FRONTEND=noninteractive $sudo apt-get -q -y install --no-install-recommends "$package" </dev/null
    } >/dev/null 2>&1 || die "apt-get could not install $package: install it by hand, then again"
fi

say "making $venv with $("$python" --version) and the pinned packages"
[ ! -e "$stamp" ] || rm "$stamp"
"$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip -qq --disable-pip-version-check --no-input "$@"; }
# Source distributions are built with pinned packages too, not with the newest ones.
for file in sources lock; do
    pip install --require-hashes --no-build-isolation --use-pep517 --requirement "requirements/$file.txt" ||
        die "the pinned packages could not be installed: is the package index reachable?"
done
pip install --no-deps --no-build-isolation --editable .
"$venv/bin/python" scripts/compile_pyspark.py
echo "$wanted" >"$stamp"
