"""Log-probability stage: how far bfloat16 is from float32, and its kinds of attention apart.

Weights are the same in both: rounded to bfloat16. The statistics are those by which jobs and
replicas are judged (runtime/logprob_limits.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cray_agents.runtime.logprob_limits import measure as distance
from cray_agents.training_jobs import Dtype
from tests.gpu.bench import TE, VARLEN, Bench, free_memory, kernel_paths, layers_of, sequences
from tests.gpu.speed import hyperparameters

ATTENTION = {"chosen by torch": None, "flash": "FLASH_ATTENTION", "math": "MATH"}
SHARE = 4  # sequences are this much shorter than those that are trained on: "math" keeps scores


def main(bench: Bench, stage: str, name: str) -> None:
    """Score the same tokens in each way, float32 first; compare each with it, and with flash."""
    float32 = bench.folder / "float32.npz"
    bench.in_rank(score, name, "float32", kernel_paths(bench.on_cpu)[-1], float32)
    truth = np.load(float32)["chosen by torch"]
    tokens = {"model": name, "tokens": truth.shape[1], "mean_logprob": float(truth[0].mean())}
    for path in kernel_paths(bench.on_cpu):
        out = bench.folder / "bfloat16.npz"
        bench.in_rank(score, name, "bfloat16", path, out)
        with np.load(out) as found:
            ways = dict(found)
        usual = ways["chosen by torch"]
        for way, (logprobs, tops) in ways.items():
            for other, against in (("float32", truth), ("chosen by torch", usual)):
                if way == other:
                    continue
                apart = distance(logprobs, against[0], (tops == against[1]).tolist())
                bench.report.add(
                    stage,
                    **tokens,
                    layers=path,
                    attention=way,
                    against=other,
                    mean=apart.mean,
                    p99=apart.p99,
                    max=apart.max,
                    equal_argmax=apart.equal_argmax,
                )


def score(bench: Bench, name: str, dtype: Dtype, path: str, out: Path) -> None:
    """In a rank: write log-probabilities and likeliest tokens, [2, tokens], by attention."""
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.models.weights import InitialWeights, round_weights

    _, model = bench.model(name)
    scale = bench.scale
    short = replace(scale, longest=scale.longest // SHARE, tokens=scale.tokens // 2)
    samples = Samples.of(sequences(short, model.vocab))
    hyper = hyperparameters(1, scale.longest).model_copy(update={"dtype": dtype})
    with layers_of(path):
        training = bench.build(name, hyper)
    round_weights(training.chunks, model, InitialWeights(model, 0))
    found: dict[str, Any] = {}
    for way in list(ATTENTION)[:1] if path in (TE, VARLEN) else ATTENTION:
        if dtype == "float32" and way == "flash":  # there is none
            continue
        with attention(bench, way):
            found[way] = np.stack([np.concatenate(x) for x in training.score_with_top(samples)])
        free_memory(bench)
    np.savez(out, **found)


@contextmanager
def attention(bench: Bench, way: str) -> Iterator[None]:
    """Let torch's attention take one kernel within the context."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = ATTENTION[way]
    with nullcontext() if backend is None else sdpa_kernel(getattr(SDPBackend, backend)):
        yield
