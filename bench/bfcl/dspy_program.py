"""DSPy's bootstrapped examples, in an environment of DSPy's own; called by rival.py.

`dspy_program.py FILE` reads a JSON object: `url` and `model` of a server, `instructions`, `shown`,
`train`, `tried` and `test` (lists of [name, text], `shown` of [text, answer]), `temperature`,
`max_tokens`, `count` examples a set and `sets`. For a verdict on an answer it prints a line
["name", "answer"], and reads `true` or `false`. Its last line is an object: `calls` of the model
before the test, `score` on what was tried, `demos`, and the `answers` to the test by name.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import dspy
from dspy.teleprompt import BootstrapFewShotWithRandomSearch

AT_ONCE = 16
verdicts = threading.Lock()
told = os.fdopen(os.dup(1), "w")  # what DSPy itself prints goes where errors go
sys.stdout = sys.stderr


class Plain(dspy.Adapter):  # type: ignore[misc]
    """Prompts as ours: a small model does not answer in the form of DSPy's own adapters."""

    def format(self, signature: Any, demos: Any, inputs: Any) -> list[dict[str, str]]:
        """The instructions, the examples and the task."""
        said = [("system", signature.instructions)]
        for demo in demos:
            said += [("user", demo["task"]), ("assistant", demo["answer"])]
        said.append(("user", inputs["task"]))
        return [{"role": role, "content": content} for role, content in said]

    def parse(self, signature: Any, completion: str) -> dict[str, str]:
        """The whole text."""
        return {"answer": completion}


def right(example: Any, prediction: Any, trace: Any = None) -> bool:
    """The benchmark's verdict."""
    with verdicts:
        print(json.dumps([example.name, str(prediction.answer or "")]), file=told, flush=True)
        return bool(json.loads(sys.stdin.readline()))


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Choose examples, and answer the test with them."""
    # no cache: ours asks again, too
    common = {"api_base": given["url"], "api_key": "none", "max_tokens": given["max_tokens"]}
    lm = dspy.LM(
        f"openai/{given['model']}", temperature=given["temperature"], cache=False, **common
    )
    dspy.configure(lm=lm, adapter=Plain())

    def examples(part: str) -> list[Any]:
        rows = [dspy.Example(name=name, task=text) for name, text in given[part]]
        return [each.with_inputs("task") for each in rows]

    program = dspy.Predict(dspy.Signature("task -> answer", given["instructions"]))
    teacher = program.deepcopy()
    teacher.demos = [dspy.Example(task=text, answer=answer) for text, answer in given["shown"]]
    search = BootstrapFewShotWithRandomSearch(
        metric=right,
        max_bootstrapped_demos=given["count"],
        max_labeled_demos=0,
        num_candidate_programs=given["sets"],
        num_threads=AT_ONCE,
        max_errors=10**6,  # what cannot be read is a wrong answer
    )
    best = search.compile(
        program,
        teacher=teacher,
        trainset=examples("train"),
        valset=examples("tried"),
        restrict=[-3, *range(-1, given["sets"])],  # not -2: there are no labels
    )
    calls = len(lm.history)
    best.set_lm(dspy.LM(f"openai/{given['model']}", temperature=0.0, cache=False, **common))
    answers = {}

    def note(example: Any, prediction: Any, trace: Any = None) -> bool:
        answers[example.name] = str(prediction.answer or "")
        return True

    tests = examples("test")
    dspy.Evaluate(devset=tests, metric=note, num_threads=AT_ONCE, max_errors=10**6)(best)
    demos = [[each.task, each.answer] for each in best.demos]
    scores = [each["score"] for each in getattr(best, "candidate_programs", [])]
    return {"calls": calls, "score": max(scores, default=0), "demos": demos, "answers": answers}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))), file=told, flush=True)
