"""Model versions: names, history, lineage, checkpoints, canaries."""
