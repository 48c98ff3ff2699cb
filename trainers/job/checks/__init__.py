"""Checks of a job's inputs: they match the parent, and the engine agrees on its weights."""
