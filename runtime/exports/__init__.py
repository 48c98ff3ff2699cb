"""Exports of runs and datasets in formats of other tools.

An export reads items (sources.py), turns each into records (formats/, with
store/run_conversation.py and chat_messages.py) and writes them to files (export_files.py). Called
by the command line and the gateway. Read next: exporter.py.
"""
