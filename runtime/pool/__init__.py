"""Replicas: the version that each one serves, and changes of version without lost requests."""
