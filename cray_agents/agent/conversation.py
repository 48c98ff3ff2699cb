"""The conversation of a run: ask the model, carry out its tool calls, until it answers.

`execute` is a whole run, from its first hook to its record. Whatever ends a run, it ends with its
trajectory and a reason. Called by agent.py. Read next: tool.py, engines/chat_completions.py.
"""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tenacity

from cray_agents.agent import hooks, user_code
from cray_agents.agent.description import OutputError
from cray_agents.agent.environment import WorkerEnvironment, begin, reply, tear_down
from cray_agents.agent.run_state import RunState
from cray_agents.agent.sessions import is_answered, without_system
from cray_agents.agent.stream_events import (
    Handoff,
    ModelFinished,
    ModelStarted,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from cray_agents.agent.tool import model_text, perform
from cray_agents.engines.chat_completions import Assembly, read_completion
from cray_agents.errors import CrayError, EngineError, EngineUnavailable, HookError, StoreError
from cray_agents.exact_json import sendable
from cray_agents.records import (
    REWARD_REFUSED,
    Message,
    ModelCall,
    Run,
    RunError,
    StopReason,
    ToolCall,
)

_REJECTED = (400, 422)  # statuses of servers that do not know a field
_TRANSIENT = (0, 408, 409, 429)  # no answer, half of one, or one of no shape; and all 5xx

log = logging.getLogger(__name__)


async def execute(state: RunState) -> Run:
    """Run the conversation within its limits, then record it, whatever happened."""
    try:
        output, error = await _within_limits(state)
    except BaseException as failure:
        await _give_up(state, failure)
        raise
    else:
        return await user_code.shielded(_finish(state, output, error))
    finally:
        await user_code.shielded(tear_down(state.context))


async def _within_limits(state: RunState) -> tuple[Any, RunError | None]:
    """The conversation's answer, and the error that ended it. Raises what no run may swallow."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(state.agent.timeout) as limit:
            await _begin(state)
            return await _converse(state), None
    except CrayError as failure:
        return None, state.fail(failure)
    except TimeoutError:
        if not limit.expired():
            raise
        state.stop(StopReason.timeout)
        return None, state.late_start() or await _engine_excuse(state, started)


async def _begin(state: RunState) -> None:
    """Gather all that the model is to know when it is first asked."""
    if state.session is not None:
        state.earlier = without_system(await state.session.history())
    state.earlier = state.agent.without_examples(state.earlier)
    state.messages[:0] = state.earlier
    environment = state.agent.environment
    if environment is not None and not isinstance(environment, WorkerEnvironment):
        state.environment_tools = await begin(environment, state.context)
    await state.enter(state.agent)
    await hooks.observed(state.agent.hooks, "before_run", state.context)


async def _converse(state: RunState) -> Any:
    """Ask until the model answers without asking for tools; return the answer as output_type."""
    mistakes = 0
    while (limit := state.reached_limit()) is None:
        again = mistakes > 0 and state.active.reader.schema is not None
        message = await ask(state, final=again)
        if requested := message.get("tool_calls"):
            calls = await act(state, requested)
            await _hand_over(state, calls)
            continue
        answer = message.get("content") or ""
        if (answered := await reply(answer, state.context)) is not None:
            state.messages.append({"role": "user", "content": answered})
            continue
        try:
            output = state.active.reader.read(answer)
        except OutputError as error:
            mistakes += 1
            if mistakes > state.agent.output_retries:
                raise
            state.messages.append({"role": "user", "content": f"{error} Answer again."})
        else:
            if state.turns[-1][0].finish_reason == "length":
                state.stop(StopReason.max_tokens)
            return output
    state.stop(limit)
    if state.agent.on_limit == "stop":
        return None
    message = await ask(state, final=True)
    if message.get("tool_calls"):
        raise OutputError("The model asked for tools when it was to answer.")
    return state.active.reader.read(message.get("content") or "")


async def ask(state: RunState, *, final: bool = False) -> Message:
    """Make one model call, record it, and return its message.

    `final`: the model is to answer, not to call tools. Raises EngineError, after the run's
    retries, and HookError.
    """
    context = state.context
    context.turn = len(state.turns)
    request = await hooks.changed(state.hooks, state.next_request(final=final), context)
    state.publish(ModelStarted(context.turn, context.agent, request["model"]))
    call = await (_retrying(state).wraps(_call) if state.agent.retries else _call)(state, request)
    state.turns.append((call, []))
    state.messages.append(sendable(call.message))
    state.publish(ModelFinished(call))
    await hooks.observed(state.hooks, "after_model", call, context)
    return call.message


async def act(state: RunState, requested: Sequence[Message]) -> list[ToolCall]:
    """Carry out one message's tool calls, at the same time if they may be, and tell the model.

    Raises HookError.
    """
    done = state.turns[-1][1]
    handoffs = [part for part in requested if part["function"]["name"] in state.active.successors]

    async def one(part: Message) -> ToolCall:
        call = await _perform(state, part, late=part in handoffs[1:])
        done.append(call)  # at once: a timeout keeps the calls that were finished
        return call

    if state.one_by_one or len(requested) == 1:
        calls = [await one(part) for part in requested]
    else:
        tasks = [asyncio.ensure_future(one(part)) for part in requested]
        try:
            calls = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # where a hook failed, the others are to end too
                task.cancel()
            await asyncio.wait(tasks)
            raise
    done[:] = calls
    state.messages.extend(
        {"role": "tool", "tool_call_id": call.id, "content": model_text(call)} for call in calls
    )
    return calls


async def _perform(state: RunState, part: Message, *, late: bool) -> ToolCall:
    """Carry out a tool call. `late`: it hands over, and another call of its message did before."""
    requested = ToolCall(id=part["id"], **part["function"])
    state.publish(ToolStarted(requested.id, requested.name, requested.arguments))
    reason: str | None = "one agent takes over at a time, and another was named first"
    if not late:
        reason = await hooks.refused(state.hooks, requested, state.context)
    if reason is None:
        call = await perform(state.tools, part, state.context)
    else:
        call = requested.model_copy(update={"error": reason})
    state.publish(ToolFinished(call))
    await hooks.observed(state.hooks, "after_tool", call, state.context)
    return call


async def _hand_over(state: RunState, calls: Sequence[ToolCall]) -> None:
    """Let another agent speak if a tool call says so, and was carried out."""
    for call in calls:
        successor = state.active.successors.get(call.name)
        if successor is not None and call.error is None:
            await state.enter(successor)
            state.publish(Handoff(successor.name))
            return


async def _call(state: RunState, request: dict[str, Any]) -> ModelCall:
    """Make one model call; ask again without the output's schema if the server takes none."""
    try:
        return await _send(state, request)
    except EngineError as error:
        output = state.active.reader
        ours = output.schema is not None and request.get("response_format") == output.schema
        if not ours or error.status not in _REJECTED:
            raise
        plain = {name: value for name, value in request.items() if name != "response_format"}
        call = await _send(state, plain)
        state.active.server.schemas = False
        return call


async def _send(state: RunState, request: dict[str, Any]) -> ModelCall:
    """Make one model call. Raises EngineError and its kinds, also for a connection that failed."""
    try:
        return await _answered(state, request)
    except CrayError:
        raise
    except OSError as error:  # of an engine of the author's; a timeout is one, too
        why = f"the engine failed: {type(error).__name__}: {error}"
        raise EngineUnavailable(why) from error


async def _answered(state: RunState, request: dict[str, Any]) -> ModelCall:
    if state.emit is not None and state.agent.max_total_tokens is not None:
        request = {"stream_options": {"include_usage": True}, **request}
    request = state.addressed(request)
    engine = state.active.asked_engine
    started, clock = time.time(), time.perf_counter()
    if state.emit is None:
        completion = await engine.chat(request)
    else:
        assembly, state.half_streamed = Assembly(), False
        async for chunk in engine.stream(request):
            if text := assembly.add(chunk):
                state.half_streamed = True
                state.emit(TextDelta(text))
        completion = assembly.completion()
    seconds = time.perf_counter() - clock
    call = read_completion(completion, request, state.context.run_id, started, seconds)
    state.tokens += _tokens(completion, call)
    return call


def _tokens(completion: Mapping[str, Any], call: ModelCall) -> int:
    """Count the tokens that a call read and sampled, by the server's own count."""
    usage = completion.get("usage") or {}
    return usage.get("total_tokens") or len(call.prompt_token_ids) + len(call.token_ids)


def _retrying(state: RunState) -> tenacity.AsyncRetrying:
    def may_pass(error: BaseException) -> bool:
        passing = isinstance(error, EngineError) and (
            error.status in _TRANSIENT or error.status >= 500
        )
        return passing and not state.half_streamed  # what was streamed cannot be taken back

    return tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(state.agent.retries + 1),
        wait=tenacity.wait_exponential_jitter(0.5, max=8, jitter=0.5),
        retry=tenacity.retry_if_exception(may_pass),
        reraise=True,
    )


async def _finish(state: RunState, output: Any, error: RunError | None) -> Run:
    """Show the finished run to the hooks, record it, add it to its session."""
    run = state.to_run(output, error)
    try:
        await hooks.observed(state.agent.hooks, "after_run", run, state.context)
        run = run.model_copy(update={"rewards": state.rewards(error)})  # hooks give some too
    except HookError as failure:
        run = state.to_run(None, state.fail(failure))
    for given in run.rewards:
        if not math.isfinite(given.value):
            what = f"reward {given.name} of turn {given.turn} is {given.value}"
            run = run.unscored(f"{what}: give a finite number", repeat=True)
    if (recorder := state.agent.run_recorder) is not None:
        try:
            await user_code.call(functools.partial(recorder, run), None)
        except StoreError as refused:
            if refused.code != REWARD_REFUSED:
                raise
            run = run.unscored(str(refused), repeat=True)
            await user_code.call(functools.partial(recorder, run), None)
    if state.session is not None and is_answered(run):
        await state.session.extend(run, state.added_messages)
    return run


async def _give_up(state: RunState, failure: BaseException) -> None:
    """Record a run that ends by being cancelled, or by a fault: it may not take long."""
    error = state.fail(failure)
    try:
        async with asyncio.timeout(user_code.GRACE):
            await _finish(state, None, error)
    except (StoreError, TimeoutError) as unrecorded:
        run = state.context.run_id
        log.error("run %s (%s) is not recorded: %s", run, state.reason, unrecorded)


async def _engine_excuse(state: RunState, started: float) -> RunError | None:
    """The engine's reason for a run that had too little time; None: the run itself took it."""
    excuse = getattr(state.agent.own_engine, "excuse", None)
    return None if excuse is None else await excuse(started)
