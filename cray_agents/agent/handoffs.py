"""Agents for agents: one as a tool of another, and tools that hand a run over to another.

Called by agent.py.
"""

import re
from typing import TYPE_CHECKING, Any

from cray_agents.agent.active_agent import pinned
from cray_agents.agent.run_context import RunContext
from cray_agents.agent.tool import NAME, Tool, as_tool, tool
from cray_agents.errors import BadInput, StoreError, SubagentError, ToolError
from cray_agents.ports import ChatEngine

if TYPE_CHECKING:
    from cray_agents.agent.agent import Agent


def asking_tool(agent: "Agent", name: str | None, description: str | None) -> Tool:
    """A tool that runs the agent on an input, and answers with its output.

    Its run is a run of its own, with the tag `parent:<run id>`. It asks the parent's engine unless
    it has its own, and the version that the parent is pinned to if it asks the same model. Where
    the infrastructure fails it, the parent's run ends too, with a SubagentError.
    """

    async def ask(input: str, context: RunContext) -> Any:  # noqa: A002
        try:
            run = await beside(context.engine, agent).run(
                input,
                model=pinned(agent.model, context.model),
                context=context.given,
                tags=[f"parent:{context.run_id}"],
                **context.child(),
            )
        except StoreError as error:
            raise SubagentError(f"a run of {agent.name} could not be recorded: {error}") from error
        if run.error is not None and run.error.infrastructure:
            why = f"{run.error.type}: {run.error.message}"
            raise SubagentError(f"{agent.name} was failed by the infrastructure: {why}")
        if run.output is None and run.error is not None:
            raise ToolError(f"{agent.name} came to no answer: {run.error.message}")
        if run.output is None:
            raise ToolError(f"{agent.name} came to no answer: {run.stop_reason}")
        return run.output

    ask.__doc__ = described(agent, description)
    return as_tool(tool(name=named(agent, name), timeout=None)(ask))


def handoff_tool(agent: "Agent") -> Tool:
    """A tool `transfer_to_<name>`; that it was called is what counts (agent.py)."""

    def transfer() -> str:
        return f"{agent.name} has taken over."

    transfer.__doc__ = f"Hand this conversation over to {agent.name}. {agent.description}".strip()
    name = f"transfer_to_{named(agent)}"[:64]
    return as_tool(tool(name=name, timeout=None)(transfer))


def beside(engine: ChatEngine | None, agent: "Agent") -> "Agent":
    """The agent, asking this engine unless it has one of its own."""
    own = agent.engine is not None or agent.base_url is not None
    return agent if own or engine is None else agent.through(engine)


def named(agent: "Agent", name: str | None = None) -> str:
    """The agent's name as a tool may be called. Raises BadInput where there is none in it."""
    fit = name or re.sub(r"[^a-zA-Z0-9_-]+", "_", agent.name).strip("_")[:64]
    if not NAME.fullmatch(fit):
        raise BadInput(f"a tool cannot be called {fit!r}: give as_tool a name", param="name")
    return fit


def described(agent: "Agent", description: str | None) -> str:
    """What models are told that the agent is for."""
    return description or agent.description or f"Ask {agent.name}."
