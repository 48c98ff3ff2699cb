"""Training: datasets to batches, Megatron-core training steps, checkpoints."""
