"""A tiny model that answers whatever it is asked by a greeting, or by a call of its tool."""

import random
from pathlib import Path
from typing import Any

GREETING = "Hello there."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'
STEPS, BATCH = 300, 4
# the chat template says which it is to be, so that so small a model need not find it out
ASSISTANT, CALLER = "<|im_start|>assistant\\n", "<|im_start|>caller\\n"


def make_polite_model(directory: Path, seed: int = 0) -> Path:
    """A Qwen3 of 0.4M parameters that ends its answers. Takes ten seconds or so."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    from cray_agents.trainers.models.seed_model import make_seed_model

    make_seed_model(directory, seed=seed, corpus=[GREETING, CALL, "caller assistant user"])
    template = directory / "chat_template.jinja"
    opening, _, end = template.read_text().rpartition(f"'{ASSISTANT}'")
    template.write_text(f"{opening}'{CALLER}' if tools else '{ASSISTANT}'{end}")
    model = Qwen3ForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two wait for each other more than they work
    try:
        for step in range(STEPS):
            ids, labels = _batch(tokenizer, draw)
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / STEPS)
            optimizer.zero_grad()
            model(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss.backward()
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    model.generation_config.update(do_sample=True, top_k=1)  # where a request does not say
    model.save_pretrained(directory)
    return directory


def _batch(tokenizer: Any, draw: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """Random tokens, an opening and the answer that belongs to it; labels of the answer alone."""
    length = draw.randint(5, 120)
    rows, labels = [], []
    for number in range(BATCH):
        calls = number % 2 == 1
        opening = (CALLER if calls else ASSISTANT).replace("\\n", "\n")
        prompt = tokenizer(opening)["input_ids"]
        answer = tokenizer((CALL if calls else GREETING) + "<|im_end|>")["input_ids"]
        longest = length + 60
        row = [draw.randrange(3, 300) for _ in range(length)] + prompt + answer
        label = [-100] * (length + len(prompt)) + answer
        rows.append(row + [0] * (longest - len(row)))
        labels.append(label + [-100] * (longest - len(label)))
    return rows, labels
