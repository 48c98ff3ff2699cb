"""Adapters: environments of other frameworks, the runs that they carry out, and their outcomes.

Failures that are not the agent's are exceptions here. leased_runs.py and slot.py carry runs and
outcomes as JSON. An adapter's module is imported in the environment's Python.
"""

import importlib
import importlib.util
import json
import math
import numbers
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

#: By name: the module beside this one, and the package that it takes.
ADAPTERS = {
    "trl": ("trl_environment", "transformers"),
    "inspect": ("inspect_task", "inspect_ai"),
    "verifiers": ("verifiers_taskset", "verifiers"),
    "openenv": ("openenv_environment", "openenv"),
}
OUTPUT_CHARS = 1_000_000  # of an outcome's output; the model calls have all of it
MAX_OBSERVATION = 4_000_000  # characters of one message that the model reads
MAX_TOOLS = 1000


class EnvironmentFailed(Exception):
    """The environment did something that no model should be trained on."""


class UsageError(Exception):
    """The worker cannot begin: a wrong option, or a package that is not there."""


def check_tools(count: int) -> None:
    """Raise EnvironmentFailed for more than MAX_TOOLS tools."""
    if count > MAX_TOOLS:
        raise EnvironmentFailed(f"the environment has {count} tools: at most {MAX_TOOLS}")


def check_observation(content: Any, what: str) -> None:
    """Raise EnvironmentFailed for text, or content as JSON, beyond MAX_OBSERVATION.

    what: how the error begins, such as "reset returned".
    """
    size = len(content if isinstance(content, str) else json.dumps(content, default=str))
    if size > MAX_OBSERVATION:
        raise EnvironmentFailed(f"{what} {size} characters: at most {MAX_OBSERVATION}")


@dataclass(frozen=True)
class Rollout:
    """A run to carry out.

    base_url: of the run, so that each model call is recorded as the run's.
    model: `name@N`. sampling: fields of the requests, such as temperature, seed and max_tokens.
    seconds: the run may take.
    """

    run_id: str
    task: Mapping[str, Any]
    model: str
    sampling: Mapping[str, Any]
    seconds: float
    base_url: str
    api_key: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The task's input as messages."""
        given = self.task["input"]
        text = isinstance(given, str)
        return [{"role": "user", "content": given}] if text else [{**one} for one in given]

    @property
    def metadata(self) -> dict[str, Any]:
        """The task's metadata, which name its row, sample or index."""
        return dict(self.task.get("metadata") or {})


@dataclass(frozen=True)
class RolloutOutcome:
    """The end of a run: rewards by name, and the answer if there is one."""

    rewards: Mapping[str, float]
    output: str | None = None
    tags: tuple[str, ...] = ()
    stop_reason: str = "completed"
    facts: Mapping[str, Any] = field(default_factory=dict)

    def checked(self) -> dict[str, Any]:
        """Return the outcome as JSON. Raises EnvironmentFailed for a reward that is no number."""
        if not self.rewards:
            raise EnvironmentFailed("the environment gave no reward")
        for name, value in self.rewards.items():
            number = isinstance(value, numbers.Real) and math.isfinite(value)
            if not number:
                raise EnvironmentFailed(f"reward {name} is {value!r}: must be a finite number")
        output = self.output
        return {
            "rewards": [{"name": n, "value": float(v)} for n, v in self.rewards.items()],
            "output": output if output is None else output[:OUTPUT_CHARS],
            "tags": list(self.tags),
            "stop_reason": self.stop_reason,
        }


class Adapter(Protocol):
    """A framework's environments: their tasks, and how a run is carried out.

    `run` blocks, in a process where nothing else runs. An exception is a failure of the
    environment, and never a reward.
    """

    def tasks(self) -> Iterable[dict[str, Any]]:
        """Yield the environment's tasks as a TaskSet reads them: input, target, metadata."""

    def run(self, rollout: Rollout) -> RolloutOutcome:
        """Carry out a run."""


def make_adapter(name: str, environment: str, options: Mapping[str, str]) -> Adapter:
    """Return the adapter over an environment. Raises UsageError."""
    if name not in ADAPTERS:
        raise UsageError(f"no adapter {name!r}; there are {', '.join(ADAPTERS)}")
    module, package = ADAPTERS[name]
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"adapter {name!r} needs the package {package}, and {sys.executable} has none: "
            "name its environment with --venv"
        )
    make = importlib.import_module(f"cray_agents.env_worker.{module}").make
    try:
        made: Adapter = make(environment, options)
    except UsageError:
        raise
    except Exception as error:  # code of the user's
        library = ("<", sysconfig.get_path("stdlib"))
        frames = traceback.extract_tb(error.__traceback__)
        last = [each for each in frames if not each.filename.startswith(library)][-1]
        why = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        raise UsageError(f"{environment}: {why}") from error
    return made


def check_options(adapter: str, options: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise UsageError for an option that an adapter does not have."""
    if unknown := set(options) - set(known):
        raise UsageError(f"adapter {adapter} has no option {min(unknown)!r}: {', '.join(known)}")


def json_or_text(value: str) -> Any:
    """Return the value of an option: JSON, or the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def load_object(reference: str) -> Any:
    """Return the object that `FILE.py:NAME` or `package.module:NAME` names. Raises UsageError."""
    source, _, name = reference.rpartition(":")
    if not source:
        raise UsageError(f"{reference!r}: write FILE.py:NAME or package.module:NAME")
    if source.endswith(".py"):
        path = Path(source).resolve()
        if not path.is_file():
            raise UsageError(f"there is no file {source}")
        loaded = sys.modules.get(path.stem)
        if loaded is None or getattr(loaded, "__file__", None) != str(path):
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = loaded
            sys.path.insert(0, str(path.parent))  # as when Python runs the file
            spec.loader.exec_module(loaded)
    else:
        try:
            loaded = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise UsageError(f"{source}: {error}") from None
    if not hasattr(loaded, name):
        raise UsageError(f"{source} has no {name!r}")
    return getattr(loaded, name)
