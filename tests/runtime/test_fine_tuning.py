"""Fine-tuning as the official OpenAI client sees it: all real but for engine and trainer.

Read next: test_fine_tuning_files.py, which has a job of the real trainer too.
"""

import asyncio
import csv
import io
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import pytest

from cray_agents.errors import NotFound
from cray_agents.records import ModelVersion, Prompt
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.fine_tuning.job_records import TuningFolder, TuningRequest
from cray_agents.runtime.fine_tuning.tuning_jobs import FineTuning
from cray_agents.runtime.registry.checkpoints import settings_in, settings_sha256
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.job.journal import JobJournal
from tests.support.fine_tuning_site import LINES, Site
from tests.support.scripted_trainer import ScriptedTrainer


def test_from_a_file_to_a_model_that_answers(site: Site) -> None:
    created = site.create(
        suffix="sums",
        seed=7,
        metadata={"team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}},
    )
    assert (created.object, created.model, created.seed) == ("fine_tuning.job", "m@1", 7)
    assert created.id.startswith("ftjob-") and created.fine_tuned_model is None
    assert created.status in ("validating_files", "queued")
    queued = site.until(created.id, "queued")
    settings = queued.method.supervised.hyperparameters
    assert (settings.n_epochs, settings.batch_size, settings.learning_rate_multiplier) == (
        2,
        12,
        1.0,
    )
    assert queued.metadata["team"] == "a" and queued.finished_at is None

    job = site.submitted(
        suffix="sums", seed=7, metadata={"team": "a"}, hyperparameters={"n_epochs": 2}
    )
    assert job.id == created.id
    training = job.metadata["job"]
    spec = json.loads((site.home.job(training) / "spec.json").read_bytes())
    hyper = spec["hyperparameters"]
    assert (hyper["steps"], hyper["batch_size"], hyper["seed"]) == (2, 12, 7)
    assert hyper["learning_rate"] == pytest.approx(2e-3)  # the tiny model's hidden size is 128

    site.trainer.advance(training, 1)
    begun = time.time()
    running = site.retrieve(job.id)
    assert running.status == "running"
    assert begun + 1 < running.estimated_finish < time.time() + 5
    assert list(site.client.fine_tuning.jobs.checkpoints.list(job.id)) == []

    site.trainer.advance(training)
    done = site.retrieve(job.id)
    assert (done.status, done.fine_tuned_model, done.error) == ("succeeded", "sums@1", None)
    assert (done.trained_tokens, done.estimated_finish) == (600, None)
    assert done.finished_at and done.finished_at >= done.created_at
    (checkpoint,) = site.client.fine_tuning.jobs.checkpoints.list(job.id)
    assert (checkpoint.fine_tuned_model_checkpoint, checkpoint.step_number) == ("sums@1", 2)
    assert (checkpoint.metrics.train_loss, checkpoint.fine_tuning_job_id) == (1.0, job.id)
    assert "sums@1" in [model.id for model in site.client.models.list()]

    (result,) = done.result_files
    about = site.client.files.retrieve(result)
    assert about.purpose == "fine-tune-results" and about.filename.startswith(job.id)
    rows = list(csv.DictReader(io.StringIO(site.client.files.content(result).text)))
    assert [(row["step"], row["train_loss"]) for row in rows] == [("1", "2.0"), ("2", "1.0")]

    version = ModelVersion.model_validate(asyncio.run(site.platform.versions("sums"))[0])
    assert version.job == training and done.fine_tuned_model == version.id
    says: Any = [{"role": "user", "content": "47 + 385?"}]
    answer = site.client.chat.completions.create(model=done.fine_tuned_model, messages=says)
    assert (answer.model, answer.choices[0].message.content) == ("sums@1", "433")
    answer = site.client.chat.completions.create(model="m", messages=says)
    assert (answer.model, answer.choices[0].message.content) == ("m@1", "432")  # still served


def test_versions_while_it_trains_are_checkpoints_that_answer(site: Site) -> None:
    job = site.submitted(suffix="sums", hyperparameters={"n_epochs": 5, "publish_every": 2})
    assert job.method.supervised.hyperparameters.publish_every == 2
    training = job.metadata["job"]
    site.trainer.advance(training, 3)
    (first,) = site.client.fine_tuning.jobs.checkpoints.list(job.id)
    assert (first.fine_tuned_model_checkpoint, first.step_number) == ("sums@1", 2)
    assert (first.metrics.train_loss, first.metrics.valid_loss) == (1.75, None)
    says: Any = [{"role": "user", "content": "47 + 385?"}]
    answer = site.client.chat.completions.create(model="sums@1", messages=says)
    assert (answer.model, site.retrieve(job.id).status) == ("sums@1", "running")

    site.trainer.advance(training)
    assert site.retrieve(job.id).fine_tuned_model == "sums@3"
    page = site.client.fine_tuning.jobs.checkpoints.list(job.id, limit=1)
    found = [(one.step_number, one.fine_tuned_model_checkpoint) for one in page]
    assert found == [(5, "sums@3"), (4, "sums@2"), (2, "sums@1")]
    told = [event.message for event in site.client.fine_tuning.jobs.list_events(job.id)]
    assert "Checkpoint created at step 2: sums@1" in told

    for wrong in (0, 1.5, "often"):
        with pytest.raises(openai.BadRequestError, match="publish_every must be 'auto' or a whole"):
            site.create(suffix="sums", hyperparameters={"publish_every": wrong})
    with pytest.raises(openai.BadRequestError, match="another publish_every: 2, not 'auto'"):
        site.create(suffix="sums", hyperparameters={"n_epochs": 5})


def test_a_shared_training_publishes_as_its_first_job_says(site: Site) -> None:
    """Nine epochs of twelve are what "auto" means here: other requests, the same training."""
    first = site.submitted(suffix="first", hyperparameters={"publish_every": 2})
    training = first.metadata["job"]
    site.trainer.advance(training, 3)
    refused = []
    for asked in ({"n_epochs": 9, "publish_every": 2}, {"batch_size": 12}):
        job = site.create(suffix="second", hyperparameters=asked)
        refused.append(site.until(job.id, "failed"))
    for job in refused:
        assert (job.error.code, job.metadata["job"]) == ("job_exists", training)
        assert "{'name': 'first', 'steps': 2}, not" in job.error.message
        assert list(site.client.fine_tuning.jobs.checkpoints.list(job.id)) == []
    site.trainer.advance(training)
    assert site.retrieve(first.id).fine_tuned_model == "first@5"
    assert site.retrieve(refused[0].id).status == "failed"


def test_what_is_made_of_a_version_keeps_its_prompt(site: Site) -> None:
    """The same training from these weights without it is another job, with its own result."""
    prompts = {"adder": Prompt(instructions="Add.")}
    first = Registry(site.home).resolve("m").checkpoint
    shown = asyncio.run(site.platform.register("m", first, prompts))
    asked: dict[str, Any] = {"suffix": "sums", "hyperparameters": {"publish_every": 5}}
    job = site.submitted(model=shown.id, **asked)
    refused = site.until(site.create(**asked).id, "failed")
    assert refused.error.code == "job_exists" and refused.metadata["job"] == job.metadata["job"]
    prompt = {"adder": prompts["adder"].id}
    assert f"'steps': 5, 'prompts': {prompt}}}, not {{'name'" in refused.error.message
    site.trainer.advance(job.metadata["job"])
    assert site.retrieve(job.id).fine_tuned_model == "sums@2"
    assert [one.prompts for one in Registry(site.home).versions("sums")] == [prompts, prompts]

    jobs = [site.submitted(model=model, suffix="both", seed=1) for model in ("m@1", shown.id)]
    assert len({one.metadata["job"] for one in jobs}) == 1
    site.trainer.advance(jobs[0].metadata["job"])
    made = [site.retrieve(one.id).fine_tuned_model for one in jobs]
    assert [Registry(site.home).resolve(one).prompts for one in made] == [{}, prompts]


def test_a_rate_of_nothing_is_a_rate(site: Site) -> None:
    job = site.submitted(hyperparameters={"learning_rate_multiplier": 0, "n_epochs": 1})
    assert job.method.supervised.hyperparameters.learning_rate_multiplier == 0
    spec = json.loads((site.home.job(job.metadata["job"]) / "spec.json").read_bytes())
    assert spec["hyperparameters"]["learning_rate"] == 0


def test_the_same_request_is_the_same_job_from_two_clients_too(site: Site) -> None:
    file = site.upload(LINES)

    def create(_: int) -> Any:
        return site.client.fine_tuning.jobs.create(model="m", training_file=file)

    with ThreadPoolExecutor(4) as clients:
        ids = {job.id for job in clients.map(create, range(8))}
    (job_id,) = ids
    again = site.submitted(LINES, model="m@1")  # the same content, uploaded again
    assert again.id == job_id and again.training_file == file
    site.trainer.advance(again.metadata["job"])
    assert site.create().fine_tuned_model == "m@2"
    assert len(list(site.home.jobs.iterdir())) == 1
    assert [version["id"] for version in asyncio.run(site.platform.versions("m"))] == ["m@1", "m@2"]
    assert site.create(seed=1).id != job_id
    for changed in ({"suffix": "other"}, {"metadata": {"run": "2"}}):
        with pytest.raises(openai.BadRequestError, match=job_id) as refused:
            site.create(**changed)
        assert (refused.value.code, refused.value.param) == ("job_exists", *changed)


def test_the_same_weights_with_another_template_are_another_parent(
    site: Site, model: Path, tmp_path: Path
) -> None:
    first = site.submitted()
    mended = tmp_path / "mended"
    shutil.copytree(model, mended)
    (mended / "generation_config.json").write_text("{}")  # read by the engine only
    (mended / "README.md").write_text("Mended.")
    same = asyncio.run(site.platform.register("m", str(mended)))
    with (mended / "chat_template.jinja").open("a") as template:
        template.write("{# mended #}")
    other = asyncio.run(site.platform.register("m", str(mended)))
    assert (same.id, other.id, same.weights_sha256) == ("m@2", "m@3", other.weights_sha256)
    assert site.create(model=same.id).id == first.id
    job = site.submitted(model=other.id)
    assert job.id != first.id and job.metadata["job"] != first.metadata["job"]
    specs = [JobJournal(site.home, each.metadata["job"]).spec() for each in (first, job)]
    assert [spec.parent_settings_sha256 for spec in specs] == [
        settings_sha256(settings_in(folder)) for folder in (model, mended)
    ]


def test_what_was_asked_before_settings_counted_keeps_its_id() -> None:
    words = dict.fromkeys(("model", "name", "parent", "training_file"), "x")
    request = TuningRequest(**words, parent_sha256="p", training_sha256="t", created=1.0)
    assert request.id == "ftjob-2ebd93476a9dac0c469f1d3a"


@pytest.mark.parametrize(
    ("option", "field", "values"),
    [
        ("dtype", "dtype", ("float32", "bfloat16")),
        ("tokens", "max_tokens_per_microbatch", (4096, 32768)),
    ],
)
def test_a_job_takes_the_trainers_dtype_and_micro_batch(
    tmp_path: Path, model: Path, option: str, field: str, values: tuple[Any, Any]
) -> None:
    """Another dtype or micro-batch is another job."""
    ids = set()
    for value in values:
        site = Site(tmp_path / "root", model)
        with site.served(**{option: value}):
            job = site.submitted()
        spec = JobJournal(site.home, job.metadata["job"]).spec()
        assert getattr(spec.hyperparameters, field) == value
        ids |= {job.id, spec.id}
    assert len(ids) == 4


def test_events_are_paged_newest_first_and_keep_their_ids(site: Site) -> None:
    job = site.submitted()
    site.trainer.advance(job.metadata["job"], 3)
    jobs = site.client.fine_tuning.jobs
    before = list(jobs.list_events(job.id, limit=2))
    assert [event.message for event in before[-3:]] == [
        "Files validated, moving job to queued state: 12 examples",
        f"Validating training file: {job.training_file}",
        f"Created fine-tuning job: {job.id}",
    ]
    newest: Any = before[0]
    assert (newest.object, newest.type, newest.level) == (
        "fine_tuning.job.event",
        "metrics",
        "info",
    )
    assert newest.data["step"] == 3 and newest.data["total_steps"] == 9
    assert newest.data["train_loss"] == pytest.approx(2 - 2 / 8)
    page = jobs.list_events(job.id, limit=2)
    assert page.has_more and len(page.data) == 2
    site.trainer.advance(job.metadata["job"])
    site.retrieve(job.id)
    rest = list(jobs.list_events(job.id, after=page.data[-1].id, limit=3))
    assert rest == before[2:]  # what happened meanwhile comes before them
    after = list(jobs.list_events(job.id, limit=100))
    assert after[-len(before) :] == before
    assert [event.message for event in after[:2]] == [
        "The job has successfully completed",
        "New fine-tuned model created: m@2",
    ]
    ids = [event.id for event in after]
    assert len(set(ids)) == len(ids)
    with pytest.raises(openai.BadRequestError) as refused:
        jobs.list_events(job.id, after="ftevent-none")
    assert refused.value.param == "after"


def test_what_every_attempt_warns_of_is_an_event_each_time(site: Site) -> None:
    job = site.submitted()
    journal = JobJournal(site.home, job.metadata["job"])
    for step in (1, 2):  # each `advance` is an attempt
        site.trainer.advance(journal.job_id, step)
        for kind in ("warning", "corrupt"):
            journal.event(kind, message="of all attempts the same")
    journal.close()
    pages = site.client.fine_tuning.jobs.list_events(job.id, limit=1)
    told = [event.id for event in islice(pages, 100) if "the same" in event.message]
    assert len(told) == len(set(told)) == 4


def test_pause_and_resume(site: Site) -> None:
    job = site.submitted()
    jobs, training = site.client.fine_tuning.jobs, job.metadata["job"]
    site.trainer.advance(training, 2)
    with pytest.raises(openai.BadRequestError, match="not paused") as refused:
        jobs.resume(job.id)
    assert refused.value.code == "job_not_paused"
    paused: Any = jobs.pause(job.id)
    assert (paused.status, paused.metadata["paused"]) == ("queued", "true")
    assert jobs.pause(job.id).metadata == paused.metadata
    assert [listed.id for listed in jobs.list(metadata={"paused": "true"})] == [job.id]
    assert site.trainer.advance(training).step == 2
    resumed: Any = jobs.resume(job.id)
    assert resumed.status == "running" and "paused" not in resumed.metadata
    assert list(jobs.list(metadata={"paused": "true"})) == []
    site.trainer.advance(training)
    assert site.retrieve(job.id).status == "succeeded"
    messages = [e.message for e in jobs.list_events(job.id, limit=100) if e.type == "message"]
    assert messages[2:5] == [
        "Fine-tuning job goes on at step 2",
        "The job is resumed",
        "The job is paused: it saves and stops",
    ]
    with pytest.raises(openai.BadRequestError, match="succeeded") as refused:
        jobs.pause(job.id)
    assert refused.value.code == "job_ended"


def test_a_cancelled_job_stays_cancelled_paused_or_not(site: Site) -> None:
    jobs = site.client.fine_tuning.jobs
    job = site.submitted()
    jobs.pause(job.id)
    cancelled = jobs.cancel(job.id)
    assert (cancelled.status, cancelled.fine_tuned_model) == ("cancelled", None)
    assert cancelled.finished_at is not None
    assert jobs.cancel(job.id) == cancelled
    assert site.create().status == "cancelled"
    assert site.trainer.advance(job.metadata["job"]).state == "cancelled"
    with pytest.raises(openai.BadRequestError, match="not paused"):
        jobs.resume(job.id)
    other = site.submitted(seed=1)
    site.trainer.advance(other.metadata["job"])
    with pytest.raises(openai.BadRequestError, match="succeeded") as refused:
        jobs.cancel(other.id)
    assert refused.value.code == "job_ended"


def test_a_failed_job_says_why(tmp_path: Path, model: Path) -> None:
    site = Site(tmp_path / "home", model)
    with site.served(by_hand=False, failures={0: "the loss is nan after 3 whole steps"}):
        failed = site.until(site.create().id, "failed")
        assert failed.error.code == "training_failed"
        assert "the loss is nan" in failed.error.message
        newest = site.client.fine_tuning.jobs.list_events(failed.id, limit=1).data[0]
        assert (newest.level, newest.message) == ("error", failed.error.message)
        assert failed.result_files == []


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"training_file": "file-none"}, "training_file", "invalid_training_file"),
        ({"training_file": "../../etc"}, "training_file", "invalid_training_file"),
        ({"method": {"type": "rlhf"}}, "method.type", "unsupported_value"),
        (
            {"method": {"type": "reinforcement", "reinforcement": {"grader": {}}}},
            "method.type",
            "unsupported_value",
        ),
        ({"validation_file": "file-x"}, "validation_file", "invalid_validation_file"),
        ({"validation_file": ""}, "validation_file", "invalid_validation_file"),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0}}}},
            "method.dpo.hyperparameters.beta",
            "invalid_value",
        ),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"gamma": 1}}}},
            "method.dpo.hyperparameters.gamma",
            "unknown_parameter",
        ),
        (
            {"method": {"type": "dpo", "supervised": {"hyperparameters": {}}}},
            "method.supervised",
            "invalid_value",
        ),
        ({"integrations": [{"type": "wandb"}]}, "integrations", "unsupported_value"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", "invalid_value"),
        ({"hyperparameters": {"n_epochs": 1.5}}, "hyperparameters.n_epochs", "invalid_value"),
        ({"hyperparameters": {"beta": 1}}, "hyperparameters.beta", "unknown_parameter"),
        (
            {"hyperparameters": {"learning_rate_multiplier": -0.1}},
            "hyperparameters.learning_rate_multiplier",
            "invalid_value",
        ),
        ({"suffix": "a b"}, "suffix", "invalid_value"),
        ({"suffix": "a" * 65}, "suffix", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"metadata": {"paused": "x"}}, "metadata.paused", "invalid_value"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "invalid_value"),
        ({"extra_body": {"n_epochs": 3}}, "n_epochs", "invalid_value"),
        ({"model": "m@1", "training_file": 3}, "training_file", "invalid_value"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    shared: Site, options: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        shared.create(**options)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.type == "invalid_request_error"
    assert shared.client.fine_tuning.jobs.list().data == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Site]:
    """A site for tests that change nothing."""
    site = Site(tmp_path_factory.mktemp("shared") / "home", model)
    with site.served():
        yield site


def test_what_is_not_there_is_not_found(shared: Site) -> None:
    for wanted in ("none", "m@9"):
        with pytest.raises(openai.NotFoundError) as refused:
            shared.create(model=wanted)
        assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
    for act in ("retrieve", "cancel", "pause", "resume", "list_events"):
        with pytest.raises(openai.NotFoundError) as refused:
            getattr(shared.client.fine_tuning.jobs, act)("ftjob-none")
        assert refused.value.param == "fine_tuning_job_id"
    with pytest.raises(openai.BadRequestError, match="assistants"):
        wrong = shared.upload(LINES, "assistants")
        shared.client.fine_tuning.jobs.create(model="m", training_file=wrong)


@pytest.mark.slow
def test_a_restart_between_any_two_steps_loses_nothing(tmp_path: Path, model: Path) -> None:
    site = Site(tmp_path / "home", model)
    with site.served():
        file = site.upload(LINES)
        sha256 = json.loads((site.home.files / f"{file}.json").read_bytes())["sha256"]
        parent = asyncio.run(site.platform.versions("m"))[0]
    request = TuningRequest(  # from a gateway that died just after writing it
        model="m",
        name="m",
        parent=parent["checkpoint"],
        parent_sha256=parent["weights_sha256"],
        parent_settings_sha256=settings_sha256(settings_in(model)),
        training_file=file,
        training_sha256=sha256,
    )
    TuningFolder(site.home).create(request)
    with site.served():
        created = site.client.fine_tuning.jobs.create(model="m", training_file=file)
        assert created.id == request.id
        training = site.submitted().metadata["job"]
        site.trainer.advance(training, 2)
    with site.served():
        assert site.retrieve(request.id).status == "running"
        site.client.fine_tuning.jobs.pause(request.id)
    with site.served():
        assert site.retrieve(request.id).metadata["paused"] == "true"
        site.client.fine_tuning.jobs.resume(request.id)
    site.trainer.advance(training)
    with site.served():
        assert [job.fine_tuned_model for job in site.client.fine_tuning.jobs.list()] == ["m@2"]
    with site.served():
        assert site.retrieve(request.id).fine_tuned_model == "m@2"
        assert len(asyncio.run(site.platform.versions("m"))) == 2


def untended(site: Site) -> FineTuning:
    """A home's fine-tuning without a gateway."""
    home, trainer = site.home, ScriptedTrainer(site.home)
    return FineTuning(home, Registry(home), trainer, Files(home), code="")


@pytest.mark.slow
def test_jobs_go_on_after_a_restart_though_nobody_asks(tmp_path: Path, model: Path) -> None:
    """The platform calls `fine_tuning.start` when it starts."""
    site = Site(tmp_path / "home", model)
    with site.served():
        job = site.submitted()
    shutil.rmtree(site.home.job(job.metadata["job"]))
    (site.home.fine_tuning / f"{job.id}.validated").unlink()  # it died while it read the file

    async def after() -> None:
        tuning = untended(site)
        await tuning.start()
        while tuning.folder.read_ended(job.id) is None:  # noqa: ASYNC110 - files tell nobody
            await asyncio.sleep(0.02)
        await tuning.close()
        assert tuning.look(job.id).ended.model == "m@2"  # type: ignore[union-attr]
        assert Registry(site.home).resolve("m@2").job == job.metadata["job"]
        assert isinstance(tuning.trainer, ScriptedTrainer)
        (spec,) = tuning.trainer.submitted
        assert not {"layout", "recompute"} & spec.model_fields_set  # the trainer's to choose

    asyncio.run(asyncio.wait_for(after(), 90))


def test_a_job_that_the_trainer_does_not_take_fails(tmp_path: Path, model: Path) -> None:
    site = Site(tmp_path / "home", model)
    with site.served():
        job = site.submitted()
    shutil.rmtree(site.home.job(job.metadata["job"]))
    shutil.rmtree(site.home.checkpoint(TuningFolder(site.home).read_request(job.id).parent))
    with pytest.raises(NotFound) as refused:
        validated = TuningFolder(site.home).read_validated(job.id)
        site.trainer.submit(validated.spec)  # type: ignore[union-attr]
    tuning = untended(site)
    assert tuning.advance(job.id)
    ended = tuning.look(job.id).ended
    assert ended is not None and ended.error is not None
    assert (ended.state, ended.error["message"]) == ("failed", str(refused.value))


def test_lists_are_paged_and_filtered(site: Site) -> None:
    jobs = site.client.fine_tuning.jobs
    made = [site.create(seed=n, metadata={"n": str(n % 2)}).id for n in range(5)]
    made.append(site.create(seed=9).id)
    assert [job.id for job in jobs.list(limit=2)] == made[::-1]
    page = jobs.list(limit=2)
    assert page.has_more and [job.id for job in page.data] == made[:-3:-1]
    assert [job.id for job in jobs.list(metadata={"n": "1"}, limit=1)] == [made[3], made[1]]
    assert [job.id for job in jobs.list(extra_query={"metadata": "null"})] == [made[-1]]
    for query in ({"limit": 5000}, {"after": "ftjob-x"}, {"status": "queued"}, {"metadata": "n"}):
        with pytest.raises(openai.BadRequestError) as refused:
            jobs.list(extra_query=query)
        assert refused.value.param == next(iter(query))
