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


def command(*words: str) -> str:
    argv = ["cray-agents", *words]
    return f"import sys; sys.argv = {argv}\nfrom cray_agents.cli import main; main()"


def test_agents_run(tmp_path: Path) -> None:
    assert light(RUN, tmp_path).stdout == "hi\n"


def test_what_is_there_can_be_looked_at(tmp_path: Path) -> None:
    for words in (["models", "list"], ["runs", "list"], ["jobs", "list"], ["status"], ["--help"]):
        assert "Traceback" not in light(command(*words), tmp_path).stderr


def test_a_platform_says_what_it_lacks(tmp_path: Path) -> None:
    done = light(command("up", "--model", "."), tmp_path)
    assert done.returncode == 2
    assert "'cray-agents[cpu]'" in done.stderr
