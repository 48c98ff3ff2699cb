"""The one typed configuration: defaults < cray-agents.toml < CRAY_AGENTS_* < flags.

Read by cli/ and by all code that needs the shared root or the platform's URL. An unknown key is
an error that names the nearest valid one.
"""

import difflib
import json
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cray_agents.errors import ConfigError
from cray_agents.paths import Home

FILE = "cray-agents.toml"
PREFIX = "CRAY_AGENTS_"
# Variables that other modules read: the platform's address, a host's cache, a guard of tests, and
# the mark of what a supervisor started.
_READ_ELSEWHERE = {"URL", "API_KEY", "CACHE", "NO_REAL_MODELS", "SUPERVISED"}
#: The sbatch options that the platform sets itself, to define a job and to find and read it again.
SLURM_OWN = (
    "array",
    "chdir",
    "clusters",
    "cpus-per-task",
    "error",
    "export",
    "gpus-per-node",
    "job-name",
    "no-requeue",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "parsable",
    "requeue",
    "signal",
    "test-only",
    "time",
    "wait",
    "wrap",
)


class Config(BaseModel):
    """Every setting of a platform, with its default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path = Field(Path(".cray-agents"), description="the shared root")
    group: str | None = Field(
        None,
        description="group that may use the shared root, too; default: the owner alone",
    )
    host: str = Field("127.0.0.1", description="address that the gateway listens on")
    port: int = Field(8000, ge=0, lt=65536, description="0 picks a free one")
    scheduler: Literal["auto", "slurm", "local"] = Field(
        "auto", description="auto: a Slurm that answers, else a private one, else local processes"
    )
    train_ranks: int | None = Field(
        None, gt=0, description="ranks of a job with no layout; one a GPU, on CPU up to 2 a node"
    )
    train_nodes: int = Field(1, gt=0, description="nodes of a job with no layout")
    train_gpus: Literal["auto", "on", "off"] = Field(
        "auto",
        description="auto: if this host has NVIDIA GPUs, or train_gpu is named; off: jobs train on "
        "CPU cores, and serving may take every GPU of this host",
    )
    train_gpu: str | None = Field(
        None, description="GPU of training nodes, as H100 or A100, if this host cannot detect it"
    )
    train_gpus_per_node: int | None = Field(
        None,
        gt=0,
        description="GPUs of a node; default: this host's number, 8 if it has none. Where jobs run "
        "on this host: those that jobs get; default: all that replicas leave",
    )
    share_gpus: Literal["auto", "split", "turns"] = Field(
        "auto",
        description="GPUs of a host that serves and trains. split: each GPU does one of the two; "
        "turns: replicas sleep while a job trains on the same GPUs; auto: turns, if too few to "
        "split",
    )
    train_cpus_per_rank: int | None = Field(
        None, gt=0, description="cores of a rank; default 1, with GPUs up to 4"
    )
    train_minutes: int | None = Field(
        None, gt=0, description="minutes after which Slurm ends a job, which goes on in a new one"
    )
    train_session_idle_minutes: float = Field(
        10, gt=0, description="minutes without a job after which a loop's training session ends"
    )
    train_session_parked_gib: float | None = Field(
        None,
        ge=0,
        description="GiB of host memory for the trainings that a training session left for another "
        "one; default: a quarter of this host's where jobs run on it, else 0. 0: through files",
    )
    train_hang_seconds: float = Field(
        120,
        gt=0,
        description="seconds after which a job whose ranks do not get on is ended, with their "
        "stacks in its folder, and started again",
    )
    exclude_minutes: float = Field(
        60,
        ge=0,
        description="minutes for which jobs leave out a node that failed, if Slurm has enough "
        "others; 0: none is left out",
    )
    delta_checkpoints: bool = Field(
        False,
        description="jobs publish what they changed in the weights, if that is less than half; a "
        "version is made whole before it is promoted",
    )
    slurm_options: list[str] = Field(
        default_factory=list,
        description="more options for a site's sbatch, such as --partition=gpu, --account=me",
    )
    spare_replicas: int = Field(
        1,
        ge=0,
        description="vLLM servers that may be started for versions that no other replica serves, "
        "if memory (or a GPU) is left, and ended when unused",
    )
    max_model_len: int = Field(1024, gt=0, description="tokens of context a replica serves")
    max_num_seqs: int = Field(64, gt=0, description="requests a replica works on at once")
    dtype: str = Field("auto", description="type of the served weights; auto: float32 on CPU")
    max_lora_rank: int = Field(
        0, ge=0, le=512, description="largest rank of adapters beside the served weights; 0: none"
    )
    kv_cache_gib: int = Field(1, gt=0, description="GiB of KV cache per replica on CPU")
    tool_call_parser: str = Field("hermes", description="vLLM's parser of tool calls")
    engine_args: list[str] = Field(default_factory=list, description="more flags for vLLM")
    start_timeout: float = Field(300.0, gt=0, description="seconds a replica may take to start")
    swap_timeout: float = Field(120.0, gt=0, description="seconds a request waits for a version")
    swap_mode: Literal["drain", "keep"] = Field(
        "drain",
        description="requests in flight when weights change end first (drain), or go on under the "
        "new ones (keep), with their seams recorded",
    )
    swap_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="share of the replicas that change their weights at once, at least one; with "
        "swap_mode drain one always serves on",
    )
    load_format: str = Field(
        "auto",
        description="how vLLM reads weights (--load-format): auto takes the fastest installed "
        "reader on GPUs, and vLLM's own on CPU",
    )
    weight_transfer: Literal["files", "ipc", "nccl"] = Field(
        "files",
        description="how weights come from a training session to replicas on GPUs: files; ipc: "
        "within the GPUs that both use by turns; nccl: between GPUs of their own. Files are "
        "written in any case, and read where a transfer fails",
    )
    load_timeout: float = Field(300.0, gt=0, description="seconds an engine may load weights for")
    engine_timeout: float = Field(600.0, gt=0, description="seconds without a byte from an engine")
    silence_timeout: float = Field(
        60.0, gt=0, description="seconds without any answer after which a replica is restarted"
    )
    body_timeout: float = Field(60.0, gt=0, description="seconds a request's body may pause")
    head_timeout: float = Field(20.0, gt=0, description="seconds a request's head may take to come")
    idle_timeout: int = Field(75, gt=0, description="seconds a client's idle connection is kept")
    keep_alive: float = Field(2.0, gt=0, description="seconds between a stream's signs of life")
    max_queue: int = Field(1024, gt=0, description="requests that may wait for an engine")
    api_keys: Literal["auto", "required", "off"] = Field(
        "auto", description="auto: off loopback always, else as soon as one was made"
    )
    reward_limit: float = Field(
        1e6, gt=0, allow_inf_nan=False, description="largest absolute value of a reward"
    )
    model_roots: list[Path] = Field(
        default_factory=list,
        description="folders whose model directories keys of the role train may name; those of "
        "the role admin may name any",
    )
    trust_remote_code: list[Path] = Field(
        default_factory=list,
        description="model directories whose own Python code (auto_map) training and vLLM may run, "
        "as this user; none: a model that needs such code is refused",
    )
    redact: list[str] = Field(
        default_factory=list,
        description="texts to remove from events before they are stored: email, api_key, token, "
        "card, and functions of your own, package.module:function",
    )
    redact_patterns: dict[str, str] = Field(
        default_factory=dict, description="your own regular expressions of such texts, by name"
    )

    @field_validator("slurm_options")
    @classmethod
    def _check_slurm_options(cls, options: list[str]) -> list[str]:
        for option in options:
            name = option.removeprefix("--").partition("=")[0]
            if not option.startswith("--") or not name:
                raise ValueError(f"{option!r} is no option: write it as --partition=gpu")
            # sbatch accepts an option abbreviated to its first letters
            if own := next((own for own in SLURM_OWN if own.startswith(name)), None):
                raise ValueError(
                    f"{option!r} cannot be given, --{own} is the platform's own: what a job takes "
                    "is set by train_nodes, train_ranks, train_gpus, train_cpus_per_rank and "
                    "train_minutes"
                )
        return options

    @field_validator("trust_remote_code")
    @classmethod
    def _check_code_directories(cls, directories: list[Path]) -> list[Path]:
        for directory in directories:
            if "--" in str(directory.expanduser().resolve()):
                raise ValueError(
                    f"'{directory}' has '--' in its path, at which transformers would cut it:"
                    " copy the model to another place"
                )
        return directories

    @field_validator("model_roots", "trust_remote_code")
    @classmethod
    def _expand_roots(cls, roots: list[Path]) -> list[Path]:
        for root in roots:
            if not root.expanduser().is_absolute():
                raise ValueError(f"'{root}' is not a whole path: write it from / or ~ on")
        return [root.expanduser() for root in roots]

    @property
    def root(self) -> Home:
        """The shared root as an absolute path, with its named places."""
        return Home(self.home.expanduser().absolute())


def load_config(flags: dict[str, Any] | None = None, directory: Path | None = None) -> Config:
    """Read the file in `directory` (default: the current one), then the environment, then `flags`.

    A flag of None was not given. Raises ConfigError naming the key, its source and the nearest
    valid key.
    """
    values: dict[str, Any] = {}
    file = (directory or Path.cwd()) / FILE
    if file.exists():
        try:
            table = tomllib.loads(file.read_text())
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file}: {error}") from error
        values |= _check_keys(table, str(file))
    environment = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in _READ_ELSEWHERE
    }
    values |= {
        key: _parse_variable(key, value)
        for key, value in _check_keys(environment, "environment", PREFIX).items()
    }
    values |= {key: value for key, value in (flags or {}).items() if value is not None}
    try:
        return Config(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{key} = {first['input']!r}: {first['msg']}", param=key) from error


def _parse_variable(key: str, value: str) -> Any:
    """Parse a variable: lists by spaces, paths by colons, JSON, else the text as it is."""
    if key in ("engine_args", "redact", "slurm_options"):
        return value.split()
    if key in ("model_roots", "trust_remote_code"):
        return [path for path in value.split(os.pathsep) if path]
    if key == "redact_patterns":
        try:
            return json.loads(value or "{}")
        except ValueError as error:
            raise ConfigError(
                f'{PREFIX}{key.upper()} must be JSON, {{"name": "pattern"}}: {error}', param=key
            ) from error
    return value


def _check_keys(table: dict[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    """Return `table`. Raises ConfigError for a key that is no setting, naming the nearest one."""

    def spelled(key: str) -> str:
        return prefix + key.upper() if prefix else key

    for key in table:
        if key not in Config.model_fields:
            near = difflib.get_close_matches(key, Config.model_fields, 1)
            known = ", ".join(Config.model_fields)
            hint = f"did you mean {spelled(near[0])}?" if near else f"valid keys: {known}"
            raise ConfigError(f"{source}: unknown key {spelled(key)!r}; {hint}", param=key)
    return table
