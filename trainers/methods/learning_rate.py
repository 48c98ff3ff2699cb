"""Learning rate: warm-up and schedule of each step. Called by training/train_step.py."""

import math

from cray_agents.training_jobs import Hyperparameters


def learning_rate(hyper: Hyperparameters, step: int) -> float:
    """Return the rate of a step (counted from 0): linear warm-up, then the schedule.

    Decay ends at `min_learning_rate` in the last step.
    """
    assert hyper.learning_rate is not None  # decided before the job took its id
    top, low, warmup = hyper.learning_rate, hyper.min_learning_rate, hyper.warmup_steps
    if step < warmup:
        return top * (step + 1) / warmup
    if hyper.schedule == "constant":
        return top
    last = hyper.steps - 1
    begin = warmup
    if hyper.schedule == "wsd":
        begin = max(warmup, last - max(1, round(hyper.decay_fraction * hyper.steps)))
    progress = min(1.0, max(0.0, (step - begin) / max(1, last - begin)))
    cosine = hyper.schedule == "cosine"
    left = (1 + math.cos(math.pi * progress)) / 2 if cosine else 1 - progress
    return low + (top - low) * left
