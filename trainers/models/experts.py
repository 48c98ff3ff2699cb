"""Experts in two matrix products: torch's grouped_mm over all experts of a rank.

Megatron's SequentialMLP, which works without Transformer Engine, calls one expert after the other.
`grouped_experts` returns a subclass with the same weights under the same names. model.py puts it
into the layers if layer_choice.py says so. Read next: attention.py.
"""

from functools import cache
from typing import Any

import torch


@cache
def grouped_experts() -> type[Any]:
    """Return the class. Megatron must be loaded: the class is made of one of Megatron's."""
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe.experts import SequentialMLP

    class GroupedExperts(SequentialMLP):  # type: ignore[misc]
        """A rank's experts, all at once: SwiGLU between two grouped products, without biases."""

        def forward(
            self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
        ) -> tuple[torch.Tensor, None]:
            """Apply the experts to tokens [n, hidden], sorted by expert; `probs` [n]."""
            if not len(tokens):  # of other ranks' tokens none may come here
                return super().forward(tokens, tokens_per_expert, probs)  # type: ignore[no-any-return]
            ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32, non_blocking=True)
            into, out = (
                [getattr(expert, name).weight for expert in self.local_experts]
                for name in ("linear_fc1", "linear_fc2")
            )
            gated = mlp.weighted_bias_swiglu_impl(
                grouped_product(tokens, ends, into), None, probs.unsqueeze(-1), False
            )
            return grouped_product(gated, ends, out), None

    return GroupedExperts


def grouped_product(
    tokens: torch.Tensor, ends: torch.Tensor, weights: list[torch.Tensor]
) -> torch.Tensor:
    """Multiply each expert's tokens [n, in] by its weight [out, in]; `ends` [experts], int32.

    Only the weights are kept for the backward pass, not the copy of them that the product takes:
    over all layers the copies would be as large as the model.
    """
    return _GroupedProduct.apply(tokens, ends, *weights)  # type: ignore[no-any-return,no-untyped-call]


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        stacked = torch.stack(weights).transpose(1, 2)
        return torch.nn.functional.grouped_mm(tokens, stacked, offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, ends, *weights = ctx.saved_tensors
        gradient, product = gradients[0].contiguous(), torch.nn.functional.grouped_mm
        d_tokens = product(gradient, torch.stack(weights), offs=ends)
        if not any(ctx.needs_input_grad[2:]):
            return d_tokens, None, *(None for _ in weights)
        d_weights = product(gradient.t(), tokens, offs=ends)
        return d_tokens, None, *d_weights.unbind()
