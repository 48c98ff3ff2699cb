"""Immutable training sets, built from recorded runs and demonstrations and named by content.

    <home>/datasets/<id>/train-00000.parquet, ...      token samples (token_shards.py)
                         validation-00000.parquet, ... only if the recipe has a validation split
                         runs.parquet                  each run and demonstration considered, with
                                                       decision and reason:
                                                       considered_runs.py
                         recipe.json                   the whole recipe
                         README.md                     for people, hubs and tools
                         manifest.json                 written last: counts, SHA-256 of every file

The same recipe over the same runs gives the same id on any machine and in any order of recording.
Called by the gateway (in a process of its own, build_process.py), fine_tuning and the command line.
Read next: build.py, which builds a dataset; reader.py, which reads one; selection.py,
which decides on the runs.
"""
