"""Kernel trial: run torch's fast kernels on a few tokens before a model is built with them.

A GPU may be too old for a kernel, or a head size unknown to it. A rank finds out here, and takes
the slower layers with a line in its log, instead of dying in its first step. model.py calls
`confirm` on GPUs. Read next: layer_choice.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.attention import attend_by_length, attend_to_all
from cray_agents.trainers.models.experts import grouped_product
from cray_agents.trainers.models.layer_choice import LayerChoice

LENGTHS = (7, 1, 12)  # of sequences; odd, as real ones are
TOLERANCE = 0.03  # of the largest number: bfloat16 has 8 bits, and sums differ in order

Function = Callable[..., torch.Tensor]


def confirm(layers: LayerChoice, model: Architecture, device: torch.device) -> LayerChoice:
    """Return the choice without the kernels that do not work on a device; print which."""
    problems = {
        "varlen": varlen_problem(model, device) if layers.varlen else None,
        "grouped": grouped_problem(model, device) if layers.grouped else None,
    }
    failed = {name: why for name, why in problems.items() if why is not None}
    for name, why in failed.items():
        print(f"the kernel {name!r} does not work on {device}, a slower one is used: {why}")
    return replace(
        layers,
        varlen=layers.varlen and "varlen" not in failed,
        grouped=layers.grouped and "grouped" not in failed,
    )


def varlen_problem(model: Architecture, device: torch.device) -> str | None:
    """Return what is wrong with attention over unequal lengths; None if nothing is."""
    scale, groups = model.head_size**-0.5, model.heads // model.kv_heads
    shapes = [(sum(LENGTHS), heads, model.head_size) for heads in (groups, 1, 1)]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    return _difference(
        lambda q, k, v: attend_to_all(q, k, v, bounds, max(LENGTHS), scale),
        lambda q, k, v: torch.cat(list(attend_by_length(q, k, v, LENGTHS, scale))),
        shapes,
        device,
    )


def grouped_problem(model: Architecture, device: torch.device) -> str | None:
    """Return what is wrong with the product of all experts; None if nothing is."""
    sizes = [LENGTHS[0], 0, *LENGTHS[1:]]  # one expert without tokens
    ends = torch.tensor(sizes).cumsum(0).to(device, torch.int32)
    shapes = [(sum(sizes), model.hidden), *[(model.expert_ffn, model.hidden)] * len(sizes)]

    def one_by_one(tokens: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        each = zip(torch.split(tokens, sizes), weights, strict=True)
        return torch.cat([mine @ weight.t() for mine, weight in each])

    return _difference(
        lambda tokens, *weights: grouped_product(tokens, ends, list(weights)),
        one_by_one,
        shapes,
        device,
    )


def _difference(
    fast: Function, plain: Function, shapes: Sequence[tuple[int, ...]], device: torch.device
) -> str | None:
    """Compare values and gradients of two functions of bfloat16 tensors of the given shapes."""
    random = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=random).bfloat16().to(device) for shape in shapes]
    results = []
    for function in (fast, plain):
        given = [tensor.clone().requires_grad_() for tensor in drawn]
        try:
            out = function(*given)
            upstream = torch.linspace(-1, 1, out.numel()).to(out).view_as(out)
            torch.autograd.backward(out, upstream)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        results.append([out.detach(), *(tensor.grad for tensor in given)])
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None and theirs is not None  # every input has a gradient
        apart, largest = (ours - theirs).abs().max(), theirs.abs().max()
        if not bool(apart <= TOLERANCE * largest):
            return f"it is {float(apart):.3g} off, where the largest number is {float(largest):.3g}"
    return None
