#!/usr/bin/env bash
# Makes the virtual environment venv/ and installs everything into it.
set -euo pipefail
cd "$(dirname "$0")"
make --no-print-directory setup
venv/bin/rlcb doctor
echo
echo "Now run: source venv/bin/activate"
