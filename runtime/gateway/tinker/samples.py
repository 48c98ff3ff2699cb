"""Samples on Tinker's wire: read a request as a completion, keep its task, write its sequences.

A sample is answered as POST /v1/completions answers a prompt of token ids: by the pool, and
recorded as a run. A script asks for it once and fetches it later. In between it is a task of this
process. After a restart the script is told that it is gone, and samples again.
Read next: protobuf.py; model_calls/answer.py.
"""

import asyncio
import math
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from cray_agents.errors import BadInput, EngineError
from cray_agents.ports import SampledSequence
from cray_agents.runtime.gateway.model_calls.call import Call
from cray_agents.runtime.gateway.tinker.protobuf import write_bytes, write_whole
from cray_agents.runtime.gateway.tinker.requests import NotServed, SampleRequest
from cray_agents.runtime.pool.vllm_http import well_formed

MOST_ENDED = 10_000  # samples that are kept for scripts that may ask once more
DEFAULT_TOKENS = 16  # sampled where a script names no limit, as for a completion
STOPS = {"stop": 0, "length": 1}


def completion_request(sample: SampleRequest, version: str) -> dict[str, Any]:
    """Return the completion by a `version` that a sample asks for.

    Raises BadInput, which names what is not served.
    """
    for name in NotServed.model_fields:
        if getattr(sample, name):
            raise BadInput(f"{name} is not served: leave it out", param=name)
    params = sample.sampling_params
    request: dict[str, Any] = {
        "model": version,
        "prompt": sample.prompt.tokens,
        "n": sample.num_samples,
        "max_tokens": DEFAULT_TOKENS if params.max_tokens is None else params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
    }
    if not request["prompt"]:
        raise BadInput("the prompt has no tokens", param="prompt")
    if params.seed is not None:
        request["seed"] = params.seed
    if sample.prompt_logprobs:
        request["prompt_logprobs"] = 0
    return request | _stops(params.stop)


def _stops(stop: str | list[int] | list[str] | None) -> dict[str, Any]:
    """Return the fields of a completion for `stop`: None, a text, texts, or token ids."""
    if stop is None:
        return {}
    if stop == []:  # nothing ends the sample before `max_tokens`
        return {"ignore_eos": True}
    if isinstance(stop, list) and isinstance(stop[0], int):
        return {"stop_token_ids": stop}
    return {"stop": stop}


def write_samples(samples: Sequence[SampledSequence], answer: bytes) -> bytes:
    """Return the sequences of a sample, exactly as they were recorded. Raises EngineError."""
    content = b""
    for sample in samples:
        if sample.finish_reason not in STOPS or len(sample.logprobs) != len(sample.token_ids):
            raise EngineError(
                f"the sample ended with {sample.finish_reason!r} after {len(sample.token_ids)}"
                " tokens: sample again"
            )
        count = len(sample.token_ids)
        content += write_bytes(
            1,
            write_whole(1, STOPS[sample.finish_reason])
            + write_bytes(2, struct.pack(f"<{count}i", *sample.token_ids))
            + write_bytes(3, struct.pack(f"<{count}f", *sample.logprobs)),
        )
    if prompt := _prompt_logprobs(samples[0].prompt_token_ids, answer):
        content += write_bytes(2, struct.pack(f"<{len(prompt)}f", *prompt))
    return content


def _prompt_logprobs(tokens: list[int], answer: bytes) -> list[float]:
    """Return the log-probabilities of a prompt's tokens, NaN for the first; [] if not asked for."""
    if b'"prompt_logprobs":[' not in answer:
        return []
    with well_formed("the replica"):
        rows = orjson.loads(answer)["choices"][0]["prompt_logprobs"]
        pairs = zip(tokens, rows, strict=True)
        return [math.nan if row is None else row[str(token)]["logprob"] for token, row in pairs]


@dataclass
class TinkerSample:
    """A sample under way, or ended."""

    call: Call
    task: "asyncio.Task[bytes]"


class TinkerSamples:
    """The samples of this process, by the names of their requests. For use on one event loop."""

    def __init__(self) -> None:
        self._samples: OrderedDict[str, TinkerSample] = OrderedDict()

    def get(self, request_id: str) -> TinkerSample | None:
        """Return a sample; None if this process has none of that name."""
        return self._samples.get(request_id)

    def add(self, request_id: str, sample: TinkerSample) -> None:
        """Keep a sample. Of those that have ended, the oldest are forgotten."""
        self._samples[request_id] = sample
        while len(self._samples) > MOST_ENDED and next(iter(self._samples.values())).task.done():
            self._samples.popitem(last=False)

    async def close(self) -> None:
        """End all samples."""
        tasks = [sample.task for sample in self._samples.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
