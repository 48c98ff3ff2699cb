"""Text model: the causal language model of transformers that a config.json describes.

Of a model that also sees or hears, only the text part is built. A kind that transformers does not
know is refused by name, unless the operator allows the code that comes with the model
(runtime/registry/foreign_model.py). Nothing is fetched. Called by parent_files.py. Read next:
conversions.py.
"""

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from cray_agents.errors import BadInput, SetupError
from cray_agents.runtime.registry.foreign_model import AUTO_MAP, TIED, code_place

# kinds of the hub whose code is that of another kind, and what transformers calls it
_SAME_AS = {"kimi_k2": "deepseek_v3"}
# settings that are not the model's: they choose kernels, which may be fetched, or say how it is
# stored
_FOREIGN = {"auto_map", "quantization_config", "use_kernels"}
_FOREIGN |= {f"{start}{part}_implementation" for start in ("", "_") for part in ("attn", "experts")}
_FOREIGN |= {"_attn_implementation_internal", "_experts_implementation_internal"}
_COUNT = re.compile(r"(layers|depth|experts)$")  # fields that number a model's parts
_MOST = 1 << 14  # more than in any known model


class TextModel:
    """A text model's class and config, and the class and config of the checkpoint around it.

    Raises BadInput for a kind that transformers does not know or that has no causal language model,
    and for a config that it refuses.
    """

    def __init__(self, raw: dict[str, Any], folder: Path) -> None:
        self._folder = folder
        with self._refused("is no config that transformers takes"):
            own = None if is_known(raw) else _OwnCode(raw, folder)
            self.whole_config = _parse(raw, folder, own)
            self.config = deepcopy(self.whole_config.get_text_config())
        self.nested = type(self.config) is not type(self.whole_config)
        if self.nested and TIED not in (raw.get("text_config") or {}):
            self.config.tie_word_embeddings = self.whole_config.tie_word_embeddings
        from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

        self._whole = (
            _class_for(AutoModelForMultimodalLM, self.whole_config) if self.nested else None
        )
        self._class = _class_for(AutoModelForCausalLM, self.config)
        if own is not None:
            self._class, self.config = own.model, self.whole_config
            self._whole = own.model if self.nested else None
        if self._class is None:
            self._class = _class_for(AutoModelForMultimodalLM, self.config)
        if self._class is None:  # the whole model, whose other parts are cut off
            self._class, self.config = self._whole, self.whole_config
        if self._class is None:
            raise BadInput(
                f"cannot train a {raw.get('model_type')!r} model ({folder}): transformers has no"
                " causal language model of this kind; give a decoder that generates text",
                param="parent",
            )

    @property
    def layers(self) -> int:
        """The number of the text model's layers."""
        return int(getattr(self.config.get_text_config(), "num_hidden_layers", 0) or 0)

    def build(self, dtype: torch.dtype, device: str) -> Any:
        """Return the module with buffers computed, and memory for parameters but no values.

        Raises SetupError where it needs a package that is not installed.
        """
        module = self._construct(self._class, self.config, dtype, device)
        if self.config is self.whole_config and self.nested:
            _cut_off_other_parts(module)
        plan = module._get_dtype_plan(dtype)
        if plan:
            from transformers.core_model_loading import build_glob_alternation

            pattern, _, _ = build_glob_alternation(list(plan))
            for name, tensor in _tensors(module).items():
                if pattern.search(name) and tensor.is_floating_point():
                    tensor.data = tensor.data.to(torch.float32)
        return module.eval()

    def build_whole(self) -> Any:
        """Return the module with all parts on the meta device; None where it is text alone.

        Also None where a part of it needs a package that is not installed.
        """
        if self._whole is None:
            return None
        try:
            return self._construct(self._whole, self.whole_config, torch.float32, "meta")
        except SetupError:
            return None

    def draw(self, seed: int) -> Any:
        """Return the module with all parts, and weights that transformers draws from a seed.

        They are of the config's type, on the CPU. Raises SetupError as `build` does.
        """
        kind, config = self._whole or self._class, self.whole_config
        dtype = getattr(config.get_text_config(), "dtype", None) or torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._construct(kind, config, dtype, "cpu", drawn=True)

    def _construct(
        self, kind: Any, config: Any, dtype: torch.dtype, device: str, *, drawn: bool = False
    ) -> Any:
        refused = self._refused(f"describes no {kind.__name__} that transformers can build")
        try:
            with refused, nullcontext() if drawn else _no_values(), torch.device(device):
                return kind._from_config(deepcopy(config), dtype=dtype)
        except ImportError as error:
            reason = " ".join(str(error).split())[:300]
            raise SetupError(f"{kind.__name__} of transformers needs: {reason}") from error

    @contextmanager
    def _refused(self, why: str) -> Iterator[None]:
        from huggingface_hub.errors import StrictDataclassError

        try:
            yield
        except BadInput:
            raise
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            StrictDataclassError,
            TypeError,
            ValueError,
        ) as error:
            reason = " ".join(str(error).split())[:300]
            raise BadInput(
                f"{self._folder}/config.json {why}: {reason or type(error).__name__}; correct it",
                param="parent",
            ) from error


def is_known(raw: dict[str, Any]) -> bool:
    """Return True if transformers itself has the kind of a config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = raw.get("model_type")
    return isinstance(kind, str) and _SAME_AS.get(kind, kind) in CONFIG_MAPPING


class _OwnCode:
    """The classes of a kind that transformers does not know, from code that may run.

    Raises BadInput where there is none, or the operator does not allow its directory.
    """

    def __init__(self, raw: dict[str, Any], folder: Path) -> None:
        named = raw.get(AUTO_MAP)
        named = named if isinstance(named, dict) else {}
        classes = [named.get(name) for name in ("AutoConfig", "AutoModelForCausalLM")]
        places = [code_place(each, folder) if isinstance(each, str) else None for each in classes]
        if None in places:
            hint = "Give a directory of a kind that it knows"
            if named:
                hint = (
                    f"Its auto_map names code ({', '.join(map(str, named.values()))}), which is"
                    " never run unless the operator allows the directory with that code"
                    " (trust_remote_code in cray-agents.toml); it must name AutoConfig and"
                    " AutoModelForCausalLM"
                )
            raise BadInput(
                f"cannot train a {raw.get('model_type')!r} model ({folder}): transformers"
                f" {importlib.metadata.version('transformers')} does not know this kind. {hint}",
                param="parent",
            )
        self.config, self.model = (_own_class(*place) for place in places if place is not None)


def _own_class(directory: Path, name: str) -> Any:
    """Import a class of the directory, which runs its code. Raises BadInput, SetupError."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        return get_class_from_dynamic_module(name, str(directory), local_files_only=True)
    except ImportError as error:
        reason = " ".join(str(error).split())[:300]
        raise SetupError(f"the code of {directory} needs: {reason}") from error
    except (OSError, SyntaxError) as error:
        raise BadInput(
            f"{name} cannot be imported from {directory}: {error}; download the model again",
            param="parent",
        ) from error


def _parse(raw: dict[str, Any], folder: Path, own: _OwnCode | None) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(raw.get("model_type"))
    known = _SAME_AS.get(kind, kind)
    _refuse_damaged(raw, folder)
    config_class: Any = CONFIG_MAPPING[known] if own is None else own.config
    fields = _without_foreign(config_class._decode_special_floats(raw))  # its JSON has no infinity
    return config_class.from_dict(fields | {"model_type": known})


def _refuse_damaged(fields: dict[str, Any], folder: Path) -> None:
    """Raise BadInput for a number of parts that no model has; to build them would never end."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _refuse_damaged(value, folder)
        elif type(value) is int and _COUNT.search(name) and value > _MOST:
            raise BadInput(
                f"{folder}/config.json has {name} = {value}, which must be at most {_MOST}: the"
                " file was damaged; download it again",
                param="parent",
            )


def _without_foreign(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: _without_foreign(v) for k, v in value.items() if k not in _FOREIGN}


def _class_for(auto: Any, config: Any) -> Any:
    named = auto._model_mapping.get(type(config), None)
    return named[0] if isinstance(named, tuple | list) else named


@contextmanager
def _no_values() -> Iterator[None]:
    """Construct modules without drawing their weights: they are read from files."""
    from transformers import initialization

    with initialization.no_init_weights(), initialization.meta_device_safe_creation_ops():
        yield


def _cut_off_other_parts(module: Any) -> None:
    """Remove what is neither on the way to the decoder nor the output layer."""
    decoder, head = module.get_decoder(), module.get_output_embeddings()
    path = next((name for name, part in module.named_modules() if part is decoder), "")
    owner = module
    for step in path.split(".") if path else ():
        for name, child in list(owner.named_children()):
            if name != step and child is not head and next(child.parameters(), None) is not None:
                setattr(owner, name, None)
        owner = getattr(owner, step)


def _tensors(module: Any) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())
