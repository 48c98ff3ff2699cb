"""The self-improving loop, from runs to promoted weights. Start at loop.py."""
