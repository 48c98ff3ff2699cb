"""Verifiers adapter: tasksets of verifiers v1, with their harness, runtime, tools and rewards.

`--env` is a taskset's id, of an installed package, or FILE.py with a taskset in `__all__`. Options
are fields of the environment's config by their path, as `taskset.difficulty=3`,
`agent.harness.id=null`, `agent.max_turns=4`, and `limit=N` for the tasks of an infinite taskset.
Unless `agent.runtime.type` is given, programs of the harness run as local processes. A run is an
episode. The values of its trace's rewards, each times its weight, are the rewards.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.errors import TaskError
from verifiers.v1.interception import server
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from cray_agents.env_worker.adapters import (
    EnvironmentFailed,
    Rollout,
    RolloutOutcome,
    UsageError,
    check_observation,
    check_tools,
    json_or_text,
)
from cray_agents.env_worker.chat import ServerFailed

KEY_VARIABLE = "CRAY_AGENTS_WORKER_KEY"
SERVER_STATUS = (408, 429)  # beside 500 and above: the model's server is to blame
LIMIT = 1000


class LimitExceeded(TaskError):
    """The environment has too many tools, or too long a message; nobody should try again."""

    status_code = 400


class BoundedClient(EvalClient):
    """Client of verifiers that sends no more than adapters.py allows. Raises LimitExceeded."""

    async def get_response(
        self, dialect: Any, body: dict[str, Any], *rest: Any, **more: Any
    ) -> Any:
        """Ask the model."""
        _check_size(body)
        return await super().get_response(dialect, body, *rest, **more)

    async def relay(self, dialect: Any, body: dict[str, Any], *rest: Any, **more: Any) -> Any:
        """Ask the model for a stream."""
        _check_size(body)
        return await super().relay(dialect, body, *rest, **more)


class VerifiersAdapter:
    """A taskset of verifiers and the agents that play it."""

    def __init__(self, environment: Any, limit: int) -> None:
        self._environment = environment
        self._tasks = iter(environment.taskset)
        self._read: list[Any] = []
        self._limit = limit if environment.taskset.INFINITE else sys.maxsize

    def tasks(self) -> Iterable[dict[str, Any]]:
        """Yield a task for each of the taskset's; `metadata.idx` is its place."""
        for place in itertools.count():
            if place >= self._limit or (task := self._task(place)) is None:
                return
            metadata = {"idx": place, "key": task.key}
            yield {"input": task.data.prompt_text, "metadata": metadata, "identity": ["key"]}

    def _task(self, place: int) -> Any:
        more = place + 1 - len(self._read)
        self._read += itertools.islice(self._tasks, max(0, more))
        return self._read[place] if place < len(self._read) else None

    def run(self, rollout: Rollout) -> RolloutOutcome:
        """Carry out a run."""
        place = rollout.metadata.get("idx")
        task = self._task(place) if isinstance(place, int) and place >= 0 else None
        if task is None:
            raise EnvironmentFailed(f"the taskset has no task {place!r}")
        if (known := rollout.metadata.get("key")) not in (None, task.key):
            raise EnvironmentFailed(
                f"task {place} is another one now: its key is {task.key}, not {known}"
            )
        os.environ[KEY_VARIABLE] = rollout.api_key
        client = EvalClientConfig(base_url=rollout.base_url, api_key_var=KEY_VARIABLE)
        sampling = SamplingConfig(**rollout.sampling)
        episode = asyncio.run(self._episode(task, ModelContext(rollout.model, client, sampling)))
        _check(episode)
        rewards: dict[str, float] = {}
        for trace in episode.traces:
            before = f"{trace.agent.name}." if len(episode.traces) > 1 else ""
            for name, reward in trace.rewards.items():
                if reward is None:
                    raise EnvironmentFailed(f"reward {name} was not given")
                rewards[before + name] = reward.value
        return RolloutOutcome(rewards, episode.traces[-1].last_reply or None)

    async def _episode(self, task: Any, context: ModelContext) -> Any:
        async with self._environment.serving():
            (slot,) = self._environment.slots(task)
            return await self._environment.run_slot(slot, context)


def make(environment: str, options: Mapping[str, str]) -> VerifiersAdapter:
    """Return the adapter. Raises UsageError."""
    # harnesses start `uv`, and programs of this environment
    _prepend("PATH", Path(sys.executable).parent)
    name = environment
    if environment.endswith(".py"):
        path = Path(environment).resolve()
        if not path.is_file():
            raise UsageError(f"there is no file {environment}")
        sys.path.insert(0, str(path.parent))
        _prepend("PYTHONPATH", path.parent)  # verifiers starts servers of tools as its modules
        name = path.stem
    config: dict[str, Any] = {"taskset": {"id": name}, "agent": {"runtime": {"type": "subprocess"}}}
    for key, text in options.items():
        if key != "limit":
            _put(config, key.split("."), text)
    try:
        made = load_environment(resolve_env_config(config))
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"taskset {environment}: {error}") from error
    assert isinstance(made, vf.Env)
    server.resolve_client = BoundedClient  # verifiers has no place to give a client
    return VerifiersAdapter(made, int(options.get("limit", str(LIMIT))))


def _prepend(variable: str, folder: Path) -> None:
    known = os.environ.get(variable)
    os.environ[variable] = f"{folder}{os.pathsep}{known}" if known else str(folder)


def _check_size(body: Mapping[str, Any]) -> None:
    """Raise LimitExceeded for too much in a request of any of the APIs."""
    try:
        check_tools(len(body.get("tools") or ()))
        read = body.get("messages") or body.get("input") or ()
        for message in [read] if isinstance(read, str) else read:
            check_observation(message, "a message to the model has")
    except EnvironmentFailed as error:
        raise LimitExceeded(str(error)) from None


def _put(config: dict[str, Any], path: list[str], text: str) -> None:
    for name in path[:-1]:
        config = config.setdefault(name, {})
    config[path[-1]] = text if path[-1] == "id" else json_or_text(text)  # "null" is a harness


def _check(episode: Any) -> None:
    """Raise EnvironmentFailed or ServerFailed for an episode with an error."""
    calls = [call for trace in episode.traces for call in trace.calls]
    for error in (call.error for call in calls if call.error is not None):
        if error.type == LimitExceeded.__name__:  # also where the harness went on
            raise EnvironmentFailed(error.message)
    if episode.ok:
        return
    errors = [error for trace in episode.traces for error in trace.errors]
    errors += episode.errors
    if not errors:
        raise EnvironmentFailed("the episode failed, and verifiers tells no error")
    first = errors[0]
    message = f"{first.type}: {first.message}"
    status = first.status_code or 0
    if first.type == "ProviderError" and (status >= 500 or status in SERVER_STATUS):
        raise ServerFailed(message)
    raise EnvironmentFailed(message)
