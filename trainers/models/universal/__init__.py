"""The universal way: any causal language model of transformers, in Megatron-core's machinery."""
