"""SkyRL's server (JAX, on the CPU) with tinker-cookbook's loop, as a side of training_sides.py.

The server trains an adapter, for it trains no other weights. Its checkpoint after each iteration is
merged into the checkpoint that all sides begin with, and measured as theirs are.
"""

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.bench.rivals.environments import ROOT
from tests.bench.rivals.server_process import (
    answers,
    foreign,
    free_port,
    log_of,
    program,
    wait_until,
)

READY = 120.0  # seconds that the server may take
MORE = 600.0  # seconds beside the limit: compilations, the last iteration
BACKEND = {
    "max_lora_adapters": 2,
    "max_lora_rank": 32,
    "train_micro_batch_size": 128,
    "sample_max_num_sequences": 128,
}


def learn(seed: int, limit: float, folder: Path, python: Path) -> list[tuple[float, int]]:
    """Let it learn, and return the seconds and tokens at each iteration's begin."""
    home, url = folder / "skyrl", f"http://127.0.0.1:{free_port()}"
    home.mkdir(exist_ok=True)
    uv = str(python.parent / "uv")
    settings = foreign(
        home,
        VIRTUAL_ENV=str(python.parents[1]),
        JAX_PLATFORMS="cpu",
        HF_HUB_OFFLINE="1",
        TINKER_API_KEY="tml-none",
        PYTHONPATH=str(ROOT),
    )
    server = [
        *(uv, "run", "--no-project", "--active", "-m", "skyrl.tinker.api"),
        *("--base-model", folder / "start", "--backend", "jax"),
        *("--backend-config", json.dumps(BACKEND), "--checkpoints-base", home / "checkpoints"),
        *("--database-url", f"sqlite:///{home}/tinker.db"),
        *("--host", "127.0.0.1", "--port", url.rpartition(":")[2]),
    ]
    loop = [python, "-m", "tests.bench.rivals.skyrl_loop", seed, limit, folder, url]
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
    return [(seconds, tokens) for seconds, tokens in json.loads(_way(folder).read_text())]


def adapters(folder: Path) -> list[Path]:
    """The checkpoints, in order."""
    return sorted((folder / "skyrl" / "checkpoints").glob("*/sampler_weights/0*.tar.gz"))


def merge(network: Any, archive: Path) -> None:
    """Add an adapter to a network's weights."""
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


def _way(folder: Path) -> Path:
    return folder / "skyrl-way.json"
