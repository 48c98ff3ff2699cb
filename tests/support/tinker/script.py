"""A script of Tinker's client, run in .venv-tinker: prints what came of each call as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

PROMPT = [5, 6, 7]
SAMPLED = [8, 9]


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def shown(sampler: Any, **settings: Any) -> list[Any]:
    """The sequences of two samples after the prompt."""
    params = types.SamplingParams(max_tokens=4, **settings)
    prompt = types.ModelInput.from_ints(PROMPT)
    answer = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    return [[s.tokens, s.logprobs, s.stop_reason, s.sequence_id] for s in answer.sequences]


def datum(**inputs: Any) -> types.Datum:
    tokens = types.ModelInput.from_ints([*PROMPT, *SAMPLED[:-1]])
    return types.Datum(model_input=tokens, loss_fn_inputs=inputs)


def imitated(weights: list[float]) -> types.Datum:
    return datum(target_tokens=[6, 7, *SAMPLED], weights=weights)


def rewarded(advantage: float) -> types.Datum:
    """As rl_loop makes it: the targets of the prompt are padding."""
    return datum(
        target_tokens=[0, 0, *SAMPLED],
        logprobs=[0.0, 0.0, -0.5, -0.25],
        advantages=[0.0, 0.0, advantage, advantage],
    )


def rows(result: Any) -> list[Any]:
    return [output["logprobs"].tolist() for output in result.loss_fn_outputs]


url, key = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key=key)
client = service.create_lora_training_client(base_model="Qwen/m", rank=4).result()
found: dict[str, Any] = {"model": client.model_id, "base": client.get_info().model_name}

before = client.save_weights_and_get_sampling_client().result()
found["before"] = shown(before)

imitation = client.forward_backward(
    [imitated([0, 0, 1, 2]), imitated([1, 1, 1, 1])], "cross_entropy"
)
step = client.optim_step(types.AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=2))
found["imitation"] = [rows(imitation.result()), imitation.result().metrics]
found["step"] = step.result().metrics
scored = client.forward([imitated([0, 0, 0, 0])], "cross_entropy").result()
found["scored"] = rows(scored)
for loss, settings in (
    ("importance_sampling", None),
    ("ppo", {"clip_low_threshold": 0.9}),
    ("cispo", {"clip_high_threshold": 1.5}),
):
    passed = client.forward_backward([rewarded(1.0), rewarded(-1.0)], loss, settings).result()
    found[loss] = rows(passed)
client.optim_step(types.AdamParams()).result()

saved = client.save_weights_for_sampler("a").result()
again = client.save_weights_for_sampler("b").result()
found["saved"] = [saved.path, again.path]
sampler = service.create_sampling_client(model_path=saved.path)
found["after"] = shown(sampler, temperature=0.5, top_k=3, seed=1, stop=[9])
same = service.create_sampling_client(model_path=again.path)
found["alias"] = shown(same, stop="x")
found["still before"] = shown(before)

state = client.save_state("s").result()
loaded = service.create_training_client_from_state(state.path).result()
found["loaded"] = [
    loaded.model_id,
    rows(loaded.forward([imitated([0, 1, 1, 1])], "cross_entropy").result()),
]
continued = service.create_training_client_from_state_with_optimizer(state.path).result()
found["continued"] = [continued.model_id, continued.save_state("s").result().path]

rest = service.create_rest_client()
found["runs"] = [run.training_run_id for run in rest.list_training_runs().result().training_runs]
found["weights"] = rest.get_weights_info_by_tinker_path(saved.path).result().lora_rank
found["checkpoints"] = [
    checkpoint.tinker_path
    for checkpoint in rest.list_checkpoints(client.model_id).result().checkpoints
]


def new() -> Any:
    """A client of its own: after a refusal a client may take no more requests."""
    return service.create_lora_training_client(base_model="m", rank=4).result()


def after_step(client: Any) -> Any:
    client.optim_step(types.AdamParams()).result()
    return client


pair = [rewarded(1.0)]
params = types.SamplingParams(max_tokens=2)
prompt = types.ModelInput.from_ints(PROMPT)
found["refused"] = {
    "loss": failure(lambda: new().forward_backward(pair, "gspo").result()),
    "setting": failure(lambda: new().forward_backward(pair, "ppo", {"clip": 1.0}).result()),
    "targets": failure(
        lambda: (
            new()
            .forward_backward([datum(target_tokens=[6, 7, 8, 9][::-1])], "cross_entropy")
            .result()
        )
    ),
    "column": failure(lambda: new().forward_backward([imitated([1] * 4)], "ppo").result()),
    "base": failure(lambda: service.create_lora_training_client(base_model="Qwen/none").result()),
    "optimizer": failure(
        lambda: service.create_training_client_from_state_with_optimizer(saved.path).result()
    ),
    "name": failure(lambda: after_step(client).save_weights_for_sampler("a").result()),
    "path": failure(lambda: shown(service.create_sampling_client(model_path=saved.path + "x"))),
    "alternatives": failure(
        lambda: sampler.sample(prompt, 1, params, topk_sample_logprobs=2).result()
    ),
}
print(json.dumps(found))
