"""Packer: choose a step's samples, with the inputs of a loss, and pack them into micro-batches.

The samples of a step are a pure function of (seed, step), so that a resumed job sees the same ones
as an uninterrupted job. They are balanced over the data ranks by tokens, and packed without padding
and without attention between them. What prompts have in common, all of it in a group, else a system
message and tools, may be packed once. No torch. Read next: training/train_step.py.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cray_agents.trainers.data.samples import LEAST_SHARED, Floats, Ints, Samples
from cray_agents.training_jobs import Hyperparameters

#: Shared tokens that take the memory of one: each sequence has their keys and values, no more.
KEYS = 16


class Rows(Protocol):
    """Arrays [length] by sample: a list of them, or an object that makes each on access."""

    def __getitem__(self, place: int, /) -> Floats: ...


Columns = Mapping[str, Rows]


@dataclass(frozen=True)
class BaselineLogprobs:
    """Samples with named columns of numbers for their trained tokens.

    `mismatched` (kto) pairs their prompts with other samples' completions.
    `mismatched_reference`, [samples], is the reference's log-probability of these completions.
    """

    samples: Samples
    columns: Columns = field(default_factory=dict)
    mismatched: Samples | None = None
    mismatched_reference: Floats = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def marks(self) -> Ints:
        """The number of trained tokens of each sample, [samples]."""
        return self.samples.marks

    def weight_scale(self, indices: Sequence[int]) -> float:
        """Return the factor that makes the samples' mean weight 1 over their trained tokens."""
        marks, weights = self.marks[list(indices)], self.samples.weights[list(indices)]
        total = float((marks * weights).sum())
        return float(marks.sum()) / total if total > 0 else 0.0


@dataclass(frozen=True)
class TrainedTokenRows:
    """Rows, expanded from numbers of the trained tokens alone.

    `values`, by sample: [its trained tokens], or one number for all of them. Other places are 0.
    """

    masks: Sequence[Floats]
    values: Mapping[int, Floats | float]

    def __getitem__(self, place: int) -> Floats:
        mask = self.masks[place]
        row = np.zeros(len(mask), np.float32)
        row[1:][mask[1:] > 0] = self.values[place]
        return row


@dataclass(frozen=True)
class Packed:
    """A micro-batch of sequences one after the other; arrays are [tokens] unless noted.

    The label at place i is the sequence's next token. `mask` and `columns` describe the label.
    The first tokens of a sequence may be left out: one before it, its head, begins with them, and
    has them itself or by its own head.
    """

    tokens: Ints
    labels: Ints
    positions: Ints
    bounds: npt.NDArray[np.int32]  # [sequences + 1]: the start of each, and the end
    mask: Floats
    columns: dict[str, Floats]
    chosen: Floats  # [sequences]
    shared_tokens: Ints  # [sequences]: the number of its first tokens that are left out
    heads: Ints  # [sequences]: the sequence that begins with them; its own number if none are
    routes: Ints | None = None  # [tokens, numbers]: the experts of each; -1: unknown


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> Ints:
    return np.random.default_rng([seed, epoch]).permutation(size)


def step_units(
    hyper: Hyperparameters,
    step: int,
    weights: npt.NDArray[np.float64],
    groups: Ints | None = None,
) -> list[int]:
    """Return the units of a step (counted from 0), a pure function of the arguments.

    `groups`: see Samples.
    """
    if hyper.order == "weighted":
        random = np.random.default_rng([hyper.seed, step])
        chances = weights / weights.sum()
        return [int(i) for i in random.choice(len(weights), hyper.batch_size, p=chances)]
    places = range(step * hyper.batch_size, (step + 1) * hyper.batch_size)
    epochs = [divmod(place, len(weights)) for place in places]
    orders = {
        epoch: _by_group(_permutation(hyper.seed, epoch, len(weights)), groups)
        for epoch in {epoch for epoch, _ in epochs}
    }
    return [int(orders[epoch][i]) for epoch, i in epochs]


def _by_group(order: Ints, groups: Ints | None) -> Ints:
    """Let the units of each group follow the first of them in an order."""
    if groups is None:
        return order
    _, first = np.unique(groups[order], return_index=True)  # of groups, sorted by their numbers
    return order[np.argsort(first[groups[order]], kind="stable")]


def samples_to_train_on(hyper: Hyperparameters, samples: Samples) -> Sequence[int]:
    """Return the samples that a job's steps take, in order."""
    weights = samples.unit_weights
    if hyper.steps * hyper.batch_size >= len(weights):  # nearly all: drawing them is not worth it
        return range(len(samples))
    units = {
        unit
        for step in range(hyper.steps)
        for unit in step_units(hyper, step, weights, samples.groups)
    }
    return sorted(place for unit in units for place in samples.units[unit])


def balance(costs: Sequence[int], ranks: int, limit: int) -> list[list[list[int]]]:
    """Balance sequences of the given costs over ranks: rank -> micro-batch -> places in `costs`.

    Each sequence, longest first, goes to the rank with the fewest tokens, and there to the first
    micro-batch with room. All ranks get equally many micro-batches, some perhaps empty.
    """
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    sizes: list[list[int]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(costs)), key=lambda p: (-costs[p], p)):
        rank = loads.index(min(loads))
        loads[rank] += costs[place]
        room = (n for n, size in enumerate(sizes[rank]) if size + costs[place] <= limit)
        number = next(room, len(shares[rank]))
        if number == len(shares[rank]):
            shares[rank].append([])
            sizes[rank].append(0)
        shares[rank][number].append(place)
        sizes[rank][number] += costs[place]
    most = max(len(share) for share in shares)
    return [share + [[] for _ in range(most - len(share))] for share in shares]


def heads_of(samples: Samples, indices: Sequence[int], *, share: bool) -> list[tuple[int, int]]:
    """Return for each sample of a micro-batch (head, number of shared tokens), as in Packed.

    The head is the one before it, among those with a prompt, that begins with most of its prompt.
    """
    found = [(place, 0) for place in range(len(indices))]
    known: list[tuple[bytes, int]] = []  # sorted: no other two have more in common than neighbours
    for place, index in enumerate(indices if share else ()):
        if len(prompt := samples.prompt(index)):
            entry = samples.tokens[index].tobytes(), place
            after = bisect(known, entry)
            for _, head in known[max(after - 1, 0) : after + 1]:
                shared_tokens = common_tokens(prompt, samples.tokens[indices[head]][:-1])
                found[place] = max(found[place], (head, shared_tokens), key=itemgetter(1))
            known.insert(after, entry)
    return found


def common_tokens(one: Ints, other: Ints) -> int:
    """Return the number of first tokens that two sequences have in common; 0 if they are few."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    size = int(differ[0]) if len(differ) else size
    return size if size >= LEAST_SHARED else 0


def cost_of(samples: Samples, indices: Sequence[int], *, share: bool) -> int:
    """Return the tokens that samples add to a micro-batch; one in KEYS counts of shared ones."""
    shared_tokens = sum(number for _, number in heads_of(samples, indices, share=share))
    return sum(samples.cost(i) for i in indices) - _spared(shared_tokens)


def _spared(shared_tokens: int) -> int:
    return shared_tokens - shared_tokens // KEYS


def merged(
    samples: Samples, units: Sequence[Sequence[int]], limit: int, ranks: int, *, share: bool
) -> Sequence[Sequence[int]]:
    """Merge units that begin with the same prompt, as far as a micro-batch has room.

    Beside the prompt none becomes larger than a rank's share of all, so that every rank has work.
    """
    if not share:
        return units
    prompts = [samples.prompt(unit[0]) for unit in units]
    costs = [
        cost_of(samples, unit, share=True) - _spared(len(prompt))
        for unit, prompt in zip(units, prompts, strict=True)
    ]
    fair = sum(costs) // ranks
    pieces: list[list[int]] = []
    open_: dict[bytes, tuple[list[int], int]] = {}  # by prompt: what has room, and its cost
    for unit, prompt, cost in zip(units, prompts, costs, strict=True):
        piece, size = open_.get(prompt.tobytes(), ([], 0))
        if not len(prompt) or not piece or size + cost > min(fair, limit - len(prompt)):
            pieces.append(piece := [])
            size = 0
        piece += unit
        open_[prompt.tobytes()] = piece, size + cost
    return pieces


def pack(
    samples: Samples,
    indices: Sequence[int],
    columns: Columns | None = None,
    *,
    share: bool = False,
) -> Packed:
    """Pack samples into one micro-batch, with the columns' numbers of their tokens.

    `share`: what prompts have in common is packed once. Without samples the micro-batch is a
    single token with a mask of 0.
    """
    filler = 0 if indices else 1
    zeros = np.zeros(filler, np.int64)
    heads, shared_tokens = zip(*(heads_of(samples, indices, share=share) or [(0, 0)]), strict=True)
    own = list(zip(indices, shared_tokens, strict=False))
    lengths = [samples.cost(i) - first for i, first in own] or [1]

    def floats(rows: Rows) -> Floats:
        each = (rows[i][first + 1 :] for i, first in own)
        return np.concatenate([*each, zeros]).astype(np.float32)

    chosen = [samples.chosen[i] for i in indices] or [0.0]
    return Packed(
        tokens=np.concatenate([*(samples.tokens[i][first:-1] for i, first in own), zeros]),
        labels=np.concatenate([*(samples.tokens[i][first + 1 :] for i, first in own), zeros]),
        positions=np.concatenate(
            [np.arange(first, first + n) for n, first in zip(lengths, shared_tokens, strict=True)]
        ),
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        mask=floats(samples.masks),
        columns={name: floats(rows) for name, rows in (columns or {}).items()},
        chosen=np.array(chosen, np.float32),
        shared_tokens=np.array(shared_tokens),
        heads=np.array(heads),
        routes=np.concatenate([samples.routes[i][:-1] for i in indices])
        if samples.routes and indices
        else None,
    )


def microbatches(
    samples: Samples,
    units: Sequence[Sequence[int]],
    limit: int,
    rank: int,
    ranks: int,
    columns: Columns | None = None,
    rounds: int = 1,
    *,
    share: bool = False,
) -> tuple[list[Packed], list[list[int]]]:
    """Pack a data rank's share of units (samples that stay together); also return the members.

    All ranks get equally many micro-batches, a multiple of `rounds` (for interleaved pipelines).
    """
    prompts = sorted((samples.prompt(unit[0]) for unit in units if share), key=bytes)
    common = common_tokens(prompts[0], prompts[-1]) if prompts else 0  # to all of them
    units = merged(samples, units, limit, ranks, share=share)
    costs = [cost_of(samples, unit, share=share) - _spared(common) for unit in units]
    mine = balance(costs, ranks, limit - common)[rank]
    mine = mine + [[] for _ in range(-len(mine) % rounds)]
    members = [[i for place in batch for i in units[place]] for batch in mine]
    return [pack(samples, batch, columns, share=share) for batch in members], members
