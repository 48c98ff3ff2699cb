"""Methods: one short module per training method, whose loss is a pure function.

`METHODS[name](tokens, hyperparameters)` returns the loss of a micro-batch. Read next: loss.py.
"""

from collections.abc import Callable

from cray_agents.trainers.methods import distill, dpo, grpo, kto, sft
from cray_agents.trainers.methods.loss import Loss, TrainedTokens
from cray_agents.training_jobs import Hyperparameters, MethodName

METHODS: dict[MethodName, Callable[[TrainedTokens, Hyperparameters], Loss]] = {
    "sft": sft.loss,
    "dpo": dpo.loss,
    "kto": kto.loss,
    "grpo": grpo.loss,
    "distill": distill.loss,
}
