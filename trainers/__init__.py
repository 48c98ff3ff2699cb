"""Learning: datasets to batches, Megatron-core."""
