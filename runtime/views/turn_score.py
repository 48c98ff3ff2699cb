"""Turn score: the sampled tokens of a turn under another version, from vLLM's prompt_logprobs.

The prompt and the sampled tokens go to the engine as one prompt, by their ids, so nothing is
tokenised again. Called by gateway/routes/run_views.py.
"""

import math
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.runtime.views.token_text import Vocabulary

Body = dict[str, Any]


def score_request(call: Body, version: str, top: int) -> Body:
    """Return the request for /v1/completions that scores the tokens of a recorded call."""
    return {
        "model": version,
        "prompt": [*call["prompt_token_ids"], *call["token_ids"]],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": top,
    }


def parse_score(call: Body, answer: Body, vocabulary: Vocabulary) -> Body:
    """Return the lists of a TurnScore from the engine's answer.

    Raises BadInput, code `unsupported_engine`, for an answer without logprobs of the prompt.
    """
    rows = answer["choices"][0].get("prompt_logprobs")
    sampled, start = call["token_ids"], len(call["prompt_token_ids"])
    if not rows or len(rows) != start + len(sampled):
        raise BadInput(
            "this engine gives no logprobs of a prompt's tokens, by which a turn is scored",
            param="model",
            code="unsupported_engine",
        )
    logprobs: list[float | None] = []
    tops: list[list[Body]] = []
    entropies: list[float | None] = []
    for token, row in zip(sampled, rows[start:], strict=True):
        if row is None:  # the first token of all follows nothing
            logprobs.append(None)
            tops.append([])
            entropies.append(None)
            continue
        logprobs.append(_finite(row[str(token)]["logprob"]))
        likely = sorted(row.items(), key=lambda item: int(item[1]["rank"]))
        tops.append([_top_token(int(name), entry, vocabulary) for name, entry in likely])
        entropies.append(_entropy([float(entry["logprob"]) for _, entry in likely]))
    recorded = [*call["logprobs"], *[None] * (len(sampled) - len(call["logprobs"]))]
    return {
        "ids": sampled,
        "logprobs": logprobs,
        "recorded": recorded,
        "top": tops,
        "entropy": entropies,
    }


def _top_token(token: int, entry: Body, vocabulary: Vocabulary) -> Body:
    text = vocabulary.bytes_of(token).decode("utf-8", "replace")
    return {"id": token, "text": text, "logprob": _finite(entry["logprob"]), "rank": entry["rank"]}


def _entropy(logprobs: list[float]) -> float:
    """Return the entropy of these tokens and of the rest as one token, in nats.

    Splitting the rest would only add to it, so it is a lower bound.
    """
    chances = [math.exp(value) for value in logprobs if math.isfinite(value)]
    rest = max(0.0, 1.0 - sum(chances))
    return -sum(chance * math.log(chance) for chance in [*chances, rest] if chance > 0)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
