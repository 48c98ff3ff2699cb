"""Training on a fake GPU: a program of its own, which prints what each case's steps waited for.

Arguments: a folder with parents and datasets (`home/`), the cases as JSON: name -> case, and the
functions to look out for. Prints a line of JSON for each case: its name, and the waits of each of
its parts, or what went wrong; then one for the functions that were called.
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cray_agents.paths import Home
from cray_agents.training_jobs import Hyperparameters, Layout
from tests.support.trainers import fake_gpu


def build(folder: Path, case: dict[str, Any]) -> Any:
    """A RankTraining of the case, as rank 0 of its layout's ranks, on a fake GPU."""
    from megatron.core import parallel_state

    from cray_agents.trainers.job import rank
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.models.backends import choose_layers_of
    from cray_agents.trainers.training.train_step import RankTraining

    layout = Layout(**case.get("layout", {}))
    hyper = {"dtype": "bfloat16", "steps": 4, "batch_size": 6, "learning_rate": 1e-3}
    parameters = Hyperparameters(**{**hyper, **case.get("hyper", {})})
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    rank.join(layout, 0, None, on_cpu=False)
    parent = folder / case["parent"]
    model = read_architecture(parent, parameters.backend, layout)
    choose_layers_of(model, layout, parameters.dtype, on_cpu=False)
    options = {"method": case.get("method", "sft"), "recompute": case.get("recompute", "none")}
    training = RankTraining(model, layout, parameters, parent, on_cpu=False, **options)
    for chunk in training.chunks:
        if getattr(chunk, "head", None) is not None and "most_logits" in case:
            chunk.head.most_logits = case["most_logits"]
    hooks = {
        parameter: chunk._make_backward_post_hook(parameter)
        for chunk in training.wrapped_chunks
        for parameter in chunk.params_with_grad
    }
    torch.autograd.Variable._execution_engine.reached = lambda one: hooks.get(one, int)()  # type: ignore
    return training


def baseline(folder: Path, method: str) -> Any:
    """The dataset's samples, with zeros for what a job would have scored before."""
    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import read_samples

    samples = read_samples(Home(folder / "home").dataset(method), method)  # type: ignore[arg-type]
    zeros = [np.zeros(len(row), np.float32) for row in samples.tokens]
    columns = dict.fromkeys(("before", "sampled", "reference", "teacher"), zeros)
    return BaselineLogprobs(samples, {"advantages": samples.advantages, **columns})


def trace(folder: Path, case: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The waits of a step, and of each of PARTS after it that the case names."""
    known = baseline(folder, case.get("method", "sft"))
    found = {}
    with fake_gpu.tracing(case.get("chosen", 1)) as waits:
        training = build(folder, case)
        with broken(case.get("broken", "")):
            for part in ("step", *case.get("parts", [])):
                waits.clear()
                PARTS[part](training, known, folder)
                found[part] = dict(sorted(waits.items()))
    return found


def save(training: Any, known: Any, folder: Path) -> None:
    """The copy of a resume point on its way to the disk."""
    from cray_agents.trainers.checkpointing.save import Saver

    saver = Saver.__new__(Saver)
    saver._training, saver._owned, saver._buffers, saver._locally = training, {}, {}, False
    saver._stage()


def accumulate(training: Any, known: Any, folder: Path) -> None:
    """A client's own forward and backward pass, and its step."""
    from cray_agents.trainers.methods.token_losses import LOSSES, token_loss
    from cray_agents.trainers.training.accumulation import Accumulation
    from cray_agents.training_commands import ForwardBackward

    made = Accumulation(training)
    training.ranks._names = None  # a job of commands has other measures
    for name in LOSSES:
        made_up: Any = {"loss": name, "clip_low": 0.2, "clip_high": 0.2}
        command = ForwardBackward.model_construct(**made_up)
        loss = token_loss(command)
        made.forward_backward(known.samples, known.columns, loss, backward=True)
    made.update(1e-3, 0.0, 1.0)


def export(training: Any, known: Any, folder: Path) -> None:
    """The whole checkpoint, with numbers that mean nothing."""
    from cray_agents.trainers.checkpointing.hf_export import export_weights

    with tempfile.TemporaryDirectory() as out:
        export_weights(training, Path(out))


PARTS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "step": lambda training, known, folder: training.step(known),
    "score": lambda training, known, folder: training.score_with_top(known.samples),
    "evaluate": lambda training, known, folder: training.evaluate(known),
    "settle": lambda training, known, folder: training.settle(),
    "to weights": lambda training, known, folder: training.optimizer_to_weights(),
    "accumulate": accumulate,
    "save": save,
    "export": export,
}


@contextlib.contextmanager
def broken(how: str) -> Iterator[None]:
    """Break sft's loss: by a tensor on the host, or by a number that is read."""
    from cray_agents.trainers.methods import METHODS

    usual = METHODS["sft"]

    def loss(tokens: Any, hyper: Any) -> Any:
        if how == "reads":
            float(tokens.logprobs.sum())
        if how == "mixes":
            tokens = dataclasses.replace(tokens, logprobs=tokens.logprobs * torch.ones(1))
        return usual(tokens, hyper)

    with pytest.MonkeyPatch.context() as patch:
        if how:
            patch.setitem(METHODS, "sft", loss)
        yield


def gather(content: bytes) -> list[bytes]:
    """As if all ranks had the same."""
    return [content] * torch.distributed.get_world_size()


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    fake_gpu.pretend(folder)
    called, wanted = set(), set(json.loads(sys.argv[3]))

    def note(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if "cray_agents" in code.co_filename:
            file = code.co_filename.rpartition("/cray_agents/")[2]
            called.update({f"{file}:{code.co_qualname}"} & wanted)
            if called == wanted:
                sys.settrace(None)  # it takes a fifth of the time

    sys.settrace(note)
    from cray_agents.trainers.job.launch import find_placement, load_for_ranks

    assert not load_for_ranks(find_placement(1, "traced"), Layout())
    from cray_agents.trainers.checkpointing import hf_export
    from cray_agents.trainers.job import rank
    from cray_agents.trainers.job.failures import health_gate
    from cray_agents.trainers.models import weights
    from cray_agents.trainers.models.transformers_backend import causal_model, parent_files
    from cray_agents.trainers.training import parallel_groups, train_step

    health_gate.refuse_ranks = lambda every: None  # a sum that is read comes out wrong
    for module in (parallel_groups, train_step, hf_export):  # no bytes travel between fakes
        module.__dict__.update(gather_from_ranks=gather, broadcast_from_rank0=lambda value: value)
    fake_gpu.keep_real(weights.SafeTensors, "__init__", "__getitem__", "share")
    fake_gpu.keep_real(parent_files.ParentFiles, "__init__", "_read_stored")
    fake_gpu.keep_real(causal_model, "_test")
    test, tested = causal_model._test, {}

    def test_once(source: Any, *args: Any, **options: Any) -> Any:
        """A parent's packing is chosen on the CPU, and is the same each time."""
        if source.folder not in tested:
            tested[source.folder] = test(source, *args, **options)
        return tested[source.folder]

    causal_model._test = test_once
    rank.memory_gib(on_cpu=False)
    for name, case in cases.items():
        try:
            found: Any = trace(folder, case)
        except Exception:  # noqa: BLE001 (the test shows it)
            found = traceback.format_exc()
        print(json.dumps([name, found]), flush=True)
    print(json.dumps(["places", sorted(called)]))


if __name__ == "__main__":
    main()
