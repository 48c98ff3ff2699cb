"""Weights: convert between a Hugging Face directory and a Megatron GPTModel spread over ranks.

One table maps each Megatron parameter to its Hugging Face tensors. Loading reads this rank's slices
of these and packs them. Exporting divides the parameters among all ranks that hold them: each is
gathered on its own writer and unpacked there, one parameter at a time. The table has the names of
torch's and Transformer Engine's layers; weights under an adapter (lora.py) keep their entries.
backends.py loads, checkpointing/hf_export.py exports. InitialWeights stand in for the
files of a model that starts at random.
"""

import hashlib
import heapq
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cray_agents.errors import BadInput, NotFound
from cray_agents.runtime.registry.adapters import SavedAdapter
from cray_agents.runtime.registry.checkpoints import base_of
from cray_agents.runtime.registry.foreign_model import EMBEDDING, HEAD, read_weights
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.tensors import hf_name, tensor_shapes
from cray_agents.trainers.progress import CLOCK
from cray_agents.training_jobs import Hyperparameters

# Megatron's name inside a layer -> (rule of packing, its Hugging Face tensors)
_LAYER = {
    "input_layernorm.weight": ("whole", ["input_layernorm.weight"]),
    "self_attention.linear_qkv.layer_norm_weight": ("whole", ["input_layernorm.weight"]),
    "self_attention.linear_qkv.weight": ("qkv", [f"self_attn.{x}_proj.weight" for x in "qkv"]),
    "self_attention.linear_qkv.bias": ("qkv", [f"self_attn.{x}_proj.bias" for x in "qkv"]),
    "self_attention.q_layernorm.weight": ("whole", ["self_attn.q_norm.weight"]),
    "self_attention.k_layernorm.weight": ("whole", ["self_attn.k_norm.weight"]),
    "self_attention.linear_proj.weight": ("columns", ["self_attn.o_proj.weight"]),
    "pre_mlp_layernorm.weight": ("whole", ["post_attention_layernorm.weight"]),
    "mlp.linear_fc1.layer_norm_weight": ("whole", ["post_attention_layernorm.weight"]),
    "mlp.linear_fc1.weight": ("pair", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
    "mlp.linear_fc2.weight": ("columns", ["mlp.down_proj.weight"]),
    "mlp.router.weight": ("whole", ["mlp.gate.weight"]),
}
_TOP = {
    "embedding.word_embeddings.weight": ("rows", ["model.embed_tokens.weight"]),
    "decoder.final_layernorm.weight": ("whole", ["model.norm.weight"]),
    "output_layer.weight": ("rows", ["lm_head.weight"]),
}
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_(fc[12])\.weight|linear_(fc[12])\.weight(\d+))"
)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class InitialWeights:
    """Random tensors by their Hugging Face names, made on access. Raises BadInput for an odd dtype.

    As in transformers, matrices are normal with the config's `initializer_range`, norms are ones
    and biases zeros. Each tensor has its own generator, seeded by its name, so that every layout
    starts from the same model.

    A device's generator makes numbers of its own, so jobs make theirs on the CPU. A GPU is much
    quicker, for measurements.
    """

    def __init__(self, model: Architecture, seed: int, device: str = "cpu") -> None:
        if model.dtype not in _STORED:
            raise BadInput(
                f"config.json has dtype={model.dtype!r}; use one of {', '.join(_STORED)}"
            )
        self.model, self.seed, self.device = model, seed, device
        self._shapes = tensor_shapes(model)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        if len(shape) == 1:
            fill = torch.zeros if name.endswith(".bias") else torch.ones
            return fill(shape, device=self.device)
        seed = hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:8]
        generator = torch.Generator(self.device)
        generator.manual_seed(int.from_bytes(seed, "little") >> 1)
        tensor = torch.empty(shape, device=self.device)
        return tensor.normal_(0.0, self.model.init_std, generator=generator)

    def share(self, name: str, axis: int, start: int, end: int) -> torch.Tensor:
        """Return start..end along an axis, cut from the whole tensor."""
        return self[name].narrow(axis, start, end - start)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the type in which the checkpoint will be stored."""
        return _STORED[self.model.dtype]


class SafeTensors:
    """The tensors of a checkpoint directory by name, in one file or many. Nothing is unpickled.

    `tied`: embedding and head are one, under either name. An adapter version's are those of its
    base, merged as they are read. Raises NotFound without safetensors, BadInput for a tensor that
    is missing or not of a float type.
    """

    def __init__(self, folder: Path, *, tied: bool = False) -> None:
        self.folder = base_of(folder) or folder
        self._adapter = None if self.folder == folder else SavedAdapter(folder)
        folder = self.folder
        stored = read_weights(folder.resolve())
        if not stored:
            raise NotFound(f"{folder} holds no model.safetensors; other formats are not read")
        self._file_of = {name: tensor.file for name, tensor in stored.items()}
        if self._adapter is not None:
            self._adapter.refuse_unknown(name.removesuffix(".weight") for name in stored)
        # like transformers, read tied embeddings from the head if only that is stored
        self._aliases = {EMBEDDING: HEAD} if tied and EMBEDDING not in stored else {}
        self._files = {n: safe_open(folder / n, "pt") for n in set(self._file_of.values())}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._slice(name)[:]
        return self._merged(name, tensor)

    def share(self, name: str, axis: int, start: int, end: int) -> torch.Tensor:
        """Read start..end along an axis (0 or 1), and nothing else."""
        whole = self._slice(name)
        tensor: torch.Tensor = whole[start:end] if axis == 0 else whole[:, start:end]
        return self._merged(name, tensor, (*(slice(None),) * axis, slice(start, end)))

    def _merged(
        self, name: str, tensor: torch.Tensor, part: tuple[slice, ...] = ()
    ) -> torch.Tensor:
        if self._adapter is None:
            return tensor
        return self._adapter.merged(name.removesuffix(".weight"), tensor, part)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's stored type."""
        dtype = self._slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise BadInput(
                f"{self.folder}: {name!r} is stored as {dtype}; supported are {', '.join(_DTYPES)}"
            )
        return _DTYPES[dtype]

    def _slice(self, name: str) -> Any:
        name = self._aliases.get(name, name)
        if name not in self._file_of:
            raise BadInput(f"{self.folder} lacks the tensor {name!r} that its config.json implies")
        CLOCK.tick()
        file: Any = self._files[self._file_of[name]]
        return file.get_slice(name)


Source = SafeTensors | InitialWeights


def weight_source(checkpoint: Path, model: Architecture, hyper: Hyperparameters) -> Source:
    """Return the source of a job's first weights: the parent's files, or a seed alone."""
    if hyper.init == "random":
        return InitialWeights(model, hyper.seed)
    return SafeTensors(checkpoint, tied=model.tied)


class Origin:
    """The origin of one local parameter: its rule of packing and its Hugging Face tensors."""

    def __init__(self, chunk: Any, name: str, model: Architecture) -> None:
        self.expert = False
        name = name.replace(".base.", ".")
        if name in _TOP:
            self.how, self.names = _TOP[name]
            if name == "output_layer.weight" and model.tied:
                self.names = ["model.embed_tokens.weight"]
            return
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        if match is None:
            raise BadInput(f"no rule for Megatron's parameter {name!r}")
        local, rest = match.groups()
        prefix = f"model.layers.{chunk.decoder.layers[int(local)].layer_number - 1}."
        if expert := _EXPERT.fullmatch(rest):
            self.expert = True
            self.how, names = _of_expert(expert, model)
        else:
            self.how, names = _LAYER[rest]
        self.names = [prefix + hf_name(model, name) for name in names]

    def ranks(self) -> tuple[int, int, Any]:
        """Return (rank, size, group) of the tensor parallelism that splits this parameter."""
        from megatron.core import parallel_state as ps

        if self.expert:
            group = ps.get_expert_tensor_parallel_group()
        else:
            group = ps.get_tensor_model_parallel_group()
        return group.rank(), group.size(), group

    def replicas(self) -> tuple[int, int]:
        """Return (rank, size) of the data parallelism: the ranks that hold the same slice."""
        from megatron.core import parallel_state as ps

        if self.expert:
            return ps.get_expert_data_parallel_rank(), ps.get_expert_data_parallel_world_size()
        return (
            ps.get_data_parallel_rank(with_context_parallel=True),
            ps.get_data_parallel_world_size(with_context_parallel=True),
        )


def _of_expert(match: re.Match[str], model: Architecture) -> tuple[str, list[str]]:
    from megatron.core import parallel_state as ps

    local, kind = match[1] or match[4], match[2] or match[3]
    per_rank = (model.experts or 0) // ps.get_expert_model_parallel_world_size()
    number = int(local) + per_rank * ps.get_expert_model_parallel_rank()
    how, names = ("pair", ["gate_proj", "up_proj"]) if kind == "fc1" else ("columns", ["down_proj"])
    return how, [f"mlp.experts.{number}.{name}.weight" for name in names]


def split_axis(how: str) -> int | None:
    """Return the axis of the Hugging Face tensors that tensor ranks split; None for no split."""
    return {"qkv": 0, "rows": 0, "pair": 0, "columns": 1}.get(how)


def pack(how: str, tensors: list[torch.Tensor], model: Architecture) -> torch.Tensor:
    """Pack a rank's slices of Hugging Face tensors into Megatron's one tensor, [out, ...]."""
    if how == "qkv":  # per query group: its query heads, its key head, its value head
        groups = len(tensors[1]) // model.head_size
        heads = [t.reshape(groups, -1, model.head_size, *t.shape[1:]) for t in tensors]
        return torch.cat(heads, 1).flatten(0, 2)
    return torch.cat(tensors)


def unpack(how: str, slices: list[torch.Tensor], model: Architecture) -> list[torch.Tensor]:
    """Invert `pack` for the slices of all tensor ranks, or of some in order.

    The vocabulary's padding is cut off. Of a single slice, most tensors are views.
    """
    return [p[0] if len(p) == 1 else torch.cat(p) for p in unpack_pieces(how, slices, model)]


def unpack_pieces(
    how: str, slices: Sequence[torch.Tensor], model: Architecture
) -> list[list[torch.Tensor]]:
    """Do as `unpack`, and leave each tensor in pieces along axis 0, mostly views."""
    if how == "whole":
        return [list(slices[:1])]
    if how == "columns":
        return [[slices[0] if len(slices) == 1 else torch.cat(list(slices), 1)]]
    pieces = zip(*(_tensors_of(how, one, model) for one in slices), strict=True)
    if how != "rows":
        return [list(each) for each in pieces]
    cut, left = [], model.vocab
    for piece in next(pieces):
        cut.append(piece[:left])
        left = max(0, left - len(piece))
    return [cut]


def _tensors_of(how: str, one: torch.Tensor, model: Architecture) -> Sequence[torch.Tensor]:
    """Return one slice's rows of each Hugging Face tensor."""
    if how == "qkv":
        queries = model.heads // model.kv_heads
        groups = one.reshape(-1, queries + 2, model.head_size, *one.shape[1:])
        heads = groups[:, :queries], groups[:, queries : queries + 1], groups[:, queries + 1 :]
        return [each.flatten(0, 2) for each in heads]
    return one.chunk(2) if how == "pair" else [one]


def weights_of(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield a chunk's own parameters by name, without the adapters' (lora.py)."""
    for name, parameter in chunk.named_parameters():
        if not name.endswith((".a", ".b")):
            yield name, parameter


@torch.no_grad()
def load_weights(
    chunks: list[Any],
    model: Architecture,
    source: Source,
    put: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_,
) -> None:
    """Fill this rank's chunks, one parameter after the other; padding becomes zeros.

    `put` copies a weight into its parameter. Raises BadInput if a tensor is missing or has another
    shape than config.json implies.
    """
    expected = tensor_shapes(model)
    for chunk in chunks:
        for name, parameter in weights_of(chunk):
            origin = Origin(chunk, name, model)
            rank, size, _ = origin.ranks()
            axis, slices = split_axis(origin.how), []
            for wanted in origin.names:
                if source.shape(wanted) != expected[wanted]:
                    raise BadInput(
                        f"{wanted} has the shape {list(source.shape(wanted))}, and config.json"
                        f" implies {list(expected[wanted])}: they are of different models"
                    )
                if axis is None or size == 1:
                    slices.append(source[wanted])
                    continue
                whole = expected[wanted][axis]
                share = -(-whole // size)
                start, end = (min(whole, share * place) for place in (rank, rank + 1))
                slices.append(source.share(wanted, axis, start, end))
            packed = pack(origin.how, slices, model)
            if filler := len(parameter) - len(packed):
                packed = torch.cat([packed, packed.new_zeros(filler, *packed.shape[1:])])
            put(parameter, packed)


def stored_types_of(
    chunks: list[Any], model: Architecture, source: Source
) -> Iterator[tuple[torch.Tensor, set[torch.dtype]]]:
    """Yield this rank's parameters, each with the types that its tensors are stored in."""
    for chunk in chunks:
        for name, parameter in weights_of(chunk):
            yield parameter, {source.dtype(n) for n in Origin(chunk, name, model).names}


@torch.no_grad()
def round_weights(chunks: list[Any], model: Architecture, source: Source) -> None:
    """Round this rank's weights to the stored types of their tensors."""
    for chunk in chunks:
        for name, parameter in weights_of(chunk):
            origin = Origin(chunk, name, model)
            if all(source.dtype(wanted) == parameter.dtype for wanted in origin.names):
                continue
            tensors = zip(unpack(origin.how, [parameter], model), origin.names, strict=True)
            rounded = [t.to(source.dtype(n)).to(parameter.dtype) for t, n in tensors]
            packed = pack(origin.how, rounded, model)
            parameter[: len(packed)] = packed


@dataclass(frozen=True)
class ExportedParameter:
    """A parameter that this rank's tensor group writes, and the tensor rank that writes it."""

    chunk: Any
    name: str
    origin: Origin
    writer: int

    @property
    def mine(self) -> bool:
        """True on the rank that writes the parameter's tensors."""
        return self.origin.ranks()[0] == self.writer


@dataclass(frozen=True)
class FilePlan:
    """The tensors of a checkpoint, and this rank's share of them.

    `sizes`: bytes by name, in the order of writing. `mine` are the names that this rank writes,
    `tensors` yields them nearly in that order, each whole or in pieces along axis 0; all ranks must
    iterate together, to the end.
    """

    dtypes: dict[str, torch.dtype]
    shapes: dict[str, tuple[int, ...]]
    sizes: dict[str, int]
    mine: list[str]
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]


AHEAD_BYTES = 64 << 20  # of slices that travel while others are written
SHARE_BYTES = 256 << 20  # at least, before another rank writes too


def plan_export(
    chunks: list[Any], model: Architecture, sizes: dict[str, int], share: int = SHARE_BYTES
) -> list[ExportedParameter]:
    """Divide the parameters among the ranks that hold them; return this tensor group's share.

    `sizes` are the bytes of all tensors, in the order of writing. The largest parameter goes first,
    each to the writer with the fewest bytes. Writers are taken from different replicas before
    different tensor ranks, so that they spread over nodes. There are as few as give each `share`
    bytes: a small model is written by the first holders alone. All holders compute the same plan.
    """
    place = {name: number for number, name in enumerate(sizes)}
    dense: list[tuple[Any, str, Origin]] = []
    experts: list[tuple[Any, str, Origin]] = []
    for chunk in chunks:
        for name, _ in weights_of(chunk):
            if name == "output_layer.weight" and model.tied:
                continue  # stored as the embedding, which the first pipeline stage has
            origin = Origin(chunk, name, model)
            (experts if origin.expert else dense).append((chunk, name, origin))
    plan: list[ExportedParameter] = []
    for parameters in filter(None, (dense, experts)):
        plan += _divide(parameters, sizes, share)
    return sorted(plan, key=lambda one: min(place[name] for name in one.origin.names))


def _divide(
    parameters: list[tuple[Any, str, Origin]], sizes: dict[str, int], share: int
) -> list[ExportedParameter]:
    """Choose the writers of parameters that the same ranks hold; return this replica's."""
    origin = parameters[0][2]
    replica, replicas = origin.replicas()
    size_of = [sum(sizes[name] for name in one.names) for _, _, one in parameters]
    writers = choose_writers(size_of, replicas * origin.ranks()[1], share)
    return [
        ExportedParameter(*one, writer // replicas)
        for one, writer in zip(parameters, writers, strict=True)
        if writer % replicas == replica
    ]


def choose_writers(sizes: Sequence[int], holders: int, share: int) -> list[int]:
    """Return each part's writer, of so many holders; see `plan_export`. `sizes` are in bytes."""
    loads = [(0, writer) for writer in range(min(holders, max(1, -(-sum(sizes) // share))))]
    chosen = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        load, chosen[number] = loads[0]
        heapq.heapreplace(loads, (load + sizes[number], chosen[number]))
    return chosen


def export_tensors(
    plan: Sequence[ExportedParameter],
    model: Architecture,
    of: Callable[[torch.nn.Parameter], torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Do as `export_pieces`, with each tensor whole."""
    return whole_tensors(export_pieces(plan, model, of), tensor_shapes(model))


def whole_tensors(
    pieces: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Join the pieces of each tensor, which come in order along axis 0."""
    waiting: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, piece in pieces:
        waiting[name].append(piece)
        if sum(one.numel() for one in waiting[name]) == prod(shapes[name]):
            come = waiting.pop(name)
            yield name, come[0] if len(come) == 1 else torch.cat(come)


@torch.no_grad()
def export_pieces(
    plan: Sequence[ExportedParameter],
    model: Architecture,
    of: Callable[[torch.nn.Parameter], torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, piece) of what this rank writes, in the order of the plan.

    A tensor comes whole, or in pieces in order along axis 0. It is made of the weights, or of
    `of(parameter)`; these must not change before the end. All
    tensor ranks must iterate together, to the end: they send each writer their slices. Those of the
    next tensors travel while the present one is used.
    """
    ahead: deque[_TravellingSlices] = deque()
    size = 0
    for one in plan:
        parameter = one.chunk.get_parameter(one.name)
        mine = parameter if of is None else of(parameter)
        ahead.append(_TravellingSlices(one, mine.detach().contiguous()))
        size += ahead[-1].nbytes
        while size > AHEAD_BYTES:
            size -= ahead[0].nbytes
            yield from ahead.popleft().pieces(model)
    while ahead:
        yield from ahead.popleft().pieces(model)


class _TravellingSlices:
    """The slices of one parameter, on their way to the rank that writes it."""

    def __init__(self, one: ExportedParameter, mine: torch.Tensor) -> None:
        from torch.distributed import irecv, isend

        rank, size, group = one.origin.ranks()
        self._one, self._slices = one, [mine]
        self._works: list[Any] = []
        if one.origin.how != "whole" and size > 1:
            if one.mine:
                self._slices = [mine if n == rank else torch.empty_like(mine) for n in range(size)]
                self._works = [
                    irecv(tensor, group=group, group_src=n)
                    for n, tensor in enumerate(self._slices)
                    if n != rank
                ]
            else:
                self._works = [isend(mine, group=group, group_dst=one.writer)]
        self.nbytes = sum(tensor.nbytes for tensor in self._slices)

    def pieces(self, model: Architecture) -> list[tuple[str, torch.Tensor]]:
        """Wait for the slices; return the named pieces, on the rank that writes them."""
        for work in self._works:
            work.wait()
        if not self._one.mine:
            return []
        origin = self._one.origin
        named = zip(origin.names, unpack_pieces(origin.how, self._slices, model), strict=True)
        return [(name, piece) for name, pieces in named for piece in pieces]
