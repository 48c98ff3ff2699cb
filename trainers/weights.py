"""Weights between a Hugging Face directory and a Megatron GPTModel spread over ranks.

One table says what each Megatron parameter is made of. Loading packs the Hugging Face tensors and
takes this rank's slice; exporting gathers over tensor ranks and unpacks. The table knows the names
of both the torch and the Transformer Engine layers. train.py loads, export.py exports.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from cray_agents.errors import BadInput, NotFound
from cray_agents.trainers.architecture import Architecture
from cray_agents.trainers.model import named_parameters

# Megatron's name inside a layer -> how it is made, from which Hugging Face tensors
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
_MIXTRAL = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class Origin:
    """Where one local parameter comes from: how it is made, Hugging Face names, expert or not."""

    def __init__(self, part: Any, name: str, model: Architecture) -> None:
        self.expert = False
        if name in _TOP:
            self.how, self.names = _TOP[name]
            if name == "output_layer.weight" and model.tied:
                self.names = ["model.embed_tokens.weight"]
            return
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        if match is None:
            raise BadInput(f"no rule for Megatron's parameter {name!r}")
        local, rest = match.groups()
        prefix = f"model.layers.{part.decoder.layers[int(local)].layer_number - 1}."
        if found := _EXPERT.fullmatch(rest):
            self.expert = True
            self.how, names = _of_expert(found, model)
        else:
            self.how, names = _LAYER[rest]
        if model.kind == "mixtral":
            for plain, theirs in _MIXTRAL.items():
                names = [n.replace(plain, theirs) for n in names]
        self.names = [prefix + n for n in names]

    def ranks(self) -> tuple[int, int, Any]:
        """(rank, size, group) of the tensor parallelism that splits this parameter."""
        from megatron.core import parallel_state as ps

        if self.expert:
            return (
                ps.get_expert_tensor_parallel_rank(),
                ps.get_expert_tensor_parallel_world_size(),
                ps.get_expert_tensor_parallel_group(),
            )
        return (
            ps.get_tensor_model_parallel_rank(),
            ps.get_tensor_model_parallel_world_size(),
            ps.get_tensor_model_parallel_group(),
        )


def _of_expert(found: re.Match[str], model: Architecture) -> tuple[str, list[str]]:
    from megatron.core import parallel_state as ps

    local, kind = found[1] or found[4], found[2] or found[3]
    per_rank = (model.experts or 0) // ps.get_expert_model_parallel_world_size()
    number = int(local) + per_rank * ps.get_expert_model_parallel_rank()
    how, names = ("pair", ["gate_proj", "up_proj"]) if kind == "fc1" else ("columns", ["down_proj"])
    return how, [f"mlp.experts.{number}.{name}.weight" for name in names]


def pack(how: str, tensors: list[torch.Tensor], model: Architecture) -> torch.Tensor:
    """Hugging Face tensors as one; its chunks along `split_axis(how)` are the ranks' slices."""
    if how == "qkv":  # per query group: its query heads, its key head, its value head
        shape = (model.kv_heads, -1, model.head_size)
        groups = [t.reshape(*shape, *t.shape[1:]) for t in tensors]
        return torch.cat(groups, 1)
    return torch.stack(tensors) if how == "pair" else tensors[0]


def split_axis(how: str) -> int | None:
    """The axis of the packed tensor along which tensor ranks split it; None: all hold it whole."""
    return {"qkv": 0, "rows": 0, "pair": 1, "columns": 1}.get(how)


def unpack(how: str, slices: list[torch.Tensor], model: Architecture) -> list[torch.Tensor]:
    """The inverse of packing and slicing: Hugging Face tensors from all ranks' parameters."""
    if how == "qkv":
        queries = model.heads // model.kv_heads
        full = torch.cat(slices)
        full = full.reshape(model.kv_heads, queries + 2, model.head_size, *full.shape[1:])
        parts = full[:, :queries], full[:, queries : queries + 1], full[:, queries + 1 :]
        return [part.flatten(0, 2) for part in parts]
    if how == "pair":
        return list(torch.cat([s.reshape(2, -1, *s.shape[1:]) for s in slices], 1))
    if how == "whole":
        return slices[:1]
    return [torch.cat(slices, 0 if how == "rows" else 1)]


class SafeTensors:
    """The tensors of a checkpoint directory by name, in one file or many. Nothing is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self.where: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        elif (folder / "model.safetensors").exists():
            with safe_open(folder / "model.safetensors", "pt") as file:
                self.where = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise NotFound(f"{folder} holds no model.safetensors; other formats are not read")
        self._files = {n: safe_open(folder / n, "pt") for n in set(self.where.values())}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.where:
            raise BadInput(f"{self.folder} lacks the tensor {name!r} that its config.json implies")
        file: Any = self._files[self.where[name]]
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def dtype(self) -> torch.dtype:
        """The type of the stored weights."""
        return self["model.embed_tokens.weight"].dtype


@torch.no_grad()
def load_weights(part: Any, model: Architecture, checkpoint: Path) -> None:
    """Fill this rank's part from a Hugging Face directory. Raises BadInput on a missing tensor."""
    source = SafeTensors(checkpoint)
    for name, parameter in named_parameters(part):
        origin = Origin(_inner(part), name, model)
        packed = pack(origin.how, [source[n] for n in origin.names], model)
        rank, size, _ = origin.ranks()
        axis = split_axis(origin.how)
        local = packed if axis is None else packed.chunk(size, axis)[rank]
        if local.numel() != parameter.numel():
            raise BadInput(
                f"{checkpoint}: {origin.names} have {local.numel()} numbers for this rank, and"
                f" config.json implies {parameter.numel()}"
            )
        parameter.copy_(local.reshape(parameter.shape))


@torch.no_grad()
def exported(part: Any, model: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) in Hugging Face's terms, of this pipeline stage and expert rank.

    All tensor ranks must iterate together: each step gathers from them.
    """
    for name, parameter in named_parameters(part):
        if name == "output_layer.weight" and model.tied:
            continue
        origin = Origin(_inner(part), name, model)
        _, size, group = origin.ranks()
        mine = parameter.detach().contiguous()
        slices = [mine]
        if origin.how != "whole" and size > 1:
            slices = [torch.empty_like(mine) for _ in range(size)]
            torch.distributed.all_gather(slices, mine, group=group)
        yield from zip(origin.names, unpack(origin.how, slices, model), strict=True)


def _inner(part: Any) -> Any:
    while hasattr(part, "module"):
        part = part.module
    return part
