"""Stored units: a network's weights rounded to the types of its files, and divided among writers.

Every data rank has the whole network, or shards of it. Units (parent_files.py) are parameters that
make tensors of the files together; each is written by one rank. Called by models/ways.py.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import torch

from cray_agents.errors import BadInput
from cray_agents.trainers.models.universal.parent_files import ExportUnit, ParentFiles
from cray_agents.trainers.models.universal.weight_shards import WeightShards
from cray_agents.trainers.models.weights import FilePlan, choose_writers


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
