"""ForwardBackward on Tinker's wire: read a request as our command, and write its result.

A datum there has a `model_input` and, by position, the `target_tokens` that follow it. Ours is one
sequence: the input and the last target. Numbers belong to targets there, and to tokens here, one
place later. Read next: protobuf.py; cray_agents/training_commands.py.
"""

import struct
from typing import Any, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.runtime.disk.turns import between_pieces
from cray_agents.runtime.gateway.http.bodies import parse
from cray_agents.runtime.gateway.http.bounds import MAX_DATUM, too_many
from cray_agents.runtime.gateway.tinker.protobuf import (
    Fields,
    message,
    messages,
    read_fields,
    real,
    text,
    whole,
    write_bytes,
    write_real,
    write_whole,
)
from cray_agents.training_commands import CommandResult, ForwardBackward

#: The losses that are served, with the columns that each reads beside the targets.
COLUMNS: dict[str, set[str]] = {
    "cross_entropy": {"weights"},
    "importance_sampling": {"logprobs", "advantages"},
    "ppo": {"logprobs", "advantages"},
    "cispo": {"logprobs", "advantages"},
}
CLIPPED = ("ppo", "cispo")  # losses with the bounds of `loss_fn_config`
BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}  # by default, as ours
LEAST = 1e-30  # weight of a token that is only asked for its log-probability
TARGETS = "target_tokens"
DTYPES = {1: "f", 2: "q", 3: "i"}  # of tensors: float32, int64, int32

Numbers = list[float]


class TinkerPass(NamedTuple):
    """A request for a pass: the model, the number of the request, and our command."""

    model_id: str
    sequence: int
    command: ForwardBackward


def read_request(body: bytes) -> TinkerPass:
    """Return a request for a forward or a forward and backward pass. Raises BadInput."""
    fields = read_fields(body)
    loss, backward = text(fields, 4), not whole(fields, 6)
    if loss not in COLUMNS:
        raise BadInput(
            f"loss_fn {loss[:100]!r} is not served: use {', '.join(COLUMNS)}, or"
            " forward_backward_custom with a function of your own",
            param="loss_fn",
        )
    data = [_TargetRow.read(datum, index, loss) for index, datum in enumerate(messages(fields, 3))]
    unweighted = not any(any(row.weights) for row in data)
    rows = [row.datum(whole_row=not backward or unweighted) for row in data]
    body_ = {"data": rows, "loss": loss, "backward": backward, **_clipping(fields, loss)}
    return TinkerPass(text(fields, 1), whole(fields, 2), parse(ForwardBackward, body_))


def write_result(result: CommandResult) -> bytes:
    """Return the result of a pass, with the log-probabilities of each datum's targets."""
    rows = [row[1:] for row in result.logprobs or []]
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + 4 * len(row))
    values = [value for row in rows for value in row]
    tensor = (
        write_bytes(1, struct.pack(f"<{len(values)}f", *values))
        + write_bytes(2, struct.pack(f"<{len(offsets)}q", *offsets))
        + write_whole(3, 1)
    )
    named = write_bytes(1, b"logprobs") + write_bytes(2, tensor)
    record = write_bytes(2, named) + write_whole(3, len(rows))
    metrics = {"loss:sum": result.loss or 0.0}
    metrics |= {f"{name}:mean": value for name, value in result.measures.items()}
    return (
        write_bytes(1, b"ArrayRecord")
        + write_bytes(2, record)
        + b"".join(
            write_bytes(3, write_bytes(1, name.encode()) + write_real(2, value))
            for name, value in metrics.items()
        )
    )


class _TargetRow(NamedTuple):
    """A datum: our tokens, and lists with a number for each target."""

    tokens: list[int]
    valid: list[bool]  # the target is the token that follows
    weights: Numbers
    columns: dict[str, Numbers]

    @classmethod
    def read(cls, content: bytes, index: int, loss: str) -> "_TargetRow":
        """Return a datum of a request. Raises BadInput, which names what is not served."""
        between_pieces()
        fields, place = read_fields(content), f"data[{index}]"
        inputs = _input_tokens(fields, place)
        columns = _columns(fields, place)
        targets = [int(target) for target in columns.pop(TARGETS, [])]
        if len(targets) != len(inputs) or not inputs:
            raise BadInput(
                f"{place} has {len(inputs)} tokens and {len(targets)} target_tokens: each token"
                " needs the one that follows it",
                param=TARGETS,
            )
        for name, values in columns.items():
            if name not in COLUMNS[loss]:
                raise BadInput(f"{place}: {loss} does not read {name!r}", param=name)
            if len(values) != len(targets):
                raise BadInput(
                    f"{place}: {name} has {len(values)} numbers for {len(targets)} targets",
                    param=name,
                )
        tokens = [*inputs, max(0, targets[-1])]
        valid = [token == target for token, target in zip(tokens[1:], targets, strict=True)]
        weights = columns.pop("weights", None) or _marks(columns, len(targets))
        for number, weight in enumerate(weights):
            if weight and not valid[number]:
                raise BadInput(
                    f"{place}: target_tokens[{number}] is {targets[number]}, and the token after"
                    f" it is {tokens[number + 1]}: only the next token is trained on",
                    param=TARGETS,
                )
        return cls(tokens, valid, weights, columns)

    def datum(self, *, whole_row: bool) -> dict[str, Any]:
        """Return our datum; with `whole_row` all of its tokens get a log-probability."""
        weights = self.weights
        if whole_row:
            pairs = zip(weights, self.valid, strict=True)
            weights = [weight or (LEAST if valid else 0.0) for weight, valid in pairs]
        shifted = {name: [0.0, *values] for name, values in self.columns.items()}
        return {"token_ids": self.tokens, "weights": [0.0, *weights], **shifted}


def _marks(columns: dict[str, Numbers], length: int) -> Numbers:
    """Return 1 for the sampled tokens, and for all where nothing says which were sampled.

    Scripts pad the prompt with zeros.
    """
    if not columns:
        return [1.0] * length
    return [float(any(numbers)) for numbers in zip(*columns.values(), strict=True)]


def _input_tokens(fields: Fields, place: str) -> list[int]:
    tokens: list[int] = []
    for chunk in map(read_fields, messages(fields, 1)):
        if set(chunk) - {1}:
            raise BadInput(f"{place}: only tokens are served, no images or sound", param="data")
        tokens += map(int, _unpack(message(read_fields(message(chunk, 1)), 1), "i", place))
    return tokens


def _columns(fields: Fields, place: str) -> dict[str, Numbers]:
    columns = {}
    for entry in map(read_fields, messages(fields, 2)):
        name, tensor = text(entry, 1), read_fields(message(entry, 2))
        kind = DTYPES.get(whole(tensor, 3))
        if 2 in tensor or kind is None or not _is_flat(tensor):
            raise BadInput(
                f"{place}: {name[:100]} must be a dense list of float32 or int64, one for each"
                " target: several targets at a position are not served",
                param=name[:100],
            )
        columns[name] = _unpack(message(tensor, 1), kind, place)
    return columns


def _is_flat(tensor: Fields) -> bool:
    """Tell whether a tensor has at most one dimension; numbers may come packed."""
    sizes = 0
    for value in tensor.get(4, []):
        sizes += 1 if isinstance(value, int) else sum(byte < 0x80 for byte in value)
    return sizes <= 1


def _unpack(content: bytes, kind: str, place: str) -> Numbers:
    size = struct.calcsize(f"<{kind}")
    if len(content) > size * MAX_DATUM:
        raise too_many(len(content) // size, MAX_DATUM, f"numbers in {place}", "data")
    if len(content) % size:
        raise BadInput(f"{place}: a tensor of {len(content)} bytes is cut off", param="data")
    return list(struct.unpack(f"<{len(content) // size}{kind}", content))


def _clipping(fields: Fields, loss: str) -> dict[str, float]:
    """Return the bounds of the ratio as our command has them. Raises BadInput."""
    given: dict[str, float] = {}
    for entry in map(read_fields, messages(fields, 5)):
        given[text(entry, 1)] = real(entry, 2)
    for entry in map(read_fields, messages(fields, 7)):
        value = read_fields(message(entry, 2))
        if 2 in value:
            raise BadInput(f"loss_fn_config: {text(entry, 1)[:100]!r} must be a number")
        given[text(entry, 1)] = real(value, 1)
    known = BOUNDS if loss in CLIPPED else {}
    for name in given:
        if name not in known:
            raise BadInput(
                f"loss_fn_config: {loss} has no {name[:100]!r}; it has"
                f" {', '.join(known) or 'no settings'}",
                param="loss_fn_config",
            )
    if not known:
        return {}
    bounds = BOUNDS | given
    low, high = bounds.values()
    if not (0 < low < 1 < high):
        raise BadInput(
            f"loss_fn_config: the bounds {low} and {high} must lie on both sides of 1, above 0",
            param="loss_fn_config",
        )
    return {"clip_low": 1 - low, "clip_high": high - 1}
