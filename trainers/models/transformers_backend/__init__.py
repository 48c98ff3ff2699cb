"""The backend transformers: any causal language model of transformers, in Megatron's machinery."""
