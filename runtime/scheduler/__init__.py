"""Schedulers: run commands on Slurm, or as processes of this machine, and sample its devices."""
