"""Worker extension: repair vLLM's worker for weight changes, CPU layers, seeds, cheap logprobs.

vLLM loads it in the engine's process (`--worker-extension-cls`, set by
runtime/pool/vllm_process.py). runtime/pool/vllm_engine.py calls it over
`/collective_rpc`.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def read_patches(folder: Path, files: dict[str, str], patch: Callable[..., Any]) -> Iterator[Any]:
    """Yield the changes in a folder's files as vLLM's `CheckpointWeightPatch`es.

    `files`: name -> SHA-256. Raises ValueError where one is damaged.
    """
    import torch

    from cray_agents.runtime.vllm_plugins.delta_codec import by_tensor

    dtypes = {"F64": torch.float64, "F32": torch.float32}
    dtypes |= {"BF16": torch.bfloat16, "F16": torch.float16}
    for file, sha256 in files.items():
        content = (folder / file).read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"{folder / file} is damaged: it is not what its SHA-256 says")
        for entry, places, values in by_tensor(content):
            numbers = torch.from_numpy(values.view(f"<i{values.itemsize}")).view(
                dtypes[entry.dtype]
            )
            yield patch(
                entry.name, entry.shape, dtypes[entry.dtype], numbers, torch.from_numpy(places)
            )


class Extension:
    """A mixin of vLLM's worker, whose fields and `update_weights` it uses."""

    model_runner: Any
    vllm_config: Any
    device: Any
    weight_transfer_engine: Any
    update_weights: Callable[[dict[str, Any]], None]

    def patch_worker(self) -> None:
        """Patch model runner, sampler and layers. vllm_engine.py calls this before any request."""
        self._skip_ranks()
        self._skip_generators()
        self._pack_experts_anew()
        self._rotate_all_heads()
        self._ask_for_amx()

    def _ask_for_amx(self) -> None:
        """Ask the kernel for AMX, which vLLM's attention in bfloat16 uses on a CPU that has it.

        oneDNN asks at its first large product. A small model has none, and died of SIGILL.
        """
        import torch
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            torch.cpu._init_amx()

    def _skip_generators(self) -> None:
        """Use a request's seeded generator only in the last step that reads its prompt.

        vLLM samples in every step of a long prompt, discards the sample, and rewinds the generator.
        A generator on CPU cannot rewind, and the engine died of that. The discarded samples can
        come from any other generator.
        """
        from vllm.platforms import current_platform

        runner = self.model_runner
        if not current_platform.is_cpu():
            return
        original = runner.sample_tokens

        def sample_tokens(grammar_output: Any) -> Any:
            batch = runner.input_batch
            unfinished = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
            unused = {
                row: batch.generators.pop(row) for row in unfinished if row in batch.generators
            }
            try:
                return original(grammar_output)
            finally:
                batch.generators.update(unused)

        runner.sample_tokens = sample_tokens

    def _skip_ranks(self) -> None:
        """Gather logprobs of sampled tokens without their ranks, which capture does not use.

        Ranking reads the whole vocabulary for each captured token. Steps in which a client asks
        for alternatives are left to vLLM.
        """
        import torch
        from vllm.v1.outputs import LogprobsTensors

        sampler = self.model_runner.sampler
        original = getattr(sampler, "gather_logprobs", None)
        if original is None:  # another kind of sampler, which stays unchanged
            return

        def gather(logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
            if num_logprobs:
                return original(logprobs, num_logprobs, token_ids)
            column = token_ids.unsqueeze(-1)
            ranks = torch.zeros_like(token_ids, dtype=torch.int32)
            return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), ranks)

        sampler.gather_logprobs = gather

    def _pack_experts_anew(self) -> None:
        """Pack experts' weights at every load, which vLLM does at the first alone.

        On CPU it computes with packed weights. It took reloaded ones, which are not, for packed.
        """
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        methods = {
            id(layer.quant_method): layer.quant_method
            for layer in self.model_runner.get_model().modules()
            if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None
        }
        for method in methods.values():

            def process(
                layer: Any,
                method: Any = method,
                original: Any = method.process_weights_after_loading,
            ) -> None:
                method.moe_kernel = None  # as before the first load
                original(layer)

            method.process_weights_after_loading = process

    def _rotate_all_heads(self) -> None:
        """Rotate queries and keys of [tokens, heads, size] as [tokens, heads * size].

        On CPU vLLM takes the last dimension for all heads of a token, and rotates wrong parts of
        three. Latent attention and LFM2 give three.
        """
        from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, RotaryEmbedding) and layer._forward_method == layer.forward_cpu:

                def rotate(
                    positions: Any, query: Any, key: Any = None, flat: Any = layer.forward_cpu
                ) -> tuple[Any, Any]:
                    keys = None if key is None else key.flatten(1)
                    queries, keys = flat(positions, query.flatten(1), keys)
                    return queries.view_as(query), None if key is None else keys.view_as(key)

                layer._forward_method = rotate

    def patch_weights(self, folder: str, files: dict[str, str]) -> dict[str, bool]:
        """Put the changes of a delta checkpoint into the weights, by vLLM's own patch loader.

        Not on CPU, whose packed layers keep no originals. `files`: see `read_patches`. If this
        fails, perhaps half-way, all weights must be loaded again. Raises ValueError.
        """
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            return {"patched": False}
        patches = list(read_patches(Path(folder), files, CheckpointWeightPatch))
        model, runner = self.model_runner.get_model(), self.model_runner
        # each file names a tensor once, and its places ascend
        load_checkpoint_weight_patches(model, patches, validate_unique_indices=False)
        for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            getattr(runner, reset, lambda: None)()
        return {"patched": True}

    # ---- weights from the trainer's ranks; see runtime/pool/weight_transfer.py
    def gpu_uuid(self) -> str:
        """Return the name of this worker's GPU; "" without one."""
        import torch

        if self.device.type != "cuda":
            return ""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def hold_sender(self, number: int) -> None:
        """Keep the group that was just joined: vLLM's engine has room for one."""
        engine = self.weight_transfer_engine
        self._groups = {**getattr(self, "_groups", {}), number: engine.model_update_group}
        engine.model_update_group = None

    def use_sender(self, number: int) -> None:
        """Receive from the rank of this number next."""
        self.weight_transfer_engine.model_update_group = self._groups[number]

    def release_senders(self) -> None:
        """Leave all groups."""
        engine = self.weight_transfer_engine
        for group in getattr(self, "_groups", {}).values():
            engine.model_update_group = group
            engine.shutdown()
        self._groups = {}

    def load_handles(self, update: dict[str, Any]) -> None:
        """Load tensors out of another process's buffers on this GPU, given as plain numbers.

        vLLM's route for them takes a pickle, which could run code here, and refuses it by default.
        """
        import torch
        from torch.storage import TypedStorage

        handles = {
            uuid: (
                *(torch.Tensor, torch.Size([one["size"]]), (1,), one["offset"]),
                *(TypedStorage, torch.uint8, 0, bytes.fromhex(one["handle"])),
                *(one["storage_bytes"], one["storage_offset"], False),
                *(bytes.fromhex(one["counter"]), one["counter_offset"]),
                *(bytes.fromhex(one["event"]), one["event_sync"]),
            )
            for uuid, one in update["ipc_handles"].items()
        }
        self.update_weights({**update, "ipc_handles": handles})

    def abandon_update(self, begun: bool) -> None:
        """Make the model whole in form after half an update, and leave all groups.

        Without this vLLM's loader still waits for the rest, and the next load of files fails.
        """
        from vllm.config import set_current_vllm_config

        if begun:
            engine = self.weight_transfer_engine
            with set_current_vllm_config(self.vllm_config):
                engine.finish_weight_update()
                engine.reset_weight_update_target()
            self._weight_update_active = False
        self.release_senders()

    def repack_kept_weights(self) -> dict[str, int]:
        """Pack the weights again of layers that keep both the original and a packed copy.

        On CPU, vLLM computes with packed copies. `reload_weights` renews those of ordinary linear
        layers, which drop the original. A tied output layer keeps the original, since it is the
        embedding too, and would compute with its old copy. Returns how many layers were packed.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return {"repacked": 0}
        kept = [
            layer
            for layer in self.model_runner.get_model().modules()
            if hasattr(layer, "cpu_linear") and layer.weight.ndim == 2 and layer.weight.numel()
        ]
        for layer in kept:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return {"repacked": len(kept)}
