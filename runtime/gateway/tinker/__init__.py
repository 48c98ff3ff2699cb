"""Tinker's wire API: what scripts of the `tinker` client ask, over training commands and the pool."""
