"""Processes: a program of ours ends at once, after its exit handlers, and its imports are safe."""

import subprocess
import sys
from pathlib import Path

import pytest

from cray_agents.processes import python

ROOT = Path(__file__).parents[2]

ENDING = """
import atexit
from cray_agents.processes import exit_at_once

class Imported:
    def __del__(self):
        print("torn down")

kept = Imported()
atexit.register(print, "handled", end=" ")
print("said", end=" ")
exit_at_once(7)
"""


def test_a_program_ends_after_its_exit_handlers_and_tears_nothing_down() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "said handled "), done.stderr


#: Where Python's path is named and no program of ours is started with the current folder in reach.
OTHER_USES = {
    "cray_agents/processes.py": "the helper",
    "cray_agents/cli/environments.py": "a script of ours, by any venv's Python",
    "cray_agents/env_worker/slot.py": "a script of ours, by any venv's Python",
    "cray_agents/cli/demo.py": "shown",
    "cray_agents/env_worker/adapters.py": "shown",
    "cray_agents/env_worker/verifiers_taskset.py": "its folder, for PATH",
    "cray_agents/server/trackers.py": "SAFE_IMPORTS does it, also for an older Python",
    "runtime/scheduler/site_environment.py": "compared",
    "trainers/job/launch.py": "the file of a command line that the helper makes",
    "tools/python.py": "the sandboxed program",
    "tools/verifier/__init__.py": "the sandboxed program",
    "cookbook/05_database.py": "the sandboxed program",
}


def test_no_python_is_started_but_by_the_helper() -> None:
    files = subprocess.run(
        ["git", "ls-files", "*.py", ":!tests", ":!bench", ":!docs"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for file in files:
        for line in (ROOT / file).read_text().splitlines():
            if "sys.executable" in line and file not in OTHER_USES:
                assert '"-I"' in line or '"-P"' in line, f"{file}: {line.strip()}"


@pytest.mark.slow
@pytest.mark.parametrize("words", [("-m", "cray_agents", "--help"), ("-c", "import timeit")])
def test_no_file_of_the_current_folder_is_run(tmp_path: Path, words: tuple[str, ...]) -> None:
    for name in ("timeit", "typer", "asyncio", "cray_agents"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run')")
    done = subprocess.run(python(*words), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
