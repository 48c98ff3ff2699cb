"""Initial weights: random tensors of a new model, from its config.json and a seed alone.

As in transformers, matrices are normal with the config's `initializer_range`, norms are ones and
biases zeros. Each tensor has its own generator, seeded by its name, so that every layout starts
from the same model. weights.py reads this class in place of a checkpoint's files.
"""

import hashlib

import torch

from cray_agents.errors import BadInput
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.tensors import tensor_shapes

_STORED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class InitialWeights:
    """Tensors by their Hugging Face names, made on access. Raises BadInput for an unknown dtype.

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
