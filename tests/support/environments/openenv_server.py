"""Servers of OpenEnv: `python openenv_server.py KIND`, a key of KINDS; prints the port."""

import socket
import sys
from typing import Any

import uvicorn
from echo import numbers, question
from fastmcp import FastMCP
from misbehaviour import FLOOD, misbehave
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int | str


class Hint(Observation):
    text: str


class Sum(Environment):
    """A number is to be guessed; the seed decides it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **rest: Any) -> Hint:
        if seed == 3:
            raise RuntimeError("no world today")
        self.a, self.steps = int(seed or 0), 0
        return Hint(text=f"What is {self.a} + 1?")

    def step(self, action: Guess, timeout_s: float | None = None, **rest: Any) -> Hint:
        self.steps += 1
        right = str(action.number).rpartition(" ")[2] == str(self.a + 1)
        done = right or self.steps == 2
        return Hint(text="right" if right else "again", reward=float(right), done=done)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Nasty(Sum):
    """The same, which fails as its task's `way` says."""

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, way: str = "", **rest: Any
    ) -> Hint:
        self.way = way
        misbehave(way)
        first = super().reset(seed=0)
        return Hint(text=first.text + FLOOD) if way == "floods first" else first

    def step(self, action: Guess, timeout_s: float | None = None, **rest: Any) -> Hint:
        seen = super().step(action)
        if self.way == "floods":
            return Hint(text=FLOOD, reward=0.0, done=False)
        return Hint(text="", reward=float("nan"), done=True) if self.way == "nan" else seen


class Say(Action):
    text: str


class Echo(Environment):
    """The number of the seed is to be told again."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **rest: Any) -> Hint:
        self.number = numbers()[int(seed or 0)]
        return Hint(text=question(self.number))

    def step(self, action: Say, timeout_s: float | None = None, **rest: Any) -> Hint:
        return Hint(text="", reward=float(action.text == self.number), done=True)

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    """The same with MCP tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    MORE = 0

    def __init__(self) -> None:
        server = FastMCP("sums")
        self.said: int | None = None
        for n in range(self.MORE):
            server.tool(lambda: "", name=f"tool_{n}", description="Do nothing.")

        @server.tool
        def submit(number: int) -> str:
            """Submit the sum."""
            self.said = number
            return "thanks"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **rest: Any) -> Any:
        self.a = int(seed or 0)
        return Hint(text=f"What is {self.a} + 1?")

    def _scored(self, seen: Any) -> Any:
        if isinstance(seen, CallToolObservation):
            seen.reward, seen.done = float(self.said == self.a + 1), True
        return seen

    def step(self, action: Any, **rest: Any) -> Any:
        return self._scored(super().step(action, **rest))

    async def step_async(self, action: Any, **rest: Any) -> Any:
        return self._scored(await super().step_async(action, **rest))

    def _step_impl(self, action: Any, **rest: Any) -> Any:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


class Crowded(Tools):
    """Thousands of tools."""

    MORE = 1999


KINDS: dict[str, tuple[Any, ...]] = {
    "tools": (Tools, CallToolAction, CallToolObservation),
    "crowded": (Crowded, CallToolAction, CallToolObservation),
    "number": (Sum, Guess, Hint),
    "nasty": (Nasty, Guess, Hint),
    "echo": (Echo, Say, Hint),
}

if __name__ == "__main__":
    made: Any = create_fastapi_app(*KINDS[sys.argv[1]], max_concurrent_envs=8)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    server = uvicorn.Server(uvicorn.Config(made, log_level="warning"))
    server.run(sockets=[listener])
