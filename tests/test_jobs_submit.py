"""`cray-agents jobs submit`: real training without a platform, a scripted platform, bad input."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cray_agents.cli.spec_options import build_spec, read_fields
from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import Prompt
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model
from cray_agents.training_jobs import Hyperparameters, JobSpec, JobStatus, usual_learning_rate
from tests.support.command_line import claimed, cli
from tests.support.scripted_platform import platform

SAMPLES = 24
CHATS = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} it is"}]
    for n in range(SAMPLES)
]
SMALL = ModelShape(vocabulary=320, hidden=64, feed_forward=96, heads=2, kv_heads=2)


class Site(NamedTuple):
    """A shared root with a dataset, and beside it the model that it is for."""

    home: Home
    model: Path
    dataset: str

    def argv(self, *words: object) -> list[str]:
        given = ["jobs", "submit", "--home", self.home.root, "--dataset", self.dataset, *words]
        return [str(word) for word in given]

    @contextmanager
    def submitting(self, *words: object) -> "Iterator[subprocess.Popen[str]]":
        """The command in a process group of its own, as a shell starts it."""
        argv = [sys.executable, "-m", "cray_agents", *self.argv("--parent", self.model, *words)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(argv, text=True, start_new_session=True, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()

    def submit(self, *words: object) -> "subprocess.CompletedProcess[str]":
        with self.submitting(*words) as process:
            out, err = process.communicate(timeout=240)
            return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @property
    def journal(self) -> JobJournal:
        """Of the one job."""
        [spec] = self.home.jobs.glob("*/spec.json")
        return JobJournal(self.home, spec.parent.name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Not to be written to."""
    folder = tmp_path_factory.mktemp("site")
    texts = [message["content"] for chat in CHATS for message in chat]
    make_seed_model(folder / "model", seed=0, corpus=texts, shape=SMALL)
    home = Home(folder / "root")
    recipe = DatasetRecipe(demonstrations=CHATS, iterations=[], tokenizer=str(folder / "model"))
    return Site(home, folder / "model", build_dataset(Store(home), home, recipe)["id"])


@pytest.fixture
def site(made: Site, tmp_path: Path) -> Site:
    """A root of one's own, with the same dataset."""
    home = Home(tmp_path / "root")
    home.datasets.mkdir(parents=True)
    home.dataset(made.dataset).symlink_to(made.home.dataset(made.dataset))
    return made._replace(home=home)


# ---- trained by the command itself
@pytest.mark.slurm
@pytest.mark.megatron
def test_it_trains_and_registers_and_the_second_time_trains_nothing(site: Site) -> None:
    wanted = ["--epochs", 1.5, "--set", "batch_size=8", "--set", "lora.alpha=8", "--lora-rank", 4]
    done = site.submit(*wanted, "--name", "tiny", "--json")
    assert done.returncode == 0, done.stderr
    status, spec = json.loads(done.stdout), site.journal.spec()
    steps = ceil(1.5 * SAMPLES / 8)
    assert (status["state"], status["step"], status["steps"]) == ("succeeded", steps, steps)
    assert f"step {steps}/{steps}  loss" in done.stderr and "scheduler: " in done.stderr
    hyper = spec.hyperparameters
    assert (spec.method, hyper.batch_size, hyper.learning_rate) == ("sft", 8, 1e-2)
    started = next(event for event in site.journal.events() if event["event"] == "started")
    assert started["learning_rate"].startswith("by the rule 0.01 for sft of adapters at width")
    assert f"learning rate: {started['learning_rate']}" in done.stderr
    assert hyper.lora is not None and (hyper.lora.rank, hyper.lora.alpha) == (4, 8)
    assert Path(spec.parent).parent == site.home.root / "checkpoints"  # taken in
    weights = site.home.checkpoint(status["checkpoint"])
    assert not (weights / "model.safetensors").exists() and (weights / "adapter").is_dir()
    assert f"an adapter over {Path(spec.parent).name}; " in done.stderr
    registry = Registry(site.home)
    [version] = registry.versions("tiny")
    assert (version.checkpoint, version.job) == (status["id"], status["id"])
    assert registry.promoted("tiny") is None

    again = site.submit(*wanted)
    assert (again.returncode, again.stdout) == (0, f"{weights}\n")
    assert "succeeded before: trained 0 steps" in again.stderr
    assert site.journal.attempts == 1


@pytest.mark.megatron
def test_what_dies_is_started_again_and_ctrl_c_saves(site: Site, monkeypatch: Any) -> None:
    monkeypatch.setenv("CRAY_AGENTS_SCHEDULER", "local")
    wanted = ["--steps", 400, "--set", "save_every=5", "--layout", "data=1"]
    with site.submitting(*wanted) as process:
        assert process.stdout is not None and process.stderr is not None
        _read_until(process.stdout, "step  11/400")  # so step 5 is saved
        os.kill(json.loads((site.journal.folder / "attempts" / "1").read_bytes())["pid"], 9)
        _read_until(process.stdout, "attempt 2 starts after step")
        _read_until(process.stdout, "step ")
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.read()
        said = process.stderr.read()
        assert process.wait() == 130, said
    stopped = site.journal.step
    assert 5 <= stopped < 400 and f"saved after step {stopped} of 400" in said
    assert site.journal.paused and site.journal.resume_points

    with site.submitting(*wanted) as process:  # alone: another one is refused
        assert process.stdout is not None
        _read_until(process.stdout, f"attempt 3 starts after step {stopped} ")
        process.send_signal(signal.SIGSTOP)  # it has the root, also when its job has ended
        refused = site.submit("--steps", 4)
        process.send_signal(signal.SIGCONT)
        assert refused.returncode == 2 and "another `jobs submit` trains on" in refused.stderr
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert "step 400/400" in out and f"step {stopped:>3}/400" not in out
    events = [e for e in site.journal.events() if e["event"] == "step"]
    assert [event["step"] for event in events] == list(range(1, 401))


def _read_until(stream: Any, text: str) -> None:
    seen = []
    for line in stream:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} was not said in:\n{''.join(seen)}")


# ---- trained by a platform
@pytest.mark.slow
def test_a_platform_is_asked(site: Site) -> None:
    engine, failures = ScriptedEngine([]), {2: "the loss is nan"}
    with (
        platform(site.home.root, engine, model=site.model, failures=failures) as where,
        claimed(site.home, where.url),
    ):
        registry = Registry(site.home)
        taken = registry.import_checkpoint(registry.directory("m@1"))
        told = registry.register("told", *taken, {"guide": Prompt(instructions="Be brief.")})
        wanted = ["--parent", told.id, "--steps", 3, "--set", "save_every=7", "--name", "tiny"]
        done = here(site, *wanted)
        many = ("--layout", "data=64", "--oversubscribe")
        later = here(site, "--parent", "m@1", "--steps", 4, "--detach", *many)
        failed = here(site, "--parent", "m@1", "--steps", 5, "--json")
        refused = here(site, "--parent", "m@7")
    spec = next(s for s in map(_spec, site.home.jobs.iterdir()) if s["save_every"] == 7)
    assert (spec["hyperparameters"]["steps"], spec["layout"]["data"]) == (3, 1)
    [wide] = [s for s in map(_spec, site.home.jobs.iterdir()) if s["layout"]["data"] == 64]
    assert wide["oversubscribe"] is True
    [version] = registry.versions("tiny")
    assert version.prompts == told.prompts
    assert done.returncode == 0 and "step 3/3" in done.stdout
    assert done.stdout.endswith(f"{site.home.checkpoint(version.checkpoint)}\n")
    assert later.returncode == 0 and "jobs logs -f job-" in later.stderr
    assert (failed.returncode, json.loads(failed.stdout)["state"]) == (1, "failed")
    assert "the loss is nan" in failed.stderr
    assert refused.returncode == 2 and "m@7" in refused.stderr


def _spec(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "spec.json").read_text())
    return found


# ---- refused
MORE = len(os.sched_getaffinity(0)) + 1  # ranks than there are cores


def here(site: Site, *words: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command in this process."""
    return cli(*site.argv(*words), cwd=site.home.root, **environment)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--set", "learning_rat=1"], "unknown key 'learning_rat': did you mean learning_rate?"),
        (["--set", "kl=0.1"], "unknown key 'kl': did you mean policy.kl?"),
        (["--set", "lora.alfa=1"], "unknown key 'lora.alfa': did you mean lora.alpha?"),
        (["--set", "nonsense"], "--set 'nonsense': write it as key=value"),
        (["--set", "zzz=1"], "valid keys: batch_size, learning_rate"),
        (["--set", "batch_size=many"], "batch_size = 'many': Input should be a valid integer"),
        (["--set", "learning_rate=-1"], "learning_rate = -1: Input should be greater than or eq"),
        (["--set", "learning_rate=Infinity"], "learning_rate = inf: Input should be a finite num"),
        (["--set", "weight_decay=NaN"], "weight_decay = nan: Input should be"),
        (["--set", "policy.kl=0.1"], "policy has no effect with method 'sft'"),
        (["--set", "seed=1", "--method", "dpo"], "is made for sft, not for dpo"),
        (
            ["--method", "ppo"],
            "method = 'ppo': Input should be 'sft', 'dpo', 'kto', 'grpo' or 'dist",
        ),
        (["--steps", 3, "--epochs", 2], "--steps and --epochs say the same"),
        (["--layout", "data=1,tensor=3"], "tensor=3"),
        (["--layout", "dat=1"], "unknown key 'layout.dat': did you mean layout.data?"),
        (["--name", "a b"], "'a b' cannot name a model"),
        (["--name", "a", "--detach"], "nobody would wait to register it"),
        (["--detach"], "the job ends with this command"),
        (["--dataset", "ds-none"], "no dataset 'ds-none'"),
        (["--parent", "./nowhere"], "no checkpoint at './nowhere'"),
        (["--reference", "/tmp"], "reference has no effect with method 'sft'"),
        (["--teacher", "/tmp"], "teacher has no effect with method 'sft'"),
        (["--method", "distill"], "method 'distill' needs a teacher: name a version, such as"),
        (["--spec", __file__], "is no job's spec"),
    ],
)
def test_bad_input_is_told_before_anything_is_submitted(
    made: Site, words: list[object], why: str
) -> None:
    parent = [] if "--parent" in words else ["--parent", made.model]
    done = here(made, *parent, *words)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert why in " ".join(done.stderr.split())
    assert not made.home.jobs.exists()


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (("--layout", f"data={MORE}"), {}),
        (("--set", f"batch_size={MORE}"), {"TRAIN_RANKS": str(MORE)}),
    ],
)
def test_more_ranks_than_cores_are_refused(
    site: Site, words: tuple[str, ...], environment: dict[str, str]
) -> None:
    given = {"SCHEDULER": "local", "TRAIN_GPUS": "off"} | environment
    variables = {f"CRAY_AGENTS_{name}": value for name, value in given.items()}
    done = here(site, "--parent", site.model, "--steps", 4, *words, **variables)
    assert (done.returncode, done.stdout) == (2, ""), done
    said = " ".join(done.stderr.split())
    assert (
        f"layout data={MORE} takes a core for each of its {MORE} ranks, and this host has" in said
    )
    assert "ask for a layout of at most" in said and "--oversubscribe" in said
    assert not site.home.jobs.exists()


def test_a_spec_file_comes_before_options(made: Site, tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    hyper = {"steps": 5, "learning_rate": 0.5, "lora": {"rank": 2, "alpha": 3}}
    given = {"dataset": made.dataset, "parent": str(made.model), "keep": 7}
    file.write_text(json.dumps(given | {"hyperparameters": hyper}))
    options = {"steps": 9, "lora.rank": None}
    spec = build_spec(
        made.home, read_fields(file, options, ["lora.rank=4", "hyperparameters.seed=3"])
    )
    chosen = spec.hyperparameters
    assert (chosen.steps, chosen.seed, chosen.learning_rate) == (9, 3, 0.5)
    assert chosen.lora is not None
    assert (chosen.lora.rank, chosen.lora.alpha, spec.keep) == (4, 3, 7)
    assert "layout" not in spec.model_fields_set  # it is the trainer's to choose
    assert build_spec(made.home, read_fields(file, {}, ["lora=null"])).hyperparameters.lora is None
    with pytest.raises(BadInput, match="parent_sha256 is 00"):
        build_spec(made.home, read_fields(file, {"parent_sha256": "00"}, []))
    # what a job wrote down is the same job
    file.write_text(spec.model_dump_json())
    assert build_spec(made.home, read_fields(file, {}, [])).id == spec.id


@pytest.mark.parametrize(
    ("file", "other"),
    [
        ("config.json", True),
        ("tokenizer_config.json", True),
        ("chat_template.jinja", True),
        ("generation_config.json", False),
        ("README.md", False),
    ],
)
def test_what_else_of_the_parent_decides_is_in_the_id(
    site: Site, tmp_path: Path, file: str, other: bool
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(site.model, changed)
    with (changed / file).open("a") as content:
        content.write("\n")
    specs = [
        build_spec(
            site.home, read_fields(None, {"dataset": site.dataset, "parent": str(parent)}, [])
        )
        for parent in (site.model, changed)
    ]
    assert specs[0].parent_sha256 == specs[1].parent_sha256
    assert (specs[0].id != specs[1].id) == other


@pytest.mark.parametrize("init", ["parent", "random"])
def test_the_same_files_are_the_same_job_over_http(site: Site, init: str) -> None:
    hyper = Hyperparameters.model_validate({"steps": 4, "init": init})
    options = {"dataset": site.dataset, "parent": str(site.model), "steps": 4, "init": init}
    here = build_spec(site.home, read_fields(None, options, []))
    root, engine = site.home.root, ScriptedEngine(lambda request: "")
    with platform(root, engine, model=site.model, name="m") as served:
        job = served.submit_job(dataset=site.dataset, parent="m@1", hyperparameters=hyper)
        there = JobJournal(site.home, asyncio.run(job).id).spec()
    assert there.parent_settings_sha256 == here.parent_settings_sha256 is not None
    assert there.model_copy(update={"code": here.code}).id == here.id
    usual = usual_learning_rate(read_architecture(site.model).hidden, "sft", hyper)
    assert there.hyperparameters.learning_rate == usual  # a number, which the id counts


def test_a_job_from_before_settings_counted_keeps_its_id() -> None:
    hyper = {"steps": 1, "learning_rate": 1e-3}
    spec = {"dataset": "d", "parent": "p", "parent_sha256": "0", "hyperparameters": hyper}
    assert JobSpec.model_validate(spec).id == "job-a97b1c54ece06987"


def test_what_failed_is_tried_again_if_it_is_to_be_run_otherwise(site: Site) -> None:
    """Here only to fail for another reason, which is found before anything is trained."""
    fields = {"dataset": site.dataset, "parent": str(site.model), "steps": 4}
    spec = build_spec(site.home, read_fields(None, fields, []))
    journal = JobJournal(site.home, spec.id)
    journal.write_spec(spec)
    journal.write_status(JobStatus(id=spec.id, state="failed", error="the limit is too low"))
    words = ["--parent", site.model, "--steps", 4, "--set", "evaluate_every=2"]
    for _ in range(2):
        done = here(site, *words, CRAY_AGENTS_SCHEDULER="local")
        assert done.returncode == 1 and "leave evaluate_every out" in done.stderr
    assert "failed before" in done.stderr
    assert (journal.attempts, journal.spec().evaluate_every) == (1, 2)
    before = JobStatus.model_validate_json((journal.folder / "status.1.json").read_bytes())
    assert before.error == "the limit is too low"


def test_from_scratch_the_weights_do_not_count(made: Site, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(made.model, bare)
    (bare / "model.safetensors").unlink()
    fields = {"dataset": made.dataset, "parent": str(bare), "init": "random"}
    spec = build_spec(made.home, read_fields(None, fields, []))
    assert (spec.parent, spec.hyperparameters.init) == (str(bare), "random")
    same = build_spec(made.home, read_fields(None, fields | {"parent": str(made.model)}, []))
    assert same.id == spec.id
