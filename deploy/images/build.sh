#!/usr/bin/env bash
# Builds the image with buildah: `make image`, or deploy/images/build.sh [OPTIONS OF BUILDAH], such as
#   --build-arg BASE=IMAGE --build-arg DEVICE=gpu
# Without a BASE it is a Debian or Ubuntu like this machine's, by debootstrap as root, and pip fetches the packages as it is
# configured here. With a BASE the build fetches them.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python context=build/image
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
rm -rf $context
version=$($python deploy/release.py --context $context)

make_base() {
  local base root suite torch
  suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
  base=$(buildah from scratch)
  root=$(buildah mount "$base")
  debootstrap --variant=minbase --include=ca-certificates,python3-venv "$suite" "$root"
  rm -f "$root/etc/apt/sources.list"
  for sources in sources.list sources.list.d/debian.sources sources.list.d/ubuntu.sources; do
    if [ -e "/etc/apt/$sources" ]; then cp "/etc/apt/$sources" "$root/etc/apt/$sources"; fi
  done
  rm -rf "$root"/etc/{hostname,resolv.conf,machine-id} "$root"/var/cache/apt/archives/*.deb "$root"/var/log/*
  minor=$(readlink "$root/usr/bin/python3")
  buildah umount "$base"
  buildah commit --quiet --timestamp "$SOURCE_DATE_EPOCH" --rm "$base" cray-agents-base
  eval "$(grep '^torch=' requirements/setup.sh)"
  fetch() {
    $python -m pip --quiet download --no-deps --dest build/wheels --only-binary :all: --python-version "${minor#python}" "$@"
  }
  fetch "torch==$torch" || fetch "torch==$torch" --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
  fetch --require-hashes -r requirements/cpu.txt
}

if [[ $* != *BASE=* ]]; then
  make_base
  set -- --build-arg BASE=localhost/cray-agents-base --build-arg PIP_NO_INDEX=1 --volume "$PWD/build/wheels:/wheels:ro" "$@"
fi
buildah build --timestamp "$SOURCE_DATE_EPOCH" --build-arg SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" \
  --build-arg VERSION="$version" --build-arg REVISION="$(git rev-parse HEAD)" --tag "cray-agents:$version" \
  "$@" --file $context/Containerfile $context
