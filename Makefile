# make demo    set up, then watch an agent train itself
# make test    set up, then run all tests, five files at a time; some, in turn: ARGS="-n 0 -k name"
# make test-fast    set up, then the quick tests that start no vLLM, Slurm or Megatron
# make lint    ruff and mypy
# make docs    set up, then build the site into site/
# make ui      set up, then build the dashboard into runtime/dashboard/static
# make bench   set up, then measure (beside rivals: ARGS=rivals)    make soak    set up, then long fault campaigns
# make gpu     measure the trainer on this machine's GPU, without set-up: CONTRIBUTING.md
PY := .venv/bin/python
# where it is set, each of the tests' thousand processes would compile the sources anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-fast lint docs ui bench soak gpu format
setup:
	@requirements/setup.sh

demo: setup
	@.venv/bin/cray-agents demo $(ARGS)

test: setup
	@$(PY) -m pytest -n 5 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: setup
	@$(PY) -m pytest -n 3 --dist loadfile -m "not vllm and not slurm and not megatron and not slow" $(ARGS)

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

bench: setup
	@$(PY) -m tests.bench $(ARGS)

soak: setup
	@CRAY_TEST_KILLS=100 CRAY_TEST_LINES=20000 CRAY_TEST_SEEDS=1,2,3 $(PY) -m pytest -s --timeout 3600 tests/test_batch_kills.py
	@CRAY_TEST_VLLM_KILLS=4 $(PY) -m pytest -s --timeout 3600 tests/test_up_batches.py
	@CRAY_TEST_REPLICAS=all $(PY) -m pytest -s --timeout 3600 tests/test_up_replicas.py tests/runtime/test_slurm_replicas.py
	@CRAY_TEST_SCALING=0,1,2,3,4,5,6,7 $(PY) -m pytest -s --timeout 3600 tests/cray_agents/test_preemption.py
	@CRAY_TEST_FAULT_MINUTES=60 CRAY_TEST_LINES=20000 $(PY) -m pytest -s --timeout 7200 tests/test_cluster_faults.py
	@CRAY_TEST_ENGINES=vllm CRAY_TEST_LINES=100 $(PY) -m pytest -s --timeout 3600 tests/test_cluster_faults.py
	@CRAY_TEST_FUZZ=20 $(PY) -m pytest -s --timeout 3600 tests/runtime/test_fuzz.py tests/runtime/test_vllm_apis.py
	@CRAY_TEST_KILLS=5 CRAY_TEST_SEEDS=1,2,3,4,5,6,7,8,9,10 $(PY) -m pytest -s tests/test_demo.py -k kills
	@CRAY_TEST_KILLS=220 $(PY) -m pytest -s --timeout 3600 tests/test_store_kills.py
	@CRAY_TEST_KILLS=60 $(PY) -m pytest -s --timeout 3600 tests/runtime/datasets/test_dataset_uses.py tests/runtime/exports/test_exporter.py tests/runtime/test_delta_kills.py
	@CRAY_TEST_KILLS=200 $(PY) -m pytest -s --timeout 3600 tests/trainers/test_job_kills.py
	@CRAY_TEST_KILLS=100 $(PY) -m pytest -s --timeout 3600 tests/test_session_kills.py
	@CRAY_TEST_KILLS=100 CRAY_TEST_RANKS=2 CRAY_TEST_SEED=2 $(PY) -m pytest -s --timeout 3600 tests/test_session_kills.py
	@CRAY_TEST_FLIPS=1000 $(PY) -m pytest -s --timeout 3600 tests/test_bit_flips.py
	@CRAY_TEST_TRIES=20 $(PY) -m pytest -s --timeout 3600 tests/test_damaged_candidates.py
	@CRAY_TEST_KILLS=100 $(PY) -m pytest -s --timeout 3600 tests/test_loop_kills.py
	@CRAY_TEST_FAMILIES=qwen3,gpt_oss,qwen3_moe,gemma3_text,lfm2 $(PY) -m pytest -s --timeout 3600 tests/trainers/universal/test_weight_shards.py
	@CRAY_TEST_ATTACKS=all $(PY) -m pytest -s tests/tools/test_verifier_attacks.py
	@CRAY_TEST_SABOTAGE=all $(PY) -m pytest -s --timeout 3600 tests/cookbook/test_13.py
	@CRAY_TEST_ENVIRONMENTS=all $(PY) -m pytest -s --timeout 3600 tests/test_environments_learn.py
	@CRAY_TEST_TINKER=1 $(PY) -m pytest tests/test_tinker_loops.py
	@CRAY_TEST_BRIDGE=1 $(PY) -m pytest -s --timeout 3600 tests/trainers/bridge/test_bridge_environment.py
	@CRAY_TEST_FAMILIES=all $(PY) -m pytest -s --timeout 3600 tests/trainers/universal/test_families.py
	@CRAY_TEST_METHODS=rft,grpo $(PY) -m pytest tests/cookbook/test_02.py
	@CRAY_TEST_SERVING=all $(PY) -m pytest -s --timeout 3600 tests/trainers/universal/test_serving.py tests/trainers/universal/test_model_code.py

# by .venv, or by the machine's own Python with what it lacks in .gpu-packages
gpu:
	@$(or $(wildcard $(PY)),PYTHONPATH="$(CURDIR)/.gpu-packages:$$PYTHONPATH" python3) -m tests.gpu $(ARGS)
