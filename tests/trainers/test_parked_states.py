"""Parked states: trainings that one session interleaves in host memory end as trainings alone."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cray_agents.paths import Home
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.trainers.job.job_state import read_status
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_commands import ForwardBackward, OptimStep, Publish, TrainingCommand
from cray_agents.training_jobs import JobSpec, Layout
from tests.support.trainers.command_client import RATE, Client, data_of, differ, weights_of
from tests.support.trainers.running_session import RunningSession

pytestmark = pytest.mark.megatron

MIB = 2**-10  # in GiB
LAYOUT = Layout()
LORA: dict[str, Any] = {"parent": "qwen3-tied", "hyper": {"lora": {"rank": 2}}}
LORA_OF_PARENTS = [LORA, {**LORA, "parent": "qwen3-x"}]
LORA_OF_ITS_OWN = {"parent": "qwen3-tied", "hyper": {"lora": {"rank": 4, "alpha": 8}}}
BFLOAT16: dict[str, Any] = {"hyper": {"dtype": "bfloat16"}}
ADAPTERS = [LORA, {**LORA, "commands": "other"}]
TRANSFORMERS: dict[str, Any] = {"hyper": {"backend": "transformers"}}
TRANSFORMERS_LORA: dict[str, Any] = {"hyper": {"backend": "transformers", "lora": {"rank": 2}}}
PARENTS: list[dict[str, Any]] = [{"parent": "qwen3-tied"}, {"parent": "qwen3-x"}]
LOSSES = ("cross_entropy", "ppo", "cispo")


def trained(client: Client, number: int, step: int) -> None:
    """One step of the number-th client; each has a loss and data of its own."""
    client.trained(data_of(10 * number + step), loss=LOSSES[number])


def sources(job: JobJournal) -> list[str]:
    """From where a session took a job up, each time."""
    return [event["source"] for event in job.events() if event["event"] == "taken_up"]


ALONE: dict[str, dict[str, torch.Tensor]] = {}  # the weights of clients, by their kind


def alone(lab: Any, kinds: list[dict[str, Any]], layout: Layout = LAYOUT) -> Any:
    """The weights of clients that each have a session of their own, after two steps."""
    found = []
    for number, kind in enumerate(kinds):
        same = {name: value for name, value in kind.items() if name != "commands"}
        key = repr((number, same, layout))
        if key not in ALONE:
            here = type(lab)(Home(lab.home.root / f"alone{number}"), lab.models)
            session = RunningSession(here.home, layout)
            client = Client(here, session, **kind)
            trained(client, number, 0)
            trained(client, number, 1)
            ALONE[key] = client.weights()
            assert session.end() == 0, session.log
        found.append(ALONE[key])
    return found


@pytest.mark.parametrize(
    ("kinds", "layout", "expected"),
    [
        (ADAPTERS, {}, {64: ["files memory", "parked parked"], 0: ["files memory", "files files"]}),
        ([BFLOAT16, LORA], {"data": 2}, {64: ["files files", "parked parked"]}),
        ([LORA, LORA_OF_ITS_OWN], {"tensor": 2}, {64: ["files parked", "parked parked"]}),
        ([TRANSFORMERS, TRANSFORMERS_LORA], {}, {64: ["files files", "parked parked"]}),
    ],
    ids=[
        "adapters",
        "parent and adapter, bfloat16",
        "adapters of two ranks",
        "the transformers backend",
    ],
)
def test_interleaved_trainings_end_as_each_alone(
    lab: Any,
    tmp_path: Path,
    kinds: list[dict[str, Any]],
    layout: dict[str, int],
    expected: dict[int, list[str]],
) -> None:
    """By the MiB that may be parked: from where the session takes up the two, round by round."""
    spec = Layout(**layout)
    weights = alone(lab, kinds, spec)
    for mib, places in expected.items():
        here = type(lab)(Home(tmp_path / f"{mib}"), lab.models)
        session = RunningSession(here.home, spec, parked_gib=mib * MIB)
        clients: list[Client] = []
        for step in range(2):
            for number, kind in enumerate(kinds):
                if step == 0:
                    clients.append(Client(here, session, **kind))
                trained(clients[number], number, step)
        in_session = [client.weights() for client in clients]
        assert session.end() == 0, session.log
        found = zip(*(sources(client.job) for client in clients), strict=True)
        assert [" ".join(each) for each in found] == [*places, places[1]]  # and to publish
        for one, other in zip(in_session, weights, strict=True):
            assert differ(one, other) == 0.0


def garble(path: Path) -> None:
    """Damage the numbers of a file of weights, and not its header."""
    with path.open("r+b") as file:
        file.seek(-10_000, os.SEEK_END)
        file.write(b"\xff" * 10_000)


@pytest.mark.parametrize("kinds", [LORA_OF_PARENTS, PARENTS], ids=["adapters", "all weights"])
def test_parked_states_read_no_weights(
    lab: Any, tmp_path: Path, kinds: list[dict[str, Any]]
) -> None:
    """All weights in files are damaged, and nobody notices."""
    undisturbed = alone(lab, kinds)
    session = RunningSession(lab.home, LAYOUT, parked_gib=64 * MIB)
    clients, parents = [], []
    for number, kind in enumerate(kinds):
        parents.append(Path(shutil.copytree(lab.models(kind["parent"]), tmp_path / str(number))))
        clients.append(Client(lab, session, **{**kind, "parent": parents[number]}))
        trained(clients[number], number, 0)
    spare = Client(lab, session, commands="spare")
    trained(spare, 2, 0)  # both are left, at a resume point
    for client, parent in zip(clients, parents, strict=True):
        garble(parent / "model.safetensors")
        [point] = client.job.folder.glob("megatron/step-*/rank-*.bin")
        garble(point)
    for number, client in enumerate(clients):
        trained(client, number, 1)
        assert differ(client.weights(), undisturbed[number]) == 0.0
        assert sources(client.job) == ["files", "parked"]
        status = read_status(lab.home, client.job.job_id)
        assert status.taken_up and status.taken_up.source == "parked" and status.taken_up.seconds
    assert session.end() == 0, session.log


def test_the_least_recently_used_is_dropped(lab: Any) -> None:
    """With room for one state, the other one comes from its resume point, with the same numbers."""
    kinds: list[dict[str, Any]] = [{"commands": name} for name in "abc"]
    session = RunningSession(lab.home, LAYOUT, parked_gib=64 * MIB)
    clients = [Client(lab, session, **kinds[0])]
    trained(clients[0], 0, 0)
    clients.append(Client(lab, session, **kinds[1]))
    trained(clients[1], 1, 0)
    one = parked_bytes(clients[1].job)
    spec = session.journal.spec()
    session.journal.write_spec(spec.model_copy(update={"parked_gib": 1.5 * one / 2**30}))
    clients.append(Client(lab, session, **kinds[2]))
    trained(clients[2], 2, 0)
    assert one > 0 and parked_bytes(clients[2].job) == one
    for number in (1, 0, 2):
        trained(clients[number], number, 1)
    in_session = [client.weights() for client in clients]
    assert session.end() == 0, session.log
    assert [sources(client.job)[1] for client in clients] == ["files", "parked", "files"]
    for mine, other in zip(in_session, alone(lab, kinds), strict=True):
        assert differ(mine, other) == 0.0


def parked_bytes(job: JobJournal) -> int:
    """All that the session had parked when it last took the job up."""
    return [event["parked_bytes"] for event in job.events() if event["event"] == "taken_up"][-1]


def test_a_kill_loses_what_is_parked_and_nothing_else(lab: Any) -> None:
    """One training is parked, the other one in memory; both go on from their files."""
    clients: list[Client] = []
    for step in range(2):
        session = RunningSession(lab.home, LAYOUT, parked_gib=64 * MIB)
        for number, kind in enumerate(ADAPTERS):
            if step == 0:
                clients.append(Client(lab, session, **kind))
            clients[number].session = session
            trained(clients[number], number, step)
        if step == 0:
            os.kill(session.pid, signal.SIGKILL)
            session.wait()
    assert parked_bytes(clients[1].job) > 0
    in_session = [client.weights() for client in clients]
    assert session.end() == 0, session.log
    found = [sources(client.job) for client in clients]
    assert [each[:2] for each in found] == [["files", "files"], ["memory", "files"]]
    assert {place for each in found for place in each[2:]} == {"parked"}
    for one, other in zip(in_session, alone(lab, ADAPTERS), strict=True):
        assert differ(one, other) == 0.0


def test_a_stale_state_is_never_used(lab: Any) -> None:
    """Another process trained the job meanwhile: its resume point decides."""
    kinds: list[dict[str, Any]] = [{"commands": name} for name in "ab"]
    session = RunningSession(lab.home, LAYOUT, parked_gib=64 * MIB)
    first = Client(lab, session, **kinds[0])
    trained(first, 0, 0)
    second = Client(lab, session, **kinds[1])
    trained(second, 1, 0)  # the first one is parked
    elsewhere = lab.start(first.job.spec())
    for command in (ForwardBackward(data=data_of(1)), OptimStep(learning_rate=RATE)):
        sequence = first.send(command)
        while first.commands.result(sequence) is None:
            time.sleep(0.002)
    assert elsewhere.kill(signal.SIGTERM) == 75, elsewhere.log
    weights = first.weights()
    assert session.end() == 0, session.log
    assert sources(first.job) == ["files", "files"]
    assert differ(weights, alone(lab, kinds)[0]) == 0.0


def test_interleaved_loops_end_as_each_alone(lab: Any, tmp_path: Path) -> None:
    """Each trains job after job from its own last checkpoint, and goes on with its optimizer."""
    session = RunningSession(lab.home, LAYOUT, parked_gib=64 * MIB)
    in_session = loops(lab, session.train)
    assert session.end() == 0, session.log
    found = [sources(job) for job, _ in in_session]
    assert found == [["files"]] * 2 + [["parked"]] * 2
    other = type(lab)(Home(tmp_path / "alone"), lab.models)
    by_themselves = loops(other, lambda spec: other.run(spec).journal)
    assert [files for _, files in in_session] == [files for _, files in by_themselves]


def loops(
    lab: Any, train: Callable[[JobSpec], JobJournal]
) -> list[tuple[JobJournal, dict[str, str]]]:
    """Two iterations of two loops in turns; returns the jobs with their checkpoints' files."""
    adapters = {"dtype": "bfloat16", "lora": {"rank": 2}}
    kinds: list[Any] = [("qwen3-tied", {}), ("qwen3-x", adapters)]
    lab.dataset()
    made: list[tuple[JobJournal, dict[str, str]]] = []
    for iteration in range(2):
        for first, hyper in kinds:
            before = made[-len(kinds)][0].job_id if iteration else None
            parent = lab.home.checkpoint(before) if before else first
            spec = lab.spec(
                parent, hyper={**hyper, "steps": 2, "seed": iteration}, optimizer_from=before
            )
            job = train(spec)
            assert job.status().state == "succeeded", (job.status(), job.log_tail())
            manifest = read_manifest(lab.home.checkpoint(spec.id))
            made.append(
                (job, {n: h for n, h in manifest.files.items() if "adapter_config" not in n})
            )
    return made


def test_a_client_goes_on_from_memory_after_a_turn(lab: Any) -> None:
    """Between its turns on a GPU the only training of a session needs no files, parked or not."""
    session = RunningSession(lab.home, LAYOUT, turns=True)
    client = Client(lab, session)
    for step in range(3):
        commands: list[TrainingCommand] = [ForwardBackward(data=data_of(step))]
        commands.append(OptimStep(learning_rate=RATE))
        for command in commands if step < 2 else [Publish()]:
            last = client.send(command)  # before the turn, which ends when no command comes
        session.journal.hand_over(client.job.job_id)
        session.journal.give_turn()
        while session.journal.has_turn:
            session.check()
            time.sleep(0.01)
    result = client.commands.result(last)
    assert result is not None and session.end() == 0, session.log
    weights = weights_of(lab.home, result.checkpoint)
    assert sources(client.job) == ["files", "memory", "memory"]
    assert differ(weights, alone(lab, [{}])[0]) == 0.0


def test_numbers_of_adam_are_a_jobs_own(lab: Any, undisturbed_job: Any) -> None:
    """A client's betas and clipping do not reach the next job in the same ranks."""
    lab.dataset()
    session = RunningSession(lab.home, LAYOUT)
    client = Client(lab, session)
    client.do(ForwardBackward(data=data_of(1)))
    client.do(OptimStep(learning_rate=RATE, beta1=0.5, beta2=0.5, eps=1e-3, clip_grad=0))
    job = session.train(lab.spec("qwen3", hyper={"steps": 2}))
    assert session.end() == 0, session.log
    assert sources(job) == ["files"]
    itself = undisturbed_job(job.spec())
    manifests = [read_manifest(each.home.checkpoint(job.job_id)) for each in (lab, itself.journal)]
    assert manifests[0].files == manifests[1].files and itself.losses
