"""Data: a dataset on disk, the order in which it is trained on, and micro-batches packed of it."""
