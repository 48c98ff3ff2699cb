"""A simulated cluster: traces of days, and who has the nodes, serving or training."""
