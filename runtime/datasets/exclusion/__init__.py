"""Exclusion: what a training set must not have, held-out texts and samples that repeat others."""
