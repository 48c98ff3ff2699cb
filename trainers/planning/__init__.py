"""Planning: a training run's memory, time, cost and layout by arithmetic alone. No torch.

arithmetic.py counts weights and floating-point operations, memory.py bytes. step_time.py
estimates how long a step takes, hardware.py lists GPUs, layout_choice.py ranks layouts, plan.py
combines them for `cray-agents plan`. default_layout.py chooses the layout of a job,
layout_limits.py refuses one that does not fit, and the trainer computes its MFU with arithmetic.py.
"""
