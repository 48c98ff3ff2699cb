"""Commands of a client's own loop: their numbers, in every layout, exactly once through kills."""

import json
import math
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.records import Manifest
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.disk.durable import kept_state
from cray_agents.trainers.checkpointing import resume
from cray_agents.trainers.checkpointing.save import SEAL
from cray_agents.trainers.job.journal import CommandJournal, JobJournal
from cray_agents.training_commands import (
    Datum,
    End,
    ForwardBackward,
    OptimStep,
    Publish,
    Save,
    Score,
    TrainingCommand,
)
from cray_agents.training_jobs import Layout
from tests.support.trainers.command_client import RATE, Client, data_of, differ, weights_of
from tests.support.trainers.running_session import RunningSession, children_of

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    "layout",
    [{}, {"data": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}],
    ids=lambda layout: "-".join(layout) or "one",
)
def test_steps_are_those_of_torch_and_transformers(lab: Any, layout: dict[str, int]) -> None:
    """AdamW of torch on transformers' own model, with the sums of the same losses."""
    from transformers import AutoModelForCausalLM

    session = RunningSession(lab.home, Layout(**layout))
    client = Client(lab, session)
    model = AutoModelForCausalLM.from_pretrained(lab.models("qwen3"), dtype=torch.float32)
    hyper = client.job.spec().hyperparameters
    betas = hyper.adam_beta1, hyper.adam_beta2
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=betas, eps=hyper.adam_eps, weight_decay=0.0
    )
    for step, loss in enumerate(("cross_entropy", "importance_sampling", "ppo", "cispo")):
        first, second = data_of(step), data_of(step + 100)
        for data in (first, second):  # gradients of two passes add up
            expected = torch.zeros(())
            result = client.do(ForwardBackward(data=data, loss=loss))
            for datum, row in zip(data, result.logprobs or [], strict=True):
                logprobs = token_logprobs(model, datum)
                seen = [0.0, *logprobs.tolist()]
                known = [w and s for w, s in zip(datum.weights or [], seen, strict=True)]
                assert row == pytest.approx(
                    [k and s for k, s in zip(known, seen, strict=True)], abs=2e-5
                )
                expected = expected + by_hand(loss, datum, logprobs)
            expected.backward()
            assert result.loss == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-5)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        assert client.do(OptimStep(learning_rate=RATE)).grad_norm == pytest.approx(norm, rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    trained = {name: p.detach() for name, p in model.named_parameters()}
    published = client.weights()
    assert differ({name: trained[name] for name in published}, published) < 3e-5
    assert client.do(End()).checkpoint == client.job.job_id
    while client.job.status() is None:
        session.check()
    assert client.job.status().state == "succeeded"
    assert session.end() == 0, session.log


def token_logprobs(model: Any, datum: Datum) -> torch.Tensor:
    ids = torch.tensor([datum.token_ids])
    logits = model(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def by_hand(loss: str, datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
    """The formulas of token_losses.py."""
    weights, advantages, sampled = (
        torch.tensor(row)[1:] for row in (datum.weights, datum.advantages, datum.logprobs)
    )
    ratio = (logprobs - sampled).exp()
    bounded = ratio.clamp(0.8, 1.2)
    values = {
        "cross_entropy": -logprobs,
        "importance_sampling": -ratio * advantages,
        "ppo": -torch.minimum(ratio * advantages, bounded * advantages),
        "cispo": -bounded.detach() * advantages * logprobs,
    }[loss]
    return (weights * values).sum()


@pytest.mark.parametrize(
    "hyper", [{}, {"backend": "transformers"}], ids=["megatron", "transformers"]
)
def test_a_linear_loss_has_the_gradient_of_the_clients_own(lab: Any, hyper: dict[str, Any]) -> None:
    results, session = [], RunningSession(lab.home, Layout())
    for linear in (False, True):
        client = Client(lab, session, hyper=hyper, commands=f"linear: {linear}")
        data = data_of(1)
        if linear:  # of cross entropy
            minus = [d.model_copy(update={"gradients": [-1.0] * len(d.token_ids)}) for d in data]
            client.trained(minus, loss="linear", source="my_losses:nll sha256:00")
        else:
            client.trained(data)
        results.append(client.weights())
    assert session.end() == 0
    assert differ(*results) == 0.0


def test_publishing_and_scoring_disturb_nothing(lab: Any) -> None:
    """Also not adapters, which a checkpoint has folded into its weights, nor master weights."""
    session = RunningSession(lab.home, Layout(data=2))
    for hyper in ({}, {"lora": {"rank": 2}}, {"dtype": "bfloat16"}):
        results = []
        for disturbed in (False, True):
            client = Client(lab, session, hyper=hyper, commands=f"disturbed: {disturbed}")
            for step in range(3):
                if disturbed:
                    client.do(Score(data=data_of(step)))
                    client.do(ForwardBackward(data=data_of(9), backward=False))
                client.trained(data_of(step))
                if disturbed:
                    client.do(Publish())
                    client.do(Save())
            results.append(client.weights())
        assert differ(*results) == 0.0
    assert session.end() == 0


def test_killed_at_any_moment_every_command_is_done_once(lab: Any, tmp_path: Path) -> None:
    """The results and weights of sessions that are killed are those of one that is not."""
    commands: list[TrainingCommand] = []
    for step in range(5):
        commands += [ForwardBackward(data=data_of(step)), ForwardBackward(data=data_of(step + 50))]
        commands += [OptimStep(learning_rate=RATE)]
        kept = Publish(keep_state=True)
        commands += [kept] if step % 3 == 1 else [Score(data=data_of(step + 70))]
    commands.append(End())

    def results(job: JobJournal) -> list[Any]:
        journal = CommandJournal(job.folder)
        found = [journal.result(n) for n in range(1, len(commands) + 1)]
        assert all(result is not None and result.error is None for result in found), found
        return [result.model_dump(exclude={"seconds"}) for result in found if result]

    def files(home: Home, name: str) -> Any:
        manifest = checksums.read_record(Manifest, home.checkpoint(name) / "manifest.json")
        metrics = {k: v for k, v in manifest.metrics.items() if k != "seconds"}
        return manifest.files, manifest.probe, metrics

    calm = RunningSession(lab.home, Layout())
    client = Client(lab, calm)
    for command in commands:
        client.do(command)
    assert calm.end() == 0
    kills = int(os.environ.get("CRAY_TEST_KILLS", "3"))
    chance, done = random.Random(4), 0
    for round_ in range(math.ceil(kills / 3)):
        here = type(lab)(Home(tmp_path / f"killed{round_}"), lab.models)
        session = RunningSession(here.home, Layout())
        killed = Client(here, session, save_every=5)
        while killed.job.status() is None:
            if killed.sequence < len(commands):
                killed.send(commands[killed.sequence])
            if done < 3 * (round_ + 1) and chance.random() < 0.15:
                time.sleep(chance.uniform(0, 0.05))
                os.kill(session.pid, signal.SIGKILL)
                session.wait()
                if done == 0:  # what it leaves that is killed while it publishes
                    here.home.checkpoint(f".{killed.job.job_id}-4.1").mkdir(parents=True)
                session = RunningSession(here.home, Layout())
                done += 1
            session.check()
            time.sleep(0.01)
        assert results(killed.job) == results(client.job)
        places = [n for n, c in enumerate(commands, 1) if isinstance(c, Publish)]
        for n in places:
            name = f"{client.job.job_id}-{n}"
            assert files(here.home, name) == files(lab.home, name)
            assert state(here.home, client.job.job_id, n) == state(lab.home, client.job.job_id, n)
        assert files(here.home, client.job.job_id) == files(lab.home, client.job.job_id)
        assert session.end() == 0
        assert not list(here.home.root.glob("checkpoints/.*"))
        assert not list(killed.job.folder.glob("megatron/.*"))
    assert done


def state(home: Home, job: str, number: int) -> dict[str, str]:
    """The hashes of a kept state's numbers, which are proven."""
    point = kept_state(home.job(job) / "megatron", number)
    resume.verify(point)
    seal = json.loads((point / SEAL).read_bytes())
    return {name: sha256 for name, sha256 in seal.items() if name.startswith("rank-")}


@pytest.mark.parametrize("hyper", [{}, {"lora": {"rank": 2}}], ids=["weights", "adapters"])
def test_a_run_begins_with_the_state_that_another_kept(lab: Any, hyper: dict[str, Any]) -> None:
    """It ends to the bit as the first one goes on, also after a kill, and not without its state."""
    session = RunningSession(lab.home, Layout(data=2))
    first = Client(lab, session, hyper=hyper)
    first.trained(data_of(1))
    assert first.do(Publish(keep_state=True)).checkpoint
    kept = f"{first.job.job_id}/{first.sequence}"
    for step in (2, 3):
        first.trained(data_of(step))
    expected = first.weights()

    second = Client(lab, session, hyper=hyper, commands="other", state_from=kept)
    second.trained(data_of(2))
    os.kill(session.pid, signal.SIGKILL)
    session.wait()
    session = second.session = RunningSession(lab.home, Layout(data=2))
    second.trained(data_of(3))
    assert differ(expected, second.weights()) == 0.0

    third = Client(lab, session, hyper=hyper, commands="third", state_from=kept)
    assert differ(weights_of(lab.home, kept.replace("/", "-")), third.weights()) == 0.0
    missing = f"{first.job.job_id}/1"
    lost = Client(lab, session, hyper=hyper, commands="lost", state_from=missing)
    lost.send(Save())
    while (status := lost.job.status()) is None:
        session.check()
    assert "that command kept no state" in (status.error or "")
    assert session.end() == 0, session.log


def test_a_full_disk_costs_a_publish_and_nothing_else(lab: Any) -> None:
    """Also with adapters, which are then in the weights half-way."""
    results, session = [], RunningSession(lab.home, Layout(data=2))
    for full in (False, True):
        client = Client(lab, session, hyper={"lora": {"rank": 2}}, commands=f"full: {full}")
        client.trained(data_of(1))
        if full:
            limit_files(session, 64 << 10)
            for command in (Publish(), End()):
                error = client.do(command).error or ""
                assert (
                    "the checkpoint was not written: File too large. Nothing is lost: make room"
                    in error
                )
            assert not list(lab.home.root.glob("checkpoints/.*"))
            limit_files(session, resource.RLIM_INFINITY)
        client.trained(data_of(2))
        results.append(client.weights())
    assert session.end() == 0
    assert differ(*results) == 0.0


def test_a_full_disk_costs_a_kept_state_and_nothing_else(lab: Any) -> None:
    session = RunningSession(lab.home, Layout(data=2))
    client = Client(lab, session)
    client.trained(data_of(1))
    limit_files(session, 64 << 10)
    error = client.do(Save(keep_state=True)).error or ""
    assert "the training state was not written: File too large. Nothing is lost" in error
    folder = client.job.folder / "megatron"
    assert not list(folder.glob(".*")) and not list(folder.glob("kept-*"))
    limit_files(session, resource.RLIM_INFINITY)
    assert client.do(Save(keep_state=True)).error is None
    assert [path.name for path in folder.glob("kept-*")] == ["kept-00000004"]
    assert session.end() == 0


def limit_files(session: RunningSession, size: int) -> None:
    """Limit the size of the files that a session's ranks can write: EFBIG, as of a full disk."""
    for rank in children_of(session.pid):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_bad_commands_are_refused_and_the_run_goes_on(lab: Any) -> None:
    session = RunningSession(lab.home, Layout())
    client = Client(lab, session)
    with pytest.raises(BadInput, match="out of order: the next one is 1"):
        client.commands.append(2, Save())
    assert "no gradients" in (client.do(OptimStep()).error or "")
    assert "nothing was trained" in (client.do(Publish()).error or "")
    stranger = Datum(token_ids=[1, 2, 10**6])
    assert "another tokenizer" in (client.do(ForwardBackward(data=[stranger])).error or "")
    nothing = Datum(token_ids=[1, 2, 3], weights=[1, 0, 0])
    assert "nothing to compute" in (client.do(Score(data=[nothing])).error or "")
    whole = client.trained(data_of(1))
    huge = [d.model_copy(update={"advantages": [3e38] * len(d.token_ids)}) for d in data_of(2)]
    client.do(ForwardBackward(data=data_of(3)))
    evaluated = client.do(ForwardBackward(data=huge, loss="cispo", backward=False)).error or ""
    assert "loss is" in evaluated and "dropped" not in evaluated
    assert client.do(OptimStep(learning_rate=0)).error is None  # the gradient was still there
    client.do(ForwardBackward(data=data_of(3)))
    assert "dropped" in (client.do(ForwardBackward(data=huge, loss="cispo")).error or "")
    assert "no gradients" in (client.do(OptimStep()).error or "")
    after = client.do(ForwardBackward(data=data_of(3)))
    client.do(OptimStep())  # at the rate of the job
    step = [event for event in client.job.events() if event["event"] == "step"][-1]
    own = client.job.spec().hyperparameters.learning_rate
    assert (step["loss"], step["lr"]) == (after.loss, own)  # of what came after alone
    assert whole.error is None and client.trained(data_of(1)).loss < (whole.loss or 0)
    client.do(ForwardBackward(data=data_of(1)))
    assert "wait for an optimizer step" in (client.do(Save()).error or "")
    with pytest.raises(BadInput, match="two clients"):
        client.commands.append(1, Save())
    assert (client.do(OptimStep(clip_grad=0)).grad_norm or 0) > 0  # measured without a bound, too
    client.do(End())
    with pytest.raises(BadInput, match="has ended this training run"):
        client.send(Save())
    assert session.end() == 0, session.log
