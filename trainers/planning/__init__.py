"""Planning: a training run's memory, time, cost and layout by arithmetic alone. No torch.

arithmetic.py counts weights, operations and bytes. step_time.py lists GPUs, and estimates how
long a step takes. layouts.py ranks layouts by both, job_layout.py gives a job its layout and
micro-batch, plan.py turns them into hours and dollars for `cray-agents plan train`.
cluster_resources.py says which ranks and GPUs there are.
"""
