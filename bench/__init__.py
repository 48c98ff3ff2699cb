"""`make bench`: ratios measured side by side in one run, medians of ROUNDS rounds. No assertions.

Prints Markdown rows for BENCHMARKS.md. `make bench ARGS="store batches"` runs only those.
"""
