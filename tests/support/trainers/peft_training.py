"""The reference of test_lora.py: the same adapters, trained by PEFT in a plain loop."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cray_agents.training_jobs import JobSpec

TOGETHER = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def tensors_in(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@dataclass
class Expected:
    """PEFT's training, from the same start."""

    before: dict[str, Any]
    losses: list[float]
    norms: list[float]
    after: dict[str, Any]


def by_peft(spec: JobSpec, start: Path, samples: Any, steps: int) -> Expected:
    """Train what `start` holds with PEFT and a plain AdamW loop, q, k and v sharing their A."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from cray_agents.trainers.data.packer import step_units
    from cray_agents.trainers.methods.learning_rate import learning_rate

    hyper = spec.hyperparameters
    network = AutoModelForCausalLM.from_pretrained(spec.parent, dtype=torch.float32)
    model = PeftModel.from_pretrained(network, start, is_trainable=True)
    for layer in network.model.layers:
        for place, (first, *others) in TOGETHER:
            block = getattr(layer, place)
            for name in others if hasattr(getattr(block, first, None), "lora_A") else ():
                shared = getattr(block, first).lora_A["default"].weight
                getattr(block, name).lora_A["default"].weight = shared
    learning = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(
        learning,
        weight_decay=hyper.weight_decay,
        betas=(hyper.adam_beta1, hyper.adam_beta2),
        eps=hyper.adam_eps,
    )
    losses, norms = [], []
    for step in range(steps):
        total, count = torch.zeros(()), 0.0
        for unit in step_units(hyper, step, samples.unit_weights):
            (i,) = samples.units[unit]
            ids = torch.from_numpy(samples.tokens[i]).long()[None]
            mask = torch.from_numpy(samples.masks[i])[1:]
            found = model(ids[:, :-1]).logits[0].log_softmax(-1)
            total = total - (found.gather(1, ids[0, 1:, None])[:, 0] * mask).sum()
            count += float(mask.sum())
        adam.zero_grad()
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(learning, hyper.clip_grad)))
        for group in adam.param_groups:
            group["lr"] = learning_rate(hyper, step)
        adam.step()
        losses.append((total / count).item())
    named = model.named_parameters(remove_duplicate=False)
    after = {name.replace(".default", ""): p.detach() for name, p in named if ".lora_" in name}
    return Expected(tensors_in(start), losses, norms, after)
