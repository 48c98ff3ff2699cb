"""Prompts with completions of other prompts: what kto estimates its drift from.

The reference point of the loss is the divergence from the reference model on completions that do
not belong to their prompts (arXiv 2402.01306, section 4.1). Called at a job's start, with kto.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from cray_agents.trainers.data.samples import Floats, Ints, Samples


def mismatched(samples: Samples, limit: int) -> Samples:
    """Each sample's prompt with another one's completion, cut to `limit` tokens in all.

    A prompt is what stands before the first token that is trained on, and a completion all from
    there on, with the same mask. Completions are passed on by as many places as the longest row of
    equal prompts has: attempts at a task stand side by side, and none gets one of its own task
    unless there are hardly others. Each completion is used once.
    """
    starts = [1 + int((mask[1:] > 0).argmax()) for mask in samples.masks]
    prompts = [ids[:start] for ids, start in zip(samples.tokens, starts, strict=True)]
    shift = _longest_row(prompts) % len(samples) or 1
    tokens: list[Ints] = []
    masks: list[Floats] = []
    for place, prompt in enumerate(prompts):
        other = (place + shift) % len(samples)
        completion = slice(starts[other], starts[other] + limit - len(prompt))
        tokens.append(np.concatenate([prompt, samples.tokens[other][completion]]))
        nothing = np.zeros(len(prompt), np.float32)
        masks.append(np.concatenate([nothing, samples.masks[other][completion]]))
    return replace(Samples.of(tokens, masks), chosen=samples.chosen, weights=samples.weights)


def _longest_row(prompts: Sequence[Ints]) -> int:
    """How many equal ones there are side by side, at most."""
    return max(len(list(same)) for _, same in groupby(ids.tobytes() for ids in prompts))
