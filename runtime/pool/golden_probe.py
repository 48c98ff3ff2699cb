"""The golden probe: do the weights that answer here give the logprobs the trainer got?

pool.py proves each version with it before the version serves.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from cray_agents.errors import Corrupt, SwapError
from cray_agents.ports import Engine, golden
from cray_agents.records import ProbePrompt, ProbeReport
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry.checkpoints import ADAPTER, MANIFEST, verify

#: Files that a running server has read and cannot read again. Weights are not among them.
_FIXED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_HARMLESS = ("transformers_version", "_name_or_path")  # in config.json


async def prove(
    engine: Engine, version: str, probe: list[ProbePrompt], tolerance: float
) -> ProbeReport:
    """Score the probe and compare. Raises SwapError, EngineError if the engine cannot score it."""
    started = time.perf_counter()
    scores = await engine.score(golden(probe))
    worst = 0.0
    for prompt, score in zip(probe, scores, strict=True):
        if len(score) != len(prompt.logprobs):
            raise SwapError(
                f"a probe prompt of {version} has {len(prompt.logprobs)} logprobs, and the engine "
                f"gave {len(score)}: the probe must hold one for each token but the first"
            )
        worst = max([worst, *(abs(a - b) for a, b in zip(score, prompt.logprobs, strict=True))])
    if worst > tolerance:
        raise SwapError(
            f"logprobs on the probe of {version} differ by {worst:.3g} "
            f"(tolerance {tolerance:g}): these are not the trainer's weights"
        )
    return ProbeReport(
        version=version,
        prompts=len(probe),
        tokens=sum(len(prompt.logprobs) for prompt in probe),
        max_logprob_diff=worst,
        tolerance=tolerance,
        passed=True,
        seconds={"prove": time.perf_counter() - started},
    )


def was_trained(checkpoint: Path) -> bool:
    """Whether the checkpoint's manifest names a training job: then it must bring a probe."""
    return bool(_object(checkpoint / "manifest.json").get("job"))


def weights_of(checkpoint: Path) -> str:
    """The hash of its weights, or its path where no manifest tells it."""
    return str(_object(checkpoint / "manifest.json").get("weights_sha256") or checkpoint)


def parent_of(checkpoint: Path) -> str | None:
    """The hash of the weights that a job trained it from; None where no manifest tells it."""
    parent = _object(checkpoint / "manifest.json").get("parent_sha256")
    return str(parent) if parent else None


def stored_type(checkpoint: Path) -> str:
    """What its config.json says its weights are stored as."""
    config = _object(checkpoint / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def adapter_rank(checkpoint: Path) -> int:
    """The rank of the adapter that it holds beside its weights; 0: it holds none."""
    rank = _object(checkpoint / ADAPTER / "adapter_config.json").get("r")
    return rank if isinstance(rank, int) else 0


def same_shape(one: Path, other: Path) -> bool:
    """Whether weights of one checkpoint fit a server started on the other: config and tokenizer."""
    return _config(one) == _config(other) and all(
        _content(one / name) == _content(other / name) for name in _FIXED
    )


def _config(checkpoint: Path) -> dict[str, object]:
    config = _object(checkpoint / "config.json")
    return {key: value for key, value in config.items() if key not in _HARMLESS}


def _object(file: Path) -> dict[str, object]:
    """What a JSON file holds; empty if there is none. Raises Corrupt."""
    value = checksums.parse(_content(file) or b"{}", file)
    return value if isinstance(value, dict) else {}


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class LoadedVersion:
    """A version, where its weights are, how to prove it, and the adapters served over it."""

    version: str
    checkpoint: Path
    probe: tuple[ProbePrompt, ...]
    beside: tuple["LoadedVersion", ...] = ()

    @property
    def versions(self) -> list[str]:
        """All that it answers with."""
        return [self.version, *(held.version for held in self.beside)]

    @classmethod
    def of(cls, checkpoint: Path, version: str, probe: list[ProbePrompt]) -> "LoadedVersion":
        """Raises SwapError where a training job made the weights and there is no probe of them."""
        if not probe and was_trained(checkpoint):
            raise SwapError(
                f"{version} was made by a training job and brings no golden probe: it cannot "
                f"be proven. Train it again, or look at {checkpoint / 'manifest.json'}"
            )
        return cls(version, checkpoint, tuple(probe))

    @classmethod
    async def proven(
        cls, checkpoint: Path, version: str, probe: list[ProbePrompt]
    ) -> "LoadedVersion":
        """The same, once its files are what its manifest says: read once a process.

        Raises SwapError, which names the damaged file.
        """
        if (checkpoint / MANIFEST).is_file():
            try:
                await asyncio.to_thread(verify, checkpoint)
            except (Corrupt, OSError) as error:
                raise SwapError(f"{version} was not loaded: {error}") from error
        return cls.of(checkpoint, version, probe)

    def fits(self, new: "LoadedVersion") -> bool:
        """Whether `new` can take its place in a running process. Raises SwapError."""
        try:
            return same_shape(self.checkpoint, new.checkpoint)
        except (Corrupt, OSError) as error:
            raise SwapError(f"{new.version} was not loaded: {error}") from error
