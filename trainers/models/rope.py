"""Rotary position embeddings: the trainable variants and their frequencies.

architecture.py reads the variant, and model.py asks for its frequencies. transformers' own
functions compute these, so that both rotate alike. Heavy imports wait until then.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cray_agents.errors import BadInput
from cray_agents.runtime.registry.foreign_model import is_positive

if TYPE_CHECKING:
    import torch

VARIANTS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


_REQUIRED = {  # the parameters of transformers' functions
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class Rope:
    """A config's `rope_parameters`, and the number of positions of its model."""

    parameters: dict[str, Any]  # with `rope_type` and `rope_theta`
    positions: int

    @property
    def kind(self) -> str:
        """One of VARIANTS."""
        return str(self.parameters["rope_type"])


def read_rope(config: dict[str, Any], checkpoint: Path) -> Rope:
    """Read transformers 5's `rope_parameters` or the older keys. Raises BadInput."""
    theta = config.get("rope_theta") or (1e6 if config["model_type"] == "mixtral" else 1e4)
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = {"rope_theta": theta, **given}
    kind = parameters.pop("type", "default")
    kind = parameters.setdefault("rope_type", kind)
    if kind not in VARIANTS:
        raise BadInput(
            f"cannot train {checkpoint}: its rotary embedding is {kind!r}; supported are"
            f" {', '.join(VARIANTS)}"
        )
    share = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1.0):
        raise BadInput(
            f"cannot train {checkpoint}: it rotates only {share} of a head"
            " (partial_rotary_factor), and only 1.0 is supported"
        )
    positions = config["max_position_embeddings"]
    if kind in ("llama3", "yarn", "longrope"):  # the config's top-level number comes first
        original = config.get("original_max_position_embeddings")
        original = original or parameters.get("original_max_position_embeddings") or positions
        parameters["original_max_position_embeddings"] = original
    return Rope(parameters, positions)


def check_rope(rope: Rope, head_size: int, checkpoint: Path) -> None:
    """Raise BadInput if no frequencies can be computed from the parameters."""
    if head_size % 2:
        raise BadInput(f"cannot train {checkpoint}: a head of {head_size} cannot be rotated")
    for name in ("rope_theta", *_REQUIRED.get(rope.kind, ())):
        value = rope.parameters.get(name)
        if name.endswith(("short_factor", "long_factor")):
            fits = isinstance(value, list) and len(value) == head_size // 2
            must = f"a list of {head_size // 2} finite numbers above 0"
        else:
            fits, must = True, "a finite number above 0"
        each = value if isinstance(value, list) and "a list" in must else [value]
        if not fits or not all(map(is_positive, each)):
            raise BadInput(
                f"cannot train {checkpoint}: its rotary embedding ({rope.kind}) has {name} ="
                f" {repr(value)[:100]}, which must be {must}"
            )


def rope_frequencies(rope: Rope, head_size: int) -> tuple["torch.Tensor", float]:
    """Return inverse frequencies [head size / 2] in float32, and the factor of queries and keys."""
    import torch

    if rope.kind == "default":
        powers = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
        return 1.0 / rope.parameters["rope_theta"] ** powers, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        head_dim=head_size,
        max_position_embeddings=rope.positions,
        rope_parameters=dict(rope.parameters),
    )
    inverse, scaling = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return inverse.float(), float(scaling)
