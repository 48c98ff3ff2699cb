"""Formats: a module for each tool that reads exports. exporter.py lists them, jsonl.py is short."""
