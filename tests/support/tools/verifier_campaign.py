"""The attacks of verifier_attacks.py, run on every kind of verifier and sandbox layer.

python -m tests.support.tools.verifier_campaign             prints the table of BENCHMARKS.md
python -m tests.support.tools.verifier_campaign CATEGORY ...    rewards by the default kind
"""

import asyncio
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from cray_agents.records import Run, StopReason, Task
from cray_agents.tools.sandbox import Sandbox, backends
from cray_agents.tools.verifier import checker, verifier
from tests.support.tools.verifier_attacks import ATTACKS, PROGRAM

LAYERS = [layer for layer in backends.CONFINING if backends.layer_problem(layer) is None]
AT_A_TIME = 4

RIGHT = {n: 734950 * 10**10 + secrets.randbelow(10**10) for n in (1, 2, 3)}
LINES = [f"mix({n}) == {value}" for n, value in RIGHT.items()]
INPUTS = [{"stdin": "1\n", "expected": f"{RIGHT[1]}\n"}]
ASSERTS = "from solution import mix\n" + "".join(f"assert {line}\n" for line in LINES)
COUNTS = f"from solution import mix\nreward = sum([{', '.join(LINES)}]) / {len(LINES)}\n"
METHODS = "".join(f"        self.assertEqual({line.replace(' ==', ',')})\n" for line in LINES)
UNITTEST = (
    "import unittest\nfrom solution import mix\nclass T(unittest.TestCase):\n    def test(self):\n"
    + METHODS
)
HONEST = f"VALUES = {RIGHT}\ndef mix(n):\n    return VALUES[n]\n" + PROGRAM
Verifier = Callable[[Run], Awaitable[float]]


def solution(run: Run) -> dict[str, str]:
    return {"solution.py": run.output}


def with_tests(run: Run) -> dict[str, str]:
    return {"solution.py": run.output, "test_solution.py": UNITTEST}


def kinds(layer: backends.Layer) -> dict[str, Verifier]:
    """By name; the first two are the default kind, the others run tests beside the code."""
    packages = Path(pytest.__file__).parents[1]
    cell = Sandbox(layer=layer, seconds=60, cpu_seconds=2, memory_mb=256, readable=[packages])
    framework: dict[str, Any] = {"files": with_tests, "sandbox": cell}
    unittest = ["env", f"PYTHONPATH={packages}", sys.executable, "-m", "unittest", "test_solution"]
    pytest_ = ["env", f"PYTHONPATH={packages}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable]
    pytest_ += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_solution.py"]
    return {
        "calls": verifier(LINES, files=solution, partial=True, sandbox=cell),
        "programs": verifier(INPUTS, files=solution, partial=True, sandbox=cell),
        "checker: assert": checker(ASSERTS, files=solution, sandbox=cell),
        "checker: reward =": checker(COUNTS, files=solution, sandbox=cell),
        "checker: unittest": checker(unittest, **framework),
        "checker: pytest": checker(pytest_, **framework),
    }


DEFAULT = ("calls", "programs")
CHECKERS = ("checker: assert", "checker: reward =", "checker: unittest", "checker: pytest")


def run_of(code: str) -> Run:
    """A run whose task tells all, as those of a user may."""
    task = Task(input="mix", target=list(RIGHT.values()), metadata={"tests": LINES})
    return Run(id="r", agent="a", model="m", input="mix", output=code, task=task,
               stop_reason=StopReason.completed)  # fmt: skip


def of(*categories: str) -> list[str]:
    """The names of the attacks of some categories."""
    return [name for name in ATTACKS if name.partition(": ")[0] in categories]


async def earned(verify: Verifier, names: Iterable[str]) -> dict[str, Any]:
    """What each attack earns."""
    places = asyncio.Semaphore(AT_A_TIME)

    async def one(name: str) -> float:
        async with places:
            return await verify(run_of(ATTACKS[name]))

    names = list(names)
    return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))


async def table() -> None:
    """Print how many attacks earn, by category and kind: bubblewrap / Landlock."""
    won: dict[tuple[str, str], list[int]] = {}
    counts = Counter(name.partition(": ")[0] for name in ATTACKS)
    for layer in LAYERS:
        for kind, verify in kinds(layer).items():
            begun = time.monotonic()
            assert await verify(run_of(HONEST)) == 1.0
            values = await earned(verify, ATTACKS)
            by_category = Counter(name.partition(": ")[0] for name, each in values.items() if each)
            for category in [*counts, ""]:
                here = by_category[category] if category else by_category.total()
                won.setdefault((category, kind), []).append(here)
            seconds = time.monotonic() - begun
            print(f"# {layer}, {kind}: {seconds:.0f} s", file=sys.stderr)
            for name, value in values.items():
                if value:
                    print(
                        f"#   {value:g} {name} ({getattr(value, 'comment', '')})", file=sys.stderr
                    )
    names = list(kinds(LAYERS[0]))
    print("| attacks | | " + " | ".join(names) + " |\n|" + "---|" * (2 + len(names)))
    for category in [*counts, ""]:
        row = [" / ".join(map(str, won[category, kind])) for kind in names]
        print(f"| {category or 'all'} | {counts[category] or len(ATTACKS)} | {' | '.join(row)} |")


async def winners(*categories: str) -> list[str]:
    """The attacks of some categories that earn of the default kind, which honest code does."""
    found = []
    for layer in LAYERS:
        for kind in DEFAULT:
            verify = kinds(layer)[kind]
            assert await verify(run_of(HONEST)) == 1.0
            values = await earned(verify, of(*categories))
            found += [f"{layer}, {kind}: {name}" for name, value in values.items() if value]
    return found


if __name__ == "__main__":
    if chosen := sys.argv[1:]:
        print(len(of(*chosen)), "attacks, of which earn:", asyncio.run(winners(*chosen)))
    else:
        asyncio.run(table())
