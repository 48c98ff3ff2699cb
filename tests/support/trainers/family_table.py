"""Family table: the table of docs/models.md, made of measured results.

`python -m tests.support.trainers.family_table` writes it anew from docs/families.json, which
test_families.py writes, and from docs/serving.json if that is there.
"""

import json
from pathlib import Path
from typing import Any

from cray_agents.runtime.registry.foreign_model import KINDS
from tests.support.trainers.family_trial import EQUAL, Result, problems
from tests.support.trainers.tiny_families import FAMILIES, FURTHER

DOCS = Path(__file__).parents[3] / "docs"
PAGE, RESULTS, SERVING = DOCS / "models.md", DOCS / "families.json", DOCS / "serving.json"
MARKS = ("<!-- families -->", "<!-- end of families -->")
NOT_TRIED = "not tried"
EVERY = FAMILIES | FURTHER
COLUMNS = {  # of a result -> its head in the table
    "one": "loss, 1 rank",
    "two": "loss, 2 ranks",
    "export": "export",
    "random": "random",
    "lora": "LoRA",
    "dpo": "DPO",
    "grpo": "GRPO",
    "bfloat16": "bfloat16",
    "recompute": "recompute",
}
#: Why a family is not right in all: by family, for every problem that its result has.
NOTES: dict[str, str] = {
    "deepseek_v4": "Transformers alone fails likewise: its norms, kept in float32, meet a matrix in"
    " bfloat16 in the first layer.",
}


def read_results() -> dict[str, Result]:
    """The results by family, in the order of tiny_families.py."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {family: found[family] for family in EVERY if family in found}


def note_result(family: str, result: Result) -> None:
    """Keep a family's result, and write the page anew."""
    results = read_results() | {family: result}
    ordered = {name: results[name] for name in EVERY if name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), ordered, read_serving()))


def read_serving() -> dict[str, dict[str, str]]:
    """What vLLM did with each kind; empty if nobody tried."""
    return dict(json.loads(SERVING.read_text())) if SERVING.exists() else {}


def table(results: dict[str, Result], serving: dict[str, dict[str, str]]) -> str:
    """Return the table as Markdown, with the reasons for what is not right below it."""
    heads = ["kind", "backends", "layouts", "packing", *COLUMNS.values(), "vLLM"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    reasons = []
    for family, result in results.items():
        kind, wrong = result["kind"], problems(result)
        listed = kind in KINDS
        served = serving.get(family) or serving.get(kind) or {}
        cells = [
            f"`{kind}`" if kind == family else f"`{kind}` ({family})",
            "megatron, transformers" if listed else "transformers",
            "all; data" if listed else "data",
            _packing(result),
            *(_cell(name, result, wrong) for name in COLUMNS),
            _served(served),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        if wrong:
            whole = {"failed": result["failed"]} if "failed" in result else wrong
            found = "; ".join(f"{COLUMNS.get(n, n)} {_text(value)}" for n, value in whole.items())
            reasons.append(f"- `{family}`: {found}. {NOTES.get(family, 'The cause is not known.')}")
        if _served(served) == "no":
            reasons.append(f"- `{family}`, vLLM: {served.get('cause', served['vllm'])}")
    return "\n".join([*lines, "", *reasons, "", _summary(results)])


def _packing(result: Result) -> str:
    text = str(result.get("packing", "none"))
    words = {
        "packed: attention within each sequence": "packed",
        "mixers once per sequence": "mixers",
    }
    for long, short in words.items():
        text = text.replace(long, short)
    return text


def _cell(name: str, result: Result, wrong: dict[str, Any]) -> str:
    value = result.get(name, NOT_TRIED)
    if name == "bfloat16" and "bfloat16_export" in wrong:
        return "no"
    if isinstance(value, str):
        return value if value in (EQUAL, NOT_TRIED) else "no"
    text = _text(value)
    if name in ("one", "two") and "noise" in result:
        text += f" (noise {_text(result['noise'])})"
    return f"**{text}**" if name in wrong else text


def _served(served: dict[str, str]) -> str:
    if not served:
        return NOT_TRIED
    return "served" if served.get("vllm") == "served" else "no"


def _text(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0e}" if value else "0"


def _summary(results: dict[str, Result]) -> str:
    right = sum(not problems(result) for result in results.values())
    text = f"{len(results)} families; {right} of them are right in all."
    if missing := [f"`{family}`" for family in EVERY if family not in results]:
        text += f" Not measured yet: {', '.join(missing)}."
    return text


def with_table(page: str, results: dict[str, Result], serving: dict[str, dict[str, str]]) -> str:
    """Return the page's text with the table between its marks written anew."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{table(results, serving)}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), read_results(), read_serving()))
