"""Order of imports: trainers -> runtime -> tools -> cray_agents, and of the rooms within them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACADE = {"__init__.py", "__main__.py", "lazy_names.py", "notebook.py", "testing.py", "training.py"}
COMPOSING = ("__init__.py", "testing.py", "cli", "server")
ORDER = ["cray_agents", "tools", "runtime", "trainers"]  # each may import those before it
LINKED = {"tools", "runtime", "trainers"}


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}:{node.lineno}: write absolute imports"
            yield node.module


def folder_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "cray_agents":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LINKED else "cray_agents"


def modules() -> list[Path]:
    return [file for folder in ORDER for file in sorted((ROOT / folder).glob("**/*.py"))
            if not any(parent.is_symlink() for parent in file.parents)]  # fmt: skip


@pytest.mark.slow
def test_imports_point_down() -> None:
    wrong = []
    for file in modules():
        place = file.relative_to(ROOT)
        if place.parts[:2] in {("cray_agents", each) for each in COMPOSING}:
            continue  # the facade, the command line and the platform's process: they compose
        above = ORDER[ORDER.index(place.parts[0]) + 1 :]
        for module in imports(file):
            if module.split(".")[0] in LINKED:
                wrong.append(f"{place}: write cray_agents.{module}")
            if folder_of(module) in above:
                wrong.append(f"{place} must not import {module}")
    assert wrong == []


#: Rooms by what they may not import: modules that begin so.
FORBIDDEN = {
    "cray_agents/engines": ("cray_agents.agent", "cray_agents.loop", "cray_agents.platform"),
    "cray_agents/agent": ("cray_agents.loop",),
    "cray_agents/tasks": ("cray_agents.agent", "cray_agents.loop", "cray_agents.platform"),
    "cray_agents/rewards": ("cray_agents.loop", "cray_agents.platform"),
    "cray_agents/promotion": ("cray_agents.agent", "cray_agents.loop", "cray_agents.platform"),
    "cray_agents/platform": ("cray_agents.loop",),
    "tools": ("cray_agents.loop",),
    "runtime": ("cray_agents.loop", "cray_agents.agent", "cray_agents.tools"),
    "runtime/disk": ("cray_agents.runtime.store", "cray_agents.runtime.gateway"),
    "runtime/store": ("cray_agents.runtime.datasets", "cray_agents.runtime.gateway"),
    "runtime/pool": ("cray_agents.runtime.store", "cray_agents.runtime.gateway"),
    "runtime/registry": ("cray_agents.runtime.pool", "cray_agents.runtime.gateway"),
    "trainers": ("cray_agents.runtime.gateway", "cray_agents.runtime.pool"),
    "trainers/models": ("cray_agents.trainers.job", "cray_agents.trainers.training"),
    "trainers/methods": ("cray_agents.trainers.models", "cray_agents.trainers.job"),
    "trainers/training": ("cray_agents.trainers.job", "cray_agents.trainers.checkpointing"),
}
ROOMS = {"cray_agents": 13, "runtime": 5, "trainers": 4}  # flat modules, at most


@pytest.mark.slow
def test_rooms_keep_their_order() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in modules()
        for room, forbidden in FORBIDDEN.items()
        if file.is_relative_to(ROOT / room)
        for module in imported(file)
        if any(module == no or module.startswith(f"{no}.") for no in forbidden)
    ]
    assert wrong == []


@pytest.mark.slow
def test_nothing_but_the_entry_point_imports_the_command_line() -> None:
    outside = {Path("cray_agents/__init__.py"), Path("cray_agents/__main__.py")}
    wrong = [
        file.relative_to(ROOT)
        for file in modules()
        if not file.is_relative_to(ROOT / "cray_agents" / "cli")
        if any(module.startswith("cray_agents.cli") for module in imports(file))
    ]
    assert set(wrong) <= outside


def test_code_inside_vllm_stands_alone() -> None:
    alone = {"cray_agents.processes", "cray_agents.runtime.vllm_plugins"}
    for file in (ROOT / "runtime" / "vllm_plugins").glob("*.py"):
        ours = {module for module in imports(file) if module.startswith("cray_agents")}
        assert not [
            m for m in ours if not any(m == one or m.startswith(f"{one}.") for one in alone)
        ]


def test_code_beside_other_frameworks_stands_alone() -> None:
    """It may be imported where nothing that cray-agents depends on is installed."""
    alone = {"cray_agents.processes", "cray_agents.env_worker"}
    theirs = {
        "trl_environment.py": {"transformers"},
        "inspect_task.py": {"inspect_ai"},
        "verifiers_taskset.py": {"verifiers"},
        "openenv_environment.py": {"openenv"},
    }
    for file in [ROOT / "cray_agents" / "processes.py",
                 *(ROOT / "cray_agents" / "env_worker").glob("*.py")]:  # fmt: skip
        for module in imports(file):
            top = module.partition(".")[0]
            ours = any(module == one or module.startswith(f"{one}.") for one in alone)
            known = top in sys.stdlib_module_names or top in theirs.get(file.name, ())
            assert ours or known, f"{file.name} imports {module}"


def test_the_ground_floor_is_small() -> None:
    for folder, most in ROOMS.items():
        names = {one.name for one in (ROOT / folder).glob("*.py")}
        flat = sorted(names - FACADE)
        assert len(flat) <= most, flat


@pytest.mark.slow
def test_no_circle_of_imports() -> None:
    """Type checking and late imports count: a module is read with what it imports."""
    names = {dotted(file): file for file in modules() if file.name != "__main__.py"}
    names.pop("cray_agents")  # the facade
    left = {name: {module for module in imported(file) if module in names} - {name}
            for name, file in names.items()}  # fmt: skip
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        for name in free:
            del left[name]
    assert not left


def dotted(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    parts = parts if parts[0] == "cray_agents" else ["cray_agents", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file: Path) -> Iterator[str]:
    """The modules that a file imports; of `from package import module` the module too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "cray_agents":
            known = [f"{node.module}.{alias.name}" for alias in node.names]
            inner = [name for name in known if is_module(name)]
            yield from inner or [node.module]


def is_module(name: str) -> bool:
    first, *rest = name.split(".")
    folder = ROOT.joinpath(*rest) if rest and rest[0] in LINKED else ROOT.joinpath(first, *rest)
    return folder.with_suffix(".py").exists() or (folder / "__init__.py").exists()


def test_links_stand() -> None:
    for name in LINKED:
        link = ROOT / "cray_agents" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


def test_no_module_is_named_like_a_dependency() -> None:
    taken = {"vllm", "torch", "transformers", "megatron", "pydantic", "openai", "tenacity", "rich"}
    assert not [file for file in modules() if file.stem in taken]


@pytest.mark.slow
def test_import_is_light() -> None:
    """`import cray_agents` and its public names pull in nothing heavy."""
    script = (
        "import sys, cray_agents\n"
        "for name in cray_agents.__all__: getattr(cray_agents, name)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'megatron', 'fastapi', 'pyarrow', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_ranks_exchange_no_pickles() -> None:
    """A process of another user that reached the ranks' rendezvous would run code with one."""
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted((ROOT / "trainers").glob("**/*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr.endswith(("_object", "_object_list")))
        or (isinstance(node, ast.Import) and any(one.name == "pickle" for one in node.names))
    ]
    assert wrong == []


#: Functions that start tasks by themselves, since they await or cancel them before they return, or
#: give them to who does. All other tasks belong to runtime/background.py.
STARTS = {"create_task", "ensure_future", "TaskGroup"}
OWN_TASKS = {
    "cray_agents/agent/agent.py": {"stream"},
    "cray_agents/agent/conversation.py": {"act"},
    "cray_agents/agent/user_code.py": {"begin", "call", "shielded", "wait_for"},
    "cray_agents/server/compose.py": {"run", "wait_for_end"},  # end `up`
    "cray_agents/server/further_process.py": {"run_further"},  # end the gateway
    "cray_agents/server/platform_process.py": {"lasting_key", "newest"},
    "cray_agents/server/gateway_parts.py": {"open_store"},
    "cray_agents/loop/collector.py": {"next"},
    "cray_agents/loop/evaluator.py": {"choosing_early"},
    "cray_agents/loop/live/traffic.py": {"_adopt"},
    "cray_agents/loop/prompts.py": {"run"},
    "cray_agents/loop/rollouts.py": {"_start"},
    "cray_agents/loop/version_gate.py": {"_keep_renewing", "receive", "stage"},
    "cray_agents/platform/client.py": {"staged"},
    "cray_agents/platform/transport.py": {"_while_alive", "put"},
    "runtime/batches/worker.py": {  # end the worker, which compose.py starts again
        *("__init__", "run", "run_worker", "_run_lane", "_start_chore", "send"),
    },
    "runtime/gateway/further_gateway.py": {"_pass_on"},
    "runtime/gateway/http/client_work.py": {"await_or_disconnect", "begin"},
    "runtime/gateway/routes/files.py": {"_feed"},
    "runtime/gateway/model_calls/answer.py": {"wait_for_slot"},
    "runtime/gateway/model_calls/relay.py": {"__call__"},
    "runtime/pool/pool.py": {"start"},
    "runtime/pool/rolling_swap.py": {"rolling_swap"},
    "runtime/pool/slurm_replica.py": {"_wait_for_place"},
    "runtime/pool/upkeep.py": {"_wait_until_lost", "keep_place"},
    "runtime/pool/weight_transfer.py": {"_next_line", "during"},
    "runtime/vllm_plugins/chat_route.py": {"_unless_left"},
    "runtime/vllm_plugins/capture.py": {"_disconnect_on", "_send_later", "receive_or_disconnect"},
    "tools/mcp_client.py": {"_connect_once", "client"},
    "tools/sandbox/process.py": {"start"},
    "tools/sandbox/sandbox.py": {"run"},
}


@pytest.mark.slow
def test_no_task_is_started_whose_end_nobody_sees() -> None:
    found = {str(file.relative_to(ROOT)): starters(file) for file in modules()}
    found.pop("runtime/background.py")
    assert {name: functions for name, functions in found.items() if functions} == OWN_TASKS


def starters(file: Path) -> set[str]:
    """The functions of a module that start tasks."""
    if not any(start in (text := file.read_text()) for start in STARTS):
        return set()
    functions = [node for node in ast.walk(ast.parse(text))
                 if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]  # fmt: skip
    return {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in STARTS
    }
