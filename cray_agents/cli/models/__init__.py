"""`models`: versions, promotion, lineage, pruning."""
