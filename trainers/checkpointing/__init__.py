"""Checkpointing: resume points of a job, and its published checkpoint."""
