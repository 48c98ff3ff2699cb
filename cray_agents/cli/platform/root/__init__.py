"""Shared root of a platform: who controls it, and who may read it."""
