#!/usr/bin/env bash
# Writes the hashes of all pins anew, of every file that the package index has of a version; pins and comments stay.
# To be run after a pin was changed or added:     requirements/hashes.sh [chart cpu dev dspy foreign gpu inspect litellm lm_eval ogx openenv phoenix scanners sglang_router skyrl tinker trackers verifiers vllm_router]
# Asks the index by uv, from a throw-away environment where it is not installed. A pin that is not there is an error.
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv=$(command -v uv) || {
  python3 -m venv "$work/venv"
  "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
  uv=$work/venv/bin/uv
}
for file in ${*:-chart cpu dev dspy foreign gpu inspect litellm lm_eval ogx openenv phoenix scanners sglang_router skyrl tinker trackers verifiers vllm_router}; do
  grep '^#' "$file.txt" >"$work/$file.txt"
  grep -o '^[A-Za-z0-9][^\\]*' "$file.txt" >"$work/pins.in"
  "$uv" pip compile --quiet --no-config --system-certs --no-deps --universal --generate-hashes \
    --no-annotate --no-header --python-version "$([[ $file =~ ^(ogx|skyrl)$ ]] && echo 3.12 || echo 3.11)" "$work/pins.in" >>"$work/$file.txt"
  mv "$work/$file.txt" "$file.txt"
  echo "$file.txt: $(grep -c '==' "$file.txt") pins, $(grep -c -- --hash "$file.txt") hashes" >&2
done
