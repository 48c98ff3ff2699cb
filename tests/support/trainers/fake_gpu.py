"""A GPU without one: torch's fake tensors on `cuda`, so that the trainer's CUDA branch runs here.

A fake tensor has a shape, a type and a device, and no numbers. `pretend` makes a process believe in
GPUs; within `tracing` all new tensors are fakes, and whole training steps run, backward pass and
optimizer included. Faults that a first GPU host would show are then errors or counts: an operation
between devices, a collective of a tensor that NCCL cannot take, a missing argument, and a wait of
the host for the device (a number that is read, or a copy that is not left to the device's queue).
No kernel runs: numbers, speed and memory are not tested.

The backward pass goes through torch's own graph, node by node, in Python: torch's engine would want
a CUDA thread. Only for a process of its own: nothing is put back.
"""

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from cray_agents.trainers.models.megatron_on_cpu import _OneStream

GIB = 1 << 30
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")
OURS = ("/trainers/", "/runtime/", "/megatron/", "/transformers/")


class Unsound(Exception):
    """What a GPU would refuse."""


def pretend(folder: Path) -> None:
    """Let torch say that it has a GPU and NCCL. `folder`: for a compiled file."""
    guard = folder / "fake_gpu.so"
    if not guard.exists():
        source, root = Path(__file__).with_suffix(".cpp"), Path(torch.__file__).parent
        command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{root}/include", str(source)]
        subprocess.run([*command, f"-L{root}/lib", "-lc10", "-o", str(guard)], check=True)
    torch.ops.load_library(str(guard))
    cuda: Any = torch.cuda
    here = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, uuid="GPU-0")
    here.total_memory, here.multi_processor_count = 80 * GIB, 132
    answers = {
        "is_available": True,
        "is_initialized": False,
        "device_count": 1,
        "current_device": torch.device("cuda:0"),  # a number alone is of a real accelerator
        "get_device_name": here.name,
        "get_device_capability": (9, 0),
        "get_device_properties": here,
        "mem_get_info": (80 * GIB, 80 * GIB),
        "max_memory_allocated": GIB,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    nothing = ("set_rng_state", "manual_seed", "set_device", "empty_cache")
    for name, value in {**answers, **dict.fromkeys(nothing)}.items():
        setattr(cuda, name, lambda *_, _value=value, **__: _value)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(cuda.random, name, getattr(cuda, name))
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.default_stream = _Stream
    cuda.synchronize = _Stream().synchronize
    cuda.stream = lambda stream: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self: self
    split = tensor.split

    def evenly(self: Any, sizes: Any, dim: int = 0) -> Any:
        size, parts = self.shape[dim], len(sizes) if isinstance(sizes, list) else 0
        if parts and sum(sizes) != size:  # numbers that were read
            sizes = [size // parts + (n < size % parts) for n in range(parts)]
        return split(self, sizes, dim)

    tensor.split = evenly
    tensor.register_hook = lambda self, hook: Engine.hooks.setdefault(
        (self.grad_fn, self.output_nr), []
    ).append(hook)
    tensor.record_stream = lambda self, stream: None
    tensor.data_ptr = lambda self: self.storage_offset() * self.element_size()
    _plain["numpy"] = tensor.numpy
    tensor.numpy, fake = _numpy, FakeTensor
    fake.tolist = lambda self: _numpy(self.cpu()).tolist()  # type: ignore[method-assign]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    Variable._execution_engine = Engine(Variable._execution_engine)  # type: ignore[assignment]
    dist: Any = torch.distributed
    init = dist.init_process_group
    dist.init_process_group = lambda backend, *, store, **options: init(
        "fake", store=FakeStore(), **options
    )
    dist.get_backend = lambda group=None: "nccl"
    dist.all_gather_object = lambda into, one, group=None: into.__setitem__(
        slice(None), [one] * len(into)
    )


_plain: dict[str, Any] = {}


class _Stream(_OneStream):
    def synchronize(self, *args: Any) -> None:
        Waits.now.found[where()] += 1


def _numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
    """Tensor.numpy: of fakes ones, and of a row of integers 0, 1, 2, ..."""
    if not isinstance(tensor, FakeTensor):
        return _plain["numpy"](tensor, force=force)
    if tensor.device.type != "cpu":
        raise Unsound(f"{where()}: a tensor of the GPU as numpy")
    with _disable_current_modes():
        like = _plain["numpy"](torch.empty(0, dtype=tensor.dtype)).dtype
    if like.kind == "i" and tensor.ndim == 1:  # an order, or sizes: see `evenly`
        return np.arange(len(tensor), dtype=like)
    return np.ones(tuple(tensor.shape), like)


def _apply(module: Any, change: Any, recurse: bool = True) -> Any:
    """Module._apply, as `cuda()` and `bfloat16()` use it: fakes cannot be changed in place."""
    changed: dict[int, Any] = {}
    for one in module.modules() if recurse else [module]:
        for name, parameter in list(one._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in changed:
                value, made = change(parameter), parameter
                if (value.dtype, value.device) != (parameter.dtype, parameter.device):
                    made = torch.nn.Parameter(value.detach(), parameter.requires_grad)
                    made.__dict__.update(parameter.__dict__ | made.__dict__)
                changed[id(parameter)] = made
            one._parameters[name] = changed[id(parameter)]
        for name, buffer in list(one._buffers.items()):
            one._buffers[name] = None if buffer is None else change(buffer)
    return module


def keep_real(owner: Any, *names: str) -> None:
    """Let functions compute with real numbers, although fakes are traced around them."""
    for name in names:
        function = getattr(owner, name)

        def call(*args: Any, _function: Any = function, **options: Any) -> Any:
            with _disable_current_modes():
                return _function(*args, **options)

        setattr(owner, name, call)


class Engine:
    """torch's engine for real tensors; for fakes the graph's nodes, called in order.

    `reached` is called with each parameter whose gradient has come, as hooks of it would be.
    """

    reached: Callable[[torch.Tensor], Any] = staticmethod(lambda parameter: None)
    hooks: ClassVar[dict[tuple[Any, int], list[Callable[..., Any]]]] = {}

    def __init__(self, real: Any) -> None:
        self.real = real

    def run_backward(
        self, roots: Sequence[torch.Tensor], given: Sequence[Any], *args: Any, **options: Any
    ) -> Any:
        """Add the gradients of the roots to `.grad` of the graph's leaves."""
        if not any(isinstance(root, FakeTensor) for root in roots):
            return self.real.run_backward(roots, given, *args, **options)
        self._run(roots, given)
        return ()

    def _run(self, roots: Sequence[torch.Tensor], given: Sequence[Any]) -> None:
        waiting: Counter[Any] = Counter()
        gradients: dict[Any, dict[int, torch.Tensor]] = {}
        for root, gradient in zip(roots, given, strict=True):
            gradients.setdefault(root.grad_fn, {})[root.output_nr] = gradient
        nodes, seen = list(gradients), set()
        while nodes:
            node = nodes.pop()
            if node not in seen:
                seen.add(node)
                into = [below for below, _ in node.next_functions if below is not None]
                waiting.update(into)
                nodes += into
        ready = [node for node in gradients if not waiting[node]]
        with torch.no_grad():
            while ready:
                node = ready.pop()
                for (below, place), out in self._call(node, gradients.pop(node, {})):
                    if below is None:
                        continue
                    if out is not None:
                        sums = gradients.setdefault(below, {})
                        sums[place] = sums[place] + out if place in sums else out
                    waiting[below] -= 1
                    if not waiting[below]:
                        ready.append(below)

    def is_checkpoint_valid(self) -> bool:
        """As torch's: recomputation by a backward pass within one may begin."""
        return True

    def _call(self, node: Any, known: dict[int, torch.Tensor]) -> Iterator[tuple[Any, Any]]:
        """Yield where each result of a node goes; what it gets is checked and cast, as torch's."""
        outs: Any = [None] * len(node.next_functions)
        if known:
            of_python = not callable(node)  # it gets zeros where nothing came
            inputs = []
            for place, facts in enumerate(node._input_metadata):
                one = known.get(place)
                if one is not None:
                    if one.device != facts.device:
                        raise Unsound(f"{node.name()}: a gradient on {one.device}")
                    try:
                        one = one.sum_to_size(facts.shape).to(facts.dtype)
                    except RuntimeError as error:
                        shapes = f"{tuple(one.shape)}, not {facts.shape}"
                        raise Unsound(f"{node.name()}: a gradient of {shapes}") from error
                elif of_python:
                    one = torch.zeros(facts.shape, dtype=facts.dtype, device=facts.device)
                for hook in self.hooks.pop((node, place), []):
                    hook(one)
                inputs.append(one)
            outs = node.apply(*inputs) if of_python else node(*inputs)
            outs = outs if isinstance(outs, tuple) else (outs,)
            if hasattr(node, "variable"):
                self.reached(node.variable)
        return zip(node.next_functions, outs, strict=False)


class _Fakes(FakeTensorMode):
    avoid_device_init = True  # `torch.tensor` makes its numbers on the CPU, and then a fake


class Waits(TorchDispatchMode):
    """Counts by file and function where the host waits for the device; a number read is 1.

    `chosen`: how many elements a mask chooses of each of its rows' columns: nobody else knows.
    """

    now: "Waits"

    def __init__(self, chosen: int) -> None:
        super().__init__()
        Waits.now = self
        self.found: Counter[str] = Counter()
        self.chosen = chosen

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in READS and first is not None:
            self.found.update([where()] if first.device.type == "cuda" else [])
            if name == "_local_scalar_dense":
                return 1.0 if first.is_floating_point() else 1
            if name == "masked_select":
                return first.new_empty(first.shape[-1] * self.chosen)
        if function.namespace == "c10d":
            return self._collective(function, args)
        out = function(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            source = first if name == "_to_copy" else args[1]
            blocking = not kwargs.get("non_blocking", len(args) > 2 and args[2])
            if blocking and {source.device.type, out.device.type} == {"cpu", "cuda"}:
                self.found[where()] += 1
        return out

    def _collective(self, function: Any, args: Any) -> Any:
        """Do nothing, as one of several ranks; NCCL takes no tensors of the host."""
        for tensor in filter(torch.is_tensor, tree_leaves(args)):
            if tensor.device.type != "cuda" and function.overloadpacket.__name__ != "barrier":
                raise Unsound(f"{where()}: NCCL gets a tensor on {tensor.device}")
        done = FakeWork().boxed()
        return (args[0], done) if len(function._schema.returns) > 1 else done


def where() -> str:
    """The innermost function of ours, of Megatron or of transformers that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for root in OURS:
            if root in file and "/tests/" not in file:
                return f"{root.strip('/')}/{file.rpartition(root)[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


@contextlib.contextmanager
def tracing(chosen: int = 1) -> Iterator[Counter[str]]:
    """Make all new tensors fakes; yields the waits so far."""
    with _Fakes(allow_non_fake_inputs=True), Waits(chosen) as waits:
        yield waits.found
