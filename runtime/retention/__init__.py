"""Disk given back: which versions are still needed, and removal of the others."""
