"""Backends: build, fill and export a model by the backend that its Architecture names.

    megatron         Megatron's layers (model.py), whose weights weights.py converts
    transformers     transformers' own module (transformers_backend/), with data parallelism alone
    megatron-bridge  Megatron's layers, as Megatron-Bridge builds and converts them
                     (megatron_bridge/)

training/train_step.py and checkpointing/hf_export.py call these; they know no difference.
architecture.py chooses the backend. With transformers every data rank has the whole network, or
shards of it; parameters that make tensors of the files together (ExportUnit) are written by one
rank.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from cray_agents.errors import BadInput
from cray_agents.runtime.registry.foreign_model import read_config, with_whole_references
from cray_agents.trainers.models.architecture import SUPPORTED, Architecture
from cray_agents.trainers.models.layer_choice import LayerChoice
from cray_agents.trainers.models.lora import add_lora, continued_base, without_adapters
from cray_agents.trainers.models.megatron_bridge.bridged_kinds import BRIDGE
from cray_agents.trainers.models.megatron_bridge.bridged_model import (
    BridgedParent,
    build_bridged,
    fill_bridged,
    plan_bridged,
    stored_types_of_bridged,
)
from cray_agents.trainers.models.model import build_model, layers_of
from cray_agents.trainers.models.tensors import tensor_shapes
from cray_agents.trainers.models.transformers_backend.causal_model import Agree, build_transformers
from cray_agents.trainers.models.transformers_backend.initial_weights import initial_weights
from cray_agents.trainers.models.transformers_backend.linear_adapter import add_adapters
from cray_agents.trainers.models.transformers_backend.parent_files import ExportUnit, ParentFiles
from cray_agents.trainers.models.transformers_backend.weight_shards import WeightShards
from cray_agents.trainers.models.weights import (
    FilePlan,
    SafeTensors,
    Source,
    choose_writers,
    export_pieces,
    load_weights,
    plan_export,
    round_weights,
    stored_types_of,
    weight_source,
)
from cray_agents.training_jobs import Hyperparameters, Layout, Lora

AnySource = Source | ParentFiles | BridgedParent


def choose_layers_of(model: Architecture, layout: Layout, dtype: str, on_cpu: bool) -> LayerChoice:
    """Return the layers that `build_chunks` makes. Megatron must be loaded."""
    if model.backend == "megatron":
        return layers_of(model, layout, dtype, on_cpu)
    why = f"there are no Megatron layers for {model.kind}"
    if model.kind in SUPPORTED:
        why = f"backend={model.backend} was asked for"
    if model.backend == "megatron-bridge":
        layers = "torch and the CPU kernels of cray-agents" if on_cpu else "Transformer Engine"
        return LayerChoice(not on_cpu, False, False, f"{layers}, built by {BRIDGE}: {why}")
    return LayerChoice(False, False, False, f"transformers' {model.network}: {why}")


def first_source(parent: Path, model: Architecture, hyper: Hyperparameters) -> AnySource:
    """Return the source of a job's first weights. Raises BadInput, NotFound, Corrupt.

    Adapters that the job goes on with are not in them: see `load_adapters`.
    """
    parent = continued_base(parent, hyper.lora) or parent
    if model.backend != "megatron":
        if hyper.init == "random":
            parent = initial_weights(parent, hyper.seed)
        return source_of(parent, model)
    return weight_source(parent, model, hyper)


def source_of(checkpoint: Path, model: Architecture) -> AnySource:
    """Return a checkpoint's weights. Raises BadInput, NotFound."""
    if model.backend == "transformers":
        return ParentFiles(checkpoint)
    if model.backend == "megatron-bridge":
        return BridgedParent(ParentFiles(checkpoint))
    return SafeTensors(checkpoint, tied=model.tied)


def build_chunks(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    on_cpu: bool,
    recompute: str,
    source: AnySource,
    agree: Agree,
    *,
    loaded: bool = True,
) -> list[Any]:
    """Build this rank's chunks of a model with their weights. Collective.

    `agree` returns rank 0's value, which JSON can hold, on every rank. Without `loaded` the caller
    puts the weights in place; the transformers backend loads them in any case. Where ranks keep
    shards, the chunks have no weights yet: `fill_chunks` fills them once they are divided.
    """
    if isinstance(source, ParentFiles):
        device = torch.device("cpu" if on_cpu else "cuda")
        sharded = layout.sharding == "full"
        chunk = build_transformers(model, hyper, source, device, recompute, agree, sharded=sharded)
        check_types(chunk.network, source)
        return [chunk]
    if isinstance(source, BridgedParent):
        return build_bridged(model, layout, hyper, on_cpu, recompute, source, loaded=loaded)
    chunks = build_model(model, layout, hyper, on_cpu, recompute)
    if loaded:
        load_weights(chunks, model, source)
    return chunks


def fill_chunks(
    chunks: list[Any],
    model: Architecture,
    source: AnySource,
    put: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_,
) -> None:
    """Fill chunks that are built with other weights of the same model. Raises BadInput.

    `put` copies a weight into the model's tensor; megatron-bridge and shards have another.
    """
    if isinstance(source, BridgedParent):
        fill_bridged(chunks, source)
        return
    if not isinstance(source, ParentFiles):
        load_weights(chunks, model, source, put)
        return
    if (shards := chunks[0].shards) is not None:
        shards.forget_gathered()
        put = shards.put
    with without_adapters(chunks):  # the files know the layers without them
        source.fill(chunks[0].network, put)


StoredTypes = dict[torch.Tensor, set[torch.dtype]]  # by weight of this rank


def stored_types(chunks: list[Any], model: Architecture, source: AnySource) -> StoredTypes:
    """Return the types that each weight of this rank is stored in, mostly one. Collective."""
    with without_adapters(chunks):
        if isinstance(source, ParentFiles):
            return dict(stored_types_in(chunks[0].network, source))
        if isinstance(source, BridgedParent):
            return dict(stored_types_of_bridged(chunks, source))
        return dict(stored_types_of(chunks, model, source))


def adapt_chunks(
    chunks: list[Any], model: Architecture, lora: Lora, seed: int, source: AnySource
) -> None:
    """Freeze a model's chunks and add adapters to its linear layers. Raises BadInput.

    `source`: what the chunks were built with.
    """
    if isinstance(source, ParentFiles):
        add_adapters(chunks[0].network, lora, seed, source.adapter_names())
        chunks[0].train()
    else:
        add_lora(chunks, model, lora, seed)


@torch.no_grad()
def round_chunks(chunks: list[Any], model: Architecture, source: AnySource) -> None:
    """Round this rank's weights to the stored types of their tensors. Collective."""
    if not isinstance(source, ParentFiles | BridgedParent):
        round_weights(chunks, model, source)  # one weight may have tensors of several types
        return
    if (shards := getattr(chunks[0], "shards", None)) is not None:
        shards.forget_gathered()
    for weight, (stored,) in stored_types(chunks, model, source).items():
        own = weight if shards is None else shards.own(weight)
        if own.is_floating_point():
            own.copy_(own.to(stored))


def plan_files(
    chunks: list[Any],
    model: Architecture,
    source: AnySource,
    order: Callable[[Mapping[str, torch.dtype]], list[str]],
    share: int,
    of: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> FilePlan:
    """Divide a checkpoint's tensors among the ranks; `order` sorts names for the files.

    `of` returns what is written of a weight. The adapters are off: see `without_adapters`.
    """
    if isinstance(source, ParentFiles):
        return plan_units(chunks[0].network, source, order, share, chunks[0].shards, of)
    if isinstance(source, BridgedParent):
        return plan_bridged(chunks, source, order)
    shapes = tensor_shapes(model)
    dtypes = {name: source.dtype(name) for name in shapes}
    sizes = {n: prod(shapes[n]) * dtypes[n].itemsize for n in order(dtypes)}
    plan = plan_export(chunks, model, sizes, share)
    mine = order({n: dtypes[n] for one in plan if one.mine for n in one.origin.names})
    return FilePlan(dtypes, shapes, sizes, mine, lambda: export_pieces(plan, model, of))


def config_of(parent: Path, source: AnySource) -> dict[str, Any]:
    """Return the config.json of an export: the parent's, or that of its dequantised weights.

    References to code in a directory that may be run lead to that directory from anywhere.
    """
    files = source.files if isinstance(source, BridgedParent) else source
    config = files.config if isinstance(files, ParentFiles) else read_config(parent)
    return with_whole_references(config, parent)


def stored_types_in(
    network: Any, source: ParentFiles
) -> Iterator[tuple[torch.Tensor, set[torch.dtype]]]:
    """Yield the network's tensors, each with the type that it is stored in."""
    for unit in source.units(network):
        for name in unit.parameters:
            yield _tensor(network, name), {_stored_type(unit)}


def check_types(network: Any, source: ParentFiles) -> None:
    """Raise BadInput for weights that could not be rounded to a type of the files."""
    for unit in source.units(network):
        _stored_type(unit)


def _stored_type(unit: ExportUnit) -> torch.dtype:
    types = {dtype for dtype, _ in unit.tensors.values()}
    if len(types) > 1 and unit.parameters:
        raise BadInput(
            f"{', '.join(sorted(unit.tensors)[:3])} make one weight of the network and are stored"
            " in several types: save them in one",
            param="parent",
        )
    return next(iter(types))


def _tensor(network: Any, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(network.get_submodule(owner), leaf)
    return tensor


def _gathered(wholes: Mapping[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return wholes[id(tensor)].detach()


def plan_units(
    network: Any,
    source: ParentFiles,
    order: Callable[[Mapping[str, torch.dtype]], list[str]],
    share: int,
    shards: WeightShards | None,
    of: Callable[[torch.Tensor], torch.Tensor],
) -> FilePlan:
    """Divide the units among the data ranks; `order` sorts names for the files.

    `of` returns what is written of a weight. With `shards` the writers' tensors are gathered: all
    ranks must iterate them together.
    """
    from megatron.core import parallel_state as ps

    units = source.units(network)
    tensors = {name: each for unit in units for name, each in unit.tensors.items()}
    dtypes = {name: dtype for name, (dtype, _) in tensors.items()}
    shapes = {name: tuple(shape) for name, (_, shape) in tensors.items()}
    sizes = {name: prod(shapes[name]) * dtypes[name].itemsize for name in order(dtypes)}
    of_units = [sum(sizes[name] for name in unit.tensors) for unit in units]
    writers = choose_writers(of_units, ps.get_data_parallel_world_size(), share)
    rank, place = ps.get_data_parallel_rank(), {name: n for n, name in enumerate(sizes)}
    written = sorted(
        zip(units, writers, strict=True), key=lambda each: min(place[n] for n in each[0].tensors)
    )
    mine = [unit for unit, writer in written if writer == rank]

    def exported() -> Iterator[tuple[str, torch.Tensor]]:
        if shards is None:
            for unit in mine:
                yield from source.export(network, unit, of)
            return
        gathered: dict[int, torch.Tensor] = {}
        for unit, writer in written:
            tensors = [_tensor(network, name) for name in unit.parameters]
            wholes = {id(tensor): shards.whole(tensor, gathered) for tensor in tensors}
            if writer == rank:
                yield from source.export(network, unit, partial(_gathered, wholes))

    names = order({name: dtypes[name] for unit in mine for name in unit.tensors})
    return FilePlan(dtypes, shapes, sizes, names, exported)
