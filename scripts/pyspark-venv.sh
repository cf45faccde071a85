#!/bin/sh
# Create .venv-pyspark-RELEASE beside .venv: the same packages with that release of PySpark, which is installed without a
# hash. If the environment exists already, this is fast.
set -eu
cd "$(dirname "$0")/.."

say() { echo "pyspark-venv: $*" >&2; }
die() { say "$*"; exit 1; }

[ $# -eq 1 ] || die "name the release of PySpark: $0 4.2.1"
venv=.venv-pyspark-$1
stamp=$venv/.installed
wanted=$(cat .venv/.installed)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c ''; then
    exit 0
fi

say "making $venv"
[ ! -e "$stamp" ] || rm "$stamp"
.venv/bin/python -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip -qq --disable-pip-version-check --no-input "$@"; }
without=$venv/lock.txt
awk '/^[^ ]/ { theirs = /^(pyspark|py4j)==/ } !theirs' requirements/lock.txt >"$without"
for file in requirements/sources.txt "$without"; do
    pip install --require-hashes --no-build-isolation --use-pep517 --requirement "$file" ||
        die "the pinned packages could not be installed: is the package index reachable?"
done
pip install --no-build-isolation --use-pep517 "pyspark==$1" || die "PySpark $1 could not be installed: is there such a release?"
pip install --no-deps --no-build-isolation --editable .
"$venv/bin/python" scripts/compile_pyspark.py
echo "$wanted" >"$stamp"
