"""How a call's tokens were sampled: at which temperature, and with what else.

A trainer compares its log-probabilities with those recorded, which are of the distribution that was
sampled from: it can do so where a temperature alone made that of the model's own. Called by
samples.py. The options are those of vLLM's four APIs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

GREEDY = 1e-5  # temperatures below it are 0 to vLLM

#: Options that change the distribution beyond its temperature -> values that do not; nor does null
SHAPING: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "output_format": (),
    "output_config": ({},),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "vllm_xargs": ({},),
}


def temperature_of(sampling: Mapping[str, Any]) -> float | None:
    """The temperature of a request: 1 where it says none, 0 where it is greedy, None if no number.

    What was imported may say anything.
    """
    given = sampling.get("temperature")
    if given is None:
        return 1.0
    if not isinstance(given, int | float) or not math.isfinite(given):
        return None
    return 0.0 if given < GREEDY else float(given)


def is_shaped(sampling: Mapping[str, Any]) -> bool:
    """Whether more than the temperature decided what could be sampled."""
    given = ((name, sampling.get(name)) for name in SHAPING)
    return any(value is not None and value not in SHAPING[name] for name, value in given)


def is_held(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a tool is `strict`: the server then holds its arguments to a grammar."""
    return any(tool.get("strict") or (tool.get("function") or {}).get("strict") for tool in tools)
