"""TrainingCommand run: carry out a client's commands, one after the other, each with one result.

A resume point is written after an optimizer step, when no gradients wait. A state that a client
keeps is written before its command has a result, and another run may begin with it. After a death
the commands since the newest point are carried out again, which gives the same state to the bit,
and their results stay as they were written. job/rank.py calls `run_commands` on every rank. Read
next: training/accumulation.py.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cray_agents.errors import FULL, BadInput, Corrupt, StoreError
from cray_agents.trainers.checkpointing import hf_export, resume
from cray_agents.trainers.checkpointing.save import Saver
from cray_agents.trainers.data.packer import Columns
from cray_agents.trainers.data.samples import Floats, Samples
from cray_agents.trainers.job.job_inputs import JobInputs
from cray_agents.trainers.job.journal import CommandJournal
from cray_agents.trainers.job.master_weights import note_moved, warn
from cray_agents.trainers.job.weights_check import FailedEverywhere
from cray_agents.trainers.methods.token_losses import token_loss
from cray_agents.trainers.training.accumulation import Accumulation
from cray_agents.trainers.training.parallel_groups import Relay, broadcast_from_rank0, is_rank0
from cray_agents.trainers.training.train_step import RankTraining
from cray_agents.training_commands import (
    COMMAND,
    CommandResult,
    Datum,
    End,
    ForwardBackward,
    OptimStep,
    Publish,
    Save,
    Score,
    TrainingCommand,
)

SHORTEST_WAIT, LONGEST_WAIT = 0.001, 0.1  # seconds between two looks for a command
FULL_WAIT = 0.5  # seconds between two trials to write on a full disk
GO, STOP = "go", "stop"
_MAKE_ROOM = ". Nothing is lost: make room, then send it again"


@dataclass
class RunTotals:
    """Totals of the commands so far, kept in every resume point.

    `commands_sha256` chains the hashes of all commands. `prompts` are the first sequences that were
    trained on; they become the golden probe.
    """

    sequence: int = 0
    steps: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    commands_sha256: str = ""
    prompts: list[list[int]] = field(default_factory=list)

    def metrics(self) -> dict[str, Any]:
        """Return the totals for a checkpoint's manifest."""
        values = asdict(self)
        del values["prompts"], values["sequence"]
        return {**values, "loss_first": self.loss_first or 0.0, "loss_last": self.loss_last or 0.0}


def run_commands(
    training: RankTraining,
    work: JobInputs,
    leave: Callable[[float], bool],
    restored: dict[str, Any] | None = None,
) -> bool:
    """Carry out commands until `end`; return False if stopped before it. Collective.

    Rank 0 calls `leave(seconds without a command)` and stops when it returns True. `restored`: the
    `common` data of the resume point, whose content the training holds already.
    """
    return CommandRun(training, work, leave).run(restored)


class CommandRun:
    """The commands of one job, from its newest resume point on. Methods are collective."""

    def __init__(
        self, training: RankTraining, work: JobInputs, leave: Callable[[float], bool]
    ) -> None:
        self._training, self._work, self._leave = training, work, leave
        self._journal = CommandJournal(work.journal.folder)
        self._relay = Relay(f"{work.spec.id}/{work.attempt}")
        self._gradients = Accumulation(training)
        self._totals = RunTotals()
        self._loss: tuple[float, int] = (0.0, 0)  # of the passes since the last step, with tokens
        self._saved = 0  # the newest resume point's command

    def run(self, restored: dict[str, Any] | None = None) -> bool:
        """Restore the newest resume point, unless it is; carry out what comes after it."""
        work, training = self._work, self._training
        if restored is not None:
            self._totals = RunTotals(**restored)
        elif work.resume_from is not None:
            self._totals = RunTotals(**resume.load(training, work.resume_from))
        elif work.state_from is not None:
            self._totals = RunTotals(**resume.load(training, work.state_from))
            self._totals.sequence, training.saved = 0, None  # of the other run
        training.done = self._saved = self._totals.sequence
        self._gradients.drop()
        saver = Saver(
            training,
            work.megatron,
            work.attempt,
            work.spec.keep,
            may_publish=lambda: work.journal.fenced(work.attempt) is None,
            report=lambda step, seconds: work.journal.event("saved", step=step, seconds=seconds),
            warn=partial(warn, work.journal),
            resumed=work.resume_from,
        )
        try:
            ended = False
            while not ended and self._relay.next(self._await_command) == GO:
                ended = self._carry_out(self._next_command(), saver)
            if not ended and self._may_publish():
                self._save(saver)
            with contextlib.suppress(StoreError):  # it was printed; the commands are in the journal
                saver.finish()
        finally:
            saver.close()
        return ended

    # ---- one command
    def _await_command(self) -> str:
        """Wait for the next command on rank 0, or for a reason to stop."""
        since, wait = time.monotonic(), SHORTEST_WAIT
        while True:
            if self._training.asked_to_stop() or self._leave(time.monotonic() - since):
                return STOP
            if self._journal.exists(self._totals.sequence + 1):
                return GO
            time.sleep(wait)
            wait = min(LONGEST_WAIT, wait * 1.02)

    def _next_command(self) -> TrainingCommand:
        """Return the next command, which rank 0 reads, on every rank. Raises FailedEverywhere."""
        text, problem = None, None
        if is_rank0():
            try:
                command = self._journal.command(self._totals.sequence + 1)
                assert command is not None  # `_await_command` saw it
                text = COMMAND.dump_json(command).decode()
            except Corrupt as error:
                problem = str(error)
        text, problem = broadcast_from_rank0((text, problem))
        if problem is not None:
            raise FailedEverywhere(problem)
        return COMMAND.validate_json(text)

    def _carry_out(self, command: TrainingCommand, saver: Saver) -> bool:
        """Carry out a command and write its result; return True after `end`."""
        begun, totals = time.perf_counter(), self._totals
        totals.sequence += 1
        self._training.done = totals.sequence
        content = totals.commands_sha256.encode() + COMMAND.dump_json(command)
        totals.commands_sha256 = hashlib.sha256(content).hexdigest()
        self._training.ranks.seed(self._work.spec.hyperparameters.seed, totals.sequence)
        try:
            result = self._do(command)
            if isinstance(command, Publish | Save) and command.keep_state:
                self._keep(saver)
        except BadInput as problem:
            result = CommandResult(sequence=totals.sequence, error=str(problem))
        seconds = time.perf_counter() - begun
        totals.seconds += seconds
        if not self._may_publish():
            return False  # another attempt writes the results
        if is_rank0():
            self._write_result(result.model_copy(update={"seconds": seconds}))
        since_saved = totals.sequence - self._saved
        due = isinstance(command, OptimStep) and since_saved >= self._work.spec.save_every
        if (due or isinstance(command, Save)) and result.error is None:
            self._save(saver)
        saver.poll()
        return isinstance(command, End) and result.error is None

    def _do(self, command: TrainingCommand) -> CommandResult:
        """Return a command's result. Raises BadInput, the same on every rank."""
        match command:
            case ForwardBackward():
                return self._forward_backward(command)
            case OptimStep():
                return self._step(command)
            case Score():
                samples, _ = self._samples(command.data)
                rows = self._training.score(samples, temperature=1.0)
                return self._result(logprobs=_spread(samples, rows))
            case Publish():
                name = f"{self._work.spec.id}-{self._totals.sequence}"
                return self._publish(name)
            case End():
                return self._publish(self._work.spec.id)
            case Save():
                if self._gradients.pending:
                    raise BadInput("gradients wait for an optimizer step: take it, then save")
                return self._result()

    def _forward_backward(self, command: ForwardBackward) -> CommandResult:
        samples, columns = self._samples(command.data)
        loss, measures, rows = self._gradients.forward_backward(
            samples, columns, token_loss(command), backward=command.backward
        )
        if not np.isfinite(loss):
            dropped = ""
            if command.backward:
                self._loss = 0.0, 0  # the next step is of what comes after
                dropped = " the gradients since the last optimizer step were dropped;"
            raise BadInput(
                f"the loss is {loss}:{dropped} look at the numbers of the data, and at the"
                " learning rate"
            )
        if command.backward:
            tokens = sum(map(len, rows))
            self._loss = self._loss[0] + loss, self._loss[1] + tokens
            known = self._totals.prompts
            if len(known) < hf_export.PROBE_PROMPTS:
                samples_ = Samples.of([*known, *samples.tokens])
                self._totals.prompts = hf_export.probe_prompts(samples_)
        return self._result(loss=loss, measures=measures, logprobs=_spread(samples, rows))

    def _step(self, command: OptimStep) -> CommandResult:
        if not self._gradients.pending:
            raise BadInput("there are no gradients: send forward_backward before optim_step")
        rate = command.learning_rate
        rate = self._work.spec.hyperparameters.learning_rate if rate is None else rate
        assert rate is not None  # decided before the job took its id
        self._gradients.set_adam(command.beta1, command.beta2, command.eps)
        norm = self._gradients.update(rate, command.weight_decay, command.clip_grad)
        if not np.isfinite(norm):
            place = f"command {self._totals.sequence}"
            raise FailedEverywhere(
                f"the gradient norm is {norm} at {place}: nothing is saved of it"
            )
        (loss, tokens), self._loss = self._loss, (0.0, 0)
        totals = self._totals
        totals.steps += 1
        totals.trained_tokens += tokens
        totals.loss_first = loss if totals.loss_first is None else totals.loss_first
        totals.loss_last = loss
        if is_rank0():
            self._work.journal.event(
                "step", step=totals.sequence, loss=loss, lr=rate, grad_norm=norm, tokens=tokens,
                seconds=0.0,
            )  # fmt: skip
        return self._result(grad_norm=norm)

    def _publish(self, name: str) -> CommandResult:
        if self._gradients.pending:
            raise BadInput("gradients wait for an optimizer step: take it, then publish")
        if not self._totals.prompts:
            raise BadInput("nothing was trained yet: there is nothing to publish")
        home, attempt = self._work.journal.home, self._work.attempt
        self._training.finish()
        try:
            with hf_export.draft_of(home, name, attempt) as draft:
                moved = note_moved(self._training, self._work.journal, name)
                hf_export.publish(
                    self._training,
                    self._work.spec,
                    self._totals.prompts,
                    self._totals.metrics() | moved,
                    None,
                    home,
                    draft,
                    home.checkpoint(name),
                )
        except StoreError as problem:
            raise BadInput(f"{problem}{_MAKE_ROOM}") from None
        return self._result(checkpoint=name)

    def _keep(self, saver: Saver) -> None:
        """Keep the state for another run to begin with. Raises BadInput, the same on every rank."""
        try:
            saver.finish()
            saver.keep(asdict(self._totals))
        except StoreError as problem:
            raise BadInput(f"{problem}{_MAKE_ROOM}") from None

    # ---- helpers
    def _write_result(self, result: CommandResult) -> None:
        """Record a result; on a full disk it waits for room. Called on rank 0."""
        while True:
            try:
                return self._journal.write_result(result)
            except OSError as error:
                if error.errno not in FULL or self._training.asked_to_stop():
                    raise
            print(f"the result of command {result.sequence} waits for room on the disk", flush=True)
            time.sleep(FULL_WAIT)

    def _result(self, **fields: Any) -> CommandResult:
        return CommandResult(sequence=self._totals.sequence, **fields)

    def _samples(self, data: list[Datum]) -> tuple[Samples, Columns]:
        """Return samples with the columns of the losses. Raises BadInput."""
        model, hyper = self._work.model, self._work.spec.hyperparameters
        for number, datum in enumerate(data):
            if (token := max(datum.token_ids)) >= model.vocab:
                raise BadInput(
                    f"data[{number}] holds token {token}, and the model has {model.vocab}:"
                    " it was made with another tokenizer"
                )
            if len(datum.token_ids) - 1 > hyper.max_tokens_per_microbatch:
                raise BadInput(
                    f"data[{number}] has {len(datum.token_ids)} tokens, and a micro-batch has room"
                    f" for {hyper.max_tokens_per_microbatch}: raise max_tokens_per_microbatch"
                )
        weights = [_numbers(datum, datum.weights, 1.0) for datum in data]
        masks = [(row != 0).astype(np.float32) for row in weights]
        if not any(mask[1:].any() for mask in masks):
            raise BadInput("no token of the data has a weight: there is nothing to compute")
        factors = [d.advantages if d.gradients is None else d.gradients for d in data]
        advantages = [_numbers(*each) for each in zip(data, factors, strict=True)]
        sampled = [_numbers(datum, datum.logprobs) for datum in data]
        columns = {"weight": weights, "advantages": advantages, "sampled": sampled}
        return Samples.of([datum.token_ids for datum in data], masks), columns

    def _save(self, saver: Saver) -> None:
        """Write a resume point, unless gradients wait, which no point holds."""
        if not self._gradients.pending and self._saved < self._totals.sequence:
            saver.save(asdict(self._totals))
            self._saved = self._totals.sequence

    def _may_publish(self) -> bool:
        """Return True if this attempt is still the newest, as rank 0 sees it."""
        work = self._work
        fenced = work.journal.fenced(work.attempt) if is_rank0() else None
        return broadcast_from_rank0(fenced) is None


def _numbers(datum: Datum, values: list[float] | None, missing: float = 0.0) -> Floats:
    if values is None:
        return np.full(len(datum.token_ids), missing, np.float32)
    return np.asarray(values, np.float32)


def _spread(samples: Samples, rows: list[Floats]) -> list[list[float]]:
    """Return numbers of the trained tokens as rows with one for each token, else 0."""
    spread = []
    for mask, row in zip(samples.masks, rows, strict=True):
        whole = np.zeros(len(mask), np.float32)
        whole[1:][mask[1:] > 0] = row
        spread.append([float(value) for value in whole])
    return spread
