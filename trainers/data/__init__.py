"""Data: a dataset's samples, their order in training, and packed micro-batches."""
