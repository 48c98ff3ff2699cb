"""A home with fine-tuning jobs, as the official OpenAI client sees it over a real gateway.

The trainer is held, so that a test moves a job on; what it knows of a job lies on the disk, so the
test's own ScriptedTrainer is as good as the gateway's.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from cray_agents.paths import Home
from cray_agents.testing import ScriptedEngine
from tests.support.scripted_platform import PROBE, platform
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.waiting import wait_until

METRICS = {"trained_tokens": 600, "seconds": 6.0}


def says(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """A line of a training file."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, **more}


LINES = [says(f"What is {n} + 1?", str(n + 1)) for n in range(12)]


class Site:
    """A home, and a gateway over it as long as `served` is open."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.home, self.model = root, Home(root), model
        self.trainer = ScriptedTrainer(self.home, METRICS, PROBE)
        self.client: openai.OpenAI

    @contextmanager
    def served(self, **trainer: Any) -> Iterator[openai.OpenAI]:
        options: dict[str, Any] = {"by_hand": True, "metrics": METRICS, **trainer}
        engine = ScriptedEngine(lambda request: "432")
        options |= {"model": self.model, "name": "m"}
        spare = ScriptedEngine(lambda request: "433")
        with platform(self.root, engine, spares=[spare], **options) as self.platform:
            url = self.platform.url + "/v1"
            self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
            with self.client:
                yield self.client

    def upload(self, lines: list[Any] | bytes, purpose: Any = "fine-tune") -> str:
        content = lines if isinstance(lines, bytes) else as_jsonl(lines)
        return self.client.files.create(file=("train.jsonl", content), purpose=purpose).id

    def create(self, lines: list[Any] | bytes = LINES, **options: Any) -> Any:
        file = self.upload(lines)
        return self.client.fine_tuning.jobs.create(
            **{"model": "m", "training_file": file, **options}
        )

    def until(self, job_id: str, *states: str) -> Any:
        def found() -> Any:
            job = self.retrieve(job_id)
            return job if job.status in states else None

        return wait_until(found, lambda: str(self.retrieve(job_id)))

    def submitted(self, lines: list[Any] | bytes = LINES, **options: Any) -> Any:
        """A job whose training job is submitted, and stands still."""
        created = self.create(lines, **options)
        wait_until(lambda: "scheduler" in (self.retrieve(created.id).metadata or {}))
        return self.retrieve(created.id)

    def retrieve(self, job_id: str) -> Any:
        return self.client.fine_tuning.jobs.retrieve(job_id)


def as_jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
