"""The settings of a platform: defaults < cray-agents.toml < CRAY_AGENTS_* < flags.

An unknown key is an error that names the nearest valid one.
"""

import difflib
import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    ValidationError,
    field_validator,
)

from cray_agents.config.job_section import JobContainer, JobSettings, check_slurm_options, matching
from cray_agents.errors import ConfigError
from cray_agents.paths import Home


# ---- The section `[prices]`: what devices and energy cost. Read by runtime/accounting/
class PriceSettings(BaseModel):
    """The section `[prices]`: what an hour of a device and energy cost, for `usage cost`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", description="of all prices")
    gpu_hour: dict[str, NonNegativeFloat] = Field(
        default_factory=dict,
        description="price of a GPU for an hour by Slurm's type, as {h100 = 2.5}; gpu: any other",
    )
    core_hour: NonNegativeFloat | None = Field(None, description="price of a core for an hour")
    kwh: NonNegativeFloat | None = Field(
        None, description="price of a kWh, for energy that was measured"
    )

    @property
    def known(self) -> bool:
        """At least one price is given."""
        return bool(self.gpu_hour) or self.core_hour is not None or self.kwh is not None

    def of_gpu(self, kind: str) -> float | None:
        """Return the price of a GPU for an hour; None if none is given.

        `kind`: its type or model, as LedgerLine has it. The longest type that is a part of it
        counts, as in Slurm, where `h100` means `nvidia_h100_80gb_hbm3`.
        """
        named = [name for name in self.gpu_hour if name.lower() in kind.lower()]
        return self.gpu_hour[max(named, key=len)] if named else self.gpu_hour.get("gpu")


FILE = "cray-agents.toml"
PREFIX = "CRAY_AGENTS_"
#: The variable by which a process hands its settings, as JSON, to a platform that it starts.
HANDED = f"{PREFIX}SETTINGS"
# Variables that are no setting: the platform's address, a host's cache, a guard of tests, the mark
# of what a supervisor started, and HANDED.
_READ_ELSEWHERE = {"URL", "API_KEY", "CACHE", "NO_REAL_MODELS", "SUPERVISED", "SETTINGS"}
#: Flags of vLLM that the rest of the platform goes by.
_NOT_IN_ENGINE_ARGS = {
    "--dtype": "give the setting dtype in its place",
    "--max-model-len": "give the setting max_model_len in its place",
    "--max-num-seqs": "give the setting max_num_seqs in its place",
    "--speculative-config": "give the settings speculative and speculative_tokens in its place",
    "--logprobs-mode": "training compares the logprobs that were sampled from: leave it out",
}
Hours = Annotated[
    str,
    matching("(1?[0-9]|2[0-4])-(1?[0-9]|2[0-4])", "is no span of hours: write it as 22-6"),
]
Tracker = Annotated[
    str,
    matching("(tensorboard|wandb|trackio)(:.*)?", "is none of tensorboard, wandb, trackio"),
]
Header = Annotated[
    str,
    matching(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", "is no name of a header"),
    AfterValidator(str.lower),
]
Endpoint = Annotated[
    str,
    matching(r"https?://[^\s/?#]+[^\s?#]*", "is no URL, such as http://127.0.0.1:4318"),
]


# ---- The section `[watch]`: scanners of live traffic. Read by cli/scan.py and the gateways
class WatchSettings(BaseModel):
    """The section `[watch]`: scanners that look at live runs, what they block, and alarms."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scanners: list[str] = Field(
        default_factory=list, description="scanners by name, or FILE.py:NAME; none: no watch"
    )
    block: list[str] = Field(
        default_factory=list,
        description="scanners of texts that refuse requests and withhold answers; none: only watch",
    )
    judge: str | None = Field(
        None, description="model that judges for `policy` and `jailbreak-judge`, as guard@1"
    )
    policy: Path | None = Field(None, description="file with your policy for answers")
    every: float = Field(30, ge=1, description="seconds between two looks at new runs")
    hours: float = Field(48, gt=0, description="age of the oldest runs, whose whole day is seen")
    alarms: dict[str, Annotated[float, Field(ge=0, lt=1)]] = Field(
        default_factory=dict,
        description="share of a version's runs of a day above which a scanner's findings are an "
        "alarm, as {jailbreak = 0.05}",
    )
    webhook: Endpoint | None = Field(None, description="URL that alarms are posted to, as JSON")


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
    lease_seconds: float = Field(
        10,
        gt=0,
        description="seconds without a heartbeat after which another process takes over",
    )
    gateways: int = Field(
        1,
        gt=0,
        le=64,
        description="gateway processes of the platform, which share its port: the platform's own, "
        "and further ones that answer calls of models",
    )
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
        None, gt=0, description="cores of a rank; default: on this host's CPU its share, else 1-4"
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
        description="GiB of host memory in which a session keeps trainings that it does not work "
        "on; default: a quarter of this host's if jobs run on it, else 0. 0: they go through files",
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
    job: JobSettings = Field(
        default_factory=JobSettings,
        description="the section [job]: how jobs start at a site",
    )
    prices: PriceSettings = Field(
        default_factory=PriceSettings,
        description="the section [prices]: what devices and energy cost",
    )
    watch: WatchSettings = Field(
        default_factory=WatchSettings,
        description="the section [watch]: scanners of live traffic",
    )
    spare_replicas: int = Field(
        1,
        ge=0,
        description="vLLM servers that may be started for versions that no other replica serves, "
        "if memory (or a GPU) is left, and ended when unused",
    )
    replica_nodes: int = Field(
        1, gt=0, description="nodes over which a replica in Slurm spreads, with vLLM's --nnodes"
    )
    replica_cpus: int | None = Field(
        None, gt=0, description="cores of a replica's Slurm job; default 4 a GPU, else 2 a node"
    )
    replica_minutes: int | None = Field(
        None, gt=1, description="time limit of a replica's Slurm job; default: the partition's"
    )
    replica_handover_minutes: float = Field(
        15,
        gt=0,
        description="minutes before the end of a replica's job at which its successor is submitted,"
        " at most half of the job's time",
    )
    replica_keep_minutes: float = Field(
        10, gt=0, description="minutes after which a replica's Slurm job ends without a gateway"
    )
    replica_calm_minutes: float = Field(
        10,
        gt=0,
        description="with --replicas slurm:MIN-MAX: minutes for which fewer replicas were needed "
        "before one gives its place back",
    )
    replica_empty_minutes: float = Field(
        30,
        gt=0,
        description="with --replicas slurm:0-MAX: minutes without a request before the last replica"
        " gives its place back",
    )
    replica_warm: int = Field(
        0,
        ge=0,
        description="with --replicas slurm:MIN-MAX: so many replicas that are not needed sleep in "
        "their jobs in place of ending them. For sites where other jobs may use the GPUs of a job "
        "that sleeps",
    )
    preempt_training: bool = Field(
        True,
        description="with --replicas slurm:MIN-MAX: jobs and sessions of this root save, leave and "
        "are queued again when requests need a replica and no node is free",
    )
    preempt_after_minutes: float = Field(
        5, ge=0, description="minutes that a job runs before it gives way, each time that it starts"
    )
    preempt_keep_nodes: int = Field(
        0,
        ge=0,
        description="training that is never preempted, in nodes; of nodes that hold several "
        "replicas, in replicas",
    )
    preempt_quiet_hours: list[Hours] = Field(
        default_factory=list,
        description='hours of the day, as ["22-6"], in which training gives way to a first replica '
        "only",
    )
    replica_scratch: Path | None = Field(
        None,
        description="a folder on each host's own disk or in its memory (/dev/shm): weights are "
        "copied to it while replicas serve the former ones, and loaded from there",
    )
    replica_interface: str | None = Field(
        None,
        description="network interface on which replicas in Slurm listen, as ib0; default: the one "
        "that leads to the gateway's host",
    )
    replica_tls: Literal["off", "on"] | Path = Field(
        "off",
        description="TLS between gateway and replicas in Slurm: on, by a CA that the root gets in "
        "tls/; or a folder with ca.pem, and either ca-key.pem, which signs a certificate for each "
        "job, or cert.pem and key.pem, which name the addresses of all nodes",
    )
    # of replicas; what is 0 or "auto" is chosen for model and device: serving_plan.py
    max_model_len: int = Field(0, ge=0, description="tokens of context; 0: what fits, see `up`")
    max_num_seqs: int = Field(0, ge=0, description="requests at once; 0: by device and memory")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="what replicas compute in. auto: the checkpoint's own; on CPU float32, unless"
        " it is large, stored in bfloat16, and the CPU has instructions for that",
    )
    threads: int = Field(0, ge=0, description="of a replica on CPU; 0: all cores, or one fewer")
    max_lora_rank: int = Field(
        0,
        ge=0,
        le=512,
        description="largest rank of adapters beside the served weights, from the"
        " start on; 0: as the versions that are served have it",
    )
    kv_cache_gib: float = Field(0, ge=0, description="GiB of KV cache on CPU; 0: by the memory")
    kv_tier: Path | None = Field(
        None,
        description="folder in which replicas keep the KV of prompts for each other and for later, "
        "best on a shared disk; none: in memory alone",
    )
    kv_tier_gib: float = Field(100, gt=0, description="GiB of that folder, of all who share it")
    kv_tier_memory_gib: float = Field(
        0,
        ge=0,
        description="GiB of a host's memory before that folder, for each replica; 0: by the model",
    )
    tool_call_parser: str = Field("hermes", description="vLLM's parser of tool calls")
    reasoning_parser: str = Field(
        "", description="vLLM's parser that keeps thoughts apart from answers; empty: none"
    )
    quantization: Literal["", "fp8"] = Field(
        "",
        description="fp8: replicas on GPUs compute in FP8 with weights that they quantise at each "
        "load; methods that learn from log-probabilities then need their importance_cap",
    )
    router_replay: bool = Field(
        False,
        description="replicas on GPUs record which experts of a mixture each token went to, and "
        "GRPO and Distill train each token through the same ones (R3, arXiv 2510.11370)",
    )
    speculative: str = Field(
        "",
        description="how replicas on GPUs guess tokens ahead, which the model then checks: ngram, "
        "from the request's own text, or the directory of a draft model or an EAGLE head",
    )
    speculative_tokens: int = Field(4, gt=0, description="tokens that a guess has, at most")
    engine_args: list[str] = Field(default_factory=list, description="more flags for vLLM")
    start_timeout: float = Field(0, ge=0, description="seconds to start; 0: by the weights' size")
    swap_timeout: float = Field(
        0, ge=0, description="seconds a request waits for a version; 0: by the weights' size"
    )
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
    replica_affinity: float = Field(
        1.5,
        ge=0,
        description="a conversation stays with a replica, whose KV cache has its beginning, until "
        "that has more than so many times the mean requests in flight, and one more; 0: each call "
        "goes to the least busy replica",
    )
    load_format: str = Field(
        "auto",
        description="how vLLM reads weights (--load-format): auto takes the fastest installed "
        "reader on GPUs, and vLLM's own on CPU",
    )
    weight_transfer: Literal["files", "ipc", "nccl"] = Field(
        "files",
        description="how weights come from a training session to replicas on GPUs: files; ipc: "
        "within the GPUs that both use by turns; nccl: between GPUs of their own, also while the "
        "files are written. Files are written in any case, and read where a transfer fails",
    )
    load_timeout: float = Field(0, ge=0, description="seconds to load; 0: by the weights' size")
    engine_timeout: float = Field(600.0, gt=0, description="seconds without a byte from an engine")
    otlp_endpoint: Endpoint | None = Field(
        None,
        description="URL of an OpenTelemetry collector that spans are sent to, as "
        "http://127.0.0.1:4318; none: no spans",
    )
    otlp_content: bool = Field(False, description="spans have messages, redacted as when stored")
    trackers: list[Tracker] = Field(
        default_factory=list,
        description="experiment trackers that get the numbers of jobs and loops: tensorboard, "
        "wandb, trackio; wandb:/path/of/python if another Python has the package",
    )
    silence_timeout: float = Field(
        60.0, gt=0, description="seconds without any answer after which a replica is restarted"
    )
    body_timeout: float = Field(60.0, gt=0, description="seconds a request's body may pause")
    head_timeout: float = Field(20.0, gt=0, description="seconds a request's head may take to come")
    idle_timeout: int = Field(75, gt=0, description="seconds a client's idle connection is kept")
    keep_alive: float = Field(2.0, gt=0, description="seconds between a stream's signs of life")
    max_queue: int = Field(1024, gt=0, description="requests that may wait for an engine")
    api_keys: Literal["auto", "required", "off"] = Field(
        "auto", description="auto: asked for beyond loopback, and on it once one is made"
    )
    reward_limit: float = Field(
        1e6, gt=0, allow_inf_nan=False, description="largest absolute value of a reward"
    )
    run_headers: list[Header] = Field(
        default_factory=list,
        description="headers that name the run of a model call, beside X-Run-Id, such as "
        "x-session-id of a client that sends a new one for each run",
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

    @property
    def quiet_hours(self) -> list[tuple[float, float]]:
        """`preempt_quiet_hours` as (from, to)."""
        spans = (span.partition("-") for span in self.preempt_quiet_hours)
        return [(float(begin), float(end)) for begin, _, end in spans]

    @field_validator("engine_args")
    @classmethod
    def _check_engine_args(cls, flags: list[str]) -> list[str]:
        for flag in (flag.partition("=")[0].replace("_", "-") for flag in flags):
            if flag in _NOT_IN_ENGINE_ARGS:
                raise ValueError(f"{flag}: {_NOT_IN_ENGINE_ARGS[flag]}")
        return flags

    @field_validator("slurm_options")
    @classmethod
    def _check_slurm_options(cls, options: list[str]) -> list[str]:
        return check_slurm_options(options)

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

    @field_validator("kv_tier", "replica_scratch")
    @classmethod
    def _expand_folder(cls, folder: Path | None) -> Path | None:
        return None if folder is None else folder.expanduser().absolute()

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
        except ValueError as error:  # no TOML, or no UTF-8
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
    values |= _check_keys(_handed(), HANDED)
    values |= {key: value for key, value in (flags or {}).items() if value is not None}
    _check_sections(values)
    try:
        return Config(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(part for part in first["loc"] if isinstance(part, str))
        raise ConfigError(f"{key} = {first['input']!r}: {first['msg']}", param=key) from error


def _handed() -> dict[str, Any]:
    try:
        values = json.loads(os.environ.get(HANDED, "{}"))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"{HANDED} is for the platform's own processes: take it out")
    return values


#: Settings that are tables, with an example of their variable.
_JSON_EXAMPLES = {
    "redact_patterns": '{"name": "pattern"}',
    "job": '{"modules": ["cuda/12"]}',
    "prices": '{"gpu_hour": {"h100": 2.5}}',
    "watch": '{"scanners": ["jailbreak"]}',
}


def _parse_variable(key: str, value: str) -> Any:
    """Parse a variable: lists by spaces, paths by colons, JSON, else the text as it is."""
    if key in ("engine_args", "redact", "run_headers", "slurm_options", "trackers"):
        return value.split()
    if key in ("model_roots", "trust_remote_code"):
        return [path for path in value.split(os.pathsep) if path]
    if key in _JSON_EXAMPLES:
        example = _JSON_EXAMPLES[key]
        try:
            return json.loads(value or "{}")
        except ValueError as error:
            raise ConfigError(
                f"{PREFIX}{key.upper()} must be JSON, {example}: {error}", param=key
            ) from error
    return value


def _check_sections(values: dict[str, Any]) -> None:
    """Check the keys of the sections, such as `[job]`, `[job.container]`. Raises ConfigError."""
    job = values.get("job")
    if isinstance(job, dict):
        _check_keys(job, "[job]", known=JobSettings)
        if isinstance(job.get("container"), dict):
            _check_keys(job["container"], "[job.container]", known=JobContainer)
    for name, section in (("prices", PriceSettings), ("watch", WatchSettings)):
        if isinstance(given := values.get(name), dict):
            _check_keys(given, f"[{name}]", known=section)


def _check_keys(
    table: dict[str, Any], source: str, prefix: str = "", known: type[BaseModel] = Config
) -> dict[str, Any]:
    """Return `table`. Raises ConfigError for a key that is no setting, naming the nearest one."""
    fields = known.model_fields

    def spelled(key: str) -> str:
        return prefix + key.upper() if prefix else key

    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            valid = ", ".join(fields)
            hint = f"did you mean {spelled(near[0])}?" if near else f"valid keys: {valid}"
            raise ConfigError(f"{source}: unknown key {spelled(key)!r}; {hint}", param=key)
    return table
