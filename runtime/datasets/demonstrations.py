"""Conversations to imitate, as training sequences: what the model would have read and sampled.

Each assistant turn is rendered as the engine would render its prompt; what the template then adds
for the answer is what would have been sampled, up to and with the end-of-turn token. The turns are
merged as those of a recorded run are (samples.py), so both kinds of sample look the same.
Called by making.py and selection.py. transformers is imported on first use: it takes seconds.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.records import Message
from cray_agents.runtime.datasets.run_samples import TokenSample, TokenTurn, merge_turns
from cray_agents.runtime.vllm_plugins.template_time import TemplateTooSlow, limited

# what transformers raises for files that are damaged, or hold other JSON than it thinks
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@functools.lru_cache(maxsize=4)
def renderer_of(checkpoint: Path) -> "Renderer":
    """The Renderer of a checkpoint, which never changes; reading a tokenizer takes a while."""
    return Renderer(checkpoint)


class Renderer:
    """A checkpoint's tokenizer and chat template. Raises BadInput if the directory lacks them."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(checkpoint), local_files_only=True, trust_remote_code=False
            )
        except _UNREADABLE as error:
            message = f"no tokenizer can be read from {checkpoint}: {error}"
            raise BadInput(message, param="tokenizer") from error
        if not self._tokenizer.chat_template:
            raise BadInput(f"the tokenizer in {checkpoint} has no chat template", param="tokenizer")
        self._ends = set(self._tokenizer.all_special_ids)

    def samples(
        self, conversation: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[TokenSample]:
        """The sequences of a conversation; only the assistant's tokens are trained on.

        A turn of `weight` 0 is context for the turns after it. Raises BadInput if no turn is left,
        the template refuses the conversation, or marks no end of a turn.
        """
        messages = [as_rendered(message) for message in conversation]
        signatures = [as_declared(tool) for tool in tools] or None
        turns = [
            self._turn(messages[: place + 1], signatures)
            for place, message in enumerate(messages)
            if message["role"] == "assistant" and conversation[place].get("weight") != 0
        ]
        if not turns:
            raise BadInput(
                "a demonstration has no assistant message to train on", param="demonstrations"
            )
        return merge_turns(turns)

    def answer(
        self, conversation: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> TokenSample:
        """The same of its last message alone, the assistant's; all before it is context."""
        context = [{**message, "weight": 0} for message in conversation[:-1]]
        [sample] = self.samples([*context, {**conversation[-1], "weight": 1}], tools)
        return sample

    def _turn(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> TokenTurn:
        prompt = self._render(messages[:-1], tools, generation=True)
        whole = self._render(messages, tools, generation=False)
        if not whole.startswith(prompt):
            raise BadInput(
                "the chat template renders an answer differently from its generation prompt: "
                f"{whole[-200:]!r} does not start with {prompt[-200:]!r}",
                param="tokenizer",
            )
        answer = self._tokens(whole[len(prompt) :])
        ends = [place for place, token in enumerate(answer) if token in self._ends]
        if not ends:
            raise BadInput("the chat template ends a turn with no special token", param="tokenizer")
        sampled = answer[: ends[-1] + 1]
        return TokenTurn(self._tokens(prompt), sampled, [0.0] * len(sampled))

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, generation: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            with limited():
                return str(
                    self._tokenizer.apply_chat_template(
                        messages, tools=tools, add_generation_prompt=generation, tokenize=False
                    )
                )
        except TemplateTooSlow as error:
            raise BadInput(str(error), param="tokenizer") from error
        except (TemplateError, TypeError, ValueError) as error:  # a template is its author's code
            message = f"the chat template refuses a demonstration: {error}"
            raise BadInput(message, param="demonstrations") from error

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def as_rendered(message: Message) -> Message:
    """A message as vLLM hands it to a chat template: tool arguments as a dict, text as a string."""
    shown = {**message, "content": _text(message.get("content"))}
    shown.pop("weight", None)  # of training, not of what is said
    calls = shown.pop("tool_calls", None)
    if calls:
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in calls
        ]
    return shown


def as_declared(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as vLLM hands it to a chat template: fields in its order, absent ones as None."""
    function = tool["function"]
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}


def _text(content: Any) -> Any:
    """None as the empty string; OpenAI's list of text parts as lines; anything else as it is."""
    if content is None:
        return ""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """The arguments as an object; what is no JSON object becomes an empty one, as in vLLM."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}
    return arguments if isinstance(arguments, dict) else {}
