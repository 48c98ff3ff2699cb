"""Mixer split: run a module that mixes tokens once for each of several packed sequences.

Recurrent and convolutional mixers of transformers carry their state from one packed sequence into
the next. `split` lets a module see one sequence at a time, and puts its results together. Used by
passes.py, which finds the modules that need it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cray_agents.trainers.models.universal.packed_attention import PackedMask


class MixerSplit:
    """The lengths of the packed sequences of the pass in progress. Empty: nothing is split."""

    def __init__(self) -> None:
        self.lengths: tuple[int, ...] = ()

    @contextmanager
    def of(self, lengths: Sequence[int]) -> Iterator[None]:
        """Split by these lengths within the context, and in its recomputation afterwards."""
        self.lengths = tuple(lengths)
        yield

    def split(self, module: torch.nn.Module) -> None:
        """Let a module see one sequence at a time from now on, whoever split it before."""
        unsplit(module)
        whole = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if len(self.lengths) < 2:
                return whole(*args, **kwargs)
            return self._run(whole, args, kwargs)

        module.forward = forward

    def _run(self, whole: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tokens, results, start = sum(self.lengths), [], 0
        for number, length in enumerate(self.lengths):
            place = (number, slice(start, start + length), tokens)
            results.append(whole(*_cut(args, *place), **_cut(kwargs, *place)))
            start += length
        return _join(results, self.lengths)


def unsplit(module: torch.nn.Module) -> None:
    """Let a module see all sequences at once again."""
    module.__dict__.pop("forward", None)


def _cut(value: Any, number: int, place: slice, tokens: int) -> Any:
    """Cut one sequence out of all tensors [1, tokens, ...] of a module's arguments."""
    if isinstance(value, torch.Tensor):
        return value[:, place] if value.ndim > 1 and value.shape[:2] == (1, tokens) else value
    if isinstance(value, PackedMask):
        return value.of(number)
    if isinstance(value, tuple | list):
        return type(value)(_cut(each, number, place, tokens) for each in value)
    if isinstance(value, dict):
        return {key: _cut(each, number, place, tokens) for key, each in value.items()}
    return value


def _join(results: list[Any], lengths: tuple[int, ...]) -> Any:
    """Put the results of one module for all sequences together: [1, tokens, ...]."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        of_tokens = all(
            one.ndim > 1 and one.shape[1] == length
            for one, length in zip(results, lengths, strict=True)
        )
        return torch.cat(results, 1) if of_tokens else results[-1]
    if type(first) is tuple:
        return tuple(_join(list(each), lengths) for each in zip(*results, strict=True))
    return results[-1]
