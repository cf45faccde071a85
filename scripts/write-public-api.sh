#!/bin/sh
# Write tests/unit/public_api.txt, docs/wire-vectors.json and the layers of CONTRIBUTING.md again, after an intended change.
set -eu
cd "$(dirname "$0")/.."
BIDE_WRITE_SNAPSHOT=1 .venv/bin/python -m pytest -q tests/unit/test_public_api.py tests/unit/test_layers.py tests/unit/test_wire_contract.py -k "snapshot or contributing"
