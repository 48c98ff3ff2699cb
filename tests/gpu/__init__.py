"""GPU stages: `make gpu` measures the trainer on one GPU, and compares it with its CPU numbers.

`__main__.py` has the options and the order of the stages. Each stage is a function of a `Bench`
(bench.py), and adds its figures to the report (report.py) as soon as they are there.
"""
