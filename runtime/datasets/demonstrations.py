"""Demonstrations: render conversations to imitate into training sequences.

The prompt of each assistant turn is rendered as the engine would render it (chat_template.py). The
text that the template adds for the answer, up to and with the token that the engine would stop at,
counts as sampled. The turns are merged like those of a recorded run (run_samples.py), so both kinds
of sample look the same. Called by build.py and selection.py.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import BadInput
from cray_agents.records import Message
from cray_agents.runtime.datasets.chat_template import Chat, ChatTemplate
from cray_agents.runtime.datasets.run_samples import TokenSample, TokenTurn, merge_turns

_NO_THOUGHT = re.compile(r"\s*<think>\s*</think>")


@functools.lru_cache(maxsize=4)
def renderer_of(checkpoint: Path) -> "Renderer":
    """Return the Renderer of a checkpoint, cached because loading a tokenizer is slow."""
    return Renderer(checkpoint)


class Renderer:
    """A checkpoint's chat template and stop tokens. Raises BadInput if the directory lacks them."""

    def __init__(self, checkpoint: Path) -> None:
        self._template = ChatTemplate(checkpoint)
        self._stops, self._is_model = _stop_ids(checkpoint)
        if self._template.tokenizer.eos_token_id is not None:
            self._stops.add(self._template.tokenizer.eos_token_id)
        self._openers: dict[str, int | None] = {}

    def samples(
        self,
        conversation: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[TokenSample]:
        """Render a conversation. Only the assistant's tokens are trained on.

        A turn of `weight` 0 is only context for later turns. What the template leaves out stands in
        the first sample's `losses`. Raises BadInput if no turn is left, or if the template refuses
        the conversation, marks no end of a turn, or leaves out what an answer makes no sense
        without: a content, a tool call or its result.
        """
        chat = Chat(self._template, conversation, tools, template_kwargs)
        turns = [
            self._turn(chat, index)
            for index, message in enumerate(conversation)
            if message["role"] == "assistant" and message.get("weight") != 0
        ]
        if not turns:
            raise BadInput(
                "a demonstration has no assistant message to train on", param="demonstrations"
            )
        samples = merge_turns(turns)
        samples[0].losses |= chat.losses
        return samples

    def answer(
        self,
        conversation: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenSample:
        """Render a conversation, and train only on its last message, the assistant's."""
        context = [{**message, "weight": 0} for message in conversation[:-1]]
        answer = {**conversation[-1], "weight": 1}
        [sample] = self.samples([*context, answer], tools, template_kwargs)
        return sample

    def _turn(self, chat: Chat, index: int) -> TokenTurn:
        prompt, full = chat.text(index, generation=True), chat.text(index + 1, generation=False)
        if not full.startswith(prompt):
            raise BadInput(
                "the chat template renders an answer differently from its generation prompt: "
                f"{full[-200:]!r} does not start with {prompt[-200:]!r}",
                param="tokenizer",
            )
        vital, hidden = chat.hidden(index + 1)
        if vital:
            message = f"the chat template does not show {', '.join(sorted(vital))}"
            raise BadInput(message, param="demonstrations")
        chat.losses |= hidden
        answer = full[len(prompt) :]
        if not hidden and not chat.says(index, answer):
            chat.losses.add("texts of answers as they are: the chat template changes them")
        if _NO_THOUGHT.match(answer) and "<think>" not in str(chat.messages[index]["content"]):
            chat.losses.add("answers without a thought: the chat template writes an empty one")
        sampled = self._sampled(chat, chat.tokens(answer), index)
        return TokenTurn(chat.tokens(prompt), sampled, [0.0] * len(sampled))

    def _sampled(self, chat: Chat, answer: list[int], index: int) -> list[int]:
        """Cut an answer behind the token that the engine stops at, which it may not have yet."""
        special = self._template.special_ids
        stop = next((i for i, token in enumerate(answer) if token in self._stops), None)
        if stop is None or not self._is_model:  # the token that ends what is not blank
            places = range(len(answer))
            last = next((i for i in reversed(places) if self._is_shown(answer[i : i + 1])), -1)
            end = next((i for i in places[last + 1 :] if answer[i] in special), None)
            if self._is_model and end is not None:
                chat.losses.add("a stop token of the model: their answers end with another one")
            stop = end if stop is None or end is not None else stop
        if stop is not None:
            if self._is_shown(answer[stop + 1 :]):
                chat.losses.add("texts of answers after their first stop token")
            return answer[: stop + 1]
        opener = self._opener("tool" if chat.messages[index].get("tool_calls") else "user")
        if opener is None:
            raise BadInput("the chat template ends a turn with no special token", param="tokenizer")
        return [*answer, opener]

    def _opener(self, role: str) -> int | None:
        """Return the token that begins the next message, if the engine stops at it (GLM)."""
        if role not in self._openers:
            tokens = Chat(self._template, [], []).opener(role)[:1]
            stops = self._stops if self._is_model else self._template.special_ids
            self._openers[role] = next((token for token in tokens if token in stops), None)
        return self._openers[role]

    def _is_shown(self, tokens: list[int]) -> bool:
        """Tell whether tokens have a text that is not blank, special tokens apart."""
        decode = self._template.tokenizer.decode
        return bool(decode(tokens, skip_special_tokens=True).strip())


def _stop_ids(checkpoint: Path) -> tuple[set[int], bool]:
    """Return the tokens that vLLM stops at besides the tokenizer's own; False: it is no model."""
    for name in ("generation_config.json", "config.json"):
        try:
            ids = orjson.loads((checkpoint / name).read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        return {one for one in (ids if isinstance(ids, list) else [ids]) if one is not None}, True
    return set(), False
