"""`make bench ARGS=bfcl`: a real model learns function calling from its own runs, on BFCL v4.

`ARGS="bfcl rft-0 table"` names stages; without names all run that have no result yet. arms.py lists
them. The agent, its tasks and its reward are those of cookbook/09_function_calling.py.
"""
