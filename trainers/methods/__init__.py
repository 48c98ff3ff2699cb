"""Methods: what is minimised. A pure function of log-probabilities each, one short module each.

`METHODS[name](marked, hyperparameters)` is the loss of a micro-batch. Read next: loss.py.
"""

from collections.abc import Callable

from cray_agents.trainers.methods import dpo, grpo, kto, sft
from cray_agents.trainers.methods.loss import Loss, Marked
from cray_agents.training_jobs import Hyperparameters, MethodName

METHODS: dict[MethodName, Callable[[Marked, Hyperparameters], Loss]] = {
    "sft": sft.loss,
    "dpo": dpo.loss,
    "kto": kto.loss,
    "grpo": grpo.loss,
}
