"""Family trial: what the transformers backend does with one family, beside transformers alone.

`measure` writes a tiny parent and trains it on one rank, also from its config alone, then on two
with layers computed again. What it returns is plain data: a number where something was compared,
`equal` where it was equal to the bit, and the reason where it was refused or failed. `problems`
judges it. Called by test_families.py; family_table.py has the results in docs/families.json.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from cray_agents.errors import BadInput, CrayError
from cray_agents.trainers.checkpointing.hf_export import copy_settings, export_weights
from cray_agents.trainers.checkpointing.peft_adapter import write_adapter
from cray_agents.trainers.checkpointing.state import allocate_moments
from cray_agents.trainers.data.packer import BaselineLogprobs, TrainedTokenRows
from cray_agents.trainers.data.samples import Samples
from cray_agents.trainers.job.launch import find_placement, run_ranks
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.models.backends import config_of
from cray_agents.trainers.models.megatron_fixes import load_megatron
from cray_agents.trainers.training.parallel_groups import join_ranks
from cray_agents.trainers.training.train_step import RankTraining
from cray_agents.training_jobs import Hyperparameters, Layout, Lora, MethodName
from tests.support.trainers.plain_model import (
    dpo_loss,
    gradients_of,
    grpo_loss,
    logprobs_of,
    plain_losses,
    plain_network,
)
from tests.support.trainers.tiny_families import FAMILIES, FURTHER, write_parent
from tests.support.trainers.toy_family import write_toy

STEPS, VOCAB, SEED = 20, 500, 5
HYPER = Hyperparameters(
    steps=STEPS,
    batch_size=4,
    learning_rate=1e-3,
    adam_beta2=0.95,
    max_tokens_per_microbatch=90,
    backend="transformers",
)
PROMPT = 5  # tokens of a row that dpo and grpo do not train on
MARKED = slice(PROMPT - 1, None)  # of the log-probabilities of a row's tokens after the first
EQUAL = "equal"
CLOSE = 1e-5  # of losses, absolute
NOISY = 10  # times what a weight noise of 1e-7 makes of a plain loop's losses
DRAWS = 8  # of that noise at most: a near tie in a choice of experts falls by some alone
SAME_GRADIENT = 1e-4  # of the largest
SAME_LOGPROBS = 1e-4  # of PEFT's and the trainer's
ROUNDED = 0.1  # of the first loss, between bfloat16 and float32
FILE_BYTES = 60_000  # of an export

Result = dict[str, Any]


def rows() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, VOCAB, int(size)).tolist() for size in random.integers(8, 40, 12)]


def write(family: str, folder: Path) -> Path:
    """Write a family's parent, with files beside the weights that an export has to keep."""
    if family == "toy":
        write_toy(folder)
    else:
        write_parent(folder, (FAMILIES | FURTHER)[family](), shard="100KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    return folder


def measure(family: str, folder: Path, *, brief: bool = False) -> Result:
    """Try everything with a family; `brief`: losses and export of one rank alone.

    Megatron is loaded here, and ranks are forked.
    """
    import peft  # noqa: F401 - once, before the forks

    load_megatron()
    parent = write(family, folder / "parent")
    config = json.loads((parent / "config.json").read_text())
    result: Result = {"kind": config["model_type"]}
    for ranks in (1,) if brief else (1, 2):
        out = folder / f"ranks{ranks}"
        out.mkdir()
        main = (
            partial(_one_rank, parent, out, brief)
            if ranks == 1
            else partial(_two_ranks, parent, out)
        )
        result |= _on_ranks(ranks, main, out)
        if "failed" in result:
            break
    return result


def problems(result: Result, *, brief: bool = False) -> dict[str, Any]:
    """What is not as it should be, by its name; empty for a family that is right in all."""
    limit = max(CLOSE, NOISY * result.get("noise", 0.0))
    limits: dict[str, float | str] = {"one": limit, "export": EQUAL, "random": SAME_LOGPROBS}
    if not brief:
        limits |= {"two": limit, "dpo": SAME_GRADIENT, "grpo": SAME_GRADIENT}
        limits |= {"lora": SAME_LOGPROBS, "bfloat16": ROUNDED, "bfloat16_export": EQUAL}
        limits["recompute"] = EQUAL
    found = {"failed": result["failed"]} if "failed" in result else {}
    for name, right in limits.items():
        value = result.get(name, "not tried")
        as_text = isinstance(value, str) or isinstance(right, str)
        if value != right if as_text else not value <= right:
            found[name] = value
    return found


def _on_ranks(ranks: int, main: Callable[[int, Any, Any], int], out: Path) -> Result:
    try:
        ended = run_ranks(find_placement(ranks, "transformers"), out / "logs", main)
    except CrayError as error:
        last = str(getattr(error, "log_tail", "")).strip().rpartition("\n")[2]
        return {"failed": f"{ranks} ranks: {last[:300] or error}"}
    if ended.refusal is not None:
        return {"failed": f"{ranks} ranks: {ended.refusal}"}
    return dict(json.loads((out / "found.json").read_text()))


# ---- on the ranks
def _join(layout: Layout, rank: int, store: Any) -> None:
    torch.set_num_threads(1)
    join_ranks(layout, rank, layout.world, store, on_cpu=True)


def _training(parent: Path, layout: Layout, recompute: str = "none", **hyper: Any) -> Any:
    model = read_architecture(parent, "transformers")
    changed = HYPER.model_copy(update=hyper)
    return RankTraining(model, layout, changed, parent, on_cpu=True, recompute=recompute)


def _begin(training: Any, method: MethodName = "sft", **hyper: Any) -> None:
    changed = HYPER.model_copy(update=hyper)
    training.switch_job(training.parent, changed, method, lambda: False)
    training.take_weights()
    allocate_moments(training, 0)  # a session keeps them


def _one_rank(parent: Path, out: Path, brief: bool, rank: int, store: Any, _: Any) -> int:
    """Export and losses, then gradients of methods, adapters, bfloat16."""
    layout = Layout()
    _join(layout, rank, store)
    known = BaselineLogprobs(Samples.of(rows()))
    training = _training(parent, layout, learning_rate=0.0)
    found: Result = {"packing": training.packing.text, "split": bool(training.packing.split)}
    found["packing_difference"] = training.packing.difference
    found["rejected"] = training.packing.rejected
    training.step(known)
    found["export"] = _tried(lambda: _exported(training, out / "export"))
    _begin(training)
    losses = [training.step(known).loss for _ in range(STEPS)]
    found |= _beside_plain(parent, losses, "one")
    found["random"] = _tried(lambda: _at_random(parent, layout, out / "bare"))
    if not brief:
        found["dpo"] = _tried(lambda: _dpo_step(training))
        found["grpo"] = _tried(lambda: _grpo_step(training))
        found["lora"] = _tried(lambda: _adapted(parent, layout, known, out / "adapter"))
        found |= _tried(lambda: _in_bfloat16(parent, layout, known, out, losses[0]), "bfloat16")
    (out / "found.json").write_text(json.dumps(found))
    return 0


def _two_ranks(parent: Path, out: Path, rank: int, store: Any, _: Any) -> int:
    """Losses on two ranks with layers computed again, and without if that is refused."""
    layout = Layout(data=2)
    _join(layout, rank, store)
    known = BaselineLogprobs(Samples.of(rows()))
    found: Result = {}
    try:
        training = _training(parent, layout, "full")
        found["recompute"] = EQUAL
    except BadInput as error:
        training = _training(parent, layout)
        found["recompute"] = str(error)
    losses = [training.step(known).loss for _ in range(STEPS)]
    if rank == 0:
        found |= _beside_plain(parent, losses, "two")
        (out / "found.json").write_text(json.dumps(found))
    return 0


def _tried(work: Callable[[], Any], name: str = "") -> Any:
    """A trial's result, or the reason why there is none."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 (a family's code raises anything; it is recorded)
        kind = "" if isinstance(error, CrayError) else f"{type(error).__name__}: "
        reason = kind + " ".join(str(error).split())[:300]
        return {name: reason} if name else reason


def _beside_plain(parent: Path, losses: list[float], name: str) -> Result:
    """The largest difference to a plain loop's losses; if large, also what noise makes of those."""
    kept = parent.parent / "plain.json"
    if not kept.exists():
        kept.write_text(json.dumps(plain_losses(parent, rows(), HYPER)))
    plain = np.array(json.loads(kept.read_text()))
    found: Result = {name: float(np.abs(plain - losses).max())}
    kept, seeds = parent.parent / "noise.json", iter(range(1, DRAWS + 1))
    noise = json.loads(kept.read_text()) if kept.exists() else 0.0
    while not found[name] <= max(CLOSE, NOISY * noise) and (seed := next(seeds, None)):
        moved = np.abs(plain - plain_losses(parent, rows(), HYPER, seed))
        noise = max(noise, float(moved.max()))
        kept.write_text(json.dumps(noise))
    if noise:
        found["noise"] = noise
    return found


def _exported(training: Any, folder: Path) -> str:
    """Write what a job publishes, and compare it with the parent."""
    parent, model = training.parent, training.model
    folder.mkdir()
    export_weights(training, folder, file_bytes=FILE_BYTES, share=FILE_BYTES)
    copy_settings(parent, folder, tied=model.tied, config=config_of(parent, model))
    theirs, ours = (
        {n: t for file in sorted(f.glob("*.safetensors")) for n, t in load_file(file).items()}
        for f in (parent, folder)
    )
    if ours.keys() != theirs.keys():
        return f"other tensors: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    wrong = [
        name
        for name, tensor in theirs.items()
        if ours[name].dtype != tensor.dtype or not torch.equal(ours[name], tensor)
    ]
    if wrong:
        return f"{len(wrong)} of {len(theirs)} tensors differ, such as {wrong[0]}"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    if index.keys() != theirs.keys():
        return "the index names other tensors"
    beside = [
        path.name
        for path in sorted(parent.iterdir())
        if path.suffix != ".safetensors" and "index" not in path.name
    ]
    changed = [n for n in beside if (folder / n).read_bytes() != (parent / n).read_bytes()]
    return f"{changed[0]} differs" if changed else EQUAL


# ---- random weights
def _at_random(parent: Path, layout: Layout, bare: Path) -> float | str:
    """Start from the config alone; compare log-probabilities with those of transformers' draw."""
    from transformers import AutoConfig

    bare.mkdir()
    shutil.copy(parent / "config.json", bare)
    kind, config = type(plain_network(parent)), AutoConfig.from_pretrained(bare)
    # token 0 pads: its embedding is drawn as zeros, and all scores of an indexer would tie there
    said = [[token or 1 for token in row] for row in rows()]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        drawn = kind._from_config(config, dtype=config.dtype).float().eval()
        theirs = [logprobs_of(drawn, row).numpy() for row in said]
    training = _training(bare, layout, init="random", seed=SEED)
    samples = Samples.of(said)
    ours = training.score(samples)
    loss = training.step(BaselineLogprobs(samples)).loss
    moved = _largest(ours, training.score(samples))
    right = np.isfinite(loss) and moved > SAME_LOGPROBS
    return _largest(ours, theirs) if right else f"a step changed log-probabilities by {moved:g}"


# ---- methods
def _marked(chosen: list[list[int]]) -> Any:
    masks = [(np.arange(len(row)) >= PROMPT).astype(np.float32) for row in chosen]
    return Samples.of(chosen, masks)


def _near(logprobs: list[Any], seed: int, spread: float) -> list[Any]:
    random = np.random.default_rng(seed)
    return [(row + random.normal(0, spread, len(row))).astype(np.float32) for row in logprobs]


def _column(samples: Any, values: list[Any]) -> Any:
    return TrainedTokenRows(samples.masks, dict(enumerate(values)))


def _dpo_step(training: Any) -> float | str:
    """A step of dpo against a reference that differs from the policy."""
    chosen = rows()[:4]
    _begin(training, "dpo", steps=1, batch_size=2, clip_grad=1e9)
    better = np.array([1.0, 0.0] * 2, np.float32)
    samples = replace(_marked(chosen), units=[[0, 1], [2, 3]], chosen=better)
    reference = _near(training.score(samples), 5, 0.3)
    pairs = [(chosen[0], chosen[1]), (chosen[2], chosen[3])]
    beta = training.hyper.preference.beta
    return _gradient_step(
        training,
        samples,
        {"reference": reference},
        lambda network: dpo_loss(network, pairs, MARKED, reference, beta),
    )


def _grpo_step(training: Any) -> float | str:
    """A step of grpo whose policy, policy before and engine all differ."""
    chosen = rows()[:4]
    _begin(training, "grpo", steps=1, batch_size=4, clip_grad=1e9)
    gains = [1.0, -0.5, 0.7, -1.2]
    samples = replace(_marked(chosen), rewards=np.array(gains))
    before = _near(training.score(samples), 6, 0.3)
    sampled = _near(before, 7, 0.3)
    of_tokens = [
        np.full(len(row), gain, np.float32) for row, gain in zip(before, gains, strict=True)
    ]
    hyper = training.hyper
    return _gradient_step(
        training,
        samples,
        {"before": before, "reference": before, "sampled": sampled, "advantages": of_tokens},
        lambda network: grpo_loss(network, chosen, MARKED, before, sampled, gains, hyper),
    )


def _gradient_step(
    training: Any, samples: Any, columns: dict[str, Any], plain_loss: Callable[[Any], Any]
) -> float | str:
    """Take a step; return how far the gradient is from the plain one, as a share of its largest."""
    network = training.chunks[0].network
    first = {name: p.detach().clone() for name, p in network.named_parameters()}
    known = BaselineLogprobs(samples, {n: _column(samples, v) for n, v in columns.items()})
    report = training.step(known)
    plain = plain_network(training.parent)
    loss = plain_loss(plain)
    if abs(report.loss - float(loss.detach())) > CLOSE:
        return f"a loss of {report.loss:g}, and {float(loss.detach()):g} by plain torch"
    truth, worst = gradients_of(plain, loss), 0.0
    truth = {name.replace("language_model.", ""): each for name, each in truth.items()}  # a part
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            other = truth.get(name.replace("language_model.", ""), torch.zeros_like(parameter))
            worst = max(worst, float((parameter.main_grad - other).abs().max()))
    moved = [n for n, p in network.named_parameters() if not torch.equal(p, first[n])]
    if not moved or not all(bool(p.isfinite().all()) for p in network.parameters()):
        return "no weight changed" if not moved else "weights that are not finite"
    return worst / float(max(g.abs().max() for g in truth.values()))


# ---- adapters and bfloat16
def _adapted(parent: Path, layout: Layout, known: Any, folder: Path) -> float | str:
    """Train adapters, load them with PEFT, and compare the log-probabilities of all tokens."""
    from peft import PeftModel

    lora = Lora(rank=4)
    training = _training(parent, layout, lora=lora, learning_rate=1e-2)
    before = training.score(known.samples)
    for _ in range(3):
        training.step(known)
    ours = training.score(known.samples)
    write_adapter(training.chunks, training.model, lora, str(parent), folder)
    network = PeftModel.from_pretrained(plain_network(parent), folder).eval()
    with torch.no_grad():
        theirs = [logprobs_of(network, row).numpy() for row in rows()]
    gap, step = (_largest(ours, others) for others in (theirs, before))
    return gap if step > 0.05 else f"adapters changed log-probabilities by {step:g} only"


def _largest(one: list[Any], other: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def _in_bfloat16(
    parent: Path, layout: Layout, known: Any, out: Path, float32_loss: float
) -> Result:
    """The first loss beside that of float32, an export at learning rate 0, and a step."""
    training = _training(parent, layout, dtype="bfloat16", learning_rate=0.0)
    loss = training.step(known).loss
    exported = _exported(training, out / "bfloat16")
    network = training.chunks[0].network
    first = [p.detach().clone() for p in network.parameters()]
    _begin(training, dtype="bfloat16")
    second = training.step(known).loss
    still = all(torch.equal(p, f) for p, f in zip(network.parameters(), first, strict=True))
    if still or not np.isfinite(second):
        exported = "no weight changed"
    return {"bfloat16": abs(loss - float32_loss), "bfloat16_export": exported}
