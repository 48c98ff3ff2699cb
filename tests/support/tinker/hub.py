"""A hub of local folders for the cookbook's loops: a tiny model and two datasets.

transformers and datasets read `owner/name` from the working directory where it is there.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cray_agents.trainers.models.seed_model import make_seed_model

MODEL = "Qwen/Qwen3-8B-Base"  # for it the cookbook renders `User: ...`
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
FEW_SHOT = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r"
    " 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
)
HOW_MANY = "How many r's are in strawberry?"
DIGITS = (2, 3)


def make_hub(folder: Path, rows: int) -> None:
    """Make model and datasets: questions whose answer is one of two digits."""
    asked = [_question(number) for number in range(rows)]
    texts = [f"User: {q}{SUFFIX}\n\nAssistant: \\boxed{{{d}}}\n\nUser:" for q, d in asked]
    example = f"User: {HOW_MANY}{SUFFIX}\n\nAssistant: {FEW_SHOT}\n\n"
    make_seed_model(folder / MODEL, seed=0, corpus=[example, *texts])
    chats = [
        {"messages": [_says("user", q + SUFFIX), _says("assistant", f"\\boxed{{{d}}}")]}
        for q, d in asked
    ]
    _write(folder / "HuggingFaceH4/no_robots", "default", chats)
    _write(
        folder / "openai/gsm8k",
        "main",
        [{"question": q, "answer": f"so\n#### {d}"} for q, d in asked],
    )


def questions(count: int) -> list[str]:
    """The first questions."""
    return [_question(number)[0] for number in range(count)]


def prompt(question: str) -> str:
    """The prompt of rl_loop, as the cookbook renders it."""
    example = f"User: {HOW_MANY}{SUFFIX}\n\nAssistant: {FEW_SHOT}\n\n"
    return f"{example}User: {question}{SUFFIX}\n\nAssistant:"


def answer(digit: int) -> str:
    """An answer and the end of its turn."""
    return f" \\boxed{{{digit}}}\n\nUser:"


def _question(number: int) -> tuple[str, int]:
    return f"What is {number} times 0 plus {DIGITS[number % 2]}?", DIGITS[number % 2]


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write(folder: Path, config: str, rows: list[dict[str, Any]]) -> None:
    """Write a dataset as the hub has it: a card that names the files of each split."""
    folder.mkdir(parents=True)
    card = (
        f"configs:\n- config_name: {config}\n  data_files:\n  - split: train\n    path: t.jsonl\n"
    )
    (folder / "README.md").write_text(f"---\n{card}---\n")
    lines: Iterator[str] = (json.dumps(row) + "\n" for row in rows)
    (folder / "t.jsonl").write_text("".join(lines))
