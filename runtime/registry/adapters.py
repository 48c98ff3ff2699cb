"""Adapter versions: a LoRA adapter over another checkpoint of this root, and the two merged.

An adapter version is a checkpoint directory without files of weights:

    checkpoints/<id>/manifest.json   `base`: the checkpoint below, beside this one; `base_sha256`
    checkpoints/<id>/adapter/        the adapter in PEFT's layout
    checkpoints/<id>/config.json...  as in any checkpoint
    checkpoints/<id>/merged/         a whole checkpoint of the two, if somebody asked for it

One adapter is over one base, which has weights of its own. Replicas load the adapter beside its
base; a job goes on with it, or reads the two merged in memory. `merge` writes them as files.
Written by trainers/checkpointing/peft_adapter.py. Read next: checkpoints.py, `base_of`.
"""

import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cray_agents.errors import BadInput, Corrupt
from cray_agents.records import new_id
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry.checkpoints import (
    ADAPTER,
    MANIFEST,
    SUFFIXES,
    base_of,
    hash_files,
    publish_folder,
    verify,
    weights_sha256,
)

if TYPE_CHECKING:
    import torch

MERGED = "merged"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
_STEM, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class SavedAdapter:
    """The adapter of a checkpoint directory: its matrices by the layer that they are of.

    `rank`, `alpha` and `modules`, the last parts of the layers' names, are PEFT's settings. Raises
    Corrupt.
    """

    def __init__(self, directory: Path) -> None:
        folder = self._folder = directory / ADAPTER
        try:
            config: Any = checksums.parse((folder / CONFIG).read_bytes(), folder / CONFIG)
            self.rank, self.alpha = int(config["r"]), float(config["lora_alpha"])
            self.modules = {str(name).rpartition(".")[2] for name in config["target_modules"]}
            self._transposed = bool(config["fan_in_fan_out"])
        except FileNotFoundError as error:
            raise Corrupt(f"{error.filename} is missing") from error
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{folder / CONFIG} is not of an adapter: {error!r}") from error

    @cached_property
    def _tensors(self) -> "dict[str, torch.Tensor]":
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors: dict[str, torch.Tensor] = load((self._folder / WEIGHTS).read_bytes())
        except (FileNotFoundError, SafetensorError) as error:
            raise Corrupt(f"{self._folder / WEIGHTS} cannot be read: {error}") from error
        return tensors

    @cached_property
    def layers(self) -> set[str]:
        """The names of the layers that it is of."""
        return {name[len(_STEM) : -len(_A)] for name in self._tensors if name.endswith(_A)}

    def pair(self, layer: str) -> "tuple[torch.Tensor, torch.Tensor] | None":
        """Return A [rank, in] and B [out, rank] of a layer, by its name in the files."""
        if layer not in self.layers:
            return None
        return self._tensors[f"{_STEM}{layer}{_A}"], self._tensors[f"{_STEM}{layer}{_B}"]

    def refuse_unknown(self, layers: Iterable[str]) -> None:
        """Raise BadInput if the adapter is of a layer that is not among these."""
        if left := self.layers - set(layers):
            raise BadInput(
                f"{self._folder} cannot be merged: it is of {min(left)}, and the weights below have"
                " no tensor of that name; serve it as an adapter, or go on with the same lora",
                param="version",
            )

    def merged(
        self, layer: str, weight: "torch.Tensor", part: tuple[slice, ...] = ()
    ) -> "torch.Tensor":
        """Return the weight of a layer with the adapter added, in float32; of others as it is.

        `part`: of the whole weight, what `weight` is; (): all of it.
        """
        if (pair := self.pair(layer)) is None:
            return weight
        update = pair[1].float() @ pair[0].float() * (self.alpha / self.rank)
        update = update.T if self._transposed else update
        return weight.float() + update[part].to(weight.device)


def merge(directory: Path) -> Path:
    """Write an adapter version as a whole checkpoint in its folder `merged`, and return that.

    It is written once. A process that is killed leaves a draft that the next one deletes. Raises
    BadInput where the directory is no adapter version, or an adapter is of a layer that no file of
    the base names; NotFound, Corrupt.
    """
    base, target = base_of(directory), directory / MERGED
    if base is None:
        raise BadInput(
            f"{directory.name} holds whole weights: there is no adapter to merge", param="version"
        )
    if (target / MANIFEST).is_file():
        verify(target)
        return target
    manifest, draft = verify(directory), directory / f".{MERGED}.{new_id('draft')}"
    draft.mkdir()
    try:
        for path in sorted(directory.iterdir()):
            if path.is_file() and path.suffix in SUFFIXES and path.name != MANIFEST:
                shutil.copyfile(path, draft / path.name)
        _merge_files(SavedAdapter(directory), base, draft)
        files = hash_files(draft)
        whole = manifest.model_copy(
            update={"files": files, "weights_sha256": weights_sha256(files), "base": None}
        )
        text = whole.model_copy(update={"parent_sha256": manifest.weights_sha256})
        durable.write_file(draft / MANIFEST, checksums.record_text(text))
        publish_folder(draft, target)
    except Exception:
        if not (target / MANIFEST).is_file():  # another was first, and deleted this draft
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for other in directory.glob(f".{MERGED}.*"):
        durable.remove(other)
    return target


def _merge_files(adapter: SavedAdapter, base: Path, target: Path) -> None:
    """Write the base's files of weights, merged. Raises BadInput for an unknown layer."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    layers: set[str] = set()
    for path in sorted(base.glob("*.safetensors*")):
        if path.suffix == ".json":  # the index
            shutil.copyfile(path, target / path.name)
            continue
        with safe_open(path, "pt") as stored:
            tensors = {}
            for name in stored.keys():  # noqa: SIM118 (it is no mapping)
                layers.add(layer := name.removesuffix(".weight"))
                tensor = stored.get_tensor(name)
                tensors[name] = adapter.merged(layer, tensor).to(tensor.dtype).contiguous()
            save_file(tensors, target / path.name, stored.metadata())
    adapter.refuse_unknown(layers)
