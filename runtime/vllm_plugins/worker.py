"""What vLLM's worker lacks: for an in-place weight change, for seeds, for capture at little cost.

Loaded inside vLLM's engine process, `--worker-extension-cls`. replica.py and vllm_engine.py call
it over `/collective_rpc`; nobody else imports this module.
"""

from typing import Any


class Extension:
    """Mixed into vLLM's worker, whose `model_runner` it uses."""

    model_runner: Any

    def mend(self) -> None:
        """Called once, before any request."""
        self._spare_ranks()
        self._spare_seeds()

    def _spare_seeds(self) -> None:
        """Let a prompt that is read in several steps draw from its request's generator in the last.

        vLLM draws in each of them and turns the generator back, which one on CPU cannot: the engine
        died of it. What is drawn in the others is thrown away, so another generator will do.
        """
        from vllm.platforms import current_platform

        runner = self.model_runner
        if not current_platform.is_cpu():
            return
        full = runner.sample_tokens

        def sample_tokens(grammar_output: Any) -> Any:
            batch = runner.input_batch
            unfinished = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
            spared = {
                row: batch.generators.pop(row) for row in unfinished if row in batch.generators
            }
            try:
                return full(grammar_output)
            finally:
                batch.generators.update(spared)

        runner.sample_tokens = sample_tokens

    def _spare_ranks(self) -> None:
        """Gather logprobs of sampled tokens without counting their ranks, which nobody is shown.

        Counting goes over the whole vocabulary, for each token of each request that is captured.
        Steps in which a client asks for alternatives too are left to vLLM.
        """
        import torch
        from vllm.v1.outputs import LogprobsTensors

        sampler = self.model_runner.sampler
        full = getattr(sampler, "gather_logprobs", None)
        if full is None:  # another of vLLM's samplers: it goes on as it does
            return

        def gather(logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
            if num_logprobs:
                return full(logprobs, num_logprobs, token_ids)
            column = token_ids.unsqueeze(-1)
            ranks = torch.zeros_like(token_ids, dtype=torch.int32)
            return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), ranks)

        sampler.gather_logprobs = gather

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
