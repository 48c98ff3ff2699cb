"""Model conversation: model calls and tool calls in turn, where the framework has no client.

The calls go to the run's own base URL, where the platform records them with their tokens. The
client takes no package, so that it runs beside any pins: JSON by urllib, with retries. Also used by
leased_runs.py.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any

from cray_agents.env_worker.adapters import Rollout, check_observation, check_tools

RETRIES = 6
BUSY = (408, 429, 500, 502, 503, 504)
_KEPT = ("role", "content", "reasoning", "tool_calls")  # of an answer, when it is sent back
TOO_LONG = ("context length", "context_length", "maximum model length", "longer than")


class RequestRefused(Exception):
    """The server refused a request: `status`, and the `code` of the error's envelope."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code, self.message = status, code, message


class ServerUnreachable(Exception):
    """No server answers."""


class HttpClient:
    """JSON requests to one base URL."""

    def __init__(self, base_url: str, api_key: str, timeout: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        self._timeout = timeout

    def post(
        self, path: str, body: dict[str, Any], *, key: str | None = None, retries: int = RETRIES
    ) -> dict[str, Any]:
        """Post JSON; return the answer. Raises RequestRefused, ServerUnreachable.

        key: an Idempotency-Key, under which a repeated request is answered and recorded once.
        """
        headers = {**self._headers, **({"idempotency-key": key} if key else {})}
        data = json.dumps(body).encode()
        for turn in range(retries + 1):
            request = urllib.request.Request(self.base_url + path, data, headers, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                    return dict(json.loads(answer.read()))
            except urllib.error.HTTPError as error:
                refused = _refused(error)
                if refused.status not in BUSY or turn == retries:
                    raise refused from None
            except (OSError, HTTPException, TypeError, ValueError, RecursionError) as error:
                if turn == retries:  # the last three: it is no JSON
                    raise ServerUnreachable(f"{self.base_url} does not answer: {error}") from None
            time.sleep(min(8.0, 0.25 * 2**turn))
        raise AssertionError


def _refused(error: urllib.error.HTTPError) -> RequestRefused:
    try:
        envelope = json.loads(error.read())["error"]
        return RequestRefused(error.code, str(envelope["message"]), str(envelope.get("code")))
    except (ValueError, KeyError, TypeError, OSError):
        return RequestRefused(error.code, str(error.reason), "")


class ServerFailed(Exception):
    """The model's server did not answer, after retries."""


class ModelConversation:
    """The messages of a run, and its model.

    Raises EnvironmentFailed for more tools, or a longer observation, than adapters.py allows.
    """

    def __init__(
        self, rollout: Rollout, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> None:
        check_tools(len(tools))
        for message in messages:
            check_observation(message.get("content"), "the first observation has")
        self.messages = list(messages)
        self._client = HttpClient(rollout.base_url, rollout.api_key, timeout=rollout.seconds)
        self._request = {"model": rollout.model, **rollout.sampling}
        if tools:
            self._request["tools"] = tools
        self._run_id, self._calls = rollout.run_id, 0
        self.cut = False  # whether the last answer was cut by a limit of tokens

    @property
    def output(self) -> str | None:
        """The model's last answer, if it has said one."""
        last = self.messages[-1]
        return last.get("content") if last["role"] == "assistant" else None

    def ask(self) -> dict[str, Any] | None:
        """Add the model's next message; None if the conversation is too long for the model."""
        self._calls += 1
        body = {**self._request, "messages": self.messages}
        if isinstance(seed := body.get("seed"), int):
            body["seed"] = seed + self._calls - 1
        key = f"{self._run_id}/{self._calls}"
        try:
            answer = self._client.post("/chat/completions", body, key=key)
        except RequestRefused as refused:
            if refused.status == 400 and any(words in refused.message for words in TOO_LONG):
                return None
            if refused.status >= 500 or refused.status == 429:
                raise ServerFailed(str(refused)) from None
            raise
        choice = answer["choices"][0]
        self.cut = choice.get("finish_reason") == "length"
        given = choice["message"]
        kept = {name: given[name] for name in _KEPT if given.get(name)}
        message: dict[str, Any] = {"content": "", **kept}
        self.messages.append(message)
        return message

    def go_on(
        self,
        called: Callable[[Mapping[str, Any]], Any],
        max_turns: int,
        done: Callable[[], bool] = lambda: False,
    ) -> str:
        """Let the model call tools until it answers, or it is done. Returns the stop reason."""
        for _ in range(max_turns):
            message = self.ask()
            if message is None:
                return "max_tokens"
            if not message.get("tool_calls"):
                return "max_tokens" if self.cut else "completed"
            for call in message["tool_calls"]:
                self.observe(call, called(call))
                if done():
                    return "completed"
        return "max_turns"

    def observe(self, call: Mapping[str, Any], result: Any) -> None:
        """Add the result of a tool call."""
        content = result if isinstance(result, list) else str(result)
        check_observation(content, f"tool {call['function']['name']} returned")
        message = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
        self.messages.append({**message, "content": content})

    def reply(self, observation: str) -> None:
        """Add an observation as the user's next message."""
        check_observation(observation, "a step returned")
        self.messages.append({"role": "user", "content": observation})
