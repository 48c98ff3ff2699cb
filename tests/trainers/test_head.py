"""The head in chunks: losses, entropies and gradients are those of all logits at once."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.training_jobs import Hyperparameters, Layout, Policy
from tests.support.trainers.forked_ranks import run_forked

pytestmark = pytest.mark.megatron
VOCAB, TOKENS, TEMPERATURE, CHUNK = 303, 24, 0.7, 3  # padded by one on two ranks


def learn(chunk: Any, vocab: int, most_logits: int) -> dict[str, Any]:
    """Losses and entropies of some rows, and all gradients of a weighted sum of the losses."""
    import torch

    from cray_agents.trainers.models.attention import packed_sequences

    packed = packed_sequences(np.array([0, 9, TOKENS], np.int32), torch.device("cpu"))
    tokens = (7 * torch.arange(TOKENS) % vocab)[None]
    rows = torch.arange(TOKENS)[torch.arange(TOKENS) % 4 != 1]
    labels = (11 * rows % vocab)[None]
    chunk.head.rows, chunk.head.most_logits = rows, most_logits
    chunk.head.want_entropy = chunk.head.want_top = True
    chunk.zero_grad()
    losses = chunk(tokens, tokens, None, labels=labels, packed_seq_params=packed)
    (losses[0] * torch.linspace(-1, 2, len(rows))).sum().backward()
    gradients = {name: p.grad.clone() for name, p in chunk.named_parameters()}
    numbers = {"entropy": chunk.head.entropy, "top": chunk.head.top}
    return {"losses": losses[0].detach(), **numbers, **gradients}


def in_float64(chunk: Any, vocab: int) -> tuple[Any, Any]:
    """Losses and gradients at random hidden states: in chunks, and by log_softmax."""
    import torch

    from cray_agents.trainers.models.head import ChunkedLosses

    torch.manual_seed(3)
    weight = chunk.output_layer.weight.detach().double()
    hidden, labels = torch.randn(20, weight.shape[1]).double(), torch.randint(vocab, (20,))
    found = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            losses, _ = ChunkedLosses.apply(h, w, labels, chunk.head)
        else:
            logits = (h @ w.t())[:, :vocab] / TEMPERATURE
            losses = -logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
        losses.backward(torch.linspace(-1, 2, 20).double())
        found.append((losses.detach(), h.grad, w.grad))
    return found[0], found[1]


def test_the_gradient_of_the_weight_adds_up_in_float32() -> None:
    """In bfloat16 a sum over many chunks would be rounded once a chunk."""
    import torch

    from cray_agents.trainers.models.head import ChunkedLosses, Head

    torch.manual_seed(3)
    hidden, weight = torch.randn(512, 32).bfloat16(), (torch.randn(64, 32) / 8).bfloat16()
    labels, found = torch.randint(64, (512,)), []
    for kind, chunk in (("float32", 512), ("main_grad", 2), ("bfloat16", 2)):
        head = Head.__new__(Head)
        head.temperature, head.want_entropy, head.want_top = 1.0, False, False
        head.first, head.columns, head.real, head.most_logits = 0, 64, 64, 64 * chunk
        head.compiled, head._reduce = False, lambda values, how: values  # type: ignore[method-assign]
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        parameter = torch.nn.Parameter(weight.to(dtype))
        if kind == "main_grad":
            parameter.main_grad = torch.zeros(64, 32)  # type: ignore[attr-defined]
        losses, _ = ChunkedLosses.apply(hidden.to(dtype), parameter, labels, head)
        losses.sum().backward()
        assert parameter.grad is not None
        found.append(parameter.main_grad if kind == "main_grad" else parameter.grad.float())  # type: ignore[attr-defined]
        assert kind != "main_grad" or not parameter.grad.any()
    truth, ours, rounded = found
    assert (ours - truth).norm() < 0.3 * (rounded - truth).norm()


@pytest.mark.slow
def test_what_gpus_compile_is_one_graph_with_the_same_results() -> None:
    import torch

    from cray_agents.trainers.models.head import chunk_gradients, chunk_sums

    torch.manual_seed(3)
    hidden, weight = torch.randn(9, 32), torch.randn(64, 32)
    labels = torch.arange(9) * 8 - 1  # the first is another rank's
    _, _, (total, product, chosen) = sums = chunk_sums(hidden, weight, labels, TEMPERATURE)
    normalizer = total.log() + sums[0]
    inputs = (hidden, weight, labels, normalizer, torch.linspace(-1, 2, 9), TEMPERATURE)
    logits = hidden @ weight.t() / TEMPERATURE
    torch.testing.assert_close(normalizer, logits.logsumexp(1))
    entropy = torch.special.entr(logits.softmax(1)).sum(1)
    torch.testing.assert_close(total.log() - product / total, entropy, rtol=1e-4, atol=1e-5)
    assert chosen[0] == 0 and chosen[1] == logits[1, 7]
    for function, given in ((chunk_sums, inputs[:3] + inputs[5:]), (chunk_gradients, inputs)):
        compiled: Any = torch.compile(function, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*given), function(*given))


def both_heads(
    folder: Path, layout: Layout, tied: bool, out: Path, rank: int, store: Any, stop: Any
) -> int:
    """One rank: the head with all logits at once, then in chunks, in float32 and float64."""
    import torch

    from cray_agents.trainers.models.model import build_model
    from cray_agents.trainers.training.parallel_groups import join_ranks

    join_ranks(layout, rank, layout.world, store, on_cpu=True)
    model = replace(read_architecture(folder), vocab=VOCAB, tied=tied)  # at random
    hyper = Hyperparameters(steps=1, policy=Policy(temperature=TEMPERATURE))
    (chunk,) = build_model(model, layout, hyper, on_cpu=True)
    whole = learn(chunk, model.vocab, chunk.head.most_logits)
    chunked = learn(chunk, model.vocab, CHUNK * chunk.head.columns)
    exact = in_float64(chunk, model.vocab) if layout.world == 1 else None
    torch.save((whole, chunked, exact), out / f"{rank}.pt")
    return 0


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        (Layout(), False),
        (Layout(tensor=2), True),
        (Layout(tensor=2, sequence_parallel=True), False),
    ],
    ids=["one", "tensor2 tied", "tensor2sp"],
)
def test_a_head_in_chunks_equals_one_with_all_logits(
    models: Callable[[str], Path], tmp_path: Path, layout: Layout, tied: bool
) -> None:
    import torch

    work = partial(both_heads, models("qwen3"), layout, tied, tmp_path)
    assert run_forked(layout.world, tmp_path / "logs", work) is None
    for rank in range(layout.world):
        whole, chunked, exact = torch.load(tmp_path / f"{rank}.pt")
        assert whole.keys() == chunked.keys()
        for name, numbers in whole.items():
            torch.testing.assert_close(chunked[name], numbers, rtol=1e-4, atol=2e-5, msg=name)
        if exact is not None:
            for ours, theirs in zip(*exact, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
