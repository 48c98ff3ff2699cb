"""Where commands run: Slurm, or processes of this machine."""
