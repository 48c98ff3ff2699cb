"""The light core, as `pip install cray-agents` gives it: what it can do, and what it says it lacks.

The packages of the extras are hidden from a child process; nothing is downloaded.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from cray_agents import Agent
from cray_agents.engines.openai_engine import run_event
from cray_agents.paths import Home
from cray_agents.records import Event
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine

pytestmark = pytest.mark.slow

HIDE = """
import importlib.machinery, importlib.metadata, re, sys
def modules(lines):
    return {re.match(r"[\\w.-]+", line)[0].replace("-", "_") for line in lines}
named = importlib.metadata.requires("cray-agents")
core = modules(line for line in named if "extra ==" not in line)
extras = modules(named) - core - {"cray_agents"}
extras |= {"vllm", "megatron", "fastapi", "tokenizers", "multipart"}
class Light(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in extras
        return None if hidden else importlib.machinery.PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Light
"""
RUN = """
from cray_agents import Agent
from cray_agents.testing import ScriptedEngine
print(Agent(name="a", engine=ScriptedEngine(["hi"])).run_sync("x").output)
"""


def light(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDE + code], cwd=cwd, capture_output=True,
                          text=True)  # fmt: skip


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


LOOKS = [
    "--help",
    "runs list",
    "runs stats",
    "maintain fsck",
    "maintain prune runs --where until=9d",
    "jobs list",
    "dataset list",
    "batch status",
    "keys list",
    "models list",
    "maintain prune models",
    "down",
]


def test_what_is_there_can_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / ".cray-agents").mkdir(mode=0o700)
    (tmp_path / ".cray-agents" / "segments").mkdir()
    done = light(commands(*LOOKS), tmp_path)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended:")]
    told = dict(zip(LOOKS, ended, strict=True))
    elsewhere = {"batch status"}  # it asks a platform, and none runs here
    assert {look for look, end in told.items() if end != "ended: 0"} == elsewhere, done.stderr


async def store_a_run(home: Path) -> None:
    agent = Agent("a", engine=ScriptedEngine(["hi"]))
    run = (await agent.run("x")).model_copy(update={"id": "run_1"})
    store = Store(Home(home))
    await store.append([Event(run_id=run.id, **run_event(run))])
    await store.close()


LACKING = {
    "runs list": "zstandard",  # sealed segments are zstd
    "runs show run_1": "zstandard",
    "dataset build": "numpy",
    "import chats.jsonl --format openai": "zstandard",
    "jobs submit --parent . --dataset nothing": "",
    "demo": "tokenizers",
    "run agent.py hi": "vLLM is not installed",
    "up --model smollm2 --detach": "vLLM is not installed",
    "doctor": "",
    "doctor --node": "",
}


def test_what_cannot_be_done_is_said_with_what_to_install(tmp_path: Path) -> None:
    asyncio.run(store_a_run(tmp_path / ".cray-agents"))
    (tmp_path / "chats.jsonl").write_text("{}\n")
    (tmp_path / "agent.py").write_text("from cray_agents import Agent\nagent = Agent('a')\n")
    done = light(commands(*LACKING), tmp_path)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended:")]
    assert ended == ["ended: 2"] * len(LACKING), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for lack in filter(None, LACKING.values()):
        assert lack in done.stderr
    assert "'cray-agents[export]'" in done.stderr and "--url" in done.stderr


def test_all_that_is_public_can_be_imported_and_a_tiny_model_says_what_it_lacks(
    tmp_path: Path,
) -> None:
    code = """
from cray_agents import *
from cray_agents.testing import make_tiny_model
try:
    make_tiny_model("m", [([{"role": "user", "content": "hi"}], {})])
except Exception as error:
    print(type(error).__name__, error)
print("torch" in sys.modules)
"""
    done = light("import sys\n" + code, tmp_path)
    assert done.stdout.startswith("SetupError to make a model takes "), done.stderr
    assert "pip install 'cray-agents[cpu]'" in done.stdout
    assert done.stdout.endswith("False\n")


def test_commands_that_only_look_import_no_client(tmp_path: Path) -> None:
    (tmp_path / ".cray-agents").mkdir(mode=0o700)
    (tmp_path / ".cray-agents" / "segments").mkdir()
    code = commands("--help", "models list", "runs list", "jobs list", "status")
    done = light(code + "\nprint('openai' in sys.modules)", tmp_path)
    assert done.stdout.splitlines()[-1] == "False"
    assert {*done.stderr.splitlines()} == {"there are none"}


def test_a_platform_says_what_it_lacks(tmp_path: Path) -> None:
    done = light(commands("up --model ."), tmp_path)
    assert "ended: 2" in done.stdout
    assert "'cray-agents[cpu]'" in done.stderr
