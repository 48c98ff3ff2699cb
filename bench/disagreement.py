"""What trainer and sampler disagree by: `python -m bench disagreement MODEL`, a directory.

vLLM samples PROMPTS x ATTEMPTS answers at temperature 1, in bfloat16 and in float32. The trainer
scores each answer's tokens in both. A row is a pair of these. Its corrections have a cap of 2: a
figure is the share of tokens that truncation or a mask would change, by the token's ratio or by its
answer's. "vLLM, alone" is the engine against itself: it reads the same tokens again, one answer at
a time. Kernels whose numbers do not depend on the batch could remove that part and no more; vLLM
has them for GPUs alone (VLLM_BATCH_INVARIANT=1).
"""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cray_agents.records import LogprobDistance
from cray_agents.runtime.logprob_limits import measure
from cray_agents.runtime.pool.vllm_process import EngineSettings, environment
from cray_agents.trainers.job.engine_agreement import disagreement_of
from cray_agents.training_jobs import Dtype, Hyperparameters, Layout

DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
ATTEMPTS, TOKENS, LONGEST, THREADS = 2, 64, 512, 1
THINGS = ("rain", "a bridge", "the number seven", "bread", "a bicycle", "sleep", "Paris", "a queue")
PROMPTS = [
    request.format(thing)
    for thing in THINGS
    for request in (
        "Tell me a fact about {}.",
        "Write a short poem about {}.",
        'Answer in JSON with the keys "name" and "use": what is {}?',
        "Explain {} to a child, in three sentences.",
    )
]


def sample(model: str, out: str, dtype: str) -> None:
    """In a process: sample, read every answer again alone, and write both as JSON."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    prompts = [getattr(one, "input_ids", one) for one in prompts for _ in range(ATTEMPTS)]
    settings: dict[str, Any] = {"generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
    engine = LLM(
        model,
        dtype=dtype,
        max_model_len=LONGEST,
        max_num_seqs=64,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**30,
        seed=0,
        **settings,
    )
    sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, logprobs=0)
    answers = engine.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False
    )
    again = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        said = answer.outputs[0]
        ids = list(said.token_ids)
        (read,) = engine.generate([{"prompt_token_ids": [*prompt, *ids]}], again, use_tqdm=False)
        row = {"prompt": list(prompt), "ids": ids}
        for name, found in (
            ("drawn", said.logprobs),
            ("alone", read.prompt_logprobs[len(prompt) :]),
        ):
            row[name] = [at[token].logprob for at, token in zip(found, ids, strict=True)]
        rows.append(row)
    Path(out).write_text(json.dumps(rows))


def score(parent: Path, rows: list[dict[str, Any]], out: Path, dtype: Dtype, *rank: Any) -> int:
    """In a rank: write the trainer's logprobs of the answers, a list each."""
    import torch

    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    number, store, _ = rank
    torch.set_num_threads(THREADS)
    join_ranks(Layout(), number, store=store, world=1, on_cpu=True)
    hyper = Hyperparameters(steps=1, learning_rate=0, dtype=dtype)
    training = RankTraining(read_architecture(parent), Layout(), hyper, parent, on_cpu=True)
    masks = [
        np.repeat(np.array([0, 1], np.float32), [len(r["prompt"]), len(r["ids"])]) for r in rows
    ]
    samples = Samples.of([[*r["prompt"], *r["ids"]] for r in rows], masks)
    found = training.score(samples, temperature=1.0)
    out.write_text(json.dumps([row.tolist() for row in found]))
    return 0


def distance(rows: list[dict[str, Any]], ours: list[list[float]]) -> LogprobDistance:
    """The distance of logprobs, a list an answer, from those that were sampled with."""
    mine = np.concatenate([np.asarray(one) for one in ours])
    theirs = np.concatenate([np.asarray(row["drawn"]) for row in rows])
    answer = np.repeat(np.arange(len(rows)), [len(row["ids"]) for row in rows])
    gaps = mine - theirs
    found = measure(mine, theirs).model_copy(update=disagreement_of(gaps, answer))
    above = np.bincount(answer, gaps) > np.log(2)
    return found.model_copy(update={"sequences_above": float(above[answer].mean())})


def main(words: list[str]) -> None:
    """Print the table. Exits with a message if no model's directory is given."""
    if len(words) != 1 or not (Path(words[0]) / "config.json").is_file():
        sys.exit('name a model\'s directory: make bench ARGS="disagreement DIR"')
    from cray_agents.trainers.job.launch import find_placement, run_ranks
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.training import train_step  # noqa: F401  (loaded before the fork)

    load_megatron()
    heads = ("sampled by", "scored by", "tokens", "mean", "p99", "largest", "KL (k3)")
    print(f"| {' | '.join((*heads, 'by token', 'by answer'))} |\n|{'---|' * 9}", flush=True)
    parent = Path(words[0]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for sampled in DTYPES:
            drawn = folder / f"{sampled}.json"
            child = [sys.executable, __file__, str(parent), str(drawn), sampled]
            variables = environment(EngineSettings(threads=THREADS))
            subprocess.run(child, check=True, stdout=sys.stderr, env=variables)
            rows = json.loads(drawn.read_bytes())
            sides = {"vLLM, alone": [row["alone"] for row in rows]}
            for dtype in DTYPES:
                out = folder / f"{sampled}-{dtype}.json"
                work = partial(score, parent, rows, out, dtype)
                run_ranks(find_placement(1, "bench"), folder / out.stem, work)
                sides[f"trainer, {dtype}"] = json.loads(out.read_bytes())
            for side, logprobs in sides.items():
                d = distance(rows, logprobs)
                cells = [f"{number:.2g}" for number in (d.mean, d.p99, d.max, d.kl or 0)]
                cells += [f"{d.tokens_above or 0:.2%}", f"{d.sequences_above or 0:.2%}"]
                print(
                    f"| vLLM, {sampled} | {side} | {d.tokens:,} | {' | '.join(cells)} |", flush=True
                )


if __name__ == "__main__":
    sample(*sys.argv[1:])
