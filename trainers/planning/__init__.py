"""What a training run will need, by arithmetic alone: memory, time, money, a layout. No torch.

arithmetic.py counts weights and floating-point operations, memory.py bytes, hardware.py knows GPUs,
choosing.py ranks layouts, plan.py adds them up. `cray-agents plan` prints it; the platform takes
a job's default layout from choosing.py, and the trainer its MFU from arithmetic.py.
"""
