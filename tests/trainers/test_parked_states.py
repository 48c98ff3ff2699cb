"""Parked states: trainings that one session interleaves in host memory end as trainings alone."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.trainers.job.job_status import read_status
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_commands import ForwardBackward, OptimStep
from cray_agents.training_jobs import JobSpec, Layout
from tests.support.trainers.command_client import RATE, Client, data_of, differ
from tests.support.trainers.running_session import RunningSession

pytestmark = pytest.mark.megatron

MIB = 2**-10  # in GiB
LORA = {"hyper": {"lora": {"rank": 2}}}
LORA_OF_ITS_OWN = {"hyper": {"lora": {"rank": 4, "alpha": 8}}}
BFLOAT16 = {"hyper": {"dtype": "bfloat16"}}
ADAPTERS = [LORA, {**LORA, "commands": "other"}]
PARENTS = [{"parent": "qwen3-tied"}, {"parent": "qwen3-x"}]
LOSSES = ("cross_entropy", "ppo", "cispo")


def trained(client: Client, number: int, step: int) -> None:
    """One step of the number-th client; each has a loss and data of its own."""
    client.trained(data_of(10 * number + step), loss=LOSSES[number])


def sources(job: JobJournal) -> list[str]:
    """From where a session took a job up, each time."""
    return [event["source"] for event in job.events() if event["event"] == "taken_up"]


def alone(lab: Any, folder: Path, kinds: list[dict[str, Any]], layout: Layout, steps: int) -> Any:
    """The weights of clients that each have a session of their own."""
    weights = []
    for number, kind in enumerate(kinds):
        here = type(lab)(Home(folder / f"alone{number}"), lab.models)
        session = RunningSession(here.home, layout)
        client = Client(here, session, **kind)
        for step in range(steps):
            trained(client, number, step)
        weights.append(client.weights())
        assert session.end() == 0, session.log
    return weights


@pytest.mark.parametrize(
    ("kinds", "layout", "expected"),
    [
        (ADAPTERS, {}, {64: ["files memory", "parked parked"], 0: ["files memory", "files files"]}),
        (PARENTS, {}, {64: ["files files", "parked parked"], 0: ["files files", "files files"]}),
        ([BFLOAT16, LORA], {"data": 2}, {64: ["files files", "parked parked"]}),
        ([LORA, LORA_OF_ITS_OWN], {"tensor": 2}, {64: ["files parked", "parked parked"]}),
    ],
    ids=["adapters", "parents", "parent and adapter, bfloat16", "adapters of two ranks"],
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
    weights = alone(lab, tmp_path, kinds, spec, 2)
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


def own_parent(lab: Any, kind: str, folder: Path) -> Path:
    """A copy of a model that a test may damage."""
    return Path(shutil.copytree(lab.models(kind), folder / kind))


@pytest.mark.parametrize("kind", [LORA, {}], ids=["adapters", "all weights"])
def test_parked_states_read_no_weights(lab: Any, tmp_path: Path, kind: dict[str, Any]) -> None:
    """All weights in files are damaged, and nobody notices."""
    parents = [own_parent(lab, name, tmp_path) for name in ("qwen3-tied", "qwen3-x")]
    kinds = [{**kind, "parent": parent} for parent in parents]
    undisturbed = alone(lab, tmp_path, kinds, Layout(), 2)
    session = RunningSession(lab.home, Layout(), parked_gib=64 * MIB)
    clients = []
    for number, each in enumerate(kinds):
        clients.append(Client(lab, session, **each))
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


def test_the_least_recently_used_is_dropped(lab: Any, tmp_path: Path) -> None:
    """With room for one state, the other one comes from its resume point, with the same numbers."""
    kinds: list[dict[str, Any]] = [{"commands": name} for name in "abc"]
    session = RunningSession(lab.home, Layout(), parked_gib=64 * MIB)
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
    for mine, other in zip(in_session, alone(lab, tmp_path, kinds, Layout(), 2), strict=True):
        assert differ(mine, other) == 0.0


def parked_bytes(job: JobJournal) -> int:
    """All that the session had parked when it last took the job up."""
    return [event["parked_bytes"] for event in job.events() if event["event"] == "taken_up"][-1]


def test_a_kill_loses_what_is_parked_and_nothing_else(lab: Any, tmp_path: Path) -> None:
    kinds = [{**LORA, "commands": name} for name in "ab"]
    session = RunningSession(lab.home, Layout(), parked_gib=64 * MIB)
    clients = [Client(lab, session, **kind) for kind in kinds]
    for step in range(4):
        for number, client in enumerate(clients):
            trained(client, number, step)
            if (step, number) in ((1, 0), (2, 1)):  # one is parked, one in memory
                os.kill(session.pid, signal.SIGKILL)
                session.wait()
                session = RunningSession(lab.home, Layout(), parked_gib=64 * MIB)
                for each in clients:
                    each.session = session
    in_session = [client.weights() for client in clients]
    assert session.end() == 0, session.log
    assert all("parked" in sources(client.job) for client in clients)
    for one, other in zip(in_session, alone(lab, tmp_path, kinds, Layout(), 4), strict=True):
        assert differ(one, other) == 0.0


def test_a_stale_state_is_never_used(lab: Any, tmp_path: Path) -> None:
    """Another process trained the job meanwhile: its resume point decides."""
    kinds: list[dict[str, Any]] = [{"commands": name} for name in "ab"]
    session = RunningSession(lab.home, Layout(), parked_gib=64 * MIB)
    first, second = (Client(lab, session, **kind) for kind in kinds)
    trained(first, 0, 0)
    trained(second, 1, 0)  # the first one is parked
    elsewhere = lab.start(first.job.spec())
    for command in (ForwardBackward(data=data_of(1)), OptimStep(learning_rate=RATE)):
        sequence = first.send(command)
        while first.commands.result(sequence) is None:
            time.sleep(0.002)
    assert elsewhere.kill(signal.SIGTERM) == 75, elsewhere.log
    trained(first, 0, 2)
    assert sources(first.job)[-1] == "files"
    weights = first.weights()
    assert session.end() == 0, session.log
    assert differ(weights, alone(lab, tmp_path, kinds[:1], Layout(), 3)[0]) == 0.0


@pytest.mark.parametrize(
    "hypers",
    [({}, {}), ({"dtype": "bfloat16"}, {"lora": {"rank": 2}})],
    ids=["parents", "bfloat16 and adapters"],
)
def test_interleaved_loops_end_as_each_alone(
    lab: Any, tmp_path: Path, hypers: tuple[dict[str, Any], ...]
) -> None:
    """Each trains job after job from its own last checkpoint, and goes on with its optimizer."""
    session = RunningSession(lab.home, Layout(), parked_gib=64 * MIB)
    in_session = loops(lab, hypers, session.train)
    assert session.end() == 0, session.log
    found = [sources(job) for job, _ in in_session]
    assert found == [["files"]] * 2 + [["parked"]] * 4
    other = type(lab)(Home(tmp_path / "alone"), lab.models)
    by_themselves = loops(other, hypers, lambda spec: other.run(spec).journal)
    assert [files for _, files in in_session] == [files for _, files in by_themselves]


def loops(
    lab: Any, hypers: tuple[dict[str, Any], ...], train: Callable[[JobSpec], JobJournal]
) -> Any:
    """Three generations of each loop in turns; returns the jobs with their checkpoints' files."""
    lab.dataset()
    made: list[tuple[JobJournal, dict[str, str]]] = []
    for generation in range(3):
        for number, hyper in enumerate(hypers):
            before = made[-len(hypers)][0].job_id if generation else None
            parent = lab.home.checkpoint(before) if before else ("qwen3-tied", "qwen3-x")[number]
            spec = lab.spec(
                parent, hyper={**hyper, "steps": 2, "seed": generation}, optimizer_from=before
            )
            job = train(spec)
            assert job.status().state == "succeeded", (job.status(), job.log_tail())
            manifest = read_manifest(lab.home.checkpoint(spec.id))
            made.append(
                (job, {n: h for n, h in manifest.files.items() if "adapter_config" not in n})
            )
    return made


def test_a_client_goes_on_from_memory_after_a_turn(lab: Any, tmp_path: Path) -> None:
    """Between its turns on a GPU the only training of a session needs no files, parked or not."""
    session = RunningSession(lab.home, Layout(), turns=True)
    client = Client(lab, session)
    for step in range(2):
        session.journal.hand_over(client.job.job_id)
        session.journal.give_turn()
        trained(client, 0, step)
        while session.journal.has_turn:  # it leaves the GPU when no command comes
            session.check()
            time.sleep(0.01)
    session.journal.hand_over(client.job.job_id)
    session.journal.give_turn()
    weights = client.weights()
    assert session.end() == 0, session.log
    assert sources(client.job) == ["files", "memory", "memory"]
    assert differ(weights, alone(lab, tmp_path, [{}], Layout(), 2)[0]) == 0.0


def test_numbers_of_adam_are_a_jobs_own(lab: Any, tmp_path: Path) -> None:
    """A client's betas and clipping do not reach the next job in the same ranks."""
    lab.dataset()
    session = RunningSession(lab.home, Layout())
    client = Client(lab, session)
    client.do(ForwardBackward(data=data_of(1)))
    client.do(OptimStep(learning_rate=RATE, beta1=0.5, beta2=0.5, eps=1e-3, clip_grad=0))
    job = session.train(lab.spec("qwen3", hyper={"steps": 2}))
    assert session.end() == 0, session.log
    assert sources(job) == ["files"]
    other = type(lab)(Home(tmp_path / "alone"), lab.models)
    other.dataset()
    itself = other.run(lab.spec("qwen3", hyper={"steps": 2}))
    manifests = [read_manifest(each.home.checkpoint(job.job_id)) for each in (lab, other)]
    assert manifests[0].files == manifests[1].files and itself.losses
