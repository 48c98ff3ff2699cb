"""Long fault campaigns, for many hours: `make soak`, or `make soak ARGS="store jobs"` for some.

Prints a row for each: name, date, commit, seconds, result; docs/results.json keeps the last result
(`make soak` then writes docs/status.md anew). The first that fails ends none of the
others. What each prints is in build/soak/NAME.log.
"""

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "soak"
RESULTS = ROOT / "docs" / "results.json"


@dataclass(frozen=True)
class Soak:
    """A campaign. `settings`: variables of its tests, without CRAY_TEST_."""

    name: str
    tests: str
    settings: dict[str, object] = field(default_factory=dict)
    timeout: int = 3600  # seconds of a test
    follows: str = ""  # patterns of files: a result is of these, as they were then

    def code(self) -> str:
        """A hash of what it follows, of a page its commands and code, and of its tests."""
        named = [*self.follows.split(), *(word for word in self.tests.split() if ".py" in word)]
        text = ""
        for file in (file for name in named for file in sorted(ROOT.glob(name)) if file.is_file()):
            content = file.read_text()
            fences = re.findall(r"```.*?```", content, re.DOTALL) if file.suffix == ".md" else ()
            text += "".join(fences) or content
        return hashlib.sha256(text.encode()).hexdigest()[:12]


SOAKS = [
    Soak("batches", "tests/test_batch_kills.py", {"KILLS": 100, "LINES": 20_000, "SEEDS": "1,2,3"}),
    Soak("replicas", "tests/test_up_replicas.py tests/runtime/test_slurm_replicas.py",
         {"REPLICAS": "all"}),
    Soak("preemption", "tests/cray_agents/test_preemption.py", {"SCALING": "0,1,2,3,4,5,6,7"}),
    Soak("cluster", "tests/test_cluster_faults.py", {"FAULT_MINUTES": 60, "LINES": 20_000}, 7200),
    Soak("cluster-vllm", "tests/test_cluster_faults.py", {"ENGINES": "vllm", "LINES": 100}),
    Soak("templates", "tests/runtime/datasets/test_chat_templates.py", {"TEMPLATES": "all"}),
    Soak("fuzz", "tests/runtime/test_fuzz.py tests/runtime/test_vllm_apis.py", {"FUZZ": 90}),
    Soak("demo", "tests/test_demo.py -k kills", {"KILLS": 5, "SEEDS": "1,2,3,4,5,6,7,8,9,10"}),
    Soak("tutorial", "tests/test_tutorial.py", {"TUTORIAL": "whole"}, 2400, "docs/tutorial.md"),
    Soak("store", "tests/test_store_kills.py", {"KILLS": 220}),
    Soak("backup", "tests/test_backup.py", {"KILLS": 200}),
    Soak("events", "tests/test_event_kills.py", {"KILLS": 60}),
    Soak("datasets", "tests/runtime/datasets/test_dataset_uses.py", {"KILLS": 60}),
    Soak("documents", "tests/trainers/test_documents_training.py -k memory",
         {"DOCUMENT_MB": 20_000}, 7200),
    Soak("exports", "tests/runtime/exports/test_exporter.py", {"KILLS": 60}),
    Soak("deltas", "tests/runtime/test_delta_kills.py", {"KILLS": 60}),
    Soak("jobs", "tests/trainers/test_job_kills.py", {"KILLS": 200}),
    Soak("nodes", "tests/trainers/test_spare_nodes.py -k again", {"KILLS": 50}, 14_400),
    Soak("sessions", "tests/test_session_kills.py", {"KILLS": 100}),
    Soak("ranks", "tests/test_session_kills.py", {"KILLS": 100, "RANKS": 2, "SEEDS": 2}),
    Soak("flips", "tests/test_bit_flips.py", {"FLIPS": 1000}),
    Soak("damage", "tests/test_damaged_candidates.py", {"TRIES": 20}),
    Soak("loops", "tests/test_loop_kills.py", {"KILLS": 100}),
    Soak("shards", "tests/trainers/transformers_backend/test_weight_shards.py",
         {"FAMILIES": "qwen3,gpt_oss,qwen3_moe,gemma3_text,lfm2"}),
    Soak("attacks", "tests/tools/test_verifier_attacks.py", {"ATTACKS": "all"}),
    Soak("environments", "tests/test_environments_learn.py", {"ENVIRONMENTS": "all"}),
    Soak("tinker", "tests/test_tinker_loops.py", {"TINKER": 1}),
    Soak("bridge", "tests/trainers/megatron_bridge/test_bridge_environment.py", {"BRIDGE": 1}),
    Soak("install", "tests/test_packages.py -k install", {"INSTALL": 1},
         follows="docs/operations.md pyproject.toml"),
    Soak("slurm", "tests/test_cluster_page.py", {"PAGE": 1},
         follows="docs/cluster.md docs/operations.md tests/test_packages.py pyproject.toml"),
    Soak("next-vllm", "tests/runtime/test_next_vllm.py", {"VLLM": "0.31.0,0.33.0"}, 7200,
         follows="tests/runtime/test_vllm_contract.py"),
    Soak("benchmarks", "tests/runtime/test_outside_benchmarks.py", {"BENCHMARKS": 1},
         follows="docs/environments.md"),
    Soak("image", "tests/test_release.py -k demo", {"IMAGE": 1}, 14_400,
         follows="deploy/images/* deploy/release.py requirements/cpu.txt requirements/setup.sh"
         " requirements/licences.py"),
    Soak("release", "tests/test_release.py -k tried", {"RELEASE": 1}, follows="deploy/release.py"),
    Soak("kubernetes", "tests/test_chart.py -k cluster_takes", {"KUBERNETES": 1}),
    Soak("families", "tests/trainers/transformers_backend/test_families.py", {"FAMILIES": "all"}),
    Soak("serving", "tests/trainers/transformers_backend/test_serving.py"
         " tests/trainers/transformers_backend/test_model_code.py", {"SERVING": "all"}),
]  # fmt: skip


def run(soak: Soak, results: Path = RESULTS) -> bool:
    """Run a campaign, print its row and record its result; return whether it passed."""
    argv = [sys.executable, "-m", "pytest", "-s", "--timeout", str(soak.timeout)]
    settings = {f"CRAY_TEST_{name}": str(value) for name, value in soak.settings.items()}
    LOGS.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with (LOGS / f"{soak.name}.log").open("wb") as log:
        done = subprocess.run(
            [*argv, *soak.tests.split()],
            cwd=ROOT, env=os.environ | settings, stdout=log, stderr=log, check=False,
        )  # fmt: skip
    date, seconds = time.strftime("%Y-%m-%d"), f"{time.monotonic() - begun:,.0f} s"
    end = Path(log.name).read_text(errors="replace")[-200:]
    counts = re.findall(r"\d+ (?:passed|skipped)", end)
    result = ", ".join(["failed", *counts] if done.returncode else counts)
    found = {"date": date, "commit": commit(), "result": f"{result}, {seconds}"}
    record("soak", soak.name, results, **found, **({"code": soak.code()} if soak.follows else {}))
    print(f"| {soak.name} | {date} | {commit()} | {seconds} | {result}: {log.name} |", flush=True)
    return done.returncode == 0


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """The last results: of the campaigns, and of the GPU stages."""
    found: dict[str, dict[str, Any]] = json.loads(file.read_bytes())
    return found


def record(kind: str, name: str, file: Path, **result: str) -> None:
    """Keep a result in the place of the last one."""
    found = read_results(file)
    found[kind][name] = result
    file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


@functools.cache
def commit() -> str:
    """The commit that the process began with: results that are recorded do not make it dirty."""
    argv = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main(names: list[str]) -> None:
    """Run those of these names, or all; exit with 1 if one failed."""
    if unknown := set(names) - {soak.name for soak in SOAKS}:
        sys.exit(f"no campaign {', '.join(sorted(unknown))}")
    passed = [run(soak) for soak in SOAKS if not names or soak.name in names]
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
