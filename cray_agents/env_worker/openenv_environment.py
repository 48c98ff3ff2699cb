"""OpenEnv adapter: environments that a server of OpenEnv offers, by their URL.

`--env URL` names a running server. Where its action is a tool call, its MCP tools are the model's.
Else one tool, `act`, has the action's schema; or with the option `text=FIELD` each answer of the
model is the action's field. Further options: `max_turns` (100), and for --tasks `prompt=TEXT` and
`seeds=N`. A task's metadata are the arguments of `reset`, such as seed, split and index. The
rewards of all steps, summed, are the reward; a step that is `done` ends the run.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

from cray_agents.env_worker.adapters import (
    MAX_OBSERVATION,
    EnvironmentFailed,
    Rollout,
    RolloutOutcome,
    UsageError,
    check_options,
    check_tools,
)
from cray_agents.env_worker.chat import ModelConversation

ACT = "act"
SCHEMA_SECONDS = 60.0


class OpenEnvAdapter:
    """A server of OpenEnv."""

    def __init__(self, url: str, action: Mapping[str, Any], options: Mapping[str, str]) -> None:
        self._url, self._action, self._options = url, action, options
        self._text = options.get("text")
        self._calls_tools = "tool_name" in action.get("properties", {})
        self._max_turns = int(options.get("max_turns", "100"))

    def tasks(self) -> Iterable[dict[str, Any]]:
        """Yield a task for each seed."""
        prompt = self._options.get("prompt", "")
        for seed in range(int(self._options.get("seeds", "100"))):
            yield {"input": prompt, "metadata": {"seed": seed}, "identity": ["seed"]}

    def run(self, rollout: Rollout) -> RolloutOutcome:
        """Carry out a run."""
        kind: Any = MCPToolClient if self._calls_tools else GenericEnvClient
        # later than the worker, which ends a run that takes too long
        client = kind(base_url=self._url, message_timeout_s=rollout.seconds + 60).sync()
        with client:
            begun = client.reset(**rollout.metadata)
            *before, last = rollout.messages
            content, seen = last["content"], _as_text(begun.observation)
            text = isinstance(content, str)
            part = {"type": "text", "text": seen}
            shown = "\n\n".join(filter(None, [content, seen])) if text else [*content, part]
            tools = [] if self._text else self._tools(client)
            talk = ModelConversation(rollout, [*before, {**last, "content": shown}], tools)
            episode = _Episode(client, self._calls_tools)
            stop = self._played(talk, episode)
        if episode.reward is None:
            raise EnvironmentFailed("no step had a reward")
        return RolloutOutcome({"return": episode.reward}, talk.output, stop_reason=stop)

    def _tools(self, client: Any) -> list[dict[str, Any]]:
        if not self._calls_tools:
            return [_schema(ACT, str(self._action.get("description", "Act.")), self._action)]
        listed = client.list_tools()
        check_tools(len(listed))
        return [_schema(tool.name, tool.description, tool.input_schema) for tool in listed]

    def _played(self, talk: ModelConversation, episode: "_Episode") -> str:
        """Let the model act until the episode is done. Returns the stop reason."""
        if not self._text:
            return talk.go_on(episode.called, self._max_turns, lambda: episode.done)
        for _ in range(self._max_turns):
            message = talk.ask()
            if message is None:
                return "max_tokens"
            observation = episode.step({self._text: message["content"]})
            if episode.done:
                return "completed"
            talk.reply(observation)
        return "max_turns"


class _Episode:
    """The steps of a run: their rewards so far, and whether they are at an end."""

    def __init__(self, client: Any, calls_tools: bool) -> None:
        self._client, self._calls_tools = client, calls_tools
        self.reward: float | None = None
        self.done = False

    def step(self, action: Any) -> str:
        """Take a step; return the observation as text."""
        result = self._client.step(action)
        if result.reward is not None:
            self.reward = (self.reward or 0.0) + float(result.reward)
        self.done = bool(result.done)
        return _as_text(result.observation)

    def called(self, call: Mapping[str, Any]) -> str:
        """Take the step that a tool call asks for; a call that makes no sense is told so."""
        name = call["function"]["name"]
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError as error:
            return json.dumps({"error": f"the arguments are no JSON: {error}"})
        if self._calls_tools:
            return self.step(CallToolAction(tool_name=name, arguments=arguments))
        return self.step(arguments) if name == ACT else json.dumps({"error": f"no tool {name}"})


def make(environment: str, options: Mapping[str, str]) -> OpenEnvAdapter:
    """Return the adapter. Raises UsageError."""
    check_options("openenv", options, ("text", "max_turns", "prompt", "seeds"))
    if not environment.startswith(("http://", "https://")):
        raise UsageError(f"--env {environment}: give the URL of a server of OpenEnv")
    url = environment.rstrip("/")
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=SCHEMA_SECONDS) as answer:
            action = json.loads(answer.read(MAX_OBSERVATION))["action"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{url}/schema does not tell the action: {error}") from None
    return OpenEnvAdapter(url, action, options)


def _schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    schema = dict(parameters)
    if name == ACT:
        properties = dict(schema.get("properties", {}))
        properties.pop("metadata", None)  # OpenEnv's own
        schema["properties"] = properties
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def _as_text(observation: Any) -> str:
    """Return an observation as the model reads it, without reward, done and metadata."""
    fields = observation if isinstance(observation, dict) else observation.model_dump(mode="json")
    own = {
        k: v for k, v in fields.items() if k not in ("reward", "done", "metadata") and v is not None
    }
    if set(own) == {"tool_name", "result"}:
        own = {"result": own["result"]}
    values = list(own.values())
    if len(values) == 1:
        return values[0] if isinstance(values[0], str) else json.dumps(values[0])
    return json.dumps(own) if own else ""
