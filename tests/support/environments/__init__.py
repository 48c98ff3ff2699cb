"""Environments of other frameworks, their Pythons, and workers that carry out runs in them."""
