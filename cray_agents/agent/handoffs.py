"""Tools made of agents: to ask another agent, and to hand a run over to one. Called by agent.py."""

import re
from collections.abc import Awaitable, Callable
from typing import Any

from cray_agents.agent.run_context import RunContext
from cray_agents.agent.tool import NAME, Tool, as_tool, tool
from cray_agents.errors import BadInput, StoreError, SubagentError, ToolError
from cray_agents.records import Run

RunAgent = Callable[[str, RunContext], Awaitable[Run]]


def agent_tool(run: RunAgent, name: str, description: str, agent: str) -> Tool:
    """A tool that runs an agent on an input, and answers with its output. See Agent.as_tool.

    `agent` names the agent in errors.
    """

    async def ask(input: str, context: RunContext) -> Any:  # noqa: A002
        try:
            ended = await run(input, context)
        except StoreError as error:
            raise SubagentError(f"a run of {agent} could not be recorded: {error}") from error
        if ended.error is not None and ended.error.infrastructure:
            why = f"{ended.error.type}: {ended.error.message}"
            raise SubagentError(f"{agent} was failed by the infrastructure: {why}")
        if ended.output is None and ended.error is not None:
            raise ToolError(f"{agent} came to no answer: {ended.error.message}")
        if ended.output is None:
            raise ToolError(f"{agent} came to no answer: {ended.stop_reason}")
        return ended.output

    if not NAME.fullmatch(name):
        raise BadInput(f"a tool cannot be called {name!r}: give as_tool a name", param="name")
    ask.__doc__ = purpose(agent, description)
    return as_tool(tool(name=name, timeout=None)(ask))


def handoff_tool(agent: str, description: str = "") -> Tool:
    """A tool `transfer_to_<agent>`. Its call alone hands over: see conversation.py."""

    def transfer() -> str:
        return f"{agent} has taken over."

    transfer.__doc__ = f"Hand this conversation over to {agent}. {description}".strip()
    return as_tool(tool(name=f"transfer_to_{tool_name(agent)}"[:64], timeout=None)(transfer))


def tool_name(agent: str) -> str:
    """An agent's name as a tool may be called. Raises BadInput where no letter of it may stay."""
    fit = re.sub(r"[^a-zA-Z0-9_-]+", "_", agent).strip("_")[:64]
    if not NAME.fullmatch(fit):
        raise BadInput(f"a tool cannot be called {fit!r}: give as_tool a name", param="name")
    return fit


def purpose(agent: str, description: str) -> str:
    """The description of an agent that models are given."""
    return description or f"Ask {agent}."
