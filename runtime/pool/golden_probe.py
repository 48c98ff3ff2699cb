"""Golden probe: prove that a replica serves the weights of a checkpoint.

A probe holds prompts with the logprobs that the trainer computed. replica.py and
lora_adapters.py compare the replica's own with them before a version serves.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cray_agents.errors import Corrupt, NotFound, SwapError
from cray_agents.ports import Engine, probe_token_ids
from cray_agents.records import LogprobDistance, ProbePrompt, ProbeReport
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.logprob_limits import LogprobLimits, measure
from cray_agents.runtime.registry.checkpoints import (
    ADAPTER,
    MANIFEST,
    base_of,
    read_manifest,
    verify,
)

log = logging.getLogger(__name__)

MAX_ADAPTERS = 4  # the incumbent, the version before it, a canary, a candidate
#: Files that a server reads at its start alone; weights can be replaced later.
_READ_AT_START = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_IGNORED_KEYS = ("transformers_version", "_name_or_path")  # of config.json, when comparing


async def prove(
    engine: Engine,
    version: str,
    probe: list[ProbePrompt],
    limits: LogprobLimits,
    before: ProbeReport | None = None,
) -> ProbeReport:
    """Score the probe and compare. Raises SwapError, EngineError if the engine cannot score it.

    `before`: the proof of good weights in the same engine, which tightens the limits in bfloat16.
    """
    started = time.perf_counter()
    scores = await engine.score(probe_token_ids(probe))
    for prompt, score in zip(probe, scores, strict=True):
        if len(score.logprobs) != len(prompt.logprobs):
            raise SwapError(
                f"a probe prompt of {version} has {len(prompt.logprobs)} logprobs, and the engine "
                f"gave {len(score.logprobs)}: the probe must hold one for each token but the first"
            )
    pairs = list(zip(scores, probe, strict=True))
    named = [(s.top, prompt.top) for s, prompt in pairs if len(s.top) == len(prompt.top)]
    distance = measure(
        [logprob for score, _ in pairs for logprob in score.logprobs],
        [logprob for _, prompt in pairs for logprob in prompt.logprobs],
        [mine == theirs for tops in named for mine, theirs in zip(*tops, strict=True)],
    )
    limits = limits.relative_to(_distance(before))
    if limits.exceeded(distance):
        raise SwapError(
            f"logprobs on the probe of {version} differ by {_describe(distance, limits)}: "
            "these are not the trainer's weights"
        )
    return ProbeReport(
        version=version,
        prompts=len(probe),
        tokens=distance.tokens,
        max_logprob_diff=distance.max,
        mean_logprob_diff=distance.mean,
        p99_logprob_diff=distance.p99,
        equal_argmax=distance.equal_argmax,
        tolerance=limits.max or limits.p99 or 0.0,
        passed=True,
        seconds={"prove": time.perf_counter() - started},
    )


def _distance(report: ProbeReport | None) -> LogprobDistance | None:
    """Return the distance that a proof measured."""
    if report is None:
        return None
    return LogprobDistance(
        tokens=report.tokens,
        mean=report.mean_logprob_diff,
        p99=report.p99_logprob_diff,
        max=report.max_logprob_diff,
        equal_argmax=report.equal_argmax,
    )


def _describe(distance: LogprobDistance, limits: LogprobLimits) -> str:
    if limits.max is not None:
        return f"{distance.max:.3g} (tolerance {limits.max:g})"
    equal = ""
    if distance.equal_argmax is not None:
        equal = f", {distance.equal_argmax:.3g} of which have the same most likely token"
    return (
        f"{distance.mean:.3g} on average and {distance.p99:.3g} in the 99th percentile of "
        f"{distance.tokens} tokens{equal} (tolerance: {limits})"
    )


def weights_of(checkpoint: Path) -> str:
    """Return the hash of the weights, or the path where no manifest records one."""
    return str(_read_object(checkpoint / "manifest.json").get("weights_sha256") or checkpoint)


def adapter_base_of(checkpoint: Path) -> str | None:
    """Return the hash of the weights that the adapter is over; None where none is recorded."""
    manifest = _read_object(checkpoint / "manifest.json")
    base = manifest.get("base_sha256") or manifest.get("parent_sha256")
    return str(base) if base else None


def stored_type(checkpoint: Path) -> str:
    """Return the dtype of the stored weights, by config.json."""
    config = _read_object(checkpoint / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def adapter_rank(checkpoint: Path) -> int:
    """Return the rank of the checkpoint's adapter; 0: it has none."""
    rank = _read_object(checkpoint / ADAPTER / "adapter_config.json").get("r")
    return rank if isinstance(rank, int) else 0


def same_shape(one: Path, other: Path) -> bool:
    """Tell whether a server started on one checkpoint can load the other's weights.

    Compares config.json and the tokenizer's files.
    """
    return config_of(one) == config_of(other) and all(
        _content(one / name) == _content(other / name) for name in _READ_AT_START
    )


def config_of(checkpoint: Path) -> dict[str, object]:
    """Return config.json without what has no influence on the model."""
    config = _read_object(checkpoint / "config.json")
    return {key: value for key, value in config.items() if key not in _IGNORED_KEYS}


def _read_object(file: Path) -> dict[str, object]:
    """Read a JSON object; empty if there is no file. Raises Corrupt."""
    value = checksums.parse(_content(file) or b"{}", file)
    return value if isinstance(value, dict) else {}


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class LoadedVersion:
    """A version with its checkpoint, its probe, and the adapters to serve beside it.

    `dtype`: what the trainer scored the probe in; None: unknown. `over`: the weights below, of a
    version that is an adapter alone; `needs`: one of `beside` for whose sake these are loaded.
    """

    version: str
    checkpoint: Path
    probe: tuple[ProbePrompt, ...]
    dtype: str | None = None
    beside: tuple["LoadedVersion", ...] = ()
    over: "LoadedVersion | None" = None
    needs: str = ""

    def with_base(self, held: "LoadedVersion | None") -> "LoadedVersion":
        """Return what to load on a replica: of an adapter its base, and the adapter beside it.

        Adapters that it `held` over the same base stay.
        """
        if self.over is None:
            return self
        same = held is not None and held.checkpoint == self.over.checkpoint
        beside = [v for v in (held.beside if held and same else ()) if v.version != self.version]
        beside = beside[1 - MAX_ADAPTERS :]
        base = held if held is not None and same else self.over
        return replace(base, beside=(*beside, self), needs=self.version)

    @property
    def lora_rank(self) -> int:
        """The largest rank of the adapters beside it; 0: none."""
        return max((adapter_rank(adapter.checkpoint) for adapter in self.beside), default=0)

    @property
    def versions(self) -> list[str]:
        """The version itself and its adapters', as `name@N`."""
        return [self.version, *(adapter.version for adapter in self.beside)]

    @classmethod
    def create(
        cls,
        checkpoint: Path,
        version: str,
        probe: list[ProbePrompt],
        name_of: Callable[[Path], str] = lambda directory: directory.name,
    ) -> "LoadedVersion":
        """Build one. Raises SwapError where a job trained the weights and there is no probe.

        `name_of`: returns the version of a base, by its checkpoint.
        """
        manifest = _read_object(checkpoint / MANIFEST)
        if not probe and manifest.get("job"):
            raise SwapError(
                f"{version} was made by a training job and has no probe for the logprob check: "
                f"it cannot serve. Train it again, or look at {checkpoint / 'manifest.json'}"
            )
        dtype = manifest.get("dtype")
        over = None
        try:
            if (base := base_of(checkpoint)) is not None:
                over = cls.create(base, name_of(base), read_manifest(base).probe)
        except (Corrupt, NotFound) as error:
            raise SwapError(f"{version} was not loaded: {error}") from error
        return cls(version, checkpoint, tuple(probe), str(dtype) if dtype else None, over=over)

    @classmethod
    async def verify_and_create(
        cls,
        checkpoint: Path,
        version: str,
        probe: list[ProbePrompt],
        name_of: Callable[[Path], str] = lambda directory: directory.name,
    ) -> "LoadedVersion":
        """Check the files against the manifest, once a process, and build one.

        Raises SwapError, which names the damaged file.
        """
        if (checkpoint / MANIFEST).is_file():
            try:
                await asyncio.to_thread(verify, checkpoint)
            except (Corrupt, NotFound, OSError) as error:
                raise SwapError(f"{version} was not loaded: {error}") from error
        return cls.create(checkpoint, version, probe, name_of)

    def fits(self, new: "LoadedVersion") -> bool:
        """Tell whether a process that runs this version can load `new`. Raises SwapError."""
        try:
            return same_shape(self.checkpoint, new.checkpoint)
        except (Corrupt, OSError) as error:
            raise SwapError(f"{new.version} was not loaded: {error}") from error


def with_failures(report: ProbeReport, failures: list[str]) -> ProbeReport:
    """Return the report of a version's check, with failed tries before it in its note."""
    if not failures:
        return report
    note = f"tries before this one failed: {'. Then: '.join(failures)}"
    log.warning("%s passed its logprob check and serves; %s", report.version, note)
    if report.load_note:
        note = f"{report.load_note}; {note}"
    return report.model_copy(update={"load_note": note})
