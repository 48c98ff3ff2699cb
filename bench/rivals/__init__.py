"""`make bench ARGS=rivals`: the same work by others' programs and by ours, in turn, on one machine.

`make bench ARGS="rivals gateway"` runs one part. Each part makes an environment for each rival,
says which could not be had and why, and prints its table, with versions and commands.
`CRAY_BENCH_ROUNDS`, `_LINES`, `_REQUESTS` and `_KILLS` make a part longer or shorter. exporter.py
lists the parts.
"""
