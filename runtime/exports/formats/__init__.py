"""Formats: a module for each tool that reads exports. catalog.py lists them, jsonl.py is short."""
