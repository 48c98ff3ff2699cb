"""The light core, as `pip install cray-agents` gives it: what it can do, and what it says it lacks.

The packages of the extras are hidden from a child process; nothing is downloaded.
"""

import subprocess
import sys
from pathlib import Path

HEAVY = ["torch", "vllm", "transformers", "megatron", "fastapi", "uvicorn", "aiohttp", "pyarrow"]
HIDE = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.split(".")[0])
sys.meta_path.insert(0, Hidden())
"""
RUN = """
from cray_agents import Agent, ScriptedEngine
print(Agent(name="a", engine=ScriptedEngine(["hi"])).run_sync("x").output)
"""


def light(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDE + code], cwd=cwd, capture_output=True,
                          text=True, timeout=60)  # fmt: skip


def commands(*words: str) -> str:
    """Code for these commands, one after another: to start a process for each takes long."""
    return f"""
import sys
from cray_agents.cli import main
for words in {words}:
    sys.argv = ["cray-agents", *words.split()]
    try:
        main()
    except SystemExit as ended:
        print("ended:", ended.code)
"""


def test_agents_run(tmp_path: Path) -> None:
    assert light(RUN, tmp_path).stdout == "hi\n"


def test_what_is_there_can_be_looked_at(tmp_path: Path) -> None:
    code = commands("models list", "runs list", "jobs list", "--help", "status")
    done = light(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended:")]
    assert ended == ["ended: 0"] * 4 + ["ended: 1"]  # nothing runs here


def test_commands_that_only_look_import_no_client(tmp_path: Path) -> None:
    code = commands("--help", "models list", "runs list", "jobs list", "status")
    done = light(code + "\nprint('openai' in sys.modules)", tmp_path)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("False", "")


def test_a_platform_says_what_it_lacks(tmp_path: Path) -> None:
    done = light(commands("up --model ."), tmp_path)
    assert "ended: 2" in done.stdout
    assert "'cray-agents[cpu]'" in done.stderr
