"""Exports of runs and datasets in formats of other tools."""
