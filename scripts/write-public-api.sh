#!/bin/sh
# Write tests/unit/public_api.txt anew, after a change of the public API that is meant.
set -eu
cd "$(dirname "$0")/.."
BIDE_WRITE_SNAPSHOT=1 .venv/bin/python -m pytest -q tests/unit/test_public_api.py -k agreed
