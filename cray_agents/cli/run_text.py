"""Text of a run for people: its header, then its messages and tool calls by turn. For runs.py.

Texts of models and tools are printed through screen.line, which disarms control characters.
"""

from collections.abc import Sequence
from typing import Any

from cray_agents.cli.screen import line
from cray_agents.messages import reasoning_of, text_of
from cray_agents.records import Message, ModelCall, Run, ToolCall, Turn
from cray_agents.runtime.store.run_conversation import Conversation, conversation_of
from cray_agents.runtime.views.run_pages import header, value_text

LABEL = 12  # columns of a header's labels
STYLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green"}


def print_run(run: Run, *, tokens: bool = False) -> None:
    """Print a run; with `tokens`, also the exact tokens of its calls."""
    line(run.id, style="bold")
    for name, value in header(run):
        line(f"{name:<{LABEL - 1}} {value}", 2, hanging=LABEL)
    conversation = conversation_of(run)
    _print_conversation(conversation, tokens=tokens)
    if conversation.other_turns:
        line("")
        line("Calls that the conversation does not tell of", style="bold")
        for turn in conversation.other_turns:
            _print_turn(turn, None, tokens=tokens)
    _print_end(run)


def _print_conversation(conversation: Conversation, *, tokens: bool) -> None:
    done = {call.id for turn in conversation.turns_by_message.values() for call in turn.tool_calls}
    number = 0
    for place, message in enumerate(conversation.messages):
        role = str(message.get("role"))
        turn = conversation.turns_by_message.get(place)
        if role == "tool" and message.get("tool_call_id") in done:
            continue  # printed with its call
        if role == "assistant" and (turn is not None or place >= conversation.own_start):
            number += 1
            line("")
            line(f"Turn {number}{_call_facts(turn)}", style="bold")
            _print_turn(turn, message, tokens=tokens)
        else:
            _print_message(message)


def _call_facts(turn: Turn | None) -> str:
    """Describe a turn's model version, counts of tokens, time and ending, as far as known."""
    if turn is None:
        return ""
    call = turn.call
    if call is None:
        return f"  call {turn.call_id}, which is not recorded"
    facts = [call.model, f"{len(call.prompt_token_ids)} + {len(call.token_ids)} tokens"]
    facts += [f"{call.seconds:.2f} s", call.finish_reason or "no end"]
    return "  " + "  ".join(facts)


def _print_turn(turn: Turn | None, message: Message | None, *, tokens: bool) -> None:
    """Print a turn: the assistant's message, the results of its tools, and its exact tokens."""
    call = turn.call if turn is not None else None
    if message is None and call is None:
        line(f"call {turn.call_id if turn else ''}, which is not recorded", 2)
        return
    if message is None and call is not None:
        line(_call_facts(turn).strip(), 2)
        message = call.message
    _print_message(message or {}, turn.tool_calls if turn is not None else ())
    if call is not None:
        for redaction in call.redacted:
            line(f"{redaction.count} of the kind {redaction.kind} were redacted", 4, "yellow")
        if tokens:
            _print_tokens(call)


def _print_message(message: Message, done: Sequence[ToolCall] = ()) -> None:
    role = str(message.get("role"))
    style = STYLES.get(role, "")
    weight = "  (weight 0: not trained on)" if message.get("weight") == 0 else ""
    if thought := reasoning_of(message):
        line("reasoning", 2, "dim")
        line(str(thought), 4, "dim")
    text = text_of(message)
    if text or not message.get("tool_calls"):
        line(f"{role}{weight}", 2, style)
        line(text if text else "(nothing)", 4, "" if text else "dim")
    finished = {call.id: call for call in done}
    for call in message.get("tool_calls") or ():
        _print_tool_call(call, finished.get(call.get("id")))


def _print_tool_call(call: dict[str, Any], done: ToolCall | None) -> None:
    function = call.get("function") or {}
    seconds = f"  {done.seconds:.3f} s" if done is not None else ""
    line(f"calls {function.get('name')}({function.get('arguments') or ''}){seconds}", 2, "blue")
    if done is None:
        return
    if done.error is not None:
        line(f"error: {done.error}", 4, "red")
    else:
        line(value_text(done.result), 4)


def _print_tokens(call: ModelCall) -> None:
    line("prompt tokens", 4, "dim")
    line(" ".join(map(str, call.prompt_token_ids)) or "(none)", 6, "dim")
    line("sampled tokens, with logprobs", 4, "dim")
    pairs = zip(call.token_ids, call.logprobs, strict=False)
    line(" ".join(f"{token}({logprob:.3f})" for token, logprob in pairs) or "(none)", 6, "dim")


def _print_end(run: Run) -> None:
    line("")
    for reward in run.rewards:
        of = reward.source if reward.turn is None else f"{reward.source}, turn {reward.turn + 1}"
        comment = "" if reward.comment is None else f": {reward.comment}"
        line(f"reward  {reward.name} = {reward.value:g}  ({of}){comment}", 0, "green", hanging=8)
    if run.reward is not None and len(run.rewards) > 1:
        line(f"reward  {run.reward:g} in all", 0, "green")
    if run.error is not None:
        kind = ", the infrastructure's" if run.error.infrastructure else ""
        line(f"error   {run.error.type}{kind}: {run.error.message}", 0, "red", hanging=8)
    for redaction in run.redacted:
        line(f"redacted  {redaction.count} of the kind {redaction.kind}", 0, "yellow")
    usage = run.usage
    counts = f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"
    line(f"{usage.calls} calls, {counts}, {run.seconds:.2f} s", 0, "dim")
