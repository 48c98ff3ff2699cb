"""Slots of the pool: the version that each replica serves, its proof, adapters and restarts."""
