"""Repairs of Megatron: those of a GPU are those of a CPU, by what a CPU can run of them."""

import json
import subprocess
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.megatron

#: Loads Megatron as on a GPU or a CPU, and prints what differs from Megatron's own; then uses it.
PROGRAM = """
import json, sys, torch
torch.cuda.is_available = lambda: sys.argv[1] == "cuda"
from cray_agents.trainers.models import megatron_fixes as fixes
on_cpu = fixes.load_megatron()
from megatron.core import optimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils

ours = {
    f"{name}.{key}"
    for name, module in list(sys.modules.items()) if name.startswith("megatron.")
    for key, value in vars(module).items() if getattr(value, "__module__", "") == fixes.__name__
}
ours |= {f"AdamW of {optimizer.torch.optim.AdamW.__module__}"}
ours |= {f"recomputes with {random.CheckpointWithoutOutput.__init__.__defaults__}"}
tokens, weight = (torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
routed = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
routed.sum().backward()
ours |= {f"routes {routed.tolist()} back {tokens.grad.tolist()}"}
print(json.dumps([on_cpu, sorted(ours)]))
"""


def test_what_is_mended_for_cpus_is_mended_for_gpus() -> None:
    """Both branches of `load_megatron`, and with both a mixture's router goes there and back."""
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, device], stdout=subprocess.PIPE)
        for device in ("cpu", "cuda")
    ]
    found = [json.loads(one.communicate()[0].splitlines()[-1]) for one in started]
    assert [on_cpu for on_cpu, _ in found] == [True, False]
    cpu, cuda = (fixes for _, fixes in found)
    assert cpu == cuda and len(cpu) >= 6, (cpu, cuda)


def test_clipping_equals_megatrons() -> None:
    """The norm and the scaled gradients are those of Megatron's own functions, to the bit."""
    from cray_agents.trainers.models.megatron_fixes import load_megatron

    load_megatron()
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    torch.manual_seed(3)
    ours = [torch.randn(size) for size in ((3, 5), (1,), (0,), (7, 2))]
    theirs = [tensor.clone() for tensor in ours]
    norm, each = clip_grads.l2_norm_impl(0, None, [ours], False)
    assert each is None and torch.equal(
        norm, utils.local_multi_tensor_l2_norm(0, None, [theirs], 0)[0]
    )
    clip_grads.multi_tensor_scale_impl(0, None, [ours, ours], 0.3)
    utils.local_multi_tensor_scale(0, None, [theirs, theirs], 0.3)
    assert all(map(torch.equal, ours, theirs))
    clip_grads.multi_tensor_scale_impl(0, None, [[], []], 0.3)


def test_torchs_adam_is_one_kernel_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's tensors are torch's fakes, which have no numbers: its kernel was not run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cray_agents.trainers.checkpointing.state import allocate_moments
    from cray_agents.trainers.models.megatron_fixes import fuse_adam, load_megatron

    load_megatron()
    module: Any = types.ModuleType("a copy of Megatron's optimizer")
    module.__dict__.update(sys.modules["megatron.core.optimizer"].__dict__, torch=torch)
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer", module)
    for usual in (True, False):
        if not usual:
            fuse_adam()
        with FakeTensorMode():
            weight = torch.nn.Parameter(torch.empty(8, device="cuda"))
            adam = module.torch.optim.AdamW([weight])
            one = SimpleNamespace(is_stub_optimizer=False, optimizer=adam)
            training: Any = SimpleNamespace(optimizer=one)
            allocate_moments(training, 3)
            (state,) = adam.state.values()
            assert isinstance(adam, torch.optim.AdamW)
            assert (adam.defaults["fused"], state["step"].device.type) == (
                (None, "cpu") if usual else (True, "cuda")
            )
    module.__dict__.update(torch=torch, USING_PYTORCH_OPTIMIZER=False)  # Transformer Engine's
    fuse_adam()
    assert module.torch is torch
