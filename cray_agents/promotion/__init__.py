"""Promotion: a paired sequential test of candidates, its e-processes, figures of evaluations."""
