"""Replicas in Slurm: their jobs, the supervisor in each, and the files and secrets between both."""
