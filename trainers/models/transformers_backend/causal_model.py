"""Causal model: a network of transformers in the form that a training step and Megatron expect.

training/train_step.py builds it through models/backends.py. Megatron's data parallelism and
optimizer take any module; they read `config` of it. Rank 0 alone tests the packing, on a copy of
the network's first layers with float32 weights on the CPU, and sends the others the result. Read
next: passes.py, parent_files.py for the weights.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from torch.utils.checkpoint import checkpoint

from cray_agents.errors import BadInput
from cray_agents.trainers.models.architecture import MOST_LOGITS, Architecture
from cray_agents.trainers.models.transformers_backend.linear_adapter import LinearAdapter
from cray_agents.trainers.models.transformers_backend.parent_files import ParentFiles
from cray_agents.trainers.models.transformers_backend.passes import (
    LENGTHS,
    REFUSALS,
    Packing,
    Passes,
    choose_packing,
    cut_layers,
    layer_modules,
    untrained,
)
from cray_agents.trainers.models.transformers_backend.weight_shards import WeightShards
from cray_agents.training_jobs import Hyperparameters

_ENTROPY_NUMBERS = 1 << 24  # probabilities at a time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Agree = Callable[[Any], Any]  # rank 0's value, which JSON can hold, on every rank


class LogitsHead:
    """The loss of logits; its fields are those of Head (models/head.py)."""

    def __init__(self, temperature: float) -> None:
        self.rows: torch.Tensor | None = None
        self.want_entropy = False
        self.entropy: torch.Tensor | None = None
        self.want_top = False
        self.top: torch.Tensor | None = None
        self.temperature = temperature
        self.most_logits = sys.maxsize

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return -log p [n] of labels [n] under logits [n, vocabulary]."""
        logits = logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        self.entropy = _entropies(logits.detach()) if self.want_entropy else None
        self.top = logits.argmax(-1) if self.want_top else None
        return F.cross_entropy(logits, labels, reduction="none")


def _entropies(logits: torch.Tensor) -> torch.Tensor:
    """Return entropies [n] of the distributions of logits [n, vocabulary]."""
    size = max(1, _ENTROPY_NUMBERS // logits.shape[1])
    entropies = (torch.special.entr(rows.softmax(-1)).sum(-1) for rows in torch.split(logits, size))
    return torch.cat(list(entropies))


class TransformersModel(torch.nn.Module):
    """A network of transformers, called as Megatron's GPTModel is.

    `packing` says how it computes several sequences. `always_reached`: every trained parameter gets
    a gradient from each batch, so that gradients may travel during the backward pass. The network
    stays in evaluation mode: nothing is dropped at random, whatever its config says. `device` is
    that of its passes. `shards` is set where weights are spread over ranks (weight_shards.py).
    """

    pre_process = post_process = True

    def __init__(
        self,
        network: torch.nn.Module,
        config: Any,
        packing: Packing,
        temperature: float,
        device: torch.device,
        *,
        always_reached: bool,
        recompute: bool,
        vocab: int,
    ) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.model_type = ModelType.encoder_or_decoder
        self.network, self.config, self.packing = network, config, packing
        self.always_reached, self.device, self.vocab = always_reached, device, vocab
        self.shards: WeightShards | None = None
        self.head = LogitsHead(temperature)
        if device.type == "cuda":
            self.head.most_logits = MOST_LOGITS
        self._passes = Passes(network)
        self._passes.use(packing)
        if recompute:
            if not getattr(network, "supports_gradient_checkpointing", False):
                raise BadInput(
                    f"recompute=full is not built into transformers' {type(network).__name__}: ask"
                    " for recompute=none, and fewer max_tokens_per_microbatch",
                    param="recompute",
                )
            network.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self._recomputed = _recomputed_modules(network)
        self.train()

    def train(self, mode: bool = True) -> "TransformersModel":
        """Switch recomputation and adapters' dropout; the network stays in evaluation mode."""
        super().train(mode)
        self.network.eval()
        for module in self.network.modules():
            if isinstance(module, LinearAdapter) or module in self._recomputed:
                module.training = mode
        return self

    @torch.no_grad()
    def check_dtype(self, dtype: str, device: torch.device) -> None:
        """Raise BadInput if the family's code cannot compute with its weights in this type."""
        try:
            self._passes.logits(torch.arange(4, device=device), (3, 1))
        except torch.OutOfMemoryError:
            raise
        except REFUSALS as error:
            raise BadInput(
                f"transformers' {type(self.network).__name__} cannot compute in {dtype}: {error};"
                " ask for dtype=float32",
                param="dtype",
            ) from error

    def set_input_tensor(self, tensor: Any) -> None:
        """Do nothing: there are no pipeline stages before this one."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention_mask: None = None,
        *,
        labels: torch.Tensor,
        packed_seq_params: Any,
    ) -> torch.Tensor:
        """Return -log p [1, rows] of labels [1, rows] after the packed tokens [1, tokens]."""
        lengths = packed_seq_params.lengths.tolist()
        losses = self._losses_in_chunks(tokens[0], lengths, positions[0], labels[0])
        if losses is not None:
            return losses[None]
        logits = self._passes.logits(tokens[0], lengths, self.head.rows, positions[0])
        return self.head.losses(logits, labels[0])[None]

    def _losses_in_chunks(
        self,
        tokens: torch.Tensor,
        lengths: list[int],
        positions: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor | None:
        """Return the losses, of few rows at a time; None where all logits are few, or not apart.

        The backward pass computes the logits again.
        """
        head, size = self.head, max(1, self.head.most_logits // self.vocab)
        if head.rows is None or len(head.rows) <= size or self.shards is not None:
            return None
        states = self._passes.states(tokens, lengths, head.rows, positions)
        if states is None:
            return None

        def chunk(*rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            losses = head.losses(self._passes.head(rows[0]), rows[1])
            return losses, head.entropy, head.top

        pieces = [
            checkpoint(chunk, *rows, use_reentrant=False, preserve_rng_state=False)
            for rows in zip(torch.split(states, size), torch.split(labels, size), strict=True)
        ]
        losses, head.entropy, head.top = (
            None if column[0] is None else torch.cat(column) for column in zip(*pieces, strict=True)
        )
        return losses


def build_transformers(
    model: Architecture,
    hyper: Hyperparameters,
    source: ParentFiles,
    device: torch.device,
    recompute: str,
    agree: Agree,
    *,
    sharded: bool,
) -> TransformersModel:
    """Build the network with its weights, and choose its packing. Collective.

    Weights go from the files to the device one by one; rank 0's host needs room for those of the
    first layers of every kind in float32, with their largest gradient. With `sharded` the
    parameters hold nothing: weight_shards.py divides them first, and the caller fills the shards.
    Raises BadInput for modules to recompute, and on every rank for weights that rank 0 refuses.
    """
    if recompute not in ("none", "full"):
        raise BadInput(
            f"recompute={recompute}, but transformers' own module is computed again whole layers at"
            " a time (backend=transformers): ask for recompute=full, or none",
            param="recompute",
        )
    tested, problem = None, None
    if torch.distributed.get_rank() == 0:
        try:
            try:
                tested = _test(source, model.vocab, cut=True)
            except BadInput:  # a family may not compute without all of its layers
                tested = _test(source, model.vocab, cut=False)
        except BadInput as error:  # the others wait for the packing
            problem = str(error)
    tested, problem = agree((tested, problem))
    if problem is not None:
        raise BadInput(problem, param="parent")
    packing, never, sometimes = tested
    network = source.build(DTYPES[hyper.dtype], device, filled=not sharded)
    for name in never:
        network.get_parameter(name).requires_grad_(False)
    made = TransformersModel(
        network,
        _megatron_config(model, hyper, device, sharded=sharded),
        Packing(**{**packing, "split": tuple(packing["split"])}),
        hyper.policy.temperature,
        device,
        always_reached=not sometimes,
        recompute=recompute == "full",
        vocab=model.vocab,
    )
    if hyper.dtype != "float32" and not sharded:
        made.check_dtype(hyper.dtype, device)
    return made


def _recomputed_modules(network: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the modules that are computed again if they are in training mode when called.

    Layers of transformers are then switched to evaluation for their own code, which would drop
    numbers at random (in OPT, for one).
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    switched = {one for one in network.modules() if getattr(one, "gradient_checkpointing", False)}
    layers: set[torch.nn.Module] = {
        one for one in switched if isinstance(one, GradientCheckpointingLayer)
    }
    for layer in layers:
        modes: list[bool] = []

        def enter(layer: Any, _: Any, modes: list[bool] = modes) -> None:
            modes.append(layer.training)
            layer.training = False

        def leave(layer: Any, *_: Any, modes: list[bool] = modes) -> None:
            layer.training = modes.pop()

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave, always_call=True)
    return layers or switched


def _test(
    source: ParentFiles, vocabulary: int, *, cut: bool
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return a network's packing as JSON can hold it, and what `untrained` returns.

    With `cut` the first layers of every kind are tested, and nothing else is read.
    """
    network: Any = source.build(torch.float32, filled=False)
    kinds = {name: kind for name, kind, _ in layer_modules(network)}
    names = [name for name, one in network.named_parameters() if one.requires_grad]
    if cut:
        cut_layers(network)
    source.fill(network)
    packing = choose_packing(network, vocabulary)
    passes = Passes(network)
    passes.use(packing)
    tokens = torch.arange(sum(LENGTHS)) * 7919 % vocabulary

    def loss() -> torch.Tensor:
        return F.cross_entropy(passes.logits(tokens, LENGTHS), tokens.roll(-1))

    never, sometimes = untrained(network, loss, names)
    mixers = {kinds[name] for name in packing.split}
    split = [name for name, kind in kinds.items() if kind in mixers]
    return vars(packing) | {"split": split}, never, sometimes


def _megatron_config(
    model: Architecture, hyper: Hyperparameters, device: torch.device, *, sharded: bool
) -> Any:
    """Return what Megatron's data parallelism, schedule and optimizer read of a model."""
    from megatron.core.transformer import TransformerConfig

    precision = DTYPES[hyper.dtype]
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=1,
        bf16=hyper.dtype == "bfloat16",
        params_dtype=precision,
        pipeline_dtype=precision,
        autocast_dtype=precision,
        use_cpu_initialization=device.type == "cpu",
        calculate_per_token_loss=True,
        init_model_with_meta_device=sharded,  # lets FSDP take weights from the host, part by part
    )
