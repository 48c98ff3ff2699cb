"""A kind of model that transformers does not have: decaying sums, defined and registered here."""

from pathlib import Path
from typing import Any

import torch

VOCAB = 500


def write_toy(folder: Path) -> Path:
    """Register the kind with transformers, and write a random model of it."""
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    class DecayConfig(PretrainedConfig):  # type: ignore[misc]
        model_type = "toy_decay"
        num_hidden_layers: int = 2
        hidden_size: int = 32
        vocab_size: int = VOCAB
        max_position_embeddings: int = 128

    class Sums(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.decay = torch.nn.Parameter(torch.zeros(size))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            total, out = torch.zeros_like(states[:, 0]), []
            for state in states.unbind(1):
                total = total * self.decay.sigmoid() + state
                out.append(total)
            return torch.stack(out, 1)

    class Layer(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.sums, self.up = Sums(size), torch.nn.Linear(size, size)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states + torch.tanh(self.up(self.sums(states)))

    class DecayForCausalLM(PreTrainedModel):  # type: ignore[misc]
        config_class = DecayConfig
        _tied_weights_keys = None

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = torch.nn.ModuleList(
                Layer(config.hidden_size) for _ in range(config.num_hidden_layers)
            )
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            states = self.embed_tokens(input_ids)
            for layer in self.layers:
                states = layer(states)
            return CausalLMOutput(logits=self.lm_head(states))

    AutoConfig.register("toy_decay", DecayConfig, exist_ok=True)
    AutoModelForCausalLM.register(DecayConfig, DecayForCausalLM, exist_ok=True)
    torch.manual_seed(0)
    DecayForCausalLM(DecayConfig()).save_pretrained(folder)
    return folder
