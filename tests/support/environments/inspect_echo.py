"""Echo as a task of Inspect AI."""

from echo import numbers, question
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def echo():
    samples = [Sample(id=n, input=question(n), target=n) for n in numbers()]
    return Task(dataset=samples, solver=generate(), scorer=exact())
