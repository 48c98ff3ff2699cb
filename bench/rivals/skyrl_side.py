"""SkyRL's server (JAX, on the CPU) with tinker-cookbook's loop, as a side of training_sides.py.

The server trains an adapter, for it trains no other weights. Its checkpoint after each iteration is
merged into the checkpoint that all sides begin with, and measured as theirs are.
"""

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from bench.rivals.environments import ROOT
from bench.rivals.server_process import (
    answers,
    foreign,
    free_port,
    log_of,
    program,
    wait_until,
)

PYTHON = ROOT / ".venv-skyrl" / "bin" / "python"
#: groups of our size. With as many runs an iteration as ours its server ran out of connections.
GROUPS, GROUP, SUBSTEPS = 16, 8, 2
#: an adapter of this rank, its constant rate, and our clipping
RANK, RATE = 32, 5e-4
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
READY = 120.0  # seconds that the server may take
MORE = 600.0  # seconds beside the limit: compilations, the last iteration
BACKEND = {
    "max_lora_adapters": 2,  # the first place is the model's without one
    "max_lora_rank": RANK,
    "train_micro_batch_size": GROUPS * GROUP // SUBSTEPS,
    "sample_max_num_sequences": 64,
}


class Way(BaseModel):
    """Seconds and tokens at each iteration's begin, and the time when their clock began."""

    begun: float
    points: list[tuple[float, int]]


def learn(seed: int, limit: float, folder: Path) -> Way:
    """Let it learn, after an iteration from which JAX keeps its compilations for the others."""
    for name, seconds in {"skyrl-first": 0.0, "skyrl": limit}.items():
        way = _learn(seed, seconds, folder, folder / name)
    return way


def _learn(seed: int, limit: float, folder: Path, home: Path) -> Way:
    url = f"http://127.0.0.1:{free_port()}"
    home.mkdir()
    settings = foreign(
        home,
        VIRTUAL_ENV=str(PYTHON.parents[1]),
        JAX_PLATFORMS="cpu",
        JAX_COMPILATION_CACHE_DIR=str(folder / "skyrl-compiled"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        HF_HUB_OFFLINE="1",
        TINKER_API_KEY="tml-none",
        PYTHONPATH=str(ROOT),
    )
    server = [
        *(PYTHON.parent / "uv", "run", "--no-project", "--active", "-m", "skyrl.tinker.api"),
        *("--base-model", folder / "start", "--backend", "jax"),
        *("--backend-config", json.dumps(BACKEND), "--checkpoints-base", home / "checkpoints"),
        *("--database-url", f"sqlite:///{home}/tinker.db"),
        *("--host", "127.0.0.1", "--port", url.rpartition(":")[2]),
    ]
    loop = [PYTHON, "-m", "bench.rivals.skyrl_loop", seed, limit, folder / "start", home, url]
    with program(server, home, settings) as process:
        wait_until(lambda: answers(f"{url}/api/v1/healthz"), process, home, READY)
        done = subprocess.run(
            [*map(str, loop)],
            cwd=ROOT,
            env=settings,
            capture_output=True,
            text=True,
            timeout=limit + MORE,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{done.stderr[-2000:]}\n{log_of(home)[-2000:]}")
    return Way.model_validate_json((home / "way.json").read_text())


def adapters(folder: Path) -> list[Path]:
    """The checkpoints of the iterations, in order."""
    return sorted((folder / "skyrl" / "checkpoints").glob("*/sampler_weights/0*.tar.gz"))


def merge(network: Any, archive: Path) -> None:
    """Add an adapter to a network's weights. Raises KeyError for a weight that it does not have."""
    from safetensors.torch import load

    with tarfile.open(archive) as files:
        read = {Path(one.name).name: files.extractfile(one) for one in files if one.isfile()}
        config = json.load(read["adapter_config.json"])  # type: ignore[arg-type]
        tensors = load(read["adapter_model.safetensors"].read())  # type: ignore[union-attr]
    scale = config["lora_alpha"] / config["r"]
    weights = dict(network.named_parameters())
    for name, down in tensors.items():
        if ".lora_A" not in name:
            continue
        up = tensors[name.replace(".lora_A", ".lora_B")]
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[target].data += scale * (up.float() @ down.float())
