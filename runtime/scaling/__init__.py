"""Scaling: who has the nodes, serving or training, decided by rules."""
