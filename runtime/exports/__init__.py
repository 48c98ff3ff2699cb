"""Exports of runs and datasets in formats of other tools.

An export reads items (sources/), turns each into records (formats/, conversations/) and writes
them to files (writers/). Called by the command line and the gateway. Read next: exporter.py.
"""
