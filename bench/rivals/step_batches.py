"""The sequences of the rivals' training steps: both sides draw them from here, in one order.

A round is GROUPS prompts with ATTEMPTS completions each, and as many steps as it takes to learn
from each completion once. The lengths are spread as those of chats are. Called by steps.py, and by
step_sides.py in the processes that it starts.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cray_agents.trainers.data.packer import step_units
from cray_agents.training_jobs import Hyperparameters, Policy

GROUPS, ATTEMPTS, BATCH = 4, 8, 8  # BATCH: sequences of a step
STEPS = GROUPS * ATTEMPTS // BATCH  # of a round
FIRST_WORD = 2  # below it are the tokens that end and pad a sequence
#: The same optimizer on both sides. TRL divides a reward's deviation by the group's spread + 1e-4.
HYPER = Hyperparameters(
    steps=10**6,
    batch_size=BATCH,
    learning_rate=1e-4,
    weight_decay=0.0,
    policy=Policy(importance_cap=None),
)
SPREAD_FLOOR = 1e-4


@dataclass(frozen=True)
class Completion:
    """A prompt's tokens, an answer's tokens, and its reward."""

    prompt: list[int]
    answer: list[int]
    reward: float


def round_of(number: int, vocabulary: int, longest: int) -> list[Completion]:
    """A round's completions, group by group. `longest`: tokens of a sequence, at most."""
    random = np.random.default_rng(number)

    def words(median: int, limit: int) -> list[int]:
        size = int(np.exp(random.normal(np.log(median), 0.8)).clip(8, limit))
        return random.integers(FIRST_WORD, vocabulary, size).tolist()

    completions = []
    for _ in range(GROUPS):
        prompt = words(longest // 16, longest // 4)
        answers = [words(longest // 8, longest - longest // 4) for _ in range(ATTEMPTS)]
        # two rewards at least, so that no group is without a signal
        rewards = [0.0, 1.0, *random.integers(0, 2, ATTEMPTS - 2).tolist()]
        completions += [Completion(prompt, a, r) for a, r in zip(answers, rewards, strict=True)]
    return completions


def places_of(step: int) -> list[int]:
    """The places in their round of the completions of a step, which counts over all rounds."""
    return step_units(HYPER, step, np.ones(GROUPS * ATTEMPTS))


def advantages_of(completions: list[Completion]) -> list[float]:
    """What TRL makes of the rewards: the deviation from a group's mean, over its spread."""
    rewards = np.array([one.reward for one in completions]).reshape(GROUPS, ATTEMPTS)
    deviations = rewards - rewards.mean(1, keepdims=True)
    spread = rewards.std(1, ddof=1, keepdims=True) + SPREAD_FLOOR
    return [float(value) for value in (deviations / spread).flatten()]


def tokens_of(completions: list[Completion]) -> int:
    """The tokens that are read: without padding, and without each last one, a target alone."""
    return sum(len(one.prompt) + len(one.answer) - 1 for one in completions)


def write_model(folder: Path, hidden: int, layers: int, vocabulary: int, longest: int) -> int:
    """A Qwen3 with random weights, and a tokenizer of that many words; returns its parameters."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=hidden * 14 // 5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=vocabulary,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    network = AutoModelForCausalLM.from_config(config)
    network.save_pretrained(folder)
    names = {f"t{number}": number for number in range(vocabulary)}
    words = Tokenizer(WordLevel(names, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t1")
    tokenizer.save_pretrained(folder)
    return int(network.num_parameters())
