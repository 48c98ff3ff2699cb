# make demo    set up, then watch an agent train itself
# make test    set up, then run all tests, five files at a time; some, in turn: ARGS="-n 0 -k name"
# make test-fast    set up, then the quick tests that start no vLLM, Slurm or Megatron
# make lint    ruff and mypy
# make docs    set up, then build the site into site/
# make ui      set up, then build the dashboard into runtime/dashboard/static
# make image   set up, then build the container image (deploy/images/build.sh)
# make release set up, then make and try all artefacts of a release, in dist/
# make bench   set up, then measure (beside rivals: ARGS=rivals)    make soak    set up, then long fault campaigns: tests/soak.py
# make gpu     measure the trainer on this machine's GPU, without set-up: CONTRIBUTING.md
PY := .venv/bin/python
# where it is set, each of the tests' thousand processes would compile the sources anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-fast lint docs ui image release bench soak gpu format
setup:
	@requirements/setup.sh

demo: setup
	@.venv/bin/cray-agents demo $(ARGS)

test: setup
	@$(PY) -m pytest -n 5 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: setup
	@$(PY) -m pytest -n 3 --dist loadfile -m "not vllm and not slurm and not megatron and not slow" --durations 20 --durations-min 1 $(ARGS)

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: setup
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

ui: setup
	@$(PY) ui/build.py

image: ui
	@deploy/images/build.sh $(ARGS)

release: ui
	@$(PY) deploy/release.py $(ARGS)

bench: setup
	@$(PY) -m bench $(ARGS)

soak: setup
	@$(PY) -m tests.soak $(ARGS); ended=$$?; $(PY) -m tests.status; exit $$ended

# by .venv, or by the machine's own Python with what it lacks in .gpu-packages
gpu:
	@$(or $(wildcard $(PY)),PYTHONPATH="$(CURDIR)/.gpu-packages:$$PYTHONPATH" python3) -m tests.gpu $(ARGS)
