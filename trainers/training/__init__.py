"""A training step over ranks: each rank's model chunks, optimizer and process groups."""
