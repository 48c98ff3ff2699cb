"""Bridged model: build, fill and export a Megatron model through NVIDIA's Megatron-Bridge.

Megatron-Bridge reads a Hugging Face config into Megatron's own, and knows where each tensor of the
files lies in the model under tensor, pipeline and expert parallelism. The chunk is Megatron's
GPTModel, with the Head of the megatron backend. Called by models/backends.py. Read next:
bridged_kinds.py
for the kinds; models/model.py, which builds the same by own tables.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache, partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)

from cray_agents.errors import BadInput, JobError, SetupError
from cray_agents.runtime.registry.foreign_model import EMBEDDING, HEAD
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.attention import RMSNorm
from cray_agents.trainers.models.head import padded_vocab
from cray_agents.trainers.models.layer_choice import INSTALL_TE, has_transformer_engine
from cray_agents.trainers.models.megatron_on_cpu import import_on_cpu
from cray_agents.trainers.models.model import (
    DTYPES,
    finish_chunk,
    recomputation,
    uneven_stages,
)
from cray_agents.trainers.models.transformers_backend.packed_attention import PackedMask, attend
from cray_agents.trainers.models.transformers_backend.parent_files import ParentFiles
from cray_agents.trainers.models.weights import FilePlan
from cray_agents.training_jobs import Hyperparameters, Layout

ROPES = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the length
_LAYER = re.compile(r"\.layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_NAMED = 5


@cache
def load_bridge() -> None:
    """Import Megatron-Bridge; Megatron must be loaded. Raises SetupError if it cannot be."""
    try:
        if torch.cuda.is_available():
            importlib.import_module("megatron.bridge")
        else:
            import_on_cpu("megatron.bridge")
    except ImportError as error:
        raise SetupError(
            f"Megatron-Bridge is installed, and cannot be imported: {error}; install what it asks"
            " for, as `pip install 'cray-agents[bridge]'` does"
        ) from error
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type("SinkAttention", "column")  # its sinks, one a head


class BridgedParent:
    """A parent's files, and Megatron-Bridge's converter for them. Nothing is read yet."""

    def __init__(self, files: ParentFiles) -> None:
        load_bridge()
        from megatron.bridge import AutoBridge
        from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
        from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource

        class Tensors(StateSource):  # type: ignore[misc]
            """The parent's tensors, dequantised, each read when it is asked for."""

            def get_all_keys(self) -> list[str]:
                return list(files.stored)

            def load_tensors(self, keys_to_load: list[str]) -> dict[str, torch.Tensor]:
                return {name: files.read(name) for name in keys_to_load}

        self.files = files
        self.skeleton = files.skeleton()
        parent = PreTrainedCausalLM(str(files.folder))
        parent.config = deepcopy(self.skeleton.config)
        parent.config.architectures = [type(self.skeleton).__name__]
        parent._state_dict_accessor = StateDict(Tensors())
        self.converter = AutoBridge(parent)

    def tasks(self, chunks: list[Any]) -> list[tuple[torch.Tensor | None, list[str]]]:
        """Return each weight of the model, None if other ranks have it, with its tensors' names.

        Collective. Of experts only those of this rank are named, unless they are one tensor.
        """
        pairs = []
        for task in filter(None, self.converter.get_conversion_tasks(chunks)):
            names = task.mapping.hf_param
            pairs.append(
                (task.param_weight, [names] if isinstance(names, str) else [*names.values()])
            )
        return pairs


# ---- build
def build_bridged(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    on_cpu: bool,
    recompute: str,
    source: BridgedParent,
    *,
    loaded: bool = True,
) -> list[Any]:
    """Build this rank's chunk of the model (GPTModel), with its weights if `loaded`. Collective.

    Raises BadInput for a model that these layers would compute otherwise than transformers.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not on_cpu and not has_transformer_engine():
        raise SetupError(f"backend=megatron-bridge on GPUs needs Transformer Engine: {INSTALL_TE}")
    provider = source.converter.to_megatron_provider(load_weights=False)
    inverse, scaling = _rotation(source.skeleton, provider)
    for name, value in _options(model, layout, hyper, on_cpu, recompute, provider).items():
        setattr(provider, name, value)
    if scaling != 1.0:  # a factor of both queries and keys
        provider.softmax_scale = scaling**2 * (provider.softmax_scale or model.head_size**-0.5)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    chunk = provider.provide(
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    if on_cpu:
        _add_biases_to_copies(chunk)
    chunks = [finish_chunk(chunk, model, hyper, inverse, on_cpu)]
    _check_tensors(chunks, source)
    if loaded:
        fill_bridged(chunks, source)
        _show_way_back(chunks, source)
    return chunks


def _options(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    on_cpu: bool,
    recompute: str,
    provider: Any,
) -> dict[str, Any]:
    """Return the options that do not depend on the kind, as transformer_config sets them."""
    precision = DTYPES[hyper.dtype]
    values: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bf16": hyper.dtype == "bfloat16",
        "fp16": False,
        "params_dtype": precision,
        "pipeline_dtype": precision,
        "autocast_dtype": precision,
        "use_cpu_initialization": on_cpu,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence_parallel,
        "variable_seq_lengths": True,
        "batch_p2p_sync": False,
        "calculate_per_token_loss": True,
        "deallocate_pipeline_outputs": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_overlap": False,
        "mtp_num_layers": None,
        "vocab_size": padded_vocab(model.vocab, layout.tensor),
        "should_pad_vocab": False,
        "seq_length": model.max_tokens,
        "position_embedding_type": "rope",  # the angles are transformers' own: `_rotation`
        "rope_scaling": False,
        "yarn_rotary_scaling_factor": None,
        **recomputation(recompute),
        **uneven_stages(model, layout),
    }
    if not on_cpu:
        return values
    plain = provider.activation_func is F.silu and not provider.add_bias_linear
    fusions = ("masked_softmax", "bias_dropout", "apply_rope", "cross_entropy_loss")
    return values | {
        **{f"{name}_fusion": False for name in fusions},
        "bias_activation_fusion": plain,  # by kernels.py
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "moe_router_dtype": None,
        "transformer_layer_spec": _layers_on_cpu,
    }


def _layers_on_cpu(config: Any) -> Any:
    """Return the layers of a chunk, in torch: as Megatron-Bridge has them with its engine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    odd = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False}
    odd |= {"multi_latent_attention": False, "rotary_interleaved": False}
    for name, value in odd.items():
        if (actual := getattr(config, name)) != value:
            raise BadInput(
                f"backend=megatron-bridge has no layers with {name}={actual} on CPUs: train on"
                " GPUs, or ask for backend=transformers",
                param="backend",
            )
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=None
    )
    spec.layer_norm = RMSNorm
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention.core_attention = ModuleSpec(module=sink_attention())
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def _add_biases_to_copies(chunk: Any) -> None:
    """Let experts add their last biases, in place, to copies: autograd refuses it for outputs."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    def copied(forward: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Any]:
        out, bias = forward(*args, **options)
        return out.clone(), bias

    for layer in chunk.modules():
        if isinstance(layer, SequentialMLP) and layer.config.add_bias_linear:
            for expert in layer.local_experts:
                expert.linear_fc2.forward = partial(copied, expert.linear_fc2.forward)


def _rotation(skeleton: Any, provider: Any) -> tuple[torch.Tensor, float]:
    """Return transformers' frequencies [size / 2] of rotated positions, and their scaling.

    Megatron-Bridge takes some of these numbers from a family's published model, whatever a config
    says.
    """
    rope = getattr(skeleton.config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ROPES:
        raise BadInput(
            f"backend=megatron-bridge knows rotary positions of the types {', '.join(ROPES)}, and"
            f" config.json has rope_parameters={rope}: ask for backend=transformers",
            param="backend",
        )
    kind = next(type(part) for part in skeleton.modules() if hasattr(part, "inv_freq"))
    rotary = kind(skeleton.config)
    inverse, scaling = rotary.inv_freq.detach().float().clone(), float(rotary.attention_scaling)
    if scaling != 1.0 and 2 * len(inverse) != provider.kv_channels:
        raise BadInput(
            f"backend=megatron-bridge cannot scale positions by {scaling:g} that rotate"
            f" {2 * len(inverse)} of a head's {provider.kv_channels} numbers: ask for"
            " backend=transformers",
            param="backend",
        )
    return inverse, scaling


def _check_tensors(chunks: list[Any], source: BridgedParent) -> None:
    """Raise BadInput for tensors that the model has no place for, or could not be rounded to."""
    files = source.files
    stored = files.stored
    carried: set[str] = set()
    for _, names in source.tasks(chunks):
        carried.update(_EXPERT.sub(".experts.#.", name) for name in names)
        if len({stored[name][0] for name in names if name in stored}) > 1:
            raise BadInput(
                f"{', '.join(names)} make one weight of the model and are stored in several types:"
                " save them in one",
                param="parent",
            )
    if chunks[0].share_embeddings_and_output_weights and {EMBEDDING, HEAD} <= stored.keys():
        carried.add(HEAD)
        if not torch.equal(files.read(EMBEDDING), files.read(HEAD)):
            raise BadInput(
                f"{files.folder} has two tensors, {EMBEDDING} and {HEAD}, which config.json calls"
                " one (tie_word_embeddings), and they differ: correct the config",
                param="parent",
            )
    lost = [
        name
        for name in stored
        if _EXPERT.sub(".experts.#.", name) not in carried and name not in files.copied
    ]
    if lost:
        raise BadInput(
            f"{files.folder}: Megatron-Bridge has no place for {_listed(lost)}: ask for"
            " backend=transformers",
            param="backend",
        )


# ---- weights
@torch.no_grad()
def fill_bridged(chunks: list[Any], source: BridgedParent) -> None:
    """Fill this rank's chunk with the parent's weights. Collective.

    Raises BadInput for weights that the files do not have.
    """
    named = [(name, weight) for chunk in chunks for name, weight in chunk.named_parameters()]
    for _, weight in named:
        weight.fill_(torch.nan)  # Megatron-Bridge passes over what it does not find
    source.converter.load_hf_weights(chunks)
    unread = [name for name, weight in named if torch.isnan(weight).any()]
    if unread:
        raise BadInput(
            f"{source.files.folder} lacks what Megatron-Bridge reads into {_listed(unread)}: ask"
            " for backend=transformers",
            param="parent",
        )


@torch.no_grad()
def _show_way_back(chunks: list[Any], source: BridgedParent) -> None:
    """Export the first layer of each kind; raise BadInput unless the parent's numbers come back.

    So it is with a matrix whose orientation Megatron-Bridge guesses by its shape. Collective.
    """
    kinds: dict[str, Any] = {}
    for task in filter(None, source.converter.get_conversion_tasks(chunks)):
        kinds.setdefault(_LAYER.sub(".layers.#.", task.global_param_name), task)
    changed = []
    for name, tensor in source.converter.export_hf_weights(
        chunks, cpu=True, show_progress=False, conversion_tasks=list(kinds.values())
    ):
        if not torch.equal(tensor, source.files.read(name).to(tensor.dtype)):
            changed.append(name)
    if changed:
        raise BadInput(
            f"{source.files.folder}: Megatron-Bridge does not give back {_listed(changed)} as it"
            " was: ask for backend=transformers",
            param="backend",
        )


def stored_types_of_bridged(
    chunks: list[Any], source: BridgedParent
) -> Iterator[tuple[torch.Tensor, set[torch.dtype]]]:
    """Yield this rank's weights, each with the type that it is stored in. Collective."""
    stored = source.files.stored
    for weight, names in source.tasks(chunks):
        types = {stored[name][0] for name in names if name in stored}
        if weight is not None and types:
            yield weight, types


def plan_bridged(
    chunks: list[Any],
    source: BridgedParent,
    order: Callable[[Mapping[str, torch.dtype]], list[str]],
) -> FilePlan:
    """Plan an export: rank 0 writes all tensors, which Megatron-Bridge gathers on every rank."""
    stored, copied = source.files.stored, source.files.copied
    dtypes = {name: dtype for name, (dtype, _) in stored.items()}
    shapes = {name: shape for name, (_, shape) in stored.items()}
    sizes = {name: prod(shapes[name]) * dtypes[name].itemsize for name in order(dtypes)}
    writes = torch.distributed.get_rank() == 0

    def exported() -> Iterator[tuple[str, torch.Tensor]]:
        left = set(stored)
        for name, tensor in source.converter.export_hf_weights(
            chunks, cpu=True, show_progress=False
        ):
            if name not in left or tuple(tensor.shape) != shapes[name]:
                raise JobError(
                    f"Megatron-Bridge exports {name!r} of shape {list(tensor.shape)}, and the"
                    " parent has no such tensor"
                )
            left.remove(name)
            if writes:
                yield name, tensor
        if left - copied:
            raise JobError(f"Megatron-Bridge does not export {_listed(sorted(left - copied))}")
        if writes:
            for name in sorted(left):
                yield name, source.files.read(name)

    return FilePlan(dtypes, shapes, sizes, list(sizes) if writes else [], exported)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


@cache
def sink_attention() -> type[Any]:
    """Return the class. Megatron must be loaded: the class is made of one of Megatron's."""
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.utils import is_layer_window_attention

    class SinkAttention(DotProductAttention):  # type: ignore[misc]
        """Causal attention within each of the packed sequences (`thd`)."""

        def __init__(self, config: Any, layer_number: int, *args: Any, **options: Any) -> None:
            super().__init__(config, layer_number, *args, **options)
            local = is_layer_window_attention(
                config.window_size, config.window_attn_skip_freq, self.layer_number
            )
            self.window: int | None = config.window_size[0] if local else None
            if isinstance(self.softmax_offset, torch.nn.Parameter):  # Megatron leaves it unmarked
                set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: None = None,
            attn_mask_type: Any = None,
            attention_bias: None = None,
            packed_seq_params: Any = None,
        ) -> torch.Tensor:
            """Attend over [tokens, heads, head size]; return [tokens, heads * head size]."""
            lengths = tuple(packed_seq_params.lengths.tolist())
            query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
            attended, _ = attend(
                self,
                query,
                key,
                value,
                PackedMask(lengths, self.window),
                scaling=self.softmax_scale,
                s_aux=self.softmax_offset,
            )
            return attended[0].flatten(1)

    return SinkAttention
