"""Agent: a model with instructions and tools, in a loop of model calls and tool calls.

`Agent.run` begins a RunState and hands it to `conversation.execute`. Read next: description.py, the
checks of its arguments; conversation.py; run_state.py.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Unpack

from cray_agents.agent import user_code
from cray_agents.agent.conversation import execute
from cray_agents.agent.description import AgentDescription, agent_tool, tool_name
from cray_agents.agent.run_context import Deps, RunContext
from cray_agents.agent.run_state import RunOptions, pinned, start_run
from cray_agents.agent.stream_events import AgentEvent, RunEnded
from cray_agents.agent.tool import Tool
from cray_agents.records import Input, Output, Run, Task


class Agent(AgentDescription[Deps, Output]):
    """Instructions and tools for a model.

    For type checkers it is an `Agent[Deps, Output]`: `Deps` is the type of `run(deps=...)`, which
    tools, hooks and instructions find in their `RunContext[Deps]`; `Output` is that of `run.output`
    and follows from `output_type`. `Agent[Shop, int]("clerk", output_type=int)` states both.

    Args:
        name: names the agent in records.
        instructions: the system message (none is sent if it is empty), or a function of nothing or
            of the RunContext, sync or async, that returns it for each run.
        examples: messages of users, tools and this agent that stand between the system message and
            each input, and end with an answer: `[{"role": "user", "content": "2+2"}, {"role":
            "assistant", "content": "4"}]`. They are read, never trained on, and kept in no session.
        tools: functions marked with @tool, or plain ones; afterwards a tuple of Tool.
        model: `name`, `name@N`, or what the server calls it.
        output_type: what `run.output` is: str, int, float, bool, or whatever pydantic reads
            from JSON.
        description: what it is for: told to agents that may call it or hand over to it.
        handoffs: agents that may take over: a tool `transfer_to_<name>` for each switches to its
            instructions, tools, model, output type and, beside this one's, hooks, within the same
            run: its limits and environment stay.
        environment: makes the Environment of each run; its tools are the run's. Or a
            WorkerEnvironment, for loops alone: another framework's, in processes of its own.
        engine: answers the requests; default: OpenAIEngine at `base_url`.
        base_url: of the server, default $CRAY_AGENTS_URL, else http://127.0.0.1:8000/v1.
        max_turns: model calls in a run, at most.
        timeout: seconds a run may take; None: no limit.
        max_total_tokens: no model call is begun once a run's calls have read and sampled so many.
        on_limit: at max_turns or max_total_tokens, `stop`; or `answer`: ask the model once more,
            without tools, for its final answer.
        temperature, max_tokens: of each model call; None: the server's default.
        sampling: more of the request's fields, such as top_p, seed, stop.
        tool_calls: `native`: the server understands its model's tool calls. `constrained`: the
            model writes them as JSON that the server holds to a schema. `auto`: native, with a
            warning when calls are missed, and constrained if the server takes no tools.
        parallel_tool_calls: whether a message's tool calls are carried out at the same time; if
            not, the server is asked for one at a time too. An environment's never are.
        json_schema: ask the server to hold answers to output_type's schema, if it can. They are
            read, and asked for again, either way.
        output_retries: how often the model is told that its answer is not of the output type.
        retries: how often a model call is done again that the server failed, beyond what the engine
            tries itself.
        tags: of each of its runs.
        hooks: called before and after model calls, tool calls and the run.
        recorder: called with each finished run, sync or async; "auto": the engine's, which posts to
            the platform when it is one; None: nobody.
    """

    def as_tool(self, name: str | None = None, description: str | None = None) -> Tool:
        """This agent as another's tool: each call is a run of its own, tagged `parent:<run id>`.

        It asks the engine of the run that calls it unless it has its own, and the version which
        that run is pinned to if both ask the same model. Where the infrastructure fails it, the
        calling run ends too, with a SubagentError.
        """

        async def ask(input: str, context: RunContext) -> Run:  # noqa: A002
            return await self.beside(context.engine).run(
                input,
                model=pinned(self.model, context.model),
                deps=context.deps,
                tags=[f"parent:{context.run_id}"],
                **context.child(),
            )

        made = agent_tool(
            ask, name or tool_name(self.name), description or self.description, self.name
        )
        made.function.__dict__["__agent__"] = self  # read by loop/settings_record.py
        return made

    async def run(
        self,
        input: Input | Task,  # noqa: A002 - the word for it
        **options: Unpack[RunOptions[Deps]],
    ) -> Run[Output]:
        """Work on an input to the end; failures and limits are in the Run, not raised.

        The input is a text, or messages as those of a Task. Raises BadInput, before the run, for
        anything else; StoreError when the finished run could not be recorded, or taken into its
        session; and CancelledError, after recording, when it was cancelled.
        """
        return await execute(start_run(self, input, options))

    def run_sync(
        self,
        input: Input | Task,  # noqa: A002
        **options: Unpack[RunOptions[Deps]],
    ) -> Run[Output]:
        """`run` for code that is not async; it also works where an event loop is running."""
        return user_code.wait_for(self.run(input, **options))

    async def stream(
        self,
        input: Input | Task,  # noqa: A002
        **options: Unpack[RunOptions[Deps]],
    ) -> AsyncGenerator[AgentEvent, None]:
        """Run, and yield what happens as it happens; the last event is RunEnded.

        Raises as `run` does. Closing the iterator early cancels the run.
        """
        events: asyncio.Queue[AgentEvent | None] = asyncio.Queue()
        state = start_run(self, input, options)
        state.emit = events.put_nowait
        task = asyncio.create_task(execute(state))
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield RunEnded(task.result())
        finally:
            task.cancel()
            await asyncio.wait([task])

    def stream_sync(
        self,
        input: Input | Task,  # noqa: A002
        **options: Unpack[RunOptions[Deps]],
    ) -> Generator[AgentEvent, None, None]:
        """`stream` for code that is not async; it also works where an event loop is running."""
        return user_code.iterate_sync(self.stream(input, **options))
