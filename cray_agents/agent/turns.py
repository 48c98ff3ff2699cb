"""A turn: one model call, and the tool calls that it asks for.

Called by agent.py. Read next: toolbox.py, completions.py, hooks.py.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tenacity

from cray_agents.agent import hooks
from cray_agents.agent.run_state import RunState
from cray_agents.agent.stream_events import (
    ModelFinished,
    ModelStarted,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from cray_agents.agent.tool import perform, told
from cray_agents.engines.chat_completions import Assembly, read_completion, sendable
from cray_agents.errors import EngineError
from cray_agents.records import Message, ModelCall, ToolCall

_REJECTED = (400, 422)  # what servers answer to fields they do not know
_PASSING = (0, 408, 409, 429)  # no answer, half of one, or one of no shape; and all 5xx


async def ask(progress: RunState, *, retries: int = 0, final: bool = False) -> Message:
    """One model call: its message, which is in the record from here on.

    `final`: for an answer, not for tools. Raises EngineError, after `retries`, and HookError.
    """
    context = progress.context
    context.turn = len(progress.turns)
    request = await hooks.changed(progress.hooks, progress.next_request(final=final), context)
    progress.tell(ModelStarted(context.turn, context.agent, request["model"]))
    attempt = _retrying(progress, retries).wraps(_call) if retries else _call
    call = await attempt(progress, request)
    progress.turns.append((call, []))
    progress.messages.append(sendable(call.message))
    progress.tell(ModelFinished(call))
    await hooks.observed(progress.hooks, "after_model", call, context)
    return call.message


async def act(progress: RunState, asked: Sequence[Message]) -> list[ToolCall]:
    """Carry out one message's tool calls, at the same time if they may be, and tell the model.

    Raises HookError.
    """
    done = progress.turns[-1][1]

    async def one(part: Message) -> ToolCall:
        call = await _perform(progress, part)
        done.append(call)  # at once: a timeout keeps the calls that were finished
        return call

    if progress.in_order or len(asked) == 1:
        calls = [await one(part) for part in asked]
    else:
        tasks = [asyncio.ensure_future(one(part)) for part in asked]
        try:
            calls = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # where a hook failed, the others are to end too
                task.cancel()
            await asyncio.wait(tasks)
            raise
    done[:] = calls
    progress.messages.extend(
        {"role": "tool", "tool_call_id": call.id, "content": told(call)} for call in calls
    )
    return calls


async def _perform(progress: RunState, part: Message) -> ToolCall:
    asked = ToolCall(id=part["id"], **part["function"])
    progress.tell(ToolStarted(asked.id, asked.name, asked.arguments))
    reason = await hooks.refused(progress.hooks, asked, progress.context)
    if reason is None:
        call = await perform(progress.tools, part, progress.context)
    else:
        call = asked.model_copy(update={"error": reason})
    progress.tell(ToolFinished(call))
    await hooks.observed(progress.hooks, "after_tool", call, progress.context)
    return call


async def _call(progress: RunState, request: dict[str, Any]) -> ModelCall:
    """One model call, asked again without the output's schema where the server takes none."""
    try:
        return await _sent(progress, request)
    except EngineError as error:
        output = progress.persona.output
        ours = output.schema is not None and request.get("response_format") == output.schema
        if not ours or error.status not in _REJECTED:
            raise
        plain = {name: value for name, value in request.items() if name != "response_format"}
        call = await _sent(progress, plain)
        progress.persona.learned.schemas = False
        return call


async def _sent(progress: RunState, request: dict[str, Any]) -> ModelCall:
    if progress.emit is not None and progress.max_tokens is not None:
        request = {"stream_options": {"include_usage": True}, **request}
    request = progress.addressed(request)
    engine = progress.persona.engine
    started, clock = time.time(), time.perf_counter()
    if progress.emit is None:
        completion = await engine.chat(request)
    else:
        assembly, progress.half_told = Assembly(), False
        async for chunk in engine.stream(request):
            if text := assembly.add(chunk):
                progress.half_told = True
                progress.emit(TextDelta(text))
        completion = assembly.completion()
    seconds = time.perf_counter() - clock
    call = read_completion(completion, request, progress.context.run_id, started, seconds)
    progress.tokens += _tokens(completion, call)
    return call


def _tokens(completion: Mapping[str, Any], call: ModelCall) -> int:
    """How many tokens a call read and sampled, by what the server says."""
    usage = completion.get("usage") or {}
    return usage.get("total_tokens") or len(call.prompt_token_ids) + len(call.token_ids)


def _retrying(progress: RunState, retries: int) -> tenacity.AsyncRetrying:
    def may_pass(error: BaseException) -> bool:
        passing = isinstance(error, EngineError) and (
            error.status in _PASSING or error.status >= 500
        )
        return passing and not progress.half_told  # what was streamed cannot be taken back

    return tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(retries + 1),
        wait=tenacity.wait_exponential_jitter(0.5, max=8, jitter=0.5),
        retry=tenacity.retry_if_exception(may_pass),
        reraise=True,
    )
