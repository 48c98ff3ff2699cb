"""What vLLM's worker lacks for an in-place weight change; loaded inside vLLM's engine process.

`--worker-extension-cls cray_agents.runtime.vllm_worker.SwapExtension`; vllm_engine.py calls it
after `reload_weights`, over `/collective_rpc`. Nobody else imports this module.
"""

from typing import Any


class SwapExtension:
    """Mixed into vLLM's worker, whose `model_runner` it uses."""

    model_runner: Any

    def repack_kept_weights(self) -> dict[str, int]:
        """Pack anew the weights of which a layer keeps both the original and a packed copy.

        On CPU, vLLM computes with packed copies. `reload_weights` renews those of ordinary linear
        layers, which drop the original; a tied output layer keeps it, being the embedding too, and
        would go on computing with the old copy. Returns how many layers were packed.
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
