#!/bin/sh
# Installs everything into an image: run by the Containerfile, as root. Nothing is left that depends on day or machine.
set -eu
context=$(dirname "$0") venv=/opt/cray-agents policy=/usr/sbin/policy-rc.d
export DEBIAN_FRONTEND=noninteractive SOURCE_DATE_EPOCH PYTHONHASHSEED=0

packages="bubblewrap ca-certificates g++ libnuma1 python3-dev python3-venv" # g++ and python3-dev: for Triton
command -v slurmd >/dev/null || packages="$packages munge slurmctld slurmd slurm-client"
printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy # starts no services
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -qq -y --no-install-recommends $packages >/dev/null
rm -f /etc/munge/munge.key # one that all would know
getent passwd 1000 >/dev/null || {
  echo 'cray:x:1000:1000::/tmp:/bin/bash' >>/etc/passwd
  echo 'cray:x:1000:' >>/etc/group
}

python3 -m venv $venv
pip() {
  $venv/bin/python -m pip --disable-pip-version-check --no-cache-dir install -q --no-deps --no-compile --find-links /wheels "$@"
}
if [ "$DEVICE" = cpu ]; then # torch as requirements/setup.sh has it
  eval "$(grep '^torch=' "$context/requirements/setup.sh")"
  pip "torch==$torch" 2>/dev/null ||
    pip "torch==$torch" --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
  pip --require-hashes -r "$context/requirements/cpu.txt"
else # Transformer Engine is compiled against the torch that is there
  grep -v '^#' "$context/requirements/gpu.txt" | sed -z 's/\\\n/ /g' | grep -v '^transformer-engine-torch' >/tmp/most.txt
  pip --require-hashes -r /tmp/most.txt
  pip --no-build-isolation --require-hashes -r "$context/requirements/gpu.txt"
fi
pip "$context"/cray_agents-*.whl
PYTHONPATH=$context/requirements $venv/bin/python "$context/sbom.py" >$venv/sbom.json
# by hash, as files get another time with the image; some packages hold files that no Python 3 reads
for folder in "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" $venv/lib; do
  python3 -m compileall -q -f --invalidation-mode unchecked-hash "$folder" >/dev/null || true
done

rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/cache/ldconfig/* /var/lib/dpkg/*-old
rm -rf /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /root/.cache /tmp/* $policy
find /var/log -type f -delete
