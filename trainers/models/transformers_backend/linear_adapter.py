"""Linear adapter: LoRA (arXiv 2106.09685) around a linear layer of transformers' modules.

W x + alpha / rank * B A x, where only A and B are trained. A job names its targets as for
Megatron's layers (qkv, proj, fc1, fc2); `NAMES` has what the families call them. Experts get no
adapters, and nor do layers that PEFT takes for experts or refuses. Called by models/backends.py.
Read next: models/lora.py, which merges these as its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)

from cray_agents.errors import BadInput
from cray_agents.records import digest
from cray_agents.training_jobs import Lora, LoraTarget

_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
NAMES: dict[LoraTarget, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", *_LATENT),
    "proj": ("o_proj", "out_proj", "dense", "attn.c_proj"),
    "fc1": ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "input_linear", "fc1", "c_fc"),
    "fc2": ("down_proj", "w2", "output_linear", "fc2", "mlp.c_proj"),
}
#: of a recurrent mixer, the counterpart of qkv: for networks that have none of the names above
MIXER = "in_proj"
#: PEFT gives adapters of these names to experts, in all kinds that transformers fuses like the key,
#: also where they are of dense layers or shared experts: it would load them wrongly
_EXPERTS = {
    "mixtral": {"w1", "w2", "w3"},
    "qwen2_moe": {"gate_proj", "up_proj", "down_proj"},
}
#: kinds whose mixers read the weight of their out_proj past its module; PEFT refuses it there
_MAMBA = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}


@dataclass(frozen=True)
class SavedAs:
    """A layer's names in files of adapters: of its tensors, and among PEFT's `target_modules`."""

    tensors: str
    target: str

    @classmethod
    def in_network(cls, place: str) -> "SavedAs":
        """Return the names of a layer that its network alone gives."""
        return cls(place, place.rpartition(".")[2])


class LinearAdapter(torch.nn.Module):
    """A frozen linear layer `base` with its adapter: `a` [rank, in] and `b` [out, rank].

    `place` is the layer's name in the network. `transposed`: the base is a Conv1D of transformers,
    whose weight is [in, out]. The attributes of a linear layer are those of its base, for families
    whose code reads them.
    """

    def __init__(self, base: Any, lora: Lora, place: str, saved_as: SavedAs) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.base, self.place, self.saved_as = base, place, saved_as
        self.transposed = isinstance(base, Conv1D)
        self.scale, self.dropout = lora.alpha / lora.rank, lora.dropout
        outs, ins = base.weight.T.shape if self.transposed else base.weight.shape
        self.a = torch.nn.Parameter(base.weight.new_empty(lora.rank, ins))
        self.b = torch.nn.Parameter(base.weight.new_empty(outs, lora.rank))

    @property
    def weight(self) -> torch.Tensor:
        """The base's weight, as families ask for its type."""
        weight: torch.Tensor = self.base.weight
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The base's bias."""
        bias: torch.Tensor | None = self.base.bias
        return bias

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Draw A from PEFT's distribution, and set B to zero."""
        random = torch.Generator().manual_seed(int(digest([seed, self.place], 15), 16))
        whole = torch.empty(self.a.shape)
        torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=random)
        self.a.copy_(whole)
        self.b.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        out: torch.Tensor = self.base(x)
        given = F.dropout(x, self.dropout) if self.training and self.dropout else x
        return out + F.linear(F.linear(given, self.a) * self.scale, self.b)

    @torch.no_grad()
    def merged(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the weight, shaped as base's, with an adapter added, in float32."""
        update = b.float() @ a.float() * self.scale
        return self.weight.float() + (update.T if self.transposed else update)


def add_adapters(
    network: Any, lora: Lora, seed: int, names: Mapping[str, SavedAs] | None = None
) -> None:
    """Freeze a network and add adapters to its linear layers. Raises BadInput if it has none.

    `names`: what files call a layer, by its name in the network; one without gets no adapter. None:
    as the network does. Names of adapters' parameters end in `.a` and `.b`; the layer's
    `weight` becomes `base.weight`.
    """
    requested = {name for target in lora.targets for name in NAMES[target]}
    chosen = _linear_layers(network, requested - _not_of_peft(network), names)
    if not chosen and "qkv" in lora.targets:
        requested.add(MIXER)
        chosen = _linear_layers(network, {MIXER}, names)
    if not chosen:
        raise BadInput(
            f"lora targets {lora.targets}, and {type(network).__name__} of transformers has no"
            f" linear layer of these names that PEFT takes: {', '.join(sorted(requested))}; name"
            " other targets, or train all weights (lora left out)",
            param="lora",
        )
    network.requires_grad_(False)
    for name, saved_as in chosen:
        path, _, last = name.rpartition(".")
        owner, base = network.get_submodule(path), network.get_submodule(name)
        if lora.rank > min(base.weight.shape):
            raise BadInput(
                f"lora has rank {lora.rank}, and {name} is a matrix of {tuple(base.weight.shape)}:"
                f" the rank can be {min(base.weight.shape)} at most",
                param="lora",
            )
        adapter = LinearAdapter(base, lora, name, saved_as)
        adapter.start(seed)
        setattr(owner, last, adapter)


def _linear_layers(
    network: Any, names: set[str], saved: Mapping[str, SavedAs] | None
) -> list[tuple[str, SavedAs]]:
    """Return the linear layers of these names: each with its name in the network, and in files."""
    from transformers.pytorch_utils import Conv1D

    ends = tuple(f".{name}" for name in names)
    return [
        (name, SavedAs.in_network(name) if saved is None else saved[name])
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
        and f".{name}".endswith(ends)
        and ".experts." not in name
        and (saved is None or name in saved)
    ]


def _not_of_peft(network: Any) -> set[str]:
    """Return the names of layers whose adapters PEFT would refuse, or load into other layers."""
    from transformers import conversion_mapping

    like = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    kind = getattr(getattr(network, "config", None), "model_type", "")
    if kind in _MAMBA:
        return {"out_proj"}
    return _EXPERTS.get(like.get(kind, "mixtral" if kind == "mixtral" else ""), set())
