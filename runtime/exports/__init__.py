"""Runs and datasets in formats that other tools read."""
