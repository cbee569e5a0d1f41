#!/bin/sh
# Prints a Python that can make the virtual environment: 3.11 or newer, with venv and ensurepip.
# An argument is the only one tried.
set -u
fits='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
if [ -n "${1:-}" ]; then
  candidates=$1
else
  candidates="python3 python3.11 python3.12 python3.13 python3.14 python"
fi
for candidate in $candidates; do
  if "$candidate" -c "$fits" >/dev/null 2>&1; then
    command -v "$candidate"
    exit 0
  fi
done
echo "setup: no Python 3.11 or newer with the venv module among: $candidates" >&2
echo "setup: install one (Debian, Ubuntu: apt install python3 python3-venv) or name it: make setup PYTHON=/path/to/python3" >&2
exit 1
