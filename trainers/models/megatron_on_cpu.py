"""Megatron on the CPU: adapt megatron-core 0.16.1 to machines without CUDA.

megatron_fixes.py calls `import_on_cpu` and `adapt_to_cpu`, before any other use of Megatron.
Megatron writes `torch.cuda.current_device()`, `device="cuda"` and the like all over its modules.
torch itself is not patched. Instead the name `torch` in every loaded `megatron.core` module becomes
a view whose `cuda` is the CPU. Two methods of Tensor are out of reach and are replaced, in the
training process only: `cuda()`, and the argumentless `type()`, whose string the optimizer reads.
What is wrong on GPUs too is mended in megatron_fixes.py. Read next: kernels.py, which replaces
fused kernels; model.py.
"""

import contextlib
import importlib
import logging
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from cray_agents.trainers.models import kernels

_PLAIN = ("zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange")
_FACTORIES = (*_PLAIN, "empty_like", "zeros_like", "ones_like", "rand", "randn", "randint")


class _OneStream:
    """A stand-in for torch.cuda.Stream and Event: the CPU has one stream, always in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> "_OneStream":
        return self

    def __exit__(self, *exc: object) -> None: ...

    def record(self, *args: Any) -> "_OneStream":
        return self

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    record_event = record
    wait_event = wait_stream = synchronize = wait


class ModuleView(types.ModuleType):
    """A module with a few overrides."""

    def __init__(self, real: types.ModuleType, **overrides: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(overrides, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _torch_on_cpu() -> ModuleView:
    cuda = ModuleView(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        synchronize=_nothing,
        empty_cache=_nothing,
        set_device=_nothing,
        manual_seed=torch.default_generator.manual_seed,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        Stream=_OneStream,
        Event=_OneStream,
        current_stream=_OneStream,
        default_stream=_OneStream,
        stream=lambda stream: contextlib.nullcontext(),
    )
    return ModuleView(
        torch,
        cuda=cuda,
        **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES},
    )


def import_on_cpu(*modules: str) -> ModuleView:
    """Import modules of Megatron, and give all that are loaded the CPU in place of CUDA.

    Returns what they have for `torch`.
    """
    # Megatron decorates small functions with torch.compile. That needs a C++ compiler at run time
    # and costs 1.5 s of imports; on the CPU they stay as written.
    compile_, torch.compile = torch.compile, lambda model=None, **_: model or (lambda f: f)  # type: ignore
    try:
        with warnings.catch_warnings(action="ignore"):  # a dozen lines about missing GPU packages
            for name in modules:
                importlib.import_module(name)
    finally:
        torch.compile = compile_
    view = _torch_on_cpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = view
    return view


def adapt_to_cpu(view: ModuleView) -> None:
    """Replace what a view of torch does not reach. Megatron is imported; `view` is its torch."""
    _adapt_tensors()
    _adapt_random()
    _adapt_experts()
    _adapt_collectives()
    _adapt_uneven_gathers()
    _adapt_full_sharding(view)
    _adapt_kernels()
    _adapt_optimizers()


def _adapt_tensors() -> None:
    plain_type: Any = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return plain_type(self, dtype, *args, **kwargs)
        name = plain_type(self)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatron.core.optimizer"):  # it asks for 'torch.cuda.FloatTensor'
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    tensor: Any = torch.Tensor
    tensor.type = type_
    tensor.cuda = lambda self, *args, **kwargs: self


def _adapt_random() -> None:
    """Replace the "cuda" generator by the CPU generator."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _adapt_experts() -> None:
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


def _adapt_collectives() -> None:
    """Skip collectives of a single rank, which gloo would carry out as two copies."""
    buffers: Any = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(into: torch.Tensor, source: torch.Tensor, *, group: Any, **options: Any) -> Any:
            if group.size() == 1 and into.data_ptr() == source.data_ptr():
                return None
            return collective(into, source, group=group, **options)

        return call

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(buffers, name, unless_alone(getattr(buffers, name)))


def _adapt_uneven_gathers() -> None:
    """Gather and scatter unequal sizes, as experts' ranks need; gloo supports equal sizes only."""
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gather_even = mappings._gather_along_first_dim
    scatter_even = mappings._reduce_scatter_along_first_dim

    def gather(tokens: torch.Tensor, group: Any, sizes: Any = None, *rest: Any) -> Any:
        if sizes is None or group.size() == 1:
            return gather_even(tokens, group, sizes, *rest)
        room = tokens.new_zeros(max(sizes), *tokens.shape[1:])
        room[: len(tokens)] = tokens
        rooms = [torch.empty_like(room) for _ in sizes]
        torch.distributed.all_gather(rooms, room, group=group)
        return torch.cat([filled[:size] for filled, size in zip(rooms, sizes, strict=True)])

    def reduce_scatter(tokens: torch.Tensor, group: Any, sizes: Any = None, *rest: Any) -> Any:
        if sizes is None or group.size() == 1:
            return scatter_even(tokens, group, sizes, *rest)
        whole = tokens.clone()
        torch.distributed.all_reduce(whole, group=group)
        return torch.split(whole, sizes)[group.rank()]

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter


def _adapt_full_sharding(view: ModuleView) -> None:
    """Let Megatron's FSDP make device meshes of the CPU, and compare devices without a CUDA one."""
    fsdp: Any = importlib.import_module("megatron.core.distributed.fsdp.src.megatron_fsdp")
    adapter: Any = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    real = adapter.DeviceMesh

    def from_group(group: Any, device_type: str, **options: Any) -> Any:
        return real.from_group(group, "cpu", **options)

    adapter.DeviceMesh = types.SimpleNamespace(from_group=from_group)
    fsdp.megatron_fsdp.torch = ModuleView(view, device=lambda name: torch.device("cpu"))


def _adapt_kernels() -> None:
    """Install kernels.py wherever Megatron has a fused kernel on GPUs only."""
    mlp: Any = importlib.import_module("megatron.core.transformer.mlp")
    loss: Any = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")

    def weighted_swiglu(
        x: torch.Tensor, bias: None, weights: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        return (kernels.swiglu(x) * weights).to(x.dtype)

    def highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.float()
        return logits, logits.amax(-1)  # max() also returns places: four times slower

    mlp.bias_swiglu_impl = lambda x, bias, *_: kernels.swiglu(x if bias is None else x + bias)
    mlp.weighted_bias_swiglu_impl = weighted_swiglu
    loss.VocabParallelCrossEntropy.calculate_logits_max = staticmethod(highest)


def _adapt_optimizers() -> None:
    """Keep optimizers from importing torch.compile's front end, 0.6 s in each rank of each job.

    Their methods ask it, when they are first called, not to compile them; here nothing is compiled.
    """
    optimizer: Any = torch.optim.Optimizer
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        plain = getattr(optimizer, name).__wrapped__
        plain.__dynamo_disable = plain
