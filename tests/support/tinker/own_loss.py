"""A script whose own loss is cross entropy; prints what both gave, and log-probabilities twice."""

import json
import sys
from typing import Any

import tinker
from tinker import types

service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-any")
TOKENS = [5, 6, 7, 8, 9]
WEIGHTS = [0.0, 1.0, 0.5, 2.0]


def own(data: Any, logprobs: Any) -> Any:
    weights = (datum.loss_fn_inputs["weights"].to_torch() for datum in data)
    return sum(-(w * row).sum() for w, row in zip(weights, logprobs, strict=True)), {}


def norm(loss: Any) -> list[float]:
    client = service.create_lora_training_client(base_model=sys.argv[2], rank=8, seed=1).result()
    tokens = types.ModelInput.from_ints(TOKENS[:-1])
    inputs: Any = {"target_tokens": TOKENS[1:], "weights": WEIGHTS}
    data = [types.Datum(model_input=tokens, loss_fn_inputs=inputs)]
    if callable(loss):
        passed = client.forward_backward_custom(data, loss)
    else:
        passed = client.forward_backward(data, loss)
    step = client.optim_step(types.AdamParams(learning_rate=1e-3))
    return [passed.result().metrics["loss:sum"], step.result().metrics["grad_norm"]]


def scores() -> list[list[float]]:
    """Of a snapshot by the engine, and of the live weights by the trainer."""
    client = service.create_lora_training_client(base_model=sys.argv[2], rank=8, seed=2).result()
    tokens = types.ModelInput.from_ints(TOKENS[:-1])
    inputs: Any = {"target_tokens": TOKENS[1:], "weights": WEIGHTS}
    data = [types.Datum(model_input=tokens, loss_fn_inputs=inputs)]
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    live = client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    return [sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:], live]


print(json.dumps([norm("cross_entropy"), norm(own), *scores()]))
