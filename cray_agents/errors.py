"""Errors: every error that this package raises on purpose.

Each is also an error of the standard library.

    CrayError
    ├── BadInput (ValueError)            a value the caller gave cannot be used
    │   └── ConfigError                  ... in a configuration file, variable or flag
    ├── NotFound (LookupError)           no such model, version, run, dataset, job
    ├── AccessDenied (PermissionError)   no API key, a wrong one, or one of too small a role
    ├── TooManyRequests (RuntimeError)   the wait queue is full; says when to come again
    ├── SetupError (RuntimeError)        this machine lacks something, or a port is taken
    ├── Superseded (RuntimeError)        another process controls the platform by now
    ├── EngineError (RuntimeError)       the model server answered with an error
    │   ├── EngineTimeout (TimeoutError)     ... or not in time
    │   └── EngineUnavailable (ConnectionError)  ... or not at all
    │       ├── NotLoaded                    ... because no replica has the version
    │       └── VersionClosed                ... because this one has another version now
    ├── NoController (ConnectionError)   nobody decides for this root at the moment
    ├── ToolError (RuntimeError)         a tool failed; the model gets it, the run goes on
    ├── SubagentError (RuntimeError)     the infrastructure failed a sub-agent's run
    ├── HookError (RuntimeError)         a hook, an environment or an instructions function failed
    ├── RewardError (RuntimeError)       a reward function failed; the run has no such reward
    ├── StoreError (OSError)             the shared root cannot be written or read
    │   ├── DiskFull                     ... because there is no room left on it
    │   ├── Corrupt                      a file does not match its checksum
    │   └── NewerFormat                  ... or was written by a newer version of this package
    ├── SwapError (RuntimeError)         new weights did not load, or failed their logprob check
    │   ├── Displaces                    ... because a promoted version would be served no more
    │   ├── PoolBusy                     ... because no replica could be had; later one may
    │   └── Overtaken                    ... because a rollback came first
    └── JobError (RuntimeError)          a training job failed; carries the log's tail
        └── SchedulerError               ... because Slurm or the launcher refused it

Two belong to tests. They are not CrayErrors, as an agent's run would record and hide them.

    AssertionError
    ├── RealModelCall                    a real model was asked where a test forbids it
    └── ReplayMismatch                   a request is not in the recording that is replayed

A message states the problem, the value and the remedy.
Read next: records.py, the data these errors speak of.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the disk, a user's share of it, one file


class CrayError(Exception):
    """The base class of all errors that this package raises on purpose.

    `code` is a name for programs, and `param` the field that is wrong, if one is. Both go into
    OpenAI's error envelope.
    """

    code = "internal_error"

    def __init__(self, *args: object, param: str | None = None, code: str | None = None) -> None:
        super().__init__(*args)
        self.param = param
        if code:
            self.code = code


class BadInput(CrayError, ValueError):
    """A value cannot be used. `param` names it."""

    code = "invalid_value"


class ConfigError(BadInput):
    """A configuration file, variable or flag has an unusable value."""

    code = "invalid_config"


class NotFound(CrayError, LookupError):
    """No such model, version, run, dataset or job. `param` names the field of the request."""

    code = "not_found"


class AccessDenied(CrayError, PermissionError):
    """The gateway refuses the caller altogether (`status` 401) or for this request (403)."""

    code = "invalid_api_key"

    def __init__(
        self, message: str, *, status: int = 401, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status


class TooManyRequests(CrayError, RuntimeError):
    """The wait queue is full. `retry_after`: seconds until there may be room."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SetupError(CrayError, RuntimeError):
    """This machine lacks something the command needs; the message says how to get it."""

    code = "setup_error"


class Superseded(CrayError, RuntimeError):
    """Another process has a higher term: this one may decide nothing any more."""

    code = "superseded"


class EngineError(CrayError, RuntimeError):
    """The model server answered with an error. `status` is its HTTP status (0: none came)."""

    code = "engine_error"

    def __init__(
        self, message: str, *, status: int = 0, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status


class EngineTimeout(EngineError, TimeoutError):
    """The model server did not answer in time."""

    code = "engine_timeout"


class EngineUnavailable(EngineError, ConnectionError):
    """No model server answered: it is starting, restarting or gone."""

    code = "engine_unavailable"


class NotLoaded(EngineUnavailable):
    """No replica has the version, and loading it would displace a promoted version."""

    code = "model_not_loaded"


class VersionClosed(EngineUnavailable):
    """A replica does not answer with the expected version now: nothing was sampled. Look again."""


class NoController(CrayError, ConnectionError):
    """The process that decides for this shared root does not answer. Come again soon."""

    code = "no_controller"


class ToolError(CrayError, RuntimeError):
    """A tool failed. The model gets the text, and the run goes on."""

    code = "tool_error"


class SubagentError(CrayError, RuntimeError):
    """The infrastructure failed a sub-agent's run. The calling run ends with this error."""

    code = "subagent_error"


class HookError(CrayError, RuntimeError):
    """A hook, an environment or an instructions function failed. The run ends with this error."""

    code = "hook_error"


class RewardError(CrayError, RuntimeError):
    """A reward function failed. The run has no such reward, and is not trained on."""

    code = "reward_error"


class StoreError(CrayError, OSError):
    """The shared root cannot be written or read."""

    code = "store_error"

    @staticmethod
    def of(what: str, error: OSError) -> "StoreError":
        """Make an error of a system error. `what` was tried, such as "cannot write to FILE"."""
        kind = DiskFull if error.errno in FULL else StoreError
        return kind(f"{what}: {error.strerror or error}")


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn a system error of the block into a StoreError; `what` was tried, see StoreError.of."""
    try:
        yield
    except CrayError:
        raise
    except OSError as error:
        raise StoreError.of(what, error) from error


class DiskFull(StoreError):
    """The disk of the shared root is full."""

    code = "disk_full"


class Corrupt(StoreError):
    """A file does not match its checksum or format."""

    code = "corrupt"


class NewerFormat(StoreError):
    """A file is of a format that only a newer version of this package reads."""

    code = "newer_format"


class SwapError(CrayError, RuntimeError):
    """New weights did not load, or failed their logprob check."""

    code = "swap_failed"


class PoolBusy(SwapError):
    """No replica was free to try new weights, which remain unjudged. Ask again later."""

    code = "pool_busy"


class Displaces(SwapError):
    """New weights would take a promoted version off its last replica. Nothing was changed."""

    code = "would_displace"


class Overtaken(SwapError):
    """A change of weights gave way to a rollback before it touched a replica."""


class JobError(CrayError, RuntimeError):
    """A training job failed. `log_tail` has the last lines of its log."""

    code = "job_failed"

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


class SchedulerError(JobError):
    """Slurm, or the local launcher, refused or lost a job."""

    code = "scheduler_error"


class RealModelCall(AssertionError):
    """A test forbids real models, and one was about to be called (engines/no_real_models.py)."""


class ReplayMismatch(AssertionError):
    """A request is not in the recording that a test replays (engines/replay.py)."""
