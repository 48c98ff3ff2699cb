"""Samples: token sequences of runs and demonstrations, their weights, and the shards they go to."""
