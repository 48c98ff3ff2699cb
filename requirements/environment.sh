#!/usr/bin/env bash
# Makes .venv-NAME at the root of the checkout from requirements/NAME.txt, with the Python of .venv: an environment for
# programs whose pins clash with ours.     requirements/environment.sh NAME
# chart, foreign, inspect, lm_eval, ogx, openenv, tinker, trackers and verifiers are for tests, dspy, litellm, phoenix, sglang_router, skyrl and vllm_router
# for benchmarks.
# Safe to run again at any time, also twice at once: a finished one is recognised by its stamp in no time, a half-finished
# or outdated one is made anew. Called by the tests and the benchmarks that use them; after `make setup`.
# .venv-tinker and .venv-lm_eval also see the packages of .venv below their own: torch and transformers are too large to
# have twice.
# .venv-ogx has a Python of 3.12 or newer, where the machine has one: ogx-client asks for it, and runs on 3.11 all the same.
# .venv-skyrl needs one: SkyRL's server does not run on 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?"name an environment: $(cd requirements && echo *.txt)"}
file=requirements/$name.txt
venv=.venv-$name
say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

[ -e "$file" ] || { say "There is no $file." && exit 2; }
stamp=$venv/.setup-$(cat "$file" requirements/environment.sh | sha256sum | cut -c1-16)
finished() { [ -e "$stamp" ] && "$venv/bin/python" -c '' 2>/dev/null; }
finished && exit 0

[ -x .venv/bin/python ] || { say "There is no .venv to make $venv with: first run \`make setup\`." && exit 2; }
if command -v flock >/dev/null; then # two at once: the second waits, and finds it done
  exec 9<requirements/environment.sh
  flock 9
  finished && exit 0
fi

python=.venv/bin/python more=()
if [[ $name =~ ^(ogx|skyrl)$ ]]; then
  for newer in python3.14 python3.13 python3.12 "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; do
    "$newer" -c 'import venv' 2>/dev/null && python=$newer && break
  done
fi
if [ "$name" = ogx ]; then more=(--ignore-requires-python); fi
if [ "$name" = skyrl ] && ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
  say "SkyRL needs Python 3.12 or newer, and this machine has none." && exit 2
fi
say "Setting up $venv (once): $(grep -c == "$file") packages of $file, pinned"
rm -rf "$venv"
"$python" -m venv --without-pip "$venv"
.venv/bin/python -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps \
  --require-hashes --no-compile --progress-bar off "${more[@]}" -r "$file"
if [[ $name =~ ^(tinker|lm_eval)$ ]]; then
  below=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$below')" >"$own/below.pth"
fi
touch "$stamp"
say "$venv is ready, after $SECONDS s."
