"""CPU kernels: norm, rotation and SwiGLU in few passes over memory.

Forward and backward passes are written by hand. Autograd would record every product and quotient
of the formulas, and keep or copy their inputs. attention.py and megatron_on_cpu.py use them where
Megatron has a fused one on GPUs, and megatron_fixes.py the rotation on GPUs too.
"""

from typing import Any

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / sqrt(mean(x**2) + eps) * weight over the last dimension (arXiv 1910.07467).

    float32 only.
    """
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return,no-untyped-call]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings (arXiv 2104.09864); elements half a head apart form the pairs.

    `x`: [tokens, heads, size]; `cos` and `sin` of the tokens' angles: [tokens, 1, size], the second
    half equal to the first.
    """
    return _Rotation.apply(x, cos, sin)  # type: ignore[no-any-return,no-untyped-call]


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Compute silu(first half) * second half of the last dimension (arXiv 2002.05202)."""
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
        product = torch.mul(gradient, x).reshape(-1, size)
        flat = scale.view(-1)
        # d scale = -scale**3 / size * x . dx
        back = torch.mv(product, weight).mul_(flat**3).div_(-size)
        dx = torch.mul(gradient, weight).mul_(scale).addcmul_(x, back.view(scale.shape))
        return dx, torch.mv(product.t(), flat), None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _Rotation.rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotation.rotate(gradients[0], cos, sin, -1), None, None

    @staticmethod
    def rotate(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int
    ) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        half = sin.chunk(2, -1)[0]
        rotated = torch.mul(x, cos)
        into_first, into_second = rotated.chunk(2, -1)
        into_first.addcmul_(second, half, value=-direction)
        into_second.addcmul_(first, half, value=direction)
        return rotated


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        activated = torch.nn.functional.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        x, activated = ctx.saved_tensors
        (gradient,) = gradients
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        d_gate, d_up = dx.chunk(2, -1)
        torch.mul(gradient, up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        torch.mul(gradient, activated, out=d_up)
        return dx
