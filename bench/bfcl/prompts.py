"""Prompts that the benchmark chooses from, on train functions alone: the stage `prompt`.

Each is the recipe's or a change of it. The best one is used for the base, all arms and the rival.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cray_agents.cli.user_files import load

ROOT = Path(__file__).parents[2]
recipe: Any = load(ROOT / "cookbook" / "09_function_calling.py")


@dataclass(frozen=True)
class JsonPrompt(recipe.Prompt):  # type: ignore[misc]  # a module that is loaded by its path
    """Calls as JSON."""

    form: ClassVar[str] = 'as JSON: {"name": ..., "arguments": {...}}'
    nothing: ClassVar[str] = "null"

    def write(self, call: dict[str, dict[str, Any]] | None) -> str:
        for name, arguments in (call or {}).items():
            return json.dumps({"name": name, "arguments": arguments})
        return self.nothing

    def read(self, answer: str) -> list[dict[str, dict[str, Any]]] | None:
        text = answer.strip()
        if text in (self.nothing, "[]"):
            return []
        try:
            said = json.loads(text)
            calls = said if isinstance(said, list) else [said]
            read = [{each["name"]: each["arguments"]} for each in calls]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        fits = all(isinstance(arguments, dict) for each in read for arguments in each.values())
        return read if fits else None


#: Few examples: their tokens are paid for in every sample that is trained on.
CANDIDATES: dict[str, Any] = {
    f"{name}, examples {', '.join(map(str, examples))}": kind(examples)
    for name, kind in (("python", recipe.Prompt), ("json", JsonPrompt))
    for examples in ((0, 1), (0, 1, 2), (2, 0, 1))
}
TEMPERATURES = (0.6, 0.8, 1.0)  # of the training runs, for the chosen prompt
