"""What the CPU does between matrix products, in as few passes over memory as torch has.

A forward and a backward pass each, by hand: torch would record every product and quotient of the
formulas, and keep or copy what it needs for each. attention.py and cpu_megatron.py put them where
Megatron has a fused kernel on GPUs.
"""

from typing import Any

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension (arXiv 1910.07467); float32."""
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return,no-untyped-call]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv 2104.09864), each element with the one half a head away.

    `x`: [tokens, heads, size]; `cos` and `sin` of the tokens' angles: [tokens, 1, size], the second
    half like the first.
    """
    return _Rotation.apply(x, cos, sin)  # type: ignore[no-any-return,no-untyped-call]


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the last dimension, times the second (arXiv 2002.05202)."""
    return _SwiGLU.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        (gradient,) = gradients
        size = x.shape[-1]
        product = torch.mul(gradient, x).view(-1, size)
        flat = scale.view(-1)
        # d scale = -scale**3 / size * x . dx
        back = torch.mv(product, weight).mul_(flat**3).div_(-size)
        dx = torch.mul(gradient, weight).mul_(scale).addcmul_(x, back.view(scale.shape))
        return dx, torch.mv(product.t(), flat), None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _Rotation.turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotation.turned(gradients[0], cos, sin, -1), None, None

    @staticmethod
    def turned(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int
    ) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        half = sin.chunk(2, -1)[0]
        turned = torch.mul(x, cos)
        into_first, into_second = turned.chunk(2, -1)
        into_first.addcmul_(second, half, value=-direction)
        into_second.addcmul_(first, half, value=direction)
        return turned


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        opened = torch.nn.functional.silu(gate)
        ctx.save_for_backward(x, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        x, opened = ctx.saved_tensors
        (gradient,) = gradients
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        d_gate, d_up = dx.chunk(2, -1)
        torch.mul(gradient, up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        torch.mul(gradient, opened, out=d_up)
        return dx
