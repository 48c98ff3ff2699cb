"""Hardware: load, energy and place of a node's GPUs and network ports. Start at sampler.py."""
