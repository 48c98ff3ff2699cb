"""Models: a Hugging Face config as a Megatron-core model spread over ranks, and its weights."""
