"""Training and validation files of fine-tuning: bad lines, weights, tools, preference pairs."""

import csv
import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cray_agents.runtime.datasets.reader import shards
from cray_agents.runtime.fine_tuning.job_inputs import auto_epochs, base_rate
from cray_agents.runtime.fine_tuning.job_records import TuningFolder, TuningRequest
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.planning.cluster_resources import Resources
from tests.support.fine_tuning_site import LINES, Site, as_jsonl, says
from tests.support.scripted_platform import bare_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
    for name in ("calculator", "solver")
]


def assistant(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", **message}]}


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD = [
    (b'{"messages": [', "not valid JSON"),
    (b"[1]", "not a JSON object"),
    ({"prompt": "a", "completion": "b"}, "'prompt' that is not supported"),
    ({"messages": []}, "messages must be a list"),
    ({"messages": [{"role": "user", "content": "q"}]}, "last message must be the assistant's"),
    ({"messages": [{"role": "robot", "content": "q"}]}, "role must be one of"),
    (assistant(), "has no content"),
    (assistant(content="a", weight=0), "nothing is left to train on"),
    (assistant(content="a", weight=0.5), "weight must be 0 or 1"),
    (assistant(content="a", refusal="no"), "'refusal' that is not supported"),
    (assistant(content=[{"type": "image_url", "image_url": {}}]), "part of type 'image_url'"),
    (
        assistant(tool_calls=[{**CALL, "function": {"name": "f", "arguments": "{"}}]),
        "arguments must be a JSON object",
    ),
    (says("q", "a", tools=[{"type": "function"}]), "tools[0] must be"),
    (
        {
            "messages": [
                {"role": "tool", "content": "4", "tool_call_id": "c9"},
                {"role": "assistant", "content": "4"},
            ]
        },
        "answers 'c9', which nothing called",
    ),
    (says("a" * 3000, "b"), "tokens, and the model reads"),
]


@pytest.mark.slow
def test_every_bad_line_is_named(tmp_path: Path, model: Path) -> None:
    site = Site(tmp_path / "home", model)
    with site.served():
        for line, expected in BAD:
            bad = line if isinstance(line, bytes) else json.dumps(line).encode()
            content = as_jsonl(LINES[:1]) + b"\n" + bad + b"\n"
            job = site.until(site.create(content).id, "failed")
            assert (job.error.code, job.error.param) == ("invalid_training_file", "training_file")
            assert "line 3: " in job.error.message and expected in job.error.message, job.error
            assert "1 of 2 lines" in job.error.message
        many = site.until(site.create(b"x\n" * 25).id, "failed")
        assert "25 of 25 lines" in many.error.message and "line 10:" in many.error.message
        assert "line 11:" not in many.error.message and "and 15 more" in many.error.message
        empty = site.until(site.create(b"\n").id, "failed")
        assert "no examples" in empty.error.message
        assert empty.status == site.create(b"\n").status == "failed"
        newest = site.client.fine_tuning.jobs.list_events(empty.id).data[0]
        assert (newest.level, newest.message) == ("error", empty.error.message)


@pytest.mark.parametrize(
    "changed",
    [
        {"sliding_window": 64, "use_sliding_window": True},
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 16,
                "long_factor": [1.0] * 16,
            }
        },
    ],
    ids=["window", "longrope"],
)
def test_a_line_that_the_trainer_would_refuse_is_named(
    tmp_path: Path, model: Path, changed: dict[str, Any]
) -> None:
    """The limit is the window, or the length up to which RoPE's frequencies stay the same."""
    narrow = tmp_path / "narrow"
    shutil.copytree(model, narrow)
    config = json.loads((narrow / "config.json").read_bytes())
    (narrow / "config.json").write_text(json.dumps(config | changed))
    assert read_architecture(narrow).max_tokens == 64 < config["max_position_embeddings"]
    site = Site(tmp_path / "home", narrow)
    with site.served():
        job = site.until(site.create([LINES[0], says("a" * 200, "b")]).id, "failed")
        assert (job.error.code, job.error.param) == ("invalid_training_file", "training_file")
        assert "line 2: " in job.error.message and "1 of 2 lines" in job.error.message
        assert "tokens, and the model reads 64" in job.error.message


def test_a_batch_is_at_most_an_epoch(site: Site) -> None:
    settings = {"n_epochs": 2, "batch_size": 256}
    job = site.submitted(hyperparameters=settings)
    assert job.method.supervised.hyperparameters.batch_size == len(LINES)
    hyper = JobJournal(site.home, job.metadata["job"]).spec().hyperparameters
    assert (hyper.steps, hyper.batch_size) == (2, len(LINES))
    other = site.submitted(hyperparameters=settings | {"batch_size": len(LINES)})
    assert other.metadata["job"] == job.metadata["job"]


def prefers(question: str, better: str, worse: str, **more: Any) -> dict[str, Any]:
    """A line of a file for dpo."""
    return {
        "input": {"messages": [{"role": "user", "content": question}], **more},
        "preferred_output": [{"role": "assistant", "content": better}],
        "non_preferred_output": [{"role": "assistant", "content": worse}],
    }


DPO = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.5, "n_epochs": 2}}}
PAIRS = [prefers(f"What is {n} + 1?", str(n + 1), str(n)) for n in range(6)]
PAIR = PAIRS[0]
BAD_PAIRS = [
    (says("q", "a"), "'messages' that is not supported"),
    ({**PAIR, "weight": 1}, "'weight' that is not supported"),
    ({**PAIR, "input": {}}, "input must be an object with a list of messages"),
    (prefers("q", "a", "b", tools={"name": "f"}), "tools must be a list"),
    ({**PAIR, "input": {"messages": [{"role": "robot", "content": "q"}]}}, "messages[0].role must"),
    ({**PAIR, "preferred_output": []}, "preferred_output must be a list of one message"),
    (
        {**PAIR, "non_preferred_output": [{"role": "user", "content": "a"}]},
        "non_preferred_output[0].role must be assistant, not 'user'",
    ),
    (
        {**PAIR, "preferred_output": [{"role": "assistant", "content": "a", "weight": 1}]},
        "preferred_output[0] has a field 'weight'",
    ),
    (prefers("q", "a", "a"), "are the same"),
    (prefers("a" * 3000, "b", "c"), "tokens, and the model reads"),
]


def test_every_bad_pair_is_named(tmp_path: Path, model: Path) -> None:
    site = Site(tmp_path / "home", model)
    with site.served():
        for line, expected in BAD_PAIRS:
            job = site.until(site.create([PAIRS[1], line], method=DPO).id, "failed")
            assert "line 2: " in job.error.message and expected in job.error.message, job.error


def test_from_pairs_to_a_dpo_job(site: Site) -> None:
    created = site.create(PAIRS, method=DPO, validation_file=site.upload([PAIR, *NEW_PAIRS]))
    assert created.method.dpo.hyperparameters.beta == 0.5
    auto = {"type": "dpo", "dpo": {"hyperparameters": {"beta": "auto"}}}
    queued = site.until(site.create(PAIRS, method=auto).id, "queued")
    settings = queued.method.dpo.hyperparameters
    assert (queued.method.type, settings.beta, settings.n_epochs, settings.batch_size) == (
        "dpo",
        0.1,
        17,
        6,
    )
    job = site.submitted(PAIRS, method=DPO, validation_file=site.upload([PAIR, *NEW_PAIRS]))
    assert job.id == created.id != queued.id
    spec = JobJournal(site.home, job.metadata["job"]).spec()
    hyper = spec.hyperparameters
    assert (spec.method, hyper.preference.beta, spec.evaluate_every) == ("dpo", 0.5, 1)
    assert (hyper.steps, hyper.batch_size) == (2, 6)  # of pairs
    assert hyper.learning_rate == pytest.approx(2e-4)  # a tenth of supervised's
    rows = [row for path in shards(site.home, spec.dataset) for row in read_rows(path)]
    assert [row["chosen"] for row in rows] == [True, False] * 6
    pairs = [
        row for path in shards(site.home, spec.dataset, "validation") for row in read_rows(path)
    ]
    assert len(pairs) == 2 * len(NEW_PAIRS)
    messages = [event.message for event in site.client.fine_tuning.jobs.list_events(job.id)]
    assert (
        "Files validated, moving job to queued state: 6 examples, 3 to validate on,"
        " 1 left out as duplicates"
    ) in messages
    assert f"Validating validation file: {job.validation_file}" in messages


NEW_PAIRS = [prefers(f"What is {n} + 1?", str(n + 1), str(n)) for n in (20, 21)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


@pytest.mark.megatron
def test_pairs_are_learnt(tmp_path: Path, model: Path) -> None:
    """After a job of the real trainer the preferred answers are more likely."""
    site = Site(tmp_path / "home", model)
    with LocalProcesses(site.root / "local") as scheduler:
        trainer = MegatronTrainer(site.home, scheduler, Resources(ranks=1))
        with site.served(trainer=trainer):
            file = site.upload(NEW_PAIRS)
            job = site.until(site.create(PAIRS, method=TENFOLD, validation_file=file).id, *ENDS)
            assert job.status == "succeeded", (job.error, trainer.status(job.metadata["job"]))
            events = site.client.fine_tuning.jobs.list_events(job.id, limit=100).data
            (checkpoint,) = site.client.fine_tuning.jobs.checkpoints.list(job.id)
            (row, *_, last) = csv.DictReader(
                io.StringIO(site.client.files.content(job.result_files[0]).text)
            )
    metrics: list[Any] = [event for event in reversed(events) if event.type == "metrics"]
    untrained, first, evaluation = metrics[0], metrics[1], metrics[-1]
    assert untrained.data["valid_loss"] == pytest.approx(math.log(2))
    assert first.data["train_loss"] == pytest.approx(math.log(2))  # nothing is preferred yet
    assert metrics[-2].data["accuracy"] == 1 and metrics[-2].data["reward_margin"] > 0
    assert [event.message.partition(":")[2][:12] for event in metrics[:2]] == [
        " validation ",
        " training lo",
    ]
    assert evaluation.data["valid_loss"] < math.log(2)
    assert checkpoint.metrics.full_valid_loss == evaluation.data["full_valid_loss"]
    assert float(last["valid_loss"]) == evaluation.data["valid_loss"]
    assert float(row["train_loss"]) == first.data["train_loss"]
    assert any("Spread over ranks: data=1" in event.message for event in events)


ENDS = ("succeeded", "failed", "cancelled")
TENFOLD = {
    "type": "dpo",
    "dpo": {"hyperparameters": {"n_epochs": 6, "learning_rate_multiplier": 10}},
}


def test_a_validation_file_s_loss_is_told_everywhere(site: Site) -> None:
    file = site.upload([says("What is 20 + 1?", "21"), says("What is 21 + 1?", "22")])
    job = site.submitted(validation_file=file, hyperparameters={"n_epochs": 3, "batch_size": 6})
    assert job.validation_file == file and job.id != site.create().id
    training = job.metadata["job"]
    journal = JobJournal(site.home, training)
    assert journal.spec().evaluate_every == 2
    for step, loss in ((2, 0.75), (4, None), (6, 0.5)):  # as trainers/job/rank.py writes them
        site.trainer.advance(training, min(step, 5))
        journal.event("evaluation", step=step, loss=loss, tokens=9, accuracy=1.0)
        journal.close()
    site.trainer.advance(training)
    done = site.retrieve(job.id)
    assert done.status == "succeeded"
    events = site.client.fine_tuning.jobs.list_events(job.id, limit=100).data
    losses: list[Any] = [e for e in events if "validation loss" in e.message]
    assert [event.message for event in reversed(losses)] == [
        "Step 2/6: validation loss=0.7500",
        "Step 4/6: validation loss=not finite",
        "Step 6/6: validation loss=0.5000",
    ]
    assert {event.type for event in losses} == {"metrics"}
    assert losses[0].data == {
        "step": 6,
        "total_steps": 6,
        "valid_loss": 0.5,
        "full_valid_loss": 0.5,
        "valid_accuracy": 1.0,
    }
    (checkpoint,) = site.client.fine_tuning.jobs.checkpoints.list(job.id)
    metrics = checkpoint.metrics
    assert (metrics.train_loss, metrics.valid_loss, metrics.full_valid_loss) == (1.0, 0.5, 0.5)
    text = site.client.files.content(done.result_files[0]).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["valid_loss"] for row in rows] == ["", "0.75", "", "", "", "0.5"]
    assert [row["full_valid_loss"] for row in rows] == [row["valid_loss"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*LINES[:1], {"messages": []}], "line 2: messages must be a list"),
        (LINES[:3], "none of its 3 examples is left"),
        ([says("a" * 3000, "b")], "line 1: "),
        (b"", "no examples"),
    ],
)
def test_a_validation_file_that_cannot_be_used_is_named(
    tmp_path: Path, model: Path, lines: Any, expected: str
) -> None:
    site = Site(tmp_path / "home", model)
    with site.served():
        job = site.until(site.create(validation_file=site.upload(lines)).id, "failed")
        assert (job.error.code, job.error.param) == ("invalid_validation_file", "validation_file")
        assert expected in job.error.message


def test_weights_and_the_tools_of_each_line_decide_what_is_trained(site: Site, model: Path) -> None:
    import pyarrow.parquet
    from transformers import AutoTokenizer

    chat = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "wrong", "weight": 0},
        {"role": "user", "content": "again?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 1},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": [{"type": "text", "text": "right"}]},
    ]
    lines = [
        {"messages": chat, "tools": TOOLS[:1], "parallel_tool_calls": False},
        says("two?", "2", tools=TOOLS[1:]),
        says("two?", "2"),
        says("two?", "2"),
    ]
    job = site.submitted(lines)
    events = site.client.fine_tuning.jobs.list_events(job.id).data
    validated: Any = next(event for event in events if "validated" in event.message)
    assert validated.message.endswith("4 examples, 1 left out as duplicates")
    (path,) = shards(site.home, validated.data["dataset"])
    rows = pyarrow.parquet.read_table(path).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(model)

    def text(row: dict[str, Any], trained: int) -> str:
        pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
        return str(tokenizer.decode([token for token, mask in pairs if mask == trained]))

    assert "calculator(" in text(rows[0], 0) and "solver(" not in text(rows[0], 0)
    assert "solver(" in text(rows[1], 0)
    assert "solver(" not in text(rows[2], 0)
    assert "wrong" in text(rows[0], 0) and "wrong" not in text(rows[0], 1)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    assert text(rows[0], 1) == call + "right<|im_end|>"


@pytest.mark.slow
def test_a_large_file_is_read_in_a_process_of_its_own(site: Site) -> None:
    """A process of its own delays no request and gives the same result."""
    large = [says(f"What is {n} + 1?", str(n + 1)) for n in range(500)]
    job = site.submitted(large)
    assert job.metadata["job"] and job.hyperparameters.n_epochs == 3
    bad = site.until(site.create([*large, {"messages": []}]).id, "failed")
    assert "line 501: messages must be" in bad.error.message


FOLLOW = """
import asyncio, sys
from pathlib import Path
from cray_agents.paths import Home
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.fine_tuning.tuning_jobs import FineTuning
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.job.job_command import check_submitted
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.runtime.scheduler.local import LocalProcesses

async def follow(home, job_id, scheduler):
    trainer = MegatronTrainer(home, scheduler)
    tuning = FineTuning(home, Registry(home), trainer, Files(home), code="")
    tuning.follow(job_id)
    while tuning.folder.read_validated(job_id) is None:
        await asyncio.sleep(0.02)
    await tuning.close()
    spec = tuning.folder.read_validated(job_id).spec
    check_submitted(spec, home, trainer.scheduler.name, turns=trainer.turns)

home = Home(Path(sys.argv[1]))
with LocalProcesses(home.root / "local") as scheduler:
    asyncio.run(follow(home, sys.argv[2], scheduler))
print(sorted({"torch", "transformers", "pyarrow"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_process_without_torch_stays_so(tmp_path: Path, model: Path) -> None:
    """A gateway that validates a small file; here pytest's has torch, so another one does."""
    site = Site(tmp_path / "home", model)
    with site.served():
        job = site.submitted()
    here = TuningFolder(site.home).read_validated(job.id)
    (site.home.fine_tuning / f"{job.id}.validated").unlink()  # it died while it read the file
    argv = [sys.executable, "-c", FOLLOW, str(site.home.root), job.id]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert ran.stdout == "[]\n", ran.stderr
    there = TuningFolder(site.home).read_validated(job.id)
    assert here is not None and there is not None
    assert there.spec == here.spec.model_copy(update={"code": ""})


def test_a_model_that_cannot_be_trained_fails_its_jobs(tmp_path: Path) -> None:
    site = Site(tmp_path / "home", bare_model(tmp_path / "bare"))
    with site.served():
        failed = site.until(site.create().id, "failed")
        assert (failed.error.code, failed.error.param) == ("unsupported_model", "model")
        assert "tokenizer" in failed.error.message


def test_a_file_that_is_deleted_before_it_is_read_fails_the_job(site: Site) -> None:
    request = TuningRequest(
        **dict.fromkeys(("model", "name", "parent", "parent_sha256"), "x"),
        training_file="file-gone",
        training_sha256="0" * 64,
    )
    TuningFolder(site.home).create(request)
    failed = site.until(request.id, "failed")
    assert failed.error.code == "invalid_training_file" and "deleted" in failed.error.message


@pytest.mark.parametrize(
    ("examples", "epochs"),
    [(1, 25), (10, 10), (33, 4), (34, 3), (8333, 3), (8334, 2), (12501, 1), (10**6, 1)],
)
def test_the_auto_rules(examples: int, epochs: int) -> None:
    assert auto_epochs(examples) == epochs
    assert base_rate({"hidden_size": 128}, "sft") == 2e-3
    assert base_rate({"hidden_size": 4096}, "dpo") == 1e-6
